//! The inputs of `anyroll evaluate`: records, a reward and sampling, in the form of a pipeline's fields.

use serde::Deserialize;

use super::data::DataConfig;
use super::reward::{RewardConfig, RewardTerm};
use super::rlvr::EvaluationConfig;
use crate::document::Section;

/// Records, reward and sampling of an evaluation without a run.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluateConfig {
    /// Source of prompts and answers; `None` for that of the evaluated run.
    #[serde(default)]
    pub data: Option<DataConfig>,
    /// Reward; `None` for that of the evaluated run.
    #[serde(default)]
    pub reward: Option<RewardConfig>,
    /// Divisor of the logits of the samples; `None` for that of the evaluated run.
    #[serde(default)]
    pub temperature: Option<f64>,
    /// Total probability of the most likely tokens that are sampled from; `None` for that of the evaluated run.
    #[serde(default)]
    pub top_p: Option<f64>,
}

impl EvaluateConfig {
    /// Reports invalid fields, and rewards that need a run.
    pub fn validate(&self, at: &Section) {
        let (temperature, top_p) = (self.temperature.unwrap_or(1.0), self.top_p.unwrap_or(1.0));
        EvaluationConfig { temperature, top_p, ..EvaluationConfig::default() }.validate(at);
        if let Some(data) = &self.data {
            data.validate_prompts(&at.below("data"));
            data.validate(&at.below("data"));
        }
        let Some(reward) = &self.reward else { return };
        reward.validate(&at.below("reward"));
        if let Some(index) = reward.terms().iter().position(RewardTerm::is_of_environment) {
            let help = "evaluate in a run with `rollout.environment` and `steps: 0`";
            at.refuse(&format!("reward[{index}].environment"), "it is of episodes, and here is none", help);
        }
    }
}
