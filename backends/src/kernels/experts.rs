//! The kernels of `kernels/experts.cu`: a step of decoding through a mixture of experts. They run on libtorch's stream.

use std::ffi::c_void;

use super::{
    Architecture, Source, grid, launch,
    product::{GROUP_THREADS, LARGE, Product},
    rows::threads_up_to,
    source_text,
};
use crate::{Device, Grid, Result};

/// CUDA C++ for NVIDIA's compute capability 9.0 alone.
pub(crate) const SOURCE: Source = Source {
    file: c"experts.cu",
    text: source_text!(
        [
            "elements.cuh",
            "block.cuh",
            "rows.cuh",
            "warpgroup.cuh",
            "cluster.cuh",
            "product.cuh",
            "product.cu"
        ],
        "experts.cu"
    ),
    kernels: &[c"choose_experts", c"sort_choices", c"multiply_experts", c"add_experts"],
    architecture: Architecture::Only("sm_90a"),
};

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
    /// J.
    pub(crate) per_token: i32,
}

/// Fills the routes by bf16 logits `[B, E]`.
///
/// # Safety
/// For this and all functions below: addresses are those of tensors on `device` with these sizes, which live until the work
/// is done. Outputs overlap with nothing else.
pub(crate) unsafe fn route(
    device: &dyn Device,
    logits: *mut c_void,
    is_normalized: bool,
    routes: Routes,
) -> Result<()> {
    let Routes { chosen, weights, ends, tokens, places, rows, experts, per_token } = routes;
    let threads = threads_up_to(MOST_EXPERTS as u32, experts.into());
    let (is_normalized, count) = (i32::from(is_normalized), rows * per_token);
    // SAFETY: the kernels' signatures, and the caller's promise.
    unsafe {
        launch!(
            device,
            c"choose_experts",
            grid(rows.into(), threads).early(),
            [logits, experts, per_token, is_normalized, chosen, weights]
        )?;
        launch!(
            device,
            c"sort_choices",
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
    product: Product,
    of_tokens: bool,
    routes: Routes,
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Experts {
        ends: *mut c_void,
        tokens: *mut c_void,
    }
    let tokens = if of_tokens { routes.tokens } else { std::ptr::null_mut() };
    let experts = Experts { ends: routes.ends, tokens };
    let blocks = product.tiles(LARGE) * i64::from(routes.experts);
    let grid = Grid {
        shared_bytes: LARGE.shared_bytes(1) as u32,
        starts_early: true,
        ..grid(blocks, GROUP_THREADS)
    };
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, c"multiply_experts", grid, [product, experts]) }
}

/// Adds the experts' results, bf16 `[R, columns]`, to the rows `y` `[B, columns]` of their tokens.
///
/// # Safety
/// The same as for [`route`]; the routes are filled.
pub(crate) unsafe fn add_up(
    device: &dyn Device,
    y: *mut c_void,
    made: *mut c_void,
    columns: i64,
    routes: Routes,
) -> Result<()> {
    let Routes { weights, places, rows, per_token, .. } = routes;
    let grid = grid(rows.into(), SUM_THREADS).early();
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, c"add_experts", grid, [y, made, places, weights, per_token, columns as i32]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_the_one_that_a_grid_is_made_for() {
        assert_eq!(LARGE.name, c"product_96_3");
        assert!(SOURCE.text.contains("multiply_expert<96, 3>"));
        assert!(SOURCE.text.contains(&format!("MOST_EXPERTS = {MOST_EXPERTS};")));
        assert!(SOURCE.text.contains(&format!("__launch_bounds__({SUM_THREADS})\n    add_experts")));
    }
}
