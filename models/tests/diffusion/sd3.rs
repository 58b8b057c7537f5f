//! Stable Diffusion 3's transformer, and 3.5's.

use anyroll_models::Weights;
use anyroll_models::diffusion::{DenoiseBatch, Sd3, Sd3Config, Texts};
use anyroll_models::model::Model;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::golden::{goldens, integer};

#[test]
fn velocities_and_gradients_equal_diffusers() {
    for (config, golden) in goldens("sd3") {
        let texts = Texts::new(golden.get("context"), Some(golden.get("pooled"))).unwrap();
        let model = Sd3::new(config_of(&config), None, Device::Cpu).unwrap().with_texts(texts).unwrap();
        golden.check(&model, &batch(golden.get("latents"), golden.get("sigmas")));
    }
}

#[test]
fn latents_and_texts_that_do_not_fit_are_refused() {
    let model = || Sd3::new(config_of(&goldens("sd3")[0].0), None, Device::Cpu).unwrap();
    let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    for size in [[1, 3, 8, 8], [1, 2, 7, 8], [1, 2, 8, 14]] {
        let batch = batch(zeros(&size), zeros(&[1]));
        let error = model().forward(0, &Weights::new(&[&[]]), None, &batch, false).unwrap_err().to_string();
        assert!(error.contains("latents") && error.contains("at most 12"), "{error}");
    }
    let narrow = Texts::new(zeros(&[1, 3, 4]), Some(zeros(&[1, 5]))).unwrap();
    let error = model().with_texts(narrow).unwrap_err().to_string();
    assert!(error.contains("texts") && error.contains("(6, Some(5))"), "{error}");
    assert!(Texts::new(zeros(&[2, 3, 6]), Some(zeros(&[1, 5]))).is_err());
}

/// Returns a batch in which each point has the text with its own index.
fn batch(latents: Tensor, sigmas: Tensor) -> DenoiseBatch {
    let labels = Tensor::arange(latents.size()[0], (Kind::Int64, Device::Cpu));
    DenoiseBatch { latents, sigmas, labels, adapters: true, latents_grad: true }
}

pub fn config_of(config: &Value) -> Sd3Config {
    let layers = config["dual_attention_layers"].as_array().into_iter().flatten();
    Sd3Config {
        sample_size: integer(config, "sample_size"),
        patch_size: integer(config, "patch_size"),
        in_channels: integer(config, "in_channels"),
        out_channels: integer(config, "out_channels"),
        num_layers: integer(config, "num_layers") as usize,
        attention_head_dim: integer(config, "attention_head_dim"),
        num_attention_heads: integer(config, "num_attention_heads"),
        joint_attention_dim: integer(config, "joint_attention_dim"),
        pooled_projection_dim: integer(config, "pooled_projection_dim"),
        pos_embed_max_size: integer(config, "pos_embed_max_size"),
        dual_attention_layers: layers.map(|layer| layer.as_u64().unwrap() as usize).collect(),
        qk_rms_norm: config["qk_norm"] == "rms_norm",
    }
}
