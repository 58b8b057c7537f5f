//! Checkpoints: every rank writes its own shard, and the manifest is written last.
//!
//! A checkpoint is a folder with a `manifest.json` and one `rank_0000.bin` per rank. A rank's file holds, for
//! each trained unit, its shard of the weights and, if there is an optimizer, of the two moments. Values are
//! raw little-endian fp32 at every precision of the model, so a checkpoint loads at any other. A run may add
//! further state of each rank, one `rank_0000.own` per rank, and further models, one folder each.
//!
//! Each file of a rank ends with its seal (the run's number, the step, the rank, the number of ranks and a
//! checksum of the layout) and the CRC-32C of all its bytes. The manifest contains these checksums, those of
//! the further models' manifests, and its own. So a load reports the name of a file that was changed, or that
//! belongs to another rank, step or run.
//!
//! The folder is written under a temporary name and renamed once everything is on disk, so a folder with its
//! final name is complete. [`Saver`] writes in the background, during training.
//!
//! Ranks of several hosts may write to a folder on each host ([`Folders`]). Each folder then has the files of its host's
//! ranks, and the manifest.
//!
//! Frozen units are left out: they are unchanged since training began, so the caller of [`load`] has already
//! built them.
//!
//! Shards are the same at every stage, and a load copies the ranges that overlap. So a checkpoint of four
//! ranks at stage 3 loads on one rank at stage 0. A rank's own state loads only at the world size that wrote
//! it.

mod folders;
mod manifest;
mod saver;
mod seal;
mod weights;

use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use anyroll_models::{Model, Run};
use tch::Tensor;

pub use folders::{Folders, Save};
pub use manifest::MANIFEST;
use manifest::Manifest;
pub use saver::Saver;
pub use seal::Stamp;
pub use weights::CheckpointWeights;

use crate::{
    Error, Result, State, Zero,
    disk::{Disk, RealDisk},
};

/// Extension of an existing checkpoint's folder while a new one replaces it.
const REPLACED: &str = "replaced";
const F32_BYTES: usize = size_of::<f32>();
const WRONG_SUM: &str = "its checksum is wrong";

/// Writes a checkpoint to the new folder `path`. Every rank calls; all return once it is complete and on
/// disk. Its files belong to the stamp of `save`, the same on all ranks. [`load`] returns `extra`, which is rank 0's.
///
/// # Errors
/// [`Error::Checkpoint`] if a file cannot be written. A checkpoint that was at `path` before is then still
/// there.
pub fn save<M: Model>(
    zero: &mut Zero<M>,
    path: &Path,
    save: impl Into<Save>,
    extra: serde_json::Value,
) -> Result<()> {
    let Save { stamp, folders } = save.into();
    let mut saver = Saver::of_run(stamp.run).into_folders(folders);
    saver.at(stamp.step).start(zero, path, extra)?;
    saver.finish(zero.group())?;
    Ok(())
}

/// Puts the complete checkpoint in the folder `aside` at `path`, in place of one that is there.
pub fn place(aside: &Path, path: &Path) -> Result<()> {
    put_in_place(&RealDisk, aside, path).map_err(failed(path))
}

/// Renames the complete checkpoint `aside` to `path`. A checkpoint already at `path` is moved away only now,
/// and still counts in [`list`] until the new one has taken its place.
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

/// Loads weights, moments and step count, and returns the saved `extra`. World size and stage may differ from
/// those of the save.
///
/// # Errors
/// [`Error::Checkpoint`], [`Error::CheckpointDamaged`] and [`Error::CheckpointForeign`], which name the file,
/// and [`Error::CheckpointMismatch`] if the checkpoint belongs to another model.
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
        return Err(mismatch(path, "it has no optimizer state, so training cannot continue from it".into()));
    }
    for rank in 0..manifest.world_size {
        let bytes = manifest.shard(path, rank).read()?;
        let (values, _) = bytes.as_chunks::<F32_BYTES>();
        let values: Vec<f32> = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        targets.take_shard(&manifest, rank, &values);
    }
    let saved = targets.parts.iter().zip(&manifest.units).filter(|(_, unit)| unit.trainable);
    for &part in saved.flat_map(|(parts, _)| parts) {
        let (_, [weights]) = &targets.weights[part];
        zero.set_resident(part, &Tensor::f_from_slice(weights)?)?;
    }
    for (index, moments) in targets.moments.iter().enumerate() {
        if let Some((_, [exp_avg, exp_avg_sq])) = moments {
            zero.restore_moments(index, exp_avg, exp_avg_sq)?;
        }
    }
    zero.restore_counters(manifest.optimizer)?;
    Ok(manifest.extra)
}

/// Returns the `extra` given to [`save`], without loading anything else.
pub fn extra(path: &Path) -> Result<serde_json::Value> {
    Ok(Manifest::read(path)?.extra)
}

/// Returns the save that wrote the checkpoint, or `None` for a format without stamps.
pub fn stamp(path: &Path) -> Result<Option<Stamp>> {
    Ok(Manifest::read(path)?.stamp)
}

/// Returns an error if the checkpoint at `path` belongs to another save than `stamp`. A format without stamps
/// passes.
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

/// Reads all of a checkpoint and its further models, and returns an error if anything differs from what was
/// written.
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

/// Returns the paths of the checkpoint's files that are missing, or are others than its manifests say. Reads all of it.
///
/// # Errors
/// Errors of a manifest that is missing or damaged.
pub fn broken(path: &Path) -> Result<Vec<PathBuf>> {
    let manifest = Manifest::read(path)?;
    let mut broken = Vec::new();
    for rank in 0..manifest.world_size {
        for file in [Some(manifest.shard(path, rank)), manifest.own(path, rank)].into_iter().flatten() {
            if file.open().is_err() {
                broken.push(file.path);
            }
        }
    }
    for name in manifest.parts.keys() {
        broken.extend(self::broken(&manifest.part(path, name)?.0)?);
    }
    Ok(broken)
}

/// Returns the `own` bytes that `rank` of `world_size` ranks gave [`Saver::start_with`], or `None` if no rank
/// gave any.
///
/// # Errors
/// [`Error::Checkpoint`], [`Error::CheckpointDamaged`] and [`Error::CheckpointForeign`] if the file is
/// missing, damaged or of another save, and [`Error::CheckpointMismatch`] if another number of ranks wrote it.
pub fn own(path: &Path, rank: usize, world_size: usize) -> Result<Option<Vec<u8>>> {
    let manifest = Manifest::read(path)?;
    let saved = manifest.world_size;
    let Some(file) = manifest.own(path, rank) else { return Ok(None) };
    if saved != world_size {
        let problem = format!(
            "it holds own state of each of its {saved} ranks, so {world_size} ranks cannot resume from it"
        );
        return Err(mismatch(path, problem));
    }
    file.read().map(Some)
}

/// Lists the checkpoints in `folder`, sorted by name; empty if there is no such folder. A checkpoint that has
/// lost its manifest is included, so that a load of it reports the loss.
pub fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(folder)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed(folder))?.path();
        // If a save ended between its two renames, the checkpoint to be replaced is still there.
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

/// Returns true if the folder `path` is a checkpoint, or what is left of one.
pub fn is_at(path: &Path) -> bool {
    let is_of_a_rank = |entry: fs::DirEntry| is_rank_file(&entry.file_name().to_string_lossy());
    path.join(MANIFEST).is_file()
        || fs::read_dir(path).is_ok_and(|entries| entries.flatten().any(is_of_a_rank))
}

/// Removes all but the last `keep` checkpoints of `folder`. Only one rank calls.
pub fn prune(folder: &Path, keep: usize) -> Result<()> {
    let mut found = list(folder)?;
    // Incomplete ones are left for the user.
    found.retain(|path| path.join(MANIFEST).exists());
    for path in &found[..found.len().saturating_sub(keep)] {
        // Renamed first, so that an interrupted removal never leaves half a checkpoint under a valid name.
        let aside = path.with_extension("removed");
        RealDisk.rename(path, &aside).map_err(failed(path))?;
        RealDisk.remove_folder(&aside).map_err(failed(&aside))?;
    }
    Ok(())
}

/// Host memory for the part of each unit that this rank keeps.
struct Targets {
    /// This rank's units that have a part of each whole unit.
    parts: Vec<Vec<usize>>,
    /// Places of this rank's elements in the whole units.
    runs: Vec<Vec<Run>>,
    weights: Vec<Target<1>>,
    moments: Vec<Option<Target<2>>>,
}

/// A range of a unit, and the values of one or more states in that range.
type Target<const STATES: usize> = (Range<usize>, [Vec<f32>; STATES]);

impl Targets {
    fn new<M: Model>(zero: &Zero<M>) -> Self {
        let (mut weights, mut moments) = (Vec::new(), Vec::new());
        for index in 0..zero.layouts().count() {
            let (kept, stepped) = zero.resident_ranges(index);
            weights.push((kept.clone(), [vec![0.0; kept.len()]]));
            moments
                .push(stepped.map(|range| (range.clone(), [vec![0.0; range.len()], vec![0.0; range.len()]])));
        }
        let runs = (0..weights.len()).map(|index| zero.unit_runs(index)).collect();
        Self { parts: zero.parts.clone(), runs, weights, moments }
    }

    /// Copies the elements that overlap with the shard of `rank`, whose values are `shard`.
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
            let weights = next();
            let moments = manifest.optimizer.is_some().then(|| [next(), next()]);
            for at in 0..self.parts[index].len() {
                self.copy(self.parts[index][at], &held, weights, moments);
            }
        }
    }

    /// Copies the elements of this rank's unit `part` that overlap with the range `held` of the whole unit.
    fn copy(&mut self, part: usize, held: &Range<usize>, weights: &[f32], moments: Option<[&[f32]; 2]>) {
        let ((range, [own]), runs) = (&mut self.weights[part], &self.runs[part]);
        copy_overlap(range, own, runs, held, weights);
        if let (Some((range, own)), Some(moments)) = (&mut self.moments[part], moments) {
            for (own, moment) in own.iter_mut().zip(moments) {
                copy_overlap(range, own, runs, held, moment);
            }
        }
    }
}

/// Copies the elements of `runs` that lie in both ranges: `to_range` of this rank's unit, and `from_range` of the whole one.
fn copy_overlap(
    to_range: &Range<usize>,
    to: &mut [f32],
    runs: &[Run],
    from_range: &Range<usize>,
    from: &[f32],
) {
    for &Run { own, whole, len } in runs {
        // Counted from the run's start.
        let start = to_range.start.saturating_sub(own).max(from_range.start.saturating_sub(whole));
        let end = to_range.end.saturating_sub(own).min(from_range.end.saturating_sub(whole)).min(len);
        if start < end {
            let (to_start, from_start) = (own + start - to_range.start, whole + start - from_range.start);
            to[to_start..to_start + end - start].copy_from_slice(&from[from_start..from_start + end - start]);
        }
    }
}

fn shard_name(rank: usize) -> String {
    format!("rank_{rank:04}.bin")
}

fn own_name(rank: usize) -> String {
    format!("rank_{rank:04}.own")
}

/// Returns true if the name is one of [`shard_name`] or [`own_name`].
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
