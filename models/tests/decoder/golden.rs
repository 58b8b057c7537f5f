//! The decoder compared with PyTorch: log-probs, entropies and every gradient of tiny models of each shape.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyroll_close::assert_close;
use anyroll_models::{Decoder, DecoderConfig, Model, PackedBatch, QkNorm, Sequence};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::holder::Holder;

/// Tolerance of each value, relative to the largest of its tensor if that is above 1.
const TOLERANCE: f64 = 1e-5;

#[test]
fn scores_and_gradients_equal_pytorch() {
    let configs: Value =
        serde_json::from_str(&std::fs::read_to_string(folder().join("configs.json")).unwrap()).unwrap();
    let temperature = configs["temperature"].as_f64().unwrap();
    for (name, config) in configs["configs"].as_object().unwrap() {
        check(name, decoder_config(config), temperature);
    }
}

fn check(name: &str, config: DecoderConfig, temperature: f64) {
    let golden = read(&folder().join(format!("{name}.safetensors")));
    let mut holder = Holder::new(Decoder::new(config, Device::Cpu).unwrap(), 0);
    for (unit, weights) in holder.decoder.units().iter().zip(&mut holder.weights) {
        for (spec, weight) in unit.params.iter().zip(weights) {
            let parts: Vec<&Tensor> = spec.parts.iter().map(|part| &golden[&part.name]).collect();
            weight.copy_(&Tensor::cat(&parts, 0));
        }
    }
    let batch = packed(&golden, temperature);
    let (scores, saved) = holder.forward(&batch, true);
    assert_close(&format!("{name}: logprobs"), &scores.logprobs, &golden["logprobs"], TOLERANCE);
    assert_close(&format!("{name}: entropy"), &scores.entropy, &golden["entropy"], TOLERANCE);

    let coefficients = ["d_logprobs", "d_entropy"].map(|which| golden[which].shallow_clone());
    let [dlogprobs, dentropy] = coefficients;
    holder.backward(&batch, saved, dlogprobs, Some(dentropy));
    for (unit, grads) in holder.decoder.units().iter().zip(&holder.grads) {
        for (spec, grad) in unit.params.iter().zip(grads.views()) {
            let mut row = 0;
            for part in &spec.parts {
                let expected = &golden[&format!("grad.{}", part.name)];
                assert_close(
                    &format!("{name}: {}", part.name),
                    &grad.narrow(0, row, part.rows),
                    expected,
                    TOLERANCE,
                );
                row += part.rows;
            }
        }
    }
}

fn packed(golden: &HashMap<String, Tensor>, temperature: f64) -> PackedBatch {
    let integers = |which: &str| Vec::<i64>::try_from(&golden[which]).unwrap();
    let (tokens, lengths, prompt_lens) = (integers("tokens"), integers("lengths"), integers("prompt_lens"));
    let mut rest = tokens.as_slice();
    let sequences: Vec<Sequence> = lengths
        .iter()
        .zip(&prompt_lens)
        .map(|(&length, &prompt_len)| {
            let (tokens, after) = rest.split_at(length as usize);
            rest = after;
            Sequence { tokens, prompt_len: prompt_len as usize }
        })
        .collect();
    PackedBatch::new(&sequences, temperature, Device::Cpu).unwrap()
}

fn decoder_config(config: &Value) -> DecoderConfig {
    let integer = |field: &str| config[field].as_i64().unwrap_or_else(|| panic!("{field}"));
    let number = |field: &str| config[field].as_f64().unwrap_or_else(|| panic!("{field}"));
    let flag = |field: &str| config[field].as_bool().unwrap_or_else(|| panic!("{field}"));
    DecoderConfig {
        vocab_size: integer("vocab_size"),
        num_key_value_heads: integer("num_key_value_heads"),
        head_dim: integer("head_dim"),
        intermediate_size: integer("intermediate_size"),
        rms_norm_eps: number("rms_norm_eps"),
        rope_theta: number("rope_theta"),
        max_position_embeddings: integer("max_position_embeddings"),
        qkv_bias: flag("qkv_bias"),
        qk_norm: flag("qk_norm").then_some(QkNorm::PerHead),
        tie_word_embeddings: flag("tie_word_embeddings"),
        initializer_range: number("initializer_range"),
        ..DecoderConfig::plain(
            integer("num_hidden_layers") as usize,
            integer("hidden_size"),
            integer("num_attention_heads"),
        )
    }
}

fn read(path: &Path) -> HashMap<String, Tensor> {
    let tensors = Tensor::read_safetensors(path).unwrap();
    assert!(tensors.iter().all(|(_, tensor)| matches!(tensor.kind(), Kind::Float | Kind::Int64)));
    tensors.into_iter().collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/decoder")
}
