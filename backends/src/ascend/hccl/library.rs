//! The functions of HCCL that are called.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use crate::{
    BackendKind, Error, Rendezvous, Result,
    collective::communicator::{self, Handle},
    ffi::library::{self, Failed, table},
};

const FILES: [&str; 3] = [
    "libhccl.so",
    "/usr/local/Ascend/ascend-toolkit/latest/lib64/libhccl.so",
    "/usr/local/Ascend/cann/lib64/libhccl.so",
];
const HINT: &str = "it comes with CANN: install that and source its set_env.sh";

/// `HCCL_DATA_TYPE_UINT8`: everything is moved as bytes, and nothing is reduced by the library.
pub(super) const BYTES: c_int = 7;
/// `HCCL_E_PARA`
const PARAMETER: c_int = 1;
/// `HCCL_E_AGAIN`: another call is in the library.
const AGAIN: c_int = 20;
/// Time for which the end of a communicator is retried.
const AGAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// The library gives up this much later than the deadline of the group above, which then names the operation first.
const GRACE: Duration = Duration::from_secs(10);

/// `HcclRootInfo`: where the first rank listens. Passed by its address, and 4108 bytes long.
#[repr(C)]
pub(crate) struct RootInfo([u8; 4108]);

/// `HcclCommConfig`. The header's function that fills it is inline, and so not in the library.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    reserved: u64,
    buffer_mib: u32,
    deterministic: u32,
    name: [u8; 128],
    udi: [u8; 128],
    op_expansion_mode: u32,
    rdma_traffic_class: u32,
    rdma_service_level: u32,
    world_rank: u32,
    job: u64,
    graph_zero_copy: u8,
    exec_timeout_s: i32,
    algorithm: [u8; 1600],
    retry_enable: [u8; 50],
    retry_params: [u8; 128],
    buffer_name: [u8; 128],
    qos: u32,
}

impl Config {
    /// Everything as the library likes it, but for how long an operation may take.
    fn new(timeout: Duration) -> Self {
        const NOT_SET: u32 = u32::MAX;
        Self {
            size: size_of::<Self>(),
            magic: 0xf0f0_f0f0,
            version: 10,
            reserved: 0,
            buffer_mib: NOT_SET,
            deterministic: NOT_SET,
            name: [0; 128],
            udi: [0; 128],
            op_expansion_mode: 0,
            rdma_traffic_class: NOT_SET,
            rdma_service_level: NOT_SET,
            world_rank: 0,
            job: 0,
            graph_zero_copy: 0,
            exec_timeout_s: i32::try_from((timeout + GRACE).as_secs()).unwrap_or(i32::MAX),
            algorithm: [0; 1600],
            retry_enable: [0; 50],
            retry_params: [0; 128],
            buffer_name: [0; 128],
            qos: NOT_SET,
        }
    }
}

/// `HcclSendRecvItem`
#[repr(C)]
pub(crate) struct Item {
    kind: c_int,
    at: *mut c_void,
    count: u64,
    dtype: c_int,
    peer: u32,
}

impl Item {
    pub(super) fn send(at: *mut c_void, bytes: usize, to: usize) -> Self {
        Self { kind: 0, at, count: bytes as u64, dtype: BYTES, peer: to as u32 }
    }

    pub(super) fn receive(at: *mut c_void, bytes: usize, from: usize) -> Self {
        Self { kind: 1, at, count: bytes as u64, dtype: BYTES, peer: from as u32 }
    }
}

table! {
    /// The library adds nothing up, so its reductions are not here; see the module's description.
    Calls {
        root_info = "HcclGetRootInfo"(info: *mut RootInfo);
        comm_init = "HcclCommInitRootInfoConfig"(
            world_size: u32, info: *const RootInfo, rank: u32, config: *const Config, comm: *mut Handle
        );
        comm_destroy = "HcclCommDestroy"(comm: Handle);
        comm_async_error = "HcclGetCommAsyncError"(comm: Handle, state: *mut c_int);
        broadcast = "HcclBroadcast"(
            at: *mut c_void, count: u64, dtype: c_int, root: u32, comm: Handle, stream: Handle
        );
        all_gather = "HcclAllGather"(
            src: *mut c_void, dst: *mut c_void, count: u64, dtype: c_int, comm: Handle, stream: Handle
        );
        all_to_all = "HcclAlltoAll"(
            src: *const c_void, send_count: u64, send_dtype: c_int,
            dst: *const c_void, receive_count: u64, receive_dtype: c_int, comm: Handle, stream: Handle
        );
        batch_send_receive = "HcclBatchSendRecv"(items: *mut Item, count: u32, comm: Handle, stream: Handle);
    }
}

/// A loaded library.
#[derive(Debug)]
pub(crate) struct Library {
    pub(super) calls: Calls,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Library {
    /// The library, opened once.
    pub(super) fn get() -> Result<&'static Self> {
        static OPENED: OnceLock<Result<Library>> = OnceLock::new();
        OPENED.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        let library = library::open(BackendKind::ASCEND, &FILES, HINT)?;
        // SAFETY: the signatures are those of hccl.h, and `open` never closes a library.
        let loaded = unsafe {
            Calls::load(library, 0).and_then(|calls| {
                Ok(Self { calls, error_string: library::symbol(library, "HcclGetErrorString")? })
            })
        };
        loaded.map_err(|reason| Error::Unavailable {
            backend: BackendKind::ASCEND,
            tried: FILES.map(str::to_owned).to_vec(),
            reason,
        })
    }
}

impl communicator::Library for Library {
    fn draw_id(&self) -> Result<Vec<u8>, Failed> {
        let mut info = RootInfo([0; 4108]);
        // SAFETY: writes as many bytes of our own.
        unsafe { self.calls.root_info(&mut info)? };
        Ok(info.0.to_vec())
    }

    fn connect(&self, id: &[u8], rendezvous: &Rendezvous) -> Result<Handle, Failed> {
        const CALL: &str = "HcclCommInitRootInfoConfig";
        let info = RootInfo(id.try_into().map_err(|_| Failed { call: CALL, code: PARAMETER })?);
        let (rank, world_size) = (rendezvous.rank as u32, rendezvous.world_size as u32);
        let config = Config::new(rendezvous.timeout);
        let mut comm: Handle = 0;
        // SAFETY: the arguments live through the call, and the handle is the caller's to end.
        unsafe { self.calls.comm_init(world_size, &info, rank, &config, &mut comm)? };
        Ok(comm)
    }

    unsafe fn check(&self, comm: Handle) -> Result<(), Failed> {
        let mut state = 0;
        // SAFETY: the caller's promise, and a number of our own.
        unsafe { self.calls.comm_async_error(comm, &mut state)? };
        Failed::check("HcclGetCommAsyncError", state)
    }

    unsafe fn destroy(&self, comm: Handle) -> Result<(), Failed> {
        // SAFETY: the caller's promise.
        unsafe { self.calls.comm_destroy(comm) }
    }

    /// There is no abort. To destroy a communicator ends the operation that runs, as its documentation has it, unless
    /// somebody is inside; where it does not, the time-out in [`Config`] does. Until then the process does not end
    /// by itself.
    unsafe fn abort(&self, comm: Handle) -> Result<(), Failed> {
        let start = Instant::now();
        loop {
            // SAFETY: the caller's promise; a refusal leaves the handle as it was.
            match unsafe { self.calls.comm_destroy(comm) } {
                Err(Failed { code: AGAIN, .. }) if start.elapsed() < AGAIN_TIMEOUT => {
                    thread::sleep(Duration::from_millis(10));
                }
                outcome => return outcome,
            }
        }
    }

    unsafe fn text(&self, code: c_int, _comm: Handle) -> String {
        // SAFETY: any number has a string, or null.
        let text = unsafe { (self.error_string)(code) };
        // SAFETY: not null, so a string of the library's own.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy());
        format!("{} (code {code})", text.unwrap_or_else(|| "unknown".into()))
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::ffi::abi::{assert_says, fact};

    #[test]
    fn the_table_says_what_the_headers_say() {
        let mut facts = Calls::signatures(0);
        let config = Config::new(Duration::from_secs(60));
        facts.extend([
            fact("size", "HcclRootInfo", size_of::<RootInfo>()),
            fact("size", "HcclSendRecvItem", size_of::<Item>()),
            fact("offset", "HcclCommConfig.hcclBufferSize", offset_of!(Config, buffer_mib)),
            fact("offset", "HcclCommConfig.hcclDeterministic", offset_of!(Config, deterministic)),
            fact("offset", "HcclCommConfig.hcclOpExpansionMode", offset_of!(Config, op_expansion_mode)),
            fact("offset", "HcclCommConfig.hcclRdmaTrafficClass", offset_of!(Config, rdma_traffic_class)),
            fact("offset", "HcclCommConfig.hcclRdmaServiceLevel", offset_of!(Config, rdma_service_level)),
            fact("offset", "HcclCommConfig.hcclJobID", offset_of!(Config, job)),
            fact("offset", "HcclCommConfig.hcclExecTimeOut", offset_of!(Config, exec_timeout_s)),
            fact("offset", "HcclCommConfig.hcclAlgo", offset_of!(Config, algorithm)),
            fact("offset", "HcclCommConfig.hcclBufferName", offset_of!(Config, buffer_name)),
            fact("offset", "HcclCommConfig.hcclQos", offset_of!(Config, qos)),
            fact("value", "HCCL_COMM_CONFIG_INFO_BYTES", offset_of!(Config, buffer_mib)),
            fact("value", "HCCL_COMM_CONFIG_MAGIC_WORD", config.magic),
            fact("value", "HCCL_COMM_CONFIG_VERSION", config.version),
            fact("value", "HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET", config.buffer_mib),
            fact("value", "HCCL_COMM_DETERMINISTIC_CONFIG_NOT_SET", config.deterministic),
            fact("value", "HCCL_COMM_QOS_CONFIG_NOT_SET", config.qos),
            fact("offset", "HcclSendRecvItem.buf", offset_of!(Item, at)),
            fact("offset", "HcclSendRecvItem.count", offset_of!(Item, count)),
            fact("offset", "HcclSendRecvItem.dataType", offset_of!(Item, dtype)),
            fact("offset", "HcclSendRecvItem.remoteRank", offset_of!(Item, peer)),
            fact("value", "HCCL_DATA_TYPE_UINT8", BYTES),
            fact("value", "HCCL_E_PARA", PARAMETER),
            fact("value", "HCCL_E_AGAIN", AGAIN),
            fact("value", "HCCL_SEND", Item::send(std::ptr::null_mut(), 0, 0).kind),
            fact("value", "HCCL_RECV", Item::receive(std::ptr::null_mut(), 0, 0).kind),
        ]);
        for release in ["cann_2.11", "cann_2.14"] {
            assert_says(release, &facts);
        }
        // Later releases append to it, and know it by its size.
        assert_says("cann_2.11", &[fact("size", "HcclCommConfig", size_of::<Config>())]);
    }
}
