//! The `offline` pipeline: what is learnt from texts that are there beforehand.

use serde::{Deserialize, Serialize};

use super::data::DataConfig;
use super::optimizer::OptimizerConfig;
use super::schema::{CheckpointConfig, WarmupConfig};
use super::steps::{DataEpochs, Steps};

/// Training on texts that are there beforehand: answers to be learnt, or pairs of a better and a worse one.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OfflineConfig {
    /// Where prompts and answers come from, and worse answers where the objective compares.
    pub data: DataConfig,
    /// What is learnt of them. Default sft.
    #[serde(default)]
    pub objective: Objective,
    /// What is learnt of answers that are conversations: with `sft` and `distill` also every message of the assistant's. Default last.
    #[serde(default)]
    pub turns: Turns,
    /// Supervised steps on the answers, the better ones, before the first step. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup: Option<WarmupConfig>,
    /// Optimizer steps: a number, or `{data_epochs: 3}` for as many as cover passes over the data.
    pub steps: Steps<DataEpochs>,
    /// Records of a step, over all ranks; a multiple of the number of ranks. Where the objective compares, a record is two
    /// sequences of `strategy.micro_batch_size`.
    pub batch_size: usize,
    /// The optimizer; its schedule counts steps.
    pub optimizer: OptimizerConfig,
    /// When and on how many held-out records the policy is evaluated, if it is.
    #[serde(default)]
    pub evaluation: OfflineEvaluationConfig,
    /// When the run is saved. `keep_best` keeps the policy with the least `eval/loss`.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// What is learnt of a record. c and r are the log-probs of the better (chosen) and the worse (rejected) answer, sums over
/// their tokens; c' and r' are those of the frozen reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// The answers themselves: the mean of -log-prob over their tokens.
    #[default]
    Sft,
    /// Direct preference optimization (Rafailov et al., 2023).
    Dpo(DpoConfig),
    /// Identity preference optimization (Azar et al., 2023): pairs to be a fixed margin apart.
    Ipo(IpoConfig),
    /// Sequence likelihood calibration by a hinge (Zhao et al., 2023), against a reference.
    Hinge(HingeConfig),
    /// Simple preference optimization (Meng et al., 2024): no reference, and lengths divided out.
    Simpo(SimpoConfig),
    /// Odds ratio preference optimization (Hong et al., 2024): no reference, beside the answers themselves.
    Orpo(OrpoConfig),
    /// Kahneman-Tversky optimization (Ethayarajh et al., 2024): answers that are desirable or not, each by itself, against how far
    /// the policy has moved from the reference.
    Kto(JudgedConfig),
    /// The unpaired form of anchored preference optimization (D'Oosterlinck et al., 2024): as KTO, against the reference itself.
    ApoZeroUnpaired(JudgedConfig),
    /// What a teacher, `roles.reference.path`, would say in the place of each token of the answers, with all odds (Hinton et al.,
    /// 2015; Agarwal et al., 2024).
    Distill(DistillConfig),
    /// A number for each answer, such that the better one's is larger (Bradley and Terry, 1952): the model becomes the one of
    /// the reward `model`, and c and r are its numbers.
    RewardModel(RewardModelObjective),
}

/// Which messages of a conversation are learnt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Turns {
    /// The last one.
    #[default]
    Last,
    /// All that are the assistant's, each behind those before it.
    All,
}

impl Objective {
    /// Whether it compares a better answer with a worse one.
    pub fn compares(&self) -> bool {
        !matches!(self, Self::Sft | Self::Distill(_)) && self.judged().is_none()
    }

    /// Whether, and how, it learns from a teacher.
    pub fn distills(&self) -> Option<&DistillConfig> {
        match self {
            Self::Distill(distill) => Some(distill),
            _ => None,
        }
    }

    /// Whether, and how, answers are judged each by itself.
    pub fn judged(&self) -> Option<&JudgedConfig> {
        match self {
            Self::Kto(judged) | Self::ApoZeroUnpaired(judged) => Some(judged),
            _ => None,
        }
    }

    /// Whether it asks how far the policy is from the reference.
    pub fn estimates_kl(&self) -> bool {
        matches!(self, Self::Kto(_))
    }

    /// Answers of a record that it reads.
    pub fn answers(&self) -> usize {
        if self.compares() { 2 } else { 1 }
    }

    /// Whether what is trained gives a text a number, in place of the next token's odds.
    pub fn is_of_numbers(&self) -> bool {
        matches!(self, Self::RewardModel(_))
    }

    /// Whether it asks another model what an answer's log-prob is: what the policy was before training, unless it is told.
    pub fn compares_with_reference(&self) -> bool {
        matches!(self, Self::Dpo(_) | Self::Ipo(_) | Self::Hinge(_)) || self.judged().is_some()
    }

    /// Whether it asks another model anything.
    pub fn has_reference(&self) -> bool {
        self.compares_with_reference() || self.distills().is_some()
    }
}

/// -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), with h = (c - c') - (r - r').
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DpoConfig {
    /// How much the distance from the reference counts; above 0. Default 0.1.
    pub beta: f64,
    /// e, the part of the pairs that may be the wrong way around, 0 to below 0.5 (cDPO). Default 0.
    pub label_smoothing: f64,
    /// Adds so many times what `sft` is of the better answers (RPO), so that they do not become unlikely as well. Default 0.
    pub sft_weight: f64,
}

impl Default for DpoConfig {
    fn default() -> Self {
        Self { beta: 0.1, label_smoothing: 0.0, sft_weight: 0.0 }
    }
}

/// (h - 1 / (2 beta))², with h as in DPO, but of means over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct IpoConfig {
    /// The margin is 1 / (2 beta); above 0. Default 0.1.
    pub beta: f64,
}

impl Default for IpoConfig {
    fn default() -> Self {
        Self { beta: 0.1 }
    }
}

/// max(0, 1 - beta h), with h as in DPO.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct HingeConfig {
    /// Pairs count until they are 1 / beta apart; above 0. Default 0.1.
    pub beta: f64,
}

impl Default for HingeConfig {
    fn default() -> Self {
        Self { beta: 0.1 }
    }
}

/// -log sigmoid(beta (c - r) - gamma), of means over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SimpoConfig {
    /// How much the difference counts; above 0. Default 2.
    pub beta: f64,
    /// The margin, 0 or above. Default 1.
    pub gamma: f64,
}

impl Default for SimpoConfig {
    fn default() -> Self {
        Self { beta: 2.0, gamma: 1.0 }
    }
}

/// What `sft` is of the better answers, plus -beta log sigmoid(log odds(c) - log odds(r)), with odds(x) = p / (1 - p) of
/// the mean's probability p = exp(x).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OrpoConfig {
    /// How much the odds count, the paper's lambda; above 0. Default 0.1.
    pub beta: f64,
}

impl Default for OrpoConfig {
    fn default() -> Self {
        Self { beta: 0.1 }
    }
}

/// w (1 - sigmoid(beta (c - c' - z))) of a desirable answer, and w (1 - sigmoid(beta (z - r + r'))) of another, each w its
/// weight. z is in `kto` an estimate of the KL divergence from the reference, without a gradient: the mean over a step's
/// prompts, each with the answer of the record before it, of what the answer's log-prob gained, 0 at least. In
/// `apo_zero_unpaired` it is 0.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct JudgedConfig {
    /// How much the distance from the reference counts; above 0. Default 0.1.
    pub beta: f64,
    /// How much a desirable answer counts; 0 or above. Default 1.
    pub desirable_weight: f64,
    /// How much one counts that is not; 0 or above. Default 1.
    pub undesirable_weight: f64,
}

impl Default for JudgedConfig {
    fn default() -> Self {
        Self { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0 }
    }
}

/// Of each token of the answers beta KL(q || m) + (1 - beta) KL(p || m), with p the policy's distribution, q the teacher's and
/// m = beta q + (1 - beta) p; at the ends KL(q || p) at 0 and KL(p || q) at 1, as in TRL. A mean over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DistillConfig {
    /// From 0, forward KL, which covers all that the teacher may say, to 1, reverse KL, which keeps to what it is likely to.
    /// Default 0.5.
    pub beta: f64,
    /// What the logits of both are divided by; above 0. Default 1.
    pub temperature: f64,
    /// Adds so many times what `sft` is of the answers. Default 0.
    pub sft_weight: f64,
}

impl Default for DistillConfig {
    fn default() -> Self {
        Self { beta: 0.5, temperature: 1.0, sft_weight: 0.0 }
    }
}

/// -log sigmoid(c - r) + center (c + r)².
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardModelObjective {
    /// How much numbers are held around 0, since only their differences count otherwise (Eisenstein et al., 2023); 0 or
    /// above. Default 0.
    pub center: f64,
}

/// When and on how many held-out records the policy is evaluated; before and after training always.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OfflineEvaluationConfig {
    /// Steps from one evaluation to the next. Default 25.
    pub every: u64,
    /// Held-out records, the same ones each time. 0: there is no evaluation, and of files no record is held out unless they say
    /// so. Default 500, or all if they are fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<usize>,
    /// Of their prompts the policy also completes so many, greedily and up to the longest answer, for people to read;
    /// `eval/exact` is the part that equals the answer. At most as many as have one; 0 for none. Default 16, or all if they are
    /// fewer; a reward model completes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completions: Option<usize>,
}

impl Default for OfflineEvaluationConfig {
    fn default() -> Self {
        Self { every: 25, prompts: None, completions: None }
    }
}

impl OfflineEvaluationConfig {
    /// How many of a config that is resolved.
    ///
    /// # Panics
    /// If it is not.
    pub fn prompts(&self) -> usize {
        self.prompts.expect("a config that is resolved says how many")
    }
}

impl OfflineConfig {
    /// How many prompts an evaluation completes, of as many as it could.
    pub fn completions_of(&self, most: usize) -> usize {
        const FEW: usize = 16;
        let own = if self.objective.is_of_numbers() { 0 } else { FEW.min(most) };
        self.evaluation.completions.unwrap_or(own)
    }

    /// The same of a config that is resolved.
    ///
    /// # Panics
    /// If it is not.
    pub fn completions(&self) -> usize {
        self.evaluation.completions.expect("a config that is resolved says how many")
    }
}
