//! A timeline of what this process computes: operations and [`span`]s of a thread, and what devices ran.

use std::{
    ffi::{CString, c_void},
    fmt,
    os::unix::ffi::OsStrExt,
    path::Path,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{Error, Result, TorchDevice, ffi};

/// True while a profile is recorded, so that a span costs nothing otherwise.
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

/// A recording by libtorch's profiler. Operations and spans are those of the thread that began it; kernels, copies and
/// the driver's calls are those of all threads.
#[derive(Debug)]
#[must_use = "a profile that is not written is lost"]
pub struct Profile(());

impl Profile {
    /// Begins to record. A process has one recording at a time.
    ///
    /// # Errors
    /// libtorch's, such as a second recording.
    pub fn begin(device: TorchDevice) -> Result<Self> {
        // SAFETY: takes a plain number.
        match unsafe { ffi::anyroll_profile_begin(device.kind) } {
            0 => {
                IS_RECORDED.store(true, Ordering::Relaxed);
                Ok(Self(()))
            }
            _ => Err(Error::Torch(ffi::last_error())),
        }
    }

    /// Ends the recording and writes it to `path` as a Chrome trace, in JSON.
    ///
    /// # Errors
    /// libtorch's, such as a path that cannot be written.
    ///
    /// # Panics
    /// If the path contains a NUL.
    pub fn write(self, path: &Path) -> Result<()> {
        IS_RECORDED.store(false, Ordering::Relaxed);
        let path = CString::new(path.as_os_str().as_bytes()).expect("a path has no NUL");
        // SAFETY: a NUL-terminated string that lives until the call returns.
        match unsafe { ffi::anyroll_profile_end(path.as_ptr()) } {
            0 => Ok(()),
            _ => Err(Error::Torch(ffi::last_error())),
        }
    }
}

/// A named part of the timeline, from its creation until it is dropped, on the same thread.
#[derive(Debug)]
#[must_use = "a span ends when it is dropped"]
pub struct Span(Option<NonNull<c_void>>);

/// Opens a span if a profile is recorded. Spans of a thread nest.
pub fn span(name: fmt::Arguments) -> Span {
    if !IS_RECORDED.load(Ordering::Relaxed) {
        return Span(None);
    }
    let Ok(name) = CString::new(name.to_string()) else { return Span(None) };
    // SAFETY: a NUL-terminated string, which the shim copies. Null, after an error, is no span.
    Span(NonNull::new(unsafe { ffi::anyroll_span_begin(name.as_ptr()) }))
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(span) = self.0 {
            // SAFETY: the shim made it, and nobody else ends it.
            unsafe { ffi::anyroll_span_end(span.as_ptr()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tch::{Device, Kind, Tensor};

    use super::*;

    #[test]
    fn a_profile_has_spans_and_operations() {
        let path = std::env::temp_dir().join(format!("anyroll-profile-{}.json", std::process::id()));
        drop(span(format_args!("before")));
        let profile = Profile::begin(TorchDevice::CPU).unwrap();
        for step in 0..2 {
            let _step = span(format_args!("step {step}"));
            let _inner = span(format_args!("product"));
            let x = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
            drop(x.matmul(&x));
        }
        profile.write(&path).unwrap();
        drop(span(format_args!("after")));
        let trace: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        fs::remove_file(&path).unwrap();
        let named = |name: &str| -> Vec<(f64, f64)> {
            let events = trace["traceEvents"].as_array().unwrap().iter();
            let found = events.filter(|event| event["name"] == name && event["ph"] == "X");
            let number = |of: &serde_json::Value| of.as_f64().unwrap();
            found.map(|event| (number(&event["ts"]), number(&event["dur"]))).collect()
        };
        assert!(named("before").is_empty() && named("after").is_empty());
        let (steps, inner, products) = (named("step 1"), named("product"), named("aten::matmul"));
        assert_eq!((steps.len(), inner.len(), products.len()), (1, 2, 2));
        let ends = |(start, duration): (f64, f64)| start + duration;
        assert!(steps[0].0 <= inner[1].0 && inner[1].0 <= products[1].0);
        assert!(ends(products[1]) <= ends(inner[1]) && ends(inner[1]) <= ends(steps[0]));
    }
}
