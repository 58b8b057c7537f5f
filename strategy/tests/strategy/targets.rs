//! A unit that follows another one: the target heads of ILQL.

use std::sync::Arc;

use anyroll_models::{IlqlGrad, IlqlModel, OfAction, ScoresGrad};
use anyroll_strategy::{Precision, Zero, ZeroConfig, ZeroStage, checkpoint};
use tch::{Kind, Tensor};

use crate::harness::{ADAMW, STAGES, batch, dense, ranks};

const SHARE: f64 = 0.001;

/// Whole weights of a unit in fp32, flat.
fn unit(zero: &mut Zero<IlqlModel>, unit: usize) -> Tensor {
    let tensors = zero.unit_weights(unit).unwrap();
    let flat: Vec<Tensor> = tensors.iter().map(|it| it.to_kind(Kind::Float).reshape([-1])).collect();
    Tensor::cat(&flat, 0).copy()
}

/// A step of the optimizer with a gradient of 1 of every output.
fn step(zero: &mut Zero<IlqlModel>) {
    let sequences = [vec![1, 2, 3, 4, 5], vec![6, 7, 8]];
    let ones = |like: &Tensor| like.ones_like();
    zero.accumulate(&batch(&sequences), |scores| {
        let of_q = |q: &OfAction| OfAction { q: ones(&q.q), logprobs: ones(&q.logprobs) };
        let logprobs = ones(&scores.language.logprobs);
        let language = ScoresGrad { logprobs, entropy: None, divergence: None };
        Ok(IlqlGrad { language, qs: scores.qs.iter().map(of_q).collect(), values: ones(&scores.values) })
    })
    .unwrap();
    let stats = zero.step(1e-2).unwrap();
    zero.finish_step(&stats).unwrap();
}

/// The moves are those of fp32 weights at every stage and precision, and optimizer steps change no target.
#[test]
fn targets_follow_and_are_not_stepped() {
    let folder = tempfile::tempdir().unwrap();
    for (world_size, precision) in [(1, Precision::Fp32), (2, Precision::Fp32), (2, Precision::Bf16)] {
        let mut at_stages = Vec::new();
        for stage in STAGES {
            let path = folder.path().join(format!("{world_size} {precision:?} {stage:?}"));
            let found = ranks(world_size, true, |device, group| {
                let new = |config: ZeroConfig, seed| {
                    let model =
                        IlqlModel::new(dense(false).config().clone(), true, tch::Device::Cpu).unwrap();
                    Zero::new(Arc::new(model), config, Some(ADAMW), device, group.clone(), seed).unwrap()
                };
                let mut zero = new(ZeroConfig { precision, ..ZeroConfig::from(stage) }, 8);
                // Weights in the highest precision.
                let whole = |zero: &mut Zero<IlqlModel>| {
                    let mut wide = new(ZeroStage::Zero0.into(), 9);
                    wide.copy_weights_from(zero).unwrap();
                    let (targets, sources) = wide.model().targets_and_sources();
                    (unit(&mut wide, targets), unit(&mut wide, sources))
                };
                let (targets, sources) = zero.model().targets_and_sources();
                let (before, q_before) = whole(&mut zero);
                step(&mut zero);
                let (after, q) = whole(&mut zero);
                assert!(after.equal(&before) && !q.equal(&q_before), "only Q heads are stepped");
                let mut expected = before.copy();
                for _ in 0..3 {
                    zero.move_unit_towards(targets, sources, SHARE).unwrap();
                    expected = expected.lerp(&q, SHARE);
                }
                let (moved, _) = whole(&mut zero);
                assert!(moved.equal(&expected) && !moved.equal(&before), "{stage:?} {precision:?}");
                let seen = unit(&mut zero, targets);
                let rounded =
                    moved.to_kind(if precision == Precision::Bf16 { Kind::BFloat16 } else { Kind::Float });
                assert!(seen.equal(&rounded.to_kind(Kind::Float)), "passes see the moved weights");
                // A checkpoint has the targets, too.
                let stamp = checkpoint::Stamp { run: 1, step: 1 };
                checkpoint::save(&mut zero, &path, stamp, serde_json::Value::Null).unwrap();
                let mut other = new(ZeroConfig { precision, ..ZeroConfig::from(stage) }, 10);
                checkpoint::load(&mut other, &path).unwrap();
                assert!(whole(&mut other).0.equal(&moved));
                Vec::<f32>::try_from(moved).unwrap()
            });
            at_stages.extend(found);
        }
        assert!(at_stages.iter().all(|found| *found == at_stages[0]), "every stage moves alike");
    }
}
