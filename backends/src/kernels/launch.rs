//! Launches: grids, the arguments of a kernel, and the device of a tensor.

use std::{ffi::c_void, sync::Arc};

use tch::Tensor;

use crate::{Device, Grid, device::opened, paper};

pub(crate) const THREADS: u32 = 256;
/// Bytes that one thread of an elementwise kernel moves at a time.
const BYTES_OF_A_THREAD: usize = 16;
/// Launches a kernel on libtorch's stream with these values as its parameters. A grid without blocks launches nothing.
macro_rules! launch {
    ($device:expr, $kernel:expr, $grid:expr, [$($argument:expr),+ $(,)?]) => {
        match $grid {
            $crate::Grid { blocks: 0, .. } => Ok(()),
            grid => $device.launch(
                $kernel,
                grid,
                &mut [$((&raw mut *&mut { $argument }).cast::<std::ffi::c_void>()),+],
                $device.torch_stream()?,
            ),
        }
    };
}
pub(crate) use launch;

/// A grid of `blocks` blocks, a number that comes from the sizes of tensors.
pub(crate) fn grid(blocks: i64, threads: u32) -> Grid {
    Grid::new(u32::try_from(blocks).expect("sizes of tensors that exist"), threads)
}

/// The device that holds a tensor, if it has kernels.
pub(crate) fn device_of(tensor: &Tensor) -> Option<Arc<dyn Device>> {
    let device = if paper::has(tensor) { paper::device() } else { opened::holder(tensor.device()) };
    device.filter(|device| device.has_kernels())
}

/// Number of blocks for `bytes` of work. A kernel with fewer loops.
pub(crate) fn blocks(bytes: usize) -> u32 {
    let blocks = bytes.div_ceil(BYTES_OF_A_THREAD * THREADS as usize);
    u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32)
}

pub(crate) fn erase<T>(argument: &mut T) -> *mut c_void {
    (&raw mut *argument).cast()
}
