//! Keys from a training command in a shell script: OpenRLHF's flags, verl's overrides.

use std::{mem, path::Path};

use serde_json::{Map, Value};

use super::{
    Origin,
    shell::{self, Variables},
    values,
};

type Keys = Map<String, Value>;

/// A training program that is configured by its command.
#[derive(Debug)]
pub(super) struct Program {
    /// System that the program belongs to.
    pub(super) origin: Origin,
    /// Names of the program. Others of the system have different trainers with the same arguments.
    names: &'static [&'static str],
    keys: fn(Vec<String>) -> Result<Keys, String>,
}

/// Prefixes of the programs' names.
const PACKAGES: [&str; 3] = ["openrlhf.cli.", "verl.trainer.", "recipe."];

const PROGRAMS: [Program; 8] = [
    Program { origin: Origin::Openrlhf, names: &["openrlhf.cli.train_ppo_ray"], keys: flags },
    Program { origin: Origin::OpenrlhfSft, names: &["openrlhf.cli.train_sft"], keys: flags },
    Program { origin: Origin::OpenrlhfDpo, names: &["openrlhf.cli.train_dpo"], keys: flags },
    Program { origin: Origin::OpenrlhfRm, names: &["openrlhf.cli.train_rm"], keys: flags },
    Program { origin: Origin::OpenrlhfPrm, names: &["openrlhf.cli.train_prm"], keys: flags },
    Program { origin: Origin::OpenrlhfKto, names: &["openrlhf.cli.train_kto"], keys: flags },
    Program {
        origin: Origin::VerlSft,
        names: &["verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer"],
        keys: overrides,
    },
    Program {
        origin: Origin::Verl,
        names: &["verl.trainer.main_ppo", "recipe.dapo.main_dapo"],
        keys: overrides,
    },
];

/// A command that calls a training program.
pub(super) struct Command {
    pub(super) program: &'static Program,
    /// Its arguments as keys.
    pub(super) keys: Keys,
    /// Overrides in the line behind the command, which the shell does not pass to it.
    pub(super) lost: Keys,
}

/// A call of a program of the known systems.
struct Call {
    name: String,
    arguments: Vec<String>,
    /// Words of the next command, if these look like overrides.
    behind: Vec<String>,
}

impl Command {
    /// The only command in the file that calls a known program, or that of `origin`. `None` if the file, with
    /// `text`, is a YAML or JSON.
    pub(super) fn of(path: &Path, text: &str, origin: Option<Origin>) -> Result<Option<Self>, String> {
        let is_script = text.starts_with("#!") || path.extension().is_some_and(|end| end == "sh");
        // verl's YAML names its classes.
        if text.lines().any(|line| line.starts_with("actor_rollout_ref:")) {
            return Ok(None);
        }
        let wanted: Vec<&'static Program> =
            PROGRAMS.iter().filter(|program| origin.is_none_or(|origin| origin == program.origin)).collect();
        // OpenRLHF has no other configs than commands.
        let must_call = is_script
            || is_named_in(text)
            || origin.is_some_and(|origin| origin != Origin::Verl && !wanted.is_empty());
        if wanted.is_empty() && !is_script {
            return Ok(None);
        }
        let mut calls = match calls(text, &mut Variables::of_shell(path), 0) {
            Ok(calls) => calls,
            Err(problem) if must_call => return Err(problem),
            Err(_) => return Ok(None),
        };
        let others: Vec<String> = calls.iter().map(|call| call.name.clone()).collect();
        let known = |call: &Call| wanted.iter().any(|program| program.names.contains(&call.name.as_str()));
        let Some(first) = calls.iter().find(|call| known(call)).map(|call| call.name.clone()) else {
            return if must_call { Err(no_call(text, &wanted, others.first())) } else { Ok(None) };
        };
        let program =
            wanted.into_iter().find(|program| program.names.contains(&&*first)).expect("just found");
        calls.retain(|call| program.names.contains(&call.name.as_str()));
        match (calls.pop(), calls.len()) {
            (Some(call), 0) => {
                let lost = overrides(call.behind)?;
                Ok(Some(Self { program, keys: (program.keys)(call.arguments)?, lost }))
            }
            (_, more) => Err(format!("it calls `{first}` {} times: keep one of the commands", more + 1)),
        }
    }
}

/// The reason why no command is imported.
fn no_call(text: &str, wanted: &[&Program], other: Option<&String>) -> String {
    let all: Vec<&str> = PROGRAMS.iter().flat_map(|program| program.names).copied().collect();
    let wanted: Vec<&str> = wanted.iter().flat_map(|program| program.names).copied().collect();
    let names = if wanted.is_empty() { all.join("`, `") } else { wanted.join("`, `") };
    if let Some(other) = other {
        return match all.contains(&other.as_str()) {
            true => format!("it calls `{other}`, not `{names}`: leave out --from"),
            false => format!("it calls `{other}`, but only commands of `{}` are imported", all.join("`, `")),
        };
    }
    let Some(path) = called_file(text) else {
        return format!("it has no command that calls `{names}`");
    };
    let stem = path.rsplit('/').next().unwrap_or(&path).trim_end_matches(".py");
    match all.iter().find(|name| name.rsplit('.').next() == Some(stem)) {
        Some(name) => format!("it calls `{path}`, not `-m {name}`: write that if the arguments are the same"),
        None => format!(
            "it is a script that calls `{path}`, but only commands of `{}` are imported",
            all.join("`, `")
        ),
    }
}

/// File that the last call of Python in a script runs.
fn called_file(script: &str) -> Option<String> {
    let commands = shell::commands(script, &mut Variables::default()).ok()?;
    let file = |words: &Vec<String>| {
        let python = words.iter().position(|word| {
            let program = word.rsplit('/').next().unwrap_or(word);
            ["python", "torchrun", "deepspeed", "accelerate"].iter().any(|name| program.starts_with(name))
        })?;
        words[python..].iter().find(|word| word.ends_with(".py")).cloned()
    };
    commands.iter().filter_map(file).next_back()
}

/// Limit of commands within arguments of commands; a script has one or two.
const MOST_NESTED: usize = 16;

/// Calls of the systems' programs in a script, each with its arguments.
fn calls(script: &str, variables: &mut Variables, depth: usize) -> Result<Vec<Call>, String> {
    if depth == MOST_NESTED {
        return Err("its commands in commands are nested too deeply".to_owned());
    }
    let (mut found, mut read): (Vec<Call>, Vec<String>) = (Vec::new(), Vec::new());
    let mut is_behind = false;
    for mut words in shell::commands(script, variables)? {
        if mem::take(&mut is_behind) {
            behind(&words, found.last_mut())?;
        }
        if let Some((place, name)) = called_in(&words) {
            let arguments = words.split_off(place + 1);
            found.push(Call { name, arguments, behind: Vec::new() });
            is_behind = true;
            continue;
        }
        // A variable that `read` fills is usually called later.
        let first = words.iter().find(|word| !shell::is_keyword(word)).map(String::as_str);
        if first == Some("read") {
            read.extend(words.pop().map(|text| text.replace('\n', " ")));
            continue;
        }
        // A command may be an argument of another: `bash -c "python -m ..."`.
        for word in words.iter().filter(|word| is_named_in(word) && *word != script) {
            found.extend(calls(word, variables, depth + 1)?);
        }
    }
    if found.is_empty() {
        for text in read.iter().filter(|text| is_named_in(text)) {
            found.extend(calls(text, variables, depth + 1)?);
        }
    }
    Ok(found)
}

/// Takes the words of the command after a call, if they were meant for the call.
fn behind(words: &[String], call: Option<&mut Call>) -> Result<(), String> {
    // The shell would end the command before this line and train without these flags.
    if words[0].starts_with("--") {
        return Err(format!("a line starts with `{}`: end the line before it with a backslash", words[0]));
    }
    let is_override = |word: &String| word.contains('=') && !shell::is_assignment(word);
    if let Some(call) = call.filter(|_| is_override(&words[0])) {
        call.behind = words.to_vec();
    }
    Ok(())
}

fn is_named_in(text: &str) -> bool {
    ["openrlhf.cli.", "verl.trainer.", "-m recipe."].iter().any(|package| text.contains(package))
}

/// Place and name of the first word that names a program.
fn called_in(words: &[String]) -> Option<(usize, String)> {
    words.iter().enumerate().find_map(|(place, word)| Some((place, called_by(word)?)))
}

/// Program of `openrlhf.cli.train_sft`, or of a path to `openrlhf/cli/train_sft.py`.
fn called_by(word: &str) -> Option<String> {
    let name = match word.strip_suffix(".py") {
        Some(path) => path.replace('/', "."),
        None => word.to_owned(),
    };
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.');
    PACKAGES.iter().find_map(|package| {
        let (before, rest) = name.split_once(package)?;
        let is_called = (before.is_empty() || before.ends_with('.')) && !rest.is_empty() && is_name(rest);
        (is_called && !word.contains('=')).then(|| format!("{package}{rest}"))
    })
}

/// Converts `--a.b 1 2 --c` to `a.b: [1, 2], c: true`.
fn flags(arguments: Vec<String>) -> Result<Keys, String> {
    let mut found = Keys::new();
    let mut current: Option<String> = None;
    for word in arguments {
        if let Some(flag) = word.strip_prefix("--") {
            let (flag, value) =
                flag.split_once('=').map_or((flag, None), |(flag, value)| (flag, Some(value)));
            found.insert(
                flag.to_owned(),
                value.map_or(Value::Bool(true), |value| Value::String(value.to_owned())),
            );
            current = Some(flag.to_owned());
            continue;
        }
        let flag =
            current.as_ref().ok_or_else(|| format!("`{word}` does not follow a flag of the program"))?;
        let slot = &mut found[flag.as_str()];
        let word = Value::String(word);
        match slot {
            Value::Array(items) => items.push(word),
            Value::Bool(_) => *slot = word,
            _ => *slot = Value::Array(vec![slot.take(), word]),
        }
    }
    Ok(found)
}

/// Converts Hydra's `a.b=1 +c=[d,e] --config-name=f` to `a: {b: 1}, c: [d, e], config-name: f`. The last of
/// several values counts.
fn overrides(arguments: Vec<String>) -> Result<Keys, String> {
    let mut found = Keys::new();
    let mut arguments = arguments.into_iter();
    while let Some(word) = arguments.next() {
        let (key, value) = match (word.split_once('='), word.starts_with("--")) {
            (Some((key, value)), _) => (key.to_owned(), value.to_owned()),
            (None, true) => (word, arguments.next().unwrap_or_default()),
            // An unexpanded variable, reported in its row.
            (None, false) => (word, String::new()),
        };
        let key = key.trim_start_matches(['+', '-']);
        match key.starts_with('$') {
            true => drop(found.insert(key.to_owned(), Value::Bool(true))),
            false => values::insert(&mut found, key, hydra(&value)),
        }
    }
    Ok(found)
}

/// Parses a value in Hydra's syntax, which is nearly YAML.
fn hydra(text: &str) -> Value {
    match serde_saphyr::from_str(text) {
        Ok(value) if shell::is_expanded(text) => value,
        _ => Value::String(text.to_owned()),
    }
}
