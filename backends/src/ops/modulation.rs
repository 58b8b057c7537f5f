//! Modulated norms and gated sums on the residual stream of image transformers, with one shift, scale and gate for all tokens
//! of an image (adaLN-Zero; Peebles and Xie, 2023). libtorch's autograd differentiates them.

use std::sync::Arc;

use tch::Tensor;

use super::check::{Args, Engine};
use super::graph::{Asked, differentiable};
use super::{Result, composite};
use crate::Device;
use crate::kernels::{
    self,
    diffusion::{Images, RowSizes},
};

/// `norm(x) (1 + scale) + shift`, where norm is over channels, without weights (Ba et al., 2016).
///
/// `x` is `[B, N, C]`, whose images may lie apart; `shift` and `scale` are `[B, 1, C]`, and may be views whose rows lie
/// apart. Returns x, for what else is made of it, whose gradient so comes in one pass with the norm's; and the result, dense,
/// of the shape and dtype of `x`.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn modulated_norm(x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let rows = Rows::of(Args::new("modulated_norm", x), "x", x)?;
    rows.check_images([("shift", shift), ("scale", scale)])?;
    let Some(device) = rows.device(x) else {
        return Ok((x.shallow_clone(), composite::modulated_norm(x, shift, scale, eps)?));
    };
    let [from, shift_rows, scale_rows] = [x, shift, scale].map(dense_rows);
    let [from, shift_rows, scale_rows] = [from?, shift_rows?, scale_rows?];
    let Rows { args, sizes } = rows;
    let (same, y) = (from.f_detach()?, args.empty(&rows.shape())?);
    let stats = args.empty_floats(&[sizes.images, sizes.tokens, 2])?;
    let inputs = (
        rows.of_tokens("x", &from)?,
        rows.of_images("shift", &shift_rows)?,
        rows.of_images("scale", &scale_rows)?,
    );
    let made = (y.data_ptr(), stats.data_ptr().cast());
    // SAFETY: the sizes of all tensors were checked or made here; libtorch takes memory back in the order of its stream.
    args.launched(unsafe {
        kernels::diffusion::modulated_norm(&*device, args.kind(), inputs, eps as f32, made, sizes)
    })?;
    differentiable(&[x, shift, scale], &[&same, &y], move |Asked { grads, .. }| {
        let [below, Some(dy)] = &grads[..] else {
            return Ok(vec![grads.into_iter().next().flatten(), None, None]);
        };
        let (below, dy) = (below.as_ref().map(dense_rows).transpose()?, dense_rows(dy)?);
        let dx = args.empty(&rows.shape())?;
        let of_modulation = args.empty(&[sizes.images, 2, sizes.channels])?;
        let partial = args.empty_floats(&[sizes.images, sizes.parts(), 2, sizes.channels])?;
        let inputs = (
            rows.of_tokens("dy", &dy)?,
            rows.of_tokens("x", &from)?,
            below.as_ref().map_or(Ok(Images::NULL), |below| rows.of_tokens("below", below))?,
            rows.of_images("scale", &scale_rows)?,
        );
        // SAFETY: as above.
        args.launched(unsafe {
            kernels::diffusion::modulated_norm_backward(
                &*device,
                args.kind(),
                inputs,
                stats.data_ptr().cast(),
                partial.data_ptr().cast(),
                (dx.data_ptr(), of_modulation.data_ptr()),
                sizes,
            )
        })?;
        let [of_shift, of_scale] = [0, 1].map(|which| of_modulation.f_narrow(1, which, 1));
        Ok(vec![Some(dx), Some(of_shift?), Some(of_scale?)])
    })?;
    Ok((same, y))
}

/// A sum `x + y gate`: `x` is `[B, N, C]`, whose images may lie apart, `y` `[B, N, C]`, `gate` `[B, 1, C]`, a view whose rows
/// may lie apart.
#[derive(Clone, Copy, Debug)]
pub struct GatedSum<'a> {
    /// The residual stream.
    pub x: &'a Tensor,
    /// The values that are added.
    pub y: &'a Tensor,
    /// Factor of `y`.
    pub gate: &'a Tensor,
}

/// `x + y gate`, dense, of the shape and dtype of `x`.
///
/// # Errors
/// The same as [`modulated_norm`].
pub fn gated_add(x: &Tensor, y: &Tensor, gate: &Tensor) -> Result<Tensor> {
    gated_sums(None, &[GatedSum { x, y, gate }])
}

/// The tokens `before` `[B, M, C]`, followed by those of each sum, in one dense tensor.
///
/// # Errors
/// The same as [`modulated_norm`].
pub fn gated_sums_behind(before: &Tensor, sums: &[GatedSum]) -> Result<Tensor> {
    gated_sums(Some(before), sums)
}

fn gated_sums(before: Option<&Tensor>, sums: &[GatedSum]) -> Result<Tensor> {
    let Some(like) = before.or(sums.first().map(|sum| sum.x)) else {
        return composite::gated_sums(before, sums);
    };
    let args = Args::new("gated_sums_behind", like);
    let rows = Rows::of(args, "before", like)?;
    let first = before.map_or(0, |_| rows.sizes.tokens);
    let mut of_sums = Vec::with_capacity(sums.len());
    for &GatedSum { x, y, gate } in sums {
        let tokens = Rows::of(args, "x", x)?.sizes.tokens;
        let of_sum = Rows { args, sizes: RowSizes { tokens, ..rows.sizes } };
        args.matches_values("x", x, &of_sum.shape())?;
        args.matches_values("y", y, &of_sum.shape())?;
        of_sum.check_images([("gate", gate)])?;
        of_sums.push(of_sum);
    }
    let Some(device) = rows.device(like) else {
        return composite::gated_sums(before, sums);
    };
    let mut tokens = first;
    let mut parts = Vec::with_capacity(sums.len());
    for (sum, rows) in sums.iter().zip(of_sums) {
        let (y, gate) = (sum.y.f_detach()?.f_contiguous()?, dense_rows(sum.gate)?);
        parts.push(GatedPart { rows, first: tokens, y, gate });
        tokens += rows.sizes.tokens;
    }
    let out = args.empty(&[rows.sizes.images, tokens, rows.sizes.channels])?;
    if let Some(before) = before {
        out.f_narrow(1, 0, first)?.f_copy_(&before.f_detach()?)?;
    }
    for (part, sum) in parts.iter().zip(sums) {
        part.add(&*device, sum.x, &out)?;
    }
    let has_before = before.is_some();
    let inputs = before.into_iter().chain(sums.iter().flat_map(|sum| [sum.x, sum.y, sum.gate]));
    differentiable(&inputs.collect::<Vec<_>>(), &[&out], move |Asked { mut grads, wanted }| {
        let Some(grad) = grads.pop().flatten() else { return Ok(wanted.iter().map(|_| None).collect()) };
        let mut found = Vec::new();
        if has_before {
            found.push(Some(grad.f_narrow(1, 0, first)?));
        }
        for part in &parts {
            found.extend(part.backward(&*device, &grad)?.map(Some));
        }
        Ok(found)
    })?;
    Ok(out)
}

/// A sum without a graph, and where its tokens are among all.
struct GatedPart {
    rows: Rows,
    first: i64,
    y: Tensor,
    gate: Tensor,
}

impl GatedPart {
    fn of(&self, all: &Tensor) -> Result<Tensor> {
        Ok(all.f_narrow(1, self.first, self.rows.sizes.tokens)?)
    }

    fn add(&self, device: &dyn Device, x: &Tensor, out: &Tensor) -> Result<()> {
        let Rows { args, sizes } = self.rows;
        let (x, out) = (dense_rows(x)?, self.of(out)?);
        let inputs = (
            self.rows.of_tokens("x", &x)?,
            args.values("y", &self.y, &self.rows.shape())?,
            self.rows.of_images("gate", &self.gate)?,
        );
        let out = self.rows.of_tokens("out", &out)?;
        // SAFETY: as in `modulated_norm`.
        args.launched(unsafe { kernels::diffusion::gated_add(device, args.kind(), inputs, out, sizes) })
    }

    /// The gradients of x, y and the gate from that of all tokens.
    fn backward(&self, device: &dyn Device, grad: &Tensor) -> Result<[Tensor; 3]> {
        let Rows { args, sizes } = self.rows;
        let dx = self.of(grad)?;
        let dout = dense_rows(&dx)?;
        let dy = args.empty(&self.rows.shape())?;
        let of_gate = args.empty(&[sizes.images, 1, sizes.channels])?;
        let partial = args.empty_floats(&[sizes.images, sizes.parts(), sizes.channels])?;
        let inputs = (
            self.rows.of_tokens("dout", &dout)?,
            args.values("y", &self.y, &self.rows.shape())?,
            self.rows.of_images("gate", &self.gate)?,
        );
        // SAFETY: as in `modulated_norm`.
        args.launched(unsafe {
            kernels::diffusion::gated_add_backward(
                device,
                args.kind(),
                inputs,
                partial.data_ptr().cast(),
                (dy.data_ptr(), of_gate.data_ptr()),
                sizes,
            )
        })?;
        Ok([dx, dy, of_gate])
    }
}

/// The checks of rows `[B, N, C]`.
#[derive(Clone, Copy)]
struct Rows {
    args: Args,
    sizes: RowSizes,
}

impl Rows {
    /// The rows of a tensor.
    fn of(args: Args, argument: &'static str, x: &Tensor) -> Result<Rows> {
        let [images, tokens, channels] = args.dims(argument, x)?;
        Ok(Rows { args, sizes: RowSizes { images, tokens, channels } })
    }

    /// Who has kernels for them where `x` lies, if anybody.
    fn device(self, x: &Tensor) -> Option<Arc<dyn Device>> {
        match Engine::of(x) {
            Some(Engine::Device(device)) if self.sizes.fit(x.kind()) => Some(device),
            _ => None,
        }
    }

    /// Checks that tensors have a row for each image.
    fn check_images<const N: usize>(self, tensors: [(&'static str, &Tensor); N]) -> Result<()> {
        let expected = [self.sizes.images, 1, self.sizes.channels];
        tensors
            .into_iter()
            .try_for_each(|(argument, tensor)| self.args.matches_values(argument, tensor, &expected))
    }

    fn shape(self) -> [i64; 3] {
        [self.sizes.images, self.sizes.tokens, self.sizes.channels]
    }

    /// A row for each token.
    fn of_tokens(self, argument: &'static str, tensor: &Tensor) -> Result<Images> {
        self.args.images(argument, tensor, self.shape())
    }

    /// A row for each image.
    fn of_images(self, argument: &'static str, tensor: &Tensor) -> Result<Images> {
        self.args.images(argument, tensor, [self.sizes.images, 1, self.sizes.channels])
    }
}

/// The values of `[B, N, C]`, without a graph, where the tokens of an image are dense rows: a copy if they are not.
fn dense_rows(x: &Tensor) -> Result<Tensor> {
    let x = x.f_detach()?;
    let (size, strides) = (x.size(), x.stride());
    let is_dense = size.len() == 3 && strides[2] == 1 && (size[1] == 1 || strides[1] == size[2]);
    Ok(if is_dense { x } else { x.f_contiguous()? })
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;
    use tch::Kind;

    use super::super::tests::{PLACES, autograd_of, random, tolerance};
    use super::*;

    /// Values and gradients of `function`, and those of `plain` in fp32, on inputs that are parts of wider tensors.
    fn compare(
        what: &str,
        inputs: &[Tensor],
        function: impl Fn(&[Tensor]) -> Tensor,
        plain: impl Fn(&[Tensor]) -> Tensor,
    ) {
        let run = |inputs: &[Tensor], of: &dyn Fn(&[Tensor]) -> Tensor| {
            let leaves: Vec<Tensor> = inputs.iter().map(|x| x.detach().set_requires_grad(true)).collect();
            let out = of(&leaves);
            // The gradient comes from a wider tensor, too.
            let joined = Tensor::cat(&[&out.narrow(1, 0, 1), &out], 1);
            let grad = random(&joined.size(), (Kind::Float, inputs[0].device())).to_kind(out.kind());
            let loss = (joined.to_kind(Kind::Float) * grad).sum(Kind::Float);
            let mut found = autograd_of(&loss, &leaves);
            found.push(out);
            found
        };
        let kind = inputs[0].kind();
        let found = run(inputs, &function);
        let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_kind(Kind::Float)).collect();
        for (index, (found, expected)) in found.iter().zip(run(&wide, &plain)).enumerate() {
            assert_eq!(found.kind(), kind);
            assert_close(&format!("{what}, tensor {index}"), found, &expected, tolerance(kind, 4.0));
        }
        for (found, again) in found.iter().zip(run(inputs, &function)) {
            assert!(found.equal(&again), "{what}: other bits");
        }
    }

    #[test]
    fn arguments_that_do_not_fit_are_refused() {
        let at = (Kind::Float, tch::Device::Cpu);
        let (x, row) = (random(&[2, 3, 4], at), random(&[2, 1, 4], at));
        let error = |result: Result<Tensor>| result.unwrap_err().to_string();
        let norm =
            |shift: &Tensor, scale: &Tensor| error(modulated_norm(&x, shift, scale, 1e-6).map(|(_, y)| y));
        assert!(norm(&x, &row).contains("`shift` has shape [2, 3, 4], expected [2, 1, 4]"));
        assert!(norm(&row, &row.to_kind(Kind::Double)).contains("`scale` is (Double, Cpu)"));
        assert!(error(gated_add(&x, &row, &row)).contains("`y` has shape [2, 1, 4], expected [2, 3, 4]"));
        let sum = GatedSum { x: &x, y: &x, gate: &row };
        let narrow = random(&[2, 1, 3], at);
        assert!(error(gated_sums_behind(&narrow, &[sum])).contains("`x` has shape"));
        let empty = x.narrow(1, 0, 0);
        let nothing = GatedSum { x: &empty, y: &empty, gate: &row };
        assert_eq!(gated_sums_behind(&x, &[nothing, sum]).unwrap().size(), [2, 6, 4]);
    }

    #[test]
    fn norms_and_sums_equal_the_plain_formulas_forward_and_backward() {
        for &at in PLACES.iter() {
            for [images, tokens, channels] in
                [[2, 37, 64], [3, 1, 7], [1, 16, 130], [2, 50, 1537], [1, 5, 1536], [2, 3, 2560]]
            {
                let what = format!("{images} images of {tokens} tokens of {channels}, {at:?}");
                let whole = random(&[images, tokens + 2, channels], at);
                // Added values lie where no pack begins.
                let added = random(&[images * tokens * channels + 1], at) * 0.5;
                let y = added.narrow(0, 1, images * tokens * channels).view([images, tokens, channels]);
                let x = whole.narrow(1, 1, tokens);
                let of_image = random(&[images, 1, 3 * channels], at) * 0.3;
                let [shift, scale, gate] = [0, 1, 2].map(|i| of_image.narrow(2, i * channels, channels));
                compare(
                    &format!("norm, {what}"),
                    &[x.shallow_clone(), shift, scale],
                    |of| {
                        let (x, y) = modulated_norm(&of[0], &of[1], &of[2], 1e-6).unwrap();
                        x * 0.5 + y
                    },
                    |of| &of[0] * 0.5 + composite::modulated_norm(&of[0], &of[1], &of[2], 1e-6).unwrap(),
                );
                compare(
                    &format!("sum, {what}"),
                    &[x, y, gate, whole],
                    |of| {
                        let sum = gated_add(&of[0], &of[1], &of[2]).unwrap();
                        let sums = [
                            GatedSum { x: &sum, y: &of[1], gate: &of[2] },
                            GatedSum { x: &of[0], y: &of[1], gate: &of[2] },
                        ];
                        gated_sums_behind(&of[3], &sums).unwrap()
                    },
                    |of| {
                        let add = |x: &Tensor| x + &of[1] * &of[2];
                        Tensor::cat(&[of[3].shallow_clone(), add(&add(&of[0])), add(&of[0])], 1)
                    },
                );
            }
        }
    }
}
