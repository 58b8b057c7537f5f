//! The `critic` section: the model that predicts the values of `advantage: gae`.

use serde::{Deserialize, Serialize};

use super::algorithm::Advantage;
use super::optimizer::OptimizerConfig;
use super::rlvr::RlvrConfig;
use crate::document::Section;

/// A copy of the policy's model with a head that predicts a value for each token. The critic begins with the policy's
/// weights before the first RL step, and with a head of 0. The critic is trained on a step's completions, with the
/// epochs, the mini-batches and the aggregation of the policy.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CriticConfig {
    /// Bound on a value's change in the value loss, from the value before the step; above 0. Default: no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_clip: Option<f64>,
    /// Number of first RL steps that train only the critic. Default 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// The critic's optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
}

impl RlvrConfig {
    /// Reports a critic without `advantage: gae`, and the reverse. `at` is the pipeline.
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
    /// Reports warm-up or schedule steps that do not end before a run of `steps` does.
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
