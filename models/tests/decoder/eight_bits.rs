//! Sampling with weights in 8 bits, compared with the values that these are.

use anyroll_backends::ops;
use anyroll_models::{
    Decoder, DecoderConfig, ExpertsConfig, LoraConfig, LoraTarget, Model, PackedBatch, Sequence, init::Seed,
};
use tch::{Device, Kind, Tensor};

use crate::{
    generation::{params, run},
    holder::Holder,
};

fn config() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 13,
        num_key_value_heads: 2,
        head_dim: 16,
        intermediate_size: 80,
        max_position_embeddings: 80,
        qkv_bias: true,
        mlp_bias: true,
        initializer_range: 0.4,
        ..DecoderConfig::plain(2, 48, 4)
    }
}

fn with(holder: &Holder, weights: Vec<Vec<Tensor>>) -> Holder {
    Holder { decoder: holder.decoder.clone(), weights, grads: Vec::new() }
}

fn copies(holder: &Holder) -> Vec<Vec<Tensor>> {
    holder.weights.iter().map(|unit| unit.iter().map(Tensor::copy).collect()).collect()
}

/// Number of matrices in 8 bits.
fn narrow(holder: &Holder) -> usize {
    holder.weights.iter().flatten().filter(|tensor| ops::is_in_eight_bits(tensor)).count()
}

/// A row's values are few: those of e4m3 times a power of two.
#[test]
fn weights_in_eight_bits_sample_as_the_values_that_they_are() {
    let adapted = || {
        let lora = LoraConfig::new(3, 6.0, LoraTarget::ALL.to_vec());
        Decoder::with_lora(config(), &lora, Device::Cpu).unwrap()
    };
    let plain = || Decoder::new(config(), Device::Cpu).unwrap();
    for (decoder, kind) in [(plain(), Kind::Float), (plain(), Kind::BFloat16), (adapted(), Kind::Float)] {
        let holder = Holder::from_source(decoder, &Seed(5), kind);
        for unit in &holder.weights[3 + 1..] {
            unit.iter().for_each(|adapter| drop(adapter.shallow_clone().normal_(0.0, 0.2)));
        }
        let eight = with(&holder, holder.decoder.all_in_eight_bits(copies(&holder)).unwrap());
        assert_eq!((narrow(&holder), narrow(&eight)), (0, 2 * 4));
        let widened = |tensor: &Tensor| ops::widened(tensor, kind).unwrap();
        let wide = eight.weights.iter().map(|unit| unit.iter().map(widened).collect());
        let wide = with(&holder, wide.collect());
        assert_eq!(narrow(&wide), 0);
        let prompts: Vec<Vec<i64>> =
            (1..9).map(|len| (0..len * 3).map(|i| (i * len) % 13).collect()).collect();
        let seeds: Vec<u64> = (0..8).collect();
        let sampled = |holder: &Holder| run(holder, &prompts, &params(1.0), &seeds);
        let (found, expected) = (sampled(&eight), sampled(&wide));
        assert_eq!(found, expected, "{kind:?}");
        assert_ne!(found, sampled(&holder), "the weights are not rounded");
    }
}

/// Rounding rows moves log-probs about as far as rounding weights does.
#[test]
fn rounded_rows_sample_otherwise_and_near() {
    let holder = Holder::from_source(Decoder::new(config(), Device::Cpu).unwrap(), &Seed(5), Kind::Float);
    let eight = with(&holder, holder.decoder.all_in_eight_bits(copies(&holder)).unwrap());
    let rounding = Decoder::clone(&holder.decoder).rounding_rows();
    let rounding = Holder { decoder: rounding.into(), ..with(&holder, copies(&eight)) };
    let prompts: Vec<Vec<i64>> = (1..9).map(|len| (0..len * 3).map(|i| (i * len) % 13).collect()).collect();
    let tokens: Vec<Sequence> = prompts.iter().map(|tokens| Sequence { tokens, prompt_len: 1 }).collect();
    let logprobs = |holder: &Holder| {
        let batch = PackedBatch::new(&tokens, 1.0, Device::Cpu).unwrap();
        holder.forward(&batch, false).0.logprobs
    };
    let [exact, weights, rows] = [&holder, &eight, &rounding].map(logprobs);
    let apart = |one: &Tensor, other: &Tensor| (one - other).abs().mean(Kind::Double).double_value(&[]);
    let [of_weights, of_rows] = [apart(&weights, &exact), apart(&rows, &weights)];
    assert!(of_rows > of_weights / 10.0 && of_rows < of_weights * 3.0, "{of_weights}, {of_rows}");
}

#[test]
fn the_bytes_of_a_layer_are_about_those_of_its_values() {
    let decoder = Decoder::new(config(), Device::Cpu).unwrap();
    let holder = Holder::of_kind(decoder, 3, Kind::BFloat16);
    let decoder = &holder.decoder;
    let all = decoder.all_in_eight_bits(copies(&holder)).unwrap();
    for (unit, weights) in all.iter().enumerate() {
        let bytes = weights.iter().map(|it| it.numel() * it.kind().elt_size_in_bytes()).sum::<usize>();
        match decoder.eight_bit_bytes(unit, 2) {
            Some(expected) => assert_eq!(bytes, expected),
            None => assert!(weights.iter().zip(&holder.weights[unit]).all(|(a, b)| a == b)),
        }
    }
    assert_eq!((decoder.widest_matrix_bytes(2), decoder.widest_row()), (2 * 80 * 48 * 2, 80));
    assert_eq!(decoder.units().len(), all.len());
}

#[test]
fn matrices_that_are_not_kept_in_eight_bits_are_refused_by_name() {
    let refused = |config: DecoderConfig, field: &str| {
        let message = config.check_eight_bits().unwrap_err().to_string();
        assert!(message.contains(field), "{message}");
    };
    config().check_eight_bits().unwrap();
    refused(DecoderConfig { intermediate_size: 76, ..config() }, "intermediate_size");
    refused(DecoderConfig { head_dim: 7, ..config() }, "num_attention_heads");
    refused(DecoderConfig { hidden_size: 44, ..config() }, "hidden_size");
    let experts = ExpertsConfig::plain(vec![true, true], 4, 2, 32);
    refused(DecoderConfig { experts: Some(experts), ..config() }, "num_experts");
}
