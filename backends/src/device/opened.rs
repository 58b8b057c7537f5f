//! The accelerators that this process has open: one object each, and the device of a tensor.

use std::sync::{Arc, Mutex, Weak};

use super::{Device, error::Result, kind::DeviceId, torch::TorchDevice};

static OPEN: Mutex<Vec<Weak<dyn Device>>> = Mutex::new(Vec::new());

/// Returns the device if it is open already, and otherwise the one that `open` makes.
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

/// The open device on which libtorch keeps tensors of `device`.
pub(crate) fn holder(device: tch::Device) -> Option<Arc<dyn Device>> {
    let all = OPEN.lock().unwrap();
    let holds = |it: &Arc<dyn Device>| it.torch_device().is_some_and(|torch| torch.tch() == device);
    all.iter().filter_map(Weak::upgrade).find(holds)
}

/// c10's numbers of a device of libtorch's; `None` for the host, and for an accelerator that is not open.
pub(crate) fn torch_device(device: tch::Device) -> Option<TorchDevice> {
    holder(device)?.torch_device()
}
