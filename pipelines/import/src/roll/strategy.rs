//! ROLL's training strategy: DeepSpeed, FSDP2 or Megatron.

use serde_json::{Value, json};

use crate::{deepspeed, ledger::Ledger, megatron, rules, shared::ONE_PLACE};

/// Limit of a list of devices.
const MOST_DEVICES: u64 = 1 << 16;

pub(super) const ROLLOUT_DEVICES: &str = "roles.rollout.devices";

const RECOMPUTE: &str = "actor_train.model_args.disable_gradient_checkpointing";
const STAGE: &str = "strategy.zero_stage";
const BLOCKS: &str = "a model is a list of blocks, each gathered separately";

fn config(name: &str) -> String {
    format!("actor_train.strategy_args.strategy_config.{name}")
}

/// Imports the strategy's keys, with the optimizer's for `pipeline`. Returns the number of ranks that share each layer
/// or sequence, which have a common batch there.
pub(super) fn strategy(ledger: &mut Ledger, pipeline: &str) -> u64 {
    let name = "actor_train.strategy_args.strategy_name";
    let mut ranks_per_replica = 1;
    match ledger.text(name).as_deref() {
        Some("deepspeed_train") => ledger.idle(name, "the stage is set in its section"),
        Some("fsdp2_train") => fsdp2(ledger, name, pipeline),
        Some("megatron_train") => {
            ranks_per_replica = megatron::apply(ledger, name, &config(""), &config(""));
            ledger.idle_all(&[(RECOMPUTE, "set by `recompute_granularity`")]);
        }
        Some(_) => ledger.refuse(name, "set `strategy.zero_stage`"),
        None => {}
    }
    ledger.either(RECOMPUTE, "strategy.recompute", "none", "full");
    deepspeed::apply(ledger, &config(""), pipeline);
    devices(ledger);
    let key = config("fsdp_size");
    match (ledger.whole(&key), world(ledger)) {
        (Some(size), world) if size == world => ledger.idle(&key, "shards span all ranks"),
        _ => rules::shard_group(ledger, &key),
    }
    ledger.refuse_all(&[("actor_train.strategy_args.strategy_config*", "it configures another engine")]);
    ranks_per_replica
        .saturating_mul(rules::ranks_of_a_sequence(ledger, "actor_train.model_args.ulysses_size"))
}

/// Number of training ranks.
pub(super) fn world(ledger: &Ledger) -> u64 {
    match ledger.draft("devices") {
        Some(Value::Array(devices)) => devices.len() as u64,
        count => count.and_then(Value::as_u64).unwrap_or(1),
    }
}

/// FSDP2 shards weights unless they stay gathered after forward. Its AdamW decays all weights.
fn fsdp2(ledger: &mut Ledger, name: &str, pipeline: &str) {
    let [reshard, offload, split] = ["reshard_after_forward", "offload_policy", "ep_size"].map(config);
    let stage = if ledger.truth(&reshard) == Some(false) { 2 } else { 3 };
    ledger.change(name, STAGE, stage, "by the states that FSDP shards");
    if ledger.truth(&reshard).is_some() {
        ledger.fold(&reshard, "part of the stage");
    }
    ledger.fill(&format!("{pipeline}.optimizer.adamw.decays"), "all");
    match ledger.truth(&offload) {
        Some(true) => {
            ledger.fill("strategy.offload.params", "cpu");
            ledger.map(&offload, "strategy.offload.optimizer", "cpu_step");
        }
        Some(false) => ledger.idle(&offload, "off"),
        None => {}
    }
    let dtype = config("param_dtype");
    match ledger.text(&dtype).as_deref() {
        Some("bf16" | "bfloat16") => ledger.map(&dtype, "strategy.precision", "bf16"),
        Some("fp16" | "float16") => ledger.map(&dtype, "strategy.precision", "fp16"),
        Some("fp32" | "float32") => ledger.map(&dtype, "strategy.precision", "fp32"),
        Some(_) => ledger.refuse(&dtype, "precisions are fp32, bf16 and fp16"),
        None => {}
    }
    rules::ranks_of_experts(ledger, &split);
    for (key, why) in [
        ("reduce_dtype", "gradients are summed in fp32"),
        ("wrap_policy*", BLOCKS),
        ("use_batched_model_update", "training and generation share one engine and its weights"),
        ("apply_expert_patch", "experts are computed by grouped products"),
        ("apply_tiled_mlp", "blocks are hand-written"),
        ("tiled_num_shards", "blocks are hand-written"),
        ("async_save_ckpt", "checkpoints are written in the background"),
    ] {
        ledger.idle_all(&[(&config(key), why)]);
    }
}

/// Sampling gets separate devices if none of them trains.
fn devices(ledger: &mut Ledger) {
    let [trains, samples] = ["actor_train.device_mapping", "actor_infer.device_mapping"];
    let Some(text) = ledger.text(trains) else { return ledger.idle_all(&[(samples, ONE_PLACE)]) };
    let Some(training) = listed(&text) else {
        return ledger.refuse_all(&[(trains, "set `devices`, a count or a list"), (samples, ONE_PLACE)]);
    };
    let sampling = ledger.text(samples).and_then(|text| listed(&text));
    match sampling.filter(|sampling| sampling.iter().all(|device| !training.contains(device))) {
        Some(sampling) if sampling.len().is_multiple_of(training.len()) => {
            ledger.map(trains, "devices", training);
            ledger.map(samples, ROLLOUT_DEVICES, sampling);
        }
        Some(_) => {
            ledger.map(trains, "devices", training);
            ledger.refuse(samples, "sampling needs as many devices as training, or a multiple");
        }
        None => {
            // Numbers count over all hosts, those of one host have a meaning here.
            let on_host = ledger.whole("num_gpus_per_node").unwrap_or(8);
            let is_first = training.iter().copied().eq(0..training.len() as u64);
            match !is_first && training.iter().all(|device| *device < on_host) {
                true => ledger.map(trains, "devices", training),
                false => ledger.change(
                    trains,
                    "devices",
                    json!(training.len()),
                    "the first devices, for all roles",
                ),
            }
            ledger.idle_all(&[(samples, ONE_PLACE)]);
        }
    }
}

/// Parses `list(range(0,8))`, `list([1, 3])`, `[0, 1]` or sums of these; at least one device.
fn listed(text: &str) -> Option<Vec<u64>> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let mut found = Vec::new();
    for part in text.split('+') {
        let list = part.strip_prefix("list(").and_then(|part| part.strip_suffix(')')).unwrap_or(part);
        match list.strip_prefix("range(").and_then(|rest| rest.strip_suffix(')')) {
            Some(bounds) => found.extend(range(bounds)?),
            None => {
                let items = list.strip_prefix('[')?.strip_suffix(']')?.split(',');
                let items = items.filter(|item| !item.is_empty()).map(|item| item.parse().ok());
                found.extend(items.collect::<Option<Vec<u64>>>()?);
            }
        }
        if found.len() as u64 > MOST_DEVICES {
            return None;
        }
    }
    Some(found).filter(|devices| !devices.is_empty())
}

/// Parses the numbers of Python's `range`: an end, a start and an end, or these with a step.
fn range(bounds: &str) -> Option<Vec<u64>> {
    let numbers = bounds.split(',').map(|number| number.parse().ok()).collect::<Option<Vec<u64>>>()?;
    let (start, end, step) = match numbers[..] {
        [end] => (0, end, 1),
        [start, end] => (start, end, 1),
        [start, end, step] if step > 0 => (start, end, step),
        _ => return None,
    };
    let step = usize::try_from(step).ok()?;
    Some((start..end).step_by(step).take(MOST_DEVICES as usize + 1).collect())
}
