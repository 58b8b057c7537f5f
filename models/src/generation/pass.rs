//! Passes over the model: what the engine's sequences become as tensors, and the tokens that come out.

use std::{ops::Range, sync::Arc};

use anyroll_backends::ops::Packing;
use tch::{Device, Kind, Tensor};

use super::{
    KvCache,
    kv_cache::{SCRATCH_BLOCK, blocks_of},
    sampling::Sampled,
    sequence::{Group, Sequence},
};
use crate::{
    Decoder, Result,
    decoder::{Piece, Prefill, Step},
    model::{Model, Weights},
};

/// The most logits of a prefill: 256 MiB on the host.
const MAX_LOGITS: usize = 1 << 26;

/// A decoder with its weights and its cache.
#[derive(Debug)]
pub(super) struct Passes {
    decoder: Arc<Decoder>,
    weights: Vec<Vec<Tensor>>,
    cache: KvCache,
    device: Device,
}

impl Passes {
    pub fn new(decoder: Arc<Decoder>, weights: Vec<Vec<Tensor>>, cache: KvCache) -> Passes {
        let device = weights[0][0].device();
        Passes { decoder, weights, cache, device }
    }

    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The most prompts of a pass.
    pub fn most_prompts(&self) -> usize {
        (MAX_LOGITS / self.decoder.config().vocab_size as usize).max(1)
    }

    /// Runs the tokens of each group by the training forward, all from the start. Returns a token for each sequence.
    pub fn prompts(&mut self, groups: &[Group]) -> Result<Vec<Sampled>> {
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        let (mut tokens, mut lengths, mut last_rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        for group in groups {
            group.destinations(0..group.len(), tokens.len(), &mut rows, &mut places);
            tokens.extend(group.first().tokens());
            lengths.push(group.len() as i64);
            last_rows.push(tokens.len() as i64 - 1);
        }
        let inputs = Prefill {
            tokens: self.upload(&tokens)?,
            packing: Packing::new(&lengths, self.device)?,
            last_rows: self.upload(&last_rows)?,
            rows: self.upload(&rows)?,
            places: self.upload(&places)?,
        };
        let logits = self.run(|decoder, weights, cache| decoder.prefill(weights, &inputs, cache))?;
        let of_rows = groups.iter().enumerate();
        choose(&logits, of_rows.flat_map(|(row, group)| group.sequences.iter().map(move |it| (row, it))))
    }

    /// Runs the tokens of a group at `positions`; those before are cached. Returns a token for each sequence, if
    /// these are the last.
    pub fn piece(&mut self, group: &Group, positions: Range<usize>) -> Result<Vec<Sampled>> {
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        group.destinations(positions.clone(), 0, &mut rows, &mut places);
        let tokens: Vec<i64> = group.first().tokens().skip(positions.start).take(positions.len()).collect();
        let context: Vec<i64> = (0..positions.end).map(|position| group.first().place(position)).collect();
        let is_last = positions.end == group.len();
        let inputs = Piece {
            tokens: self.upload(&tokens)?,
            positions: self.upload(&positions.map(|position| position as i64).collect::<Vec<_>>())?,
            rows: self.upload(&rows)?,
            places: self.upload(&places)?,
            context: self.upload(&context)?,
        };
        let hidden = self.run(|decoder, weights, cache| decoder.extend(weights, &inputs, cache))?;
        if !is_last {
            return Ok(Vec::new());
        }
        let last = hidden.f_narrow(0, tokens.len() as i64 - 1, 1)?;
        let logits = self.run(|decoder, weights, _| decoder.logits(weights, &last))?;
        choose(&logits, group.sequences.iter().map(|sequence| (0, sequence)))
    }

    /// Runs the last token of each sequence, and returns the next.
    pub fn step(&mut self, live: &[Sequence]) -> Result<Vec<Sampled>> {
        let of_live =
            |value: &dyn Fn(&Sequence) -> i64| self.upload(&live.iter().map(value).collect::<Vec<_>>());
        let table_len = live.iter().map(|sequence| blocks_of(sequence.len())).max().unwrap_or(0);
        let mut tables = vec![i64::from(SCRATCH_BLOCK); live.len() * table_len];
        for (table, sequence) in tables.chunks_exact_mut(table_len).zip(live) {
            let blocks = &sequence.blocks[..table_len.min(sequence.blocks.len())];
            table.iter_mut().zip(blocks).for_each(|(entry, &block)| *entry = i64::from(block));
        }
        let inputs = Step {
            tokens: of_live(&Sequence::last_token)?,
            positions: of_live(&|sequence| sequence.len() as i64 - 1)?,
            lengths: of_live(&|sequence| sequence.len() as i64)?,
            places: of_live(&|sequence| sequence.place(sequence.len() - 1))?,
            tables: self.upload(&tables)?.f_view([-1, table_len as i64])?,
        };
        let logits = self.run(|decoder, weights, cache| decoder.decode(weights, &inputs, cache))?;
        choose(&logits, live.iter().enumerate())
    }

    fn run(
        &mut self,
        pass: impl FnOnce(&Decoder, &[Weights], &mut KvCache) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let blocks = 0..self.decoder.blocks();
        let units: Vec<Vec<&[Tensor]>> = blocks
            .map(|block| self.decoder.units_of(block).iter().map(|&unit| &*self.weights[unit]).collect())
            .collect();
        let weights: Vec<Weights> = units.iter().map(|units| Weights::new(units)).collect();
        pass(&self.decoder, &weights, &mut self.cache)
    }

    fn upload(&self, values: &[i64]) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(values)?.f_to_device(self.device)?)
    }
}

/// Chooses a token for each sequence from its row of `logits` `[rows, V]`, on the host.
fn choose<'a>(
    logits: &Tensor,
    sequences: impl Iterator<Item = (usize, &'a Sequence)>,
) -> Result<Vec<Sampled>> {
    let vocab_size = logits.size()[1] as usize;
    let logits = logits.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?;
    let mut values = vec![0.0; logits.numel()];
    logits.f_copy_data(&mut values, logits.numel())?;
    let row = |row: usize| &values[row * vocab_size..][..vocab_size];
    Ok(sequences.map(|(index, sequence)| sequence.choose(row(index))).collect())
}
