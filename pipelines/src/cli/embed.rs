//! `anyroll embed`: what a published model's text encoders say of prompts, for training on them.

use std::path::{Path, PathBuf};

use anyroll_models::hf::{ExportDtype, TextEmbeddingsWriter};
use clap::Args;
use tch::Kind;

use super::{lines::lines, model_args::DeviceArgs, stdout::print};
use crate::{
    Result,
    config::Precision,
    diffusion::{PromptEncoders, read_records},
    train::torch_device,
};

#[derive(Debug, Args)]
pub(super) struct EmbedArgs {
    /// The folder of a Stable Diffusion 3 or a Wan, as diffusers publishes it, with its text encoders and tokenizers
    model: PathBuf,
    /// The prompts: lines of {"prompt": ...}, which can be the `records` of training as well, or a .txt with one a line
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// The new safetensors file, for `embeddings`
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// What guidance leads away from
    #[arg(long, value_name = "TEXT", default_value = "")]
    negative: String,
    /// Tokens of a prompt that the T5 reads [default: 256 of Stable Diffusion 3, 512 of Wan]
    #[arg(long, value_name = "TOKENS")]
    max_sequence_length: Option<usize>,
    /// Weights to read where a folder has them, such as fp16 of model.fp16.safetensors [default: the plain files]
    #[arg(long, value_name = "NAME")]
    variant: Option<String>,
    /// Prompts that go through the encoders together
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    #[command(flatten)]
    device: DeviceArgs,
}

pub(super) fn embed(args: &EmbedArgs) -> Result<u8> {
    let mut texts = prompts(&args.file)?;
    let count = texts.len();
    if count == 0 {
        let problem = format!("{} has no prompt", args.file.display());
        return Err(anyroll_models::Error::Input { what: "--file", problem }.into());
    }
    let encoders = PromptEncoders::open(&args.model, args.variant.as_deref(), args.max_sequence_length)?;
    texts.push(args.negative.clone());
    let tokens = encoders.tokens(&texts)?;
    let choice = args.device.choice();
    let device = choice.open()?;
    let (kind, dtype) = match choice.precision(&*device) {
        Precision::Bf16 => (Kind::BFloat16, ExportDtype::Bf16),
        _ => (Kind::Float, ExportDtype::Fp32),
    };
    let shape = encoders.shape(count);
    let mut file =
        TextEmbeddingsWriter::create(&args.out, shape, dtype).map_err(anyroll_models::Error::from)?;
    let encoders = encoders.load(kind, torch_device(&*device)?)?;
    for first in (0..count).step_by(args.batch_size as usize) {
        let rows = first..count.min(first + args.batch_size as usize);
        let (states, pooled) = encoders.encode(&tokens, rows.clone())?;
        file.add(&states, pooled.as_ref())?;
        tracing::info!("{} of {count} prompts", rows.end);
    }
    let (states, pooled) = encoders.encode(&tokens, count..count + 1)?;
    file.finish(&states, pooled.as_ref())?;
    print(format_args!("{count} prompts of {} tokens each are in {}\n", shape.tokens, args.out.display()))?;
    Ok(0)
}

/// The prompts of a file.
fn prompts(path: &Path) -> Result<Vec<String>> {
    if path.extension().is_some_and(|extension| extension == "txt") {
        return lines(path)?.map(|line| Ok(line?.1)).collect();
    }
    Ok(read_records(path)?.into_iter().map(|record| record.prompt).collect())
}
