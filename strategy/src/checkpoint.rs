//! Checkpoints: every rank writes its own shard, and a manifest comes last.
//!
//! A checkpoint is a folder: `manifest.json` and a `rank_0000.bin` a rank. Such a file holds, for each unit that is
//! trained, this rank's shard of the weights and, if there is an optimizer, of its two moments: raw little-endian
//! fp32 (whatever the precision that the model runs in: a checkpoint loads at another).
//! A run may add what each rank has beside the model, a `rank_0000.own` each, and further models, a folder each.
//!
//! Each file of a rank ends in its seal (the run's number, the step, the rank, the number of ranks and a checksum of
//! the layout) and the CRC-32C of it all. The manifest has these checksums, those of further models' manifests, and
//! its own. So a file that was changed, or that is another rank's, step's or run's, is named.
//! The folder is written under another name and renamed once it is whole and on the disk, so that a folder with the
//! right name is a whole checkpoint. [`Saver`] writes beside training.
//!
//! Frozen units are left out: they are what they were when training began, so who loads has made them already.
//!
//! Shards are the same at every stage, and a load copies whatever ranges overlap: a checkpoint of four ranks at
//! stage 3 loads on one rank at stage 0. What ranks have of their own goes to as many ranks again.

mod manifest;
mod saver;
mod seal;
mod weights;

use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use anyroll_models::Model;
use tch::Tensor;

use manifest::{MANIFEST, Manifest};
pub use saver::Saver;
pub use seal::Stamp;
pub use weights::CheckpointWeights;

use crate::{
    Error, Result, State, Zero,
    disk::{Disk, RealDisk},
};

/// What the name of a checkpoint ends in while another takes its place.
const REPLACED: &str = "replaced";
const F32_BYTES: usize = size_of::<f32>();
const WRONG_SUM: &str = "its checksum is wrong";

/// Writes a checkpoint to the new folder `path`. Every rank calls; all return once it is whole on the disk.
/// Its files belong to `stamp`, the same on all ranks; `extra` (rank 0's) comes back from [`load`].
///
/// # Errors
/// [`Error::Checkpoint`] when a file cannot be written. What was at `path` before is then still there.
pub fn save<M: Model>(zero: &mut Zero<M>, path: &Path, stamp: Stamp, extra: serde_json::Value) -> Result<()> {
    let mut saver = Saver::of_run(stamp.run);
    saver.at(stamp.step).start(zero, path, extra)?;
    saver.finish(zero.group())?;
    Ok(())
}

/// Gives the whole checkpoint `aside` its name. One of this name gives way only now, and counts ([`list`]) until the
/// new one has taken its place.
fn put_in_place(disk: &dyn Disk, aside: &Path, path: &Path) -> io::Result<()> {
    disk.sync_folder(aside)?;
    let replaced = path.with_extension(REPLACED);
    if path.exists() {
        disk.remove_folder(&replaced)?;
        disk.rename(path, &replaced)?;
    }
    disk.rename(aside, path)?;
    disk.sync_folder(path.parent().unwrap_or(Path::new(".")))?;
    disk.remove_folder(&replaced)
}

/// Loads weights, moments and step count, and returns what `extra` was. The world size and the stage may have
/// changed.
///
/// # Errors
/// [`Error::Checkpoint`], [`Error::CheckpointDamaged`] and [`Error::CheckpointForeign`], which name the file, and
/// [`Error::CheckpointMismatch`] if it is of another model.
pub fn load<M: Model>(zero: &mut Zero<M>, path: &Path) -> Result<serde_json::Value> {
    zero.needs("load", &[State::Params, State::Optimizer])?;
    let manifest = Manifest::read(path)?;
    manifest.check_model(zero.model().units(), path)?;
    manifest.check_places(path)?;
    if zero.group().rank() == 0 {
        manifest.warn_if_unsealed(path);
    }
    let mut targets = Targets::new(zero);
    if targets.moments.iter().any(Option::is_some) && manifest.optimizer.is_none() {
        return Err(mismatch(path, "it has no optimizer state, so training cannot go on from it".into()));
    }
    for rank in 0..manifest.world_size {
        let bytes = manifest.shard(path, rank).read()?;
        let (values, _) = bytes.as_chunks::<F32_BYTES>();
        let values: Vec<f32> = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        targets.take_shard(&manifest, rank, &values);
    }
    for (index, (_, [weights])) in targets.weights.iter().enumerate() {
        if manifest.units[index].trainable {
            zero.set_kept(index, &Tensor::f_from_slice(weights)?)?;
        }
    }
    for (index, moments) in targets.moments.iter().enumerate() {
        if let Some((_, [exp_avg, exp_avg_sq])) = moments {
            zero.restore_moments(index, exp_avg, exp_avg_sq)?;
        }
    }
    zero.restore_counters(manifest.optimizer)?;
    Ok(manifest.extra)
}

/// The `extra` that [`save`] was given, without loading anything else.
pub fn extra(path: &Path) -> Result<serde_json::Value> {
    Ok(Manifest::read(path)?.extra)
}

/// The save that the checkpoint is of; `None` for one of before stamps.
pub fn stamp(path: &Path) -> Result<Option<Stamp>> {
    Ok(Manifest::read(path)?.stamp)
}

/// Refuses the checkpoint at `path` if it is of another save than `stamp`. One of before stamps may be of any.
///
/// # Errors
/// [`Error::CheckpointForeign`], and those of a manifest that cannot be read.
pub fn check_stamp(path: &Path, stamp: Stamp) -> Result<()> {
    let Some(found) = self::stamp(path)?.filter(|&found| found != stamp) else { return Ok(()) };
    let problem = match found.run == stamp.run {
        true => format!("it is of step {}, and not of step {}", found.step, stamp.step),
        false => "it is of another run".to_owned(),
    };
    Err(foreign(&path.join(MANIFEST), problem))
}

/// Reads all of a checkpoint, with further models in it, and refuses it if anything is not as it was written.
///
/// # Errors
/// [`Error::Checkpoint`], [`Error::CheckpointDamaged`] and [`Error::CheckpointForeign`], which name the file.
pub fn verify(path: &Path) -> Result<()> {
    let manifest = Manifest::read(path)?;
    for rank in 0..manifest.world_size {
        manifest.shard(path, rank).open()?;
        manifest.own(path, rank).map_or(Ok(()), |own| own.open().map(drop))?;
    }
    manifest.parts.keys().try_for_each(|name| verify(&manifest.part(path, name)?.0))
}

/// What `rank` of `world_size` ranks gave [`Saver::start_with`] as its own; `None` if no rank gave anything.
///
/// # Errors
/// [`Error::Checkpoint`], [`Error::CheckpointDamaged`] and [`Error::CheckpointForeign`] if it is missing, damaged or of
/// another save, and [`Error::CheckpointMismatch`] if it was given by another number of ranks.
pub fn own(path: &Path, rank: usize, world_size: usize) -> Result<Option<Vec<u8>>> {
    let manifest = Manifest::read(path)?;
    let saved = manifest.world_size;
    let Some(file) = manifest.own(path, rank) else { return Ok(None) };
    if saved != world_size {
        let problem = format!(
            "each of its {saved} ranks has states of its own in it: {world_size} cannot go on with them"
        );
        return Err(mismatch(path, problem));
    }
    file.read().map(Some)
}

/// The checkpoints in `folder`, in the order of their names; none if there is no such folder. One that has lost its
/// manifest counts, so that whoever loads it says so.
pub fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(folder)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed(folder))?.path();
        // A save that ended between its two renames has left the checkpoint that it was to replace.
        let counts = match path.extension() {
            None => true,
            Some(extension) => extension == REPLACED && !path.with_extension("").exists(),
        };
        if counts && is_at(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Whether the folder `path` is a checkpoint, or what is left of one.
pub fn is_at(path: &Path) -> bool {
    let is_of_a_rank = |entry: fs::DirEntry| is_rank_file(&entry.file_name().to_string_lossy());
    path.join(MANIFEST).is_file()
        || fs::read_dir(path).is_ok_and(|entries| entries.flatten().any(is_of_a_rank))
}

/// Removes all but the last `keep` checkpoints of `folder`. Called by one rank.
pub fn prune(folder: &Path, keep: usize) -> Result<()> {
    let mut found = list(folder)?;
    // Others are for their owner to look at.
    found.retain(|path| path.join(MANIFEST).exists());
    for path in &found[..found.len().saturating_sub(keep)] {
        // Renamed first: a removal that is interrupted must not leave half a checkpoint under a good name.
        let aside = path.with_extension("removed");
        RealDisk.rename(path, &aside).map_err(failed(path))?;
        RealDisk.remove_folder(&aside).map_err(failed(&aside))?;
    }
    Ok(())
}

/// Host memory for what this rank keeps of each unit.
struct Targets {
    weights: Vec<Target<1>>,
    moments: Vec<Option<Target<2>>>,
}

/// A range of a unit, and the values of one or more states there.
type Target<const STATES: usize> = (Range<usize>, [Vec<f32>; STATES]);

impl Targets {
    fn new<M: Model>(zero: &Zero<M>) -> Self {
        let (mut weights, mut moments) = (Vec::new(), Vec::new());
        for index in 0..zero.layouts().count() {
            let (kept, stepped) = zero.kept_ranges(index);
            weights.push((kept.clone(), [vec![0.0; kept.len()]]));
            moments
                .push(stepped.map(|range| (range.clone(), [vec![0.0; range.len()], vec![0.0; range.len()]])));
        }
        Self { weights, moments }
    }

    /// Copies what overlaps with the shard of `rank`, whose values are `shard`.
    fn take_shard(&mut self, manifest: &Manifest, rank: usize, shard: &[f32]) {
        let mut rest = shard;
        for (index, unit) in manifest.units.iter().enumerate().filter(|(_, unit)| unit.trainable) {
            let len = unit.len / manifest.world_size;
            let held = rank * len..(rank + 1) * len;
            let mut next = || {
                let (values, tail) = rest.split_at(len);
                rest = tail;
                values
            };
            let (range, [weights]) = &mut self.weights[index];
            copy_overlap(range, weights, &held, next());
            if manifest.optimizer.is_some() {
                let values = [next(), next()];
                if let Some((range, moments)) = &mut self.moments[index] {
                    for (moment, values) in moments.iter_mut().zip(values) {
                        copy_overlap(range, moment, &held, values);
                    }
                }
            }
        }
    }
}

fn copy_overlap(to_range: &Range<usize>, to: &mut [f32], from_range: &Range<usize>, from: &[f32]) {
    let (start, end) = (to_range.start.max(from_range.start), to_range.end.min(from_range.end));
    if start < end {
        to[start - to_range.start..end - to_range.start]
            .copy_from_slice(&from[start - from_range.start..end - from_range.start]);
    }
}

fn shard_name(rank: usize) -> String {
    format!("rank_{rank:04}.bin")
}

fn own_name(rank: usize) -> String {
    format!("rank_{rank:04}.own")
}

/// Whether [`shard_name`] or [`own_name`] gives this name.
fn is_rank_file(name: &str) -> bool {
    let number = name.strip_prefix("rank_").and_then(|rest| rest.split_once('.'));
    number.is_some_and(|(rank, kind)| rank.parse::<usize>().is_ok() && ["bin", "own"].contains(&kind))
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Checkpoint { path, source }
}

fn wrong_length(bytes: usize, expected: usize) -> String {
    format!("it has {bytes} bytes instead of {expected}")
}

fn damaged(path: &Path, problem: &str) -> Error {
    Error::CheckpointDamaged { path: path.to_path_buf(), problem: problem.to_owned() }
}

fn foreign(path: &Path, problem: String) -> Error {
    Error::CheckpointForeign { path: path.to_path_buf(), problem }
}

fn mismatch(path: &Path, problem: String) -> Error {
    Error::CheckpointMismatch { path: path.to_path_buf(), problem }
}
