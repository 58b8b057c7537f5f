//! Memory planning before a run starts: bytes that each rank holds while it trains, scores and generates.
//!
//! Nothing is measured and no device is opened. The strategy's share is counted by the code that allocates it
//! ([`anyroll_strategy::plan`]), activations by the model's blocks ([`anyroll_models::Footprint`]). This
//! module adds them up in the order in which pipelines run a step. Roles with devices of their own are
//! counted on those devices, except rollout on a host.

mod choices;
mod device_group;
mod image_networks;
mod images;
mod reward;
mod stage;
mod texts;
pub mod time;

use anyroll_config::PipelineConfig;
use anyroll_models::Runs;
use anyroll_strategy::{State, plan::Held};
use serde::Serialize;

use images::Images;
use texts::Texts;

pub use choices::{Choice, choices};
pub use device_group::DevicePlan;
use device_group::{is_host, not_counted};
pub use stage::{Settled, Stages, Unsettled, settle};

use crate::{
    Error, Result,
    opened::Opened,
    run::{Run, Strategy},
    train::{offloaded, zero_config},
};

/// Bytes on a rank's device at the peak of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PhaseBytes {
    /// Weights of the policy, its reference, its critic and reward models.
    pub weights: usize,
    /// Accumulated gradients.
    pub gradients: usize,
    /// Moments, and fp32 master weights if the model runs in another dtype.
    pub optimizer: usize,
    /// Temporary tensors of libtorch. Off the host libtorch caches that memory for its next pass, so the
    /// largest phase counts for all.
    pub activations: usize,
    /// Whole units held for a short time: gathered weights and gradients being reduced. Off the host also the steps that
    /// sampling records, which stay from one sampling to the next.
    pub buffers: usize,
    /// Keys and values: as much as the sequences need, if it fits.
    pub kv_cache: usize,
    /// Latents being sampled, their pixels, and the embeddings of the prompts.
    pub images: usize,
    /// Networks that decode latents, score images and encode texts.
    pub frozen: usize,
    /// Overhead of the driver and of libraries.
    pub driver: usize,
}

impl PhaseBytes {
    /// Sum of all parts.
    pub fn total(&self) -> usize {
        let Self { weights, gradients, optimizer, activations, buffers, .. } = self;
        let Self { kv_cache, images, frozen, driver, .. } = self;
        weights + gradients + optimizer + activations + buffers + kv_cache + images + frozen + driver
    }

    fn add(&mut self, held: &Held) {
        self.weights += held.weights;
        self.gradients += held.gradients;
        self.optimizer += held.optimizer;
        self.buffers += held.gathered + held.reducing + held.replicas;
    }
}

/// Memory of a run under one choice of strategies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Encoding the texts of an image run before its model is created, on rank 0; `None` without it.
    pub encode: Option<PhaseBytes>,
    /// Forward, backward and the optimizer's step of the policy.
    pub train: PhaseBytes,
    /// Reward models on the policy's device, one after the other; in an image run, decoding and scoring
    /// before training. `None` without any.
    pub reward: Option<PhaseBytes>,
    /// The critic's phase: its values and its training; `None` without a critic.
    pub critic: Option<PhaseBytes>,
    /// Log-probs of the reference, or the policy's own recomputed; `None` if the run has no such pass.
    pub score: Option<PhaseBytes>,
    /// Sampling; in an image run, also decoding during an evaluation.
    pub generate: PhaseBytes,
    /// Host memory per rank: offloaded states, plus a checkpoint being written.
    pub host: usize,
    /// The part of the KV cache that a single sequence needs at least.
    pub least_kv_cache: usize,
    /// Devices of roles that do not share the policy's.
    pub others: Vec<DevicePlan>,
}

/// The phase with the least free memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tightest {
    /// The phase, followed by its devices if they are not the policy's.
    pub phase: String,
    /// Bytes that it needs.
    pub needs: usize,
    /// Bytes that its device has.
    pub memory_bytes: usize,
}

impl Tightest {
    /// Missing bytes; negative if there are bytes to spare.
    pub fn missing(&self) -> i128 {
        self.needs as i128 - self.memory_bytes as i128
    }
}

impl MemoryPlan {
    /// Phases on the policy's device by name, in the order of a step.
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

    /// The largest phase on the policy's device, and its bytes.
    pub fn peak(&self) -> (&'static str, usize) {
        let totals = self.phases().map(|(name, phase)| (name, phase.total()));
        totals.max_by_key(|(_, total)| *total).expect("there are phases")
    }

    /// The phase with the least free memory, for a policy's device of `memory_bytes`. Devices of unknown
    /// memory always fit.
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

    /// Returns true if the plan fits a policy's device of `memory_bytes` and the devices of all other roles.
    pub fn fits(&self, memory_bytes: usize) -> bool {
        self.tightest(memory_bytes).missing() <= 0
    }
}

/// Strategies of a run's roles, each with a concrete ZeRO stage.
#[derive(Clone, Debug)]
pub struct Strategies {
    /// The policy.
    pub policy: Strategy,
    /// The reference, a frozen copy.
    pub reference: Option<Strategy>,
    /// The critic.
    pub critic: Option<Strategy>,
    /// Reward models in the order of the reward's terms; `None` for one that each rank keeps on the host.
    pub reward_models: Vec<Option<Strategy>>,
}

/// Plans the memory of a run.
pub enum Planner {
    /// Plans a run of a language model.
    Texts(Box<Texts>),
    /// Plans a run of an image model.
    Images(Box<Images>),
}

impl Planner {
    /// Creates the planner of `run`, whose stages may be unresolved, from the files that its config names.
    ///
    /// # Errors
    /// [`Error::NoPlan`] for a reward model that is trained, or heads of values.
    pub fn new(run: &Run, opened: &Opened) -> Result<Self> {
        match (&run.config.pipeline, opened) {
            (PipelineConfig::Diffusion(config), Opened::Shapes(dit)) => {
                Ok(Self::Images(Box::new(Images::of_shapes(run, config, dit)?)))
            }
            (PipelineConfig::Diffusion(config), Opened::Images(opened)) => {
                Ok(Self::Images(Box::new(Images::of_texts(run, config, opened)?)))
            }
            (_, Opened::Texts(texts))
                if !run.config.trains_a_reward_model() && !run.config.trains_values() =>
            {
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

    /// Tokens of the longest prompt and of the longest completion; `None` for an image run.
    pub fn longest(&self) -> Option<(usize, usize)> {
        match self {
            Self::Texts(texts) => Some(texts.longest()),
            Self::Images(_) => None,
        }
    }

    /// Description of a sample in a micro-batch, for the report.
    pub fn describe(&self) -> String {
        match self {
            Self::Texts(texts) => {
                let (prompt, completion) = texts.longest();
                format!("sequences of up to {prompt} + {completion} tokens")
            }
            Self::Images(images) => images.describe(),
        }
    }

    /// Descriptions of the parts of `run` that the plan leaves out.
    pub fn not_counted(&self, run: &Run) -> Vec<String> {
        match self {
            Self::Texts(_) => not_counted(run),
            Self::Images(images) => images.not_counted(),
        }
    }

    /// Returns true if a frozen reference is on the policy's devices.
    pub fn has_reference(&self) -> bool {
        match self {
            Self::Texts(texts) => texts.has_reference(),
            Self::Images(images) => images.has_reference(),
        }
    }

    /// Returns true if the loss is over tokens, so that there are logits.
    fn has_logits(&self) -> bool {
        matches!(self, Self::Texts(_))
    }

    /// Memory of the run under `strategies`.
    pub fn plan(&self, strategies: &Strategies) -> MemoryPlan {
        match self {
            Self::Texts(texts) => texts.plan(strategies),
            Self::Images(images) => images.plan(strategies),
        }
    }
}

/// Gives every phase off the host the activations of the largest one, since libtorch caches them.
fn kept(on_host: bool, most: usize) -> impl Fn(PhaseBytes) -> PhaseBytes {
    move |phase| if on_host { phase } else { PhaseBytes { activations: most, ..phase } }
}

fn runs(strategy: &Strategy, on_host: bool) -> Runs {
    Runs { dtype: zero_config(strategy).precision.dtype(), on_host }
}

/// The part of a role that stays on the device while its offloaded states are on the host. Buffers leave with
/// the states that they serve.
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

/// Host memory of a role: its permanent part, its offloaded states and a checkpoint.
fn on_host(strategy: &Strategy, held: &Held) -> usize {
    let left = away(strategy, held);
    let moved = held.weights + held.optimizer - left.weights - left.optimizer;
    held.host + held.saved + moved
}
