//! The `rlvr` pipeline: reinforcement learning with a verifiable reward.

use anyroll_models::ExpertParts;
use serde::{Deserialize, Serialize};

use super::algorithm::{AlgorithmConfig, OldLogprobs, RolloutCorrection};
use super::critic::CriticConfig;
use super::data::DataConfig;
use super::environment::EnvironmentConfig;
use super::optimizer::OptimizerConfig;
use super::reward::{RewardConfig, RewardTerm};
use super::schema::{CheckpointConfig, Config, ModelConfig, WarmupConfig, is_default};
use super::speculation::SpeculationConfig;
use super::steps::{DataEpochs, Steps};
use crate::document::Section;

/// Reinforcement learning with a verifiable reward: a supervised warm-up, then policy gradients.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RlvrConfig {
    /// Source of prompts and answers.
    pub data: DataConfig,
    /// Reward of a completion. Default `exact`.
    #[serde(default)]
    pub reward: RewardConfig,
    /// Options of scoring completions.
    #[serde(default)]
    pub scoring: ScoringConfig,
    /// Selection of the completions that are trained on. Default: all.
    #[serde(default)]
    pub selection: SelectionConfig,
    /// Supervised steps on the gold answers, before the first RL step. Default: none.
    #[serde(default)]
    pub warmup: Option<WarmupConfig>,
    /// Number of RL steps: a count, or `{data_epochs: 3}` for the steps of that number of passes over the data. With 0
    /// the run only evaluates the model.
    pub steps: Steps<DataEpochs>,
    /// Number of prompts sampled in a step, over all ranks; a multiple of the number of ranks.
    pub prompts_per_step: usize,
    /// Number of completions of each prompt. At least 2, since advantages are relative to the group's mean; 1 is
    /// allowed with an advantage that needs no group: `reinforce`, `remax`, `none` or `gae`.
    pub group_size: usize,
    /// Number of mini-batches, one optimizer update each, that an epoch over a step's completions is split into; a
    /// divisor of `prompts_per_step`. Default 1.
    #[serde(default = "one")]
    pub mini_batches: usize,
    /// Number of epochs over a step's completions; 1 or above. Default 1.
    #[serde(default = "one")]
    pub epochs: usize,
    /// True if the policy's updates deal each mini-batch's samples to the ranks by their tokens, so that no rank waits long
    /// for the one with the longest completions. Each rank has as many samples as before, and groups stay together if
    /// `share_prompts` is true. Results are equal up to rounding. Default false.
    #[serde(default)]
    pub balance_ranks: bool,
    /// True if consecutive sequences with a common prefix, such as the prompt of a group, share the prefix's forward
    /// pass in training and scoring. The gradients are equal up to the order of sums. Default true, unless adapters
    /// have dropout, which differs between samples.
    #[serde(default)]
    pub share_prompts: Option<bool>,
    /// Options of sampling completions.
    pub rollout: RolloutConfig,
    /// Advantages and the policy loss. Default: GRPO, the defaults of the section's fields.
    #[serde(default)]
    pub algorithm: AlgorithmConfig,
    /// The policy's optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
    /// Critic that predicts the values of `advantage: gae`. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critic: Option<CriticConfig>,
    /// Interval, held-out prompts and sampling of evaluations.
    #[serde(default)]
    pub evaluation: EvaluationConfig,
    /// Interval and number of checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Completions of training that are written to `samples.jsonl`, TensorBoard and the report.
    #[serde(default, skip_serializing_if = "is_default")]
    pub samples: SamplesConfig,
}

/// Completions of training that are written, in addition to those of evaluations. They change no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplesConfig {
    /// Number of RL steps between written steps; the first step is written too. 0 for none. Default 10.
    pub every: u64,
    /// Maximum number of groups of such a step, each with all of its completions; 1 or above. The groups are the one
    /// with the highest mean reward, the one with the lowest, and others at random. Default 2.
    pub groups: usize,
}

impl Default for SamplesConfig {
    fn default() -> Self {
        Self { every: 10, groups: 2 }
    }
}

/// Options of scoring completions.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScoringConfig {
    /// Number of completions that a rank scores at a time, in parallel with generation; 1 to 4096. Rewards that wait
    /// for a process or an endpoint need more. Default 4.
    pub workers: usize,
    /// Control experiment: the rewards of a step are randomly permuted among its completions. The distribution of
    /// rewards is unchanged, and rewards carry no signal. Default false.
    pub random: bool,
}

impl Default for ScoringConfig {
    fn default() -> Self {
        Self { workers: 4, random: false }
    }
}

/// Selection of the completions that are trained on. A completion that is left out counts in no mean of the loss; its
/// reward counts in its group's advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SelectionConfig {
    /// Dynamic sampling (DAPO): groups whose completions are all equally right are replaced by groups of further
    /// prompts. Default: off.
    pub mixed_groups: Option<MixedGroupsConfig>,
    /// Range of difficulty: groups outside are left out, or replaced with `mixed_groups`. Default: no range.
    pub difficulty: Option<DifficultyConfig>,
    /// Overlong filtering (DAPO): completions that were cut at `rollout.max_new_tokens` are left out. Default false.
    pub leave_out_cut: bool,
}

/// Limit of dynamic sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MixedGroupsConfig {
    /// Maximum number of batches of `prompts_per_step` prompts that a step samples; 1 or above. If there are still too
    /// few mixed groups, other groups fill the step, and are counted. Default 10.
    #[serde(default = "ten_batches")]
    pub max_batches: u64,
}

/// Range of the difficulty of groups.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DifficultyConfig {
    /// Smallest mean of the evaluation's measure over a group's completions.
    pub min: f64,
    /// Largest mean of the evaluation's measure over a group's completions; `min` or above.
    pub max: f64,
}

/// Options of sampling completions.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutConfig {
    /// Divisor of the logits, in sampling and in the loss; 0.001 or above. Default 1.
    #[serde(default = "one_f64")]
    pub temperature: f64,
    /// Number of most likely tokens that are sampled from; 0 for all. Default 0.
    #[serde(default)]
    pub top_k: usize,
    /// Total probability of the most likely tokens that are sampled from; above 0, at most 1, and 1 for all. Default 1.
    #[serde(default = "one_f64")]
    pub top_p: f64,
    /// Minimum probability of a token relative to the most likely token's; from 0, for all tokens, to 1. Default 0.
    #[serde(default)]
    pub min_p: f64,
    /// Penalty that makes tokens of the prompt or the completion less likely; above 0, and 1 for none. Default 1.
    #[serde(default = "one_f64")]
    pub repetition_penalty: f64,
    /// Maximum length of a completion in tokens, end token included; 1 or above. With an environment it is the length
    /// of all turns and all messages between turns.
    pub max_new_tokens: usize,
    /// Texts that end a completion. A completion ends with the token that completes any of these texts, and includes
    /// that token: the sampled tokens are scored and trained on. Default: none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stop: Vec<String>,
    /// Number of sequences that a rank generates at a time; 1 or above. If a sequence ends, the next one takes its
    /// slot. Default 64.
    #[serde(default = "sixty_four")]
    pub batch_size: usize,
    /// Number of ranks that sample together, each with a part of every matrix and of the KV cache; it divides the number
    /// of ranks. A model may then be that many times larger than a device's memory allows. They run the sequences of all
    /// of them at a time. Default 1.
    #[serde(default = "one", skip_serializing_if = "is_one_rank")]
    pub tensor_parallel: usize,
    /// True if each of the ranks that sample together has some experts of a mixture, whole, in place of columns of every
    /// expert; `tensor_parallel` divides the experts. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub expert_parallel: bool,
    /// True if log-probs in sampling must be bitwise equal to log-probs in training, independent of the batch. A step
    /// with a difference ends the run. Matrix products and attention are slower. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub strict: bool,
    /// True if the adapters of `model.lora` are merged into the weights for sampling and evaluation, once a step.
    /// Sampling is then as fast as without adapters. In 16 bits the merged weights are rounded, and the sampled policy
    /// differs a little from the trained one. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merge_adapters: bool,
    /// Form of the weights that sample, in rollout and evaluation. With `fp8` the old log-probs and the correction have
    /// other defaults. Default `policy`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub weights: RolloutWeights,
    /// True if the rows that matrices in 8 bits multiply are rounded to 8 bits, too: faster where a device multiplies 8 bits,
    /// and less exact. Needs `weights: fp8`. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fp8_activations: bool,
    /// True if training sends each token of a mixture of experts to the experts that it went to in sampling, in the
    /// behaviour log-probs and in every pass of the loss (R3). Their weights are those of training's router, which learns
    /// through them. The reference and the critic choose their own. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub replay_routing: bool,
    /// Environment that replies to the model, turn by turn. Default: none, and a completion is one turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentConfig>,
    /// Memory of the KV cache in sampling.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv_cache: KvCacheConfig,
    /// Prompt-lookup speculation, which ends long completions sooner if they repeat their prompt or themselves; `{}` for its
    /// defaults. Default: none, and a step samples one token of each sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationConfig>,
    /// Asynchronous rollout, which continues across steps. Default: each step samples the completions that it trains
    /// on.
    #[serde(rename = "async", default, skip_serializing_if = "is_default")]
    pub asynchronous: AsyncConfig,
}

/// Form of the weights that sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutWeights {
    /// The policy's weights, in `strategy.precision`.
    #[default]
    Policy,
    /// The layers' matrices rounded to 8 bits, e4m3 with a scale for each row, anew after each step: half of their
    /// memory, in products of `strategy.precision`.
    Fp8,
}

/// Asynchronous rollout: completions that a step begins and a later step trains on. A step ends sampling as soon as
/// enough groups are complete; with devices that only sample, as soon as the next step's groups are. Completions in
/// flight then continue in the next step, with the weights of that step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AsyncConfig {
    /// Number of later steps whose prompts are begun in a step; 0 is none, and exactly on-policy. Default 0.
    pub ahead: u64,
    /// Maximum staleness of a token in steps; `ahead` or above. A step waits for completions whose staleness would
    /// exceed the maximum in the next step. With devices that only sample, staleness is at most `ahead`.
    /// Default: `ahead`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_staleness: Option<u64>,
}

impl AsyncConfig {
    /// Returns the maximum staleness of a token in steps.
    pub fn staleness_bound(self) -> u64 {
        self.max_staleness.unwrap_or(self.ahead)
    }
}

/// Memory of the KV cache, which is allocated when sampling begins and freed when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvCacheConfig {
    /// Maximum size of the cache as a fraction of the device's free memory, above 0, at most 1. The cache is never
    /// larger than `batch_size` sequences need. If the cache is full, sequences wait for one another. Default 0.85.
    pub memory: f64,
}

impl Default for KvCacheConfig {
    fn default() -> Self {
        Self { memory: 0.85 }
    }
}

/// Evaluations: their interval, their held-out prompts, and sampling of completions. The policy is always evaluated
/// before and after training.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// Number of RL steps between evaluations; 1 or above. Default 25.
    pub every: u64,
    /// Number of held-out prompts, the same ones each time; 1 or above. Default 500, or all if there are fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<usize>,
    /// Number of completions of each prompt for pass@k, in addition to the greedy one; 1 or above. Default 4.
    pub samples: usize,
    /// Divisor of the logits of these completions; 0.001 or above. Default 1, for any `rollout.temperature`.
    #[serde(skip_serializing_if = "is_one")]
    pub temperature: f64,
    /// Total probability of the most likely tokens that these completions are sampled from; above 0, at most 1, and 1
    /// for all. Default 1, for any `rollout.top_p`.
    #[serde(skip_serializing_if = "is_one")]
    pub top_p: f64,
    /// Maximum length of an evaluated completion in tokens, end token included; 1 or above. Default:
    /// `rollout.max_new_tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_new_tokens: Option<usize>,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self { every: 25, prompts: None, samples: 4, temperature: 1.0, top_p: 1.0, max_new_tokens: None }
    }
}

impl RlvrConfig {
    /// Reports invalid fields of the pipeline of `config`.
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
        self.validate_weights(&config.model, at);
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
            ("samples.groups", self.samples.groups as u64),
        ] {
            at.positive(name, value);
        }
        self.checkpoint.validate(&at.below("checkpoint"));
        self.evaluation.validate(&at.below("evaluation"));
        self.validate_without_steps(at);
        self.validate_environment(config, at);
        self.validate_readers_of_answers(&at.below("data"));
        self.data.validate_prompts(&at.below("data"));
        self.data.validate(&at.below("data"));
        self.validate_adapters(&config.model, at);
    }

    /// Reports a warm-up of a run without steps, which only evaluates.
    fn validate_without_steps(&self, at: &Section) {
        let warms_up = self.warmup.as_ref().is_some_and(|warmup| warmup.steps > 0);
        at.given(&["steps", "warmup"]).ensure(
            self.steps != Steps::Count(0) || !warms_up,
            "warmup",
            "with `steps: 0` the run only evaluates the model, and trains nothing",
            "leave it out, or pass `--set pipeline.rlvr.warmup=null`; or write `steps: 1` or above",
        );
    }

    /// Reports an asynchronous rollout with a staleness bound below `ahead`, or with fields that exclude such a
    /// rollout. `at` is the rollout.
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

    /// Reports fields that exclude weights in 8 bits. `at` is the pipeline.
    fn validate_weights(&self, model: &ModelConfig, at: &Section) {
        if self.rollout.weights != RolloutWeights::Fp8 {
            at.ensure(
                !self.rollout.fp8_activations,
                "rollout.fp8_activations",
                "rounds the rows of products with matrices in 8 bits, and `rollout.weights` has none",
                "write `weights: fp8` beside it, or leave it out",
            );
            return;
        }
        at.ensure(
            !self.rollout.strict,
            "rollout.weights",
            "`rollout.strict` wants the log-probs of training, whose weights are not rounded to 8 bits",
            "leave one of the two out",
        );
        let dora = at.when(at.root().is_sound("model.lora") && at.root().is_read("model"));
        dora.ensure(
            !model.has_dora() || self.rollout.merge_adapters,
            "rollout.weights",
            "`lora.dora` needs the norms of rows that are not rounded to 8 bits",
            "write `merge_adapters: true` beside it, or leave one of the two out",
        );
        at.given(&["algorithm.old_logprobs"]).ensure(
            self.old_logprobs() == OldLogprobs::Rollout
                || self.rollout_correction() != RolloutCorrection::None,
            "algorithm.rollout_correction",
            "with `rollout.weights: fp8` sampling differs from training, and nothing corrects the difference",
            "write `truncate`, or leave it out; or write `old_logprobs: rollout`",
        );
    }

    /// Source of the behaviour log-probs. With weights in 8 bits it is by default another pass, unless the loss refuses a
    /// correction.
    pub fn old_logprobs(&self) -> OldLogprobs {
        let default = if self.corrects_rounding() { OldLogprobs::Recompute } else { OldLogprobs::Rollout };
        self.algorithm.old_logprobs.unwrap_or(default)
    }

    /// Returns true if weights sample in 8 bits and the loss takes a correction of that.
    fn corrects_rounding(&self) -> bool {
        self.rollout.weights == RolloutWeights::Fp8
            && self.algorithm.loss.formula().refuses_correction().is_none()
    }

    /// Correction of the difference between sampling and training. With weights in 8 bits and log-probs of another pass it is
    /// by default truncated importance sampling.
    pub fn rollout_correction(&self) -> RolloutCorrection {
        let corrects = self.corrects_rounding() && self.old_logprobs() == OldLogprobs::Recompute;
        let default =
            if corrects { RolloutCorrection::Truncate(Default::default()) } else { RolloutCorrection::None };
        self.algorithm.rollout_correction.unwrap_or(default)
    }

    /// Reports an environment without a reward, and the reverse, and fields that exclude an environment.
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

    /// Reports fields that need answers where records have none. `at` is the data.
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

    /// Reports fields that exclude the adapters of `model`, and fields that need adapters.
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

impl EvaluationConfig {
    /// Maximum length of a completion, in a run whose rollout has at most `rollout` tokens.
    pub fn max_new_tokens(&self, rollout: usize) -> usize {
        self.max_new_tokens.unwrap_or(rollout)
    }

    /// Reports invalid sampling.
    pub(super) fn validate(&self, at: &Section) {
        let Self { temperature, top_p, max_new_tokens, .. } = *self;
        let range = "0.001 or above; the greedy completion is measured in any case";
        at.number("temperature", temperature, temperature >= 1e-3, range);
        at.number("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, at most 1");
        at.positive("max_new_tokens", max_new_tokens.unwrap_or(1));
    }
}

impl RolloutConfig {
    fn validate(&self, at: &Section) {
        let Self {
            temperature, top_p, min_p, repetition_penalty, kv_cache: KvCacheConfig { memory }, ..
        } = *self;
        // The divisor of logits.
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
        at.positive("tensor_parallel", self.tensor_parallel);
        if let Some(speculation) = self.speculation {
            speculation.validate(&at.below("speculation"));
        }
        at.given(&["tensor_parallel"]).ensure(
            !self.expert_parallel || self.tensor_parallel > 1,
            "expert_parallel",
            "each rank samples by itself, with all experts",
            "set `tensor_parallel` to the number of ranks that sample together, or leave it out",
        );
    }

    /// Returns the parts of experts that ranks which sample together have.
    pub fn expert_parts(&self) -> ExpertParts {
        if self.expert_parallel { ExpertParts::Whole } else { ExpertParts::Columns }
    }
}

// serde's attributes take functions only.

fn one() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one_rank(count: &usize) -> bool {
    *count == 1
}

fn one_f64() -> f64 {
    1.0
}

fn is_one(value: &f64) -> bool {
    *value == 1.0
}

fn sixty_four() -> usize {
    64
}

fn ten_batches() -> u64 {
    10
}
