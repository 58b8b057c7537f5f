//! `manifest.json`: the contents of a checkpoint, the checksums of its files, and its own checksum.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyroll_models::Unit;
use serde::{Deserialize, Serialize};

use super::{
    F32_BYTES, WRONG_SUM, damaged, failed, foreign, mismatch, own_name,
    seal::{RankFile, Seal, Stamp},
    shard_name,
};
use crate::{Result, layout::Layout, loss_scale::Counters};

/// Name of the file that makes a folder a checkpoint.
pub const MANIFEST: &str = "manifest.json";
const FORMAT: u32 = 3;
/// The format before checksums of files were in the manifest, and a seal in each file.
const UNSEALED: u32 = 2;
/// The text before the manifest's own checksum, which is of all before this.
const SUM_KEY: &str = ",\n  \"crc32c\": \"";
/// The text behind it.
const SUM_END: &str = "\"\n}\n";

/// Contents of `manifest.json`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub format: u32,
    /// `None` in format 2, in which `files` and `parts` are empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<Stamp>,
    pub world_size: usize,
    /// Counters of the optimizer, if there is one; the shards then hold its moments, too.
    pub optimizer: Option<Counters>,
    pub units: Vec<UnitEntry>,
    /// Checksums of each rank's files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileSums>,
    /// Checksums of the manifests of further models, by the names of their folders.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<String, u32>,
    /// The caller's data, returned by [`super::load`].
    pub extra: serde_json::Value,
}

/// Checksums of a rank's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileSums {
    pub shard: u32,
    /// `None` if the rank has no file of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<u32>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct UnitEntry {
    pub name: String,
    /// Length of the whole buffer in elements, padding included.
    pub len: usize,
    /// True if the unit is in the checkpoint.
    pub trainable: bool,
    pub params: Vec<ParamEntry>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ParamEntry {
    pub name: String,
    pub shape: Vec<i64>,
    pub start: usize,
}

impl Manifest {
    /// Builds the manifest of a model's units on `world_size` ranks, except for the entries that change with each save.
    pub(super) fn new(units: &[Unit], world_size: usize, stamp: Stamp) -> Self {
        Self {
            format: FORMAT,
            stamp: Some(stamp),
            world_size,
            optimizer: None,
            units: units.iter().map(|unit| UnitEntry::new(unit, world_size)).collect(),
            files: Vec::new(),
            parts: BTreeMap::new(),
            extra: serde_json::Value::Null,
        }
    }

    /// Reads the manifest of the checkpoint in the folder `path` and checks its checksum.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let file = path.join(MANIFEST);
        let bytes = fs::read(&file).map_err(failed(&file))?;
        let sealed = checked_sum(&bytes).map_err(|problem| damaged(&file, problem))?;
        let manifest: Manifest =
            serde_json::from_slice(&bytes).map_err(|error| damaged(&file, &error.to_string()))?;
        match manifest.format {
            FORMAT if !sealed => return Err(damaged(&file, "it does not end in its checksum")),
            UNSEALED if sealed || manifest.stamp.is_some() => return Err(damaged(&file, WRONG_SUM)),
            FORMAT | UNSEALED => {}
            format => {
                let problem = format!("format {format} is not {FORMAT}, which this version reads");
                return Err(mismatch(&file, problem));
            }
        }
        let whole =
            |unit: &UnitEntry| manifest.world_size > 0 && unit.len.is_multiple_of(manifest.world_size);
        if !manifest.units.iter().all(whole) {
            let problem = format!("its units do not divide by world_size {}", manifest.world_size);
            return Err(damaged(&file, &problem));
        }
        if sealed && (manifest.stamp.is_none() || manifest.files.len() != manifest.world_size) {
            return Err(damaged(&file, "it has no checksums of its files"));
        }
        Ok(manifest)
    }

    /// Returns the text of `manifest.json`, which ends with its checksum.
    pub(super) fn to_text(&self) -> String {
        let text = serde_json::to_string_pretty(self).expect("a manifest is plain data");
        let text = text.strip_suffix("\n}").expect("an object of several lines");
        format!("{text}{SUM_KEY}{:08x}{SUM_END}", crc32c::crc32c(text.as_bytes()))
    }

    /// Logs a warning if the checkpoint has no seals, since nothing then shows that its files belong together.
    pub(super) fn warn_if_unsealed(&self, path: &Path) {
        if self.stamp.is_none() {
            let path = path.display();
            tracing::warn!(
                "checkpoint {path}: an older version wrote it, without checksums across its files: that they belong together is not checked"
            );
        }
    }

    /// Returns the number of elements that a shard holds of a unit's states.
    pub(super) fn saved_len(&self, unit: &UnitEntry) -> usize {
        let states = if self.optimizer.is_some() { 3 } else { 1 };
        if unit.trainable { unit.len / self.world_size * states } else { 0 }
    }

    /// Returns the seal of the files of `rank`, or `None` for a format without seals.
    pub(super) fn seal(&self, rank: usize) -> Option<Seal> {
        let units = serde_json::to_vec(&self.units).expect("units are plain data");
        Some(Seal {
            stamp: self.stamp?,
            rank: rank as u32,
            world_size: self.world_size as u32,
            layout: crc32c::crc32c(&units),
        })
    }

    /// Returns the shard of `rank` in the checkpoint `path`.
    pub(super) fn shard(&self, path: &Path, rank: usize) -> RankFile {
        let elements: usize = self.units.iter().map(|unit| self.saved_len(unit)).sum();
        RankFile {
            path: path.join(shard_name(rank)),
            content_bytes: Some(elements * F32_BYTES),
            seal: self.seal(rank),
            sum: self.files.get(rank).map(|file| file.shard),
        }
    }

    /// Returns the own file of `rank` in the checkpoint `path`, or `None` if no rank has one.
    pub(super) fn own(&self, path: &Path, rank: usize) -> Option<RankFile> {
        let sum = match self.files.get(rank) {
            Some(file) => Some(file.own?),
            None => path.join(own_name(0)).exists().then_some(None)?,
        };
        Some(RankFile { path: path.join(own_name(rank)), content_bytes: None, seal: self.seal(rank), sum })
    }

    /// Checks the seals of all files of the checkpoint `path` except the shards, which the caller reads. Contents
    /// are not read.
    pub(super) fn check_places(&self, path: &Path) -> Result<()> {
        for own in (0..self.world_size).filter_map(|rank| self.own(path, rank)) {
            own.check_place()?;
        }
        for name in self.parts.keys() {
            let (part, manifest) = self.part(path, name)?;
            (0..manifest.world_size).try_for_each(|rank| manifest.shard(&part, rank).check_place())?;
            manifest.check_places(&part)?;
        }
        Ok(())
    }

    /// Returns the folder and the manifest of a further model.
    pub(super) fn part(&self, path: &Path, name: &str) -> Result<(PathBuf, Manifest)> {
        let part = path.join(name);
        if Some(sum_of(&part)?) != self.parts.get(name).copied() {
            // A damaged manifest has a more specific error.
            Self::read(&part)?;
            return Err(foreign(
                &part.join(MANIFEST),
                "it is of another save than the checkpoint".to_owned(),
            ));
        }
        let manifest = Self::read(&part)?;
        Ok((part, manifest))
    }

    /// Checks that the checkpoint `path` holds a model with these units.
    pub(super) fn check_model(&self, units: &[Unit], path: &Path) -> Result<()> {
        if self.units.len() != units.len() {
            let problem = format!("it has {} units, the model has {}", self.units.len(), units.len());
            return Err(mismatch(path, problem));
        }
        for (theirs, ours) in self.units.iter().zip(units) {
            // Lengths differ by their padding if the world size does.
            let ours = UnitEntry::new(ours, self.world_size);
            if let Some(problem) = difference(theirs, &ours) {
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
}

impl UnitEntry {
    fn new(unit: &Unit, world_size: usize) -> Self {
        let layout = Layout::new(unit, world_size);
        let params = unit.params.iter().zip(&layout.params).map(|(spec, range)| ParamEntry {
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            start: range.start,
        });
        Self { name: unit.name.clone(), len: layout.len, trainable: unit.trainable, params: params.collect() }
    }
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

/// Returns the checksum of the manifest in the folder `path`.
pub(super) fn sum_of(path: &Path) -> Result<u32> {
    let file = path.join(MANIFEST);
    Ok(crc32c::crc32c(&fs::read(&file).map_err(failed(&file))?))
}

/// Returns true if a manifest ends with its checksum, and an error if the checksum is wrong.
fn checked_sum(bytes: &[u8]) -> Result<bool, &'static str> {
    let key_at = bytes.len().checked_sub(SUM_KEY.len() + 8 + SUM_END.len());
    let Some((text, end)) = key_at.map(|at| bytes.split_at(at)) else { return Ok(false) };
    let sum = end.strip_prefix(SUM_KEY.as_bytes()).and_then(|end| end.strip_suffix(SUM_END.as_bytes()));
    let Some(sum) = sum else { return Ok(false) };
    let right = format!("{:08x}", crc32c::crc32c(text));
    if right.as_bytes() == sum { Ok(true) } else { Err(WRONG_SUM) }
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
