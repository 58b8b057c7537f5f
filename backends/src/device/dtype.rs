//! [`DType`]: the element types that every backend moves and reduces.

use tch::Kind;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// Byte.
    U8,
}

impl DType {
    /// Every element type.
    pub const ALL: [Self; 6] = [Self::F32, Self::Bf16, Self::F16, Self::I32, Self::I64, Self::U8];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::I64 => 8,
            Self::U8 => 1,
        }
    }

    /// Returns true for a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::Bf16 | Self::F16)
    }

    /// libtorch's name for it.
    pub const fn kind(self) -> Kind {
        match self {
            Self::F32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
            Self::F16 => Kind::Half,
            Self::I32 => Kind::Int,
            Self::I64 => Kind::Int64,
            Self::U8 => Kind::Uint8,
        }
    }

    /// The element type with libtorch's name `kind`, if it is one of these.
    pub fn of(kind: Kind) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.kind() == kind)
    }

    /// `c10::ScalarType`'s number.
    pub(crate) const fn scalar_type(self) -> i32 {
        match self {
            Self::U8 => 0,
            Self::I32 => 3,
            Self::I64 => 4,
            Self::F16 => 5,
            Self::F32 => 6,
            Self::Bf16 => 15,
        }
    }
}
