//! The command line, one file per command.

mod bench;
mod check;
mod columns;
mod conformance;
mod doctor;
mod embed;
mod evaluate;
mod export;
mod export_wandb;
mod generate;
mod hosts;
mod import;
mod init;
mod lines;
mod model_args;
mod plan;
mod prompt_lines;
mod quickstart;
mod restarts;
mod reward;
mod rollout;
mod run;
mod schema;
mod score;
mod serve;
mod stdout;
mod strategy_files;
mod trial;
mod upload;
mod version;
mod watch;

use std::{
    env,
    io::{self, IsTerminal},
    path::PathBuf,
};

use crate::serve::{TRY_FORMATS, answer_trials};
use anyroll_config::{self as config, error_chain::one_line};
use anyroll_pipelines::{
    Error,
    hub::Hub,
    launch::{self, FailureKind, Rank},
    run::{BackendFacts, Machine},
};
use clap::{Args, Parser, Subcommand};
use hosts::HostArgs;
use strategy_files::StrategyFiles;
use tracing_subscriber::EnvFilter;

/// Reinforcement-learning post-training on any accelerator.
#[derive(Debug, Parser)]
#[command(name = "anyroll", bin_name = "anyroll", version, long_version = version::long(), after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  anyroll quickstart                                         train a tiny model for some seconds; needs no file
  anyroll init --model DIR --data train.jsonl                write a config for a model and data; asks for the rest
  anyroll run configs/rlvr_sort_cpu.yaml                     train; everything lands in runs/<name>-<time>/
  anyroll run configs/rlvr_sort_cpu.yaml --set seed=1 --set pipeline.rlvr.steps=50
  anyroll run --resume runs/rlvr_sort_cpu-20260101-120000    resume from the last checkpoint, bitwise
  anyroll rollout CONFIG --trainer HOST                      sample on this host's devices for a run on another
  anyroll watch runs                                         a live page of these runs, at http://127.0.0.1:8088/
  anyroll check configs/rlvr_sort_cpu_2ranks.yaml            print the resolved config, without running it
  anyroll plan configs/rlvr_sort_cpu.yaml --memory 80GiB --world 4
                                                             memory of a rank at every stage, and what fits
  anyroll doctor                                             available backends, and why others are not
  anyroll doctor --test                                      does this installation train?
  anyroll doctor --bench                                     copies, products and collectives vs. the limit
  anyroll generate runs/rlvr_sort_cpu-20260101-120000 --prompt '314159>' --temperature 0
                                                             complete a prompt with a trained model
  anyroll evaluate DIR --data test.jsonl --reward math       pass@k of a model before or after training
  anyroll score DIR --file texts.jsonl                       log-probs of given texts
  anyroll embed DIR --file prompts.jsonl --out prompts.safetensors
                                                             embeddings by a diffusers folder's text encoders
  anyroll serve DIR --port 8000                              a model behind OpenAI's interface
  anyroll reward math --file cases.jsonl                     try a reward on completions and their answers
  anyroll import deepspeed.json                              translate another system's config, key by key
  anyroll export runs/rlvr_sort_cpu-20260101-120000 --to DIR trained weights as a folder that transformers loads
  anyroll export-wandb runs/rlvr_sort_cpu-20260101-120000    metrics for Weights & Biases, offline
  anyroll upload runs/rlvr_sort_cpu-20260101-120000          the rest of a run for the trackers of its config
  anyroll conformance --backend cpu                          check memory, streams and collectives on 1 to 4 ranks
  torchrun --no-python --nproc-per-node 2 anyroll run configs/rlvr_sort_cpu_2ranks.yaml
                                                             any launcher that sets RANK and WORLD_SIZE will do";

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model from a config
    Run(RunArgs),
    /// Sample on this host for a run on other hosts
    Rollout(rollout::RolloutArgs),
    /// Write the first config, quickstart.yaml, and train with it
    Quickstart(quickstart::QuickstartArgs),
    /// Write a commented config for a model and data
    Init(init::InitArgs),
    /// Validate a config and print its resolved form
    Check(check::CheckArgs),
    /// Print the JSON Schema of configs, for editors
    Schema,
    /// Plan a run's memory for every stage and offload, and show which fit; needs no device
    Plan(plan::PlanArgs),
    /// Check on this machine that a backend fulfils its contract
    Conformance(conformance::ConformanceArgs),
    /// Complete prompts with a trained or a published model
    Generate(generate::GenerateArgs),
    /// Measure a model's accuracy on records with a reward
    Evaluate(evaluate::EvaluateArgs),
    /// Print the log-probs of given texts
    Score(score::ScoreArgs),
    /// Encode prompts with a published model's text encoders, to train the model on them
    Embed(embed::EmbedArgs),
    /// Answer completion and chat requests over HTTP
    Serve(serve::ServeArgs),
    /// Try formats for `serve`, in a process that it ends
    #[command(name = TRY_FORMATS, hide = true)]
    TryFormats,
    /// Show runs on a live page, with curves, completions and the log
    Watch(watch::WatchArgs),
    /// Score completions from a file with a reward, before training with it
    Reward(reward::RewardArgs),
    /// Turn a config of ROLL, verl, accelerate, DeepSpeed, TRL, OpenRLHF or trlx into ours
    Import(import::ImportArgs),
    /// Write a run's model as a folder that transformers loads
    Export(export::ExportArgs),
    /// Write a run's metrics for Weights & Biases
    ExportWandb(export_wandb::ExportWandbArgs),
    /// Send the rest of a run to the trackers that its config names
    Upload(upload::UploadArgs),
    /// List every backend with its devices, or the reason why it is unavailable; or test the installation
    Doctor(DoctorArgs),
}

/// A config with overrides.
#[derive(Debug, Args)]
struct ConfigArgs {
    /// The YAML file
    config: PathBuf,
    /// Change a field, as in `--set pipeline.rlvr.steps=50`; repeatable
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    sets: Vec<String>,
    #[command(flatten)]
    strategy: StrategyFiles,
    #[command(flatten)]
    download: DownloadArg,
}

/// Permission to download what a config names.
#[derive(Clone, Copy, Debug, Args)]
struct DownloadArg {
    /// Download models and data sets that the config names and that are not in the hub's cache, with Hugging Face's
    /// program `hf`
    #[arg(long)]
    download: bool,
}

impl DownloadArg {
    fn hub(self) -> Hub {
        Hub::of_environment(self.download)
    }
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The YAML file
    #[arg(required_unless_present = "resume", conflicts_with = "resume")]
    config: Option<PathBuf>,
    /// Change a field, as in `--set pipeline.rlvr.steps=50`; repeatable
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    sets: Vec<String>,
    #[command(flatten)]
    strategy: StrategyFiles,
    /// The run folder itself [default: runs/NAME-TIME]
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    output: Option<PathBuf>,
    /// Resume the run in this folder from its last checkpoint
    #[arg(long, value_name = "DIR", conflicts_with_all = ["accelerate_config", "deepspeed_config"])]
    resume: Option<PathBuf>,
    /// Continue the run in `--output` if it has begun, and begin it if not; for launchers that start a job again
    #[arg(long, requires = "output")]
    auto_resume: bool,
    /// Start the ranks again after a failure, from the newest checkpoint, at most so many times
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,
    #[command(flatten)]
    hosts: HostArgs,
    /// Print a completion of training now and then
    #[arg(long)]
    show: bool,
    /// Record so many steps as a timeline in the run's folder `profile`, after two that warm up
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    profile: u64,
    #[command(flatten)]
    download: DownloadArg,
}

#[derive(Debug, Args)]
struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Test the installation instead: train a tiny model for some steps in a folder that is then deleted
    #[arg(long, group = "measure", conflicts_with = "json")]
    test: bool,
    /// Benchmark the devices instead: copies, matrix products and collectives, compared with the hardware's
    /// limit
    #[arg(long, group = "measure")]
    bench: bool,
    /// The backend to test or benchmark [default: the first available]
    #[arg(long, requires = "measure")]
    backend: Option<anyroll_backends::BackendKind>,
}

/// Folders that are searched for vendors' libraries first, separated as in `PATH`.
const LIBRARIES: &str = "ANYROLL_LIBRARIES";

/// Runs the command of the arguments and returns the exit code: 0 on success, 130 after an interrupt, 1 after
/// an error, which has been reported.
pub fn main() -> u8 {
    let folders = env::var_os(LIBRARIES).unwrap_or_default();
    env::split_paths(&folders).for_each(anyroll_backends::prefer_folder);
    if let Some(folder) = cache_folder() {
        anyroll_backends::cache_kernels_in(folder);
    }
    let command = Cli::parse().command;
    // A process that may be one of several ranks sets up its log itself.
    if !matches!(command, Command::Run(_) | Command::Rollout(_) | Command::Conformance(_)) {
        log_to(io::stderr);
    }
    let is_run = matches!(command, Command::Run(_));
    let outcome = match command {
        Command::Run(args) => run::run(&args),
        Command::Rollout(args) => rollout::rollout(&args),
        Command::Init(args) => init::init(&args),
        Command::Check(args) => check::check(&args),
        Command::Schema => schema::schema(),
        Command::Plan(args) => plan::plan(&args),
        Command::Conformance(args) => conformance::conformance(&args),
        Command::Generate(args) => generate::generate(&args),
        Command::Evaluate(args) => evaluate::evaluate(&args),
        Command::Score(args) => score::score(&args),
        Command::Embed(args) => embed::embed(&args),
        Command::Serve(args) => serve::serve(&args),
        Command::TryFormats => answer_trials().map(|()| 0).map_err(Error::Serve),
        Command::Watch(args) => watch::run(&args),
        Command::Reward(args) => reward::reward(&args),
        Command::Quickstart(args) => quickstart::quickstart(&args),
        Command::Doctor(args) if args.test => trial::test(args.backend),
        Command::Doctor(args) if args.bench => bench::bench(args.backend, args.json),
        Command::Import(args) => import::run(&args),
        Command::Export(args) => export::run(&args),
        Command::ExportWandb(args) => export_wandb::run(&args),
        Command::Upload(args) => upload::run(&args),
        Command::Doctor(args) => doctor::doctor(args.json),
    };
    outcome.unwrap_or_else(|error| {
        tell(&error, is_run);
        1
    })
}

/// Logs warnings, or the level of `ANYROLL_LOG`, to `writer`: a level such as `info`, or one per crate.
fn log_to<W: io::Write>(writer: impl Fn() -> W + Send + Sync + 'static) {
    let filter = EnvFilter::try_from_env("ANYROLL_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .init();
}

/// Folder of files that can be rebuilt: `ANYROLL_CACHE`, or the user's cache folder.
fn cache_folder() -> Option<PathBuf> {
    let named = |variable: &str| env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("ANYROLL_CACHE").or_else(|| {
        let all = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
        Some(all?.join("anyroll"))
    })
}

/// Reports a failure to the parent that started this rank, or to the user.
fn tell(error: &Error, is_run: bool) {
    let kind = if error.is_from_peer() { FailureKind::Peer } else { FailureKind::Own };
    let mut reason = one_line(error);
    if let Some(help) = error.help(&reason).filter(|_| is_run) {
        reason = format!("{reason}\n  help: {help}");
    }
    let reported = launch::is_launched() && launch::report_failure(&reason, kind).is_ok();
    match error {
        _ if reported => {}
        Error::Config(config::Error::Invalid(problems)) => {
            problems.iter().for_each(|problem| eprintln!("error: {problem}"));
        }
        _ => eprintln!("error: {reason}"),
    }
}

/// Facts of this machine that a config depends on.
fn machine(rank: Option<Rank>) -> Machine {
    let backends = anyroll_backends::BackendKind::all().map(|kind| {
        // A backend that runs no models is refused by name in any case, so its devices are not queried.
        let found = if kind.runs_models() { anyroll_backends::devices(kind) } else { Ok(Vec::new()) };
        BackendFacts {
            name: kind.name().to_owned(),
            runs_models: kind.runs_models(),
            adds_by_rows: kind.adds_by_rows(),
            devices: if kind.is_host() { None } else { Some(found.as_ref().map_or(0, Vec::len)) },
            memory_bytes: found
                .as_ref()
                .ok()
                .and_then(|found| found.iter().map(|it| it.total_bytes).min()?),
            unavailable: found.err().map(|error| one_line(&error)),
        }
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Machine { cores, backends: backends.collect(), rank, hosts: 1 }
}
