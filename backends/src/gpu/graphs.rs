//! Recorded work, where the driver has it: looked for when it is first wanted.

use std::ffi::{c_int, c_ulonglong};

use super::{
    context::Context,
    driver::{Handle, NON_BLOCKING},
};
use crate::{
    RawGraph, RawStream, Result,
    ffi::library::{self, table},
};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: other streams go on as if nothing were recorded.
const RELAXED: c_int = 2;

table! {
    /// The functions, by NVIDIA's names and by AMD's.
    Calls {
        capture_begin = "cuStreamBeginCapture_v2" | "hipStreamBeginCapture"(stream: Handle, mode: c_int);
        capture_end = "cuStreamEndCapture" | "hipStreamEndCapture"(stream: Handle, graph: *mut Handle);
        graph_destroy = "cuGraphDestroy" | "hipGraphDestroy"(graph: Handle);
        graph_instantiate = "cuGraphInstantiateWithFlags" | "hipGraphInstantiateWithFlags"(
            executable: *mut Handle, graph: Handle, flags: c_ulonglong
        );
        graph_launch = "cuGraphLaunch" | "hipGraphLaunch"(executable: Handle, stream: Handle);
        executable_destroy = "cuGraphExecDestroy" | "hipGraphExecDestroy"(executable: Handle);
    }
}

/// A device's recordings.
#[derive(Debug)]
pub(super) struct Graphs {
    calls: Calls,
    /// The one stream that is recorded on.
    stream: Handle,
}

impl Graphs {
    pub(super) fn open(context: &Context) -> Result<Self> {
        let vendor = context.driver.vendor;
        let library = library::open(vendor.backend, vendor.driver_files, vendor.driver_hint)?;
        // SAFETY: the signatures are those of the vendor's header, and `open` never closes a library.
        let calls = unsafe { Calls::load(library, vendor.column) };
        let calls = calls.map_err(|reason| vendor.unavailable(vendor.driver_files, reason))?;
        let mut stream = 0;
        // SAFETY: a number of our own; the stream is given back in `close`.
        context.run(|driver| unsafe { driver.stream_create(&mut stream, NON_BLOCKING) })?;
        Ok(Self { calls, stream })
    }

    pub(super) fn stream(&self) -> RawStream {
        RawStream(self.stream as u64)
    }

    /// # Safety
    /// Nothing is pending on the stream, and the recording is ended.
    pub(super) unsafe fn begin(&self, context: &Context) -> Result<()> {
        // SAFETY: the caller's promise.
        context.run(|_| unsafe { self.calls.capture_begin(self.stream, RELAXED) })
    }

    /// # Safety
    /// Begun, and the graph is released once.
    pub(super) unsafe fn end(&self, context: &Context) -> Result<RawGraph> {
        let (mut graph, mut executable) = (0, 0);
        // SAFETY: the caller's promise, and numbers of our own; what was recorded is not needed beside its executable.
        context.run(|_| unsafe {
            self.calls.capture_end(self.stream, &mut graph)?;
            let instantiated = self.calls.graph_instantiate(&mut executable, graph, 0);
            instantiated.and(self.calls.graph_destroy(graph))
        })?;
        Ok(RawGraph(executable as u64))
    }

    /// # Safety
    /// Both are live, and so is the memory that the work uses, until it is done.
    pub(super) unsafe fn launch(&self, context: &Context, graph: RawGraph, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        context.run(|_| unsafe { self.calls.graph_launch(graph.0 as Handle, stream.0 as Handle) })
    }

    /// # Safety
    /// The graph came from `end` and is not used again.
    pub(super) unsafe fn destroy(&self, context: &Context, graph: RawGraph) -> Result<()> {
        // SAFETY: the caller's promise.
        context.run(|_| unsafe { self.calls.executable_destroy(graph.0 as Handle) })
    }

    pub(super) fn close(self, context: &Context) -> Result<()> {
        // SAFETY: made by `open`, and graphs hold the device.
        context.run(|driver| unsafe { driver.stream_destroy(self.stream) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::abi::{assert_says, fact};

    #[test]
    fn the_table_says_what_the_headers_say() {
        for (release, column, relaxed) in [
            ("cuda_13.0", 0, "CU_STREAM_CAPTURE_MODE_RELAXED"),
            ("hip_6.4", 1, "hipStreamCaptureModeRelaxed"),
            ("hip_7.2", 1, "hipStreamCaptureModeRelaxed"),
        ] {
            let mut facts = Calls::signatures(column);
            facts.push(fact("value", relaxed, RELAXED));
            assert_says(release, &facts);
        }
    }
}
