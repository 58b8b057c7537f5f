//! The models of a run: the policy that is trained, and what it is compared with. Each may be held on devices of its own;
//! what one computes for another goes by way of the policy's.

use tch::Tensor;

use super::{Critic, Decoder, Task, prepare::scores};
use crate::{
    Result,
    inference::Sample,
    train::{Learner, Reference},
};

/// The policy and what surrounds it.
#[derive(Debug)]
pub struct Models {
    /// The policy, which is trained.
    pub learner: Learner<Decoder>,
    /// Its frozen copy from after the warm-up; `None` without a KL term, and with adapters, where it is the policy with
    /// these off.
    pub reference: Option<Reference>,
    /// The critic; `None` unless advantages are made from values.
    pub critic: Option<Critic>,
}

impl Models {
    /// Lets leave the device what rollout needs no more; what is still there is so in the first step.
    pub fn make_room(&mut self) -> Result<()> {
        self.learner.start_leaving()?;
        self.reference.as_mut().map_or(Ok(()), Reference::offload)
    }

    /// The policy's log-probs and entropies of these samples' tokens.
    pub fn policy_scores(&mut self, task: &Task, samples: &[Sample]) -> Result<[Tensor; 2]> {
        let device = self.learner.device();
        let pack = |samples: &[Sample]| task.packing.pack(device, samples);
        scores(&mut self.learner.model, self.learner.micro_batch_size, samples, pack)
    }

    /// Log-probs of the frozen copy, or of the policy with its adapters off; `None` where nothing compares with them.
    pub fn reference_logprobs(&mut self, task: &Task, samples: &[Sample]) -> Result<Option<Tensor>> {
        let device = self.learner.device();
        let [logprobs, _] = match &mut self.reference {
            Some(reference) => reference.score(|model, size| {
                let own = model.torch_device();
                scores(model, size, samples, |samples| task.packing.pack(own, samples))
            })?,
            None if task.has_adapters && task.config.algorithm.kl_coef > 0.0 => {
                let pack = |samples: &[Sample]| Ok(task.packing.pack(device, samples)?.without_adapters());
                scores(&mut self.learner.model, self.learner.micro_batch_size, samples, pack)?
            }
            None => return Ok(None),
        };
        Ok(Some(logprobs.f_to_device(device)?))
    }

    /// The critic's values of these samples' tokens, if there is one: fp32 `[M]` on the policy's device.
    pub fn values(&mut self, task: &Task, samples: &[Sample]) -> Result<Option<Tensor>> {
        let device = self.learner.device();
        let critic = self.critic.as_mut();
        critic.map(|critic| critic.values(&task.packing, samples, device)).transpose()
    }

    /// Values on the policy's device.
    pub fn to_device(&self, values: &[f32]) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(values)?.f_to_device(self.learner.device())?)
    }
}
