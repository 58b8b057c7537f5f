//! Device of a command.

use std::sync::Arc;

use anyroll_backends::{BackendKind, Device, DeviceId, devices, open};
use anyroll_config::Precision;

use crate::Result;

/// A device with the dtype of its models.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceChoice {
    /// The backend; `None` for the first one that runs models.
    pub backend: Option<BackendKind>,
    /// Ordinal of the device.
    pub ordinal: usize,
    /// The dtype; `None` for fp32 on a CPU, bf16 elsewhere.
    pub precision: Option<Precision>,
}

impl DeviceChoice {
    /// Opens the device.
    ///
    /// # Errors
    /// `Unsupported` for a backend that runs no models, or the backend's own error.
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        let usable = |kind: &BackendKind| kind.runs_models() && devices(*kind).is_ok();
        let backend = self.backend.or_else(|| BackendKind::all().find(usable));
        let backend = backend.unwrap_or(BackendKind::CPU);
        if !backend.runs_models() {
            let what =
                "models: libtorch does not compute on it; leave `--backend` out for the first that does"
                    .into();
            return Err(anyroll_backends::Error::Unsupported { backend, what }.into());
        }
        Ok(open(DeviceId { backend, ordinal: self.ordinal })?)
    }

    /// The dtype on this device.
    pub fn precision(&self, device: &dyn Device) -> Precision {
        let usual = if device.id().backend.is_host() { Precision::Fp32 } else { Precision::Bf16 };
        self.precision.unwrap_or(usual)
    }
}
