//! [`Acl`]: the functions of Huawei's runtime library that we call, and the structs and numbers that they take.
//! `crate::ffi::abi` compares them with the vendor's headers, and their rules are those of its documentation (CANN 8.5).

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::OnceLock,
};

use crate::{
    BackendKind, DeviceId, Error, Result,
    ffi::library::{self, Failed, Library, table},
    host::work::HostCallback,
};

/// A context, stream, event or physical memory.
pub(super) type Handle = usize;

/// The library by its bare name, and where its installer puts it.
pub(super) const FILES: [&str; 3] = [
    "libascendcl.so",
    "/usr/local/Ascend/ascend-toolkit/latest/lib64/libascendcl.so",
    "/usr/local/Ascend/cann/lib64/libascendcl.so",
];
const HINT: &str = "it comes with CANN: install that and source its set_env.sh";

/// `ACL_ERROR_REPEAT_INITIALIZE`: libtorch, or other code of this process, was first.
const REPEAT_INITIALIZE: c_int = 100_002;
/// `ACL_ERROR_BAD_ALLOC`, `ACL_ERROR_STORAGE_OVER_LIMIT` and `ACL_ERROR_RT_MEMORY_ALLOCATION`.
const OUT_OF_MEMORY: [c_int; 3] = [200_000, 300_000, 207_001];
/// `ACL_MEM_MALLOC_HUGE_FIRST`
pub(super) const HUGE_FIRST: c_int = 0;
/// `ACL_HBM_MEM`
pub(super) const HBM: c_int = 1;
/// `ACL_HBM_MEM_HUGE`
const HBM_HUGE: c_int = 4;
/// `ACL_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: c_int = 1;
/// `ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED`
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;
/// Reserved addresses are for huge pages.
pub(super) const HUGE_PAGES: u64 = 1;
/// `ACL_EVENT_SYNC`: streams can wait for it.
pub(super) const EVENT_SYNC: u32 = 1;
/// `ACL_EVENT_TIME_LINE`: it knows when it was reached.
pub(super) const EVENT_TIME_LINE: u32 = 8;
/// `ACL_EVENT_RECORDED_STATUS_COMPLETE`. The statuses of streams and of waits are the other way round.
pub(super) const EVENT_COMPLETE: c_int = 1;
/// `ACL_DEV_ATTR_AICORE_CORE_NUM`
pub(super) const AI_CORES: c_int = 101;
/// `ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE`
pub(super) const TOTAL_MEMORY: c_int = 301;

/// `aclrtMemcpyKind`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Direction {
    ToDevice = 1,
    ToHost = 2,
    WithinDevice = 3,
}

/// `aclrtPhysicalMemProp`
#[repr(C)]
pub(crate) struct PhysicalProperties {
    handle_type: c_int,
    allocation_type: c_int,
    attribute: c_int,
    device: u32,
    location: c_int,
    reserved: u64,
}

impl PhysicalProperties {
    pub(super) fn on(device: i32) -> Self {
        Self {
            handle_type: 0,     // not to be shared with other processes
            allocation_type: 0, // stays where it is
            attribute: HBM_HUGE,
            device: device as u32,
            location: LOCATION_DEVICE,
            reserved: 0,
        }
    }
}

table! {
    /// Functions of CANN 8.5, the oldest release that libtorch's version is built for.
    Calls {
        init = "aclInit"(config: *const c_char);
        version = "aclrtGetVersion"(major: *mut i32, minor: *mut i32, patch: *mut i32);
        device_count = "aclrtGetDeviceCount"(count: *mut u32);
        device_info = "aclrtGetDeviceInfo"(device: u32, attribute: c_int, value: *mut i64);
        device_set = "aclrtSetDevice"(device: i32);
        context_current = "aclrtGetCurrentContext"(context: *mut Handle);
        context_set = "aclrtSetCurrentContext"(context: Handle);
        device_synchronize = "aclrtSynchronizeDeviceWithTimeout"(timeout_ms: i32);
        memory_info = "aclrtGetMemInfo"(attribute: c_int, free: *mut usize, total: *mut usize);
        malloc = "aclrtMalloc"(address: *mut *mut c_void, len: usize, policy: c_int);
        free = "aclrtFree"(address: *mut c_void);
        malloc_host = "aclrtMallocHost"(address: *mut *mut c_void, len: usize);
        free_host = "aclrtFreeHost"(address: *mut c_void);
        address_reserve = "aclrtReserveMemAddress"(
            address: *mut *mut c_void, len: usize, alignment: usize, wish: *mut c_void, flags: u64
        );
        address_release = "aclrtReleaseMemAddress"(address: *mut c_void);
        physical_granularity = "aclrtMemGetAllocationGranularity"(
            properties: *mut PhysicalProperties, option: c_int, bytes: *mut usize
        );
        physical_malloc = "aclrtMallocPhysical"(
            physical: *mut Handle, len: usize, properties: *const PhysicalProperties, flags: u64
        );
        physical_free = "aclrtFreePhysical"(physical: Handle);
        map = "aclrtMapMem"(address: *mut c_void, len: usize, offset: usize, physical: Handle, flags: u64);
        unmap = "aclrtUnmapMem"(address: *mut c_void);
        fill = "aclrtMemsetAsync"(dst: *mut c_void, capacity: usize, byte: i32, len: usize, stream: Handle);
        copy = "aclrtMemcpy"(dst: *mut c_void, capacity: usize, src: *const c_void, len: usize, kind: c_int);
        copy_async = "aclrtMemcpyAsync"(
            dst: *mut c_void, capacity: usize, src: *const c_void, len: usize, kind: c_int, stream: Handle
        );
        stream_create = "aclrtCreateStream"(stream: *mut Handle);
        stream_destroy = "aclrtDestroyStream"(stream: Handle);
        stream_synchronize = "aclrtSynchronizeStream"(stream: Handle);
        stream_wait_event = "aclrtStreamWaitEvent"(stream: Handle, event: Handle);
        launch_host_function = "aclrtLaunchHostFunc"(stream: Handle, callback: HostCallback, data: *mut c_void);
        event_create = "aclrtCreateEventExWithFlag"(event: *mut Handle, flags: u32);
        event_destroy = "aclrtDestroyEvent"(event: Handle);
        event_record = "aclrtRecordEvent"(event: Handle, stream: Handle);
        event_status = "aclrtQueryEventStatus"(event: Handle, status: *mut c_int);
        event_elapsed = "aclrtEventElapsedTime"(elapsed_ms: *mut f32, start: Handle, end: Handle);
    }
}

/// The library, opened and started.
#[derive(Debug)]
pub(super) struct Acl {
    /// Its version in words.
    pub(super) version: String,
    calls: Calls,
    soc_name: unsafe extern "C" fn() -> *const c_char,
    last_message: unsafe extern "C" fn() -> *const c_char,
}

/// The functions are called on the library itself.
impl std::ops::Deref for Acl {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
}

impl Acl {
    /// The library, opened and started once a process. [`Error::Unavailable`] where there is none.
    pub(super) fn get() -> Result<&'static Self> {
        static OPENED: OnceLock<Result<Acl>> = OnceLock::new();
        OPENED.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        let library = library::open(BackendKind::ASCEND, &FILES, HINT)?;
        // SAFETY: the signatures are those of acl_rt.h, and `open` never closes a library.
        let acl = unsafe { Self::load(library) };
        let mut acl =
            acl.map_err(|reason| unavailable(&FILES, format!("{reason}; CANN 8.5 or newer has it")))?;
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: no file of options, and numbers of our own. Nobody calls `aclFinalize`: it may come once a process,
        // and libtorch may still need the library.
        let started = unsafe {
            acl.init(ptr::null())
                .or_else(|failed| if failed.code == REPEAT_INITIALIZE { Ok(()) } else { Err(failed) })
                .and_then(|()| acl.version(&mut major, &mut minor, &mut patch))
        };
        started.map_err(|failed| unavailable(&[failed.call], acl.text(failed.code)))?;
        acl.version = format!("ACL {major}.{minor}.{patch}");
        Ok(acl)
    }

    /// # Safety
    /// The same as for [`Calls::load`].
    unsafe fn load(library: &Library) -> Result<Self, String> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Self {
                version: String::new(),
                calls: Calls::load(library, 0)?,
                soc_name: library::symbol(library, "aclrtGetSocName")?,
                last_message: library::symbol(library, "aclGetRecentErrMsg")?,
            })
        }
    }

    /// The product's name, such as `Ascend910B4`.
    pub(super) fn soc_name(&self) -> String {
        // SAFETY: takes nothing, and returns a string of its own or null.
        read(unsafe { (self.soc_name)() }).unwrap_or_else(|| "unknown".into())
    }

    /// Number of devices that this process sees.
    pub(super) fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: a number of our own.
        unsafe { self.device_count(&mut count) }
            .map_err(|failed| unavailable(&[failed.call], self.text(failed.code)))?;
        Ok(count as usize)
    }

    /// The value of a device attribute, by the vendor's number.
    pub(super) fn attribute(&self, device: usize, attribute: c_int) -> Result<i64, Failed> {
        let mut value = 0;
        // SAFETY: a number of our own.
        unsafe { self.device_info(device as u32, attribute, &mut value)? };
        Ok(value)
    }

    /// The error that a failed call becomes.
    pub(super) fn error(&self, device: DeviceId, failed: Failed) -> Error {
        let Failed { call, code } = failed;
        Error::Driver { device, call, code: code.into(), message: self.text(code) }
    }

    /// The library's last message in this thread: it has none for a code alone.
    fn text(&self, code: c_int) -> String {
        // SAFETY: takes nothing, and returns a string of its own or null.
        match read(unsafe { (self.last_message)() }) {
            Some(message) => message,
            None => format!("code {code}, and the library has no words for it"),
        }
    }
}

/// Returns true if a call failed for lack of memory.
pub(super) fn is_out_of_memory(failed: Failed) -> bool {
    OUT_OF_MEMORY.contains(&failed.code)
}

/// The error for what is not on this machine.
pub(super) fn unavailable(tried: &[&str], reason: impl Into<String>) -> Error {
    let tried = tried.iter().map(|what| (*what).to_owned()).collect();
    Error::Unavailable { backend: BackendKind::ASCEND, tried, reason: reason.into() }
}

fn read(text: *const c_char) -> Option<String> {
    // SAFETY: not null, so a string of the library's own.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
    let text = text.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::ffi::abi::{assert_says, fact};

    #[test]
    fn the_table_says_what_the_headers_say() {
        let mut facts = Calls::signatures(0);
        facts.extend([
            fact("value", "ACL_ERROR_REPEAT_INITIALIZE", REPEAT_INITIALIZE),
            fact("value", "ACL_ERROR_BAD_ALLOC", OUT_OF_MEMORY[0]),
            fact("value", "ACL_ERROR_STORAGE_OVER_LIMIT", OUT_OF_MEMORY[1]),
            fact("value", "ACL_ERROR_RT_MEMORY_ALLOCATION", OUT_OF_MEMORY[2]),
            fact("value", "ACL_MEM_MALLOC_HUGE_FIRST", HUGE_FIRST),
            fact("value", "ACL_HBM_MEM", HBM),
            fact("value", "ACL_HBM_MEM_HUGE", HBM_HUGE),
            fact("value", "ACL_MEM_LOCATION_TYPE_DEVICE", LOCATION_DEVICE),
            fact("value", "ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED", GRANULARITY_RECOMMENDED),
            fact("value", "ACL_EVENT_SYNC", EVENT_SYNC),
            fact("value", "ACL_EVENT_TIME_LINE", EVENT_TIME_LINE),
            fact("value", "ACL_EVENT_RECORDED_STATUS_COMPLETE", EVENT_COMPLETE),
            fact("value", "ACL_DEV_ATTR_AICORE_CORE_NUM", AI_CORES),
            fact("value", "ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE", TOTAL_MEMORY),
            fact("value", "ACL_MEMCPY_HOST_TO_DEVICE", Direction::ToDevice as i32),
            fact("value", "ACL_MEMCPY_DEVICE_TO_HOST", Direction::ToHost as i32),
            fact("value", "ACL_MEMCPY_DEVICE_TO_DEVICE", Direction::WithinDevice as i32),
            fact("size", "aclrtPhysicalMemProp", size_of::<PhysicalProperties>()),
            fact("offset", "aclrtPhysicalMemProp.memAttr", offset_of!(PhysicalProperties, attribute)),
            fact("offset", "aclrtPhysicalMemProp.location", offset_of!(PhysicalProperties, device)),
            fact("offset", "aclrtPhysicalMemProp.reserve", offset_of!(PhysicalProperties, reserved)),
        ]);
        for release in ["cann_2.11", "cann_2.14"] {
            assert_says(release, &facts);
        }
    }
}
