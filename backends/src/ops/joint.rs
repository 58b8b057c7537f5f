//! Queries, keys and values of several kinds of tokens that attend to each other (Esser et al., 2024). libtorch's autograd
//! differentiates them.

use std::ptr;

use tch::Tensor;

use super::check::{Args, Engine};
use super::graph::{Asked, differentiable};
use super::{Result, composite};
use crate::Device;
use crate::kernels::{
    self,
    diffusion::{HeadSizes, Spread},
};

/// Projections of one kind of tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenKind<'a> {
    /// Queries, keys and values, `[B, N, 3 H D]`.
    pub qkv: &'a Tensor,
    /// The weights `[D]` of the norms of queries and of keys, if they are normed.
    pub norms: Option<[&'a Tensor; 2]>,
}

/// Queries, keys and values of all kinds, the tokens of each kind after those of the previous: dense `[B, N of all, H, D]`
/// each. Queries and keys are normed by their mean square over a head, as in [`super::rms_norm`].
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn joint_heads(kinds: &[TokenKind], heads: i64, eps: f64) -> Result<[Tensor; 3]> {
    let [first, ..] = kinds else { return composite::joint_heads(kinds, heads, eps) };
    let args = Args::new("joint_heads", first.qkv);
    let [images, _, width] = args.dims("qkv", first.qkv)?;
    if heads < 1 || width % (3 * heads) != 0 {
        return Err(args.refuse("heads", format!("is {heads}, must divide a third of the {width} of `qkv`")));
    }
    let dim = width / (3 * heads);
    let mut sizes = Vec::with_capacity(kinds.len());
    for TokenKind { qkv, norms } in kinds {
        let [_, tokens, _] = args.dims("qkv", qkv)?;
        args.matches_values("qkv", qkv, &[images, tokens, width])?;
        for norm in norms.iter().flatten() {
            args.matches_values("norms", norm, &[dim])?;
        }
        sizes.push(HeadSizes { images, tokens, heads, dim });
    }
    let Some(Engine::Device(device)) = Engine::of(first.qkv).filter(|_| sizes[0].fit(args.kind())) else {
        return composite::joint_heads(kinds, heads, eps);
    };
    let mut parts = Vec::with_capacity(kinds.len());
    let mut tokens = 0;
    for (kind, sizes) in kinds.iter().zip(sizes) {
        parts.push(Part::new(args, kind, tokens, sizes)?);
        tokens += sizes.tokens;
    }
    let shape = [images, tokens, heads, dim];
    let all = [args.empty(&shape)?, args.empty(&shape)?, args.empty(&shape)?];
    for part in &parts {
        part.split(&*device, eps as f32, &all)?;
    }
    let norms = kinds.iter().flat_map(|kind| kind.norms.into_iter().flatten());
    let inputs: Vec<&Tensor> = kinds.iter().map(|kind| kind.qkv).chain(norms).collect();
    differentiable(&inputs, &all.each_ref(), move |Asked { grads, wanted }| {
        let dense = |grad: Option<Tensor>| match grad {
            Some(grad) if grad.stride()[3] == 1 => Ok(grad),
            Some(grad) => Ok(grad.f_contiguous()?),
            None => Ok::<_, super::Error>(args.empty(&shape)?.f_zero_()?),
        };
        let grads = grads.into_iter().map(dense).collect::<Result<Vec<Tensor>>>()?;
        let grads: [Tensor; 3] = grads.try_into().expect("three outputs");
        let mut wanted_norms = wanted[parts.len()..].chunks(2);
        let (mut of_qkv, mut of_norms) = (Vec::new(), Vec::new());
        for part in &parts {
            let wanted =
                part.norms.is_some() && wanted_norms.next().is_some_and(|wanted| wanted.contains(&true));
            let (dqkv, of_weights) = part.backward(&*device, eps as f32, &grads, wanted)?;
            of_qkv.push(Some(dqkv));
            match of_weights {
                Some(of_weights) => of_norms.extend([Some(of_weights.f_get(0)?), Some(of_weights.f_get(1)?)]),
                None => of_norms.extend(part.norms.iter().flatten().map(|_| None)),
            }
        }
        of_qkv.append(&mut of_norms);
        Ok(of_qkv)
    })?;
    Ok(all)
}

/// A kind of tokens, without a graph.
struct Part {
    args: Args,
    qkv: Tensor,
    norms: Option<[Tensor; 2]>,
    /// Index of its first token among those of all kinds.
    first: i64,
    sizes: HeadSizes,
}

impl Part {
    fn new(args: Args, kind: &TokenKind, first: i64, sizes: HeadSizes) -> Result<Part> {
        let qkv = kind.qkv.f_detach()?.f_contiguous()?;
        let norms = match kind.norms {
            Some(norms) => {
                let [q, k] = norms.map(|norm| norm.f_detach()?.f_contiguous());
                Some([q?, k?])
            }
            None => None,
        };
        Ok(Part { args, qkv, norms, first, sizes })
    }

    /// Addresses of the norms' weights.
    fn weights(&self) -> [*mut std::ffi::c_void; 2] {
        self.norms.as_ref().map_or([ptr::null_mut(); 2], |norms| norms.each_ref().map(Tensor::data_ptr))
    }

    /// Its rows of a tensor of all kinds.
    fn rows(&self, all: &Tensor) -> Result<Spread> {
        let HeadSizes { images, tokens, heads, dim } = self.sizes;
        self.args.spread("heads", &all.f_narrow(1, self.first, tokens)?, [images, tokens, heads, dim])
    }

    fn split(&self, device: &dyn Device, eps: f32, to: &[Tensor; 3]) -> Result<()> {
        let [q, k, v] = to.each_ref().map(|all| self.rows(all));
        let to = [q?, k?, v?];
        let qkv = self.qkv.data_ptr();
        // SAFETY: the sizes of all tensors were checked; libtorch takes memory back in the order of its stream.
        self.args.launched(unsafe {
            kernels::diffusion::split_heads(
                device,
                self.args.kind(),
                qkv,
                self.weights(),
                eps,
                to,
                self.sizes,
            )
        })
    }

    /// The gradient of `qkv`, and where it is `wanted` that of the norms' weights, `[2, D]`.
    fn backward(
        &self,
        device: &dyn Device,
        eps: f32,
        grads: &[Tensor; 3],
        wanted: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Part { args, sizes, .. } = *self;
        let [q, k, v] = grads.each_ref().map(|all| self.rows(all));
        let from = [q?, k?, v?];
        let dqkv = args.empty(&self.qkv.size())?;
        let of_norms = if wanted {
            Some((args.empty_floats(&[sizes.parts(), 2, sizes.dim])?, args.empty(&[2, sizes.dim])?))
        } else {
            None
        };
        let of_weights = of_norms.as_ref().map(|(partial, sum)| (partial.data_ptr().cast(), sum.data_ptr()));
        // SAFETY: as in `split`.
        args.launched(unsafe {
            kernels::diffusion::split_heads_backward(
                device,
                args.kind(),
                from,
                (self.qkv.data_ptr(), self.weights(), eps),
                dqkv.data_ptr(),
                of_weights,
                sizes,
            )
        })?;
        Ok((dqkv, of_norms.map(|(_, sum)| sum)))
    }
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;
    use tch::Kind;

    use super::super::tests::{PLACES, autograd_of, random, tolerance};
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
                    let [q, k, v] = &all;
                    let grad = |x: &Tensor| random(&x.size(), (Kind::Float, at.1)).to_kind(x.kind());
                    let sum = |x: Tensor| x.to_kind(Kind::Float).sum(Kind::Float);
                    // As attention may have them: a head's tokens in a row, and values across; and one for all.
                    let of_q = sum(q.transpose(1, 2) * grad(q).transpose(1, 2));
                    let across = q.size().iter().product::<i64>();
                    let of_k =
                        sum(k.transpose(1, 3).contiguous().view([across]) * grad(&k.reshape([across])));
                    let loss = of_q + of_k + sum(v.shallow_clone());
                    let mut found = autograd_of(&loss, &leaves);
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
