//! Stages and world sizes agree to the bit, with each other and after a checkpoint; ranks are threads here.

use std::{net::TcpListener, sync::Arc, thread, time::Duration};

use anyroll_backends::{BackendKind, CollectiveGroup, Device, DeviceId, Rendezvous, connect, faults, open};
use anyroll_models::{Decoder, DecoderConfig, OutputGrad, PackedBatch, Sequence};
use anyroll_strategy::{AdamW, Zero, ZeroStage, checkpoint};
use tch::Tensor;

const STAGES: [ZeroStage; 4] = [ZeroStage::Zero0, ZeroStage::Zero1, ZeroStage::Zero2, ZeroStage::Zero3];
const ADAMW: AdamW = AdamW { betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1, max_grad_norm: 0.05 };
/// Divisible by every world size here, so that each rank has equally many micro-batches.
const SEQUENCES: usize = 12;

fn decoder(tied: bool) -> Arc<Decoder> {
    let config = DecoderConfig {
        vocab_size: 11,
        hidden_size: 12,
        num_hidden_layers: 3,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 6,
        intermediate_size: 20,
        max_position_embeddings: 16,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-6,
        qkv_bias: true,
        initializer_range: 0.3,
        qk_norm: true,
        tie_word_embeddings: tied,
    };
    Arc::new(Decoder::new(config, tch::Device::Cpu).unwrap())
}

/// Runs `rank` on as many threads, each with a group of its own; returns what each returned.
fn ranks<R: Send>(
    world_size: usize,
    delayed: bool,
    rank: impl Fn(&Arc<dyn Device>, CollectiveGroup) -> R + Sync,
) -> Vec<R> {
    let master_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    thread::scope(|scope| {
        let start = |number: usize| {
            let rank = &rank;
            move || {
                let timeout = Duration::from_secs(60);
                let mut device = open(DeviceId { backend: BackendKind::Cpu, ordinal: number }).unwrap();
                if delayed {
                    device = faults::Delayed::wrap(device, number as u64, Duration::from_micros(500));
                }
                let master_addr = "127.0.0.1".into();
                let rendezvous = Rendezvous {
                    rank: number,
                    world_size,
                    master_addr,
                    master_port,
                    agent_store: None,
                    timeout,
                };
                let comm = connect(&*device, &rendezvous).unwrap();
                let group = CollectiveGroup::new("data", comm, &device, timeout).unwrap();
                rank(&device, group)
            }
        };
        let threads: Vec<_> = (0..world_size).map(|number| scope.spawn(start(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The log-probs' gradient of the mean negative log-likelihood over `targets`.
fn train(zero: &mut Zero<Decoder>, steps: std::ops::Range<u64>, micro_batches: usize) -> Vec<f64> {
    let (rank, world_size) = (zero.group().rank(), zero.group().world_size());
    let mine = SEQUENCES / world_size;
    let micro = SEQUENCES / micro_batches;
    let mut norms = Vec::new();
    for step in steps {
        let sequences: Vec<Vec<i64>> = (0..SEQUENCES as u64).map(|index| sequence(step, index)).collect();
        let targets: usize = sequences.iter().map(|sequence| sequence.len() - 2).sum();
        for part in sequences[rank * mine..(rank + 1) * mine].chunks(micro.min(mine)) {
            let part: Vec<Sequence> = part.iter().map(|tokens| Sequence { tokens, prompt_len: 2 }).collect();
            let batch = PackedBatch::new(&part, 1.0, tch::Device::Cpu).unwrap();
            zero.accumulate(&batch, |scores| {
                let logprobs = Tensor::full_like(&scores.logprobs, -1.0 / targets as f64);
                Ok(OutputGrad::Scores { logprobs, entropy: None })
            })
            .unwrap();
        }
        let stats = zero.step(1e-2).unwrap();
        norms.push(zero.finish_step(&stats).unwrap());
    }
    norms
}

/// Tokens that depend on the step and the sequence alone; lengths differ.
fn sequence(step: u64, index: u64) -> Vec<i64> {
    (0..4 + index % 7).map(|t| ((step * 7 + index * 5 + t * t * 3 + t) % 11) as i64).collect()
}

fn values(zero: &mut Zero<Decoder>) -> Vec<u32> {
    let weights = zero.weights().unwrap();
    let flat: Vec<f32> =
        weights.iter().flatten().flat_map(|t| Vec::<f32>::try_from(t.reshape([-1])).unwrap()).collect();
    flat.iter().map(|value| value.to_bits()).collect()
}

fn trained(
    stage: ZeroStage,
    world_size: usize,
    tied: bool,
    delayed: bool,
    micro_batches: usize,
) -> (Vec<f64>, Vec<u32>) {
    let mut results = ranks(world_size, delayed, |device, group| {
        let mut zero = Zero::new(decoder(tied), stage, Some(ADAMW), device, group, 7).unwrap();
        let norms = train(&mut zero, 0..4, micro_batches);
        (norms, values(&mut zero))
    });
    let first = results.swap_remove(0);
    assert!(results.iter().all(|other| *other == first), "ranks differ at {stage:?}");
    first
}

#[test]
fn stages_are_bitwise_equal() {
    for world_size in [1, 2, 3, 4] {
        for tied in [false, true] {
            let reference = trained(ZeroStage::Zero0, world_size, tied, false, 12);
            assert!(reference.0.iter().all(|norm| *norm > 0.05), "clipping is tested only when it is active");
            for stage in STAGES {
                assert!(
                    trained(stage, world_size, tied, true, 12) == reference,
                    "{stage:?} x {world_size}, tied {tied}"
                );
            }
        }
    }
}

#[test]
fn the_split_over_ranks_does_not_change_the_bits() {
    // One micro-batch a rank, so the same micro-batches added in the same order. The norm's partial sums are
    // other ones, in fp64.
    let alone = trained(ZeroStage::Zero0, 1, false, false, 2);
    for stage in [ZeroStage::Zero0, ZeroStage::Zero3] {
        let split = trained(stage, 2, false, false, 2);
        assert!(alone.1 == split.1, "weights at {stage:?}");
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * a;
        assert!(alone.0.iter().zip(&split.0).all(close), "{:?} {:?}", alone.0, split.0);
    }
}

#[test]
fn training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step_000002");
    let make = |stage, device: &Arc<dyn Device>, group| {
        Zero::new(decoder(true), stage, Some(ADAMW), device, group, 7).unwrap()
    };
    let whole = ranks(2, false, |device, group| {
        let mut zero = make(ZeroStage::Zero2, device, group);
        train(&mut zero, 0..2, 2);
        checkpoint::save(&mut zero, &path, serde_json::json!({"cursor": 5})).unwrap();
        train(&mut zero, 2..4, 2);
        values(&mut zero)
    });
    // Also at another stage and world size: the order of summation is that of the micro-batches.
    for (world_size, stage) in
        [(2, ZeroStage::Zero2), (2, ZeroStage::Zero3), (2, ZeroStage::Zero0), (1, ZeroStage::Zero0)]
    {
        let resumed = ranks(world_size, false, |device, group| {
            let mut zero = make(stage, device, group);
            let extra = checkpoint::load(&mut zero, &path).unwrap();
            assert_eq!((extra["cursor"].as_u64(), zero.steps_done()), (Some(5), 2));
            train(&mut zero, 2..4, 2);
            values(&mut zero)
        });
        assert!(resumed[0] == whole[0], "{stage:?} x {world_size}");
    }
    damaged_checkpoints_are_named(&path);
}

fn damaged_checkpoints_are_named(path: &std::path::Path) {
    let shard = path.join("rank_0001.bin");
    let good = std::fs::read(&shard).unwrap();
    let load = || {
        let mut outcome = ranks(1, false, |device, group| {
            let mut zero = Zero::new(decoder(true), ZeroStage::Zero0, Some(ADAMW), device, group, 7).unwrap();
            let error = checkpoint::load(&mut zero, path).unwrap_err();
            let source = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
            format!("{error}: {source}")
        });
        outcome.remove(0)
    };
    let check = |bytes: Option<&[u8]>, words: &str| {
        match bytes {
            Some(bytes) => std::fs::write(&shard, bytes).unwrap(),
            None => std::fs::remove_file(&shard).unwrap(),
        }
        let message = load();
        assert!(message.contains("rank_0001.bin") && message.contains(words), "{message}");
    };
    let mut flipped = good.clone();
    flipped[100] ^= 1;
    check(Some(&flipped), "checksum");
    check(Some(&good[..good.len() - 1]), "bytes instead of");
    check(None, "No such file");
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    for stage in STAGES {
        let same = ranks(2, false, |device, group| {
            let mut zero = Zero::new(decoder(false), stage, Some(ADAMW), device, group, 7).unwrap();
            train(&mut zero, 0..1, 2);
            let before = values(&mut zero);
            let tokens = sequence(0, 3);
            let batch =
                PackedBatch::new(&[Sequence { tokens: &tokens, prompt_len: 2 }], 1.0, tch::Device::Cpu)
                    .unwrap();
            zero.accumulate(&batch, |scores| {
                let logprobs = Tensor::full_like(&scores.logprobs, f64::NAN);
                Ok(OutputGrad::Scores { logprobs, entropy: None })
            })
            .unwrap();
            let stats = zero.step(1e-2).unwrap();
            let error = zero.finish_step(&stats).unwrap_err().to_string();
            assert!(error.contains("step 2") && error.contains("NaN"), "{error}");
            before == values(&mut zero)
        });
        assert_eq!(same, [true, true], "{stage:?}");
    }
}
