//! Checks that stand between a tensor and the address that a kernel gets.

use tch::{Device, Kind, Tensor};

use super::{Error, Result};

/// The checks of one call: they know the operation's name for their messages.
#[derive(Clone, Copy)]
pub(super) struct Args(pub &'static str);

/// The fp32 values of a `[rows, heads, dim]` view: each row is dense, rows lie `stride` elements apart.
/// Mirrors `Heads` in `shim/vectors.h`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Heads {
    pub data: *mut f32,
    pub stride: i64,
}

impl Args {
    /// The error for an argument.
    pub fn refuse(self, argument: &'static str, problem: impl Into<String>) -> Error {
        Error::Argument { op: self.0, argument, problem: problem.into() }
    }

    /// The sizes of a tensor with exactly `N` dimensions.
    pub fn dims<const N: usize>(self, argument: &'static str, tensor: &Tensor) -> Result<[i64; N]> {
        let size = tensor.size();
        size.as_slice()
            .try_into()
            .map_err(|_| self.refuse(argument, format!("has shape {size:?}, expected {N} dimensions")))
    }

    /// Refuses a tensor of another shape.
    pub fn shape(self, argument: &'static str, tensor: &Tensor, expected: &[i64]) -> Result<()> {
        let size = tensor.size();
        if size == expected {
            return Ok(());
        }
        Err(self.refuse(argument, format!("has shape {size:?}, expected {expected:?}")))
    }

    /// The values of a dense fp32 tensor on the CPU.
    pub fn floats(self, argument: &'static str, tensor: &Tensor, expected: &[i64]) -> Result<*mut f32> {
        self.dense(argument, tensor, expected, Kind::Float)?;
        Ok(tensor.data_ptr().cast())
    }

    /// The values of a dense int64 tensor on the CPU, each checked to be in `0..bound`: kernels index with
    /// them unchecked.
    pub fn indices(
        self,
        argument: &'static str,
        tensor: &Tensor,
        expected: &[i64],
        bound: i64,
    ) -> Result<*const i64> {
        self.dense(argument, tensor, expected, Kind::Int64)?;
        let data: *const i64 = tensor.data_ptr().cast_const().cast();
        let count = tensor.numel();
        // SAFETY: the tensor is dense, int64 and in host memory, so `count` values lie at `data`, and it
        // outlives the slice. An empty tensor may have a null address, which a slice may not.
        let values = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, count) } };
        match values.iter().find(|&&value| value < 0 || value >= bound) {
            None => Ok(data),
            Some(value) => Err(self.refuse(argument, format!("holds {value}, outside of 0..{bound}"))),
        }
    }

    /// The values of an fp32 `[rows, heads, dim]` view on the CPU whose rows may lie apart; with one head also
    /// `[rows, dim]`.
    pub fn heads(self, argument: &'static str, tensor: &Tensor, expected: [i64; 3]) -> Result<Heads> {
        let [rows, heads, dim] = expected;
        let flat = tensor.dim() == 2 && heads == 1;
        let flat_size = [rows, dim];
        self.shape(argument, tensor, if flat { &flat_size } else { &expected })?;
        self.host(argument, tensor, Kind::Float)?;
        let strides = tensor.stride();
        let (stride, within) = (strides[0], &strides[1..]);
        let dense = if flat { within == [1] } else { within == [dim, 1] || (heads == 1 && within[1] == 1) };
        if !dense || (rows > 1 && stride < heads * dim) {
            return Err(self.refuse(argument, format!("has strides {strides:?}, expected dense rows")));
        }
        Ok(Heads { data: tensor.data_ptr().cast(), stride })
    }

    fn dense(self, argument: &'static str, tensor: &Tensor, expected: &[i64], kind: Kind) -> Result<()> {
        self.shape(argument, tensor, expected)?;
        self.host(argument, tensor, kind)?;
        if !tensor.is_contiguous() {
            return Err(self.refuse(argument, format!("is not contiguous: strides {:?}", tensor.stride())));
        }
        Ok(())
    }

    fn host(self, argument: &'static str, tensor: &Tensor, kind: Kind) -> Result<()> {
        if tensor.device() != Device::Cpu || tensor.kind() != kind {
            let found = (tensor.kind(), tensor.device());
            return Err(self.refuse(argument, format!("is {found:?}, expected {kind:?} on the CPU")));
        }
        Ok(())
    }
}

/// Whether the kernels of the shim can take this tensor; everything else goes to [`super::composite`].
pub(super) fn has_kernel(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu && tensor.kind() == Kind::Float
}
