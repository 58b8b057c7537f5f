//! Memory of image runs, following the steps of [`crate::diffusion`].

use std::fs;

use anyroll_backends::DType;
use anyroll_config::{DiffusionConfig, DitConfig, EncodeOn, MethodConfig};
use anyroll_models::{
    Model, Runs,
    diffusion::{DenoiseSize, Transformer},
};
use anyroll_strategy::plan::{
    Held, driver_bytes, held, recorded_activations, scoring_activations, training_activations, whole_weights,
};

use super::{
    MemoryPlan, PhaseBytes, Strategies, away,
    device_group::{DeviceGroup, Member},
    image_networks::{Decoder, RewardNetwork},
    kept, on_host, runs,
};
use crate::{
    Result,
    diffusion::{self, PaintedTexts},
    run::{Run, Strategy},
    train::zero_config,
};

/// Bytes per value of latents, pixels and losses.
const F32: usize = size_of::<f32>();

/// Approximate number of latent-sized tensors held by a loss and its gradient.
const OF_A_LOSS: usize = 12;

/// Plans the memory of a run of an image model.
pub struct Images {
    config: DiffusionConfig,
    model: Transformer,
    /// True if the reference is a separate copy of the model.
    copies_reference: bool,
    decoder: Option<Decoder>,
    networks: Vec<RewardNetwork>,
    /// Bytes of all text embeddings, and of the encoders if the run encodes on the device when it starts.
    texts: usize,
    encoders: Option<usize>,
    /// Size of one denoising point.
    size: DenoiseSize,
    /// Number of values of one point.
    latent: usize,
    /// Images that a rank generates in a step, and in an evaluation.
    samples: usize,
    evaluated: usize,
    here: DeviceGroup,
}

/// Text embeddings: tokens per text, bytes of all, and bytes of the encoders on the device.
struct Texts {
    tokens: usize,
    bytes: usize,
    encoders: Option<usize>,
}

/// Sizes of the images that a model paints, and their decoder.
struct Painted {
    model: Transformer,
    /// Frames, height and width of the denoised latents.
    sides: [usize; 3],
    texts: Texts,
    decoder: Option<Decoder>,
}

impl Images {
    /// Plans a run on images that are made in code.
    pub(super) fn of_shapes(run: &Run, config: &DiffusionConfig, dit: &DitConfig) -> Result<Self> {
        let side = diffusion::SIZE;
        let model = Transformer::Dit(Box::new(diffusion::dit_of(dit)?));
        let texts = Texts { tokens: 0, bytes: 0, encoders: None };
        Self::new(run, config, Painted { model, sides: [1, side, side], texts, decoder: None })
    }

    /// Plans a run of a published model with its opened files.
    pub(super) fn of_texts(run: &Run, config: &DiffusionConfig, opened: &diffusion::Opened) -> Result<Self> {
        let precision = run.policy.strategy.precision;
        let diffusion::PublishedModel { folder, lora, sides, frames, .. } = &opened.model;
        let sides = sides.map(|side| side as usize);
        let decoder = folder
            .decoder()
            .ok()
            .map(|decoder| Decoder::new(decoder.config(), *frames, sides, &config.sampler, precision));
        let model = folder.transformer_config().build(lora.as_ref(), None, tch::Device::Cpu)?;
        let texts = Texts::of(&opened.texts, super::is_host(&run.policy.backend));
        Self::new(run, config, Painted { model, sides, texts, decoder: decoder.transpose()? })
    }

    fn new(run: &Run, config: &DiffusionConfig, painted: Painted) -> Result<Self> {
        let Painted { model, sides, texts, decoder } = painted;
        let channels = match &model {
            Transformer::Dit(dit) => dit.config().channels,
            Transformer::Sd3(sd3) => sd3.config().in_channels,
            Transformer::Wan(wan) => wan.config().in_channels,
        };
        let networks = config.reward.terms().iter().map(RewardNetwork::open).collect::<Result<_>>()?;
        Ok(Self {
            copies_reference: run.held_reference().is_some(),
            here: DeviceGroup::all(run).0,
            latent: channels as usize * sides.iter().product::<usize>(),
            size: DenoiseSize { points: 1, sides, text: texts.tokens, latents_grad: false },
            samples: run.batches.sequences_per_step / run.world_size,
            evaluated: config.evaluation.images.div_ceil(run.world_size),
            texts: texts.bytes,
            encoders: texts.encoders,
            config: config.clone(),
            model,
            decoder,
            networks,
        })
    }

    pub(super) fn parameters(&self) -> usize {
        self.model.units().iter().flat_map(|unit| &unit.params).map(|param| param.elements()).sum()
    }

    pub(super) fn has_reference(&self) -> bool {
        self.copies_reference && self.here.holds(Member::Reference)
    }

    /// Description of a generated sample.
    pub(super) fn describe(&self) -> String {
        let sides = self.decoder.as_ref().map_or(self.size.sides, Decoder::pixels);
        match sides {
            [1, height, width] => format!("images of {height} x {width}"),
            [frames, height, width] => format!("videos of {frames} frames of {height} x {width}"),
        }
    }

    /// Descriptions of the rewards' parts whose memory is unknown.
    pub(super) fn not_counted(&self) -> Vec<String> {
        let script = self.networks.iter().any(|network| matches!(network, RewardNetwork::Script { .. }));
        let encoders = self.encoders.is_some();
        let script = script.then(|| "activations of the `torchscript` network".to_owned());
        script.into_iter().chain(encoders.then(|| "activations of text encoders".to_owned())).collect()
    }

    /// Memory under `strategies`.
    pub(super) fn plan(&self, strategies: &Strategies) -> MemoryPlan {
        let (policy, group) = (&strategies.policy, &self.here);
        let own = held(&self.model, zero_config(policy), true, group.ranks);
        let frozen_as = strategies.reference.as_ref().unwrap_or(policy);
        let frozen = held(&self.model, zero_config(frozen_as), false, group.ranks);
        let is_nft = matches!(self.config.method, MethodConfig::DiffusionNft(_));
        let copies = vec![frozen; usize::from(self.has_reference()) + usize::from(is_nft)];

        let away = away(policy, &own);
        let mut generate = self.phase(&away, &copies, self.sampling(policy), self.walked(2));
        let sampler = if is_nft { frozen_as } else { policy };
        generate.buffers += whole_weights(&self.model, zero_config(sampler), group.ranks, |_, _| false);
        let pixels = self.pixels(self.batch(self.evaluated));
        generate.images += 2 * pixels;
        let follows = self.config.method.differentiates_reward();
        let reward = (!follows).then(|| {
            let (activations, images) = self.scoring(self.samples);
            self.phase(&own, &copies, activations, self.walked(1) + images)
        });
        let (activations, images) = self.training(policy);
        let train = self.phase(&own, &copies, activations, images);

        let phases = [Some(train), reward, Some(generate)];
        let most = phases.iter().flatten().map(|phase| phase.activations).max().unwrap_or(0);
        let kept = kept(group.on_host, most);
        let encode = self.encoders.map(|encoders| PhaseBytes {
            frozen: encoders,
            driver: generate.driver,
            ..PhaseBytes::default()
        });
        let host = on_host(policy, &own) + copies.iter().map(|held| on_host(frozen_as, held)).sum::<usize>();
        MemoryPlan {
            encode,
            train: kept(train),
            reward: reward.map(&kept),
            generate: kept(generate),
            host,
            ..MemoryPlan::default()
        }
    }

    /// Adds the decoder, the rewards and the texts to the policy and the copies.
    fn phase(&self, own: &Held, copies: &[Held], activations: usize, images: usize) -> PhaseBytes {
        let driver = if self.here.on_host { 0 } else { driver_bytes(self.here.connected()) };
        let networks: usize = self.networks.iter().map(RewardNetwork::weights).sum();
        let frozen = networks + self.decoder.as_ref().map_or(0, Decoder::weights);
        let images = images + self.texts;
        let mut phase = PhaseBytes { activations, images, frozen, driver, ..PhaseBytes::default() };
        std::iter::once(own).chain(copies).for_each(|held| phase.add(held));
        phase
    }

    /// Batch size of sampling for `samples` samples.
    fn batch(&self, samples: usize) -> usize {
        self.config.sampler.batch_size.min(samples)
    }

    /// A batch of `samples` samples, doubled by guidance.
    fn asked(&self, samples: usize, latents_grad: bool) -> DenoiseSize {
        let times = if self.config.sampler.is_guided() { 2 } else { 1 };
        DenoiseSize { points: times * samples, latents_grad, ..self.size }
    }

    fn latents(&self, samples: usize) -> usize {
        samples * self.latent * F32
    }

    /// Bytes of the pixels of `samples` samples; without a decoder, of their latents.
    fn pixels(&self, samples: usize) -> usize {
        samples * self.decoder.as_ref().map_or(self.latent, Decoder::values) * F32
    }

    /// Bytes of the sampling trajectories of a step, times `copies` while batches are concatenated.
    fn walked(&self, copies: usize) -> usize {
        let steps = self.config.sampler.steps;
        let noise = match self.config.method {
            MethodConfig::FlowGrpo(_) | MethodConfig::DanceGrpo(_) => {
                self.latents(steps * self.batch(self.samples))
            }
            MethodConfig::Refl(_) | MethodConfig::DraftK(_) => return self.latents(self.samples),
            MethodConfig::DiffusionNft(_) => 0,
        };
        let copies = if self.samples > self.config.sampler.batch_size { copies } else { 1 };
        copies * self.latents((steps + 1) * self.samples) + if copies > 1 { noise } else { 0 }
    }

    /// Activations of sampling in steps and evaluations. Evaluations decode pixels while the policy's weights
    /// are loaded.
    fn sampling(&self, policy: &Strategy) -> usize {
        let batch = self.batch(self.samples.max(self.evaluated));
        let runs = runs(policy, self.here.on_host);
        let asked = scoring_activations(&self.model, &self.asked(batch, false), runs);
        let decoded = self.decoder.as_ref().map_or(0, |it| it.activations(batch, false, self.here.on_host));
        (asked + self.latents(4 * batch)).max(decoded)
    }

    /// Activations and pixels of scoring `samples` samples.
    fn scoring(&self, samples: usize) -> (usize, usize) {
        let reads_images = self.networks.iter().any(RewardNetwork::reads_images);
        let decoder = self.decoder.as_ref().filter(|_| reads_images);
        let on_host = self.here.on_host;
        // Pixels of one batch, and pixels of all batches.
        let decoded = decoder.map_or(0, |it| it.activations(samples, false, on_host) + self.pixels(samples));
        let scored = self.networks.iter().map(|network| self.network_activations(network, samples, false));
        (decoded.max(scored.max().unwrap_or(0)), if decoder.is_some() { self.pixels(samples) } else { 0 })
    }

    fn network_activations(&self, network: &RewardNetwork, samples: usize, followed: bool) -> usize {
        let [frames, height, width] = self.decoder.as_ref().map_or(self.size.sides, Decoder::pixels);
        network.activations(
            samples,
            [frames, height, width],
            self.latents(samples),
            followed,
            self.here.on_host,
        )
    }

    /// Activations, latents and pixels of training.
    fn training(&self, policy: &Strategy) -> (usize, usize) {
        let (config, runs) = (zero_config(policy), runs(policy, self.here.on_host));
        let micro_batch = policy.micro_batch_size.min(self.samples);
        let (activations, images) = match &self.config.method {
            MethodConfig::Refl(refl) => self.following(policy, self.config.sampler.steps - refl.mid_step),
            MethodConfig::DraftK(draft) => self.following(policy, draft.k),
            _ => {
                let passes = recorded_activations(&self.model, &self.asked(micro_batch, false), config, runs);
                let of_loss = self.latents(OF_A_LOSS * micro_batch);
                (passes.forward.max(passes.backward + of_loss), self.walked(1))
            }
        };
        let warmup = self.config.warmup.as_ref().filter(|warmup| warmup.steps > 0).map(|warmup| {
            let own = policy.micro_batch_size.min(warmup.batch_size / self.here.ranks.world_size);
            let size = DenoiseSize { points: own, ..self.size };
            let of_loss = self.latents(OF_A_LOSS * own);
            (
                training_activations(&self.model, &size, config, runs) + of_loss,
                self.latents(5 * warmup.batch_size),
            )
        });
        let (of_warmup, of_data) = warmup.unwrap_or_default();
        (activations.max(of_warmup), images.max(of_data))
    }

    /// Activations, latents and pixels of backpropagation through the last `steps` denoising steps, whose
    /// tapes are all kept.
    fn following(&self, policy: &Strategy, steps: usize) -> (usize, usize) {
        let micro_batch = policy.micro_batch_size.min(self.samples);
        let (config, on_host) = (zero_config(policy), self.here.on_host);
        let size = self.asked(micro_batch, true);
        let passes = recorded_activations(&self.model, &size, config, runs(policy, on_host));
        let reads_images = self.networks.iter().any(RewardNetwork::reads_images);
        let decoder = self.decoder.as_ref().filter(|_| reads_images);
        let decoded = decoder.map_or(0, |it| it.activations(micro_batch, true, on_host));
        let scored = self
            .networks
            .iter()
            .map(|network| self.network_activations(network, micro_batch, true))
            .max()
            .unwrap_or(0);
        let before = (steps - 1) * passes.kept;
        let on_top = passes.forward.max(passes.backward).max(passes.kept + decoded.max(scored));
        // Points of a step, its velocities and the reference's; pixels with their gradient.
        let latents =
            self.latents(3 * steps * size.points) + self.latents(self.samples + OF_A_LOSS * micro_batch);
        let pixels = if decoder.is_some() { 2 * self.pixels(micro_batch) } else { 0 };
        (before + on_top, latents + pixels)
    }
}

impl Texts {
    fn of(texts: &PaintedTexts, on_host: bool) -> Self {
        let (encoders, encode, records) = match texts {
            PaintedTexts::Encoded(texts) => {
                let (tokens, bytes) = (texts.embeddings.tokens(), texts.embeddings.bytes());
                return Self { tokens, bytes, encoders: None };
            }
            PaintedTexts::ToEncode { encoders, encode, records } => (encoders, encode, records),
        };
        let shape = encoders.shape(records.len() + 1);
        let there = encode.on == EncodeOn::Device;
        let element = diffusion::encoded_in(encode, on_host || !there);
        let values = shape.tokens * shape.widths.token + shape.widths.pooled.unwrap_or(0);
        Self {
            tokens: shape.tokens as usize,
            bytes: shape.count * values as usize * element,
            encoders: there.then(|| encoders.elements() * element),
        }
    }
}

/// Precision of frozen networks in a run with this precision.
pub(super) fn frozen_runs(is_fp32: bool, on_host: bool) -> Runs {
    Runs { dtype: if is_fp32 { DType::F32 } else { DType::Bf16 }, on_host }
}

/// Bytes of a file, 0 if it does not exist.
pub(super) fn file_bytes(path: &std::path::Path) -> usize {
    fs::metadata(path).map_or(0, |file| file.len() as usize)
}
