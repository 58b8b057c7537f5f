//! [`Compiler`]: C++ for a device, compiled at run time by the vendor's library.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    fs, ptr,
};

use super::{Handle, Vendor};
use crate::{
    Error, Result,
    ffi::library::{self, Failed, table},
};

table! {
    /// NVIDIA's names, and AMD's.
    Calls {
        create = "nvrtcCreateProgram" | "hiprtcCreateProgram"(
            program: *mut Handle, source: *const c_char, name: *const c_char, count: c_int,
            headers: *const *const c_char, names: *const *const c_char
        );
        compile = "nvrtcCompileProgram" | "hiprtcCompileProgram"(program: Handle, count: c_int, options: *const *const c_char);
        log_size = "nvrtcGetProgramLogSize" | "hiprtcGetProgramLogSize"(program: Handle, len: *mut usize);
        log = "nvrtcGetProgramLog" | "hiprtcGetProgramLog"(program: Handle, text: *mut u8);
        binary_size = "nvrtcGetCUBINSize" | "hiprtcGetCodeSize"(program: Handle, len: *mut usize);
        binary = "nvrtcGetCUBIN" | "hiprtcGetCode"(program: Handle, image: *mut u8);
        destroy = "nvrtcDestroyProgram" | "hiprtcDestroyProgram"(program: *mut Handle);
    }
}

/// A vendor's compiler, opened.
#[derive(Debug)]
pub(crate) struct Compiler {
    vendor: &'static Vendor,
    calls: Calls,
}

impl Compiler {
    /// The compiler, opened once. [`Error::Unavailable`] where there is none.
    pub(super) fn of(vendor: &'static Vendor) -> Result<&'static Self> {
        vendor.opened.compiler.get_or_init(|| Self::open(vendor)).as_ref().map_err(Clone::clone)
    }

    fn open(vendor: &'static Vendor) -> Result<Self> {
        open_builtins(vendor);
        let library = library::open(vendor.backend, vendor.compiler_files, vendor.compiler_hint)?;
        // SAFETY: the signatures are those of the vendor's header, and `open` never closes a library.
        let calls = unsafe { Calls::load(library, vendor.column) };
        let calls = calls.map_err(|reason| vendor.unavailable(vendor.compiler_files, reason))?;
        Ok(Self { vendor, calls })
    }

    /// Compiles C++ for an architecture; the result is what the driver loads.
    pub(super) fn compile(&self, source: &CStr, name: &CStr, architecture: &str) -> Result<Vec<u8>> {
        let mut program = 0;
        // SAFETY: strings that live through the call, and no headers.
        let created = unsafe {
            self.calls.create(&mut program, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        created.map_err(|failed| self.refused(failed, ""))?;
        let architecture = format!("{}{architecture}", self.vendor.compiler_architecture);
        let options = [&*architecture].into_iter().chain(self.vendor.compiler_options.iter().copied());
        let options: Vec<_> =
            options.map(|option| CString::new(option).expect("an option has no NUL byte")).collect();
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is live, and so are the options.
        let compiled = unsafe { self.calls.compile(program, options.len() as c_int, options.as_ptr()) };
        let image = match compiled {
            Ok(()) => self.image(program).map_err(|failed| self.refused(failed, "")),
            Err(failed) => Err(self.refused(failed, &self.messages(program))),
        };
        // SAFETY: made above, and not used again. It has no way to fail for a live program.
        let _ = unsafe { self.calls.destroy(&mut program) };
        image
    }

    /// The image of a compiled program.
    fn image(&self, program: Handle) -> Result<Vec<u8>, Failed> {
        let mut len = 0;
        // SAFETY: a number of our own, and then a buffer of the length that it tells.
        unsafe {
            self.calls.binary_size(program, &mut len)?;
            let mut image = vec![0; len];
            self.calls.binary(program, image.as_mut_ptr())?;
            Ok(image)
        }
    }

    /// The compiler's messages about a program.
    fn messages(&self, program: Handle) -> String {
        let mut len = 0;
        // SAFETY: a number of our own.
        if let Err(failed) = unsafe { self.calls.log_size(program, &mut len) } {
            return format!("{} failed, too, with code {}", failed.call, failed.code);
        }
        let mut text = vec![0; len];
        // SAFETY: a buffer of the length that was told.
        match unsafe { self.calls.log(program, text.as_mut_ptr()) } {
            Ok(()) => String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned(),
            Err(failed) => format!("{} failed, too, with code {}", failed.call, failed.code),
        }
    }

    fn refused(&self, failed: Failed, log: &str) -> Error {
        let reason = format!("run-time kernels do not compile (code {}): {}", failed.code, log.trim());
        self.vendor.unavailable(&[failed.call], reason)
    }
}

/// The compiler opens a second library by its bare name, which the loader finds only where the system looks. One
/// that is loaded already is found anywhere.
fn open_builtins(vendor: &Vendor) {
    for folder in library::wheel_folders() {
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            if name.starts_with(vendor.compiler_builtins) {
                let path = file.path().display().to_string();
                // Where this fails, the compiler says so itself.
                let _ = library::open(vendor.backend, &[&path], "");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::{cuda, ffi::abi::assert_says, kernels, rocm};

    #[test]
    fn the_tables_say_what_the_headers_say() {
        assert_says("cuda_13.0", &Calls::signatures(0));
        assert_says("hip_6.4", &Calls::signatures(1));
        assert_says("hip_7.2", &Calls::signatures(1));
    }

    /// The compilers need no GPU. Where one is not installed the test says so past the harness.
    fn compiles_the_kernels(vendor: &'static Vendor, architectures: &[&str]) {
        let compiler = match Compiler::of(vendor) {
            Ok(compiler) => compiler,
            Err(error) => return drop(writeln!(std::io::stderr(), "SKIPPED: {error}")),
        };
        for source in &kernels::SOURCES {
            let text = CString::new(source.text).unwrap();
            for architecture in
                architectures.iter().filter(|architecture| source.architecture.includes(architecture))
            {
                let image = compiler.compile(&text, source.file, architecture).unwrap();
                for name in source.kernels.iter().map(|name| name.to_bytes()) {
                    assert!(
                        image.windows(name.len()).any(|part| part == name),
                        "{name:?} for {architecture}"
                    );
                }
            }
        }
        let error = compiler.compile(c"int x = y;", c"wrong.cu", architectures[0]).unwrap_err().to_string();
        assert!(error.contains("wrong.cu") && error.contains("CompileProgram"), "{error}");
    }

    #[test]
    fn the_kernels_compile_for_nvidia_and_an_error_names_its_file() {
        compiles_the_kernels(&cuda::VENDOR, &["sm_75", "sm_80", "sm_90a", "sm_100"]);
    }

    #[test]
    fn the_kernels_compile_for_amd_and_an_error_names_its_file() {
        let architectures = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];
        compiles_the_kernels(&rocm::VENDOR, &architectures);
    }
}
