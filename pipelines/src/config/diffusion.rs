//! The fields of `pipeline.diffusion` and of the model that it trains.
//!
//! `docs/guides/diffusion.md` has the formula and the source of each method.

use std::path::PathBuf;

use anyroll_models::diffusion::{sigmas, sigmas_of_diffusers};
use serde::{Deserialize, Serialize};

use super::image_reward::ImageRewardConfig;
use super::optimizer::OptimizerConfig;
use super::schema::{CheckpointConfig, Precision};

/// The shape of a class-conditional diffusion transformer (DiT with adaLN-Zero).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DitConfig {
    /// Height and width of a patch in pixels; a divisor of the images'.
    pub patch_size: usize,
    /// Width of the residual stream; a multiple of `heads`.
    pub hidden_size: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Width of the feed-forward's hidden layer.
    pub intermediate_size: usize,
}

/// Reward training of a flow-matching model of images: a supervised warm-up, then one of several methods.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DiffusionConfig {
    /// What the images are of.
    pub data: ImageDataConfig,
    /// What an image earns.
    pub reward: ImageRewardConfig,
    /// The control: each image gets the reward of another one of the step, so that there is nothing to learn.
    /// Not for methods that follow the reward's gradient. Default false.
    #[serde(default)]
    pub shuffle_rewards: bool,
    /// Supervised flow matching on the data, before the first reward; texts have none. Default: none.
    #[serde(default)]
    pub warmup: Option<FlowMatchingConfig>,
    /// RL steps.
    pub steps: u64,
    /// Classes or texts drawn in a step, over all ranks; a multiple of the number of ranks.
    pub prompts_per_step: usize,
    /// Images of each; at least 2 for methods whose advantages are relative to the group's mean.
    pub group_size: usize,
    /// Optimizer updates that a step's images are cut into. Default 1.
    #[serde(default = "one")]
    pub mini_batches: usize,
    /// How noise becomes an image.
    pub sampler: SamplerConfig,
    /// How a reward becomes a gradient.
    pub method: MethodConfig,
    /// The policy's optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
    /// When and on how many images of fixed noise the policy is evaluated.
    #[serde(default)]
    pub evaluation: ImageEvaluationConfig,
    /// When the run is saved.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// What the images are of.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageDataConfig {
    /// Light squares and diamonds on black, made in code: 8 x 8 pixels, and a class for each quadrant. For a `dit`.
    Shapes,
    /// Texts, for a published model.
    Prompts(Box<PromptsConfig>),
}

/// Texts, as a model's text encoders read them: before the run, or at its beginning.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PromptsConfig {
    /// Of what encoders made of the texts beforehand, unless there is `encode`: a safetensors file with `prompt_embeds` `[P, S, D]` and `pooled_prompt_embeds` `[P, E]`, and for guidance
    /// `negative_prompt_embeds` `[1, S, D]` and `negative_pooled_prompt_embeds` `[1, E]`; a relative path starts at the
    /// current folder. All of it lies on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeddings: Option<PathBuf>,
    /// Let the model's own text encoders read the `records`, each text once, before the run holds a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode: Option<EncodeConfig>,
    /// A file with a JSON object a line, one for each text in their order: its `prompt` and what else rewards read; or a
    /// `.txt` with a prompt a line. Default, without `encode`: rewards read the text's number.
    #[serde(default)]
    pub records: Option<PathBuf>,
    /// Height of the images in pixels; a multiple of what the decoder and the patches need.
    pub height: usize,
    /// Their width.
    pub width: usize,
    /// Frames, where the model makes videos: one more than a multiple of what its autoencoder needs. Default 1.
    #[serde(default = "one")]
    pub frames: usize,
    /// The last so many texts are for evaluation alone; 0 evaluates on those that are trained on. Default 0.
    #[serde(default)]
    pub held_out: usize,
}

/// How a model's own text encoders read the texts, with diffusers' names.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct EncodeConfig {
    /// What guidance leads away from. Default: the empty text.
    pub negative_prompt: String,
    /// What the second encoder reads of that. Default: the same.
    pub negative_prompt_2: Option<String>,
    /// What the third encoder reads of that. Default: the same.
    pub negative_prompt_3: Option<String>,
    /// Tokens of a text that T5 reads. Default: 256 of Stable Diffusion 3, at most 512; 512 of Wan.
    pub max_sequence_length: Option<usize>,
    /// Layers of each CLIP that are skipped before its last; of `negative_prompt` none. Default 0.
    pub clip_skip: usize,
    /// Texts that are read at a time. Default 8.
    pub batch_size: usize,
    /// Where rank 0 holds the encoders meanwhile. Default `device`.
    pub on: EncodeOn,
    /// Their dtype, fp32 or bf16, and that of what they say. Default: fp32 on a host, bf16 elsewhere.
    pub precision: Option<Precision>,
}

impl Default for EncodeConfig {
    fn default() -> Self {
        Self {
            negative_prompt: String::new(),
            negative_prompt_2: None,
            negative_prompt_3: None,
            max_sequence_length: None,
            clip_skip: 0,
            batch_size: 8,
            on: EncodeOn::default(),
            precision: None,
        }
    }
}

/// Where text encoders are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EncodeOn {
    /// On rank 0's device, which is free of them before the model comes.
    #[default]
    Device,
    /// In rank 0's memory, by its processor.
    Host,
}

/// Supervised flow matching.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FlowMatchingConfig {
    /// Optimizer steps; 0 is no warm-up.
    pub steps: u64,
    /// Images of a step, over all ranks; a multiple of the number of ranks.
    pub batch_size: usize,
    /// How often an image goes without its class, 0 to 1: what guidance needs. Default 0.
    #[serde(default)]
    pub class_dropout: f64,
    /// An optimizer of its own, with its own states; its schedule counts warm-up steps.
    pub optimizer: OptimizerConfig,
}

/// How noise becomes an image.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerConfig {
    /// Denoising steps.
    pub steps: usize,
    /// How the sigmas are spaced before they are shifted. Default even.
    #[serde(default)]
    pub spacing: Spacing,
    /// Moves the sigmas towards noise, `s sigma / (1 + (s - 1) sigma)`; above 0. Default: what the scheduler in the
    /// model's folder says; without a folder 1, evenly spaced.
    #[serde(default)]
    pub shift: Option<f64>,
    /// Classifier-free guidance, in sampling and in training; 1 is none. Default 1.
    #[serde(default = "one_f64")]
    pub guidance: f64,
    /// The same where the second of a pair of transformers paints, as Wan 2.2's 14B is one. Default: `guidance`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance_2: Option<f64>,
    /// Images that a rank samples at a time.
    pub batch_size: usize,
    /// Images that a rank decodes from latents at a time, where the model has any. Default: one.
    #[serde(default = "one")]
    pub decode_batch_size: usize,
    /// Of videos the first so many frames are decoded, for rewards, evaluations and pictures: one more than a multiple of
    /// what the autoencoder needs. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_frames: Option<usize>,
    /// Decode what is larger than a tile in tiles that overlap, as diffusers' `enable_tiling` does: less memory, and slightly
    /// other pixels. Default: whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_tiles: Option<TilesConfig>,
}

/// Square tiles of images or frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TilesConfig {
    /// Pixels of a tile's side; a multiple of what a latent stands for.
    pub size: usize,
    /// Pixels from one tile to the next, from half of `size` to all of it. Default: three quarters of `size`, in whole latents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
}

impl TilesConfig {
    /// Pixels from one tile to the next, where a latent stands for `zoom` of a side.
    pub fn stride(&self, zoom: usize) -> usize {
        self.stride.unwrap_or(self.size / zoom * 3 / 4 * zoom)
    }
}

impl SamplerConfig {
    /// Every sigma on the way, from 1 to 0.
    ///
    /// # Errors
    /// For steps or a shift that make none.
    pub fn sigmas(&self, shift: f64) -> anyroll_models::Result<Vec<f64>> {
        match self.spacing {
            Spacing::Even => sigmas(self.steps, shift),
            Spacing::Diffusers => sigmas_of_diffusers(self.steps, shift),
        }
    }

    /// The guidance at `sigma`, of a pair of transformers with this `boundary`.
    pub fn guidance_at(&self, sigma: f64, boundary: Option<f64>) -> f64 {
        let of_second = boundary.is_some_and(|boundary| is_of_second(sigma, boundary));
        self.guidance_2.filter(|_| of_second).unwrap_or(self.guidance)
    }

    /// Whether any step has guidance.
    pub fn is_guided(&self) -> bool {
        self.guided_by().is_some()
    }

    /// The first field by which any step has guidance.
    pub fn guided_by(&self) -> Option<&'static str> {
        let fields = [("guidance", Some(self.guidance)), ("guidance_2", self.guidance_2)];
        fields.into_iter().find(|(_, value)| value.is_some_and(|value| value != 1.0)).map(|(name, _)| name)
    }
}

/// Whether the second of a pair of transformers paints at `sigma`; as the model compares them, in fp32.
pub fn is_of_second(sigma: f64, boundary: f64) -> bool {
    (sigma as f32) < boundary as f32
}

/// How a sampler's sigmas are spaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// From 1 to 0 in equal steps, as ROLL has it.
    #[default]
    Even,
    /// As diffusers' `FlowMatchEulerDiscreteScheduler`: in equal steps to the first timestep's, and one step to 0.
    Diffusers,
}

/// How a reward becomes a gradient.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MethodConfig {
    /// Backpropagation of the reward through the last denoising steps, as ROLL's reward flow.
    Refl(ReflConfig),
    /// The same without more ado: DRaFT-K.
    DraftK(DraftKConfig),
    /// Policy gradients on the log-probs of stochastic denoising steps.
    FlowGrpo(FlowGrpoConfig),
    /// The same with constant noise and, within a group, equal beginnings.
    DanceGrpo(DanceGrpoConfig),
    /// Flow matching towards good samples and away from bad ones.
    DiffusionNft(NftConfig),
}

/// ROLL's reward flow. The loss is `-(score - score_mean) / score_std * score_scale + kl_coef * kl`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReflConfig {
    /// The first denoising step, from 0, that a gradient flows through; those before it have none.
    pub mid_step: usize,
    /// Where each step's images begin. Default free.
    #[serde(default)]
    pub noise: StartNoise,
    /// Weight of the KL divergence from the frozen model, `mean((v - v_ref)^2 / (2 sigma^2))`, a mean over the steps
    /// with a gradient; 0 needs no frozen model. Default 0.
    #[serde(default)]
    pub kl_coef: f64,
    /// Taken off a score. Default 0.
    #[serde(default)]
    pub score_mean: f64,
    /// Divides what is left; above 0. Default 1.
    #[serde(default = "one_f64")]
    pub score_std: f64,
    /// Multiplies that; above 0. Default 1.
    #[serde(default = "one_f64")]
    pub score_scale: f64,
}

/// Where images begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StartNoise {
    /// New noise in each step.
    #[default]
    Free,
    /// The same noise in each step, as ROLL has it.
    Fixed,
}

/// DRaFT-K (Clark et al., 2024).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DraftKConfig {
    /// The last so many denoising steps have a gradient.
    pub k: usize,
}

/// Flow-GRPO (Liu et al., 2025).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlowGrpoConfig {
    /// Noise of the denoising steps; above 0. Default 0.7.
    pub noise_level: f64,
    /// The fraction of a step's denoising steps that is trained on, drawn anew in each; above 0, at most 1.
    /// Default 1.
    pub timestep_fraction: f64,
    /// Ratios are clipped at 1 minus and plus this. Small, since a log-prob is a mean over an image's values.
    /// Default 1e-4.
    pub clip: f64,
    /// Advantages are clamped to minus and plus this; above 0. Default 5.
    pub advantage_clip: f64,
    /// Weight of the KL divergence from the frozen model; 0 needs none. Default 0.
    pub kl_coef: f64,
    /// What the KL divergence of two denoising steps is divided by. Default `noise`.
    pub kl_scale: KlScale,
}

impl Default for FlowGrpoConfig {
    fn default() -> Self {
        Self {
            noise_level: 0.7,
            timestep_fraction: 1.0,
            clip: 1e-4,
            advantage_clip: 5.0,
            kl_coef: 0.0,
            kl_scale: KlScale::default(),
        }
    }
}

/// What the squared distance of two denoising steps' means is divided by, twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlScale {
    /// The square of the noise per root of time, as Flow-GRPO's code has it.
    #[default]
    Noise,
    /// The step's variance, which has the step's length as well: the divergence of the two Gaussians.
    Variance,
}

/// DanceGRPO (Xue et al., 2025).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DanceGrpoConfig {
    /// Noise of the denoising steps, the same at every sigma; above 0. Default 0.3.
    pub eta: f64,
    /// As in `flow_grpo`. Default 1.
    pub timestep_fraction: f64,
    /// As in `flow_grpo`. Default 1e-4.
    pub clip: f64,
    /// As in `flow_grpo`. Default 5.
    pub advantage_clip: f64,
}

impl Default for DanceGrpoConfig {
    fn default() -> Self {
        Self { eta: 0.3, timestep_fraction: 1.0, clip: 1e-4, advantage_clip: 5.0 }
    }
}

/// DiffusionNFT (Zheng et al., 2025).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct NftConfig {
    /// How far the implicit positive and negative policies lie from the old one; above 0. Default 1.
    pub beta: f64,
    /// Sigmas, drawn at random, that each image is trained at. Default 1.
    pub timesteps: usize,
    /// Advantages are clamped to minus and plus this, and are then a part of it; above 0. Default 5.
    pub advantage_clip: f64,
    /// Weight of `mean((v - v_ref)^2)`, with the frozen model's velocity; 0 needs none. Default 0.
    pub kl_coef: f64,
    /// After step `i`, from 1, the old policy keeps `min(old_decay_rate i, old_decay_max)` of itself. Default 0.001.
    pub old_decay_rate: f64,
    /// See `old_decay_rate`; 0 to below 1. Default 0.5.
    pub old_decay_max: f64,
}

impl Default for NftConfig {
    fn default() -> Self {
        Self {
            beta: 1.0,
            timesteps: 1,
            advantage_clip: 5.0,
            kl_coef: 0.0,
            old_decay_rate: 0.001,
            old_decay_max: 0.5,
        }
    }
}

/// When and on how many images the policy is evaluated; before and after training always.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImageEvaluationConfig {
    /// RL steps from one evaluation to the next. Default 10.
    pub every: u64,
    /// Images, of all classes or texts in turn, from the same noise each time. Default 512.
    pub images: usize,
}

impl Default for ImageEvaluationConfig {
    fn default() -> Self {
        Self { every: 10, images: 512 }
    }
}

impl MethodConfig {
    /// The weight of the KL divergence from the frozen model.
    pub fn kl_coef(&self) -> f64 {
        match self {
            Self::Refl(refl) => refl.kl_coef,
            Self::FlowGrpo(grpo) => grpo.kl_coef,
            Self::DiffusionNft(nft) => nft.kl_coef,
            Self::DraftK(_) | Self::DanceGrpo(_) => 0.0,
        }
    }

    /// Its name in YAML.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Refl(_) => "refl",
            Self::DraftK(_) => "draft_k",
            Self::FlowGrpo(_) => "flow_grpo",
            Self::DanceGrpo(_) => "dance_grpo",
            Self::DiffusionNft(_) => "diffusion_nft",
        }
    }

    /// Whether it follows the gradient of the reward.
    pub fn differentiates_reward(&self) -> bool {
        matches!(self, Self::Refl(_) | Self::DraftK(_))
    }
}

fn one() -> usize {
    1
}

fn one_f64() -> f64 {
    1.0
}
