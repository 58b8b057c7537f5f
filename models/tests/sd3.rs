//! Stable Diffusion 3's transformer against diffusers: outputs and every gradient of tiny models of 3 and of 3.5.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyroll_models::diffusion::{Sd3, Sd3Batch, Sd3Config};
use anyroll_models::{Grads, Model, Output, OutputGrad, UnitGrads, Weights};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// Of each value, relative to the largest of its tensor where that is above 1.
const TOLERANCE: f64 = 1e-5;

#[test]
fn velocities_and_gradients_equal_diffusers() {
    let text = std::fs::read_to_string(folder().join("configs.json")).unwrap();
    let configs: Value = serde_json::from_str(&text).unwrap();
    let configs = configs["configs"].as_object().unwrap();
    assert_eq!(configs.len(), 2);
    for (name, config) in configs {
        check(name, config);
    }
}

fn check(name: &str, config: &Value) {
    let golden: HashMap<String, Tensor> =
        Tensor::read_safetensors(folder().join(format!("{name}.safetensors"))).unwrap().into_iter().collect();
    let model = Sd3::new(config_of(config), Device::Cpu).unwrap();
    check_names(name, &model, &golden);
    let weights: Vec<Vec<Tensor>> = model
        .units()
        .iter()
        .map(|unit| {
            let whole = |spec: &anyroll_models::ParamSpec| {
                let parts: Vec<&Tensor> = spec.parts.iter().map(|part| &golden[&part.name]).collect();
                let whole = Tensor::cat(&parts, 0);
                assert_eq!(whole.size(), spec.shape, "{}", spec.name);
                whole
            };
            unit.params.iter().map(whole).collect()
        })
        .collect();
    let of = |what: &str| golden[what].shallow_clone();
    let batch = Sd3Batch {
        latents: of("latents"),
        sigmas: of("sigmas"),
        context: of("context"),
        pooled: of("pooled"),
        latents_grad: true,
    };
    let (output, grads, latents_grad) = run(&model, &weights, &batch, of("d_output"));
    assert_close(name, "output", &output, &golden["output"]);
    assert_close(name, "latents", &latents_grad, &golden["grad.latents"]);
    for (unit, grads) in model.units().iter().zip(&grads) {
        for (spec, grad) in unit.params.iter().zip(grads.views()) {
            let mut row = 0;
            for part in &spec.parts {
                let expected = &golden[&format!("grad.{}", part.name)];
                assert_close(name, &part.name, &grad.narrow(0, row, part.rows), expected);
                row += part.rows;
            }
        }
    }
}

/// The model has each of the file's tensors, and no others: positions are made, not trained.
fn check_names(name: &str, model: &Sd3, golden: &HashMap<String, Tensor>) {
    let parts = model.units().iter().flat_map(|unit| &unit.params).flat_map(|spec| &spec.parts);
    let ours: HashSet<&str> = parts.map(|part| part.name.as_str()).collect();
    let theirs: HashSet<&str> = golden.keys().filter_map(|key| key.strip_prefix("grad.")).collect();
    let theirs: HashSet<&str> = theirs.into_iter().filter(|key| *key != "latents").collect();
    assert_eq!(ours, theirs, "{name}");
}

fn run(
    model: &Sd3,
    weights: &[Vec<Tensor>],
    batch: &Sd3Batch,
    wanted: Tensor,
) -> (Tensor, Vec<UnitGrads>, Tensor) {
    let nan = |tensor: &Tensor| tensor.full_like(f64::NAN);
    let mut grads: Vec<UnitGrads> =
        weights.iter().map(|unit| UnitGrads::new(unit.iter().map(nan).collect())).collect();
    let (mut saved, mut x, mut scores) = (Vec::new(), None, None);
    for (block, unit) in weights.iter().enumerate() {
        let units = [unit.as_slice()];
        let (output, kept) = model.forward(block, &Weights::new(&units), x.as_ref(), batch, true).unwrap();
        saved.push(kept);
        match output {
            Output::Hidden(hidden) => x = Some(hidden),
            Output::Scores(velocity) => scores = Some(velocity),
        }
    }
    let mut grad = OutputGrad::Scores(wanted);
    for (block, unit) in weights.iter().enumerate().rev() {
        let units = [unit.as_slice()];
        let mut block_grads = Grads::new(vec![Some(&mut grads[block])]);
        let (weights, kept) = (Weights::new(&units), saved.pop().unwrap());
        let dx = model.backward(block, &weights, &mut block_grads, kept, grad, batch).unwrap().unwrap();
        grad = OutputGrad::Hidden(dx);
    }
    let OutputGrad::Hidden(latents_grad) = grad else { unreachable!() };
    assert!(grads.iter().all(UnitGrads::all_written));
    (scores.unwrap(), grads, latents_grad)
}

fn assert_close(name: &str, what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{name}: {what}");
    let scale = expected.abs().max().double_value(&[]).max(1.0);
    let error = (found - expected).abs().max().double_value(&[]) / scale;
    assert!(error <= TOLERANCE, "{name}: {what} differs by {error:e}"); // false for NaN
}

#[test]
fn latents_that_do_not_fit_are_refused() {
    let text = std::fs::read_to_string(folder().join("configs.json")).unwrap();
    let configs: Value = serde_json::from_str(&text).unwrap();
    let model = Sd3::new(config_of(&configs["configs"]["sd3"]), Device::Cpu).unwrap();
    for size in [[1, 3, 8, 8], [1, 2, 7, 8], [1, 2, 8, 14]] {
        let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
        let batch = Sd3Batch {
            latents: zeros(&size),
            sigmas: zeros(&[1]),
            context: zeros(&[1, 3, 6]),
            pooled: zeros(&[1, 5]),
            latents_grad: false,
        };
        let error = model.forward(0, &Weights::new(&[&[]]), None, &batch, false).unwrap_err().to_string();
        assert!(error.contains("latents") && error.contains("at most 12"), "{error}");
    }
}

fn config_of(config: &Value) -> Sd3Config {
    let integer = |field: &str| config[field].as_i64().unwrap_or_else(|| panic!("{field}"));
    let layers = config["dual_attention_layers"].as_array().into_iter().flatten();
    Sd3Config {
        sample_size: integer("sample_size"),
        patch_size: integer("patch_size"),
        in_channels: integer("in_channels"),
        out_channels: integer("out_channels"),
        num_layers: integer("num_layers") as usize,
        attention_head_dim: integer("attention_head_dim"),
        num_attention_heads: integer("num_attention_heads"),
        joint_attention_dim: integer("joint_attention_dim"),
        pooled_projection_dim: integer("pooled_projection_dim"),
        pos_embed_max_size: integer("pos_embed_max_size"),
        dual_attention_layers: layers.map(|layer| layer.as_u64().unwrap() as usize).collect(),
        qk_rms_norm: config["qk_norm"] == "rms_norm",
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/sd3")
}
