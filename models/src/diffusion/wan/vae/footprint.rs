//! Memory of decoding a video and of its backward.

use tch::{Kind, Tensor};

use super::WanVaeDecoder;
use crate::Result;
use crate::footprint::Runs;
use crate::measured::Paper;

/// Size of latents of videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoLatentSize {
    /// Videos B.
    pub videos: usize,
    /// Frames, height and width of the latents.
    pub sides: [usize; 3],
    /// Frames of latents that are decoded at a time.
    pub part: usize,
}

impl WanVaeDecoder {
    /// Returns the peak memory of decoding in bytes, including the videos.
    pub fn decoding_bytes(&self, size: &VideoLatentSize, runs: Runs) -> usize {
        self.measured.once((size, runs, false), || self.measure(size, runs, false))
    }

    /// Returns the peak memory of decoding with a tape and of its backward, in bytes. Includes the videos and
    /// their gradient, which the caller holds.
    pub fn following_bytes(&self, size: &VideoLatentSize, runs: Runs) -> usize {
        self.measured.once((size, runs, true), || self.measure(size, runs, true))
    }

    fn measure(&self, size: &VideoLatentSize, runs: Runs, followed: bool) -> Result<usize> {
        let paper = Paper::new(runs)?;
        let params = self.units.iter().map(|unit| paper.params(unit)).collect::<Result<Vec<_>>>()?;
        let weights: Vec<&[Tensor]> = params.iter().map(Vec::as_slice).collect();
        let [frames, height, width] = size.sides;
        let latents = [size.videos, self.config.z_dim as usize, frames, height, width];
        let latents = paper.of_kind(&latents, Kind::Float)?;
        let decode = || {
            let (videos, tape) = self.decode(&weights, &latents, size.part as i64, followed)?;
            tape.map(|tape| self.latents_grad(&weights, tape, &videos.f_empty_like()?)).transpose()
        };
        Ok(paper.peak(decode)?.1)
    }
}
