//! `anyroll export-wandb`: a run's metrics and config for Weights & Biases, written by its own package.

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyroll_pipelines::{
    Error, Result,
    metrics::{Record, read_metrics},
    run_dir::RunDir,
};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

use super::stdout::print;

/// The script that runs in the user's Python.
const SCRIPT: &str = include_str!("export_wandb.py");

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
    python: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Offline,
    Online,
}

pub(super) fn run(args: &ExportWandbArgs) -> Result<u8> {
    let dir = RunDir::open(&args.run)?;
    let config = config(&dir)?;
    let records = read_metrics(&dir.metrics())?;
    let whole = dir.path().canonicalize().unwrap_or_else(|_| dir.path().to_owned());
    let folder = whole.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let steps: Vec<(u64, Map<String, Value>)> = records.iter().map(step).collect();
    let asked = json!({
        "project": args.project,
        "entity": args.entity,
        "name": config["name"],
        "id": folder.chars().map(|it| if it.is_ascii_alphanumeric() { it } else { '-' }).collect::<String>(),
        "mode": if args.mode == Mode::Offline { "offline" } else { "online" },
        "dir": whole,
        "config": config,
        "steps": steps,
    });
    write(args, &asked)?;
    print(format_args!("{} steps of {}\n", records.len(), args.run.display()))?;
    if args.mode == Mode::Offline {
        print(format_args!("send them with: wandb sync {}/wandb/offline-run-*\n", args.run.display()))?;
    }
    Ok(0)
}

/// The run's resolved config. It is not validated, since its data may be gone.
fn config(dir: &RunDir) -> Result<Value> {
    let path = dir.resolved();
    let broken = |problem: String| Error::Resume { run: path.clone(), problem };
    let text = fs::read_to_string(&path).map_err(|error| broken(error.to_string()))?;
    serde_saphyr::from_str(&text).map_err(|error| broken(error.to_string()))
}

/// Metrics of a step; a number that is not finite becomes null.
fn step(record: &Record) -> (u64, Map<String, Value>) {
    (record.step, record.metrics.iter().map(|(name, value)| (name.to_owned(), json!(value))).collect())
}

fn write(args: &ExportWandbArgs, asked: &Value) -> Result<()> {
    let failed = |problem: String| Error::Wandb { python: args.python.clone(), problem };
    let child = Command::new(&args.python).args(["-c", SCRIPT]).stdin(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| failed(format!("it does not start: {error}")))?;
    // If it ends early, the pipe breaks and its own message says why.
    let mut stdin = child.stdin.take().expect("it is piped");
    let _ = stdin.write_all(asked.to_string().as_bytes());
    drop(stdin);
    let status = child.wait().map_err(|error| failed(error.to_string()))?;
    if status.success() {
        Ok(())
    } else {
        Err(failed(format!("it ended with {status}; its output is above")))
    }
}
