//! Memory that processes of one host share: NVIDIA's driver alone, looked for when it is first wanted.

use std::ffi::c_uint;

use super::{context::Context, driver::Address};
use crate::{
    Result, SharedHandle,
    device::unsupported,
    ffi::library::{self, table},
};

/// `CUipcMemHandle`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(SharedHandle);

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const PEER_ACCESS: c_uint = 1;
/// The column of NVIDIA's names.
const NVIDIA: usize = 0;

table! {
    /// The functions.
    Calls {
        alloc = "cuMemAlloc_v2"(address: *mut Address, len: usize);
        fill = "cuMemsetD8_v2"(address: Address, byte: u8, len: usize);
        name = "cuIpcGetMemHandle"(handle: *mut IpcHandle, address: Address);
        open = "cuIpcOpenMemHandle_v2"(address: *mut Address, handle: IpcHandle, flags: c_uint);
    }
}

/// See [`crate::Device::shared_alloc`].
pub(super) fn alloc(context: &Context, len: usize) -> Result<(Address, SharedHandle)> {
    let calls = calls(context)?;
    let (mut address, mut handle) = (0, IpcHandle([0; 64]));
    // SAFETY: numbers of our own, and memory that was just allocated.
    context.run(|_| unsafe {
        calls.alloc(&mut address, len)?;
        calls.fill(address, 0, len)?;
        calls.name(&mut handle, address)
    })?;
    Ok((address, handle.0))
}

/// See [`crate::Device::shared_open`].
pub(super) fn open(context: &Context, handle: &SharedHandle) -> Result<Address> {
    let calls = calls(context)?;
    let mut address = 0;
    // SAFETY: a number of our own; a name that no memory has is an error.
    context.run(|_| unsafe { calls.open(&mut address, IpcHandle(*handle), PEER_ACCESS) })?;
    Ok(address)
}

fn calls(context: &Context) -> Result<Calls> {
    let vendor = context.driver.vendor;
    if vendor.column != NVIDIA {
        return unsupported(context.id, "memory shared with other processes");
    }
    let library = library::open(vendor.backend, vendor.driver_files, vendor.driver_hint)?;
    // SAFETY: the signatures are those of the vendor's header, and `open` never closes a library.
    let calls = unsafe { Calls::load(library, vendor.column) };
    calls.map_err(|reason| vendor.unavailable(vendor.driver_files, reason))
}
