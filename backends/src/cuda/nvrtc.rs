//! NVIDIA's run-time compiler, which comes with libtorch's wheels.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    fs, ptr,
    sync::OnceLock,
};

use super::driver::Handle;
use crate::{
    BackendKind, Error, Result,
    library::{self, Failed, table},
};

/// Newest first. The number is that of the CUDA release, which goes with libtorch's own.
const FILES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

table! {
    /// The compiler's table.
    Nvrtc {
        create = "nvrtcCreateProgram"(
            program: *mut Handle, source: *const c_char, name: *const c_char, count: c_int,
            headers: *const *const c_char, names: *const *const c_char
        );
        compile = "nvrtcCompileProgram"(program: Handle, count: c_int, options: *const *const c_char);
        log_size = "nvrtcGetProgramLogSize"(program: Handle, len: *mut usize);
        log = "nvrtcGetProgramLog"(program: Handle, text: *mut u8);
        binary_size = "nvrtcGetCUBINSize"(program: Handle, len: *mut usize);
        binary = "nvrtcGetCUBIN"(program: Handle, image: *mut u8);
        destroy = "nvrtcDestroyProgram"(program: *mut Handle);
    }
}

/// Compiles CUDA C++ for a compute capability; the result is what the driver loads.
pub(super) fn compile(source: &CStr, name: &CStr, (major, minor): (c_int, c_int)) -> Result<Vec<u8>> {
    let nvrtc = Nvrtc::get()?;
    let mut program = 0;
    // SAFETY: strings that live through the call, and no headers.
    let created =
        unsafe { nvrtc.create(&mut program, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
    created.map_err(|failed| unavailable(failed, String::new()))?;
    // A sum must have the same bits as on a CPU, so no multiplication is fused into an addition.
    let architecture = CString::new(format!("--gpu-architecture=sm_{major}{minor}")).expect("digits");
    let options = [architecture.as_ptr(), c"--fmad=false".as_ptr(), c"--std=c++17".as_ptr()];
    // SAFETY: the program is live, and so are the options.
    let compiled = unsafe { nvrtc.compile(program, options.len() as c_int, options.as_ptr()) };
    let image = match compiled {
        // SAFETY: the two calls belong together.
        Ok(()) => nvrtc.read(
            |len| unsafe { nvrtc.binary_size(program, len) },
            |image| unsafe { nvrtc.binary(program, image) },
        ),
        Err(failed) => Err(failed),
    };
    let image = image.map_err(|failed| {
        // SAFETY: as above.
        let log = nvrtc
            .read(|len| unsafe { nvrtc.log_size(program, len) }, |text| unsafe { nvrtc.log(program, text) });
        unavailable(failed, String::from_utf8_lossy(&log.unwrap_or_default()).into_owned())
    });
    // SAFETY: made above, and not used again. It has no way to fail for a live program.
    let _ = unsafe { nvrtc.destroy(&mut program) };
    image
}

impl Nvrtc {
    fn get() -> Result<&'static Self> {
        static NVRTC: OnceLock<Result<Nvrtc>> = OnceLock::new();
        NVRTC.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        open_builtins();
        let hint = "it comes with libtorch for GPUs: `cargo xtask setup --gpu`";
        let library = library::open(BackendKind::Cuda, &FILES, hint)?;
        // SAFETY: the signatures are those of nvrtc.h, and `open` never closes a library.
        unsafe { Self::load(library) }.map_err(|reason| Error::Unavailable {
            backend: BackendKind::Cuda,
            tried: FILES.map(String::from).to_vec(),
            reason,
        })
    }

    /// Bytes of a length that the first call tells and the second fills.
    fn read(
        &self,
        len: impl FnOnce(*mut usize) -> Result<(), Failed>,
        fill: impl FnOnce(*mut u8) -> Result<(), Failed>,
    ) -> Result<Vec<u8>, Failed> {
        let mut size = 0;
        len(&mut size)?;
        let mut bytes = vec![0; size];
        fill(bytes.as_mut_ptr())?;
        Ok(bytes)
    }
}

/// The compiler opens a second library by its bare name, which the loader finds only where the system looks. One
/// that is loaded already is found anywhere.
fn open_builtins() {
    for folder in library::wheel_folders() {
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            if name.starts_with("libnvrtc-builtins.so") {
                let path = file.path().display().to_string();
                // Where this fails, the compiler says so itself.
                let _ = library::open(BackendKind::Cuda, &[&path], "");
            }
        }
    }
}

fn unavailable(failed: Failed, log: String) -> Error {
    let reason = format!("run-time kernels do not compile (code {}): {}", failed.code, log.trim());
    Error::Unavailable { backend: BackendKind::Cuda, tried: vec![failed.call.into()], reason }
}
