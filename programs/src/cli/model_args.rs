//! Arguments shared by `generate`, `evaluate`, `score`, `serve` and `embed`.

use std::path::{self, Path, PathBuf};

use anyroll_backends::BackendKind;
use anyroll_config::{self as config};
use anyroll_models::SamplingParams;
use anyroll_pipelines::{
    Result,
    hub::{Hub, Name},
    inference::Sampling,
    loaded::{DeviceChoice, Loaded, LoadedModel, Options},
    run_dir::RunDir,
};
use clap::{Args, ValueEnum};

/// The model and its device.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// A run's folder, one of its checkpoints, a model folder as published on Hugging Face or its name there, such as
    /// `Qwen/Qwen2.5-0.5B-Instruct`, or an adapter folder as PEFT saves it
    model: PathBuf,
    /// Download a model that is named and not in the hub's cache, with Hugging Face's program `hf`
    #[arg(long)]
    download: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Device of a model.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct DeviceArgs {
    /// The backend to run on [default: the first available]
    #[arg(long)]
    backend: Option<BackendKind>,
    /// Ordinal of the device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Dtype of the model [default: fp32 on the cpu, bf16 on other backends]
    #[arg(long)]
    precision: Option<Precision>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Precision {
    Fp32,
    Bf16,
}

impl DeviceArgs {
    /// The chosen device and precision.
    pub fn choice(self) -> DeviceChoice {
        let precision = self.precision.map(|precision| match precision {
            Precision::Fp32 => config::Precision::Fp32,
            Precision::Bf16 => config::Precision::Bf16,
        });
        DeviceChoice { backend: self.backend, ordinal: self.device, precision }
    }
}

impl ModelArgs {
    /// Loads a model that generates text.
    pub fn load(&self, options: Options) -> Result<LoadedModel> {
        LoadedModel::open(&self.model, &self.placed(options))
    }

    /// Loads a model of either kind.
    pub fn load_any(&self, options: Options) -> Result<Loaded> {
        Loaded::open(&self.model, &self.placed(options))
    }

    fn placed(&self, options: Options) -> Options {
        let hub = Hub::of_environment(self.download);
        Options { device: self.device.choice(), hub, ..options }
    }

    /// The model as it was named.
    pub fn path(&self) -> &Path {
        &self.model
    }

    /// Returns true if the model is a run's, or one of its checkpoints.
    pub fn is_of_run(&self) -> bool {
        RunDir::open(&RunDir::and_checkpoint(&self.model).0).is_ok()
    }

    /// Name of the model for clients: that on the hub, or its folder's; for a checkpoint the run folder's.
    pub fn name(&self) -> String {
        let path = path::absolute(&self.model).unwrap_or_else(|_| self.model.clone());
        if !path.exists() {
            return self.model.display().to_string();
        }
        if let Some(name) = Name::of_snapshot(&path) {
            return name.repository().to_owned();
        }
        let (folder, _) = RunDir::and_checkpoint(&path);
        folder.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
    }
}

/// Guidance of completions.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct GuidanceArgs {
    /// For a run of `ilql`: times the values of tokens that are added to the logits; 0 for none [default: the
    /// run's `guidance`]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true, value_parser = finite)]
    pub guidance: Option<f64>,
}

/// Sampling of tokens.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct SamplingArgs {
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, allow_negative_numbers = true, default_value_t = 1.0)]
    pub temperature: f64,
    /// Sample from this many likeliest tokens only; 0 for all
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Sample from the likeliest tokens that together reach this probability only; 1 for all
    #[arg(long, allow_negative_numbers = true, default_value_t = 1.0)]
    pub top_p: f64,
    /// Sample from tokens with at least this fraction of the likeliest one's probability only; 0 for all
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.0)]
    pub min_p: f64,
    /// Makes tokens that occurred before less likely; 1 turns it off
    #[arg(long, allow_negative_numbers = true, default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// The most tokens of a completion [default: 256, or as many as fit after the prompt]
    #[arg(long)]
    pub max_new_tokens: Option<usize>,
}

/// Default length of a completion.
const NEW_TOKENS: usize = 256;

impl SamplingArgs {
    /// Parameters for a prompt after which `room` tokens fit, with the tokens that end a completion.
    pub fn params(&self, stop_tokens: Vec<i64>, room: usize) -> SamplingParams {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens } = *self;
        let max_new_tokens = max_new_tokens.unwrap_or(NEW_TOKENS.min(room.max(1)));
        let how = Sampling { temperature, top_k, top_p, min_p, repetition_penalty };
        how.params(max_new_tokens, stop_tokens)
    }
}

/// Capacity of an engine.
#[derive(Debug, Args)]
pub(super) struct CapacityArgs {
    /// Sequences in flight
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    pub sequences: usize,
    /// Fraction of the device's free memory that the KV cache may take
    #[arg(long, default_value_t = 0.85, value_parser = part)]
    pub memory: f64,
}

/// Parses an integer of at least 1.
pub(super) fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|number| *number >= 1).ok_or_else(|| "write an integer of at least 1".into())
}

/// Parses a finite number.
fn finite(text: &str) -> std::result::Result<f64, String> {
    text.parse().ok().filter(|number: &f64| number.is_finite()).ok_or_else(|| "write a finite number".into())
}

/// Parses a number above 0 and at most 1.
fn part(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|number| *number > 0.0 && *number <= 1.0);
    number.ok_or_else(|| "write a number above 0 and at most 1, such as 0.85".into())
}
