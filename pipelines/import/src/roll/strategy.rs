//! ROLL's training strategy: DeepSpeed, FSDP2 or Megatron.

use serde_json::{Value, json};

use crate::{
    deepspeed,
    ledger::Ledger,
    megatron,
    shared::{ONE_PLACE, R},
};

/// Limit of a list of devices.
const MOST_DEVICES: u64 = 1 << 16;

pub(super) const ROLLOUT_DEVICES: &str = "roles.rollout.devices";

const RECOMPUTE: &str = "actor_train.model_args.disable_gradient_checkpointing";
const STAGE: &str = "strategy.zero_stage";
const BLOCKS: &str = "a model is a list of blocks, each gathered separately";

fn config(name: &str) -> String {
    format!("actor_train.strategy_args.strategy_config.{name}")
}

/// Imports the strategy's keys. Returns the number of ranks that share each layer, which have a common batch
/// there.
pub(super) fn strategy(ledger: &mut Ledger) -> u64 {
    let name = "actor_train.strategy_args.strategy_name";
    let mut ranks_per_replica = 1;
    match ledger.text(name).as_deref() {
        Some("deepspeed_train") => ledger.idle(name, "the stage is set in its section"),
        Some("fsdp2_train") => fsdp2(ledger, name),
        Some("megatron_train") => {
            ranks_per_replica = megatron::apply(ledger, name, &config(""), &config(""));
            ledger.idle_all(&[(RECOMPUTE, "set by `recompute_granularity`")]);
        }
        Some(_) => ledger.refuse(name, "set `strategy.zero_stage`"),
        None => {}
    }
    ledger.either(RECOMPUTE, "strategy.recompute", "none", "full");
    deepspeed::apply(ledger, &config(""), R);
    devices(ledger);
    let key = config("fsdp_size");
    match (ledger.whole(&key), world(ledger)) {
        (Some(size), world) if size == world => ledger.idle(&key, "shards span all ranks"),
        _ => ledger.refuse_all(&[(&key, "shards span all ranks")]),
    }
    ledger.refuse_all(&[("actor_train.strategy_args.strategy_config*", "it configures another engine")]);
    ranks_per_replica
}

/// Number of training ranks.
pub(super) fn world(ledger: &Ledger) -> u64 {
    match ledger.draft("devices") {
        Some(Value::Array(devices)) => devices.len() as u64,
        count => count.and_then(Value::as_u64).unwrap_or(1),
    }
}

/// FSDP2 shards weights unless they stay gathered after forward. Its AdamW decays all weights.
fn fsdp2(ledger: &mut Ledger, name: &str) {
    let [reshard, offload, split] = ["reshard_after_forward", "offload_policy", "ep_size"].map(config);
    let stage = if ledger.truth(&reshard) == Some(false) { 2 } else { 3 };
    ledger.change(name, STAGE, stage, "by the states that FSDP shards");
    if ledger.truth(&reshard).is_some() {
        ledger.fold(&reshard, "part of the stage");
    }
    ledger.fill(&format!("{R}.optimizer.adamw.decays"), "all");
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
    if ledger.whole(&split) == Some(1) {
        ledger.idle(&split, "off");
    }
    ledger.refuse_all(&[(&split, "experts are sharded like other weights")]);
    for (key, why) in [
        ("reduce_dtype", "gradients are summed in fp32"),
        ("wrap_policy*", BLOCKS),
        ("use_batched_model_update", "training and generation share one engine and its weights"),
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
            ledger.change(trains, "devices", json!(training.len()), "the first devices, for all roles");
            ledger.idle_all(&[(samples, ONE_PLACE)]);
        }
    }
}

/// Parses `list(range(0,8))` or `[0, 1]`; at least one device.
fn listed(text: &str) -> Option<Vec<u64>> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let found: Vec<u64> =
        if let Some(bounds) = text.strip_prefix("list(range(").and_then(|rest| rest.strip_suffix("))")) {
            let (start, end) = bounds.split_once(',').unwrap_or(("0", bounds));
            let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
            (start..end.min(start.saturating_add(MOST_DEVICES + 1))).collect()
        } else {
            let items = text.strip_prefix('[')?.strip_suffix(']')?.split(',').filter(|item| !item.is_empty());
            items.map(|item| item.parse().ok()).collect::<Option<_>>()?
        };
    Some(found).filter(|devices| (1..=MOST_DEVICES).contains(&(devices.len() as u64)))
}
