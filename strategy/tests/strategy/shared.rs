//! Weights that two models have in common.

use std::sync::Arc;

use anyroll_models::{Model, ValueModel};
use anyroll_strategy::{Precision, Zero, ZeroConfig, ZeroStage};
use tch::{Kind, Tensor};

use crate::harness::{ADAMW, STAGES, decoder, ranks, train, zero};

#[test]
fn a_value_model_takes_over_a_decoders_weights_below_its_head() {
    for (world_size, tied) in [(1, true), (2, false), (3, true)] {
        for (from, to) in STAGES.into_iter().zip(STAGES.into_iter().rev()) {
            ranks(world_size, true, |device, group| {
                let precise = ZeroConfig { precision: Precision::Bf16, ..ZeroConfig::from(from) };
                let mut policy = zero(precise, tied, device, group.clone());
                train(&mut policy, 0..1, 12);
                let model = ValueModel::new(decoder(tied).config().clone(), tch::Device::Cpu).unwrap();
                let mut critic =
                    Zero::new(Arc::new(model), to, Some(ADAMW), device, group.clone(), 8).unwrap();
                critic.copy_shared_weights_from(&mut policy).unwrap();
                // A policy in fp32 provides its master weights; weights in bf16 are those, rounded.
                let mut whole = zero(ZeroStage::Zero0, tied, device, group);
                whole.copy_weights_from(&mut policy).unwrap();
                let given = by_name(&mut whole);
                for (name, values) in by_name(&mut critic) {
                    match given.iter().find(|(other, _)| *other == name) {
                        Some((_, expected)) => assert_eq!(values, *expected, "{name}, {from:?} to {to:?}"),
                        None => {
                            assert!(name == ValueModel::HEAD && values.iter().all(|it| *it == 0.0), "{name}")
                        }
                    }
                }
            });
        }
    }
}

fn by_name<M: Model>(zero: &mut Zero<M>) -> Vec<(String, Vec<f32>)> {
    let model = zero.model().clone();
    let weights = zero.weights().unwrap();
    let flat = |tensor: &Tensor| Vec::try_from(tensor.to_kind(Kind::Float).reshape([-1])).unwrap();
    let units = model.units().iter().zip(&weights);
    let of_unit = units.flat_map(|(unit, weights)| unit.params.iter().zip(weights));
    of_unit.map(|(spec, weight)| (spec.name.clone(), flat(weight))).collect()
}
