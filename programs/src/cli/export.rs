//! `anyroll export`: a run's model as a folder that `transformers` loads.

use std::path::PathBuf;

use anyroll_models::hf::ExportDtype;
use anyroll_pipelines::{
    Result,
    export::{ExportOptions, export},
    run_dir::RunDir,
};
use clap::{Args, ValueEnum};

use super::stdout::print;

#[derive(Debug, Args)]
pub(super) struct ExportArgs {
    /// A run folder, for its last checkpoint, or one checkpoint: runs/NAME/checkpoints/step_000100,
    /// runs/NAME/best
    run: PathBuf,
    /// The new folder
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Dtype of the written weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Dtype,
    /// Write only the adapters of a LoRA run, as PEFT loads them (diffusers for an image model), instead of
    /// merging them
    #[arg(long)]
    adapter: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    Bf16,
    Fp16,
    Fp32,
}

pub(super) fn run(args: &ExportArgs) -> Result<u8> {
    let dtype = match args.dtype {
        Dtype::Bf16 => ExportDtype::Bf16,
        Dtype::Fp16 => ExportDtype::Fp16,
        Dtype::Fp32 => ExportDtype::Fp32,
    };
    let (run, checkpoint) = RunDir::and_checkpoint(&args.run);
    let options = ExportOptions { dtype, adapter: args.adapter };
    let checkpoint = export(&run, checkpoint.as_deref(), &args.to, options)?;
    print(format_args!("{} is in {}\n", checkpoint.display(), args.to.display()))?;
    Ok(0)
}
