//! Wan's transformer.

use anyroll_models::Weights;
use anyroll_models::diffusion::{DenoiseBatch, Texts, Wan, WanConfig};
use anyroll_models::model::Model;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::golden::{goldens, integer};

#[test]
fn velocities_and_gradients_equal_diffusers() {
    for (config, golden) in goldens("wan") {
        let texts = Texts::new(golden.get("context"), None).unwrap();
        let model = Wan::new(config_of(&config), None, Device::Cpu).unwrap().with_texts(texts).unwrap();
        golden.check(&model, &batch(golden.get("latents"), golden.get("sigmas")));
    }
}

#[test]
fn latents_that_do_not_fit_are_refused() {
    let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let (config, _) =
        goldens("wan").into_iter().find(|(config, _)| config["cross_attn_norm"] == true).unwrap();
    let texts = Texts::new(zeros(&[1, 3, 6]), None).unwrap();
    let model = Wan::new(config_of(&config), None, Device::Cpu).unwrap().with_texts(texts).unwrap();
    for size in [&[1, 3, 4, 4, 4][..], &[1, 4, 4, 3, 4], &[1, 4, 9, 4, 4], &[1, 4, 4, 4]] {
        let batch = batch(zeros(size), zeros(&[1]));
        let error = model.forward(0, &Weights::new(&[&[]]), None, &batch, false).unwrap_err().to_string();
        assert!(error.contains("latents") && error.contains("at most 8 patches"), "{error}");
    }
}

/// Returns a batch in which each point has the text with its own index.
fn batch(latents: Tensor, sigmas: Tensor) -> DenoiseBatch {
    let labels = Tensor::arange(latents.size()[0], (Kind::Int64, Device::Cpu));
    DenoiseBatch { latents, sigmas, labels, adapters: true, latents_grad: true }
}

fn config_of(config: &Value) -> WanConfig {
    WanConfig {
        patch_size: serde_json::from_value(config["patch_size"].clone()).unwrap(),
        num_attention_heads: integer(config, "num_attention_heads"),
        attention_head_dim: integer(config, "attention_head_dim"),
        in_channels: integer(config, "in_channels"),
        text_dim: integer(config, "text_dim"),
        freq_dim: integer(config, "freq_dim"),
        ffn_dim: integer(config, "ffn_dim"),
        num_layers: integer(config, "num_layers") as usize,
        cross_attn_norm: config["cross_attn_norm"].as_bool().unwrap(),
        eps: config["eps"].as_f64().unwrap(),
        rope_max_seq_len: integer(config, "rope_max_seq_len"),
        boundary_ratio: config["boundary_ratio"].as_f64(),
    }
}
