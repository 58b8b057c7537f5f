//! Files as trees: YAML with hydra's defaults and references, JSON, and command lines.

use std::path::Path;

use serde_json::{Map, Value};

use super::System;
use super::command_line;

type Tree = Map<String, Value>;

/// What a text looks like, by keys that only one system has.
pub(super) fn system_of(text: &str) -> Option<System> {
    if text.contains("openrlhf.cli") || text.contains("train_ppo_ray") {
        return Some(System::Openrlhf);
    }
    let tree = parse(text).ok()?;
    let has = |key: &str| tree.contains_key(key);
    if has("actor_train") || has("rollout_batch_size") && has("rewards") {
        return Some(System::Roll);
    }
    if has("compute_environment") || has("distributed_type") {
        return Some(System::Accelerate);
    }
    if has("zero_optimization") || has("train_micro_batch_size_per_gpu") {
        return Some(System::Deepspeed);
    }
    if has("method") && has("train") && has("model") {
        return Some(System::Trlx);
    }
    if has("model_name_or_path") || has("num_generations") || has("reward_funcs") {
        return Some(System::Trl);
    }
    None
}

/// The file's tree, with what it names of other files.
pub(super) fn tree(system: System, path: &Path, text: &str) -> Result<Tree, String> {
    let folder = path.parent().unwrap_or(Path::new(""));
    match system {
        System::Openrlhf => command_line::tree(text),
        System::Roll => {
            let mut tree = parse(text)?;
            let named = defaults(&mut tree, folder)?;
            let mut tree = references(tree)?;
            // What was only there to be named is no key of the run.
            tree.retain(|key, value| !(value.is_object() && named.contains(key)));
            Ok(tree)
        }
        System::Accelerate => {
            let mut tree = parse(text)?;
            deepspeed_file(&mut tree, folder)?;
            Ok(tree)
        }
        System::Deepspeed | System::Trl | System::Trlx => parse(text),
    }
}

fn parse(text: &str) -> Result<Tree, String> {
    // JSON with its comments left out is YAML. That `no` is a boolean surprises most people, so here it is a text.
    let options = serde_saphyr::options! { with_snippet: false, strict_booleans: true };
    match serde_saphyr::from_str_with_options(text, options) {
        Ok(Value::Object(tree)) => Ok(tree),
        Ok(_) => Err("it is no mapping of keys to values".into()),
        Err(error) => Err(error.without_snippet().to_string()),
    }
}

/// Hydra's `defaults: [../config/deepspeed_zero3@_here_]`: the keys of these files come first. ROLL's own DeepSpeed files
/// are known by their names where they do not lie beside. Returns the keys that these files have.
fn defaults(tree: &mut Tree, folder: &Path) -> Result<Vec<String>, String> {
    let Some(Value::Array(list)) = tree.shift_remove("defaults") else { return Ok(Vec::new()) };
    let mut merged = Tree::new();
    for entry in list.iter().filter_map(Value::as_str).filter(|entry| *entry != "_self_") {
        let relative = entry.split('@').next().unwrap_or(entry);
        let file = folder.join(format!("{relative}.yaml"));
        match std::fs::read_to_string(&file) {
            Ok(text) => merged.extend(parse(&text).map_err(|error| format!("{}: {error}", file.display()))?),
            Err(error) => {
                let name = relative.rsplit('/').next().unwrap_or(relative);
                // `envs` names variables of their machines.
                match known_defaults(name) {
                    Some(known) => merged.extend(known),
                    None => return Err(format!("its default {}: {error}", file.display())),
                }
            }
        }
    }
    let named = merged.keys().cloned().collect();
    merged.extend(std::mem::take(tree));
    *tree = merged;
    Ok(named)
}

fn known_defaults(name: &str) -> Option<Tree> {
    let zero = |stage: u64, offload: &str| {
        let config = serde_json::json!({
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": offload}},
        });
        Some(Tree::from_iter([(name.to_owned(), config)]))
    };
    match name {
        "envs" | "traj_envs" => Some(Tree::new()),
        "deepspeed_zero" => zero(0, "none"),
        "deepspeed_zero2" => zero(2, "none"),
        "deepspeed_zero2_cpuoffload" => zero(2, "cpu"),
        "deepspeed_zero3" => zero(3, "none"),
        "deepspeed_zero3_cpuoffload" => zero(3, "cpu"),
        _ => None,
    }
}

/// Puts what `${a.b}` names in its place.
fn references(tree: Tree) -> Result<Tree, String> {
    /// References may lead to references.
    const MOST_DEPTH: usize = 16;
    fn find<'a>(root: &'a Tree, path: &str) -> Option<&'a Value> {
        let mut names = path.split('.');
        let mut value = root.get(names.next()?)?;
        for name in names {
            value = value.get(name)?;
        }
        Some(value)
    }
    fn resolve(value: &Value, root: &Tree, depth: usize) -> Result<Value, String> {
        match value {
            Value::Object(map) => {
                let entries = map.iter().map(|(key, value)| Ok((key.clone(), resolve(value, root, depth)?)));
                Ok(Value::Object(entries.collect::<Result<_, String>>()?))
            }
            Value::Array(list) => {
                let items = list.iter().map(|value| resolve(value, root, depth));
                Ok(Value::Array(items.collect::<Result<_, String>>()?))
            }
            Value::String(text) => {
                let Some((before, rest)) = text.split_once("${") else { return Ok(value.clone()) };
                let Some((path, after)) = rest.split_once('}') else {
                    return Err(format!("`{text}` has no end"));
                };
                let named = find(root, path).filter(|_| depth < MOST_DEPTH);
                let named = named.ok_or_else(|| format!("`${{{path}}}` leads nowhere"))?;
                let named = resolve(named, root, depth + 1)?;
                if before.is_empty() && after.is_empty() {
                    return Ok(named);
                }
                let named = named.as_str().map_or_else(|| named.to_string(), str::to_owned);
                resolve(&Value::String(format!("{before}{named}{after}")), root, depth + 1)
            }
            _ => Ok(value.clone()),
        }
    }
    let root = tree.clone();
    match resolve(&Value::Object(tree), &root, 0)? {
        Value::Object(tree) => Ok(tree),
        _ => unreachable!("a mapping stays one"),
    }
}

/// accelerate's `deepspeed_config_file`, from beside the file or from the current folder.
fn deepspeed_file(tree: &mut Tree, folder: &Path) -> Result<(), String> {
    let Some(Value::Object(section)) = tree.get_mut("deepspeed_config") else { return Ok(()) };
    let Some(Value::String(name)) = section.get("deepspeed_config_file") else { return Ok(()) };
    let beside = folder.join(name);
    let file = if beside.exists() { beside } else { name.into() };
    let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let json = parse(&text).map_err(|error| format!("{}: {error}", file.display()))?;
    section.insert("deepspeed_config_file".into(), Value::Object(json));
    Ok(())
}
