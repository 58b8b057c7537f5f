//! Parts of a run of images: its options and its models.

use std::sync::Arc;

use anyroll_backends::profile::span;
use anyroll_config::{DanceGrpoConfig, DiffusionConfig, FlowGrpoConfig, MethodConfig};
use anyroll_models::{
    diffusion::{DenoiseBatch, Guidance, Sampler, SdeNoise, Transformer, Walk},
    init::WeightSource,
};
use anyroll_strategy::{Weights, Zero};
use tch::Tensor;

use super::{
    decoder::ImageDecoder,
    image_model::ImageModel,
    noise::{Purpose, gaussian, order},
    scorer::{Painted, Scorer, Scores},
    shapes,
};
use crate::{
    Result,
    run::Run,
    train::{Learner, Place, Share},
};

/// Options of an image run, with its sampler and rewards.
pub struct ImageTask {
    /// The pipeline's part of the config.
    pub config: DiffusionConfig,
    /// The run's seed.
    pub seed: u64,
    /// The sampler, which turns noise into an image.
    pub sampler: Sampler,
    /// The reward of an image.
    pub scorer: Scorer,
    /// Division of samples among ranks.
    pub share: Share,
    /// Device of the batches.
    pub device: tch::Device,
    /// The policy's model.
    pub model: Arc<Transformer>,
    /// Initial weights of the policy.
    pub weights: Box<dyn WeightSource>,
    /// True if adapters are trained; the reference is then the policy without adapters.
    pub has_adapters: bool,
    /// Shape of latents: channels, frames (videos only), height and width.
    pub latent_shape: Vec<i64>,
    /// Number of classes or texts to train on.
    pub trained: usize,
    /// Classes or texts of the evaluation.
    pub evaluated: std::ops::Range<usize>,
    /// Decoder of latents; `None` if pixels are denoised, or videos cannot be decoded.
    pub decoder: Option<ImageDecoder>,
}

/// The models of a run.
pub struct ImageModels {
    /// The policy, which is trained; its states are offloaded during sampling.
    pub learner: Learner<Transformer>,
    /// The reference; `None` without a KL term.
    pub reference: Option<Reference>,
    /// The old policy, which samples for DiffusionNFT and follows the policy.
    pub old: Option<Zero<Transformer>>,
}

/// The reference of the KL term.
pub enum Reference {
    /// A frozen copy.
    Copy(Box<Zero<Transformer>>),
    /// The policy itself without adapters.
    AdaptersOff,
}

impl ImageModels {
    /// Velocities of the reference for a batch; `None` without a reference.
    pub fn reference_velocity(&mut self, batch: &DenoiseBatch) -> Result<Option<Tensor>> {
        Ok(match &mut self.reference {
            None => None,
            Some(Reference::Copy(model)) => Some(model.score(batch)?),
            Some(Reference::AdaptersOff) => Some(self.learner.model.score(&batch.without_adapters())?),
        })
    }
}

/// This rank's samples of a step.
pub struct Samples {
    /// Indices of the samples in the whole step, in this rank's order.
    pub numbers: Vec<usize>,
    /// Classes or text indices of the samples: int64 `[N]`.
    pub labels: Tensor,
    /// Trajectories of the samples from noise to latents.
    pub walk: Walk,
}

impl Samples {
    /// Denoised latents: fp32 `[N, channels, height, width]`.
    pub fn latents(&self) -> &Tensor {
        self.walk.points.last().expect("a walk has a beginning")
    }
}

impl ImageTask {
    /// Prepares a run of `image_model` on `place`.
    pub fn new(run: &Run, config: &DiffusionConfig, image_model: ImageModel, place: &Place) -> Result<Self> {
        let device = place.torch_device()?;
        let sigmas = config.sampler.sigmas(run.shift)?;
        let guidance = sigmas[..sigmas.len() - 1].iter().map(|&sigma| Guidance {
            scale: config.sampler.guidance_at(sigma, image_model.boundary),
            no_class: image_model.no_class,
            adapters: true,
        });
        let sampler = Sampler { guidance: guidance.collect(), sigmas };
        Ok(Self {
            seed: run.config.seed,
            sampler,
            scorer: Scorer::new(&config.reward, &image_model.records, device)?,
            share: Share {
                prompts: config.prompts_per_step,
                group_size: config.group_size,
                mini_batches: config.mini_batches,
                world_size: run.world_size,
            },
            device,
            model: Arc::new(image_model.model),
            weights: image_model.weights,
            has_adapters: image_model.has_adapters,
            latent_shape: image_model.latent_shape,
            trained: image_model.trained,
            evaluated: image_model.evaluated,
            decoder: image_model.decoder,
            config: config.clone(),
        })
    }

    /// Indices of this rank's samples in the whole step, and their classes or texts.
    pub fn own_prompts(&self, rank: usize, step: u64) -> Result<(Vec<usize>, Tensor)> {
        let prompts = shapes::prompts(self.seed, step, self.share.prompts, self.trained);
        let numbers: Vec<usize> = self.share.samples_of(rank).collect();
        let labels: Vec<i64> = numbers.iter().map(|number| prompts[number / self.share.group_size]).collect();
        Ok((numbers, self.labels(&labels)?))
    }

    /// Images of the latents, with their labels. If the reward reads only latents, they are not decoded.
    pub fn paint_for_reward(&self, latents: &Tensor, labels: &Tensor) -> Result<Painted> {
        painted_by(self.reward_decoder(), latents, labels)
    }

    /// Images of the latents, with their labels.
    pub fn paint(&self, latents: &Tensor, labels: &Tensor) -> Result<Painted> {
        painted_by(self.decoder.as_ref(), latents, labels)
    }

    /// The decoder, if the reward reads pixels.
    fn reward_decoder(&self) -> Option<&ImageDecoder> {
        self.decoder.as_ref().filter(|_| self.scorer.reads_images())
    }

    /// Scores of the latents' images, and the gradients of the scores with respect to the latents. The gradient is 0
    /// for an excluded image.
    pub fn score_with_gradient(&self, latents: &Tensor, labels: &Tensor) -> Result<(Scores, Tensor)> {
        let decoder = self.reward_decoder();
        let decoded = decoder.map(|decoder| decoder.decode(latents, true)).transpose()?;
        let images = decoded.as_ref().map_or(latents, |decoded| &decoded.images).shallow_clone();
        let painted = Painted { images, latents: latents.shallow_clone(), labels: labels.shallow_clone() };
        let (scores, gradients) = self.scorer.score_with_gradient(&painted)?;
        let refused = scores.total.f_isfinite()?.f_logical_not()?;
        let [of_images, of_latents] = gradients.map(|gradient| without(&gradient, &refused));
        let gradient = match (decoder, decoded) {
            (Some(decoder), Some(decoded)) => {
                decoder.follow_back(decoded, &of_images?)?.f_add(&of_latents?)?
            }
            _ => of_images?.f_add(&of_latents?)?,
        };
        Ok((scores, without(&gradient, &refused)?))
    }

    /// Labels as a tensor on the device: int64 `[N]`.
    pub fn labels(&self, labels: &[i64]) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(labels)?.f_to_device(self.device)?)
    }

    /// Initial noise of the samples `numbers` of a step. With `DanceGRPO` all samples of a group have the same noise.
    pub fn start_noise(&self, step: u64, numbers: &[usize]) -> Result<Tensor> {
        let group_size = match self.config.method {
            MethodConfig::DanceGrpo(_) => self.share.group_size,
            _ => 1,
        };
        self.noise(Purpose::Start, step, numbers.iter().map(|number| number / group_size))
    }

    /// Standard normal noise of the latents' shape.
    pub fn noise(
        &self,
        purpose: Purpose,
        step: u64,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<Tensor> {
        gaussian(purpose, self.seed, step, numbers, &self.latent_shape, self.device)
    }

    /// Samples this rank's part of a step, with noise at the method's denoising steps.
    pub fn sample(&self, weights: &Weights, rank: usize, step: u64) -> Result<Samples> {
        let _named = span(format_args!("sample"));
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

    /// Runs the sampler once with whole weights, without collectives.
    fn walk(
        &self,
        weights: &Weights,
        noise: Tensor,
        labels: &Tensor,
        sde: Option<(SdeNoise, &[Tensor])>,
    ) -> Result<Walk> {
        let units: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        Ok(self.sampler.walk(&*self.model, &units, noise, labels, sde)?)
    }

    /// Denoises noise by Euler's method, with the model's adapters or without them.
    pub fn denoise(
        &self,
        weights: &Weights,
        noise: Tensor,
        labels: &Tensor,
        adapters: bool,
    ) -> Result<Tensor> {
        let units: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        let mut sampler = self.sampler.clone();
        sampler.guidance.iter_mut().for_each(|guidance| guidance.adapters = adapters);
        let mut walk = sampler.walk(&*self.model, &units, noise, labels, None)?;
        Ok(walk.points.pop().expect("a walk has an end"))
    }

    /// Noise of the method's denoising steps; `None` for deterministic ones.
    pub fn sde_noise(&self) -> Option<SdeNoise> {
        match self.config.method {
            MethodConfig::FlowGrpo(FlowGrpoConfig { noise_level, .. }) => Some(SdeNoise::Level(noise_level)),
            MethodConfig::DanceGrpo(DanceGrpoConfig { eta, .. }) => Some(SdeNoise::Constant(eta)),
            MethodConfig::Refl(_) | MethodConfig::DraftK(_) | MethodConfig::DiffusionNft(_) => None,
        }
    }

    /// Denoising steps to train in step `step`: the given fraction of all, drawn anew for each step.
    pub fn trained_timesteps(&self, step: u64, fraction: f64) -> Vec<usize> {
        let steps = self.sampler.steps();
        let count = ((steps as f64 * fraction).round() as usize).clamp(1, steps);
        let mut timesteps = order(Purpose::Timesteps, self.seed, step, steps);
        timesteps.truncate(count);
        timesteps
    }
}

/// Images from `decoder`, or the latents themselves without one, with their labels.
fn painted_by(decoder: Option<&ImageDecoder>, latents: &Tensor, labels: &Tensor) -> Result<Painted> {
    let images = match decoder {
        Some(decoder) => decoder.decode(latents, false)?.images,
        None => latents.shallow_clone(),
    };
    Ok(Painted { images, latents: latents.shallow_clone(), labels: labels.shallow_clone() })
}

/// `values` `[B, ..]` with 0 for samples that are `refused` `[B]`.
pub fn without(values: &Tensor, refused: &Tensor) -> Result<Tensor> {
    Ok(values.f_masked_fill(&beside(refused, values)?, 0.0)?)
}

/// Reshapes one number per sample, `[B]`, so that it broadcasts over `values` `[B, ..]`.
pub fn beside(numbers: &Tensor, values: &Tensor) -> Result<Tensor> {
    let mut wide = vec![1; values.dim()];
    wide[0] = -1;
    Ok(numbers.f_view(&wide[..])?)
}

/// Concatenates walks along the batch.
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
