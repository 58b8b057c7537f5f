use tch::Tensor;

/// The result of [`super::logprobs`], each fp32 `[M]`.
#[derive(Debug)]
pub struct LogProbs {
    /// Log-probability of each target.
    pub logprobs: Tensor,
    /// Entropy of each row's distribution, in nats.
    pub entropy: Tensor,
    /// log(sum(exp(logits / temperature))) of each row.
    pub lse: Tensor,
}
