//! The kernels of `kernels/strategy.cu`, for devices that compile them at run time.

use std::ffi::c_void;

use tch::Kind;

use super::{
    Architecture, Source, grid, launch,
    launch::{THREADS, blocks, erase},
    rows::{ceil_div, typed, typed_names},
    source_text,
};
use crate::{Buffer, DType, Device, Grid, RawStream, ReduceOp, Result, Stream};

pub(super) const SOURCE: Source = Source {
    file: c"strategy.cu",
    text: source_text!(["elements.cuh"], "strategy.cu"),
    kernels: &[
        c"reduce_f32",
        c"reduce_bf16",
        c"reduce_f16",
        c"reduce_i32",
        c"reduce_i64",
        c"reduce_u8",
        c"sum_ranks_f32",
        c"sum_ranks_bf16",
        c"sum_ranks_f16",
        c"adamw_f32",
        c"adamw_bf16",
        c"adamw_f16",
        c"adamw_eight_bits",
        c"sum_squares",
        c"sum_partial",
    ],
    architecture: Architecture::Any,
};

/// Elements of one block of `sum_squares`.
const CHUNK: usize = 16384;

/// Most blocks of `adamw_eight_bits`: several waves of any device.
const MOST_BLOCKS_WITH_MAPS: i64 = 4096;

/// The numbers of one step, as the kernel takes them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamW {
    pub(crate) learning_rate: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) eps: f32,
    pub(crate) keep: f32,
}

/// Writes the reduction of `received`, a slice of `output`'s length for each rank, to `output`: in rank order, floats in fp32
/// and rounded once.
pub(crate) fn reduce_in_rank_order(
    output: &Buffer,
    received: &Buffer,
    op: ReduceOp,
    stream: &Stream,
) -> Result<()> {
    let device = stream.device();
    let kernel = match output.dtype() {
        DType::F32 => c"reduce_f32",
        DType::Bf16 => c"reduce_bf16",
        DType::F16 => c"reduce_f16",
        DType::I32 => c"reduce_i32",
        DType::I64 => c"reduce_i64",
        DType::U8 => c"reduce_u8",
    };
    assert!(!output.is_empty() && received.len().is_multiple_of(output.len()), "slices of one length");
    let mut to = output.address()?;
    let mut from = received.address()?;
    let mut len = output.len() as u64;
    let mut ranks = (received.len() / output.len()) as i32;
    let mut op = op as i32;
    let mut arguments =
        [erase(&mut to), erase(&mut from), erase(&mut len), erase(&mut ranks), erase(&mut op)];
    let grid = Grid::new(blocks(output.len_bytes()), THREADS);
    // SAFETY: the kernel's signature; the caller keeps the buffers until the work is done, as for a copy.
    unsafe { device.launch(kernel, grid, &mut arguments, stream.raw()) }
}

/// Writes to `out`, or adds to it, the sum over ranks of `received`, which has `len` elements of each rank: in fp32, in rank
/// order.
///
/// # Safety
/// `received` has `world_size * len` elements of `kind`, a float, on `device`, and `out` `len` of fp32.
pub(crate) unsafe fn sum_ranks(
    device: &dyn Device,
    kind: Kind,
    mut out: *mut f32,
    mut received: *mut c_void,
    (world_size, len): (i64, i64),
    is_added: bool,
    stream: RawStream,
) -> Result<()> {
    let kernel = typed(typed_names!("sum_ranks"), kind);
    if len == 0 {
        return Ok(());
    }
    let (mut count, mut ranks, mut is_added) = (len as u64, world_size as i32, i32::from(is_added));
    let mut arguments =
        [erase(&mut out), erase(&mut received), erase(&mut count), erase(&mut ranks), erase(&mut is_added)];
    let bytes = len as usize * kind.elt_size_in_bytes();
    // SAFETY: the kernel's signature and the caller's promise.
    unsafe { device.launch(kernel, Grid::new(blocks(bytes), THREADS), &mut arguments, stream) }
}

/// One step over `len` elements. The gradient has the kind that it comes with, a float.
///
/// # Safety
/// Each address but that of `factors` has `len` elements on `device`, fp32 but for the gradient's; `factors` has
/// three, fp32. Those that are written (the first three) do not overlap.
pub(crate) unsafe fn adamw(
    device: &dyn Device,
    mut states: [*mut c_void; 3],
    (mut gradient, kind): (*mut c_void, Kind),
    mut factors: *mut c_void,
    len: usize,
    mut numbers: AdamW,
    stream: RawStream,
) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let kernel = typed(typed_names!("adamw"), kind);
    let mut count = len as u64;
    let [weights, exp_avg, exp_avg_sq] = &mut states;
    let mut arguments = [
        erase(weights),
        erase(exp_avg),
        erase(exp_avg_sq),
        erase(&mut gradient),
        erase(&mut factors),
        erase(&mut count),
        erase(&mut numbers),
    ];
    // SAFETY: the kernel's signature and the caller's promise.
    unsafe {
        device.launch(kernel, Grid::new(blocks(len * size_of::<f32>()), THREADS), &mut arguments, stream)
    }
}

/// Inputs of a step with moments in 8 bits: the gradient, the three factors, the maps and the runs of weight decay, of which
/// there are `count`.
pub(crate) struct EightBitInputs {
    pub(crate) gradient: *mut c_void,
    pub(crate) factors: *mut c_void,
    pub(crate) maps: *mut c_void,
    pub(crate) runs: *mut c_void,
    pub(crate) count: i32,
}

/// One step over `len` elements whose moments are in blocks of 8 bits: weights, codes of both moments, scales of both.
///
/// # Safety
/// On `device`, weights and the gradient have `len` elements, fp32, codes as many bytes, and scales one fp32 value for each
/// [`THREADS`] elements; `maps` has 1024 fp32 values and `runs` twice `count` int64 ones. States do not overlap.
pub(crate) unsafe fn adamw_in_eight_bits(
    device: &dyn Device,
    [weights, m_codes, v_codes, m_scales, v_scales]: [*mut c_void; 5],
    &EightBitInputs { gradient, factors, maps, runs, count }: &EightBitInputs,
    len: i64,
    numbers: AdamW,
) -> Result<()> {
    // Fewer blocks than that loop, since each reads the maps first.
    let grid = grid(ceil_div(len, i64::from(THREADS)).min(MOST_BLOCKS_WITH_MAPS), THREADS);
    // SAFETY: the kernel's signature and the caller's promise.
    unsafe {
        launch!(
            device,
            c"adamw_eight_bits",
            grid,
            [
                weights, m_codes, v_codes, m_scales, v_scales, gradient, factors, maps, runs, count,
                len as u64, numbers
            ]
        )
    }
}

/// Number of partial sums of [`sum_of_squares`].
pub(crate) fn partial_sums(len: usize) -> usize {
    len.div_ceil(CHUNK)
}

/// The sum of the squares of `len` elements.
///
/// # Safety
/// `x` has `len` fp32 elements on `device`, `partial` as many fp64 elements as [`partial_sums`] says, `total` one.
pub(crate) unsafe fn sum_of_squares(
    device: &dyn Device,
    mut x: *mut c_void,
    len: usize,
    mut partial: *mut c_void,
    mut total: *mut c_void,
    stream: RawStream,
) -> Result<()> {
    let (mut count, mut chunks) = (len as u64, partial_sums(len) as u64);
    if chunks > 0 {
        let mut arguments = [erase(&mut x), erase(&mut count), erase(&mut partial)];
        // SAFETY: the kernel's signature and the caller's promise.
        unsafe { device.launch(c"sum_squares", Grid::new(chunks as u32, THREADS), &mut arguments, stream)? };
    }
    let mut arguments = [erase(&mut partial), erase(&mut chunks), erase(&mut total)];
    // SAFETY: as above.
    unsafe { device.launch(c"sum_partial", Grid::new(1, THREADS), &mut arguments, stream) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use half::{bf16, f16};

    use super::*;
    use crate::{
        BackendKind,
        testing::{download, first_of, upload, values},
    };

    /// Every backend's first device that has kernels.
    fn devices() -> impl Iterator<Item = Arc<dyn Device>> {
        [BackendKind::CUDA, BackendKind::VULKAN].into_iter().filter_map(first_of)
    }

    /// Element types as their bytes, and back.
    trait Element: Copy {
        const DTYPE: DType;
        fn from_f32(value: f32) -> Self;
        fn to_f32(self) -> f32;
        fn bytes(self) -> Vec<u8>;
        fn from_bytes(bytes: &[u8]) -> Self;
    }
    macro_rules! element {
        ($type:ty, $dtype:expr, $narrow:expr, $widen:expr) => {
            impl Element for $type {
                const DTYPE: DType = $dtype;
                fn from_f32(value: f32) -> Self {
                    $narrow(value)
                }
                fn to_f32(self) -> f32 {
                    $widen(self)
                }
                fn bytes(self) -> Vec<u8> {
                    self.to_le_bytes().to_vec()
                }
                fn from_bytes(bytes: &[u8]) -> Self {
                    Self::from_le_bytes(bytes.try_into().unwrap())
                }
            }
        };
    }
    element!(f32, DType::F32, |value| value, |value| value);
    element!(bf16, DType::Bf16, bf16::from_f32, bf16::to_f32);
    element!(f16, DType::F16, f16::from_f32, f16::to_f32);

    fn reduces_as_the_host_does<T: Element>(device: &Arc<dyn Device>, ranks: usize, len: usize, skip: usize) {
        let stream = Stream::new(device).unwrap();
        for op in ReduceOp::ALL {
            let mut all: Vec<T> = values(ranks * len, len as u64).into_iter().map(T::from_f32).collect();
            all[len / 2] = T::from_f32(f32::NAN);
            all[len / 3] = T::from_f32(f32::INFINITY);
            // `skip` elements in front of each, so that addresses are not aligned.
            let mut bytes: Vec<u8> = (0..skip).flat_map(|_| T::from_f32(7.0).bytes()).collect();
            bytes.extend(all.iter().flat_map(|value| value.bytes()));
            let received = upload(&stream, &bytes, T::DTYPE).slice(skip..skip + all.len());
            let output = Buffer::zeros(&stream, skip + len, T::DTYPE).unwrap().slice(skip..skip + len);
            reduce_in_rank_order(&output, &received, op, &stream).unwrap();
            let got = download(&output, &stream);
            for (index, bytes) in got.chunks(T::DTYPE.size_bytes()).enumerate() {
                let slices = all[index..].iter().step_by(len).map(|value| value.to_f32());
                let reduced = slices
                    .reduce(|a, b| match op {
                        ReduceOp::Sum | ReduceOp::Avg => a + b,
                        _ if a.is_nan() || b.is_nan() => f32::NAN,
                        ReduceOp::Min => a.min(b),
                        ReduceOp::Max => a.max(b),
                    })
                    .unwrap();
                let reduced = if op == ReduceOp::Avg { reduced / ranks as f32 } else { reduced };
                let (got, want) = (T::from_bytes(bytes).to_f32(), T::from_f32(reduced).to_f32());
                // There are many NaNs, and processors differ in the one they make.
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(
                    same,
                    "{op:?} of {ranks} x {len} {:?}, {skip} skipped: {got}, not {want} at {index}",
                    T::DTYPE
                );
            }
        }
    }

    fn reduces_integers(device: &Arc<dyn Device>, dtype: DType, (ranks, len, skip): (usize, usize, usize)) {
        let stream = Stream::new(device).unwrap();
        let size = dtype.size_bytes();
        for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
            let bytes: Vec<u8> =
                values((skip + ranks * len) * size, 3).iter().map(|x| x.to_bits() as u8).collect();
            let received = upload(&stream, &bytes, dtype).slice(skip..skip + ranks * len);
            let output = Buffer::zeros(&stream, skip + len, dtype).unwrap().slice(skip..skip + len);
            reduce_in_rank_order(&output, &received, op, &stream).unwrap();
            // Sign-extended to 64 bits, of which the low ones are the sum in any width.
            let wide = |index: usize| {
                let bytes = &bytes[(skip + index) * size..][..size];
                match dtype {
                    DType::U8 => i64::from(bytes[0]),
                    DType::I32 => i64::from(i32::from_le_bytes(bytes.try_into().unwrap())),
                    _ => i64::from_le_bytes(bytes.try_into().unwrap()),
                }
            };
            let want = (0..len).flat_map(|index| {
                let all = (0..ranks).map(|rank| wide(rank * len + index));
                let reduced = match op {
                    ReduceOp::Min => all.min().unwrap(),
                    ReduceOp::Max => all.max().unwrap(),
                    _ => all.fold(0, i64::wrapping_add),
                };
                reduced.to_le_bytes().into_iter().take(size)
            });
            let same = download(&output, &stream).into_iter().eq(want);
            assert!(same, "{op:?} of {ranks} x {len} {dtype:?}, {skip} skipped");
        }
    }

    fn reduces(device: &Arc<dyn Device>, (ranks, len, skip): (usize, usize, usize)) {
        reduces_as_the_host_does::<f32>(device, ranks, len, skip);
        reduces_as_the_host_does::<bf16>(device, ranks, len, skip);
        reduces_as_the_host_does::<f16>(device, ranks, len, skip);
        for dtype in [DType::I32, DType::I64, DType::U8] {
            reduces_integers(device, dtype, (ranks, len, skip));
        }
    }

    #[test]
    fn reductions_have_the_bits_of_the_host() {
        for device in devices() {
            for case in [(1, 9, 0), (2, 64, 0), (3, 1000, 0), (4, 1001, 1), (5, 48, 1)] {
                reduces(&device, case);
            }
        }
    }

    #[test]
    fn large_reductions_have_the_bits_of_the_host() {
        devices().for_each(|device| reduces(&device, (8, 1 << 20, 0)));
    }
}
