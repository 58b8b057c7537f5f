//! Copies, and their host memory. The library's asynchronous copy requires that both ends are aligned to 64 bytes, and host
//! memory that it has allocated; otherwise it misbehaves without an error. A thread of ours makes all other copies while the
//! stream waits for it: the library's own callbacks must not call the library.

use std::{
    ffi::c_void,
    sync::{Arc, Mutex, mpsc},
    thread,
};

use super::{
    acl::{Direction, Handle},
    context::Context,
};
use crate::{
    Error, Result,
    device::HostFn,
    host::{memory, pinned_ranges::PinnedRanges},
};

/// Alignment, in bytes, of both ends of an asynchronous copy.
const ALIGNMENT: usize = 64;

/// From where to where, and how many bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) len: usize,
    pub(super) direction: Direction,
}

impl Copy {
    pub(super) fn is_aligned(&self) -> bool {
        (self.to as usize | self.from as usize).is_multiple_of(ALIGNMENT)
    }

    /// Enqueues an aligned copy.
    ///
    /// # Safety
    /// Both ranges live until the work is done.
    pub(super) unsafe fn enqueue(&self, context: &Context, stream: Handle) -> Result<()> {
        let (to, from) = (self.to as *mut c_void, self.from as *const c_void);
        // SAFETY: the caller's promise.
        context
            .run(|acl| unsafe { acl.copy_async(to, self.len, from, self.len, self.direction as i32, stream) })
    }
}

/// The thread for copies that are not aligned, started for the first of them.
#[derive(Debug, Default)]
pub(super) struct Copier(Mutex<Option<mpsc::Sender<Job>>>);

/// A copy, and where to say how it went.
type Job = (Copy, mpsc::Sender<Result<()>>);

impl Copier {
    /// Host work that does `copy` and waits for it.
    ///
    /// # Safety
    /// Both ranges live until the work is done.
    pub(super) unsafe fn work(&self, context: &Arc<Context>, copy: Copy) -> Result<HostFn> {
        let mut queue = self.0.lock().unwrap();
        let queue = match &*queue {
            Some(queue) => queue.clone(),
            None => queue.insert(start(context.clone())?).clone(),
        };
        Ok(Box::new(move || {
            let (sender, done) = mpsc::channel();
            queue.send((copy, sender)).map_err(|_| "the thread that copies is gone".to_owned())?;
            let outcome = done.recv().map_err(|_| "the thread that copies is gone".to_owned())?;
            outcome.map_err(|error| error.to_string())
        }))
    }
}

fn start(context: Arc<Context>) -> Result<mpsc::Sender<Job>> {
    let (queue, copies) = mpsc::channel::<Job>();
    let device = context.id;
    let work = move || {
        for (copy, done) in copies {
            let (to, from, len) = (copy.to as *mut c_void, copy.from as *const c_void, copy.len);
            // SAFETY: `Copier::work` was promised that both ranges live until this is done.
            let outcome = context.run(|acl| unsafe { acl.copy(to, len, from, len, copy.direction as i32) });
            let _ = done.send(outcome); // whoever waited is there
        }
    };
    let spawned = thread::Builder::new().name("npu copies".into()).spawn(work);
    spawned.map_err(|error| Error::Stream { device, message: format!("no thread for copies: {error}") })?;
    Ok(queue)
}

/// The pinned memory of one device.
#[derive(Debug, Default)]
pub(super) struct Pinned(PinnedRanges);

impl Pinned {
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// `len` zeroed bytes.
    pub(super) fn alloc(&self, context: &Context, len: usize) -> Result<*mut u8> {
        let _entered = context.enter()?;
        let (free_bytes, total_bytes) = memory::host().unwrap_or((0, usize::MAX));
        if len > total_bytes {
            return Err(Error::OutOfMemory { device: context.id, requested_bytes: len, free_bytes });
        }
        let mut address = std::ptr::null_mut();
        // SAFETY: an address of our own.
        unsafe { context.acl.malloc_host(&mut address, len) }
            .map_err(|failed| context.memory_error(failed, len))?;
        // SAFETY: fresh memory of this length.
        unsafe { address.cast::<u8>().write_bytes(0, len) };
        self.0.add(address as usize, len);
        Ok(address.cast())
    }

    /// # Safety
    /// `address` came from `alloc`, and no copy uses it.
    pub(super) unsafe fn free(&self, context: &Context, address: *mut u8) -> Result<()> {
        self.0.remove(address as usize);
        // SAFETY: the caller's promise.
        context.run(|acl| unsafe { acl.free_host(address.cast()) })
    }

    /// An error unless the range lies in one allocation: the library would copy it, and say nothing.
    pub(super) fn check(&self, context: &Context, address: u64, len: usize) -> Result<()> {
        self.0.offset_of(context.id, address as usize, len).map(drop)
    }
}
