//! The kernels of `kernels/product_eight.cu`: products of few rows with weights of 8 bits. They run on libtorch's stream.

use std::ffi::c_void;

use super::{
    Narrow, Source, grid, launch,
    narrow::{NarrowNames, narrow_names, narrow_sources},
    product::{ARCHITECTURE, CHUNK, GROUP_ROWS, GROUP_THREADS, Product, inbox_bytes, multiprocessors_of},
    rows::ceil_div,
};
use crate::{Device, Grid, Result};

const EIGHT_64: NarrowNames = narrow_names!("product_eight_64");
const EIGHT_256: NarrowNames = narrow_names!("product_eight_256");
const EIGHT_320: NarrowNames = narrow_names!("product_eight_320");

/// Each kernel by its groups of four warps, its stages, and the blocks of a multiprocessor.
pub(crate) const SOURCES: [Source; 2] = narrow_sources!(
    "product_eight.cu",
    ["block.cuh", "rows.cuh", "warpgroup.cuh", "cluster.cuh", "product.cuh", "product.cu"],
    [EIGHT_64, EIGHT_256, EIGHT_320],
    ARCHITECTURE,
    "EIGHT(product_eight_64, 1, 6, 3)
EIGHT(product_eight_256, 4, 6, 1)
EIGHT(product_eight_320, 5, 5, 1)
"
);

/// One of the kernels.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    names: NarrowNames,
    /// Groups of four warps, each with [`GROUP_ROWS`] rows of weights.
    groups: i64,
    /// Chunks that a block holds.
    stages: i64,
}

/// The kernel for tiles that blocks share, and for those with a norm.
const SHARED: Kernel = Kernel { names: EIGHT_64, groups: 1, stages: 6 };
const KERNELS: [Kernel; 3] = [
    Kernel { names: EIGHT_320, groups: 5, stages: 5 },
    Kernel { names: EIGHT_256, groups: 4, stages: 6 },
    SHARED,
];

impl Kernel {
    /// The kernel for a product in `parts` parts: the one with which a multiprocessor has the fewest rows of weights at most,
    /// and of those the largest, which reads the fewest rows of `x`.
    fn of(product: &Product, parts: i64, multiprocessors: i64) -> Self {
        if parts > 1 || !product.norm.is_null() {
            return SHARED;
        }
        let most = |kernel: &Kernel| ceil_div(product.tiles(kernel.tile()), multiprocessors) * kernel.groups;
        KERNELS.into_iter().min_by_key(most).expect("there are kernels")
    }

    /// Rows of weights of a tile.
    fn tile(self) -> i64 {
        self.groups * GROUP_ROWS
    }

    /// Shared memory of a block if `parts` blocks share a tile's columns.
    fn shared_bytes(self, parts: i64) -> i64 {
        (GROUP_ROWS * 2 + self.tile()) * CHUNK * self.stages + inbox_bytes(GROUP_ROWS, parts)
    }
}

/// Returns true if a device has kernels for a product with 16-bit values of this type.
pub(crate) fn exist_for(product: &Product, device: &dyn Device, narrow: Narrow) -> bool {
    product.is_even() && narrow.pick(SOURCES).exists_on(device)
}

/// [`multiply`](super::product::multiply) with weights of e4m3, whose rows have the fp32 `scales`, for any number of rows if no
/// norm is before or after it.
///
/// # Safety
/// The same as for `multiply`, with weights of 8 bits and as many scales as they have rows.
pub(crate) unsafe fn multiply_eight(
    device: &dyn Device,
    narrow: Narrow,
    product: Product,
    scales: *mut c_void,
) -> Result<()> {
    let multiprocessors = multiprocessors_of(device);
    let parts = product.parts(multiprocessors);
    let kernel = Kernel::of(&product, parts, multiprocessors);
    let lots = ceil_div(i64::from(product.rows), GROUP_ROWS);
    let grid = Grid {
        cluster: parts as u32,
        shared_bytes: kernel.shared_bytes(parts) as u32,
        starts_early: true,
        ..grid(product.tiles(kernel.tile()) * lots * parts, kernel.groups as u32 * GROUP_THREADS)
    };
    // SAFETY: the kernels' signature, and the caller's promise.
    unsafe { launch!(device, narrow.pick(kernel.names), grid, [product, scales, lots as i32]) }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::{super::product::PAIR_BYTES, *};

    /// The kernels' names and sizes, and their number at once on an H200, as for 16 bits.
    #[test]
    fn kernels_are_what_their_sources_say() {
        let [source, _] = SOURCES;
        for kernel in KERNELS {
            let name = kernel.names[0].to_str().unwrap().strip_suffix("_bf16").unwrap();
            let begin = format!("EIGHT({name}, {}, {}, ", kernel.groups, kernel.stages);
            let line = source.text.lines().find(|line| line.starts_with(&begin)).expect(&begin);
            let at_once: i64 = line[begin.len()..].trim_end_matches(')').parse().unwrap();
            let bytes = kernel.shared_bytes(1) + 2048; // with what is not dynamic
            assert!(bytes * at_once <= 228 << 10, "{name} takes {bytes} bytes");
            let turned = GROUP_ROWS * (kernel.groups * GROUP_ROWS + 4) * 4;
            assert!(turned + PAIR_BYTES * GROUP_ROWS / 2 <= kernel.shared_bytes(1) || kernel.groups > 1);
            assert!(turned <= kernel.shared_bytes(1), "{name} turns {turned} bytes of sums");
        }
        assert!((SHARED.shared_bytes(8) + 2048) * 2 <= 228 << 10);
    }

    #[test]
    fn products_are_cut_to_fill_a_device() {
        for (outputs, inputs, is_gated, kernel, parts) in [
            (18944, 3584, true, EIGHT_320, 1),
            (14336, 4096, true, EIGHT_256, 1),
            (8960, 1536, true, EIGHT_64, 1),
            (3584, 18944, false, EIGHT_64, 4),
            (4608, 3584, false, EIGHT_64, 3),
        ] {
            let product = Product::new([ptr::null_mut(); 3], [64, outputs, inputs]);
            let product = Product { is_gated: i32::from(is_gated), ..product };
            assert_eq!(product.parts(132), parts, "{outputs} x {inputs}");
            assert_eq!(Kernel::of(&product, parts, 132).names, kernel, "{outputs} x {inputs}");
        }
    }
}
