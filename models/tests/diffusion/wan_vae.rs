//! The video decoder.

use std::collections::HashSet;

use anyroll_models::diffusion::{WanVaeConfig, WanVaeDecoder};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::golden::{Golden, goldens, integer};

/// The number of latent frames decoded at a time does not matter.
#[test]
fn videos_and_gradients_equal_diffusers() {
    for (config, golden) in goldens("wan_vae") {
        let (model, weights) = decoder(&config, &golden);
        let weights: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        for part in 1..=4 {
            let (videos, tape) = model.decode(&weights, &golden.get("latents"), part, true).unwrap();
            // diffusers clips values that are not colors.
            golden.assert_close("output", &videos.clamp(-1.0, 1.0));
            let d_videos = golden.get("d_output") * videos.abs().le(1.0);
            let found = model.latents_grad(&weights, tape.unwrap(), &d_videos).unwrap();
            golden.assert_close("grad.latents", &found);
        }
        // The first frames do not depend on later ones.
        let first = golden.get("latents").narrow(2, 0, 2);
        let (videos, tape) = model.decode(&weights, &first, 1, false).unwrap();
        let frames = 1 + model.config().zoom_in_time();
        assert!(videos.size()[2] == frames && tape.is_none());
        let all = model.decode(&weights, &golden.get("latents"), 1, false).unwrap().0;
        assert!(videos.equal(&all.narrow(2, 0, frames)));
    }
}

/// Within bf16's precision; the gradient is compared by its direction.
#[test]
fn in_16_bits_videos_and_gradients_are_near() {
    let (config, golden) = goldens("wan_vae").remove(0);
    let (model, weights) = decoder(&config, &golden);
    let found = [Kind::Float, Kind::BFloat16].map(|kind| {
        let weights: Vec<Vec<Tensor>> =
            weights.iter().map(|unit| unit.iter().map(|param| param.to_kind(kind)).collect()).collect();
        let weights: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        let (videos, tape) = model.decode(&weights, &golden.get("latents"), 1, true).unwrap();
        let grad = model.latents_grad(&weights, tape.unwrap(), &golden.get("d_output")).unwrap();
        assert_eq!((videos.kind(), grad.kind()), (Kind::Float, Kind::Float));
        (videos, grad)
    });
    let [(wide, wide_grad), (narrow, narrow_grad)] = &found;
    let apart = (wide - narrow).square().mean(Kind::Float).sqrt().double_value(&[]);
    assert!(apart > 0.0 && apart < 0.05, "{apart}");
    let length = |tensor: &Tensor| tensor.square().sum(Kind::Float).sqrt().double_value(&[]);
    let cosine = (wide_grad * narrow_grad).sum(Kind::Float).double_value(&[])
        / (length(wide_grad) * length(narrow_grad));
    assert!(cosine > 0.95, "{cosine}");
}

#[test]
fn contradictions_name_their_field() {
    let check = |field: &str, change: fn(&mut WanVaeConfig)| {
        let mut config = config_of(&goldens("wan_vae")[0].0);
        change(&mut config);
        let error = WanVaeDecoder::new(config).map(|_| field.to_owned()).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")), "{error}");
    };
    check("base_dim", |config| config.base_dim = 0);
    check("dim_mult", |config| config.dim_mult[1] = 0);
    check("dim_mult", |config| config.base_dim = 3);
    check("dim_mult", |config| config.dim_mult.clear());
    check("dim_mult", |config| {
        config.is_residual = true;
        config.dim_mult[1] = 3;
        config.dim_mult[2] = 5;
    });
    check("patch_size", |config| config.patch_size = 0);
    check("out_channels", |config| config.patch_size = 2);
    check("out_channels", |config| config.patch_size = 1 << 32);
    check("temperal_downsample", |config| config.temperal_downsample.push(true));
    check("latents_mean", |config| config.latents_mean = vec![0.0]);
    check("latents_std", |config| config.latents_std[0] = f64::NAN);
}

/// Returns a decoder with the file's weights, which it has exactly.
fn decoder(config: &Value, golden: &Golden) -> (WanVaeDecoder, Vec<Vec<Tensor>>) {
    let model = WanVaeDecoder::new(config_of(config)).unwrap();
    let mut names: HashSet<&str> = golden.names().collect();
    let mut read = |spec: &anyroll_models::ParamSpec| {
        assert!(names.remove(spec.name.as_str()), "{}", spec.name);
        let values = golden.get(&spec.name);
        assert_eq!(values.size(), spec.shape, "{}", spec.name);
        values
    };
    let weights = model.units().iter().map(|unit| unit.params.iter().map(&mut read).collect()).collect();
    assert_eq!(names, HashSet::from(["latents", "output", "d_output", "grad.latents"]));
    (model, weights)
}

pub fn config_of(config: &Value) -> WanVaeConfig {
    fn read<T: serde::de::DeserializeOwned>(value: &Value) -> T {
        serde_json::from_value(value.clone()).unwrap()
    }
    let own = if config["decoder_base_dim"].is_null() { "base_dim" } else { "decoder_base_dim" };
    WanVaeConfig {
        base_dim: integer(config, own),
        z_dim: integer(config, "z_dim"),
        dim_mult: read(&config["dim_mult"]),
        num_res_blocks: integer(config, "num_res_blocks") as usize,
        temperal_downsample: read(&config["temperal_downsample"]),
        latents_mean: read(&config["latents_mean"]),
        latents_std: read(&config["latents_std"]),
        out_channels: config["out_channels"].as_i64().unwrap_or(3),
        patch_size: config["patch_size"].as_i64().unwrap_or(1),
        is_residual: config["is_residual"].as_bool().unwrap_or(false),
    }
}
