//! `anyroll init`: writes a commented config for a model and data, with numbers for the model's size.
//!
//! `questions.rs` asks for what no option gives, `facts.rs` reads the model and the data, `method.rs` has the numbers of
//! each method with their sources, and `text.rs` the config. Whatever is written has passed `anyroll check`.

mod facts;
mod method;
mod questions;
mod text;

use std::path::{Path, PathBuf};

use anyroll_backends::BackendKind;
use anyroll_config::{Error as ConfigError, error_chain::one_line};
use anyroll_pipelines::{
    Error, Result,
    atomic_file::write_atomic,
    prepare::{Draft, Purpose, read_reward},
    run::{BackendFacts, Machine},
};
use clap::Args;

use super::{
    DownloadArg, columns::Columns, machine, model_args::at_least_one, schema::SCHEMA, stdout::print,
};
use facts::{DataFacts, ModelFacts};
use method::Method;
use questions::Questions;
use text::{Answers, MicroBatch};

/// Name of the schema's file, beside the config.
const SCHEMA_FILE: &str = "anyroll.schema.json";

#[derive(Debug, Args)]
pub(super) struct InitArgs {
    /// The config to write [default: METHOD.yaml]
    file: Option<PathBuf>,
    /// The model's folder, or its name on the hub
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Records as a config's `data.file.path` takes them
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Columns of the records, as in a config's `columns`: `prompt=question,answer=gold` [default: recognized by their
    /// names]
    #[arg(long, value_name = "PART=NAME,...")]
    columns: Option<Columns>,
    /// The training method [default: recognized by the columns]
    #[arg(long, value_enum)]
    method: Option<Method>,
    /// The reward of grpo and rloo, as a config's `reward` has it [default: math if all answers have digits, else exact]
    #[arg(long, value_name = "REWARD")]
    reward: Option<String>,
    /// The backend to train on [default: the first available]
    #[arg(long)]
    backend: Option<BackendKind>,
    /// Number of devices, one for each rank [default: all; 1 on the cpu]
    #[arg(long, value_parser = at_least_one)]
    devices: Option<usize>,
    /// Take the defaults of all questions that no option answers
    #[arg(long)]
    yes: bool,
    /// Overwrite an existing file
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    download: DownloadArg,
}

pub(super) fn init(args: &InitArgs) -> Result<u8> {
    let questions = Questions { takes_defaults: args.yes };
    let machine = machine(None);
    questions.need(&[
        ("--model", args.model.is_some(), false),
        ("--data", args.data.is_some(), false),
        ("--method", args.method.is_some(), true),
        ("--backend", args.backend.is_some(), true),
    ])?;
    let hub = args.download.hub();
    let read_model = |path: &Path| ModelFacts::read(path, &hub);
    let (model, model_facts) =
        questions.opened(&args.model, "model, a folder or a name on the hub", read_model)?;
    let read_data = |path: &Path| DataFacts::read(path, &hub);
    let (data, facts) = questions.opened(&args.data, "data, a file of records", read_data)?;
    let guess = Method::of_columns(&facts);
    let method = questions.answer(&args.method, &Method::question(), Some(guess), Method::read)?;
    let columns = facts.columns_for(method, args.columns.as_ref())?;
    let reward = match (method.has_reward(), &args.reward) {
        (false, Some(_)) => return Err(refused("--reward", format!("`{method}` has none: leave it out"))),
        (false, None) => None,
        (true, given) => {
            let usual = facts.usual_reward(&columns).to_owned();
            let question = "reward, such as math, exact, choice, code or ifeval";
            Some(questions.answer(given, question, Some(usual), reward)?)
        }
    };
    let backend = questions.answer(&args.backend, "backend", first_usable(&machine), |name| {
        let found = BackendKind::all().find(|kind| kind.name() == name);
        found.ok_or_else(|| format!("there is no backend `{name}`"))
    })?;
    let here = machine.backends.iter().find(|it| it.name == backend.name());
    let all = here.and_then(|it| it.devices).filter(|count| *count > 0).unwrap_or(1);
    let devices = questions.answer(&args.devices, "devices, one for each rank", Some(all), at_least_one)?;
    let usual_file = PathBuf::from(format!("{method}.yaml"));
    let file = match questions.takes_defaults || args.file.is_some() || !questions.has_terminal() {
        true => args.file.clone().unwrap_or(usual_file),
        false => {
            let usual = usual_file.display().to_string();
            let usual = free(&usual, args.force).is_ok().then_some(usual);
            questions.answer(&None, "file to write", usual, |text| free(text, args.force))?.into()
        }
    };
    free(&file.display().to_string(), args.force).map_err(|problem| refused("FILE", problem))?;
    let answers = Answers {
        model: in_config(&model, &file),
        data: in_config(&data, &file),
        file: &file,
        model_facts: &model_facts,
        data_facts: &facts,
        columns,
        method,
        reward,
        is_host: backend.is_host(),
        backend: backend.name(),
        devices,
    };
    let (text, checked) = settle(&answers, &machine, here, args)?;
    write_atomic(&file, text.as_bytes())?;
    let schema = file.with_file_name(SCHEMA_FILE);
    write_atomic(&schema, SCHEMA.as_bytes())?;
    print(format_args!(
        "{} trains {} by {method} on {}: {}\n{checked}\nNext:\n  anyroll check {}\n  anyroll run {}\n",
        file.display(),
        model.display(),
        data.display(),
        answers.columns,
        file.display(),
        file.display(),
    ))?;
    Ok(0)
}

/// Sizes of a micro-batch, the largest first.
const MICRO_BATCHES: [usize; 7] = [64, 32, 16, 8, 4, 2, 1];

/// The text of the config, after a check, and a sentence on it. Where memory is known, the micro-batch is the largest
/// that fits, and everything is recomputed only if none fits else.
fn settle(
    answers: &Answers,
    machine: &Machine,
    here: Option<&BackendFacts>,
    args: &InitArgs,
) -> Result<(String, String)> {
    let is_known = here.is_some_and(|it| it.unavailable.is_none() && it.memory_bytes.is_some());
    let by_size = answers.micro_batch_by_size();
    let sizes: Vec<usize> = match is_known && answers.method.is_planned() && !answers.is_host {
        true => {
            MICRO_BATCHES.into_iter().filter(|size| *size <= answers.sequences_per_rank().max(1)).collect()
        }
        false => vec![by_size],
    };
    let mut last = None;
    for recomputes in [false, true] {
        for &size in &sizes {
            let micro_batch = MicroBatch { size, recomputes, is_planned: sizes.len() > 1 };
            let text = answers.text(micro_batch);
            let draft = Draft::parse(answers.file, text.clone(), &[])?.with_hub(args.download.hub());
            match draft.prepare(machine, Purpose::CheckWithoutCode) {
                Ok(_) if here.is_some_and(|it| it.unavailable.is_some()) => {
                    let told =
                        format!("`{}` is not on this machine: its memory was not checked", answers.backend);
                    return Ok((text, told));
                }
                Ok(_) => return Ok((text, "It passes `anyroll check`.".to_owned())),
                Err(error) if is_of_memory(&error) => last = Some(error),
                Err(error) => return Err(of_text(&error)),
            }
        }
    }
    Err(of_text(&last.expect("a size was tried")))
}

/// Returns true if no strategy fits the devices.
fn is_of_memory(error: &ConfigError) -> bool {
    let ConfigError::Invalid(problems) = error else { return false };
    problems.iter().all(|problem| problem.message.starts_with("no stage fits"))
}

/// The problem of a config that is not written.
fn of_text(error: &ConfigError) -> Error {
    refused("anyroll init", format!("the config would not run, and is not written: {}", one_line(error)))
}

/// The first backend that runs models here.
fn first_usable(machine: &Machine) -> Option<BackendKind> {
    let usable = machine.backends.iter().find(|it| it.runs_models && it.unavailable.is_none());
    usable.and_then(|it| BackendKind::all().find(|kind| kind.name() == it.name))
}

/// A reward of this name, or any other text: the check of the whole config reads it.
fn reward(text: &str) -> std::result::Result<String, String> {
    if text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        read_reward(text, &[]).map_err(|error| one_line(&error))?;
    }
    Ok(text.to_owned())
}

/// The name of a file to write.
fn free(file: &str, force: bool) -> std::result::Result<String, String> {
    match Path::new(file).exists() {
        _ if file.is_empty() => Err("write the file's name".to_owned()),
        true if !force => Err(format!("{file} exists: name another file, or pass `--force`")),
        _ => Ok(file.to_owned()),
    }
}

/// A path as the config in `file` names it: unchanged beside the shell, and whole elsewhere.
fn in_config(path: &Path, file: &Path) -> String {
    let is_beside = file.parent().is_none_or(|folder| folder.as_os_str().is_empty());
    let folder = path.parent().unwrap_or(path);
    match is_beside || !(path.exists() || folder.is_dir()) {
        true => path.display().to_string(),
        false => std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string(),
    }
}

fn refused(what: &'static str, problem: String) -> Error {
    anyroll_models::Error::Input { what, problem }.into()
}
