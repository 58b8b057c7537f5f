//! The fields of `algorithm:`: how rewards become advantages, and advantages a loss.
//!
//! `docs/reference/algorithms.md` has the formula and the source of each, and where other systems disagree.

use anyroll_algorithm::Range;
use serde::{Deserialize, Serialize};

use super::rlvr::RlvrConfig;
use crate::document::Section;
pub use anyroll_algorithm::{advantages::Scale, advantages::sections::*, losses::sections::*, sections::*};

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

/// Reports numbers out of their ranges. `at` is their section.
fn validate_ranges(ranges: Vec<Range>, at: &Section) {
    for Range { field, value, holds, range, given } in ranges {
        at.given(given.as_slice()).number(field, value, holds, range);
    }
}

impl AlgorithmConfig {
    /// Reports what cannot be, of the algorithm of `rlvr`. `at` is the pipeline.
    pub(super) fn validate(&self, rlvr: &RlvrConfig, at: &Section) {
        let (pipeline, at) = (at, at.below("algorithm"));
        self.validate_reward_norm(&pipeline.given(&["group_size"]).below("algorithm"), rlvr.group_size);
        self.validate_decoupled(&at);
        self.validate_credit(&at, rlvr);
        let Self { kl_coef, entropy_coef, .. } = *self;
        at.number("kl_coef", kl_coef, kl_coef >= 0.0, "0 or above");
        for (name, clip) in [("reward_clip", self.reward_clip), ("advantage_clip", self.advantage_clip)] {
            at.number(name, clip.unwrap_or(1.0), clip.is_none_or(|clip| clip > 0.0), "above 0");
        }
        let (advantage, loss) = (self.advantage.formula(), self.loss.formula());
        validate_ranges(advantage.ranges(), &at.below("advantage").below(self.advantage.name()));
        at.given(&["kl_coef"]).ensure(
            self.advantage != Advantage::None || kl_coef > 0.0,
            "advantage",
            "without advantages and without a KL divergence there is nothing to learn",
            "write `kl_coef: 1` and `kl_in: advantage` beside it, and a teacher in `roles.reference.path`",
        );
        if let Aggregation::SeqMeanTokenSumNorm(norm) = self.aggregation {
            at.positive("aggregation.seq_mean_token_sum_norm.length", norm.length);
        }
        at.number("entropy_coef", entropy_coef, entropy_coef >= 0.0, "0 or above");
        validate_ranges(loss.ranges(), &at.below("loss").below(self.loss.name()));
        self.rollout_correction.validate(&at.below("rollout_correction"));
        let threshold = self.off_policy_mask.unwrap_or(1.0);
        at.number("off_policy_mask", threshold, threshold > 0.0, "above 0");
        let share = self.top_entropy.unwrap_or(0.5);
        let holds = share > 0.0 && share < 1.0;
        at.number("top_entropy", share, holds, "above 0 and below 1, or leave it out");
        self.validate_as_a_whole(&at);
    }

    /// Reports rewards that cannot be normalized as they are to be.
    fn validate_reward_norm(&self, at: &Section, group_size: usize) {
        let RewardNormConfig { mean, std } = self.reward_norm;
        let normalizes = [mean, std].iter().any(|over| *over != Over::None);
        at.ensure(
            !(normalizes && self.advantage == Advantage::Remax),
            "reward_norm",
            "`remax` compares with the reward of the greedy completion as it is",
            "leave it out, or write another advantage",
        );
        at.ensure(
            group_size >= 2 || ![mean, std].contains(&Over::Group),
            "reward_norm",
            "a group of 1 has no mean to differ from",
            "write `batch` or `running`",
        );
    }

    /// Reports terms that are to be normalized each by itself and by something else as well.
    fn validate_decoupled(&self, at: &Section) {
        if !matches!(self.advantage, Advantage::Gdpo(_)) {
            return;
        }
        for (name, is_set) in [
            ("reward_norm", self.reward_norm != RewardNormConfig::default()),
            ("reward_clip", self.reward_clip.is_some()),
            ("kl_in", matches!(self.kl_in, KlTerm::Reward(_))),
        ] {
            at.ensure(
                !is_set,
                name,
                "it is of the sum of the reward's terms, and `gdpo` normalizes each of them before",
                "leave it out, or write `advantage: grpo`",
            );
        }
    }

    /// Reports turns that cannot have credit of their own.
    fn validate_credit(&self, at: &Section, rlvr: &RlvrConfig) {
        let Some(gamma) = self.credit.gamma() else { return };
        at.number("credit.turns.gamma", gamma, (0.0..=1.0).contains(&gamma), "from 0 to 1");
        let help = "write `credit: episode`, or leave it out";
        let no_turns = "there are no turns without `rollout.environment`";
        let has_turns = rlvr.rollout.environment.is_some();
        let is_read = at.root().is_read("pipeline.rlvr.rollout.environment");
        if !at.when(is_read).ensure(has_turns, "credit", no_turns, help) {
            return;
        }
        let why = self.advantage.formula().refuses_turns();
        let others = "write `grpo`, `rloo`, `reinforce` or `gae`, or `credit: episode`";
        if !at.ensure(why.is_none(), "advantage", why.unwrap_or_default(), others) {
            return;
        }
        let normalizes = self.reward_norm != RewardNormConfig::default();
        for (name, is_set) in [("reward_norm", normalizes), ("reward_clip", self.reward_clip.is_some())] {
            let message = "it is of what whole completions earn, and `credit: turns` asks for that of turns";
            at.ensure(!is_set, name, message, "leave it out, or write `credit: episode`");
        }
    }

    /// Reports fields that come to nothing together, or to something else than they say.
    fn validate_as_a_whole(&self, at: &Section) {
        let of_logprobs = at.given(&["old_logprobs"]);
        of_logprobs.ensure(
            self.rollout_correction == RolloutCorrection::None || self.old_logprobs == OldLogprobs::Recompute,
            "rollout_correction",
            "all its weights are 1, since the old log-probs are those of the rollout",
            "write `old_logprobs: recompute` beside it",
        );
        of_logprobs.ensure(
            self.top_entropy.is_none() || self.old_logprobs == OldLogprobs::Recompute,
            "top_entropy",
            "entropies before the first update of a step come with log-probs that are computed again",
            "write `old_logprobs: recompute` beside it",
        );
        let refused = self.loss.formula().refuses_correction();
        at.ensure(
            self.rollout_correction == RolloutCorrection::None || refused.is_none(),
            "rollout_correction",
            refused.unwrap_or_default(),
            "leave it out, and write `old_logprobs: rollout`: then they are of the whole difference",
        );
        self.validate_kl(&at.given(&["kl_in", "advantage"]));
        let of_tokens = at.given(&["credit", "advantage", "kl_in"]);
        of_tokens.ensure(
            !(self.varies_over_tokens() && self.loss.formula().is_of_sequences()),
            "loss",
            "it has one ratio a sequence, and these advantages differ from token to token",
            "write `gamma: 1`, `kl_in: loss` and `credit: episode`, or an advantage of another kind",
        );
    }

    /// Reports a KL term without a coefficient.
    fn validate_kl(&self, at: &Section) {
        match self.kl_in {
            KlTerm::Loss(_) => {}
            KlTerm::Advantage => {
                at.ensure(
                    self.kl_coef > 0.0,
                    "kl_coef",
                    "at 0 nothing is taken off the advantages",
                    "write a number above 0, such as 1, or leave `kl_in` out",
                );
            }
            KlTerm::Reward(KlRewardConfig { adaptive }) => {
                if let Some(AdaptiveKlConfig { target, horizon }) = adaptive {
                    at.number("kl_in.reward.adaptive.target", target, target > 0.0, "above 0");
                    at.number("kl_in.reward.adaptive.horizon", horizon, horizon > 0.0, "above 0");
                }
                at.ensure(
                    self.kl_coef > 0.0,
                    "kl_coef",
                    "at 0 nothing is taken off the reward, and no controller moves it",
                    "write a number above 0, such as 0.001, or leave `kl_in` out",
                );
            }
        }
    }

    /// Whether the tokens of a sequence have advantages of their own.
    fn varies_over_tokens(&self) -> bool {
        let in_reward = matches!(self.kl_in, KlTerm::Reward(_));
        match self.advantage {
            _ if self.credit.gamma().is_some() => true,
            Advantage::Reinforce(ReinforceConfig { gamma }) if gamma < 1.0 || in_reward => true,
            Advantage::Gae(_) => true,
            _ => self.kl_in == KlTerm::Advantage,
        }
    }
}

impl RolloutCorrection {
    fn validate(self, at: &Section) {
        match self {
            Self::None => {}
            Self::Truncate(TruncateConfig { max, .. }) => {
                at.number("truncate.max", max, max > 0.0, "above 0");
            }
            Self::Mask(MaskConfig { min, max, .. }) => {
                at.number("mask.min", min, min >= 0.0, "0 or above");
                at.given(&["mask.min"]).number("mask.max", max, max > min, "above `min`");
            }
        }
    }
}
