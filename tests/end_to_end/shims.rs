//! A backend on the shims of its vendor's libraries (`tests/shims`), where `ANYROLL_SHIMS` names the folder that
//! `tests/shims/build` has filled. Elsewhere these tests say that they are skipped.

use std::{env, io::Write as _, path::Path, process::Command};

use super::{anyroll, finish, lasting_metrics, succeed, tiny};

const CONFIG: &str = "configs/rlvr_sort_rocm.yaml";

/// A command that finds the shims, or `None` where there are none: said past the harness, which keeps what passing
/// tests print.
fn on_shims(mut command: Command) -> Option<Command> {
    let Some(folder) = env::var_os("ANYROLL_SHIMS") else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: ANYROLL_SHIMS does not name the folder of the shims");
        return None;
    };
    command.env("ANYROLL_LIBRARIES", folder).env("ANYROLL_SHIM", "1");
    Some(command)
}

#[test]
fn the_contract_is_held_on_one_to_four_ranks() {
    for world_size in ["1", "2", "3", "4"] {
        let conformance =
            anyroll(["conformance", "--backend", "rocm", "--world-size", world_size, "--timeout-s", "30"]);
        let Some(conformance) = on_shims(conformance) else { return };
        println!("{}", succeed(conformance).stdout);
    }
}

#[test]
fn every_zero_stage_has_the_same_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let runs = ["0", "1", "2", "3"].map(|stage| {
        let run = folder.path().join(stage);
        let sets = ["devices=2", "pipeline.rlvr.steps=3", "pipeline.rlvr.warmup.steps=5"];
        let mut command = tiny(CONFIG, &run, &sets);
        command.args(["--set", &format!("strategy.zero_stage={stage}")]);
        on_shims(command).map(|command| {
            succeed(command);
            lasting_metrics(&run)
        })
    });
    let [Some(first), rest @ ..] = &runs else { return };
    assert!(!first.is_empty());
    for (stage, run) in rest.iter().enumerate() {
        // Bytes differ, as they should; losses, rewards and norms do not.
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

#[test]
fn a_device_that_runs_full_is_an_error_with_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut command) = on_shims(tiny(CONFIG, &folder.path().join("run"), &["devices=1"])) else {
        return;
    };
    command.env("ANYROLL_SHIM_MEMORY_MIB", "2");
    let ended = finish(command);
    assert!(ended.error().contains("out of memory"), "{ended:#?}");
}

#[test]
fn without_the_variable_a_shim_finds_no_device() {
    let Some(mut doctor) = on_shims(anyroll(["doctor"])) else { return };
    doctor.env_remove("ANYROLL_SHIM");
    let ended = succeed(doctor);
    assert!(ended.stdout.contains("rocm     not available: hipErrorNoDevice"), "{ended:#?}");
}

#[test]
fn a_driver_that_is_too_old_is_refused_by_its_version() {
    let Some(mut doctor) = on_shims(anyroll(["doctor"])) else { return };
    doctor.env("ANYROLL_SHIM_VERSION", "50732831");
    let ended = succeed(doctor);
    assert!(ended.stdout.contains("it is HIP 5.7, and 6.0 is the oldest"), "{ended:#?}");
}

#[test]
fn the_configs_of_two_vendors_differ_by_the_backends_name_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let named = read(CONFIG).replace("AMD", "NVIDIA").replace("rocm", "cuda");
    assert_eq!(named, read("configs/rlvr_sort_cuda.yaml"));
}
