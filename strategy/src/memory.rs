//! Flat buffers of a unit, and views of its parameters in them.

use std::{collections::HashMap, ops::Range};

use anyroll_backends::{Buffer, DType, Stream};
use anyroll_models::{ParamSpec, Unit};
use tch::Tensor;

use crate::{Result, layout::Layout};

/// One dense view a parameter, in the order of the unit's parameters.
pub(crate) fn param_views(unit: &Unit, layout: &Layout, buffer: &Buffer) -> Result<Vec<Tensor>> {
    let view =
        |(spec, range): (&ParamSpec, &Range<usize>)| Ok(buffer.slice(range.clone()).tensor(&spec.shape)?);
    unit.params.iter().zip(&layout.params).map(view).collect()
}

/// The whole buffer as one row.
pub(crate) fn flat(buffer: &Buffer) -> Result<Tensor> {
    Ok(buffer.tensor(&[buffer.len() as i64])?)
}

/// Whole-unit buffers that are in use only for a while: gathered weights, gradients of a micro-batch. One that
/// comes back is used again, so that after the first step nothing is allocated.
#[derive(Debug)]
pub(crate) struct Pool {
    stream: Stream,
    /// By layout: blocks write parameters only, so what is zero between them stays zero.
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

    /// The caller has ordered the pool's stream after every use of the buffer.
    pub(crate) fn put(&mut self, layout: &Layout, buffer: Buffer) {
        match self.free.get_mut(layout) {
            Some(free) => free.push(buffer),
            None => drop(self.free.insert(layout.clone(), vec![buffer])),
        }
    }

    /// Gives the device's memory back that nobody uses at the moment.
    pub(crate) fn clear(&mut self) {
        self.free.clear();
    }
}
