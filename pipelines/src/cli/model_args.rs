//! The arguments that `generate`, `score`, `serve` and `embed` share.

use std::path::PathBuf;

use anyroll_backends::BackendKind;
use anyroll_models::SamplingParams;
use clap::{Args, ValueEnum};

use crate::{
    Result, config,
    inference::Sampling,
    loaded::{DeviceChoice, LoadedModel, Options},
};

/// Which model, and where.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// A run's folder, one of its checkpoints, a model's folder as Hugging Face publishes it, or an adapter's as PEFT saves it
    model: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Where a model runs.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct DeviceArgs {
    /// Where it runs [default: the first backend that there is]
    #[arg(long)]
    backend: Option<BackendKind>,
    /// The device's number
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// The dtype of all that it holds [default: fp32 on the cpu, bf16 elsewhere]
    #[arg(long)]
    precision: Option<Precision>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Precision {
    Fp32,
    Bf16,
}

impl DeviceArgs {
    /// What they choose.
    pub fn choice(self) -> DeviceChoice {
        let precision = self.precision.map(|precision| match precision {
            Precision::Fp32 => config::Precision::Fp32,
            Precision::Bf16 => config::Precision::Bf16,
        });
        DeviceChoice { backend: self.backend, ordinal: self.device, precision }
    }
}

impl ModelArgs {
    /// Loads it; with `chat`, prompts are messages behind this system message.
    pub fn load(&self, chat: bool, system_prompt: Option<String>) -> Result<LoadedModel> {
        let options = Options { device: self.device.choice(), chat, system_prompt };
        LoadedModel::open(&self.model, &options)
    }
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct SamplingArgs {
    /// Divides the logits; 0 takes the likeliest token
    #[arg(long, allow_negative_numbers = true, default_value_t = 1.0)]
    pub temperature: f64,
    /// Only the so many likeliest tokens; 0 for all
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability; 1 for all
    #[arg(long, allow_negative_numbers = true, default_value_t = 1.0)]
    pub top_p: f64,
    /// Only tokens with this part of the likeliest one's probability; 0 for all
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.0)]
    pub min_p: f64,
    /// Makes tokens less likely that were there before; 1 for not
    #[arg(long, allow_negative_numbers = true, default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// The most tokens of a completion [default: 256, or as many as the model has room for behind the prompt]
    #[arg(long)]
    pub max_new_tokens: Option<usize>,
}

/// Tokens of a completion where nobody says how many.
const NEW_TOKENS: usize = 256;

impl SamplingArgs {
    /// With the tokens that end a completion, for a prompt behind which there is room for so many.
    pub fn params(&self, stop_tokens: Vec<i64>, room: usize) -> SamplingParams {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens } = *self;
        let max_new_tokens = max_new_tokens.unwrap_or(NEW_TOKENS.min(room.max(1)));
        let how = Sampling { temperature, top_k, top_p, min_p, repetition_penalty };
        how.params(max_new_tokens, stop_tokens)
    }
}

/// What an engine takes on.
#[derive(Debug, Args)]
pub(super) struct RoomArgs {
    /// Sequences that are live together
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    pub sequences: usize,
    /// The most that the KV cache takes, as a part of the device's free memory
    #[arg(long, default_value_t = 0.85, value_parser = part)]
    pub memory: f64,
}

/// A whole number from 1 on.
fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|number| *number >= 1).ok_or_else(|| "write a whole number, 1 or above".into())
}

/// A number above 0, and at most 1.
fn part(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|number| *number > 0.0 && *number <= 1.0);
    number.ok_or_else(|| "write a number above 0 and at most 1, such as 0.85".into())
}
