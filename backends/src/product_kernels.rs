//! The kernels of `kernels/product.cu`, and how a product is cut for them. They run on libtorch's stream.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use crate::{
    Device, Grid, Result,
    device_kernels::{Source, grid, launch},
    model_kernels::ceil_div,
};

/// CUDA C++ for NVIDIA's compute capability 9.0 alone.
pub(crate) const SOURCE: Source = Source {
    file: c"product.cu",
    text: concat!(
        include_str!("../kernels/elements.cuh"),
        include_str!("../kernels/warpgroup.cuh"),
        "\n#line 1 \"product.cu\"\n",
        include_str!("../kernels/product.cu")
    ),
    kernels: &[NARROW_AND_DEEP.name, NARROW.name, WIDE.name],
    architecture: Some("sm_90a"),
};

/// Rows of `x` that the kernels take, at most.
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

    /// Whether there is a kernel for it on a device.
    pub(crate) fn fits(&self, device: &dyn Device) -> bool {
        let is_aligned = |address: *mut c_void| (address as usize).is_multiple_of(16);
        i64::from(self.rows) <= MAX_ROWS
            && i64::from(self.inputs) % CHUNK == 0
            && self.outputs % 8 == 0
            && [self.x, self.weight, self.y, self.normed].into_iter().all(is_aligned)
            && SOURCE.exists_on(device)
    }

    /// The kernel and how many blocks share a tile's columns: as many blocks as are on the device at once, unless the parts
    /// would be too short to be worth it. Whatever the rows, so that a sum is always made in the same order. The choices
    /// are those that were quickest on an H200 for the matrices of Qwen2.5 of 0.5B to 7B.
    fn cut(&self, multiprocessors: i64) -> (Kernel, i64) {
        const TOO_FEW: i64 = 3; // chunks of a part
        let chunks = i64::from(self.inputs) / CHUNK;
        let tiles = self.tiles(NARROW);
        let fits =
            |parts: i64| (parts == 1 || chunks > TOO_FEW * parts) && tiles * parts <= 3 * multiprocessors;
        match [8, 4, 2, 1].into_iter().find(|&parts| fits(parts)) {
            Some(parts) if tiles * parts <= 2 * multiprocessors => (NARROW_AND_DEEP, parts),
            Some(parts) => (NARROW, parts),
            None if self.norm.is_null() => (WIDE, 1),
            None => (NARROW, 1), // whose tiles are those of the squares
        }
    }

    fn tiles(&self, kernel: Kernel) -> i64 {
        let halves = if self.is_gated == 1 { 2 } else { 1 };
        ceil_div(i64::from(self.outputs), kernel.tile / halves)
    }
}

/// Multiplies bf16 values.
///
/// # Safety
/// The product fits the device, on which its addresses are those of dense tensors of these sizes; they live until the work
/// is done. `y` overlaps with nothing else. The weights are not written by the kernel in front, nor is that one of a
/// library's that lets the next one start before it has waited for its own turn.
pub(crate) unsafe fn multiply(device: &dyn Device, product: Product) -> Result<()> {
    let multiprocessors = device.multiprocessors().expect("a device with these kernels counts them");
    let (kernel, parts) = product.cut(multiprocessors);
    let grid = Grid {
        cluster: parts as u32,
        shared_bytes: kernel.shared_bytes() as u32,
        ..grid(product.tiles(kernel) * parts, THREADS).early()
    };
    // SAFETY: the kernels' signature, and the caller's promise.
    unsafe { launch!(device, kernel.name, grid, [product]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_cut_to_fill_a_device() {
        for (outputs, inputs, is_gated, kernel, parts) in [
            (2048, 1536, false, NARROW_AND_DEEP, 4),
            (1536, 8960, false, NARROW_AND_DEEP, 8),
            (8960, 1536, true, NARROW, 1),
            (4864, 896, true, NARROW, 2),
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
