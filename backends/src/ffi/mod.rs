//! The C ABI of `shim/`: one declaration a function, in the order of the C++ files, and what turns its failures
//! into [`Error`].

#[cfg(test)]
pub(crate) mod abi;
pub(crate) mod library;

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::{Error, Result, without_backtrace};
pub use library::prefer_folder;

unsafe extern "C" {
    // tensor.cpp
    pub(crate) fn anyroll_last_error() -> *const c_char;
    pub(crate) fn anyroll_tensor_from_blob(
        data: *mut c_void,
        sizes: *const i64,
        n_sizes: c_int,
        scalar_type: c_int,
        device_type: c_int,
        device_index: c_int,
        release: extern "C" fn(*mut c_void),
        owner: *mut c_void,
    ) -> *mut c_void;
    pub(crate) fn anyroll_tensor_upload(
        tensor: *mut c_void,
        device_type: c_int,
        device_index: c_int,
    ) -> *mut c_void;

    // device.cpp
    pub(crate) fn anyroll_torch_start(device_type: c_int) -> c_int;
    pub(crate) fn anyroll_torch_stream(device_type: c_int, index: c_int, handle: *mut *mut c_void) -> c_int;
    pub(crate) fn anyroll_exchange_stream(
        device_type: c_int,
        index: c_int,
        id: i64,
        before: *mut i64,
    ) -> c_int;
    pub(crate) fn anyroll_empty_cache(device_type: c_int) -> c_int;
    pub(crate) fn anyroll_exchange_device(device_type: c_int, index: c_int) -> c_int;
    pub(crate) fn anyroll_restore_device(device_type: c_int, index: c_int);

    // memory.cpp: -1 with the reason in anyroll_last_error
    pub(crate) fn anyroll_meter_begin() -> c_int;
    pub(crate) fn anyroll_meter_end() -> i64;

    // meta.cpp
    pub(crate) fn anyroll_measure_begin() -> c_int; // -1 with the reason in anyroll_last_error
    pub(crate) fn anyroll_measure_end();
    pub(crate) fn anyroll_measured(live: *mut i64, peak: *mut i64);
    pub(crate) fn anyroll_measure_restart();
    pub(crate) fn anyroll_attention_of_device(
        q: *mut c_void,
        k: *mut c_void,
        v: *mut c_void,
        is_causal: c_int,
    ) -> *mut c_void;

    // mps.cpp
    pub(crate) fn anyroll_npu_start(index: c_int) -> c_int;

    // profile.cpp
    pub(crate) fn anyroll_profile_begin(device_type: c_int) -> c_int;
    pub(crate) fn anyroll_profile_end(path: *const c_char) -> c_int;
    pub(crate) fn anyroll_span_begin(name: *const c_char) -> *mut c_void;
    pub(crate) fn anyroll_span_end(span: *mut c_void);

    // c10d.cpp
    pub(crate) fn anyroll_store_tcp(
        host: *const c_char,
        port: u16,
        server: c_int,
        listening: c_int,
        world_size: c_int,
        timeout_ms: i64,
    ) -> *mut c_void;
    pub(crate) fn anyroll_store_prefix(store: *mut c_void, prefix: *const c_char) -> *mut c_void;
    pub(crate) fn anyroll_store_set(
        store: *mut c_void,
        key: *const c_char,
        value: *const u8,
        len: usize,
    ) -> c_int;
    pub(crate) fn anyroll_store_add(store: *mut c_void, key: *const c_char, amount: i64) -> i64;
    pub(crate) fn anyroll_store_is_set(store: *mut c_void, key: *const c_char) -> i32;
    pub(crate) fn anyroll_store_get(
        store: *mut c_void,
        key: *const c_char,
        out: *mut u8,
        capacity: usize,
        timeout_ms: i64,
    ) -> i64;
    pub(crate) fn anyroll_store_free(store: *mut c_void);
}

/// The message of the last call of this thread that failed, without the C++ backtrace.
pub(crate) fn last_error() -> String {
    // SAFETY: the shim returns a NUL-terminated string of this thread that lives until its next failure.
    let text = unsafe { CStr::from_ptr(anyroll_last_error()) }.to_string_lossy();
    match without_backtrace(&text) {
        "" => "unknown error".to_owned(),
        told => told.to_owned(),
    }
}

/// Takes over a tensor that the shim made; null is the shim's last error.
///
/// # Safety
/// `tensor` is null, or an `at::Tensor*` that nobody else owns.
pub(crate) unsafe fn own_tensor(tensor: *mut c_void) -> Result<tch::Tensor> {
    if tensor.is_null() {
        return Err(Error::Torch(last_error()));
    }
    // SAFETY: the caller's promise; tch's tensors are the same `at::Tensor*`.
    Ok(unsafe { tch::Tensor::from_ptr(tensor.cast()) })
}

/// The shim's view of a tensor.
pub(crate) fn tensor_ptr(tensor: &tch::Tensor) -> *mut c_void {
    tensor.as_ptr().cast_mut().cast()
}

/// Gives a tensor to the shim, which deletes it.
pub(crate) fn into_tensor_ptr(tensor: tch::Tensor) -> *mut c_void {
    std::mem::ManuallyDrop::new(tensor).as_ptr().cast_mut().cast()
}
