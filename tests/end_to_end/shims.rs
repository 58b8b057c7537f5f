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
