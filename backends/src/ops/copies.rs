//! Rows that several sequences of a batch share. Each is stored once, and copied to each sequence if a sequence's rows have to
//! be contiguous.

use tch::{Device, Tensor};

use super::check::{Args, Engine};
use super::embedding::add_up;
use super::{Error, Result, Store, upload};
use crate::kernels;

/// The row of each of N copies of U rows.
///
/// Kernels index with these numbers unchecked, so they are checked here and cannot be changed.
#[derive(Debug)]
pub struct Copies {
    /// The row of each copy: int64 `[N]`.
    of: Tensor,
    /// The first copy of each row: int64 `[U]`.
    first: Tensor,
    /// The row of each copy that is its first, and -1 for the others: int64 `[N]`.
    if_first: Tensor,
    /// The rows of the copies in ascending order, and these copies, those of a row in their order: int64 `[N]`.
    by_row: (Tensor, Tensor),
}

impl Copies {
    /// Copies of these rows, which are numbered by first use.
    ///
    /// # Errors
    /// Rows that are not numbered by first use, or libtorch's error.
    pub fn new(of: &[i64], device: Device) -> Result<Copies> {
        let (mut first, mut if_first) = (Vec::new(), vec![-1; of.len()]);
        for (copy, &row) in of.iter().enumerate() {
            let next = first.len() as i64;
            if row < 0 || row > next {
                let problem = format!("holds {row} where at most {next} can come up");
                return Err(Error::Argument { op: "copies", argument: "of", problem });
            }
            if row == next {
                first.push(copy as i64);
                if_first[copy] = row;
            }
        }
        let mut order: Vec<i64> = (0..of.len() as i64).collect();
        order.sort_by_key(|&copy| of[copy as usize]);
        let sorted: Vec<i64> = order.iter().map(|&copy| of[copy as usize]).collect();
        let upload = |values: &[i64]| upload(values, device);
        Ok(Copies {
            of: upload(of)?,
            first: upload(&first)?,
            if_first: upload(&if_first)?,
            by_row: (upload(&sorted)?, upload(&order)?),
        })
    }

    /// The number of rows U.
    pub fn rows(&self) -> i64 {
        self.first.numel() as i64
    }

    /// The first copy of each row: int64 `[U]`.
    pub fn first(&self) -> &Tensor {
        &self.first
    }

    /// Copies rows: from `[U, ...]`, whose rows may lie apart, to `[N, ...]`.
    ///
    /// # Errors
    /// [`Error::Argument`] for shapes that do not fit, or libtorch's error.
    pub fn spread(&self, rows: &Tensor) -> Result<Tensor> {
        match self.take(rows, &self.of, self.rows())? {
            Some(copies) => Ok(copies),
            None => Ok(rows.f_index_select(0, &self.of)?),
        }
    }

    /// Backward of [`Self::spread`]: from the dense `[N, C]` to the sum of each row's copies `[U, C]`, in their order and in
    /// fp32.
    ///
    /// # Errors
    /// The same as [`Self::spread`].
    pub fn sum(&self, copies: &Tensor) -> Result<Tensor> {
        let args = Args::new("copies", copies);
        let [_, columns] = args.dims("copies", copies)?;
        let mut sums = args.empty(&[self.rows(), columns])?;
        add_up("copies", copies, (&self.of, Some(&self.by_row)), &mut sums, Store::Write)?;
        Ok(sums)
    }

    /// The first copy of each row: from `[N, ...]` to `[U, ...]`.
    ///
    /// # Errors
    /// The same as [`Self::spread`].
    pub fn of_first(&self, copies: &Tensor) -> Result<Tensor> {
        match self.take(copies, &self.first, self.of.numel() as i64)? {
            Some(rows) => Ok(rows),
            None => Ok(copies.f_index_select(0, &self.first)?),
        }
    }

    /// Backward of [`Self::of_first`]: from `[U, ...]` to `[N, ...]`, zero where a copy is not the first.
    ///
    /// # Errors
    /// The same as [`Self::spread`].
    pub fn to_first(&self, rows: &Tensor) -> Result<Tensor> {
        if let Some(copies) = self.take(rows, &self.if_first, self.rows())? {
            return Ok(copies);
        }
        let mut size = rows.size();
        size[0] = self.of.numel() as i64;
        let mut copies = Tensor::f_zeros(size, (rows.kind(), rows.device()))?;
        Ok(copies.f_index_copy_(0, &self.first, rows)?)
    }

    /// The rows that `index` names, among `from` rows of `x`, and zeros for negative indices; `None` without a kernel for it.
    fn take(&self, x: &Tensor, index: &Tensor, from: i64) -> Result<Option<Tensor>> {
        let Some(Engine::Device(device)) = Engine::of(x) else { return Ok(None) };
        let args = Args::new("copies", x);
        let mut size = x.size();
        let (heads, dim) = match size[..] {
            [_, heads, dim] => (heads, dim),
            [_, columns] => (1, columns),
            _ => return Err(args.refuse("x", format!("has shape {size:?}, expected 2 or 3 dimensions"))),
        };
        let x = args.heads("x", x, [from, heads, dim])?;
        size[0] = index.numel() as i64;
        let (y, sizes) = (args.empty(&size)?, [size[0], heads * dim]);
        // SAFETY: the sizes of `x` were checked and `y` was made here, what is not negative in `index` is below `from`, and
        // libtorch takes memory back in the order of its stream.
        args.launched(unsafe {
            kernels::model::take_rows(&*device, args.kind(), x, (index.data_ptr(), y.data_ptr()), sizes)
        })?;
        Ok(Some(y))
    }
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;
    use tch::Kind;

    use super::*;
    use crate::ops::tests::{PLACES, random, tolerance};

    /// Against libtorch's own indexing, and its sums in fp64.
    #[test]
    fn copies_come_and_go() {
        let of = [0, 1, 2, 0, 1, 3, 4, 0, 1, 2];
        let first = [0, 1, 2, 5, 6];
        for ((kind, device), dim) in PLACES.iter().flat_map(|&place| [1, 7, 64, 129].map(|dim| (place, dim)))
        {
            let copies = Copies::new(&of, device).unwrap();
            let [of, first] = [&of[..], &first].map(|rows| Tensor::from_slice(rows).to_device(device));
            assert_eq!((copies.rows(), copies.first().equal(&first)), (5, true));
            // Rows lie apart by a head that belongs to nobody.
            let rows = random(&[5, 3, dim], (kind, device)).narrow(1, 0, 2);
            let of_all = random(&[10, 2, dim], (kind, device));
            assert!(copies.spread(&rows).unwrap().equal(&rows.index_select(0, &of)));
            assert!(copies.of_first(&of_all).unwrap().equal(&of_all.index_select(0, &first)));
            let to_first = of_all.zeros_like().index_copy(0, &first, &rows);
            assert!(copies.to_first(&rows).unwrap().equal(&to_first));

            let of_all = of_all.view([10, 2 * dim]);
            let wide = Tensor::zeros([5, 2 * dim], (Kind::Double, device));
            let expected = wide.index_add(0, &of, &of_all.to_kind(Kind::Double));
            let sums = copies.sum(&of_all).unwrap();
            assert_eq!(sums.kind(), kind);
            assert_close("sums", &sums, &expected, tolerance(kind, 1.0));
            assert!(sums.equal(&copies.sum(&of_all).unwrap()));
        }
    }

    #[test]
    fn rows_are_numbered_as_they_come_up() {
        for of in [&[1][..], &[0, 2, 1], &[0, -1]] {
            let message = Copies::new(of, Device::Cpu).unwrap_err().to_string();
            assert!(message.contains("argument `of` holds"), "{message}");
        }
    }
}
