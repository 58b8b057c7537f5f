//! Gradients of the diffusion transformer, block by block, compared with libtorch's of the whole.

use anyroll_close::assert_close;
use anyroll_models::diffusion::{DenoiseBatch, Dit, DitConfig, velocity};
use anyroll_models::{Model, UnitGrads, normals};
use tch::{Device, Kind, Tensor};

use crate::passes::{TOLERANCE, pass};

fn dit() -> Dit {
    let config = DitConfig {
        image_size: 8,
        channels: 2,
        patch_size: 4,
        classes: 3,
        hidden_size: 16,
        layers: 2,
        heads: 2,
        intermediate_size: 24,
    };
    Dit::new(config).unwrap()
}

fn random(seed: u64, shape: &[i64], scale: f64) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    (Tensor::from_slice(&normals(seed, count)) * scale).view(shape)
}

/// Returns random weights where the model initializes 0, so that the conditioning has an effect.
fn random_weights(dit: &Dit) -> Vec<Vec<Tensor>> {
    let mut seed = 0;
    let mut next = |shape: &[i64]| {
        seed += 1;
        random(seed, shape, 0.2).set_requires_grad(true)
    };
    dit.units().iter().map(|unit| unit.params.iter().map(|spec| next(&spec.shape)).collect()).collect()
}

fn batch(latents: &Tensor) -> DenoiseBatch {
    DenoiseBatch {
        latents: latents.shallow_clone(),
        sigmas: Tensor::from_slice(&[0.1f32, 0.5, 0.9]),
        labels: Tensor::from_slice(&[0i64, 2, 3]),
        adapters: true,
        latents_grad: true,
    }
}

#[test]
fn gradients_block_by_block_equal_those_of_the_whole() {
    let dit = dit();
    let weights = random_weights(&dit);
    let slices: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
    let latents = random(100, &[3, 2, 8, 8], 1.0).set_requires_grad(true);
    let wanted = random(101, &[3, 2, 8, 8], 1.0);
    let output = velocity(&dit, &slices, &batch(&latents)).unwrap();
    assert!(output.std(true).double_value(&[]) > 0.01);
    let mut leaves: Vec<&Tensor> = weights.iter().flatten().collect();
    leaves.push(&latents);
    let mut expected = Tensor::run_backward(&[(&output * &wanted).sum(Kind::Float)], &leaves, false, false);
    let expected_latents = expected.pop().unwrap();

    let detached: Vec<Vec<Tensor>> =
        weights.iter().map(|unit| unit.iter().map(Tensor::detach).collect()).collect();
    // In two passes, so that the second adds to the first.
    let passed = pass(&dit, &detached, &batch(&latents.detach()), &[&wanted * 0.25, &wanted * 0.75]);
    let found = passed.grads.iter().flat_map(UnitGrads::views);
    for ((found, expected), spec) in found.zip(&expected).zip(dit.units().iter().flat_map(|u| &u.params)) {
        assert_close(&spec.name, found, expected, TOLERANCE);
    }
    assert_close("latents", &passed.input_grad, &expected_latents, TOLERANCE);
}

#[test]
fn a_batch_of_another_shape_is_refused() {
    let dit = dit();
    let weights = random_weights(&dit);
    let slices: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
    let wrong = Tensor::zeros([3, 1, 8, 8], (Kind::Float, Device::Cpu));
    let error = velocity(&dit, &slices, &batch(&wrong)).unwrap_err().to_string();
    assert!(error.contains("latents") && error.contains("[B, 2, 8, 8]"), "{error}");
}
