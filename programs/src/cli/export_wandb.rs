//! `anyroll export-wandb`: a run's metrics, samples and config for Weights & Biases, written by its own package.

use std::path::PathBuf;

use anyroll_config::{WandbConfig, WandbMode};
use anyroll_pipelines::{Result, metrics::read_metrics, run_dir::RunDir, trackers::export_wandb};
use clap::{Args, ValueEnum};

use super::stdout::print;

#[derive(Debug, Args)]
pub(super) struct ExportWandbArgs {
    /// A run folder
    run: PathBuf,
    /// The project to write to
    #[arg(long, default_value = "anyroll")]
    project: String,
    /// The user or team that owns the project [default: wandb's own]
    #[arg(long)]
    entity: Option<String>,
    /// `offline` writes RUN/wandb, for `wandb sync`; `online` uploads at once
    #[arg(long, value_enum, default_value = "offline")]
    mode: Mode,
    /// A Python with the package wandb
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Offline,
    Online,
}

pub(super) fn run(args: &ExportWandbArgs) -> Result<u8> {
    let dir = RunDir::open(&args.run)?;
    let steps = read_metrics(&dir.metrics())?.len();
    let mode = match args.mode {
        Mode::Offline => WandbMode::Offline,
        Mode::Online => WandbMode::Online,
    };
    let fields = WandbConfig {
        project: args.project.clone(),
        entity: args.entity.clone(),
        name: None,
        group: None,
        tags: Vec::new(),
        mode: Some(mode),
    };
    let told = export_wandb(&dir, &args.python, &fields)?;
    print(format_args!("{steps} steps of {}\n", args.run.display()))?;
    for line in told {
        print(format_args!("{line}\n"))?;
    }
    Ok(0)
}
