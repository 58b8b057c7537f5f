//! The timeline of some steps, for a profile: `anyroll run --profile N`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyroll_backends::{TorchDevice, profile::Profile};

use crate::{Result, atomic_file::place, output_error::OutputError};

/// Steps of this process before the first recorded one, in which kernels are compiled and caches filled.
const WARM_UP_STEPS: u64 = 2;

/// Recording of some steps of this rank, each written once.
#[derive(Debug)]
pub(super) struct Timeline {
    /// Index of the first recorded step, and of the first one after them.
    first: u64,
    end: u64,
    device: TorchDevice,
    file: PathBuf,
    recording: Option<Profile>,
}

impl Timeline {
    /// Plans to record `wanted` of the steps `next..all`, after the warm-up if enough are left. Returns `None` if no step is
    /// left. The file is in the run's `folder`.
    pub fn new(
        wanted: u64,
        (next, all): (u64, u64),
        device: TorchDevice,
        folder: &Path,
        rank: usize,
    ) -> Option<Self> {
        let left = all.saturating_sub(next);
        let count = wanted.min(left);
        if count == 0 {
            return None;
        }
        let first = next + WARM_UP_STEPS.min(left - count);
        let end = first + count;
        let name = format!("steps_{}_to_{end}_rank_{rank}.json", first + 1);
        let file = folder.join("profile").join(name);
        Some(Self { first, end, device, file, recording: None })
    }

    /// Begins to record if `step`, from 0, is the first recorded one.
    pub fn before(&mut self, step: u64) -> Result<()> {
        if step == self.first {
            self.recording = Some(Profile::begin(self.device)?);
        }
        Ok(())
    }

    /// Writes the file if `step` is the last recorded one, and returns its path.
    pub fn after(&mut self, step: u64) -> Result<Option<&Path>> {
        let Some(recording) = self.recording.take_if(|_| step + 1 == self.end) else { return Ok(None) };
        let folder = self.file.parent().expect("it is in a folder");
        fs::create_dir_all(folder).map_err(|source| OutputError::io("make", folder, source))?;
        place(&self.file, |aside| Ok(recording.write(aside)?))?;
        Ok(Some(&self.file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_steps_warm_up_if_enough_are_left() {
        let planned = |wanted, next, all| {
            let folder = Path::new("run");
            let timeline = Timeline::new(wanted, (next, all), TorchDevice::CPU, folder, 1)?;
            Some((timeline.first, timeline.end, timeline.file.display().to_string()))
        };
        let expected = |first, end, name: &str| Some((first, end, format!("run/profile/{name}_rank_1.json")));
        assert_eq!(planned(3, 0, 100), expected(2, 5, "steps_3_to_5"));
        assert_eq!(planned(3, 40, 100), expected(42, 45, "steps_43_to_45"));
        assert_eq!(planned(3, 0, 4), expected(1, 4, "steps_2_to_4"));
        assert_eq!(planned(3, 0, 2), expected(0, 2, "steps_1_to_2"));
        assert_eq!(planned(1, 4, 4), None);
    }
}
