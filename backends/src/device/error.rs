//! Errors of devices, collectives and libtorch, with the fields that identify them.

use std::time::Duration;

use super::{
    dtype::DType,
    kind::{BackendKind, DeviceId},
};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a device, a collective or the tensor library.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library or the device is not on this machine. This is expected, and callers may skip.
    #[error("backend {backend} is unavailable: {reason} (tried: {})", if tried.is_empty() { "nothing".into() } else { tried.join(", ") })]
    Unavailable {
        /// The backend that was asked for.
        backend: BackendKind,
        /// The files and calls that were tried, in order.
        tried: Vec<String>,
        /// The reason why the last of them failed.
        reason: String,
    },
    /// A call of the vendor's library failed. `call` is the vendor's own name, so that it can be searched for.
    #[error("{call} failed on {device}: {message} (code {code})")]
    Driver {
        /// The device.
        device: DeviceId,
        /// The vendor's name of the call.
        call: &'static str,
        /// The vendor's code.
        code: i64,
        /// The vendor's message.
        message: String,
    },
    /// The device has less memory than was asked for.
    #[error("out of memory on {device}: requested {requested_bytes} bytes, {free_bytes} free")]
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// Size of the allocation.
        requested_bytes: usize,
        /// Free memory at that moment.
        free_bytes: usize,
    },
    /// A collective failed; usually because another rank died. Look for that rank's own error first.
    #[error("{call} failed on rank {rank} of {world_size}: {message}")]
    Collective {
        /// The operation.
        call: String,
        /// This rank.
        rank: usize,
        /// Ranks in the communicator.
        world_size: usize,
        /// The library's message.
        message: String,
    },
    /// A collective passed its deadline. The communicator is aborted; `recent` lists its last operations.
    #[error(
        "{call} on rank {rank} of {world_size} did not finish within {timeout:?}{}; communicator {group:?} is aborted\n{recent}",
        .waits_for.as_ref().map_or(String::new(), |other| format!(": it waits for {other}"))
    )]
    Timeout {
        /// The operation.
        call: &'static str,
        /// Name of the process group.
        group: String,
        /// This rank.
        rank: usize,
        /// Ranks in the communicator.
        world_size: usize,
        /// The deadline that passed.
        timeout: Duration,
        /// The rank that it waits for, in words, if that is known.
        waits_for: Option<Box<str>>,
        /// The flight recorder's last entries, one a line.
        recent: String,
    },
    /// The communicator was aborted before or during this call.
    #[error("{call} on rank {rank}: the communicator was aborted")]
    Aborted {
        /// The operation.
        call: String,
        /// This rank.
        rank: usize,
    },
    /// The backend has no such feature, and does nothing else in its place.
    #[error("{backend} does not support {what}")]
    Unsupported {
        /// The backend.
        backend: BackendKind,
        /// The missing feature.
        what: String,
    },
    /// The ranks did not meet.
    #[error("rank {rank} of {world_size} found no rendezvous at {address}: {message}")]
    Rendezvous {
        /// `host:port` of the store.
        address: String,
        /// This rank.
        rank: usize,
        /// Ranks that were expected.
        world_size: usize,
        /// The store's message.
        message: String,
    },
    /// A rank that met the others did not connect to them.
    #[error(
        "rank {rank} of {world_size} did not connect to the others: {message}. It offers them {offered}: set \
         GLOO_SOCKET_IFNAME to the interface of their network if that is another"
    )]
    Unconnected {
        /// This rank.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// Address or interfaces at which the others are to reach it.
        offered: String,
        /// The failure, in words.
        message: String,
    },
    /// An arena was used while its physical memory was released.
    #[error("memory of arena {arena:?} was used while it is released")]
    Released {
        /// The arena's name.
        arena: String,
    },
    /// Work on a stream failed or panicked.
    #[error("work on a stream of {device} failed: {message}")]
    Stream {
        /// The device.
        device: DeviceId,
        /// The failure, in words.
        message: String,
    },
    /// The reduction is not defined for this element type.
    #[error("{op} is not defined for {dtype:?}")]
    NoReduction {
        /// The reduction.
        op: &'static str,
        /// The element type.
        dtype: DType,
    },
    /// libtorch raised an exception.
    #[error("libtorch: {0}")]
    Torch(String),
}

impl Error {
    /// Returns true if another rank is the likely cause, so that a launcher can report that rank first.
    pub fn is_from_peer(&self) -> bool {
        matches!(
            self,
            Self::Collective { .. }
                | Self::Timeout { .. }
                | Self::Aborted { .. }
                | Self::Rendezvous { .. }
                | Self::Unconnected { .. }
        )
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(without_backtrace(&error.to_string()).to_owned())
    }
}

/// Strips the C++ backtrace, dozens of lines, from one of libtorch's messages.
pub fn without_backtrace(message: &str) -> &str {
    let begins = ["\nException raised from", "\nframe #0: "].map(|begin| message.find(begin));
    let end = begins.into_iter().flatten().min().unwrap_or(message.len());
    message[..end].trim_end()
}
