//! Devices only for rollout. Each has a copy of the policy's weights and an engine, which samples during training. A
//! thread of this process drives it.

use std::{
    collections::VecDeque,
    fmt, mem, panic,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyroll_config::RolloutConfig;
use anyroll_strategy::Weights;
use serde::{Deserialize, Serialize};

use super::{Door, Engine, SamplingDevice};
use crate::{
    Error, Result,
    inference::{Sample, SampleRequest, Sampled},
    run::RolloutRole,
};

/// Condition for a device to stop sampling with its weights.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
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

/// An engine on a device that only samples. Neither its place nor the number of engines is part of a sample, since each
/// request has a seed.
pub trait RolloutEngine: fmt::Debug + Send {
    /// Hands over the weights of step `version`, with which the engine samples next.
    fn receive(&mut self, weights: &Weights, version: u64) -> Result<()>;

    /// Samples until the goal is reached, or `stops` returns true, and leaves the other samples unfinished. Calls `ended` with
    /// the index and the sample of each that ends.
    fn sample(
        &mut self,
        dealt: &Dealt,
        ended: &dyn Fn(usize, &Sample),
        stops: &dyn Fn() -> bool,
    ) -> Result<Sampled>;

    /// Returns true if the engine is gone, with the samples that it had not sent back.
    fn is_lost(&self) -> bool {
        false
    }

    /// Says that the run has ended without a failure.
    fn end(&mut self) {}
}

/// Samples of an engine.
#[derive(Clone, Debug)]
pub struct Dealt {
    /// Their indices among all requests.
    pub numbers: Vec<usize>,
    /// Their requests.
    pub asked: Vec<SampleRequest>,
    /// Condition for the end.
    pub goal: Goal,
}

/// Rollout devices of this rank.
#[derive(Debug)]
pub struct Devices {
    engines: Vec<Box<dyn RolloutEngine>>,
    /// The way of engines of other hosts; `None` if all are in this process.
    door: Option<Door>,
    running: Option<Running>,
    /// Time for which this rank has waited until engines had the weights, since it was last asked.
    sent: Duration,
}

/// Completions in flight.
#[derive(Debug)]
struct Running {
    /// Samples as they were at the start of the devices.
    samples: Vec<Sample>,
    /// One thread per device.
    threads: VecDeque<JoinHandle<Result<Part>>>,
    /// Stops the threads after their current pass.
    given_up: Arc<AtomicBool>,
}

/// Finished work of a device.
#[derive(Debug)]
struct Part {
    engine: Box<dyn RolloutEngine>,
    /// Indices of the device's samples.
    numbers: Vec<usize>,
    sampled: Sampled,
    took: Duration,
}

/// Finished work of all devices.
#[derive(Debug)]
pub struct Done {
    /// Samples in the order of the requests, and the passes of the device with the most.
    pub sampled: Sampled,
    /// Time of the slowest device.
    pub took: Duration,
    /// Time for which the rank has waited until the devices had the weights.
    pub sent: Duration,
    /// Number of the devices.
    pub engines: usize,
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
        let open = |&ordinal| {
            let device = SamplingDevice::open(engine, rollout, (&role.backend, ordinal))?;
            Ok::<_, Error>(Box::new(device) as Box<dyn RolloutEngine>)
        };
        let engines = role.ordinals[local_rank].iter().map(open).collect::<Result<_>>()?;
        Ok(Self { engines, door: None, running: None, sent: Duration::ZERO })
    }

    /// Devices of other hosts, as they come through `door`.
    pub fn elsewhere(door: Door) -> Self {
        Self { engines: Vec::new(), door: Some(door), running: None, sent: Duration::ZERO }
    }

    /// Returns true if devices come and go, so that samples may be left unfinished that were due.
    pub fn come_and_go(&self) -> bool {
        self.door.is_some()
    }

    /// Returns true if there is no device at present.
    pub fn is_empty(&self) -> bool {
        self.engines.is_empty()
    }

    /// Sends `weights` of step `version`, and starts sampling with them. Prompts are dealt to the devices; equal
    /// prompts stay together. Each device samples until it has reached `goal`, and leaves the other samples
    /// unfinished. Its thread calls `ended` with each sample and its index when the sample ends. Without a device, which
    /// may still come, nothing starts.
    pub fn start(
        &mut self,
        weights: &Weights,
        version: u64,
        asked: Vec<SampleRequest>,
        goal: Goal,
        ended: impl Fn(usize, &Sample) + Send + Sync + 'static,
    ) -> Result<()> {
        assert!(self.running.is_none(), "what is sampled was not waited for");
        if let Some(door) = &mut self.door
            && !door.fill(&mut self.engines, weights)?
        {
            return Ok(());
        }
        let samples: Vec<Sample> = asked.iter().map(|asked| asked.sample.clone()).collect();
        let dealt = deal(asked, self.engines.len(), goal);
        let (ended, given_up) = (Arc::new(ended), Arc::new(AtomicBool::new(false)));
        let mut running = Running { samples, threads: VecDeque::new(), given_up: given_up.clone() };
        for (mut engine, dealt) in mem::take(&mut self.engines).into_iter().zip(dealt) {
            let started = Instant::now();
            engine.receive(weights, version)?;
            self.sent += started.elapsed();
            let (ended, given_up) = (ended.clone(), given_up.clone());
            let work = move || {
                let started = Instant::now();
                let of_all = |index: usize, sample: &Sample| ended(dealt.numbers[index], sample);
                let sampled = engine.sample(&dealt, &of_all, &|| given_up.load(Ordering::Relaxed));
                if sampled.is_err() {
                    given_up.store(true, Ordering::Relaxed); // the others need not finish
                }
                Ok(Part { engine, numbers: dealt.numbers, sampled: sampled?, took: started.elapsed() })
            };
            let thread = thread::Builder::new().name("rollout".into()).spawn(work).map_err(Error::Thread)?;
            running.threads.push_back(thread);
        }
        self.running = Some(running);
        Ok(())
    }

    /// Waits until all devices are done; `None` if nothing was in flight.
    pub fn wait(&mut self) -> Result<Option<Done>> {
        let Some(mut running) = self.running.take() else { return Ok(None) };
        let mut all = Sampled::none_of(mem::take(&mut running.samples));
        let (mut took, engines) = (Duration::ZERO, running.threads.len());
        while let Some(thread) = running.threads.pop_front() {
            let part = thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))?;
            all.passes = all.passes.max(part.sampled.passes);
            all.speculated = all.speculated + part.sampled.speculated;
            took = took.max(part.took);
            for (number, sample) in part.numbers.into_iter().zip(part.sampled.samples) {
                all.samples[number] = sample;
            }
            if !part.engine.is_lost() {
                self.engines.push(part.engine);
            }
        }
        Ok(Some(Done { sampled: all, took, sent: mem::take(&mut self.sent), engines }))
    }

    /// Tells devices of other hosts that the run has ended without a failure.
    pub fn end(&mut self) -> Result<()> {
        self.wait()?;
        self.engines.iter_mut().for_each(|engine| engine.end());
        self.door.iter().for_each(Door::close);
        Ok(())
    }
}

/// Deals samples to engines.
fn deal(asked: Vec<SampleRequest>, engines: usize, goal: Goal) -> Vec<Dealt> {
    let mut dealt = vec![Dealt { numbers: Vec::new(), asked: Vec::new(), goal }; engines];
    let numbered: Vec<(usize, SampleRequest)> = asked.into_iter().enumerate().collect();
    let of_prompts = numbered.chunk_by(|(_, a), (_, b)| a.sample.context() == b.sample.context());
    for (index, group) in of_prompts.enumerate() {
        let Dealt { numbers, asked, .. } = &mut dealt[index % engines];
        numbers.extend(group.iter().map(|(number, _)| *number));
        asked.extend(group.iter().map(|(_, asked)| asked.clone()));
    }
    dealt
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
