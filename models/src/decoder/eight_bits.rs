//! Weights for sampling in 8 bits: the matrices of the layers as [`ops::in_eight_bits`] has them. Embeddings, norms, biases,
//! adapters and the head stay as they are.

use anyroll_backends::ops::{self, EIGHT_BIT_COLUMNS};
use tch::Tensor;

use super::{Decoder, DecoderConfig, layer_block::LayerBlock, lora::Projection};
use crate::cut::copied;
use crate::{Result, error::check_config};

impl DecoderConfig {
    /// Checks that the layers' matrices can be in 8 bits.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field that excludes it.
    pub fn check_eight_bits(&self) -> Result<()> {
        check_config(self.expressed.is_none(), "model_type", || {
            "has layers that libtorch differentiates, whose matrices are not kept in 8 bits".to_owned()
        })?;
        check_config(self.experts.is_none(), "num_experts", || {
            "are several, and matrices of experts are not kept in 8 bits".to_owned()
        })?;
        for (field, width) in self.row_widths() {
            check_config(width % EIGHT_BIT_COLUMNS == 0, field, || {
                let multiple = format!("no multiple of {EIGHT_BIT_COLUMNS}, as matrices in 8 bits need");
                format!("gives rows of {width} values, {multiple}")
            })?;
        }
        Ok(())
    }

    /// Returns the numbers of values of the rows that matrices of a layer multiply, each with the field that it follows from.
    fn row_widths(&self) -> [(&'static str, i64); 3] {
        [
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads * self.head_dim),
            ("intermediate_size", self.intermediate_size),
        ]
    }
}

impl Decoder {
    /// Returns the weights of a unit for sampling: matrices of a layer in 8 bits, and copies of its other weights, so that
    /// nothing refers to the memory of `weights`. Other units keep theirs. The config passes
    /// [`DecoderConfig::check_eight_bits`], and no adapter has magnitudes.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    pub fn in_eight_bits(&self, unit: usize, weights: &[Tensor]) -> Result<Vec<Tensor>> {
        let Some(matrices) = self.matrices_of(unit) else {
            return Ok(weights.iter().map(Tensor::shallow_clone).collect());
        };
        let of_param = |(param, tensor): (usize, &Tensor)| match matrices.contains(&param) {
            true => Ok(ops::in_eight_bits(tensor)?),
            false => copied(tensor),
        };
        weights.iter().enumerate().map(of_param).collect()
    }

    /// Returns the same of all units, each of which is freed once it is converted.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    pub fn all_in_eight_bits(&self, weights: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>> {
        weights.into_iter().enumerate().map(|(unit, weights)| self.in_eight_bits(unit, &weights)).collect()
    }

    /// Returns the bytes that [`Self::in_eight_bits`] allocates for a unit of elements of `element` bytes; `None` for a unit
    /// that stays as it is.
    pub fn eight_bit_bytes(&self, unit: usize, element: usize) -> Option<usize> {
        let matrices = self.matrices_of(unit)?;
        let params = self.units[unit].params.iter().enumerate();
        let bytes = params.map(|(param, spec)| match *spec.shape {
            [rows, columns] if matrices.contains(&param) => {
                ((rows + ops::rows_of_scales([rows, columns])) * columns) as usize
            }
            _ => spec.elements() * element,
        });
        Some(bytes.sum())
    }

    /// Returns the bytes of the largest of those matrices in elements of `element` bytes, to which a pass over prompts widens
    /// one at a time.
    pub fn widest_matrix_bytes(&self, element: usize) -> usize {
        let of_unit = |unit: usize| {
            let matrices = self.matrices_of(unit).into_iter().flatten();
            matrices.map(move |param| self.units[unit].params[param].elements() * element)
        };
        (0..self.units.len()).flat_map(of_unit).max().unwrap_or(0)
    }

    /// Checks that steps with these weights can be recorded. Otherwise returns the reason.
    pub(crate) fn multiplies_in_place(&self, weights: &[Vec<Tensor>]) -> Result<(), String> {
        let mut in_eight_bits = weights.iter().flatten().filter(|tensor| ops::is_in_eight_bits(tensor));
        let multiplies = match self.rounds_rows() {
            true => ops::multiplies_eight_bit_rows,
            false => ops::multiplies_in_eight_bits,
        };
        match in_eight_bits.all(|matrix| multiplies(&weights[0][0], matrix)) {
            true => Ok(()),
            false => Err("its weights are in 8 bits, which no kernel here multiplies with".to_owned()),
        }
    }

    /// Returns the most values of a row that a matrix of a layer multiplies.
    pub fn widest_row(&self) -> usize {
        self.config.row_widths().into_iter().map(|(_, width)| width as usize).max().expect("there are some")
    }

    /// Returns true if [`Self::rounding_rows`] made it.
    pub(super) fn rounds_rows(&self) -> bool {
        self.inner_blocks.iter().any(LayerBlock::rounds_rows)
    }

    /// Returns the matrices of the unit of a layer.
    pub(super) fn matrices_of(&self, unit: usize) -> Option<[usize; 4]> {
        let LayerBlock::Written(block) = self.plain_blocks.get(unit.checked_sub(1)?)? else { return None };
        Some(Projection::ALL.map(|projection| block.params_at(projection).0))
    }
}
