//! [`Offline`]: the pipeline of offline training.

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use anyroll_backends::Stream;
use anyroll_config::{KvCacheConfig, Objective, OfflineConfig};
use anyroll_data::{Dataset, Record, Tokenizer};
use anyroll_models::{
    Decoder, IlqlModel, Model, ValueHead, ValueModel, WithIlqlHeads,
    hf::ModelFolder,
    init::{Seed, WeightSource},
};
use anyroll_strategy::checkpoint::Saver;
use tch::{Kind, Tensor};

use super::{
    Tokenized,
    gradient::{Answering, score},
    read,
    step::Lesson,
    teacher::{Taught, Teacher},
    tokenized::mismatched,
};
use crate::{
    Result,
    base_model::{BaseModel, UnderNewHead},
    inference::Sampler,
    launch::Rank,
    metrics::Metrics,
    opened::Texts,
    run::Run,
    samples::Phase,
    train::{
        Evaluation, Exchange, Kept, Learner, Nothing, Pipeline, Place, Plan, Reference, Schedule,
        StepOutcome, WarmupStep, describe,
    },
};

/// A model that is trained on given texts.
pub struct Offline<M: Answering> {
    run: Run,
    /// Devices of the reference.
    reference_place: Option<Place>,
    /// Initial weights of the policy.
    weights: Box<dyn WeightSource>,
    /// Published model of the reference, if it is one.
    published: Option<ModelFolder>,
    task: TextTask,
    models: TextModels<M>,
}

/// The options of a run, and the records that every evaluation reads.
pub struct TextTask {
    /// The pipeline's part of the config.
    pub config: OfflineConfig,
    /// The run's seed.
    pub seed: u64,
    /// Prompts and answers.
    pub dataset: Dataset,
    /// Records of the warm-up; `None` for all records.
    pub to_warm_up: Option<Dataset>,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Records of every evaluation.
    pub held_out: Vec<Record>,
    /// This rank's part of the held-out records, in the form that the objective reads. Every rank has the same
    /// number: short parts repeat their last record.
    pub held_out_own: Vec<Tokenized>,
    /// The same number of prompts with answers of other records, if the objective uses these.
    pub held_out_strangers: Vec<Tokenized>,
    /// Number of this rank's held-out records without repetitions.
    pub held_out_count: usize,
    /// Held-out records whose prompts the policy completes.
    pub completed: Vec<Record>,
    /// Length limit of a prompt with another record's answer.
    pub room: usize,
    /// Sampler of greedy completions; `None` if no prompts are completed.
    pub sampler: Option<Sampler>,
    /// Most tokens of a completion of a held-out prompt, including its end.
    pub completion_tokens: usize,
}

/// The models of a run.
pub struct TextModels<M: Model> {
    /// The policy, which is trained.
    pub learner: Learner<M>,
    /// The frozen copy from after the warm-up, if the objective needs a reference and the policy has no adapters.
    pub reference: Option<Reference>,
    /// The teacher of distillation.
    pub teacher: Option<Teacher>,
    /// Cached outputs of the reference for this rank's held-out answers.
    pub of_held_out: Option<Compared>,
}

impl<M: Answering> TextModels<M> {
    /// The teacher's outputs for the answers' tokens; `None` without a teacher.
    pub fn taught(&mut self, sequences: &[Tokenized]) -> Result<Option<Taught>> {
        let device = self.learner.device();
        self.teacher.as_mut().map(|teacher| teacher.read(sequences, device)).transpose()
    }
}

/// Outputs of the frozen reference for answers, fp64 on the policy's device.
#[derive(Debug)]
pub struct Compared {
    /// Outputs for the trained answers, `[S]`.
    pub sequences: Tensor,
    /// Outputs for answers to other prompts, all of them.
    pub strangers: Tensor,
}

impl Offline<Decoder> {
    /// Prepares a run of a language model, with its policy on `place` and its initial weights. Opens the
    /// reference's devices.
    pub fn of_language(
        run: Run,
        config: &OfflineConfig,
        opened: Texts,
        place: Place,
        rank: &Rank,
    ) -> Result<Self> {
        let Texts { dataset, base, reference: published, .. } = opened;
        let model = Arc::new(base.policy(place.torch_device()?, &run.policy.strategy)?);
        let mut task = TextTask::new(&run, config, dataset, &base, &place)?;
        task.completion_tokens = room_for_answers(&base, &task.completed)?;
        task.sampler = Some(sampler(&base, &task, model.clone(), &place)?);
        let reference_place =
            run.held_reference().map(|role| place.beside("reference", role, &run, rank)).transpose()?;
        let weights = base.weights;
        let learner = learner(&run, &task, model, &place, &*weights)?;
        Ok(Self { reference_place, published, ..Self::new(run, task, learner, weights) })
    }
}

impl Offline<ValueModel> {
    /// Prepares a run of a reward model, or a process reward model, on `place`: the blocks of a language model with a
    /// zero head.
    pub fn of_numbers(run: Run, config: &OfflineConfig, opened: Texts, place: Place) -> Result<Self> {
        let Texts { dataset, base, .. } = opened;
        let head = value_head(&config.objective);
        let model = ValueModel::with_head(base.config.clone(), head, place.torch_device()?)?;
        let model = Arc::new(model.deterministic(run.policy.strategy.deterministic));
        let task = TextTask::new(&run, config, dataset, &base, &place)?;
        let learner = learner(&run, &task, model, &place, &UnderNewHead(&*base.weights))?;
        Ok(Self::new(run, task, learner, base.weights))
    }
}

impl Offline<IlqlModel> {
    /// Prepares a run of a language model with heads of values on `place`. The heads are generated from the run's seed.
    pub fn of_values(run: Run, config: &OfflineConfig, opened: Texts, place: Place) -> Result<Self> {
        let Texts { dataset, base, .. } = opened;
        let ilql = config.objective.ilql().expect("only `ilql` trains heads of values");
        let strategy = &run.policy.strategy;
        let device = place.torch_device()?;
        let new = || IlqlModel::new(base.config.clone(), ilql.two_qs, device);
        let model = new()?.deterministic(strategy.deterministic).keeping_logits(strategy.keep_logits);
        let mut task = TextTask::new(&run, config, dataset, &base, &place)?;
        task.completion_tokens = room_for_answers(&base, &task.completed)?;
        let writer = new()?.guided(ilql.guidance);
        task.sampler = Some(sampler(&base, &task, Arc::new(writer), &place)?);
        let weights = WithIlqlHeads { base: &*base.weights, seed: Seed(run.config.seed) };
        let learner = learner(&run, &task, Arc::new(model), &place, &weights)?;
        Ok(Self::new(run, task, learner, base.weights))
    }
}

/// The sampler of greedy completions by `model`.
fn sampler(base: &BaseModel, task: &TextTask, model: Arc<Decoder>, place: &Place) -> Result<Sampler> {
    Ok(Sampler {
        max_turn_tokens: None,
        batch_size: task.completed.len().clamp(1, MOST_AT_A_TIME),
        stop: Vec::new(),
        cache_memory: KvCacheConfig::default().memory,
        model,
        compute: Stream::torch(&place.device)?,
        tokenizer: base.tokenizer.clone(),
        threads: None,
        records_routing: false,
        speculation: None,
        kept: Mutex::default(),
    })
}

impl<M: Answering> Offline<M> {
    /// Creates a run without a reference.
    fn new(run: Run, task: TextTask, learner: Learner<M>, weights: Box<dyn WeightSource>) -> Self {
        let models = TextModels { learner, reference: None, teacher: None, of_held_out: None };
        Self { run, reference_place: None, weights, published: None, task, models }
    }
}

/// Creates the policy, ready for its first step. Its states stay on the device, except during evaluations.
fn learner<M: Model>(
    run: &Run,
    task: &TextTask,
    model: Arc<M>,
    place: &Place,
    weights: &dyn WeightSource,
) -> Result<Learner<M>> {
    let config = &task.config;
    let warmup = config.warmup.as_ref().filter(|warmup| warmup.steps > 0);
    let schedule = Schedule {
        optimizer: config.optimizer.clone(),
        steps: run.steps,
        warmup: warmup.map(|warmup| warmup.optimizer.clone()),
    };
    Ok(Learner::new(model, &run.policy, place, weights, schedule)?.staying())
}

/// Head of the model that a scalar objective trains.
pub fn value_head(objective: &Objective) -> ValueHead {
    if objective.prm().is_some() { ValueHead::Classes } else { ValueHead::Number }
}

/// Prompts completed in a batch.
pub const MOST_AT_A_TIME: usize = 256;

/// A rank's part of the records, and the number of its records without repetitions. Every rank has the same number of
/// records: short parts repeat the last record.
fn part(records: &[Record], rank: usize, world_size: usize) -> (Vec<Record>, usize) {
    let per_rank = records.len().div_ceil(world_size);
    let last = records.len().saturating_sub(1);
    let own = (rank * per_rank..(rank + 1) * per_rank).map(|index| records[index.min(last)].clone());
    (own.collect(), (records.len() - (rank * per_rank).min(records.len())).min(per_rank))
}

/// Tokens of the longest answer to these prompts, limited to what fits after the longest prompt.
fn room_for_answers(base: &BaseModel, records: &[Record]) -> Result<usize> {
    let (mut prompt, mut answer) = (0, 1);
    for record in records {
        prompt = prompt.max(base.tokenizer.encode_prompt(record)?.len());
        answer = answer.max(base.tokenizer.encode_answer(record)?.len());
    }
    let room = base.config.max_position_embeddings as usize - prompt;
    Ok(answer.min(room))
}

impl TextTask {
    fn new(
        run: &Run,
        config: &OfflineConfig,
        dataset: Dataset,
        base: &BaseModel,
        place: &Place,
    ) -> Result<Self> {
        let held_out = dataset.held_out(run.evaluated)?;
        let (rank, world_size) = (place.group().rank(), place.group().world_size());
        let (own, held_out_count) = part(&held_out, rank, world_size);
        let longest = base.config.max_position_embeddings as usize;
        let room = config.data.max_tokens().unwrap_or(longest).min(longest);
        let strangers = match config.objective.estimates_kl() {
            true => part(&mismatched(&held_out, 0..held_out.len(), room), rank, world_size).0,
            false => Vec::new(),
        };
        let objective = config.objective.evaluated();
        let read = |records: &[Record]| read(&base.tokenizer, &objective, config.turns, records);
        let warms_up = config.warmup.as_ref().is_some_and(|warmup| warmup.steps > 0);
        let is_judged = config.objective.judged().is_some();
        let to_complete = held_out.iter().filter(|record| record.is_to_complete());
        let completed = to_complete.take(run.completed).cloned().collect();
        Ok(Self {
            config: config.clone(),
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
            sampler: None,
            completion_tokens: 0,
        })
    }

    /// Source of the steps' records.
    pub fn lesson(&self) -> Lesson<'_> {
        let OfflineConfig { turns, router_aux_loss_coef, .. } = self.config;
        let (dataset, tokenizer) = (&self.dataset, &self.tokenizer);
        Lesson { dataset, tokenizer, seed: self.seed, turns, router_aux_loss_coef }
    }

    /// Outputs of the frozen copy, or of the policy without adapters, for the answers and for `strangers`,
    /// answers to other prompts. `None` for objectives without a reference.
    pub fn reference_logprobs<M: Answering>(
        &self,
        models: &mut TextModels<M>,
        sequences: &[Tokenized],
        strangers: &[Tokenized],
    ) -> Result<Option<Compared>> {
        if !self.config.objective.compares_with_reference() {
            return Ok(None);
        }
        let TextModels { learner, reference, .. } = models;
        let both = [sequences, strangers].concat();
        let logprobs = match reference {
            Some(reference) => {
                let score =
                    |model: &mut _, micro_batch| Ok(score(model, &both, micro_batch, true, None)?.logprobs);
                let logprobs = reference.score(score)?;
                logprobs.f_to_device(learner.device())?
            }
            None => score(&mut learner.model, &both, learner.micro_batch, false, None)?.logprobs,
        };
        let (own, others) = (sequences.len() as i64, strangers.len() as i64);
        let sequences = logprobs.f_narrow(0, 0, own)?;
        Ok(Some(Compared { sequences, strangers: logprobs.f_narrow(0, own, others)? }))
    }

    /// KTO's estimate of the divergence from the reference: the mean gain of mismatched answers over the
    /// `records` prompts of all ranks, at least 0. This rank has `count` of them, the first of its
    /// `strangers`. 0 for other objectives. Every rank must call this.
    pub fn kl<M: Answering>(
        &self,
        learner: &mut Learner<M>,
        exchange: &Exchange,
        strangers: &[Tokenized],
        reference: &Option<Compared>,
        (count, records): (usize, f64),
    ) -> Result<f64> {
        let Some(compared) = reference.as_ref().filter(|_| self.config.objective.estimates_kl()) else {
            return Ok(0.0);
        };
        let logprobs = score(&mut learner.model, strangers, learner.micro_batch, true, None)?.logprobs;
        let gained = logprobs.f_sub(&compared.strangers)?.f_narrow(0, 0, count as i64)?;
        let sum = exchange.reduce(&f64::try_from(gained.f_sum(Kind::Double)?)?)?;
        Ok((sum / records).max(0.0))
    }
}

impl<M: Answering> Pipeline for Offline<M> {
    type Carried = Nothing;

    fn plan(&self) -> Plan {
        let config = &self.task.config;
        Plan {
            warmup_steps: config.warmup.as_ref().map_or(0, |warmup| warmup.steps),
            steps: self.run.steps,
            evaluate_every: (self.run.evaluated > 0).then_some(config.evaluation.every),
            save_every: config.checkpoint.every,
            keep_last: config.checkpoint.keep_last,
        }
    }

    fn best_by(&self, evaluation: &Metrics) -> Option<f64> {
        let loss = evaluation.get("eval/loss").filter(|_| self.task.config.checkpoint.keep_best);
        loss.map(|loss| -loss)
    }

    fn description(&self) -> String {
        describe(title(&self.task.config.objective), &**self.models.learner.model.model(), &self.run)
    }

    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<WarmupStep> {
        let Self { task, models, .. } = self;
        let warmup = task.config.warmup.as_ref().expect("the plan has warm-up steps");
        let Learner { model, micro_batch, .. } = &mut models.learner;
        let policy = M::writer(model).expect("only a model of language has a warm-up");
        let dataset = task.to_warm_up.as_ref().unwrap_or(&task.dataset);
        let lesson = Lesson { dataset, ..task.lesson() };
        lesson.warmup_step(policy, exchange, warmup, *micro_batch, step)
    }

    fn check_divergence(&mut self) -> Result<()> {
        self.models.learner.check_divergence()
    }

    fn end_warm_up(&mut self) -> Result<()> {
        self.models.learner.end_warm_up()
    }

    fn freeze(&mut self, kept: Kept) -> Result<()> {
        let (Some(place), Some(role)) = (&self.reference_place, self.run.held_reference()) else {
            return Ok(());
        };
        let published = self.published.as_ref();
        if let (Some(distill), Some(teacher)) = (self.task.config.objective.distills(), published) {
            self.models.teacher = Some(Teacher::new(teacher, distill, role, place)?);
            return Ok(());
        }
        let policy =
            M::writer(&mut self.models.learner.model).expect("only a model of language has a reference");
        let reference = Reference::new(policy, published, role, place, &*self.weights, kept)?;
        self.models.reference = Some(reference);
        Ok(())
    }

    fn step(&mut self, exchange: &Exchange, step: u64, _: &mut Nothing, stop: bool) -> Result<StepOutcome> {
        self.task.step(&mut self.models, exchange, step, stop)
    }

    fn evaluate(&mut self, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation> {
        self.task.evaluate(&mut self.models, exchange, step, phase)
    }

    fn save(&mut self, saver: &mut Saver, path: &Path, position: serde_json::Value) -> Result<()> {
        self.models.learner.save(saver, path, position, None, |_| Ok(()))
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        self.models.learner.restore(path)
    }
}

/// Name of the objective in papers.
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
        Objective::Prm(_) => "process reward model",
        Objective::Ilql(_) => "ILQL",
    }
}
