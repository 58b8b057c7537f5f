//! Frozen units have no gradient, no optimizer state and no entry in a checkpoint, and stages stay bitwise
//! equal.

use std::sync::Arc;

use anyroll_backends::{CollectiveGroup, Device};
use anyroll_models::{Decoder, Model};
use anyroll_strategy::{
    AdamW, Error, Precision, Recompute, State, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
};
use tch::{Kind, Tensor};

use crate::harness::{ADAMW, STAGES, decoder, ranks, train, trained_and_offloaded, values, zero};

/// Frozen units of each case: the first ones, so that backward ends early; the last ones; a middle one; the
/// tied matrix.
const FROZEN: [&[&str]; 4] = [
    &["model.embed_tokens", "model.layers.0"],
    &["lm_head", "model.layers.2"],
    &["model.layers.1"],
    &["model.embed_tokens"],
];

fn freeze(tied: bool, frozen: &[&str]) -> Arc<Decoder> {
    let decoder = Arc::into_inner(decoder(tied)).expect("it has one owner");
    Arc::new(decoder.freeze(|unit| frozen.contains(&&*unit.name)))
}

fn frozen_zero(
    config: impl Into<ZeroConfig>,
    (tied, frozen): (bool, &[&str]),
    adamw: AdamW,
    device: &Arc<dyn Device>,
    group: CollectiveGroup,
) -> Zero<Decoder> {
    Zero::new(freeze(tied, frozen), config, Some(adamw), device, group, 7).unwrap()
}

/// Returns the norms and weights of three steps on a fault-injecting device, with all states offloaded in
/// between.
fn trained(config: ZeroConfig, world_size: usize, model: (bool, &[&str])) -> (Vec<f64>, Vec<u32>) {
    trained_and_offloaded(world_size, &format!("{config:?}"), |device, group| {
        frozen_zero(config, model, ADAMW, device, group)
    })
}

#[test]
fn stages_are_bitwise_equal() {
    for (precision, recompute) in [(Precision::Fp32, Recompute::None), (Precision::Bf16, Recompute::Full)] {
        let config = |stage| ZeroConfig { precision, recompute, ..ZeroConfig::from(stage) };
        for (index, frozen) in FROZEN.into_iter().enumerate() {
            let (world_size, tied) = (1 + index % 3, index != 1);
            let reference = trained(config(ZeroStage::Zero0), world_size, (tied, frozen));
            for stage in STAGES {
                let same = trained(config(stage), world_size, (tied, frozen)) == reference;
                assert!(same, "{:?} x {world_size}, without {frozen:?}", config(stage));
            }
        }
    }
}

/// Without clipping, one step changes the trained weights as if all were trained, and no others.
#[test]
fn only_what_is_trained_moves() {
    let adamw = AdamW { max_grad_norm: f64::INFINITY, ..ADAMW };
    for tied in [false, true] {
        for frozen in FROZEN {
            ranks(2, false, |device, group| {
                let mut some = frozen_zero(ZeroStage::Zero3, (tied, frozen), adamw, device, group.clone());
                let mut all = frozen_zero(ZeroStage::Zero3, (tied, &[]), adamw, device, group);
                let before = some.weights().unwrap();
                train(&mut some, 0..1, 2);
                train(&mut all, 0..1, 2);
                let (some_after, all_after) = (some.weights().unwrap(), all.weights().unwrap());
                for (index, unit) in some.model().units().iter().enumerate() {
                    let expected = if unit.trainable { &all_after } else { &before };
                    let same = |(a, b): (&Tensor, &Tensor)| a.equal(b);
                    let equal = some_after[index].iter().zip(&expected[index]).all(same);
                    assert!(equal, "{} beside {frozen:?}", unit.name);
                    assert!(!before[index].iter().zip(&all_after[index]).all(same), "training moves all");
                }
            });
        }
    }
}

#[test]
fn frozen_units_have_no_states() {
    let frozen = &["model.layers.0", "model.layers.1", "model.layers.2"];
    for stage in STAGES {
        ranks(2, false, |device, group| {
            let states = [State::Optimizer, State::Gradients];
            let mut freed = [&frozen[..0], frozen].map(|frozen| {
                let mut zero = frozen_zero(stage, (true, frozen), ADAMW, device, group.clone());
                train(&mut zero, 0..1, 2);
                states.map(|state| zero.offload_states(&[state]).unwrap())
            });
            // Two of five units are left; at this size each takes whole pages.
            let [all, some] = &mut freed;
            assert!(all.iter().zip(some).all(|(all, some)| *some * 2 < *all), "{stage:?}: {freed:?}");
        });
    }
    ranks(1, false, |device, group| {
        let all = Arc::into_inner(decoder(true)).unwrap().freeze(|_| true);
        let error = Zero::new(Arc::new(all), ZeroStage::Zero0, Some(ADAMW), device, group, 7).unwrap_err();
        assert!(matches!(error, Error::NothingToTrain), "{error}");
    });
}

#[test]
fn checkpoints_leave_frozen_units_out() {
    let frozen: &[&str] = &["model.embed_tokens", "model.layers.1"];
    let folder = tempfile::tempdir().unwrap();
    let paths = ["step_000001", "step_000002"].map(|name| folder.path().join(name));
    let config = |stage| ZeroConfig { precision: Precision::Bf16, ..ZeroConfig::from(stage) };
    let whole = ranks(2, false, |device, group| {
        let mut zero = frozen_zero(config(ZeroStage::Zero2), (true, frozen), ADAMW, device, group.clone());
        train(&mut zero, 0..2, 2);
        checkpoint::save(&mut zero, &paths[0], Stamp::default(), serde_json::Value::Null).unwrap();
        train(&mut zero, 2..4, 2);
        let mut all = frozen_zero(config(ZeroStage::Zero2), (true, &[]), ADAMW, device, group);
        checkpoint::save(&mut all, &paths[1], Stamp::default(), serde_json::Value::Null).unwrap();
        values(&mut zero)
    });
    let bytes = paths.each_ref().map(|path| path.join("rank_0000.bin").metadata().unwrap().len());
    assert!(bytes[0] * 4 < bytes[1] * 3, "{bytes:?}");
    for (world_size, stage) in [(2, ZeroStage::Zero2), (2, ZeroStage::Zero3), (1, ZeroStage::Zero0)] {
        let resumed = ranks(world_size, false, |device, group| {
            let mut zero = frozen_zero(config(stage), (true, frozen), ADAMW, device, group);
            checkpoint::load(&mut zero, &paths[0]).unwrap();
            train(&mut zero, 2..4, 2);
            values(&mut zero)
        });
        assert!(resumed[0] == whole[0], "{stage:?} x {world_size}");
    }
    ranks(1, false, |device, group| {
        let mut all = zero(ZeroStage::Zero0, true, device, group.clone());
        let error = checkpoint::load(&mut all, &paths[0]).unwrap_err().to_string();
        assert!(error.contains("model.embed_tokens was frozen"), "{error}");
        // The other direction works: a unit that was trained may be frozen now.
        let mut some = frozen_zero(ZeroStage::Zero0, (true, frozen), ADAMW, device, group);
        checkpoint::load(&mut some, &paths[1]).unwrap();
        assert!(some.weights().unwrap()[0][0].kind() == Kind::Float);
    });
}
