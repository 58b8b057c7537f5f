mod algorithms;
mod defaults;
mod evaluations;
mod experts;
mod facts;
mod four_bits;
mod ilql;
mod includes;
mod judges;
mod lengths;
mod logits;
mod merging;
mod paths;
mod references;
mod repository;
mod reward_models;
mod rollout_hosts;
mod schedules;
mod several;
mod sharing;
mod steps;
mod strict;
mod trackers;
mod weights;

use std::fmt;
use std::path::PathBuf;

use anyroll_config::*;
use anyroll_data::Dataset;

use super::*;
use crate::launch::Rank;
use crate::run::{BackendFacts, Batches, Role, RolloutRole, Strategy};
use repository::brought;

/// The smallest config; every other field has a default.
pub const SMALL: &str = "\
name: small
backend: cpu
model:
  decoder: {hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32, max_length: 16}
strategy: {micro_batch_size: 8}
pipeline:
  rlvr:
    data:
      sort: {digits: 6}
    steps: 20
    prompts_per_step: 4
    group_size: 4
    rollout: {max_new_tokens: 8, batch_size: 16}
    optimizer:
      adamw: {learning_rate: 1.0e-3}
";

/// A config that was read and opened.
pub struct Loaded {
    draft: Draft,
    pub config: Config,
    pub opened: Opened,
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt(f)
    }
}

impl Loaded {
    pub fn read(path: &Path, sets: &[String]) -> Result<Self, Error> {
        let draft = Draft::read(path, sets)?;
        let (config, opened) = draft.open()?;
        Ok(Self { draft, config, opened })
    }

    pub fn resolve(&self, machine: &Machine) -> Result<Run, Error> {
        Ok(self.draft.prepare(machine, Purpose::Run)?.run)
    }

    /// Resolves on `machine` and keeps `zero_stage: auto` unresolved.
    pub fn resolve_but_stage(&self, machine: &Machine) -> Result<Run, Error> {
        Ok(self.draft.prepare(machine, Purpose::Plan)?.run)
    }

    pub fn dataset(&self) -> Option<&Dataset> {
        self.opened.dataset()
    }
}

pub fn read(text: &str, sets: &[&str]) -> Result<Loaded, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, text).unwrap();
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    Loaded::read(&path, &sets)
}

/// The only problem of a config.
#[track_caller]
pub fn only_problem(error: Error) -> Invalid {
    match error {
        Error::Invalid(mut all) if all.len() == 1 => all.remove(0),
        error => panic!("not a single problem: {error}"),
    }
}

#[track_caller]
fn invalid(text: &str, sets: &[&str]) -> Invalid {
    only_problem(read(text, sets).err().unwrap_or_else(|| panic!("accepted: {text}\n{sets:?}")))
}

fn facts(name: &str, runs_models: bool, devices: Option<usize>) -> BackendFacts {
    let memory_bytes = Some(1 << 30);
    let adds_by_rows = devices.is_none();
    BackendFacts {
        name: name.to_owned(),
        runs_models,
        adds_by_rows,
        devices,
        memory_bytes,
        unavailable: None,
    }
}

/// A machine with backends of made-up names, since this module knows no vendor.
pub fn machine() -> Machine {
    let broken =
        BackendFacts { unavailable: Some("libgone.so is not there".to_owned()), ..facts("gone", true, None) };
    let backends =
        vec![broken, facts("gpu", true, Some(4)), facts("cpu", true, None), facts("picture", false, Some(1))];
    Machine { cores: 8, backends, rank: None, hosts: 1 }
}

fn resolve(sets: &[&str], machine: &Machine) -> Result<Run, Error> {
    read(SMALL, sets).unwrap().resolve(machine)
}

/// Expected problem of `SMALL` with `from` replaced by `to`. The error names `field`, has `position` (`line:column`),
/// and contains `message` and `help`.
struct Malformed {
    from: &'static str,
    to: &'static str,
    position: &'static str,
    field: &'static str,
    message: &'static str,
    help: &'static str,
}

macro_rules! malformed {
    ($($from:literal => $to:literal, $position:literal, $field:literal, $message:literal, $help:literal;)*) => {
        &[$(Malformed {
            from: $from, to: $to, position: $position, field: $field, message: $message, help: $help,
        }),*]
    };
}

const MALFORMED: &[Malformed] = malformed! {
    // Keys.
    "group_size: 4" => "group_sise: 4", "12:5", "pipeline.rlvr.group_sise", "no such field", "did you mean `group_size`?";
    "name: small" => "nam: small", "1:1", "nam", "no such field", "did you mean `name`?";
    "heads: 2" => "head: 2", "4:41", "model.decoder.head", "no such field", "did you mean `heads`?";
    "    steps: 20" => "    steps: 20\n    bogus_thing: 1", "11:5", "pipeline.rlvr.bogus_thing", "no such field", "choose from `data`, `reward`";
    "learning_rate" => "lr", "15:15", "pipeline.rlvr.optimizer.adamw.lr", "no such field", "choose from `learning_rate`, `betas`";
    "sort:" => "sorting:", "9:7", "pipeline.rlvr.data", "no `sorting` here", "choose from `sort`, `addition`, `countdown`, `file`, `mix`";
    "rlvr:" => "rlhf:", "7:3", "pipeline", "no `rlhf` here", "did you mean `rlvr`?";
    "decoder:" => "encoder:", "4:3", "model.encoder", "no such field", "did you mean `decoder`?";
    "decoder:" => "path: x\n  decoder:", "3:1", "model", "expected exactly one of `decoder`, `path`, `dit` and `diffusers`", "change this value";
    "    steps: 20" => "    reward: exakt\n    steps: 20", "10:13", "pipeline.rlvr.reward", "no `exakt` here", "did you mean `exact`?";
    "    steps: 20" => "    steps: 20\n    steps: 30", "11:5", "", "`steps` is given twice", "keep one `steps`";
    "    group_size: 4\n" => "", "7:3", "pipeline.rlvr.group_size", "it is missing", "add `group_size:`";
    "digits: 6" => "", "9:7", "pipeline.rlvr.data.sort.digits", "it is missing", "add `digits:`";
    "sort: {digits: 6}" => "sort", "9:7", "pipeline.rlvr.data.sort.digits", "it is missing", "add `digits:`";
    "name: small\n" => "", "1:1", "name", "it is missing", "add `name:`";
    "      sort: {digits: 6}\n" => "      sort: {digits: 6}\n      addition: {digits: 2}\n", "10:7", "pipeline.rlvr.data", "expected one of `sort`, `addition`, `countdown`, `file`, `mix`, found `sort`, `addition`", "keep one of them";
    "    steps: 20" => "    reward: {exact: 1}\n    steps: 20", "10:21", "pipeline.rlvr.reward[0].exact", "found the number 1", "write a mapping";
    "    steps: 20" => "    reward: {math: {tol: 1}}\n    steps: 20", "10:21", "pipeline.rlvr.reward[0].math.tol", "no such field", "choose from `tolerance`";
    "    steps: 20" => "    reward: {math: {tolerance: 1}}\n    steps: 20", "10:32", "pipeline.rlvr.reward[0].math.tolerance", "1.0 is out of range", "from 0 to 0.1";
    "    steps: 20" => "    reward: 1\n    steps: 20", "10:13", "pipeline.rlvr.reward", "found the number 1", "write a reward that needs no field, such as `math`";
    "    steps: 20" => "    reward: regex\n    steps: 20", "10:13", "pipeline.rlvr.reward", "regex", "math";
    "    steps: 20" => "    reward: []\n    steps: 20", "10:5", "pipeline.rlvr.reward", "the list is empty", "add a term";
    "    steps: 20" => "    reward: [{maths: {}}]\n    steps: 20", "10:15", "pipeline.rlvr.reward[0].maths", "no such field", "did you mean `math`?";
    "    steps: 20" => "    reward: [{math: {tol: 1}}]\n    steps: 20", "10:22", "pipeline.rlvr.reward[0].math.tol", "no such field", "choose from `tolerance`, `only_boxed`, `decimal_comma`";
    "    steps: 20" => "    reward: [{weight: 2}]\n    steps: 20", "10:14", "pipeline.rlvr.reward[0]", "expected exactly one reward in a term, found 0", "exactly one";
    "    steps: 20" => "    reward: [{math: {}, exact: {}}]\n    steps: 20", "10:14", "pipeline.rlvr.reward[0]", "expected exactly one reward in a term, found 2", "exactly one";
    "    steps: 20" => "    reward: [{exact: 1}]\n    steps: 20", "10:22", "pipeline.rlvr.reward[0].exact", "found the number 1", "write a mapping";
    "    steps: 20" => "    reward: [math]\n    steps: 20", "10:14", "pipeline.rlvr.reward[0]", "found the text `math`", "write a mapping";
    "    steps: 20" => "    reward: [{math: {}, weight: 0}]\n    steps: 20", "10:33", "pipeline.rlvr.reward[0].weight", "0.0 is out of range", "other than 0";
    "    steps: 20" => "    reward: [{math: {}, max_error_rate: 2}]\n    steps: 20", "10:41", "pipeline.rlvr.reward[0].max_error_rate", "2.0 is out of range", "from 0 to 1";
    "    steps: 20" => "    reward: [{python: {path: none.py, function: f}}]\n    steps: 20", "10:30", "pipeline.rlvr.reward[0].python.path", "there is no file none.py", "give its path";
    "    steps: 20" => "    reward: [{code: {timeout_s: 0}}]\n    steps: 20", "10:33", "pipeline.rlvr.reward[0].code.timeout_s", "0.0 is out of range", "at most an hour";
    "    steps: 20" => "    reward: [{code: {readable: [usr]}}]\n    steps: 20", "10:33", "pipeline.rlvr.reward[0].code.readable[0]", "usr is not there", "path from the root";
    "    steps: 20" => "    reward: [{code: {http: {url: http://a, timeout_s: 9}}}]\n    steps: 20", "10:55", "pipeline.rlvr.reward[0].code.http.timeout_s", "9 s, and a test may take 10", "more than";
    "    steps: 20" => "    reward: [{code: {http: {url: http://a}, disk_mib: 8}}]\n    steps: 20", "10:55", "pipeline.rlvr.reward[0].code.disk_mib", "of this machine's sandbox", "leave it out";
    "    steps: 20" => "    reward: [{judge: {url: a, model: m, template: t}}]\n    steps: 20", "10:28", "pipeline.rlvr.reward[0].judge.url", "`a` is no URL", "http://";
    "    steps: 20" => "    selection: {difficulty: {min: 0.5, max: 0.1}}\n    steps: 20", "10:45", "pipeline.rlvr.selection.difficulty.max", "0.1 is out of range", "not below `min`";
    "    steps: 20" => "    selection: {mixed_groups: {max_batches: 0}}\n    steps: 20", "10:45", "pipeline.rlvr.selection.mixed_groups.max_batches", "it is 0", "1 or above";
    "sort: {digits: 6}" => "file: {path: []}", "9:14", "pipeline.rlvr.data.file.path", "the list is empty", "name a file";
    "sort: {digits: 6}" => "file: {path: {}}", "9:14", "pipeline.rlvr.data.file.path", "found a mapping", "write a path, or a list";
    "sort: {digits: 6}" => "file: {path: a.jsonl, max_prompt_tokens: 0}", "9:48", "pipeline.rlvr.data.file.max_prompt_tokens", "it is 0", "1 or above";
    "sort: {digits: 6}" => "file: {path: a.jsonl, long_prompts: refuse}", "9:43", "pipeline.rlvr.data.file.long_prompts", "no record is too long", "add it";
    "sort: {digits: 6}" => "mix: [{domain: a, data: {sort: {digits: 6}}}, {domain: a, data: {sort: {digits: 5}}}]", "9:62", "pipeline.rlvr.data.mix[1].domain", "`a` is no name of its own", "a name of its own";
    "sort: {digits: 6}" => "mix: [{domain: a, weight: 0, data: {sort: {digits: 6}}}]", "9:33", "pipeline.rlvr.data.mix[0].weight", "0.0 is out of range", "above 0";
    "sort: {digits: 6}" => "mix: [{domain: a, data: {sort: {digits: 1}}}]", "9:47", "pipeline.rlvr.data.mix[0].data.sort.digits", "1 is out of range", "from 2 to 18";
    "sort: {digits: 6}" => "sort: {digits: 6}\n    reward: [{exact: {}, domains: [a]}]", "10:5", "pipeline.rlvr.reward", "no term is for the records of the domain ``", "leave a term's `domains` out";
    "batch_size: 16" => "batch_size: 16, async: {ahead: 2, max_staleness: 1}", "13:83", "pipeline.rlvr.rollout.async.max_staleness", "what is begun 2 steps ahead", "write 2 or above";
    "    steps: 20" => "    scoring: {workers: 0}\n    steps: 20", "10:24", "pipeline.rlvr.scoring.workers", "0 is out of range", "1 or above";
    "    steps: 20" => "    reward: [{exact: {}}, {math: {tolerance: 1}}]\n    steps: 20", "10:46", "pipeline.rlvr.reward[1].math.tolerance", "1.0 is out of range", "from 0 to 0.1";
    "    steps: 20" => "    reward: [{regex: {pattern: '(a'}}]\n    steps: 20", "10:32", "pipeline.rlvr.reward[0].regex.pattern", "it is not a valid pattern: unclosed group", "mend the pattern";
    "    steps: 20" => "    reward: [{regex: {}}]\n    steps: 20", "10:15", "pipeline.rlvr.reward[0].regex.pattern", "it is missing", "add `pattern:`";
    "    steps: 20" => "    reward: [{length: {max_tokens: 4, buffer_tokens: 8}}]\n    steps: 20", "10:54", "pipeline.rlvr.reward[0].length.buffer_tokens", "8 is more than `max_tokens`", "write 4 or fewer";
    "    steps: 20" => "    reward: [{repetition: {ngram_words: 0}}]\n    steps: 20", "10:41", "pipeline.rlvr.reward[0].repetition.ngram_words", "it is 0", "1 or above";

    // Types.
    "group_size: 4" => "group_size: '4'", "12:17", "pipeline.rlvr.group_size", "found the text `4`", "write a whole number, 0 or above, without quotes";
    "group_size: 4" => "group_size: four", "12:17", "pipeline.rlvr.group_size", "expected a whole number, 0 or above, found the text `four`", "write a whole number";
    "group_size: 4" => "group_size: 4.5", "12:17", "pipeline.rlvr.group_size", "found the number 4.5", "write a whole number";
    "group_size: 4" => "group_size: -4", "12:17", "pipeline.rlvr.group_size", "found the number -4", "write a whole number";
    "group_size: 4" => "group_size:", "12:15", "pipeline.rlvr.group_size", "found nothing", "write a whole number";
    "group_size: 4" => "group_size: [4]", "12:5", "pipeline.rlvr.group_size", "found a list", "write a whole number";
    "steps: 20" => "steps: 99999999999999999999999", "10:12", "pipeline.rlvr.steps", "found the number 1e23", "write a whole number";
    "name: small" => "name: 12", "1:7", "name", "expected a text, found the number 12", "write a text";
    "{learning_rate: 1.0e-3}" => "{learning_rate: small}", "15:30", "pipeline.rlvr.optimizer.adamw.learning_rate", "expected a number, found the text `small`", "write a number";
    "{learning_rate: 1.0e-3}" => "{learning_rate: 1.0e-3, betas: 0.9}", "15:45", "pipeline.rlvr.optimizer.adamw.betas", "expected a list of 2 values, found the number 0.9", "write a list of 2 values";
    "{learning_rate: 1.0e-3}" => "{learning_rate: 1.0e-3, betas: [0.9]}", "15:38", "pipeline.rlvr.optimizer.adamw.betas", "expected a list of 2 values, found 1", "write a list of 2 values";
    "{learning_rate: 1.0e-3}" => "{learning_rate: 1.0e-3, betas: [0.9, 0.9, 0.9]}", "15:38", "pipeline.rlvr.optimizer.adamw.betas", "expected a list of 2 values, found 3", "write a list of 2 values";
    "{learning_rate: 1.0e-3}" => "{learning_rate: 1.0e-3, betas: [0.9, x]}", "15:51", "pipeline.rlvr.optimizer.adamw.betas[1]", "found the text `x`", "write a number";
    "max_length: 16" => "max_length: 16, qk_norm: yes", "4:99", "model.decoder.qk_norm", "expected `true` or `false`, found the text `yes`", "write `true` or `false`";
    "strategy: {micro_batch_size: 8}" => "strategy: 8", "5:11", "strategy", "expected a mapping with fields, found the number 8", "write a mapping";
    "backend: cpu" => "backend: cpu\ndevices: some", "3:10", "devices", "found the text `some`", "write a count, `all`, or a list";
    "backend: cpu" => "backend: cpu\ndevices: [0, -1]", "3:14", "devices[1]", "found the number -1", "write a whole number";

    // Values.
    "name: small" => "name: ../small", "1:7", "name", "cannot start the name of a folder", "use letters, digits";
    "layers: 1" => "layers: 0", "4:38", "model.decoder.layers", "it is 0", "1 or above";
    "layers: 1" => "layers: 99999999999", "4:38", "model.decoder.layers", "it is too large", "at most 2147483648";
    "heads: 2" => "heads: 0", "4:48", "model.decoder.heads", "it is 0", "1 or above";
    "heads: 2" => "heads: 4, kv_heads: 3", "4:61", "model.decoder.kv_heads", "4 query heads cannot share 3", "divisor of `heads`, 4";
    "heads: 2" => "heads: 3", "4:26", "model.decoder.hidden_size", "3 heads of an even width do not make 16", "a multiple of 6";
    "max_length: 16" => "max_length: 10", "4:86", "model.decoder.max_length", "the longest prompt is 7 tokens", "write 15 or above";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, zero_stage: most}", "5:45", "strategy.zero_stage", "`most`", "a stage, 0 to 3, or `auto`";
    "{micro_batch_size: 8}" => "{micro_batch_tokens: 14}", "5:32", "strategy.micro_batch_tokens", "has up to 15 tokens", "write 15 or above";
    "{micro_batch_size: 8}" => "{micro_batch_tokens: 0}", "5:32", "strategy.micro_batch_tokens", "it is 0", "write a whole number, 1 or above";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, zero_stage: 4}", "5:45", "strategy.zero_stage", "there is no stage 4", "write 0, 1, 2, 3 or auto";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, precision: {fp16: {initial_scale: 3}}}", "5:67", "strategy.precision.fp16.initial_scale", "3.0 is out of range", "a power of two, 1 to 2^24";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, precision: {fp16: {growth_interval: 0}}}", "5:69", "strategy.precision.fp16.growth_interval", "it is 0", "write a whole number, 1 or above";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, include: zero4}", "5:42", "strategy.include", "no ready strategy `zero4`", "did you mean `zero1`?";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, include: {zero3: {}}}", "5:33", "strategy.include", "expected a name, found a mapping", "choose from `ddp`";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, recompute: some_blocks}", "5:44", "strategy.recompute", "no `some_blocks` here", "choose from `none`, `selective`, `full`";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, reduction: some_tree}", "5:44", "strategy.reduction", "no `some_tree` here", "choose from `ordered`, `library`";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, offload: {optimiser: none}}", "5:43", "strategy.offload.optimiser", "no such field", "did you mean `optimizer`?";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, offload: {optimizer: disk}}", "5:54", "strategy.offload.optimizer", "no `disk` here", "choose from `none`, `between_steps`, `cpu_step`";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, offload: {params: between_steps}}", "5:51", "strategy.offload.params", "the policy's weights are needed at all times", "roles.reference.strategy.offload.params";
    "backend: cpu" => "backend: cpu\nroles:\n  policy: {strategy: {offload: {params: between_steps}}}", "4:41", "roles.policy.strategy.offload.params", "the policy's weights are needed at all times", "write `none`";
    "{micro_batch_size: 8}" => "{micro_batch_size: 0}", "5:30", "strategy.micro_batch_size", "it is 0", "1 or above";
    "{micro_batch_size: 8}" => "{micro_batch_size: 8, collective_timeout_s: 0}", "5:55", "strategy.collective_timeout_s", "0.0 is out of range", "seconds above 0";
    "backend: cpu" => "backend: cpu\nroles:\n  reference: {strategy: {micro_batch_size: 0}}", "4:44", "roles.reference.strategy.micro_batch_size", "it is 0", "1 or above";
    "backend: cpu" => "backend: cpu\nthreads: 0", "3:10", "threads", "0 is out of range", "1 or above, at most 4096";
    "    steps: 20" => "    scoring: {workers: 1000000}\n    steps: 20", "10:24", "pipeline.rlvr.scoring.workers", "1000000 is out of range", "1 or above, at most 4096";
    "digits: 6" => "digits: 19", "9:22", "pipeline.rlvr.data.sort.digits", "19 is out of range", "from 2 to 18";
    "    steps: 20" => "    warmup: {steps: 5, batch_size: 4, optimizer: {adamw: {learning_rate: 1.0e-3}}}\n    steps: 0", "10:5", "pipeline.rlvr.warmup", "only evaluates the model", "--set pipeline.rlvr.warmup=null";
    "    steps: 20" => "    evaluation: {temperature: 0}\n    steps: 20", "10:31", "pipeline.rlvr.evaluation.temperature", "0.0 is out of range", "0.001 or above";
    "    steps: 20" => "    evaluation: {top_p: 0}\n    steps: 20", "10:25", "pipeline.rlvr.evaluation.top_p", "0.0 is out of range", "above 0, at most 1";
    "    steps: 20" => "    evaluation: {max_new_tokens: 0}\n    steps: 20", "10:34", "pipeline.rlvr.evaluation.max_new_tokens", "it is 0", "1 or above";
    "    steps: 20" => "    evaluation: {max_new_tokens: 6}\n    steps: 20", "10:34", "pipeline.rlvr.evaluation.max_new_tokens", "the longest answer and its end are 7 tokens", "write 7 or above";
    "    steps: 20" => "    evaluation: {max_new_tokens: 12}\n    steps: 20", "4:86", "model.decoder.max_length", "with `evaluation.max_new_tokens`, 12, it exceeds 16", "write 19 or above";
    "group_size: 4" => "group_size: 1", "12:17", "pipeline.rlvr.group_size", "a group of 1 has no mean", "2 or above";
    "group_size: 4" => "group_size: 1\n    algorithm: {advantage: reinforce}\n    selection: {mixed_groups: {}}", "14:17", "pipeline.rlvr.selection.mixed_groups", "no group of 1 is mixed", "2 or above";
    "group_size: 4" => "group_size: 4\n    mini_batches: 3", "13:19", "pipeline.rlvr.mini_batches", "4 prompts are no multiple of 3 mini-batches", "divisor of `prompts_per_step`";
    "max_new_tokens: 8" => "max_new_tokens: 6", "13:31", "pipeline.rlvr.rollout.max_new_tokens", "the longest answer and its end are 7 tokens", "write 7 or above";
    "batch_size: 16" => "batch_size: 16, temperature: 0", "13:63", "pipeline.rlvr.rollout.temperature", "0.0 is out of range", "0.001 or above";
    "batch_size: 16" => "batch_size: 16, kv_cache: {memory: 0}", "13:69", "pipeline.rlvr.rollout.kv_cache.memory", "0.0 is out of range", "above 0, at most 1";
    "batch_size: 16" => "batch_size: 16, stop: [a, '']", "13:50", "pipeline.rlvr.rollout.stop", "a text is empty", "</answer>";
    "batch_size: 16" => "batch_size: 16, min_p: 2", "13:57", "pipeline.rlvr.rollout.min_p", "2.0 is out of range", "from 0 to 1";
    "batch_size: 16" => "batch_size: 16, repetition_penalty: 0", "13:70", "pipeline.rlvr.rollout.repetition_penalty", "0.0 is out of range", "above 0";
    "batch_size: 16" => "batch_size: 16, top_p: 1.5", "13:57", "pipeline.rlvr.rollout.top_p", "1.5 is out of range", "above 0, at most 1";
    "    steps: 20" => "    algorithm: {loss: {clipped: {clip_low: 1}}}\n    steps: 20", "10:44", "pipeline.rlvr.algorithm.loss.clipped.clip_low", "1.0 is out of range", "above 0 and below 1";
    "    steps: 20" => "    algorithm: {loss: {clipped: {dual_clip: 1.1}}}\n    steps: 20", "10:45", "pipeline.rlvr.algorithm.loss.clipped.dual_clip", "1.1 is out of range", "above 1 + `clip_high`";
    "    steps: 20" => "    algorithm: {loss: {gspo: {clip_high: 0}}}\n    steps: 20", "10:42", "pipeline.rlvr.algorithm.loss.gspo.clip_high", "0.0 is out of range", "above 0";
    "    steps: 20" => "    algorithm: {loss: {cispo: {min_ratio: 0.8, max_ratio: 0.28}}}\n    steps: 20", "10:59", "pipeline.rlvr.algorithm.loss.cispo.max_ratio", "0.28 is out of range", "both are ratios";
    "    steps: 20" => "    algorithm: {loss: {sapo: {tau_positive: -1}}}\n    steps: 20", "10:45", "pipeline.rlvr.algorithm.loss.sapo.tau_positive", "-1.0 is out of range", "above 0";
    "    steps: 20" => "    algorithm: {loss: {topr: {negative_weight: -1}}}\n    steps: 20", "10:48", "pipeline.rlvr.algorithm.loss.topr.negative_weight", "-1.0 is out of range", "0 or above";
    "    steps: 20" => "    algorithm: {loss: {topr: {clip_low: 0.1}}}\n    steps: 20", "10:31", "pipeline.rlvr.algorithm.loss.topr.clip_low", "no such field", "choose from `positive_weight`, `negative_weight`";
    "    steps: 20" => "    algorithm: {loss: {reinforce: {}}}\n    steps: 20", "10:17", "pipeline.rlvr.algorithm.loss", "`reinforce` has no fields", "write `reinforce`";
    "    steps: 20" => "    algorithm: {loss: vtrace}\n    steps: 20", "10:23", "pipeline.rlvr.algorithm.loss", "no `vtrace` here", "choose from `clipped`, `gspo`";
    "    steps: 20" => "    algorithm: {advantage: {grpo: {eps: 0}}}\n    steps: 20", "10:41", "pipeline.rlvr.algorithm.advantage.grpo.eps", "0.0 is out of range", "above 0";
    "    steps: 20" => "    algorithm: {advantage: {grpo: {scale: std}}}\n    steps: 20", "10:43", "pipeline.rlvr.algorithm.advantage.grpo.scale", "no `std` here", "`group_std`, `batch_std`, `none`";
    "    steps: 20" => "    algorithm: {advantage: {reinforce: {gamma: 1.1}}}\n    steps: 20", "10:48", "pipeline.rlvr.algorithm.advantage.reinforce.gamma", "1.1 is out of range", "above 0, at most 1";
    "    steps: 20" => "    algorithm: {reward_clip: 0}\n    steps: 20", "10:30", "pipeline.rlvr.algorithm.reward_clip", "0.0 is out of range", "above 0";
    "    steps: 20" => "    algorithm: {advantage_clip: -2}\n    steps: 20", "10:33", "pipeline.rlvr.algorithm.advantage_clip", "-2.0 is out of range", "above 0";
    "    steps: 20" => "    algorithm: {aggregation: seq_mean_token_sum_norm}\n    steps: 20", "10:30", "pipeline.rlvr.algorithm.aggregation.seq_mean_token_sum_norm.length", "it is missing", "add `length:`";
    "    steps: 20" => "    algorithm: {aggregation: {seq_mean_token_sum_norm: {length: 0}}}\n    steps: 20", "10:65", "pipeline.rlvr.algorithm.aggregation.seq_mean_token_sum_norm.length", "it is 0", "1 or above";
    "    steps: 20" => "    algorithm: {kl_in: reward}\n    steps: 20", "10:5", "pipeline.rlvr.algorithm.kl_coef", "at 0 nothing is taken off the reward", "above 0, such as 0.001";
    "    steps: 20" => "    algorithm: {kl_coef: 0.1, kl_in: {loss: {estimator: k4}}}\n    steps: 20", "10:57", "pipeline.rlvr.algorithm.kl_in.loss.estimator", "no `k4` here", "`k1`";
    "    steps: 20" => "    algorithm: {kl_coef: 0.1, kl_in: {reward: {adaptive: {target: 0}}}}\n    steps: 20", "10:67", "pipeline.rlvr.algorithm.kl_in.reward.adaptive.target", "0.0 is out of range", "above 0";
    "    steps: 20" => "    algorithm: {rollout_correction: truncate}\n    steps: 20", "10:37", "pipeline.rlvr.algorithm.rollout_correction", "all its weights are 1", "write `old_logprobs: recompute`";
    "    steps: 20" => "    algorithm: {old_logprobs: recompute, rollout_correction: {mask: {min: 2, max: 1}}}\n    steps: 20", "10:83", "pipeline.rlvr.algorithm.rollout_correction.mask.max", "1.0 is out of range", "above `min`";
    "    steps: 20" => "    algorithm: {old_logprobs: recompute, rollout_correction: {truncate: {max: 0}}}\n    steps: 20", "10:79", "pipeline.rlvr.algorithm.rollout_correction.truncate.max", "0.0 is out of range", "above 0";
    "    steps: 20" => "    algorithm: {loss: gspo, advantage: {reinforce: {gamma: 0.9}}}\n    steps: 20", "10:23", "pipeline.rlvr.algorithm.loss", "one ratio a sequence", "write `gamma: 1`";
    "    steps: 20" => "    algorithm: {loss: gspo, advantage: reinforce, kl_coef: 0.1, kl_in: reward}\n    steps: 20", "10:23", "pipeline.rlvr.algorithm.loss", "one ratio a sequence", "`kl_in: loss`";
    "    steps: 20" => "    algorithm: {kl_coef: -0.1}\n    steps: 20", "10:26", "pipeline.rlvr.algorithm.kl_coef", "-0.1 is out of range", "0 or above";
    "learning_rate: 1.0e-3" => "learning_rate: 0", "15:30", "pipeline.rlvr.optimizer.adamw.learning_rate", "0.0 is out of range", "above 0";
    "learning_rate: 1.0e-3" => "learning_rate: .nan", "15:30", "pipeline.rlvr.optimizer.adamw.learning_rate", "NaN is out of range", "above 0";
    "learning_rate: 1.0e-3" => "learning_rate: 1e999", "15:30", "pipeline.rlvr.optimizer.adamw.learning_rate", "inf is out of range", "above 0";
    "{learning_rate: 1.0e-3}" => "{learning_rate: 1.0e-3, betas: [0.9, 1.0]}", "15:38", "pipeline.rlvr.optimizer.adamw.betas", "1.0 is out of range", "from 0 to below 1";
    "learning_rate: 1.0e-3}" => "learning_rate: 1.0e-3}\n      schedule: {linear: {warmup_steps: 20}}", "16:41", "pipeline.rlvr.optimizer.schedule.linear.warmup_steps", "20 of 20 steps leave none to fall", "fewer than the steps";
    "learning_rate: 1.0e-3}" => "learning_rate: 1.0e-3}\n      schedule: {wsd: {warmup_steps: 5, decay_steps: 16}}", "16:54", "pipeline.rlvr.optimizer.schedule.wsd.decay_steps", "16 do not fit in 20 steps, 5 of which are the warm-up", "no more than are left";
    "learning_rate: 1.0e-3}" => "learning_rate: 1.0e-3, decays: biases}", "15:46", "pipeline.rlvr.optimizer.adamw.decays", "no `biases` here", "choose from `matrices`, `all`";
    "learning_rate: 1.0e-3}" => "learning_rate: 1.0e-3}\n      schedule: {cosine: {final_ratio: 2}}", "16:40", "pipeline.rlvr.optimizer.schedule.cosine.final_ratio", "2.0 is out of range", "from 0 to 1";
    "    steps: 20" => "    evaluation: {every: 0}\n    steps: 20", "10:25", "pipeline.rlvr.evaluation.every", "it is 0", "1 or above";
    "    steps: 20" => "    evaluation: {prompts: 9999999}\n    steps: 20", "10:27", "pipeline.rlvr.evaluation.prompts", "9999999 are too many", "or fewer";
    "{digits: 6}" => "{digits: 3}\n    evaluation: {prompts: 500}", "10:27", "pipeline.rlvr.evaluation.prompts", "500 held-out prompts are asked for", "or fewer";
    "sort: {digits: 6}" => "file: {path: nowhere.jsonl}", "9:20", "pipeline.rlvr.data.file.path", "there is no file nowhere.jsonl; looked for ", "give the path of a .jsonl, .json, .csv, .parquet or .arrow file";
    "sort: {digits: 6}" => "file: {path: Cargo.toml}", "9:20", "pipeline.rlvr.data.file.path", "Cargo.toml is not a data file: its name must end with .jsonl, .json, .csv, .parquet or .arrow", "rename it, or write its records in one of these formats";
    "sort: {digits: 6}" => "file: {path: ../tests/golden/tables/verl.parquet}", "9:20", "pipeline.rlvr.data.file.path", "verl.parquet:1: there is no column `answer`, only `data_source`, `prompt`", "`columns: {prompt: ..., answer: ...}`";
    "sort: {digits: 6}" => "file: {path: nowhere.jsonl, columns: varl}", "9:44", "pipeline.rlvr.data.file.columns", "expected `roll`, `verl`, `trl`, `openrlhf`, or columns", "write `roll`";
    "sort: {digits: 6}" => "file: {path: nowhere.jsonl, columns: {promt: a}}", "9:45", "pipeline.rlvr.data.file.columns.promt", "no such field", "did you mean `prompt`?";
    "sort: {digits: 6}" => "file: {path: nowhere.jsonl, columns: {answer: null}}", "9:53", "pipeline.rlvr.data.file.columns.answer", "`reward: exact` compares with an answer, and records have no answers", "name the column of their answers";
    "sort: {digits: 6}" => "file: {path: nowhere.jsonl, domains: [a]}", "9:35", "pipeline.rlvr.data.file.domains", "its records have no domain", "`columns: {domain: ...}`";
    "sort: {digits: 6}" => "file: {path: nowhere.jsonl, held_out: also.jsonl, held_out_percent: 5}", "9:75", "pipeline.rlvr.data.file.held_out_percent", "with `held_out` none of these prompts is", "leave one of the two out";
    "      sort: {digits: 6}\n" => "      file: {path: ../tests/golden/tables/verl.parquet, columns: verl, held_out_percent: 40}\n    evaluation: {prompts: 5}\n", "4:3", "model.decoder", "the prompt of row", "name a column of texts";

    // YAML itself.
    "steps: 20" => "steps: [20", "11:21", "", "illegal placement of ':'", "mend the YAML";
    "learning_rate: 1.0e-3}" => "learning_rate: 1.0e-3", "15:14", "", "unclosed", "mend the YAML";
    "    steps: 20" => "\tsteps: 20", "10:2", "", "tabs disallowed", "indent with spaces";
    "name: small" => "name: a: b", "1:8", "", "mapping values are not allowed", "mend the YAML";
    "name: small" => "---\nname: small\n---", "4:1", "", "more than one document", "remove what follows";
};

#[test]
fn a_reward_that_needs_no_field_is_a_word() {
    let reward = |set: &str| {
        let PipelineConfig::Rlvr(rlvr) = read(SMALL, &[set]).unwrap().config.pipeline else { unreachable!() };
        rlvr.reward
    };
    assert_eq!(reward("pipeline.rlvr.reward=countdown"), reward("pipeline.rlvr.reward=[{countdown: {}}]"));
    assert_eq!(reward("pipeline.rlvr.reward=math"), reward("pipeline.rlvr.reward=[{math: {}}]"));
}

#[test]
fn malformed_configs_name_the_field_the_place_and_the_fix() {
    for case in MALFORMED {
        let text = SMALL.replacen(case.from, case.to, 1);
        assert_ne!(text, SMALL, "{} is in the config", case.from);
        let error = invalid(&text, &[]);
        let message = error.to_string();
        assert!(
            error.position.ends_with(&format!("run.yaml:{}", case.position)),
            "at {}: {message}",
            case.position
        );
        assert_eq!(error.field, case.field, "{message}");
        assert!(error.message.contains(case.message), "{}: {message}", case.message);
        assert!(error.help.contains(case.help), "{}: {message}", case.help);
        // The caret is in the line of the position, and the user sees the full message.
        let line = case.position.split(':').next().unwrap();
        assert!(error.snippet.contains(&format!(" {line} | ")) && error.snippet.ends_with('^'), "{message}");
        assert!(message.contains(case.field) && message.contains(case.help), "{message}");
    }
    assert!(MALFORMED.len() >= 30);
}

#[test]
fn whole_files_that_are_no_config_are_refused() {
    let check = |text: &str, position: &str, message: &str| {
        let error = invalid(text, &[]);
        assert!(error.position.ends_with(position) && error.message.contains(message), "{error}");
    };
    check("", "run.yaml:1:1", "the file has no field");
    check("# nothing\n", "run.yaml:2:1", "the file has no field");
    check("just text\n", "run.yaml:1:1", "found the text `just text`");
    check("- name: small\n", "run.yaml:1:1", "found a list");
    check("[1]: 2\n", "run.yaml:1:1", "expected string scalar");
    check("name: *nobody\n", "run.yaml:1:7", "unknown anchor");
    check(&"[".repeat(100_000), "run.yaml:1:256", "recursion limit exceeded");
    check(&"{a: ".repeat(100_000), "", "");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent.yaml");
    let error = Loaded::read(&path, &[]).unwrap_err();
    let shown = path.display();
    let expected =
        format!("cannot read the config {shown}, looked for at {shown}; give the path of a YAML file");
    assert_eq!(error.to_string(), expected);
    std::fs::write(&path, b"name: \xff").unwrap();
    assert!(matches!(Loaded::read(&path, &[]), Err(Error::Read { .. })));
}

#[test]
fn an_error_reads_like_a_compilers() {
    let error = invalid(&SMALL.replace("group_size", "group_sise"), &[]).to_string();
    let (position, rest) = error.split_once("run.yaml").unwrap();
    assert!(position.starts_with('/'));
    assert_eq!(
        rest,
        ":12:5: pipeline.rlvr.group_sise: there is no such field
    |
 12 |     group_sise: 4
    |     ^^^^^^^^^^
  help: did you mean `group_size`?"
    );
}

#[test]
fn set_overrides_the_file() {
    let sets = [
        "seed=7",
        "pipeline.rlvr.steps=3",
        "pipeline.rlvr.evaluation.every=1",
        "pipeline.rlvr.optimizer.adamw.betas=[0.5, 0.6]",
        "pipeline.rlvr.data={addition: {digits: 2}}",
        "roles.reference.strategy.micro_batch_size=2",
        "seed=8",
    ];
    let config = read(SMALL, &sets).unwrap().config;
    let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { panic!("another pipeline") };
    assert_eq!(config.seed, 8, "the last one counts");
    assert_eq!((rlvr.steps, rlvr.evaluation.every), (Steps::Count(3), 1));
    assert_eq!(rlvr.optimizer.adamw.betas, [0.5, 0.6]);
    assert_eq!(rlvr.data, DataConfig::Addition(AdditionConfig { digits: 2, reversed: false }));
    assert_eq!(config.roles.reference.strategy.micro_batch_size, Some(2));
}

#[test]
fn a_wrong_set_is_named() {
    let check = |set: &str, field: &str, message: &str, help: &str| {
        let error = invalid(SMALL, &["seed=1", set]);
        assert_eq!(error.position, format!("--set {set}"), "{error}");
        assert_eq!(error.field, field, "{error}");
        assert!(error.message.contains(message) && error.help.contains(help), "{error}");
    };
    check("pipeline.rlvr.step=1", "pipeline.rlvr.step", "no such field", "did you mean `steps`?");
    check("pipelin.rlvr.steps=1", "pipelin", "no such field", "did you mean `pipeline`?");
    check("pipeline.rlvr.steps", "pipeline.rlvr.steps", "no `=`", "--set path.to.field=value");
    check("pipeline..steps=1", "pipeline..steps", "empty", "--set path.to.field=value");
    check("=1", "", "empty", "--set path.to.field=value");
    check("seed.x=1", "seed.x", "there is no `x` below the number 1", "replace it whole");
    check("pipeline.rlvr.steps=many", "pipeline.rlvr.steps", "the text `many`", "write a whole number");
    check("pipeline.rlvr.steps=", "pipeline.rlvr.steps", "found nothing", "write a whole number");
    check("pipeline.rlvr.steps=[1", "pipeline.rlvr.steps", "no YAML", "mend the YAML");
    let field = "pipeline.rlvr.data";
    check("pipeline.rlvr.data.addition.digits=2", field, "found `sort`, `addition`", "data={addition: ...}'");
    check("pipeline.rlvr.group_size=1", "pipeline.rlvr.group_size", "a group of 1", "2 or above");
    check("pipeline.rlvr.rollout={batch_size: 1}", "pipeline.rlvr.rollout.max_new_tokens", "missing", "add");
}

#[test]
fn text_that_looks_like_a_number_can_be_quoted() {
    assert_eq!(read(SMALL, &["name=\"12\""]).unwrap().config.name, "12");
}

#[test]
fn anchors_and_merges_are_read_and_errors_point_at_the_text() {
    let text = SMALL
        .replace("    steps: 20", "    warmup:\n      steps: 5\n      batch_size: 4\n      optimizer: &adam {adamw: {learning_rate: 0.1}}\n    steps: 20")
        .replace("    optimizer:\n      adamw: {learning_rate: 1.0e-3}", "    optimizer: *adam");
    let config = read(&text, &[]).unwrap().config;
    let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { panic!("another pipeline") };
    assert_eq!(rlvr.warmup.as_ref().unwrap().optimizer, rlvr.optimizer);
    let error = invalid(&text.replace("0.1}", "-0.1}"), &[]);
    assert!(error.position.ends_with(":13:48"), "{error}");
}

#[test]
fn only_an_advantage_without_groups_takes_groups_of_one() {
    for advantage in ["reinforce", "remax"] {
        let advantage = format!("pipeline.rlvr.algorithm.advantage={advantage}");
        assert!(read(SMALL, &["pipeline.rlvr.group_size=1", &advantage]).is_ok());
    }
    assert!(read(SMALL, &["pipeline.rlvr.group_size=1"]).is_err());
}

#[test]
fn a_critic_and_advantages_from_its_values_go_together() {
    let gae = "pipeline.rlvr.algorithm={advantage: {gae: {lambda: 0.9}}}";
    let critic = "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1}}}";
    let run = resolve(&[gae, critic, "roles.critic.strategy.zero_stage=3"], &machine()).unwrap();
    let PipelineConfig::Rlvr(rlvr) = &run.config.pipeline else { panic!("another pipeline") };
    assert_eq!(rlvr.algorithm.advantage, Advantage::Gae(GaeConfig { gamma: 1.0, lambda: 0.9 }));
    let found = rlvr.critic.as_ref().unwrap();
    assert_eq!((found.value_clip, found.warmup_steps), (None, 0));
    assert_eq!(run.critic.unwrap().strategy.zero_stage, 3);
    assert_eq!((run.policy.strategy.zero_stage, run.reference), (0, None));
    let check = |sets: &[&str], field: &str, message: &str| {
        let error = invalid(SMALL, sets);
        assert!(error.field == field && error.message.contains(message), "{error}");
    };
    check(&[gae], "pipeline.rlvr.critic", "`advantage: gae` needs its values");
    check(&[critic], "pipeline.rlvr.critic", "no advantage is made from its values");
    let path = "pipeline.rlvr.critic";
    check(&[gae, critic, "pipeline.rlvr.critic.value_clip=0"], &format!("{path}.value_clip"), "0.0 is out");
    check(
        &[gae, critic, "pipeline.rlvr.critic.warmup_steps=20"],
        &format!("{path}.warmup_steps"),
        "20 of 20",
    );
    let gae = "pipeline.rlvr.algorithm={advantage: {gae: {lambda: 2}}}";
    check(&[gae, critic], "pipeline.rlvr.algorithm.advantage.gae.lambda", "2.0 is out of range");
    let gspo = "pipeline.rlvr.algorithm={advantage: gae, loss: gspo}";
    check(&[gspo, critic], "pipeline.rlvr.algorithm.loss", "these advantages differ from token to token");
}

#[test]
fn what_is_begun_ahead_is_trained_on_in_time() {
    let rollout = |sets: &[&str]| {
        let config = read(SMALL, sets).unwrap().config;
        assert_eq!(read(&config.to_yaml(), &[]).unwrap().config, config);
        let PipelineConfig::Rlvr(rlvr) = config.pipeline else { panic!("another pipeline") };
        (rlvr.rollout.asynchronous.ahead, rlvr.rollout.asynchronous.staleness_bound())
    };
    let path = "pipeline.rlvr.rollout.async";
    assert_eq!(rollout(&[]), (0, 0));
    assert_eq!(rollout(&["pipeline.rlvr.rollout.async={ahead: 0}"]), (0, 0));
    assert_eq!(rollout(&["pipeline.rlvr.rollout.async={ahead: 2}"]), (2, 2));
    assert_eq!(rollout(&["pipeline.rlvr.rollout.async={ahead: 1, max_staleness: 3}"]), (1, 3));
    let check = |sets: &[&str], field: &str, message: &str, help: &str| {
        let error = invalid(SMALL, sets);
        assert_eq!(error.field, format!("{path}.{field}"), "{error}");
        assert!(error.message.contains(message) && error.help.contains(help), "{error}");
    };
    let stale = "max_staleness";
    check(&["pipeline.rlvr.rollout.async={max_staleness: 1}"], stale, "nothing is stale", "`ahead: 1`");
    let set = "pipeline.rlvr.rollout.async={ahead: 2, max_staleness: 1}";
    check(&[set], stale, "begun 2 steps ahead", "write 2 or above");
    let mixed = "pipeline.rlvr.selection.mixed_groups={}";
    let set = "pipeline.rlvr.rollout.async={ahead: 1}";
    check(&[set, mixed], "ahead", "samples whole batches", "leave `mixed_groups` out");
    check(&[set, "pipeline.rlvr.rollout.strict=true"], "ahead", "an earlier step", "leave `strict` out");
    check(&["pipeline.rlvr.rollout.async={steps: 1}"], "steps", "no such field", "`ahead`");
}

#[test]
fn a_resolved_config_reads_back_as_the_same_run() {
    let machine = machine();
    let sets = ["backend=auto", "devices=all", "pipeline.rlvr.algorithm.kl_coef=0.1"];
    let run = resolve(&sets, &machine).unwrap();
    assert_eq!((run.config.backend.as_str(), &run.config.devices), ("gpu", &Devices::Count(4)));
    assert_eq!((run.config.threads, run.threads), (Some(2), 2));
    let again = read(&run.config.to_yaml(), &[]).unwrap().resolve(&machine).unwrap();
    assert_eq!(again, run);
}

#[test]
fn a_resolved_data_file_is_found_from_any_folder() {
    let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile_in(".").unwrap();
    for n in 0..200 {
        std::io::Write::write_all(
            &mut file,
            format!("{{\"prompt\": \"{n}\", \"answer\": {n}}}\n").as_bytes(),
        )
        .unwrap();
    }
    let name = file.path().file_name().unwrap().to_str().unwrap();
    let pattern = name.replace("l", "?");
    for path in [name, &pattern, &format!("[{pattern}]")] {
        let data = format!("pipeline.rlvr.data={{file: {{path: {path}}}}}");
        let run = resolve(&[&data, "pipeline.rlvr.evaluation.prompts=5"], &machine()).unwrap();
        let PipelineConfig::Rlvr(rlvr) = &run.config.pipeline else { panic!("another pipeline") };
        let DataConfig::File(file) = &rlvr.data else { panic!("{:?}", rlvr.data) };
        assert_eq!(file.path.0, [std::env::current_dir().unwrap().join(name)]);
    }
}

#[test]
fn ready_strategies_are_included_under_what_stands_beside_them() {
    let strategy = |sets: &[&str]| resolve(sets, &machine()).unwrap().policy.strategy;
    let plain = strategy(&[]);
    let ready = READY.map(|(name, text)| {
        assert!(text.starts_with("# ") && text.lines().nth(1).is_some_and(|line| !line.starts_with('#')));
        strategy(&[&format!("strategy.include={name}")])
    });
    let [ddp, zero1, zero2_bf16, zero2_fp16, zero3, zero3_cpu_offload] = &ready;
    assert_eq!(*ddp, plain);
    assert_eq!(*zero1, Strategy { zero_stage: 1, ..plain.clone() });
    let bf16 = |stage| Strategy { zero_stage: stage, precision: Precision::Bf16, ..plain.clone() };
    assert_eq!((zero2_bf16, zero3), (&bf16(2), &bf16(3)));
    let fp16 = Precision::Fp16(Fp16Config::default());
    assert_eq!(*zero2_fp16, Strategy { precision: fp16, ..bf16(2) });
    let offload = OffloadConfig { optimizer: OptimizerOffload::CpuStep, ..plain.offload.clone() };
    assert_eq!(*zero3_cpu_offload, Strategy { recompute: Recompute::Full, offload, ..bf16(3) });

    // Fields next to an include override it, also in nested sections, and a role may have another one.
    let sets = [
        "strategy={include: zero3_cpu_offload, micro_batch_size: 8, recompute: none, offload: {params: none}}",
        "roles.reference.strategy={include: zero1, precision: bf16}",
        "pipeline.rlvr.algorithm.kl_coef=0.1",
        "roles.critic.strategy={include: zero2_bf16}",
        "pipeline.rlvr.algorithm.advantage={gae: {}}",
        "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1.0e-3}}}",
    ];
    let run = resolve(&sets, &machine()).unwrap();
    let (policy, reference) = (&run.policy.strategy, run.reference.as_ref().unwrap().strategy.clone());
    assert_eq!((policy.zero_stage, policy.recompute), (3, Recompute::None));
    assert_eq!(policy.offload.optimizer, OptimizerOffload::CpuStep);
    let critic = &run.critic.as_ref().unwrap().strategy;
    assert_eq!((critic.zero_stage, critic.recompute), (2, Recompute::None));
    assert_eq!((reference.zero_stage, reference.precision), (1, Precision::Bf16));
    let yaml = run.config.to_yaml();
    assert!(!yaml.contains("include") && yaml.contains("zero_stage: 3"), "{yaml}");
}

#[test]
fn a_run_knows_its_ranks_and_their_share() {
    let run = resolve(&["devices=2", "pipeline.rlvr.mini_batches=2"], &machine()).unwrap();
    assert_eq!((run.world_size, run.threads, &run.policy.ordinals), (2, 4, &vec![0, 0]));
    let expected = Batches {
        prompts_per_rank: 2,
        sequences_per_step: 16,
        sequences_per_update: 4,
        micro_batches_per_update: Some(1),
    };
    assert_eq!(run.batches, expected);
    assert_eq!(run.reference, None);

    let sets = [
        "pipeline.rlvr.algorithm.kl_coef=0.1",
        "roles.reference={strategy: {zero_stage: 3, micro_batch_size: 3}}",
    ];
    let reference = resolve(&sets, &machine()).unwrap().reference.unwrap();
    assert_eq!((reference.strategy.zero_stage, reference.strategy.micro_batch_size), (3, 3));
    assert_eq!(reference.strategy.offload, OffloadConfig::default());

    let sets = [
        "pipeline.rlvr.algorithm.kl_coef=0.1",
        "strategy.precision=bf16",
        "strategy.recompute=full",
        "strategy.deterministic=false",
        "roles.reference={strategy: {precision: fp32, offload: {params: between_steps}}}",
    ];
    let run = resolve(&sets, &machine()).unwrap();
    let (policy, reference) = (run.policy.strategy, run.reference.unwrap().strategy);
    assert_eq!((policy.precision, policy.recompute), (Precision::Bf16, Recompute::Full));
    assert_eq!((reference.precision, reference.recompute), (Precision::Fp32, Recompute::Full));
    assert!(!policy.deterministic);
    assert_eq!((policy.offload.params, reference.offload.params), (Offload::None, Offload::BetweenSteps));

    let run = resolve(&["backend=gpu", "devices=[3, 1]", "threads=1"], &machine()).unwrap();
    assert_eq!((run.policy.ordinals, run.threads), (vec![3, 1], 1));
}

#[test]
fn a_launcher_brings_more_hosts() {
    let rank = |world_size, local_rank| {
        let rank = Rank {
            rank: 0,
            world_size,
            local_rank,
            master_addr: "a".to_owned(),
            master_port: 1,
            agent_store: None,
            interfaces: None,
        };
        Machine { rank: Some(rank), ..machine() }
    };
    assert_eq!(resolve(&["devices=2"], &rank(4, 1)).unwrap().world_size, 4);
    let of_two = Machine { hosts: 2, ..machine() };
    assert_eq!(resolve(&["devices=2"], &of_two).unwrap().world_size, 4);
    assert_eq!(resolve(&["devices=2"], &of_two).unwrap().policy.ordinals.len(), 2);
    for (world_size, local_rank) in [(3, 0), (1, 0), (4, 2)] {
        let error = resolve(&["devices=2"], &rank(world_size, local_rank)).unwrap_err().to_string();
        assert!(error.contains("devices: each host has 2 ranks by this"), "{error}");
    }
}

#[test]
fn what_the_machine_lacks_is_refused() {
    let check = |sets: &[&str], expected: &str, help: &str| {
        let error = resolve(sets, &machine()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(help), "{error}");
        assert!(error.starts_with("--set ") || error.contains("run.yaml:"), "{error}");
    };
    check(&["backend=gpuu"], "backend: there is no backend `gpuu`", "did you mean `gpu`?");
    check(&["backend=abacus"], "there is no backend `abacus`", "choose from `gone`, `gpu`, `cpu`");
    let strict = "pipeline.rlvr.rollout.strict=true";
    check(
        &["backend=gpu", strict],
        "`gpu` has no products of matrices that add in one order",
        "train on one of gone, cpu",
    );
    check(&["backend=picture"], "`picture` has memory and collectives, but not the math", "gone, gpu, cpu");
    check(
        &["backend=gone"],
        "`gone` cannot be used on this machine: libgone.so is not there",
        "anyroll doctor",
    );
    check(&["devices=all"], "devices: `cpu` has no devices to choose from", "write a number of ranks");
    check(&["devices=[0]"], "devices: `cpu` has no devices to choose from", "write a number of ranks");
    check(&["devices=0"], "devices: there cannot be 0 ranks on a host", "1 to 1024");
    check(&["devices=999999999999999"], "devices: there cannot be 999999999999999 ranks", "1 to 1024");
    check(&["backend=gpu", "devices=999999999999999"], "device 4 is asked for", "0 to 3");
    check(&["backend=gpu", "devices=5"], "device 4 is asked for, and `gpu` has 4 here", "0 to 3");
    check(&["backend=gpu", "devices=[1, 1]"], "device 1 is given twice", "a device of its own");
    check(&["backend=gpu", "devices=[]"], "no device is left", "at least one");
    check(
        &["devices=3"],
        "prompts_per_step: 4 prompts cannot be shared evenly by 3 ranks x mini-batches",
        "such as 6",
    );
    check(
        &["devices=4", "pipeline.rlvr.mini_batches=2"],
        "prompts_per_step: 4 prompts cannot be shared evenly by 8 ranks x mini-batches",
        "multiple of 8",
    );
    check(
        &[
            "devices=4",
            "pipeline.rlvr.warmup={steps: 1, batch_size: 6, optimizer: {adamw: {learning_rate: 1}}}",
        ],
        "warmup.batch_size: 6 records cannot be shared evenly by 4 ranks",
        "such as 8",
    );
}

#[test]
fn roles_may_have_devices_of_their_own() {
    let kl = "pipeline.rlvr.algorithm.kl_coef=0.1";
    let elsewhere = |sets: &[&str]| resolve(sets, &machine()).unwrap().elsewhere();
    assert_eq!(elsewhere(&[kl, "backend=gpu"]), [""; 0]);
    assert_eq!(elsewhere(&[kl, "backend=gpu", "roles.reference.devices=[0]"]), [""; 0]);
    assert_eq!(elsewhere(&[kl, "roles.reference.backend=gpu"]), ["the reference on gpu [0]"]);
    assert_eq!(
        elsewhere(&[kl, "roles.reference.strategy.collective_timeout_s=5"]),
        ["the reference on cpu [0]"]
    );
    let gpus = ["backend=gpu", "devices=[0, 1]"];
    let sets = ["roles.rollout={}", "devices=2"];
    assert_eq!(elsewhere(&sets), ["rollout on cpu [0, 0]"]);
    let run = resolve(&[gpus[0], gpus[1], "roles.rollout.devices=[2, 3]"], &machine()).unwrap();
    assert_eq!(run.rollout.unwrap().ordinals, [[2], [3]]);
    let run = resolve(&["backend=gpu", "roles.rollout.devices=[1, 2, 3]"], &machine()).unwrap();
    assert_eq!(run.rollout.unwrap().ordinals, [[1, 2, 3]]);
    let run = resolve(&["roles.rollout={}", "pipeline.rlvr.rollout.async.ahead=3"], &machine()).unwrap();
    assert_eq!(run.rollout.unwrap().ordinals, [[0]]);

    let check = |sets: &[&str], expected: &str, help: &str| {
        let error = resolve(sets, &machine()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(help), "{error}");
    };
    let path = "roles.reference.devices: they are";
    check(&[kl, "roles.reference.devices=2"], &format!("{path} 2, and there are 1 ranks"), "write 1");
    check(&["backend=gpu", "roles.rollout={}"], "roles.rollout.devices: device 0 is the policy's", "has not");
    let set = "roles.rollout.devices=[1, 2, 3]";
    check(&["backend=gpu", "devices=2", set], "3 devices cannot be shared evenly by 2", "a multiple of 2");
    let strict = "pipeline.rlvr.rollout.strict=true";
    check(&["roles.rollout.backend=gpu", strict], "roles.rollout.backend: `gpu` has no products", "leave it");
    let error = invalid(SMALL, &["roles.rollout={stage: 1}"]);
    assert_eq!(error.field, "roles.rollout.stage", "{error}");
}
