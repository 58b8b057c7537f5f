//! [`Rlvr`]: the pipeline of reinforcement learning with verifiable rewards.

use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
};

use anyroll_algorithm::Moments;
use anyroll_config::{AlgorithmConfig, RlvrConfig, Turns};
use anyroll_data::{Dataset, Record};
use anyroll_models::{hf::ModelFolder, init::WeightSource};
use anyroll_reward::RewardSum;
use anyroll_strategy::checkpoint::{self, Saver};
use serde::{Deserialize, Serialize};

use super::{
    Critic, Models, Task,
    evaluate::evaluate,
    reward_model,
    rewards::Rewards,
    rollout::{Engine, Prompts, Rollout},
    setup,
    step::step,
};
use crate::{
    Error, Result,
    launch::Rank,
    metrics::Metrics,
    offline::Lesson,
    opened::Texts,
    run::{Role, Run},
    samples::Phase,
    train::{
        Evaluation, Exchange, Kept, Learner, Pipeline, Place, Plan, Reference, Schedule, StepOutcome,
        WarmupStep, describe,
    },
};

/// A language model that learns from verifiable rewards.
pub struct Rlvr {
    run: Run,
    place: Place,
    /// Placement of the reference, which is made after the warm-up.
    reference_place: Option<Place>,
    /// The published model of the reference, if it is one.
    published: Option<ModelFolder>,
    /// Initial weights of the policy.
    weights: Box<dyn WeightSource>,
    /// The run's options.
    pub task: Arc<Task>,
    /// Prompts and answers of the run.
    pub dataset: Arc<Dataset>,
    /// The prompts of every evaluation.
    pub held_out: Vec<Arc<Record>>,
    /// The engine on the policy's device.
    pub engine: Arc<Engine>,
    /// The rewards.
    pub rewards: Rewards,
    /// The rollout, which samples the groups of a step.
    pub rollout: Box<dyn Rollout>,
    /// The policy and the models around it.
    pub models: Models,
}

/// State that one step leaves for the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Carried {
    /// Number of batches of prompts that previous steps drew: one per step, unless `mixed_groups` draws more.
    pub batches: u64,
    /// Weight of the KL divergence in the reward, after a controller has changed it.
    #[serde(default)]
    pub kl_coef: Option<f64>,
    /// Moments of all rewards so far, if they normalize rewards.
    #[serde(default)]
    pub rewards: Option<Moments>,
}

impl Rlvr {
    /// Prepares a run with its policy on `place` and initial weights. Opens the devices of the other roles.
    pub fn new(run: Run, config: &RlvrConfig, opened: Texts, place: Place, rank: &Rank) -> Result<Self> {
        let Texts { dataset, base, reference: published, reward_models } = opened;
        let (held, on_host) = reward_model::divide(reward_models, &run.reward_models);
        let model = setup::policy(&run, config, &base, place.torch_device()?)?;
        let sum = RewardSum::new(&config.reward, on_host)?;
        let engine = Arc::new(setup::engine(&run, config, &base, &model, &place)?);
        let task = Arc::new(Task::new(&run, config, &base, &model));
        let held_out = dataset.held_out(run.evaluated)?.into_iter().map(Arc::new).collect();
        let dataset = Arc::new(dataset);
        let warmup = config.warmup.as_ref().filter(|warmup| warmup.steps > 0);
        let schedule = Schedule {
            optimizer: config.optimizer.clone(),
            steps: run.steps,
            warmup: warmup.map(|warmup| warmup.optimizer.clone()),
        };
        let learner = Learner::new(model.clone(), &run.policy, &place, &*base.weights, schedule)?;
        // Only evaluations sample on the policy's device, and no critic alternates with the policy.
        let stays = run.rollout.is_some() && run.critic.is_none();
        let learner = if stays { learner.staying() } else { learner };
        let beside =
            |name, role: Option<&Role>| role.map(|role| place.beside(name, role, &run, rank)).transpose();
        let reference_place = beside("reference", run.held_reference())?;
        let critic_place = beside("critic", run.critic.as_ref())?;
        let critic = |place| Critic::new(&run, config, &model, &*base.weights, &place);
        let critic = critic_place.map(critic).transpose()?.flatten();
        let (tokenizer, task_of) = (base.tokenizer.clone(), task.clone());
        let prompts =
            Prompts { dataset: dataset.clone(), tokenizer, task: task_of, rank: place.group().rank() };
        let rollout = setup::rollout(&run, prompts, &engine, &place, rank)?;
        let rewards = setup::rewards(&run, sum, held, &task, &base, &place, rank)?;
        let models = Models { learner, reference: None, critic };
        let weights = base.weights;
        Ok(Self {
            run,
            place,
            reference_place,
            published,
            weights,
            task,
            dataset,
            held_out,
            engine,
            rewards,
            rollout,
            models,
        })
    }

    /// Returns true if completions are in flight between steps.
    fn is_asynchronous(&self) -> bool {
        self.task.config.rollout.asynchronous.ahead > 0
    }
}

impl Pipeline for Rlvr {
    type Carried = Carried;

    fn plan(&self) -> Plan {
        let rlvr = &self.task.config;
        Plan {
            warmup_steps: rlvr.warmup.as_ref().map_or(0, |warmup| warmup.steps),
            steps: self.run.steps,
            evaluate_every: Some(rlvr.evaluation.every),
            save_every: rlvr.checkpoint.every,
            keep_last: rlvr.checkpoint.keep_last,
        }
    }

    fn best_by(&self, evaluation: &Metrics) -> Option<f64> {
        evaluation.get("eval/greedy").filter(|_| self.task.config.checkpoint.keep_best)
    }

    fn description(&self) -> String {
        describe(&title(&self.task.config.algorithm), &**self.models.learner.model.model(), &self.run)
    }

    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<WarmupStep> {
        let Self { task, dataset, engine, models, .. } = self;
        let warmup = task.config.warmup.as_ref().expect("the plan has warm-up steps");
        let tokenizer = &engine.sampler.tokenizer;
        let router_aux_loss_coef = task.config.algorithm.router_aux_loss_coef;
        let lesson = Lesson { dataset, tokenizer, seed: task.seed, turns: Turns::Last, router_aux_loss_coef };
        let Learner { model, micro_batch, .. } = &mut models.learner;
        lesson.warmup_step(model, exchange, warmup, *micro_batch, step)
    }

    fn check_divergence(&mut self) -> Result<()> {
        self.models.learner.check_divergence()?;
        self.models.critic.as_mut().map_or(Ok(()), Critic::check_divergence)
    }

    fn end_warm_up(&mut self) -> Result<()> {
        self.models.learner.end_warm_up()
    }

    /// Creates the reference. The critic starts with the policy's weights, except adapters, which it does not have.
    fn freeze(&mut self, kept: Kept) -> Result<()> {
        let policy = &mut self.models.learner.model;
        let begins = !kept.is_saved && !self.task.has_adapters;
        if let Some(critic) = self.models.critic.as_mut().filter(|_| begins) {
            critic.begin_as(policy)?;
        }
        let reference = self.reference_place.as_ref().zip(self.run.held_reference());
        let (published, weights) = (self.published.as_ref(), &*self.weights);
        let new = |(place, role)| Reference::new(policy, published, role, place, weights, kept);
        self.models.reference = reference.map(new).transpose()?;
        Ok(())
    }

    fn step(
        &mut self,
        exchange: &Exchange,
        number: u64,
        carried: &mut Carried,
        stop: bool,
    ) -> Result<StepOutcome> {
        let stepped = step(self, exchange, number, carried, stop);
        if let Err(Error::Unscored) = stepped {
            self.models.learner.finish_leaving()?;
        }
        stepped
    }

    fn stop_by(&mut self, stop: &Arc<AtomicBool>) {
        self.rewards.grader.stop = stop.clone();
    }

    /// Completions in flight are taken from their queue before they are scored.
    fn is_unchanged_if_unscored(&self) -> bool {
        self.run.rollout.is_none() && !self.is_asynchronous()
    }

    fn evaluate(&mut self, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation> {
        evaluate(self, exchange, step, phase)
    }

    fn save(&mut self, saver: &mut Saver, path: &Path, position: serde_json::Value) -> Result<()> {
        self.rollout.settle()?;
        let in_flight = self.rollout.in_flight();
        let in_flight = in_flight.map(|groups| serde_json::to_vec(groups).expect("plain data"));
        let Models { learner, critic, .. } = &mut self.models;
        let save = saver.save();
        learner.save(saver, path, position, in_flight, |folder| {
            critic.as_mut().map_or(Ok(()), |critic| critic.save(folder, save))
        })
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        self.models.learner.restore(path)?;
        if self.is_asynchronous() {
            let group = self.place.group();
            let refused = |problem: String| Error::Resume { run: path.to_owned(), problem };
            let bytes = checkpoint::own(path, group.rank(), group.world_size())?.ok_or_else(|| {
                refused("it has no completions in flight: write `rollout.async.ahead: 0` again".to_owned())
            })?;
            let groups = serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))?;
            self.rollout.restore(groups);
        }
        self.models.critic.as_mut().map_or(Ok(()), |critic| critic.restore(path))
    }

    fn end(&mut self) -> Result<()> {
        self.rollout.end()
    }
}

/// Name of the algorithm in papers.
fn title(algorithm: &AlgorithmConfig) -> String {
    let advantage = algorithm.advantage.formula().title(algorithm.whiten_advantages);
    match algorithm.loss.formula().title() {
        Some(loss) => format!("{loss} on {advantage}"),
        None => advantage.to_owned(),
    }
}
