//! Gradients by libtorch's autograd, inside of one block.
//!
//! A block whose backward nobody has written by hand is a function of its weights and its input. Backward runs that
//! function once more, with its graph: so such a block keeps nothing but its input. A graph that was kept from
//! forward would point into weights that their holder may have let go in between.

use anyroll_backends::ops::Store;
use tch::Tensor;

use crate::Result;
use crate::model::{Grads, Model, Output, OutputGrad, ParamSpec, Saved, Unit, Weights};

/// A [`Model`] whose blocks are functions from one tensor to one tensor.
pub trait AutogradModel: Send + Sync {
    /// What a forward pass reads.
    type Batch;

    /// What its blocks are made of.
    fn layout(&self) -> &Layout;

    /// Whether blocks run with their adapters, where they have any.
    fn adapters(&self, _: &Self::Batch) -> bool {
        true
    }

    /// What the first block reads, and whether backward shall find its gradient.
    fn input<'a>(&self, batch: &'a Self::Batch) -> (&'a Tensor, bool);

    /// The output of a block for `x`, the output of the block before or [`Self::input`]'s.
    ///
    /// # Errors
    /// A batch that the model cannot take, which its first block sees, or libtorch's.
    fn run(&self, block: usize, weights: &Weights, x: &Tensor, batch: &Self::Batch) -> Result<Tensor>;
}

/// The units of a model: each block reads that of its number and, behind it, that of its adapters.
#[derive(Debug)]
pub struct Layout {
    units: Vec<Unit>,
    units_of: Vec<Vec<usize>>,
}

impl Layout {
    /// Of a model with a block for each of `units`.
    pub fn new(units: Vec<Unit>) -> Layout {
        Layout { units_of: (0..units.len()).map(|unit| vec![unit]).collect(), units }
    }

    /// The same with the parameters of adapters for each block, in their order. All else is frozen.
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
        let weights = if self.adapters(batch) { *weights } else { weights.first() };
        let out = self.run(block, &weights, x.unwrap_or(self.input(batch).0), batch)?;
        let kept = x.filter(|_| save).map(Tensor::shallow_clone);
        let is_last = block + 1 == self.blocks();
        let output = if is_last { Output::Scores(out) } else { Output::Hidden(out) };
        Ok((output, Saved(kept.into_iter().collect())))
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
        let weights = if self.adapters(batch) { *weights } else { weights.first() };
        let run = |weights: &Weights, x: &Tensor| self.run(block, weights, x, batch);
        if block == 0 {
            let (input, input_grad) = self.input(batch);
            return backward(&weights, grads, input, input_grad, &grad, run);
        }
        let [x] = saved.unpack();
        backward(&weights, grads, &x, true, &grad, run)
    }
}

/// Writes the weights' gradients of `sum(function(weights, input) * grad_output)` into `grads`, and returns the
/// input's if `input_grad` asks for it. A weight without influence has a gradient of 0.
///
/// # Errors
/// The function's own, or libtorch's.
fn backward(
    weights: &Weights,
    grads: &mut Grads,
    input: &Tensor,
    input_grad: bool,
    grad_output: &Tensor,
    function: impl FnOnce(&Weights, &Tensor) -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    let mut tensors = Vec::with_capacity(weights.units().len());
    for (unit, params) in weights.units().iter().enumerate() {
        let as_leaf = |param: &Tensor| if grads.wants(unit) { leaf(param) } else { Ok(param.f_detach()?) };
        tensors.push(params.iter().map(as_leaf).collect::<Result<Vec<Tensor>>>()?);
    }
    let views: Vec<&[Tensor]> = tensors.iter().map(Vec::as_slice).collect();
    let input = if input_grad { leaf(input)? } else { input.f_detach()? };
    let trained = |unit: &usize| grads.wants(*unit);
    let params_of = |unit: usize| (0..views[unit].len()).map(move |param| (unit, param));
    let wanted: Vec<(usize, usize)> = (0..views.len()).filter(trained).flat_map(params_of).collect();
    let mut leaves: Vec<&Tensor> = wanted.iter().map(|&(unit, param)| &views[unit][param]).collect();
    leaves.extend(input_grad.then_some(&input));
    if leaves.is_empty() {
        return Ok(None);
    }
    let output = function(&Weights::new(&views), &input)?;
    let objective = output.f_mul(grad_output)?.f_sum(output.kind())?;
    let mut found = Tensor::f_run_backward(&[objective], &leaves, false, false)?.into_iter();
    for (unit, param) in wanted {
        let gradient = found.next().expect("one gradient for each leaf");
        grads.put(unit, param, |buffer, how| store(buffer, &gradient, how))?;
    }
    Ok(found.next())
}

/// The same memory, as something to differentiate with respect to.
fn leaf(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_set_requires_grad(true)?)
}

fn store(
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
