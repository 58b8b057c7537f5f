//! The kernels of `kernels/product.cu`, and how a product is cut for them. They run on libtorch's stream.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use crate::{
    Device, Grid, Result,
    device_kernels::{Architecture, Source, grid, launch, source_text},
    model_kernels::ceil_div,
};

/// CUDA C++ for NVIDIA's compute capability 9.0 alone.
pub(crate) const SOURCE: Source = Source {
    file: c"product.cu",
    text: source_text!(["elements.cuh", "warpgroup.cuh"], "product.cu"),
    kernels: &[NARROW_AND_DEEP.name, NARROW.name, WIDE.name, MANY],
    architecture: Architecture::Only("sm_90a"),
};

/// Rows of `x` that the kernels take, at most; but for the one that takes any number.
pub(crate) const MAX_ROWS: i64 = 64;
/// Columns of `x` and of the weights come in so many.
const CHUNK: i64 = 64;
const THREADS: u32 = 128;

/// One of the kernels.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    name: &'static CStr,
    /// Rows of weights of a block.
    tile: i64,
    /// Chunks that a block holds.
    stages: i64,
}

/// Two of its blocks share a multiprocessor.
const NARROW_AND_DEEP: Kernel = Kernel { name: c"product_64_6", tile: 64, stages: 6 };
/// Three do, of this one and of the next.
const NARROW: Kernel = Kernel { name: c"product_64_4", tile: 64, stages: 4 };
const WIDE: Kernel = Kernel { name: c"product_96_3", tile: 96, stages: 3 };

/// Makes sums in the order of the others, of any number of rows.
const MANY: &CStr = c"product_many";
/// Rows of `x` and of weights of one of its blocks, its threads, and the chunks that it holds.
const MANY_TILE: i64 = 128;
const MANY_THREADS: u32 = 256;
const MANY_STAGES: i64 = 6;

impl Kernel {
    fn shared_bytes(self) -> i64 {
        (MAX_ROWS + self.tile) * CHUNK * 2 * self.stages
    }
}

/// Sums of the squares of a vector's parts, fp32 `[tiles, MAX_ROWS]`, of which a norm is made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Squares {
    /// Null where there is no norm.
    pub(crate) of_tiles: *mut c_void,
    pub(crate) tiles: i32,
    pub(crate) eps: f32,
}

impl Squares {
    /// Of no norm.
    pub(crate) const NONE: Self = Self { of_tiles: ptr::null_mut(), tiles: 0, eps: 0.0 };
}

/// Sums of squares that a product leaves of so many columns.
pub(crate) fn tiles(columns: i64) -> i64 {
    ceil_div(columns, NARROW.tile)
}

/// What is multiplied, as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) x: *mut c_void,
    pub(crate) weight: *mut c_void,
    /// May be null.
    pub(crate) bias: *mut c_void,
    pub(crate) y: *mut c_void,
    /// The weights of the norm that follows; null where none does.
    pub(crate) norm: *mut c_void,
    /// What that makes of `y`, but for its scale.
    pub(crate) normed: *mut c_void,
    /// Of the norm that made `x` but for its scale.
    pub(crate) before: Squares,
    /// Of the norm that follows.
    pub(crate) after: Squares,
    pub(crate) rows: i32,
    /// Columns of `y`.
    pub(crate) outputs: i32,
    /// Columns of `x`.
    pub(crate) inputs: i32,
    /// Whether the weights are two matrices, of a gate and of what it lets through.
    pub(crate) is_gated: i32,
    /// Whether to add to what `y` holds.
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

    /// Whether there are kernels for its weights on a device.
    pub(crate) fn fits(&self, device: &dyn Device) -> bool {
        i64::from(self.inputs) % CHUNK == 0 && self.outputs % 8 == 0 && SOURCE.exists_on(device)
    }

    /// Whether its matrices begin where a copy of 16 bytes may.
    pub(crate) fn is_aligned(&self) -> bool {
        let is_aligned = |address: *mut c_void| (address as usize).is_multiple_of(16);
        [self.x, self.weight, self.y, self.normed].into_iter().all(is_aligned)
    }

    /// The kernel and how many blocks share a tile's columns: one where tiles are enough for the device, else as many as are
    /// on it at once, unless the parts would be too short to be worth it. Whatever the rows, so that a sum is always made in
    /// the same order. The choices are those that were quickest on an H200 for the layers of Qwen2.5 of 0.5B to 7B.
    fn cut(&self, multiprocessors: i64) -> (Kernel, i64) {
        const TOO_FEW: i64 = 3; // chunks of a part
        let chunks = i64::from(self.inputs) / CHUNK;
        let tiles = self.tiles(NARROW);
        let is_worth_it = |parts: i64| tiles < multiprocessors && chunks > TOO_FEW * parts;
        let fits = |parts: i64| (parts == 1 || is_worth_it(parts)) && tiles * parts <= 3 * multiprocessors;
        match [8, 4, 2, 1].into_iter().find(|&parts| fits(parts)) {
            Some(parts) if tiles * parts <= 2 * multiprocessors => (NARROW_AND_DEEP, parts),
            Some(parts) => (NARROW, parts),
            None if self.norm.is_null() => (WIDE, 1),
            None => (NARROW, 1), // whose tiles are those of the squares
        }
    }

    /// Blocks that take more rows.
    fn many_blocks(&self) -> i64 {
        let tiles = |count: i32| ceil_div(i64::from(count), MANY_TILE);
        tiles(self.rows) * tiles(self.outputs)
    }

    /// Up to [`MAX_ROWS`] of its rows.
    fn rows_from(self, first: i32) -> Self {
        let row = |matrix: *mut c_void, columns: i32| {
            matrix.wrapping_byte_add(first as usize * columns as usize * size_of::<u16>())
        };
        let (x, y) = (row(self.x, self.inputs), row(self.y, self.outputs));
        Self { x, y, rows: (self.rows - first).min(MAX_ROWS as i32), ..self }
    }

    fn tiles(&self, kernel: Kernel) -> i64 {
        let halves = if self.is_gated == 1 { 2 } else { 1 };
        ceil_div(i64::from(self.outputs), kernel.tile / halves)
    }
}

/// Multiplies bf16 values. A row has the same bits whatever the others are and however many; of more than [`MAX_ROWS`] there
/// is the product alone with its bias, without gates, norms, or what `y` held.
///
/// # Safety
/// The product is aligned and its weights fit the device, on which its addresses are those of dense tensors of these sizes;
/// they live until the work is done. `y` overlaps with nothing else. If it `is_early`, the weights are not written by the
/// kernel in front, nor is that one of a library's that lets the next one start before it has waited for its own turn.
pub(crate) unsafe fn multiply(device: &dyn Device, product: Product, is_early: bool) -> Result<()> {
    let multiprocessors = device.multiprocessors().expect("a device with these kernels counts them");
    let (kernel, parts) = product.cut(multiprocessors);
    if i64::from(product.rows) > MAX_ROWS && product.many_blocks() > multiprocessors / 2 {
        let shared_bytes = (2 * MANY_TILE * CHUNK * 2 * MANY_STAGES) as u32;
        let blocks = product.many_blocks();
        let grid = Grid { shared_bytes, starts_early: is_early, ..grid(blocks, MANY_THREADS) };
        // SAFETY: the kernel's signature, and the caller's promise.
        return unsafe { launch!(device, MANY, grid, [product, parts as i32]) };
    }
    // Few blocks that take more rows would leave most of the device idle.
    for first in (0..product.rows).step_by(MAX_ROWS as usize) {
        let grid = Grid {
            cluster: parts as u32,
            shared_bytes: kernel.shared_bytes() as u32,
            starts_early: is_early,
            ..grid(product.tiles(kernel) * parts, THREADS)
        };
        // SAFETY: the kernels' signature, and the caller's promise, whose product has these rows.
        unsafe { launch!(device, kernel.name, grid, [product.rows_from(first)])? };
    }
    Ok(())
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
        for (outputs, inputs, is_gated, kernel, parts) in [
            (2048, 1536, false, NARROW_AND_DEEP, 4),
            (1536, 8960, false, NARROW_AND_DEEP, 8),
            (8960, 1536, true, NARROW, 1),
            (4864, 896, true, NARROW_AND_DEEP, 1),
            (4608, 3584, false, NARROW, 4),
            (18944, 3584, true, WIDE, 1),
            (151_936, 1536, false, WIDE, 1),
            (96, 64, false, NARROW_AND_DEEP, 1),
        ] {
            let product = Product::new([ptr::null_mut(); 3], [64, outputs, inputs]);
            let (found, found_parts) = Product { is_gated: i32::from(is_gated), ..product }.cut(132);
            assert_eq!((found.name, found_parts), (kernel.name, parts), "{outputs} x {inputs}");
        }
    }
}
