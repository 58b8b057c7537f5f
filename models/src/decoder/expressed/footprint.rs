//! Memory of an expressed layer: its own functions, run on tensors without values around attention, whose memory is given.

use tch::{Kind, Tensor};

use super::super::{DecoderConfig, PackedSize};
use super::ExpressedBlock;
use crate::Result;
use crate::footprint::{BlockBytes, Runs};
use crate::measured::{Paper, bytes};
use crate::model::{Grads, Unit, UnitGrads, Weights};

impl ExpressedBlock {
    /// Returns the memory of a pass over a batch of this size. `units` are the block's, and `attention` the bytes of
    /// attention forward and backward in addition to its arguments and results.
    pub fn block_bytes(
        &self,
        config: &DecoderConfig,
        units: &[&Unit],
        attention: (usize, usize),
        size: &PackedSize,
        runs: Runs,
    ) -> BlockBytes {
        let measure = || Batch::new(config, size, attention, runs)?.measure(self, units);
        self.measured.once((size, attention, runs), measure)
    }
}

/// A batch without values.
struct Batch {
    paper: Paper,
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    rows: usize,
    /// Rows that attention reads if it needs copies of shared ones.
    copies: usize,
    heads: usize,
    dim: usize,
    attention: (usize, usize),
}

impl Batch {
    fn new(
        config: &DecoderConfig,
        size: &PackedSize,
        attention: (usize, usize),
        runs: Runs,
    ) -> Result<Batch> {
        let [hidden, heads, dim, rotary] =
            [config.hidden_size, config.num_attention_heads, config.head_dim, config.rotary_dim()]
                .map(|it| it as usize);
        let (paper, rows) = (Paper::new(runs)?, size.tokens);
        Ok(Batch {
            x: paper.tensor(&[rows, hidden])?,
            positions: paper.of_kind(&[rows], Kind::Int64)?,
            table: paper.of_kind(&[size.longest, rotary], Kind::Float)?,
            paper,
            rows,
            copies: size.copies,
            heads,
            dim,
            attention,
        })
    }

    fn measure(&self, block: &ExpressedBlock, units: &[&Unit]) -> Result<BlockBytes> {
        let params = units.iter().map(|unit| self.paper.params(unit)).collect::<Result<Vec<_>>>()?;
        let views: Vec<&[Tensor]> = params.iter().map(Vec::as_slice).collect();
        let (weights, rotation) = (Weights::new(&views), (&self.positions, &self.table));
        let attend = |qkv: [Tensor; 3]| {
            let outputs = self.outputs()?;
            let [_, k, v] = &qkv;
            self.pass(self.copied([k, v]) + self.attention.0)?;
            Ok(outputs)
        };
        let (_, forward) =
            self.paper.peak(|| Ok(block.forward_around(&weights, &self.x, rotation, attend)?.0))?;

        let ((attended, lse), dout) = (self.outputs()?, self.x.f_empty_like()?);
        let grads_of = |unit: &&Unit| Ok(unit.trainable.then_some(UnitGrads::new(self.paper.params(unit)?)));
        let mut grads = units.iter().map(grads_of).collect::<Result<Vec<_>>>()?;
        let mut grads = Grads::new(grads.iter_mut().map(Option::as_mut).collect());
        let attend = |_: &Tensor, [_, k, v]: [&Tensor; 3], _: [&mut Tensor; 3]| {
            self.pass(2 * self.copied([k, v]) + self.attention.1)
        };
        let kept = [&self.x, &attended];
        let run = || block.backward_around(&weights, &mut grads, kept, &dout, rotation, attend);
        let (_, backward) = self.paper.peak(run)?;

        let input = bytes(&self.x);
        let saved = input + bytes(&attended) + bytes(&lse);
        let (scoring, output_grad) = (forward, input);
        Ok(BlockBytes { input, saved, thinned: saved, forward, scoring, output_grad, backward })
    }

    /// Returns attention's output, and its log-sum-exps.
    fn outputs(&self) -> Result<(Tensor, Tensor)> {
        let lse = self.paper.of_kind(&[self.rows, self.heads], Kind::Float)?;
        Ok((self.paper.tensor(&[self.rows, self.heads * self.dim])?, lse))
    }

    /// Takes bytes and frees them.
    fn pass(&self, bytes: usize) -> Result<()> {
        drop(self.paper.of_kind(&[bytes], Kind::Uint8)?);
        Ok(())
    }

    /// Returns the bytes of attention's copies of keys and values.
    fn copied(&self, keys_and_values: [&Tensor; 2]) -> usize {
        if self.copies <= self.rows {
            return 0;
        }
        keys_and_values.map(bytes).iter().sum::<usize>() / self.rows * self.copies
    }
}
