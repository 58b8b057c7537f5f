//! The simplest holder of a decoder's weights: all units whole, on one device.

use std::sync::Arc;

use anyroll_models::init::{Seed, WeightSource};
use anyroll_models::{
    Decoder, Grads, Model, Output, OutputGrad, PackedBatch, Saved, Scores, ScoresGrad, UnitGrads, Weights,
};
use tch::{Device, Kind, Tensor};

pub struct Holder {
    pub decoder: Arc<Decoder>,
    /// One tensor per parameter of each unit.
    pub weights: Vec<Vec<Tensor>>,
    pub grads: Vec<UnitGrads>,
}

impl Holder {
    /// Creates weights from the seed. Gradients start as NaN, so that a sum into an unwritten buffer shows.
    pub fn new(decoder: Decoder, seed: u64) -> Holder {
        Holder::of_kind(decoder, seed, Kind::Float)
    }

    pub fn of_kind(decoder: Decoder, seed: u64, kind: Kind) -> Holder {
        Holder::from_source(decoder, &Seed(seed), kind)
    }

    pub fn from_source(decoder: Decoder, source: &dyn WeightSource, kind: Kind) -> Holder {
        let tensors = |make: &dyn Fn(&anyroll_models::ParamSpec) -> Tensor| -> Vec<Vec<Tensor>> {
            decoder.units().iter().map(|unit| unit.params.iter().map(make).collect()).collect()
        };
        let weights = tensors(&|spec| {
            let mut values = vec![f32::NAN; spec.elements()];
            source.read(spec, 0..spec.elements(), &mut values).unwrap();
            Tensor::from_slice(&values).view(spec.shape.as_slice()).to_kind(kind)
        });
        let nan = |spec: &anyroll_models::ParamSpec| {
            Tensor::full(spec.shape.as_slice(), f64::NAN, (kind, Device::Cpu))
        };
        let grads = tensors(&nan).into_iter().map(UnitGrads::new).collect();
        Holder { decoder: Arc::new(decoder), weights, grads }
    }

    /// Calls `body` with the weights of a block.
    pub fn with_weights<R>(&self, block: usize, body: impl FnOnce(&Weights) -> R) -> R {
        let units: Vec<&[Tensor]> =
            self.decoder.units_of(block).iter().map(|&unit| self.weights[unit].as_slice()).collect();
        body(&Weights::new(&units))
    }

    pub fn forward(&self, batch: &PackedBatch, save: bool) -> (Scores, Vec<Saved>) {
        let (mut hidden, mut saved) = (None, Vec::new());
        for block in 0..self.decoder.blocks() {
            let (output, kept) = self.with_weights(block, |weights| {
                self.decoder.forward(block, weights, hidden.as_ref(), batch, save).unwrap()
            });
            saved.push(kept);
            match output {
                Output::Hidden(x) => hidden = Some(x),
                Output::Scores(scores) => return (scores, saved),
            }
        }
        unreachable!("the last block returns scores")
    }

    pub fn backward(
        &mut self,
        batch: &PackedBatch,
        saved: Vec<Saved>,
        dlogprobs: Tensor,
        dentropy: Option<Tensor>,
    ) {
        let grad = ScoresGrad { logprobs: dlogprobs, entropy: dentropy, divergence: None };
        self.backward_of(batch, saved, grad);
    }

    pub fn backward_of(&mut self, batch: &PackedBatch, mut saved: Vec<Saved>, grad: ScoresGrad) {
        self.grads.iter_mut().for_each(UnitGrads::reset);
        let mut grad = Some(OutputGrad::Scores(grad));
        for block in (0..self.decoder.blocks()).rev() {
            let wanted = self.decoder.units_of(block);
            let mut grads: Vec<(usize, &mut UnitGrads)> =
                self.grads.iter_mut().enumerate().filter(|(unit, _)| wanted.contains(unit)).collect();
            grads.sort_by_key(|(unit, _)| wanted.iter().position(|wanted| wanted == unit));
            let trained = |(unit, grads): (usize, _)| self.decoder.units()[unit].trainable.then_some(grads);
            let mut grads = Grads::new(grads.into_iter().map(trained).collect());
            let units: Vec<&[Tensor]> = wanted.iter().map(|&unit| self.weights[unit].as_slice()).collect();
            let weights = Weights::new(&units);
            let (saved, output) = (saved.pop().unwrap(), grad.take().unwrap());
            let dx = self.decoder.backward(block, &weights, &mut grads, saved, output, batch).unwrap();
            grad = dx.map(OutputGrad::Hidden);
        }
        for (unit, grads) in self.decoder.units().iter().zip(&self.grads) {
            assert_eq!(grads.all_written(), unit.trainable, "{}", unit.name);
        }
    }
}
