//! The `offline` pipeline: what is learnt from texts that are there beforehand.

use serde::{Deserialize, Serialize};

use super::data::{DataConfig, LongPrompts};
use super::optimizer::OptimizerConfig;
use super::schema::{CheckpointConfig, Config, ModelConfig, WarmupConfig};
use super::stage::ZeroStage;
use super::steps::{DataEpochs, Steps};
use crate::document::Section;

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

impl OfflineConfig {
    /// How many prompts an evaluation completes, of as many as it could.
    pub fn completions_of(&self, most: usize) -> usize {
        const FEW: usize = 16;
        let own = if self.objective.is_of_numbers() { 0 } else { FEW.min(most) };
        self.evaluation.completions.unwrap_or(own)
    }
}

impl OfflineConfig {
    /// Reports what cannot be, of the pipeline of `config`.
    pub(super) fn validate(&self, config: &Config, at: &Section) {
        for (name, value) in [
            ("batch_size", self.batch_size as u64),
            ("evaluation.every", self.evaluation.every),
            ("checkpoint.every", self.checkpoint.every),
            ("checkpoint.keep_last", self.checkpoint.keep_last as u64),
        ] {
            at.positive(name, value);
        }
        at.given(&["evaluation.prompts"]).ensure(
            self.evaluation.prompts != Some(0) || !self.checkpoint.keep_best,
            "checkpoint.keep_best",
            "the best policy is told by `eval/loss`, and with `evaluation.prompts: 0` nothing is evaluated",
            "leave it out, or evaluate some held-out records",
        );
        self.objective.validate(&at.below("objective"));
        at.root().given(&["pipeline.offline.objective"]).ensure(
            self.objective.distills().is_none() || config.roles.reference.path.is_some(),
            "roles.reference.path",
            "it is missing, and `objective: distill` learns from the model there",
            "name the folder of a teacher: `roles: {reference: {path: DIR}}`",
        );
        self.validate_turns(&config.model, &at.given(&["objective"]));
        self.optimizer.validate(&at.below("optimizer"));
        if let Some(warmup) = &self.warmup {
            warmup.validate(&at.below("warmup"));
        }
        if self.objective.is_of_numbers() {
            self.validate_numbers(config, at);
            self.data.validate_uncut(&at.below("data"));
        }
        at.given(&["objective"]).ensure(
            self.batch_size >= 2 || !self.objective.estimates_kl(),
            "batch_size",
            "how far the policy has moved is told by a prompt with another record's answer",
            "write 2 or above",
        );
        let of_policy = config.roles.policy.strategy.micro_batch_size;
        let size = of_policy.unwrap_or(config.strategy.micro_batch_size);
        let of_pairs = ["pipeline.offline.objective", "roles.policy.strategy.micro_batch_size"];
        at.root().given(&of_pairs).ensure(
            size >= 2 || !self.objective.compares(),
            "strategy.micro_batch_size",
            "a better and a worse answer are two sequences, and go through the model together",
            "write 2 or above",
        );
        self.data.validate_answers(&at.below("data"), "`objective` learns from answers", &[]);
        self.data.validate(&at.below("data"));
    }

    fn validate_turns(&self, model: &ModelConfig, at: &Section) {
        if self.turns == Turns::Last {
            return;
        }
        at.ensure(
            self.objective == Objective::Sft || self.objective.distills().is_some(),
            "turns",
            "only `sft` and `distill` learn more than the last message of a conversation",
            "leave it out",
        );
        at.when(at.root().is_read("model")).ensure(
            matches!(model, ModelConfig::Folder(folder) if folder.chat),
            "turns",
            "the model has no chat template for conversations",
            "name a folder that has one, with `model.chat: true`, or leave it out",
        );
    }

    /// Reports what a reward model has not: it writes nothing, has no adapters, and the memory of its training is not planned.
    fn validate_numbers(&self, config: &Config, at: &Section) {
        let what = "the objective is a reward model's, which gives texts a number";
        at.ensure(self.warmup.is_none(), "warmup", what, "leave it out");
        let completions = self.evaluation.completions.unwrap_or(0);
        at.ensure(completions == 0, "evaluation.completions", what, "write 0, or leave it out");
        let root = at.root();
        let adapts = matches!(&config.model, ModelConfig::Folder(folder) if folder.lora.is_some());
        root.ensure(!adapts, "model.lora", "a reward model has no adapters", "leave it out");
        let roles = &config.roles;
        for (path, stage) in [
            ("strategy", Some(config.strategy.zero_stage)),
            ("roles.policy.strategy", roles.policy.strategy.zero_stage),
            ("roles.reference.strategy", roles.reference.strategy.zero_stage),
            ("roles.critic.strategy", roles.critic.strategy.zero_stage),
        ] {
            let holds = stage != Some(ZeroStage::Auto);
            let message = "`auto` does not plan the training of a reward model";
            root.ensure(holds, &format!("{path}.zero_stage"), message, "write 0, 1, 2 or 3");
        }
    }
}

impl DataConfig {
    /// Reports texts that are cut, and of which a number is read at the end.
    fn validate_uncut(&self, at: &Section) {
        match self {
            Self::File(file) => {
                at.ensure(
                    !matches!(file.long_prompts, LongPrompts::Truncate(_)),
                    "file.long_prompts.truncate",
                    "a reward model reads a text's number at its end, which would be cut off",
                    "write `leave_out` or `refuse`",
                );
            }
            Self::Mix(sources) => {
                for (index, source) in sources.iter().enumerate() {
                    source.data.validate_uncut(&at.below("mix").item(index).below("data"));
                }
            }
            Self::Sort(_) | Self::Addition(_) | Self::Countdown(_) => {}
        }
    }
}

impl Objective {
    fn validate(&self, at: &Section) {
        let not_negative = |name: &str, value: f64| at.number(name, value, value >= 0.0, "0 or above");
        let (name, beta) = match *self {
            Self::Sft => return,
            Self::Dpo(DpoConfig { beta, label_smoothing, sft_weight }) => {
                let holds = (0.0..0.5).contains(&label_smoothing);
                at.number("dpo.label_smoothing", label_smoothing, holds, "from 0 to below 0.5");
                not_negative("dpo.sft_weight", sft_weight);
                ("dpo", beta)
            }
            Self::Ipo(IpoConfig { beta }) => ("ipo", beta),
            Self::Hinge(HingeConfig { beta }) => ("hinge", beta),
            Self::Simpo(SimpoConfig { beta, gamma }) => {
                not_negative("simpo.gamma", gamma);
                ("simpo", beta)
            }
            Self::Orpo(OrpoConfig { beta }) => ("orpo", beta),
            Self::Kto(judged) => {
                judged.validate_weights(&at.below("kto"));
                ("kto", judged.beta)
            }
            Self::ApoZeroUnpaired(judged) => {
                judged.validate_weights(&at.below("apo_zero_unpaired"));
                ("apo_zero_unpaired", judged.beta)
            }
            Self::Distill(DistillConfig { beta, temperature, sft_weight }) => {
                at.number("distill.beta", beta, (0.0..=1.0).contains(&beta), "from 0 to 1");
                // Logits are divided by it.
                at.number("distill.temperature", temperature, temperature >= 1e-3, "0.001 or above");
                not_negative("distill.sft_weight", sft_weight);
                return;
            }
            Self::RewardModel(RewardModelObjective { center }) => {
                not_negative("reward_model.center", center);
                return;
            }
        };
        at.number(&format!("{name}.beta"), beta, beta > 0.0, "above 0");
    }
}

impl JudgedConfig {
    fn validate_weights(&self, at: &Section) {
        let Self { desirable_weight, undesirable_weight, .. } = *self;
        for (name, weight) in
            [("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)]
        {
            at.number(name, weight, weight >= 0.0, "0 or above");
        }
        at.given(&["undesirable_weight"]).ensure(
            desirable_weight + undesirable_weight > 0.0,
            "desirable_weight",
            "both weights are 0, and nothing is learnt",
            "write a weight above 0",
        );
    }
}
