//! Every strategy trains like a plain PyTorch loop: tests/python/make_training_golden.py.

use std::{collections::HashMap, fs, path::Path, sync::Arc};

use anyroll_models::{Model, ScoresGrad};
use anyroll_strategy::{
    AdamW, Recompute, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
};
use tch::{Kind, Tensor};

use crate::harness::{ADAMW, STAGES, batch, dense, ranks, sequence};
use crate::seals::unseal;

/// Relative tolerance of losses, and absolute tolerance of weights.
const TOLERANCE: f64 = 1e-5;
/// Relative tolerance of the gradient norm, which magnifies rounding of the weights.
const NORM_TOLERANCE: f64 = 1e-4;
const SEQUENCES: usize = 12;

/// Values of each tensor, by name.
type Golden = HashMap<String, Vec<f32>>;

/// AdamW with an `eps` so large that rounding does not decide the sign of a step.
const OPTIMIZER: AdamW = AdamW { eps: 1e-3, max_grad_norm: 0.5, ..ADAMW };

#[test]
fn training_equals_a_plain_pytorch_loop() {
    let cases: [(&str, bool, &[&str]); 2] =
        [("all", false, &[]), ("frozen", true, &["model.embed_tokens", "model.layers.0"])];
    for (name, tied, frozen) in cases {
        let golden = read(name);
        let folder = tempfile::tempdir().unwrap();
        let start = folder.path().join("start");
        write_start(&golden, tied, &start);
        let kinds = [
            (1, Recompute::None, StepsOn::Device),
            (2, Recompute::Selective, StepsOn::Host),
            (3, Recompute::Full, StepsOn::Device),
            (4, Recompute::Selective, StepsOn::Host),
        ];
        for ((world_size, recompute, steps_on), stage) in kinds.into_iter().zip(STAGES) {
            let config = ZeroConfig { recompute, steps_on, ..stage.into() };
            check(
                &format!("{name}, {config:?} x {world_size}"),
                &golden,
                &start,
                (tied, frozen),
                config,
                world_size,
            );
        }
    }
}

fn check(
    what: &str,
    golden: &Golden,
    start: &Path,
    (tied, frozen): (bool, &[&str]),
    config: ZeroConfig,
    world_size: usize,
) {
    let trained = ranks(world_size, false, |device, group| {
        let model = Arc::into_inner(dense(tied)).unwrap().freeze(|unit| frozen.contains(&&*unit.name));
        let mut zero = Zero::new(Arc::new(model), config, Some(OPTIMIZER), device, group, 7).unwrap();
        checkpoint::load(&mut zero, start).unwrap();
        let (losses, norms): (Vec<f64>, Vec<f64>) = (0..10).map(|number| step(&mut zero, number)).unzip();
        (losses, norms, parts(&mut zero))
    });
    let numbers = |which: &str| golden[which].iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
    let (losses, norms) = (numbers("losses"), numbers("norms"));
    for (step, (expected_loss, expected_norm)) in losses.iter().zip(&norms).enumerate() {
        let loss: f64 = trained.iter().map(|rank| rank.0[step]).sum();
        let norm = trained[0].1[step];
        assert!(
            (loss - expected_loss).abs() <= TOLERANCE * expected_loss,
            "{what}: loss {loss}, not {expected_loss}"
        );
        assert!(
            (norm - expected_norm).abs() <= NORM_TOLERANCE * expected_norm,
            "{what}: norm {norm}, not {expected_norm}"
        );
    }
    for (name, values) in &trained[0].2 {
        let expected = &golden[&format!("after.{name}")];
        let apart = values.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        assert!(values.len() == expected.len() && apart <= TOLERANCE, "{what}: {name} differs by {apart:e}");
    }
}

/// Returns this rank's part of the loss, and the gradient norm.
fn step(zero: &mut Zero<anyroll_models::Decoder>, number: u64) -> (f64, f64) {
    let mine = SEQUENCES / zero.group().world_size();
    let sequences: Vec<Vec<i64>> = (0..SEQUENCES as u64).map(|index| sequence(number, index)).collect();
    let targets: usize = sequences.iter().map(|sequence| sequence.len() - 2).sum();
    let mut loss = 0.0;
    // Two micro-batches, so that a forgotten last one shows.
    for part in sequences[zero.group().rank() * mine..][..mine].chunks(mine.div_ceil(2)) {
        zero.accumulate(&batch(part), |scores| {
            loss -= scores.logprobs.sum(Kind::Double).double_value(&[]) / targets as f64;
            let logprobs = Tensor::full_like(&scores.logprobs, -1.0 / targets as f64);
            Ok(ScoresGrad { logprobs, entropy: None, divergence: None })
        })
        .unwrap();
    }
    let stats = zero.step(1e-4).unwrap();
    (loss, zero.finish_step(&stats).unwrap().grad_norm.unwrap())
}

/// Returns the values of every tensor by its Hugging Face name.
fn parts(zero: &mut Zero<anyroll_models::Decoder>) -> Vec<(String, Vec<f32>)> {
    let weights = zero.weights().unwrap();
    let mut found = Vec::new();
    for (unit, weights) in zero.model().units().iter().zip(&weights) {
        for (spec, weight) in unit.params.iter().zip(weights) {
            let mut row = 0;
            for part in &spec.parts {
                let values = weight.narrow(0, row, part.rows).contiguous().reshape([-1]);
                found.push((part.name.clone(), values.try_into().unwrap()));
                row += part.rows;
            }
        }
    }
    found
}

/// Writes a checkpoint with the golden initial weights and no moments: saves one with other weights and
/// rewrites its shard.
fn write_start(golden: &Golden, tied: bool, path: &Path) {
    ranks(1, false, |device, group| {
        let mut zero = Zero::new(dense(tied), ZeroStage::Zero0, Some(OPTIMIZER), device, group, 7).unwrap();
        checkpoint::save(&mut zero, path, Stamp::default(), serde_json::Value::Null).unwrap();
        // Without seals a shard can be written here.
        unseal(path);
        let manifest: serde_json::Value =
            serde_json::from_slice(&fs::read(path.join("manifest.json")).unwrap()).unwrap();
        let mut bytes = Vec::new();
        for (unit, entry) in zero.model().units().iter().zip(manifest["units"].as_array().unwrap()) {
            let mut whole = vec![0f32; entry["len"].as_u64().unwrap() as usize];
            for (spec, param) in unit.params.iter().zip(entry["params"].as_array().unwrap()) {
                let mut start = param["start"].as_u64().unwrap() as usize;
                for part in &spec.parts {
                    let values = &golden[&format!("before.{}", part.name)];
                    whole[start..start + values.len()].copy_from_slice(values);
                    start += values.len();
                }
            }
            bytes.extend(whole.iter().flat_map(|value| value.to_le_bytes()));
            bytes.extend(vec![0; 2 * size_of_val(&*whole)]); // the moments
        }
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        fs::write(path.join("rank_0000.bin"), bytes).unwrap();
    });
}

fn read(name: &str) -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/training");
    let tensors = Tensor::read_safetensors(folder.join(format!("{name}.safetensors"))).unwrap();
    let values = |tensor: Tensor| Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
    tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect()
}
