//! What causal convolutions remember of the frames before.

use tch::Tensor;

use crate::Result;

/// Frames that a convolution sees before its own.
const SEEN: i64 = 2;

/// The last two frames that each convolution saw, in the order in which they are asked: of the frames before, and of
/// those that are decoded now, for those behind.
pub(super) struct Past<'a> {
    /// Empty at a video's beginning.
    seen: &'a [Tensor],
    kept: Vec<Tensor>,
}

impl<'a> Past<'a> {
    /// That which [`Self::into_kept`] left, or nothing at a video's beginning.
    pub fn new(seen: &'a [Tensor]) -> Self {
        Self { seen, kept: Vec::with_capacity(seen.len()) }
    }

    /// Whether the frames that are decoded now are a video's first.
    pub fn is_beginning(&self) -> bool {
        self.seen.is_empty()
    }

    /// `x` with the next convolution's two frames before it, which are 0 before a video.
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
        // A copy: a view would keep all of the frames.
        self.kept.push(all.f_narrow(2, all.size()[2] - SEEN, SEEN)?.f_contiguous()?);
        Ok(all)
    }

    /// How many convolutions have asked.
    pub fn asked(&self) -> usize {
        self.kept.len()
    }

    /// For the frames behind.
    pub fn into_kept(self) -> Vec<Tensor> {
        self.kept
    }
}
