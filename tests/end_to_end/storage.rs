//! A store that has copies of a run's checkpoints.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use super::{ONE_RANK, assert_same, checkpoints, fail, finish, resume, run_tiny, succeed, tiny};

fn stored(run: &Path, store: &Path, sets: &[&str]) -> Command {
    let storage = format!("pipeline.rlvr.checkpoint.storage=file://{}", store.display());
    let timeout = "pipeline.rlvr.checkpoint.storage_timeout_s=1";
    tiny(ONE_RANK, run, &[&[storage.as_str(), timeout], sets].concat())
}

#[test]
fn a_half_copied_checkpoint_is_not_resumed_from() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let store = path("store");
    let best = "pipeline.rlvr.checkpoint.keep_best=true";
    let whole = run_tiny(&folder, "whole", ONE_RANK, &[best]);
    succeed(stored(&path("run"), &store, &[best]));
    assert_same(&whole, &store);
    assert_eq!(checkpoints(&store), ["step_000008", "step_000012"]);
    let bests: Vec<_> = fs::read_dir(store.join("best")).unwrap().collect();
    assert_eq!(bests.len(), 1, "{bests:?}");

    let error = fail(stored(&path("new"), &store, &[best]));
    assert!(error.contains("store holds checkpoints of a run: continue it with --auto-resume"), "{error}");

    // As the copy is while it is made, on a host whose disk is new.
    fs::remove_file(store.join("checkpoints/step_000012/manifest.json")).unwrap();
    let mut again = stored(&path("again"), &store, &[best]);
    again.arg("--auto-resume");
    let ended = succeed(again);
    assert!(ended.stderr.contains("step 12"), "{ended:#?}");
    assert_same(&whole, &path("again"));
    assert_same(&whole, &store);
    let mut other = stored(&path("other"), &store, &[best, "seed=1"]);
    other.arg("--auto-resume");
    assert!(fail(other).contains("holds a run with `seed: 0` where this one has `seed: 1`"));
}

/// A file where a folder has to be: no copy can be made, however often it is tried.
#[test]
fn a_copy_that_fails_is_told_and_the_last_one_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for (step, code) in [("step_000008", 0), ("step_000012", 1)] {
        let (run, store) = (folder.path().join(step), folder.path().join(format!("store of {step}")));
        fs::create_dir_all(store.join("checkpoints")).unwrap();
        fs::write(store.join("checkpoints").join(step), "").unwrap();
        let ended = finish(stored(&run, &store, &[]));
        assert_eq!(ended.code, Some(code), "{ended:#?}");
        let words = format!("checkpoints/{step} is not in `checkpoint.storage`: rank 0: ");
        assert!(ended.stderr.contains(&format!("warning: {words}")), "{ended:#?}");
        if code == 1 {
            let error = ended.error();
            assert!(error.contains(&words) && error.contains("it is in the folders of the hosts"), "{error}");
            // Once there is room, the same run copies it.
            fs::remove_file(store.join("checkpoints").join(step)).unwrap();
            succeed(resume(&run));
            assert_eq!(checkpoints(&store), ["step_000008", step]);
        }
        assert_eq!(checkpoints(&run), ["step_000008", "step_000012"]);
    }
}

#[test]
fn a_store_that_is_not_to_be_had_is_refused_before_a_device_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let run = |storage: &str| {
        let set = format!("pipeline.rlvr.checkpoint.storage={storage}");
        // No rank would come as far as its device.
        tiny(ONE_RANK, &folder.path().join("run"), &[&set, "pipeline.rlvr.checkpoint.storage_timeout_s=1"])
    };
    for storage in ["s3://", "/shared/runs", "ftp://host/folder", "file://relative"] {
        let ended = finish(run(storage));
        assert!(ended.stderr.contains("is no place in a store"), "{ended:#?}");
        assert!(ended.stderr.contains("pipeline.rlvr.checkpoint.storage"), "{ended:#?}");
    }
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = fail(run(&format!("file://{}/below", file.display())));
    assert!(error.contains("`checkpoint.storage` file:///"), "{error}");
    let started = Instant::now();
    let mut unreachable = run("s3://bucket/runs/first");
    for (name, value) in
        [("ENDPOINT", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret")]
    {
        unreachable.env(format!("AWS_{name}"), value);
    }
    let error = fail(unreachable);
    assert!(error.contains("`checkpoint.storage` s3://bucket/runs/first: cannot write probe-"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(20), "it took {:?}", started.elapsed());
    assert!(!folder.path().join("run").exists());
}
