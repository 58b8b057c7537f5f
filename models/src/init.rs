//! The first values of parameters, made on the host from a seed.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::model::{Init, ParamSpec};

/// The first values of a parameter, row-major.
///
/// A pure function of the seed and the parts' names: the same on every device and at every world size, and
/// the same whether matrices are fused or not.
pub fn fill(spec: &ParamSpec, seed: u64) -> Vec<f32> {
    match spec.init {
        Init::Zeros => vec![0.0; spec.elements()],
        Init::Ones => vec![1.0; spec.elements()],
        Init::Normal { std } => {
            let row = spec.elements() / spec.shape[0] as usize;
            let mut values = Vec::with_capacity(spec.elements());
            for part in &spec.parts {
                let mut random = ChaCha8Rng::seed_from_u64(seed);
                random.set_stream(name_hash(&part.name));
                extend_normal(&mut values, part.rows as usize * row, std, &mut random);
            }
            values
        }
    }
}

/// Appends `count` values of N(0, std^2), by Box and Muller's method in pairs.
fn extend_normal(values: &mut Vec<f32>, count: usize, std: f64, random: &mut ChaCha8Rng) {
    let end = values.len() + count;
    while values.len() < end {
        let radius = std * (-2.0 * (1.0 - uniform(random)).ln()).sqrt(); // 1 - u is never 0
        let (sin, cos) = (std::f64::consts::TAU * uniform(random)).sin_cos();
        values.push((radius * cos) as f32);
        if values.len() < end {
            values.push((radius * sin) as f32);
        }
    }
}

/// A number in [0, 1) with 53 random bits.
fn uniform(random: &mut ChaCha8Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// FNV-1a: std's hashers promise no stable value.
fn name_hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
