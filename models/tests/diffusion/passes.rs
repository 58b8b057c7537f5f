//! Forward and backward, run like a holder of the weights does.

use anyroll_models::{Grads, Model, Output, OutputGrad, UnitGrads, Weights};
use tch::Tensor;

/// Results of passes.
pub struct Passed {
    pub output: Tensor,
    pub grads: Vec<UnitGrads>,
    /// Gradient of the first block's input.
    pub input_grad: Tensor,
}

/// Runs a pass for each of `wanted`, the gradients of the output, and sums their gradients. Checks that
/// results are bitwise equal with and without lasting weights.
pub fn pass<M>(model: &M, weights: &[Vec<Tensor>], batch: &M::Batch, wanted: &[Tensor]) -> Passed
where
    M: Model<Scores = Tensor, ScoresGrad = Tensor>,
{
    let [once, again] = [true, false].map(|lasting| pass_on(model, weights, lasting, batch, wanted));
    let tensors = |passed: &Passed| -> Vec<Tensor> {
        let grads = passed.grads.iter().zip(model.units()).filter(|(_, unit)| unit.trainable);
        let grads = grads.flat_map(|(grads, _)| grads.views().iter().map(Tensor::shallow_clone));
        grads.chain([passed.output.shallow_clone(), passed.input_grad.shallow_clone()]).collect()
    };
    assert!(tensors(&once).iter().zip(tensors(&again)).all(|(kept, run_again)| kept.equal(&run_again)));
    once
}

/// Gradients start as NaN, so that a sum into an unwritten buffer shows; those of frozen units stay NaN.
fn pass_on<M>(
    model: &M,
    weights: &[Vec<Tensor>],
    lasting: bool,
    batch: &M::Batch,
    wanted: &[Tensor],
) -> Passed
where
    M: Model<Scores = Tensor, ScoresGrad = Tensor>,
{
    fn until_backward(weights: Weights<'_>, lasting: bool) -> Weights<'_> {
        if lasting { weights.lasting() } else { weights }
    }
    let nan = |tensor: &Tensor| tensor.full_like(f64::NAN);
    let mut grads: Vec<UnitGrads> =
        weights.iter().map(|unit| UnitGrads::new(unit.iter().map(nan).collect())).collect();
    let units_of = |block: usize| -> Vec<&[Tensor]> {
        model.units_of(block).iter().map(|&unit| weights[unit].as_slice()).collect()
    };
    let (mut output, mut input_grad) = (None, None);
    for wanted in wanted {
        let (mut saved, mut x) = (Vec::new(), None);
        for block in 0..model.blocks() {
            let units = units_of(block);
            let (found, kept) = model
                .forward(block, &until_backward(Weights::new(&units), lasting), x.as_ref(), batch, true)
                .unwrap();
            saved.push(kept);
            match found {
                Output::Hidden(hidden) => x = Some(hidden),
                Output::Scores(scores) => output = Some(scores),
            }
        }
        let mut grad = OutputGrad::Scores(wanted.shallow_clone());
        for block in (0..model.blocks()).rev() {
            let units = units_of(block);
            let numbers = model.units_of(block);
            let mut of_units: Vec<Option<&mut UnitGrads>> = numbers.iter().map(|_| None).collect();
            for (unit, grads) in
                grads.iter_mut().enumerate().filter(|(unit, _)| model.units()[*unit].trainable)
            {
                if let Some(place) = numbers.iter().position(|&number| number == unit) {
                    of_units[place] = Some(grads);
                }
            }
            let mut block_grads = Grads::new(of_units);
            let (weights, kept) = (until_backward(Weights::new(&units), lasting), saved.pop().unwrap());
            let dx = model.backward(block, &weights, &mut block_grads, kept, grad, batch).unwrap().unwrap();
            grad = OutputGrad::Hidden(dx);
        }
        let OutputGrad::Hidden(dx) = grad else { unreachable!() };
        input_grad = Some(input_grad.map_or(dx.shallow_clone(), |sum: Tensor| sum + dx));
    }
    let trained = grads.iter().zip(model.units()).filter(|(_, unit)| unit.trainable);
    assert!(trained.clone().count() > 0 && trained.clone().all(|(grads, _)| grads.all_written()));
    Passed { output: output.unwrap(), grads, input_grad: input_grad.unwrap() }
}

/// Tolerance of single precision.
pub const TOLERANCE: f64 = 1e-5;
