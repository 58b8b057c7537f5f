//! Runs of models of images, as [`crate::diffusion`] goes through a step.

use std::fs;

use anyroll_backends::DType;
use anyroll_models::{
    Model, Runs,
    diffusion::{DenoiseSize, Transformer},
};
use anyroll_strategy::plan::{
    Held, driver_bytes, held, recorded_activations, scoring_activations, training_activations, whole_weights,
};

use super::{
    MemoryPlan, PhaseBytes, Strategies, away,
    judged::{Decoder, Judge},
    kept, on_host, runs,
    site::{Member, Site},
};
use crate::{
    Result,
    config::{DiffusionConfig, DitConfig, EncodeOn, MethodConfig},
    diffusion::{self, PaintedTexts},
    run::{Run, Strategy},
    train::zero_config,
};

/// Bytes of what latents, pixels and losses are made of.
const F32: usize = size_of::<f32>();

/// Tensors as large as the latents that a loss and its gradient hold at a time, about.
const OF_A_LOSS: usize = 12;

/// Plans the memory of a run of a model of images.
pub struct Images {
    config: DiffusionConfig,
    model: Transformer,
    /// Whether the reference is another model.
    copies_reference: bool,
    decoder: Option<Decoder>,
    judges: Vec<Judge>,
    /// All texts, and what reads them when the run begins, if it does that on the device.
    texts: usize,
    encoders: Option<usize>,
    /// One point.
    size: DenoiseSize,
    /// Its values.
    latent: usize,
    /// Images that a rank paints in a step, and in an evaluation.
    samples: usize,
    evaluated: usize,
    here: Site,
}

/// What there is of the texts: tokens of each, bytes of all, and of what reads them on the device.
struct Texts {
    tokens: usize,
    bytes: usize,
    encoders: Option<usize>,
}

/// What is painted by a model, and how it is decoded.
struct Painted {
    model: Transformer,
    /// Frames, height and width of what is denoised.
    sides: [usize; 3],
    texts: Texts,
    decoder: Option<Decoder>,
}

impl Images {
    /// Plans a run of images that are made in code.
    pub(super) fn of_shapes(run: &Run, config: &DiffusionConfig, dit: &DitConfig) -> Result<Self> {
        let side = diffusion::SIZE;
        let model = Transformer::Dit(Box::new(diffusion::dit_of(dit)?));
        let texts = Texts { tokens: 0, bytes: 0, encoders: None };
        Self::new(run, config, Painted { model, sides: [1, side, side], texts, decoder: None })
    }

    /// Plans a run of a published model, of what the config names.
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
        let judges = config.reward.terms().iter().map(Judge::open).collect::<Result<_>>()?;
        Ok(Self {
            copies_reference: run.held_reference().is_some(),
            here: Site::all(run).0,
            latent: channels as usize * sides.iter().product::<usize>(),
            size: DenoiseSize { points: 1, sides, text: texts.tokens, latents_grad: false },
            samples: run.batches.sequences_per_step / run.world_size,
            evaluated: config.evaluation.images.div_ceil(run.world_size),
            texts: texts.bytes,
            encoders: texts.encoders,
            config: config.clone(),
            model,
            decoder,
            judges,
        })
    }

    pub(super) fn parameters(&self) -> usize {
        self.model.units().iter().flat_map(|unit| &unit.params).map(|param| param.elements()).sum()
    }

    pub(super) fn has_reference(&self) -> bool {
        self.copies_reference && self.here.holds(Member::Reference)
    }

    /// What is painted, in words.
    pub(super) fn describe(&self) -> String {
        let sides = self.decoder.as_ref().map_or(self.size.sides, Decoder::pixels);
        match sides {
            [1, height, width] => format!("images of {height} x {width}"),
            [frames, height, width] => format!("videos of {frames} frames of {height} x {width}"),
        }
    }

    /// What is not known of the rewards, in words.
    pub(super) fn not_counted(&self) -> Vec<String> {
        let script = self.judges.iter().any(|judge| matches!(judge, Judge::Script { .. }));
        let encoders = self.encoders.is_some();
        let script = script.then(|| "what the network of `torchscript` makes on its way".to_owned());
        script
            .into_iter()
            .chain(encoders.then(|| "what text encoders make on their way".to_owned()))
            .collect()
    }

    /// What these strategies come to.
    pub(super) fn plan(&self, strategies: &Strategies) -> MemoryPlan {
        let (policy, site) = (&strategies.policy, &self.here);
        let own = held(&self.model, zero_config(policy), true, site.ranks);
        let frozen_as = strategies.reference.as_ref().unwrap_or(policy);
        let frozen = held(&self.model, zero_config(frozen_as), false, site.ranks);
        let is_nft = matches!(self.config.method, MethodConfig::DiffusionNft(_));
        let copies = vec![frozen; usize::from(self.has_reference()) + usize::from(is_nft)];

        let away = away(policy, &own);
        let mut generate = self.phase(&away, &copies, self.sampling(policy), self.walked(2));
        let sampler = if is_nft { frozen_as } else { policy };
        generate.buffers += whole_weights(&self.model, zero_config(sampler), site.ranks, |_, _| false);
        let pixels = self.pixels(self.batch(self.evaluated));
        generate.images += 2 * pixels;
        let follows = self.config.method.differentiates_reward();
        let reward = (!follows).then(|| {
            let (activations, images) = self.judging(self.samples);
            self.phase(&own, &copies, activations, self.walked(1) + images)
        });
        let (activations, images) = self.training(policy);
        let train = self.phase(&own, &copies, activations, images);

        let phases = [Some(train), reward, Some(generate)];
        let most = phases.iter().flatten().map(|phase| phase.activations).max().unwrap_or(0);
        let kept = kept(site.on_host, most);
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

    /// What the policy and the copies hold, beside the decoder, the rewards and the texts.
    fn phase(&self, own: &Held, copies: &[Held], activations: usize, images: usize) -> PhaseBytes {
        let driver = if self.here.on_host { 0 } else { driver_bytes(self.here.connected()) };
        let judges: usize = self.judges.iter().map(Judge::weights).sum();
        let frozen = judges + self.decoder.as_ref().map_or(0, Decoder::weights);
        let images = images + self.texts;
        let mut phase = PhaseBytes { activations, images, frozen, driver, ..PhaseBytes::default() };
        std::iter::once(own).chain(copies).for_each(|held| phase.add(held));
        phase
    }

    /// Samples at a time, of so many.
    fn batch(&self, samples: usize) -> usize {
        self.config.sampler.batch_size.min(samples)
    }

    /// A batch of so many samples, which guidance doubles.
    fn asked(&self, samples: usize, latents_grad: bool) -> DenoiseSize {
        let times = if self.config.sampler.is_guided() { 2 } else { 1 };
        DenoiseSize { points: times * samples, latents_grad, ..self.size }
    }

    fn latents(&self, samples: usize) -> usize {
        samples * self.latent * F32
    }

    /// Bytes of the pixels of so many samples, of latents that are not decoded theirs.
    fn pixels(&self, samples: usize) -> usize {
        samples * self.decoder.as_ref().map_or(self.latent, Decoder::values) * F32
    }

    /// The ways of a step's samples from noise, which are there so many times where several batches are put together.
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

    /// Activations of sampling, in steps and in evaluations, where pixels are made while the weights are there.
    fn sampling(&self, policy: &Strategy) -> usize {
        let batch = self.batch(self.samples.max(self.evaluated));
        let runs = runs(policy, self.here.on_host);
        let asked = scoring_activations(&self.model, &self.asked(batch, false), runs);
        let decoded = self.decoder.as_ref().map_or(0, |it| it.activations(batch, false, self.here.on_host));
        (asked + self.latents(4 * batch)).max(decoded)
    }

    /// Activations and pixels of scoring so many samples.
    fn judging(&self, samples: usize) -> (usize, usize) {
        let reads_images = self.judges.iter().any(Judge::reads_images);
        let decoder = self.decoder.as_ref().filter(|_| reads_images);
        let on_host = self.here.on_host;
        // Batches of pixels, and all of them together.
        let decoded = decoder.map_or(0, |it| it.activations(samples, false, on_host) + self.pixels(samples));
        let judged = self.judges.iter().map(|judge| self.judged(judge, samples, false));
        (decoded.max(judged.max().unwrap_or(0)), if decoder.is_some() { self.pixels(samples) } else { 0 })
    }

    fn judged(&self, judge: &Judge, samples: usize, followed: bool) -> usize {
        let [frames, height, width] = self.decoder.as_ref().map_or(self.size.sides, Decoder::pixels);
        judge.activations(
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

    /// Of a gradient that is followed back through the last `steps` denoising steps, whose tapes wait for each other.
    fn following(&self, policy: &Strategy, steps: usize) -> (usize, usize) {
        let micro_batch = policy.micro_batch_size.min(self.samples);
        let (config, on_host) = (zero_config(policy), self.here.on_host);
        let size = self.asked(micro_batch, true);
        let passes = recorded_activations(&self.model, &size, config, runs(policy, on_host));
        let reads_images = self.judges.iter().any(Judge::reads_images);
        let decoder = self.decoder.as_ref().filter(|_| reads_images);
        let decoded = decoder.map_or(0, |it| it.activations(micro_batch, true, on_host));
        let judged = self.judges.iter().map(|judge| self.judged(judge, micro_batch, true)).max().unwrap_or(0);
        let before = (steps - 1) * passes.kept;
        let on_top = passes.forward.max(passes.backward).max(passes.kept + decoded.max(judged));
        // A step's points, its velocities and the reference's; and pixels with their gradient.
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
        let values = shape.tokens * shape.widths.0 + shape.widths.1.unwrap_or(0);
        Self {
            tokens: shape.tokens as usize,
            bytes: shape.count * values as usize * element,
            encoders: there.then(|| encoders.elements() * element),
        }
    }
}

/// How frozen networks compute where a run has this precision.
pub(super) fn frozen_runs(is_fp32: bool, on_host: bool) -> Runs {
    Runs { dtype: if is_fp32 { DType::F32 } else { DType::Bf16 }, on_host }
}

/// Bytes of a file, 0 where there is none.
pub(super) fn file_bytes(path: &std::path::Path) -> usize {
    fs::metadata(path).map_or(0, |file| file.len() as usize)
}
