//! Reads a checkpoint's weights by range, without a device: for programs that write them in another format.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyroll_models::{ParamSpec, init::WeightSource};

use super::{
    F32_BYTES, Manifest, WRONG_SUM, damaged, failed, mismatch, read_manifest, shard_name, wrong_length,
};
use crate::Result;

/// The weights of a checkpoint, written at any world size and stage.
#[derive(Debug)]
pub struct CheckpointWeights {
    manifest: Manifest,
    /// One per rank.
    shards: Vec<(PathBuf, File)>,
    /// Offset of each unit's weights in every shard, in elements; `None` if the checkpoint does not hold
    /// them.
    unit_starts: Vec<Option<usize>>,
}

impl CheckpointWeights {
    /// Opens the checkpoint in the folder `path` and checks the checksums of its shards.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`] and [`crate::Error::CheckpointDamaged`] if a file is missing, short or
    /// damaged.
    pub fn open(path: &Path) -> Result<CheckpointWeights> {
        let manifest = read_manifest(path)?;
        let mut end = 0;
        let unit_starts = manifest.units.iter().map(|unit| {
            let start = end;
            end += manifest.saved_len(unit);
            unit.trainable.then_some(start)
        });
        let unit_starts = unit_starts.collect();
        let open = |rank| {
            let file = path.join(shard_name(rank));
            Ok((file.clone(), open_shard(&file, end)?))
        };
        let shards: Result<_> = (0..manifest.world_size).map(open).collect();
        Ok(CheckpointWeights { shards: shards?, manifest, unit_starts })
    }

    /// Returns true if the checkpoint holds the parameter. Frozen ones are not saved.
    pub fn holds(&self, spec: &ParamSpec) -> bool {
        self.place(spec).is_some_and(|(unit, _)| self.unit_starts[unit].is_some())
    }

    /// Returns the parameter's unit, and its offset in the unit.
    fn place(&self, spec: &ParamSpec) -> Option<(usize, usize)> {
        self.manifest.units.iter().enumerate().find_map(|(index, unit)| {
            let param = unit.params.iter().find(|it| it.name == spec.name && it.shape == spec.shape)?;
            Some((index, param.start))
        })
    }

    fn read_range(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        let found = self.place(spec).and_then(|(unit, start)| Some((unit, start, self.unit_starts[unit]?)));
        let Some((unit, param_start, unit_start)) = found else {
            let problem = format!("it has no {} of shape {:?}", spec.name, spec.shape);
            return Err(mismatch(&self.shards[0].0, problem));
        };
        let shard_len = self.manifest.units[unit].len / self.manifest.world_size;
        let wanted = param_start + range.start..param_start + range.end;
        for (rank, (path, shard)) in self.shards.iter().enumerate() {
            let held = rank * shard_len..(rank + 1) * shard_len;
            let (start, end) = (wanted.start.max(held.start), wanted.end.min(held.end));
            if start >= end {
                continue;
            }
            let mut bytes = vec![0; (end - start) * F32_BYTES];
            let offset = (unit_start + start - held.start) * F32_BYTES;
            shard.read_exact_at(&mut bytes, offset as u64).map_err(failed(path))?;
            let (bytes, _) = bytes.as_chunks::<F32_BYTES>();
            let values = &mut values[start - wanted.start..end - wanted.start];
            for (value, bytes) in values.iter_mut().zip(bytes) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }
}

impl WeightSource for CheckpointWeights {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> anyroll_models::Result<()> {
        self.read_range(spec, range, values).map_err(|error| anyroll_models::Error::Weights(Box::new(error)))
    }
}

/// Opens a shard of `elements` values and checks its sum, one chunk at a time.
fn open_shard(path: &Path, elements: usize) -> Result<File> {
    let mut file = File::open(path).map_err(failed(path))?;
    let (len, expected) = (file.metadata().map_err(failed(path))?.len(), (elements + 1) * F32_BYTES);
    if len != expected as u64 {
        return Err(damaged(path, &wrong_length(len as usize, expected)));
    }
    let mut piece = vec![0; 1 << 22];
    let (mut rest, mut sum) = (elements * F32_BYTES, 0);
    while rest > 0 {
        let piece = &mut piece[..rest.min(1 << 22)];
        file.read_exact(piece).map_err(failed(path))?;
        sum = crc32c::crc32c_append(sum, piece);
        rest -= piece.len();
    }
    let mut stored = [0; F32_BYTES];
    file.read_exact(&mut stored).map_err(failed(path))?;
    if sum.to_le_bytes() != stored {
        return Err(damaged(path, WRONG_SUM));
    }
    file.seek(SeekFrom::Start(0)).map_err(failed(path))?;
    Ok(file)
}
