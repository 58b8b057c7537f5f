//! Parts of a run of images: its options and its models.

use std::sync::Arc;

use anyroll_config::{DanceGrpoConfig, DiffusionConfig, FlowGrpoConfig, MethodConfig};
use anyroll_models::{
    diffusion::{DenoiseBatch, Guidance, Sampler, SdeNoise, Transformer, Walk},
    init::WeightSource,
};
use anyroll_strategy::{Weights, Zero};
use tch::Tensor;

use super::{
    decoder::ImageDecoder,
    noise::{Purpose, gaussian, order},
    scorer::{Painted, Scorer, Scores},
    shapes,
    subject::Subject,
};
use crate::{
    Result,
    run::Run,
    train::{Learner, Place, Share},
};

/// The options of a run, and what samples and scores.
pub struct ImageTask {
    /// The pipeline's part of the config.
    pub config: DiffusionConfig,
    /// The run's seed.
    pub seed: u64,
    /// The sampler, which turns noise into an image.
    pub sampler: Sampler,
    /// The reward of an image.
    pub scorer: Scorer,
    /// Which rank samples what.
    pub share: Share,
    /// Device of the batches.
    pub device: tch::Device,
    /// The policy's model.
    pub model: Arc<Transformer>,
    /// The policy's first weights.
    pub weights: Box<dyn WeightSource>,
    /// Whether adapters are what is trained; the reference is then the policy with its adapters off.
    pub has_adapters: bool,
    /// The sizes of what is denoised: channels, of a video frames, height and width.
    pub latent_shape: Vec<i64>,
    /// The classes or texts that are trained on.
    pub trained: usize,
    /// Prompts of the evaluation.
    pub evaluated: std::ops::Range<usize>,
    /// From what is denoised to pixels; `None` where these are, and where videos cannot be decoded.
    pub decoder: Option<ImageDecoder>,
}

/// The models of a run.
pub struct ImageModels {
    /// The policy, which is trained; its states are away while it samples.
    pub learner: Learner<Transformer>,
    /// The policy after the warm-up; `None` without a KL term.
    pub reference: Option<Reference>,
    /// The one that DiffusionNFT samples with: it follows the policy.
    pub old: Option<Zero<Transformer>>,
}

/// The reference of the KL term.
pub enum Reference {
    /// A frozen copy.
    Copy(Box<Zero<Transformer>>),
    /// The policy itself with its adapters off.
    AdaptersOff,
}

impl ImageModels {
    /// The reference's velocities for a batch, if there is one.
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
    /// Their numbers among the step's, in this rank's order.
    pub numbers: Vec<usize>,
    /// Their classes or the numbers of their texts: int64 `[N]`.
    pub labels: Tensor,
    /// Their way from noise to what a decoder reads.
    pub walk: Walk,
}

impl Samples {
    /// Images made from the noise: fp32 `[N, channels, height, width]`.
    pub fn latents(&self) -> &Tensor {
        self.walk.points.last().expect("a walk has a beginning")
    }
}

impl ImageTask {
    /// Prepares a run of `subject` on `place`.
    pub fn new(run: &Run, config: &DiffusionConfig, subject: Subject, place: &Place) -> Result<Self> {
        let device = place.torch_device()?;
        let sigmas = config.sampler.sigmas(run.shift)?;
        let guidance = sigmas[..sigmas.len() - 1].iter().map(|&sigma| Guidance {
            scale: config.sampler.guidance_at(sigma, subject.boundary),
            no_class: subject.no_class,
            adapters: true,
        });
        let sampler = Sampler { guidance: guidance.collect(), sigmas };
        Ok(Self {
            seed: run.config.seed,
            sampler,
            scorer: Scorer::new(&config.reward, &subject.records, device)?,
            share: Share {
                prompts: config.prompts_per_step,
                group_size: config.group_size,
                mini_batches: config.mini_batches,
                world_size: run.world_size,
            },
            device,
            model: Arc::new(subject.model),
            weights: subject.weights,
            has_adapters: subject.has_adapters,
            latent_shape: subject.latent_shape,
            trained: subject.trained,
            evaluated: subject.evaluated,
            decoder: subject.decoder,
            config: config.clone(),
        })
    }

    /// The numbers of this rank's samples of a step, and their classes or texts.
    pub fn own_prompts(&self, rank: usize, step: u64) -> Result<(Vec<usize>, Tensor)> {
        let prompts = shapes::prompts(self.seed, step, self.share.prompts, self.trained);
        let numbers: Vec<usize> = self.share.samples_of(rank).collect();
        let labels: Vec<i64> = numbers.iter().map(|number| prompts[number / self.share.group_size]).collect();
        Ok((numbers, self.labels(&labels)?))
    }

    /// The images of some latents, with what they show; the latents instead, if these are what the reward reads.
    pub fn paint_for_reward(&self, latents: &Tensor, labels: &Tensor) -> Result<Painted> {
        painted_by(self.reward_decoder(), latents, labels)
    }

    /// The images of some latents, with what they show.
    pub fn paint(&self, latents: &Tensor, labels: &Tensor) -> Result<Painted> {
        painted_by(self.decoder.as_ref(), latents, labels)
    }

    /// The decoder, if the reward reads what it makes.
    fn reward_decoder(&self) -> Option<&ImageDecoder> {
        self.decoder.as_ref().filter(|_| self.scorer.reads_images())
    }

    /// The scores of the images of some latents, and the gradients of the scores with respect to the latents, 0 for an
    /// image that is refused.
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

    /// Normal noise of the shape of what is denoised.
    pub fn noise(
        &self,
        purpose: Purpose,
        step: u64,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<Tensor> {
        gaussian(purpose, self.seed, step, numbers, &self.latent_shape, self.device)
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

    /// Where Euler's method leads from some noise, with the model's adapters or without.
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

/// The images that `decoder` makes of some latents, or without one the latents, with what they show.
fn painted_by(decoder: Option<&ImageDecoder>, latents: &Tensor, labels: &Tensor) -> Result<Painted> {
    let images = match decoder {
        Some(decoder) => decoder.decode(latents, false)?.images,
        None => latents.shallow_clone(),
    };
    Ok(Painted { images, latents: latents.shallow_clone(), labels: labels.shallow_clone() })
}

/// `values` `[B, ..]` with 0 where `refused` `[B]`.
pub fn without(values: &Tensor, refused: &Tensor) -> Result<Tensor> {
    Ok(values.f_masked_fill(&beside(refused, values)?, 0.0)?)
}

/// One number for each sample, `[B]`, as something to multiply `values` `[B, ..]` with.
pub fn beside(numbers: &Tensor, values: &Tensor) -> Result<Tensor> {
    let mut wide = vec![1; values.dim()];
    wide[0] = -1;
    Ok(numbers.f_view(&wide[..])?)
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
