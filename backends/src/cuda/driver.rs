//! The CUDA driver's functions that this backend calls: `libcuda.so.1`, which comes with the driver.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_ushort, c_void},
    ptr,
    sync::OnceLock,
};

use crate::{
    BackendKind, DeviceId, Error, Result,
    library::{self, Failed, table},
};

/// A context, stream, event, pool, module or function.
pub(super) type Handle = usize;
/// An address in the device's memory.
pub(super) type Address = u64;
/// What the driver calls on a thread of its own.
pub(super) type HostCallback = unsafe extern "C" fn(*mut c_void);

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(super) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: in no order with libtorch's default stream.
pub(super) const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`
pub(super) const WITHOUT_TIME: c_uint = 2;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`: physical memory that stays where it is.
const ALLOCATION_PINNED: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const READ_WRITE: c_int = 3;

/// `CUdevice_attribute`
pub(super) mod attribute {
    use std::ffi::c_int;

    pub(in super::super) const CLOCK_KHZ: c_int = 13;
    pub(in super::super) const MULTIPROCESSORS: c_int = 16;
    pub(in super::super) const MEMORY_CLOCK_KHZ: c_int = 36;
    pub(in super::super) const MEMORY_BUS_BITS: c_int = 37;
    pub(in super::super) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(in super::super) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
}

/// `CUmemPool_attribute`: whether memory whose release is still pending may be handed out again, with a wait.
pub(super) const REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;

/// `CUmemLocation`
#[repr(C)]
pub(super) struct Location {
    kind: c_int,
    device: c_int,
}

impl Location {
    fn device(device: c_int) -> Self {
        Self { kind: LOCATION_DEVICE, device }
    }
}

/// `CUmemAllocationProp`
#[repr(C)]
pub(super) struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

impl AllocationProperties {
    pub(super) fn on(device: c_int) -> Self {
        let location = Location::device(device);
        Self { kind: ALLOCATION_PINNED, handle_types: 0, location, win32: ptr::null_mut(), flags: [0; 8] }
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
pub(super) struct AccessDescription {
    location: Location,
    flags: c_int,
}

impl AccessDescription {
    pub(super) fn by(device: c_int) -> Self {
        Self { location: Location::device(device), flags: READ_WRITE }
    }
}

/// `CUmemPoolProps`
#[repr(C)]
pub(super) struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    max_bytes: usize,
    usage: c_ushort,
    reserved: [u8; 54],
}

impl PoolProperties {
    pub(super) fn on(device: c_int) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: 0,
            location: Location::device(device),
            win32: ptr::null_mut(),
            max_bytes: 0, // the device's own limit
            usage: 0,
            reserved: [0; 54],
        }
    }
}

table! {
    /// The driver's table, by the names that the library exports.
    Driver {
        init = "cuInit"(flags: c_uint);
        error_name = "cuGetErrorName"(code: c_int, text: *mut *const c_char);
        error_string = "cuGetErrorString"(code: c_int, text: *mut *const c_char);
        driver_version = "cuDriverGetVersion"(version: *mut c_int);
        device_count = "cuDeviceGetCount"(count: *mut c_int);
        device_get = "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
        device_name = "cuDeviceGetName"(name: *mut c_char, capacity: c_int, device: c_int);
        device_total_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int);
        device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: c_int);
        device_pci_bus_id = "cuDeviceGetPCIBusId"(id: *mut c_char, capacity: c_int, device: c_int);
        device_can_access_peer = "cuDeviceCanAccessPeer"(can: *mut c_int, device: c_int, peer: c_int);
        primary_context_retain = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: c_int);
        primary_context_release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
        context_push = "cuCtxPushCurrent_v2"(context: Handle);
        context_pop = "cuCtxPopCurrent_v2"(context: *mut Handle);
        context_current = "cuCtxGetCurrent"(context: *mut Handle);
        context_synchronize = "cuCtxSynchronize"();
        memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
        pool_create = "cuMemPoolCreate"(pool: *mut Handle, properties: *const PoolProperties);
        pool_destroy = "cuMemPoolDestroy"(pool: Handle);
        pool_set_attribute = "cuMemPoolSetAttribute"(pool: Handle, attribute: c_int, value: *mut c_void);
        pool_trim = "cuMemPoolTrimTo"(pool: Handle, keep_bytes: usize);
        alloc_from_pool = "cuMemAllocFromPoolAsync"(address: *mut Address, len: usize, pool: Handle, stream: Handle);
        free_async = "cuMemFreeAsync"(address: Address, stream: Handle);
        address_reserve = "cuMemAddressReserve"(
            address: *mut Address, len: usize, alignment: usize, wish: Address, flags: c_ulonglong
        );
        address_free = "cuMemAddressFree"(address: Address, len: usize);
        physical_create = "cuMemCreate"(
            physical: *mut c_ulonglong, len: usize, properties: *const AllocationProperties, flags: c_ulonglong
        );
        physical_release = "cuMemRelease"(physical: c_ulonglong);
        physical_granularity = "cuMemGetAllocationGranularity"(
            bytes: *mut usize, properties: *const AllocationProperties, option: c_int
        );
        map = "cuMemMap"(address: Address, len: usize, offset: usize, physical: c_ulonglong, flags: c_ulonglong);
        unmap = "cuMemUnmap"(address: Address, len: usize);
        set_access = "cuMemSetAccess"(
            address: Address, len: usize, access: *const AccessDescription, count: usize
        );
        host_register = "cuMemHostRegister_v2"(address: *mut c_void, len: usize, flags: c_uint);
        host_unregister = "cuMemHostUnregister"(address: *mut c_void);
        fill = "cuMemsetD8Async"(dst: Address, byte: u8, len: usize, stream: Handle);
        copy_h2d = "cuMemcpyHtoDAsync_v2"(dst: Address, src: *const c_void, len: usize, stream: Handle);
        copy_d2h = "cuMemcpyDtoHAsync_v2"(dst: *mut c_void, src: Address, len: usize, stream: Handle);
        copy_d2d = "cuMemcpyDtoDAsync_v2"(dst: Address, src: Address, len: usize, stream: Handle);
        stream_create = "cuStreamCreate"(stream: *mut Handle, flags: c_uint);
        stream_destroy = "cuStreamDestroy_v2"(stream: Handle);
        stream_synchronize = "cuStreamSynchronize"(stream: Handle);
        stream_wait_event = "cuStreamWaitEvent"(stream: Handle, event: Handle, flags: c_uint);
        launch_host_function = "cuLaunchHostFunc"(stream: Handle, callback: HostCallback, data: *mut c_void);
        event_create = "cuEventCreate"(event: *mut Handle, flags: c_uint);
        event_destroy = "cuEventDestroy_v2"(event: Handle);
        event_record = "cuEventRecord"(event: Handle, stream: Handle);
        event_query = "cuEventQuery"(event: Handle);
        event_elapsed = "cuEventElapsedTime"(elapsed_ms: *mut f32, start: Handle, end: Handle);
        module_load = "cuModuleLoadData"(module: *mut Handle, image: *const c_void);
        module_unload = "cuModuleUnload"(module: Handle);
        module_function = "cuModuleGetFunction"(function: *mut Handle, module: Handle, name: *const c_char);
        function_load = "cuFuncLoad"(function: Handle);
        launch = "cuLaunchKernel"(
            function: Handle,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
}

impl Driver {
    /// The driver, opened and started once. [`Error::Unavailable`] where there is none.
    pub(super) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        const FILE: &str = "libcuda.so.1";
        let unavailable = |tried: &str, reason: String| Error::Unavailable {
            backend: BackendKind::Cuda,
            tried: vec![FILE.into(), tried.into()],
            reason,
        };
        let hint = "it comes with NVIDIA's driver: install that, or give this container access to the GPUs";
        let library = library::open(BackendKind::Cuda, &[FILE], hint)?;
        // SAFETY: the signatures are those of cuda.h, and `open` never closes a library.
        let driver = unsafe { Self::load(library) }.map_err(|reason| unavailable("dlsym", reason))?;
        // SAFETY: the first call, with the only flags there are.
        unsafe { driver.init(0) }.map_err(|failed| unavailable(failed.call, driver.text(failed.code)))?;
        Ok(driver)
    }

    /// The error that a failed call becomes.
    pub(super) fn error(&self, device: DeviceId, failed: Failed) -> Error {
        let Failed { call, code } = failed;
        Error::Driver { device, call, code: code.into(), message: self.text(code) }
    }

    /// Whether an event is reached, from the result of the query.
    pub(super) fn reached(outcome: Result<(), Failed>) -> Result<bool, Failed> {
        match outcome {
            Ok(()) => Ok(true),
            Err(Failed { code: NOT_READY, .. }) => Ok(false),
            Err(failed) => Err(failed),
        }
    }

    /// The driver's name and words for a code.
    fn text(&self, code: c_int) -> String {
        let read = |outcome: Result<(), Failed>, text: *const c_char| {
            // SAFETY: the driver has answered with the address of a constant string.
            outcome.is_ok().then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        let (mut name, mut words) = (ptr::null(), ptr::null());
        // SAFETY: addresses of our own.
        let (named, worded) =
            unsafe { (self.error_name(code, &mut name), self.error_string(code, &mut words)) };
        match (read(named, name), read(worded, words)) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            _ => "a code that this driver has no words for".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_have_the_sizes_of_the_header() {
        assert_eq!(size_of::<AllocationProperties>(), 32);
        assert_eq!(size_of::<AccessDescription>(), 12);
        assert_eq!(size_of::<PoolProperties>(), 88);
    }

    #[test]
    fn an_event_that_is_not_reached_is_no_error() {
        let failed = |code| Failed::check("cuEventQuery", code);
        assert_eq!(Driver::reached(failed(0)), Ok(true));
        assert_eq!(Driver::reached(failed(600)), Ok(false));
        assert_eq!(Driver::reached(failed(700)), Err(Failed { call: "cuEventQuery", code: 700 }));
    }
}
