//! [`Offline`]: what the loop trains here.

use std::{path::Path, sync::Arc};

use anyroll_backends::Stream;
use anyroll_models::{Decoder, Model, ValueModel, init::WeightSource};
use anyroll_strategy::{
    State, Zero,
    checkpoint::{self, Saver},
};
use tch::{Kind, Tensor};

use super::{
    Written,
    learn::{Answering, score},
    read,
    step::Lesson,
    teacher::{Taught, Teacher},
    written::mismatched,
};
use crate::{
    Result,
    base_model::{BaseModel, UnderNewHead},
    config::{KvCacheConfig, Objective, OfflineConfig, PipelineConfig, Run},
    data::{Dataset, Record, Tokenizer},
    inference::Sampler,
    launch::Rank,
    metrics::Metrics,
    samples::Phase,
    train::{
        Evaluation, Exchange, Kept, Nothing, Pipeline, Place, Plan, Reference, StepOutcome, adamw, describe,
        hold, offloaded,
    },
};

/// A model that learns from texts that are there beforehand.
pub struct Offline<M: Answering> {
    run: Run,
    /// Where the reference will be.
    reference_place: Option<Place>,
    /// The policy's first weights.
    weights: Box<dyn WeightSource>,
    setup: Setup,
    roles: Roles<M>,
}

/// What a run is made of, apart from the weights.
pub struct Setup {
    /// The pipeline's part of the config.
    pub config: OfflineConfig,
    /// The run's seed.
    pub seed: u64,
    /// Prompts and answers.
    pub dataset: Dataset,
    /// Those that a warm-up learns, where these are not all.
    pub to_warm_up: Option<Dataset>,
    /// Text to tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// The records of every evaluation.
    pub held_out: Vec<Record>,
    /// This rank's part of them, as the objective reads them: on every rank as many, and where there are too few the last
    /// one again.
    pub held_out_own: Vec<Written>,
    /// As many prompts of them with answers of others, if the objective asks for such.
    pub held_out_strangers: Vec<Written>,
    /// How many of its records are no repetition.
    pub held_out_count: usize,
    /// Held-out records whose prompts the policy completes.
    pub completed: Vec<Record>,
    /// The most tokens of a prompt with an answer that is not its own.
    pub room: usize,
    /// Sequences that a rank puts through forward and backward at a time.
    pub micro_batch_size: usize,
    /// What of the policy is away while it completes prompts.
    pub offloaded: Vec<State>,
    /// What completes prompts, if anything does.
    pub sampler: Option<Sampler>,
}

/// The models of a run.
pub struct Roles<M: Model> {
    /// The one that is trained.
    pub policy: Zero<M>,
    /// Its frozen copy from after the warm-up, if the objective compares with it and it has no adapters.
    pub reference: Option<Reference>,
    /// What it learns from, if it distills.
    pub teacher: Option<Teacher>,
    /// What the reference says of this rank's held-out answers, once it was asked.
    pub of_held_out: Option<Compared>,
}

impl<M: Answering> Roles<M> {
    /// What the teacher says of the answers' tokens, if there is one.
    pub fn taught(&mut self, sequences: &[Written]) -> Result<Option<Taught>> {
        let device = self.policy.torch_device();
        self.teacher.as_mut().map(|teacher| teacher.read(sequences, device)).transpose()
    }
}

/// What the frozen reference says of answers, fp64 on the policy's device.
#[derive(Debug)]
pub struct Compared {
    /// Of those that are learnt, `[S]`.
    pub sequences: Tensor,
    /// Of those to prompts that are not their own, as many as there are.
    pub strangers: Tensor,
}

impl Offline<Decoder> {
    /// Prepares a run of a language model, its policy on `place`, with its first weights. Opens the reference's devices.
    pub fn of_language(run: Run, dataset: Dataset, place: Place, rank: &Rank) -> Result<Self> {
        let base = BaseModel::open(&run.config.model, &dataset, run.config.seed)?;
        let model = Arc::new(base.policy(place.torch_device()?, &run.policy.strategy)?);
        let mut setup = Setup::new(&run, dataset, &base, &place)?;
        setup.sampler = Some(Sampler {
            max_turn_tokens: None,
            max_new_tokens: room_for_answers(&base, &setup.completed)?,
            batch_size: setup.completed.len().clamp(1, MOST_AT_A_TIME),
            stop: Vec::new(),
            cache_memory: KvCacheConfig::default().memory,
            model: model.clone(),
            compute: Stream::torch(&place.device)?,
            tokenizer: base.tokenizer,
            threads: None,
        });
        let reference_place =
            run.held_reference().map(|role| place.beside("reference", role, &run, rank)).transpose()?;
        let weights = base.weights;
        let policy = held(&run, &setup, model, &place, &*weights)?;
        Ok(Self::new(run, setup, policy, weights, reference_place))
    }
}

impl Offline<ValueModel> {
    /// Prepares a run of a reward model on `place`: the blocks of a language model under a head of 0.
    pub fn of_numbers(run: Run, dataset: Dataset, place: Place) -> Result<Self> {
        let base = BaseModel::open(&run.config.model, &dataset, run.config.seed)?;
        let model = ValueModel::new(base.config.clone(), place.torch_device()?)?;
        let model = Arc::new(model.deterministic(run.policy.strategy.deterministic));
        let setup = Setup::new(&run, dataset, &base, &place)?;
        let policy = held(&run, &setup, model, &place, &UnderNewHead(&*base.weights))?;
        Ok(Self::new(run, setup, policy, base.weights, None))
    }
}

impl<M: Answering> Offline<M> {
    fn new(
        run: Run,
        setup: Setup,
        policy: Zero<M>,
        weights: Box<dyn WeightSource>,
        reference_place: Option<Place>,
    ) -> Self {
        let roles = Roles { policy, reference: None, teacher: None, of_held_out: None };
        Self { run, reference_place, weights, setup, roles }
    }
}

/// The policy, ready for its first step.
fn held<M: Model>(
    run: &Run,
    setup: &Setup,
    model: Arc<M>,
    place: &Place,
    weights: &dyn WeightSource,
) -> Result<Zero<M>> {
    let optimizer = match &setup.config.warmup {
        Some(warmup) if warmup.steps > 0 => &warmup.optimizer,
        _ => &setup.config.optimizer,
    };
    hold(model, &run.policy.strategy, place, Some(adamw(optimizer)), weights)
}

/// Prompts that are completed together.
pub const MOST_AT_A_TIME: usize = 256;

/// A rank's part of the records, on every rank as many, and how many of them are no repetition of the last.
fn part(records: &[Record], rank: usize, world_size: usize) -> (Vec<Record>, usize) {
    let per_rank = records.len().div_ceil(world_size);
    let last = records.len().saturating_sub(1);
    let own = (rank * per_rank..(rank + 1) * per_rank).map(|index| records[index.min(last)].clone());
    (own.collect(), (records.len() - (rank * per_rank).min(records.len())).min(per_rank))
}

/// Tokens of the longest answer to one of these prompts, as far as the model has room for them behind the longest prompt.
fn room_for_answers(base: &BaseModel, records: &[Record]) -> Result<usize> {
    let (mut prompt, mut answer) = (0, 1);
    for record in records {
        prompt = prompt.max(base.tokenizer.encode_prompt(record)?.len());
        answer = answer.max(base.tokenizer.encode_answer(record)?.len());
    }
    let room = base.config.max_position_embeddings as usize - prompt;
    Ok(answer.min(room))
}

impl Setup {
    fn new(run: &Run, dataset: Dataset, base: &BaseModel, place: &Place) -> Result<Self> {
        let PipelineConfig::Offline(config) = &run.config.pipeline else {
            unreachable!("the command line starts the pipeline that the config names")
        };
        let held_out = dataset.held_out(config.evaluation.prompts())?;
        let (rank, world_size) = (place.group.rank(), place.group.world_size());
        let (own, held_out_count) = part(&held_out, rank, world_size);
        let longest = base.config.max_position_embeddings as usize;
        let room = config.data.max_tokens().unwrap_or(longest).min(longest);
        let strangers = match config.objective.estimates_kl() {
            true => part(&mismatched(&held_out, 0..held_out.len(), room), rank, world_size).0,
            false => Vec::new(),
        };
        let read = |records: &[Record]| read(&base.tokenizer, &config.objective, config.turns, records);
        let warms_up = config.warmup.as_ref().is_some_and(|warmup| warmup.steps > 0);
        let is_judged = config.objective.judged().is_some();
        let to_complete = held_out.iter().filter(|record| record.is_to_complete());
        let completed = to_complete.take(config.completions()).cloned().collect();
        Ok(Self {
            config: (**config).clone(),
            seed: run.config.seed,
            tokenizer: base.tokenizer.clone(),
            held_out_own: read(&own)?,
            held_out_strangers: read(&strangers)?,
            held_out_count,
            to_warm_up: if warms_up && is_judged { dataset.desirable() } else { None },
            room,
            completed,
            held_out,
            dataset,
            micro_batch_size: run.policy.strategy.micro_batch_size,
            offloaded: offloaded(&run.policy.strategy),
            sampler: None,
        })
    }

    /// What steps draw records from.
    pub fn lesson(&self) -> Lesson<'_> {
        let turns = self.config.turns;
        Lesson { dataset: &self.dataset, tokenizer: &self.tokenizer, seed: self.seed, turns }
    }

    /// What the frozen copy, or the policy with its adapters off, says of the answers, and of `strangers`, answers to other
    /// prompts; `None` where the objective does not ask.
    pub fn reference_logprobs<M: Answering>(
        &self,
        roles: &mut Roles<M>,
        sequences: &[Written],
        strangers: &[Written],
    ) -> Result<Option<Compared>> {
        if !self.config.objective.compares_with_reference() {
            return Ok(None);
        }
        let Roles { policy, reference, .. } = roles;
        let both = [sequences, strangers].concat();
        let logprobs = match reference {
            Some(reference) => {
                let score = |model: &mut _, size| Ok(score(model, &both, size, true, None)?.logprobs);
                let logprobs = reference.score(score)?;
                logprobs.f_to_device(policy.torch_device())?
            }
            None => score(policy, &both, self.micro_batch_size, false, None)?.logprobs,
        };
        let (own, others) = (sequences.len() as i64, strangers.len() as i64);
        let sequences = logprobs.f_narrow(0, 0, own)?;
        Ok(Some(Compared { sequences, strangers: logprobs.f_narrow(0, own, others)? }))
    }

    /// KTO's estimate of how far the policy is from the reference: the mean over all ranks' `records` prompts of what answers
    /// gained that are not their own, and 0 at least. This rank has `count` of them, the first of its `strangers`; 0 where the
    /// objective does not ask. Every rank calls.
    pub fn kl<M: Answering>(
        &self,
        policy: &mut Zero<M>,
        exchange: &Exchange,
        strangers: &[Written],
        reference: &Option<Compared>,
        (count, records): (usize, f64),
    ) -> Result<f64> {
        let Some(compared) = reference.as_ref().filter(|_| self.config.objective.estimates_kl()) else {
            return Ok(0.0);
        };
        let logprobs = score(policy, strangers, self.micro_batch_size, true, None)?.logprobs;
        let gained = logprobs.f_sub(&compared.strangers)?.f_narrow(0, 0, count as i64)?;
        let sum = exchange.sum(&[f64::try_from(gained.f_sum(Kind::Double)?)?])?[0];
        Ok((sum / records).max(0.0))
    }
}

impl<M: Answering> Pipeline for Offline<M> {
    type Carried = Nothing;

    fn plan(&self) -> Plan {
        let config = &self.setup.config;
        Plan {
            warmup_steps: config.warmup.as_ref().map_or(0, |warmup| warmup.steps),
            steps: config.steps.number(),
            evaluate_every: (config.evaluation.prompts() > 0).then_some(config.evaluation.every),
            save_every: config.checkpoint.every,
            keep_last: config.checkpoint.keep_last,
        }
    }

    fn best_by(&self, evaluation: &Metrics) -> Option<f64> {
        let loss = evaluation.get("eval/loss").filter(|_| self.setup.config.checkpoint.keep_best);
        loss.map(|loss| -loss)
    }

    fn description(&self) -> String {
        describe(title(&self.setup.config.objective), &**self.roles.policy.model(), &self.run)
    }

    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<f64> {
        let Self { setup, roles, .. } = self;
        let warmup = setup.config.warmup.as_ref().expect("the plan has warm-up steps");
        let policy = M::writer(&mut roles.policy).expect("only a model of language has a warm-up");
        let dataset = setup.to_warm_up.as_ref().unwrap_or(&setup.dataset);
        let lesson = Lesson { dataset, ..setup.lesson() };
        lesson.warmup_step(policy, exchange, warmup, setup.micro_batch_size, step)
    }

    fn check_learnt(&mut self) -> Result<()> {
        self.roles.policy.load_states(&self.setup.offloaded)?;
        Ok(self.roles.policy.check_learnt()?)
    }

    fn end_warm_up(&mut self) -> Result<()> {
        Ok(self.roles.policy.reset_optimizer(adamw(&self.setup.config.optimizer))?)
    }

    fn freeze(&mut self, kept: Kept) -> Result<()> {
        let (Some(place), Some(role)) = (&self.reference_place, self.run.held_reference()) else {
            return Ok(());
        };
        if let Some(distill) = self.setup.config.objective.distills() {
            let path = self.run.config.roles.reference.path.as_ref().expect("a config that was checked");
            self.roles.teacher = Some(Teacher::open(path, distill, role, place)?);
            return Ok(());
        }
        let policy = M::writer(&mut self.roles.policy).expect("only a model of language has a reference");
        let reference = Reference::new(policy, &self.run, role, place, &*self.weights, kept)?;
        self.roles.reference = Some(reference);
        Ok(())
    }

    fn step(&mut self, exchange: &Exchange, step: u64, _: &mut Nothing, stop: bool) -> Result<StepOutcome> {
        self.setup.step(&mut self.roles, exchange, step, stop)
    }

    fn evaluate(&mut self, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation> {
        self.setup.evaluate(&mut self.roles, exchange, step, phase)
    }

    fn save(&mut self, saver: &mut Saver, path: &Path, position: serde_json::Value) -> Result<()> {
        let policy = &mut self.roles.policy;
        policy.load_states(&self.setup.offloaded)?;
        Ok(saver.start(policy, path, position)?)
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        checkpoint::load(&mut self.roles.policy, path)?;
        Ok(())
    }
}

/// The objective as papers call it.
fn title(objective: &Objective) -> &'static str {
    match objective {
        Objective::Sft => "SFT",
        Objective::Distill(_) => "distillation",
        Objective::Dpo(_) => "DPO",
        Objective::Ipo(_) => "IPO",
        Objective::Hinge(_) => "SLiC-HF",
        Objective::Simpo(_) => "SimPO",
        Objective::Orpo(_) => "ORPO",
        Objective::Kto(_) => "KTO",
        Objective::ApoZeroUnpaired(_) => "APO-zero",
        Objective::RewardModel(_) => "reward model",
    }
}
