//! The kernels of `kernels/experts.cu`: a step of decoding through a mixture of experts. They run on libtorch's stream.

use std::ffi::c_void;

use super::{
    Architecture, Narrow, Source, grid, launch,
    narrow::{NarrowNames, narrow_names, narrow_sources},
    product::{GROUP_THREADS, LARGE, Product},
    rows::threads_up_to,
};
use crate::{Device, Grid, Result};

const CHOOSE_EXPERTS: NarrowNames = narrow_names!("choose_experts");
const SORT_CHOICES: NarrowNames = narrow_names!("sort_choices");
const MULTIPLY_EXPERTS: NarrowNames = narrow_names!("multiply_experts");
const ADD_EXPERTS: NarrowNames = narrow_names!("add_experts");

/// CUDA C++ for NVIDIA's compute capability 9.0 alone.
pub(crate) const SOURCES: [Source; 2] = narrow_sources!(
    "experts.cu",
    ["block.cuh", "rows.cuh", "warpgroup.cuh", "cluster.cuh", "product.cuh", "product.cu"],
    [CHOOSE_EXPERTS, SORT_CHOICES, MULTIPLY_EXPERTS, ADD_EXPERTS],
    Architecture::Only("sm_90a")
);

/// Experts of a layer that the kernels take.
pub(crate) const MOST_EXPERTS: i64 = 1024;
const SUM_THREADS: u32 = 256;

/// The experts of a step's tokens, and the order of their R = B J rows: see `ops::Choice` and `ops::Dispatch`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routes {
    /// int32 `[B, J]`.
    pub(crate) chosen: *mut c_void,
    /// fp32 `[B, J]`.
    pub(crate) weights: *mut c_void,
    /// int32 `[E]`.
    pub(crate) ends: *mut c_void,
    /// int32 `[R]`.
    pub(crate) tokens: *mut c_void,
    /// int32 `[B, J]`.
    pub(crate) places: *mut c_void,
    /// B.
    pub(crate) rows: i32,
    /// E.
    pub(crate) experts: i32,
    /// The first of the experts whose matrices are here, and their number.
    pub(crate) own: [i32; 2],
    /// J.
    pub(crate) per_token: i32,
}

/// Fills the routes by logits `[B, E]`.
///
/// # Safety
/// For this and all functions below: addresses are those of tensors on `device` with these sizes, which live until the work
/// is done. Outputs overlap with nothing else.
pub(crate) unsafe fn route(
    device: &dyn Device,
    narrow: Narrow,
    logits: *mut c_void,
    is_normalized: bool,
    routes: Routes,
) -> Result<()> {
    let Routes { chosen, weights, ends, tokens, places, rows, experts, per_token, .. } = routes;
    let threads = threads_up_to(MOST_EXPERTS as u32, experts.into());
    let (is_normalized, count) = (i32::from(is_normalized), rows * per_token);
    // SAFETY: the kernels' signatures, and the caller's promise.
    unsafe {
        launch!(
            device,
            narrow.pick(CHOOSE_EXPERTS),
            grid(rows.into(), threads).early(),
            [logits, experts, per_token, is_normalized, chosen, weights]
        )?;
        launch!(
            device,
            narrow.pick(SORT_CHOICES),
            grid(1, threads).early(),
            [chosen, count, per_token, experts, ends, tokens, places]
        )
    }
}

/// Multiplies sorted rows by the matrices of their experts, which are stacked in the product's weights. With `of_tokens`, `x`
/// has the tokens' rows, and otherwise sorted ones.
///
/// # Safety
/// The same as for [`route`]; the product is aligned, without norms and biases, its weights fit the device, and the routes are
/// filled.
pub(crate) unsafe fn multiply(
    device: &dyn Device,
    narrow: Narrow,
    product: Product,
    of_tokens: bool,
    routes: Routes,
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Experts {
        ends: *mut c_void,
        tokens: *mut c_void,
        first: i32,
        own: i32,
    }
    let [first, own] = routes.own;
    let tokens = if of_tokens { routes.tokens } else { std::ptr::null_mut() };
    let experts = Experts { ends: routes.ends, tokens, first, own };
    let blocks = product.tiles(LARGE.tile) * i64::from(own);
    let grid = Grid {
        shared_bytes: LARGE.shared_bytes(1) as u32,
        starts_early: true,
        ..grid(blocks, GROUP_THREADS)
    };
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, narrow.pick(MULTIPLY_EXPERTS), grid, [product, experts]) }
}

/// Adds the experts' results `[R, columns]` to the rows `y` `[B, columns]` of their tokens.
///
/// # Safety
/// The same as for [`route`]; the routes are filled.
pub(crate) unsafe fn add_up(
    device: &dyn Device,
    narrow: Narrow,
    y: *mut c_void,
    made: *mut c_void,
    columns: i64,
    routes: Routes,
) -> Result<()> {
    let Routes { weights, ends, places, rows, per_token, own: [first, own], .. } = routes;
    let grid = grid(rows.into(), SUM_THREADS).early();
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            narrow.pick(ADD_EXPERTS),
            grid,
            [y, made, places, weights, per_token, columns as i32, ends, first, own]
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_the_one_that_a_grid_is_made_for() {
        assert_eq!(LARGE.names, narrow_names!("product_96_3"));
        let [source, _] = SOURCES;
        assert!(source.text.contains("multiply_expert<96, 3>"));
        assert!(source.text.contains(&format!("MOST_EXPERTS = {MOST_EXPERTS};")));
        assert!(source.text.contains(&format!("__launch_bounds__({SUM_THREADS})\n    NAMED(add_experts)")));
    }
}
