//! [`Buffer`], [`Arena`] and [`PinnedBuffer`]: memory with an owner, written once over the verbs of [`Device`].

use std::{
    ffi::c_void,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use super::stream::report;
use crate::{DType, Device, Error, Event, RawBuffer, RawSlice, Result, Stream, device::unsupported, ffi};

/// Far beyond any work on memory that is given back: a wedged device is to be an error and not a hang.
const WORK_TIMEOUT: Duration = Duration::from_secs(120);

/// Device memory: `len` elements of `dtype`. A clone, a slice or a tensor shares the allocation, and the last of
/// them releases it, in order with the buffer's home stream.
#[derive(Clone, Debug)]
pub struct Buffer {
    memory: Arc<Memory>,
    offset_bytes: usize,
    len: usize,
    dtype: DType,
}

#[derive(Debug)]
struct Memory {
    home: Stream,
    raw: RawBuffer,
    len_bytes: usize,
    keeper: Keeper,
}

/// Owner of an allocation.
#[derive(Debug)]
enum Keeper {
    /// The buffer itself.
    Buffer,
    Arena(ArenaState),
    /// A tensor of libtorch, which is only dropped.
    Tensor {
        _tensor: Mutex<tch::Tensor>,
    },
    /// Nobody: it stays until the process ends.
    Process,
}

#[derive(Debug)]
struct ArenaState {
    name: String,
    mapped: Mutex<bool>,
}

impl Buffer {
    /// Zeroed memory whose home is `stream`: it is ready for work enqueued there.
    pub fn zeros(stream: &Stream, len: usize, dtype: DType) -> Result<Self> {
        // A zero-length allocation is an error to some drivers, and a length that overflows to all of them.
        let len_bytes = len.saturating_mul(dtype.size_bytes()).max(1);
        // SAFETY: `Memory` owns the allocation and releases it.
        let raw = unsafe { stream.device().alloc(len_bytes)? };
        let memory = Arc::new(Memory { home: stream.clone(), raw, len_bytes, keeper: Keeper::Buffer });
        let buffer = Self { memory, offset_bytes: 0, len, dtype };
        buffer.fill(0, stream)?;
        Ok(buffer)
    }

    /// Bytes of memory that stays until the process ends.
    pub(crate) fn kept(stream: &Stream, raw: RawBuffer, len_bytes: usize) -> Self {
        let memory = Memory { home: stream.clone(), raw, len_bytes, keeper: Keeper::Process };
        Self { memory: Arc::new(memory), offset_bytes: 0, len: len_bytes, dtype: DType::U8 }
    }

    /// The memory of a dense `tensor` on the device of `stream`, without a copy, for as long as it is in use. `stream` is
    /// libtorch's own, in whose order libtorch re-uses the memory afterwards.
    pub fn of_tensor(tensor: tch::Tensor, stream: &Stream) -> Self {
        assert!(tensor.is_contiguous(), "a buffer over a tensor with gaps");
        let dtype = DType::of(tensor.kind()).expect("a type that buffers have");
        let (len, raw) = (tensor.numel(), RawBuffer(tensor.data_ptr() as u64));
        let (len_bytes, keeper) = (len * dtype.size_bytes(), Keeper::Tensor { _tensor: Mutex::new(tensor) });
        let memory = Memory { home: stream.clone(), raw, len_bytes, keeper };
        Self { memory: Arc::new(memory), offset_bytes: 0, len, dtype }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len * self.dtype.size_bytes()
    }

    /// The stream in whose order the memory is released.
    pub fn home(&self) -> &Stream {
        &self.memory.home
    }

    /// A view of `range`, in elements. Panics when out of range: the caller computed it.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        Self {
            offset_bytes: self.offset_bytes + range.start * self.dtype.size_bytes(),
            len: range.len(),
            ..self.clone()
        }
    }

    /// The same memory as bytes: for operations that move and do not compute.
    pub fn as_bytes(&self) -> Self {
        Self { len: self.len_bytes(), dtype: DType::U8, ..self.clone() }
    }

    /// The same memory as elements of another type, of which there is a whole number.
    pub(crate) fn cast(&self, dtype: DType) -> Self {
        assert!(
            self.len_bytes().is_multiple_of(dtype.size_bytes()),
            "{} bytes as {dtype:?}",
            self.len_bytes()
        );
        Self { len: self.len_bytes() / dtype.size_bytes(), dtype, ..self.clone() }
    }

    /// The address of the first element, for kernels and collectives.
    pub(crate) fn address(&self) -> Result<*mut c_void> {
        let (raw, device) = (self.raw()?, self.memory.home.device());
        match device.address(raw.buffer) {
            // By wrapping: the sum is inside of the allocation, and the memory is the device's.
            Some(base) => Ok(base.wrapping_add(raw.offset).cast()),
            None => unsupported(device.id(), "kernels and collectives on memory without an address"),
        }
    }

    /// The backend's view of it. An error when its arena is released.
    pub fn raw(&self) -> Result<RawSlice> {
        self.memory.check()?;
        Ok(RawSlice { buffer: self.memory.raw, offset: self.offset_bytes, len: self.len_bytes() })
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<()> {
        // SAFETY: the range is ours; `Memory` outlives the work, since its release is ordered after `home`,
        // and whoever works on another stream orders the two.
        unsafe { stream.device().fill(self.raw()?, byte, stream.raw()) }
    }

    /// Copies all of `src`, which has the same length in bytes, on the same device.
    pub fn copy_from(&self, src: &Self, stream: &Stream) -> Result<()> {
        assert_eq!(self.len_bytes(), src.len_bytes(), "copies are between equal lengths");
        // SAFETY: as in `fill`, for both; two buffers overlap only if the caller sliced them so.
        unsafe { stream.device().copy_d2d(self.raw()?, src.raw()?, stream.raw()) }
    }

    /// A tensor of `shape` over this memory, without a copy; it keeps the allocation alive. Its contents are
    /// what the stream that wrote them left: order the reader after it.
    pub fn tensor(&self, shape: &[i64]) -> Result<tch::Tensor> {
        let elements: i64 = shape.iter().product();
        assert_eq!(usize::try_from(elements), Ok(self.len), "shape {shape:?} of {} elements", self.len);
        self.memory.check()?;
        let device = self.memory.home.device();
        let (Some(at), Some(base)) = (device.torch_device(), device.address(self.memory.raw)) else {
            return unsupported(device.id(), "tensors: libtorch does not compute on it");
        };
        let owner = Arc::into_raw(self.memory.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the range lies in the allocation that `owner` keeps alive until libtorch calls `release`.
        unsafe {
            let data = base.add(self.offset_bytes).cast();
            let tensor = ffi::anyroll_tensor_from_blob(
                data,
                shape.as_ptr(),
                shape.len() as i32,
                self.dtype.scalar_type(),
                at.kind,
                at.index,
                release,
                owner,
            );
            if tensor.is_null() {
                release(owner);
            }
            ffi::own_tensor(tensor)
        }
    }
}

/// Called by libtorch when the last tensor over a buffer is gone.
extern "C" fn release(owner: *mut c_void) {
    // SAFETY: `owner` is the reference that `Buffer::tensor` gave away, and this is called once.
    drop(unsafe { Arc::from_raw(owner.cast::<Memory>()) });
}

impl Memory {
    fn check(&self) -> Result<()> {
        match &self.keeper {
            Keeper::Arena(arena) if !*arena.mapped.lock().unwrap() => {
                Err(Error::Released { arena: arena.name.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let device = self.home.device();
        let arena = match &self.keeper {
            Keeper::Buffer => {
                // SAFETY: the last owner; the release is ordered after the work on `home`.
                return report(unsafe { device.free(self.raw, self.len_bytes, self.home.raw()) });
            }
            Keeper::Tensor { .. } | Keeper::Process => return,
            Keeper::Arena(arena) => arena,
        };
        let (device, raw, len_bytes) = (device.clone(), self.raw, self.len_bytes);
        if !*arena.mapped.lock().unwrap() {
            // SAFETY: the last owner, and no memory is mapped.
            report(unsafe { device.arena_free(raw, len_bytes) });
            return;
        }
        let name = arena.name.clone();
        let finish =
            move |reached: Result<Event>| match reached.and_then(|event| event.wait_for(WORK_TIMEOUT)) {
                // SAFETY: the last owner, and the work that used it is done.
                Ok(true) => report(unsafe {
                    device.arena_unmap(raw, len_bytes).and_then(|()| device.arena_free(raw, len_bytes))
                }),
                outcome => tracing::error!("arena {name:?} is leaked: work on it has not ended: {outcome:?}"),
            };
        match self.home.record() {
            Ok(event) if !event.is_complete().unwrap_or(true) => {
                // The last owner may be an operation on another stream's thread that the home stream waits for:
                // to wait here would stop both.
                let spawned =
                    thread::Builder::new().name("arena release".into()).spawn(move || finish(Ok(event)));
                report(spawned.map(drop).map_err(|source| Error::Stream {
                    device: self.home.device().id(),
                    message: format!("an arena is leaked: {source}"),
                }));
            }
            reached => finish(reached),
        }
    }
}

/// Device memory at a fixed address whose physical pages can be given back and taken again. Buffers and tensors
/// over it stay valid across that; using them in between is [`Error::Released`] (tensors: a fault).
#[derive(Clone, Debug)]
pub struct Arena {
    memory: Arc<Memory>,
}

impl Arena {
    /// Reserves addresses for at least `len_bytes` and maps memory there, zeroed. `name` appears in errors.
    pub fn new(name: impl Into<String>, stream: &Stream, len_bytes: usize) -> Result<Self> {
        let device = stream.device();
        let granularity = device.arena_granularity_bytes();
        // Where rounding up overflows, the length as asked for is more than any device has.
        let len_bytes = len_bytes.max(1).checked_next_multiple_of(granularity).unwrap_or(len_bytes);
        // SAFETY: `Memory` owns the reservation and releases it.
        let raw = unsafe { device.arena_reserve(len_bytes)? };
        let state = ArenaState { name: name.into(), mapped: Mutex::new(false) };
        let arena = Self {
            memory: Arc::new(Memory { home: stream.clone(), raw, len_bytes, keeper: Keeper::Arena(state) }),
        };
        arena.map_zeroed()?;
        Ok(arena)
    }

    /// Length in bytes, after rounding up.
    pub fn len_bytes(&self) -> usize {
        self.memory.len_bytes
    }

    /// A buffer over `range`, in bytes; its ends are multiples of the element size.
    pub fn buffer(&self, range: Range<usize>, dtype: DType) -> Buffer {
        assert!(range.start <= range.end && range.end <= self.memory.len_bytes, "{range:?}");
        let size = dtype.size_bytes();
        assert!(range.start.is_multiple_of(size) && range.end.is_multiple_of(size), "{range:?}");
        let len = range.len() / size;
        Buffer { memory: self.memory.clone(), offset_bytes: range.start, len, dtype }
    }

    /// Returns true while it has physical memory.
    pub fn is_mapped(&self) -> bool {
        *self.mapped()
    }

    /// Takes memory again (contents undefined), at the same address. A no-op if it is there.
    pub fn map(&self) -> Result<()> {
        let mut mapped = self.mapped();
        if !*mapped {
            // SAFETY: reserved by `new`, and not mapped.
            unsafe { self.memory.home.device().arena_map(self.memory.raw, self.memory.len_bytes)? };
            *mapped = true;
        }
        Ok(())
    }

    /// The same with zeros, in order with the home stream, if the memory was not there.
    pub fn map_zeroed(&self) -> Result<()> {
        let (home, is_fresh) = (&self.memory.home, !self.is_mapped());
        self.map()?;
        if is_fresh && !home.device().arena_is_zeroed() {
            self.buffer(0..self.len_bytes(), DType::U8).fill(0, home)?;
        }
        Ok(())
    }

    /// Gives the memory back once the work on the home stream is done. A no-op if it is not there. The caller
    /// has ordered the home stream after every other stream that used it.
    pub fn unmap(&self) -> Result<()> {
        let mut mapped = self.mapped();
        if *mapped {
            self.memory.home.synchronize()?;
            // SAFETY: it is mapped, and the work that used it is done.
            unsafe { self.memory.home.device().arena_unmap(self.memory.raw, self.memory.len_bytes)? };
            *mapped = false;
        }
        Ok(())
    }

    fn mapped(&self) -> MutexGuard<'_, bool> {
        let Keeper::Arena(arena) = &self.memory.keeper else { unreachable!("an arena's memory is its own") };
        arena.mapped.lock().unwrap()
    }
}

/// Page-locked host memory, for copies that overlap with compute. The host sees its bytes only when no copy is
/// in flight.
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Arc<dyn Device>,
    ptr: *mut u8,
    len_bytes: usize,
    in_flight: Option<Event>,
}

// SAFETY: the memory is owned, and every access of the host waits for `in_flight` first.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Zeroed memory of `len_bytes`, more than zero.
    pub fn new(device: &Arc<dyn Device>, len_bytes: usize) -> Result<Self> {
        assert!(len_bytes > 0, "pinned memory of no bytes");
        // SAFETY: released in `drop`.
        let ptr = unsafe { device.alloc_pinned(len_bytes)? };
        Ok(Self { device: device.clone(), ptr, len_bytes, in_flight: None })
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// First byte: for host work between copies, in the order of their streams.
    pub(crate) fn address(&self) -> *mut u8 {
        self.ptr
    }

    /// Starts a copy of all of `src` to `offset_bytes` and returns at once.
    pub fn copy_from(&mut self, offset_bytes: usize, src: &Buffer, stream: &Stream) -> Result<()> {
        self.assert_holds(offset_bytes, src);
        self.order(stream)?;
        // SAFETY: the range is ours; `in_flight` keeps the host away until the copy is done.
        unsafe { self.device.copy_d2h(self.ptr.add(offset_bytes), src.raw()?, stream.raw())? };
        self.hold(stream)
    }

    /// Starts a copy from `offset_bytes` into all of `dst` and returns at once.
    pub fn copy_to(&mut self, offset_bytes: usize, dst: &Buffer, stream: &Stream) -> Result<()> {
        self.assert_holds(offset_bytes, dst);
        self.order(stream)?;
        // SAFETY: as in `copy_from`.
        unsafe { self.device.copy_h2d(dst.raw()?, self.ptr.add(offset_bytes), stream.raw())? };
        self.hold(stream)
    }

    /// The bytes, once no copy is in flight.
    pub fn bytes(&mut self) -> Result<&[u8]> {
        self.settle()?;
        // SAFETY: zeroed at allocation, ours, and no copy is in flight.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr, self.len_bytes) })
    }

    /// The bytes to write, once no copy is in flight.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.settle()?;
        // SAFETY: as in `bytes`, and `self` is borrowed alone.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len_bytes) })
    }

    /// The first `len` elements as a tensor of the host, without a copy.
    ///
    /// # Safety
    /// The tensor is used in the order of a stream, between copies, and [`PinnedBuffer::hold`] or a copy follows its
    /// last use there.
    pub(crate) unsafe fn host_tensor(&self, len: usize, dtype: DType) -> Result<tch::Tensor> {
        assert!(len * dtype.size_bytes() <= self.len_bytes, "{len} x {dtype:?} of {} bytes", self.len_bytes);
        let (shape, strides, kind) = ([len as i64], [1], dtype.kind());
        // SAFETY: the range is ours, and the caller's promise keeps it until its last use.
        Ok(unsafe { tch::Tensor::f_from_blob(self.ptr, &shape, &strides, kind, tch::Device::Cpu)? })
    }

    /// Keeps the host away until the work that is on `stream` now is done, as after a copy.
    pub(crate) fn hold(&mut self, stream: &Stream) -> Result<()> {
        self.in_flight = Some(stream.record()?);
        Ok(())
    }

    /// Returns true if no work on a stream uses it.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.as_ref().is_none_or(|event| event.is_complete().unwrap_or(false))
    }

    fn assert_holds(&self, offset_bytes: usize, buffer: &Buffer) {
        let end = offset_bytes.checked_add(buffer.len_bytes());
        assert!(
            end.is_some_and(|end| end <= self.len_bytes),
            "{} bytes at {offset_bytes} end past a pinned buffer of {}",
            buffer.len_bytes(),
            self.len_bytes
        );
    }

    /// Copies follow one another even when they are on different streams.
    fn order(&self, stream: &Stream) -> Result<()> {
        self.in_flight.as_ref().map_or(Ok(()), |event| stream.wait(event))
    }

    fn settle(&mut self) -> Result<()> {
        if let Some(event) = &self.in_flight
            && !event.wait_for(WORK_TIMEOUT)?
        {
            let message = format!("a copy of pinned memory did not finish within {WORK_TIMEOUT:?}");
            return Err(Error::Stream { device: self.device.id(), message });
        }
        self.in_flight = None;
        Ok(())
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            // Memory that a device may still write is leaked rather than given to somebody else.
            tracing::error!("{} bytes of pinned memory are leaked: {error}", self.len_bytes);
            return;
        }
        // SAFETY: no copy is in flight.
        report(unsafe { self.device.free_pinned(self.ptr, self.len_bytes) });
    }
}
