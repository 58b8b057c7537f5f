//! `anyroll evaluate`: accuracy of a model on records, with confidence intervals.

mod files;
mod table;

use std::{
    cell::Cell,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyroll_pipelines::{
    Result,
    evaluation::{Asked, Exam, Place, Summary},
    loaded::Options,
};
use clap::{Args, builder::NonEmptyStringValueParser};
use serde_json::{Map, json};

use super::{
    columns::Columns,
    model_args::{CapacityArgs, ModelArgs, at_least_one},
    stdout::print,
};

#[derive(Debug, Args)]
pub(super) struct EvaluateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Records as a config's `data.file.path` takes them; repeatable [default: the held-out records of the run]
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,
    /// Columns of the records: `prompt=question,answer=gold`, or roll, verl, trl or openrlhf
    #[arg(long, value_name = "PART=NAME,...", value_parser = Columns::of_prompts, requires = "data")]
    columns: Option<Columns>,
    /// Evaluate only this percentage of the prompts, those that a run with this `held_out_percent` holds out
    #[arg(long, value_name = "PERCENT", requires = "data")]
    held_out_percent: Option<u32>,
    /// The reward as a config's `reward` has it: `math`, or YAML such as `[{math: {tolerance: 0.001}}]` [default: that of
    /// the run]
    #[arg(long, value_name = "REWARD")]
    reward: Option<String>,
    /// Evaluate this many prompts, in the order of a run's evaluation [default: all, or as many as the run]
    #[arg(long, value_parser = at_least_one)]
    prompts: Option<usize>,
    /// Completions per prompt, in addition to the greedy one [default: 4, or as the run]
    #[arg(long)]
    samples: Option<usize>,
    /// Divides the logits of the samples [default: 1, or as the run]
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Sample from the likeliest tokens that together reach this probability only [default: 1, or as the run]
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// The most tokens of a completion [default: 256 or as many as fit, or as the run]
    #[arg(long, value_parser = at_least_one)]
    max_new_tokens: Option<usize>,
    /// Text that ends a completion; repeatable, in addition to those of the run
    #[arg(long = "stop", value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stops: Vec<String>,
    /// Seed of the samples [default: 0, or as the run]
    #[arg(long)]
    seed: Option<u64>,
    /// Use the model's chat template, with a prompt as the user's message; without it, a run's model is
    /// prompted as in the run
    #[arg(long)]
    chat: bool,
    /// The system message of `--chat`
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Completions that are scored at a time [default: 4, or as the run]
    #[arg(long, value_parser = at_least_one)]
    workers: Option<usize>,
    /// Right and wrong completions to print
    #[arg(long, default_value_t = 2)]
    examples: usize,
    /// Write the numbers to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write every completion to this file as a line of JSON, which `anyroll reward --file` reads
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    capacity: CapacityArgs,
}

pub(super) fn evaluate(args: &EvaluateArgs) -> Result<u8> {
    let exam = Exam::prepare(args.model.path(), &asked(args))?;
    let (chat, system_prompt) = (args.chat, args.system.clone());
    let mut model = args.model.load(Options { chat, system_prompt, ..Options::default() })?;
    let max_new_tokens = exam.tokens_of(&model)?;
    let place = Place { sequences: args.capacity.sequences, memory: args.capacity.memory };
    let (all, ended, told) = (exam.completions(), Cell::new(0), Cell::new(Instant::now()));
    let progress = |count| {
        ended.set(ended.get() + count);
        if told.get().elapsed() >= PROGRESS_INTERVAL {
            told.set(Instant::now());
            eprintln!("{} of {all} completions", ended.get());
        }
    };
    let prompts = exam.take(&mut model, place, &progress)?;
    let summary = Summary::new(&prompts, exam.samples, exam.seed);
    let facts = json!({
        "model": args.model.path(),
        "step": model.version(),
        "reward": exam.terms(),
        "samples": exam.samples,
        "temperature": exam.how.temperature,
        "top_p": exam.how.top_p,
        "max_new_tokens": max_new_tokens,
        "seed": exam.seed,
    });
    if let Some(path) = &args.output {
        files::write_completions(path, &prompts, &exam.terms())?;
    }
    if let Some(path) = &args.json {
        files::write_numbers(path, &facts, &summary)?;
    }
    print(table::table(&facts, &summary))?;
    print(table::examples(&prompts, args.examples))?;
    Ok(0)
}

/// Least time between two lines about the progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The wishes of the arguments.
fn asked(args: &EvaluateArgs) -> Asked {
    let mut inputs = Map::new();
    if !args.data.is_empty() {
        let mut file = Map::from_iter([("path".to_owned(), json!(args.data))]);
        if let Some(Columns(columns)) = &args.columns {
            file.insert("columns".to_owned(), json!(columns));
        }
        if let Some(percent) = args.held_out_percent {
            file.insert("held_out_percent".to_owned(), json!(percent));
        }
        inputs.insert("data".to_owned(), json!({ "file": file }));
    }
    // JSON is YAML; the reward is YAML already, which may have several lines.
    let mut text: String = inputs.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
    for (name, value) in [("temperature", args.temperature), ("top_p", args.top_p)] {
        text.extend(value.map(|value| format!("{name}: {value:?}\n")));
    }
    let reward = args.reward.as_ref().map(|reward| match reward.trim_end().contains('\n') {
        false => format!("reward: {reward}\n"),
        true => format!("reward:\n{reward}\n"),
    });
    text.extend(reward);
    Asked {
        inputs: if text.is_empty() { "{}".to_owned() } else { text },
        prompts: args.prompts,
        samples: args.samples,
        max_new_tokens: args.max_new_tokens,
        stop: args.stops.clone(),
        seed: args.seed,
        workers: args.workers,
    }
}
