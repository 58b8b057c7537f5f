//! What a run of images is made of, and who takes part.

use std::sync::Arc;

use anyroll_models::diffusion::{self, Guidance, Sampler, SdeNoise, Walk, sigmas, sigmas_of_diffusers};
use anyroll_strategy::{State, Weights, Zero};
use tch::Tensor;

use super::{
    Dit,
    noise::{Purpose, gaussian, order},
    scorer::Scorer,
    shapes,
};
use crate::{
    Result,
    config::{
        DanceGrpoConfig, DiffusionConfig, FlowGrpoConfig, MethodConfig, ModelConfig, PipelineConfig, Run,
        SamplerConfig, Spacing,
    },
    train::{Place, Share, offloaded},
};

/// What a run is made of, apart from the weights.
pub struct Setup {
    /// The pipeline's part of the config.
    pub config: DiffusionConfig,
    /// The run's seed.
    pub seed: u64,
    /// How noise becomes an image.
    pub sampler: Sampler,
    /// What an image earns.
    pub scorer: Scorer,
    /// Which rank samples what.
    pub share: Share,
    /// Images that a rank puts through forward and backward at a time.
    pub micro_batch_size: usize,
    /// What of the policy is on the device only from the end of sampling to the end of the step.
    pub offloaded: Vec<State>,
    /// Where batches go.
    pub device: tch::Device,
    /// The policy's model.
    pub model: Arc<Dit>,
}

/// The models of a run.
pub struct Roles {
    /// The one that is trained.
    pub policy: Zero<Dit>,
    /// As the policy was after the warm-up; `None` without a KL term.
    pub reference: Option<Zero<Dit>>,
    /// The one that DiffusionNFT samples with: it follows the policy.
    pub old: Option<Zero<Dit>>,
}

/// This rank's samples of a step.
pub struct Samples {
    /// Their numbers among the step's, in this rank's order.
    pub numbers: Vec<usize>,
    /// Their classes: int64 `[N]`.
    pub labels: Tensor,
    /// Their way from noise to images.
    pub walk: Walk,
}

impl Samples {
    /// fp32 `[N, channels, height, width]`.
    pub fn images(&self) -> &Tensor {
        self.walk.points.last().expect("a walk has a beginning")
    }
}

impl Setup {
    /// Prepares a run on `place`.
    pub fn new(run: &Run, place: &Place) -> Result<Self> {
        let (PipelineConfig::Diffusion(config), ModelConfig::Dit(dit)) =
            (&run.config.pipeline, &run.config.model)
        else {
            unreachable!("a checked config has a model of images for a pipeline of images")
        };
        let device = place.torch_device()?;
        let model = Dit::new(diffusion::DitConfig {
            image_size: shapes::SIZE as i64,
            channels: 1,
            patch_size: dit.patch_size as i64,
            classes: shapes::CLASSES as i64,
            hidden_size: dit.hidden_size as i64,
            layers: dit.layers,
            heads: dit.heads as i64,
            intermediate_size: dit.intermediate_size as i64,
        })?;
        let guidance = Guidance { scale: config.sampler.guidance, no_class: shapes::CLASSES as i64 };
        Ok(Self {
            seed: run.config.seed,
            sampler: Sampler { sigmas: spaced(&config.sampler)?, guidance },
            scorer: Scorer::new(device)?,
            share: Share {
                prompts: config.prompts_per_step,
                group_size: config.group_size,
                mini_batches: config.mini_batches,
                world_size: run.world_size,
            },
            micro_batch_size: run.policy.strategy.micro_batch_size,
            offloaded: offloaded(&run.policy.strategy),
            device,
            model: Arc::new(model),
            config: (**config).clone(),
        })
    }

    /// The numbers of this rank's samples of a step, and their classes.
    pub fn own_prompts(&self, rank: usize, step: u64) -> Result<(Vec<usize>, Tensor)> {
        let prompts = shapes::prompts(self.seed, step, self.share.prompts);
        let numbers: Vec<usize> = self.share.samples_of(rank).collect();
        let labels: Vec<i64> = numbers.iter().map(|number| prompts[number / self.share.group_size]).collect();
        Ok((numbers, self.labels(&labels)?))
    }

    /// On the device.
    pub fn labels(&self, labels: &[i64]) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(labels)?.f_to_device(self.device)?)
    }

    /// Where the samples `numbers` of a step begin. `DanceGRPO` lets a group begin at one point.
    pub fn start_noise(&self, step: u64, numbers: &[usize]) -> Result<Tensor> {
        let group_size = match self.config.method {
            MethodConfig::DanceGrpo(_) => self.share.group_size,
            _ => 1,
        };
        self.noise(Purpose::Start, step, numbers.iter().map(|number| number / group_size))
    }

    /// Normal noise of the images' shape.
    pub fn noise(
        &self,
        purpose: Purpose,
        step: u64,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<Tensor> {
        let size = shapes::SIZE as i64;
        gaussian(purpose, self.seed, step, numbers, [1, size, size], self.device)
    }

    /// Samples this rank's part of a step, with the noise of the method's denoising steps.
    pub fn sample(&self, weights: &Weights, rank: usize, step: u64) -> Result<Samples> {
        let (numbers, labels) = self.own_prompts(rank, step)?;
        let mut walks = Vec::new();
        for (index, part) in numbers.chunks(self.config.sampler.batch_size).enumerate() {
            let start = (index * self.config.sampler.batch_size) as i64;
            let labels = labels.f_narrow(0, start, part.len() as i64)?;
            let steps = self.sampler.steps();
            let draws = match self.sde_noise() {
                None => None,
                Some(noise) => {
                    let of_step = |denoising: usize| {
                        let numbers = part.iter().map(|number| number * steps + denoising);
                        self.noise(Purpose::Sde, step, numbers)
                    };
                    Some((noise, (0..steps).map(of_step).collect::<Result<Vec<_>>>()?))
                }
            };
            let sde = draws.as_ref().map(|(noise, draws)| (*noise, draws.as_slice()));
            walks.push(self.walk(weights, self.start_noise(step, part)?, &labels, sde)?);
        }
        Ok(Samples { numbers, labels, walk: join(walks)? })
    }

    /// One walk with whole weights, which no rank waits for.
    pub fn walk(
        &self,
        weights: &Weights,
        noise: Tensor,
        labels: &Tensor,
        sde: Option<(SdeNoise, &[Tensor])>,
    ) -> Result<Walk> {
        let units: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        Ok(self.sampler.walk(&*self.model, &units, noise, labels, sde)?)
    }

    /// The noise of the method's denoising steps, if they have any.
    pub fn sde_noise(&self) -> Option<SdeNoise> {
        match self.config.method {
            MethodConfig::FlowGrpo(FlowGrpoConfig { noise_level, .. }) => Some(SdeNoise::Level(noise_level)),
            MethodConfig::DanceGrpo(DanceGrpoConfig { eta, .. }) => Some(SdeNoise::Constant(eta)),
            MethodConfig::Refl(_) | MethodConfig::DraftK(_) | MethodConfig::DiffusionNft(_) => None,
        }
    }

    /// The denoising steps of step `step` that are trained on: the so-manieth part of all, drawn anew for each.
    pub fn trained_timesteps(&self, step: u64, fraction: f64) -> Vec<usize> {
        let steps = self.sampler.steps();
        let count = ((steps as f64 * fraction).round() as usize).clamp(1, steps);
        let mut timesteps = order(Purpose::Timesteps, self.seed, step, steps);
        timesteps.truncate(count);
        timesteps
    }
}

fn spaced(sampler: &SamplerConfig) -> Result<Vec<f64>> {
    Ok(match sampler.spacing {
        Spacing::Even => sigmas(sampler.steps, sampler.shift)?,
        Spacing::Diffusers => sigmas_of_diffusers(sampler.steps, sampler.shift)?,
    })
}

/// Walks beside each other.
fn join(mut walks: Vec<Walk>) -> Result<Walk> {
    if walks.len() == 1 {
        return Ok(walks.remove(0));
    }
    let cat = |of: fn(&Walk) -> &[Tensor]| {
        let parts = (0..of(&walks[0]).len())
            .map(|index| Tensor::f_cat(&walks.iter().map(|walk| &of(walk)[index]).collect::<Vec<_>>(), 0));
        parts.collect::<Result<Vec<_>, _>>()
    };
    Ok(Walk { points: cat(|walk| &walk.points)?, logprobs: cat(|walk| &walk.logprobs)? })
}
