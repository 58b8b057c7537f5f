//! Offloaded states come back unchanged, and their device memory is free in the meantime.

use std::time::{Duration, Instant};

use anyroll_strategy::{
    Error, Fp16Config, Precision, State,
    State::{Gradients, Optimizer, Params},
    StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
};

use crate::harness::{
    ADAMW, STAGES, accumulate, batch, decoder, ranks, sequence, train, train_with, trained, values, zero,
};

const ALL: [State; 3] = [Optimizer, Gradients, Params];

/// Returns allocated and pinned bytes, once no collective holds a buffer.
fn memory(zero: &Zero<anyroll_models::Decoder>) -> (usize, usize) {
    zero.group().stream().synchronize().unwrap();
    let memory = zero.group().stream().device().memory_info().unwrap();
    (memory.allocated_bytes, memory.pinned_bytes)
}

#[test]
fn states_that_were_away_change_no_bit() {
    for world_size in [1, 2, 3] {
        let reference = trained(ZeroStage::Zero0, world_size, true, false, 12);
        for stage in STAGES {
            // Also offloads gradients in the middle of a step, where their values are still needed.
            let away = ranks(world_size, true, |device, group| {
                let mut zero = zero(stage, true, device, group);
                let norms = train_with(&mut zero, 0..4, 12, |zero| {
                    zero.offload_states(&ALL).unwrap();
                    zero.load_states(&ALL).unwrap();
                });
                (norms, values(&mut zero))
            });
            assert!(away.iter().all(|rank| *rank == reference), "{stage:?} x {world_size}");
        }
    }
}

#[test]
fn states_come_back_from_halfway() {
    let reference = trained(ZeroStage::Zero0, 2, false, false, 12);
    for stage in STAGES {
        let halfway = ranks(2, true, |device, group| {
            let mut zero = zero(stage, false, device, group);
            let norms = train_with(&mut zero, 0..4, 12, |zero| {
                zero.start_offload(&ALL).unwrap();
                zero.load_states(&ALL).unwrap();
                zero.start_offload(&[Optimizer]).unwrap();
                zero.offload_states(&ALL).unwrap();
                zero.load_states(&ALL).unwrap();
                zero.start_offload(&[Params, Gradients]).unwrap();
                zero.load_states(&ALL).unwrap();
            });
            (norms, values(&mut zero))
        });
        assert!(halfway.iter().all(|rank| *rank == reference), "{stage:?}");
    }
}

#[test]
fn the_device_holds_less_and_pins_once() {
    for stage in STAGES {
        ranks(2, false, |device, group| {
            let mut zero = zero(stage, false, device, group);
            train(&mut zero, 0..1, 2);
            let mut pinned = 0;
            for step in 1..4 {
                let (before, _) = memory(&zero);
                let freed = ALL.map(|state| zero.offload_states(&[state]).unwrap());
                let (after, pinned_now) = memory(&zero);
                let total: usize = freed.iter().sum();
                assert!(freed.iter().all(|&bytes| bytes > 0), "{freed:?}");
                assert!(before - after >= total, "{stage:?}: {before} - {after} bytes, {freed:?} moved");
                // Two moments, with as many elements as the gradient; each unit's memory is rounded up to
                // pages.
                assert!(freed[0] > freed[1], "{freed:?}");
                assert_eq!(zero.offload_states(&ALL).unwrap(), 0, "a second call does nothing");
                assert_eq!(memory(&zero), (after, pinned_now));
                assert!(step == 1 || pinned_now == pinned, "pinned memory is allocated once");
                pinned = pinned_now;

                zero.load_states(&ALL).unwrap();
                let (back, _) = memory(&zero);
                assert_eq!(back, after + total);
                zero.load_states(&ALL).unwrap();
                assert_eq!(memory(&zero), (back, pinned), "a second call does nothing");
                train(&mut zero, step..step + 1, 2);
                zero.load_wait().unwrap();
                assert!(zero.load_wait().unwrap().is_zero(), "a wait is counted once");
            }
        });
    }
}

#[test]
fn states_that_leave_make_as_much_room_as_is_asked_for() {
    ranks(2, true, |device, group| {
        let mut zero = zero(ZeroStage::Zero1, false, device, group);
        train(&mut zero, 0..1, 2);
        let total = zero.offload_states(&[Optimizer, Gradients]).unwrap();
        let away = memory(&zero).0;
        zero.load_states(&[Optimizer, Gradients]).unwrap();
        assert_eq!(zero.leaving_bytes(), 0);

        zero.start_offload(&[Optimizer, Gradients]).unwrap();
        assert_eq!(zero.leaving_bytes(), total);
        zero.make_room(usize::MAX).unwrap();
        assert_eq!((zero.leaving_bytes(), memory(&zero).0), (0, away), "all of it has left");
        assert_eq!(zero.give_back_left().unwrap(), 0);
        zero.load_states(&[Optimizer, Gradients]).unwrap();

        // Polls without waiting, with a deadline.
        zero.start_offload(&[Optimizer, Gradients]).unwrap();
        let started = Instant::now();
        let mut given_back = 0;
        while given_back < total {
            given_back += zero.give_back_left().unwrap();
            assert!(started.elapsed() < Duration::from_secs(60), "{given_back} of {total} bytes");
        }
        assert_eq!((zero.leaving_bytes(), memory(&zero).0), (0, away));
        zero.load_states(&[Optimizer, Gradients]).unwrap();
        train(&mut zero, 1..2, 2);
    });
}

#[test]
fn memory_that_was_pinned_beforehand_is_what_states_leave_to() {
    let reference = trained(ZeroStage::Zero0, 2, false, false, 12);
    let prepared = ranks(2, true, |device, group| {
        let mut zero = zero(ZeroStage::Zero2, false, device, group);
        zero.prepare_offload(&ALL);
        zero.prepare_offload(&ALL); // a second time does nothing
        let mut pinned = Vec::new();
        let norms = train_with(&mut zero, 0..4, 12, |zero| {
            zero.offload_states(&[Optimizer, Params]).unwrap();
            pinned.push(memory(zero).1);
            zero.load_states(&ALL).unwrap();
        });
        assert!(pinned[0] > 0 && pinned.iter().all(|&bytes| bytes == pinned[0]), "{pinned:?}");
        (norms, values(&mut zero))
    });
    assert!(prepared.iter().all(|rank| *rank == reference));
    // Dropping the strategy at once leaves no thread waiting.
    ranks(1, false, |device, group| zero(ZeroStage::Zero1, false, device, group).prepare_offload(&ALL));
}

#[test]
fn a_call_on_states_that_are_away_names_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step_000001");
    ranks(1, false, |device, group| {
        let mut zero = zero(ZeroStage::Zero1, false, device, group.clone());
        let mut other = Zero::new(decoder(false), ZeroStage::Zero3, None, device, group, 8).unwrap();
        train(&mut zero, 0..1, 2);
        checkpoint::save(&mut zero, &path, Stamp::default(), serde_json::Value::Null).unwrap();
        let tokens = batch(&[sequence(0, 3)]);
        let check = |state: State, op: &str, outcome: Option<Error>| {
            match &outcome {
                Some(Error::Offloaded { op: found, state: away }) => assert_eq!((*found, *away), (op, state)),
                other => panic!("{op}: {other:?}"),
            }
            let message = outcome.unwrap().to_string();
            assert!(message.starts_with(op) && message.contains("call `load_states` first"), "{message}");
        };

        zero.offload_states(&[Optimizer]).unwrap();
        assert!(zero.score(&tokens).is_ok() && zero.weights().is_ok(), "these calls need no optimizer");
        accumulate(&mut zero, &[sequence(0, 3)], 1.0);
        check(Optimizer, "step", zero.step(1e-2).err());
        check(Optimizer, "reset_optimizer", zero.reset_optimizer(ADAMW).err());
        check(
            Optimizer,
            "save",
            checkpoint::save(&mut zero, &path, Stamp::default(), serde_json::Value::Null).err(),
        );
        check(Optimizer, "load", checkpoint::load(&mut zero, &path).err());
        zero.load_states(&[Optimizer]).unwrap();

        zero.start_offload(&[Gradients]).unwrap();
        check(Gradients, "step", zero.step(1e-2).err());
        let outcome = zero.accumulate(&tokens, |_| unreachable!("the call fails before"));
        check(Gradients, "accumulate", outcome.err());
        zero.load_states(&[Gradients]).unwrap();

        zero.offload_states(&[Params]).unwrap();
        check(Params, "score", zero.score(&tokens).err());
        check(Params, "weights", zero.weights().err());
        check(Params, "copy_weights_from", other.copy_weights_from(&mut zero).err());
        zero.load_states(&[Params]).unwrap();
        zero.step(1e-2).unwrap();
    });
}

#[test]
fn a_frozen_model_comes_and_goes() {
    for stage in STAGES {
        ranks(2, true, |device, group| {
            let mut zero = Zero::new(decoder(true), stage, None, device, group, 7).unwrap();
            let tokens = batch(&[sequence(0, 3), sequence(1, 6)]);
            let scores = zero.score(&tokens).unwrap();
            for _ in 0..2 {
                assert!(zero.offload_states(&ALL).unwrap() > 0);
                zero.load_states(&ALL).unwrap();
                assert_eq!(zero.score(&tokens).unwrap().logprobs, scores.logprobs, "{stage:?}");
            }
        });
    }
}

/// Values written without the strategy's knowledge show if a copy was made: the next copy would keep them.
#[test]
fn weights_that_nobody_has_set_are_copied_once() {
    ranks(2, true, |device, group| {
        let mut frozen = Zero::new(decoder(false), ZeroStage::Zero0, None, device, group.clone(), 7).unwrap();
        let mut other = Zero::new(decoder(false), ZeroStage::Zero0, None, device, group, 8).unwrap();
        let first = values(&mut frozen);
        let go_and_come = |zero: &mut Zero<_>| {
            zero.offload_states(&[Params]).unwrap();
            zero.load_states(&[Params]).unwrap();
        };
        go_and_come(&mut frozen);
        drop(frozen.weights().unwrap()[0][0].fill_(3.0));
        assert_ne!(values(&mut frozen), first);
        go_and_come(&mut frozen);
        assert_eq!(values(&mut frozen), first, "weights offloaded once are on the host");
        // Also if they are loaded before the offload is done.
        frozen.start_offload(&[Params]).unwrap();
        frozen.load_states(&[Params]).unwrap();
        assert_eq!(values(&mut frozen), first);

        frozen.copy_weights_from(&mut other).unwrap();
        go_and_come(&mut frozen);
        assert_eq!(values(&mut frozen), values(&mut other), "weights that were set are copied again");
    });
}

fn host(stage: ZeroStage, precision: Precision) -> ZeroConfig {
    ZeroConfig { precision, steps_on: StepsOn::Host, ..stage.into() }
}

#[test]
fn a_step_on_the_host_changes_no_bit() {
    let fp16 = Precision::Fp16(Fp16Config::default());
    for (precision, world_size) in [(Precision::Fp32, 3), (Precision::Bf16, 2), (fp16, 1)] {
        for stage in STAGES {
            let on_device = ZeroConfig { precision, ..stage.into() };
            let reference = trained(on_device, world_size, true, false, 12);
            let away = ranks(world_size, true, |device, group| {
                let mut zero = zero(host(stage, precision), true, device, group);
                let norms = train_with(&mut zero, 0..4, 12, |zero| {
                    zero.offload_states(&ALL).unwrap();
                    zero.load_states(&ALL).unwrap();
                });
                (norms, values(&mut zero))
            });
            assert!(away.iter().all(|rank| *rank == reference), "{stage:?} x {world_size} in {precision:?}");
        }
    }
}

#[test]
fn states_on_the_host_take_no_memory_of_the_device() {
    for stage in STAGES {
        ranks(2, false, |device, group| {
            let before = device.memory_info().unwrap().allocated_bytes;
            let mut on_device = zero(stage, false, device, group.clone());
            train(&mut on_device, 0..1, 2);
            let states = on_device.offload_states(&[Optimizer]).unwrap();
            on_device.load_states(&[Optimizer]).unwrap();
            let with_states = memory(&on_device).0 - before;
            drop(on_device);

            let mut on_host = zero(host(stage, Precision::Fp32), false, device, group);
            train(&mut on_host, 0..1, 2);
            assert_eq!(memory(&on_host).0 - before + states, with_states, "{stage:?}");
            assert_eq!(on_host.offload_states(&[Optimizer]).unwrap(), 0);
        });
    }
}

/// States saved from the device load on the host, and the other way round.
#[test]
fn a_checkpoint_does_not_know_where_states_were() {
    let folder = tempfile::tempdir().unwrap();
    let on = |steps_on| ZeroConfig { precision: Precision::Bf16, steps_on, ..ZeroStage::Zero2.into() };
    for (from, to) in [(StepsOn::Device, StepsOn::Host), (StepsOn::Host, StepsOn::Device)] {
        let path = folder.path().join(format!("{from:?}"));
        let [whole, resumed] = [None, Some(to)].map(|to| {
            ranks(2, false, |device, group| {
                let mut zero = zero(on(to.unwrap_or(from)), true, device, group);
                match to {
                    None => {
                        train(&mut zero, 0..2, 2);
                        checkpoint::save(&mut zero, &path, Stamp::default(), serde_json::Value::Null)
                            .unwrap();
                    }
                    Some(_) => drop(checkpoint::load(&mut zero, &path).unwrap()),
                }
                train(&mut zero, 2..4, 2);
                values(&mut zero)
            })
        });
        assert!(whole == resumed, "from {from:?} to {to:?}");
    }
}
