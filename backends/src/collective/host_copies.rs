//! Buffers as tensors that the host can touch, for collectives that go through it.

use std::{sync::Mutex, thread};

use tch::Tensor;

use crate::{Buffer, Device, PinnedBuffer, Result, Stream};

/// A buffer, and the use that a collective makes of it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand<'a> {
    /// Reads all of it.
    Read(&'a Buffer),
    /// Writes all of it.
    Write(&'a Buffer),
    /// Reads and writes it.
    Update(&'a Buffer),
}

impl<'a> Operand<'a> {
    pub(crate) fn buffer(self) -> &'a Buffer {
        match self {
            Self::Read(buffer) | Self::Write(buffer) | Self::Update(buffer) => buffer,
        }
    }
}

/// The pinned memory of one communicator, kept for its next operations.
#[derive(Debug, Default)]
pub(crate) struct HostCopies {
    memory: Mutex<Vec<PinnedBuffer>>,
}

/// A buffer as the host sees it, in the order of a stream.
#[derive(Debug)]
pub(crate) struct HostCopy {
    /// All elements, for functions of the host on that stream.
    pub(crate) tensor: Tensor,
    /// The copy, if the host does not see the device's own memory.
    memory: Option<PinnedBuffer>,
    /// The buffer that gets the contents in the end.
    to: Option<Buffer>,
}

impl HostCopies {
    /// Makes the host see `operand` in what is enqueued on `stream` next: the memory itself, or else a copy.
    pub(crate) fn bring(&self, operand: Operand<'_>, stream: &Stream) -> Result<HostCopy> {
        let buffer = operand.buffer();
        let shape = [buffer.len() as i64];
        if host_sees(&**stream.device()) {
            return Ok(HostCopy { tensor: buffer.tensor(&shape)?, memory: None, to: None });
        }
        if buffer.is_empty() {
            let tensor = Tensor::f_zeros(shape, (buffer.dtype().kind(), tch::Device::Cpu))?;
            return Ok(HostCopy { tensor, memory: None, to: None });
        }
        let mut memory = self.take(buffer.len_bytes(), stream)?;
        if !matches!(operand, Operand::Write(_)) {
            memory.copy_from(0, buffer, stream)?;
        }
        // SAFETY: `give_back` keeps the memory until the stream has passed all that uses the tensor.
        let tensor = unsafe { memory.host_tensor(buffer.len(), buffer.dtype())? };
        let to = if matches!(operand, Operand::Read(_)) { None } else { Some(buffer.clone()) };
        Ok(HostCopy { tensor, memory: Some(memory), to })
    }

    /// Ends what [`HostCopies::bring`] began, once the work between is enqueued: the buffer gets what was written.
    pub(crate) fn give_back(&self, copy: HostCopy, stream: &Stream) -> Result<()> {
        let Some(mut memory) = copy.memory else { return Ok(()) };
        let outcome = match &copy.to {
            Some(buffer) => memory.copy_to(0, buffer, stream),
            None => memory.hold(stream),
        };
        self.memory.lock().unwrap().push(memory);
        outcome
    }

    /// Memory that nothing uses, of at least this length.
    fn take(&self, len_bytes: usize, stream: &Stream) -> Result<PinnedBuffer> {
        let mut kept = self.memory.lock().unwrap();
        let fits = |memory: &PinnedBuffer| memory.len_bytes() >= len_bytes && memory.is_idle();
        match kept.iter().position(fits) {
            Some(index) => Ok(kept.swap_remove(index)),
            // In powers of two, so that operations of many lengths share it.
            None => PinnedBuffer::new(stream.device(), len_bytes.next_power_of_two()),
        }
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        let memory = std::mem::take(self.memory.get_mut().unwrap());
        if !memory.iter().all(PinnedBuffer::is_idle) {
            // A communicator may go in the midst of its work, and nobody here is to wait for other ranks.
            let released = thread::Builder::new().name("pinned release".into()).spawn(move || drop(memory));
            if let Err(error) = released {
                tracing::error!("pinned memory is leaked: no thread to wait for it: {error}");
            }
        }
    }
}

fn host_sees(device: &dyn Device) -> bool {
    device.torch_device().is_some_and(|torch| torch.tch() == tch::Device::Cpu)
}
