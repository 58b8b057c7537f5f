//! A model's weights as training in 4 bits sees them.

use std::{collections::HashMap, ops::Range};

use anyroll_backends::ops::{self, FOUR_BIT_BLOCK, FOUR_BIT_BLOCK_BYTES};
use tch::{Device, Kind, Tensor};

use crate::{
    Result,
    init::WeightSource,
    model::{Model, ParamSpec},
};

/// A model's weights whose [`Model::layer_matrices`] are rounded to 4 bits, as a strategy keeps them, and widened again.
pub struct InFourBits<B> {
    base: B,
    /// Dtype of the strategy, to which values are rounded first.
    kind: Kind,
    /// By the name of each part: its matrix, and its first element there. Blocks do not end where a part does.
    matrices: HashMap<String, (ParamSpec, usize)>,
}

impl<B: WeightSource> InFourBits<B> {
    /// Rounds the weights `base` of `model`, trained in the dtype `kind`.
    pub fn new(base: B, model: &impl Model, kind: Kind) -> Self {
        let units = model.units().iter().enumerate();
        let specs = units.flat_map(|(index, unit)| {
            model.layer_matrices(index).into_iter().map(move |param| &unit.params[param])
        });
        let mut matrices = HashMap::new();
        for spec in specs {
            let (mut first, columns) = (0, spec.elements() / spec.shape[0] as usize);
            for part in &spec.parts {
                matrices.insert(part.name.clone(), (spec.clone(), first));
                first += part.rows as usize * columns;
            }
        }
        Self { base, kind, matrices }
    }

    /// Reads the values `range` of a matrix: the blocks that have them.
    fn read_rounded(&self, matrix: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        let block = FOUR_BIT_BLOCK as usize;
        let start = range.start / block * block;
        let mut given = vec![0.0; (range.end - start).next_multiple_of(block)];
        let len = given.len().min(matrix.elements() - start);
        self.base.read(matrix, start..start + len, &mut given[..len])?;
        let mut wide = Tensor::f_from_slice(&given)?.f_to_kind(self.kind)?;
        let blocks = (given.len() / block) as i64;
        let mut packed = Tensor::f_zeros([blocks, FOUR_BIT_BLOCK_BYTES], (Kind::Uint8, Device::Cpu))?;
        ops::in_four_bits(&wide, &mut packed)?;
        ops::from_four_bits(&packed, &mut wide)?;
        let own = wide.f_narrow(0, (range.start - start) as i64, values.len() as i64)?;
        own.f_to_kind(Kind::Float)?.f_copy_data(values, values.len())?;
        Ok(())
    }
}

impl<B: WeightSource> WeightSource for InFourBits<B> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        let matrix = spec.parts.first().and_then(|part| self.matrices.get(&part.name));
        match matrix.filter(|_| !range.is_empty()) {
            Some((matrix, first)) => {
                self.read_rounded(matrix, first + range.start..first + range.end, values)
            }
            None => self.base.read(spec, range, values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Decoder, DecoderConfig, init::Seed};

    /// Parts of a matrix and ranges within blocks give the values of the whole, and nothing but matrices is rounded.
    #[test]
    fn any_range_has_the_values_of_the_whole() {
        let config =
            DecoderConfig { num_key_value_heads: 1, qkv_bias: true, ..DecoderConfig::plain(2, 12, 2) };
        let model = Decoder::new(config, Device::Cpu).unwrap();
        let rounded = InFourBits::new(Seed(3), &model, Kind::BFloat16);
        let read = |source: &dyn WeightSource, spec: &ParamSpec, range: Range<usize>| {
            let mut values = vec![0.0; range.len()];
            source.read(spec, range, &mut values).unwrap();
            values
        };
        for (index, unit) in model.units().iter().enumerate() {
            for (param, spec) in unit.params.iter().enumerate() {
                let (exact, whole) =
                    (read(&Seed(3), spec, 0..spec.elements()), read(&rounded, spec, 0..spec.elements()));
                if !model.layer_matrices(index).contains(&param) {
                    assert_eq!(exact, whole, "{}", spec.name);
                    continue;
                }
                let levels = |values: &[f32]| {
                    let mut values: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
                    values.sort_unstable();
                    values.dedup();
                    values.len()
                };
                assert!(levels(&whole[..64]) <= 16 && levels(&exact[..64]) > 40, "{}", spec.name);
                for range in [0..1, 63..65, 70..90, spec.elements() - 5..spec.elements()] {
                    assert_eq!(read(&rounded, spec, range.clone()), whole[range], "{}", spec.name);
                }
                let (mut first, columns) = (0, spec.elements() / spec.shape[0] as usize);
                for part in &spec.parts {
                    let len = part.rows as usize * columns;
                    let shape = vec![part.rows, columns as i64];
                    let own = ParamSpec { parts: vec![part.clone()], shape, ..spec.clone() };
                    assert_eq!(read(&rounded, &own, 0..len), whole[first..first + len], "{}", part.name);
                    first += len;
                }
            }
        }
    }
}
