//! Functions of libtorch that it computes in other ways on a host and on an accelerator. In a measurement they take the way of the
//! device that is measured.

use tch::{Kind, Tensor};

use super::{Error, Result};
use crate::{ffi, paper};

/// Attention of `q` `[B, H, N, D]` over `k` and `v` `[B, H, M, D]`: `softmax(q k^T / sqrt(D)) v`, `[B, H, N, D]`. If
/// `is_causal`, a query sees the keys up to its own index. libtorch's autograd differentiates it.
///
/// # Errors
/// libtorch's.
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    let mask = None::<&Tensor>;
    if paper::has_on_host(q) {
        return Ok(Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, mask, None,
        )?
        .0);
    }
    if paper::has(q) {
        let [q, k, v] = [q, k, v].map(ffi::tensor_ptr);
        // SAFETY: live tensors; the shim makes another and gives it away.
        let out = unsafe { ffi::own_tensor(ffi::anyroll_attention_of_device(q, k, v, is_causal.into())) };
        return out.map_err(|error| Error::Kernel { op: "attend", message: error.to_string() });
    }
    Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, None, false)?)
}

/// `x / rms(x) weight` over the last dimension, in the dtype of `x` (Zhang and Sennrich, 2019). libtorch's autograd
/// differentiates it.
///
/// # Errors
/// libtorch's.
pub fn rms_normed(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if !paper::has_on_host(x) || !x.requires_grad() {
        return Ok(x.f_rms_norm(weight.size(), Some(weight), eps)?);
    }
    // libtorch's kernel for hosts has no backward: it composes the norm of these.
    let wide = x.f_to_kind(Kind::Float)?;
    let mean = wide.f_pow_tensor_scalar(2)?.f_mean_dim([-1i64].as_slice(), true, None)?;
    let normed = wide.f_mul(&mean.f_add_scalar(eps)?.f_rsqrt()?)?;
    Ok(normed.f_mul(weight)?.f_to_kind(x.kind())?)
}
