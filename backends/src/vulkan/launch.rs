//! Arguments of kernels: a launch as dispatches, in as many parts as a device needs.

use std::ffi::{CStr, c_void};

use super::{
    kernels::{Arguments, CHUNK, Dispatch, Elements, Kernels, Kind, THREADS},
    memory::Memory,
};
use crate::{DType, Error, Result, device::unsupported, kernels::strategy::AdamW};

/// A launch as it was asked for.
pub(super) struct Launch<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) memory: &'a Memory,
    pub(super) arguments: &'a [*mut c_void],
}

impl Launch<'_> {
    /// # Safety
    /// The arguments are those of `kernel`.
    pub(super) unsafe fn dispatches(&self, kernel: &CStr) -> Result<Vec<Dispatch>> {
        // SAFETY: here and below, the caller's promise, and the types of `kernels/strategy.cu` and `flat`.
        unsafe {
            match kernel.to_bytes() {
                b"reduce_f32" => self.reduce(c"reduce_floats", Kind::F32),
                b"reduce_bf16" => self.reduce(c"reduce_floats", Kind::Bf16),
                b"reduce_f16" => self.reduce(c"reduce_floats", Kind::F16),
                b"reduce_i32" => self.reduce(c"reduce_i32", Kind::I32),
                b"reduce_i64" => self.reduce(c"reduce_i64", Kind::I64),
                b"reduce_u8" => self.reduce(c"reduce_u8", Kind::U8),
                b"sum_ranks_f32" => self.sum_ranks(Kind::F32),
                b"sum_ranks_bf16" => self.sum_ranks(Kind::Bf16),
                b"sum_ranks_f16" => self.sum_ranks(Kind::F16),
                b"adamw_f32" => self.adamw(Kind::F32),
                b"adamw_bf16" => self.adamw(Kind::Bf16),
                b"adamw_f16" => self.adamw(Kind::F16),
                b"sum_squares" => self.sum_squares(),
                b"sum_partial" => self.sum_partial(),
                b"cast" => self.cast(),
                b"scale_f32" => self.with_number(c"scale"),
                b"fill_f32" => self.with_number(c"fill"),
                _ => unsupported(self.kernels.context.id, format!("the kernel {kernel:?}")),
            }
        }
    }

    /// # Safety
    /// The argument has this type.
    unsafe fn argument<T: Copy>(&self, number: usize) -> T {
        // SAFETY: the caller's promise; the value need not be aligned for it.
        unsafe { self.arguments[number].cast::<T>().read_unaligned() }
    }

    /// # Safety
    /// The argument is an address.
    unsafe fn elements(&self, number: usize, kind: Kind, len: usize) -> Result<Elements> {
        // SAFETY: the caller's promise.
        let address = unsafe { self.argument::<u64>(number) };
        let refuse = || {
            let message = format!("a kernel on {len} {kind:?} at {address:#x}, where there are not so many");
            Error::Stream { device: self.kernels.context.id, message }
        };
        let place = self.memory.at(address).ok_or_else(refuse)?;
        let elements = Elements { place, kind, len };
        if elements.bytes() as u64 > place.len { Err(refuse()) } else { Ok(elements) }
    }

    /// The parts of `len` elements that one dispatch may have each, the widest of `bytes`.
    fn parts(&self, len: usize, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
        let most = self.kernels.most_elements(bytes);
        (0..len).step_by(most).map(move |from| (from, most.min(len - from)))
    }

    /// # Safety
    /// The arguments are an output and an input of this kind, `u64` elements, `i32` ranks and `i32` reduction.
    unsafe fn reduce(&self, entry: &'static CStr, kind: Kind) -> Result<Vec<Dispatch>> {
        // SAFETY: the caller's promise.
        unsafe { self.over_ranks(entry, kind, kind) }
    }

    /// # Safety
    /// The arguments are an fp32 output, an input of this kind, `u64` elements, `i32` ranks and an `i32` that says
    /// whether sums are added.
    unsafe fn sum_ranks(&self, kind: Kind) -> Result<Vec<Dispatch>> {
        // SAFETY: the caller's promise.
        unsafe { self.over_ranks(c"sum_ranks", Kind::F32, kind) }
    }

    /// # Safety
    /// The rule of the functions above.
    unsafe fn over_ranks(&self, entry: &'static CStr, to_kind: Kind, kind: Kind) -> Result<Vec<Dispatch>> {
        // SAFETY: the caller's promise.
        let (n, ranks, op) =
            unsafe { (self.argument::<u64>(2) as usize, self.argument::<i32>(3), self.argument::<i32>(4)) };
        let ranks = ranks as usize;
        // SAFETY: as above.
        let (to, from) = unsafe { (self.elements(0, to_kind, n)?, self.elements(1, kind, ranks * n)?) };
        let dispatch = |(start, len)| Dispatch {
            entry,
            buffers: vec![to.slice(start, len), from.slice(start, (ranks - 1) * n + len)],
            arguments: Arguments {
                n: len as u32,
                ranks: ranks as u32,
                stride: n as u32,
                op: op as u32,
                kind: kind as u32,
                to_kind: to_kind as u32,
                ..Arguments::default()
            },
            groups: len.div_ceil(THREADS),
        };
        Ok(self.parts(n, to_kind.bytes().max(kind.bytes())).map(dispatch).collect())
    }

    /// # Safety
    /// The arguments are those of `adamw_f32` with a gradient of this kind.
    unsafe fn adamw(&self, kind: Kind) -> Result<Vec<Dispatch>> {
        // SAFETY: the caller's promise.
        let (n, numbers) = unsafe { (self.argument::<u64>(5) as usize, self.argument::<AdamW>(6)) };
        // SAFETY: as above.
        let [w, m, v, gradient, factors] = unsafe {
            [
                self.elements(0, Kind::F32, n)?,
                self.elements(1, Kind::F32, n)?,
                self.elements(2, Kind::F32, n)?,
                self.elements(3, kind, n)?,
                self.elements(4, Kind::F32, 3)?,
            ]
        };
        let AdamW { learning_rate, beta1, beta2, eps, keep } = numbers;
        let dispatch = |(start, len)| Dispatch {
            entry: c"adamw",
            buffers: [w, gradient, m, v]
                .map(|it| it.slice(start, len))
                .into_iter()
                .chain([factors])
                .collect(),
            arguments: Arguments {
                n: len as u32,
                kind: kind as u32,
                learning_rate,
                beta1,
                beta2,
                eps,
                keep,
                ..Arguments::default()
            },
            groups: len.div_ceil(THREADS),
        };
        Ok(self.parts(n, size_of::<f32>()).map(dispatch).collect())
    }

    /// # Safety
    /// The arguments are fp32 elements, their `u64` number, and room for fp64 sums.
    unsafe fn sum_squares(&self) -> Result<Vec<Dispatch>> {
        self.needs_f64()?;
        // SAFETY: the caller's promise.
        let n = unsafe { self.argument::<u64>(1) } as usize;
        // SAFETY: as above.
        let (x, sums) =
            unsafe { (self.elements(0, Kind::F32, n)?, self.elements(2, Kind::F64, n.div_ceil(CHUNK))?) };
        let dispatch = |(start, len): (usize, usize)| Dispatch {
            entry: c"sum_squares",
            buffers: vec![sums.slice(start / CHUNK, len.div_ceil(CHUNK)), x.slice(start, len)],
            arguments: Arguments { n: len as u32, ..Arguments::default() },
            groups: len.div_ceil(CHUNK),
        };
        Ok(self.parts(n, size_of::<f32>()).map(dispatch).collect())
    }

    /// # Safety
    /// The arguments are fp64 sums, their `u64` number, and room for one more.
    unsafe fn sum_partial(&self) -> Result<Vec<Dispatch>> {
        self.needs_f64()?;
        // SAFETY: the caller's promise.
        let n = unsafe { self.argument::<u64>(1) } as usize;
        // SAFETY: as above.
        let total = unsafe { self.elements(2, Kind::F64, 1)? };
        // Of none the sum is zero; the window has to have something.
        // SAFETY: as above.
        let sums = if n == 0 { total } else { unsafe { self.elements(0, Kind::F64, n)? } };
        let arguments = Arguments { n: n as u32, ..Arguments::default() };
        Ok(vec![Dispatch { entry: c"sum_partial", buffers: vec![total, sums], arguments, groups: 1 }])
    }

    /// # Safety
    /// The arguments are an output and an input, their `u64` elements, and their dtypes as `i32`, both floats.
    unsafe fn cast(&self) -> Result<Vec<Dispatch>> {
        // SAFETY: the caller's promise.
        let n = unsafe { self.argument::<u64>(2) } as usize;
        // SAFETY: as above.
        let (to_kind, kind) = unsafe { (self.float(3)?, self.float(4)?) };
        // SAFETY: as above.
        let (to, from) = unsafe { (self.elements(0, to_kind, n)?, self.elements(1, kind, n)?) };
        // The reduction of one rank.
        let dispatch = |(start, len)| Dispatch {
            entry: c"reduce_floats",
            buffers: vec![to.slice(start, len), from.slice(start, len)],
            arguments: Arguments {
                n: len as u32,
                ranks: 1,
                kind: kind as u32,
                to_kind: to_kind as u32,
                ..Arguments::default()
            },
            groups: len.div_ceil(THREADS),
        };
        Ok(self.parts(n, to_kind.bytes().max(kind.bytes())).map(dispatch).collect())
    }

    /// # Safety
    /// The argument is a dtype as `i32`.
    unsafe fn float(&self, number: usize) -> Result<Kind> {
        // SAFETY: the caller's promise.
        let dtype = unsafe { self.argument::<i32>(number) };
        let kinds = [(DType::F32, Kind::F32), (DType::Bf16, Kind::Bf16), (DType::F16, Kind::F16)];
        match kinds.into_iter().find(|(it, _)| *it as i32 == dtype) {
            Some((_, kind)) => Ok(kind),
            None => unsupported(self.kernels.context.id, format!("casts of dtype {dtype}")),
        }
    }

    /// # Safety
    /// The arguments are fp32 elements, how many there are as `u64`, and an `f32`.
    unsafe fn with_number(&self, entry: &'static CStr) -> Result<Vec<Dispatch>> {
        // SAFETY: the caller's promise.
        let (n, number) = unsafe { (self.argument::<u64>(1) as usize, self.argument::<f32>(2)) };
        // SAFETY: as above.
        let x = unsafe { self.elements(0, Kind::F32, n)? };
        let dispatch = |(start, len)| Dispatch {
            entry,
            buffers: vec![x.slice(start, len)],
            arguments: Arguments { n: len as u32, keep: number, ..Arguments::default() },
            groups: len.div_ceil(THREADS),
        };
        Ok(self.parts(n, size_of::<f32>()).map(dispatch).collect())
    }

    fn needs_f64(&self) -> Result<()> {
        match self.kernels.context.physical.has_f64 {
            true => Ok(()),
            false => {
                unsupported(self.kernels.context.id, "sums of squares: the device does not compute in fp64")
            }
        }
    }
}
