//! Memory of functions that libtorch differentiates: they run on tensors without values ([`anyroll_backends::paper`]).

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

use anyroll_backends::paper::Meter;
use tch::{Kind, Tensor};

use crate::Result;
use crate::autograd::{Graph, one_to_one};
use crate::footprint::{BlockBytes, Runs};
use crate::model::{Model, Unit, Weights};

/// A measurement, and the run that it is of.
pub(crate) struct Paper {
    meter: Meter,
    runs: Runs,
}

impl Paper {
    /// Begins a measurement.
    pub fn new(runs: Runs) -> Result<Paper> {
        Ok(Paper { meter: Meter::new(runs.on_host)?, runs })
    }

    /// Returns a tensor in the weights' dtype.
    pub fn tensor(&self, size: &[usize]) -> Result<Tensor> {
        self.of_kind(size, self.runs.dtype.kind())
    }

    /// Returns a tensor of this dtype.
    pub fn of_kind(&self, size: &[usize], kind: Kind) -> Result<Tensor> {
        let size: Vec<i64> = size.iter().map(|&it| it as i64).collect();
        Ok(self.meter.tensor(&size, kind)?)
    }

    /// Returns the parameters of a unit.
    pub fn params(&self, unit: &Unit) -> Result<Vec<Tensor>> {
        let kind = self.runs.dtype.kind();
        unit.params.iter().map(|spec| Ok(self.meter.tensor(&spec.shape, kind)?)).collect()
    }

    /// Runs `work`. Returns its result and the peak of memory that it takes, in bytes.
    pub fn peak<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, usize)> {
        let base = self.meter.restart();
        let result = work()?;
        Ok((result, self.meter.peak() - base))
    }

    /// Returns the memory of a block of `model`, which is the function `run` of its weights and of `x`, as
    /// [`crate::autograd`] runs it. `input_grad` is true if `x` needs a gradient.
    pub fn block_bytes(
        &self,
        model: &impl Model,
        block: usize,
        (x, input_grad): (&Tensor, bool),
        weights_last: bool,
        run: impl Fn(&Weights, &Tensor) -> Result<Tensor>,
    ) -> Result<BlockBytes> {
        let units: Vec<&Unit> = model.units_of(block).iter().map(|&unit| &model.units()[unit]).collect();
        let params = units.iter().map(|unit| self.params(unit)).collect::<Result<Vec<_>>>()?;
        let views: Vec<&[Tensor]> = params.iter().map(Vec::as_slice).collect();
        let weights = Weights::new(&views);
        let (output, scoring) = self.peak(|| Ok(bytes(&run(&weights, x)?)))?;

        let base = self.meter.live();
        let trains = |unit: usize| units[unit].trainable;
        let record = || Graph::record(&weights, trains, &[(x, input_grad)], one_to_one(&run));
        let (graph, forward) = self.peak(record)?;
        let kept = self.meter.live() - base;
        let is_followed = graph.outputs[0].requires_grad();
        // In addition to saved tensors and the output's gradient.
        let backward = match is_followed {
            true => {
                let grad = graph.outputs[0].f_detach()?.f_empty_like()?;
                self.peak(|| graph.gradients(&[&grad]))?.1
            }
            false => 0,
        };
        let input = if block == 0 { 0 } else { bytes(x) };
        // An inner block's output counts as the next block's input; the graph holds it to the end.
        let next = if block + 1 == model.blocks() { 0 } else { output };
        let bytes = BlockBytes { input, forward, scoring, output_grad: output, ..BlockBytes::default() };
        if weights_last {
            let saved = kept - next + input;
            return Ok(BlockBytes { saved, thinned: saved, backward: backward + next, ..bytes });
        }
        let saved = input + output - next;
        // Only the input is kept, and backward recomputes the block.
        let backward = if is_followed { forward.max(kept + backward) } else { 0 };
        Ok(BlockBytes { saved, thinned: saved, forward: scoring, backward, ..bytes })
    }
}

/// Returns the bytes of a tensor's values.
pub(crate) fn bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// Measured bytes, kept under what was asked: the plans of a run's choices ask for the same many times.
#[derive(Debug)]
pub(crate) struct Memo<V>(Mutex<HashMap<String, V>>);

impl<V> Default for Memo<V> {
    fn default() -> Self {
        Memo(Mutex::default())
    }
}

impl<V: Copy> Memo<V> {
    /// Returns the bytes for `asked`, which `measure` finds at the first time. What is measured runs with values, too, so that
    /// a failure is an error in the program.
    pub fn once(&self, asked: impl Debug, measure: impl FnOnce() -> Result<V>) -> V {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = format!("{asked:?}");
        if let Some(&found) = known().get(&asked) {
            return found;
        }
        let found = measure().expect("a function that is measured runs");
        known().insert(asked, found);
        found
    }
}
