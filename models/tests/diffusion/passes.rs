//! Forward and backward as whoever holds the weights runs them.

use anyroll_models::{Grads, Model, Output, OutputGrad, UnitGrads, Weights};
use tch::Tensor;

/// What passes found.
pub struct Passed {
    pub output: Tensor,
    pub grads: Vec<UnitGrads>,
    /// Of what the first block read.
    pub input_grad: Tensor,
}

/// A pass for each of `wanted`, the gradients of the output, whose gradients add up. Gradients start as NaN, so that a
/// sum into an unwritten buffer shows. Each block reads the unit of its own number.
pub fn pass<M>(model: &M, weights: &[Vec<Tensor>], batch: &M::Batch, wanted: &[Tensor]) -> Passed
where
    M: Model<Scores = Tensor, ScoresGrad = Tensor>,
{
    let nan = |tensor: &Tensor| tensor.full_like(f64::NAN);
    let mut grads: Vec<UnitGrads> =
        weights.iter().map(|unit| UnitGrads::new(unit.iter().map(nan).collect())).collect();
    let (mut output, mut input_grad) = (None, None);
    for wanted in wanted {
        let (mut saved, mut x) = (Vec::new(), None);
        for (block, unit) in weights.iter().enumerate() {
            let units = [unit.as_slice()];
            let (found, kept) = model.forward(block, &Weights::new(&units), x.as_ref(), batch, true).unwrap();
            saved.push(kept);
            match found {
                Output::Hidden(hidden) => x = Some(hidden),
                Output::Scores(scores) => output = Some(scores),
            }
        }
        let mut grad = OutputGrad::Scores(wanted.shallow_clone());
        for (block, unit) in weights.iter().enumerate().rev() {
            let units = [unit.as_slice()];
            let mut block_grads = Grads::new(vec![Some(&mut grads[block])]);
            let (weights, kept) = (Weights::new(&units), saved.pop().unwrap());
            let dx = model.backward(block, &weights, &mut block_grads, kept, grad, batch).unwrap().unwrap();
            grad = OutputGrad::Hidden(dx);
        }
        let OutputGrad::Hidden(dx) = grad else { unreachable!() };
        input_grad = Some(input_grad.map_or(dx.shallow_clone(), |sum: Tensor| sum + dx));
    }
    assert!(grads.iter().all(UnitGrads::all_written));
    Passed { output: output.unwrap(), grads, input_grad: input_grad.unwrap() }
}

/// Relative to the largest of `expected` where that is above 1.
#[track_caller]
pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let scale = expected.abs().max().double_value(&[]).max(1.0);
    let error = (found - expected).abs().max().double_value(&[]) / scale;
    assert!(error <= 1e-5, "{what} differs by {error:e}"); // false for NaN
}
