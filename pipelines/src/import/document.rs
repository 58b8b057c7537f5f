//! A foreign file as flat keys: YAML or JSON by its mappings, a command line by its flags.

use std::{fs, path::Path};

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::{Error, Origin};

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
            true => flags(&text),
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

/// `--a.b 1 2 --c` as `a.b: [1, 2], c: true`, from a shell script or a line: what precedes the first flag is the
/// program, comments and line ends are skipped.
fn flags(text: &str) -> Map<String, Value> {
    let command: String = text
        .lines()
        .map(|line| line.trim().trim_end_matches('\\'))
        .filter(|line| !line.starts_with('#'))
        .collect::<Vec<_>>()
        .join(" ");
    let command = command.split_once("openrlhf.cli.").map_or(command.as_str(), |(_, rest)| rest);
    let mut found: Map<String, Value> = Map::new();
    let mut current: Option<String> = None;
    for word in command.split_whitespace() {
        let word = word.trim_matches(['"', '\'']);
        if let Some(flag) = word.strip_prefix("--") {
            let (flag, value) =
                flag.split_once('=').map_or((flag, None), |(flag, value)| (flag, Some(value)));
            found.insert(
                flag.to_owned(),
                value.map_or(Value::Bool(true), |value| Value::String(value.to_owned())),
            );
            current = Some(flag.to_owned());
        } else if let Some(flag) = &current {
            let slot = &mut found[flag.as_str()];
            let word = Value::String(word.to_owned());
            *slot = match slot.take() {
                Value::Array(items) => items.into_iter().chain([word]).collect(),
                Value::Bool(_) => word,
                first => Value::Array(vec![first, word]),
            };
        }
    }
    found
}
