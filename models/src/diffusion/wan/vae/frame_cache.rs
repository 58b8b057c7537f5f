//! Cached input frames of causal convolutions.

use tch::Tensor;

use crate::Result;

/// Number of earlier frames that a convolution sees.
const SEEN: i64 = 2;

/// The last two input frames of each convolution, in the order in which convolutions run. Holds those of the
/// previous part, and those of the current part for the next one.
pub(super) struct FrameCache<'a> {
    /// Empty at a video's beginning.
    seen: &'a [Tensor],
    kept: Vec<Tensor>,
}

impl<'a> FrameCache<'a> {
    /// Takes the frames that [`Self::into_kept`] returned, or none at a video's beginning.
    pub fn new(seen: &'a [Tensor]) -> Self {
        Self { seen, kept: Vec::with_capacity(seen.len()) }
    }

    /// Returns true if the current frames are a video's first.
    pub fn is_beginning(&self) -> bool {
        self.seen.is_empty()
    }

    /// Prepends the next convolution's two earlier frames to `x`; they are 0 before a video.
    pub fn before(&mut self, x: &Tensor) -> Result<Tensor> {
        let seen = match self.seen.get(self.kept.len()) {
            Some(seen) => seen.shallow_clone(),
            None => {
                let mut size = x.size();
                size[2] = SEEN;
                x.f_new_zeros(size, (x.kind(), x.device()))?
            }
        };
        let all = Tensor::f_cat(&[seen, x.shallow_clone()], 2)?;
        // A copy, since a view would keep all frames alive.
        self.kept.push(all.f_narrow(2, all.size()[2] - SEEN, SEEN)?.f_contiguous()?);
        Ok(all)
    }

    /// Returns the number of convolutions that have run.
    pub fn asked(&self) -> usize {
        self.kept.len()
    }

    /// Returns the frames for the next part.
    pub fn into_kept(self) -> Vec<Tensor> {
        self.kept
    }
}
