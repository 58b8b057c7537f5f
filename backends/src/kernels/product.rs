//! The kernels of `kernels/product*.cu`, and the division of a product into blocks. They run on libtorch's stream.

use std::{ffi::c_void, ptr};

use super::{
    Architecture, Narrow, Source, grid, launch,
    narrow::{NarrowNames, narrow_names, narrow_sources},
    rows::ceil_div,
};
use crate::{Device, Grid, Result};

const PRODUCT_48_5: NarrowNames = narrow_names!("product_48_5");
const PRODUCT_48_8: NarrowNames = narrow_names!("product_48_8");
const PRODUCT_64_6: NarrowNames = narrow_names!("product_64_6");
const PRODUCT_80_6: NarrowNames = narrow_names!("product_80_6");
const PRODUCT_96_3: NarrowNames = narrow_names!("product_96_3");
const PRODUCT_112_4: NarrowNames = narrow_names!("product_112_4");
const PRODUCT_128_ROWS_64_3: NarrowNames = narrow_names!("product_128_rows_64_3");
const PRODUCT_128_ROWS_128_6: NarrowNames = narrow_names!("product_128_rows_128_6");
const PRODUCT_128_ROWS_144_6: NarrowNames = narrow_names!("product_128_rows_144_6");

/// CUDA C++ for NVIDIA's compute capability 9.0 alone.
pub(super) const ARCHITECTURE: Architecture = Architecture::Only("sm_90a");

/// Products of up to 64 rows, each kernel by its rows of weights and its stages.
pub(crate) const SOURCES: [Source; 2] = narrow_sources!(
    "product.cu",
    ["block.cuh", "rows.cuh", "warpgroup.cuh", "cluster.cuh", "product.cuh"],
    [PRODUCT_48_5, PRODUCT_48_8, PRODUCT_64_6, PRODUCT_80_6, PRODUCT_96_3, PRODUCT_112_4],
    ARCHITECTURE,
    "PRODUCT(product_48_5, 1, 48, 5)
PRODUCT(product_48_8, 1, 48, 8)
PRODUCT(product_64_6, 1, 64, 6)
PRODUCT(product_80_6, 1, 80, 6)
PRODUCT(product_96_3, 1, 96, 3)
PRODUCT(product_112_4, 1, 112, 4)
"
);

/// The same for up to 128 rows.
pub(crate) const SOURCES_128: [Source; 2] = narrow_sources!(
    "product.cu",
    ["block.cuh", "rows.cuh", "warpgroup.cuh", "cluster.cuh", "product.cuh"],
    [PRODUCT_128_ROWS_64_3, PRODUCT_128_ROWS_128_6, PRODUCT_128_ROWS_144_6],
    ARCHITECTURE,
    "PRODUCT(product_128_rows_64_3, 2, 64, 3)
PRODUCT(product_128_rows_128_6, 2, 128, 6)
PRODUCT(product_128_rows_144_6, 2, 144, 6)
"
);

/// The same for any number of rows, with sums in the same order.
pub(crate) const SOURCES_MANY: [Source; 2] =
    narrow_sources!("product_many.cu", ["warpgroup.cuh", "product.cuh"], [MANY], ARCHITECTURE);

/// Rows of `x` that a product with a norm, or with gates, has at most.
pub(crate) const MAX_ROWS: i64 = 128;
/// Rows that four warps multiply.
pub(super) const GROUP_ROWS: i64 = 64;
pub(crate) const GROUP_THREADS: u32 = 128;
/// Columns of `x` and of the weights that are read at a time.
pub(super) const CHUNK: i64 = 64;

/// One of the kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    pub(crate) names: NarrowNames,
    /// Groups of [`GROUP_ROWS`] rows.
    groups: i64,
    /// Rows of weights of a block.
    pub(super) tile: i64,
    /// Chunks that a block holds.
    stages: i64,
    /// Its blocks that a multiprocessor has room for.
    at_once: i64,
}

impl Kernel {
    const fn of(names: NarrowNames, [groups, tile, stages, at_once]: [i64; 4]) -> Self {
        Self { names, groups, tile, stages, at_once }
    }

    /// Shared memory of a block if `parts` blocks share a tile's columns.
    pub(crate) fn shared_bytes(self, parts: i64) -> i64 {
        let inbox = inbox_bytes(self.groups * GROUP_ROWS, parts);
        (self.groups * GROUP_ROWS + self.tile) * CHUNK * 2 * self.stages + inbox
    }
}

/// Shared memory for the sums that a block gets of a tile with so many rows of `x`, if `parts` blocks share the tile's columns.
pub(super) fn inbox_bytes(rows: i64, parts: i64) -> i64 {
    (parts - 1) * ceil_div(rows / 2, parts) * PAIR_BYTES
}

/// Sums of two rows of a tile that blocks share.
pub(super) const PAIR_BYTES: i64 = 2 * SHARED_TILE * 4;
/// Rows of weights of such a tile, and of one that has a norm.
const SHARED_TILE: i64 = 64;

/// Kernels for one range of rows.
#[derive(Debug)]
struct Kernels {
    /// The kernel for tiles that blocks share, and for those with a norm.
    shared: Kernel,
    /// Kernels for all other products that one of them takes at once.
    whole: &'static [Kernel],
    /// The kernel for the rest.
    large: Kernel,
}

const UP_TO_64: Kernels = Kernels {
    shared: SHARED,
    whole: &[
        Kernel::of(PRODUCT_48_5, [1, 48, 5, 3]),
        LARGE,
        Kernel::of(PRODUCT_48_8, [1, 48, 8, 2]),
        SHARED,
        Kernel::of(PRODUCT_80_6, [1, 80, 6, 2]),
        Kernel::of(PRODUCT_112_4, [1, 112, 4, 2]),
    ],
    large: LARGE,
};
const SHARED: Kernel = Kernel::of(PRODUCT_64_6, [1, SHARED_TILE, 6, 2]);
pub(crate) const LARGE: Kernel = Kernel::of(PRODUCT_96_3, [1, 96, 3, 3]);
const UP_TO_128: Kernels = Kernels {
    shared: Kernel::of(PRODUCT_128_ROWS_64_3, [2, SHARED_TILE, 3, 2]),
    whole: &[LARGE_128, Kernel::of(PRODUCT_128_ROWS_128_6, [2, 128, 6, 1])],
    large: LARGE_128,
};
const LARGE_128: Kernel = Kernel::of(PRODUCT_128_ROWS_144_6, [2, 144, 6, 1]);

/// The kernel for any number of rows, with sums in the order of the others.
const MANY: NarrowNames = narrow_names!("product_many");
/// Rows of `x` and of weights of one of its blocks, its threads, and the chunks that it holds.
const MANY_TILE: i64 = 128;
const MANY_THREADS: u32 = 256;
const MANY_STAGES: i64 = 6;

/// Sums of the squares of a vector's parts, fp32 `[tiles + 1, MAX_ROWS]`, from which a norm is computed. In fp16 the last row has
/// the unit of the norm's weights: the vector was multiplied by these, divided by it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Squares {
    /// Null without a norm.
    pub(crate) of_tiles: *mut c_void,
    pub(crate) tiles: i32,
    pub(crate) eps: f32,
}

impl Squares {
    /// No norm.
    pub(crate) const NONE: Self = Self { of_tiles: ptr::null_mut(), tiles: 0, eps: 0.0 };
}

/// Number of sums of squares that a product of `columns` columns writes.
pub(crate) fn tiles(columns: i64) -> i64 {
    ceil_div(columns, SHARED_TILE)
}

/// A product and its neighbours, as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) x: *mut c_void,
    pub(crate) weight: *mut c_void,
    /// May be null.
    pub(crate) bias: *mut c_void,
    pub(crate) y: *mut c_void,
    /// Weights of the norm that follows; null without one.
    pub(crate) norm: *mut c_void,
    /// The norm's result, not yet scaled.
    pub(crate) normed: *mut c_void,
    /// Sums of the norm that made `x`, which is not yet scaled.
    pub(crate) before: Squares,
    /// Sums for the norm that follows.
    pub(crate) after: Squares,
    pub(crate) rows: i32,
    /// Columns of `y`.
    pub(crate) outputs: i32,
    /// Columns of `x`.
    pub(crate) inputs: i32,
    /// 1 if the weights are two matrices: of the gate and of the gated values.
    pub(crate) is_gated: i32,
    /// 1 to add to `y`, 0 to overwrite it.
    pub(crate) is_added: i32,
}

impl Product {
    /// `x W^T` into `y`, and nothing else.
    pub(crate) fn new([x, weight, y]: [*mut c_void; 3], [rows, outputs, inputs]: [i64; 3]) -> Self {
        let none = ptr::null_mut();
        Self {
            x,
            weight,
            bias: none,
            y,
            norm: none,
            normed: none,
            before: Squares::NONE,
            after: Squares::NONE,
            rows: rows as i32,
            outputs: outputs as i32,
            inputs: inputs as i32,
            is_gated: 0,
            is_added: 0,
        }
    }

    /// Returns true if a device has kernels for its weights, of this type.
    pub(crate) fn fits(&self, device: &dyn Device, narrow: Narrow) -> bool {
        self.is_even() && narrow.pick(SOURCES).exists_on(device)
    }

    /// Returns true if its sizes are multiples of what the kernels read at a time.
    pub(super) fn is_even(&self) -> bool {
        i64::from(self.inputs) % CHUNK == 0 && self.outputs % 8 == 0
    }

    /// Returns true if the kernels for its rows are faster than a library's product and the norm after it, for a residual
    /// stream of `stream` elements.
    pub(crate) fn is_quick(&self, stream: i64) -> bool {
        const NARROW: i64 = 2048;
        let rows = i64::from(self.rows);
        rows <= GROUP_ROWS || rows <= MAX_ROWS && stream <= NARROW
    }

    /// Returns true if its matrices are aligned to 16 bytes.
    pub(crate) fn is_aligned(&self) -> bool {
        let is_aligned = |address: *mut c_void| (address as usize).is_multiple_of(16);
        [self.x, self.weight, self.y, self.normed].into_iter().all(is_aligned)
    }

    /// Number of blocks that share a tile's columns. It is one if the tiles fill the device; otherwise as many as clusters of
    /// any size fit at once, unless their parts would be too short. It does not depend on the rows, so the order of a sum is
    /// fixed. This choice and those of kernels were the fastest on an H200, or nearly so, in whole layers of Qwen2.5 0.5B, 1.5B
    /// and 7B, Qwen3 1.7B and 4B, and Llama 3 8B.
    pub(super) fn parts(&self, multiprocessors: i64) -> i64 {
        const FEWEST: i64 = 3; // chunks of a part
        let (tiles, chunks) =
            (ceil_div(i64::from(self.outputs), SHARED_TILE), i64::from(self.inputs) / CHUNK);
        let fits = |parts: &i64| {
            tiles * parts <= multiprocessors * 7 / 4 && chunks >= FEWEST * parts && self.is_gated == 0
        };
        [8, 6, 5, 4, 3, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// The kernel for `parts` parts: among those that take a whole product at once, the one that leaves the least of the device
    /// idle.
    fn kernel(&self, kernels: &Kernels, parts: i64, multiprocessors: i64) -> Kernel {
        if parts > 1 || !self.norm.is_null() {
            return kernels.shared;
        }
        let room = |kernel: &Kernel| kernel.at_once * multiprocessors;
        let idle = |kernel: &Kernel| (room(kernel) - self.tiles(kernel.tile)) * 1000 / room(kernel);
        let takes_all = |kernel: &&Kernel| self.tiles(kernel.tile) <= room(kernel);
        kernels
            .whole
            .iter()
            .filter(takes_all)
            .min_by_key(|kernel| idle(kernel))
            .copied()
            .unwrap_or(kernels.large)
    }

    /// Blocks that take more rows.
    fn many_blocks(&self) -> i64 {
        let tiles = |count: i32| ceil_div(i64::from(count), MANY_TILE);
        tiles(self.rows) * tiles(self.outputs)
    }

    /// Up to [`GROUP_ROWS`] of its rows.
    fn rows_from(self, first: i32) -> Self {
        let row = |matrix: *mut c_void, columns: i32| {
            matrix.wrapping_byte_add(first as usize * columns as usize * size_of::<u16>())
        };
        let (x, y) = (row(self.x, self.inputs), row(self.y, self.outputs));
        Self { x, y, rows: (self.rows - first).min(GROUP_ROWS as i32), ..self }
    }

    /// Tiles of so many rows of weights that cover its columns.
    pub(super) fn tiles(&self, tile: i64) -> i64 {
        let halves = if self.is_gated == 1 { 2 } else { 1 };
        ceil_div(i64::from(self.outputs), tile / halves)
    }
}

/// Multiplies up to [`MAX_ROWS`] rows. In products of up to [`GROUP_ROWS`] rows, a row's bits do not depend on the
/// other rows or their number; nor do they in larger products.
///
/// # Safety
/// The product is aligned and its weights fit the device, on which its addresses are those of dense tensors of these sizes;
/// they live until the work is done. `y` overlaps with nothing else. If it `is_early`, the previous kernel does not write the
/// weights, and is no library's that lets the next one start before it has waited for its own predecessor.
pub(crate) unsafe fn multiply(
    device: &dyn Device,
    narrow: Narrow,
    product: Product,
    is_early: bool,
) -> Result<()> {
    let multiprocessors = multiprocessors_of(device);
    let kernels = if i64::from(product.rows) > GROUP_ROWS { &UP_TO_128 } else { &UP_TO_64 };
    let parts = product.parts(multiprocessors);
    let kernel = product.kernel(kernels, parts, multiprocessors);
    let grid = Grid {
        cluster: parts as u32,
        shared_bytes: kernel.shared_bytes(parts) as u32,
        starts_early: is_early,
        ..grid(product.tiles(kernel.tile) * parts, kernel.groups as u32 * GROUP_THREADS)
    };
    // SAFETY: the kernels' signature, and the caller's promise.
    unsafe { launch!(device, narrow.pick(kernel.names), grid, [product]) }
}

/// Multiplies any number of rows and adds the bias. Each row has the bits that [`multiply`] gives it among up to
/// [`GROUP_ROWS`] rows.
///
/// # Safety
/// The same as for [`multiply`].
pub(crate) unsafe fn multiply_by_rows(
    device: &dyn Device,
    narrow: Narrow,
    product: Product,
    is_early: bool,
) -> Result<()> {
    let multiprocessors = multiprocessors_of(device);
    let blocks = product.many_blocks();
    if i64::from(product.rows) > GROUP_ROWS && blocks > multiprocessors / 2 {
        let shared_bytes = (2 * MANY_TILE * CHUNK * 2 * MANY_STAGES) as u32;
        let grid = Grid { shared_bytes, starts_early: is_early, ..grid(blocks, MANY_THREADS) };
        // SAFETY: the kernel's signature, and the caller's promise.
        return unsafe {
            launch!(device, narrow.pick(MANY), grid, [product, product.parts(multiprocessors) as i32])
        };
    }
    // Few blocks that take more rows would leave most of the device idle.
    for first in (0..product.rows).step_by(GROUP_ROWS as usize) {
        // SAFETY: the caller's promise, whose product has these rows.
        unsafe { multiply(device, narrow, product.rows_from(first), is_early)? };
    }
    Ok(())
}

pub(super) fn multiprocessors_of(device: &dyn Device) -> i64 {
    device.multiprocessors().expect("a device with these kernels counts them")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_so_many_at_a_time() {
        let start = |address: usize| ptr::without_provenance_mut(address);
        let product = Product::new([start(0x1000), start(0x2000), start(0x3000)], [150, 8, 64]);
        let taken = [0, 64, 128].map(|first| {
            let part = product.rows_from(first);
            assert_eq!((part.weight.addr(), part.outputs, part.inputs), (0x2000, 8, 64));
            (part.rows, part.x.addr() - 0x1000, part.y.addr() - 0x3000)
        });
        assert_eq!(taken, [(64, 0, 0), (64, 64 * 128, 64 * 16), (22, 128 * 128, 128 * 16)]);
    }

    #[test]
    fn products_are_cut_to_fill_a_device() {
        for (rows, outputs, inputs, is_gated, kernel, parts) in [
            (64, 2048, 1536, false, PRODUCT_64_6, 6),
            (64, 1536, 8960, false, PRODUCT_64_6, 8),
            (64, 8960, 1536, true, PRODUCT_48_5, 1),
            (64, 4864, 896, true, PRODUCT_48_8, 1),
            (64, 4608, 3584, false, PRODUCT_64_6, 3),
            (64, 18944, 3584, true, PRODUCT_96_3, 1),
            (64, 14336, 4096, true, PRODUCT_112_4, 1),
            (64, 151_936, 1536, false, PRODUCT_96_3, 1),
            (64, 96, 64, false, PRODUCT_48_8, 1),
            (65, 2048, 1536, false, PRODUCT_128_ROWS_64_3, 6),
            (65, 8960, 1536, true, PRODUCT_128_ROWS_144_6, 1),
            (65, 4864, 896, true, PRODUCT_128_ROWS_128_6, 1),
            (65, 151_936, 1536, false, PRODUCT_128_ROWS_144_6, 1),
        ] {
            let product = Product::new([ptr::null_mut(); 3], [rows, outputs, inputs]);
            let product = Product { is_gated: i32::from(is_gated), ..product };
            let kernels = if rows > GROUP_ROWS { &UP_TO_128 } else { &UP_TO_64 };
            assert_eq!(product.parts(132), parts, "{outputs} x {inputs}");
            let names = product.kernel(kernels, parts, 132).names;
            assert_eq!(names, kernel, "{rows} x {outputs} x {inputs}");
        }
    }

    /// The kernels' names, and their number at once on an H200. Its multiprocessor has 228 KiB for blocks, each of which takes
    /// 1 KiB for itself.
    #[test]
    fn kernels_are_what_their_sources_say() {
        for (kernels, [source, _]) in [(UP_TO_64, SOURCES), (UP_TO_128, SOURCES_128)] {
            for &kernel in kernels.whole.iter().chain([&kernels.shared, &kernels.large]) {
                let Kernel { names, groups, tile, stages, at_once } = kernel;
                let name = names[0].to_str().unwrap().strip_suffix("_bf16").unwrap();
                assert!(
                    source.text.contains(&format!("PRODUCT({name}, {groups}, {tile}, {stages})")),
                    "{name}"
                );
                let most_parts = if tile == SHARED_TILE { 8 } else { 1 };
                for parts in 1..=most_parts {
                    let fixed = groups * GROUP_ROWS * 4 + 8 + 32 * 4; // scales, what counts arrivals, sums of warps
                    let bytes = kernel.shared_bytes(parts) + fixed + 1024;
                    assert!(bytes * at_once <= 228 << 10, "{name} in {parts} parts takes {bytes} bytes");
                }
            }
        }
    }
}
