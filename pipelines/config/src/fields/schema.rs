//! The top level of a YAML file, each field with its unit, its default and the meaning of its edge values.
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

/// The config of a run, as the user wrote it, with the defaults of absent fields filled in.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the run, with which the run folder's name starts: letters, digits, `-`, `_` and `.`, first a letter or
    /// digit.
    pub name: String,
    /// Seed of all random numbers: weights, prompts, samples. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// Backend that runs the math, or `auto`: the first usable one of the machine.
    pub backend: String,
    /// Devices of this host, one for each rank. Default 1.
    #[serde(default)]
    pub devices: Devices,
    /// Number of CPU threads of a rank's math; 1 to 4096. Default: the machine's cores divided by its ranks, at
    /// least 1.
    #[serde(default)]
    pub threads: Option<usize>,
    /// The policy's architecture.
    pub model: ModelConfig,
    /// Strategy of every role, unless `roles` overrides it. Default: the defaults of its fields, but `zero_stage: auto`
    /// where `anyroll plan` can plan the run.
    #[serde(default)]
    pub strategy: StrategyConfig,
    /// Differences of single roles from the top level. Default: none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub roles: RolesConfig,
    /// Fewer hosts after one is lost, by `anyroll run --restarts`. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elastic: Option<ElasticConfig>,
    /// Publication of the metrics while the run continues. Default: none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metrics: MetricsConfig,
    /// The pipeline of the run.
    pub pipeline: PipelineConfig,
}

/// Number of hosts of a run that goes on without those that are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ElasticConfig {
    /// Least number of hosts; 1 or above, and below `--nnodes`.
    pub min: usize,
}

/// Devices of a host: a count, `all`, or a list of ordinals.
#[derive(Clone, Debug, PartialEq)]
pub enum Devices {
    /// A number of devices, the first ones; on the cpu, the number of ranks.
    Count(usize),
    /// Every device of the backend on this host. Not on the cpu, which has no count of its own.
    All,
    /// Ordinals, in the order of the ranks. Not on the cpu.
    List(Vec<usize>),
}

impl Default for Devices {
    fn default() -> Self {
        Self::Count(1)
    }
}

/// A model's architecture and the source of its weights: `{decoder: {...}}`, `{path: DIR}`, `{dit: {...}}` or
/// `{diffusers: DIR}`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "ModelFields", into = "ModelFields")]
pub enum ModelConfig {
    /// A decoder language model with new weights, drawn from the run's seed.
    Decoder(DecoderConfig),
    /// A published model.
    Folder(FolderConfig),
    /// A class-conditional diffusion transformer for images, with new weights.
    Dit(DitConfig),
    /// A published image model.
    Diffusers(DiffusersConfig),
}

impl ModelConfig {
    /// Returns true if adapters have dropout in training.
    pub fn drops(&self) -> bool {
        matches!(self, Self::Folder(folder) if folder.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0))
    }

    /// Returns true if adapters have magnitudes.
    pub fn has_dora(&self) -> bool {
        matches!(self, Self::Folder(folder) if folder.lora.as_ref().is_some_and(|lora| lora.dora))
    }

    /// Returns true if adapters are trained instead of the weights.
    pub fn has_adapters(&self) -> bool {
        match self {
            Self::Folder(folder) => folder.lora.is_some(),
            Self::Diffusers(model) => model.lora.is_some(),
            Self::Decoder(_) | Self::Dit(_) => false,
        }
    }
}

/// The pipeline of a run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineConfig {
    /// Reinforcement learning with a verifiable reward.
    Rlvr(Box<RlvrConfig>),
    /// Training on texts that exist before the run: supervised, or on pairs.
    Offline(Box<OfflineConfig>),
    /// Reward training of an image model.
    Diffusion(Box<DiffusionConfig>),
}

impl Config {
    /// Returns true if the trained model scores texts, and generates none.
    pub fn trains_a_reward_model(&self) -> bool {
        matches!(&self.pipeline, PipelineConfig::Offline(offline) if offline.objective.is_of_numbers())
    }

    /// Returns true if heads that learn values are trained with the model.
    pub fn trains_values(&self) -> bool {
        matches!(&self.pipeline, PipelineConfig::Offline(offline) if offline.objective.ilql().is_some())
    }
}

impl PipelineConfig {
    /// Returns the pipeline's name in YAML.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Rlvr(_) => "rlvr",
            Self::Offline(_) => "offline",
            Self::Diffusion(_) => "diffusion",
        }
    }

    /// Returns the interval and place of checkpoints.
    pub fn checkpoint(&self) -> &CheckpointConfig {
        match self {
            Self::Rlvr(rlvr) => &rlvr.checkpoint,
            Self::Offline(offline) => &offline.checkpoint,
            Self::Diffusion(diffusion) => &diffusion.checkpoint,
        }
    }

    /// Returns true if the pipeline has a reference.
    pub fn has_reference(&self) -> bool {
        match self {
            Self::Rlvr(rlvr) => rlvr.algorithm.kl_coef > 0.0,
            Self::Offline(offline) => offline.objective.has_reference(),
            Self::Diffusion(diffusion) => diffusion.method.kl_coef() > 0.0,
        }
    }

    /// Returns true if the pipeline has a critic.
    pub fn has_critic(&self) -> bool {
        matches!(self, Self::Rlvr(rlvr) if rlvr.critic.is_some())
    }
}

/// Supervised steps on the gold answers.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupConfig {
    /// Number of optimizer steps; 0 is no warm-up.
    pub steps: u64,
    /// Number of records of a step, over all ranks; a multiple of the number of ranks.
    pub batch_size: usize,
    /// Number of sequences of a micro-batch; 1 or above. Default: `strategy.micro_batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// A separate optimizer with its own states; its schedule counts warm-up steps.
    pub optimizer: OptimizerConfig,
}

/// Interval and number of checkpoints. A checkpoint is always written after the last step.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Number of RL steps between checkpoints; 1 or above. Default 50.
    pub every: u64,
    /// Number of newest checkpoints that are kept; at least 1. Default 2.
    pub keep_last: usize,
    /// True if the policy with the best `eval/greedy` is kept as well, in the run folder's `best`. Default false.
    pub keep_best: bool,
    /// A store that has a copy of the checkpoints, so that hosts need no shared folder: `s3://BUCKET/FOLDER`,
    /// `gs://BUCKET/FOLDER`, `az://CONTAINER/FOLDER` or `file:///FOLDER`, one for each run. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<String>,
    /// Seconds for which a request to the store is tried again; 1 or above. Default 180.
    #[serde(skip_serializing_if = "is_default_timeout")]
    pub storage_timeout_s: u64,
}

/// Default of [`CheckpointConfig::storage_timeout_s`].
const STORAGE_TIMEOUT_S: u64 = 180;

fn is_default_timeout(seconds: &u64) -> bool {
    *seconds == STORAGE_TIMEOUT_S
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            every: 50,
            keep_last: 2,
            keep_best: false,
            storage: None,
            storage_timeout_s: STORAGE_TIMEOUT_S,
        }
    }
}

impl CheckpointConfig {
    /// Kinds of stores, as their URLs begin.
    pub const STORES: [&str; 4] = ["s3://", "gs://", "az://", "file:///"];

    pub(super) fn validate(&self, at: &Section) {
        for (name, number) in [
            ("every", self.every),
            ("keep_last", self.keep_last as u64),
            ("storage_timeout_s", self.storage_timeout_s),
        ] {
            at.positive(name, number);
        }
        if let Some(storage) = &self.storage {
            let names_a_place =
                Self::STORES.iter().any(|store| storage.strip_prefix(store).is_some_and(|it| !it.is_empty()));
            at.ensure(
                names_a_place,
                "storage",
                format!("`{storage}` is no place in a store"),
                "write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or file:///FOLDER",
            );
        }
    }
}

impl Config {
    /// Reports invalid fields, without querying the machine or reading the files that are named.
    pub fn validate(&self, at: &Section) {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let (name, first) = (&self.name, |c: char| c.is_ascii_alphanumeric());
        at.ensure(
            name.chars().all(is_plain) && name.starts_with(first),
            "name",
            format!("`{name}` cannot start the name of a folder"),
            "use letters, digits, `-`, `_` and `.`, first a letter or digit",
        );
        if let Some(ElasticConfig { min }) = self.elastic {
            at.positive("elastic.min", min as u64);
        }
        if let Some(threads) = self.threads {
            at.number_of_threads("threads", threads);
        }
        self.model.validate(&at.below("model"));
        self.strategy.validate(&at.below("strategy"));
        self.validate_logits(at);
        self.roles.validate(self, &at.below("roles"));
        self.metrics.validate(&at.below("metrics"));
        self.validate_micro_batches(at);
        self.validate_kinds(at);
        let pipeline = at.below("pipeline").below(self.pipeline.name());
        match &self.pipeline {
            PipelineConfig::Rlvr(rlvr) => rlvr.validate(self, &pipeline),
            PipelineConfig::Offline(offline) => offline.validate(self, &pipeline),
            PipelineConfig::Diffusion(diffusion) => diffusion.validate(&self.model, &pipeline),
        }
    }

    /// Reports `keep_logits` for a loss without logits: only a loss of tokens has logits.
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

    /// Reports a limit in tokens for a model without tokens.
    fn validate_micro_batches(&self, at: &Section) {
        let is_of_images = matches!(self.pipeline, PipelineConfig::Diffusion(_));
        at.when(at.is_read("pipeline")).ensure(
            !(is_of_images && self.strategy.micro_batch_tokens.is_some()),
            "strategy.micro_batch_tokens",
            "`diffusion` trains on images, which are not counted in tokens",
            "write `micro_batch_size`",
        );
    }

    /// Reports a model of a kind that the pipeline does not train.
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
    /// Returns true if the model generates images.
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
