//! Products of rows with one of several matrices each: the rows lie group by group, and a group has its matrix.

use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use super::check::Args;
use super::{Result, Store, linear_by_rows};
use crate::paper;

/// Bytes of one access of libtorch's own kernel to rows and matrices.
const ALIGNMENT_BYTES: usize = 16;
/// Most groups of that kernel: the threads of one of its blocks.
const MOST_GROUPS: i64 = 1023;

/// Ends of E groups of rows. Rows behind the last group have no matrix, and undefined results.
#[derive(Debug)]
pub struct Groups {
    /// int32 `[E]`.
    ends: Tensor,
    /// The same on the host, after the first wait for them.
    on_host: OnceCell<Vec<i64>>,
}

impl Groups {
    /// Groups whose ends, int32 `[E]`, rise, to the number of rows at most.
    ///
    /// # Errors
    /// [`super::Error::Argument`] for another tensor.
    pub fn new(ends: Tensor) -> Result<Groups> {
        let args = Args::new("Groups::new", &ends);
        let [_] = args.dims("ends", &ends)?;
        match ends.kind() {
            Kind::Int => Ok(Groups { ends, on_host: OnceCell::new() }),
            kind => Err(args.refuse("ends", format!("is {kind:?}, expected Int"))),
        }
    }

    /// The first `count` groups.
    ///
    /// # Errors
    /// libtorch's (there are fewer).
    pub fn first(&self, count: i64) -> Result<Groups> {
        Groups::new(self.ends.f_narrow(0, 0, count)?)
    }

    /// The number of groups E.
    pub fn count(&self) -> i64 {
        self.ends.size()[0]
    }

    /// The number of rows of each group: int32 `[E]`.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    pub fn counts(&self) -> Result<Tensor> {
        let before = self.ends.f_narrow(0, 0, self.count() - 1)?.f_constant_pad_nd([1, 0])?;
        Ok(self.ends.f_sub(&before)?)
    }

    /// The beginning and the length of each group. On a device this waits for it, the first time.
    fn spans(&self) -> Result<impl Iterator<Item = (i64, i64)>> {
        if paper::has(&self.ends) {
            // Products go to memory that is there, so that a measurement has none.
            drop(self.on_host.set(Vec::new()));
        }
        if self.on_host.get().is_none() {
            let ends = self.ends.f_to_device(Device::Cpu)?.f_to_kind(Kind::Int64)?;
            let ends = Vec::<i64>::try_from(ends).expect("a vector of the kind that was asked for");
            drop(self.on_host.set(ends));
        }
        let ends = self.on_host.get().expect("set above");
        let starts = std::iter::once(0).chain(ends.iter().copied());
        Ok(starts.zip(ends).map(|(start, end)| (start, end - start)))
    }
}

/// Number of rows to which a matrix product on a host is padded: at least 8, and below 16 a multiple of 4. For fewer rows, and
/// for 9 to 11 with several threads, libraries sum in another order. With these, a row's result depends on that row alone.
pub fn padded_rows(rows: usize) -> usize {
    const LEAST: usize = 8;
    const FEW: usize = 16;
    if rows < FEW { rows.max(LEAST).next_multiple_of(4) } else { rows }
}

/// `x W^T` with the matrix of each row's group: `x` is `[R, C]` and `weight` `[E F, C]`, the stacked matrices; returns
/// `[R, F]`. In bf16 on a GPU it is one operation that does not wait; otherwise a product for each group, whose lengths
/// the host reads.
///
/// # Errors
/// [`super::Error::Argument`] for tensors that do not fit, or libtorch's error; so for all below.
pub fn grouped_linear(x: &Tensor, weight: &Tensor, groups: &Groups) -> Result<Tensor> {
    let weight = matrices("grouped_linear", x, weight, groups)?;
    if is_one_operation(x, &weight, groups) {
        return Ok(x.f_internal_grouped_mm(&weight.f_transpose(1, 2)?, Some(&groups.ends), NO_BIAS, None)?);
    }
    let y = Tensor::f_empty([x.size()[0], weight.size()[1]], (x.kind(), x.device()))?;
    for (group, (start, rows)) in groups.spans()?.enumerate().filter(|(_, (_, rows))| *rows > 0) {
        let weight = weight.f_get(group as i64)?.f_tr()?;
        let (x, y) = (x.f_narrow(0, start, rows)?, y.f_narrow(0, start, rows)?);
        let lacking = padded_rows(rows as usize) as i64 - rows;
        if x.device() == Device::Cpu && lacking > 0 {
            let padded = x.f_constant_pad_nd([0, 0, 0, lacking])?.f_mm(&weight)?;
            y.f_narrow(0, 0, rows)?.f_copy_(&padded.f_narrow(0, 0, rows)?)?;
        } else {
            drop(x.f_mm_out(&y, &weight)?);
        }
    }
    Ok(y)
}

/// The same, in which a row has the same bits whatever the others are: see [`linear_by_rows`].
pub fn grouped_linear_by_rows(x: &Tensor, weight: &Tensor, groups: &Groups) -> Result<Tensor> {
    let weight = matrices("grouped_linear_by_rows", x, weight, groups)?;
    let y = Tensor::f_empty([x.size()[0], weight.size()[1]], (x.kind(), x.device()))?;
    for (group, (start, rows)) in groups.spans()?.enumerate().filter(|(_, (_, rows))| *rows > 0) {
        let product = linear_by_rows(&x.f_narrow(0, start, rows)?, &weight.f_get(group as i64)?, None)?;
        y.f_narrow(0, start, rows)?.f_copy_(&product)?;
    }
    Ok(y)
}

/// Returns the gradient `[R, C]` of [`grouped_linear`]'s `x` from that of its result, `dy` `[R, F]`.
pub fn grouped_input_backward(dy: &Tensor, weight: &Tensor, groups: &Groups) -> Result<Tensor> {
    let weight = matrices("grouped_input_backward", dy, weight, groups)?;
    if is_one_operation(dy, &weight, groups) {
        return Ok(dy.f_internal_grouped_mm(&weight, Some(&groups.ends), NO_BIAS, None)?);
    }
    let dx = Tensor::f_empty([dy.size()[0], weight.size()[2]], (dy.kind(), dy.device()))?;
    for (group, (start, rows)) in groups.spans()?.enumerate().filter(|(_, (_, rows))| *rows > 0) {
        let dx = dx.f_narrow(0, start, rows)?;
        drop(dy.f_narrow(0, start, rows)?.f_mm_out(&dx, &weight.f_get(group as i64)?)?);
    }
    Ok(dx)
}

/// Writes the gradient of the matrices to `dweight` `[E F, C]`, from `dy` `[R, F]`, that of [`grouped_linear`]'s result, and its
/// `x` `[R, C]`. It is 0 for a matrix without rows.
pub fn grouped_weight_backward(
    dy: &Tensor,
    x: &Tensor,
    groups: &Groups,
    dweight: &mut Tensor,
    how: Store,
) -> Result<()> {
    let mut dweight = matrices("grouped_weight_backward", x, dweight, groups)?;
    let dy = dy.f_tr()?;
    if is_one_operation(x, &dweight, groups) {
        let gradient = dy.f_internal_grouped_mm(x, Some(&groups.ends), NO_BIAS, None)?;
        match how {
            Store::Write => dweight.f_copy_(&gradient)?,
            Store::Add => drop(dweight.f_add_(&gradient)?),
        }
        return Ok(());
    }
    for (group, (start, rows)) in groups.spans()?.enumerate() {
        let mut dweight = dweight.f_get(group as i64)?;
        let (dy, x) = (dy.f_narrow(1, start, rows)?, x.f_narrow(0, start, rows)?);
        match how {
            Store::Write if rows == 0 => drop(dweight.f_zero_()?),
            Store::Write => drop(dy.f_mm_out(&dweight, &x)?),
            Store::Add if rows == 0 => (),
            Store::Add => drop(dweight.f_addmm_(&dy, &x)?),
        }
    }
    Ok(())
}

const NO_BIAS: Option<&Tensor> = None;

/// The matrices `[E F, C]` as `[E, F, C]`.
fn matrices(op: &'static str, like: &Tensor, weight: &Tensor, groups: &Groups) -> Result<Tensor> {
    let args = Args::new(op, like);
    let ([_, _], [rows, inputs]) = (args.dims("x", like)?, args.dims("weight", weight)?);
    if rows % groups.count() != 0 {
        let problem = format!("has {rows} rows, which {} groups do not share evenly", groups.count());
        return Err(args.refuse("weight", problem));
    }
    args.values("weight", weight, &[rows, inputs])?;
    Ok(weight.f_view([groups.count(), -1, inputs])?)
}

/// Returns true if libtorch has these products as one operation. It takes matrices in bf16 whose starts and strides are
/// multiples of 16 bytes; the dimension of a group's rows may have any.
fn is_one_operation(x: &Tensor, weight: &Tensor, groups: &Groups) -> bool {
    let (size, element) = (weight.size(), weight.kind().elt_size_in_bytes());
    let is_aligned = |width: i64| (width as usize * element).is_multiple_of(ALIGNMENT_BYTES);
    let begins_aligned = |tensor: &Tensor| (tensor.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES);
    matches!(x.device(), Device::Cuda(_))
        && x.size()[0] > 0
        && x.kind() == Kind::BFloat16
        && groups.count() <= MOST_GROUPS
        && size[1..].iter().all(|&width| is_aligned(width))
        && begins_aligned(x)
        && begins_aligned(weight)
}
