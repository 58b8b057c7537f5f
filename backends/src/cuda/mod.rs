//! The CUDA backend: NVIDIA's driver, which comes with the kernel module, and its run-time compiler, which comes
//! with libtorch. What it has in common with [`crate::rocm`] is [`crate::gpu`].
//!
//! It works in the device's primary context, as libtorch and NCCL do, so that streams, events and addresses pass
//! between the three.

mod diagnose;
mod nvml;

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
};

use crate::{
    BackendKind, BackendTraits, Diagnosis, Grid, Result,
    ffi::library::{Failed, table},
    gpu::{Dialect, Driver, Handle, Opened, Vendor, VendorBackend},
    kernels::Architecture,
    nccl::Installation,
};

impl BackendKind {
    /// NVIDIA.
    pub const CUDA: Self =
        Self::new(&BackendTraits { adds_by_rows: true, ..BackendTraits::accelerator("cuda") });
}

/// The entry of the list in `lib.rs`.
pub(crate) static BACKEND: VendorBackend = VendorBackend(&VENDOR);

/// NCCL.
static NCCL: Installation = Installation::new(
    BackendKind::CUDA,
    &["libnccl.so.2", "libnccl.so"],
    "it comes with libtorch for GPUs: `cargo xtask setup --gpu`",
);

/// NVIDIA's names and numbers.
pub(crate) static VENDOR: Vendor = Vendor {
    backend: BackendKind::CUDA,
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
    collectives: &NCCL,
    // NVLink multicast is off: a rank that dies in it can leave the GPUs of a host unusable, and no option of NCCL's own
    // calls turns it off.
    rank_environment: &[("NCCL_NVLS_ENABLE", "0")],
    multiprocessors: 16,
    // SAFETY: the caller's promise; the signatures are those of cuda.h.
    dialect: |library| unsafe { Ok(Box::new(Calls::load(library, 0)?)) },
    opened: Opened::nothing(),
};

/// Result of [`Dialect::enter`] if the context was current already: no context has this handle.
const NOT_PUSHED: Handle = 0;
/// `CUdevice_attribute`
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
/// See above.
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`
const CLUSTER_DIMENSION: c_int = 4;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`
const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;

/// `CUlaunchAttribute`; of the 64 bytes of its value, ours have the first numbers.
#[repr(C)]
pub(crate) struct Attribute {
    id: c_int,
    pad: c_int,
    value: [c_uint; 16],
}

impl Attribute {
    fn new(id: c_int, [x, y, z]: [c_uint; 3]) -> Self {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&[x, y, z]);
        Self { id, pad: 0, value }
    }
}

/// `CUlaunchConfig`
#[repr(C)]
pub(crate) struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const Attribute,
    attribute_count: c_uint,
}

table! {
    /// Functions that only this driver has: contexts, and kernels that are loaded late.
    Calls {
        primary_context_retain = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: c_int);
        primary_context_release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
        context_push = "cuCtxPushCurrent_v2"(context: Handle);
        context_pop = "cuCtxPopCurrent_v2"(context: *mut Handle);
        context_current = "cuCtxGetCurrent"(context: *mut Handle);
        function_load = "cuFuncLoad"(function: Handle);
        function_set_attribute = "cuFuncSetAttribute"(function: Handle, attribute: c_int, value: c_int);
        launch_with = "cuLaunchKernelEx"(
            config: *const LaunchConfig, function: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void
        );
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

    fn allow_shared(&self, function: Handle, bytes: u32) -> Result<(), Failed> {
        // SAFETY: a function of a loaded module.
        unsafe { self.function_set_attribute(function, MAX_DYNAMIC_SHARED_BYTES, bytes as c_int) }
    }

    fn architecture(&self, driver: &Driver, device: c_int) -> Result<String, Failed> {
        let major = driver.attribute(device, COMPUTE_CAPABILITY_MAJOR)?;
        let minor = driver.attribute(device, COMPUTE_CAPABILITY_MINOR)?;
        // With what only 9.0 has, and later ones have not.
        let own = if (major, minor) == (9, 0) { "a" } else { "" };
        Ok(format!("sm_{major}{minor}{own}"))
    }

    fn can_start_early(&self, architecture: &str) -> bool {
        Architecture::NvidiaFrom(90).includes(architecture)
    }

    unsafe fn launch(
        &self,
        _driver: &Driver,
        function: Handle,
        grid: Grid,
        stream: Handle,
        arguments: *mut *mut c_void,
    ) -> Result<(), Failed> {
        let Grid { blocks, threads, cluster, shared_bytes, starts_early } = grid;
        let mut attributes = Vec::new();
        if cluster > 1 {
            attributes.push(Attribute::new(CLUSTER_DIMENSION, [cluster, 1, 1]));
        }
        if starts_early {
            attributes.push(Attribute::new(PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]));
        }
        let config = LaunchConfig {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes,
            stream,
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as c_uint,
        };
        // SAFETY: the caller's promise; the attributes outlive the call.
        unsafe { self.launch_with(&config, function, arguments, ptr::null_mut()) }
    }

    fn busy(&self, pci_bus_id: &str) -> Option<f64> {
        nvml::busy(pci_bus_id)
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
    use std::mem::offset_of;

    use super::*;
    use crate::ffi::abi::{assert_says, fact};

    #[test]
    fn the_table_says_what_the_headers_say() {
        let mut facts = Calls::signatures(0);
        facts.extend([
            fact("value", "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", VENDOR.multiprocessors),
            fact("value", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", COMPUTE_CAPABILITY_MAJOR),
            fact("value", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", COMPUTE_CAPABILITY_MINOR),
            fact("value", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", MAX_DYNAMIC_SHARED_BYTES),
            fact("value", "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", CLUSTER_DIMENSION),
            fact(
                "value",
                "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
                PROGRAMMATIC_STREAM_SERIALIZATION,
            ),
            fact("size", "CUlaunchAttribute", size_of::<Attribute>()),
            fact("offset", "CUlaunchAttribute.value", offset_of!(Attribute, value)),
            fact("size", "CUlaunchConfig", size_of::<LaunchConfig>()),
            fact("offset", "CUlaunchConfig.blockDimX", offset_of!(LaunchConfig, block)),
            fact("offset", "CUlaunchConfig.sharedMemBytes", offset_of!(LaunchConfig, shared_bytes)),
            fact("offset", "CUlaunchConfig.hStream", offset_of!(LaunchConfig, stream)),
            fact("offset", "CUlaunchConfig.attrs", offset_of!(LaunchConfig, attributes)),
            fact("offset", "CUlaunchConfig.numAttrs", offset_of!(LaunchConfig, attribute_count)),
        ]);
        assert_says("cuda_13.0", &facts);
    }
}
