//! Adapters of a transformer's layers, compared with the transformer whose weights contain their products.

use std::collections::HashMap;

use anyroll_close::assert_close;
use anyroll_models::diffusion::{DenoiseBatch, Lora, Sd3, Texts, TransformerConfig, velocity};
use anyroll_models::{Model, normals};
use tch::{Device, Kind, Tensor};

use crate::golden::goldens;
use crate::passes::{TOLERANCE, pass};
use crate::sd3::config_of;

const LORA: (i64, f64) = (2, 3.0);
const SCALE: f64 = 1.5;

struct Case {
    base: Sd3,
    adapted: Sd3,
    weights: Vec<Vec<Tensor>>,
    batch: DenoiseBatch,
}

/// Returns the golden file of 3.5, with adapters on two of every three layers of the blocks.
fn case() -> Case {
    let (config, golden) =
        goldens("sd3").into_iter().find(|(config, _)| config["qk_norm"] == "rms_norm").unwrap();
    let config = config_of(&config);
    let modules = TransformerConfig::Sd3(config.clone()).modules();
    assert!(modules.iter().any(|name| name == "transformer_blocks.0.attn2.to_out.0"), "{modules:?}");
    let modules = modules.into_iter().enumerate().filter(|(i, _)| i % 3 != 1).map(|(_, name)| name).collect();
    let lora = Lora { rank: LORA.0, scale: LORA.1 / LORA.0 as f64, modules };
    let model = |lora| {
        let texts = Texts::new(golden.get("context"), Some(golden.get("pooled"))).unwrap();
        Sd3::new(config.clone(), lora, Device::Cpu).unwrap().with_texts(texts).unwrap()
    };
    let (base, adapted) = (model(None), model(Some(&lora)));
    let mut seed = 0;
    let mut random = |shape: &[i64]| {
        seed += 1;
        let count = shape.iter().product::<i64>() as usize;
        (Tensor::from_slice(&normals(seed, count)) * 0.3).view(shape)
    };
    let weights = adapted
        .units()
        .iter()
        .map(|unit| unit.params.iter().map(|spec| random(&spec.shape)).collect())
        .collect();
    let latents = golden.get("latents");
    let labels = Tensor::arange(2, (Kind::Int64, Device::Cpu));
    let batch =
        DenoiseBatch { latents, sigmas: golden.get("sigmas"), labels, adapters: true, latents_grad: true };
    Case { base, adapted, weights, batch }
}

/// Returns each adapter's A and B, by the name of its weight.
fn adapters(case: &Case) -> HashMap<String, [usize; 3]> {
    let mut found = HashMap::new();
    for (unit, params) in case.adapted.units().iter().map(|unit| &unit.params).enumerate() {
        for (a, spec) in params.iter().enumerate().filter(|(_, spec)| spec.name.ends_with(".lora_A.weight")) {
            let name = spec.name.replace("base_model.model.", "").replace(".lora_A", "");
            found.insert(name, [unit, a, a + 1]);
        }
    }
    found
}

/// Returns the base's weights plus the products of the adapters.
fn merged(case: &Case) -> Vec<Vec<Tensor>> {
    let adapters = adapters(case);
    let mut used = 0;
    let mut merged: Vec<Vec<Tensor>> = Vec::new();
    for (unit, tensors) in case.base.units().iter().zip(&case.weights) {
        merged.push(tensors.iter().map(Tensor::copy).collect());
        for (spec, tensor) in unit.params.iter().zip(merged.last().unwrap()) {
            let mut row = 0;
            for part in &spec.parts {
                if let Some(&[unit, a, b]) = adapters.get(&part.name) {
                    let product = case.weights[unit][b].matmul(&case.weights[unit][a]) * SCALE;
                    let _ = tensor.narrow(0, row, part.rows).g_add_(&product);
                    used += 1;
                }
                row += part.rows;
            }
        }
    }
    assert_eq!(used, adapters.len());
    merged
}

#[test]
fn adapters_add_their_products_and_can_be_left_out() {
    let case = case();
    let said = |model: &Sd3, weights: &[Vec<Tensor>], batch: &DenoiseBatch| {
        let units: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        velocity(model, &units, batch).unwrap()
    };
    let with = said(&case.adapted, &case.weights, &case.batch);
    assert_close("with adapters", &with, &said(&case.base, &merged(&case), &case.batch), TOLERANCE);
    let plain = said(&case.base, &case.weights, &case.batch);
    assert_eq!(said(&case.adapted, &case.weights, &case.batch.without_adapters()), plain);
    assert!((&with - plain).abs().max().double_value(&[]) > 0.01);
}

#[test]
fn gradients_are_those_of_the_products() {
    let case = case();
    let wanted = Tensor::from_slice(&normals(99, 2 * 2 * 8 * 4)).view([2, 2, 8, 4]);
    let found = pass(&case.adapted, &case.weights, &case.batch, &[wanted.shallow_clone()]);
    let whole = pass(&case.base, &merged(&case), &case.batch, &[wanted]);
    assert_close("latents", &found.input_grad, &whole.input_grad, TOLERANCE);
    let adapters = adapters(&case);
    for (index, unit) in case.base.units().iter().enumerate() {
        for (spec, grad) in unit.params.iter().zip(whole.grads[index].views()) {
            let mut row = 0;
            for part in &spec.parts {
                let dw = grad.narrow(0, row, part.rows);
                row += part.rows;
                let Some(&[unit, a, b]) = adapters.get(&part.name) else { continue };
                // W + s B A: dB = s dW A^T, dA = s B^T dW.
                let (weights, grads) = (&case.weights[unit], found.grads[unit].views());
                assert_close(&part.name, &grads[b], &(dw.matmul(&weights[a].tr()) * SCALE), TOLERANCE);
                assert_close(&part.name, &grads[a], &(weights[b].tr().matmul(&dw) * SCALE), TOLERANCE);
            }
        }
    }
    let frozen = case.adapted.units().iter().filter(|unit| !unit.trainable).count();
    assert_eq!(frozen, case.base.units().len());
}
