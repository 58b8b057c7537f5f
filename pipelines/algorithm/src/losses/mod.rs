//! Policy losses, a file each. A file has the section that a config writes, with its defaults and ranges, and the formula
//! with its source; the list in `choices!` names it. `docs/reference/algorithms.md` says where systems disagree.
//!
//! The loss of a token is a function of its log-prob l, old log-prob o and advantage A; r = exp(l - o) is its ratio.

mod sequences;

use serde::{Deserialize, Serialize};
use tch::{TchError, Tensor};

use crate::choices::{bound, choices, formula_of};
use crate::range::Range;

pub use sequences::{sequence_means, sequence_sums};

type Result<T> = std::result::Result<T, TchError>;

/// Differences of log-probs are clamped to minus and plus this, since exp overflows.
const MOST_LOG_RATIO: f64 = 20.0;
/// The clamp from above of a sequence's ratio, as verl's.
const MOST_SEQUENCE_LOG_RATIO: f64 = 10.0;

/// The tokens of some sequences, all in a row: each tensor `[M]`.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Log-probs under the policy, with a gradient.
    pub logprobs: &'a Tensor,
    /// Log-probs under the policy before the step's first update.
    pub old_logprobs: &'a Tensor,
    /// Advantages.
    pub advantages: &'a Tensor,
    /// Tokens of each sequence.
    pub lengths: &'a [i64],
}

/// A loss of each token, `[M]`.
#[derive(Debug)]
pub struct Terms {
    /// The loss, with its gradient.
    pub loss: Tensor,
    /// l - o.
    pub log_ratio: Tensor,
    /// The ratio; for a loss of sequences, their sequence's.
    pub ratio: Tensor,
    /// True where the ratio is kept from below, and from above, from moving the policy as it would; `None` for a loss
    /// without bounds, which has no `clip_fraction/*`.
    pub clipped: Option<[Tensor; 2]>,
}

/// A policy loss.
pub trait Loss {
    /// Its name in papers; `None` where a recipe is named after its advantages.
    fn title(&self) -> Option<&'static str>;

    /// Ranges of its section's numbers.
    fn ranges(&self) -> Vec<Range> {
        Vec::new()
    }

    /// True if it has one ratio a sequence, so that advantages may not differ within one.
    fn is_of_sequences(&self) -> bool {
        false
    }

    /// True if its ratios are bounded: then [`Terms::clipped`] says where.
    fn clips(&self) -> bool {
        false
    }

    /// Why it cannot stand beside `rollout_correction`, if it cannot.
    fn refuses_correction(&self) -> Option<&'static str> {
        None
    }

    /// The loss of each token.
    fn terms(&self, tokens: &Tokens) -> Result<Terms>;
}

choices! {
    /// The loss of a token. A ratio is the token's new probability over its old one.
    enum PolicyLoss: dyn Loss {
        /// PPO's: the ratio is clipped where clipping makes the loss larger.
        clipped => Clipped(ClippedConfig),
        /// PPO's clipping with one ratio per sequence: the geometric mean of its tokens'.
        gspo => Gspo(GspoConfig),
        /// The geometric mean of a sequence's ratios, of which each is clipped before.
        gmpo => Gmpo(GmpoConfig),
        /// The log-prob, weighted by the advantage and the clamped ratio, through which no gradient flows.
        cispo => Cispo(CispoConfig),
        /// The log-prob, weighted by the advantage: vanilla policy gradient, without a ratio.
        reinforce => Reinforce,
        /// The ratio behind a soft gate instead of a clip.
        sapo => Sapo(SapoConfig),
        /// The log-prob, weighted by the advantage, and where that is negative by the ratio, at most 1.
        topr => Topr(ToprConfig),
        /// The log-prob, weighted by the advantage and a smooth function of the sequence's ratio, the product of its tokens'.
        vespo => Vespo(VespoConfig),
    }
}

impl Default for PolicyLoss {
    fn default() -> Self {
        Self::Clipped(ClippedConfig::default())
    }
}

impl Tokens<'_> {
    /// l - o.
    fn log_ratio(&self) -> Result<Tensor> {
        self.logprobs.f_sub(self.old_logprobs)
    }

    /// -w A l: a policy gradient with weights through which nothing flows.
    fn weighted(&self, weights: &Tensor) -> Result<Tensor> {
        weights.f_mul(self.advantages)?.f_neg()?.f_mul(self.logprobs)
    }
}

/// exp(l - o), the exponent clamped.
pub fn ratio(log_ratio: &Tensor) -> Result<Tensor> {
    log_ratio.f_clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)?.f_exp()
}

/// exp(mean of `log_ratio` over the token's sequence) (Zheng et al., 2025), in their token form: its gradient is that of
/// the token's own. Summed over a sequence of equal advantages this is the gradient of the sequence's ratio.
fn sequence_ratio(log_ratio: &Tensor, lengths: &[i64]) -> Result<Tensor> {
    let mean = sequence_means(log_ratio, lengths)?;
    let of_token = log_ratio.f_sub(&log_ratio.f_detach()?)?; // 0, with a gradient
    mean.f_add(&of_token)?.f_clamp_max(MOST_SEQUENCE_LOG_RATIO)?.f_exp()
}
