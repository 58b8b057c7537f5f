//! The kernels of `kernels/strategy.cu`, for devices that compile them at run time.

use std::{
    ffi::{CStr, c_void},
    sync::Arc,
};

use tch::{Kind, Tensor};

use crate::{
    Buffer, DType, Device, Grid, RawStream, ReduceOp, Result, Stream, TorchDevice, attention_kernels,
    decode_kernels, diffusion_kernels, expert_kernels, model_kernels, open_devices, product_kernels,
    sample_kernels,
};

/// A file of kernels, compiled when the first of them is wanted.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: &'static CStr,
    /// CUDA C++ that HIP compiles too.
    pub(crate) text: &'static str,
    /// Every kernel in it.
    pub(crate) kernels: &'static [&'static CStr],
    /// What it is written for.
    pub(crate) architecture: Architecture,
}

/// Devices that a file of kernels compiles for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Architecture {
    Any,
    /// One alone, as the compiler names it.
    Only(&'static str),
    /// NVIDIA's of this compute capability, times ten, and of later ones.
    NvidiaFrom(u32),
}

impl Architecture {
    /// Whether a device is one of these, by what the compiler calls it.
    pub(crate) fn includes(self, name: &str) -> bool {
        match self {
            Architecture::Any => true,
            Architecture::Only(only) => only == name,
            Architecture::NvidiaFrom(least) => {
                let capability = name.strip_prefix("sm_").map(|rest| rest.trim_end_matches('a'));
                capability.and_then(|number| number.parse::<u32>().ok()).is_some_and(|number| number >= least)
            }
        }
    }
}

impl Source {
    /// Whether a device has all of its kernels.
    pub(crate) fn exists_on(&self, device: &dyn Device) -> bool {
        self.kernels.iter().all(|kernel| device.has_kernel(kernel))
    }
}

/// A file of `kernels/` behind those that it shares with others, and what is to follow it.
macro_rules! source_text {
    ([$($shared:literal),+], $file:literal $(, $behind:literal)?) => {
        concat!(
            $(include_str!(concat!("../kernels/", $shared)),)+
            "\n#line 1 \"", $file, "\"\n",
            include_str!(concat!("../kernels/", $file)),
            $($behind)?
        )
    };
}
pub(crate) use source_text;

/// All there are; a device without the first counts as having none.
pub(crate) const SOURCES: [Source; 13] = [
    SOURCE,
    model_kernels::SOURCE,
    diffusion_kernels::SOURCE,
    decode_kernels::F32_SOURCE,
    decode_kernels::BF16_SOURCE,
    decode_kernels::MATRIX_SOURCE,
    sample_kernels::SOURCE,
    product_kernels::SOURCE,
    product_kernels::SOURCE_128,
    product_kernels::SOURCE_MANY,
    expert_kernels::SOURCE,
    attention_kernels::SOURCE,
    attention_kernels::BACKWARD_SOURCE,
];

const SOURCE: Source = Source {
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
        c"sum_squares",
        c"sum_partial",
    ],
    architecture: Architecture::Any,
};

/// Launches a kernel on libtorch's stream with these values as its parameters; no blocks is no work.
macro_rules! launch {
    ($device:expr, $kernel:expr, $grid:expr, [$($argument:expr),+ $(,)?]) => {
        match $grid {
            $crate::Grid { blocks: 0, .. } => Ok(()),
            grid => $device.launch(
                $kernel,
                grid,
                &mut [$((&raw mut *&mut { $argument }).cast::<std::ffi::c_void>()),+],
                $device.torch_stream()?,
            ),
        }
    };
}
pub(crate) use launch;

/// For so many blocks, counted from the sizes of tensors.
pub(crate) fn grid(blocks: i64, threads: u32) -> Grid {
    Grid::new(u32::try_from(blocks).expect("sizes of tensors that exist"), threads)
}

pub(crate) const THREADS: u32 = 256;
/// What one thread of an elementwise kernel moves at a time.
const BYTES_OF_A_THREAD: usize = 16;
/// Elements of one block of `sum_squares`.
const CHUNK: usize = 16384;

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

/// The device that holds a tensor, if it has kernels.
pub(crate) fn device_of(tensor: &Tensor) -> Option<Arc<dyn Device>> {
    let device = open_devices::at(TorchDevice::of(tensor.device())?)?;
    device.has_kernels().then_some(device)
}

/// `output` becomes the reduction of `received`, which holds as many slices of its length as there are ranks: in
/// rank order, floats in fp32 and rounded once.
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

/// `out` becomes the sum over ranks of `len` elements each that lie one rank after the other in `received`, or has it
/// added: in fp32, in rank order.
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
    let kernel = match kind {
        Kind::Float => c"sum_ranks_f32",
        Kind::BFloat16 => c"sum_ranks_bf16",
        Kind::Half => c"sum_ranks_f16",
        other => unreachable!("no device has kernels for {other:?}"),
    };
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

/// One step over `len` elements. The gradient is fp32, or bf16 where `is_bf16`.
///
/// # Safety
/// Each address but that of `factors` has `len` elements on `device`, fp32 but for the gradient's; `factors` has
/// three, fp32. Those that are written (the first three) do not overlap.
pub(crate) unsafe fn adamw(
    device: &dyn Device,
    mut states: [*mut c_void; 3],
    (mut gradient, is_bf16): (*mut c_void, bool),
    mut factors: *mut c_void,
    len: usize,
    mut numbers: AdamW,
    stream: RawStream,
) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let kernel = if is_bf16 { c"adamw_bf16" } else { c"adamw_f32" };
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

/// How many partial sums [`sum_of_squares`] makes.
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

/// As many blocks as there is work for; a kernel that gets fewer goes around.
pub(crate) fn blocks(bytes: usize) -> u32 {
    let blocks = bytes.div_ceil(BYTES_OF_A_THREAD * THREADS as usize);
    u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32)
}

pub(crate) fn erase<T>(argument: &mut T) -> *mut c_void {
    (&raw mut *argument).cast()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use half::{bf16, f16};
    use tch::Tensor;

    use super::*;
    use crate::{BackendKind, DeviceId, Error, PinnedBuffer, open, ops};

    /// The first GPU on which libtorch computes; without one says so past the harness, which keeps what passing tests
    /// print.
    fn device() -> Option<Arc<dyn Device>> {
        first_of(BackendKind::Cuda)
    }

    /// Every backend's first device that has kernels.
    fn devices() -> impl Iterator<Item = Arc<dyn Device>> {
        [BackendKind::Cuda, BackendKind::Vulkan].into_iter().filter_map(first_of)
    }

    pub(crate) fn first_of(backend: BackendKind) -> Option<Arc<dyn Device>> {
        match open(DeviceId { backend, ordinal: 0 }) {
            Ok(device) => {
                assert!(device.has_kernels());
                Some(device)
            }
            Err(error @ Error::Unavailable { .. }) => {
                let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn architectures_are_told_by_their_names() {
        let includes = |architecture: Architecture| {
            ["sm_75", "sm_80", "sm_90a", "sm_100", "gfx942"].map(|name| architecture.includes(name))
        };
        assert_eq!(includes(Architecture::Any), [true; 5]);
        assert_eq!(includes(Architecture::Only("sm_90a")), [false, false, true, false, false]);
        assert_eq!(includes(Architecture::NvidiaFrom(80)), [false, true, true, true, false]);
    }

    /// Values of many sizes and both signs, from a fixed sequence (Knuth's MMIX).
    pub(crate) fn values(len: usize, mut state: u64) -> Vec<f32> {
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..len).map(|_| (draw() - 0.5) * (draw() * 16.0 - 8.0).exp2()).collect()
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

    pub(crate) fn upload(stream: &Stream, bytes: &[u8], dtype: DType) -> Buffer {
        let buffer = Buffer::zeros(stream, bytes.len() / dtype.size_bytes(), dtype).unwrap();
        let mut host = PinnedBuffer::new(stream.device(), bytes.len()).unwrap();
        host.bytes_mut().unwrap().copy_from_slice(bytes);
        host.copy_to(0, &buffer, stream).unwrap();
        buffer
    }

    pub(crate) fn download(buffer: &Buffer, stream: &Stream) -> Vec<u8> {
        let mut host = PinnedBuffer::new(stream.device(), buffer.len_bytes()).unwrap();
        host.copy_from(0, buffer, stream).unwrap();
        host.bytes().unwrap().to_vec()
    }

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

    /// One element of the step, as `kernels/strategy.cu` and `shim/optimizer.cpp` write it.
    pub(crate) fn adamw_one([w, m, v]: [f32; 3], gradient: f32, h: &ops::AdamW, step: i32) -> [f32; 3] {
        let (learning_rate, beta1, beta2) = (h.learning_rate as f32, h.betas.0 as f32, h.betas.1 as f32);
        let bias1 = (1.0 - h.betas.0.powi(step)) as f32;
        let bias2_root = (1.0 - h.betas.1.powi(step)).sqrt() as f32;
        let keep = 1.0 - learning_rate * h.weight_decay as f32;
        let m = beta1 * m + (1.0 - beta1) * gradient;
        let v = beta2 * v + (1.0 - beta2) * gradient * gradient;
        [keep * w - learning_rate / bias1 * m / (v.sqrt() / bias2_root + h.eps as f32), m, v]
    }

    /// Five steps, with one that is not finite after each, at `skip` elements behind an aligned address.
    fn steps_as_the_host_does(len: usize, skip: usize, gradient_kind: Kind) {
        let at = tch::Device::Cuda(0);
        let mut host: Vec<[f32; 3]> = values(len, 1).into_iter().map(|w| [w, 0.0, 0.0]).collect();
        let on_device = |column: &[f32], kind| {
            let padded: Vec<f32> = vec![3.0; skip].into_iter().chain(column.iter().copied()).collect();
            let padded = Tensor::from_slice(&padded).to_kind(kind);
            padded.to_device(at).narrow(0, skip as i64, len as i64)
        };
        let zeros = vec![0.0; len];
        let weights: Vec<f32> = host.iter().map(|state| state[0]).collect();
        let mut states = [&weights, &zeros, &zeros].map(|column| on_device(column, Kind::Float));
        for step in 1..=5 {
            let hyper = ops::AdamW { learning_rate: 1e-2, betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1 };
            let mut gradient = values(len, 10 + step as u64);
            if gradient_kind == Kind::BFloat16 {
                gradient.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
            for scale in [0.37f32, f32::NAN] {
                let (scale, step) = (Tensor::from(scale), Tensor::from(f64::from(step)));
                let factors = hyper.factors(&scale.to_device(at), &step.to_device(at)).unwrap();
                let [w, m, v] = &mut states;
                ops::adamw_(w, m, v, &on_device(&gradient, gradient_kind), &factors, &hyper).unwrap();
            }
            for (state, gradient) in host.iter_mut().zip(&gradient) {
                *state = adamw_one(*state, gradient * 0.37f32, &hyper, step);
            }
        }
        for (column, state) in states.iter().enumerate() {
            let got = Vec::<f32>::try_from(state.to_device(tch::Device::Cpu)).unwrap();
            let differ = got.iter().zip(&host).filter(|(a, b)| a.to_bits() != b[column].to_bits()).count();
            assert_eq!(differ, 0, "of {len} elements after {skip}, state {column}, {gradient_kind:?}");
        }
    }

    #[test]
    fn adamw_has_the_bits_of_the_host() {
        let Some(_open) = device() else { return };
        for kind in [Kind::Float, Kind::BFloat16] {
            for (len, skip) in [(0, 0), (1, 0), (7, 0), (4096, 0), (4099, 1), (4100, 2), (4100, 4)] {
                steps_as_the_host_does(len, skip, kind);
            }
        }
    }

    #[test]
    fn large_adamw_steps_have_the_bits_of_the_host() {
        let Some(_open) = device() else { return };
        for kind in [Kind::Float, Kind::BFloat16] {
            steps_as_the_host_does(100_001, 1, kind);
            steps_as_the_host_does(1 << 20, 4, kind);
        }
    }

    #[test]
    fn sums_of_squares_depend_on_the_length_alone() {
        let Some(_open) = device() else { return };
        let at = tch::Device::Cuda(0);
        for len in [0, 1, 255, 16_384, 16_385, 1_000_003] {
            let host = values(len, 5);
            let exact: f64 = host.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let sums = [0, 1, 2, 3].map(|skip| {
                let padded: Vec<f32> = vec![9.0; skip].into_iter().chain(host.iter().copied()).collect();
                let x = Tensor::from_slice(&padded).to_device(at).narrow(0, skip as i64, len as i64);
                ops::sum_of_squares(&x).unwrap().double_value(&[])
            });
            assert!((sums[0] - exact).abs() <= 1e-12 * exact, "{len} elements: {} and {exact}", sums[0]);
            assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()), "{len} elements: {sums:?}");
        }
    }

    #[test]
    fn tensors_that_a_kernel_cannot_take_are_refused() {
        let Some(_open) = device() else { return };
        let make = |at| Tensor::zeros([8], (Kind::Float, at));
        let on_device = || make(tch::Device::Cuda(0));
        let hyper = ops::AdamW { learning_rate: 1.0, betas: (0.9, 0.9), eps: 1e-8, weight_decay: 0.0 };
        let factors = Tensor::from_slice(&[1f32, 0.1, 0.1]).to_device(tch::Device::Cuda(0));
        let check = |gradient: &Tensor, words: &str| {
            let error =
                ops::adamw_(&mut on_device(), &mut on_device(), &mut on_device(), gradient, &factors, &hyper);
            let error = error.unwrap_err().to_string();
            assert!(error.contains("`gradient`") && error.contains(words), "{error}");
        };
        check(&make(tch::Device::Cpu), "Cpu");
        check(&on_device().to_kind(Kind::Half), "Half");
        check(&on_device().narrow(0, 0, 7), "7");
        check(&Tensor::zeros([16], (Kind::Float, tch::Device::Cuda(0))).slice(0, 0, 16, 2), "contiguous");
    }
}
