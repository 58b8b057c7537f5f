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
pub(super) struct Copies {
    /// The row of each copy: int64 `[N]`.
    of: Tensor,
    /// The rows of the copies in ascending order, and these copies, those of a row in their order: int64 `[N]`.
    by_row: (Tensor, Tensor),
    /// The number of rows U.
    rows: i64,
}

impl Copies {
    /// Copies of these rows, of which there are `rows`.
    ///
    /// # Errors
    /// A row out of range, or libtorch's error.
    pub fn new(of: &[i64], rows: i64, device: Device) -> Result<Copies> {
        if let Some(row) = of.iter().find(|row| !(0..rows).contains(*row)) {
            let problem = format!("holds {row}, outside of 0..{rows}");
            return Err(Error::Argument { op: "copies", argument: "of", problem });
        }
        let mut order: Vec<i64> = (0..of.len() as i64).collect();
        order.sort_by_key(|&copy| of[copy as usize]);
        let sorted: Vec<i64> = order.iter().map(|&copy| of[copy as usize]).collect();
        let upload = |values: &[i64]| upload(values, device);
        Ok(Copies { of: upload(of)?, by_row: (upload(&sorted)?, upload(&order)?), rows })
    }

    /// The number of rows U.
    pub fn rows(&self) -> i64 {
        self.rows
    }

    /// Copies rows: from `[U, heads, D]`, whose rows may lie apart, to `[N, heads, D]`.
    ///
    /// # Errors
    /// [`Error::Argument`] for shapes that do not fit, or libtorch's error.
    pub fn spread(&self, rows: &Tensor) -> Result<Tensor> {
        let args = Args::new("copies", rows);
        let [_, heads, dim] = args.dims("rows", rows)?;
        let Some(Engine::Device(device)) = Engine::of(rows) else {
            return Ok(rows.f_index_select(0, &self.of)?);
        };
        let from = args.heads("rows", rows, [self.rows, heads, dim])?;
        let copies = self.of.numel() as i64;
        let (to, sizes) = (args.empty(&[copies, heads, dim])?, [copies, heads * dim]);
        // SAFETY: the sizes of `rows` were checked and `to` was made here, `of` is below their number, and libtorch takes
        // memory back in the order of its stream.
        args.launched(unsafe {
            kernels::model::take_rows(&*device, args.kind(), from, (self.of.data_ptr(), to.data_ptr()), sizes)
        })?;
        Ok(to)
    }

    /// Backward of [`Self::spread`]: from the dense `[N, C]` to the sum of each row's copies `[U, C]`, in their order and in
    /// fp32.
    ///
    /// # Errors
    /// The same as [`Self::spread`].
    pub fn sum(&self, copies: &Tensor) -> Result<Tensor> {
        let args = Args::new("copies", copies);
        let [_, columns] = args.dims("copies", copies)?;
        let mut sums = args.empty(&[self.rows, columns])?;
        add_up("copies", copies, (&self.of, Some(&self.by_row)), &mut sums, Store::Write)?;
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;
    use tch::Kind;

    use super::*;
    use crate::ops::tests::{PLACES, random, tolerance};

    /// Against libtorch's own indexing, and its sums in fp64. The fourth row has no copy.
    #[test]
    fn copies_come_and_go() {
        let of = [0, 1, 2, 0, 1, 4, 5, 0, 1, 2];
        for ((kind, device), dim) in PLACES.iter().flat_map(|&place| [1, 7, 64, 129].map(|dim| (place, dim)))
        {
            let copies = Copies::new(&of, 6, device).unwrap();
            let of = Tensor::from_slice(&of).to_device(device);
            // Rows lie apart by a head that belongs to nobody.
            let rows = random(&[6, 3, dim], (kind, device)).narrow(1, 0, 2);
            assert!(copies.spread(&rows).unwrap().equal(&rows.index_select(0, &of)));

            let of_all = random(&[10, 2 * dim], (kind, device));
            let wide = Tensor::zeros([6, 2 * dim], (Kind::Double, device));
            let expected = wide.index_add(0, &of, &of_all.to_kind(Kind::Double));
            let sums = copies.sum(&of_all).unwrap();
            assert_eq!(sums.kind(), kind);
            assert_close("sums", &sums, &expected, tolerance(kind, 1.0));
            assert!(sums.equal(&copies.sum(&of_all).unwrap()));
        }
    }

    #[test]
    fn copies_are_of_rows_that_there_are() {
        for of in [&[0, 3][..], &[0, -1]] {
            let message = Copies::new(of, 3, Device::Cpu).unwrap_err().to_string();
            assert!(message.contains("outside of 0..3"), "{message}");
        }
    }
}
