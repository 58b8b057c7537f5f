//! The kernels of `kernels/product_eight.cu`: products of few rows with weights of 8 bits. They run on libtorch's stream.

use std::ffi::c_void;

use super::{
    Narrow, Source, launch,
    narrow::{NarrowNames, narrow_names, narrow_sources},
    product::{
        ARCHITECTURE, GROUP_ROWS, Kernel, Kernels, MAX_ROWS, Product, SHARED_TILE, multiprocessors_of,
    },
};
use crate::{Device, Result};

const EIGHT_48: NarrowNames = narrow_names!("product_eight_48");
const EIGHT_64: NarrowNames = narrow_names!("product_eight_64");
const EIGHT_80: NarrowNames = narrow_names!("product_eight_80");
const EIGHT_96: NarrowNames = narrow_names!("product_eight_96");
const EIGHT_112: NarrowNames = narrow_names!("product_eight_112");
const EIGHT_128_ROWS_64: NarrowNames = narrow_names!("product_eight_128_rows_64");
const EIGHT_128_ROWS_128: NarrowNames = narrow_names!("product_eight_128_rows_128");
const EIGHT_128_ROWS_144: NarrowNames = narrow_names!("product_eight_128_rows_144");

/// Each kernel by its groups of 64 rows, its rows of weights, its stages, the chunks of weights that a thread reads ahead,
/// and the blocks of a multiprocessor.
pub(crate) const SOURCES: [Source; 2] = narrow_sources!(
    "product_eight.cu",
    ["block.cuh", "rows.cuh", "warpgroup.cuh", "cluster.cuh", "product.cuh", "product.cu"],
    [
        EIGHT_48,
        EIGHT_64,
        EIGHT_80,
        EIGHT_96,
        EIGHT_112,
        EIGHT_128_ROWS_64,
        EIGHT_128_ROWS_128,
        EIGHT_128_ROWS_144
    ],
    ARCHITECTURE,
    "EIGHT(product_eight_48, 1, 48, 5, 4, 3)
EIGHT(product_eight_64, 1, 64, 5, 6, 2)
EIGHT(product_eight_80, 1, 80, 6, 4, 2)
EIGHT(product_eight_96, 1, 96, 5, 4, 3)
EIGHT(product_eight_112, 1, 112, 5, 4, 2)
EIGHT(product_eight_128_rows_64, 2, 64, 3, 4, 2)
EIGHT(product_eight_128_rows_128, 2, 128, 4, 6, 1)
EIGHT(product_eight_128_rows_144, 2, 144, 4, 6, 1)
"
);

/// Chunks of weights in shared memory: one is multiplied while the next one is widened.
const WIDE: i64 = 2;

const fn kernel(names: NarrowNames, sizes: [i64; 4]) -> Kernel {
    Kernel::of(names, sizes).with_weight_stages(WIDE)
}

const UP_TO_64: Kernels = Kernels {
    shared: SHARED,
    whole: &[
        kernel(EIGHT_48, [1, 48, 5, 3]),
        LARGE,
        SHARED,
        kernel(EIGHT_80, [1, 80, 6, 2]),
        kernel(EIGHT_112, [1, 112, 5, 2]),
    ],
    large: LARGE,
};
const SHARED: Kernel = kernel(EIGHT_64, [1, SHARED_TILE, 5, 2]);
const LARGE: Kernel = kernel(EIGHT_96, [1, 96, 5, 3]);
const UP_TO_128: Kernels = Kernels {
    shared: kernel(EIGHT_128_ROWS_64, [2, SHARED_TILE, 3, 2]),
    whole: &[LARGE_128, kernel(EIGHT_128_ROWS_128, [2, 128, 4, 1])],
    large: LARGE_128,
};
const LARGE_128: Kernel = kernel(EIGHT_128_ROWS_144, [2, 144, 4, 1]);

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
    for first in (0..product.rows).step_by(MAX_ROWS as usize) {
        let product = product.rows_from(first, MAX_ROWS);
        let kernels = if i64::from(product.rows) > GROUP_ROWS { &UP_TO_128 } else { &UP_TO_64 };
        let parts = product.parts(multiprocessors);
        let kernel = product.kernel(kernels, parts, multiprocessors);
        let grid = kernel.grid(product.tiles(kernel), parts, true);
        // SAFETY: the kernels' signature, and the caller's promise.
        unsafe { launch!(device, narrow.pick(kernel.names), grid, [product, scales])? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels' names and sizes, and their number at once on an H200, as for 16 bits.
    #[test]
    fn kernels_are_what_their_sources_say() {
        let [source, _] = SOURCES;
        for kernels in [UP_TO_64, UP_TO_128] {
            for &kernel in kernels.whole.iter().chain([&kernels.shared, &kernels.large]) {
                let name = kernel.names[0].to_str().unwrap().strip_suffix("_bf16").unwrap();
                let (groups, tile, stages, at_once) =
                    (kernel.groups, kernel.tile, kernel.stages, kernel.at_once);
                let begin = format!("EIGHT({name}, {groups}, {tile}, {stages}, ");
                let line = source.text.lines().find(|line| line.starts_with(&begin)).expect(&begin);
                assert!(line.ends_with(&format!(", {at_once})")), "{line}");
                let most_parts = if tile == SHARED_TILE { 8 } else { 1 };
                for parts in 1..=most_parts {
                    let bytes = kernel.shared_bytes(parts) + 2048 + 1024; // with what is not dynamic
                    assert!(bytes * at_once <= 228 << 10, "{name} in {parts} parts takes {bytes} bytes");
                }
            }
        }
    }
}
