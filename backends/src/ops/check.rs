//! The engine that runs an operation, and the checks of tensors before a kernel gets their addresses.

use std::{ffi::c_void, sync::Arc};

use tch::{Kind, Tensor};

use super::{Error, Result};
use crate::{
    Device,
    kernels::{
        self, Heads, Narrow,
        diffusion::{Images, Spread},
    },
};

/// The kernels that run an operation. Without any, [`super::composite`] does.
#[derive(Debug)]
pub(super) enum Engine {
    /// The shim's kernels.
    Cpu,
    /// The device's own kernels, compiled at run time.
    Device(Arc<dyn Device>),
}

impl Engine {
    /// The shim has kernels for fp32, devices have them for fp32, bf16 and fp16.
    pub fn of(tensor: &Tensor) -> Option<Engine> {
        match (tensor.device(), tensor.kind()) {
            (tch::Device::Cpu, Kind::Float) => Some(Engine::Cpu),
            (_, kind) if kernels::rows::has_kernels(kind) => kernels::device_of(tensor).map(Engine::Device),
            _ => None,
        }
    }
}

/// Returns true for 16-bit values on a CPU, which have to be widened for the shim's kernels.
pub(super) fn is_narrow_on_host(tensor: &Tensor) -> bool {
    tensor.device() == tch::Device::Cpu && Narrow::of(tensor.kind()).is_some()
}

/// Checks of one call: they have the operation's name for messages, and the dtype and device of the first tensor, which the
/// others have to match.
#[derive(Clone, Copy)]
pub(super) struct Args {
    op: &'static str,
    kind: Kind,
    device: tch::Device,
}

impl Args {
    /// Checks for `op`, whose values have the dtype and the device of `like`.
    pub fn new(op: &'static str, like: &Tensor) -> Args {
        Args { op, kind: like.kind(), device: like.device() }
    }

    /// The dtype of its values.
    pub fn kind(self) -> Kind {
        self.kind
    }

    /// The same as a 16-bit float; `None` if it is another.
    pub fn narrow(self) -> Option<Narrow> {
        Narrow::of(self.kind)
    }

    /// The error for an argument.
    pub fn refuse(self, argument: &'static str, problem: impl Into<String>) -> Error {
        Error::Argument { op: self.op, argument, problem: problem.into() }
    }

    /// A new tensor of values.
    pub fn empty(self, size: &[i64]) -> Result<Tensor> {
        Ok(Tensor::f_empty(size, (self.kind, self.device))?)
    }

    /// A new fp32 tensor.
    pub fn empty_floats(self, size: &[i64]) -> Result<Tensor> {
        Ok(Tensor::f_empty(size, (Kind::Float, self.device))?)
    }

    /// The sizes of a tensor with exactly `N` dimensions.
    pub fn dims<const N: usize>(self, argument: &'static str, tensor: &Tensor) -> Result<[i64; N]> {
        let size = tensor.size();
        size.as_slice()
            .try_into()
            .map_err(|_| self.refuse(argument, format!("has shape {size:?}, expected {N} dimensions")))
    }

    /// Dense values.
    pub fn values(self, argument: &'static str, tensor: &Tensor, expected: &[i64]) -> Result<*mut c_void> {
        self.dense(argument, tensor, expected, self.kind)
    }

    /// Dense fp32 values, whatever the dtype of the others.
    pub fn floats(self, argument: &'static str, tensor: &Tensor, expected: &[i64]) -> Result<*mut f32> {
        Ok(self.dense(argument, tensor, expected, Kind::Float)?.cast())
    }

    /// Dense int64 values. On a CPU each is checked to be in `0..bound`, since kernels index with them unchecked. On a device
    /// the kernel checks, since reading them here would wait for it.
    pub fn indices(
        self,
        argument: &'static str,
        tensor: &Tensor,
        expected: &[i64],
        bound: i64,
    ) -> Result<*const i64> {
        let data: *const i64 = self.dense(argument, tensor, expected, Kind::Int64)?.cast_const().cast();
        let count = tensor.numel();
        if self.device != tch::Device::Cpu || count == 0 {
            return Ok(data);
        }
        // SAFETY: the tensor is dense, int64 and in host memory, so `count` values lie at `data`, and it
        // outlives the slice.
        let values = unsafe { std::slice::from_raw_parts(data, count) };
        match values.iter().find(|&&value| value < 0 || value >= bound) {
            None => Ok(data),
            Some(value) => Err(self.refuse(argument, format!("holds {value}, outside of 0..{bound}"))),
        }
    }

    /// The values of a `[rows, heads, dim]` view whose rows may lie apart; with one head also `[rows, dim]`.
    pub fn heads(self, argument: &'static str, tensor: &Tensor, expected: [i64; 3]) -> Result<Heads> {
        let [rows, heads, dim] = expected;
        let flat = tensor.dim() == 2 && heads == 1;
        let flat_size = [rows, dim];
        self.matches(argument, tensor, if flat { &flat_size } else { &expected }, self.kind)?;
        let strides = tensor.stride();
        let (stride, within) = (strides[0], &strides[1..]);
        let dense = if flat { within == [1] } else { within == [dim, 1] || (heads == 1 && within[1] == 1) };
        if !dense || (rows > 1 && stride < heads * dim) {
            return Err(self.refuse(argument, format!("has strides {strides:?}, expected dense rows")));
        }
        Ok(Heads { data: tensor.data_ptr(), stride })
    }

    /// The values of `[images, tokens, channels]` where images may lie apart.
    pub fn images(self, argument: &'static str, tensor: &Tensor, expected: [i64; 3]) -> Result<Images> {
        self.matches(argument, tensor, &expected, self.kind)?;
        let (strides, [_, tokens, channels]) = (tensor.stride(), expected);
        if strides[2] != 1 || (tokens > 1 && strides[1] != channels) {
            return Err(self.refuse(argument, format!("has strides {strides:?}, expected dense rows")));
        }
        Ok(Images { data: tensor.data_ptr(), stride: strides[0] })
    }

    /// The values of `[images, tokens, heads, dim]` of which the last dimension is dense.
    pub fn spread(self, argument: &'static str, tensor: &Tensor, expected: [i64; 4]) -> Result<Spread> {
        self.matches(argument, tensor, &expected, self.kind)?;
        let [image, token, head, 1] = tensor.stride()[..] else {
            return Err(
                self.refuse(argument, format!("has strides {:?}, expected dense heads", tensor.stride()))
            );
        };
        Ok(Spread { data: tensor.data_ptr(), strides: [image, token, head] })
    }

    /// The values of an fp32 matrix in any order, and its strides.
    pub fn float_matrix(
        self,
        argument: &'static str,
        tensor: &Tensor,
        expected: [i64; 2],
    ) -> Result<(*mut f32, [i64; 2])> {
        self.matches(argument, tensor, &expected, Kind::Float)?;
        let strides = tensor.stride();
        Ok((tensor.data_ptr().cast(), [strides[0], strides[1]]))
    }

    /// The result of a call of the shim. Call it on the same thread, right after that call.
    pub fn ran(self, code: std::ffi::c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(Error::Kernel { op: self.op, message: crate::ffi::last_error() })
    }

    /// The result of a launch.
    pub fn launched(self, launched: crate::Result<()>) -> Result<()> {
        launched.map_err(|error| Error::Kernel { op: self.op, message: error.to_string() })
    }

    /// Dense elements of a kind.
    pub fn dense(
        self,
        argument: &'static str,
        tensor: &Tensor,
        expected: &[i64],
        kind: Kind,
    ) -> Result<*mut c_void> {
        self.matches(argument, tensor, expected, kind)?;
        if !tensor.is_contiguous() {
            return Err(self.refuse(argument, format!("is not contiguous: strides {:?}", tensor.stride())));
        }
        Ok(tensor.data_ptr())
    }

    /// Checks that a tensor has this shape, and the dtype and device of the others.
    pub fn matches_values(self, argument: &'static str, tensor: &Tensor, expected: &[i64]) -> Result<()> {
        self.matches(argument, tensor, expected, self.kind)
    }

    fn matches(self, argument: &'static str, tensor: &Tensor, expected: &[i64], kind: Kind) -> Result<()> {
        let size = tensor.size();
        if size != expected {
            return Err(self.refuse(argument, format!("has shape {size:?}, expected {expected:?}")));
        }
        let found = (tensor.kind(), tensor.device());
        if found != (kind, self.device) {
            return Err(
                self.refuse(argument, format!("is {found:?}, expected {kind:?} on {:?}", self.device))
            );
        }
        Ok(())
    }
}
