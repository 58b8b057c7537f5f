//! The first values of parameters, on the host: made from a seed, or read from somewhere.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::model::{Init, ParamSpec};
use crate::random::Stream;

/// Where the values of parameters come from.
pub trait WeightSource {
    /// Puts the values `range` of a parameter, row-major, into `values`, which is as long.
    ///
    /// # Errors
    /// The source's own.
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()>;
}

impl<T: WeightSource + ?Sized> WeightSource for &T {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        (**self).read(spec, range, values)
    }
}

impl<T: WeightSource + ?Sized> WeightSource for Box<T> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        (**self).read(spec, range, values)
    }
}

/// All values of a parameter as a tensor of its shape on `device`.
///
/// # Errors
/// The source's, or libtorch's.
pub fn whole(source: &dyn WeightSource, spec: &ParamSpec, kind: Kind, device: Device) -> Result<Tensor> {
    let mut values = vec![0.0; spec.elements()];
    source.read(spec, 0..values.len(), &mut values)?;
    Ok(Tensor::f_from_slice(&values)?.f_view(&spec.shape[..])?.f_to_device(device)?.f_to_kind(kind)?)
}

/// Values as [`fill`] makes them from this seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

impl WeightSource for Seed {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        values.copy_from_slice(&fill(spec, self.0)[range]);
        Ok(())
    }
}

/// The first values of a parameter, row-major.
///
/// A pure function of the seed and the parts' names: the same on every device and at every world size, and
/// the same whether matrices are fused or not.
pub fn fill(spec: &ParamSpec, seed: u64) -> Vec<f32> {
    match spec.init {
        Init::Zeros => vec![0.0; spec.elements()],
        Init::Ones | Init::RowNorms { .. } => vec![1.0; spec.elements()],
        Init::Uniform { bound } => random_parts(spec, seed, |values, count, random| {
            values.extend((0..count).map(|_| ((2.0 * random.uniform() - 1.0) * bound) as f32));
        }),
        Init::Normal { std } => {
            random_parts(spec, seed, |values, count, random| random.extend_normal(values, count, std))
        }
    }
}

/// The values of each part, from random numbers of its own: `extend` appends so many.
fn random_parts(spec: &ParamSpec, seed: u64, extend: impl Fn(&mut Vec<f32>, usize, &mut Stream)) -> Vec<f32> {
    let row = spec.elements() / spec.shape[0] as usize;
    let mut values = Vec::with_capacity(spec.elements());
    for part in &spec.parts {
        extend(&mut values, part.rows as usize * row, &mut Stream::new(seed, name_hash(&part.name)));
    }
    values
}

/// FNV-1a: std's hashers promise no stable value.
fn name_hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Part;

    fn matrix(parts: &[(&str, i64)]) -> ParamSpec {
        let parts: Vec<Part> =
            parts.iter().map(|&(name, rows)| Part { name: name.to_owned(), rows }).collect();
        ParamSpec {
            name: "whole".to_owned(),
            shape: vec![parts.iter().map(|part| part.rows).sum(), 33],
            parts,
            init: Init::Normal { std: 0.02 },
            decay: true,
        }
    }

    #[test]
    fn values_are_normal() {
        let values = fill(&matrix(&[("a", 301)]), 0);
        let count = values.len() as f64;
        let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / count;
        let variance = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>() / count;
        let within_one = values.iter().filter(|value| value.abs() < 0.02).count() as f64 / count;
        assert_eq!(values.len(), 301 * 33);
        assert!(mean.abs() < 0.001, "{mean}");
        assert!((variance.sqrt() - 0.02).abs() < 0.001, "{variance}");
        assert!((within_one - 0.683).abs() < 0.02, "{within_one}");
    }

    #[test]
    fn fusing_changes_no_value() {
        let fused = fill(&matrix(&[("a", 5), ("b", 3)]), 1);
        let apart = [fill(&matrix(&[("a", 5)]), 1), fill(&matrix(&[("b", 3)]), 1)].concat();
        assert_eq!(fused, apart);
        assert_ne!(fused[..33], fused[5 * 33..6 * 33]);
        assert_ne!(fused, fill(&matrix(&[("a", 5), ("b", 3)]), 2));
    }
}
