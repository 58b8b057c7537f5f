//! The fields of `algorithm:`: how rewards become advantages, and advantages a loss.
//!
//! `docs/reference/algorithms.md` has the formula and the source of each, and where other systems disagree.

use serde::{Deserialize, Serialize};

use super::optimizer::OptimizerConfig;
pub use crate::algorithm::{losses::sections::*, sections::*};

/// Advantages and the policy loss.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlgorithmConfig {
    /// What rewards are shifted and scaled by, before anything else. Default: not.
    pub reward_norm: RewardNormConfig,
    /// Rewards are clamped to minus and plus this, after `reward_norm`; above 0. Default: not.
    pub reward_clip: Option<f64>,
    /// Which tokens an environment's rewards are earned by. Default `episode`.
    pub credit: TurnCredit,
    /// How a reward becomes an advantage. Default `grpo`.
    pub advantage: Advantage,
    /// Shift and scale advantages to mean 0 and variance 1 over all tokens of the step, on all ranks.
    /// With `reinforce` this is REINFORCE++, with `grpo: {scale: none}` its baseline form. Default false.
    pub whiten_advantages: bool,
    /// Advantages are clamped to minus and plus this, after whitening; above 0. Default: not.
    pub advantage_clip: Option<f64>,
    /// The loss of a token. Default `clipped`.
    pub loss: PolicyLoss,
    /// How a loss per token becomes one number. Default `token_mean`.
    pub aggregation: Aggregation,
    /// Weight of the KL divergence to the frozen reference; 0 needs no reference. Default 0.
    pub kl_coef: f64,
    /// Where the KL divergence goes. Default `loss`.
    pub kl_in: KlTerm,
    /// Weight of the entropy bonus in the loss; 0 is none. Default 0.
    pub entropy_coef: f64,
    /// Whose log-probs the ratio of probabilities compares with. Default `rollout`.
    pub old_logprobs: OldLogprobs,
    /// Weights against the difference between sampling and training. Default `none`.
    pub rollout_correction: RolloutCorrection,
    /// Tokens of a negative advantage move nothing where their sequence's mean of rollout less new log-prob is above this; above
    /// 0. Default: they do.
    pub off_policy_mask: Option<f64>,
    /// The policy loss is of this share of a step's tokens alone, those of the largest entropy before its first update; above 0 and
    /// below 1. It needs `old_logprobs: recompute`. Default: of all.
    pub top_entropy: Option<f64>,
}

/// Which tokens the rewards are earned by that an environment gives for turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnCredit {
    /// All of the episode's: their sum is the sample's reward.
    #[default]
    Episode,
    /// Those of the turn and before it: each turn has what is earned from it on. It needs `rollout.environment`.
    Turns(TurnsConfig),
}

/// How far a turn is praised for what comes after it.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TurnsConfig {
    /// Weight of what is earned one turn later, whatever the turns' lengths; from 0, each turn for itself, to 1. Default 1.
    pub gamma: f64,
}

impl Default for TurnsConfig {
    fn default() -> Self {
        Self { gamma: 1.0 }
    }
}

impl TurnCredit {
    /// The weight of what is earned one turn later; `None` where the episode's sum counts.
    pub fn gamma(self) -> Option<f64> {
        match self {
            Self::Episode => None,
            Self::Turns(TurnsConfig { gamma }) => Some(gamma),
        }
    }
}

/// The policy's model under a head that gives a value for each token, in place of a distribution. It begins with the
/// policy's weights before the first RL step and a head of 0, and is trained on a step's completions in as many epochs
/// and mini-batches, its loss aggregated as the policy's is.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CriticConfig {
    /// A value moves by at most this from where it was before the step, as far as its loss is concerned; above 0.
    /// Default: as far as it likes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_clip: Option<f64>,
    /// First RL steps in which only the critic is trained. Default 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Its optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
}

/// How a loss per token becomes one number. Counts are those of the mini-batch over all ranks, so how it is split
/// does not change the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// The mean over all completion tokens.
    #[default]
    TokenMean,
    /// The mean over completions of the mean over each one's tokens.
    SeqMeanTokenMean,
    /// The mean over completions of the sum over each one's tokens.
    SeqMeanTokenSum,
    /// As `seq_mean_token_sum`, over a constant length: Dr. GRPO's.
    SeqMeanTokenSumNorm(NormConfig),
}

/// The constant that a sum over tokens is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NormConfig {
    /// Tokens; 1 or above. Usually `rollout.max_new_tokens`.
    pub length: usize,
}

/// Where the KL divergence to the reference goes.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlTerm {
    /// Into the loss, with a gradient of its own.
    Loss(KlLossConfig),
    /// Off the reward of each token, before advantages; by the estimator `k1`.
    Reward(KlRewardConfig),
    /// Off the advantage of each token itself, whatever comes after it; by the estimator `k1`. With a teacher as the reference
    /// it is on-policy distillation.
    Advantage,
}

impl Default for KlTerm {
    fn default() -> Self {
        Self::Loss(KlLossConfig::default())
    }
}

/// KL divergence in the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlLossConfig {
    /// Default `k3`.
    pub estimator: KlEstimator,
    /// Multiply it by the token's ratio, gradient and all: then it is unbiased for samples of the old policy, as DeepSeek-V3.2
    /// has it. Default false.
    pub weighted: bool,
}

/// Estimators of the KL divergence from samples (Schulman, 2020), with d = log-prob less the reference's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// d. As a loss its expected gradient is 0 on-policy.
    K1,
    /// d² / 2, whose gradient on-policy is that of the divergence.
    K2,
    /// exp(-d) + d - 1: never negative, and of low variance.
    #[default]
    K3,
}

/// KL divergence off the reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlRewardConfig {
    /// Moves `kl_coef` after each step, so that the divergence nears a target. Default: it stays.
    pub adaptive: Option<AdaptiveKlConfig>,
}

/// The controller of Ziegler et al. (2019), section 2.2.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdaptiveKlConfig {
    /// The divergence per token that is aimed at; above 0. Default 0.1.
    pub target: f64,
    /// Completions after which the coefficient may have changed by a fifth; above 0. Default 10000.
    pub horizon: f64,
}

impl Default for AdaptiveKlConfig {
    fn default() -> Self {
        Self { target: 0.1, horizon: 10_000.0 }
    }
}

/// Whose log-probs the ratio compares with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogprobs {
    /// Those that sampling gave: no pass of their own.
    #[default]
    Rollout,
    /// Those of the training forward, from one more pass before the first update of a step.
    Recompute,
}

/// Weights of the policy loss by how much likelier training finds what sampling drew. They need
/// `old_logprobs: recompute`, and multiply no denominator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutCorrection {
    /// No weights.
    #[default]
    None,
    /// Truncated importance sampling, TIS: weights above a bound are set to it.
    Truncate(TruncateConfig),
    /// Masked importance sampling, MIS: what is out of bounds weighs 0.
    Mask(MaskConfig),
}

/// Truncated weights.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TruncateConfig {
    /// What has a weight. Default `token`.
    pub level: Level,
    /// The largest weight; above 0. Default 2.
    pub max: f64,
}

impl Default for TruncateConfig {
    fn default() -> Self {
        Self { level: Level::Token, max: 2.0 }
    }
}

/// Masked weights.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MaskConfig {
    /// What has a weight. Default `sequence`.
    pub level: Level,
    /// The least weight that counts; 0 or above. Default 0.
    pub min: f64,
    /// The largest weight that counts; above `min`. Default 3.
    pub max: f64,
}

impl Default for MaskConfig {
    fn default() -> Self {
        Self { level: Level::Sequence, min: 0.0, max: 3.0 }
    }
}

/// What has an importance weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Each token its own.
    Token,
    /// The product over a sequence's tokens, for all of them.
    Sequence,
    /// The geometric mean over a sequence's tokens, for all of them.
    Geometric,
}
