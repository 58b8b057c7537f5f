//! Log-probabilities of target tokens and the entropy of their distributions, from logits, in one pass.

use tch::{Kind, Tensor};

use super::check::{Args, has_kernel};
use super::{Result, composite, kernels};

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
    if !has_kernel(logits) {
        return composite::logprobs(logits, targets, temperature);
    }
    let args = Args("logprobs");
    let [rows, vocab] = args.dims("logits", logits)?;
    let empty = || Tensor::f_empty([rows], (Kind::Float, logits.device()));
    let result = LogProbs { logprobs: empty()?, entropy: empty()?, lse: empty()? };
    // SAFETY: the sizes of all tensors and the range of the targets were checked, and all outlive the call.
    let code = unsafe {
        kernels::anyroll_logprobs(
            args.floats("logits", logits, &[rows, vocab])?,
            args.indices("targets", targets, &[rows], vocab)?,
            (1.0 / temperature) as f32,
            args.floats("logprobs", &result.logprobs, &[rows])?,
            args.floats("entropy", &result.entropy, &[rows])?,
            args.floats("lse", &result.lse, &[rows])?,
            rows,
            vocab,
        )
    };
    kernels::check(args.0, code)?;
    Ok(result)
}

/// Backward of [`logprobs`]: replaces the logits by their gradient.
///
/// `saved` is `(lse, entropy)` of the forward; `dlogprobs` and, if the loss reads entropies, `dentropy` are
/// fp32 `[M]`. With `p` the softmax and `h` the entropy of a row, the gradient of logit `j` is
/// `(dlogprob * (1[j = target] - p_j) - dentropy * p_j * (log p_j + h)) / temperature`.
///
/// # Errors
/// As [`logprobs`].
pub fn logprobs_backward_(
    logits: &mut Tensor,
    targets: &Tensor,
    temperature: f64,
    saved: (&Tensor, &Tensor),
    dlogprobs: &Tensor,
    dentropy: Option<&Tensor>,
) -> Result<()> {
    if !has_kernel(logits) {
        return composite::logprobs_backward_(logits, targets, temperature, saved, dlogprobs, dentropy);
    }
    let args = Args("logprobs_backward_");
    let [rows, vocab] = args.dims("logits", logits)?;
    let dentropy = dentropy.map(|dentropy| args.floats("dentropy", dentropy, &[rows])).transpose()?;
    // SAFETY: the sizes of all tensors and the range of the targets were checked, `logits` is borrowed
    // mutably, and all outlive the call.
    let code = unsafe {
        kernels::anyroll_logprobs_backward(
            args.floats("logits", logits, &[rows, vocab])?,
            args.indices("targets", targets, &[rows], vocab)?,
            (1.0 / temperature) as f32,
            args.floats("saved", saved.0, &[rows])?,
            args.floats("saved", saved.1, &[rows])?,
            args.floats("dlogprobs", dlogprobs, &[rows])?,
            dentropy.map_or(std::ptr::null(), |pointer| pointer.cast_const()),
            rows,
            vocab,
        )
    };
    kernels::check(args.0, code)
}
