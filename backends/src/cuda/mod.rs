//! The CUDA backend: NVIDIA's driver, which comes with the kernel module, and its run-time compiler, which comes
//! with libtorch. What it has in common with [`crate::rocm`] is [`crate::gpu`].
//!
//! It works in the device's primary context, as libtorch and NCCL do, so that streams, events and addresses pass
//! between the three.

mod diagnose;
mod nvml;

use std::ffi::c_int;

use crate::{
    BackendKind, Diagnosis, Result,
    gpu::{Dialect, Driver, Handle, Opened, Vendor},
    library::{Failed, table},
};

/// NVIDIA.
pub static VENDOR: Vendor = Vendor {
    backend: BackendKind::Cuda,
    column: 0,
    driver_files: &["libcuda.so.1"],
    driver_hint: "it comes with NVIDIA's driver: install that, or give this container access to the GPUs",
    version_call: "cuDriverGetVersion",
    version: |version| Ok(format!("CUDA {}.{}", version / 1000, version % 1000 / 10)),
    // Newest first. The number is that of the CUDA release, which goes with libtorch's own.
    compiler_files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    compiler_hint: "it comes with libtorch for GPUs: `cargo xtask setup --gpu`",
    compiler_builtins: "libnvrtc-builtins.so",
    compiler_architecture: "--gpu-architecture=",
    compiler_options: &["--fmad=false", "--std=c++17"],
    libtorch_file: "libtorch_cuda.so",
    multiprocessors: 16,
    // SAFETY: the caller's promise; the signatures are those of cuda.h.
    dialect: |library| unsafe { Ok(Box::new(Calls::load(library, 0)?)) },
    opened: Opened::nothing(),
};

/// What [`Dialect::enter`] returns where it has nothing to do: no context has this handle.
const NOT_PUSHED: Handle = 0;
/// `CUdevice_attribute`
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
/// See above.
const COMPUTE_CAPABILITY_MINOR: c_int = 76;

table! {
    /// What only this driver has: contexts, and kernels that are loaded late.
    Calls {
        primary_context_retain = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: c_int);
        primary_context_release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
        context_push = "cuCtxPushCurrent_v2"(context: Handle);
        context_pop = "cuCtxPopCurrent_v2"(context: *mut Handle);
        context_current = "cuCtxGetCurrent"(context: *mut Handle);
        function_load = "cuFuncLoad"(function: Handle);
    }
}

impl Dialect for Calls {
    fn retain(&self, device: c_int) -> Result<Handle, Failed> {
        let mut context = 0;
        // SAFETY: a number of our own.
        unsafe { self.primary_context_retain(&mut context, device)? };
        Ok(context)
    }

    fn release(&self, device: c_int) -> Result<(), Failed> {
        // SAFETY: takes any number.
        unsafe { self.primary_context_release(device) }
    }

    fn enter(&self, retained: Handle) -> Result<Handle, Failed> {
        let mut current = 0;
        // SAFETY: a number of our own.
        unsafe { self.context_current(&mut current)? };
        if current == retained {
            return Ok(NOT_PUSHED); // libtorch mostly leaves it current
        }
        // SAFETY: retained, and not yet released.
        unsafe { self.context_push(retained)? };
        Ok(retained)
    }

    fn leave(&self, previous: Handle) -> Result<(), Failed> {
        if previous == NOT_PUSHED {
            return Ok(());
        }
        let mut popped = 0;
        // SAFETY: pops what `enter` has pushed in this thread.
        unsafe { self.context_pop(&mut popped) }
    }

    fn load_function(&self, function: Handle) -> Result<(), Failed> {
        // SAFETY: a function of a loaded module.
        unsafe { self.function_load(function) }
    }

    fn architecture(&self, driver: &Driver, device: c_int) -> Result<String, Failed> {
        let major = driver.attribute(device, COMPUTE_CAPABILITY_MAJOR)?;
        let minor = driver.attribute(device, COMPUTE_CAPABILITY_MINOR)?;
        Ok(format!("sm_{major}{minor}"))
    }

    fn diagnose(
        &self,
        driver: &Driver,
        device: c_int,
        ordinal: usize,
        addresses: &[String],
    ) -> Result<Diagnosis, Failed> {
        diagnose::diagnose(driver, device, ordinal, addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{assert_says, fact};

    #[test]
    fn the_table_says_what_the_headers_say() {
        let mut facts = Calls::signatures(0);
        facts.extend([
            fact("value", "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", VENDOR.multiprocessors),
            fact("value", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", COMPUTE_CAPABILITY_MAJOR),
            fact("value", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", COMPUTE_CAPABILITY_MINOR),
        ]);
        assert_says("cuda_13.0", &facts);
    }
}
