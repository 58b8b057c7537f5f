//! Weights on the host, which are on the device only while a block uses them.

use anyroll_models::{DecoderConfig, LoraConfig, LoraTarget, LoraTargets};
use anyroll_strategy::{
    Fp16Config, ParamsOn, Precision, Recompute, State, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
};

use crate::harness::{
    ADAMW, STAGES, batch, decoder, ranks, sequence, train, train_with, trained, values, zero,
};

const ALL: [State; 3] = [State::Optimizer, State::Gradients, State::Params];

fn streamed(config: impl Into<ZeroConfig>) -> ZeroConfig {
    ZeroConfig { params_on: ParamsOn::Host, ..config.into() }
}

#[test]
fn streamed_weights_change_no_bit() {
    let fp16 = Precision::Fp16(Fp16Config::default());
    for (precision, world_size) in
        [(Precision::Fp32, 1), (Precision::Fp32, 3), (Precision::Bf16, 2), (fp16, 2)]
    {
        for (recompute, steps_on) in [(Recompute::None, StepsOn::Device), (Recompute::Full, StepsOn::Host)] {
            let plain = ZeroConfig { precision, recompute, steps_on, ..ZeroStage::Zero0.into() };
            let reference = trained(plain, world_size, true, false, 12);
            for stage in STAGES {
                let config = streamed(ZeroConfig { stage, ..plain });
                let of_ranks = ranks(world_size, true, |device, group| {
                    let mut zero = zero(config, true, device, group);
                    let norms = train_with(&mut zero, 0..4, 12, |zero| {
                        zero.offload_states(&ALL).unwrap();
                        zero.load_states(&ALL).unwrap();
                    });
                    (norms, values(&mut zero))
                });
                assert!(of_ranks.iter().all(|rank| *rank == reference), "{config:?} x {world_size}");
            }
        }
    }
}

/// The device holds only the weights that blocks use at a time, for any number of blocks.
#[test]
fn the_device_holds_no_more_than_a_few_blocks() {
    for stage in STAGES {
        ranks(2, false, |device, group| {
            let allocated = |zero: &Zero<anyroll_models::Decoder>| {
                zero.group().stream().synchronize().unwrap();
                device.memory_info().unwrap().allocated_bytes
            };
            let before = device.memory_info().unwrap();
            let mut frozen =
                Zero::new(decoder(true), streamed(stage), None, device, group.clone(), 7).unwrap();
            assert_eq!(
                allocated(&frozen),
                before.allocated_bytes,
                "{stage:?}: nothing is allocated before the first pass"
            );
            let pinned = device.memory_info().unwrap().pinned_bytes - before.pinned_bytes;
            let scores = frozen.score(&batch(&[sequence(0, 3)])).unwrap();
            let streaming = allocated(&frozen) - before.allocated_bytes;

            let mut resident = Zero::new(decoder(true), ZeroStage::Zero0, None, device, group, 7).unwrap();
            let weights = resident.offload_states(&[State::Params]).unwrap();
            resident.load_states(&[State::Params]).unwrap();
            assert_eq!(resident.score(&batch(&[sequence(0, 3)])).unwrap().logprobs, scores.logprobs);
            // Four of five units have pages of their own; three are on the device at a time.
            assert!(streaming > 0 && streaming < weights, "{stage:?}: {streaming} of {weights} bytes");
            assert!(pinned > 0, "{stage:?}");
            assert_eq!(frozen.offload_states(&[State::Params]).unwrap(), 0, "there is nothing to offload");
            let rest = allocated(&frozen);
            drop(frozen.score(&batch(&[sequence(0, 3)])).unwrap());
            assert!(allocated(&frozen) > rest, "the offload freed gathered weights");
        });
    }
}

#[test]
fn streamed_weights_are_saved_and_loaded() {
    for stage in STAGES {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("step_000001");
            let plain = ZeroConfig { precision, ..stage.into() };
            let of_ranks = ranks(2, true, |device, group| {
                let mut there = zero(streamed(plain), true, device, group.clone());
                train(&mut there, 0..2, 2);
                checkpoint::save(&mut there, &path, Stamp::default(), serde_json::Value::Null).unwrap();
                let mut here = zero(plain, true, device, group.clone());
                checkpoint::load(&mut here, &path).unwrap();
                let loaded = values(&mut here) == values(&mut there);
                train(&mut here, 2..4, 2);
                checkpoint::load(&mut there, &path).unwrap();
                train(&mut there, 2..4, 2);
                let trained_on = values(&mut here) == values(&mut there);
                let mut copy = Zero::new(decoder(true), streamed(stage), None, device, group, 8).unwrap();
                copy.copy_weights_from(&mut there).unwrap();
                (loaded, trained_on, values(&mut copy) == values(&mut there) || precision != Precision::Fp32)
            });
            assert!(of_ranks.iter().all(|it| *it == (true, true, true)), "{plain:?}: {of_ranks:?}");
        }
    }
}

#[test]
fn adapters_train_beside_streamed_weights() {
    let shape = decoder(true).config().clone();
    let lora = LoraConfig::new(2, 4.0, LoraTarget::ALL.to_vec());
    let unequal = [(0, vec![LoraTarget::Q, LoraTarget::Up]), (1, LoraTarget::ALL.to_vec())];
    let of_some = LoraConfig { dora: true, targets: LoraTargets::ByLayer(unequal.into()), ..lora.clone() };
    let of_fused = LoraConfig::new(2, 4.0, LoraTarget::FUSED.to_vec());
    let fused = DecoderConfig { fused_projections: true, qkv_bias: false, ..shape.clone() };
    let cases = [(&shape, &lora), (&shape, &of_some), (&fused, &of_fused)];
    for (stage, (shape, lora)) in STAGES.into_iter().flat_map(|stage| cases.map(|case| (stage, case))) {
        let adapted = || anyroll_models::Decoder::with_lora(shape.clone(), lora, tch::Device::Cpu).unwrap();
        let run = |config: ZeroConfig| {
            ranks(2, true, |device, group| {
                let mut zero =
                    Zero::new(std::sync::Arc::new(adapted()), config, Some(ADAMW), device, group, 7).unwrap();
                let norms = train(&mut zero, 0..3, 2);
                (norms, values(&mut zero))
            })
        };
        assert!(run(stage.into()) == run(streamed(stage)), "{stage:?}");
    }
}
