//! Devices only for rollout. Each has a copy of the policy's weights, and a thread that runs an engine during
//! training.

use std::{
    mem,
    ops::ControlFlow,
    panic,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyroll_backends::{Stream, ops};
use anyroll_config::RolloutConfig;
use anyroll_models::Decoder;
use anyroll_strategy::{Weights, shared};
use tch::Tensor;

use super::{Engine, engine::sampler};
use crate::{
    Error, Result,
    inference::{Sample, SampleRequest, Sampled, Sampler},
    run::RolloutRole,
    train::{open_device, torch_device},
};

/// Condition for a device to stop sampling with its weights.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    /// Number of samples that must end, the first of all requests.
    pub due: usize,
    /// Tokens of the longest completion among the due samples, as far as known.
    pub longest: usize,
    /// Divisor of `longest` that gives the tokens by which one of the device's samples must grow: 1 is all of
    /// `longest`, 2 is half. The condition does not apply if no samples are left. Without the condition, long due
    /// completions would leave enough time for all of the next batch. Sampling of the next step would then end at
    /// once, and that of the step after it would be long again.
    pub part: usize,
}

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

/// Rollout devices of this rank.
#[derive(Debug)]
pub struct Devices {
    devices: Vec<SamplingDevice>,
    running: Option<Running>,
}

#[derive(Debug)]
struct SamplingDevice {
    sampler: Arc<Sampler>,
    torch: tch::Device,
    /// The last weights that were sent, or their merged form; empty before the first ones.
    weights: Weights,
    /// The policy's model, if its adapters are merged for sampling.
    merged: Option<Arc<Decoder>>,
}

/// Completions in flight.
#[derive(Debug)]
struct Running {
    /// Samples as they were at the start of the devices.
    samples: Vec<Sample>,
    /// One thread per device.
    threads: Vec<JoinHandle<Result<Part>>>,
    /// Stops the threads after their current pass.
    given_up: Arc<AtomicBool>,
}

/// Finished work of a device.
#[derive(Debug)]
struct Part {
    /// Indices of the device's samples.
    numbers: Vec<usize>,
    sampled: Sampled,
    took: Duration,
}

impl Devices {
    /// Opens the devices of the rank `local_rank` of this host. They sample like `engine`, with the options of
    /// `rollout`.
    pub fn open(
        engine: &Engine,
        rollout: &RolloutConfig,
        role: &RolloutRole,
        local_rank: usize,
    ) -> Result<Self> {
        let devices = role.ordinals[local_rank].iter().map(|&ordinal| {
            let device = open_device(&role.backend, ordinal)?;
            let torch = torch_device(&*device)?;
            let (model, compute) = (Arc::new(engine.sampler.model.on(torch)?), Stream::torch(&device)?);
            let sampler = sampler(rollout, model, compute, engine.sampler.tokenizer.clone(), None);
            let merged = engine.merged.clone();
            Ok(SamplingDevice { sampler: Arc::new(sampler), torch, weights: Weights::new(), merged })
        });
        Ok(Self { devices: devices.collect::<Result<_>>()?, running: None })
    }

    /// Sends `weights` of step `version`, and starts sampling with them. Prompts are dealt to the devices; equal
    /// prompts stay together. Each device samples until it has reached `goal`, and leaves the other samples
    /// unfinished. Its thread calls `ended` with each sample and its index when the sample ends.
    pub fn start(
        &mut self,
        weights: &Weights,
        version: u64,
        asked: Vec<SampleRequest>,
        goal: Goal,
        ended: impl Fn(usize, &Sample) + Send + Sync + 'static,
    ) -> Result<()> {
        assert!(self.running.is_none(), "what is sampled was not waited for");
        let samples: Vec<Sample> = asked.iter().map(|asked| asked.sample.clone()).collect();
        let dealt = deal(asked, self.devices.len());
        let (ended, given_up) = (Arc::new(ended), Arc::new(AtomicBool::new(false)));
        let mut running = Running { samples, threads: Vec::new(), given_up: given_up.clone() };
        for (device, (numbers, asked)) in self.devices.iter_mut().zip(dealt) {
            let mut progress = Progress::new(goal, &numbers);
            let weights = device.receive(weights)?;
            let (sampler, ended, given_up) = (device.sampler.clone(), ended.clone(), given_up.clone());
            let work = move || {
                let started = Instant::now();
                let sampled = sampler.sample(&weights, version, &asked, None, |samples, indices| {
                    for &index in indices {
                        ended(numbers[index], &samples[index]);
                        progress.add(numbers[index], &asked[index].sample, &samples[index]);
                    }
                    match progress.is_enough() || given_up.load(Ordering::Relaxed) {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                });
                if sampled.is_err() {
                    given_up.store(true, Ordering::Relaxed); // the others need not finish
                }
                Ok(Part { numbers, sampled: sampled?, took: started.elapsed() })
            };
            let thread = thread::Builder::new().name("rollout".into()).spawn(work).map_err(Error::Thread)?;
            running.threads.push(thread);
        }
        self.running = Some(running);
        Ok(())
    }

    /// Waits until all devices are done, and returns the time of the slowest device; `None` if nothing was in flight.
    pub fn wait(&mut self) -> Result<Option<(Sampled, Duration)>> {
        let Some(mut running) = self.running.take() else { return Ok(None) };
        let mut all = Sampled { samples: mem::take(&mut running.samples), passes: 0, kept_tokens: 0 };
        let mut longest = Duration::ZERO;
        while let Some(thread) = running.threads.pop() {
            let part = thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))?;
            all.passes = all.passes.max(part.sampled.passes);
            longest = longest.max(part.took);
            for (number, sample) in part.numbers.into_iter().zip(part.sampled.samples) {
                all.samples[number] = sample;
            }
        }
        Ok(Some((all, longest)))
    }
}

/// Samples for each of `devices` devices, with their indices.
fn deal(asked: Vec<SampleRequest>, devices: usize) -> Vec<(Vec<usize>, Vec<SampleRequest>)> {
    let mut dealt: Vec<(Vec<usize>, Vec<SampleRequest>)> = vec![Default::default(); devices];
    let numbered: Vec<(usize, SampleRequest)> = asked.into_iter().enumerate().collect();
    let of_prompts = numbered.chunk_by(|(_, a), (_, b)| a.sample.context() == b.sample.context());
    for (index, group) in of_prompts.enumerate() {
        let (numbers, asked) = &mut dealt[index % devices];
        numbers.extend(group.iter().map(|(number, _)| *number));
        asked.extend(group.iter().map(|(_, asked)| asked.clone()));
    }
    dealt
}

impl SamplingDevice {
    /// Copies weights, in the order of the streams of libtorch. Returns them for the device's thread, with merged
    /// adapters if requested. All weights are sent every time, so that merging needs no second copy here.
    fn receive(&mut self, from: &Weights) -> Result<Weights> {
        if self.weights.is_empty() {
            let like = |tensor: &Tensor| Tensor::f_empty(tensor.size(), (tensor.kind(), self.torch));
            let units = from.iter().map(|unit| unit.iter().map(like).collect());
            self.weights = units.collect::<Result<_, _>>()?;
        }
        for (own, from) in self.weights.iter_mut().flatten().zip(from.iter().flatten()) {
            ops::copy_across(own, from)?;
        }
        let weights = shared(&self.weights);
        Ok(match &self.merged {
            Some(model) => model.merge(weights)?,
            None => weights,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Results and errors of the thread no longer matter, since something else has failed.
            let _ = thread.join();
        }
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
