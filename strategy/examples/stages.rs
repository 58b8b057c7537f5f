//! One rank of a check that all ZeRO stages train bitwise equally on an accelerator, and up to rounding like
//! a CPU.
//!
//! Usage: `stages BACKEND RANK WORLD_SIZE PORT [LIBRARIES]`. Start one process per device, all with the same
//! port. LIBRARIES is a folder that is searched first for the vendor's libraries.

#![forbid(unsafe_code)]

use std::{sync::Arc, time::Duration};

use anyroll_backends::{
    BackendKind, CollectiveGroup, Device, DeviceId, Rendezvous, TorchDevice, connect, faults::Delayed, open,
    prefer_folder,
};
use anyroll_models::{Decoder, DecoderConfig, PackedBatch, QkNorm, ScoresGrad, Sequence};
use anyroll_strategy::{AdamW, Decays, Zero, ZeroStage};
use tch::{Kind, Tensor};

const STAGES: [ZeroStage; 4] = [ZeroStage::Zero0, ZeroStage::Zero1, ZeroStage::Zero2, ZeroStage::Zero3];
const ADAMW: AdamW =
    AdamW { betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1, decays: Decays::Matrices, max_grad_norm: 0.5 };
const STEPS: u64 = 6;
/// Divisible by every world size used here, so that ranks have equally many micro-batches.
const SEQUENCES: usize = 24;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Results of a run: loss and gradient norm per step, and the bits of every weight.
#[derive(PartialEq)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<u32>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [backend, rank, world_size, port, libraries @ ..] = &*arguments else {
        panic!("usage: stages BACKEND RANK WORLD_SIZE PORT [LIBRARIES]");
    };
    libraries.iter().for_each(prefer_folder);
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let (rank, world_size) = (number(rank), number(world_size));
    let ordinal = rank;
    let device = open(DeviceId { backend: backend.parse().expect("a backend"), ordinal }).unwrap();
    let port = port.parse().expect("a port");
    let group = group(&device, &Rendezvous::on_this_host(rank, world_size, port, TIMEOUT));
    for (name, tied, hidden) in [("small", false, 32), ("tied", true, 32), ("wide", false, 512)] {
        let run = |stage, delayed: bool| {
            let device = if delayed {
                Delayed::wrap(device.clone(), 1 + rank as u64, Duration::from_micros(300))
            } else {
                device.clone()
            };
            let group = group.split(name, Some(0), 0).unwrap().expect("a rank with a color is a member");
            trained(stage, tied, hidden, &device, group)
        };
        let reference = run(ZeroStage::Zero0, false);
        for stage in STAGES {
            let other = run(stage, true);
            let (losses, norms) = (other.losses == reference.losses, other.norms == reference.norms);
            let differ = other.weights.iter().zip(&reference.weights).filter(|(a, b)| a != b).count();
            println!(
                "rank {rank} of {world_size}, {name}, {stage:?}: losses equal {losses}, norms equal {norms}, {differ} of {} weights differ",
                reference.weights.len()
            );
            assert!(other == reference, "{stage:?} differs from stage 0");
        }
        let cpu = open(DeviceId { backend: BackendKind::CPU, ordinal }).unwrap();
        let alone = self::group(&cpu, &Rendezvous::in_this_process(1, TIMEOUT).unwrap()[0]);
        let cpu = trained(ZeroStage::Zero0, tied, hidden, &cpu, alone);
        let apart =
            |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max);
        let (losses, norms) = (apart(&reference.losses, &cpu.losses), apart(&reference.norms, &cpu.norms));
        println!(
            "rank {rank} of {world_size}, {name}: losses {:?}; they differ from the CPU's by {losses:.1e}, norms by {norms:.1e}",
            reference.losses
        );
        assert!(losses < 1e-4, "losses {:?} and the CPU's {:?}", reference.losses, cpu.losses);
    }
}

fn group(device: &Arc<dyn Device>, rendezvous: &Rendezvous) -> CollectiveGroup {
    let comm = connect(&**device, rendezvous).unwrap();
    CollectiveGroup::new("world", comm, device, TIMEOUT).unwrap()
}

fn trained(
    stage: ZeroStage,
    tied: bool,
    hidden: i64,
    device: &Arc<dyn Device>,
    group: CollectiveGroup,
) -> Trained {
    let at = device.torch_device().map(TorchDevice::tch).expect("libtorch computes on it");
    let config = DecoderConfig {
        vocab_size: 4 * hidden + 1,
        num_key_value_heads: 2,
        intermediate_size: 2 * hidden + 8,
        max_position_embeddings: 128,
        qkv_bias: true,
        initializer_range: 0.1,
        qk_norm: Some(QkNorm::PerHead),
        tie_word_embeddings: tied,
        ..DecoderConfig::plain(3, hidden, 4)
    };
    let vocabulary = config.vocab_size as u64;
    let decoder = Arc::new(Decoder::new(config, at).unwrap());
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut zero = Zero::new(decoder, stage, Some(ADAMW), device, group.clone(), 7).unwrap();
    let mut run = Trained { losses: Vec::new(), norms: Vec::new(), weights: Vec::new() };
    let mine = SEQUENCES / world_size;
    for step in 0..STEPS {
        let all: Vec<Vec<i64>> =
            (0..SEQUENCES as u64).map(|index| sequence(step, index, vocabulary)).collect();
        let targets: usize = all.iter().map(|sequence| sequence.len() - 2).sum();
        let mut loss = 0.0;
        for part in all[rank * mine..(rank + 1) * mine].chunks(4) {
            let part: Vec<Sequence> = part.iter().map(|tokens| Sequence { tokens, prompt_len: 2 }).collect();
            let batch = PackedBatch::new(&part, 1.0, at).unwrap();
            let gradient = -1.0 / targets as f64;
            zero.accumulate(&batch, |scores| {
                loss += scores.logprobs.sum(Kind::Double).double_value(&[]) * gradient;
                let logprobs = Tensor::full_like(&scores.logprobs, gradient);
                Ok(ScoresGrad { logprobs, entropy: None, divergence: None })
            })
            .unwrap();
        }
        run.losses.push(summed(loss, &group, device));
        let stats = zero.step(1e-2).unwrap();
        run.norms.push(zero.finish_step(&stats).unwrap().grad_norm.unwrap());
    }
    for weight in zero.weights().unwrap().iter().flatten() {
        let values = Vec::<f32>::try_from(weight.to_device(tch::Device::Cpu).reshape([-1])).unwrap();
        run.weights.extend(values.iter().map(|value| value.to_bits()));
    }
    run
}

/// Sums one number of each rank, in rank order.
fn summed(value: f64, group: &CollectiveGroup, device: &Arc<dyn Device>) -> f64 {
    use anyroll_backends::{Buffer, DType, Stream};
    let stream = Stream::torch(device).unwrap();
    let all = Buffer::zeros(&stream, group.world_size() * size_of::<f64>(), DType::U8).unwrap();
    let mine = all.slice(group.rank() * size_of::<f64>()..(group.rank() + 1) * size_of::<f64>());
    let tensor = mine.tensor(&[size_of::<f64>() as i64]).unwrap();
    tensor.view_dtype(Kind::Double).copy_(&Tensor::from_slice(&[value]));
    group.all_gather(&all, &mine, &stream).unwrap().wait_stream(&stream).unwrap();
    let values = all.tensor(&[all.len() as i64]).unwrap().view_dtype(Kind::Double);
    Vec::<f64>::try_from(values.to_device(tch::Device::Cpu)).unwrap().iter().sum()
}

/// Returns tokens that depend only on the step and the sequence; lengths differ.
fn sequence(step: u64, index: u64, vocabulary: u64) -> Vec<i64> {
    (0..20 + index * 3).map(|t| ((step * 7 + index * 5 + t * t * 3 + t) % vocabulary) as i64).collect()
}
