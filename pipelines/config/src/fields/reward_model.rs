//! A reward model's fields, and how the ranks hold one that is not on the host.

use std::path::PathBuf;

use anyroll_backends::DType;
use serde::{Deserialize, Serialize};

use super::schema::Devices;
use super::stage::ZeroStage;
use super::strategy::{Fp16Config, Offload, Precision, validate_collective_timeout};
use crate::document::Section;

/// A reward model: a published sequence classifier with one label.
///
/// With `backend: cpu` and neither `devices` nor a `strategy` every rank has all of it on the host, and scores by itself while
/// completions are sampled. Otherwise the ranks hold it together, and score once all is sampled.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RewardModelConfig {
    /// Its folder; a relative path starts at the current folder.
    pub path: PathBuf,
    /// Whether prompt and completion are put to it as two messages in its chat template, or as one text. Default true.
    #[serde(default = "yes")]
    pub chat: bool,
    /// Where it computes. Default `cpu`.
    #[serde(default = "host")]
    pub backend: String,
    /// Its devices, as many as there are ranks. Default: the policy's, or with another backend the first ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
    /// How the ranks hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RewardStrategyConfig>,
    /// The dtype of its weights and activations. Default fp32.
    #[serde(default)]
    pub dtype: RewardDtype,
    /// Completions that a rank puts through a forward pass. Memory grows with it; scores depend on it by rounding alone.
    /// Default 8.
    #[serde(default = "eight")]
    pub batch_size: usize,
}

/// How the ranks hold a model that only scores.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardStrategyConfig {
    /// 0, whole on every rank, 3, sharded over them, or auto: 0 if that fits. Scores do not depend on it. Default 0.
    pub zero_stage: ZeroStage,
    /// What leaves the device while it does not score; scores do not depend on it.
    pub offload: RewardOffloadConfig,
    /// Seconds after which a collective that has not finished is aborted. Default: the policy's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collective_timeout_s: Option<f64>,
}

/// What leaves the device while a reward model does not score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardOffloadConfig {
    /// The weights. Default between_steps.
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

/// A dtype of weights that are not trained.
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
    /// As tensors have it.
    pub fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Fp16 => DType::F16,
        }
    }

    /// As strategies have it.
    pub fn precision(self) -> Precision {
        match self {
            Self::Fp32 => Precision::Fp32,
            Self::Bf16 => Precision::Bf16,
            Self::Fp16 => Precision::Fp16(Fp16Config::default()),
        }
    }
}

impl RewardModelConfig {
    pub(super) fn validate(&self, at: &Section) {
        at.positive("batch_size", self.batch_size);
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

/// The backend that each rank has for itself.
pub fn host() -> String {
    "cpu".into()
}
