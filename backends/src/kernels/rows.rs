//! Shared parts of the kernels that include `kernels/rows.cuh`: names for each type, and the division of work.

use std::ffi::CStr;

use tch::Kind;

use super::Narrow;

/// The names of a kernel for fp32, bf16 and fp16 values.
pub(crate) type Typed = [&'static CStr; 3];

/// The [`Typed`] names of a kernel.
macro_rules! typed_names {
    ($name:literal) => {
        [
            $crate::kernels::rows::name(concat!($name, "_f32\0")),
            $crate::kernels::rows::name(concat!($name, "_bf16\0")),
            $crate::kernels::rows::name(concat!($name, "_f16\0")),
        ]
    };
}
pub(crate) use typed_names;

/// A file of kernels for each type of values; `$kernels` are the [`Typed`] names of all.
macro_rules! typed_sources {
    ($file:literal, [$($shared:literal),+], $kernels:expr) => {
        [
            $crate::kernels::rows::typed_source!("KERNELS(float, f32)\n", 0, $file, [$($shared),+], $kernels),
            $crate::kernels::rows::typed_source!("KERNELS(Bf16, bf16)\n", 1, $file, [$($shared),+], $kernels),
            $crate::kernels::rows::typed_source!("KERNELS(F16, f16)\n", 2, $file, [$($shared),+], $kernels),
        ]
    };
}
pub(crate) use typed_sources;

/// One of [`typed_sources`].
macro_rules! typed_source {
    ($entries:literal, $index:literal, $file:literal, [$($shared:literal),+], $kernels:expr) => {
        $crate::kernels::Source {
            file: $crate::kernels::rows::name(concat!($file, "\0")),
            text: $crate::kernels::source_text!([$($shared),+], $file, $entries),
            kernels: &$crate::kernels::narrow::of_type($kernels, $index),
            architecture: $crate::kernels::Architecture::Any,
        }
    };
}
pub(crate) use typed_source;

/// A constant for each kernel of a file, and `NAMES` of them all.
macro_rules! typed_kernels {
    ($count:literal: $($constant:ident = $name:literal;)*) => {
        $(const $constant: $crate::kernels::rows::Typed = $crate::kernels::rows::typed_names!($name);)*
        const NAMES: [&std::ffi::CStr; 3 * $count] = {
            let typed = [$($constant),*];
            assert!(typed.len() == $count, "the number in front is that of the kernels");
            let mut names = [c""; 3 * $count];
            let mut index = 0;
            while index < names.len() {
                names[index] = typed[index / 3][index % 3];
                index += 1;
            }
            names
        };
    };
}
pub(crate) use typed_kernels;

/// A kernel's name, for [`typed_kernels`].
pub(crate) const fn name(bytes: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a kernel's name ends in NUL"),
    }
}

/// Bytes of one access to memory.
pub(crate) const PACK_BYTES: usize = 16;

/// Threads of a block that has no shared sums.
pub(crate) const THREADS: u32 = 256;

/// Threads and columns of a block of `join_parts`.
pub(crate) const JOIN_THREADS: u32 = 1024;
pub(crate) const JOINED_COLUMNS: i64 = 32;

/// Fewest rows of one partial sum, and most partial sums: enough blocks to hide the latency of memory.
const PART_ROWS: i64 = 16;
const MAX_PARTS: i64 = 1024;

/// Most blocks of a kernel that loops: many waves of any device.
pub(crate) const MAX_BLOCKS: i64 = 1 << 16;

/// Blocks with one thread for each of `items`, up to [`MAX_BLOCKS`].
pub(crate) fn blocks_for(items: i64) -> i64 {
    ceil_div(items, THREADS.into()).min(MAX_BLOCKS)
}

/// Exponent of two of the threads that share a head, one pack each; `None` if a block has one head only.
pub(crate) fn sharers(kind: Kind, dim: i64) -> Option<u32> {
    let packs = packs(kind, dim);
    (packs <= 32).then(|| (packs as u32).next_power_of_two().ilog2())
}

/// Threads for `items`, one each, up to `most`: a power of two from 32 on.
pub(crate) fn threads_up_to(most: u32, items: i64) -> u32 {
    (items as u32).next_power_of_two().clamp(32, most)
}

/// Number of partial sums over `rows` rows. It depends on `rows` alone, and so does the order of summation.
pub(crate) fn row_parts(rows: i64) -> i64 {
    ceil_div(rows, part_rows(rows))
}

pub(crate) fn part_rows(rows: i64) -> i64 {
    ceil_div(rows, MAX_PARTS).max(PART_ROWS)
}

/// Returns true if kernels of all types have this one.
pub(crate) fn has_kernels(kind: Kind) -> bool {
    kind == Kind::Float || Narrow::of(kind).is_some()
}

pub(crate) fn typed(kernel: Typed, kind: Kind) -> &'static CStr {
    match kind {
        Kind::Float => kernel[0],
        Kind::BFloat16 => kernel[1],
        Kind::Half => kernel[2],
        other => unreachable!("no device has kernels for {other:?}"),
    }
}

pub(crate) fn lanes(kind: Kind) -> i64 {
    (PACK_BYTES / kind.elt_size_in_bytes()) as i64
}

pub(crate) fn packs(kind: Kind, size: i64) -> i64 {
    ceil_div(size, lanes(kind))
}

pub(crate) fn ceil_div(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}
