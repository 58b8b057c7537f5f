//! Vulkan's loader and the devices behind it: opened once, and never closed.

use std::{
    ffi::CStr,
    sync::{Mutex, OnceLock},
};

use ash::vk;

use crate::{BackendKind, DeviceId, DeviceInfo, Error, Result, ffi::library};

const FILE: &str = "libvulkan.so.1";
const HINT: &str = "it is Vulkan's loader: install libvulkan1 and a driver, such as mesa-vulkan-drivers";
/// Timeline semaphores belong to it.
const OLDEST: u32 = vk::API_VERSION_1_2;
/// More streams than these share queues.
const MOST_QUEUES: u32 = 8;

/// The loader, and an instance that lives as long as the process.
pub(super) struct Loader {
    pub(super) instance: ash::Instance,
}

/// A device that can do what the backend needs.
#[derive(Clone, Debug)]
pub(super) struct Physical {
    pub(super) raw: vk::PhysicalDevice,
    pub(super) name: String,
    pub(super) kind: vk::PhysicalDeviceType,
    api_version: u32,
    driver: String,
    /// A family of queues that compute and copy, and how many of it there are.
    pub(super) queue_family: u32,
    pub(super) queues: u32,
    /// Bits of a time stamp that count.
    pub(super) timestamp_bits: u32,
    pub(super) limits: vk::PhysicalDeviceLimits,
    /// The largest buffer.
    pub(super) largest_bytes: usize,
    /// The heap of the device's own memory.
    pub(super) heap: usize,
    pub(super) heap_bytes: usize,
    /// The size of the heap from which pinned memory comes.
    pub(super) host_heap_bytes: usize,
    /// The driver reports the free bytes of a heap.
    pub(super) has_budget: bool,
    /// Shaders compute in fp64.
    pub(super) has_f64: bool,
}

/// The loader; [`Error::Unavailable`] where it is missing, or finds no driver.
pub(super) fn loader() -> Result<&'static Loader> {
    static LOADER: OnceLock<Result<Loader>> = OnceLock::new();
    LOADER.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn unavailable(reason: String) -> Error {
    Error::Unavailable { backend: BackendKind::VULKAN, tried: vec![FILE.into()], reason }
}

fn open() -> Result<Loader> {
    let library = library::open(BackendKind::VULKAN, &[FILE], HINT)?;
    // SAFETY: the function's type in the specification; the library is never closed.
    let get_instance_proc_addr = unsafe { library::symbol(library, "vkGetInstanceProcAddr") };
    let get_instance_proc_addr = get_instance_proc_addr.map_err(unavailable)?;
    // SAFETY: the loader's own function, valid as long as the process.
    let entry = unsafe { ash::Entry::from_static_fn(ash::StaticFn { get_instance_proc_addr }) };
    // SAFETY: it takes no arguments.
    let version = unsafe { entry.try_enumerate_instance_version() }.ok().flatten();
    let version = version.unwrap_or(vk::API_VERSION_1_0);
    if version < OLDEST {
        let version = words_of_version(version);
        return Err(unavailable(format!("the loader is Vulkan {version}, and 1.2 is the oldest that works")));
    }
    let application = vk::ApplicationInfo::default().application_name(c"anyroll").api_version(OLDEST);
    let description = vk::InstanceCreateInfo::default().application_info(&application);
    // SAFETY: the description lives through the call.
    let instance = unsafe { entry.create_instance(&description, None) }.map_err(|code| {
        let reason = match code {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => {
                "the loader finds no driver: install one, such as mesa-vulkan-drivers, or give this container the \
                 host's, with its file in /usr/share/vulkan/icd.d or /etc/vulkan/icd.d"
                    .into()
            }
            code => format!("vkCreateInstance failed: {code:?} (code {})", code.as_raw()),
        };
        unavailable(reason)
    })?;
    Ok(Loader { instance })
}

/// The devices that the backend can use, GPUs before processors, else in the loader's order.
pub(super) fn physical_devices() -> Result<Vec<Physical>> {
    // The loader reads its files anew in every call, and the answer does not change.
    static FOUND: Mutex<Option<Vec<Physical>>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap();
    if let Some(found) = &*found {
        return Ok(found.clone());
    }
    let loader = loader()?;
    // SAFETY: the instance is live.
    let all = unsafe { loader.instance.enumerate_physical_devices() };
    let all = all.map_err(|code| {
        unavailable(format!("vkEnumeratePhysicalDevices failed: {code:?} (code {})", code.as_raw()))
    })?;
    let (mut usable, mut refused) = (Vec::new(), Vec::new());
    for raw in all {
        match Physical::read(&loader.instance, raw) {
            Ok(physical) => usable.push(physical),
            Err(why) => refused.push(why),
        }
    }
    if usable.is_empty() {
        let why = if refused.is_empty() { "none".to_owned() } else { refused.join("; ") };
        return Err(unavailable(format!("no device that computes: {why}")));
    }
    usable.sort_by_key(|physical| physical.kind == vk::PhysicalDeviceType::CPU);
    *found = Some(usable.clone());
    Ok(usable)
}

impl Physical {
    /// Reads what the backend has to know, or says what the device lacks.
    fn read(instance: &ash::Instance, raw: vk::PhysicalDevice) -> Result<Self, String> {
        // SAFETY: here and below, `raw` is one of the instance's devices, and the structs are our own.
        let first = unsafe { instance.get_physical_device_properties(raw) };
        let name = words(&first.device_name);
        if first.api_version < OLDEST {
            let version = words_of_version(first.api_version);
            return Err(format!("{name} has Vulkan {version}, and 1.2 is the oldest that works"));
        }
        let mut driver = vk::PhysicalDeviceDriverProperties::default();
        let mut largest = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut properties =
            vk::PhysicalDeviceProperties2::default().push_next(&mut driver).push_next(&mut largest);
        // SAFETY: as above.
        unsafe { instance.get_physical_device_properties2(raw, &mut properties) };
        let limits = properties.properties.limits;
        let mut timeline = vk::PhysicalDeviceTimelineSemaphoreFeatures::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut timeline);
        // SAFETY: as above.
        unsafe { instance.get_physical_device_features2(raw, &mut features) };
        let has_f64 = features.features.shader_float64 == vk::TRUE;
        if timeline.timeline_semaphore != vk::TRUE {
            return Err(format!("{name} has no timeline semaphores"));
        }
        // SAFETY: as above.
        let families = unsafe { instance.get_physical_device_queue_family_properties(raw) };
        let (queue_family, family) =
            computing(&families).ok_or_else(|| format!("{name} has no queue that computes"))?;
        // SAFETY: as above.
        let memory = unsafe { instance.get_physical_device_memory_properties(raw) };
        let (heap, heap_bytes) = heap_of(&memory, vk::MemoryPropertyFlags::DEVICE_LOCAL)
            .ok_or_else(|| format!("{name} has no memory of its own"))?;
        let visible = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let (_, host_heap_bytes) = heap_of(&memory, visible | vk::MemoryPropertyFlags::HOST_CACHED)
            .or_else(|| heap_of(&memory, visible))
            .ok_or_else(|| format!("{name} has no memory that the host sees"))?;
        // SAFETY: as above.
        let extensions = unsafe { instance.enumerate_device_extension_properties(raw) }.unwrap_or_default();
        let has_budget =
            extensions.iter().any(|it| it.extension_name_as_c_str() == Ok(ash::ext::memory_budget::NAME));
        Ok(Self {
            raw,
            name,
            kind: first.device_type,
            api_version: first.api_version,
            driver: format!("{} {}", words(&driver.driver_name), words(&driver.driver_info)),
            queue_family,
            queues: family.queue_count.min(MOST_QUEUES),
            timestamp_bits: family.timestamp_valid_bits,
            limits,
            largest_bytes: usize::try_from(largest.max_memory_allocation_size).unwrap_or(usize::MAX),
            heap,
            heap_bytes,
            host_heap_bytes,
            has_budget,
            has_f64,
        })
    }

    /// Facts that `doctor` shows.
    pub(super) fn info(&self, id: DeviceId) -> DeviceInfo {
        let kind = match self.kind {
            vk::PhysicalDeviceType::DISCRETE_GPU => "GPU with memory of its own",
            vk::PhysicalDeviceType::INTEGRATED_GPU => "GPU with the host's memory",
            vk::PhysicalDeviceType::VIRTUAL_GPU => "GPU of a virtual machine",
            vk::PhysicalDeviceType::CPU => "the host's processor",
            _ => "unknown",
        };
        let gib = |bytes: usize| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
        let details = [
            ("driver", self.driver.trim().to_owned()),
            ("Vulkan", words_of_version(self.api_version)),
            ("kind", kind.to_owned()),
            ("memory", gib(self.heap_bytes)),
            ("largest buffer", gib(self.largest_bytes)),
            ("queues", self.queues.to_string()),
            ("fp64", if self.has_f64 { "yes" } else { "no" }.to_owned()),
            ("models", "no: libtorch does not compute on it".to_owned()),
        ];
        let details = details.map(|(name, value)| (name.to_owned(), value)).to_vec();
        DeviceInfo { id, name: self.name.clone(), total_bytes: Some(self.heap_bytes), details }
    }
}

/// The family that computes and does not draw, which has its own hardware where there is one, or else any that computes.
fn computing(families: &[vk::QueueFamilyProperties]) -> Option<(u32, vk::QueueFamilyProperties)> {
    let computes = (0u32..).zip(families).filter(|(_, it)| it.queue_flags.contains(vk::QueueFlags::COMPUTE));
    let chosen = computes.min_by_key(|(_, it)| it.queue_flags.contains(vk::QueueFlags::GRAPHICS));
    chosen.map(|(index, family)| (index, *family))
}

/// The heap of the first type of memory with these properties, which is the one that the allocator takes.
fn heap_of(
    memory: &vk::PhysicalDeviceMemoryProperties,
    wanted: vk::MemoryPropertyFlags,
) -> Option<(usize, usize)> {
    let found = memory.memory_types_as_slice().iter().find(|it| it.property_flags.contains(wanted))?;
    let index = found.heap_index as usize;
    Some((index, usize::try_from(memory.memory_heaps_as_slice()[index].size).unwrap_or(usize::MAX)))
}

fn words(text: &[std::ffi::c_char]) -> String {
    // SAFETY: the driver's text is an array of our own, which it ends with a NUL.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

fn words_of_version(version: u32) -> String {
    let (major, minor) = (vk::api_version_major(version), vk::api_version_minor(version));
    format!("{major}.{minor}.{}", vk::api_version_patch(version))
}
