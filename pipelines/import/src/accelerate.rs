//! Importer of `accelerate config` files: number of processes, precision, and a deepspeed or fsdp section.

use std::path::Path;

use serde_json::Value;

use super::{
    Error, Origin, deepspeed,
    document::Document,
    ledger::Ledger,
    machines::{self, Machines},
    rules, values,
};

const LAUNCHER: &str =
    "`anyroll run` starts the ranks of a host; torchrun, Slurm or Kubernetes those of several";
const SHARDED: &str = "weights are created and kept as shards; `anyroll export` gathers them";
const BLOCKS: &str = "a model is a list of blocks, each gathered separately";

const IDLE: [(&str, &str); 39] = [
    ("command_file", LAUNCHER),
    ("mpirun_*", LAUNCHER),
    ("deepspeed_config.seq_parallel_communication_data_type", deepspeed::UNSPLIT),
    ("compute_environment", LAUNCHER),
    ("debug", "every collective is always checked and has a deadline"),
    ("machine_rank", LAUNCHER),
    ("main_process_ip", LAUNCHER),
    ("main_process_port", LAUNCHER),
    ("main_training_function", LAUNCHER),
    ("rdzv_backend", LAUNCHER),
    ("same_network", LAUNCHER),
    ("enable_cpu_affinity", LAUNCHER),
    ("commands", LAUNCHER),
    ("tpu_*", "only for TPUs"),
    ("downcast_bf16", "only for TPUs"),
    ("ipex_config.*", "only for another library"),
    ("dynamo_backend", "blocks are hand-written; nothing is compiled"),
    ("dynamo_config.*", "blocks are hand-written; nothing is compiled"),
    ("deepspeed_config.gradient_accumulation_steps", "computed from the batch sizes"),
    ("deepspeed_config.zero3_init_flag", SHARDED),
    ("deepspeed_config.zero3_save_16bit_model", SHARDED),
    ("deepspeed_config.deepspeed_multinode_launcher", LAUNCHER),
    ("deepspeed_config.deepspeed_hostfile", LAUNCHER),
    ("deepspeed_config.deepspeed_inclusion_filter", LAUNCHER),
    ("deepspeed_config.deepspeed_exclusion_filter", LAUNCHER),
    ("fsdp_config.fsdp_version", "one layout serves every stage"),
    ("fsdp_config.fsdp_auto_wrap_policy", BLOCKS),
    ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", BLOCKS),
    ("fsdp_config.fsdp_min_num_params", BLOCKS),
    ("fsdp_config.fsdp_use_orig_params", BLOCKS),
    ("fsdp_config.fsdp_backward_prefetch", "the next block is always fetched ahead"),
    ("fsdp_config.fsdp_backward_prefetch_policy", "the next block is always fetched ahead"),
    ("fsdp_config.fsdp_forward_prefetch", "the next block is always fetched ahead"),
    ("fsdp_config.fsdp_cpu_ram_efficient_loading", SHARDED),
    ("fsdp_config.fsdp_sync_module_states", SHARDED),
    ("fsdp_config.fsdp_state_dict_type", SHARDED),
    ("parallelism_config.parallelism_config_dp_replicate_size", "the other factor of all ranks"),
    ("gradient_accumulation_steps", "computed from the batch sizes"),
    ("mixed_precision_config.*", "precision is set by `strategy.precision`"),
];

/// The trainer's file counts the batch, and does not know the split.
const ROWS: &str = "ranks that share a sequence have one batch there: divide the batch by it. Heads travel between them, as with Ulysses";

/// The trainer's file counts the batch here, too.
const LAYERS: &str = "ranks that hold layers together have one batch there: divide the batch by it";

const REFUSED: [(&str, &str); 9] = [
    ("fsdp_config.fsdp_ignored_modules", "all weights are sharded"),
    ("megatron_lm_config", "layers are not split over ranks; zero_stage 3 shards their weights"),
    ("fp8_config.*", "precisions are fp32, bf16 and fp16"),
    ("megatron_lm_config.*", "layers are not split over ranks; zero_stage 3 shards their weights"),
    ("deepspeed_config.deepspeed_moe_layer_cls_names", "experts are sharded like other weights"),
    ("parallelism_config.*", "set `strategy`: its fields lay out the ranks"),
    ("use_xpu", "no backend supports it"),
    ("deepspeed_config.offload_optimizer_nvme_path", "nothing is offloaded to disks; use cpu"),
    ("deepspeed_config.offload_param_nvme_path", "nothing is offloaded to disks; use cpu"),
];

/// Imports all keys; optimizer settings of a deepspeed section go to that of `pipeline`. Returns the machines that the
/// file places.
pub(super) fn apply(ledger: &mut Ledger, path: &Path, pipeline: &str) -> Result<Option<Machines>, Error> {
    include_deepspeed(ledger, path, pipeline)?;
    unsaid_stage(ledger);
    let machines = machines::take(ledger);
    processes(ledger, machines.is_some());
    precision(ledger);
    distributed_type(ledger);
    unsplit(ledger);
    deepspeed_section(ledger, pipeline);
    fsdp_section(ledger);
    ledger.idle_all(&IDLE);
    ledger.refuse_all(&REFUSED);
    Ok(machines)
}

/// Includes `deepspeed_config_file`, relative to a folder above the file that names it, or to the current one.
fn include_deepspeed(ledger: &mut Ledger, path: &Path, pipeline: &str) -> Result<(), Error> {
    let key = "deepspeed_config.deepspeed_config_file";
    let Some(name) = ledger.text(key).filter(|_| !ledger.peek(key).is_some_and(values::is_off)) else {
        if ledger.peek(key).is_some() {
            ledger.idle(key, "none");
        }
        return Ok(());
    };
    let beside = path.ancestors().skip(1).map(|folder| folder.join(&name)).find(|file| file.exists());
    let file = beside.unwrap_or_else(|| name.into());
    let section = "deepspeed_config_file.";
    let document = Document::read(&file, Some(Origin::Deepspeed))?;
    ledger.fold(key, "its settings follow");
    ledger.include(
        document.flat().into_iter().map(|(name, value)| (format!("{section}{name}"), value)).collect(),
    );
    deepspeed::apply(ledger, section, pipeline);
    Ok(())
}

/// Applies accelerate's defaults for a section that does not set how it shards.
fn unsaid_stage(ledger: &mut Ledger) {
    let kind = ledger.text("distributed_type").unwrap_or_default().to_ascii_uppercase();
    let says = |keys: &[&str]| keys.iter().any(|key| ledger.peek(key).is_some());
    let fsdp = ["fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"];
    if kind == "FSDP" && !says(&fsdp) {
        ledger.assume(&[(fsdp[1], true.into())]);
    } else if kind == "DEEPSPEED" && ledger.draft("strategy.zero_stage").is_none() {
        ledger.assume(&[("deepspeed_config.zero_stage", 2.into())]);
    }
}

/// Takes the groups of ranks, and ignores those of size 1.
fn unsplit(ledger: &mut Ledger) {
    let size = |name: &str| format!("parallelism_config.parallelism_config_{name}_size");
    let layers = size("tp");
    if let Some(ranks @ 2..) = ledger.whole(&layers) {
        ledger.change(&layers, "strategy.tensor_parallel", ranks, LAYERS);
    }
    for name in ["cp", "sp"] {
        let Some(ranks @ 2..) = ledger.whole(&size(name)) else { continue };
        match ledger.draft("strategy.sequence_parallel").is_some() {
            false => ledger.change(&size(name), "strategy.sequence_parallel", ranks, ROWS),
            true => ledger.refuse(&size(name), "`cp_size` splits sequences, too: leave one of the two out"),
        }
        let others = format!("parallelism_config.parallelism_config_{name}_*");
        ledger.idle_all(&[(&others, "sequences are split in one way, of any length")]);
    }
    for name in ["tp", "cp", "sp"] {
        if ledger.number(&size(name)) == Some(1.0) {
            ledger.idle(&size(name), "off");
            ledger.idle_all(&[(&format!("parallelism_config.parallelism_config_{name}_*"), "off")]);
        }
    }
    let shards = size("dp_shard");
    match ledger.whole(&size("dp_replicate")).unwrap_or(1) {
        1 => ledger.idle_all(&[(&shards, "shards span all ranks")]),
        _ => rules::shard_group(ledger, &shards),
    }
}

/// Takes the number of processes. `is_placed`: the file says where the ranks of all machines meet.
fn processes(ledger: &mut Ledger, is_placed: bool) {
    let hosts = ledger.whole("num_machines").unwrap_or(1).max(1);
    match hosts {
        1 => ledger.idle_all(&[("num_machines", LAUNCHER)]),
        _ if is_placed => ledger.pass("num_machines", "WORLD_SIZE"),
        _ => ledger.fold("num_machines", "each host has its part of the processes; a launcher starts them"),
    }
    let mut processes = ledger.whole("num_processes").filter(|all| *all > 0);
    if processes.is_none() && ledger.peek("num_processes").is_some_and(|value| !values::is_unset(value)) {
        ledger.refuse("num_processes", "must be a number above 0: one process per device");
    }
    if processes.is_some_and(|all| !all.is_multiple_of(hosts)) {
        ledger.refuse("num_processes", format!("not a multiple of the {hosts} hosts; set `devices`"));
        processes = None;
    }
    devices(ledger, processes.map(|all| all / hosts), hosts);
    match ledger.truth("use_cpu") {
        Some(true) => ledger.map("use_cpu", "backend", "cpu"),
        Some(false) => ledger.change("use_cpu", "backend", "auto", "the first usable accelerator"),
        None => {}
    }
}

/// Devices of a host: the first `count`, of all or of those in `gpu_ids`.
fn devices(ledger: &mut Ledger, count: Option<u64>, hosts: u64) {
    let (key, field) = ("gpu_ids", "devices");
    let is_set = ledger.peek(key).is_some_and(|ids| !values::is_unset(ids) && !values::is_empty(ids));
    let named = ledger.text(key).filter(|text| is_set && !text.eq_ignore_ascii_case("all"));
    let named = named.filter(|_| ledger.truth("use_cpu") != Some(true));
    let listed = named.map(|text| ordinals(&text));
    let devices = match (listed, count) {
        (None, None) => None,
        (None, Some(count)) => Some(count.into()),
        (Some(Some(ids)), count) if count.is_none_or(|count| count <= ids.len() as u64) => {
            let used = &ids[..count.map_or(ids.len(), |count| count as usize)];
            match used == ids {
                true => ledger.map(key, field, used),
                false => ledger.change(key, field, used, "each process has one device"),
            }
            Some(used.into())
        }
        (Some(_), count) => {
            ledger.refuse(key, "set `devices`, a list with one number for each process of a host");
            count.map(Value::from)
        }
    };
    if let (Some(devices), Some(_)) = (devices, count) {
        match hosts {
            1 => ledger.map("num_processes", field, devices),
            _ => ledger.change("num_processes", field, devices, format!("on each of {hosts} hosts")),
        }
    }
    rules::leave_unset(ledger, &["num_processes", key]);
    ledger.idle_all(&[(key, "`devices` counts from the first device")]);
}

/// Parses `0,2` or `[0, 2]`.
fn ordinals(text: &str) -> Option<Vec<u64>> {
    text.trim_matches(['[', ']']).split(',').map(|id| id.trim().parse().ok()).collect()
}

fn precision(ledger: &mut Ledger) {
    // A bare `no` is a boolean in YAML 1.1, and a word in 1.2.
    let off = ledger.truth("mixed_precision") == Some(false);
    match ledger.text("mixed_precision").as_deref() {
        Some(_) if off => ledger.map("mixed_precision", "strategy.precision", "fp32"),
        Some(precision @ ("bf16" | "fp16")) => ledger.map("mixed_precision", "strategy.precision", precision),
        Some(_) => ledger.refuse("mixed_precision", "precisions are fp32, bf16 and fp16"),
        None => {}
    }
    ledger.switch("fp16", "strategy.precision", "fp16");
}

fn distributed_type(ledger: &mut Ledger) {
    let key = "distributed_type";
    let Some(kind) = ledger.text(key) else { return };
    match kind.to_ascii_uppercase().as_str() {
        "DEEPSPEED" | "FSDP" => ledger.idle(key, "the stage is set in its section"),
        "NO" | "FALSE" | "MULTI_GPU" | "MULTI_NPU" => ledger.map(key, "strategy.zero_stage", 0),
        "MULTI_CPU" => {
            ledger.fill("backend", "cpu");
            ledger.map(key, "strategy.zero_stage", 0);
        }
        _ => ledger.refuse(key, "this way of distributing a model is not supported"),
    }
}

fn deepspeed_section(ledger: &mut Ledger, pipeline: &str) {
    let key = |name: &str| format!("deepspeed_config.{name}");
    let stage = ledger.whole(&key("zero_stage"));
    match stage {
        Some(stage @ 0..=3) => ledger.map(&key("zero_stage"), "strategy.zero_stage", stage),
        Some(_) => ledger.refuse(&key("zero_stage"), "stages are 0, 1, 2 and 3"),
        None => {}
    }
    ledger.copy_number(&key("gradient_clipping"), &format!("{pipeline}.optimizer.max_grad_norm"));
    deepspeed::offloaded_states(ledger, &key("offload_optimizer_device"));
    deepspeed::offloaded_parameters(ledger, &key("offload_param_device"), stage.unwrap_or(2));
    if ledger.peek("deepspeed_config").is_some() {
        ledger.idle("deepspeed_config", "empty");
    }
}

fn fsdp_section(ledger: &mut Ledger) {
    let key = |name: &str| format!("fsdp_config.fsdp_{name}");
    let field = "strategy.zero_stage";
    let sharding = key("sharding_strategy");
    match ledger.text(&sharding).map(|word| word.to_ascii_uppercase()).as_deref() {
        Some("1" | "FULL_SHARD") => ledger.map(&sharding, field, 3),
        Some("2" | "SHARD_GRAD_OP") => ledger.map(&sharding, field, 2),
        Some("3" | "NO_SHARD") => ledger.map(&sharding, field, 0),
        Some(hybrid @ ("4" | "5" | "HYBRID_SHARD" | "HYBRID_SHARD_ZERO2")) => {
            ledger.fill("strategy.shard_group", "host");
            ledger.map(&sharding, field, if hybrid == "4" || hybrid == "HYBRID_SHARD" { 3 } else { 2 });
        }
        Some(_) => ledger.refuse(&sharding, "no such strategy; FULL_SHARD is zero_stage 3"),
        None => {}
    }
    let reshard = key("reshard_after_forward");
    match ledger.truth(&reshard) {
        Some(true) => ledger.map(&reshard, field, 3),
        Some(false) => ledger.map(&reshard, field, 2),
        // FSDP 1's strategies under FSDP 2's key.
        None => match ledger.text(&reshard).as_deref() {
            Some("FULL_SHARD") => ledger.map(&reshard, field, 3),
            Some("SHARD_GRAD_OP") => ledger.map(&reshard, field, 2),
            Some(_) => ledger.refuse(&reshard, "neither true nor false"),
            None => {}
        },
    }
    let offload = key("offload_params");
    match ledger.truth(&offload) {
        Some(true) => {
            let why = "weights stay on the devices as shards, unless `strategy.offload.params: cpu` is set";
            ledger.change(&offload, "strategy.offload.optimizer", "cpu_step", why);
        }
        Some(false) => ledger.idle(&offload, "off"),
        None => {}
    }
    ledger.either(&key("activation_checkpointing"), "strategy.recompute", "full", "none");
    for section in ["fsdp_config", "dynamo_config", "parallelism_config", "ipex_config"] {
        ledger.idle_all(&[(section, "empty")]);
    }
}
