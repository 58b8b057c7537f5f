//! Parts of a run: its options, the engine that samples, and the rewards.

use std::{num::NonZeroUsize, sync::Arc};

use anyroll_backends::{BackendKind, Stream, ops};
use anyroll_config::{RlvrConfig, RolloutConfig, RolloutWeights};
use anyroll_reward::{OpenModel, RewardSum, Scorer};
use anyroll_strategy::{neighbours, peers};
use tch::Tensor;

use super::{
    Decoder,
    grader::Grader,
    pack::Packing,
    reward_model::ShardedModel,
    rewards::Rewards,
    rollout::{
        Devices, Door, Engine, GroupQueue, InFlightRollout, OwnDevicesRollout, Prompts, Rollout, SyncRollout,
        Together, sampler,
    },
};
use crate::{
    Error, Result,
    base_model::BaseModel,
    environment::Environment,
    launch::Rank,
    run::Run,
    train::{Exchange, Place, Share, zero_config},
};

/// The options of a run, which are the same on every rank.
#[derive(Clone, Debug)]
pub struct Task {
    /// The pipeline's part of the config.
    pub config: RlvrConfig,
    /// The run's seed.
    pub seed: u64,
    /// The run's steps.
    pub steps: u64,
    /// Division of samples among ranks.
    pub share: Share,
    /// Packing of samples into batches.
    pub packing: Packing,
    /// True if adapters are trained; the reference is then the policy without adapters.
    pub has_adapters: bool,
}

impl Task {
    /// Creates the task of `run` with `config`, for the policy `model`.
    pub fn new(run: &Run, config: &RlvrConfig, base: &BaseModel, model: &Decoder) -> Self {
        Self {
            config: config.clone(),
            seed: run.config.seed,
            steps: run.steps,
            share: Share {
                prompts: config.prompts_per_step,
                group_size: config.group_size,
                mini_batches: config.mini_batches,
                world_size: run.world_size,
            },
            packing: Packing::new(run, config, model),
            has_adapters: base.lora.is_some(),
        }
    }
}

/// Creates the policy's model on `device`. With `rollout.strict` its log-probs are bitwise equal to those of sampling.
pub fn policy(run: &Run, config: &RlvrConfig, base: &BaseModel, device: tch::Device) -> Result<Arc<Decoder>> {
    let model = base.policy(device, &run.policy.strategy)?.strict(config.rollout.strict);
    if config.rollout.strict {
        let kind = zero_config(&run.policy.strategy).precision.dtype().kind();
        let like = Tensor::f_empty([0], (kind, device))?;
        let (dim, vocab) = (model.config().head_dim, model.config().vocab_size);
        ops::exist_by_rows(&like, dim, vocab).map_err(|reason| Error::NoStrict { reason })?;
    }
    Ok(Arc::new(model))
}

/// The model that samples in place of `policy`: without adapters if they are merged, with activations in 8 bits if they are.
pub fn sampled(rollout: &RolloutConfig, policy: &Arc<Decoder>) -> Arc<Decoder> {
    let model = if rollout.merge_adapters { Arc::new(policy.merged()) } else { policy.clone() };
    if rollout.fp8_activations { Arc::new(Decoder::clone(&model).rounding_rows()) } else { model }
}

/// Creates the engine that samples `model` on the policy's device.
pub fn engine(
    run: &Run,
    config: &RlvrConfig,
    base: &BaseModel,
    model: &Arc<Decoder>,
    place: &Place,
) -> Result<Engine> {
    let rollout = &config.rollout;
    let (compute, threads) = (Stream::torch(&place.device)?, threads(run, config, model));
    let together = (rollout.tensor_parallel > 1).then(|| {
        let group = neighbours(place.group(), "rollout", rollout.tensor_parallel)?;
        let part = Arc::new(model.split(peers(&group, &compute), rollout.expert_parts())?);
        Ok::<_, Error>(Together { part, exchange: Exchange::new(&group)? })
    });
    let together = together.transpose()?;
    let own = together.as_ref().map_or(model, |together| &together.part);
    let sampled = sampled(rollout, own);
    let environment = Environment::new(rollout, base.tokenizer.clone()).map_err(Error::NoEnvironment)?;
    Ok(Engine {
        sampler: sampler(rollout, sampled, compute, base.tokenizer.clone(), threads),
        environment,
        merged: rollout.merge_adapters.then(|| model.clone()),
        in_eight_bits: rollout.weights == RolloutWeights::Fp8,
        together,
    })
}

/// Creates the rewards of `sum`, with the opened models that the ranks hold.
pub fn rewards(
    run: &Run,
    sum: RewardSum,
    held: Vec<OpenModel>,
    task: &Arc<Task>,
    base: &BaseModel,
    place: &Place,
    rank: &Rank,
) -> Result<Rewards> {
    let (config, sum) = (&task.config, Arc::new(sum));
    let workers = NonZeroUsize::new(config.scoring.workers).expect("a config that was checked");
    let grader = Grader {
        scorer: Scorer::start(sum.clone(), workers).map_err(Error::Thread)?,
        sum,
        models: ShardedModel::all(held, run, place, rank)?,
        tokenizer: base.tokenizer.clone(),
        stop: Arc::default(),
    };
    Ok(Rewards { grader, task: task.clone() })
}

/// Creates the rollout of the config.
pub fn rollout(
    run: &Run,
    prompts: Prompts,
    engine: &Arc<Engine>,
    place: &Place,
    rank: &Rank,
) -> Result<Box<dyn Rollout>> {
    let config = &prompts.task.config.rollout;
    let engine = engine.clone();
    Ok(match &run.rollout {
        Some(role) => {
            let devices = match role.hosts {
                Some(hosts) => Devices::elsewhere(Door::open(run, &prompts.task.config, hosts, place, rank)?),
                None => Devices::open(&engine, config, role, rank.local_rank)?,
            };
            Box::new(OwnDevicesRollout::new(prompts, devices))
        }
        None if config.asynchronous.ahead > 0 => {
            Box::new(InFlightRollout { engine, prompts, queue: GroupQueue::default() })
        }
        None => Box::new(SyncRollout { engine, prompts }),
    })
}

/// Number of math threads while a host samples; `None` if something else computes on the host then. Other work would
/// be affected, since the number of threads may change the rounding of a matrix product. Threads synchronize after
/// each product of a decoding step. If they sleep in between, that takes as long as some ten million multiplications
/// of one thread.
fn threads(run: &Run, config: &RlvrConfig, model: &Decoder) -> Option<usize> {
    const LEAST: usize = 1 << 24;
    let is_host = run.policy.backend.parse::<BackendKind>().is_ok_and(BackendKind::is_host);
    let is_alone = run.rollout.is_none() && run.reward_models.iter().all(Option::is_some);
    let rows = config.rollout.batch_size.min(run.batches.sequences_per_step / run.world_size);
    let (width, inner) = (model.config().hidden_size, model.config().intermediate_size);
    let largest = rows * (width * 2 * inner) as usize;
    (is_host && is_alone).then(|| (largest / LEAST).clamp(1, run.threads))
}
