//! The top level of a YAML file, each field with its unit, its default and what its edge values mean.
//!
//! Enums are externally tagged (`data: {sort: {digits: 6}}`), because serde buffers the other forms and an error inside would
//! lose its line.

use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::decoder::DecoderConfig;
use super::diffusion::{DiffusionConfig, DitConfig};
use super::metrics::MetricsConfig;
use super::model::{DiffusersConfig, FolderConfig, ModelFields};
use super::offline::OfflineConfig;
use super::optimizer::OptimizerConfig;
use super::rlvr::RlvrConfig;
use super::roles::RolesConfig;
use super::strategy::StrategyConfig;
use crate::document::Section;

/// A whole run, as the user wrote it, with the defaults of absent fields filled in.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The run's name, the start of its folder's: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Everything random follows from it: weights, prompts, samples. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// The backend that runs the math, or `auto`: the first usable one of the machine.
    pub backend: String,
    /// The devices of this host, one rank each. Default 1.
    #[serde(default)]
    pub devices: Devices,
    /// CPU threads of a rank's math. Default: the machine's cores divided by its ranks, at least 1.
    #[serde(default)]
    pub threads: Option<usize>,
    /// The policy's architecture.
    pub model: ModelConfig,
    /// How every role is held and computed, unless `roles` says otherwise.
    pub strategy: StrategyConfig,
    /// What differs for one role. Default: nothing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub roles: RolesConfig,
    /// Who may read the metrics while the run goes on. Default: nobody.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metrics: MetricsConfig,
    /// What is run.
    pub pipeline: PipelineConfig,
}

/// The devices of a host: a count, `all`, or a list of ordinals.
#[derive(Clone, Debug, PartialEq)]
pub enum Devices {
    /// The first so many; on the cpu, the number of ranks.
    Count(usize),
    /// Every device that the backend has here. Not on the cpu, which has no count of its own.
    All,
    /// These ordinals, in the order of the ranks. Not on the cpu.
    List(Vec<usize>),
}

impl Default for Devices {
    fn default() -> Self {
        Self::Count(1)
    }
}

/// A model's architecture and where its weights come from: `{decoder: {...}}`, `{path: DIR}`, `{dit: {...}}` or
/// `{diffusers: DIR}`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "ModelFields", into = "ModelFields")]
pub enum ModelConfig {
    /// A decoder language model made from scratch, its weights drawn from the run's seed.
    Decoder(DecoderConfig),
    /// A published model.
    Folder(FolderConfig),
    /// A diffusion transformer for images of a class, made from scratch as well.
    Dit(DitConfig),
    /// A published model of images.
    Diffusers(DiffusersConfig),
}

impl ModelConfig {
    /// Whether adapters drop values in training.
    pub fn drops(&self) -> bool {
        matches!(self, Self::Folder(folder) if folder.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0))
    }

    /// Whether adapters are what is trained.
    pub fn has_adapters(&self) -> bool {
        match self {
            Self::Folder(folder) => folder.lora.is_some(),
            Self::Diffusers(model) => model.lora.is_some(),
            Self::Decoder(_) | Self::Dit(_) => false,
        }
    }
}

/// What is run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineConfig {
    /// Reinforcement learning with a verifiable reward.
    Rlvr(Box<RlvrConfig>),
    /// Training on texts that are there beforehand: supervised, or on pairs.
    Offline(Box<OfflineConfig>),
    /// Reward training of a model of images.
    Diffusion(Box<DiffusionConfig>),
}

impl Config {
    /// Whether what is trained gives texts a number, and writes none.
    pub fn trains_a_reward_model(&self) -> bool {
        matches!(&self.pipeline, PipelineConfig::Offline(offline) if offline.objective.is_of_numbers())
    }
}

impl PipelineConfig {
    /// Its name in YAML.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Rlvr(_) => "rlvr",
            Self::Offline(_) => "offline",
            Self::Diffusion(_) => "diffusion",
        }
    }

    /// Whether something is compared with what the policy was.
    pub fn has_reference(&self) -> bool {
        match self {
            Self::Rlvr(rlvr) => rlvr.algorithm.kl_coef > 0.0,
            Self::Offline(offline) => offline.objective.has_reference(),
            Self::Diffusion(diffusion) => diffusion.method.kl_coef() > 0.0,
        }
    }

    /// Whether a model learns what tokens earn.
    pub fn has_critic(&self) -> bool {
        matches!(self, Self::Rlvr(rlvr) if rlvr.critic.is_some())
    }
}

/// Supervised steps on the gold answers.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupConfig {
    /// Optimizer steps; 0 is no warm-up.
    pub steps: u64,
    /// Records of a step, over all ranks; a multiple of the number of ranks.
    pub batch_size: usize,
    /// Instead of `strategy.micro_batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// An optimizer of its own, with its own states; its schedule counts warm-up steps.
    pub optimizer: OptimizerConfig,
}

/// When the run is saved; after the last step always.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// RL steps from one checkpoint to the next. Default 50.
    pub every: u64,
    /// The newest so many are kept; at least 1. Default 2.
    pub keep_last: usize,
    /// Keeps the policy with the best `eval/greedy` as well, in the run folder's `best`. Default false.
    pub keep_best: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 50, keep_last: 2, keep_best: false }
    }
}

impl Config {
    /// Reports what cannot be, whatever the machine has and the files hold that are named.
    pub fn validate(&self, at: &Section) {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let (name, first) = (&self.name, |c: char| c.is_ascii_alphanumeric());
        at.ensure(
            name.chars().all(is_plain) && name.starts_with(first),
            "name",
            format!("`{name}` cannot start the name of a folder"),
            "use letters, digits, `-`, `_` and `.`, first a letter or digit",
        );
        if let Some(threads) = self.threads {
            at.number_of_threads("threads", threads);
        }
        self.model.validate(&at.below("model"));
        self.strategy.validate(&at.below("strategy"));
        self.validate_logits(at);
        self.roles.validate(self, &at.below("roles"));
        self.validate_kinds(at);
        let pipeline = at.below("pipeline").below(self.pipeline.name());
        match &self.pipeline {
            PipelineConfig::Rlvr(rlvr) => rlvr.validate(self, &pipeline),
            PipelineConfig::Offline(offline) => offline.validate(self, &pipeline),
            PipelineConfig::Diffusion(diffusion) => diffusion.validate(&self.model, &pipeline),
        }
    }

    /// Reports logits that are to be kept and not made: only a loss of tokens has some.
    fn validate_logits(&self, at: &Section) {
        let has_none = matches!(self.pipeline, PipelineConfig::Diffusion(_)) || self.trains_a_reward_model();
        let is_read = at.is_read("pipeline") && at.is_sound("pipeline.offline.objective");
        at.when(is_read).ensure(
            !(has_none && self.strategy.keep_logits == Some(true)),
            "strategy.keep_logits",
            "what this trains makes no logits",
            "leave it out",
        );
    }

    /// Whether the pipeline trains a model of this kind; reported if it does not.
    fn validate_kinds(&self, at: &Section) {
        let at = at.when(at.is_read("pipeline"));
        match (&self.pipeline, self.model.is_of_images()) {
            (PipelineConfig::Diffusion(_), false) => {
                let help = "write `dit`, or `diffusers` for a published one";
                at.refuse("model", "`diffusion` trains a model of images", help);
            }
            (PipelineConfig::Rlvr(_) | PipelineConfig::Offline(_), true) => {
                let message = format!("`{}` trains a language model", self.pipeline.name());
                at.refuse("model", message, "write `decoder` or `path`");
            }
            _ => {}
        }
    }
}

impl ModelConfig {
    /// Whether it paints.
    pub fn is_of_images(&self) -> bool {
        matches!(self, Self::Dit(_) | Self::Diffusers(_))
    }

    fn validate(&self, at: &Section) {
        match self {
            Self::Decoder(decoder) => decoder.validate(&at.below("decoder")),
            Self::Dit(dit) => dit.validate(&at.below("dit")),
            Self::Folder(folder) => folder.validate(at),
            Self::Diffusers(model) => model.validate(at),
        }
    }
}

impl WarmupConfig {
    pub(super) fn validate(&self, at: &Section) {
        at.positive("batch_size", self.batch_size);
        if let Some(size) = self.micro_batch_size {
            at.positive("micro_batch_size", size);
        }
        let optimizer = at.below("optimizer");
        self.optimizer.validate(&optimizer);
        self.optimizer.validate_over(self.steps, &optimizer);
    }
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DevicesVisitor;

        impl<'de> Visitor<'de> for DevicesVisitor {
            type Value = Devices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a count, `all`, or a list of ordinals such as [0, 2]")
            }

            fn visit_u64<E: de::Error>(self, count: u64) -> Result<Devices, E> {
                usize::try_from(count)
                    .map(Devices::Count)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(count), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Devices, E> {
                match text {
                    "all" => Ok(Devices::All),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, ordinals: A) -> Result<Devices, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(ordinals)).map(Devices::List)
            }
        }

        deserializer.deserialize_any(DevicesVisitor)
    }
}

impl Serialize for Devices {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Count(count) => count.serialize(serializer),
            Self::All => "all".serialize(serializer),
            Self::List(ordinals) => ordinals.serialize(serializer),
        }
    }
}

// serde's attributes take functions only.

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
