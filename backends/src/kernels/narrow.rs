//! [`Narrow`]: a 16-bit float, and the files that are compiled once for each.

use std::ffi::CStr;

use tch::Kind;

/// A float of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Narrow {
    Bf16,
    F16,
}

/// The names of a kernel for bf16 and fp16 values.
pub(crate) type NarrowNames = [&'static CStr; 2];

impl Narrow {
    /// Returns the float of a kind; `None` if it has another number of bits.
    pub(crate) fn of(kind: Kind) -> Option<Narrow> {
        match kind {
            Kind::BFloat16 => Some(Narrow::Bf16),
            Kind::Half => Some(Narrow::F16),
            _ => None,
        }
    }

    /// Its entry of two.
    pub(crate) fn pick<T: Copy>(self, of_both: [T; 2]) -> T {
        of_both[self as usize]
    }
}

/// The [`NarrowNames`] of a kernel.
macro_rules! narrow_names {
    ($name:literal) => {
        [
            $crate::kernels::rows::name(concat!($name, "_bf16\0")),
            $crate::kernels::rows::name(concat!($name, "_f16\0")),
        ]
    };
}
pub(crate) use narrow_names;

/// The names of kernels for one of their types.
pub(crate) const fn of_type<const COUNT: usize, const TYPES: usize>(
    kernels: [[&'static CStr; TYPES]; COUNT],
    index: usize,
) -> [&'static CStr; COUNT] {
    let mut names = [c""; COUNT];
    let mut kernel = 0;
    while kernel < COUNT {
        names[kernel] = kernels[kernel][index];
        kernel += 1;
    }
    names
}

/// A file of kernels for each 16-bit float, after `elements.cuh`, the float's header and others; `$kernels` are the
/// [`NarrowNames`] of all.
macro_rules! narrow_sources {
    ($file:literal, [$($shared:literal),+], $kernels:expr, $architecture:expr $(, $behind:literal)?) => {
        [
            $crate::kernels::narrow::narrow_source!(
                "bf16.cuh", 0, $file, [$($shared),+], $kernels, $architecture $(, $behind)?
            ),
            $crate::kernels::narrow::narrow_source!(
                "f16.cuh", 1, $file, [$($shared),+], $kernels, $architecture $(, $behind)?
            ),
        ]
    };
}
pub(crate) use narrow_sources;

/// One of [`narrow_sources`].
macro_rules! narrow_source {
    (
        $float:literal, $index:literal, $file:literal, [$($shared:literal),+], $kernels:expr, $architecture:expr
        $(, $behind:literal)?
    ) => {
        $crate::kernels::Source {
            file: $crate::kernels::rows::name(concat!($file, "\0")),
            text: $crate::kernels::source_text!(
                ["elements.cuh", $float, $($shared),+], $file $(, $behind)?
            ),
            kernels: &$crate::kernels::narrow::of_type($kernels, $index),
            architecture: $architecture,
        }
    };
}
pub(crate) use narrow_source;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_float_has_its_own_kernels() {
        const NAMES: [NarrowNames; 2] = [narrow_names!("one"), narrow_names!("two")];
        let names = |kind| Narrow::of(kind).map(|narrow| narrow.pick([of_type(NAMES, 0), of_type(NAMES, 1)]));
        assert_eq!(names(Kind::BFloat16), Some([c"one_bf16", c"two_bf16"]));
        assert_eq!(names(Kind::Half), Some([c"one_f16", c"two_f16"]));
        assert_eq!((names(Kind::Float), names(Kind::Int)), (None, None));
    }
}
