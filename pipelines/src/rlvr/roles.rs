//! Who takes part in a run: the policy, its frozen reference, and what they are made from.

use std::{sync::Arc, time::Duration};

use anyroll_backends::{BackendKind, CollectiveGroup, Device, DeviceId, Rendezvous, Stream, connect, open};
use anyroll_models::init::WeightSource;
use anyroll_strategy::{AdamW, Precision, Recompute, Schedule, State, Zero, ZeroConfig, ZeroStage};

use super::{Decoder, share::Share};
use crate::{
    Error, Result,
    base_model::BaseModel,
    config::{
        self, Offload, OffloadConfig, OptimizerConfig, PipelineConfig, RlvrConfig, Run, ScheduleConfig,
    },
    data::{Dataset, Record, Tokenizer},
    launch::Rank,
    reward::RewardSum,
};

/// What a run is made of, apart from the weights.
pub struct Setup {
    /// The pipeline's part of the config.
    pub rlvr: RlvrConfig,
    /// The run's seed.
    pub seed: u64,
    /// Prompts and answers.
    pub dataset: Dataset,
    /// The prompts of every evaluation.
    pub held_out: Vec<Record>,
    /// Text to tokens.
    pub tokenizer: Tokenizer,
    /// The policy's first weights.
    pub weights: Box<dyn WeightSource>,
    /// What a completion earns.
    pub reward: RewardSum,
    /// Which rank samples what.
    pub share: Share,
    /// Sequences that a rank puts through forward and backward at a time.
    pub micro_batch_size: usize,
    /// What of the policy is on the device only from the end of generation to the end of the step.
    pub offloaded: Vec<State>,
    /// Where batches go.
    pub device: tch::Device,
    /// The stream on which libtorch computes there.
    pub compute: Stream,
    /// The policy's model.
    pub model: Arc<Decoder>,
}

/// The models of a run.
#[derive(Debug)]
pub struct Roles {
    /// The one that is trained.
    pub policy: Zero<Decoder>,
    /// Its frozen copy from after the warm-up; `None` without a KL term.
    pub reference: Option<Reference>,
}

/// The frozen copy.
#[derive(Debug)]
pub struct Reference {
    /// Its weights.
    pub model: Zero<Decoder>,
    /// Sequences that a rank scores at a time.
    pub micro_batch_size: usize,
    /// What of it is on the device only while it scores.
    pub offloaded: Vec<State>,
}

/// A device and the ranks that it trains with.
#[derive(Debug)]
pub struct Place {
    /// The device.
    pub device: Arc<dyn Device>,
    /// All ranks.
    pub group: CollectiveGroup,
}

impl Place {
    /// Opens the policy's device and meets the other ranks.
    pub fn open(run: &Run, rank: &Rank) -> Result<Self> {
        let backend: BackendKind = run.policy.backend.parse().expect("a resolved config names a backend");
        let device = open(DeviceId { backend, ordinal: run.policy.ordinals[rank.local_rank] })?;
        let timeout = Duration::from_secs_f64(run.policy.strategy.collective_timeout_s);
        let rendezvous = Rendezvous {
            rank: rank.rank,
            world_size: rank.world_size,
            master_addr: rank.master_addr.clone(),
            master_port: rank.master_port,
            agent_store: rank.agent_store.clone(),
            timeout,
        };
        let comm = connect(&*device, &rendezvous)?;
        let group = CollectiveGroup::new("policy", comm, &device, timeout)?;
        Ok(Self { device, group })
    }
}

impl Setup {
    /// Prepares a run over `world_size` ranks on `place`.
    pub fn new(run: &Run, dataset: Dataset, place: &Place) -> Result<Self> {
        let PipelineConfig::Rlvr(rlvr) = &run.config.pipeline;
        let base = BaseModel::open(&run.config.model, &dataset, run.config.seed)?;
        let device = place.device.torch_device().and_then(anyroll_backends::TorchDevice::tch);
        let device = device.ok_or_else(|| anyroll_backends::Error::Unsupported {
            backend: place.device.id().backend,
            what: "models: libtorch does not compute on it".into(),
        })?;
        let model = Decoder::new(base.config, device)?;
        Ok(Self {
            seed: run.config.seed,
            held_out: dataset.held_out(rlvr.evaluation.prompts)?,
            dataset,
            tokenizer: base.tokenizer,
            weights: base.weights,
            reward: RewardSum::new(&rlvr.reward),
            share: Share {
                prompts: rlvr.prompts_per_step,
                group_size: rlvr.group_size,
                mini_batches: rlvr.mini_batches,
                world_size: run.world_size,
            },
            micro_batch_size: run.policy.strategy.micro_batch_size,
            offloaded: offloaded(&run.policy.strategy),
            device,
            compute: Stream::torch(&place.device)?,
            model: Arc::new(model),
            rlvr: (**rlvr).clone(),
        })
    }

    /// The policy, with its first weights, ready to be trained by `optimizer`.
    pub fn policy(&self, run: &Run, place: &Place, optimizer: &OptimizerConfig) -> Result<Zero<Decoder>> {
        self.zero(&run.policy.strategy, place, Some(adamw(optimizer)))
    }

    /// A frozen copy of `policy`, if the loss has a KL term.
    pub fn reference(
        &self,
        run: &Run,
        place: &Place,
        policy: &mut Zero<Decoder>,
    ) -> Result<Option<Reference>> {
        let Some(role) = &run.reference else { return Ok(None) };
        let mut model = self.zero(&role.strategy, place, None)?;
        model.copy_weights_from(policy)?;
        let micro_batch_size = role.strategy.micro_batch_size;
        Ok(Some(Reference { model, micro_batch_size, offloaded: offloaded(&role.strategy) }))
    }

    /// The learning rate's way.
    pub fn schedule(&self, config: &ScheduleConfig) -> Schedule {
        match config {
            ScheduleConfig::Constant(c) => Schedule::Constant { warmup_steps: c.warmup_steps },
            ScheduleConfig::Linear(c) => {
                Schedule::Linear { warmup_steps: c.warmup_steps, final_ratio: c.final_ratio }
            }
            ScheduleConfig::Cosine(c) => {
                Schedule::Cosine { warmup_steps: c.warmup_steps, final_ratio: c.final_ratio }
            }
        }
    }

    fn zero(
        &self,
        strategy: &config::StrategyConfig,
        place: &Place,
        adamw: Option<AdamW>,
    ) -> Result<Zero<Decoder>> {
        let config = ZeroConfig {
            stage: ZeroStage::try_from(u64::from(strategy.zero_stage)).map_err(Error::from)?,
            precision: match strategy.precision {
                config::Precision::Fp32 => Precision::Fp32,
                config::Precision::Bf16 => Precision::Bf16,
                config::Precision::Fp16 => unreachable!("a config with it is refused"),
            },
            recompute: match strategy.recompute {
                config::Recompute::None => Recompute::None,
                config::Recompute::Full => Recompute::Full,
            },
        };
        let (model, group) = (self.model.clone(), place.group.clone());
        Ok(Zero::from_source(model, config, adamw, &place.device, group, &*self.weights)?)
    }
}

/// What leaves the device between uses. Gradients are only let go, so they go with the optimizer's states.
fn offloaded(strategy: &config::StrategyConfig) -> Vec<State> {
    let OffloadConfig { optimizer, params } = strategy.offload;
    let mut states = Vec::new();
    if optimizer == Offload::BetweenSteps {
        states.extend([State::Optimizer, State::Gradients]);
    }
    if params == Offload::BetweenSteps {
        states.push(State::Params);
    }
    states
}

/// The optimizer's numbers.
pub fn adamw(optimizer: &OptimizerConfig) -> AdamW {
    let [beta1, beta2] = optimizer.adamw.betas;
    AdamW {
        betas: (beta1, beta2),
        eps: optimizer.adamw.eps,
        weight_decay: optimizer.adamw.weight_decay,
        max_grad_norm: optimizer.max_grad_norm,
    }
}
