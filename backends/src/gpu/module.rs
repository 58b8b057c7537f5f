//! [`Module`]: a file of kernels, compiled for one device.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    sync::{Mutex, PoisonError},
};

use super::{
    compiler::Compiler,
    context::Context,
    driver::{Driver, Handle},
};
use crate::{
    Result,
    ffi::library::Failed,
    kernels::{Source, cached},
};

#[derive(Debug)]
pub(super) struct Module {
    raw: Handle,
    functions: HashMap<&'static CStr, Function>,
}

/// A kernel on the device.
#[derive(Debug)]
pub(super) struct Function {
    pub raw: Handle,
    /// The most dynamic shared memory that a launch was allowed. The driver keeps one such limit for all threads, some of
    /// which launch the same kernel with more than others, so it only grows.
    shared_bytes: Mutex<u32>,
}

impl Function {
    /// Allows launches with so much dynamic shared memory.
    pub fn allow(&self, shared_bytes: u32, driver: &Driver) -> Result<(), Failed> {
        let mut allowed = self.shared_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if shared_bytes > *allowed {
            driver.dialect.allow_shared(self.raw, shared_bytes)?;
            *allowed = shared_bytes;
        }
        Ok(())
    }
}

impl Module {
    pub(super) fn compile(source: &Source, architecture: &str, context: &Context) -> Result<Self> {
        let text = CString::new(source.text).expect("source code has no NUL byte");
        let vendor = context.driver.vendor;
        let options = vendor.compiler_options.iter().map(|option| option.as_bytes());
        let key: Vec<&[u8]> = [text.to_bytes(), architecture.as_bytes()].into_iter().chain(options).collect();
        let image = cached(&key, || Compiler::of(vendor)?.compile(&text, source.file, architecture))?;
        let mut raw = 0;
        let mut functions = HashMap::new();
        // SAFETY: the compiler's own image; the names end in NUL; the handles are numbers of our own.
        context.run(|driver| unsafe {
            driver.module_load(&mut raw, image.as_ptr().cast())?;
            for &name in source.kernels {
                let mut function = 0;
                driver.module_function(&mut function, raw, name.as_ptr())?;
                // Now, and not at the first launch, when another kernel may wait for what that launch holds up.
                driver.dialect.load_function(function)?;
                functions.insert(name, Function { raw: function, shared_bytes: Mutex::new(0) });
            }
            Ok(())
        })?;
        Ok(Self { raw, functions })
    }

    /// A kernel by its name in the source, which lists it.
    pub(super) fn function(&self, name: &CStr) -> &Function {
        &self.functions[name]
    }

    pub(super) fn unload(self, context: &Context) -> Result<()> {
        // SAFETY: loaded by `compile`, and `self` is gone.
        context.run(|driver| unsafe { driver.module_unload(self.raw) })
    }
}
