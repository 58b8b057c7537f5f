//! [`Cut`]: the part that a rank has of a tensor which several ranks hold together.

use std::ops::Range;

use tch::Tensor;

use crate::Result;
use crate::slice::padded;

/// A rank's part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All of it.
    Whole,
    /// Ranges of rows, one after the other.
    Rows(Vec<Range<i64>>),
    /// A range of the columns.
    Columns(Range<i64>),
    /// A range of the rows, with zeros behind them up to this many.
    Padded(Range<i64>, i64),
    /// Zeros of its shape, in place of a tensor that only the first rank adds to a sum.
    Zeros,
}

/// Consecutive elements that a part and the whole tensor have in common, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First element in the part.
    pub own: usize,
    /// First element in the whole tensor.
    pub whole: usize,
    /// Number of elements.
    pub len: usize,
}

impl Cut {
    /// Returns the shape of the part of a tensor of this shape.
    pub fn shape(&self, whole: &[i64]) -> Vec<i64> {
        let mut shape = whole.to_vec();
        match self {
            Cut::Whole | Cut::Zeros => {}
            Cut::Rows(ranges) => shape[0] = ranges.iter().map(len).sum(),
            Cut::Columns(range) => shape[1] = len(range),
            Cut::Padded(_, rows) => shape[0] = *rows,
        }
        shape
    }

    /// Copies the part of a tensor.
    ///
    /// # Errors
    /// libtorch's.
    pub fn copy(&self, whole: &Tensor) -> Result<Tensor> {
        let rows = |range: &Range<i64>| whole.f_narrow(0, range.start, len(range));
        Ok(match self {
            Cut::Whole => copied(whole)?,
            Cut::Rows(ranges) => {
                let parts = ranges.iter().map(rows).collect::<Result<Vec<_>, _>>()?;
                Tensor::f_cat(&parts, 0)?
            }
            Cut::Columns(range) => copied(&whole.f_narrow(1, range.start, len(range))?)?,
            Cut::Padded(range, count) => {
                let own = rows(range)?;
                if own.size()[0] == *count { copied(&own)? } else { padded(&own, *count)? }
            }
            Cut::Zeros => whole.f_zeros_like()?,
        })
    }

    /// Writes a part to its place in the whole tensor: the inverse of [`Self::copy`].
    ///
    /// # Errors
    /// libtorch's.
    pub fn put(&self, part: &Tensor, whole: &Tensor) -> Result<()> {
        match self {
            Cut::Whole => whole.shallow_clone().f_copy_(part)?,
            Cut::Rows(ranges) => {
                let mut start = 0;
                for range in ranges {
                    let rows = part.f_narrow(0, start, len(range))?;
                    whole.f_narrow(0, range.start, len(range))?.f_copy_(&rows)?;
                    start += len(range);
                }
            }
            Cut::Columns(range) => whole.f_narrow(1, range.start, len(range))?.f_copy_(part)?,
            Cut::Padded(range, _) => {
                let rows = part.f_narrow(0, 0, len(range))?;
                whole.f_narrow(0, range.start, len(range))?.f_copy_(&rows)?;
            }
            Cut::Zeros => {}
        }
        Ok(())
    }

    /// Returns what a part and the whole tensor of this shape have in common, in the order of both.
    pub fn runs(&self, whole: &[i64]) -> Vec<Run> {
        let row = whole[1..].iter().product::<i64>();
        let run = |own: i64, whole: i64, len: i64| Run {
            own: own as usize,
            whole: whole as usize,
            len: len as usize,
        };
        match self {
            Cut::Whole => vec![run(0, 0, whole[0] * row)],
            Cut::Rows(ranges) => {
                let mut start = 0;
                let runs = ranges.iter().map(|range| {
                    let own = start;
                    start += len(range);
                    run(own * row, range.start * row, len(range) * row)
                });
                runs.collect()
            }
            Cut::Columns(range) => {
                let own = len(range);
                (0..whole[0]).map(|at| run(at * own, at * row + range.start, own)).collect()
            }
            Cut::Padded(range, _) => vec![run(0, range.start * row, len(range) * row)],
            Cut::Zeros => Vec::new(),
        }
    }

    /// Returns the elements of the part, row-major, that no rank before has, of a tensor of this shape. `before` is the
    /// cut of the rank before, `None` for the first.
    pub fn first_elements(&self, before: Option<&Cut>, whole: &[i64]) -> Vec<Range<usize>> {
        let all = 0..self.shape(whole).iter().product::<i64>() as usize;
        match (self, before) {
            (_, None) => vec![all],
            (Cut::Whole | Cut::Zeros, Some(_)) => Vec::new(),
            (Cut::Rows(ranges), Some(Cut::Rows(before))) => {
                let runs = self.runs(whole).into_iter().zip(ranges.iter().zip(before));
                let first = runs.filter(|(_, (own, before))| own != before);
                first.map(|(run, _)| run.own..run.own + run.len).collect()
            }
            (_, Some(_)) => vec![all],
        }
    }
}

fn len(range: &Range<i64>) -> i64 {
    range.end - range.start
}

/// Returns a dense copy in memory of its own.
pub(crate) fn copied(x: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(x.size(), (x.kind(), x.device()))?;
    copy.f_copy_(x)?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    const SHAPE: [i64; 2] = [6, 4];

    fn cuts() -> [[Cut; 2]; 4] {
        [
            [Cut::Rows(vec![0..2, 4..5]), Cut::Rows(vec![2..4, 5..6])],
            [Cut::Columns(0..2), Cut::Columns(2..4)],
            [Cut::Padded(0..4, 5), Cut::Padded(4..6, 5)],
            [Cut::Whole, Cut::Zeros],
        ]
    }

    #[test]
    fn parts_join_to_the_whole() {
        let whole = Tensor::arange(24, (Kind::Float, Device::Cpu)).view(SHAPE);
        for cuts in cuts() {
            let joined = whole.zeros_like();
            for cut in &cuts {
                let part = cut.copy(&whole).unwrap();
                assert_eq!(part.size(), cut.shape(&SHAPE), "{cut:?}");
                cut.put(&part, &joined).unwrap();
            }
            assert!(joined.equal(&whole), "{cuts:?}");
        }
    }

    #[test]
    fn runs_say_where_each_element_of_a_part_is() {
        let whole = Tensor::arange(24, (Kind::Float, Device::Cpu)).view(SHAPE);
        for cut in cuts().into_iter().flatten() {
            let part: Vec<f32> = Vec::try_from(cut.copy(&whole).unwrap().view([-1])).unwrap();
            let mut found = vec![0.0; part.len()];
            for Run { own, whole, len } in cut.runs(&SHAPE) {
                (0..len).for_each(|at| found[own + at] = (whole + at) as f32);
            }
            assert_eq!(found, part, "{cut:?}");
        }
    }

    #[test]
    fn rows_of_several_ranks_belong_to_the_first() {
        let only = |elements: Range<usize>| Vec::from_iter([elements]);
        let [first, second] = [Cut::Rows(vec![0..2, 4..5]), Cut::Rows(vec![2..4, 4..5])];
        assert_eq!(first.first_elements(None, &SHAPE), only(0..12));
        assert_eq!(second.first_elements(Some(&first), &SHAPE), only(0..8));
        assert!(Cut::Whole.first_elements(Some(&Cut::Whole), &SHAPE).is_empty());
        assert_eq!(Cut::Columns(2..4).first_elements(Some(&Cut::Columns(0..2)), &SHAPE), only(0..12));
    }
}
