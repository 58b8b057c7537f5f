//! [`SamplingDevice`]: a device that only samples, with its copy of the policy's weights.

use std::{ops::ControlFlow, sync::Arc};

use anyroll_backends::{Device, Stream, ops};
use anyroll_config::{RolloutConfig, RolloutWeights};
use anyroll_data::Tokenizer;
use anyroll_models::Decoder;
use anyroll_strategy::{Weights, shared};
use tch::Tensor;

use super::{
    Engine,
    devices::{Dealt, Goal, RolloutEngine},
    engine::sampler,
};
use crate::{
    Result,
    inference::{Sample, Sampled, Sampler},
    train::{open_device, torch_device},
};

/// Progress of a device.
struct Progress {
    goal: Goal,
    /// Due samples of the device that have not ended.
    left: usize,
    /// Largest number of tokens by which a sample has grown.
    grown: usize,
}

impl Progress {
    fn new(goal: Goal, numbers: &[usize]) -> Self {
        Self { goal, left: numbers.iter().filter(|number| **number < goal.due).count(), grown: 0 }
    }

    /// Adds a sample that has ended and was `begun`.
    fn add(&mut self, number: usize, begun: &Sample, ended: &Sample) {
        self.grown = self.grown.max(ended.completion_len() - begun.completion_len());
        if number < self.goal.due {
            self.left -= 1;
            self.goal.longest = self.goal.longest.max(ended.completion_len());
        }
    }

    fn is_enough(&self) -> bool {
        self.left == 0 && self.grown * self.goal.part >= self.goal.longest
    }
}

/// An engine on a device of this process.
#[derive(Debug)]
pub struct SamplingDevice {
    sampler: Sampler,
    torch: tch::Device,
    /// The last weights that were sent; empty before the first ones.
    pub(super) weights: Weights,
    /// The weights that sample, if they have not sampled yet: the last ones, or their merged form, or either in 8 bits.
    ready: Weights,
    /// Version of the weights.
    pub(super) version: u64,
    /// The policy's model, if its adapters are merged for sampling.
    merged: Option<Arc<Decoder>>,
    /// True if the layers' matrices are in 8 bits for sampling.
    in_eight_bits: bool,
}

impl SamplingDevice {
    /// Opens a device, which samples like `engine` with the options of `rollout`.
    pub fn open(engine: &Engine, rollout: &RolloutConfig, (backend, ordinal): (&str, usize)) -> Result<Self> {
        let device = open_device(backend, ordinal)?;
        let model = Arc::new(engine.sampler.model.on(torch_device(&*device)?)?);
        let models = (model, engine.merged.clone());
        Self::new(rollout, &device, models, engine.sampler.tokenizer.clone())
    }

    /// The engine of an open device, for a model on it. `merged` is the policy's, if its adapters are merged for sampling.
    pub fn new(
        rollout: &RolloutConfig,
        device: &Arc<dyn Device>,
        (model, merged): (Arc<Decoder>, Option<Arc<Decoder>>),
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let (torch, compute) = (torch_device(&**device)?, Stream::torch(device)?);
        let sampler = sampler(rollout, model, compute, tokenizer, None);
        let (weights, ready) = (Weights::new(), Weights::new());
        let in_eight_bits = rollout.weights == RolloutWeights::Fp8;
        Ok(Self { sampler, torch, weights, ready, version: 0, merged, in_eight_bits })
    }

    /// Samples next with the present values of the device's weights, those of step `version`.
    pub(super) fn take(&mut self, version: u64) -> Result<()> {
        let weights = shared(&self.weights);
        self.version = version;
        let merged = match &self.merged {
            Some(model) => model.merge(weights)?,
            None => weights,
        };
        self.ready = if self.in_eight_bits { self.sampler.model.all_in_eight_bits(merged)? } else { merged };
        Ok(())
    }
}

impl RolloutEngine for SamplingDevice {
    /// Copies weights, in the order of the streams of libtorch. All weights are sent every time, so that merging needs no
    /// second copy here.
    fn receive(&mut self, from: &Weights, version: u64) -> Result<()> {
        if self.weights.is_empty() {
            let like = |tensor: &Tensor| Tensor::f_empty(tensor.size(), (tensor.kind(), self.torch));
            let units = from.iter().map(|unit| unit.iter().map(like).collect());
            self.weights = units.collect::<Result<_, _>>()?;
        }
        for (own, from) in self.weights.iter_mut().flatten().zip(from.iter().flatten()) {
            ops::copy_across(own, from)?;
        }
        self.take(version)
    }

    fn sample(
        &mut self,
        Dealt { numbers, asked, goal }: &Dealt,
        ended: &dyn Fn(usize, &Sample),
        stops: &dyn Fn() -> bool,
    ) -> Result<Sampled> {
        let mut progress = Progress::new(*goal, numbers);
        let weights = std::mem::take(&mut self.ready); // merged ones live no longer than this call
        self.sampler.sample(&weights, self.version, asked, None, |samples, indices| {
            for &index in indices {
                ended(index, &samples[index]);
                progress.add(numbers[index], &asked[index].sample, &samples[index]);
            }
            match progress.is_enough() || stops() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use anyroll_models::generation::Ending;

    use super::*;

    fn sample(tokens: usize) -> Sample {
        Sample { tokens: vec![7; 1 + tokens], ending: Some(Ending::Stop), ..Sample::begin(vec![1]) }
    }

    /// Samples 0, 2, 4 and 6 belong to a device, and begin with these numbers of tokens.
    const BEGUN: [usize; 4] = [6, 0, 0, 0];

    /// Index of the end, given as a sample with its tokens, at which the goal is reached.
    fn enough_at(goal: Goal, ends: &[(usize, usize)]) -> Option<usize> {
        let mut progress = Progress::new(goal, &[0, 2, 4, 6]);
        ends.iter().position(|&(index, tokens)| {
            progress.add(2 * index, &sample(BEGUN[index]), &sample(tokens));
            progress.is_enough()
        })
    }

    #[test]
    fn a_device_samples_what_is_due_and_no_less_than_its_part() {
        let goal = |due, longest, part| Goal { due, longest, part };
        // The due samples have ended, and one sample has grown by all of the longest.
        assert_eq!(enough_at(goal(4, 0, 1), &[(2, 2), (1, 3), (0, 9)]), None);
        assert_eq!(enough_at(goal(3, 0, 1), &[(2, 2), (0, 7), (1, 9)]), Some(2));
        // One sample has grown by 3 of 9 tokens: half of them would be enough.
        let ends = [(0, 9), (2, 4), (3, 5), (1, 6)];
        assert_eq!(enough_at(goal(1, 0, 2), &ends), Some(2));
        assert_eq!(enough_at(goal(1, 0, 3), &ends), Some(0));
        // No sample is due, or the longest completion is from before.
        assert_eq!(enough_at(goal(0, 10, 2), &ends), Some(2));
        assert_eq!(enough_at(goal(1, 12, 2), &ends), Some(3));
    }
}
