//! Memory of the device, and of the host for its copies.
//!
//! An allocation is a buffer of the driver with memory behind it. Its *address* is a number of our own, larger than
//! any that a host has: the driver's own addresses are an option of it, and change when an arena's memory comes back,
//! which is a new buffer here, since drivers that run on processors map no memory into a buffer that is there already.
//! Kernels get addresses, and [`Memory::at`] finds the buffer again.

use std::{
    collections::BTreeMap,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use ash::vk;
use gpu_allocator::{
    AllocationError, AllocationSizes, AllocatorDebugSettings, MemoryLocation,
    vulkan::{Allocation, AllocationCreateDesc, AllocationScheme, Allocator, AllocatorCreateDesc},
};

use super::{context::Context, timeline::Point};
use crate::{Error, MemoryInfo, RawBuffer, RawSlice, Result, device::unsupported, safe::stream::report};

/// The first address that is given out. No host maps anything so high, so that one which touches it faults.
const FIRST_ADDRESS: u64 = 1 << 60;
/// Addresses are multiples of it, and so are the lengths of arenas.
pub(super) const GRANULARITY_BYTES: usize = 64 << 10;
/// Small buffers share memory of this size.
const SHARED_BYTES: u64 = 64 << 20;
/// Kernels read whole words of 16 bytes at most, also at the end of a buffer.
const PADDED_TO_BYTES: usize = 16;
/// Bytes of each value in [`Memory::pattern`].
const PATTERN_BYTES: u64 = 4;

/// A buffer of the driver with its memory.
pub(super) struct Block {
    pub(super) buffer: vk::Buffer,
    memory: Allocation,
    /// Requested length in bytes, which is counted.
    len: usize,
}

/// A range of a buffer of the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) buffer: vk::Buffer,
    pub(super) offset: u64,
    /// From `offset` to the end of what was allocated.
    pub(super) len: u64,
}

/// An allocation that has an address. One without a block is an arena whose memory is released.
struct Slot {
    len: usize,
    block: Option<Block>,
}

impl Slot {
    fn place(&self, offset: u64) -> Option<Place> {
        let len = (self.len as u64).checked_sub(offset)?;
        Some(Place { buffer: self.block.as_ref()?.buffer, offset, len })
    }
}

/// All memory of one device.
pub(super) struct Memory {
    slots: Mutex<BTreeMap<u64, Slot>>,
    next_address: AtomicU64,
    /// By the address at which the host sees it.
    pinned: Mutex<BTreeMap<usize, Block>>,
    /// Blocks that are released once their stream has reached a point.
    released: Mutex<Vec<(Point, Block)>>,
    /// Every byte value, [`PATTERN_BYTES`] times: fills begin and end at any byte, and the driver's own at words only.
    pattern: Option<Block>,
    allocated_bytes: AtomicUsize,
    pinned_bytes: AtomicUsize,
    // Before the device that it allocates from.
    allocator: Mutex<Allocator>,
    context: Arc<Context>,
}

impl Memory {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let allocator = Allocator::new(&AllocatorCreateDesc {
            instance: context.loader.instance.clone(),
            device: context.device.clone(),
            physical_device: context.physical.raw,
            debug_settings: AllocatorDebugSettings::default(),
            buffer_device_address: false,
            allocation_sizes: AllocationSizes::new(SHARED_BYTES, SHARED_BYTES),
        });
        let allocator = allocator.map_err(|source| refused(context, &source))?;
        let mut memory = Self {
            slots: Mutex::default(),
            next_address: AtomicU64::new(FIRST_ADDRESS),
            pinned: Mutex::default(),
            released: Mutex::default(),
            pattern: None,
            allocated_bytes: AtomicUsize::new(0),
            pinned_bytes: AtomicUsize::new(0),
            allocator: Mutex::new(allocator),
            context: context.clone(),
        };
        let (pattern, address) = memory.host_block(256 * PATTERN_BYTES as usize)?;
        for index in 0..256 * PATTERN_BYTES as usize {
            // SAFETY: in the fresh block, which nobody else knows of.
            unsafe { address.add(index).write((index / PATTERN_BYTES as usize) as u8) };
        }
        memory.pattern = Some(pattern);
        Ok(memory)
    }

    pub(super) fn info(&self) -> MemoryInfo {
        self.sweep();
        MemoryInfo {
            free_bytes: self.free_bytes(),
            total_bytes: self.context.physical.heap_bytes,
            allocated_bytes: self.allocated_bytes.load(Ordering::Relaxed),
            pinned_bytes: self.pinned_bytes.load(Ordering::Relaxed),
        }
    }

    /// Free bytes by the driver's report, or else those that this process has not allocated.
    fn free_bytes(&self) -> usize {
        let physical = &self.context.physical;
        if !physical.has_budget {
            let taken = usize::try_from(self.allocator.lock().unwrap().capacity()).unwrap_or(usize::MAX);
            return physical.heap_bytes.saturating_sub(taken);
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        let instance = &self.context.loader.instance;
        // SAFETY: the instance's device, and structs of our own.
        unsafe { instance.get_physical_device_memory_properties2(physical.raw, &mut properties) };
        let free = budget.heap_budget[physical.heap].saturating_sub(budget.heap_usage[physical.heap]);
        usize::try_from(free).unwrap_or(usize::MAX).min(physical.heap_bytes)
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        Error::OutOfMemory { device: self.context.id, requested_bytes, free_bytes: self.free_bytes() }
    }

    /// An error for a length that no buffer has, and for one that is more than a heap.
    fn fits(&self, len: usize, heap_bytes: usize) -> Result<()> {
        if len > heap_bytes {
            return Err(self.out_of_memory(len));
        }
        match self.context.physical.largest_bytes {
            largest if len > largest => unsupported(
                self.context.id,
                format!("one allocation of {len} bytes: the driver's largest has {largest}"),
            ),
            _ => Ok(()),
        }
    }

    /// A buffer with memory. What waits to be given back is waited for, if that may be what is missing.
    fn block(&self, len: usize, location: MemoryLocation, is_alone: bool) -> Result<Block> {
        self.sweep();
        match self.try_block(len, location, is_alone) {
            Err(Error::OutOfMemory { .. }) => {
                let points: Vec<Point> =
                    self.released.lock().unwrap().iter().map(|(point, _)| point.clone()).collect();
                points.iter().try_for_each(Point::wait)?;
                self.sweep();
                self.try_block(len, location, is_alone)
            }
            outcome => outcome,
        }
    }

    fn try_block(&self, len: usize, location: MemoryLocation, is_alone: bool) -> Result<Block> {
        let device = &self.context.device;
        let usage = vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST
            | vk::BufferUsageFlags::STORAGE_BUFFER;
        let description = vk::BufferCreateInfo::default()
            .size(len.next_multiple_of(PADDED_TO_BYTES) as u64)
            .usage(usage)
            .sharing_mode(vk::SharingMode::EXCLUSIVE);
        // SAFETY: the description lives through the call; given back below or by `destroy`.
        let buffer = unsafe { device.create_buffer(&description, None) }.map_err(|code| match code {
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
                self.out_of_memory(len)
            }
            code => self.context.error("vkCreateBuffer", code),
        })?;
        // SAFETY: the buffer is live.
        let requirements = unsafe { device.get_buffer_memory_requirements(buffer) };
        let scheme = match is_alone {
            true => AllocationScheme::DedicatedBuffer(buffer),
            false => AllocationScheme::GpuAllocatorManaged,
        };
        let allocated = self.allocator.lock().unwrap().allocate(&AllocationCreateDesc {
            name: "buffer",
            requirements,
            location,
            linear: true,
            allocation_scheme: scheme,
        });
        let memory = match allocated {
            Ok(memory) => memory,
            Err(source) => {
                // SAFETY: nobody else knows of it.
                unsafe { device.destroy_buffer(buffer, None) };
                return Err(if is_out_of_memory(&source) {
                    self.out_of_memory(len)
                } else {
                    refused(&self.context, &source)
                });
            }
        };
        // SAFETY: memory of the buffer's size and alignment, which is bound once.
        let bound = unsafe { device.bind_buffer_memory(buffer, memory.memory(), memory.offset()) };
        let block = Block { buffer, memory, len };
        if let Err(code) = bound {
            self.destroy(block);
            return Err(self.context.error("vkBindBufferMemory", code));
        }
        Ok(block)
    }

    /// A block that the host sees, zeroed, and where.
    fn host_block(&self, len: usize) -> Result<(Block, *mut u8)> {
        self.fits(len, self.context.physical.host_heap_bytes)?;
        // Cached, as the host reads it as well as it writes it.
        let block = self.block(len, MemoryLocation::GpuToCpu, false)?;
        let Some(address) = block.memory.mapped_ptr() else {
            self.destroy(block);
            return unsupported(self.context.id, "memory that the host sees");
        };
        let address = address.as_ptr().cast::<u8>();
        // SAFETY: the block is mapped there, and nobody else knows of it.
        unsafe { ptr::write_bytes(address, 0, len) };
        Ok((block, address))
    }

    /// Gives a block back that nothing uses.
    fn destroy(&self, block: Block) {
        // SAFETY: the caller's promise.
        unsafe { self.context.device.destroy_buffer(block.buffer, None) };
        let freed = self.allocator.lock().unwrap().free(block.memory);
        report(freed.map_err(|source| refused(&self.context, &source)));
    }

    /// Gives back what nothing uses any more.
    fn sweep(&self) {
        let mut released = self.released.lock().unwrap();
        // A device that is lost uses nothing.
        for (_, block) in released.extract_if(.., |(point, _)| point.is_reached().unwrap_or(true)) {
            self.release(block);
        }
    }

    /// Gives a block of the device's own memory back that nothing uses.
    pub(super) fn release(&self, block: Block) {
        self.allocated_bytes.fetch_sub(block.len, Ordering::Relaxed);
        self.destroy(block);
    }

    /// Gives a block back once `point` is reached.
    pub(super) fn release_after(&self, point: Point, block: Block) {
        self.released.lock().unwrap().push((point, block));
        self.sweep();
    }

    pub(super) fn alloc(&self, len: usize) -> Result<RawBuffer> {
        let block = self.scratch(len)?;
        Ok(self.place(Slot { len, block: Some(block) }))
    }

    /// Memory for the time of one launch, to be given back with [`Memory::release_after`].
    pub(super) fn scratch(&self, len: usize) -> Result<Block> {
        self.fits(len, self.context.physical.heap_bytes)?;
        let block = self.block(len, MemoryLocation::GpuOnly, false)?;
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(block)
    }

    /// Takes a buffer's address away; its block is to be given back with [`Memory::release_after`].
    pub(super) fn remove(&self, buffer: RawBuffer) -> Result<Block> {
        let slot = self.slots.lock().unwrap().remove(&buffer.0);
        slot.and_then(|slot| slot.block).ok_or_else(|| self.dead(buffer))
    }

    /// Addresses for an arena. They are ours to give, so that only what could never be mapped is refused.
    pub(super) fn reserve(&self, len: usize) -> Result<RawBuffer> {
        self.fits(len, self.context.physical.heap_bytes)?;
        Ok(self.place(Slot { len, block: None }))
    }

    /// Puts memory behind an arena.
    pub(super) fn map(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // Alone, so that to unmap it is to give it back to the driver.
        let block = self.block(len, MemoryLocation::GpuOnly, true)?;
        match self.slots.lock().unwrap().get_mut(&arena.0) {
            Some(slot) => slot.block = Some(block),
            None => {
                self.destroy(block);
                return Err(self.dead(arena));
            }
        }
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the memory behind an arena away, which nothing uses.
    pub(super) fn unmap(&self, arena: RawBuffer) -> Result<()> {
        let block = self.slots.lock().unwrap().get_mut(&arena.0).and_then(|slot| slot.block.take());
        let block = block.ok_or_else(|| self.dead(arena))?;
        self.release(block);
        Ok(())
    }

    /// Gives the addresses of an arena back, which has no memory.
    pub(super) fn forget(&self, arena: RawBuffer) -> Result<()> {
        self.slots.lock().unwrap().remove(&arena.0).map(drop).ok_or_else(|| self.dead(arena))
    }

    fn place(&self, slot: Slot) -> RawBuffer {
        // The address behind the last byte is nobody else's.
        let len = (slot.len + 1).next_multiple_of(GRANULARITY_BYTES) as u64;
        let address = self.next_address.fetch_add(len, Ordering::Relaxed);
        self.slots.lock().unwrap().insert(address, slot);
        RawBuffer(address)
    }

    pub(super) fn alloc_pinned(&self, len: usize) -> Result<*mut u8> {
        let (block, address) = self.host_block(len)?;
        self.pinned_bytes.fetch_add(len, Ordering::Relaxed);
        self.pinned.lock().unwrap().insert(address as usize, block);
        Ok(address)
    }

    /// Gives pinned memory back, which no copy uses.
    pub(super) fn free_pinned(&self, address: *mut u8) -> Result<()> {
        let block = self.pinned.lock().unwrap().remove(&(address as usize));
        let block = block.ok_or_else(|| self.not_pinned(address))?;
        self.pinned_bytes.fetch_sub(block.len, Ordering::Relaxed);
        self.destroy(block);
        Ok(())
    }

    /// The place of a slice.
    pub(super) fn of(&self, slice: RawSlice) -> Result<Place> {
        let slots = self.slots.lock().unwrap();
        let place = slots.get(&slice.buffer.0).and_then(|slot| slot.place(slice.offset as u64));
        place.filter(|place| place.len >= slice.len as u64).ok_or_else(|| self.dead(slice.buffer))
    }

    /// The place of an address.
    pub(super) fn at(&self, address: u64) -> Option<Place> {
        let slots = self.slots.lock().unwrap();
        let (base, slot) = slots.range(..=address).next_back()?;
        slot.place(address - base)
    }

    /// The place of pinned memory: `len` bytes at `address`.
    pub(super) fn of_pinned(&self, address: *const u8, len: usize) -> Result<Place> {
        let pinned = self.pinned.lock().unwrap();
        let found = pinned.range(..=address as usize).next_back();
        let within = found.map(|(base, block)| (address as usize - base, block));
        match within.filter(|(offset, block)| offset + len <= block.len) {
            Some((offset, block)) => {
                Ok(Place { buffer: block.buffer, offset: offset as u64, len: len as u64 })
            }
            None => Err(self.not_pinned(address)),
        }
    }

    /// [`PATTERN_BYTES`] bytes of this value.
    pub(super) fn pattern(&self, byte: u8) -> Place {
        let buffer = self.pattern.as_ref().expect("made by `new`").buffer;
        Place { buffer, offset: u64::from(byte) * PATTERN_BYTES, len: PATTERN_BYTES }
    }

    fn dead(&self, buffer: RawBuffer) -> Error {
        let message = format!("the memory at {:#x} is not there, or not so long", buffer.0);
        Error::Stream { device: self.context.id, message }
    }

    fn not_pinned(&self, address: *const u8) -> Error {
        let what = format!("copies of host memory at {address:?}, which is not pinned");
        Error::Unsupported { backend: self.context.id.backend, what }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Streams hold on to it: they are over, and so is their work.
        let slots = std::mem::take(self.slots.get_mut().unwrap());
        let released = std::mem::take(self.released.get_mut().unwrap());
        let pinned = std::mem::take(self.pinned.get_mut().unwrap());
        let blocks = slots.into_values().filter_map(|slot| slot.block);
        let blocks = blocks.chain(released.into_iter().map(|(_, block)| block));
        for block in blocks.chain(pinned.into_values()).chain(self.pattern.take()) {
            self.destroy(block);
        }
    }
}

fn is_out_of_memory(source: &AllocationError) -> bool {
    match source {
        AllocationError::OutOfMemory => true,
        // The allocator keeps the code of only one kind, and the name of the others.
        AllocationError::Internal(words) => words.contains("ERROR_OUT_OF_HOST_MEMORY"),
        _ => false,
    }
}

/// The allocator's own words, which have the name of the driver's code where it gave one.
fn refused(context: &Context, source: &AllocationError) -> Error {
    let code = vk::Result::ERROR_UNKNOWN.as_raw().into();
    Error::Driver { device: context.id, call: "vkAllocateMemory", code, message: source.to_string() }
}
