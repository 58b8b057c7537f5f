//! A strategy's operations on flat shards, for devices that have kernels but no libtorch. `ops` has the same operations on
//! tensors.
//!
//! Lengths and dtypes that do not fit are the caller's mistake, and panic, as for slices. A device without the kernel is
//! [`crate::Error::Unsupported`].

use std::ffi::{CStr, c_void};

use crate::{
    Buffer, DType, Grid, Result, Stream,
    kernels::{
        self,
        launch::{THREADS, blocks, erase},
    },
    ops::{self, Store},
};

/// One step of AdamW in place, as [`ops::adamw_`]: `states` are weights and both moments, fp32 `[N]`; the gradient is a
/// float; `factors`, fp32 `[3]`, are the gradient's scale, and what the first moment and the root of the second are
/// divided by. Where the scale is not finite nothing is written.
pub fn adamw(
    states: [&Buffer; 3],
    gradient: &Buffer,
    factors: &Buffer,
    adamw: &ops::AdamW,
    stream: &Stream,
) -> Result<()> {
    let len = gradient.len();
    states.iter().for_each(|state| expect(state, DType::F32, len));
    assert!(gradient.dtype().is_float(), "a gradient of {:?}", gradient.dtype());
    expect(factors, DType::F32, 3);
    let [weights, exp_avg, exp_avg_sq] = states.map(Buffer::address);
    let (states, device) = ([weights?, exp_avg?, exp_avg_sq?], stream.device());
    let (gradient, factors) = ((gradient.address()?, gradient.dtype().kind()), factors.address()?);
    let numbers = adamw.numbers();
    // SAFETY: the lengths were checked; the caller keeps the buffers until the work is done, as for a copy.
    unsafe { kernels::strategy::adamw(&**device, states, gradient, factors, len, numbers, stream.raw()) }
}

/// `out`, fp32 `[N]`, becomes the sum of the rows of `received` `[W, N]`, one a rank, or has it added: in fp32, from the
/// first rank to the last. Of one row it widens.
pub fn sum_ranks(out: &Buffer, received: &Buffer, how: Store, stream: &Stream) -> Result<()> {
    let len = out.len();
    expect(out, DType::F32, len);
    assert!(received.dtype().is_float(), "sums of {:?}", received.dtype());
    if len == 0 {
        return Ok(());
    }
    assert!(received.len().is_multiple_of(len), "{} elements in rows of {len}", received.len());
    let ranks = (received.len() / len) as i64;
    let (kind, device) = (received.dtype().kind(), stream.device());
    let (to, from, is_added) = (out.address()?.cast(), received.address()?, how == Store::Add);
    // SAFETY: as in `adamw`.
    unsafe {
        kernels::strategy::sum_ranks(&**device, kind, to, from, (ranks, len as i64), is_added, stream.raw())
    }
}

/// The sum of the squares of fp32 `x`, as the 8 bytes of one fp64: in fp64, in an order that depends on the length alone.
pub fn sum_of_squares(x: &Buffer, stream: &Stream) -> Result<Buffer> {
    const F64: usize = 8;
    expect(x, DType::F32, x.len());
    let partial = Buffer::zeros(stream, kernels::strategy::partial_sums(x.len()) * F64, DType::U8)?;
    let total = Buffer::zeros(stream, F64, DType::U8)?;
    let [from, partial_at, total_at] = [x, &partial, &total].map(Buffer::address);
    let device = stream.device();
    // SAFETY: as in `adamw`; `partial` is released in the order of the stream.
    unsafe {
        kernels::strategy::sum_of_squares(&**device, from?, x.len(), partial_at?, total_at?, stream.raw())?;
    }
    Ok(total)
}

/// `to` becomes `from`, each element rounded to the nearest of its type, ties to even; floats of one length.
pub fn cast(to: &Buffer, from: &Buffer, stream: &Stream) -> Result<()> {
    assert!(to.dtype().is_float() && from.dtype().is_float(), "{:?} from {:?}", to.dtype(), from.dtype());
    expect(to, to.dtype(), from.len());
    let (mut to_dtype, mut dtype) = (to.dtype() as i32, from.dtype() as i32);
    let (mut to_at, mut at) = (to.address()?, from.address()?);
    let mut len = from.len() as u64;
    let arguments =
        [erase(&mut to_at), erase(&mut at), erase(&mut len), erase(&mut to_dtype), erase(&mut dtype)];
    // SAFETY: as in `adamw`.
    unsafe { launch(c"cast", from, arguments, stream) }
}

/// Multiplies fp32 `x` by `factor`.
pub fn scale(x: &Buffer, factor: f32, stream: &Stream) -> Result<()> {
    // SAFETY: one number is all it takes.
    unsafe { with_number(c"scale_f32", x, factor, stream) }
}

/// Makes every element of fp32 `x` `value`.
pub fn fill(x: &Buffer, value: f32, stream: &Stream) -> Result<()> {
    // SAFETY: as above.
    unsafe { with_number(c"fill_f32", x, value, stream) }
}

/// # Safety
/// The kernel takes fp32 elements, how many there are, and a number.
unsafe fn with_number(kernel: &'static CStr, x: &Buffer, mut number: f32, stream: &Stream) -> Result<()> {
    expect(x, DType::F32, x.len());
    let (mut at, mut len) = (x.address()?, x.len() as u64);
    let arguments = [erase(&mut at), erase(&mut len), erase(&mut number)];
    // SAFETY: the caller's promise, and as in `adamw`.
    unsafe { launch(kernel, x, arguments, stream) }
}

/// # Safety
/// The rule of [`crate::Device::launch`]; `over` is the buffer that the kernel passes over.
unsafe fn launch<const N: usize>(
    kernel: &'static CStr,
    over: &Buffer,
    mut arguments: [*mut c_void; N],
    stream: &Stream,
) -> Result<()> {
    let grid = Grid::new(blocks(over.len_bytes()), THREADS);
    // SAFETY: the caller's promise.
    unsafe { stream.device().launch(kernel, grid, &mut arguments, stream.raw()) }
}

fn expect(buffer: &Buffer, dtype: DType, len: usize) {
    assert_eq!((buffer.dtype(), buffer.len()), (dtype, len), "dtype and length of a flat buffer");
}
