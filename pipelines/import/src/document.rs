//! A foreign file as flat keys: mappings of YAML or JSON, or the arguments of a command.

use std::{borrow::Cow, collections::HashSet, fs, mem, path::Path};

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::{
    Error, Origin,
    command::{Command, Program},
};

/// A parsed file.
pub(super) struct Document {
    root: Map<String, Value>,
    program: Option<&'static Program>,
    /// Keys in the line behind the command, which are not passed to it.
    lost: Map<String, Value>,
    /// Top-level keys that `${...}` names.
    pub(super) referenced: HashSet<String>,
    /// Advice for a file whose system its keys do not tell.
    pub(super) hint: String,
    /// True if values may contain `$name` or `${a.b}` that are set outside the file.
    pub(super) is_partial: bool,
}

impl Document {
    pub(super) fn read(path: &Path, origin: Option<Origin>) -> Result<Self, Error> {
        let text =
            fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let problem = |problem| Error::Syntax { path: path.to_owned(), problem };
        let command = Command::of(path, &text, origin).map_err(problem)?;
        let (program, mut root, lost) = match command {
            Some(Command { program, keys, lost }) => (Some(program), keys, lost),
            None => (None, mapping(path, &text)?, Map::new()),
        };
        if let Some(other) = foreign(&root) {
            return Err(problem(other.to_owned()));
        }
        if root.contains_key("defaults") {
            include_defaults(&mut root, path)?;
        }
        // Some values are set by a command or the environment.
        let is_partial =
            program.is_some() || root.contains_key("actor_rollout_ref") || text.contains("${oc.env:");
        let referenced = interpolate(&mut root, is_partial).map_err(problem)?;
        in_home(&mut root);
        let hint = hint(&root, &text);
        let document = Self { root, program, lost, hint, referenced, is_partial };
        document.check_length().map_err(problem)?;
        Ok(document)
    }

    /// Recognizes the system by keys that only its configs have.
    pub(super) fn origin(&self) -> Option<Origin> {
        let has = |key: &str| self.root.contains_key(key);
        let any = |keys: &[&str]| keys.iter().any(|key| has(key));
        if let Some(program) = self.program {
            Some(program.origin)
        } else if has("actor_rollout_ref") {
            Some(Origin::Verl)
        } else if any(&ROLL) {
            Some(Origin::Roll)
        } else if has("method") && has("train") {
            Some(Origin::Trlx)
        } else if any(&["compute_environment", "distributed_type", "deepspeed_config", "fsdp_config"]) {
            Some(Origin::Accelerate)
        } else if any(&["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"]) {
            Some(Origin::Deepspeed)
        } else if any(&TRL_PRM) {
            Some(Origin::TrlPrm)
        } else if any(&TRL_RL) {
            Some(Origin::Trl)
        } else {
            None
        }
    }

    /// Takes the keys, flat, that a command's next line has in vain.
    pub(super) fn take_lost(&mut self) -> IndexMap<String, Value> {
        let mut keys = IndexMap::new();
        flatten(mem::take(&mut self.lost), "", &mut keys);
        keys
    }

    /// Checks that the number of keys is that of a config.
    fn check_length(&self) -> Result<(), String> {
        fn count(map: &Map<String, Value>) -> usize {
            map.values().map(|value| value.as_object().map_or(1, |below| count(below).max(1))).sum()
        }
        match count(&self.root) {
            keys if keys > MOST_KEYS => Err(format!("it has {keys} keys: a config has at most {MOST_KEYS}")),
            _ => Ok(()),
        }
    }

    /// Converts `a: {b: 1}` to `a.b: 1`. Lists, and mappings without keys, are values.
    pub(super) fn flat(self) -> IndexMap<String, Value> {
        let mut keys = IndexMap::new();
        flatten(self.root, "", &mut keys);
        keys
    }
}

/// Keys that only ROLL's configs have; those of its other pipelines are refused with a reason.
const ROLL: [&str; 8] = [
    "actor_train",
    "rollout_batch_size",
    "num_return_sequences_in_group",
    "sft_train",
    "student_train",
    "student",
    "train_env_manager",
    "custom_envs",
];

/// Keys that only TRL's PRM trainer has; it also has one of GRPO's.
const TRL_PRM: [&str; 2] = ["step_separator", "train_on_last_step_only"];

/// Keys that only TRL's GRPO and RLOO have.
const TRL_RL: [&str; 8] = [
    "num_generations",
    "max_completion_length",
    "reward_funcs",
    "num_iterations",
    "scale_rewards",
    "steps_per_generation",
    "generation_batch_size",
    "mask_truncated_completions",
];

/// Keys that only one of TRL's other trainers has, with its name for `--from`.
const TRL_OFFLINE: [(&str, &str); 18] = [
    ("dataset_text_field", "trl-sft"),
    ("packing", "trl-sft"),
    ("assistant_only_loss", "trl-sft"),
    ("completion_only_loss", "trl-sft"),
    ("max_seq_length", "trl-sft"),
    ("rpo_alpha", "trl-dpo"),
    ("label_smoothing", "trl-dpo"),
    ("truncation_mode", "trl-dpo"),
    ("f_divergence_type", "trl-dpo"),
    ("ld_alpha", "trl-dpo"),
    ("use_weighting", "trl-dpo"),
    ("center_rewards_coefficient", "trl-reward"),
    ("desirable_weight", "trl-kto"),
    ("undesirable_weight", "trl-kto"),
    ("lmbda", "trl-gkd"),
    ("seq_kd", "trl-gkd"),
    ("teacher_model_name_or_path", "trl-gkd"),
    ("teacher_model_init_kwargs", "trl-gkd"),
];

/// Keys that all of TRL's trainers share.
const TRL: [&str; 5] = [
    "model_name_or_path",
    "dataset_name",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "lr_scheduler_type",
];

/// Advice for a file whose system its keys do not tell; empty if there is none.
fn hint(root: &Map<String, Value>, text: &str) -> String {
    if !TRL.iter().any(|key| root.contains_key(*key)) {
        return String::new();
    }
    let commands = ["sft", "dpo", "reward", "prm", "kto", "gkd"];
    let named = commands.iter().find(|name| text.contains(&format!("trl {name}")));
    let only = TRL_OFFLINE.iter().find(|(key, _)| root.contains_key(*key));
    match (only, named) {
        (Some((key, from)), _) => format!(" (`{key}` is a key of TRL: pass --from {from})"),
        (None, Some(name)) => format!(" (its comment names `trl {name}`: pass --from trl-{name})"),
        (None, None) => {
            " (its keys are those of all of TRL's trainers: pass --from trl-sft, trl-dpo, trl-reward, trl-prm, trl-kto or trl-gkd, or trl for GRPO)"
                .to_owned()
        }
    }
}

/// The reason why a file of a known form has no importer.
fn foreign(root: &Map<String, Value>) -> Option<&'static str> {
    let has = |key: &str| root.contains_key(key);
    if has("exp_manager") && has("trainer") {
        Some("it is a config of NeMo, which is not imported")
    } else if has("tune_config") {
        Some("it is a sweep of trlx, not a run: import the config that it varies")
    } else {
        None
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
            (Ok(text), _)
                if text.lines().all(|line| line.trim().is_empty() || line.trim().starts_with('#')) =>
            {
                Map::new()
            }
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

/// Limit of the keys of a config; a long one has some hundreds.
const MOST_KEYS: usize = 10_000;

/// Limit of all values that `${...}` stands for together; a config needs some kilobytes.
const MOST_EXPANDED: usize = 1 << 22;

/// Expands `${a.b}`. ROLL's DeepSpeed dictionaries at the root are removed once expanded, since they are no
/// settings of their own. If a file `is_partial`, unknown names stay. Returns the top-level keys that are named.
fn interpolate(root: &mut Map<String, Value>, is_partial: bool) -> Result<HashSet<String>, String> {
    /// More passes than any sensible config needs; a cycle ends here.
    const PASSES: usize = 10;
    let (mut expanded, mut referenced) = (0, HashSet::new());
    for _ in 0..PASSES {
        let whole = Value::Object(root.clone());
        let mut pass = Pass { whole: &whole, is_partial, expanded, referenced: &mut referenced };
        let mut changed = false;
        for value in root.values_mut() {
            changed |= pass.substitute(value)?;
        }
        expanded = pass.expanded;
        if !changed {
            root.retain(|key, _| !key.starts_with("deepspeed_zero"));
            return Ok(referenced);
        }
    }
    Err("its ${...} form a cycle".to_owned())
}

struct Pass<'a> {
    whole: &'a Value,
    is_partial: bool,
    /// Size of all values that were inserted.
    expanded: usize,
    referenced: &'a mut HashSet<String>,
}

impl Pass<'_> {
    fn substitute(&mut self, value: &mut Value) -> Result<bool, String> {
        let mut changed = false;
        match value {
            Value::Object(fields) => {
                for field in fields.values_mut() {
                    changed |= self.substitute(field)?;
                }
            }
            Value::Array(items) => {
                for item in items {
                    changed |= self.substitute(item)?;
                }
            }
            Value::String(text) => {
                if let Some(full) = self.in_text(text)? {
                    *value = full;
                    changed = true;
                }
            }
            _ => {}
        }
        Ok(changed)
    }

    /// The value of `text` with its first known `${...}` expanded.
    fn in_text(&mut self, text: &str) -> Result<Option<Value>, String> {
        let mut from = 0;
        while let Some((start, end)) = placeholder(text, from) {
            let name = &text[start + 2..end];
            let found = match named(name, self.whole) {
                Some(found) => found,
                None if self.is_partial => {
                    from = end;
                    continue;
                }
                None => return Err(format!("`${{{name}}}` is not defined in the file")),
            };
            self.referenced.insert(name.split('.').next().unwrap_or(name).to_owned());
            self.expanded = self.expanded.saturating_add(size(&found)).saturating_add(text.len());
            if self.expanded > MOST_EXPANDED {
                return Err(format!("`${{{name}}}` grows too long: write its value out"));
            }
            return Ok(Some(match (start, end + 1 == text.len()) {
                (0, true) => found.into_owned(),
                _ => {
                    let inserted = super::values::text(&found);
                    Value::String(format!("{}{inserted}{}", &text[..start], &text[end + 1..]))
                }
            }));
        }
        Ok(None)
    }
}

/// Approximate size of a value in bytes.
fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len() + 1,
        Value::Array(items) => items.iter().map(size).sum::<usize>() + 1,
        Value::Object(fields) => fields.iter().map(|(key, value)| key.len() + size(value)).sum::<usize>() + 1,
        _ => 8,
    }
}

/// Replaces the `~` of paths, which other systems expand, by the user's folder.
fn in_home(root: &mut Map<String, Value>) {
    fn expand(value: &mut Value, home: &str) {
        match value {
            Value::Object(fields) => fields.values_mut().for_each(|field| expand(field, home)),
            Value::Array(items) => items.iter_mut().for_each(|item| expand(item, home)),
            Value::String(text) => {
                if let Some(rest) = text.strip_prefix("~/") {
                    *text = format!("{}/{rest}", home.trim_end_matches('/'));
                }
            }
            _ => {}
        }
    }
    if let Ok(home) = std::env::var("HOME") {
        root.values_mut().for_each(|value| expand(value, &home));
    }
}

/// Value of `a.b`, or of OmegaConf's `oc.select:a.b,default` for an optional name.
fn named<'a>(name: &str, whole: &'a Value) -> Option<Cow<'a, Value>> {
    let find = |path: &str| path.split('.').try_fold(whole, |value, key| value.get(key)).map(Cow::Borrowed);
    // Start time, which is used in folder names only.
    if name.starts_with("now:") {
        return Some(Cow::Owned(Value::String("now".to_owned())));
    }
    match name.strip_prefix("oc.select:").map(|select| select.split_once(',').unwrap_or((select, "null"))) {
        None => find(name),
        Some((path, default)) => find(path).or_else(|| serde_saphyr::from_str(default).ok().map(Cow::Owned)),
    }
}

fn placeholder(text: &str, from: usize) -> Option<(usize, usize)> {
    let start = from + text[from..].find("${")?;
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
