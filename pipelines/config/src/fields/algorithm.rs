//! The fields of `algorithm:`: estimators of advantages, and policy losses.
//!
//! `docs/reference/algorithms.md` has the formula and the source of each, and the differences between systems.

use anyroll_algorithm::Range;
use serde::{Deserialize, Serialize};

use super::rlvr::RlvrConfig;
use super::schema::is_default;
use crate::document::Section;
pub use anyroll_algorithm::{advantages::Scale, advantages::sections::*, losses::sections::*, sections::*};

/// Advantages and the policy loss.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlgorithmConfig {
    /// Mean and standard deviation that rewards are normalized by, before `reward_clip`. Default: no normalization.
    pub reward_norm: RewardNormConfig,
    /// Bound that rewards are clamped to, from minus to plus this value, after `reward_norm`; above 0. Default: no
    /// clamp.
    pub reward_clip: Option<f64>,
    /// Tokens that earn an environment's rewards. Default `episode`.
    pub credit: TurnCredit,
    /// Estimator of advantages. Default `grpo`.
    pub advantage: Advantage,
    /// Shifts and scales advantages to mean 0 and variance 1 over all tokens of the step, on all ranks. With
    /// `reinforce` this is REINFORCE++, with `grpo: {scale: none}` its baseline form. Default false.
    pub whiten_advantages: bool,
    /// Bound that advantages are clamped to, from minus to plus this value, after whitening; above 0. Default: no
    /// clamp.
    pub advantage_clip: Option<f64>,
    /// Loss of a token. Default `clipped`.
    pub loss: PolicyLoss,
    /// Reduction of the losses of tokens to one number. Default `token_mean`.
    pub aggregation: Aggregation,
    /// Weight of the KL divergence from the reference; 0 or above, and 0 needs no reference. Default 0.
    pub kl_coef: f64,
    /// Place of the KL divergence: the loss, the reward or the advantage. Default `loss`.
    pub kl_in: KlTerm,
    /// Weight of the entropy bonus in the loss; 0 or above, and 0 adds no bonus. Default 0.
    pub entropy_coef: f64,
    /// Weight of the loss that balances a mixture's experts, `transformers`' own, in RL steps and the warm-up; 0 or above, and 0
    /// adds no loss. Default 0.
    #[serde(skip_serializing_if = "is_default")]
    pub router_aux_loss_coef: f64,
    /// Source of the behaviour log-probs in the ratio's denominator. Default `rollout`, and `recompute` with
    /// `rollout.weights: fp8`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub old_logprobs: Option<OldLogprobs>,
    /// Importance weights that correct the difference between sampling and training. Default `none`, and `truncate` with
    /// `rollout.weights: fp8` and `old_logprobs: recompute`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout_correction: Option<RolloutCorrection>,
    /// Threshold on a sequence's mean of rollout log-prob minus new log-prob; above 0. In a sequence above the
    /// threshold, tokens of a negative advantage are masked out of the policy loss. Default: no mask.
    pub off_policy_mask: Option<f64>,
    /// Fraction of a step's tokens that the policy loss is restricted to; above 0 and below 1. The tokens are those of
    /// the largest entropy before the step's first update. The fraction needs `old_logprobs: recompute`. Default: all
    /// tokens.
    pub top_entropy: Option<f64>,
}

/// Tokens that earn the rewards that an environment gives for turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnCredit {
    /// All tokens of the episode: the sum of the rewards is the sample's reward.
    #[default]
    Episode,
    /// The tokens of the turn and of the turns before it: each turn is credited with its return, the rewards from that
    /// turn on. The choice `turns` needs `rollout.environment`.
    Turns(TurnsConfig),
}

/// Discount between turns.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TurnsConfig {
    /// Weight of a reward one turn later, whatever the turns' lengths; from 0, each turn for itself, to 1. Default 1.
    pub gamma: f64,
}

impl Default for TurnsConfig {
    fn default() -> Self {
        Self { gamma: 1.0 }
    }
}

impl TurnCredit {
    /// Returns the weight of a reward one turn later; `None` where the episode's sum counts.
    pub fn gamma(self) -> Option<f64> {
        match self {
            Self::Episode => None,
            Self::Turns(TurnsConfig { gamma }) => Some(gamma),
        }
    }
}

/// Reduction of the losses of tokens to one number. Counts are those of the mini-batch over all ranks. The gradient
/// therefore does not depend on the split into micro-batches and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// The mean over all completion tokens.
    #[default]
    TokenMean,
    /// The mean over completions of the mean over the tokens of each completion.
    SeqMeanTokenMean,
    /// The mean over completions of the sum over the tokens of each completion.
    SeqMeanTokenSum,
    /// The same as `seq_mean_token_sum`, divided by a constant length, as in Dr. GRPO.
    SeqMeanTokenSumNorm(NormConfig),
}

/// Divisor of a sum over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NormConfig {
    /// Length in tokens; 1 or above. Usually `rollout.max_new_tokens`.
    pub length: usize,
}

/// Place of the KL divergence from the reference.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlTerm {
    /// A term of the loss, with its own gradient.
    Loss(KlLossConfig),
    /// Subtracted from the reward of each token, before advantages; by the estimator `k1`.
    Reward(KlRewardConfig),
    /// Subtracted from the advantage of each token alone, without a return over later tokens; by the estimator `k1`.
    /// With a teacher as the reference, this subtraction is on-policy distillation.
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
    /// Estimator of the divergence. Default `k3`.
    pub estimator: KlEstimator,
    /// Multiplies the divergence by the token's ratio, gradient included. The estimate is then unbiased for samples of
    /// the behaviour policy, as in DeepSeek-V3.2. Default false.
    pub weighted: bool,
}

/// Estimators of the KL divergence from samples (Schulman, 2020), with d = log-prob minus the reference's log-prob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// d. The expected gradient of this loss is 0 on-policy.
    K1,
    /// d² / 2. On-policy, the expected gradient of this loss is that of the divergence.
    K2,
    /// exp(-d) + d - 1, which is never negative and has low variance.
    #[default]
    K3,
}

/// KL divergence subtracted from the reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlRewardConfig {
    /// Controller that changes `kl_coef` after each step, so that the divergence approaches a target. Default: a
    /// constant `kl_coef`.
    pub adaptive: Option<AdaptiveKlConfig>,
}

/// The controller of Ziegler et al. (2019), section 2.2.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdaptiveKlConfig {
    /// Target of the divergence per token; above 0. Default 0.1.
    pub target: f64,
    /// Number of completions after which the coefficient may have changed by a fifth; above 0. Default 10000.
    pub horizon: f64,
}

impl Default for AdaptiveKlConfig {
    fn default() -> Self {
        Self { target: 0.1, horizon: 10_000.0 }
    }
}

/// Source of the behaviour log-probs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogprobs {
    /// Log-probs from sampling, which need no forward pass.
    #[default]
    Rollout,
    /// Log-probs of the training forward, from one more pass before the first update of a step.
    Recompute,
}

/// Importance weights of the policy loss: the probability in training over the probability in sampling. The weights
/// need `old_logprobs: recompute`, and do not enter the denominators of the aggregation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutCorrection {
    /// No weights.
    #[default]
    None,
    /// Truncated importance sampling, TIS: weights above a bound are set to the bound.
    Truncate(TruncateConfig),
    /// Masked importance sampling, MIS: weights out of bounds are set to 0.
    Mask(MaskConfig),
}

/// Truncated weights.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TruncateConfig {
    /// Level at which weights are computed. Default `token`.
    pub level: Level,
    /// Largest weight; above 0. Default 2.
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
    /// Level at which weights are computed. Default `sequence`.
    pub level: Level,
    /// Smallest weight that is not masked; 0 or above. Default 0.
    pub min: f64,
    /// Largest weight that is not masked; above `min`. Default 3.
    pub max: f64,
}

impl Default for MaskConfig {
    fn default() -> Self {
        Self { level: Level::Sequence, min: 0.0, max: 3.0 }
    }
}

/// Level at which importance weights are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// A weight for each token.
    Token,
    /// The product over a sequence's tokens, shared by all tokens of the sequence.
    Sequence,
    /// The geometric mean over a sequence's tokens, shared by all tokens of the sequence.
    Geometric,
}

/// Reports numbers out of their ranges. `at` is the section of the numbers.
fn validate_ranges(ranges: Vec<Range>, at: &Section) {
    for Range { field, value, holds, range, given } in ranges {
        at.given(given.as_slice()).number(field, value, holds, range);
    }
}

impl AlgorithmConfig {
    /// Reports invalid combinations of the algorithm with the fields of `rlvr`. `at` is the pipeline.
    pub(super) fn validate(&self, rlvr: &RlvrConfig, at: &Section) {
        let (pipeline, at) = (at, at.below("algorithm"));
        self.validate_reward_norm(&pipeline.given(&["group_size"]).below("algorithm"), rlvr.group_size);
        self.validate_decoupled(&at);
        self.validate_credit(&at, rlvr);
        let Self { kl_coef, entropy_coef, router_aux_loss_coef, .. } = *self;
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
        at.number("router_aux_loss_coef", router_aux_loss_coef, router_aux_loss_coef >= 0.0, "0 or above");
        validate_ranges(loss.ranges(), &at.below("loss").below(self.loss.name()));
        rlvr.rollout_correction().validate(&at.below("rollout_correction"));
        let threshold = self.off_policy_mask.unwrap_or(1.0);
        at.number("off_policy_mask", threshold, threshold > 0.0, "above 0");
        let share = self.top_entropy.unwrap_or(0.5);
        let holds = share > 0.0 && share < 1.0;
        at.number("top_entropy", share, holds, "above 0 and below 1, or leave it out");
        self.validate_as_a_whole(&at, rlvr);
    }

    /// Reports rewards for which the requested normalization is impossible.
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

    /// Reports a second normalization of reward terms that are already normalized each by itself.
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

    /// Reports turns that cannot have separate credit.
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

    /// Reports fields that have no effect together, or another effect than their names say.
    fn validate_as_a_whole(&self, at: &Section, rlvr: &RlvrConfig) {
        let of_logprobs = at.given(&["old_logprobs"]);
        let recomputes = rlvr.old_logprobs() == OldLogprobs::Recompute;
        of_logprobs.ensure(
            rlvr.rollout_correction() == RolloutCorrection::None || recomputes,
            "rollout_correction",
            "all its weights are 1, since the old log-probs are those of the rollout",
            "write `old_logprobs: recompute` beside it",
        );
        of_logprobs.ensure(
            self.top_entropy.is_none() || recomputes,
            "top_entropy",
            "entropies before the first update of a step come with log-probs that are computed again",
            "write `old_logprobs: recompute` beside it",
        );
        let refused = self.loss.formula().refuses_correction();
        at.ensure(
            rlvr.rollout_correction() == RolloutCorrection::None || refused.is_none(),
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

    /// Returns true if advantages differ between the tokens of a sequence.
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
