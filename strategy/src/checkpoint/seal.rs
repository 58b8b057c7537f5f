//! End of a rank's file: the [`Seal`], which identifies the file, and the checksum of everything before it.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use super::{WRONG_SUM, damaged, failed, foreign, wrong_length};
use crate::Result;

/// First bytes of a seal.
const MARK: [u8; 8] = *b"anyroll\x03";
const SEAL_BYTES: usize = MARK.len() + 4 * size_of::<u32>() + size_of::<u64>();
const SUM_BYTES: usize = size_of::<u32>();
/// Length of the seal and checksum after a file's content.
pub(super) const END_BYTES: usize = SEAL_BYTES + SUM_BYTES;
/// Bytes read at a time if a file is only checked.
const PIECE_BYTES: usize = 1 << 22;

/// Identifies the save that a file belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// Number of the run, the same on all ranks and after a resume.
    pub run: u32,
    /// Completed steps of the run.
    pub step: u64,
}

/// Identifies a rank's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seal {
    pub stamp: Stamp,
    pub rank: u32,
    pub world_size: u32,
    /// Checksum of the units' names, shapes and offsets.
    pub layout: u32,
}

impl Seal {
    /// Writes seal and checksum to the last [`END_BYTES`] of a file's `bytes`, and returns the checksum.
    pub(super) fn close(&self, bytes: &mut [u8]) -> u32 {
        let (content, end) = bytes.split_at_mut(bytes.len() - END_BYTES);
        let (seal, sum) = end.split_at_mut(SEAL_BYTES);
        seal.copy_from_slice(&self.to_bytes());
        let computed = crc32c::crc32c_append(crc32c::crc32c(content), seal);
        sum.copy_from_slice(&computed.to_le_bytes());
        computed
    }

    fn to_bytes(self) -> [u8; SEAL_BYTES] {
        let Self { stamp: Stamp { run, step }, rank, world_size, layout } = self;
        let mut bytes = [0; SEAL_BYTES];
        bytes[..8].copy_from_slice(&MARK);
        for (to, value) in bytes[8..24].chunks_exact_mut(4).zip([run, rank, world_size, layout]) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        bytes[24..].copy_from_slice(&step.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MARK)?;
        let (numbers, step) = rest.split_at(16);
        let number =
            |index: usize| u32::from_le_bytes(numbers[index * 4..][..4].try_into().expect("4 bytes"));
        let step = u64::from_le_bytes(step.try_into().ok()?);
        let stamp = Stamp { run: number(0), step };
        Some(Self { stamp, rank: number(1), world_size: number(2), layout: number(3) })
    }

    /// Describes the first difference from the expected seal.
    fn difference(&self, expected: &Self) -> Option<String> {
        let Self { stamp: Stamp { run, step }, rank, world_size, layout } = *self;
        if run != expected.stamp.run {
            return Some("it is of another run than manifest.json".to_owned());
        }
        if step != expected.stamp.step {
            return Some(format!("it is of step {step}, and manifest.json of step {}", expected.stamp.step));
        }
        if world_size != expected.world_size {
            return Some(format!(
                "it is one of {world_size} ranks, and manifest.json has {}",
                expected.world_size
            ));
        }
        if layout != expected.layout {
            return Some("it is of a model of another layout than manifest.json".to_owned());
        }
        (rank != expected.rank).then(|| format!("it is the file of rank {rank}"))
    }
}

/// A rank's file, with the manifest's entries for it.
#[derive(Debug)]
pub(super) struct RankFile {
    pub path: PathBuf,
    /// Length without seal and checksum; `None` if the manifest does not contain it.
    pub content_bytes: Option<usize>,
    /// `None` in a format without seals, whose files end with only their checksum.
    pub seal: Option<Seal>,
    /// Checksum in the manifest; `None` in a format without seals.
    pub sum: Option<u32>,
}

impl RankFile {
    /// Reads and checks the file, and returns its content.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`], [`crate::Error::CheckpointDamaged`] and [`crate::Error::CheckpointForeign`].
    pub(super) fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = fs::read(&self.path).map_err(failed(&self.path))?;
        self.check_length(bytes.len())?;
        let end = bytes.split_off(bytes.len() - self.end_bytes());
        let sum = crc32c::crc32c_append(crc32c::crc32c(&bytes), &end[..end.len() - SUM_BYTES]);
        self.check_end(&end, Some(sum))?;
        Ok(bytes)
    }

    /// Checks the whole file in pieces, and returns it open at its start.
    ///
    /// # Errors
    /// Errors of [`Self::read`].
    pub(super) fn open(&self) -> Result<File> {
        let (mut file, len) = self.open_unchecked()?;
        let mut piece = vec![0; PIECE_BYTES.min(len)];
        let (mut rest, mut sum) = (len - self.end_bytes(), 0);
        while rest > 0 {
            let piece = &mut piece[..rest.min(PIECE_BYTES)];
            file.read_exact(piece).map_err(failed(&self.path))?;
            sum = crc32c::crc32c_append(sum, piece);
            rest -= piece.len();
        }
        let mut end = vec![0; self.end_bytes()];
        file.read_exact(&mut end).map_err(failed(&self.path))?;
        self.check_end(&end, Some(crc32c::crc32c_append(sum, &end[..end.len() - SUM_BYTES])))?;
        file.seek(SeekFrom::Start(0)).map_err(failed(&self.path))?;
        Ok(file)
    }

    /// Checks length and seal without reading the content.
    ///
    /// # Errors
    /// Errors of [`Self::read`].
    pub(super) fn check_place(&self) -> Result<()> {
        let (mut file, len) = self.open_unchecked()?;
        let mut end = vec![0; self.end_bytes()];
        file.seek(SeekFrom::Start((len - end.len()) as u64)).map_err(failed(&self.path))?;
        file.read_exact(&mut end).map_err(failed(&self.path))?;
        self.check_end(&end, None)
    }

    fn open_unchecked(&self) -> Result<(File, usize)> {
        let file = File::open(&self.path).map_err(failed(&self.path))?;
        let len = file.metadata().map_err(failed(&self.path))?.len() as usize;
        self.check_length(len)?;
        Ok((file, len))
    }

    fn end_bytes(&self) -> usize {
        if self.seal.is_some() { END_BYTES } else { SUM_BYTES }
    }

    fn check_length(&self, bytes: usize) -> Result<()> {
        let expected = self.content_bytes.map(|content| content + self.end_bytes());
        if expected.is_some_and(|expected| bytes != expected) || bytes < self.end_bytes() {
            let expected = expected.unwrap_or(self.end_bytes());
            return Err(damaged(&self.path, &wrong_length(bytes, expected)));
        }
        Ok(())
    }

    /// Checks seal and checksum. `sum` is the checksum computed from content and seal, or `None` if neither was read.
    fn check_end(&self, end: &[u8], sum: Option<u32>) -> Result<()> {
        let (seal, stored) = end.split_at(end.len() - SUM_BYTES);
        let stored = u32::from_le_bytes(stored.try_into().expect("a checksum has 4 bytes"));
        if sum.is_some_and(|sum| sum != stored) {
            return Err(damaged(&self.path, WRONG_SUM));
        }
        if let Some(expected) = &self.seal {
            let found = Seal::from_bytes(seal)
                .ok_or_else(|| damaged(&self.path, "it does not end in its rank and step"))?;
            if let Some(problem) = found.difference(expected) {
                return Err(foreign(&self.path, problem));
            }
        }
        match self.sum {
            Some(sum) if sum != stored => {
                let problem = "its checksum is another than the one in manifest.json";
                Err(foreign(&self.path, problem.to_owned()))
            }
            _ => Ok(()),
        }
    }
}
