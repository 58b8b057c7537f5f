//! Samples of several turns: the selected tokens against a mask over all tokens after the prompt.

use anyroll_algorithm::gae;
use anyroll_config::KlLossConfig;
use anyroll_models::{PackedBatch, targets_in};
use anyroll_strategy::{Zero, ZeroStage};
use serde_json::Value;

use super::split::{NEARLY_SGD, assert_near, decoder, flat, own, parts, wave};
use super::*;
use crate::{
    inference::{Episode, Sample},
    train::{Place, ranks},
};

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/turns.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn rows(value: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A sample with a prompt of two tokens; the tokens after it are sampled where the mask is 1.
fn sample(index: usize, mask: &[f64]) -> Sample {
    let token = |place: usize| ((index * 7 + place * 3 + place * place) % 11) as i64;
    let mut sample = Sample { tokens: (0..2 + mask.len()).map(token).collect(), ..Sample::begin(vec![0; 2]) };
    let mut episode = Episode::default();
    let mut start = 2;
    for run in mask.chunk_by(|a, b| a == b) {
        let end = start + run.len();
        if run[0] == 0.0 {
            episode.observations.push(start..end);
        }
        start = end;
    }
    sample.episode = Some(episode);
    sample
}

fn samples(mask: &[Vec<f64>]) -> Vec<Sample> {
    mask.iter().enumerate().map(|(index, mask)| sample(index, mask)).collect()
}

/// Indices of the selected tokens among all tokens after prompts.
fn kept(samples: &[Sample]) -> Vec<i64> {
    let turns: Vec<_> = samples.iter().map(Sample::turns).collect();
    targets_in(samples.iter().map(Sample::sequence).zip(turns.iter().map(Vec::as_slice)))
}

fn lengths(samples: &[Sample]) -> Vec<i64> {
    samples.iter().map(|sample| sample.completion_len() as i64).collect()
}

#[test]
fn what_an_environment_says_weighs_nothing() {
    let golden = golden();
    let number = |name: &str| golden[name].as_f64().unwrap();
    let mask = rows(&golden["mask"]);
    let samples = samples(&mask);
    let (kept, lengths) = (kept(&samples), lengths(&samples));
    let of_mask = mask.concat();
    assert_eq!(kept.len() as f64, of_mask.iter().sum::<f64>());
    assert!(kept.iter().all(|&token| of_mask[token as usize] == 1.0));
    let pick = |all: &[Vec<f64>]| -> Vec<f64> {
        let all = all.concat();
        kept.iter().map(|&token| all[token as usize]).collect()
    };
    let tensor = |name: &str| Tensor::from_slice(&pick(&rows(&golden[name])));
    let advantages: Vec<f64> = serde_json::from_value(golden["advantages"].clone()).unwrap();
    let of_tokens = advantages.iter().zip(&lengths);
    let of_tokens: Vec<f64> =
        of_tokens.flat_map(|(&advantage, &length)| std::iter::repeat_n(advantage, length as usize)).collect();
    for (aggregation, name) in
        AGGREGATIONS.into_iter().zip(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
    {
        let algorithm = AlgorithmConfig {
            loss: PolicyLoss::Clipped(ClippedConfig {
                clip_low: number("clip_low"),
                clip_high: number("clip_high"),
                dual_clip: None,
            }),
            aggregation,
            kl_coef: number("kl_coef"),
            kl_in: KlTerm::Loss(KlLossConfig { estimator: KlEstimator::K3, weighted: false }),
            ..AlgorithmConfig::default()
        };
        let weights: Vec<f64> = token_weights(aggregation, &lengths).into_iter().map(f64::from).collect();
        let targets = Targets {
            lengths: lengths.clone(),
            rollout_logprobs: tensor("old_logp"),
            old_logprobs: tensor("old_logp"),
            advantages: Tensor::from_slice(&of_tokens),
            ref_logprobs: Some(tensor("ref_logp")),
            policy_weights: None,
            token_weights: Tensor::from_slice(&weights),
        };
        let all: Vec<f64> = lengths.iter().map(|&length| length as f64).collect();
        let count = count(aggregation, &all);
        let (found, sums) = gradient(&algorithm, &pick(&rows(&golden["logp"])), &targets, count);
        let expected = &golden[name];
        let of_masked = rows(&expected["gradient"]);
        check_near(&found, &pick(&of_masked), 1e-7);
        let elsewhere = of_masked.concat().into_iter().zip(&of_mask).filter(|(_, kept)| **kept == 0.0);
        assert!(elsewhere.map(|(gradient, _)| gradient).all(|gradient| gradient == 0.0));
        let loss = (sums.policy + algorithm.kl_coef * sums.kl) / count;
        check_near(&[loss], &[expected["loss"].as_f64().unwrap()], 1e-7);
    }
}

/// Advantages continue from one turn to the next, as if there was no observation between them.
#[test]
fn advantages_of_values_pass_over_what_an_environment_says() {
    let golden = golden();
    let [gamma, lambda] = ["gamma", "lambda"].map(|name| golden[name].as_f64().unwrap());
    let rewards: Vec<f64> = serde_json::from_value(golden["rewards"].clone()).unwrap();
    let [mask, values, expected] = ["mask", "values", "gae"].map(|name| rows(&golden[name]));
    for (index, mask) in mask.iter().enumerate() {
        let pick = |all: &[f64]| -> Vec<f64> {
            all.iter().zip(mask).filter(|(_, kept)| **kept == 1.0).map(|(value, _)| *value).collect()
        };
        let values = pick(&values[index]);
        let mut of_tokens = vec![0.0; values.len()];
        *of_tokens.last_mut().unwrap() = rewards[index];
        let gammas = vec![gamma; values.len()];
        check_near(&gae(lambda, &gammas, &of_tokens, &values), &pick(&expected[index]), 1e-12);
    }
}

const MASKS: [&str; 4] = ["110011", "101", "1110000111", "1"];
const SAMPLES: usize = 12;

/// Through a model: the selected tokens of each micro-batch of each rank, against all tokens with weights of 0.
#[test]
fn any_split_gives_the_gradient_of_the_mask() {
    let masked = update(1, SAMPLES, true);
    for (world_size, micro_batch_size) in [(1, SAMPLES), (1, 5), (2, 4), (4, 3), (4, 1)] {
        let what = format!("{world_size} ranks, micro-batches of {micro_batch_size}");
        assert_near(&what, &update(world_size, micro_batch_size, false), &masked);
    }
}

fn update(world_size: usize, micro_batch_size: usize, is_masked: bool) -> (f64, Vec<f32>) {
    let mut of_ranks = ranks(world_size, |place| update_rank(place, micro_batch_size, is_masked));
    of_ranks.swap_remove(0)
}

fn update_rank(Place { device, mesh }: Place, micro_batch_size: usize, is_masked: bool) -> (f64, Vec<f32>) {
    let bits = |mask: &str| mask.bytes().map(|bit| f64::from(bit - b'0')).collect::<Vec<f64>>();
    let mask: Vec<Vec<f64>> = (0..SAMPLES).map(|index| bits(MASKS[index % MASKS.len()])).collect();
    let samples = samples(&mask);
    let aggregation = Aggregation::SeqMeanTokenMean;
    let algorithm = AlgorithmConfig { aggregation, ..AlgorithmConfig::default() };
    let sampled = lengths(&samples);
    let all: Vec<i64> = mask.iter().map(|mask| mask.len() as i64).collect();
    let kept = Tensor::from_slice(&kept(&samples));
    let tokens: i64 = all.iter().sum();
    // Weights of all tokens, including those of weight 0.
    let of_all: Vec<f32> = mask
        .iter()
        .zip(&sampled)
        .flat_map(|(mask, &length)| mask.iter().map(move |&bit| bit as f32 / length as f32))
        .collect();
    let pick = |values: Tensor| if is_masked { values } else { values.index_select(0, &kept) };
    let targets = Targets {
        rollout_logprobs: pick(wave(tokens, 1.1, 0.8, -2.3)),
        old_logprobs: pick(wave(tokens, 1.3, 0.8, -2.4)),
        advantages: pick(wave(tokens, 2.3, 1.0, 0.1)),
        ref_logprobs: None,
        policy_weights: None,
        token_weights: match is_masked {
            true => Tensor::from_slice(&of_all),
            false => Tensor::from_slice(&token_weights(aggregation, &sampled)),
        },
        lengths: if is_masked { all } else { sampled.clone() },
    };
    let count = count(aggregation, &sampled.iter().map(|&length| length as f64).collect::<Vec<_>>());
    let own = own(mesh.world());
    let mut zero = Zero::new(decoder(), ZeroStage::Zero2, Some(NEARLY_SGD), &device, mesh, 0).unwrap();
    for part in parts(own, micro_batch_size) {
        let samples = &samples[part.clone()];
        let sequences: Vec<_> = samples.iter().map(Sample::sequence).collect();
        let packed = PackedBatch::new(&sequences, 1.0, tch::Device::Cpu).unwrap();
        let batch = if is_masked { packed } else { packed.keeping(&self::kept(samples)).unwrap() };
        let targets = targets.part(part).unwrap();
        let mut stats = LossStats::default();
        zero.accumulate(&batch, |scores| {
            Ok(policy_loss(&algorithm, scores, &targets, count, &mut stats).unwrap())
        })
        .unwrap();
    }
    let stats = zero.step(1.0).unwrap();
    let norm = zero.finish_step(&stats).unwrap().grad_norm.unwrap();
    (norm, flat(&mut zero))
}
