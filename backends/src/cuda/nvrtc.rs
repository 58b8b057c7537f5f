//! NVIDIA's run-time compiler, which comes with libtorch's wheels.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    fs, ptr,
    sync::OnceLock,
};

use super::driver::Handle;
use crate::{
    BackendKind, Error, Result, kernel_cache,
    library::{self, Failed, table},
};

/// Newest first. The number is that of the CUDA release, which goes with libtorch's own.
const FILES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

table! {
    /// The compiler's table.
    Nvrtc {
        version = "nvrtcVersion"(major: *mut c_int, minor: *mut c_int);
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

/// Compiles CUDA C++ for a compute capability, unless that was done before; the result is what the driver loads.
pub(super) fn compile(source: &CStr, name: &CStr, (major, minor): (c_int, c_int)) -> Result<Vec<u8>> {
    let architecture = CString::new(format!("--gpu-architecture=sm_{major}{minor}")).expect("digits");
    // A sum must have the same bits as on a CPU, so no multiplication is fused into an addition.
    let options = [&*architecture, c"--fmad=false", c"--std=c++17"];
    let key: Vec<&[u8]> = [source].iter().chain(&options).map(|part| part.to_bytes()).collect();
    kernel_cache::cached(&key, || compile_now(source, name, &options))
}

fn compile_now(source: &CStr, name: &CStr, options: &[&CStr]) -> Result<Vec<u8>> {
    let nvrtc = Nvrtc::get()?;
    let mut program = 0;
    // SAFETY: strings that live through the call, and no headers.
    let created =
        unsafe { nvrtc.create(&mut program, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
    created.map_err(|failed| unavailable(failed, String::new()))?;
    let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the program is live, and so are the options.
    let compiled = unsafe { nvrtc.compile(program, options.len() as c_int, options.as_ptr()) };
    let image = match compiled {
        Ok(()) => nvrtc.image(program).map_err(|failed| unavailable(failed, String::new())),
        Err(failed) => Err(unavailable(failed, nvrtc.messages(program))),
    };
    // SAFETY: made above, and not used again. It has no way to fail for a live program.
    let _ = unsafe { nvrtc.destroy(&mut program) };
    image
}

/// The compiler's version, as `13.0`; `None` where there is no compiler.
pub(super) fn version() -> Option<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: numbers of our own.
    unsafe { Nvrtc::get().ok()?.version(&mut major, &mut minor) }.ok()?;
    Some(format!("{major}.{minor}"))
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

    /// What a program was compiled to.
    fn image(&self, program: Handle) -> Result<Vec<u8>, Failed> {
        let mut len = 0;
        // SAFETY: a number of our own, and then a buffer of the length that it tells.
        unsafe {
            self.binary_size(program, &mut len)?;
            let mut image = vec![0; len];
            self.binary(program, image.as_mut_ptr())?;
            Ok(image)
        }
    }

    /// What the compiler has to say about a program.
    fn messages(&self, program: Handle) -> String {
        let mut len = 0;
        // SAFETY: a number of our own.
        if let Err(failed) = unsafe { self.log_size(program, &mut len) } {
            return format!("{} failed, too, with code {}", failed.call, failed.code);
        }
        let mut text = vec![0; len];
        // SAFETY: a buffer of the length that was told.
        match unsafe { self.log(program, text.as_mut_ptr()) } {
            Ok(()) => String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned(),
            Err(failed) => format!("{} failed, too, with code {}", failed.call, failed.code),
        }
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::device_kernels;

    /// The compiler needs no GPU. Where it is not installed the test says so past the harness.
    #[test]
    fn the_kernels_compile_and_an_error_names_its_line() {
        let source = CString::new(device_kernels::SOURCE).unwrap();
        for capability in [(7, 5), (8, 0), (9, 0)] {
            if let Err(error) = Nvrtc::get() {
                let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
                return;
            }
            let image = compile(&source, c"strategy.cu", capability).unwrap();
            for name in device_kernels::NAMES {
                let name = name.to_bytes();
                assert!(image.windows(name.len()).any(|part| part == name), "{name:?} for {capability:?}");
            }
        }
        let error = compile(c"int x = y;", c"wrong.cu", (9, 0)).unwrap_err().to_string();
        assert!(error.contains("wrong.cu(1)") && error.contains("nvrtcCompileProgram"), "{error}");
    }
}
