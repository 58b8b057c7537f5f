//! The memory of a run before it is one: what each rank holds while it trains, scores and generates.
//!
//! Nothing is measured and no device is opened. What a strategy holds is told by the code that allocates it
//! ([`anyroll_strategy::plan`]), activations by the model's blocks ([`anyroll_models::Footprint`]); here it is put
//! together as [`crate::rlvr`] and [`crate::offline`] go through a step. Every sequence counts as the longest that there can
//! be. What is held on devices other than the policy's is not counted.

mod choices;
mod reward;
mod stage;

use anyroll_backends::{BackendKind, DType};
use anyroll_models::{Decoder, KvCache, Model, PackedSize, Runs, ValueModel, generation::Limits};
use anyroll_strategy::{
    Precision, State,
    plan::{Held, Ranks, driver_bytes, held, scoring_activations, training_activations, whole_weights},
};
use serde::Serialize;

use reward::RewardModel;

pub use choices::{Choice, choices};
pub use stage::{Settled, Stages, Unsettled, settle};

use crate::{
    Result,
    base_model::BaseModel,
    config::{
        KvCacheConfig, OfflineConfig, OldLogprobs, PipelineConfig, Reduction, Role, Run, StrategyConfig,
        Turns, WarmupConfig,
    },
    data::{Dataset, Tokenizer},
    offline,
    offline::Written,
    train::{offloaded, zero_config},
};

/// What lengths of memory that can leave a device are rounded up to: 2 MiB on every device so far, pages on a host.
const GRANULARITY_BYTES: [usize; 2] = [2 << 20, 4 << 10];

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
    /// The driver's own, and what libraries hold besides.
    pub driver: usize,
}

impl PhaseBytes {
    /// All together.
    pub fn total(&self) -> usize {
        let Self { weights, gradients, optimizer, activations, buffers, kv_cache, driver } = self;
        weights + gradients + optimizer + activations + buffers + kv_cache + driver
    }

    fn add(&mut self, held: &Held) {
        self.weights += held.weights;
        self.gradients += held.gradients;
        self.optimizer += held.optimizer;
        self.buffers += held.gathered + held.reducing;
    }
}

/// What one choice of strategies comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Forward, backward and the optimizer's step of the policy.
    pub train: PhaseBytes,
    /// Reward models on the policy's device, one after the other; `None` without one.
    pub reward: Option<PhaseBytes>,
    /// The critic's turn: its values, and its training; `None` without one.
    pub critic: Option<PhaseBytes>,
    /// The reference's log-probs, or the policy's own anew; `None` in a run that has no such pass.
    pub score: Option<PhaseBytes>,
    /// Sampling.
    pub generate: PhaseBytes,
    /// Host memory of a rank for states that are off the device, and for a checkpoint on its way.
    pub host: usize,
    /// Of the cache's bytes those without which not one sequence can be sampled.
    pub least_kv_cache: usize,
}

impl MemoryPlan {
    /// The phases by name, in a step's order.
    pub fn phases(&self) -> impl Iterator<Item = (&'static str, PhaseBytes)> {
        let phases = [
            ("generate", Some(self.generate)),
            ("reward", self.reward),
            ("score", self.score),
            ("critic", self.critic),
            ("train", Some(self.train)),
        ];
        phases.into_iter().filter_map(|(name, phase)| Some((name, phase?)))
    }

    /// The phase that takes most, and how much.
    pub fn peak(&self) -> (&'static str, usize) {
        let totals = self.phases().map(|(name, phase)| (name, phase.total()));
        totals.max_by_key(|(_, total)| *total).expect("there are phases")
    }

    /// Whether it fits into a device of so many bytes.
    pub fn fits(&self, memory_bytes: usize) -> bool {
        self.peak().1 <= memory_bytes
    }
}

/// What a step takes sequences through.
struct Work {
    /// Tokens of the longest prompt, of the longest gold answer with its end, and of the longest completion to train on.
    prompt: usize,
    answer: usize,
    completion: usize,
    /// Sequences in a row whose prompt is computed once; 1 where each is by itself.
    sharing: usize,
    warmup: Option<WarmupConfig>,
    /// Sequences that are sampled at a time, and the part of free memory that their cache may take; `None` if none are.
    sampling: Option<(usize, f64)>,
}

impl Work {
    fn new(run: &Run, tokenizer: &Tokenizer, dataset: &Dataset) -> Result<Self> {
        let (prompt, answer) = longest(tokenizer, dataset)?;
        let per_rank = run.batches.sequences_per_step / run.world_size;
        Ok(match &run.config.pipeline {
            PipelineConfig::Rlvr(rlvr) => Self {
                prompt,
                answer,
                completion: rlvr.rollout.max_new_tokens,
                sharing: if rlvr.share_prompts == Some(true) { rlvr.group_size } else { 1 },
                warmup: rlvr.warmup.clone(),
                sampling: Some((rlvr.rollout.batch_size.min(per_rank), rlvr.rollout.kv_cache.memory)),
            },
            PipelineConfig::Offline(offline) => {
                let completed = offline.completions().div_ceil(run.world_size);
                let (prompt, answer) = match offline.turns {
                    Turns::Last => (prompt, answer),
                    Turns::All => longest_turns(tokenizer, offline, dataset)?,
                };
                Self {
                    prompt,
                    answer,
                    completion: answer,
                    sharing: if run.config.model.drops() { 1 } else { offline.objective.answers() },
                    warmup: offline.warmup.clone(),
                    sampling: (completed > 0)
                        .then(|| (completed.min(offline::MOST_AT_A_TIME), KvCacheConfig::default().memory)),
                }
            }
            PipelineConfig::Diffusion(_) => unreachable!("only a run of a language model has a dataset"),
        })
    }
}

/// Plans the memory of a run of a language model.
pub struct Planner {
    model: Decoder,
    /// The same, which keeps logits.
    keeping_logits: Decoder,
    critic: Option<ValueModel>,
    rewards: Vec<RewardModel>,
    work: Work,
    ranks: Ranks,
    on_host: bool,
    memory_bytes: Option<usize>,
    samples_per_rank: usize,
    has_reference: bool,
    scores_itself: bool,
    /// Whether the policy's states leave with every step, and not for evaluation alone.
    states_leave: bool,
}

impl Planner {
    /// For `run`, whose stages may be open still.
    ///
    /// # Errors
    /// The model's folder's.
    pub fn new(run: &Run, dataset: &Dataset) -> Result<Self> {
        let base = BaseModel::open(&run.config.model, dataset, run.config.seed)?;
        let model = |keep| {
            let strategy = StrategyConfig { keep_logits: Some(keep), ..run.policy.strategy.clone() };
            base.policy(tch::Device::Cpu, &strategy)
        };
        let backend: BackendKind = run.policy.backend.parse().expect("a resolved config names a backend");
        let on_host = backend.is_host();
        let has_adapters = base.lora.is_some();
        let ranks = Ranks {
            world_size: run.world_size,
            granularity_bytes: GRANULARITY_BYTES[usize::from(on_host)],
            // A host has no library that sums.
            sums_in_rank_order: on_host || run.policy.strategy.reduction == Reduction::Ordered,
        };
        let is_here = |role: &Option<Role>| role.as_ref().is_some_and(|role| role.is_with(&run.policy));
        let critic = is_here(&run.critic).then(|| ValueModel::new(base.config.clone(), tch::Device::Cpu));
        let rlvr = if let PipelineConfig::Rlvr(rlvr) = &run.config.pipeline { Some(rlvr) } else { None };
        let models = rlvr.into_iter().flat_map(|rlvr| rlvr.reward.models()).zip(&run.reward_models);
        let rewards =
            models.map(|(config, role)| RewardModel::open(config, role.as_ref(), run, (ranks, on_host)));
        let rewards: Vec<Option<RewardModel>> = rewards.collect::<Result<_>>()?;
        let asks_itself = rlvr.is_some_and(|rlvr| rlvr.algorithm.old_logprobs == OldLogprobs::Recompute);
        Ok(Self {
            model: model(false)?,
            keeping_logits: model(true)?,
            critic: critic.transpose()?,
            rewards: rewards.into_iter().flatten().collect(),
            ranks,
            on_host,
            memory_bytes: run.memory_bytes,
            work: Work::new(run, &base.tokenizer, dataset)?,
            samples_per_rank: run.batches.sequences_per_step / run.world_size,
            has_reference: is_here(&run.reference) && !has_adapters,
            scores_itself: asks_itself || (run.reference.is_some() && has_adapters),
            states_leave: run.rollout.is_none() || run.critic.is_some(),
        })
    }

    /// The number of parameters.
    pub fn parameters(&self) -> usize {
        self.model.units().iter().flat_map(|unit| &unit.params).map(|param| param.elements()).sum()
    }

    /// Tokens of the longest prompt, and of the longest completion.
    pub fn longest(&self) -> (usize, usize) {
        (self.work.prompt, self.work.completion)
    }

    /// Whether there is a frozen copy on the policy's devices.
    pub fn has_reference(&self) -> bool {
        self.has_reference
    }

    /// What these strategies of the policy, of its reference and of its critic come to.
    pub fn plan(
        &self,
        policy: &StrategyConfig,
        reference: Option<&StrategyConfig>,
        critic: Option<&StrategyConfig>,
    ) -> MemoryPlan {
        let reference = reference.filter(|_| self.has_reference);
        let own = held(&self.model, zero_config(policy), true, self.ranks);
        let frozen = reference.map(|it| (it, held(&self.model, zero_config(it), false, self.ranks)));
        let valued = critic.zip(self.critic.as_ref());
        let valued = valued.map(|(it, model)| (it, held(model, zero_config(it), true, self.ranks)));
        let own_away = away(policy, &own);
        let [frozen_away, valued_away] =
            [&frozen, &valued].map(|role| role.as_ref().map(|(it, held)| away(it, held)));

        // Before a critic's turn the policy's states are still away, and after it the critic's.
        let scorer = reference.or(self.scores_itself.then_some(policy));
        let its = frozen.as_ref().map(|(_, held)| held);
        let while_scored =
            if valued.is_some() { own_away } else { Held { reducing: own_away.reducing, ..own } };
        let score =
            scorer.map(|it| self.phase(self.scoring(it), &[Some(&while_scored), its, valued_away.as_ref()]));
        let critic = valued.as_ref().map(|(it, held)| {
            self.phase(self.valuing(it), &[Some(&own_away), frozen_away.as_ref(), Some(held)])
        });
        let train =
            self.phase(self.training(policy), &[Some(&own), frozen_away.as_ref(), valued_away.as_ref()]);
        let generate = self.phase(0, &[Some(&own_away), frozen_away.as_ref(), valued_away.as_ref()]);
        let while_rewarded = if self.states_leave { &own_away } else { &own };
        let held = [Some(while_rewarded), frozen_away.as_ref(), valued_away.as_ref()];
        let rewards = self.rewarding(policy, &held);
        let passes = [score, critic, Some(train)].into_iter().flatten().chain(rewards.iter().copied());
        let busiest = passes.map(|phase| phase.activations).max().unwrap_or(0);
        let reward = rewards.into_iter().max_by_key(PhaseBytes::total);
        let (generate, least_kv_cache) = self.generating(policy, generate, busiest);

        let trained = [Some((policy, own)), valued].into_iter().flatten();
        let all: Vec<(&StrategyConfig, Held)> = trained.chain(frozen).collect();
        let roles: usize = all.iter().map(|(strategy, held)| on_host(strategy, held)).sum();
        let host = roles + self.rewards.iter().map(|reward| reward.host_bytes).sum::<usize>();
        let most = generate.activations.max(busiest);
        let kept = |phase: PhaseBytes| match self.on_host {
            true => phase,
            false => PhaseBytes { activations: most, ..phase },
        };
        let [reward, score, critic] = [reward, score, critic].map(|phase| phase.map(kept));
        MemoryPlan { train: kept(train), critic, score, reward, generate, host, least_kv_cache }
    }

    /// What these hold together, and what reward models hold at all times, beside so many bytes of activations.
    fn phase(&self, activations: usize, held: &[Option<&Held>]) -> PhaseBytes {
        let driver = if self.on_host { 0 } else { driver_bytes(self.ranks.world_size) };
        let mut phase = PhaseBytes { driver, activations, ..PhaseBytes::default() };
        let rewards = self.rewards.iter().map(|reward| &reward.stays);
        held.iter().flatten().copied().chain(rewards).for_each(|held| phase.add(held));
        phase
    }

    /// The phase of each reward model that computes on the policy's device, beside what else is held then: the cache is gone,
    /// and the policy's whole weights are not.
    fn rewarding(&self, policy: &StrategyConfig, held: &[Option<&Held>]) -> Vec<PhaseBytes> {
        let Work { prompt, completion, .. } = self.work;
        let phases = self.rewards.iter().filter_map(|reward| {
            let activations = reward.activations(self.samples_per_rank, prompt, completion)?;
            let mut phase = self.phase(activations, held);
            phase.add(&reward.comes);
            phase.buffers += whole_weights(&self.model, zero_config(policy), self.ranks);
            Some(phase)
        });
        phases.collect()
    }

    /// Activations of the critic's turn.
    fn valuing(&self, critic: &StrategyConfig) -> usize {
        let model = self.critic.as_ref().expect("it has a turn");
        let size = self.micro_batch(critic);
        let runs = self.runs(critic);
        let training = training_activations(model, &size, zero_config(critic), runs);
        training.max(scoring_activations(model, &size, runs))
    }

    /// The largest micro-batch of samples.
    fn micro_batch(&self, strategy: &StrategyConfig) -> PackedSize {
        let sequences = strategy.micro_batch_size.min(self.samples_per_rank);
        let Work { prompt, completion, sharing, .. } = self.work;
        PackedSize::of_groups(sequences, sharing, prompt, completion)
    }

    fn training(&self, policy: &StrategyConfig) -> usize {
        let Work { prompt, answer, .. } = self.work;
        let config = zero_config(policy);
        let micro_batch = policy.micro_batch_size;
        let rl = self.micro_batch(policy);
        let warmup = self.work.warmup.as_ref().filter(|warmup| warmup.steps > 0).map(|warmup| {
            let own = warmup.batch_size / self.ranks.world_size;
            PackedSize::uniform(warmup.micro_batch_size.unwrap_or(micro_batch).min(own), prompt, answer)
        });
        let sizes = [Some(rl), warmup].into_iter().flatten();
        let model = if policy.keep_logits == Some(true) { &self.keeping_logits } else { &self.model };
        let peaks = sizes.map(|size| training_activations(model, &size, config, self.runs(policy)));
        peaks.max().unwrap_or(0)
    }

    fn scoring(&self, scorer: &StrategyConfig) -> usize {
        scoring_activations(&self.model, &self.micro_batch(scorer), self.runs(scorer))
    }

    /// The phase, from what is held in it, and the cache of one sequence. `busiest` are the activations of the other
    /// phases.
    fn generating(
        &self,
        policy: &StrategyConfig,
        mut generate: PhaseBytes,
        busiest: usize,
    ) -> (PhaseBytes, usize) {
        let Some((sequences, memory)) = self.work.sampling else { return (generate, 0) };
        generate.buffers += whole_weights(&self.model, zero_config(policy), self.ranks);
        let (shape, dtype) = (self.model.config(), self.runs(policy).dtype);
        let sequences = sequences.max(1);
        let (prompt, longest) = (self.work.prompt, self.work.prompt + self.work.completion);
        let limits = Limits::new(sequences);
        let prompts = limits.prefill_tokens.min(sequences * prompt);
        let sampling = self.model.sampling_bytes(sequences, prompts, prompt, self.runs(policy));
        generate.activations = if self.on_host { sampling } else { sampling.max(busiest) };

        // As `inference::Room` shares out what is free.
        let cache = |blocks| KvCache::bytes_of(shape, dtype, blocks);
        let (wanted, least) = (KvCache::blocks_for(sequences, longest), KvCache::blocks_for(1, longest));
        let room = self.memory_bytes.map_or(wanted, |memory_bytes| {
            let free = memory_bytes.saturating_sub(generate.total()) as f64 * memory;
            KvCache::blocks_in(shape, dtype, free as usize)
        });
        generate.kv_cache = cache(wanted.min(room).max(least));
        (generate, cache(least))
    }

    fn runs(&self, strategy: &StrategyConfig) -> Runs {
        let precision: Precision = zero_config(strategy).precision;
        let dtype: DType = precision.dtype();
        Runs { dtype, on_host: self.on_host }
    }
}

/// What is left on the device while a role's offloaded states are away. Buffers go with what they are for.
fn away(strategy: &StrategyConfig, held: &Held) -> Held {
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
fn on_host(strategy: &StrategyConfig, held: &Held) -> usize {
    let left = away(strategy, held);
    let moved = held.weights + held.optimizer - left.weights - left.optimizer;
    held.host + held.saved + moved
}

/// Of conversations of which every turn is learnt: the most tokens that are, behind as many as make them the longest one.
fn longest_turns(
    tokenizer: &Tokenizer,
    offline: &OfflineConfig,
    dataset: &Dataset,
) -> Result<(usize, usize)> {
    let read = offline::read(tokenizer, &offline.objective, offline.turns, &dataset.examples())?;
    let most = |tokens: fn(&Written) -> usize| read.iter().map(tokens).max().unwrap_or(0);
    let (all, answers) = (most(|it| it.tokens.len()), most(Written::answer_len));
    Ok((all - answers, answers))
}

/// Tokens of the longest prompt and of the longest gold answer.
fn longest(tokenizer: &Tokenizer, dataset: &Dataset) -> Result<(usize, usize)> {
    if let Tokenizer::Characters(_) = tokenizer {
        return Ok((dataset.longest_prompt(), dataset.longest_answer() + 1));
    }
    let (mut prompt, mut answer) = (0, 0);
    for record in dataset.examples() {
        prompt = prompt.max(tokenizer.encode_prompt(&record)?.len());
        for record in [Some(record.clone()), record.rejected()].into_iter().flatten() {
            answer = answer.max(tokenizer.encode_answer(&record)?.len());
        }
    }
    Ok((prompt, answer))
}
