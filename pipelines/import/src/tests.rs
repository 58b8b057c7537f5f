//! One file per system, as in its documentation, and the result of its import.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{Import, Machines, Origin, Outcome, changes, import};
use anyroll_pipelines::prepare::Draft;

/// Imports `text` as a file called `name`, whose system must be recognized by its keys.
#[track_caller]
fn imported(name: &str, text: &str, origin: Origin) -> Import {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    let import = import(&path, None).unwrap();
    assert_eq!(import.origin, origin);
    import
}

/// Checks rows: keys, each with the start of its row.
#[track_caller]
fn check_rows(import: &Import, expected: &[(&str, &str)]) {
    for (key, line) in expected {
        let rows: Vec<_> = import.rows.iter().filter(|row| row.key == *key).collect();
        let [row] = rows[..] else { panic!("{key}: {} rows in {:#?}", rows.len(), import.rows) };
        assert!(row.to_string().starts_with(line), "{row}\ninstead of\n{line}");
    }
}

/// Checks that the YAML has valid fields: its first error must be the missing model.
#[track_caller]
fn check_loads(import: &Import) {
    check_loads_as("rlvr", import);
}

#[track_caller]
fn check_loads_as(pipeline: &str, import: &Import) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    fs::write(&path, import.yaml()).unwrap();
    let data = format!("pipeline.{pipeline}.data={{sort: {{digits: 3}}}}");
    let error = Draft::read(&path, &[data]).and_then(|draft| draft.open().map(drop)).unwrap_err().to_string();
    assert!(error.contains("model.path: there is no folder"), "{error}\n{}", import.yaml());
}

#[track_caller]
fn check_refused(import: &Import, expected: &[&str]) {
    let refused = import.rows.iter().filter(|row| matches!(row.outcome, Outcome::Refused { .. }));
    let refused: Vec<&str> = refused.map(|row| row.key.as_str()).collect();
    assert_eq!(refused, expected, "{:#?}", import.rows);
}

const ACCELERATE_ZERO3: &str = "\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: no
mixed_precision: bf16
num_machines: 2
num_processes: 16
tpu_env: []
use_cpu: false
";

#[test]
fn accelerate_with_deepspeed() {
    let import = imported("zero3.yaml", ACCELERATE_ZERO3, Origin::Accelerate);
    check_refused(&import, &[]);
    assert_eq!(
        import.yaml(),
        "\
backend: auto
devices: 8
strategy:
  precision: bf16
  zero_stage: 3
  offload:
    optimizer: cpu_step
pipeline:
  rlvr:
    optimizer:
      max_grad_norm: 0.5
"
    );
    check_rows(
        &import,
        &[
            ("downcast_bf16", "no effect downcast_bf16"),
            ("num_processes", "changed   num_processes: 16 -> devices: 8 (on each of 2 hosts)"),
            ("deepspeed_config.offload_param_device", "no effect"),
        ],
    );
}

#[test]
fn accelerates_processes_have_the_devices_it_names() {
    let import = |more: &str| {
        imported("gpus.yaml", &format!("distributed_type: MULTI_GPU\n{more}"), Origin::Accelerate)
    };
    let zero = "strategy:\n  zero_stage: 0\n";
    for (more, devices) in [
        ("gpu_ids: 0,2\nnum_processes: 2\n", "devices:\n- 0\n- 2\n"),
        ("gpu_ids: [3]\n", "devices:\n- 3\n"),
        ("gpu_ids: '1,2,3'\nnum_processes: 4\nnum_machines: 2\n", "devices:\n- 1\n- 2\n"),
        ("gpu_ids: all\nnum_processes: 2\n", "devices: 2\n"),
        ("gpu_ids: '0,1'\nnum_processes: 2\nuse_cpu: true\n", "backend: cpu\ndevices: 2\n"),
    ] {
        let import = import(more);
        check_refused(&import, &[]);
        assert_eq!(import.yaml(), format!("{devices}{zero}"), "{more}");
    }
    check_refused(&import("gpu_ids: 0,2\nnum_processes: 3\n"), &["gpu_ids"]);
    check_refused(&import("gpu_ids: GPU-5d2c\nnum_processes: 1\n"), &["gpu_ids"]);
    check_refused(&import("num_machines: 2\nnum_processes: 15\n"), &["num_processes"]);
}

#[test]
fn accelerates_machines_have_a_place() {
    let import = |more: &str| {
        let text = format!("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 16\n{more}");
        imported("machines.yaml", &text, Origin::Accelerate)
    };
    let (own, at) = ("machine_rank: 1\n", "main_process_ip: 10.0.0.1\n");
    for (more, port) in [
        ("main_process_port: 29501\nrdzv_backend: static\n", 29501),
        ("main_process_port: null\nrdzv_backend: c10d\n", 29500),
        ("", 29500),
    ] {
        let import = import(&format!("{own}{at}{more}"));
        check_refused(&import, &[]);
        let master_addr = "10.0.0.1".to_owned();
        assert_eq!(import.machines, Some(Machines { count: 2, index: 1, master_addr, master_port: port }));
        let rows = [("machine_rank", "mapped    machine_rank: 1 -> RANK"), ("num_machines", "mapped")];
        check_rows(&import, &rows);
        assert_eq!(import.yaml(), "devices: 8\nstrategy:\n  zero_stage: 0\n", "{more}");
    }
    for (more, refused) in [
        (format!("{own}{at}rdzv_backend: etcd\n"), "rdzv_backend"),
        (format!("machine_rank: 2\n{at}"), "machine_rank"),
        (format!("{own}{at}main_process_port: 0\n"), "main_process_port"),
        (at.to_owned(), "main_process_ip"),
    ] {
        check_refused(&import(&more), &[refused]);
    }
    // Another launcher has its own address, and one machine needs none.
    assert_eq!(import(own).machines, None);
    let text = format!("distributed_type: MULTI_GPU\nnum_machines: 1\n{own}{at}");
    assert_eq!(imported("one.yaml", &text, Origin::Accelerate).machines, None);
}

#[test]
fn a_bare_no_is_no_precision_of_its_own() {
    for no in ["no", "'no'", "false"] {
        let text = format!("distributed_type: 'NO'\nmixed_precision: {no}\n");
        let import = imported("ddp.yaml", &text, Origin::Accelerate);
        check_refused(&import, &[]);
        assert_eq!(import.yaml(), "strategy:\n  precision: fp32\n  zero_stage: 0\n", "{no}");
    }
}

#[test]
fn accelerate_with_fsdp() {
    let text = "\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: fp8
num_processes: 4
";
    let import = imported("fsdp2.yaml", text, Origin::Accelerate);
    check_refused(&import, &["mixed_precision"]);
    assert_eq!(import.yaml(), "devices: 4\nstrategy:\n  zero_stage: 3\n  recompute: full\n");
}

#[test]
fn accelerate_finds_the_deepspeed_file_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("accelerate.yaml");
    fs::write(&path, "deepspeed_config: {deepspeed_config_file: ds.json}\ndistributed_type: DEEPSPEED\n")
        .unwrap();
    fs::write(folder.path().join("ds.json"), DEEPSPEED).unwrap();
    let import = import(&path, None).unwrap();
    assert!(import.yaml().contains("zero_stage: 2"), "{}", import.yaml());
    fs::remove_file(folder.path().join("ds.json")).unwrap();
    let error = super::import(&path, None).unwrap_err().to_string();
    assert!(error.contains("ds.json"), "{error}");
}

const DEEPSPEED: &str = r#"{
  "train_micro_batch_size_per_gpu": "auto",
  "train_batch_size": "auto",
  "gradient_clipping": 1.0,
  "bfloat16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "cpu_offload": true,
    "reduce_bucket_size": 5e8,
    "overlap_comm": true,
    "offload_param": {"device": "cpu", "pin_memory": true}
  },
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
  "hybrid_engine": {"enabled": true},
  "steps_per_print": 2000,
  "my_own_key": 1
}"#;

#[test]
fn deepspeed_with_old_names() {
    let import = imported("ds.json", DEEPSPEED, Origin::Deepspeed);
    check_refused(&import, &["hybrid_engine.enabled", "my_own_key"]);
    assert_eq!(
        import.yaml(),
        "\
strategy:
  zero_stage: 2
  offload:
    optimizer: cpu_step
  precision: bf16
pipeline:
  rlvr:
    optimizer:
      max_grad_norm: 1
      adamw:
        learning_rate: 0.001
        eps: 1.0e-8
        weight_decay: 0.1
        betas:
        - 0.9
        - 0.95
      schedule:
        linear:
          warmup_steps: 10
"
    );
    check_rows(
        &import,
        &[
            (
                "zero_optimization.offload_param.device",
                "no effect zero_optimization.offload_param.device: cpu (DeepSpeed",
            ),
            ("zero_optimization.reduce_bucket_size", "no effect"),
            (
                "scheduler.params.warmup_max_lr",
                "mapped    scheduler.params.warmup_max_lr: 0.001 by default -> pipeline.rlvr.optimizer.adamw.learning_rate",
            ),
            ("scheduler.params.warmup_type", "changed   scheduler.params.warmup_type: log by default"),
            ("my_own_key", "refused   my_own_key: 1 (the importer does not know this key)"),
        ],
    );
}

#[test]
fn deepspeeds_scheduler_sets_the_rate() {
    let import = |lr: &str, kind: &str, params: &str| {
        let optimizer = format!(r#"{{"type": "AdamW", "params": {{"lr": {lr}}}}}"#);
        let scheduler = format!(r#"{{"type": "{kind}", "params": {{"warmup_num_steps": 5, {params}}}}}"#);
        let text = format!(
            r#"{{"zero_optimization": {{"stage": 1}}, "optimizer": {optimizer}, "scheduler": {scheduler}}}"#
        );
        imported("ds.json", &text, Origin::Deepspeed)
    };
    let peak = r#""warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_type": "linear""#;
    for (lr, outcome) in
        [("1e-4", "no effect optimizer.params.lr"), (r#""auto""#, "no effect optimizer.params.lr")]
    {
        let import = import(lr, "WarmupLR", peak);
        check_rows(
            &import,
            &[
                ("optimizer.params.lr", outcome),
                ("scheduler.params.warmup_max_lr", "mapped"),
                ("scheduler.params.warmup_min_lr", "changed"),
                ("scheduler.params.warmup_type", "no effect"),
            ],
        );
        assert!(import.yaml().contains("learning_rate: 0.002\n"), "{}", import.yaml());
    }
    let own = import("1e-4", "WarmupLR", r#""warmup_max_lr": "auto""#);
    assert!(own.yaml().contains("learning_rate: 0.0001\n"), "{}", own.yaml());
    let cosine = import("1e-4", "WarmupCosineLR", r#""total_num_steps": 50"#);
    check_refused(&cosine, &[]);
    for line in
        ["learning_rate: 0.0001\n", "cosine:\n          warmup_steps: 5\n          final_ratio: 0.0001\n"]
    {
        assert!(cosine.yaml().contains(line), "no\n{line}in\n{}", cosine.yaml());
    }
}

/// Published configs have schedules of other types than the file.
#[test]
fn the_optimizer_is_that_of_the_runs_own_pipeline() {
    const DEEPSPEED: &str = r#"{
      "zero_optimization": {"stage": 2},
      "gradient_clipping": 0.0,
      "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.25}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 1}}
    }"#;
    const ACCELERATE: &str = "deepspeed_config: {gradient_clipping: 0.5, zero_stage: 2}\n";
    let folder = tempfile::tempdir().unwrap();
    let optimizer = |text: &str, origin, pipeline: &str, config: &str| {
        let path = folder.path().join("theirs");
        fs::write(&path, text).unwrap();
        let config = Path::new("../../configs").join(config);
        let ours = fs::read_to_string(&config).unwrap();
        let draft = Draft::read(&config, &changes(&path, origin, &ours).unwrap().sets).unwrap();
        let (config, _) = draft.open().unwrap();
        let yaml: Value = serde_saphyr::from_str(&config.to_yaml()).unwrap();
        assert_eq!(yaml["strategy"]["zero_stage"], 2);
        yaml["pipeline"][pipeline]["optimizer"].clone()
    };
    for (pipeline, config) in [
        ("rlvr", "rlvr_sort_cpu.yaml"),
        ("offline", "offline_sft_sort_cpu.yaml"),
        ("diffusion", "diffusion_nft_shapes_cpu.yaml"),
    ] {
        let theirs = optimizer(DEEPSPEED, Origin::Deepspeed, pipeline, config);
        assert_eq!(theirs["max_grad_norm"].as_f64(), Some(0.0), "{pipeline}");
        assert_eq!(theirs["adamw"]["learning_rate"].as_f64(), Some(2e-3), "{pipeline}");
        assert_eq!(theirs["adamw"]["weight_decay"].as_f64(), Some(0.25), "{pipeline}");
        assert_eq!(theirs["schedule"], json!({"constant": {"warmup_steps": 1}}), "{pipeline}");
        let clipped = optimizer(ACCELERATE, Origin::Accelerate, pipeline, config);
        assert_eq!(clipped["max_grad_norm"].as_f64(), Some(0.5), "{pipeline}");
    }
}

#[test]
fn what_is_refused_starts_no_run() {
    let import = imported("ds.json", DEEPSPEED, Origin::Deepspeed);
    let error = import.changes("ds.json".as_ref()).unwrap_err().to_string();
    assert!(error.contains("2 of its settings") && error.contains("hybrid_engine"), "{error}");
    let import = imported(
        "ds.json",
        r#"{"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}"#,
        Origin::Deepspeed,
    );
    let sets = import.changes("ds.json".as_ref()).unwrap().sets;
    assert_eq!(sets, ["strategy.zero_stage=3", "strategy.precision=\"fp16\""]);
}

/// Configs of `trl sft`, `trl dpo`, `trl reward` and `trl kto`, which a file's keys do not distinguish.
#[test]
fn trls_offline_trainers_with_their_defaults() {
    const TEXT: &str = "\
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/ultrafeedback_binarized
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_processes: 2
max_steps: 200
warmup_ratio: 0.1
max_length: 2048
bf16: true
";
    let import = |more: &str, origin| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        fs::write(&path, format!("{TEXT}{more}")).unwrap();
        import(&path, Some(origin)).unwrap()
    };
    let check = |import: &Import, lines: &[&str]| {
        check_loads_as("offline", import);
        let yaml = import.yaml();
        for line in lines {
            assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
        }
    };
    let sft =
        import("packing: true\nassistant_only_loss: true\ncompletion_only_loss: false\n", Origin::TrlSft);
    check_refused(&sft, &["completion_only_loss"]);
    check(
        &sft,
        &[
            "devices: 2\n",
            "  micro_batch_size: 4\n",
            "    objective: sft\n",
            "    turns: all\n",
            "    batch_size: 64\n",
            "    steps: 200\n",
            "        learning_rate: 0.00002\n",
            "          warmup_steps:\n            share: 0.1\n",
            "          answer: messages\n",
        ],
    );
    let dpo = import("beta: 0.2\nlabel_smoothing: 0.1\nrpo_alpha: 0.5\n", Origin::TrlDpo);
    check_refused(&dpo, &[]);
    check(
        &dpo,
        &[
            "  micro_batch_size: 8\n",
            "      dpo:\n        beta: 0.2\n        label_smoothing: 0.1\n        sft_weight: 0.5\n",
            "          answer: chosen\n          rejected: rejected\n",
            "        learning_rate: 1.0e-6\n",
        ],
    );
    check_rows(
        &dpo,
        &[
            (
                "per_device_train_batch_size",
                "changed   per_device_train_batch_size: 4 -> strategy.micro_batch_size: 8",
            ),
            (
                "loss_type",
                "mapped    loss_type: sigmoid by default -> pipeline.offline.objective.dpo.beta: 0.2",
            ),
            ("max_length", "mapped    max_length: 2048 -> pipeline.offline.data.file.max_tokens: 2048"),
            (
                "eval_strategy",
                "mapped    eval_strategy: no by default -> pipeline.offline.evaluation.prompts: 0",
            ),
        ],
    );
    let cut =
        |mode: &str| format!("        max_tokens: 2048\n        long_prompts:\n          truncate: {mode}\n");
    check(&dpo, &[&cut("keep_start")]);
    check(&import("truncation_mode: keep_end\n", Origin::TrlDpo), &[&cut("keep_end")]);
    check_refused(&import("truncation_mode: middle\n", Origin::TrlDpo), &["truncation_mode"]);
    let texts = import("dataset_text_field: body\ncompletion_only_loss: false\n", Origin::TrlSft);
    check_refused(&texts, &[]);
    check(&texts, &["        columns:\n          text: body\n"]);
    assert!(!texts.yaml().contains("messages"), "{}", texts.yaml());
    let evaluated = import("eval_strategy: steps\neval_steps: 50\n", Origin::TrlSft);
    check(&evaluated, &["    evaluation:\n      every: 50\n"]);
    check_refused(&import("eval_strategy: often\n", Origin::TrlSft), &["eval_strategy"]);
    let kto = import("undesirable_weight: 1.5\n", Origin::TrlKto);
    check_refused(&kto, &[]);
    check(
        &kto,
        &[
            "  micro_batch_size: 4\n",
            "    batch_size: 64\n",
            "      kto:\n        beta: 0.1\n        desirable_weight: 1\n        undesirable_weight: 1.5\n",
            "          answer: completion\n          label: label\n",
            "        learning_rate: 1.0e-6\n",
            &cut("keep_start"),
        ],
    );
    let apo = import("loss_type: apo_zero_unpaired\nbeta: 0.3\n", Origin::TrlKto);
    check(&apo, &["      apo_zero_unpaired:\n        beta: 0.3\n"]);
    let gkd = import(
        "teacher_model_name_or_path: models/large\nlmbda: 0.0\nseq_kd: false\nmax_new_tokens: 128\n",
        Origin::TrlGkd,
    );
    check_refused(&gkd, &[]);
    check(
        &gkd,
        &[
            "    path: models/large\n",
            "      distill:\n        beta: 0.5\n        temperature: 0.9\n",
            "        columns:\n          answer: messages\n",
        ],
    );
    let sampled = import("teacher_model_name_or_path: m\nseq_kd: true\n", Origin::TrlGkd);
    check_refused(&sampled, &["seq_kd", "lmbda"]);
    let other = import("loss_type: bco\n", Origin::TrlKto);
    check_refused(&other, &["loss_type", "beta", "desirable_weight", "undesirable_weight"]);
    check(&import("loss_type: ipo\n", Origin::TrlDpo), &["      ipo:\n        beta: 0.1\n"]);
    check_refused(&import("loss_type: exo_pair\n", Origin::TrlDpo), &["loss_type", "beta"]);
    let reward = import("center_rewards_coefficient: 0.01\n", Origin::TrlReward);
    check(&reward, &["      reward_model:\n        center: 0.01\n", "        learning_rate: 0.0001\n"]);
    assert!(!reward.yaml().contains("truncate"), "what is longer is left out: {}", reward.yaml());
    let prm = import("step_separator: \" ## \"\ntrain_on_last_step_only: true\n", Origin::TrlPrm);
    check_refused(&prm, &[]);
    check(
        &prm,
        &[
            "  micro_batch_size: 4\n",
            "      prm:\n        step_separator: \" ## \"\n        train_on_last_step_only: true\n",
            "          steps: completions\n          step_labels: labels\n",
            "        max_prompt_tokens: 512\n",
            "        learning_rate: 0.00001\n",
            &cut("keep_start"),
        ],
    );
    let prm = import(
        "max_prompt_length: null\nmax_completion_length: 256\ndisable_dropout: true\n",
        Origin::TrlPrm,
    );
    check_refused(&prm, &["max_completion_length"]);
    check(&prm, &["        train_on_last_step_only: false\n"]);
    assert!(!prm.yaml().contains("max_prompt_tokens"), "{}", prm.yaml());
    check_refused(&import("train_on_last_step_only: some\n", Origin::TrlPrm), &["train_on_last_step_only"]);
    // Recognized although GRPO has one of its keys.
    let text = "model_name_or_path: m\nstep_separator: '#'\nmax_completion_length: null\n";
    imported("prm.yaml", text, Origin::TrlPrm);
    let told =
        "mapped    step_separator: \\n by default -> pipeline.offline.objective.prm.step_separator: \\n";
    check_rows(&prm, &[("step_separator", told)]);
}

#[test]
fn trl_with_its_defaults() {
    let text = "\
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward]
reward_weights: [1.0, 0.2]
learning_rate: 1.0e-5
num_generations: 8
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
steps_per_generation: 16
max_completion_length: 512
loss_type: dr_grpo
scale_rewards: false
max_steps: 100
epsilon_high: 0.28
use_peft: true
lora_r: 16
use_dora: true
use_rslora: true
bf16: true
gradient_checkpointing: true
use_vllm: true
push_to_hub: true
generation_kwargs:
  prompt_lookup_num_tokens: 10
  max_matching_ngram_size: 3
";
    let import = imported("grpo.yaml", text, Origin::Trl);
    check_refused(&import, &["push_to_hub"]);
    check_loads(&import);
    let yaml = import.yaml();
    for line in [
        "  path: Qwen/Qwen2.5-0.5B-Instruct\n  lora:\n    rank: 16\n    alpha: 32\n    dropout: 0.05\n",
        "    targets:\n    - q_proj\n    - v_proj\n    rslora: true\n    dora: true\n",
        "  precision: bf16\n",
        "  recompute: full\n",
        "  micro_batch_size: 4\n",
        "    group_size: 8\n",
        "    prompts_per_step: 8\n",
        "    mini_batches: 2\n",
        "    steps: 50\n",
        "seq_mean_token_sum_norm:\n          length: 512\n",
        "          scale: none\n",
        "          clip_low: 0.2\n          clip_high: 0.28\n",
        "<think>[^<]*(?:<(?:[^<t]",
        "      weight: 0.2\n",
        "        num_speculative_tokens: 10\n        prompt_lookup_max: 3\n        prompt_lookup_min: 1\n",
    ] {
        assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
    }
    check_rows(
        &import,
        &[
            ("temperature", "mapped    temperature: 1.0 by default -> pipeline.rlvr.rollout.temperature: 1"),
            (
                "max_steps",
                "changed   max_steps: 100 -> pipeline.rlvr.steps: 50 (2 updates are one step here)",
            ),
        ],
    );
}

#[test]
fn openrlhf_flags_old_and_new() {
    let old = "\
set -x
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_gpus_per_node 8 \\
   --pretrain models/llama \\
   --remote_rm_url rewards/mine.py \\
   --train_batch_size 128 \\
   --rollout_batch_size 128 \\
   --n_samples_per_prompt 8 \\
   --generate_max_len 1024 \\
   --max_samples 1280 \\
   --zero_stage 3 \\
   --bf16 --adam_offload \\
   --advantage_estimator group_norm \\
   --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \\
   --eps_clip_low_high 0.2 0.27 \\
   --dynamic_filtering --dynamic_filtering_reward_range 0 1 \\
   --prompt_data data/math.jsonl --input_key question --label_key gold \\
   --vllm_num_engines 4 --colocate_all_models
# comments stay comments: --zero_stage 1
";
    let ppo = "--advantage_estimator gae --lambd 0.9 --critic_learning_rate 5e-6";
    let ppo = imported("ppo.sh", &old.replace("--advantage_estimator group_norm", ppo), Origin::Openrlhf);
    check_refused(&ppo, &[]);
    check_loads(&ppo);
    let rows = [
        ("algo.advantage.lambd", "changed   algo.advantage.lambd: 0.9 (part of the advantage"),
        ("critic.adam.lr", "mapped    critic.adam.lr: "),
    ];
    check_rows(&ppo, &rows);
    for line in [
        "          lambda: 0.9\n",
        "      whiten_advantages: true\n",
        "    critic:\n",
        "      value_clip: 0.5\n",
    ] {
        assert!(ppo.yaml().contains(line), "no\n{line}in\n{}", ppo.yaml());
    }
    let ahead = "--train.async_enable --train.partial_rollout_enable";
    let text = old.replace("--dynamic_filtering --dynamic_filtering_reward_range 0 1", ahead);
    let ahead = imported("ahead.sh", &text, Origin::Openrlhf);
    check_refused(&ahead, &[]);
    check_loads(&ahead);
    assert!(ahead.yaml().contains("      async:\n        ahead: 1\n"), "{}", ahead.yaml());
    let narrow = old.replace("--colocate_all_models", "--colocate_all_models --vllm.quantization fp8");
    let narrow = imported("narrow.sh", &narrow, Origin::Openrlhf);
    check_refused(&narrow, &[]);
    assert!(narrow.yaml().contains("      weights: fp8\n      fp8_activations: true\n"), "{}", narrow.yaml());
    let new = "\
python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 --actor.model_name_or_path models/llama \
--reward.remote_url rewards/mine.py --train.batch_size 128 --rollout.batch_size 128 \
--rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 1024 --data.max_samples 1280 --ds.zero_stage 3 \
--ds.param_dtype bf16 --ds.adam_offload --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 \
--algo.kl.use_loss --algo.kl.estimator k3 --actor.eps_clip_low_high 0.2 0.27 --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 --data.prompt_dataset data/math.jsonl \
--data.input_key question --data.label_key gold --vllm.num_engines 4 --train.colocate_all
";
    let [old, new] = [old, new].map(|text| imported("train.sh", text, Origin::Openrlhf));
    check_refused(&old, &[]);
    check_refused(&new, &[]);
    assert_eq!(old.yaml(), new.yaml());
    check_loads(&old);
    let yaml = old.yaml();
    for line in [
        "devices: 8\n",
        "  zero_stage: 3\n",
        "  precision: bf16\n",
        "    optimizer: cpu_step\n",
        "    prompts_per_step: 128\n",
        "    group_size: 8\n",
        "    mini_batches: 8\n",
        "    steps: 10\n",
        "        max_records: 1280\n",
        "      kl_coef: 0.001\n",
        "          estimator: k3\n",
        "          clip_high: 0.27\n          clip_low: 0.2\n",
        "      mixed_groups:\n        max_batches: 10\n",
        "        path: data/math.jsonl\n        columns:\n          prompt: question\n          answer: gold\n",
    ] {
        assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
    }
}

#[test]
fn trlx_sections() {
    let text = "\
train: {seq_length: 64, epochs: 100, total_steps: 1000, batch_size: 16, seed: 7, tracker: wandb}
model: {model_path: models/gpt, num_layers_unfrozen: -1}
tokenizer: {tokenizer_path: models/gpt}
optimizer: {name: adamw, kwargs: {lr: 2.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-6}}
scheduler: {name: cosine_annealing, kwargs: {T_max: 1000, eta_min: 2.0e-5}}
method:
  name: ppoconfig
  num_rollouts: 128
  chunk_size: 32
  ppo_epochs: 4
  init_kl_coef: 0.2
  target: 6
  horizon: 10000
  gamma: 1
  lam: 0.9
  vf_coef: 1.2
  cliprange: 0.2
  cliprange_value: 0.3
  gen_kwargs: {max_new_tokens: 40, top_k: 0, top_p: 1.0, do_sample: true}
";
    let import = imported("ppo.yml", text, Origin::Trlx);
    check_refused(&import, &[]);
    check_loads(&import);
    let yaml = import.yaml();
    // One optimizer for two heads: gradients are not clipped, and the critic's rate decays like the policy's.
    assert_eq!(yaml.matches("max_grad_norm: 0\n").count(), 2, "{yaml}");
    assert_eq!(yaml.matches("final_ratio: 0.1\n").count(), 2, "{yaml}");
    for line in [
        "seed: 7\n",
        "    steps: 32\n",
        "    epochs: 4\n",
        "          final_ratio: 0.1\n",
        "target: 6",
        "          lambda: 0.9\n",
        "      value_clip: 0.3\n",
    ] {
        assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
    }
}

#[test]
fn what_is_no_config_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for (text, expected) in [
        ("- 1\n- 2\n", "not a mapping"),
        ("a: [", "no known training program"),
        ("nothing: known\n", "unrecognized config format"),
        ("defaults: [absent@_here_]\nrollout_batch_size: 1\n", "absent.yaml"),
        ("rollout_batch_size: ${nowhere}\n", "`${nowhere}` is not defined"),
        ("rollout_batch_size: ${seed}\nseed: ${rollout_batch_size}\n", "cycle"),
    ] {
        fs::write(&path, text).unwrap();
        let error = anyroll_config::error_chain::one_line(&import(&path, None).unwrap_err());
        assert!(error.contains(expected), "{text}: {error}");
    }
}

mod defaults;
mod epochs;
mod losses;
mod mutations;
mod openrlhf_offline;
mod openrlhf_trl;
mod roll;
mod scripts;
mod verl;
