//! Queries, keys and values of several kinds of tokens that attend to each other (Esser et al., 2024). libtorch's autograd
//! differentiates them.

use std::{ptr, sync::Arc};

use tch::Tensor;

use super::check::{Args, Engine};
use super::graph::{Asked, differentiable};
use super::{Result, composite};
use crate::Device;
use crate::diffusion_kernels::{self, HeadSizes, Spread};

/// What is made of one kind of tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenKind<'a> {
    /// Queries, keys and values, `[B, N, 3 H D]`.
    pub qkv: &'a Tensor,
    /// The weights `[D]` of the norms of queries and of keys, if they are normed.
    pub norms: Option<[&'a Tensor; 2]>,
}

/// Queries, keys and values of all kinds, the tokens of a kind behind those of the one before: dense `[B, N of all, H, D]`
/// each. Queries and keys are normed by their mean square over a head, as in [`super::rms_norm`].
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn joint_heads(kinds: &[TokenKind], heads: i64, eps: f64) -> Result<[Tensor; 3]> {
    let [first, ..] = kinds else { return composite::joint_heads(kinds, heads, eps) };
    let args = Args::new("joint_heads", first.qkv);
    let [images, _, width] = args.dims("qkv", first.qkv)?;
    let dim = width / (3 * heads);
    let of_kind = |tokens| HeadSizes { images, tokens, heads, dim };
    let Some(Engine::Device(device)) = Engine::of(first.qkv).filter(|_| of_kind(0).fit(args.kind())) else {
        return composite::joint_heads(kinds, heads, eps);
    };
    let mut parts = Vec::with_capacity(kinds.len());
    let mut tokens = 0;
    for kind in kinds {
        let [_, count, _] = args.dims("qkv", kind.qkv)?;
        parts.push(Part::new(args, kind, tokens, of_kind(count))?);
        tokens += count;
    }
    let shape = [images, tokens, heads, dim];
    let all = [args.empty(&shape)?, args.empty(&shape)?, args.empty(&shape)?];
    for part in &parts {
        part.split(args, &*device, eps as f32, &all)?;
    }
    let norms = kinds.iter().flat_map(|kind| kind.norms.into_iter().flatten());
    let inputs: Vec<&Tensor> = kinds.iter().map(|kind| kind.qkv).chain(norms).collect();
    differentiable(&inputs, &all.each_ref(), move |Asked { grads, .. }| {
        let grads: [Tensor; 3] = grads.try_into().expect("three outputs");
        let (mut of_qkv, mut of_norms) = (Vec::new(), Vec::new());
        for part in &parts {
            let (dqkv, of_weights) = part.join(args, &device, eps as f32, &grads)?;
            of_qkv.push(Some(dqkv));
            if part.norms.is_some() {
                of_norms.extend([Some(of_weights.f_get(0)?), Some(of_weights.f_get(1)?)]);
            }
        }
        of_qkv.append(&mut of_norms);
        Ok(of_qkv)
    })?;
    Ok(all)
}

/// A kind of tokens, without a graph.
struct Part {
    qkv: Tensor,
    norms: Option<[Tensor; 2]>,
    /// Of the tokens of all kinds.
    first: i64,
    sizes: HeadSizes,
}

impl Part {
    fn new(args: Args, kind: &TokenKind, first: i64, sizes: HeadSizes) -> Result<Part> {
        let HeadSizes { images, tokens, heads, dim } = sizes;
        let qkv = kind.qkv.f_detach()?.f_contiguous()?;
        args.values("qkv", &qkv, &[images, tokens, 3 * heads * dim])?;
        let norms = match kind.norms {
            Some(norms) => {
                for norm in norms {
                    args.values("norms", norm, &[dim])?;
                }
                let [q, k] = norms.map(Tensor::f_detach);
                Some([q?, k?])
            }
            None => None,
        };
        Ok(Part { qkv, norms, first, sizes })
    }

    /// Those of the norms.
    fn weights(&self) -> [*mut std::ffi::c_void; 2] {
        self.norms.as_ref().map_or([ptr::null_mut(); 2], |norms| norms.each_ref().map(Tensor::data_ptr))
    }

    /// Its rows of a tensor of all kinds.
    fn rows(&self, args: Args, all: &Tensor) -> Result<Spread> {
        let HeadSizes { images, tokens, heads, dim } = self.sizes;
        args.spread("heads", &all.f_narrow(1, self.first, tokens)?, [images, tokens, heads, dim])
    }

    fn split(&self, args: Args, device: &dyn Device, eps: f32, to: &[Tensor; 3]) -> Result<()> {
        let [q, k, v] = to.each_ref().map(|all| self.rows(args, all));
        let to = [q?, k?, v?];
        let qkv = self.qkv.data_ptr();
        // SAFETY: the sizes of all tensors were checked; libtorch takes memory back in the order of its stream.
        args.launched(unsafe {
            diffusion_kernels::split_heads(device, args.kind(), qkv, self.weights(), eps, to, self.sizes)
        })
    }

    /// The gradients of `qkv` and of the norms' weights, `[2, D]`.
    fn join(
        &self,
        args: Args,
        device: &Arc<dyn Device>,
        eps: f32,
        grads: &[Tensor; 3],
    ) -> Result<(Tensor, Tensor)> {
        let [q, k, v] = grads.each_ref().map(|all| self.rows(args, all));
        let from = [q?, k?, v?];
        let dqkv = args.empty(&self.qkv.size())?;
        let of_weights = args.empty(&[2, self.sizes.dim])?;
        let partial = args.empty_floats(&[self.sizes.parts(), 2, self.sizes.dim])?;
        // SAFETY: as in `split`.
        args.launched(unsafe {
            diffusion_kernels::split_heads_backward(
                &**device,
                args.kind(),
                from,
                (self.qkv.data_ptr(), self.weights(), eps),
                partial.data_ptr().cast(),
                (dqkv.data_ptr(), of_weights.data_ptr()),
                self.sizes,
            )
        })?;
        Ok((dqkv, of_weights))
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::super::tests::{PLACES, assert_close, random, tolerance};
    use super::*;

    #[test]
    fn heads_equal_the_plain_formula_forward_and_backward() {
        for &at in PLACES.iter() {
            for (heads, dim, lengths, is_normed) in [
                (3, 64, &[37, 5][..], true),
                (2, 20, &[9], true),
                (1, 128, &[3, 1, 2], true),
                (2, 64, &[4, 4], false),
            ] {
                let what = format!("{heads} heads of {dim}, {lengths:?}, {is_normed}, {at:?}");
                let mut inputs: Vec<Tensor> =
                    lengths.iter().map(|&tokens| random(&[2, tokens, 3 * heads * dim], at)).collect();
                let kinds = inputs.len();
                if is_normed {
                    inputs.extend((0..2 * kinds).map(|i| random(&[dim], at) + i as f64 * 0.1));
                }
                let run = |inputs: &[Tensor], is_plain: bool| {
                    let leaves: Vec<Tensor> =
                        inputs.iter().map(|x| x.detach().set_requires_grad(true)).collect();
                    let of = |kind: usize| TokenKind {
                        qkv: &leaves[kind],
                        norms: is_normed.then(|| [0, 1].map(|i| &leaves[kinds + 2 * kind + i])),
                    };
                    let of: Vec<TokenKind> = (0..kinds).map(of).collect();
                    let function = if is_plain { composite::joint_heads } else { joint_heads };
                    let all = function(&of, heads, 1e-6).unwrap();
                    let terms = all.each_ref().map(|x| {
                        let grad = random(&x.size(), (Kind::Float, at.1)).to_kind(x.kind());
                        // As attention has them: a head's tokens in a row.
                        (x.transpose(1, 2).to_kind(Kind::Float) * grad.transpose(1, 2)).sum(Kind::Float)
                    });
                    let [q, k, v] = &terms;
                    let mut found = Tensor::run_backward(&[q + k + v], &leaves, false, false);
                    found.extend(all);
                    found
                };
                let found = run(&inputs, false);
                let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_kind(Kind::Float)).collect();
                for (index, (found, expected)) in found.iter().zip(run(&wide, true)).enumerate() {
                    assert_close(&format!("{what}, tensor {index}"), found, &expected, tolerance(at.0, 4.0));
                }
                for (found, again) in found.iter().zip(run(&inputs, false)) {
                    assert!(found.equal(&again), "{what}: other bits");
                }
            }
        }
    }
}
