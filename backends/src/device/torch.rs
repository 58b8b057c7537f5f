//! [`TorchDevice`]: a device as libtorch and tch name it.

/// Place of a device's tensors in libtorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchDevice {
    /// `c10::DeviceType`: 0 CPU, 1 CUDA (also of libtorch's build for ROCm), 20 PrivateUse1.
    pub kind: i32,
    /// Index among the devices of that type; -1 for the CPU.
    pub index: i32,
    tch: tch::Device,
}

impl TorchDevice {
    /// Tensors in the host's memory.
    pub const CPU: Self = Self::new(0, -1, tch::Device::Cpu);

    /// The device that c10 numbers `kind` and `index`. `tch` is the name by which tch reaches it: its own, or one that a
    /// backend borrows for a device type that tch has no name for.
    pub const fn new(kind: i32, index: i32, tch: tch::Device) -> Self {
        Self { kind, index, tch }
    }

    /// The device as tch names it.
    pub const fn tch(self) -> tch::Device {
        self.tch
    }
}
