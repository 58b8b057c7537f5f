//! `anyroll embed`: embeddings of prompts by a published model's text encoders, for training the model on
//! them.

use std::path::PathBuf;

use anyroll_config::Precision;
use anyroll_pipelines::{
    Result,
    diffusion::{EncoderOptions, PromptEncoders, PromptTexts, Prompts, read_records},
    train::torch_device,
};
use clap::Args;
use tch::Kind;

use super::{model_args::DeviceArgs, stdout::print};

#[derive(Debug, Args)]
pub(super) struct EmbedArgs {
    /// The folder of a Stable Diffusion 3 or Wan model as diffusers publishes it, with its text encoders and
    /// tokenizers
    model: PathBuf,
    /// The prompts: lines of {"prompt": ...}, which may be the `records` of training, or a .txt with one
    /// prompt per line; `prompt_2` and `prompt_3` replace the prompt for the second and the third encoder
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// The new safetensors file, for `embeddings`
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The negative prompt of guidance
    #[arg(long, value_name = "TEXT", default_value = "")]
    negative: String,
    /// The negative prompt of the second encoder [default: the same]
    #[arg(long, value_name = "TEXT")]
    negative_2: Option<String>,
    /// The negative prompt of the third encoder [default: the same]
    #[arg(long, value_name = "TEXT")]
    negative_3: Option<String>,
    /// Tokens of a prompt that the T5 reads [default: 256 for Stable Diffusion 3, 512 for Wan]
    #[arg(long, value_name = "TOKENS")]
    max_sequence_length: Option<usize>,
    /// Last layers of each CLIP to skip
    #[arg(long, value_name = "LAYERS", default_value_t = 0)]
    clip_skip: usize,
    /// Variant of the weights to read where a folder has it, such as fp16 of model.fp16.safetensors [default:
    /// the plain files]
    #[arg(long, value_name = "NAME")]
    variant: Option<String>,
    /// Prompts encoded together
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    #[command(flatten)]
    device: DeviceArgs,
}

pub(super) fn embed(args: &EmbedArgs) -> Result<u8> {
    let records = read_records(&args.file)?;
    if records.is_empty() {
        let problem = format!("{} has no prompt", args.file.display());
        return Err(anyroll_models::Error::Input { what: "--file", problem }.into());
    }
    let options = EncoderOptions {
        variant: args.variant.as_deref(),
        max_sequence_length: args.max_sequence_length,
        clip_skip: args.clip_skip,
    };
    let encoders = PromptEncoders::open(&args.model, options)?;
    let negative = PromptTexts::new(&args.negative, args.negative_2.as_deref(), args.negative_3.as_deref());
    let prompts = Prompts::new(&records, negative, args.batch_size as usize);
    let choice = args.device.choice();
    let device = choice.open()?;
    let kind = match choice.precision(&*device) {
        Precision::Bf16 => Kind::BFloat16,
        _ => Kind::Float,
    };
    let mut tell = |done: usize, of: usize| {
        tracing::info!("{done} of {of} texts");
        Ok(true)
    };
    prompts.write(&encoders, (kind, torch_device(&*device)?), &args.out, &mut tell)?;
    let (count, tokens) = (prompts.rows(), encoders.shape(0).tokens);
    print(format_args!("{count} prompts of {tokens} tokens each are in {}\n", args.out.display()))?;
    Ok(0)
}
