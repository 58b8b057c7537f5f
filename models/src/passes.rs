//! Passes through a model with whole weights in one place, such as a sampler's or a frozen network's.

use tch::Tensor;

use crate::Result;
use crate::model::{Grads, Model, Output, OutputGrad, Saved, Weights};

/// Returns the scores of a batch and, with `save`, the tensors that [`input_gradient`] needs. `weights` are
/// all of the model's, one list per unit.
///
/// # Errors
/// The model's.
pub fn forward<M: Model>(
    model: &M,
    weights: &[&[Tensor]],
    batch: &M::Batch,
    save: bool,
) -> Result<(M::Scores, Vec<Saved>)> {
    let (mut x, mut saved) = (None, Vec::new());
    for block in 0..model.blocks() {
        let units = units_of(model, weights, block);
        let (output, kept) = model.forward(block, &Weights::new(&units), x.as_ref(), batch, save)?;
        saved.push(kept);
        match output {
            Output::Hidden(hidden) => x = Some(hidden),
            Output::Scores(scores) => return Ok((scores, saved)),
        }
    }
    unreachable!("the last block has scores")
}

/// Returns the gradient of the first block's input, from that of the scores; weights get none.
///
/// # Errors
/// The model's.
pub fn input_gradient<M: Model>(
    model: &M,
    weights: &[&[Tensor]],
    batch: &M::Batch,
    saved: Vec<Saved>,
    grad: M::ScoresGrad,
) -> Result<Option<Tensor>> {
    let mut grad = OutputGrad::Scores(grad);
    for (block, saved) in saved.into_iter().enumerate().rev() {
        let units = units_of(model, weights, block);
        let mut none = Grads::new(units.iter().map(|_| None).collect());
        let below = model.backward(block, &Weights::new(&units), &mut none, saved, grad, batch)?;
        if block == 0 {
            return Ok(below);
        }
        grad = OutputGrad::Hidden(below.expect("an inner block has an input"));
    }
    Ok(None)
}

fn units_of<'a, M: Model>(model: &M, weights: &[&'a [Tensor]], block: usize) -> Vec<&'a [Tensor]> {
    model.units_of(block).iter().map(|&unit| weights[unit]).collect()
}
