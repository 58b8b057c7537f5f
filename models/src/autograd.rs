//! Gradients of a single block by libtorch's autograd.
//!
//! A block without a hand-written backward is a function of its weights and its input. If the weights stay in
//! place from forward to backward, forward keeps that function's graph. If they may be freed in between, the
//! graph would point to freed memory: forward then keeps only the input, and backward recomputes the block.

use anyroll_backends::ops::Store;
use tch::Tensor;

use crate::Result;
use crate::footprint::{BlockBytes, Memo};
use crate::model::{Grads, Model, Output, OutputGrad, ParamSpec, Saved, Unit, Weights};

/// A [`Model`] whose blocks are functions from one tensor to one tensor.
pub trait AutogradModel: Send + Sync {
    /// Input of a forward pass.
    type Batch;

    /// Returns the units of the blocks.
    fn layout(&self) -> &Layout;

    /// Returns true if blocks run with their adapters, where they have any.
    fn adapters(&self, _: &Self::Batch) -> bool {
        true
    }

    /// Returns the first block's input, and true if backward must compute its gradient.
    fn input<'a>(&self, batch: &'a Self::Batch) -> (&'a Tensor, bool);

    /// Returns the output of a block for `x`, the output of the previous block or [`Self::input`]'s tensor.
    ///
    /// # Errors
    /// A batch that does not fit the model, found by its first block, or libtorch's.
    fn run(&self, block: usize, weights: &Weights, x: &Tensor, batch: &Self::Batch) -> Result<Tensor>;
}

/// Returns the weights that a block of `model` reads for `batch`.
fn weights_for<'a, T: AutogradModel>(model: &T, weights: &Weights<'a>, batch: &T::Batch) -> Weights<'a> {
    if model.adapters(batch) { *weights } else { weights.first() }
}

/// The units of a model. Each block reads the unit with its index and then the unit of its adapters.
#[derive(Debug)]
pub struct Layout {
    units: Vec<Unit>,
    units_of: Vec<Vec<usize>>,
    pub(crate) measured: Memo<BlockBytes>,
}

impl Layout {
    /// Creates the layout of a model with one block per unit.
    pub fn new(units: Vec<Unit>) -> Layout {
        let units_of = (0..units.len()).map(|unit| vec![unit]).collect();
        Layout { units, units_of, measured: Memo::default() }
    }

    /// Returns the first inner block whose units have the parameters of those of `block`, if that is an inner block.
    pub(crate) fn first_alike(&self, block: usize) -> usize {
        let is_inner = block > 0 && block + 1 < self.units_of.len();
        let params = |block: usize| {
            let units = self.units_of[block].iter().map(|&unit| &self.units[unit]);
            units.flat_map(|unit| unit.params.iter().map(|param| (&param.shape, unit.trainable)))
        };
        (1..block).find(|&first| is_inner && params(first).eq(params(block))).unwrap_or(block)
    }

    /// Adds adapter parameters per block, in block order, and freezes all other units.
    #[must_use]
    pub fn with_adapters(mut self, adapters: Vec<Vec<ParamSpec>>) -> Layout {
        self.units.iter_mut().for_each(|unit| unit.trainable = false);
        for (block, params) in adapters.into_iter().enumerate() {
            if !params.is_empty() {
                self.units_of[block].push(self.units.len());
                let name = format!("{}.lora", self.units[block].name);
                self.units.push(Unit { name, params, trainable: true });
            }
        }
        self
    }
}

impl<T: AutogradModel> Model for T {
    type Batch = T::Batch;
    type Scores = Tensor;
    type ScoresGrad = Tensor;

    fn units(&self) -> &[Unit] {
        &self.layout().units
    }

    fn blocks(&self) -> usize {
        self.layout().units_of.len()
    }

    fn units_of(&self, block: usize) -> &[usize] {
        &self.layout().units_of[block]
    }

    fn forward(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &T::Batch,
        save: bool,
    ) -> Result<(Output<Tensor>, Saved)> {
        let weights = weights_for(self, weights, batch);
        let (input, input_grad) = x.map_or_else(|| self.input(batch), |x| (x, true));
        let run = |weights: &Weights, x: &Tensor| self.run(block, weights, x, batch);
        let (out, kept) = if save && weights.lasts() {
            let layout = self.layout();
            let trains = |unit: usize| layout.units[layout.units_of[block][unit]].trainable;
            let graph = Graph::record(&weights, trains, &[(input, input_grad)], one_to_one(run))?;
            (graph.outputs[0].f_detach()?, graph.into_tensors())
        } else {
            let kept = x.filter(|_| save).map(Tensor::shallow_clone);
            (run(&weights, input)?, kept.into_iter().collect())
        };
        let is_last = block + 1 == self.blocks();
        let output = if is_last { Output::Scores(out) } else { Output::Hidden(out) };
        Ok((output, Saved(kept)))
    }

    fn backward(
        &self,
        block: usize,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        grad_output: OutputGrad<Tensor>,
        batch: &T::Batch,
    ) -> Result<Option<Tensor>> {
        let (OutputGrad::Hidden(grad) | OutputGrad::Scores(grad)) = grad_output;
        let weights = weights_for(self, weights, batch);
        let (input, input_grad) = self.input(batch);
        let input_grad = input_grad || block > 0;
        let units = weights.units();
        let trains = |unit: usize| grads.wants(unit);
        if !input_grad && !(0..units.len()).any(trains) {
            return Ok(None);
        }
        let graph = if weights.lasts() {
            Graph::of_tensors(saved.0)
        } else {
            let input = saved.0.first().unwrap_or(input);
            let run = |weights: &Weights, x: &Tensor| self.run(block, weights, x, batch);
            Graph::record(&weights, trains, &[(input, input_grad)], one_to_one(run))?
        };
        let trained: Vec<_> = trained(&weights, trains).collect();
        let mut found = graph.gradients(&[&grad])?.into_iter();
        for (unit, param) in trained {
            let gradient = found.next().expect("one gradient for each leaf");
            grads.put(unit, param, |buffer, how| store(buffer, &gradient, how))?;
        }
        Ok(found.next())
    }
}

/// Turns a function from one tensor to one tensor into one of lists, for [`Graph::record`].
pub(crate) fn one_to_one(
    function: impl FnOnce(&Weights, &Tensor) -> Result<Tensor>,
) -> impl FnOnce(&Weights, &[Tensor]) -> Result<Vec<Tensor>> {
    |weights, inputs| Ok(vec![function(weights, &inputs[0])?])
}

/// A function's outputs, and the tensors that they can be differentiated with respect to.
pub(crate) struct Graph {
    pub outputs: Vec<Tensor>,
    /// The trained weights, unit by unit, then the inputs whose gradient is needed.
    leaves: Vec<Tensor>,
}

impl Graph {
    /// Runs `function` on `weights` and `inputs`, without copying them. Inputs with true need a gradient.
    ///
    /// # Errors
    /// The function's own, or libtorch's.
    pub fn record(
        weights: &Weights,
        trains: impl Fn(usize) -> bool,
        inputs: &[(&Tensor, bool)],
        function: impl FnOnce(&Weights, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Graph> {
        let as_leaf = |tensor: &Tensor, is_leaf: bool| Ok(tensor.f_detach()?.f_set_requires_grad(is_leaf)?);
        let mut tensors = Vec::with_capacity(weights.units().len());
        for (unit, params) in weights.units().iter().enumerate() {
            let params = params.iter().map(|param| as_leaf(param, trains(unit)));
            tensors.push(params.collect::<Result<Vec<Tensor>>>()?);
        }
        let of_function: Vec<Tensor> =
            inputs.iter().map(|&(input, is_leaf)| as_leaf(input, is_leaf)).collect::<Result<_>>()?;
        let views: Vec<&[Tensor]> = tensors.iter().map(Vec::as_slice).collect();
        let outputs = function(&Weights::new(&views), &of_function)?;
        let trained = trained(weights, trains).map(|(unit, param)| tensors[unit][param].shallow_clone());
        let wanted = of_function.iter().zip(inputs).filter(|(_, (_, is_leaf))| *is_leaf);
        let leaves = trained.chain(wanted.map(|(input, _)| input.shallow_clone())).collect();
        Ok(Graph { outputs, leaves })
    }

    /// Converts the graph of one output to tensors that a block can save.
    fn into_tensors(self) -> Vec<Tensor> {
        self.outputs.into_iter().chain(self.leaves).collect()
    }

    /// Inverse of [`Self::into_tensors`].
    fn of_tensors(mut tensors: Vec<Tensor>) -> Graph {
        let leaves = tensors.split_off(1);
        Graph { outputs: tensors, leaves }
    }

    /// Returns the gradient of `sum(output * grad)` over all outputs for each leaf; undefined for a leaf that does
    /// not influence them.
    ///
    /// # Errors
    /// libtorch's.
    pub fn gradients(self, grads: &[&Tensor]) -> Result<Vec<Tensor>> {
        let objective = |(output, grad): (&Tensor, &&Tensor)| Ok(output.f_mul(grad)?.f_sum(output.kind())?);
        let objectives = self.outputs.iter().zip(grads).map(objective).collect::<Result<Vec<Tensor>>>()?;
        Ok(Tensor::f_run_backward(&objectives, &self.leaves, false, false)?)
    }
}

/// Lists the trained parameters among `weights` as (unit, parameter) indices.
pub(crate) fn trained(
    weights: &Weights,
    trains: impl Fn(usize) -> bool,
) -> impl Iterator<Item = (usize, usize)> {
    let units = weights.units().iter().enumerate().filter(move |(unit, _)| trains(*unit));
    units.flat_map(|(unit, params)| (0..params.len()).map(move |param| (unit, param)))
}

/// Writes or adds a gradient; an undefined one counts as 0.
pub(crate) fn store(
    buffer: &mut Tensor,
    gradient: &Tensor,
    how: Store,
) -> std::result::Result<(), anyroll_backends::ops::Error> {
    match how {
        Store::Write if gradient.defined() => buffer.f_copy_(gradient)?,
        Store::Write => drop(buffer.f_zero_()?),
        Store::Add if gradient.defined() => drop(buffer.f_add_(gradient)?),
        Store::Add => {}
    }
    Ok(())
}
