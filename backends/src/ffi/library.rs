//! Vendors' libraries, opened at run time: the places that are searched, and tables of their functions.

use std::{
    ffi::{CStr, OsStr, c_int},
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
};

pub(crate) use libloading::os::unix::Library;
use libloading::os::unix::{RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use crate::{BackendKind, Error, Result, ffi};

/// Folders that the user has named, first to last.
static PREFERRED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Adds `folder` to the places that are searched first for vendors' libraries. Call it before the first [`crate::open`]: an
/// open library stays open.
pub fn prefer_folder(folder: impl Into<PathBuf>) {
    PREFERRED.lock().unwrap().push(folder.into());
}

/// A call that did not return zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    /// The vendor's name of the function.
    pub(crate) call: &'static str,
    /// The code that it returned.
    pub(crate) code: c_int,
}

impl Failed {
    pub(crate) fn check(call: &'static str, code: c_int) -> Result<(), Self> {
        if code == 0 { Ok(()) } else { Err(Self { call, code }) }
    }
}

/// A struct of function pointers, with one method a function. Vendors that share an interface differ in the names:
/// each function has one for every column, and `load` takes the column. Results are plain integers, not enums: a
/// newer library may return a code that this version has not heard of.
macro_rules! table {
    ($(#[$meta:meta])* $name:ident {
        $( $field:ident = $($symbol:literal)|+ ( $($argument:ident: $ty:ty),* ); )*
    }) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub(crate) struct $name {
            column: usize,
            $( $field: unsafe extern "C" fn($($ty),*) -> std::ffi::c_int, )*
        }

        #[allow(clippy::too_many_arguments)] // the vendor's own signatures
        impl $name {
            /// Looks every function up; the error names the one that is not there.
            ///
            /// # Safety
            /// The library's functions have these names and signatures, and it is never closed.
            pub(crate) unsafe fn load(library: &$crate::ffi::library::Library, column: usize) -> Result<Self, String> {
                Ok(Self {
                    column,
                    // SAFETY: the caller's promise.
                    $( $field: unsafe { $crate::ffi::library::symbol(library, [$($symbol),+][column])? }, )*
                })
            }

            /// Lines that `backends/abi` has for these functions if their signatures are the vendor's.
            #[cfg(test)]
            #[allow(dead_code)] // of tables that are a test's own
            pub(crate) fn signatures(column: usize) -> Vec<String> {
                vec![ $( {
                    let classes: &[String] = &[ $( $crate::ffi::abi::class::<$ty>() ),* ];
                    $crate::ffi::abi::function([$($symbol),+][column], classes)
                } ),* ]
            }

            $(
                pub(crate) unsafe fn $field(&self, $($argument: $ty),*) -> Result<(), $crate::ffi::library::Failed> {
                    // SAFETY: the caller keeps the vendor's rules for this function.
                    let code = unsafe { (self.$field)($($argument),*) };
                    $crate::ffi::library::Failed::check([$($symbol),+][self.column], code)
                }
            )*
        }
    };
}
pub(crate) use table;

/// A function of a library, or the error that names it.
///
/// # Safety
/// `T` is the function's type, and the library is never closed.
pub(crate) unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<T>(name).map(|symbol| *symbol).map_err(|error| words(&error)) }
}

/// Opens the first file of `names` that loads: from the user's folders, from those of libtorch's wheels, then from the
/// system's. It stays open to the end of the process, since vendors' libraries do not survive being closed.
pub(crate) fn open(backend: BackendKind, names: &[&str], hint: &str) -> Result<&'static Library> {
    open_first(backend, &candidates(names), RTLD_LOCAL, hint)
}

/// Opens libtorch's own library for a vendor, and starts it. Its kernels register themselves with libtorch, which
/// remembers missing ones, so this precedes any operation that could ask for them. `hint` tells the user how to get it.
pub(crate) fn open_libtorch(backend: BackendKind, file: &str, device_type: c_int, hint: &str) -> Result<()> {
    let mut paths = preferred(&[file]);
    paths.push(libtorch_folder().map_or_else(|| file.into(), |folder| folder.join(file)));
    open_first(backend, &paths, RTLD_GLOBAL, hint)?;
    // SAFETY: the library that registers this device type is loaded.
    if unsafe { ffi::anyroll_torch_start(device_type) } != 0 {
        return Err(Error::Torch(ffi::last_error()));
    }
    Ok(())
}

fn open_first(backend: BackendKind, paths: &[PathBuf], scope: c_int, hint: &str) -> Result<&'static Library> {
    let (mut reason, mut tried) = (String::new(), Vec::new());
    for path in paths {
        // The same file may come from several places to look in.
        let name = path.display().to_string();
        if tried.contains(&name) {
            continue;
        }
        tried.push(name);
        // SAFETY: a vendor's library; its initializers are meant to run in any process.
        match unsafe { Library::open(Some(path), RTLD_NOW | scope) } {
            Ok(library) => return Ok(Box::leak(Box::new(library))),
            Err(error) => reason = words(&error),
        }
    }
    Err(Error::Unavailable { backend, tried, reason: format!("{reason}; {hint}") })
}

/// The loader's own message, which names the missing file or symbol.
fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn candidates(names: &[&str]) -> Vec<PathBuf> {
    let wheels = wheel_folders();
    let beside = |name: &&str| {
        let beside = wheels.iter().filter(|_| !name.contains('/')).map(|folder| folder.join(name));
        beside.filter(|path| path.exists()).collect::<Vec<_>>()
    };
    let system = names.iter().map(PathBuf::from);
    preferred(names).into_iter().chain(names.iter().flat_map(beside)).chain(system).collect()
}

/// Bare names in the user's folders.
fn preferred(names: &[&str]) -> Vec<PathBuf> {
    let bare = names.iter().filter(|name| !name.contains('/'));
    let folders = PREFERRED.lock().unwrap();
    folders.iter().flat_map(|folder| bare.clone().map(|name| folder.join(name))).collect()
}

/// Folders next to libtorch in which the vendors' wheels have their libraries.
pub(crate) fn wheel_folders() -> Vec<PathBuf> {
    let Some(torch) = libtorch_folder() else { return Vec::new() };
    let mut folders = vec![torch.clone()];
    for vendor in ["../nvidia", "../../nvidia"] {
        let Ok(entries) = fs::read_dir(torch.join(vendor)) else { continue };
        folders.extend(entries.flatten().map(|entry| entry.path().join("lib")).filter(|path| path.is_dir()));
    }
    folders.sort();
    folders
}

/// The folder from which this process has loaded libtorch, symbolic links followed.
pub(crate) fn libtorch_folder() -> Option<PathBuf> {
    // Any function that libtorch_cpu exports under a C name would do.
    const EXPORTED: &CStr = c"aoti_torch_device_type_cpu";
    // SAFETY: looks a name up in what is loaded.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, EXPORTED.as_ptr()) };
    // SAFETY: `Dl_info` is plain data, for which zeros are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is writable, and an address that is in no library is answered with zero.
    if address.is_null() || unsafe { libc::dladdr(address, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own NUL-terminated string, which lives as long as libtorch is loaded.
    let file = unsafe { CStr::from_ptr(info.dli_fname) };
    let file = Path::new(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(file.to_bytes()));
    Some(file.canonicalize().ok()?.parent()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    table! {
        /// Functions of the C library, which is there on every machine.
        Present {
            abs = "abs" | "labs"(number: c_int);
        }
    }
    table! {
        /// The same, and one that no library has.
        Incomplete {
            abs = "abs"(number: c_int);
            missing = "anyroll_no_such_function"(number: c_int);
        }
    }

    const LIBC: &str = "libc.so.6";

    #[test]
    fn a_result_that_is_not_zero_is_the_vendors_code() {
        let library = open(BackendKind::CUDA, &[LIBC], "").unwrap();
        // SAFETY: the signature of the C standard.
        let present = unsafe { Present::load(library, 0) }.unwrap();
        // SAFETY: takes any number.
        let call = |number| unsafe { present.abs(number) };
        assert_eq!(call(0), Ok(()));
        assert_eq!(call(-700), Err(Failed { call: "abs", code: 700 }));
        // SAFETY: the second name takes a long, of which any number is one.
        let call = unsafe { Present::load(library, 1).unwrap().abs(3) };
        assert_eq!(call, Err(Failed { call: "labs", code: 3 }));
    }

    #[test]
    fn a_missing_function_is_named() {
        let library = open(BackendKind::CUDA, &[LIBC], "").unwrap();
        // SAFETY: the signature of the C standard, and a function that is not there.
        let incomplete = unsafe { Incomplete::load(library, 0) };
        // SAFETY: takes any number, and would be reached only if the other were there.
        let called = incomplete.map(|table| unsafe { (table.abs(1), table.missing(1)) });
        assert!(called.unwrap_err().contains("anyroll_no_such_function"));
    }

    #[test]
    fn an_absent_library_says_where_it_was_looked_for() {
        prefer_folder("/named/by/the/user");
        let names = ["libanyroll_absent.so", "libanyroll_absent.so"];
        let error = open(BackendKind::ROCM, &names, "install it").unwrap_err();
        let Error::Unavailable { backend, tried, reason } = error else { panic!("{error}") };
        assert_eq!(backend, BackendKind::ROCM);
        assert_eq!(tried, ["/named/by/the/user/libanyroll_absent.so", "libanyroll_absent.so"]);
        assert!(reason.contains("libanyroll_absent.so") && reason.ends_with("; install it"), "{reason}");
    }

    #[test]
    fn libtorch_is_found_where_it_was_loaded_from() {
        assert!(libtorch_folder().unwrap().join("libtorch_cpu.so").exists());
    }
}
