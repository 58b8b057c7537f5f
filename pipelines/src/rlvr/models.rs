//! Models of a run: the policy, the reference and the critic. Each may be on devices of its own; results for another
//! model pass through the policy's devices.

use tch::Tensor;

use super::{Critic, Decoder, Task, prepare::scores};
use crate::{
    Result,
    inference::Sample,
    train::{Learner, Reference},
};

/// The policy and the models around it.
#[derive(Debug)]
pub struct Models {
    /// The policy, which is trained.
    pub learner: Learner<Decoder>,
    /// The frozen reference; `None` without a KL term, or if the reference is the policy without adapters.
    pub reference: Option<Reference>,
    /// The critic; `None` unless advantages are computed from values.
    pub critic: Option<Critic>,
}

impl Models {
    /// Starts to offload the states that rollout does not need; in the first step some are still on the device.
    pub fn make_room(&mut self) -> Result<()> {
        self.learner.start_leaving()?;
        self.reference.as_mut().map_or(Ok(()), Reference::offload)
    }

    /// The policy's log-probs and entropies at these samples' tokens.
    pub fn policy_scores(&mut self, task: &Task, samples: &[Sample]) -> Result<[Tensor; 2]> {
        let device = self.learner.device();
        let pack = |samples: &[Sample]| task.packing.pack_for_policy(device, samples);
        scores(&mut self.learner.model, self.learner.micro_batch, samples, pack)
    }

    /// The reference's log-probs, or those of the policy without adapters; `None` without a KL term.
    pub fn reference_logprobs(&mut self, task: &Task, samples: &[Sample]) -> Result<Option<Tensor>> {
        let device = self.learner.device();
        let [logprobs, _] = match &mut self.reference {
            Some(reference) => reference.score(|model, micro_batch| {
                let own = model.torch_device();
                scores(model, micro_batch, samples, |samples| task.packing.pack(own, samples))
            })?,
            None if task.has_adapters && task.config.algorithm.kl_coef > 0.0 => {
                let pack = |samples: &[Sample]| Ok(task.packing.pack(device, samples)?.without_adapters());
                scores(&mut self.learner.model, self.learner.micro_batch, samples, pack)?
            }
            None => return Ok(None),
        };
        Ok(Some(logprobs.f_to_device(device)?))
    }

    /// The critic's values of these samples' tokens, fp32 `[M]` on the policy's device; `None` without a critic.
    pub fn values(&mut self, task: &Task, samples: &[Sample]) -> Result<Option<Tensor>> {
        let device = self.learner.device();
        let critic = self.critic.as_mut();
        critic.map(|critic| critic.values(&task.packing, samples, device)).transpose()
    }

    /// Copies values to the policy's device.
    pub fn to_device(&self, values: &[f32]) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(values)?.f_to_device(self.learner.device())?)
    }
}
