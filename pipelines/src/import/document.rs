//! A foreign file as flat keys: YAML or JSON by its mappings, a command line by its flags.

use std::{fs, path::Path};

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::{Error, Origin, shell};

/// A parsed file.
pub(super) struct Document {
    root: Map<String, Value>,
    is_command: bool,
}

impl Document {
    pub(super) fn read(path: &Path, origin: Option<Origin>) -> Result<Self, Error> {
        let text =
            fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let is_command = origin == Some(Origin::Openrlhf) || text.contains("openrlhf.cli.");
        let problem = |problem: String| Error::Syntax { path: path.to_owned(), problem };
        let mut root = match is_command {
            true => flags(&text).map_err(problem)?,
            false => match serde_saphyr::from_str::<Value>(&text) {
                Ok(Value::Object(root)) => root,
                Ok(_) => return Err(problem("it is not a mapping of keys to values".to_owned())),
                Err(error) => return Err(problem(error.to_string())),
            },
        };
        if root.contains_key("defaults") {
            include_defaults(&mut root, path)?;
        }
        interpolate(&mut root).map_err(problem)?;
        Ok(Self { root, is_command })
    }

    /// Whose config this is, by keys that only one system has.
    pub(super) fn origin(&self) -> Option<Origin> {
        let has = |key: &str| self.root.contains_key(key);
        let any = |keys: &[&str]| keys.iter().any(|key| has(key));
        if self.is_command {
            Some(Origin::Openrlhf)
        } else if any(&["actor_train", "rollout_batch_size", "num_return_sequences_in_group"]) {
            Some(Origin::Roll)
        } else if has("method") && has("train") {
            Some(Origin::Trlx)
        } else if any(&["compute_environment", "distributed_type", "deepspeed_config", "fsdp_config"]) {
            Some(Origin::Accelerate)
        } else if any(&["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"]) {
            Some(Origin::Deepspeed)
        } else if any(&["num_generations", "max_completion_length", "per_device_train_batch_size"]) {
            Some(Origin::Trl)
        } else {
            None
        }
    }

    /// `a: {b: 1}` as `a.b: 1`; lists, and mappings without keys, are values.
    pub(super) fn flat(self) -> IndexMap<String, Value> {
        let mut keys = IndexMap::new();
        flatten(self.root, "", &mut keys);
        keys
    }
}

fn flatten(map: Map<String, Value>, prefix: &str, keys: &mut IndexMap<String, Value>) {
    for (key, value) in map {
        let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(below) if !below.is_empty() => flatten(below, &key, keys),
            value => drop(keys.insert(key, value)),
        }
    }
}

/// Hydra's `defaults: [../config/deepspeed_zero3@_here_]`: each file's keys, below those that are here. ROLL's five
/// DeepSpeed files are known without being there.
fn include_defaults(root: &mut Map<String, Value>, path: &Path) -> Result<(), Error> {
    let Some(Value::Array(entries)) = root.shift_remove("defaults") else { return Ok(()) };
    for entry in entries {
        let Value::String(entry) = entry else { continue };
        let name = entry.split('@').next().unwrap_or(&entry);
        if name == "_self_" {
            continue;
        }
        let file = path.parent().unwrap_or(Path::new("")).join(format!("{name}.yaml"));
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let included = match fs::read_to_string(&file) {
            Ok(text) => serde_saphyr::from_str::<Value>(&text)
                .map_err(|error| Error::Syntax { path: file.clone(), problem: error.to_string() })?,
            Err(source) => match known_default(&stem) {
                Some(known) => known,
                None => return Err(Error::Read { path: file, source }),
            },
        };
        let Value::Object(included) = included else {
            let problem = "it is not a mapping of keys to values".to_owned();
            return Err(Error::Syntax { path: file, problem });
        };
        for (key, value) in included {
            root.entry(key).or_insert(value);
        }
    }
    Ok(())
}

/// What ROLL's `deepspeed_zero*.yaml` say, as far as it matters here.
fn known_default(stem: &str) -> Option<Value> {
    let cpu = serde_json::json!({"device": "cpu"});
    let zero = match stem {
        "deepspeed_zero" => serde_json::json!({"stage": 0}),
        "deepspeed_zero2" => serde_json::json!({"stage": 2}),
        "deepspeed_zero2_cpuoffload" => serde_json::json!({"stage": 2, "offload_optimizer": cpu}),
        "deepspeed_zero3" => serde_json::json!({"stage": 3}),
        "deepspeed_zero3_cpuoffload" => {
            serde_json::json!({"stage": 3, "offload_optimizer": cpu, "offload_param": cpu})
        }
        _ => return None,
    };
    Some(serde_json::json!({stem: {"zero_optimization": zero, "bf16": {"enabled": "auto"}}}))
}

/// Puts what `${a.b}` names in its place. What is only interpolated is no setting of its own, so ROLL's DeepSpeed
/// dictionaries at the root go once they are placed.
fn interpolate(root: &mut Map<String, Value>) -> Result<(), String> {
    /// More passes than any sane config nests; a cycle ends here.
    const PASSES: usize = 10;
    for _ in 0..PASSES {
        let whole = Value::Object(root.clone());
        let mut changed = false;
        for value in root.values_mut() {
            changed |= substitute(value, &whole)?;
        }
        if !changed {
            root.retain(|key, _| !key.starts_with("deepspeed_zero"));
            return Ok(());
        }
    }
    Err("its ${...} refer to each other in a circle".to_owned())
}

fn substitute(value: &mut Value, whole: &Value) -> Result<bool, String> {
    match value {
        Value::Object(fields) => {
            fields.values_mut().try_fold(false, |changed, value| Ok(changed | substitute(value, whole)?))
        }
        Value::Array(items) => {
            items.iter_mut().try_fold(false, |changed, value| Ok(changed | substitute(value, whole)?))
        }
        Value::String(text) => {
            let Some((start, end)) = placeholder(text) else { return Ok(false) };
            let name = &text[start + 2..end];
            let found = name.split('.').try_fold(whole, |value, key| value.get(key));
            let found = found.ok_or_else(|| format!("`${{{name}}}` names nothing in the file"))?;
            *value = match (start, end + 1 == text.len()) {
                (0, true) => found.clone(),
                _ => Value::String(format!(
                    "{}{}{}",
                    &text[..start],
                    super::values::text(found),
                    &text[end + 1..]
                )),
            };
            Ok(true)
        }
        _ => Ok(false),
    }
}

fn placeholder(text: &str) -> Option<(usize, usize)> {
    let start = text.find("${")?;
    Some((start, start + text[start..].find('}')?))
}

/// The program whose commands are imported; OpenRLHF's others train otherwise, with the same flags.
const PROGRAM: &str = "train_ppo_ray";

/// `--a.b 1 2 --c` as `a.b: [1, 2], c: true`, from the one command of a shell script that calls the program.
fn flags(script: &str) -> Result<Map<String, Value>, String> {
    let mut calls = calls(script)?;
    let other = calls.first().map(|(name, _)| name.clone());
    calls.retain(|(name, _)| name == PROGRAM);
    match (calls.len(), calls.pop(), other) {
        (1, Some((_, arguments)), _) => arguments_by_flag(arguments),
        (0, _, Some(other)) => Err(format!(
            "it calls `openrlhf.cli.{other}`, and only commands of `openrlhf.cli.{PROGRAM}` are imported"
        )),
        (0, ..) => Err(format!("it has no command that calls `openrlhf.cli.{PROGRAM}`")),
        (count, ..) => {
            Err(format!("it calls `openrlhf.cli.{PROGRAM}` {count} times: leave one of the commands in"))
        }
    }
}

/// OpenRLHF's programs that a script calls, each with its arguments.
fn calls(script: &str) -> Result<Vec<(String, Vec<String>)>, String> {
    let mut found = Vec::new();
    for mut words in shell::commands(script)? {
        // The shell would end the program's command before it, and train without these flags.
        if words[0].starts_with("--") {
            return Err(format!("a line begins with `{}`: end the one before it with a backslash", words[0]));
        }
        if let Some(place) = words.iter().position(|word| program(word).is_some()) {
            let arguments = words.split_off(place + 1);
            found.extend(program(&words[place]).map(|name| (name.to_owned(), arguments)));
            continue;
        }
        // A command may be a word of another: `bash -c "python -m ..."`.
        for word in words.iter().filter(|word| word.contains("openrlhf.cli.") && *word != script) {
            found.extend(calls(word)?);
        }
    }
    Ok(found)
}

fn program(word: &str) -> Option<&str> {
    if word.contains(char::is_whitespace) {
        return None;
    }
    word.split_once("openrlhf.cli.").map(|(_, name)| name)
}

fn arguments_by_flag(arguments: Vec<String>) -> Result<Map<String, Value>, String> {
    let mut found: Map<String, Value> = Map::new();
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
        let flag = current.as_ref().ok_or_else(|| format!("`{word}` belongs to no flag of the program"))?;
        let slot = &mut found[flag.as_str()];
        let word = Value::String(word);
        *slot = match slot.take() {
            Value::Array(items) => items.into_iter().chain([word]).collect(),
            Value::Bool(_) => word,
            first => Value::Array(vec![first, word]),
        };
    }
    Ok(found)
}
