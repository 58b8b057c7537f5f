//! The `critic` section: what learns the values that `advantage: gae` is made from.

use serde::{Deserialize, Serialize};

use super::algorithm::Advantage;
use super::optimizer::OptimizerConfig;
use super::rlvr::RlvrConfig;
use crate::document::Section;

/// The policy's model under a head that gives a value for each token, in place of a distribution. It begins with the
/// policy's weights before the first RL step and a head of 0, and is trained on a step's completions in as many epochs
/// and mini-batches, its loss aggregated as the policy's is.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CriticConfig {
    /// A value moves by at most this from where it was before the step, as far as its loss is concerned; above 0.
    /// Default: as far as it likes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_clip: Option<f64>,
    /// First RL steps in which only the critic is trained. Default 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Its optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
}

impl RlvrConfig {
    /// Reports values and advantages that do not go together. `at` is the pipeline.
    pub(super) fn validate_critic(&self, at: &Section) {
        let needed = matches!(self.algorithm.advantage, Advantage::Gae(_));
        let given = at.given(&["algorithm.advantage"]);
        let Some(critic) = &self.critic else {
            let help = "write `critic: {optimizer: {adamw: {learning_rate: 1.0e-5}}}` beside `algorithm`";
            given.ensure(!needed, "critic", "it is missing, and `advantage: gae` needs its values", help);
            return;
        };
        let help = "write `advantage: gae`, or leave the critic out";
        given.ensure(needed, "critic", "no advantage is made from its values", help);
        let clip = critic.value_clip;
        let holds = clip.is_none_or(|clip| clip > 0.0);
        at.number("critic.value_clip", clip.unwrap_or(1.0), holds, "above 0");
        critic.optimizer.validate(&at.below("critic.optimizer"));
    }
}

impl CriticConfig {
    /// Reports a part of the run of `steps` that does not end before it.
    pub fn validate_over(&self, steps: u64, at: &Section) {
        at.ensure(
            self.warmup_steps < steps,
            "warmup_steps",
            format!("{} of {steps} steps leave none to the policy", self.warmup_steps),
            "write fewer than the steps",
        );
        self.optimizer.validate_over(steps, &at.below("optimizer"));
    }
}
