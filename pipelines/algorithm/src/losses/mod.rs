//! Policy losses, one in each file. A file has a section of the config, with its defaults and ranges, and a formula
//! with its source. The list in `choices!` names the file. `docs/reference/algorithms.md` describes the differences
//! between systems.
//!
//! The loss of a token is a function of its log-prob l, its behaviour log-prob o and its advantage A. The ratio is r =
//! exp(l - o).

mod sequences;

use serde::{Deserialize, Serialize};
use tch::{TchError, Tensor};

use crate::choices::{bound, choices, formula_of};
use crate::range::Range;

pub use sequences::{sequence_means, sequence_sums};

type Result<T> = std::result::Result<T, TchError>;

/// Bound that differences of log-probs are clamped to, from minus to plus this value, since exp overflows.
const MOST_LOG_RATIO: f64 = 20.0;
/// Upper bound that a sequence's log-ratio is clamped to, as in verl.
const MOST_SEQUENCE_LOG_RATIO: f64 = 10.0;

/// The tokens of some sequences, one sequence after another; each tensor is `[M]`.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Log-probs under the policy, with a gradient.
    pub logprobs: &'a Tensor,
    /// Behaviour log-probs, from before the step's first update.
    pub old_logprobs: &'a Tensor,
    /// Advantages.
    pub advantages: &'a Tensor,
    /// Number of tokens of each sequence.
    pub lengths: &'a [i64],
}

/// The losses of tokens, `[M]`.
#[derive(Debug)]
pub struct Terms {
    /// The loss, with its gradient.
    pub loss: Tensor,
    /// Log-ratio l - o.
    pub log_ratio: Tensor,
    /// The ratio; for a loss of sequences, the ratio of the token's sequence.
    pub ratio: Tensor,
    /// True where a bound from below, or from above, limits the ratio's gradient; `None` for a loss without bounds,
    /// which has no `clip_fraction/*`.
    pub clipped: Option<[Tensor; 2]>,
}

/// A policy loss.
pub trait Loss {
    /// Name of the loss in papers; `None` where a recipe is named after its advantages.
    fn title(&self) -> Option<&'static str>;

    /// Ranges of the numbers of the loss's section.
    fn ranges(&self) -> Vec<Range> {
        Vec::new()
    }

    /// Returns true if the loss has one ratio for each sequence, so that advantages may not differ within a sequence.
    fn is_of_sequences(&self) -> bool {
        false
    }

    /// Returns true if the loss has clipped ratios: [`Terms::clipped`] then marks the tokens.
    fn clips(&self) -> bool {
        false
    }

    /// Reason why `rollout_correction` cannot be combined with the loss; `None` if it can.
    fn refuses_correction(&self) -> Option<&'static str> {
        None
    }

    /// Computes the loss of each token.
    fn terms(&self, tokens: &Tokens) -> Result<Terms>;
}

choices! {
    /// Loss of a token. A ratio is the policy probability of the token over its behaviour probability.
    enum PolicyLoss: dyn Loss {
        /// PPO's loss: the ratio is clipped where clipping increases the loss.
        clipped => Clipped(ClippedConfig),
        /// PPO's clipping with one ratio for each sequence: the geometric mean of the tokens' ratios.
        gspo => Gspo(GspoConfig),
        /// The geometric mean of a sequence's ratios, each clipped before the mean.
        gmpo => Gmpo(GmpoConfig),
        /// The log-prob, weighted by the advantage and the clamped ratio, without a gradient through the ratio.
        cispo => Cispo(CispoConfig),
        /// The log-prob, weighted by the advantage: vanilla policy gradient, without a ratio.
        reinforce => Reinforce,
        /// The ratio with a soft gate instead of a clip.
        sapo => Sapo(SapoConfig),
        /// The log-prob, weighted by the advantage. For a negative advantage the ratio, at most 1, is another weight.
        topr => Topr(ToprConfig),
        /// The log-prob, weighted by the advantage and a smooth function of the sequence's ratio, the product of its
        /// tokens' ratios.
        vespo => Vespo(VespoConfig),
    }
}

impl Default for PolicyLoss {
    fn default() -> Self {
        Self::Clipped(ClippedConfig::default())
    }
}

impl Tokens<'_> {
    /// Computes the log-ratio l - o.
    fn log_ratio(&self) -> Result<Tensor> {
        self.logprobs.f_sub(self.old_logprobs)
    }

    /// -w A l: a policy gradient with weights that have no gradient.
    fn weighted(&self, weights: &Tensor) -> Result<Tensor> {
        weights.f_mul(self.advantages)?.f_neg()?.f_mul(self.logprobs)
    }
}

/// exp(l - o), with the exponent clamped.
pub fn ratio(log_ratio: &Tensor) -> Result<Tensor> {
    log_ratio.f_clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)?.f_exp()
}

/// exp(mean of `log_ratio` over the token's sequence) (Zheng et al., 2025), in the token form: the gradient is that of
/// the token's log-ratio. Summed over a sequence of equal advantages, the gradient is that of the sequence's ratio.
fn sequence_ratio(log_ratio: &Tensor, lengths: &[i64]) -> Result<Tensor> {
    let mean = sequence_means(log_ratio, lengths)?;
    let of_token = log_ratio.f_sub(&log_ratio.f_detach()?)?; // 0, with a gradient
    mean.f_add(&of_token)?.f_clamp_max(MOST_SEQUENCE_LOG_RATIO)?.f_exp()
}
