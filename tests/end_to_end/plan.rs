//! Memory plans without a device, and the stage chosen by them.

use std::{fs, path::Path};

use serde_json::Value;

use super::{
    TWO_RANKS, anyroll, diffusers,
    diffusion::{METHODS, run_tiny},
    fail, metrics, series, succeed, tiny,
};

const LARGE: [&str; 5] = [
    "model.decoder={hidden_size: 3584, layers: 28, heads: 28, kv_heads: 4, intermediate_size: 18944, max_length: 4096, qkv_bias: true}",
    "strategy.precision=bf16",
    "pipeline.rlvr.rollout.max_new_tokens=4000",
    "pipeline.rlvr.algorithm.kl_coef=0.01",
    "strategy.micro_batch_size=4",
];

fn plan(sets: &[&str], options: &[&str]) -> Value {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let args = ["plan", TWO_RANKS, "--json"].into_iter().chain(sets).chain(options.iter().copied());
    serde_json::from_str(&succeed(anyroll(args)).stdout).unwrap()
}

/// Returns the totals of a choice's phases.
fn totals(report: &Value, stage: u64, optimizer: &str, params: &str) -> [u64; 3] {
    let choices = report["choices"].as_array().unwrap();
    let is_it = |it: &&Value| {
        let policy = [&it["optimizer"], &it["params"], &it["recompute"]];
        let has_policy = policy == [optimizer, "none", "none"].map(Value::from).each_ref();
        it["zero_stage"] == stage && has_policy && it["reference_params"] == params
    };
    let plan = &choices.iter().find(is_it).unwrap()["plan"];
    ["train", "score", "generate"].map(|phase| plan[phase]["total"].as_u64().unwrap())
}

#[test]
fn a_model_for_devices_that_are_not_here_is_planned() {
    // A backend that this machine may not have, and more ranks than it could run.
    let batches = ["pipeline.rlvr.prompts_per_step=128", "pipeline.rlvr.warmup.batch_size=64"];
    let sets = [&LARGE[..], &["backend=auto"], &batches].concat();
    let report = plan(&sets, &["--memory", "80GiB", "--world", "64"]);
    assert_eq!(report["world_size"], 64);
    assert_ne!(report["backend"], "cpu");
    assert_eq!(report["memory_bytes"], 80_u64 << 30);
    assert_eq!(report["choices"].as_array().unwrap().len(), 4 * 3 * 2 * 3 * 3);
    let parameters = report["parameters"].as_u64().unwrap();
    assert!((6_500_000_000..7_000_000_000).contains(&parameters), "{parameters}");

    let [zero, _, generate] = totals(&report, 0, "none", "none");
    assert!(zero > 18 * parameters, "weights, gradients, optimizer, and a reference");
    let [one, ..] = totals(&report, 1, "none", "none");
    assert!(zero - one > 15 * parameters, "63 of 64 parts of what stage 1 shards");
    assert!(totals(&report, 3, "none", "none")[0] < one);
    // The reference's weights are offloaded in training and loaded for scoring; other states are offloaded
    // during generation.
    let [train, score, offloaded] = totals(&report, 0, "between_steps", "between_steps");
    assert!((zero - train).abs_diff(2 * parameters) < parameters / 100, "{zero} and {train}");
    assert!(score > 20 * parameters && offloaded + 10 * parameters < generate, "{score}, {offloaded}");
    let fits = &report["configured"]["plan"]["fits"];
    assert_eq!(*fits, false, "ZeRO-0 of 7 billion parameters in 80 GiB");
    assert_eq!(report["configured"]["plan"]["train"]["kv_cache"], 0, "a large cache is given back");
}

/// On the policy's devices its weights are loaded for scoring, between sampling and training, and otherwise
/// offloaded to the host.
#[test]
fn a_reward_model_is_planned() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/reward_model");
    let file = fs::read(format!("{folder}/model.safetensors")).unwrap();
    let (length, rest) = file.split_first_chunk().unwrap();
    let bytes = rest.len() as u64 - u64::from_le_bytes(*length); // in fp32
    let config: Value = serde_json::from_slice(&fs::read(format!("{folder}/config.json")).unwrap()).unwrap();
    // Each layer, the embedding and the head are smaller than the smallest unit of offloading.
    let units = config["num_hidden_layers"].as_u64().unwrap() + 2;
    let away_bytes = units * (2 << 20);
    let planned = |reward: &str| {
        let reward = format!("pipeline.rlvr.reward=[{{exact: {{}}}}{reward}]");
        plan(&["backend=cuda", &reward], &["--memory", "80GiB", "--world", "2"])
    };
    let report = |more: &str| planned(&format!(", {{model: {{path: tests/golden/reward_model{more}}}}}"));
    let model = |more: &str| report(more)["configured"]["plan"].clone();
    let number = |of: &Value| of.as_u64().unwrap();
    let without = planned("")["configured"]["plan"].clone();
    assert!(without["reward"].is_null());
    for (dtype, bytes) in [("fp32", bytes), ("bf16", bytes / 2)] {
        let on_host = model(&format!(", dtype: {dtype}"));
        assert!(on_host["reward"].is_null());
        assert_eq!(number(&on_host["host"]), number(&without["host"]) + bytes);
    }
    let comes = model(", backend: cuda");
    let (reward, generate) = (&comes["reward"], &comes["generate"]);
    assert_eq!(number(&reward["weights"]), number(&generate["weights"]) + away_bytes);
    assert_eq!(reward["kv_cache"], generate["kv_cache"], "a small cache stays");
    assert!(number(&reward["activations"]) > 0);
    assert_eq!(number(&comes["host"]), number(&without["host"]) + away_bytes);
    let stays = model(", backend: cuda, strategy: {offload: {params: none}}");
    for phase in ["generate", "reward", "train"] {
        let beside = number(&without[if phase == "reward" { "generate" } else { phase }]["weights"]);
        assert_eq!(number(&stays[phase]["weights"]), beside + away_bytes, "{phase}");
    }
    // If sharded, a few blocks at a time are gathered in addition to the shards.
    let sharded = model(", backend: cuda, strategy: {zero_stage: 3}");
    assert!(number(&sharded["reward"]["buffers"]) > number(&reward["buffers"]));
    // On its own devices it counts there, and on the policy's only if these are the same.
    let elsewhere = report(", backend: cuda, devices: [2, 3]");
    let plan = &elsewhere["configured"]["plan"];
    for phase in ["generate", "train"] {
        assert_eq!(plan[phase], without[phase]);
    }
    assert_eq!(plan["host"], comes["host"]);
    assert!(plan["reward"].is_null() && elsewhere["not_counted"] == serde_json::json!([]));
    let there = &plan["others"][0];
    let reward = &there["reward"];
    assert_eq!([&there["backend"], &there["roles"][0]], ["cuda", "reward model"]);
    assert_eq!((&there["devices"], &there["fits"]), (&serde_json::json!([2, 3]), &Value::from(true)));
    assert_eq!(number(&there["memory_bytes"]), 80 << 30);
    assert_eq!((number(&reward["weights"]), number(&reward["kv_cache"])), (away_bytes, 0));
    assert_eq!(reward["driver"], comes["reward"]["driver"]);
    let parts = ["weights", "activations", "driver"].map(|part| number(&reward[part]));
    assert_eq!(number(&reward["total"]), parts.iter().sum::<u64>());
    let half = model(", backend: cuda, devices: [1, 2]");
    let names = |plan: &Value| {
        plan["others"].as_array().unwrap().iter().map(|it| it["devices"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!((&half["reward"], names(&half)), (&comes["reward"], vec!["[2]".to_owned()]));
    // Devices without enough memory are reported.
    let sets = [
        "pipeline.rlvr.reward=[{model: {path: tests/golden/reward_model, backend: cuda, devices: [2]}}]",
        "backend=cpu",
        "devices=1",
    ];
    let args = |memory| {
        [
            &["plan", "configs/rlvr_sort_cpu.yaml", "--memory", memory][..],
            &sets.map(|set| ["--set", set]).concat(),
        ]
        .concat()
    };
    let text = succeed(anyroll(args("80GiB"))).stdout;
    assert!(text.contains("reward model on cuda [2], of 80.0 GiB; it fits, with 7"), "{text}");
    let text = succeed(anyroll(args("1GiB"))).stdout;
    assert!(text.contains("reward model on cuda [2], of 1.00 GiB; it does not fit: reward needs"), "{text}");
}

/// Devices that only sample hold the weights once, and keys and values for the sequences they are assigned.
#[test]
fn rollout_on_devices_of_its_own_is_planned() {
    let planned = |devices: &str, more: &[&str]| {
        let rollout = format!("roles.rollout={{devices: {devices}}}");
        let sets = [&["backend=cuda", "devices=[0, 1]", "strategy.precision=bf16", &rollout], more].concat();
        let report = plan(&sets, &["--memory", "80GiB"]);
        assert_eq!(report["not_counted"], serde_json::json!([]));
        report
    };
    let number = |of: &Value| of.as_u64().unwrap();
    let report = planned("[2, 3]", &[]);
    let (whole, parameters) = (&report["configured"]["plan"], number(&report["parameters"]));
    let there = &whole["others"][0];
    assert_eq!(
        (&there["devices"], &there["roles"]),
        (&serde_json::json!([2, 3]), &serde_json::json!(["rollout"]))
    );
    let (own, policys) = (&there["generate"], &whole["generate"]);
    assert_eq!(number(&own["weights"]), 2 * parameters);
    assert_eq!(own["kv_cache"], policys["kv_cache"]);
    assert!(number(&own["driver"]) < number(&policys["driver"]), "it has no communicator");
    assert!(number(&own["buffers"]) > 64 << 20, "steps that are recorded stay");
    let parts = ["weights", "activations", "buffers", "driver", "kv_cache"].map(|part| number(&own[part]));
    assert_eq!(number(&own["total"]), parts.iter().sum::<u64>());

    // Twice the devices have half of the sequences each; a staleness of two steps adds as many again.
    let cache = |report: &Value| number(&report["configured"]["plan"]["others"][0]["generate"]["kv_cache"]);
    let all = "pipeline.rlvr.rollout.batch_size=4096";
    let ahead = "pipeline.rlvr.rollout.async.ahead=2";
    let whole = cache(&planned("[2, 3]", &[all]));
    let half = cache(&planned("[2, 3, 4, 5]", &[all]));
    let spare = 2 * half - whole; // a cache has a block that nobody owns
    assert!(spare > 0 && 100 * spare < whole, "{half} and {whole}");
    assert_eq!(cache(&planned("[2, 3, 4, 5]", &[all, ahead])), whole);
    // If a reference shares the devices, keys and values are held while the reference scores: if sampling runs ahead, those
    // of all sequences ahead, and otherwise a small cache.
    let beside = ["pipeline.rlvr.algorithm.kl_coef=0.01", "roles.reference={devices: [2, 3]}"];
    let score = |ahead: &str| {
        let report = planned("[2, 3]", &[&beside[..], &[ahead]].concat());
        let others = report["configured"]["plan"]["others"].as_array().unwrap().clone();
        assert_eq!(others.len(), 1);
        assert_eq!(others[0]["roles"], serde_json::json!(["reference", "rollout"]));
        others[0]["score"].clone()
    };
    let (in_turn, meanwhile) = (score("pipeline.rlvr.rollout.async.ahead=0"), score(ahead));
    assert!(
        0 < number(&in_turn["kv_cache"]) && number(&in_turn["kv_cache"]) <= number(&meanwhile["kv_cache"])
    );
    assert!(number(&in_turn["weights"]) >= 4 * parameters);
    // The host has no device memory.
    let host = plan(&["roles.rollout={devices: 2}"], &["--memory", "80GiB"]);
    assert_eq!(host["not_counted"][0], "rollout on cpu [0, 0]");
    assert_eq!(host["configured"]["plan"]["others"], serde_json::json!([]));
}

/// The plan of a config that keeps logits equals the one that `anyroll plan` predicts for keeping them.
#[test]
fn a_plan_says_what_keeping_logits_takes() {
    // Enough targets that logits are computed in chunks if they are not kept.
    let sets = [
        "model={path: tests/golden/tiny_model}",
        "strategy.micro_batch_size=2048",
        "pipeline.rlvr.prompts_per_step=1024",
        "pipeline.rlvr.rollout.max_new_tokens=500",
    ];
    let of = |more: &[&str]| plan(&[&sets, more].concat(), &["--memory", "80GiB"]);
    let (without, with) = (of(&[]), of(&["strategy.keep_logits=true"]));
    assert_eq!(without["keeping_logits"], with["configured"]["plan"]);
    assert!(with["keeping_logits"].is_null());
    let train = |plan: &Value| plan["train"]["activations"].as_u64().unwrap();
    assert!(train(&without["keeping_logits"]) > train(&without["configured"]["plan"]));

    // `auto` keeps logits if there is room, and drops them if one byte is missing.
    let at_one = |keep: &str| of(&["strategy.zero_stage=1", keep])["configured"]["plan"]["train"].clone();
    let [with, without] = ["true", "false"].map(|keep| at_one(&format!("strategy.keep_logits={keep}")));
    let needs = with["total"].as_u64().unwrap();
    let auto = |memory: u64| {
        plan(&[&sets[..], &["strategy.zero_stage=auto"]].concat(), &["--memory", &memory.to_string()])
    };
    let (kept, made_twice) = (auto(80 << 30), auto(needs - 1));
    assert_eq!(kept["configured"]["plan"]["train"], with);
    assert_eq!(made_twice["configured"]["plan"]["train"], without);
    let says = |plan: &Value| plan["auto"].as_str().unwrap().contains("and logits kept");
    assert!(says(&kept) && !says(&made_twice));
}

#[test]
fn a_plan_is_a_table_for_people() {
    let text = succeed(anyroll(["plan", TWO_RANKS])).stdout;
    for part in [
        "2 ranks on cpu",
        "as configured: ZeRO 0",
        "train",
        "generate",
        "it fits",
        "with `keep_logits: true`, which fits, train takes",
        "cpu_step",
        "every choice",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let text =
        succeed(anyroll(["plan", TWO_RANKS, "--memory", "1MiB", "--set", "strategy.zero_stage=auto"])).stdout;
    assert!(text.contains("auto finds no stage that fits") && text.contains('!'), "{text}");
    let text = succeed(anyroll(["plan", "configs/diffusion_nft_shapes_cpu.yaml"])).stdout;
    for part in ["images of 8 x 8", "40 steps", "images", "generate", "reward", "train", "every choice"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let reward_model = ["plan", "configs/offline_reward_model_sort_cpu.yaml"];
    assert!(fail(anyroll(reward_model)).contains("not runs that train a reward model"));
}

/// A step's allocations equal the plan, except activations and the cache, which are libtorch's or already
/// freed.
#[test]
fn a_run_takes_what_was_planned() {
    let folder = tempfile::tempdir().unwrap();
    let critic = [
        "devices=2",
        "strategy.zero_stage=1",
        "roles.critic.strategy.zero_stage=3",
        "roles.critic.strategy.offload.params=between_steps",
        "pipeline.rlvr.critic.warmup_steps=0",
        "pipeline.rlvr.critic.optimizer.schedule.linear.warmup_steps=1",
    ];
    let scorer = "pipeline.rlvr.reward=[{exact: {}}, {model: {path: tests/golden/reward_model, \
                  strategy: {zero_stage: 3, offload: {params: none}}}, weight: 0.1}]";
    for (name, config, sets) in [
        ("scorer", TWO_RANKS, &[scorer][..]),
        ("stage 1", TWO_RANKS, &["strategy.zero_stage=1", "pipeline.rlvr.algorithm.kl_coef=0.01"]),
        ("stage 3", TWO_RANKS, &["strategy.zero_stage=3", "strategy.precision=bf16"]),
        ("streamed", TWO_RANKS, &["strategy.offload={optimizer: none, params: cpu}"]),
        ("away", "configs/ppo_critic_cpu.yaml", &critic),
        (
            "critic",
            "configs/ppo_critic_cpu.yaml",
            &[&critic[4..], &["strategy.offload.optimizer=none"]].concat(),
        ),
    ] {
        let run = folder.path().join(name);
        succeed(tiny(config, &run, &[sets, &["pipeline.rlvr.steps=4"]].concat()));
        let args = ["plan", run.join("resolved.yaml").to_str().unwrap(), "--json"].map(str::to_owned);
        let report: Value = serde_json::from_str(&succeed(anyroll(args)).stdout).unwrap();
        let plan = &report["configured"]["plan"];
        assert_eq!(plan["critic"].is_null(), config == TWO_RANKS, "{plan}");
        for (phase, metric) in
            [("train", "perf/allocated_bytes"), ("generate", "perf/generate_allocated_bytes")]
        {
            let kinds = ["weights", "gradients", "optimizer", "buffers"];
            let planned: f64 = kinds.iter().map(|kind| plan[phase][kind].as_f64().unwrap()).sum();
            let measured = series(&run, metric)[1];
            let ratio = measured / planned;
            assert!((0.99..1.01).contains(&ratio), "{name}, {phase}: {measured} measured, {planned} planned");
        }
    }
}

/// The device's accounting of a step of images equals the plan; activations, pixels and frozen networks are
/// libtorch's.
#[test]
fn a_run_of_images_takes_what_was_planned() {
    let check = |name: &str, run: &Path| {
        let args = ["plan", run.join("resolved.yaml").to_str().unwrap(), "--json"].map(str::to_owned);
        let report: Value = serde_json::from_str(&succeed(anyroll(args)).stdout).unwrap();
        let train = &report["configured"]["plan"]["train"];
        let part = |kind: &str| train[kind].as_f64().unwrap();
        let planned: f64 = ["weights", "gradients", "optimizer", "buffers"].map(part).iter().sum();
        // The smallest of the steps: a sum in flight, which its stream has yet to free, adds to the others.
        let measured = series(run, "perf/allocated_bytes").into_iter().fold(f64::INFINITY, f64::min);
        assert!((0.99..1.01).contains(&(measured / planned)), "{name}: {measured} measured, {train}");
        assert!(part("activations") > 0.0 && part("images") > 0.0, "{train}");
        report
    };
    // With DiffusionNFT's old policy, and a copy for the KL term.
    let folder = tempfile::tempdir().unwrap();
    for (config, sets) in METHODS {
        let sets =
            [sets, &["devices=2", "strategy.zero_stage=3", "strategy.offload.optimizer=none"]].concat();
        check(config, &run_tiny(&folder, config.split('/').next_back().unwrap(), config, &sets));
    }
    // Adapters of a published model, at the stage that `auto` finds.
    let case = diffusers::by_function();
    let run = case.run("auto", &["devices=2", "strategy.zero_stage=auto", "strategy.offload.optimizer=none"]);
    let resolved = fs::read_to_string(run.join("resolved.yaml")).unwrap();
    assert!(resolved.starts_with("# strategy.zero_stage: auto is 1, the fastest: "), "{resolved}");
    let report = check("auto", &run);
    let frozen = report["configured"]["plan"]["train"]["frozen"].as_u64().unwrap();
    let file = fs::metadata(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/tiny_sd3/model/vae/diffusion_pytorch_model.safetensors"
    ));
    // In fp32 like the file, which also contains the names.
    assert!(frozen > 0 && file.is_ok_and(|file| frozen < file.len()), "{frozen}");
}

#[test]
fn a_run_says_why_auto_is_its_stage() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let ended = succeed(tiny(TWO_RANKS, &run, &["strategy.zero_stage=auto", "pipeline.rlvr.steps=4"]));
    assert!(ended.stderr.contains("ZeRO 1 (auto is 1, the fastest: "), "{}", ended.stderr);
    let resolved = fs::read_to_string(run.join("resolved.yaml")).unwrap();
    assert!(resolved.starts_with("# strategy.zero_stage: auto is 1, the fastest: "), "{resolved}");
    assert!(resolved.contains("  zero_stage: 1\n"), "{resolved}");
    assert_eq!(metrics(&run).len(), 5);
}

/// Stages are also found with a critic, and with a reward model on the policy's devices.
#[test]
fn auto_goes_with_every_role() {
    let folder = tempfile::tempdir().unwrap();
    let scorer = "pipeline.rlvr.reward=[{exact: {}}, {model: {path: tests/golden/reward_model, strategy: {}}, weight: 0.1}]";
    let sets = [
        "devices=2",
        "strategy.zero_stage=auto",
        "pipeline.rlvr.steps=4",
        "pipeline.rlvr.critic.warmup_steps=0",
        "pipeline.rlvr.critic.optimizer.schedule.linear.warmup_steps=1",
        scorer,
    ];
    let run = folder.path().join("run");
    let ended = succeed(tiny("configs/ppo_critic_cpu.yaml", &run, &sets));
    assert!(ended.stderr.contains("ZeRO 1 (auto is 1, the fastest: "), "{}", ended.stderr);
    let resolved = run.join("resolved.yaml");
    let text = succeed(anyroll(["plan", resolved.to_str().unwrap()])).stdout;
    assert!(
        ["reward", "critic", "train"].iter().all(|phase| text.contains(&format!("\n{phase} "))),
        "{text}"
    );
}
