//! The accelerators that are open in this process: one object each, and the way from a tensor to its device.

use std::sync::{Arc, Mutex, Weak};

use crate::{Device, DeviceId, Result, TorchDevice};

static OPEN: Mutex<Vec<Weak<dyn Device>>> = Mutex::new(Vec::new());

/// The device that is open already, or the one that `open` makes.
pub(crate) fn once(id: DeviceId, open: impl FnOnce() -> Result<Arc<dyn Device>>) -> Result<Arc<dyn Device>> {
    let mut all = OPEN.lock().unwrap();
    all.retain(|device| device.strong_count() > 0);
    if let Some(device) = all.iter().filter_map(Weak::upgrade).find(|device| device.id() == id) {
        return Ok(device);
    }
    let device = open()?;
    all.push(Arc::downgrade(&device));
    Ok(device)
}

/// The open device on which libtorch keeps tensors of this kind and index.
pub(crate) fn at(torch: TorchDevice) -> Option<Arc<dyn Device>> {
    let all = OPEN.lock().unwrap();
    all.iter().filter_map(Weak::upgrade).find(|device| device.torch_device() == Some(torch))
}
