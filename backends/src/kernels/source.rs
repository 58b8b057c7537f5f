//! [`Source`]: a file of `kernels/`, and the devices that it compiles for.

use std::ffi::CStr;

use crate::Device;

/// A file of kernels, compiled when the first of them is needed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) file: &'static CStr,
    /// CUDA C++ that HIP compiles too.
    pub(crate) text: &'static str,
    /// Every kernel in it.
    pub(crate) kernels: &'static [&'static CStr],
    /// Devices that it is written for.
    pub(crate) architecture: Architecture,
}

/// Devices that a file of kernels compiles for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Architecture {
    Any,
    /// One alone, as the compiler names it.
    Only(&'static str),
    /// NVIDIA's of this compute capability, times ten, and of later ones.
    NvidiaFrom(u32),
}

impl Architecture {
    /// Returns true if a device is one of these, by the compiler's name for its architecture.
    pub(crate) fn includes(self, name: &str) -> bool {
        match self {
            Architecture::Any => true,
            Architecture::Only(only) => only == name,
            Architecture::NvidiaFrom(least) => {
                let capability = name.strip_prefix("sm_").map(|rest| rest.trim_end_matches('a'));
                capability.and_then(|number| number.parse::<u32>().ok()).is_some_and(|number| number >= least)
            }
        }
    }
}

impl Source {
    /// Returns true if a device has all of its kernels.
    pub(crate) fn exists_on(&self, device: &dyn Device) -> bool {
        self.kernels.iter().all(|kernel| device.has_kernel(kernel))
    }
}

/// Text of a file of `kernels/`, after the headers that it shares with others, and followed by `$behind`.
macro_rules! source_text {
    ([$($shared:literal),+], $file:literal $(, $behind:literal)?) => {
        concat!(
            $(include_str!(concat!("../../kernels/", $shared)),)+
            "\n#line 1 \"", $file, "\"\n",
            include_str!(concat!("../../kernels/", $file)),
            $($behind)?
        )
    };
}
pub(crate) use source_text;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_told_by_their_names() {
        let includes = |architecture: Architecture| {
            ["sm_75", "sm_80", "sm_90a", "sm_100", "gfx942"].map(|name| architecture.includes(name))
        };
        assert_eq!(includes(Architecture::Any), [true; 5]);
        assert_eq!(includes(Architecture::Only("sm_90a")), [false, false, true, false, false]);
        assert_eq!(includes(Architecture::NvidiaFrom(80)), [false, true, true, true, false]);
    }
}
