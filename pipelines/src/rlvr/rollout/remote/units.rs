//! Form of a unit's weights on their way to an engine.

use anyroll_backends::{Buffer, DType, Stream};
use anyroll_strategy::Weights;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::Result;

/// Elements to whose multiple each parameter is aligned, for kernels that read several at once.
const ALIGNMENT: usize = 64;

/// A unit: parameters of one dtype, which travel as one buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Form {
    /// Index in [`DType::ALL`].
    dtype: usize,
    /// Shape of each parameter.
    pub(super) shapes: Vec<Vec<i64>>,
}

impl Form {
    /// Forms of all units.
    pub(super) fn all(weights: &Weights) -> Vec<Self> {
        weights.iter().map(|unit| Self::of(unit)).collect()
    }

    fn of(unit: &[Tensor]) -> Self {
        let kind = unit.first().map_or(tch::Kind::Float, Tensor::kind);
        assert!(unit.iter().all(|tensor| tensor.kind() == kind), "a unit has one dtype");
        let dtype = DType::ALL.iter().position(|dtype| dtype.kind() == kind);
        Self { dtype: dtype.expect("a dtype of weights"), shapes: unit.iter().map(Tensor::size).collect() }
    }

    /// Memory for the unit on the device of `stream`, and its parameters in it.
    pub(super) fn memory(&self, stream: &Stream) -> Result<(Buffer, Vec<Tensor>)> {
        let elements = |shape: &Vec<i64>| shape.iter().product::<i64>() as usize;
        let len = self.shapes.iter().map(|shape| elements(shape).next_multiple_of(ALIGNMENT)).sum();
        let buffer = Buffer::zeros(stream, len, DType::ALL[self.dtype])?;
        let mut start = 0;
        let views = self.shapes.iter().map(|shape| {
            let range = start..start + elements(shape);
            start += range.len().next_multiple_of(ALIGNMENT);
            Ok(buffer.slice(range).tensor(shape)?)
        });
        let views = views.collect::<Result<_>>()?;
        Ok((buffer, views))
    }
}

#[cfg(test)]
mod tests {
    use anyroll_backends::{BackendKind, DeviceId, open};

    use super::*;

    #[test]
    fn a_unit_arrives_in_memory_that_has_its_form() {
        let device = open(DeviceId { backend: BackendKind::CPU, ordinal: 0 }).unwrap();
        let stream = Stream::torch(&device).unwrap();
        let tensor = |shape: &[i64]| Tensor::rand(shape, (tch::Kind::BFloat16, tch::Device::Cpu));
        let weights = vec![vec![tensor(&[3, 5]), tensor(&[7])], vec![]];
        let forms: Vec<Form> =
            serde_json::from_str(&serde_json::to_string(&Form::all(&weights)).unwrap()).unwrap();
        assert_eq!(forms, Form::all(&weights));
        let (buffer, mut views) = forms[0].memory(&stream).unwrap();
        for (view, tensor) in views.iter_mut().zip(&weights[0]) {
            view.copy_(tensor);
        }
        assert_eq!((buffer.len(), buffer.dtype()), (2 * ALIGNMENT, DType::Bf16));
        assert_eq!(views, weights[0]);
        assert!(forms[1].memory(&stream).unwrap().0.is_empty());
    }
}
