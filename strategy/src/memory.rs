//! Flat buffers of a unit, and views of its parameters in them.

use std::{collections::HashMap, ops::Range};

use anyroll_backends::{Buffer, DType, Stream};
use anyroll_models::{ParamSpec, Unit};
use tch::Tensor;

use crate::{Result, layout::Layout};

/// Returns one dense view per parameter, in the order of the unit's parameters.
pub(crate) fn param_views(unit: &Unit, layout: &Layout, buffer: &Buffer) -> Result<Vec<Tensor>> {
    let view =
        |(spec, range): (&ParamSpec, &Range<usize>)| Ok(buffer.slice(range.clone()).tensor(&spec.shape)?);
    unit.params.iter().zip(&layout.params).map(view).collect()
}

/// Returns the whole buffer as one row.
pub(crate) fn flat(buffer: &Buffer) -> Result<Tensor> {
    Ok(buffer.tensor(&[buffer.len() as i64])?)
}

/// Whole-unit buffers that are in use only for a while: gathered weights, or gradients of a micro-batch.
/// Returned buffers are reused, so nothing is allocated after the first step.
#[derive(Debug)]
pub(crate) struct Pool {
    stream: Stream,
    /// Keyed by layout. Blocks write only parameters, so the padding between them stays zero.
    free: HashMap<Layout, Vec<Buffer>>,
}

impl Pool {
    pub(crate) fn new(stream: &Stream) -> Self {
        Self { stream: stream.clone(), free: HashMap::new() }
    }

    pub(crate) fn take(&mut self, layout: &Layout, dtype: DType) -> Result<Buffer> {
        if let Some(free) = self.free.get_mut(layout)
            && let Some(index) = free.iter().rposition(|buffer| buffer.dtype() == dtype)
        {
            return Ok(free.swap_remove(index));
        }
        Ok(Buffer::zeros(&self.stream, layout.len, dtype)?)
    }

    /// Returns a buffer. The caller has ordered the pool's stream after every use of it.
    pub(crate) fn put(&mut self, layout: &Layout, buffer: Buffer) {
        match self.free.get_mut(layout) {
            Some(free) => free.push(buffer),
            None => drop(self.free.insert(layout.clone(), vec![buffer])),
        }
    }

    /// Frees the device memory of unused buffers.
    pub(crate) fn clear(&mut self) {
        self.free.clear();
    }
}
