//! A foreign file as flat keys: mappings of YAML or JSON, or the arguments of a command.

use std::{borrow::Cow, fs, path::Path};

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::{Error, Origin, command::Program};

/// A parsed file.
pub(super) struct Document {
    root: Map<String, Value>,
    program: Option<&'static Program>,
    /// True if values may contain `$name` or `${a.b}` that are set outside the file.
    pub(super) is_partial: bool,
}

impl Document {
    pub(super) fn read(path: &Path, origin: Option<Origin>) -> Result<Self, Error> {
        let text =
            fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let program = Program::of(&text, origin);
        let mut root = match program {
            Some(program) => {
                program.keys(&text).map_err(|problem| Error::Syntax { path: path.to_owned(), problem })?
            }
            None => mapping(path, &text)?,
        };
        if root.contains_key("defaults") {
            include_defaults(&mut root, path)?;
        }
        // Some values are set by a command or the environment.
        let is_partial =
            program.is_some() || root.contains_key("actor_rollout_ref") || text.contains("${oc.env:");
        interpolate(&mut root, is_partial)
            .map_err(|problem| Error::Syntax { path: path.to_owned(), problem })?;
        Ok(Self { root, program, is_partial })
    }

    /// Recognizes the system by keys that only its configs have.
    pub(super) fn origin(&self) -> Option<Origin> {
        let has = |key: &str| self.root.contains_key(key);
        let any = |keys: &[&str]| keys.iter().any(|key| has(key));
        if let Some(program) = self.program {
            Some(program.origin)
        } else if has("actor_rollout_ref") {
            Some(Origin::Verl)
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

    /// Converts `a: {b: 1}` to `a.b: 1`. Lists, and mappings without keys, are values.
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

/// Includes Hydra's `defaults: [../config/deepspeed_zero3@_here_]`: the keys of each file, which keys here
/// override. ROLL's five DeepSpeed files are built in.
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
        let included = match (fs::read_to_string(&file), known_default(&stem)) {
            (Ok(text), _) => mapping(&file, &text)?,
            (Err(_), Some(known)) => known,
            (Err(source), None) => return Err(Error::Read { path: file, source }),
        };
        for (key, value) in included {
            root.entry(key).or_insert(value);
        }
    }
    Ok(())
}

/// Relevant content of ROLL's `deepspeed_zero*.yaml`. verl's `ppo_trainer` has the importer's defaults.
fn known_default(stem: &str) -> Option<Map<String, Value>> {
    let cpu = serde_json::json!({"device": "cpu"});
    let zero = match stem {
        "deepspeed_zero" => serde_json::json!({"stage": 0}),
        "deepspeed_zero2" => serde_json::json!({"stage": 2}),
        "deepspeed_zero2_cpuoffload" => serde_json::json!({"stage": 2, "offload_optimizer": cpu}),
        "deepspeed_zero3" => serde_json::json!({"stage": 3}),
        "deepspeed_zero3_cpuoffload" => {
            serde_json::json!({"stage": 3, "offload_optimizer": cpu, "offload_param": cpu})
        }
        "ppo_trainer" | "ppo_megatron_trainer" => return Some(Map::new()),
        _ => return None,
    };
    let known = serde_json::json!({"zero_optimization": zero, "bf16": {"enabled": "auto"}});
    Some(Map::from_iter([(stem.to_owned(), known)]))
}

/// Expands `${a.b}`. ROLL's DeepSpeed dictionaries at the root are removed once expanded, since they are no
/// settings of their own. If a file `is_partial`, unknown names stay.
fn interpolate(root: &mut Map<String, Value>, is_partial: bool) -> Result<(), String> {
    /// More passes than any sensible config needs; a cycle ends here.
    const PASSES: usize = 10;
    for _ in 0..PASSES {
        let whole = Value::Object(root.clone());
        let mut changed = false;
        for value in root.values_mut() {
            changed |= substitute(value, &whole, is_partial)?;
        }
        if !changed {
            root.retain(|key, _| !key.starts_with("deepspeed_zero"));
            return Ok(());
        }
    }
    Err("its ${...} form a cycle".to_owned())
}

fn substitute(value: &mut Value, whole: &Value, is_partial: bool) -> Result<bool, String> {
    let below = |changed, value| Ok(changed | substitute(value, whole, is_partial)?);
    match value {
        Value::Object(fields) => fields.values_mut().try_fold(false, below),
        Value::Array(items) => items.iter_mut().try_fold(false, below),
        Value::String(text) => {
            let Some((start, end)) = placeholder(text) else { return Ok(false) };
            let name = &text[start + 2..end];
            let Some(found) = named(name, whole) else {
                let missing = || format!("`${{{name}}}` is not defined in the file");
                return if is_partial { Ok(false) } else { Err(missing()) };
            };
            *value = match (start, end + 1 == text.len()) {
                (0, true) => found,
                _ => Value::String(format!(
                    "{}{}{}",
                    &text[..start],
                    super::values::text(&found),
                    &text[end + 1..]
                )),
            };
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Value of `a.b`, or of OmegaConf's `oc.select:a.b,default` for an optional name.
fn named(name: &str, whole: &Value) -> Option<Value> {
    let find = |path: &str| path.split('.').try_fold(whole, |value, key| value.get(key)).cloned();
    // Start time, which is used in folder names only.
    if name.starts_with("now:") {
        return Some(Value::String("now".to_owned()));
    }
    match name.strip_prefix("oc.select:").map(|select| select.split_once(',').unwrap_or((select, "null"))) {
        None => find(name),
        Some((path, default)) => find(path).or_else(|| serde_saphyr::from_str(default).ok()),
    }
}

fn placeholder(text: &str) -> Option<(usize, usize)> {
    let start = text.find("${")?;
    Some((start, start + text[start..].find('}')?))
}

/// Parses a YAML, or a JSON with comments as DeepSpeed allows.
fn mapping(path: &Path, text: &str) -> Result<Map<String, Value>, Error> {
    let problem = |problem: String| Error::Syntax { path: path.to_owned(), problem };
    match serde_saphyr::from_str_with_options::<Value>(&without_comments(text), options()) {
        Ok(Value::Object(root)) => Ok(root),
        Ok(_) => Err(problem("it is not a mapping of keys to values".to_owned())),
        Err(error) => Err(problem(match error.without_snippet() {
            serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
                let line = error.location().map_or(1, |at| at.line());
                format!("line {line}: `{key}` is given twice: keep one")
            }
            error => {
                let error = error.to_string();
                let error = error.trim_start_matches("error: ");
                format!("it calls no known training program, and is not YAML or JSON: {error}")
            }
        })),
    }
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! { with_snippet: false }
}

/// Removes `//` and `/* */` from JSON, keeping line numbers. In YAML both are text.
fn without_comments(text: &str) -> Cow<'_, str> {
    if !text.trim_start().starts_with(['{', '/']) {
        return Cow::Borrowed(text);
    }
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let length = match next {
            '"' => quoted_length(rest),
            '/' if rest.starts_with("//") => {
                rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
                continue;
            }
            '/' if rest.starts_with("/*") => {
                let end = rest[2..].find("*/").map_or(rest.len(), |end| end + 4);
                kept.extend(rest[..end].matches('\n'));
                rest = &rest[end..];
                continue;
            }
            _ => next.len_utf8(),
        };
        kept.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    Cow::Owned(kept)
}

/// Length of the string at the start of `text`, with its quotes.
fn quoted_length(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, next)| {
        let ends = *next == '"' && !is_escaped;
        is_escaped = *next == '\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}
