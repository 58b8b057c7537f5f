//! Memory of functions that libtorch differentiates: they run on tensors without values ([`anyroll_backends::paper`]).

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

    /// Returns the memory of a block of `model`, as [`crate::autograd`] runs it. `run` is the function of each block: of its
    /// index, its weights and its input. `input` is that of the first block, and true if it needs a gradient.
    pub fn block_bytes(
        &self,
        model: &impl Model,
        block: usize,
        input: (&Tensor, bool),
        weights_last: bool,
        run: impl Fn(usize, &Weights, &Tensor) -> Result<Tensor>,
    ) -> Result<BlockBytes> {
        let mut x = input.0.shallow_clone();
        for before in 0..block {
            x = self.with_weights(model, before, |weights| run(before, weights, &x))?;
        }
        let input = (&x, block > 0 || input.1);
        self.with_weights(model, block, |weights| {
            self.bytes_of_run(model, block, (weights, weights_last), input, |weights, x| {
                run(block, weights, x)
            })
        })
    }

    fn with_weights<R>(
        &self,
        model: &impl Model,
        block: usize,
        work: impl FnOnce(&Weights) -> Result<R>,
    ) -> Result<R> {
        let units = model.units_of(block).iter().map(|&unit| self.params(&model.units()[unit]));
        let params = units.collect::<Result<Vec<_>>>()?;
        work(&Weights::new(&params.iter().map(Vec::as_slice).collect::<Vec<_>>()))
    }

    fn bytes_of_run(
        &self,
        model: &impl Model,
        block: usize,
        (weights, weights_last): (&Weights, bool),
        (x, input_grad): (&Tensor, bool),
        run: impl Fn(&Weights, &Tensor) -> Result<Tensor>,
    ) -> Result<BlockBytes> {
        let (output, scoring) = self.peak(|| Ok(bytes(&run(weights, x)?)))?;
        let base = self.meter.live();
        let trains = |unit: usize| model.units()[model.units_of(block)[unit]].trainable;
        let record = || Graph::record(weights, trains, &[(x, input_grad)], one_to_one(&run));
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
