//! The memory of a run before it is one: what each rank holds while it trains, scores and generates.
//!
//! Nothing is measured and no device is opened. What a strategy holds is told by the code that allocates it
//! ([`anyroll_strategy::plan`]), activations by the model's blocks ([`anyroll_models::Footprint`]); here it is put
//! together as pipelines go through a step. Roles that have devices of their own are counted on those, but for what samples
//! on a host.

mod choices;
mod images;
mod judged;
mod reward;
mod site;
mod stage;
mod texts;

use anyroll_models::Runs;
use anyroll_strategy::{State, plan::Held};
use serde::Serialize;

use images::Images;
use texts::Texts;

pub use choices::{Choice, choices};
pub use site::DevicePlan;
use site::{is_host, not_counted};
pub use stage::{Settled, Stages, Unsettled, settle};

use crate::{
    Error, Result,
    config::PipelineConfig,
    opened::Opened,
    run::{Run, Strategy},
    train::{offloaded, zero_config},
};

/// What a rank's device holds at the peak of a phase, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PhaseBytes {
    /// Those of the policy, its reference, its critic and reward models.
    pub weights: usize,
    /// Accumulated gradients.
    pub gradients: usize,
    /// Moments, and fp32 weights where the model runs with others.
    pub optimizer: usize,
    /// What libtorch makes on the way. Off the host it keeps that memory for its next pass, so there the most of all phases.
    pub activations: usize,
    /// Whole units that come and go: gathered weights, gradients under way.
    pub buffers: usize,
    /// Keys and values: as much as sequences need, if there is room.
    pub kv_cache: usize,
    /// Latents on their way and pixels, and the texts that are painted.
    pub images: usize,
    /// Networks that make pixels of latents, score these and read texts.
    pub frozen: usize,
    /// The driver's own, and what libraries hold besides.
    pub driver: usize,
}

impl PhaseBytes {
    /// All together.
    pub fn total(&self) -> usize {
        let Self { weights, gradients, optimizer, activations, buffers, .. } = self;
        let Self { kv_cache, images, frozen, driver, .. } = self;
        weights + gradients + optimizer + activations + buffers + kv_cache + images + frozen + driver
    }

    fn add(&mut self, held: &Held) {
        self.weights += held.weights;
        self.gradients += held.gradients;
        self.optimizer += held.optimizer;
        self.buffers += held.gathered + held.reducing;
    }
}

/// What one choice of strategies comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Of rank 0, which reads the texts of a run of images before there is a model; `None` if it does not.
    pub encode: Option<PhaseBytes>,
    /// Forward, backward and the optimizer's step of the policy.
    pub train: PhaseBytes,
    /// Reward models on the policy's device, one after the other; of images what decodes and scores them before training;
    /// `None` without one.
    pub reward: Option<PhaseBytes>,
    /// The critic's turn: its values, and its training; `None` without one.
    pub critic: Option<PhaseBytes>,
    /// The reference's log-probs, or the policy's own anew; `None` in a run that has no such pass.
    pub score: Option<PhaseBytes>,
    /// Sampling; of images, decoding those of an evaluation as well.
    pub generate: PhaseBytes,
    /// Host memory of a rank for states that are off the device, and for a checkpoint on its way.
    pub host: usize,
    /// Of the cache's bytes those without which not one sequence can be sampled.
    pub least_kv_cache: usize,
    /// Devices that roles have for themselves.
    pub others: Vec<DevicePlan>,
}

/// Where there is least room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tightest {
    /// The phase, and the devices if they are not the policy's.
    pub phase: String,
    /// What it takes.
    pub needs: usize,
    /// What there is.
    pub memory_bytes: usize,
}

impl Tightest {
    /// Bytes that are missing; below zero those to spare.
    pub fn missing(&self) -> i128 {
        self.needs as i128 - self.memory_bytes as i128
    }
}

impl MemoryPlan {
    /// The phases of the policy's device by name, in a step's order.
    pub fn phases(&self) -> impl Iterator<Item = (&'static str, PhaseBytes)> {
        let phases = [
            ("encode", self.encode),
            ("generate", Some(self.generate)),
            ("reward", self.reward),
            ("score", self.score),
            ("critic", self.critic),
            ("train", Some(self.train)),
        ];
        phases.into_iter().filter_map(|(name, phase)| Some((name, phase?)))
    }

    /// The phase that takes most of the policy's device, and how much.
    pub fn peak(&self) -> (&'static str, usize) {
        let totals = self.phases().map(|(name, phase)| (name, phase.total()));
        totals.max_by_key(|(_, total)| *total).expect("there are phases")
    }

    /// The phase with least room, where the policy's device has so many bytes. Devices of unknown memory have room.
    pub fn tightest(&self, memory_bytes: usize) -> Tightest {
        let (phase, needs) = self.peak();
        let here = Tightest { phase: phase.to_owned(), needs, memory_bytes };
        let others = self.others.iter().filter_map(|device| {
            let (phase, needs) = device.peak();
            let phase = format!("{phase} on {}", device.place());
            Some(Tightest { phase, needs, memory_bytes: device.memory_bytes? })
        });
        others.fold(here, |most, it| if it.missing() > most.missing() { it } else { most })
    }

    /// Whether it fits into a policy's device of so many bytes, and into those of the other roles.
    pub fn fits(&self, memory_bytes: usize) -> bool {
        self.tightest(memory_bytes).missing() <= 0
    }
}

/// How the roles of a run are held, with no stage open.
#[derive(Clone, Debug)]
pub struct Strategies {
    /// The policy.
    pub policy: Strategy,
    /// Its frozen copy.
    pub reference: Option<Strategy>,
    /// What values tokens.
    pub critic: Option<Strategy>,
    /// Reward models in the order of the reward's terms; `None` for one that each rank has on the host.
    pub reward_models: Vec<Option<Strategy>>,
}

/// Plans the memory of a run.
pub enum Planner {
    /// Of a language model.
    Texts(Box<Texts>),
    /// Of a model of images.
    Images(Box<Images>),
}

impl Planner {
    /// For `run`, whose stages may be open still, and what its config names.
    ///
    /// # Errors
    /// [`Error::NoPlan`] for a reward model that is trained.
    pub fn new(run: &Run, opened: &Opened) -> Result<Self> {
        match (&run.config.pipeline, opened) {
            (PipelineConfig::Diffusion(config), Opened::Shapes(dit)) => {
                Ok(Self::Images(Box::new(Images::of_shapes(run, config, dit)?)))
            }
            (PipelineConfig::Diffusion(config), Opened::Images(opened)) => {
                Ok(Self::Images(Box::new(Images::of_texts(run, config, opened)?)))
            }
            (_, Opened::Texts(texts)) if !run.config.trains_a_reward_model() => {
                Ok(Self::Texts(Box::new(Texts::new(run, texts)?)))
            }
            _ => Err(Error::NoPlan),
        }
    }

    /// The number of parameters.
    pub fn parameters(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.parameters(),
            Self::Images(images) => images.parameters(),
        }
    }

    /// Tokens of the longest prompt, and of the longest completion, where there are such.
    pub fn longest(&self) -> Option<(usize, usize)> {
        match self {
            Self::Texts(texts) => Some(texts.longest()),
            Self::Images(_) => None,
        }
    }

    /// What a micro-batch is made of, in words.
    pub fn describe(&self) -> String {
        match self {
            Self::Texts(texts) => {
                let (prompt, completion) = texts.longest();
                format!("sequences of up to {prompt} + {completion} tokens")
            }
            Self::Images(images) => images.describe(),
        }
    }

    /// What of `run` is left out, in words.
    pub fn not_counted(&self, run: &Run) -> Vec<String> {
        match self {
            Self::Texts(_) => not_counted(run),
            Self::Images(images) => images.not_counted(),
        }
    }

    /// Whether there is a frozen copy on the policy's devices.
    pub fn has_reference(&self) -> bool {
        match self {
            Self::Texts(texts) => texts.has_reference(),
            Self::Images(images) => images.has_reference(),
        }
    }

    /// Whether the loss is one of tokens, which logits are made for.
    fn has_logits(&self) -> bool {
        matches!(self, Self::Texts(_))
    }

    /// What these strategies come to.
    pub fn plan(&self, strategies: &Strategies) -> MemoryPlan {
        match self {
            Self::Texts(texts) => texts.plan(strategies),
            Self::Images(images) => images.plan(strategies),
        }
    }
}

/// Off the host libtorch keeps what activations took, so each phase has the most of all.
fn kept(on_host: bool, most: usize) -> impl Fn(PhaseBytes) -> PhaseBytes {
    move |phase| if on_host { phase } else { PhaseBytes { activations: most, ..phase } }
}

fn runs(strategy: &Strategy, on_host: bool) -> Runs {
    Runs { dtype: zero_config(strategy).precision.dtype(), on_host }
}

/// What is left on the device while a role's offloaded states are away. Buffers go with what they are for.
fn away(strategy: &Strategy, held: &Held) -> Held {
    let states = offloaded(strategy);
    let left = |state, bytes: usize| if states.contains(&state) { 0 } else { bytes };
    Held {
        weights: left(State::Params, held.weights),
        gathered: left(State::Params, held.gathered),
        gradients: left(State::Gradients, held.gradients),
        reducing: left(State::Gradients, held.reducing),
        optimizer: left(State::Optimizer, held.optimizer),
        ..*held
    }
}

/// Host memory of a role: what is there at all times, what comes there, and a checkpoint.
fn on_host(strategy: &Strategy, held: &Held) -> usize {
    let left = away(strategy, held);
    let moved = held.weights + held.optimizer - left.weights - left.optimizer;
    held.host + held.saved + moved
}
