//! The opened device: its queues, and errors that name it.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use ash::vk;

use super::loader::{Loader, Physical, loader};
use crate::{DeviceId, Error, Result};

/// A device of the driver. It is closed when the last stream, event and allocation is gone.
pub(super) struct Context {
    pub(super) id: DeviceId,
    pub(super) loader: &'static Loader,
    pub(super) physical: Physical,
    pub(super) device: ash::Device,
    queues: Vec<Mutex<vk::Queue>>,
    next_queue: AtomicUsize,
}

impl Context {
    pub(super) fn open(id: DeviceId, physical: Physical) -> Result<Self> {
        let loader = loader()?;
        let priorities = vec![1.0; physical.queues as usize];
        let queues = [vk::DeviceQueueCreateInfo::default()
            .queue_family_index(physical.queue_family)
            .queue_priorities(&priorities)];
        let extensions: &[_] =
            if physical.has_budget { &[ash::ext::memory_budget::NAME.as_ptr()] } else { &[] };
        let features = vk::PhysicalDeviceFeatures::default().shader_float64(physical.has_f64);
        let mut timeline = vk::PhysicalDeviceTimelineSemaphoreFeatures::default().timeline_semaphore(true);
        let description = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(extensions)
            .enabled_features(&features)
            .push_next(&mut timeline);
        // SAFETY: one of the instance's devices, which has what is asked for; the description lives through the call.
        let device = unsafe { loader.instance.create_device(physical.raw, &description, None) }
            .map_err(|code| error(id, "vkCreateDevice", code))?;
        // SAFETY: the device has as many queues of this family.
        let queue = |index| Mutex::new(unsafe { device.get_device_queue(physical.queue_family, index) });
        let queues = (0..physical.queues).map(queue).collect();
        Ok(Self { id, loader, physical, device, queues, next_queue: AtomicUsize::new(0) })
    }

    /// A queue for a new stream. Streams take turns, and may share one: what is submitted waits for nothing that is
    /// not submitted yet.
    pub(super) fn choose_queue(&self) -> usize {
        self.next_queue.fetch_add(1, Ordering::Relaxed) % self.queues.len()
    }

    /// # Safety
    /// The description is valid for this device, and what it names lives until the work is done.
    pub(super) unsafe fn submit(&self, queue: usize, description: vk::SubmitInfo<'_>) -> Result<()> {
        let queue = self.queues[queue].lock().unwrap();
        // SAFETY: the caller's promise; the lock keeps other threads away from the queue.
        unsafe { self.device.queue_submit(*queue, &[description], vk::Fence::null()) }
            .map_err(|code| self.error("vkQueueSubmit", code))
    }

    pub(super) fn error(&self, call: &'static str, code: vk::Result) -> Error {
        error(self.id, call, code)
    }
}

/// A failed call, in the words of the specification.
fn error(device: DeviceId, call: &'static str, code: vk::Result) -> Error {
    let message = match code {
        vk::Result::ERROR_DEVICE_LOST => {
            "ERROR_DEVICE_LOST: the driver has reset the device, or it is gone; this process cannot use it any more"
                .into()
        }
        code => format!("{code:?}"),
    };
    Error::Driver { device, call, code: code.as_raw().into(), message }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: whatever was made from the device holds on to it, so that all of it is gone. To wait is to be sure
        // that no queue is at work; a device that is lost has none that is.
        unsafe {
            let _ = self.device.device_wait_idle();
            self.device.destroy_device(None);
        }
    }
}
