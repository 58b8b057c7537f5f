//! The text of a config, with a comment for each number.

use std::path::Path;

use super::{
    Method, SCHEMA_FILE,
    facts::{Chosen, DataFacts, ModelFacts, scalar},
};

/// Answers to all questions.
pub(super) struct Answers<'a> {
    pub model: String,
    pub data: String,
    pub file: &'a Path,
    pub model_facts: &'a ModelFacts,
    pub data_facts: &'a DataFacts,
    pub columns: Chosen,
    pub method: Method,
    pub reward: Option<String>,
    /// True if the host computes.
    pub is_host: bool,
    pub backend: &'static str,
    pub devices: usize,
}

/// A micro-batch.
#[derive(Clone, Copy)]
pub(super) struct MicroBatch {
    /// Sequences.
    pub size: usize,
    /// True if backward recomputes all activations.
    pub recomputes: bool,
    /// True if it is the largest that fits the devices.
    pub is_planned: bool,
}

/// Completions of a prompt.
const GROUP_SIZE: usize = 8;
/// Column at which comments start.
const COMMENT_AT: usize = 40;

impl Answers<'_> {
    /// Prompts or records of a step: a multiple of the ranks, and no more than the data have.
    fn records(&self) -> usize {
        let usual: usize = if self.is_host { 8 } else { 32 };
        usual.div_ceil(self.devices) * self.devices
    }

    /// Sequences that a rank trains on in a step.
    pub fn sequences_per_rank(&self) -> usize {
        let of_record = if self.method.has_reward() { GROUP_SIZE } else { self.method.sequences() };
        self.records() / self.devices * of_record
    }

    /// A micro-batch by the model's size, where the memory of devices is not known.
    pub fn micro_batch_by_size(&self) -> usize {
        let usual = match self.model_facts.weights {
            _ if self.is_host => 8,
            0..300_000_000 => 32,
            300_000_000..1_000_000_000 => 16,
            1_000_000_000..3_000_000_000 => 8,
            3_000_000_000..10_000_000_000 => 4,
            _ => 1,
        };
        usual.min(self.sequences_per_rank()).max(1)
    }

    /// The config.
    pub fn text(&self, micro_batch: MicroBatch) -> String {
        let Self { method, backend, devices, .. } = self;
        let millions = self.model_facts.weights.div_ceil(1_000_000);
        let (file, count) = (self.file.display(), self.data_facts.count);
        let mut lines = vec![
            format!("# yaml-language-server: $schema={SCHEMA_FILE}"),
            format!(
                "# {method} of a model with {millions} million weights on {count} records, by `anyroll init`."
            ),
            format!(
                "# `anyroll check {file}` prints every default and facts on the data; docs/reference/fields.md has all"
            ),
            "# fields.".to_owned(),
            String::new(),
            format!("name: {method}"),
            "seed: 0".to_owned(),
            format!("backend: {backend}"),
            commented(&format!("devices: {devices}"), "one for each rank"),
            String::new(),
        ];
        lines.extend(self.model_lines());
        lines.extend(self.strategy_lines(micro_batch));
        lines.push("pipeline:".to_owned());
        lines.extend(if method.has_reward() { self.rlvr_lines() } else { self.offline_lines() });
        lines.join("\n") + "\n"
    }

    fn model_lines(&self) -> Vec<String> {
        let chat = match self.model_facts.has_template {
            true => commented("  chat: true", "a prompt is a user's message in the model's chat template"),
            false => commented("  chat: false", "the model has no chat template"),
        };
        vec!["model:".to_owned(), format!("  path: {}", scalar(&self.model)), chat, String::new()]
    }

    fn strategy_lines(&self, micro_batch: MicroBatch) -> Vec<String> {
        let MicroBatch { size, recomputes, is_planned } = micro_batch;
        let stage = match (self.method.is_planned(), self.devices) {
            (true, _) => commented("  zero_stage: auto", "the fastest sharding that fits the devices"),
            (false, 1) => commented("  zero_stage: 0", "one rank has nothing to shard"),
            (false, _) => commented("  zero_stage: 2", "gradients and optimizer states are sharded"),
        };
        let why = match (is_planned, self.is_host) {
            (true, _) => "sequences of a forward pass: the most that fit this machine's devices",
            (false, true) => "sequences of a forward pass",
            (false, false) => "sequences of a forward pass, by the model's size; see `anyroll plan`",
        };
        let mut lines = vec!["strategy:".to_owned(), stage];
        if !self.is_host {
            lines.push("  precision: bf16".to_owned());
        }
        if recomputes {
            lines.push(commented("  recompute: full", "slower; without it the model does not fit"));
        }
        lines.extend([commented(&format!("  micro_batch_size: {size}"), why), String::new()]);
        lines
    }

    fn data_lines(&self) -> [String; 5] {
        [
            "    data:".to_owned(),
            "      file:".to_owned(),
            format!("        path: {}", scalar(&self.data)),
            format!("        columns: {}", self.columns.yaml),
            commented("        held_out_percent: 10", "for evaluation, by a hash of the prompt"),
        ]
    }

    fn optimizer_lines(&self, warmup: &str) -> [String; 7] {
        let rate = self.method.learning_rate(self.model_facts.weights);
        [
            "    optimizer:".to_owned(),
            format!("      # The learning rate is {}.", rate.source),
            format!("      adamw: {{learning_rate: {}}}", rate.value),
            "      max_grad_norm: 1.0".to_owned(),
            "      schedule:".to_owned(),
            commented(
                &format!("        linear: {{warmup_steps: {warmup}, final_ratio: 0.1}}"),
                "falls to a tenth",
            ),
            "    evaluation:".to_owned(),
        ]
    }

    fn rlvr_lines(&self) -> Vec<String> {
        let records = self.records();
        let new_tokens = 512.min(self.model_facts.max_length / 2).max(1);
        let mut lines = vec!["  rlvr:".to_owned()];
        lines.extend(self.data_lines());
        lines.extend([
            format!("    reward: {}", self.reward.as_deref().unwrap_or("exact")),
            String::new(),
            "    steps: 200".to_owned(),
            commented(&format!("    prompts_per_step: {records}"), "over all ranks"),
            commented(&format!("    group_size: {GROUP_SIZE}"), "completions of a prompt"),
            "    rollout:".to_owned(),
            "      temperature: 1.0".to_owned(),
            commented(&format!("      max_new_tokens: {new_tokens}"), "longer completions are cut"),
            commented("      batch_size: 64", "sequences that a rank samples at a time"),
        ]);
        lines.extend(match self.method {
            Method::Rloo => vec![
                "    algorithm:".to_owned(),
                "      advantage: rloo".to_owned(),
                "      loss: reinforce".to_owned(),
                commented("      aggregation: seq_mean_token_sum", "a completion's log-prob is a sum"),
            ],
            _ => vec![
                "    algorithm:".to_owned(),
                "      advantage:".to_owned(),
                commented("        grpo: {scale: group_std, eps: 1.0e-4}", "as in the paper, DeepSeekMath"),
                commented("      kl_coef: 0.0", "no reference model, as in DAPO"),
            ],
        });
        lines.extend(self.optimizer_lines("0"));
        lines.extend([
            commented("      every: 20", "steps; also before the first and after the last"),
            "    checkpoint:".to_owned(),
            "      every: 50".to_owned(),
        ]);
        lines
    }

    fn offline_lines(&self) -> Vec<String> {
        let records = self.records();
        let objective = match self.method {
            Method::Dpo => {
                commented("    objective: {dpo: {beta: 0.1}}", "the paper's distance from the reference")
            }
            Method::Kto => {
                commented("    objective: {kto: {beta: 0.1}}", "the paper's distance from the reference")
            }
            Method::RewardModel => {
                commented("    objective: {reward_model: {center: 0.01}}", "scores stay around 0")
            }
            Method::Sft | Method::Grpo | Method::Rloo => "    objective: sft".to_owned(),
        };
        let passes = if self.method == Method::Sft { 2 } else { 1 };
        let mut lines = vec!["  offline:".to_owned()];
        lines.extend(self.data_lines());
        lines.extend([
            objective,
            String::new(),
            commented(&format!("    steps: {{data_epochs: {passes}}}"), "passes over the data"),
            commented(&format!("    batch_size: {records}"), "records of a step, over all ranks"),
        ]);
        lines.extend(self.optimizer_lines("{share: 0.03}"));
        lines.extend([
            commented("      every: 50", "steps; also before the first and after the last"),
            "    checkpoint:".to_owned(),
            "      every: 200".to_owned(),
        ]);
        lines
    }
}

/// A line with a comment behind it.
fn commented(line: &str, comment: &str) -> String {
    format!("{line:<COMMENT_AT$}  # {comment}")
}
