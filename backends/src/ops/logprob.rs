//! Log-probabilities of target tokens and the entropy of their distributions, from logits, in one pass.

use std::ptr;

use tch::Tensor;

use super::check::{Args, Engine, is_narrow_on_host};
use super::{Result, composite, cpu_kernels};
use crate::kernels;

/// The result of [`logprobs`], each fp32 `[M]`.
#[derive(Debug)]
pub struct LogProbs {
    /// Log-probability of each target.
    pub logprobs: Tensor,
    /// Entropy of each row's distribution, in nats.
    pub entropy: Tensor,
    /// log(sum(exp(logits / temperature))) of each row, which the backward needs.
    pub lse: Tensor,
}

/// Scores `targets`, int64 `[M]`, under softmax(`logits` / `temperature`); `logits` is dense `[M, V]`.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit or a target outside of the vocabulary, or libtorch's
/// error.
pub fn logprobs(logits: &Tensor, targets: &Tensor, temperature: f64) -> Result<LogProbs> {
    if is_narrow_on_host(logits) {
        return logprobs(&logits.f_to_kind(tch::Kind::Float)?, targets, temperature);
    }
    let Some(engine) = Engine::of(logits) else { return composite::logprobs(logits, targets, temperature) };
    let args = Args::new("logprobs", logits);
    let [rows, vocab] = args.dims("logits", logits)?;
    let empty = || args.empty_floats(&[rows]);
    let result = LogProbs { logprobs: empty()?, entropy: empty()?, lse: empty()? };
    let logits = args.values("logits", logits, &[rows, vocab])?;
    let targets = args.indices("targets", targets, &[rows], vocab)?;
    let inverse_temperature = (1.0 / temperature) as f32;
    let to = [&result.logprobs, &result.entropy, &result.lse].map(|tensor| tensor.data_ptr().cast());
    // SAFETY: the sizes of all tensors and on a CPU the range of the targets were checked, and all outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => {
                let [logprobs, entropy, lse] = to;
                args.ran(cpu_kernels::anyroll_logprobs(
                    logits.cast(),
                    targets,
                    inverse_temperature,
                    logprobs,
                    entropy,
                    lse,
                    rows,
                    vocab,
                ))?;
            }
            Engine::Device(device) => args.launched(kernels::model::logprobs(
                &*device,
                args.kind(),
                logits,
                targets,
                inverse_temperature,
                to,
                [rows, vocab],
            ))?,
        }
    }
    Ok(result)
}

/// Backward of [`logprobs`]: replaces the logits by their gradient.
///
/// `saved` is `(lse, entropy)` of the forward; `dlogprobs` and, if the loss reads entropies, `dentropy` are
/// fp32 `[M]`. With `p` the softmax and `h` the entropy of a row, the gradient of logit `j` is
/// `(dlogprob * (1[j = target] - p_j) - dentropy * p_j * (log p_j + h)) / temperature`.
///
/// # Errors
/// The same as [`logprobs`].
pub fn logprobs_backward_(
    logits: &mut Tensor,
    targets: &Tensor,
    temperature: f64,
    saved: (&Tensor, &Tensor),
    dlogprobs: &Tensor,
    dentropy: Option<&Tensor>,
) -> Result<()> {
    let Some(engine) = Engine::of(logits) else {
        return composite::logprobs_backward_(logits, targets, temperature, saved, dlogprobs, dentropy);
    };
    let args = Args::new("logprobs_backward_", logits);
    let [rows, vocab] = args.dims("logits", logits)?;
    let logits = args.values("logits", logits, &[rows, vocab])?;
    let targets = args.indices("targets", targets, &[rows], vocab)?;
    let inverse_temperature = (1.0 / temperature) as f32;
    let of_row = |argument, tensor| args.floats(argument, tensor, &[rows]);
    let (lse, entropy) = (of_row("saved", saved.0)?, of_row("saved", saved.1)?);
    let dlogprobs = of_row("dlogprobs", dlogprobs)?;
    let dentropy = dentropy.map(|dentropy| of_row("dentropy", dentropy)).transpose()?;
    let dentropy = dentropy.unwrap_or(ptr::null_mut());
    // SAFETY: the sizes of all tensors and on a CPU the range of the targets were checked, `logits` is borrowed
    // mutably, and all outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => args.ran(cpu_kernels::anyroll_logprobs_backward(
                logits.cast(),
                targets,
                inverse_temperature,
                lse,
                entropy,
                dlogprobs,
                dentropy,
                rows,
                vocab,
            )),
            Engine::Device(device) => args.launched(kernels::model::logprobs_backward(
                &*device,
                args.kind(),
                logits,
                targets,
                inverse_temperature,
                [lse, entropy, dlogprobs, dentropy],
                [rows, vocab],
            )),
        }
    }
}
