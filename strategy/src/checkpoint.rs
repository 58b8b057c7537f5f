//! Checkpoints: every rank writes its own shard, and the manifest is written last.
//!
//! A checkpoint is a folder with a `manifest.json` and one `rank_0000.bin` per rank. A rank's file holds, for
//! each trained unit, its shard of the weights and, if there is an optimizer, of the two moments. Values are
//! raw little-endian fp32 at every precision of the model, so a checkpoint loads at any other. The file ends
//! with the CRC-32C of its bytes. A run may add further state of each rank, one `rank_0000.own` per rank.
//!
//! The folder is written under a temporary name and renamed once everything is on disk, so a folder with its
//! final name is complete. [`Saver`] writes in the background, during training.
//!
//! Frozen units are left out: they are unchanged since training began, so the caller of [`load`] has already
//! built them.
//!
//! Shards are the same at every stage, and a load copies the ranges that overlap. So a checkpoint of four
//! ranks at stage 3 loads on one rank at stage 0. A rank's own state loads only at the world size that wrote
//! it.

mod saver;
mod weights;

use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use anyroll_models::Model;
use serde::{Deserialize, Serialize};
use tch::Tensor;

pub use saver::Saver;
pub use weights::CheckpointWeights;

use crate::{
    Error, Result, State, Zero,
    disk::{Disk, RealDisk},
    loss_scale::Counters,
};

const MANIFEST: &str = "manifest.json";
/// Extension of an existing checkpoint's folder while a new one replaces it.
const REPLACED: &str = "replaced";
const FORMAT: u32 = 2;
const F32_BYTES: usize = size_of::<f32>();
const WRONG_SUM: &str = "its checksum is wrong";

/// Contents of `manifest.json`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    world_size: usize,
    /// Counters of the optimizer, if there is one; the shards then hold its moments, too.
    optimizer: Option<Counters>,
    units: Vec<UnitEntry>,
    /// The caller's data, returned by [`load`].
    extra: serde_json::Value,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct UnitEntry {
    name: String,
    /// Length of the whole buffer in elements, padding included.
    len: usize,
    /// True if the unit is in the checkpoint.
    trainable: bool,
    params: Vec<ParamEntry>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ParamEntry {
    name: String,
    shape: Vec<i64>,
    start: usize,
}

impl Manifest {
    /// Returns the number of elements that a shard holds of a unit's states.
    fn saved_len(&self, unit: &UnitEntry) -> usize {
        let states = if self.optimizer.is_some() { 3 } else { 1 };
        if unit.trainable { unit.len / self.world_size * states } else { 0 }
    }
}

/// Writes a checkpoint to the new folder `path`. Every rank calls; all return once it is complete and on
/// disk. [`load`] returns `extra`, which is rank 0's.
///
/// # Errors
/// [`Error::Checkpoint`] if a file cannot be written. A checkpoint that was at `path` before is then still
/// there.
pub fn save<M: Model>(zero: &mut Zero<M>, path: &Path, extra: serde_json::Value) -> Result<()> {
    let mut saver = Saver::default();
    saver.start(zero, path, extra)?;
    saver.finish(zero.group())?;
    Ok(())
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
/// [`Error::Checkpoint`] and [`Error::CheckpointDamaged`], which name the file, and
/// [`Error::CheckpointMismatch`] if the checkpoint belongs to another model.
pub fn load<M: Model>(zero: &mut Zero<M>, path: &Path) -> Result<serde_json::Value> {
    zero.needs("load", &[State::Params, State::Optimizer])?;
    let manifest = read_manifest(path)?;
    check_model(&manifest, zero, path)?;
    let mut targets = Targets::new(zero);
    if targets.moments.iter().any(Option::is_some) && manifest.optimizer.is_none() {
        return Err(mismatch(path, "it has no optimizer state, so training cannot continue from it".into()));
    }
    for rank in 0..manifest.world_size {
        let file = path.join(shard_name(rank));
        targets.take_shard(&manifest, rank, &read_shard(&file, &manifest)?);
    }
    for (index, (_, [weights])) in targets.weights.iter().enumerate() {
        if manifest.units[index].trainable {
            zero.set_resident(index, &Tensor::f_from_slice(weights)?)?;
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

/// Returns the `extra` given to [`save`], without loading anything else.
pub fn extra(path: &Path) -> Result<serde_json::Value> {
    Ok(read_manifest(path)?.extra)
}

/// Returns the `own` bytes that `rank` of `world_size` ranks gave [`Saver::start_with`], or `None` if no rank
/// gave any.
///
/// # Errors
/// [`Error::Checkpoint`] and [`Error::CheckpointDamaged`] if the file is missing or damaged, and
/// [`Error::CheckpointMismatch`] if another number of ranks wrote it.
pub fn own(path: &Path, rank: usize, world_size: usize) -> Result<Option<Vec<u8>>> {
    let saved = read_manifest(path)?.world_size;
    if !path.join(own_name(0)).exists() {
        return Ok(None);
    }
    if saved != world_size {
        let problem = format!(
            "it holds own state of each of its {saved} ranks, so {world_size} ranks cannot resume from it"
        );
        return Err(mismatch(path, problem));
    }
    let file = path.join(own_name(rank));
    let mut bytes = fs::read(&file).map_err(failed(&file))?;
    let sum = bytes.split_off(bytes.len().saturating_sub(size_of::<u32>()));
    if crc32c::crc32c(&bytes).to_le_bytes() != *sum {
        return Err(damaged(&file, WRONG_SUM));
    }
    Ok(Some(bytes))
}

/// Lists the complete checkpoints in `folder`, sorted by name; empty if there is no such folder.
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
        if counts && path.join(MANIFEST).exists() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Removes all but the last `keep` checkpoints of `folder`. Only one rank calls.
pub fn prune(folder: &Path, keep: usize) -> Result<()> {
    let found = list(folder)?;
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
        Self { weights, moments }
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

/// Builds the manifest, except for the entries that change with each step.
fn manifest_of<M: Model>(zero: &Zero<M>) -> Manifest {
    let units = zero.model().units().iter().zip(zero.layouts()).map(|(unit, layout)| UnitEntry {
        name: unit.name.clone(),
        len: layout.len,
        trainable: unit.trainable,
        params: unit
            .params
            .iter()
            .zip(&layout.params)
            .map(|(spec, range)| ParamEntry {
                name: spec.name.clone(),
                shape: spec.shape.clone(),
                start: range.start,
            })
            .collect(),
    });
    Manifest {
        format: FORMAT,
        world_size: zero.group().world_size(),
        optimizer: None,
        units: units.collect(),
        extra: serde_json::Value::Null,
    }
}

fn check_model<M: Model>(manifest: &Manifest, zero: &Zero<M>, path: &Path) -> Result<()> {
    let ours = manifest_of(zero);
    if manifest.units.len() != ours.units.len() {
        let problem = format!("it has {} units, the model has {}", manifest.units.len(), ours.units.len());
        return Err(mismatch(path, problem));
    }
    for (theirs, ours) in manifest.units.iter().zip(&ours.units) {
        // Lengths differ by their padding if the world size does.
        if let Some(problem) = difference(theirs, ours) {
            return Err(mismatch(path, problem));
        }
        if ours.trainable && !theirs.trainable {
            let problem =
                format!("unit {} was frozen in it and is not saved; here it is trained", theirs.name);
            return Err(mismatch(path, problem));
        }
    }
    Ok(())
}

/// Describes the first difference between a checkpoint's unit and the model's.
fn difference(theirs: &UnitEntry, ours: &UnitEntry) -> Option<String> {
    if theirs.name != ours.name {
        return Some(format!("it has a unit `{}` where the model has `{}`", theirs.name, ours.name));
    }
    let [saved, wanted] = [theirs, ours].map(|unit| unit.params.iter().map(Some).chain([None]));
    let (saved, wanted) = saved.zip(wanted).find(|(saved, wanted)| saved != wanted)?;
    Some(match (saved, wanted) {
        (Some(saved), Some(wanted)) if saved.name == wanted.name && saved.shape != wanted.shape => {
            format!(
                "`{}` has the shape {:?} in it, and {:?} in the model",
                saved.name, saved.shape, wanted.shape
            )
        }
        (Some(saved), Some(wanted)) if saved.name == wanted.name => {
            format!("`{}` begins at {} in it, and at {} in the model", saved.name, saved.start, wanted.start)
        }
        (Some(saved), wanted) => {
            let wanted = wanted.map_or("nothing".to_owned(), |it| format!("`{}`", it.name));
            format!("it has `{}` where the model has {wanted}", saved.name)
        }
        (None, wanted) => format!("it has no `{}`", wanted.map_or("", |it| &it.name)),
    })
}

fn read_manifest(path: &Path) -> Result<Manifest> {
    let file = path.join(MANIFEST);
    let text = fs::read(&file).map_err(failed(&file))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|error| damaged(&file, &error.to_string()))?;
    if manifest.format != FORMAT {
        return Err(mismatch(
            &file,
            format!("format {} is not {FORMAT}, which this version reads", manifest.format),
        ));
    }
    let whole = |unit: &UnitEntry| manifest.world_size > 0 && unit.len.is_multiple_of(manifest.world_size);
    if !manifest.units.iter().all(whole) {
        return Err(damaged(
            &file,
            &format!("its units do not divide by world_size {}", manifest.world_size),
        ));
    }
    Ok(manifest)
}

/// Reads a shard file and checks its sum.
fn read_shard(file: &Path, manifest: &Manifest) -> Result<Vec<f32>> {
    let bytes = fs::read(file).map_err(failed(file))?;
    let elements: usize = manifest.units.iter().map(|unit| manifest.saved_len(unit)).sum();
    let expected = elements * F32_BYTES + F32_BYTES;
    if bytes.len() != expected {
        return Err(damaged(file, &wrong_length(bytes.len(), expected)));
    }
    let (values, sum) = bytes.split_at(elements * F32_BYTES);
    if crc32c::crc32c(values).to_le_bytes() != sum {
        return Err(damaged(file, WRONG_SUM));
    }
    Ok(values.chunks_exact(F32_BYTES).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn shard_name(rank: usize) -> String {
    format!("rank_{rank:04}.bin")
}

fn own_name(rank: usize) -> String {
    format!("rank_{rank:04}.own")
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

fn mismatch(path: &Path, problem: String) -> Error {
    Error::CheckpointMismatch { path: path.to_path_buf(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(name: &str, params: &[(&str, &[i64])]) -> UnitEntry {
        let mut end = 0;
        let params = params.iter().map(|(name, shape)| {
            let start = end;
            end += shape.iter().product::<i64>() as usize;
            ParamEntry { name: (*name).to_owned(), shape: shape.to_vec(), start }
        });
        let params = params.collect();
        UnitEntry { name: name.to_owned(), len: end, trainable: true, params }
    }

    #[test]
    fn what_differs_is_said_in_words() {
        let saved = unit("layer", &[("a", &[3, 2]), ("b", &[4])]);
        let told = |model: UnitEntry| difference(&saved, &model).unwrap_or_default();
        assert_eq!(told(unit("layer", &[("a", &[3, 2]), ("b", &[4])])), "");
        assert_eq!(told(unit("head", &[])), "it has a unit `layer` where the model has `head`");
        assert_eq!(
            told(unit("layer", &[("a", &[3, 4]), ("b", &[4])])),
            "`a` has the shape [3, 2] in it, and [3, 4] in the model"
        );
        assert_eq!(told(unit("layer", &[("a", &[3, 2]), ("c", &[4])])), "it has `b` where the model has `c`");
        assert_eq!(told(unit("layer", &[("a", &[3, 2])])), "it has `b` where the model has nothing");
        let more = unit("layer", &[("a", &[3, 2]), ("b", &[4]), ("c", &[1])]);
        assert_eq!(told(more), "it has no `c`");
        let mut apart = unit("layer", &[("a", &[3, 2]), ("b", &[4])]);
        apart.params[1].start = 8;
        assert_eq!(told(apart), "`b` begins at 6 in it, and at 8 in the model");
    }
}
