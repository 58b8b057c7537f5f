//! The functions of NCCL that are called. RCCL exports them under the same names, with the same numbers.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::OnceLock,
};

use crate::{
    BackendKind, DType, Error, ReduceOp, Rendezvous, Result,
    collective::communicator::{self, Handle},
    ffi::library::{self, Failed, table},
};

/// A stream of the vendor's.
pub(super) type StreamHandle = usize;

/// `ncclInProgress`: work continues in the background.
const IN_PROGRESS: c_int = 7;
/// `NCCL_SPLIT_NOCOLOR`
pub(super) const NO_COLOR: c_int = -1;
/// `ncclUint8`, for what is moved and not reduced.
pub(super) const BYTES: c_int = 1;

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` as of 2.17. Later libraries have more fields, and take this form by its `version`.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return once they are enqueued. Said aloud, since a variable can change what is not.
    pub(super) const BLOCKING: Self = Self {
        size: size_of::<Self>(),
        magic: 0xcafe_beef,
        version: 21_700,
        blocking: 1,
        cga_cluster_size: c_int::MIN, // undefined: the library's own choice
        min_ctas: c_int::MIN,
        max_ctas: c_int::MIN,
        net_name: ptr::null(),
        split_share: c_int::MIN,
    };
}

table! {
    /// Functions of every version since 2.18.
    Calls {
        version = "ncclGetVersion"(version: *mut c_int);
        unique_id = "ncclGetUniqueId"(id: *mut UniqueId);
        comm_init = "ncclCommInitRankConfig"(
            comm: *mut Handle, world_size: c_int, id: UniqueId, rank: c_int, config: *const Config
        );
        comm_split = "ncclCommSplit"(
            comm: Handle, color: c_int, key: c_int, child: *mut Handle, config: *const Config
        );
        comm_async_error = "ncclCommGetAsyncError"(comm: Handle, state: *mut c_int);
        comm_destroy = "ncclCommDestroy"(comm: Handle);
        comm_abort = "ncclCommAbort"(comm: Handle);
        group_start = "ncclGroupStart"();
        group_end = "ncclGroupEnd"();
        broadcast = "ncclBroadcast"(
            src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, root: c_int,
            comm: Handle, stream: StreamHandle
        );
        all_reduce = "ncclAllReduce"(
            src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, op: c_int,
            comm: Handle, stream: StreamHandle
        );
        all_gather = "ncclAllGather"(
            src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, comm: Handle, stream: StreamHandle
        );
        reduce_scatter = "ncclReduceScatter"(
            src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, op: c_int,
            comm: Handle, stream: StreamHandle
        );
        send = "ncclSend"(
            src: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: StreamHandle
        );
        recv = "ncclRecv"(
            dst: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: StreamHandle
        );
    }
}

type AllToAll = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, StreamHandle) -> c_int;

/// A loaded library.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) calls: Calls,
    /// Not in every version, and spelled in two ways.
    all_to_all: Option<(&'static str, AllToAll)>,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
}

/// A vendor's files of the library, and the library once it is open. A `static` in the vendor's folder.
#[derive(Debug)]
pub(crate) struct Installation {
    backend: BackendKind,
    files: &'static [&'static str],
    hint: &'static str,
    opened: OnceLock<Result<Library>>,
}

impl Installation {
    /// The first of `files` that loads, from [`crate::prefer_folder`]'s folders, libtorch's wheels or the system. `hint` tells the
    /// user how to get one.
    pub(crate) const fn new(
        backend: BackendKind,
        files: &'static [&'static str],
        hint: &'static str,
    ) -> Self {
        Self { backend, files, hint, opened: OnceLock::new() }
    }

    /// The library, opened once.
    pub(super) fn library(&self) -> Result<&Library> {
        self.opened.get_or_init(|| self.open()).as_ref().map_err(Clone::clone)
    }

    fn open(&self) -> Result<Library> {
        let library = library::open(self.backend, self.files, self.hint)?;
        // SAFETY: the signatures are those of nccl.h, and `open` never closes a library.
        unsafe { Library::load(library) }.map_err(|reason| Error::Unavailable {
            backend: self.backend,
            tried: self.files.iter().map(|file| (*file).to_owned()).collect(),
            reason,
        })
    }
}

impl Library {
    /// # Safety
    /// The rule of [`Calls::load`].
    unsafe fn load(library: &'static library::Library) -> Result<Self, String> {
        const ALL_TO_ALL: [&str; 2] = ["ncclAlltoAll", "ncclAllToAll"];
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Self {
                calls: Calls::load(library, 0)?,
                all_to_all: ALL_TO_ALL
                    .into_iter()
                    .find_map(|name| Some((name, library::symbol(library, name).ok()?))),
                error_string: library::symbol(library, "ncclGetErrorString")?,
                last_error: library::symbol(library, "ncclGetLastError")?,
            })
        }
    }

    /// The library's own all-to-all, or `None` where it has none.
    ///
    /// # Safety
    /// `src` and `dst` have `count` elements a rank on the communicator's device, which is live.
    pub(super) unsafe fn all_to_all(
        &self,
        src: *const c_void,
        dst: *mut c_void,
        count: usize,
        dtype: c_int,
        comm: Handle,
        stream: StreamHandle,
    ) -> Option<Result<(), Failed>> {
        let (name, call) = self.all_to_all?;
        // SAFETY: the caller's promise.
        Some(Failed::check(name, unsafe { call(src, dst, count, dtype, comm, stream) }))
    }
}

impl communicator::Library for Library {
    fn draw_id(&self) -> Result<Vec<u8>, Failed> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes 128 bytes of our own.
        unsafe { self.calls.unique_id(&mut id)? };
        Ok(id.0.to_vec())
    }

    fn connect(&self, id: &[u8], rendezvous: &Rendezvous) -> Result<Handle, Failed> {
        const CALL: &str = "ncclCommInitRankConfig";
        /// `ncclInvalidArgument`
        const INVALID_ARGUMENT: c_int = 4;
        let id = UniqueId(id.try_into().map_err(|_| Failed { call: CALL, code: INVALID_ARGUMENT })?);
        let (rank, world_size) = (rendezvous.rank as c_int, rendezvous.world_size as c_int);
        let mut handle: Handle = 0;
        // SAFETY: the arguments live through the call, and the handle is the caller's to end.
        unsafe { self.calls.comm_init(&mut handle, world_size, id, rank, &Config::BLOCKING)? };
        Ok(handle)
    }

    unsafe fn check(&self, comm: Handle) -> Result<(), Failed> {
        let mut state = 0;
        // SAFETY: the caller's promise, and a number of our own.
        unsafe { self.calls.comm_async_error(comm, &mut state)? };
        match state {
            0 | IN_PROGRESS => Ok(()),
            code => Err(Failed { call: "ncclCommGetAsyncError", code }),
        }
    }

    unsafe fn destroy(&self, comm: Handle) -> Result<(), Failed> {
        // SAFETY: the caller's promise.
        unsafe { self.calls.comm_destroy(comm) }
    }

    unsafe fn abort(&self, comm: Handle) -> Result<(), Failed> {
        // SAFETY: the caller's promise. A thread that is stuck in a call is let go by the flag that this sets first.
        unsafe { self.calls.comm_abort(comm) }
    }

    unsafe fn text(&self, code: c_int, comm: Handle) -> String {
        let read = |text: *const c_char| {
            // SAFETY: not null, so a string of the library's own.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().trim().to_owned()).filter(|text| !text.is_empty())
        };
        // SAFETY: any number has a string; the communicator is the caller's promise.
        let (words, detail) = unsafe { (read((self.error_string)(code)), read((self.last_error)(comm))) };
        let words = words.unwrap_or_else(|| "unknown".into());
        match detail {
            Some(detail) => format!("{words} (code {code}): {detail}"),
            None => format!("{words} (code {code})"),
        }
    }
}

/// `ncclDataType_t`
pub(super) const fn dtype_number(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => BYTES,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::Bf16 => 9,
    }
}

/// `ncclRedOp_t`
pub(super) const fn op_number(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, mem::offset_of};

    use super::*;
    use crate::{
        collective::communicator::Library as _,
        ffi::abi::{assert_says, fact},
        rocm,
    };

    #[test]
    fn the_table_says_what_the_headers_say() {
        let mut facts = Calls::signatures(0);
        facts.extend([
            fact("size", "ncclUniqueId", size_of::<UniqueId>()),
            fact("offset", "ncclConfig_t.magic", offset_of!(Config, magic)),
            fact("offset", "ncclConfig_t.version", offset_of!(Config, version)),
            fact("offset", "ncclConfig_t.blocking", offset_of!(Config, blocking)),
            fact("offset", "ncclConfig_t.netName", offset_of!(Config, net_name)),
            fact("offset", "ncclConfig_t.splitShare", offset_of!(Config, split_share)),
            fact("value", "ncclInProgress", IN_PROGRESS),
            fact("value", "NCCL_SPLIT_NOCOLOR", NO_COLOR),
            fact("value", "NCCL_CONFIG_UNDEF_INT", Config::BLOCKING.min_ctas),
        ]);
        let dtypes = [
            ("ncclUint8", DType::U8),
            ("ncclInt32", DType::I32),
            ("ncclInt64", DType::I64),
            ("ncclFloat16", DType::F16),
            ("ncclFloat32", DType::F32),
            ("ncclBfloat16", DType::Bf16),
        ];
        facts.extend(dtypes.map(|(name, dtype)| fact("value", name, dtype_number(dtype))));
        let ops = [
            ("ncclSum", ReduceOp::Sum),
            ("ncclAvg", ReduceOp::Avg),
            ("ncclMin", ReduceOp::Min),
            ("ncclMax", ReduceOp::Max),
        ];
        facts.extend(ops.map(|(name, op)| fact("value", name, op_number(op))));
        for release in ["nccl_2.28", "rccl_2.27"] {
            assert_says(release, &facts);
        }
        // Taken by value, and by the form of 2.17.
        assert_eq!((align_of::<UniqueId>(), size_of::<Config>(), Config::BLOCKING.size), (1, 48, 48));
    }

    /// AMD's own library, if it is here: it has all functions, and without a device it refuses to connect, with a reason.
    #[test]
    fn amds_library_loads_and_connects_nobody_without_a_device() {
        let library = match rocm::RCCL.library() {
            Ok(library) => library,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
                return;
            }
        };
        let mut version = 0;
        // SAFETY: a number of our own.
        unsafe { library.calls.version(&mut version) }.unwrap();
        assert!(version >= 21_800, "{version}");
        assert!(library.all_to_all.is_some());
        if crate::devices(BackendKind::ROCM).is_ok() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: there is a device");
            return;
        }
        let alone = Rendezvous::on_this_host(0, 1, 0, std::time::Duration::from_secs(5));
        let failed = library.draw_id().and_then(|id| library.connect(&id, &alone)).unwrap_err();
        // SAFETY: no communicator is one that the library knows.
        let words = unsafe { library.text(failed.code, 0) };
        let _ = writeln!(std::io::stderr(), "RCCL {version}: {} failed: {words}", failed.call);
        assert!(words.contains("(code "), "{words}");
    }
}
