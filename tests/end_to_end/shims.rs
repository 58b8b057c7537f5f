//! Backends on shims of their vendors' libraries (`tests/shims`), if `ANYROLL_SHIMS` names the folder that
//! `tests/shims/build` created. Otherwise these tests print that they are skipped.

use std::{
    env,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use super::{Process, anyroll, finish, lasting_metrics, series, succeed, tiny};

/// Returns a command that finds the shims of a backend's vendor. Without shims returns `None` and prints a
/// message past the harness, which hides the output of passing tests.
fn on_shims(backend: &str, mut command: Command) -> Option<Command> {
    let Some(folder) = env::var_os("ANYROLL_SHIMS").map(PathBuf::from) else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: ANYROLL_SHIMS does not name the folder of the shims");
        return None;
    };
    // Kernels for the shim are cached separately. Only one vendor's libraries are visible: libtorch is built
    // for one vendor, but both would be used.
    command.env("XDG_CACHE_HOME", folder.join("cache")).env("ANYROLL_LIBRARIES", folder.join(backend));
    command.env("ANYROLL_SHIM", "1");
    Some(command)
}

/// Backends whose hardware is missing here.
const BACKENDS: [&str; 2] = ["rocm", "ascend"];

/// Returns the quickstart's config.
fn config(backend: &str) -> String {
    format!("configs/rlvr_sort_{backend}.yaml")
}

#[test]
fn the_contract_is_held_on_one_to_four_ranks() {
    for backend in BACKENDS {
        for world_size in ["1", "2", "3", "4"] {
            let conformance = anyroll([
                "conformance",
                "--backend",
                backend,
                "--world-size",
                world_size,
                "--timeout-s",
                "30",
            ]);
            let Some(conformance) = on_shims(backend, conformance) else { return };
            println!("{backend}\n{}", succeed(conformance).stdout);
        }
    }
}

#[test]
fn every_zero_stage_has_the_same_metrics() {
    for backend in BACKENDS {
        stages_agree(backend);
    }
}

fn stages_agree(backend: &str) {
    let folder = tempfile::tempdir().unwrap();
    let runs = ["0", "1", "2", "3"].map(|stage| {
        let run = folder.path().join(stage);
        let sets = ["devices=2", "pipeline.rlvr.steps=3", "pipeline.rlvr.warmup.steps=5"];
        let mut command = tiny(&config(backend), &run, &sets);
        command.args(["--set", &format!("strategy.zero_stage={stage}")]);
        on_shims(backend, command).map(|command| {
            succeed(command);
            lasting_metrics(&run)
        })
    });
    let [Some(first), rest @ ..] = &runs else { return };
    assert!(!first.is_empty());
    let run = folder.path().join("0");
    let [used, share] = ["perf/device_used_bytes", "perf/device_used_share"].map(|name| series(&run, name));
    assert!(used.len() == 3 && used.iter().all(|used| *used > 1e5), "{used:?}");
    assert!(share.iter().all(|share| (0.0..=1.0).contains(share) && *share > 0.0), "{share:?}");
    // No kernel driver knows the shim's device.
    assert!(series(&run, "perf/device_utilization").is_empty());
    for (stage, run) in rest.iter().enumerate() {
        // Bytes differ, as expected; losses, rewards and norms do not.
        let of_training = |run: &[serde_json::Map<String, serde_json::Value>]| {
            run.iter()
                .map(|step| {
                    let kept = step.iter().filter(|(name, _)| !name.starts_with("memory/"));
                    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
                })
                .collect::<Vec<Vec<_>>>()
        };
        assert_eq!(of_training(run.as_ref().unwrap()), of_training(first), "stage {}", stage + 1);
    }
}

/// Pairs and judged answers with a frozen reference, and a reward model: a few steps on two ranks, with the
/// CPU's losses.
#[test]
fn written_texts_are_learnt_as_on_the_cpu() {
    for backend in BACKENDS {
        for name in ["offline_dpo_sort_cpu", "offline_kto_sort_cpu", "offline_reward_model_sort_cpu"] {
            let folder = tempfile::tempdir().unwrap();
            let few = |backend: &str| {
                let mut command = anyroll(["run", &format!("configs/{name}.yaml")]);
                for set in [
                    &*format!("backend={backend}"),
                    "devices=2",
                    "strategy.zero_stage=3",
                    "pipeline.offline.steps=3",
                    "pipeline.offline.optimizer.schedule={constant: {}}",
                    "pipeline.offline.evaluation={every: 3, prompts: 9}",
                ] {
                    command.args(["--set", set]);
                }
                command.arg("--output").arg(folder.path().join(backend));
                command
            };
            let Some(command) = on_shims(backend, few(backend)) else { return };
            succeed(command);
            succeed(few("cpu"));
            for metric in ["loss", "reward/margin", "grad_norm", "eval/loss"] {
                let [found, expected] = [backend, "cpu"].map(|run| series(&folder.path().join(run), metric));
                let near = found
                    .iter()
                    .zip(&expected)
                    .all(|(found, expected)| (found - expected).abs() <= TOLERANCE * expected.abs().max(1.0));
                assert!(found.len() > 1 && near, "{backend}, {name}, {metric}: {found:?}, not {expected:?}");
            }
        }
    }
}

/// The quickstart up to its first step. The warm-up is complete: before it no sample is right, and gradients
/// are zero.
const FIRST_STEP: [&str; 3] = [
    "pipeline.rlvr.steps=1",
    "pipeline.rlvr.optimizer.schedule.linear.warmup_steps=0",
    "pipeline.rlvr.evaluation.prompts=8",
];

/// Further changes for each world size: three ranks do not share the config's batches evenly.
const WORLDS: [(&str, &[&str]); 4] = [
    ("1", &[]),
    ("2", &[]),
    ("3", &["pipeline.rlvr.warmup.batch_size=33", "pipeline.rlvr.prompts_per_step=36"]),
    ("4", &[]),
];

/// Compared metrics: the last loss of 90 supervised steps, and a step on sampled completions.
const COMPARED: [&str; 6] =
    ["warmup/loss", "reward/mean", "response_length/mean", "loss/policy", "entropy", "grad_norm"];
/// Measured differences were at most 3e-6, with the same rewards and lengths. Such a difference changes about
/// one in a million sampled tokens, and the step has about 3,600; later steps would amplify it.
const TOLERANCE: f64 = 1e-4;

#[test]
fn the_quickstart_begins_as_on_the_cpu_on_one_to_four_ranks() {
    for backend in BACKENDS {
        for (world_size, sizes) in WORLDS {
            begins_as_on_the_cpu(backend, world_size, sizes);
        }
    }
}

fn begins_as_on_the_cpu(backend: &str, world_size: &str, sizes: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let [run, reference] = ["run", "reference"].map(|name| folder.path().join(name));
    let first_step = |run: &Path, sets: &[&str]| {
        let mut command = anyroll(["run", &config(backend), "--set", &format!("devices={world_size}")]);
        for set in FIRST_STEP.iter().chain(sizes).chain(sets) {
            command.args(["--set", set]);
        }
        command.arg("--output").arg(run);
        command
    };
    let Some(command) = on_shims(backend, first_step(&run, &[])) else { return };
    succeed(command);
    succeed(first_step(&reference, &["backend=cpu", "threads=1"]));
    assert!(series(&reference, "reward/mean")[0] > 0.05, "there is nothing to learn from");
    for name in COMPARED {
        let [value, expected] = [&run, &reference].map(|run| series(run, name)[0]);
        let difference = (value - expected).abs();
        assert!(
            difference <= TOLERANCE,
            "{backend} on {world_size}: {name} is {value}, and {expected} on the cpu"
        );
    }
}

/// Changes to `offline_sft_sort_cpu` that make it short, with batches that 1, 2 and 4 ranks share.
const SHORT: [&str; 5] = [
    "pipeline.offline.batch_size=32",
    "pipeline.offline.optimizer.schedule={constant: {}}",
    "pipeline.offline.evaluation={every: 2, prompts: 8}",
    "pipeline.offline.checkpoint.every=2",
    "strategy.micro_batch_size=4",
];

/// Parts of two steps of one run: backend, ranks and ZeRO stage.
const PARTS: [(&str, usize, usize); 6] =
    [("cpu", 2, 1), ("rocm", 1, 0), ("cpu", 4, 3), ("ascend", 2, 3), ("rocm", 4, 2), ("cpu", 1, 0)];

/// A checkpoint has no vendor, stage or number of ranks.
#[test]
fn a_run_moves_between_vendors_stages_and_numbers_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let [moved, stayed] = ["moved", "stayed"].map(|name| folder.path().join(name));
    let start = |run: &Path, steps: usize, sets: &[&str]| {
        let mut command = anyroll(["run", "configs/offline_sft_sort_cpu.yaml", "--output"]);
        command.arg(run);
        let steps = format!("pipeline.offline.steps={steps}");
        for set in SHORT.iter().chain(sets).chain([&&*steps]) {
            command.args(["--set", set]);
        }
        command
    };
    let resumed = |backend: &str| {
        let command = anyroll(["run", "--resume", moved.to_str().unwrap()]);
        if backend == "cpu" { Some(command) } else { on_shims(backend, command) }
    };
    if on_shims("rocm", anyroll::<&str>([])).is_none() {
        return;
    }
    succeed(start(&stayed, 2 * PARTS.len(), &[]));
    succeed(start(&moved, 2, &["devices=2", "strategy.zero_stage=1"]));
    for (part, (backend, ranks, stage)) in PARTS.iter().enumerate().skip(1) {
        edit(&moved.join("resolved.yaml"), |line| match line.split_once(':')?.0 {
            "backend" => Some(format!("backend: {backend}")),
            "devices" => Some(format!("devices: {ranks}")),
            "  zero_stage" => Some(format!("  zero_stage: {stage}")),
            "    steps" => Some(format!("    steps: {}", 2 * (part + 1))),
            _ => None,
        });
        succeed(resumed(backend).expect("there are shims"));
    }
    for metric in ["loss", "grad_norm", "eval/loss"] {
        let [found, expected] = [&moved, &stayed].map(|run| series(run, metric));
        let near =
            |(found, expected): (&f64, &f64)| (found - expected).abs() <= TOLERANCE * expected.abs().max(1.0);
        assert!(found.len() == expected.len() && found.len() > PARTS.len(), "{metric}: {found:?}");
        assert!(found.iter().zip(&expected).all(near), "{metric}: {found:?}, not {expected:?}");
    }
}

/// Replaces the lines for which `line` returns another.
fn edit(file: &Path, line: impl Fn(&str) -> Option<String>) {
    let text = std::fs::read_to_string(file).unwrap();
    let edited: Vec<String> = text.lines().map(|old| line(old).unwrap_or_else(|| old.to_owned())).collect();
    std::fs::write(file, edited.join("\n") + "\n").unwrap();
}

/// The policy on a vendor's devices, and its frozen reference on the host.
#[test]
fn a_reference_on_the_host_serves_a_policy_of_another_backend() {
    let folder = tempfile::tempdir().unwrap();
    for backend in BACKENDS {
        let run = |name: &str, sets: &[&str]| {
            let run = folder.path().join(backend).join(name);
            let mut command = anyroll(["run", &config(backend), "--set", "devices=2", "--output"]);
            command.arg(&run);
            // In the first step the policy is its reference.
            let two_steps = ["pipeline.rlvr.steps=2", "pipeline.rlvr.algorithm.kl_coef=0.05"];
            for set in FIRST_STEP.iter().chain(&two_steps).chain(sets) {
                command.args(["--set", set]);
            }
            succeed(on_shims(backend, command)?);
            Some(run)
        };
        let Some(together) = run("together", &[]) else { return };
        let apart = run("apart", &["roles.reference.backend=cpu"]).expect("there are shims");
        assert!(series(&together, "loss/kl")[1] > 1e-6, "the policy has not moved");
        for name in COMPARED.iter().chain(&["loss/kl"]) {
            let [value, expected] =
                [&apart, &together].map(|run| series(run, name).pop().expect("it was measured"));
            let difference = (value - expected).abs();
            assert!(difference <= TOLERANCE, "{backend}: {name} is {value}, and {expected} on one backend");
        }
    }
}

/// The policy on a vendor's devices, and its reward model on the host or beside it.
#[test]
fn a_reward_model_on_the_host_scores_a_policy_of_another_backend() {
    let folder = tempfile::tempdir().unwrap();
    for backend in BACKENDS {
        let run = |place: &str, zero_stage: u8| {
            let run = folder.path().join(backend).join(place);
            let mut command = anyroll(["run", &config(backend), "--set", "devices=2", "--output"]);
            command.arg(&run);
            let model = format!("path: tests/golden/reward_model, backend: {place}");
            let model = format!("model: {{{model}, strategy: {{zero_stage: {zero_stage}}}}}, weight: 0.1");
            let reward = format!("pipeline.rlvr.reward=[{{exact: {{}}}}, {{{model}}}]");
            for set in FIRST_STEP.iter().chain(&["pipeline.rlvr.steps=2", &reward]) {
                command.args(["--set", set]);
            }
            succeed(on_shims(backend, command)?);
            Some(run)
        };
        // Sharded on the host, and whole on the policy's devices.
        let Some(host) = run("cpu", 3) else { return };
        let beside = run(backend, 0).expect("there are shims");
        let scores = series(&host, "reward/model/mean");
        assert!(scores.len() == 2 && scores.iter().all(|score| score.abs() > 1e-3), "{backend}: {scores:?}");
        for name in ["reward/model/mean", "reward/model/std", "reward/mean", "loss/policy", "grad_norm"] {
            for (value, expected) in series(&host, name).into_iter().zip(series(&beside, name)) {
                let difference = (value - expected).abs();
                assert!(difference <= TOLERANCE, "{backend}: {name} is {value}, and {expected} beside it");
            }
        }
    }
}

#[test]
fn strict_rollouts_have_the_log_probs_of_training() {
    let folder = tempfile::tempdir().unwrap();
    let strict = "pipeline.rlvr.rollout.strict=true";
    let short = ["pipeline.rlvr.steps=3", "pipeline.rlvr.warmup.steps=5"];
    // Other rows share a batch than in sampling.
    let one_rank = ["devices=1", "strategy.micro_batch_size=3"];
    let two_ranks = ["devices=2", "strategy.zero_stage=3", "strategy.recompute=full"];
    for (name, sets) in [("one rank", &one_rank[..]), ("two ranks", &two_ranks)] {
        let run = folder.path().join(name);
        let sets: Vec<&str> = [strict].iter().chain(&short).chain(sets).copied().collect();
        let Some(command) = on_shims("rocm", tiny(&config("rocm"), &run, &sets)) else { return };
        succeed(command);
        let differences = series(&run, "rollout/logprob_diff_max");
        assert!(
            !differences.is_empty() && differences.iter().all(|&it| it == 0.0),
            "{name}: {differences:?}"
        );
    }
    let refused = tiny(&config("ascend"), &folder.path().join("ascend"), &["devices=1", strict]);
    let ended = finish(on_shims("ascend", refused).expect("as above"));
    assert!(
        ended.error().contains("`ascend` has no products of matrices that add in one order"),
        "{ended:#?}"
    );
}

/// Deadline of a whole quickstart, even on a busy machine.
const QUICKSTART_DEADLINE: Duration = Duration::from_secs(900);

#[test]
fn the_quickstart_learns() {
    // In parallel, since nothing else takes longer.
    thread::scope(|scope| {
        for backend in BACKENDS {
            scope.spawn(move || learns(backend));
        }
    });
}

fn learns(backend: &str) {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut whole = anyroll(["run", &config(backend), "--set", "devices=1", "--output"]);
    whole.arg(&run);
    let Some(command) = on_shims(backend, whole) else { return };
    let ended = Process::start(command).finish_within(QUICKSTART_DEADLINE);
    assert_eq!(ended.code, Some(0), "{backend}: {ended:#?}");
    let pass_at_1 = series(&run, "eval/pass@1");
    let (before, after) = (pass_at_1[0], pass_at_1[pass_at_1.len() - 1]);
    println!("{backend}: held-out pass@1 went from {before} to {after} in {:?}", ended.took);
    assert!(before < 0.2 && after >= 0.85, "{backend}: held-out pass@1 went from {before} to {after}");
}

#[test]
fn a_device_that_runs_full_is_an_error_with_the_bytes() {
    for backend in BACKENDS {
        let folder = tempfile::tempdir().unwrap();
        let run = tiny(&config(backend), &folder.path().join("run"), &["devices=1"]);
        let Some(mut command) = on_shims(backend, run) else { return };
        command.env("ANYROLL_SHIM_MEMORY_MIB", "2");
        let ended = finish(command);
        assert!(ended.error().contains("out of memory"), "{backend}: {ended:#?}");
    }
}

#[test]
fn without_the_variable_a_shim_finds_no_device() {
    // Including the shims that forward to NVIDIA's libraries, which need not be installed.
    for folder in ["", "forward/"] {
        for (backend, words) in [("rocm", "hipErrorNoDevice"), ("ascend", "this process sees no device")] {
            let Some(mut doctor) = on_shims(&format!("{folder}{backend}"), anyroll(["doctor"])) else {
                return;
            };
            doctor.env_remove("ANYROLL_SHIM");
            let ended = succeed(doctor);
            assert!(ended.stdout.contains(&format!("{backend:8} not available: {words}")), "{ended:#?}");
        }
    }
}

#[test]
fn a_driver_that_is_too_old_is_refused_by_its_version() {
    let Some(mut doctor) = on_shims("rocm", anyroll(["doctor"])) else { return };
    doctor.env("ANYROLL_SHIM_VERSION", "50732831");
    let ended = succeed(doctor);
    assert!(ended.stdout.contains("it is HIP 5.7, and 6.0 is the oldest"), "{ended:#?}");
}

#[test]
fn the_configs_of_two_vendors_differ_by_the_backends_name_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let read = |backend: &str| std::fs::read_to_string(root.join(config(backend))).unwrap();
    for (backend, hardware) in [("rocm", "AMD GPUs"), ("ascend", "Ascend NPUs")] {
        let named = read(backend).replace(hardware, "NVIDIA GPUs").replace(backend, "cuda");
        assert_eq!(named, read("cuda"), "{backend}");
    }
}
