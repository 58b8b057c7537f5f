//! Loads name a checkpoint's file that was changed, is missing, or belongs to another rank, step or run.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyroll_models::Model;
use anyroll_strategy::{
    Error, ZeroStage,
    checkpoint::{self, CheckpointWeights, Saver, Stamp},
};
use serde_json::{Value, json};

use crate::harness::{decoder, ranks, train, values, zero};

/// Bytes after the content of a rank's file: its seal and its checksum.
const END_BYTES: usize = 36;

/// Saves two steps of a run on two ranks, with own states and a further model, and one step of another run.
fn checkpoints(folder: &Path) -> [PathBuf; 3] {
    let paths = ["step_000001", "step_000002", "other_000002"].map(|name| folder.join(name));
    ranks(2, false, |device, group| {
        let rank = group.rank() as u8;
        let mut critic = zero(ZeroStage::Zero1, false, device, group.clone());
        let mut zero = zero(ZeroStage::Zero1, true, device, group.clone());
        for (path, run, step) in [(&paths[0], 7, 1), (&paths[1], 7, 2), (&paths[2], 8, 2)] {
            train(&mut zero, step - 1..step, 2);
            train(&mut critic, step - 1..step, 2);
            let mut saver = Saver::of_run(run);
            let stamp = saver.at(step).stamp();
            let others =
                |folder: &Path| checkpoint::save(&mut critic, &folder.join("critic"), stamp, Value::Null);
            let own = Some(vec![rank; 5]);
            saver.start_with(&mut zero, path, json!({"steps": step}), own, others).unwrap();
            saver.finish(&group).unwrap();
        }
    });
    paths
}

fn load(path: &Path) -> Result<Value, Error> {
    ranks(1, false, |device, group| {
        let mut zero = zero(ZeroStage::Zero0, true, device, group);
        checkpoint::load(&mut zero, path)
    })
    .remove(0)
}

/// Asserts that loading, reading weights and verifying all refuse the checkpoint, with these words.
#[track_caller]
fn refused(path: &Path, words: &[&str]) {
    let weights = CheckpointWeights::open(path, decoder(true).units()).map(drop);
    for (how, outcome) in
        [("load", load(path).map(drop)), ("weights", weights), ("verify", checkpoint::verify(path))]
    {
        let error = outcome.expect_err(how);
        let source = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
        let message = format!("{error}: {source}");
        assert!(words.iter().all(|word| message.contains(word)), "{how}: {words:?} in {message}");
        assert!(error.is_of_a_file() && error.is_in(path), "{how}: {message}");
    }
}

/// Changes a copy of a checkpoint, and asserts that the change is reported.
fn check(good: &Path, change: impl FnOnce(&Path), words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("step_000002");
    copy_folder(good, &copy);
    change(&copy);
    refused(&copy, words);
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => copy_folder(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

fn swap(folder: &Path, a: &str, b: &str) {
    fs::rename(folder.join(a), folder.join("x")).unwrap();
    fs::rename(folder.join(b), folder.join(a)).unwrap();
    fs::rename(folder.join("x"), folder.join(b)).unwrap();
}

#[test]
fn files_that_do_not_belong_together_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let [older, good, other] = checkpoints(folder.path());
    assert_eq!(load(&good).unwrap(), json!({"steps": 2}));
    checkpoint::verify(&good).unwrap();
    let own = |rank| checkpoint::own(&good, rank, 2).unwrap();
    assert_eq!([own(0), own(1)], [Some(vec![0; 5]), Some(vec![1; 5])]);

    check(&good, |it| swap(it, "rank_0000.bin", "rank_0001.bin"), &["rank_0000.bin", "the file of rank 1"]);
    check(&good, |it| swap(it, "rank_0000.own", "rank_0001.own"), &["rank_0000.own", "the file of rank 1"]);
    check(
        &good,
        |it| swap(it, "critic/rank_0000.bin", "critic/rank_0001.bin"),
        &["critic/rank_0000.bin", "the file of rank 1"],
    );
    let from = |source: &Path, name: &'static str| {
        let source = source.join(name);
        move |it: &Path| {
            fs::copy(source, it.join(name)).unwrap();
        }
    };
    for name in ["rank_0000.bin", "rank_0001.bin", "rank_0001.own", "critic/rank_0001.bin"] {
        check(&good, from(&older, name), &[name, "of step 1, and manifest.json of step 2"]);
        check(&good, from(&other, name), &[name, "of another run"]);
    }
    check(&good, from(&older, "manifest.json"), &["rank_0000", "of step 2, and manifest.json of step 1"]);
    check(&good, from(&older, "critic/manifest.json"), &["critic/manifest.json", "of another save"]);
    let whole_critic = |it: &Path| {
        fs::remove_dir_all(it.join("critic")).unwrap();
        copy_folder(&older.join("critic"), &it.join("critic"));
    };
    check(&good, whole_critic, &["critic/manifest.json", "of another save"]);
    // Of the same run and step, but other values: a save that was made twice.
    let again = |it: &Path| {
        let path = it.join("rank_0001.bin");
        let mut bytes = fs::read(&path).unwrap();
        bytes[100] ^= 1;
        let end = bytes.len() - 4;
        let sum = crc32c::crc32c(&bytes[..end]);
        bytes[end..].copy_from_slice(&sum.to_le_bytes());
        fs::write(path, bytes).unwrap();
    };
    check(&good, again, &["rank_0001.bin", "another than the one in manifest.json"]);
    for name in
        ["manifest.json", "rank_0000.bin", "rank_0001.own", "critic/manifest.json", "critic/rank_0001.bin"]
    {
        check(&good, |it| fs::remove_file(it.join(name)).unwrap(), &[name, "No such file"]);
    }
    let stamp = Stamp { run: 7, step: 2 };
    assert_eq!(checkpoint::stamp(&good).unwrap(), Some(stamp));
    checkpoint::check_stamp(&good, stamp).unwrap();
    assert!(checkpoint::check_stamp(&older, stamp).unwrap_err().to_string().contains("of step 1"));
    assert!(checkpoint::check_stamp(&other, stamp).unwrap_err().to_string().contains("of another run"));
}

/// Flips bits of bytes in each kind of file.
#[test]
fn a_flipped_bit_is_told_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let [_, good, _] = checkpoints(folder.path());
    for name in ["manifest.json", "rank_0001.bin", "rank_0000.own"] {
        let path = good.join(name);
        let bytes = fs::read(&path).unwrap();
        let step = if name == "manifest.json" { 7 } else { bytes.len() / 150 + 1 };
        // The last bytes have another meaning than those before.
        let end = bytes.len().saturating_sub(if name == "manifest.json" { 30 } else { END_BYTES });
        for at in (0..end).step_by(step).chain(end..bytes.len()) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            fs::write(&path, flipped).unwrap();
            let error = checkpoint::verify(&good).expect_err(name);
            assert!(error.is_of_a_file() && error.is_in(&good), "{name}, byte {at}: {error}");
        }
        for length in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&path, &bytes[..length]).unwrap();
            checkpoint::verify(&good).expect_err(name);
        }
        fs::write(&path, bytes).unwrap();
    }
    // As an editor would.
    let manifest = good.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    for (from, to) in [
        ("\"taken\": 2", "\"taken\": 9"),
        ("\"start\": 64", "\"start\": 65"),
        ("\"format\": 3", "\"format\": 2"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&manifest, text.replacen(from, to, 1)).unwrap();
        refused(&good, &["manifest.json", "damaged", "checksum is wrong"]);
    }
    fs::write(manifest, text).unwrap();
    checkpoint::verify(&good).unwrap();
}

/// Rewrites a checkpoint in the format without seals.
pub fn unseal(path: &Path) {
    let file = path.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let fields = manifest.as_object_mut().unwrap();
    fields.retain(|name, _| !["stamp", "files", "parts", "crc32c"].contains(&name.as_str()));
    fields.insert("format".into(), json!(2));
    fs::write(&file, serde_json::to_vec_pretty(&manifest).unwrap()).unwrap();
    for entry in fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|kind| kind == "bin" || kind == "own") {
            let mut bytes = fs::read(&entry).unwrap();
            bytes.truncate(bytes.len() - END_BYTES);
            bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
            fs::write(entry, bytes).unwrap();
        }
    }
}

#[test]
fn a_checkpoint_of_before_seals_still_loads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step_000002");
    let saved = ranks(2, false, |device, group| {
        let mut zero = zero(ZeroStage::Zero1, true, device, group.clone());
        train(&mut zero, 0..2, 2);
        let mut saver = Saver::of_run(7);
        let own = Some(vec![group.rank() as u8; 5]);
        saver.at(2).start_with(&mut zero, &path, json!({"steps": 2}), own, |_| Ok(())).unwrap();
        saver.finish(&group).unwrap();
        values(&mut zero)
    });
    unseal(&path);
    let loaded = ranks(1, false, |device, group| {
        let mut zero = zero(ZeroStage::Zero0, true, device, group);
        assert_eq!(checkpoint::load(&mut zero, &path).unwrap(), json!({"steps": 2}));
        values(&mut zero)
    });
    assert!(loaded[0] == saved[0]);
    assert_eq!(checkpoint::own(&path, 1, 2).unwrap(), Some(vec![1; 5]));
    assert_eq!(checkpoint::stamp(&path).unwrap(), None);
    checkpoint::check_stamp(&path, Stamp { run: 9, step: 9 }).unwrap();
    checkpoint::verify(&path).unwrap();
    CheckpointWeights::open(&path, decoder(true).units()).unwrap();
    let shard = path.join("rank_0001.bin");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[100] ^= 1;
    fs::write(shard, bytes).unwrap();
    refused(&path, &["rank_0001.bin", "damaged"]);
}

/// Reading weights checks the model, as a load does.
#[test]
fn weights_of_another_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [_, good, _] = checkpoints(folder.path());
    let error = CheckpointWeights::open(&good, decoder(false).units()).unwrap_err();
    assert!(matches!(error, Error::CheckpointMismatch { .. }), "{error}");
}

/// A folder without its manifest is listed, so that a resume reports it.
#[test]
fn a_missing_manifest_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let [older, good, other] = checkpoints(folder.path());
    fs::remove_dir_all(other).unwrap();
    fs::create_dir(folder.path().join("notes")).unwrap();
    fs::write(folder.path().join("notes/todo.txt"), "").unwrap();
    fs::remove_file(good.join("manifest.json")).unwrap();
    assert_eq!(checkpoint::list(folder.path()).unwrap(), [older.clone(), good.clone()]);
    refused(&good, &["manifest.json", "No such file"]);
    checkpoint::prune(folder.path(), 1).unwrap();
    assert_eq!(checkpoint::list(folder.path()).unwrap(), [older, good]);
    assert!(folder.path().join("notes/todo.txt").exists());
}
