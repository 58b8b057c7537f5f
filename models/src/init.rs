//! Initial values of parameters, on the host: generated from a seed, or read from a source.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::model::{Init, ParamSpec};
use crate::random::Numbers;
use crate::{Cut, Result, Run};

/// Most values of a part that are read together, with those between them.
const MOST_READ: usize = 1 << 20;

/// A source of parameter values.
pub trait WeightSource {
    /// Writes the values `range` of a parameter, row-major, to `values`, which has the same length.
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

/// Reads all values of a parameter as a tensor of its shape on `device`.
///
/// # Errors
/// The source's, or libtorch's.
pub fn whole(source: &dyn WeightSource, spec: &ParamSpec, kind: Kind, device: Device) -> Result<Tensor> {
    let mut values = vec![0.0; spec.elements()];
    source.read(spec, 0..values.len(), &mut values)?;
    Ok(Tensor::f_from_slice(&values)?.f_view(&spec.shape[..])?.f_to_device(device)?.f_to_kind(kind)?)
}

/// Reads the values `range` of a part of a parameter, row-major. `spec` is that of the whole parameter.
///
/// # Errors
/// The source's.
pub fn read_part(
    source: &dyn WeightSource,
    (spec, cut): (&ParamSpec, &Cut),
    range: Range<usize>,
    values: &mut [f32],
) -> Result<()> {
    values.fill(0.0);
    let within = |run: Run| {
        let (start, end) = (run.own.max(range.start), (run.own + run.len).min(range.end));
        let (own, whole) = (start - range.start, run.whole + start - run.own);
        (start < end).then(|| Run { own, whole, len: end - start })
    };
    let runs: Vec<Run> = cut.runs(&spec.shape).into_iter().filter_map(within).collect();
    let (mut rest, mut read) = (&runs[..], Vec::new());
    while let [first, others @ ..] = rest {
        let is_near = |run: &&Run| run.whole + run.len - first.whole <= MOST_READ;
        let (near, behind) = rest.split_at(1 + others.iter().take_while(is_near).count());
        let last = near.last().expect("the first is near");
        read.resize(last.whole + last.len - first.whole, 0.0);
        source.read(spec, first.whole..last.whole + last.len, &mut read)?;
        for run in near {
            let start = run.whole - first.whole;
            values[run.own..run.own + run.len].copy_from_slice(&read[start..start + run.len]);
        }
        rest = behind;
    }
    Ok(())
}

/// Source of the values that [`fill`] generates from this seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

impl WeightSource for Seed {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        fill_range(spec, self.0, range, values);
        Ok(())
    }
}

/// Returns the initial values of a parameter, row-major.
///
/// They depend only on the seed and the parts' names. They are the same on every device, at every world size,
/// and for fused and separate matrices.
pub fn fill(spec: &ParamSpec, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; spec.elements()];
    fill_range(spec, seed, 0..values.len(), &mut values);
    values
}

/// Generates the values `range` of [`fill`].
fn fill_range(spec: &ParamSpec, seed: u64, range: Range<usize>, values: &mut [f32]) {
    match spec.init {
        Init::Zeros => values.fill(0.0),
        Init::Ones | Init::RowNorms { .. } => values.fill(1.0),
        Init::Uniform { bound } => each_part(spec, seed, range, values, |numbers, first, values| {
            numbers.uniforms(first, bound, values);
        }),
        Init::Normal { std } => each_part(spec, seed, range, values, |numbers, first, values| {
            numbers.normals(first, std, values);
        }),
    }
}

/// Calls `make` for each part in `range` with its random numbers, the index of the first of them, and its
/// piece of `values`.
fn each_part(
    spec: &ParamSpec,
    seed: u64,
    range: Range<usize>,
    values: &mut [f32],
    make: impl Fn(Numbers, usize, &mut [f32]),
) {
    let row = spec.elements() / spec.shape[0] as usize;
    let mut part_start = 0;
    for part in &spec.parts {
        let part_end = part_start + part.rows as usize * row;
        let (start, end) = (part_start.max(range.start), part_end.min(range.end));
        if start < end {
            let numbers = Numbers { seed, stream: name_hash(&part.name) };
            make(numbers, start - part_start, &mut values[start - range.start..end - range.start]);
        }
        part_start = part_end;
    }
}

/// Computes FNV-1a; std's hashers do not promise stable values.
fn name_hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Part;
    use crate::random::Stream;

    fn matrix(parts: &[(&str, i64)]) -> ParamSpec {
        let parts: Vec<Part> =
            parts.iter().map(|&(name, rows)| Part { name: name.to_owned(), rows }).collect();
        ParamSpec {
            name: "whole".to_owned(),
            shape: vec![parts.iter().map(|part| part.rows).sum(), 33],
            parts,
            init: Init::Normal { std: 0.02 },
            decay: true,
            offset: 0.0,
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

    /// One by one from consecutive numbers, in Box and Muller's order.
    #[test]
    fn any_range_is_of_the_same_sequence() {
        let spec = matrix(&[("a", 4001), ("b", 3)]);
        let whole = fill(&spec, 5);
        let mut stream = Stream::new(5, name_hash("a"));
        let expected: Vec<f32> = (0..4001 * 33 / 2)
            .flat_map(|_| {
                let radius = 0.02 * (-2.0 * (1.0 - stream.uniform()).ln()).sqrt();
                let (sin, cos) = (std::f64::consts::TAU * stream.uniform()).sin_cos();
                [(radius * cos) as f32, (radius * sin) as f32]
            })
            .collect();
        assert_eq!(whole[..expected.len()], expected);
        for range in [0..1, 7..8, 7..100_003, 4001 * 33 - 2..4001 * 33 + 3, 4001 * 33 + 1..4004 * 33] {
            let mut values = vec![0.0; range.len()];
            Seed(5).read(&spec, range.clone(), &mut values).unwrap();
            assert_eq!(values, whole[range]);
        }
        let uniform = ParamSpec { init: Init::Uniform { bound: 0.5 }, ..spec };
        let whole = fill(&uniform, 5);
        let mut stream = Stream::new(5, name_hash("b"));
        let expected = (0..99).map(|_| (stream.uniform() - 0.5) as f32);
        assert_eq!(whole[4001 * 33..], expected.collect::<Vec<_>>());
        let mut values = [0.0; 5];
        Seed(5).read(&uniform, 33..38, &mut values).unwrap();
        assert_eq!(values, whole[33..38]);
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
