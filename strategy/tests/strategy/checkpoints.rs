//! An interrupted save leaves a complete checkpoint, and a checkpoint loads at another world size.

use std::{
    fs, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyroll_models::Decoder;
use anyroll_strategy::{
    Error, Precision, State, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Saver, Stamp},
    disk::{Disk, RealDisk},
};
use serde_json::json;

use crate::harness::{STAGES, ranks, train, values, zero};

/// Fails for all ranks from the change after `left` on, as if the processes had been killed there. A failing
/// write has written half of its bytes.
#[derive(Debug)]
struct Dying {
    left: AtomicUsize,
}

impl Dying {
    fn after(changes: usize) -> Self {
        Self { left: AtomicUsize::new(changes) }
    }

    fn change(&self) -> io::Result<()> {
        let spend = |left: usize| left.checked_sub(1);
        let spent = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend);
        spent.map(|_| ()).map_err(|_| io::Error::other("killed"))
    }
}

impl Disk for Dying {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.change()?;
        RealDisk.create_folder(path)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.change().inspect_err(|_| drop(fs::write(path, &bytes[..bytes.len() / 2])))?;
        RealDisk.write(path, bytes)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.change()?;
        RealDisk.sync_folder(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change()?;
        RealDisk.rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.change()?;
        RealDisk.remove_folder(path)
    }
}

/// Tries every prefix of the changes made by a save of two models, with an older checkpoint next to it and in
/// place of one.
#[test]
fn a_save_that_ends_anywhere_leaves_a_whole_checkpoint() {
    for replaces in [false, true] {
        let mut changes = 0;
        loop {
            let folder = tempfile::tempdir().unwrap();
            let first = folder.path().join("step_000001");
            let second = if replaces { first.clone() } else { folder.path().join("step_000002") };
            let disk: Arc<dyn Disk> = Arc::new(Dying::after(changes));
            let states = ranks(2, false, |device, group| {
                let mut other = crate::harness::zero(ZeroStage::Zero1, false, device, group.clone());
                let mut zero = zero(ZeroStage::Zero2, true, device, group);
                let mut with_other = |disk: &Arc<dyn Disk>, folder: &Path| {
                    save_on(disk, &mut other, &folder.join("other"), |_| Ok(()))
                };
                train(&mut zero, 0..1, 2);
                let real: Arc<dyn Disk> = Arc::new(RealDisk);
                let mut saver = Saver::default();
                let own = Some(vec![1]);
                saver.start_with(&mut zero, &first, json!(1), own, |it| with_other(&real, it)).unwrap();
                saver.finish(zero.group()).unwrap();
                let before = values(&mut zero);
                train(&mut zero, 1..2, 2);
                let after = values(&mut zero);
                // No collective can run once one of the ranks has died.
                let saved = save_on(&disk, &mut zero, &second, |folder| with_other(&disk, folder)).is_ok();
                (saved, before, after)
            });
            let (_, before, after) = &states[0];
            let newest = checkpoint::list(folder.path()).unwrap().pop().expect("one is left");
            let own = [0, 1].map(|rank| checkpoint::own(&newest, rank, 2).unwrap().unwrap());
            let loaded = ranks(1, false, |device, group| {
                let mut other = crate::harness::zero(ZeroStage::Zero0, false, device, group.clone());
                checkpoint::load(&mut other, &newest.join("other")).unwrap();
                let mut zero = zero(ZeroStage::Zero0, true, device, group);
                let which = checkpoint::load(&mut zero, &newest).unwrap();
                (which.as_u64(), values(&mut zero), checkpoint_again(&mut zero, &second, folder.path()))
            });
            let (which, found, again) = &loaded[0];
            assert_eq!(
                own.map(|own| own[0]),
                [which.unwrap() as u8; 2],
                "{newest:?} after {changes} changes"
            );
            let expected = if *which == Some(2) { after } else { before };
            assert!(found == expected, "{newest:?} after {changes} changes");
            assert_eq!(*again, Some(3), "a later save after {changes} changes");
            if states.iter().all(|(saved, ..)| *saved) {
                assert_eq!(*which, Some(2));
                break;
            }
            changes += 1;
        }
        // For both models: each rank's shard and own state, the manifest, and the folder operations before
        // and after.
        assert_eq!(changes, if replaces { 24 } else { 22 });
    }
}

/// Each rank's own state is returned to it, and to no other world size.
#[test]
fn each_rank_gets_its_own_back() {
    let folder = tempfile::tempdir().unwrap();
    let [with, without] = ["with", "without"].map(|name| folder.path().join(name));
    ranks(2, false, |device, group| {
        let rank = group.rank() as u8;
        let mut zero = zero(ZeroStage::Zero1, true, device, group);
        let mut saver = Saver::default();
        saver.start_with(&mut zero, &with, json!(1), Some(vec![7; 10 * rank as usize]), |_| Ok(())).unwrap();
        saver.finish(zero.group()).unwrap();
        checkpoint::save(&mut zero, &without, Stamp::default(), json!(1)).unwrap();
    });
    assert_eq!(checkpoint::own(&with, 0, 2).unwrap(), Some(Vec::new()));
    assert_eq!(checkpoint::own(&with, 1, 2).unwrap(), Some(vec![7; 10]));
    assert_eq!(checkpoint::own(&without, 0, 2).unwrap(), None);
    let refused = |rank, world_size, expected: &str| {
        let error = checkpoint::own(&with, rank, world_size).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(0, 1, "each of its 2 ranks");
    fs::write(with.join("rank_0001.own"), [7; 14]).unwrap();
    refused(1, 2, "rank_0001.own is damaged");
    fs::write(with.join("rank_0001.own"), [7]).unwrap();
    refused(1, 2, "rank_0001.own is damaged");
}

fn save_on(
    disk: &Arc<dyn Disk>,
    zero: &mut Zero<Decoder>,
    path: &Path,
    others: impl FnOnce(&Path) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut saver = Saver::on(disk.clone());
    saver.start_with(zero, path, json!(2), Some(vec![2]), others)?;
    saver.finish(zero.group()).map(drop)
}

/// Saves the same step again, like a resumed run, and returns the step of the newest checkpoint.
fn checkpoint_again(zero: &mut Zero<Decoder>, path: &Path, folder: &Path) -> Option<u64> {
    checkpoint::save(zero, path, Stamp::default(), json!(3)).unwrap();
    checkpoint::extra(&checkpoint::list(folder).unwrap().pop()?).unwrap().as_u64()
}

/// Stage 3 on four ranks, then stage 1 on two, then stage 0 on one: only the order of sums changes.
#[test]
fn training_goes_on_in_a_smaller_world() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["step_000002", "step_000004"].map(|name| folder.path().join(name));
        let config = |stage| ZeroConfig { precision, ..ZeroConfig::from(stage) };
        let leg = |world_size, stage, steps: std::ops::Range<u64>, from: Option<&Path>, to: Option<&Path>| {
            let mut of_ranks = ranks(world_size, false, |device, group| {
                let mut zero = zero(config(stage), true, device, group);
                if let Some(from) = from {
                    checkpoint::load(&mut zero, from).unwrap();
                }
                let loaded = values(&mut zero);
                let norms = train(&mut zero, steps.clone(), 12);
                if let Some(to) = to {
                    checkpoint::save(&mut zero, to, Stamp::default(), serde_json::Value::Null).unwrap();
                }
                (loaded, norms, values(&mut zero))
            });
            of_ranks.swap_remove(0)
        };
        let four = leg(4, ZeroStage::Zero3, 0..2, None, Some(&paths[0]));
        let two = leg(2, ZeroStage::Zero1, 2..4, Some(&paths[0]), Some(&paths[1]));
        let one = leg(1, ZeroStage::Zero0, 4..6, Some(&paths[1]), None);
        assert!(four.2 == two.0 && two.2 == one.0, "weights in {precision:?}");
        let whole = leg(1, ZeroStage::Zero0, 0..6, None, None);
        let parts = [four.1, two.1, one.1].concat();
        let tolerance = if precision == Precision::Fp32 { 1e-4 } else { 2e-2 };
        for (step, (part, whole)) in parts.iter().zip(&whole.1).enumerate() {
            assert!(
                (part - whole).abs() <= tolerance * whole,
                "{precision:?}, step {step}: {part}, not {whole}"
            );
        }
    }
}

/// A disk that writes no shard before it is opened.
#[derive(Debug, Default)]
struct Slow {
    open: AtomicBool,
    /// Number of shards that it was asked to write.
    asked: AtomicUsize,
}

impl Disk for Slow {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        RealDisk.create_folder(path)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.open.load(Ordering::SeqCst) {
            assert!(Instant::now() < deadline, "the disk was not opened in time");
            thread::sleep(Duration::from_millis(1));
        }
        RealDisk.write(path, bytes)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_folder(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove_folder(path)
    }
}

/// A save holds the state at its start, even if training changes it before it is written.
#[test]
fn training_goes_on_while_a_checkpoint_is_written() {
    let fp32 = STAGES.map(ZeroConfig::from);
    let bf16 = STAGES.map(|stage| ZeroConfig { precision: Precision::Bf16, ..stage.into() });
    let host = STAGES.map(|stage| ZeroConfig { steps_on: StepsOn::Host, ..stage.into() });
    for config in [fp32, bf16, host].into_iter().flatten() {
        let folder = tempfile::tempdir().unwrap();
        let slow = Arc::new(Slow::default());
        let paths = ["beside", "at_once", "again"].map(|name| folder.path().join(name));
        ranks(2, true, |device, group| {
            let mut zero = zero(config, true, device, group.clone());
            train(&mut zero, 0..2, 2);
            checkpoint::save(&mut zero, &paths[1], Stamp::default(), json!(1)).unwrap();
            let mut saver = Saver::on(slow.clone());
            assert!(!saver.poll(&group).unwrap() && !saver.finish(&group).unwrap(), "no save is in progress");
            saver.start(&mut zero, &paths[0], json!(1)).unwrap();
            // Like a step in a run: states are offloaded, loaded and updated.
            zero.offload_states(&[State::Optimizer, State::Gradients]).unwrap();
            zero.load_states(&[State::Optimizer, State::Gradients]).unwrap();
            train(&mut zero, 2..4, 2);
            assert!(!saver.poll(&group).unwrap(), "the disk is not open yet");
            assert!(checkpoint::extra(&paths[0]).is_err(), "an incomplete checkpoint has its final name");
            slow.open.store(true, Ordering::SeqCst);
            let deadline = Instant::now() + Duration::from_secs(60);
            while !saver.poll(&group).unwrap() {
                assert!(Instant::now() < deadline);
            }
            // The next save uses the same memory.
            let pinned = device.memory_info().unwrap().pinned_bytes;
            saver.start(&mut zero, &paths[2], json!(1)).unwrap();
            assert_eq!(device.memory_info().unwrap().pinned_bytes, pinned);
            saver.finish(&group).unwrap();
        });
        let files = |path: &Path| {
            ["manifest.json", "rank_0000.bin", "rank_0001.bin"].map(|name| fs::read(path.join(name)).unwrap())
        };
        assert!(files(&paths[0]) == files(&paths[1]), "{config:?}");
        assert!(files(&paths[0])[1..] != files(&paths[2])[1..], "{config:?} has not trained on");
    }
}

/// The next call reports a failed background write on every rank, and the previous checkpoint still counts.
#[test]
fn a_write_that_fails_is_told_on_every_rank() {
    // Creating the folder succeeds, then the first shard fails.
    for changes in [2, 3] {
        for next in ["poll", "finish", "start"] {
            let folder = tempfile::tempdir().unwrap();
            let (first, second) = (folder.path().join("step_000001"), folder.path().join("step_000002"));
            let disk: Arc<dyn Disk> = Arc::new(Dying::after(changes));
            let told = ranks(2, false, |device, group| {
                let mut zero = zero(ZeroStage::Zero1, true, device, group.clone());
                checkpoint::save(&mut zero, &first, Stamp::default(), json!(1)).unwrap();
                let mut saver = Saver::on(disk.clone());
                saver.start(&mut zero, &second, json!(2)).unwrap();
                train(&mut zero, 0..1, 2);
                let outcome = match next {
                    "poll" => loop {
                        match saver.poll(&group) {
                            Ok(false) => {}
                            outcome => break outcome.map(drop),
                        }
                    },
                    "finish" => saver.finish(&group).map(drop),
                    _ => saver.start(&mut zero, &second, json!(3)),
                };
                let error = outcome.unwrap_err();
                (error.is_from_peer(), error.to_string())
            });
            for (rank, (is_from_peer, message)) in told.iter().enumerate() {
                let named = if *is_from_peer {
                    "could not write its part".into()
                } else {
                    format!("rank_{rank:04}.bin")
                };
                assert!(message.contains(&named), "{next}: {message}");
            }
            assert!(told.iter().any(|(is_from_peer, _)| !is_from_peer), "{told:?}");
            assert_eq!(checkpoint::list(folder.path()).unwrap(), [first]);
        }
    }
}
