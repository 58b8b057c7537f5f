//! Reads a checkpoint's weights by range, without a device: for programs that write them in another format.

use std::{
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyroll_models::{ParamSpec, Unit, init::WeightSource};

use super::{F32_BYTES, Manifest, failed, mismatch};
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
    /// Opens the checkpoint in the folder `path` of a model with these units, with the checks of a load.
    ///
    /// # Errors
    /// Errors of [`super::load`].
    pub fn open(path: &Path, units: &[Unit]) -> Result<CheckpointWeights> {
        let manifest = Manifest::read(path)?;
        manifest.check_model(units, path)?;
        manifest.check_places(path)?;
        manifest.warn_if_unsealed(path);
        let mut end = 0;
        let unit_starts = manifest.units.iter().map(|unit| {
            let start = end;
            end += manifest.saved_len(unit);
            unit.trainable.then_some(start)
        });
        let unit_starts = unit_starts.collect();
        let open = |rank| {
            let shard = manifest.shard(path, rank);
            let file = shard.open()?;
            Ok((shard.path, file))
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
