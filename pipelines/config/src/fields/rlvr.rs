//! The `rlvr` pipeline: reinforcement learning with a verifiable reward.

use serde::{Deserialize, Serialize};

use super::algorithm::AlgorithmConfig;
use super::critic::CriticConfig;
use super::data::DataConfig;
use super::environment::EnvironmentConfig;
use super::optimizer::OptimizerConfig;
use super::reward::{RewardConfig, RewardTerm};
use super::schema::{CheckpointConfig, Config, ModelConfig, WarmupConfig, is_default};
use super::steps::{DataEpochs, Steps};
use crate::document::Section;

/// Reinforcement learning with a verifiable reward: a supervised warm-up, then policy gradients.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RlvrConfig {
    /// Where prompts and answers come from.
    pub data: DataConfig,
    /// What a completion earns. Default `exact`.
    #[serde(default)]
    pub reward: RewardConfig,
    /// How completions are scored.
    #[serde(default)]
    pub scoring: ScoringConfig,
    /// Which completions are trained on. Default: all.
    #[serde(default)]
    pub selection: SelectionConfig,
    /// Supervised steps on the gold answers, before the first RL step. Default: none.
    #[serde(default)]
    pub warmup: Option<WarmupConfig>,
    /// RL steps: a number, or `{data_epochs: 3}` for as many as cover passes over the data.
    pub steps: Steps<DataEpochs>,
    /// Prompts sampled in a step, over all ranks; a multiple of the number of ranks.
    pub prompts_per_step: usize,
    /// Completions of each prompt; at least 2, since advantages are relative to the group's mean, unless they are
    /// `reinforce`, `remax` or `gae`.
    pub group_size: usize,
    /// Optimizer updates that an epoch over a step's completions is cut into. Default 1.
    #[serde(default = "one")]
    pub mini_batches: usize,
    /// Passes over a step's completions. Default 1.
    #[serde(default = "one")]
    pub epochs: usize,
    /// Whether what a sequence begins with as the one before it does, such as the prompt of its group, goes through the model
    /// once for both where samples are trained on and scored: the same gradients, up to the order of sums. Default true,
    /// unless adapters drop values, of each sample others.
    #[serde(default)]
    pub share_prompts: Option<bool>,
    /// How completions are sampled.
    pub rollout: RolloutConfig,
    /// Advantages and the policy loss. Default: GRPO as in its fields.
    #[serde(default)]
    pub algorithm: AlgorithmConfig,
    /// The policy's optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
    /// What learns the values that `advantage: gae` is made from. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critic: Option<CriticConfig>,
    /// When and on how many held-out prompts the policy is evaluated.
    #[serde(default)]
    pub evaluation: EvaluationConfig,
    /// When the run is saved.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// How completions are scored.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScoringConfig {
    /// Completions that a rank scores at a time, beside generation; rewards that wait for a process or an endpoint need
    /// more. Default 4.
    pub workers: usize,
    /// The control: the rewards of a step are dealt to its completions at random. Their distribution stays, and nothing
    /// is to be learnt. Default false.
    pub random: bool,
}

impl Default for ScoringConfig {
    fn default() -> Self {
        Self { workers: 4, random: false }
    }
}

/// Which completions are trained on. A completion that is left out counts in no mean of the loss; its reward counts in
/// its group's advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SelectionConfig {
    /// Dynamic sampling (DAPO): groups whose completions are all equally right are replaced by those of further prompts.
    /// Default: no.
    pub mixed_groups: Option<MixedGroupsConfig>,
    /// Groups outside of a range of difficulty are left out, or replaced with `mixed_groups`. Default: none is.
    pub difficulty: Option<DifficultyConfig>,
    /// Overlong filtering (DAPO): completions that were cut at `rollout.max_new_tokens` are left out. Default false.
    pub leave_out_cut: bool,
}

/// How long is looked for groups that teach something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MixedGroupsConfig {
    /// Batches of `prompts_per_step` prompts that a step samples at most; if there are still too few groups then, others
    /// fill it up, and are counted. Default 10.
    #[serde(default = "ten_batches")]
    pub max_batches: u64,
}

/// Which groups are neither too hard nor too easy.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DifficultyConfig {
    /// The least mean of what evaluation measures, over a group's completions.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

/// How completions are sampled.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutConfig {
    /// Divides the logits, in sampling and in the loss; above 0. Default 1.
    #[serde(default = "one_f64")]
    pub temperature: f64,
    /// Only the so many likeliest tokens are sampled; 0 for all. Default 0.
    #[serde(default)]
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability; 1 for all. Default 1.
    #[serde(default = "one_f64")]
    pub top_p: f64,
    /// Only tokens with at least this part of the likeliest one's probability; 0 for all. Default 0.
    #[serde(default)]
    pub min_p: f64,
    /// Makes tokens less likely that the prompt or the completion has; 1 for not. Default 1.
    #[serde(default = "one_f64")]
    pub repetition_penalty: f64,
    /// Longest completion in tokens, its end token included; with an environment of all turns and all that is said between
    /// them.
    pub max_new_tokens: usize,
    /// A completion ends with the token that completes any of these texts, and keeps it: what was sampled is what is
    /// scored and trained on. Default: none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stop: Vec<String>,
    /// Sequences that a rank generates at a time; as one ends, the next takes its place.
    pub batch_size: usize,
    /// Whether sampling computes each log-prob to the bit as training does, whatever shares a batch; a step in which it does
    /// not ends the run. Products of matrices and attention are slower. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub strict: bool,
    /// Whether sampling and evaluation run on weights into which the adapters of `model.lora` are merged, once a step, and so
    /// as fast as without any. In 16 bits the sum is rounded: what is sampled from differs a little from what is trained.
    /// Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merge_adapters: bool,
    /// Who answers what the model writes, turn by turn. Default: nobody, a completion is one turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentConfig>,
    /// The memory of past tokens while completions are sampled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv_cache: KvCacheConfig,
    /// Sampling that goes on over the steps. Default: each step samples what it trains on.
    #[serde(rename = "async", default, skip_serializing_if = "is_default")]
    pub asynchronous: AsyncConfig,
}

/// Completions that a step begins and a later one trains on. A step ends its sampling as soon as enough groups are whole, and
/// with devices that only sample as soon as the next step's are; what is still being written then goes on in the next step,
/// with its weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AsyncConfig {
    /// Steps whose prompts are begun beside the step's own; 0 is none, and exactly on-policy. Default 0.
    pub ahead: u64,
    /// The most steps that a token may be older than the policy it trains; `ahead` or above. A step waits for the
    /// completions that would be too old in the next one. With devices that only sample none is older than `ahead`. Default:
    /// `ahead`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_staleness: Option<u64>,
}

impl AsyncConfig {
    /// The most steps that a token may be older than the policy it trains.
    pub fn staleness_bound(self) -> u64 {
        self.max_staleness.unwrap_or(self.ahead)
    }
}

/// Room for keys and values. It is taken when sampling begins and given back when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvCacheConfig {
    /// The most that the cache takes, as a part of the device's free memory, above 0, at most 1; never more than
    /// `batch_size` sequences need. Where it is short, sequences wait for one another. Default 0.85.
    pub memory: f64,
}

impl Default for KvCacheConfig {
    fn default() -> Self {
        Self { memory: 0.85 }
    }
}

/// When and on how many held-out prompts the policy is evaluated; before and after training always.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// RL steps from one evaluation to the next. Default 25.
    pub every: u64,
    /// Held-out prompts, the same ones each time. Default 500, or all if they are fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<usize>,
    /// Completions of each prompt for pass@k, beside the greedy one. Default 4.
    pub samples: usize,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self { every: 25, prompts: None, samples: 4 }
    }
}

impl RlvrConfig {
    /// Reports what cannot be, of the pipeline of `config`.
    pub(super) fn validate(&self, config: &Config, at: &Section) {
        at.positive("prompts_per_step", self.prompts_per_step);
        at.positive("group_size", self.group_size);
        at.given(&["algorithm.advantage"]).ensure(
            self.group_size >= 2 || !self.algorithm.advantage.formula().needs_groups(),
            "group_size",
            format!("a group of {} has no mean to differ from", self.group_size),
            "write 2 or above, or an advantage without groups: `reinforce`, `remax`, `gae` or `none`",
        );
        at.positive("mini_batches", self.mini_batches);
        at.positive("epochs", self.epochs);
        at.given(&["prompts_per_step"]).ensure(
            self.prompts_per_step.is_multiple_of(self.mini_batches),
            "mini_batches",
            format!(
                "{} prompts are no multiple of {} mini-batches, which hold whole groups",
                self.prompts_per_step, self.mini_batches
            ),
            "write a divisor of `prompts_per_step`",
        );
        self.reward.validate(&at.below("reward"));
        at.number_of_threads("scoring.workers", self.scoring.workers);
        self.selection.validate(&at.given(&["group_size"]).below("selection"), self.group_size);
        self.rollout.validate(&at.below("rollout"));
        self.validate_async(&at.below("rollout"));
        self.algorithm.validate(self, at);
        self.optimizer.validate(&at.below("optimizer"));
        self.validate_critic(at);
        if let Some(warmup) = &self.warmup {
            warmup.validate(&at.below("warmup"));
        }
        for (name, value) in [
            ("evaluation.every", self.evaluation.every),
            ("evaluation.prompts", self.evaluation.prompts.map_or(1, |prompts| prompts as u64)),
            ("evaluation.samples", self.evaluation.samples as u64),
            ("checkpoint.every", self.checkpoint.every),
            ("checkpoint.keep_last", self.checkpoint.keep_last as u64),
        ] {
            at.positive(name, value);
        }
        self.validate_environment(config, at);
        self.validate_readers_of_answers(&at.below("data"));
        self.data.validate_prompts(&at.below("data"));
        self.data.validate(&at.below("data"));
        self.validate_adapters(&config.model, at);
    }

    /// Reports steps that begin ahead and cannot be trained on in time. `at` is the rollout.
    fn validate_async(&self, at: &Section) {
        let AsyncConfig { ahead, max_staleness } = self.rollout.asynchronous;
        if ahead == 0 {
            let help = "leave it out, or write `ahead: 1`";
            let message = "with `ahead: 0` nothing is stale";
            at.given(&["async.ahead"]).ensure(max_staleness.is_none(), "async.max_staleness", message, help);
            return;
        }
        at.ensure(
            max_staleness.is_none_or(|most| most >= ahead),
            "async.max_staleness",
            format!("what is begun {ahead} steps ahead may be so many steps old"),
            format!("write {ahead} or above, or begin fewer steps ahead"),
        );
        at.ensure(
            self.selection.mixed_groups.is_none(),
            "async.ahead",
            "`selection.mixed_groups` samples whole batches until enough groups teach something: nothing is left over",
            "write `ahead: 0`, or leave `mixed_groups` out",
        );
        at.ensure(
            !self.rollout.strict,
            "async.ahead",
            "`rollout.strict` wants training's log-probs, and tokens of an earlier step have those of its weights",
            "write `ahead: 0`, or leave `strict` out",
        );
    }

    /// Reports an environment without a reward, or the other way around, and what does not go with one.
    fn validate_environment(&self, config: &Config, at: &Section) {
        let environment = &self.rollout.environment;
        let terms = self.reward.terms();
        match (environment, terms.iter().position(RewardTerm::is_of_environment)) {
            (Some(_), None) => {
                let help = "add `- environment: {}`; what the environment gives no reward for counts 0 there";
                let reward = at.given(&["reward"]);
                reward.refuse("reward", "no term is what `rollout.environment` gives", help);
            }
            (None, Some(index)) => {
                let help = "leave it out, or write `rollout.environment`";
                let term = at.given(&["rollout.environment"]);
                term.refuse(&format!("reward[{index}].environment"), "there is no environment", help);
            }
            (Some(_), Some(index)) => {
                let field = format!("reward[{index}].domains");
                at.ensure(
                    terms[index].domains.is_empty(),
                    &field,
                    "all records have episodes",
                    "leave it out",
                );
            }
            (None, None) => {}
        }
        let Some(environment) = environment else { return };
        environment.validate(&self.rollout, &at.below("rollout"));
        at.ensure(
            self.rollout.asynchronous.ahead == 0,
            "rollout.async.ahead",
            "an episode lives in a process, and ends with the step that began it",
            "write `ahead: 0`, or leave `rollout.environment` out",
        );
        at.root().ensure(
            config.roles.rollout.is_none(),
            "roles.rollout",
            "with `rollout.environment` sampling and training take turns on the policy's devices",
            "leave one of the two out",
        );
    }

    /// Reports readers of answers that have none. `at` is the data.
    fn validate_readers_of_answers(&self, at: &Section) {
        let of_reward = at.when(at.root().is_sound("pipeline.rlvr.reward"));
        if self.warmup.is_some() {
            self.data.validate_answers(at, "`warmup` learns answers", &[]);
        }
        let RewardConfig::Sum(terms) = &self.reward else {
            self.data.validate_answers(&of_reward, "`reward: exact` compares with an answer", &[]);
            return;
        };
        for RewardTerm { kind, domains, .. } in terms {
            if let Some(name) = kind.compares() {
                let reader = format!("`{name}` compares with an answer");
                self.data.validate_answers(&of_reward, &reader, domains);
            }
        }
    }

    /// Reports what does not go with the adapters of `model`, and what needs some.
    fn validate_adapters(&self, model: &ModelConfig, at: &Section) {
        let lora = match model {
            ModelConfig::Folder(folder) => folder.lora.as_ref(),
            _ => None,
        };
        if self.rollout.merge_adapters {
            let help = "leave it out, or give the model some by `model.lora`";
            let is_read = at.root().is_sound("model.lora") && at.root().is_read("model");
            let at = at.when(is_read);
            at.ensure(lora.is_some(), "rollout.merge_adapters", "the model has no adapters", help);
            at.ensure(
                !self.rollout.strict,
                "rollout.merge_adapters",
                "`rollout.strict` wants the log-probs of training, which does not merge, and merged weights round otherwise",
                "leave one of the two out",
            );
        }
        let drops = model.drops();
        at.root().ensure(
            !self.rollout.strict || !drops,
            "model.lora.dropout",
            "training drops values and sampling does not, and `rollout.strict` wants them equal",
            "leave one of the two out",
        );
        at.when(at.root().is_sound("model.lora.dropout")).ensure(
            self.share_prompts != Some(true) || !drops,
            "share_prompts",
            "adapters drop values of a prompt, for each of its samples others",
            "leave it out, or `model.lora.dropout`",
        );
    }
}

impl SelectionConfig {
    fn validate(&self, at: &Section, group_size: usize) {
        if let Some(MixedGroupsConfig { max_batches }) = self.mixed_groups {
            at.positive("mixed_groups.max_batches", max_batches);
            let message =
                "no group of 1 is mixed: each step would sample all of its batches, and drop most of them";
            let help = "leave it out, or write a `group_size` of 2 or above";
            at.ensure(group_size >= 2, "mixed_groups", message, help);
        }
        if let Some(DifficultyConfig { min, max }) = self.difficulty {
            at.number("difficulty.min", min, true, "such as 0.1");
            at.given(&["difficulty.min"]).number("difficulty.max", max, max >= min, "not below `min`");
        }
    }
}

impl RolloutConfig {
    fn validate(&self, at: &Section) {
        let Self {
            temperature, top_p, min_p, repetition_penalty, kv_cache: KvCacheConfig { memory }, ..
        } = *self;
        // Logits are divided by it.
        let range = "0.001 or above; evaluation is greedy beside";
        at.number("temperature", temperature, temperature >= 1e-3, range);
        at.number("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, at most 1");
        at.number("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1");
        at.number("repetition_penalty", repetition_penalty, repetition_penalty > 0.0, "above 0");
        at.number("kv_cache.memory", memory, memory > 0.0 && memory <= 1.0, "above 0, at most 1");
        let help = "write a text, such as \"</answer>\"";
        at.ensure(!self.stop.contains(&String::new()), "stop", "a text is empty", help);
        at.positive("max_new_tokens", self.max_new_tokens);
        at.positive("batch_size", self.batch_size);
    }
}

// serde's attributes take functions only.

fn one() -> usize {
    1
}

fn one_f64() -> f64 {
    1.0
}

fn ten_batches() -> u64 {
    10
}
