//! Who takes part in a run: the policy, its frozen reference, the critic, reward models, and what they are made from. Each may be held on
//! devices of its own; what one tells another goes by way of the policy's.

use std::{num::NonZeroUsize, sync::Arc};

use anyroll_backends::{BackendKind, Stream, ops};
use anyroll_models::init::WeightSource;
use anyroll_strategy::{State, Weights, Zero};
use tch::Tensor;

use super::{Critic, Decoder};
use crate::{
    Error, Result,
    base_model::BaseModel,
    config::{OptimizerConfig, RlvrConfig, RolloutConfig, Turns},
    data::{Dataset, Record, Tokenizer},
    environment::Environment,
    inference::{AnswersTurns, Sampler},
    offline::Lesson,
    reward::{HeldModel, OpenModel, RewardSum, Scorer},
    run::Run,
    train::{Place, Reference, Share, adamw, hold, offloaded, zero_config},
};

/// What a run is made of, apart from the weights.
pub struct Setup {
    /// The pipeline's part of the config.
    pub rlvr: RlvrConfig,
    /// The run's seed.
    pub seed: u64,
    /// The run's steps.
    pub steps: u64,
    /// Whether a prompt that neighbouring sequences share goes through the model once.
    pub shares_prompts: bool,
    /// Prompts and answers.
    pub dataset: Dataset,
    /// The prompts of every evaluation.
    pub held_out: Vec<Arc<Record>>,
    /// Text to tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Whether adapters are what is trained; the reference is then the policy with its adapters off.
    pub has_adapters: bool,
    /// The policy's first weights.
    pub weights: Box<dyn WeightSource>,
    /// What a completion earns.
    pub reward: Arc<RewardSum>,
    /// Where that is found out.
    pub scorer: Scorer,
    /// What answers the policy's turns, if something does.
    pub environment: Option<Environment>,
    /// Which rank samples what.
    pub share: Share,
    /// Sequences that a rank puts through forward and backward at a time.
    pub micro_batch_size: usize,
    /// What of the policy is away while the device samples.
    pub offloaded: Vec<State>,
    /// What of that leaves with every step: nothing where only evaluation samples there, and no critic takes turns with it.
    pub leaving: Vec<State>,
    /// Where the policy's batches go.
    pub device: tch::Device,
    /// The policy's model, with its adapters.
    pub model: Arc<Decoder>,
    /// What samples on the policy's device.
    pub sampler: Sampler,
}

/// The models of a run.
#[derive(Debug)]
pub struct Roles {
    /// The one that is trained.
    pub policy: Zero<Decoder>,
    /// Its frozen copy from after the warm-up; `None` without a KL term.
    pub reference: Option<Reference>,
    /// What values tokens; `None` unless advantages are made from values.
    pub critic: Option<Critic>,
    /// The reward models that the ranks hold together, in the order of the reward's terms.
    pub reward_models: Vec<HeldModel>,
}

/// The math's threads while a host samples, if nothing else computes on it then: how many threads share a product of
/// matrices may decide how it is rounded. Threads meet after each product of a decoding step, and where they sleep in
/// between, that takes as long as one thread takes for some ten million multiplications.
fn threads(run: &Run, rlvr: &RlvrConfig, model: &Decoder) -> Option<usize> {
    const LEAST: usize = 1 << 24;
    let is_host = run.policy.backend.parse::<BackendKind>().is_ok_and(BackendKind::is_host);
    let is_alone = run.rollout.is_none() && run.reward_models.iter().all(Option::is_some);
    let rows = rlvr.rollout.batch_size.min(run.batches.sequences_per_step / run.world_size);
    let (width, inner) = (model.config().hidden_size, model.config().intermediate_size);
    let largest = rows * (width * 2 * inner) as usize;
    (is_host && is_alone).then(|| (largest / LEAST).clamp(1, run.threads))
}

/// What samples with `model` as `rollout` says.
pub fn sampler(
    rollout: &RolloutConfig,
    model: Arc<Decoder>,
    compute: Stream,
    tokenizer: Arc<Tokenizer>,
    threads: Option<usize>,
) -> Sampler {
    Sampler {
        model,
        compute,
        tokenizer,
        max_new_tokens: rollout.max_new_tokens,
        max_turn_tokens: rollout.environment.as_ref().and_then(|environment| environment.max_turn_tokens),
        batch_size: rollout.batch_size,
        stop: rollout.stop.clone(),
        cache_memory: rollout.kv_cache.memory,
        threads,
    }
}

impl Setup {
    /// Prepares a run of `base` on `place`. `reward_models` are those on the host, as [`RewardSum::new`] takes them.
    pub fn new(
        run: &Run,
        rlvr: &RlvrConfig,
        dataset: Dataset,
        base: BaseModel,
        reward_models: Vec<Option<OpenModel>>,
        place: &Place,
    ) -> Result<Self> {
        let device = place.torch_device()?;
        let model = base.policy(device, &run.policy.strategy)?;
        let model = Arc::new(model.strict(rlvr.rollout.strict));
        if rlvr.rollout.strict {
            let kind = zero_config(&run.policy.strategy).precision.dtype().kind();
            let like = Tensor::f_empty([0], (kind, device))?;
            let (dim, vocab) = (model.config().head_dim, model.config().vocab_size);
            ops::exist_by_rows(&like, dim, vocab).map_err(|reason| Error::NoStrict { reason })?;
        }
        let (compute, threads) = (Stream::torch(&place.device)?, threads(run, rlvr, &model));
        let sampled = if rlvr.rollout.merge_adapters { Arc::new(model.merged()) } else { model.clone() };
        let sampler = sampler(&rlvr.rollout, sampled, compute, base.tokenizer.clone(), threads);
        let reward = Arc::new(RewardSum::new(&rlvr.reward, reward_models)?);
        let environment = Environment::new(&rlvr.rollout, base.tokenizer.clone());
        let environment = environment.map_err(Error::NoEnvironment)?;
        let offloaded = offloaded(&run.policy.strategy);
        let leaves = run.rollout.is_none() || run.critic.is_some();
        let workers = NonZeroUsize::new(rlvr.scoring.workers).expect("a config that was checked");
        Ok(Self {
            seed: run.config.seed,
            steps: run.steps,
            shares_prompts: run.shares_prompts,
            held_out: dataset.held_out(run.evaluated)?.into_iter().map(Arc::new).collect(),
            dataset,
            tokenizer: base.tokenizer,
            weights: base.weights,
            has_adapters: base.lora.is_some(),
            scorer: Scorer::start(reward.clone(), workers).map_err(Error::Thread)?,
            reward,
            environment,
            share: Share {
                prompts: rlvr.prompts_per_step,
                group_size: rlvr.group_size,
                mini_batches: rlvr.mini_batches,
                world_size: run.world_size,
            },
            micro_batch_size: run.policy.strategy.micro_batch_size,
            leaving: if leaves { offloaded.clone() } else { Vec::new() },
            offloaded,
            device,
            model,
            sampler,
            rlvr: rlvr.clone(),
        })
    }

    /// The policy, with its first weights, ready to be trained by `optimizer`.
    pub fn policy(&self, run: &Run, place: &Place, optimizer: &OptimizerConfig) -> Result<Zero<Decoder>> {
        hold(self.model.clone(), &run.policy.strategy, place, Some(adamw(optimizer)), &*self.weights)
    }

    /// The policy's weights as [`Self::sampler`] reads them. With merged adapters they are one copy more of the matrices that
    /// have some, as long as these live.
    pub fn weights_to_sample(&self, policy: &mut Zero<Decoder>) -> Result<Weights> {
        if !self.rlvr.rollout.merge_adapters {
            return Ok(policy.weights()?);
        }
        let weights = policy.weights_with_own(|unit, param| self.model.merges_into(unit, param))?;
        Ok(self.model.merge(weights)?)
    }

    /// The episodes of samples of these records, if there is an environment.
    pub fn episodes<'a>(
        &self,
        records: impl IntoIterator<Item = &'a Arc<Record>>,
    ) -> Option<Box<dyn AnswersTurns + '_>> {
        let environment = self.environment.as_ref()?;
        Some(Box::new(environment.episodes(records.into_iter().cloned().collect())))
    }

    /// What the warm-up draws records from.
    pub fn lesson(&self) -> Lesson<'_> {
        let turns = Turns::Last;
        Lesson { dataset: &self.dataset, tokenizer: &self.tokenizer, seed: self.seed, turns }
    }
}
