//! The fields of a reward model, and the strategy of a reward model that is not on the host.

use std::path::PathBuf;

use anyroll_backends::DType;
use serde::{Deserialize, Serialize};

use super::schema::Devices;
use super::stage::ZeroStage;
use super::strategy::{Fp16Config, Offload, Precision, validate_collective_timeout};
use crate::document::Section;

/// A reward model: a published sequence classifier with one label. With `per_step` it is a process reward model: a
/// token classifier with two labels, wrong and right.
///
/// With `backend: cpu` and neither `devices` nor a `strategy`, every rank has a complete copy on the host, and scores
/// while completions are sampled. Otherwise the ranks share one model, and score after all completions are sampled.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RewardModelConfig {
    /// Folder of the model, which starts at the config's folder if relative, or its name on the hub, `ORG/NAME`.
    pub path: PathBuf,
    /// True if prompt and completion are two messages in the model's chat template; false if they are one text.
    /// With `per_step` true is for a prompt in the template, with the steps after it. Default true.
    #[serde(default = "yes")]
    pub chat: bool,
    /// Reduction of the probabilities that the steps of a completion are right, for a process reward model.
    /// Default: none, and the score is that of the whole text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_step: Option<PerStep>,
    /// Text between the steps of a completion, with `per_step`; not empty. It is that of the model's training.
    /// Default a line break, `"\n"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_separator: Option<String>,
    /// Backend that computes the model. Default `cpu`.
    #[serde(default = "host")]
    pub backend: String,
    /// Devices of the model, one for each rank. Default: the policy's, or with another backend the first ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
    /// Strategy of the reward model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RewardStrategyConfig>,
    /// Dtype of the model's weights and activations. Default fp32.
    #[serde(default)]
    pub dtype: RewardDtype,
    /// Number of completions of a rank's forward pass; 1 or above. Memory grows with the number; scores are equal up to
    /// rounding. Default 8.
    #[serde(default = "eight")]
    pub batch_size: usize,
}

/// Reduction of a completion's steps to its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PerStep {
    /// The smallest probability.
    Min,
    /// The mean of the probabilities.
    Mean,
    /// The probability of the last step.
    Last,
    /// The product of the probabilities.
    Product,
}

impl PerStep {
    /// Returns the score of a completion with these probabilities of its steps. A completion without a step has the
    /// lowest score, 0.
    pub fn reduce(self, probabilities: &[f64]) -> f64 {
        let Some(last) = probabilities.last() else { return 0.0 };
        match self {
            // NaN is kept, so that it is reported.
            Self::Min => probabilities
                .iter()
                .copied()
                .fold(*last, |least, next| if next < least || next.is_nan() { next } else { least }),
            Self::Mean => probabilities.iter().sum::<f64>() / probabilities.len() as f64,
            Self::Last => *last,
            Self::Product => probabilities.iter().product(),
        }
    }
}

/// Strategy of a model that only scores.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardStrategyConfig {
    /// Sharding of the weights: 0, a complete copy on every rank; 3, sharded over the ranks; or auto: 0 if that fits.
    /// Scores do not depend on the sharding. Default 0.
    pub zero_stage: ZeroStage,
    /// Offload of the model between uses. Scores do not depend on offload.
    pub offload: RewardOffloadConfig,
    /// Timeout of a collective in seconds; above 0, at most 86400. An unfinished collective is then aborted.
    /// Default: the policy's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collective_timeout_s: Option<f64>,
}

/// Offload of a reward model between uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardOffloadConfig {
    /// Offload of the weights. Default between_steps.
    pub params: Offload,
}

impl Default for RewardStrategyConfig {
    fn default() -> Self {
        Self {
            zero_stage: ZeroStage::Stage(0),
            offload: RewardOffloadConfig::default(),
            collective_timeout_s: None,
        }
    }
}

impl Default for RewardOffloadConfig {
    fn default() -> Self {
        Self { params: Offload::BetweenSteps }
    }
}

/// Dtype of weights that are not trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardDtype {
    /// 32-bit IEEE.
    #[default]
    Fp32,
    /// bfloat16.
    Bf16,
    /// 16-bit IEEE.
    Fp16,
}

impl RewardDtype {
    /// Returns the dtype of tensors.
    pub fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Fp16 => DType::F16,
        }
    }

    /// Returns the precision of strategies.
    pub fn precision(self) -> Precision {
        match self {
            Self::Fp32 => Precision::Fp32,
            Self::Bf16 => Precision::Bf16,
            Self::Fp16 => Precision::Fp16(Fp16Config::default()),
        }
    }
}

impl RewardModelConfig {
    /// Returns the text between the steps of a completion.
    pub fn separator(&self) -> &str {
        self.step_separator.as_deref().unwrap_or("\n")
    }

    pub(super) fn validate(&self, at: &Section) {
        at.positive("batch_size", self.batch_size);
        let separator = self.step_separator.as_deref();
        let help = "write the text between steps, such as \"\\n\"";
        at.ensure(separator != Some(""), "step_separator", "it is empty", help);
        at.given(&["per_step"]).ensure(
            separator.is_none() || self.per_step.is_some(),
            "step_separator",
            "without `per_step` the score is that of the whole text",
            "add `per_step: min`, or leave this out",
        );
        let Some(RewardStrategyConfig { zero_stage, collective_timeout_s, .. }) = &self.strategy else {
            return;
        };
        at.ensure(
            matches!(zero_stage, ZeroStage::Stage(0 | 3) | ZeroStage::Auto),
            "strategy.zero_stage",
            "a model that is not trained is whole on every rank, 0, or sharded, 3",
            "write 0, 3 or auto",
        );
        if let Some(timeout_s) = collective_timeout_s {
            validate_collective_timeout(&at.below("strategy"), *timeout_s);
        }
    }
}

fn yes() -> bool {
    true
}

fn eight() -> usize {
    8
}

/// Returns the backend that each rank has for itself.
pub fn host() -> String {
    "cpu".into()
}
