//! The fields of `pipeline.diffusion` and of the diffusion model.
//!
//! `docs/guides/diffusion.md` has the formula and the source of each method.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::diffusion_method::MethodConfig;
use super::image_reward::ImageRewardConfig;
use super::optimizer::OptimizerConfig;
use super::sampler::SamplerConfig;
use super::schema::{CheckpointConfig, ModelConfig};
use super::strategy::Precision;
use crate::document::Section;

/// Largest number of images of an evaluation; a larger number is a typing error.
const MOST_EVALUATED: usize = 1_000_000;

/// The shape of a class-conditional diffusion transformer (DiT with adaLN-Zero).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DitConfig {
    /// Height and width of a patch in pixels; a divisor of the images' height and width.
    pub patch_size: usize,
    /// Width of the residual stream; a multiple of `heads`.
    pub hidden_size: usize,
    /// Number of transformer blocks; 1 or above.
    pub layers: usize,
    /// Number of attention heads; 1 or above.
    pub heads: usize,
    /// Width of the feed-forward's hidden layer; 1 or above.
    pub intermediate_size: usize,
}

/// Reward training of a flow-matching image model: a supervised warm-up, then one of several methods.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DiffusionConfig {
    /// Source of the images' classes or texts.
    pub data: ImageDataConfig,
    /// Reward of an image.
    pub reward: ImageRewardConfig,
    /// Control experiment: each image gets the reward of another image of the step, so that rewards carry no signal.
    /// Not for methods that differentiate the reward. Default false.
    #[serde(default)]
    pub shuffle_rewards: bool,
    /// Supervised flow matching on the data, before the first RL step; not with `prompts`, which have no images.
    /// Default: none.
    #[serde(default)]
    pub warmup: Option<FlowMatchingConfig>,
    /// Number of RL steps; 1 or above.
    pub steps: u64,
    /// Number of classes or texts drawn in a step, over all ranks; a multiple of the number of ranks.
    pub prompts_per_step: usize,
    /// Number of images of each class or text; at least 2 for methods whose advantages are relative to the group's
    /// mean.
    pub group_size: usize,
    /// Number of mini-batches, one optimizer update each, that a step's images are split into; a divisor of
    /// `prompts_per_step`. Default 1.
    #[serde(default = "one")]
    pub mini_batches: usize,
    /// Sampler that denoises images.
    pub sampler: SamplerConfig,
    /// Method that turns rewards into gradients.
    pub method: MethodConfig,
    /// The policy's optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
    /// Interval of evaluations, and their number of images, from fixed noise.
    #[serde(default)]
    pub evaluation: ImageEvaluationConfig,
    /// Interval and number of checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// Source of the images' classes or texts.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageDataConfig {
    /// Light squares and diamonds on black, generated: 8 x 8 pixels, and a class for each quadrant. For a `dit`.
    Shapes,
    /// Texts, for a published model.
    Prompts(Box<PromptsConfig>),
}

/// Texts as embeddings of the model's text encoders, computed before the run or at its beginning.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PromptsConfig {
    /// A safetensors file with embeddings computed beforehand, instead of `encode`: `prompt_embeds` `[P, S, D]` and
    /// `pooled_prompt_embeds` `[P, E]`. Guidance also needs `negative_prompt_embeds` `[1, S, D]` and
    /// `negative_pooled_prompt_embeds` `[1, E]`. A relative path starts at the config's folder. All embeddings are
    /// resident on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeddings: Option<PathBuf>,
    /// Encodes the `records` with the model's text encoders, each text once, before the model is loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode: Option<EncodeConfig>,
    /// A file with a JSON object a line, one for each text in order: `prompt` and the columns that rewards read; or a
    /// `.txt` with a prompt a line. Default, without `encode`: rewards receive the text's index.
    #[serde(default)]
    pub records: Option<PathBuf>,
    /// Height of the images in pixels; a multiple that the decoder and the patches require.
    pub height: usize,
    /// Width of the images in pixels; a multiple as for `height`.
    pub width: usize,
    /// Number of frames, for a model of videos: one more than a multiple of the autoencoder's temporal factor.
    /// Default 1.
    #[serde(default = "one")]
    pub frames: usize,
    /// Number of texts at the end that are for evaluation alone; 0 evaluates on the texts that are trained on.
    /// Default 0.
    #[serde(default)]
    pub held_out: usize,
}

/// Options of encoding texts with the model's text encoders, named as in diffusers.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct EncodeConfig {
    /// Text that guidance steers away from. Default: the empty text.
    pub negative_prompt: String,
    /// Negative prompt of the second encoder. Default: `negative_prompt`.
    pub negative_prompt_2: Option<String>,
    /// Negative prompt of the third encoder. Default: `negative_prompt`.
    pub negative_prompt_3: Option<String>,
    /// Maximum number of tokens of a text that T5 reads. Default: 256 for Stable Diffusion 3, at most 512; 512 for Wan.
    pub max_sequence_length: Option<usize>,
    /// Number of layers skipped before the last one of each CLIP; none for `negative_prompt`. Default 0.
    pub clip_skip: usize,
    /// Number of texts encoded at a time. Default 8.
    pub batch_size: usize,
    /// Place of the encoders on rank 0 while texts are encoded. Default `device`.
    pub on: EncodeOn,
    /// Dtype of the encoders and of the embeddings, fp32 or bf16. Default: fp32 on a host, bf16 elsewhere.
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

/// Place of the text encoders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EncodeOn {
    /// Rank 0's device; the encoders are freed before the model is loaded.
    #[default]
    Device,
    /// Rank 0's host memory, computed by the CPU.
    Host,
}

/// Supervised flow matching.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FlowMatchingConfig {
    /// Number of optimizer steps; 0 is no warm-up.
    pub steps: u64,
    /// Number of images of a step, over all ranks; a multiple of the number of ranks.
    pub batch_size: usize,
    /// Probability that an image is trained without its class, 0 to 1; guidance needs a value above 0. Default 0.
    #[serde(default)]
    pub class_dropout: f64,
    /// A separate optimizer with its own states; its schedule counts warm-up steps.
    pub optimizer: OptimizerConfig,
}

/// Interval and number of images of evaluations. The policy is always evaluated before and after training.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImageEvaluationConfig {
    /// Number of RL steps between evaluations; 1 or above. Default 10.
    pub every: u64,
    /// Number of images, of all classes or texts in turn, from the same noise each time; from 1 to 1000000.
    /// Default 512.
    pub images: usize,
}

impl Default for ImageEvaluationConfig {
    fn default() -> Self {
        Self { every: 10, images: 512 }
    }
}

impl ImageDataConfig {
    /// Height and width of `shapes` in pixels.
    pub const SHAPES_SIZE: usize = 8;
    /// Classes of `shapes`.
    pub const SHAPES_CLASSES: usize = 4;

    /// Returns the number of texts that are for evaluation alone; 0 if all are trained on.
    pub fn held_out(&self) -> usize {
        match self {
            Self::Prompts(prompts) => prompts.held_out,
            Self::Shapes => 0,
        }
    }
}

impl DitConfig {
    pub(super) fn validate(&self, at: &Section) {
        for (name, size) in [
            ("patch_size", self.patch_size),
            ("hidden_size", self.hidden_size),
            ("layers", self.layers),
            ("heads", self.heads),
            ("intermediate_size", self.intermediate_size),
        ] {
            at.positive(name, size);
        }
        let size = ImageDataConfig::SHAPES_SIZE;
        at.ensure(
            size.is_multiple_of(self.patch_size),
            "patch_size",
            format!("patches of {} pixels do not make images of {size}", self.patch_size),
            format!("write a divisor of {size}"),
        );
        at.given(&["heads"]).ensure(
            self.hidden_size.is_multiple_of(self.heads),
            "hidden_size",
            format!("{} heads of one width do not make {}", self.heads, self.hidden_size),
            format!("write a multiple of {}", self.heads),
        );
    }
}

impl DiffusionConfig {
    /// Reports invalid fields of the pipeline that trains `model`.
    pub(super) fn validate(&self, model: &ModelConfig, at: &Section) {
        at.positive("steps", self.steps);
        at.positive("prompts_per_step", self.prompts_per_step);
        at.positive("group_size", self.group_size);
        at.positive("mini_batches", self.mini_batches);
        let (prompts, mini_batches) = (self.prompts_per_step, self.mini_batches);
        at.given(&["prompts_per_step"]).ensure(
            prompts.is_multiple_of(mini_batches),
            "mini_batches",
            format!(
                "{prompts} prompts are no multiple of {mini_batches} mini-batches, which hold whole groups"
            ),
            "write a divisor of `prompts_per_step`",
        );
        self.sampler.validate(&at.below("sampler"));
        self.reward.validate(&at.below("reward"));
        if self.method.differentiates_reward() {
            self.validate_followed_reward(&at.given(&["method"]));
        }
        self.method.validate(&self.sampler, self.group_size, at);
        self.optimizer.validate(&at.below("optimizer"));
        self.optimizer.validate_over(self.steps, &at.given(&["steps"]).below("optimizer"));
        if let Some(warmup) = &self.warmup {
            warmup.validate(&at.below("warmup"));
        }
        at.positive("evaluation.every", self.evaluation.every);
        self.checkpoint.validate(&at.below("checkpoint"));
        at.ensure(
            !self.checkpoint.keep_best,
            "checkpoint.keep_best",
            "it goes by `eval/greedy`, which a language model has",
            "leave it out",
        );
        let images = self.evaluation.images;
        at.ensure(
            (1..=MOST_EVALUATED).contains(&images),
            "evaluation.images",
            format!("{images} is out of range"),
            format!("write 1 or above, at most {MOST_EVALUATED}"),
        );
        if let ModelConfig::Dit(_) = model {
            self.validate_shapes(&at.when(at.root().is_read("model")));
        }
    }

    /// Reports rewards without a gradient, and shuffled rewards, for a method that differentiates the reward.
    fn validate_followed_reward(&self, at: &Section) {
        let name = self.method.name();
        let of_reward = at.when(at.below("reward").has_all_items());
        for (index, reward) in self.reward.fields() {
            of_reward.ensure(
                reward.is_differentiable(),
                &format!("reward{index}"),
                format!("`{name}` follows the reward's gradient, and this one has none"),
                "write `brightness`, `clip`, `aesthetic` or `torchscript`",
            );
        }
        at.ensure(
            !self.shuffle_rewards,
            "shuffle_rewards",
            format!("`{name}` follows the reward's gradient, which cannot be another image's"),
            "leave it out, or choose another method",
        );
    }

    /// Reports fields that images of classes do not have.
    fn validate_shapes(&self, at: &Section) {
        at.ensure(
            self.data == ImageDataConfig::Shapes,
            "data",
            "a `dit` reads classes, and no text",
            "write `shapes`, or `model: {diffusers: DIR}`",
        );
        let reward = at.below("reward");
        let reward = reward.when(reward.has_all_items());
        for (index, kind) in self.reward.fields() {
            kind.validate_of_shapes(&reward.below(&index));
        }
        at.ensure(
            self.sampler.decode_frames.is_none(),
            "sampler.decode_frames",
            "the shapes are images, which have no frames",
            "leave it out",
        );
        at.ensure(
            self.sampler.decode_tiles.is_none(),
            "sampler.decode_tiles",
            "the shapes are pixels, which nothing decodes",
            "leave it out",
        );
        self.sampler.validate_second_guidance(false, &at.below("sampler"));
        self.reward.validate_frames(None, &reward);
        if let Some(warmup) = &self.warmup {
            at.given(&["warmup.class_dropout"]).ensure(
                !self.sampler.is_guided() || warmup.class_dropout > 0.0,
                "sampler.guidance",
                "it leads away from what the model says of no class, which it never learns",
                "write 1, or `warmup.class_dropout` above 0, such as 0.1",
            );
        }
        let (images, classes) = (self.evaluation.images, ImageDataConfig::SHAPES_CLASSES);
        at.ensure(
            images >= classes,
            "evaluation.images",
            format!("{images} are fewer than the classes"),
            format!("write {classes} or above, one for each class"),
        );
    }
}

impl FlowMatchingConfig {
    fn validate(&self, at: &Section) {
        at.positive("batch_size", self.batch_size);
        let dropout = self.class_dropout;
        at.number("class_dropout", dropout, (0.0..=1.0).contains(&dropout), "from 0 to 1");
        let optimizer = at.below("optimizer");
        self.optimizer.validate(&optimizer);
        self.optimizer.validate_over(self.steps, &optimizer);
    }
}

// serde's attributes take functions only.

fn one() -> usize {
    1
}
