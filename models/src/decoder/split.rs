//! A decoder that several ranks hold together, for sampling: each has some heads and some columns of every layer, and
//! some tokens of the embedding and the head (Megatron-LM, Shoeybi et al. 2019).
//!
//! Queries, keys, values, gates and ups are cut by their output, and what reads them by its input. So a branch needs one
//! sum over the ranks, at its end. The residual stream and the logits have the same bits on every rank, and so do the
//! chosen tokens. Of a mixture each rank has some columns of every expert.

use std::{ops::Range, sync::Arc};

use tch::Tensor;

use super::block::Block;
use super::embedding::Embedding;
use super::lora::Projection;
use super::{Decoder, DecoderConfig, ExpertsConfig, QkNorm};
use crate::error::check_config;
use crate::model::Weights;
use crate::slice::padded;
use crate::{Peers, Result};

/// This rank's part of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cut {
    Whole,
    /// Ranges of rows, one after the other.
    Rows(Vec<Range<i64>>),
    /// A range of the columns.
    Columns(Range<i64>),
    /// A range of the rows, with zeros behind them up to this many.
    Padded(Range<i64>, i64),
    /// All of it on the first rank and zeros on the others, whose sum it enters.
    First,
}

/// A rank's part of a decoder's sizes.
#[derive(Clone, Debug)]
pub(super) struct Part {
    whole: DecoderConfig,
    rank: i64,
    ranks: i64,
}

/// A rank's part of a decoder, and the ranks that have the others.
#[derive(Clone, Debug)]
pub(super) struct Split {
    peers: Arc<dyn Peers>,
    part: Part,
    /// Of each parameter of each unit.
    cuts: Vec<Vec<Cut>>,
}

impl DecoderConfig {
    /// Checks that `ranks` ranks can hold the decoder together.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field that they cannot share.
    pub fn check_split(&self, ranks: i64) -> Result<()> {
        self.check_ranks(ranks)?;
        let experts = self.experts.as_ref();
        let widths = [
            ("intermediate_size", Some(self.intermediate_size)),
            ("moe_intermediate_size", experts.map(|experts| experts.moe_intermediate_size)),
        ];
        for (field, width) in widths {
            let width = width.unwrap_or(ranks);
            check_config(width % ranks == 0, field, || {
                format!("is {width}, which {ranks} ranks cannot share evenly")
            })?;
        }
        check_config(self.qk_norm != Some(QkNorm::Together), "qk_norm", || {
            "spans all heads of a token, which are on several ranks".to_owned()
        })
    }
}

impl Decoder {
    /// Returns this rank's part of the decoder, for generation by `peers` together with the weights that [`Self::own_part`]
    /// returns. Its config has the sizes of the part, but the whole vocabulary.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for sizes that the ranks cannot share, or adapters with magnitudes.
    pub fn split(&self, peers: Arc<dyn Peers>) -> Result<Decoder> {
        self.config.check_split(peers.count() as i64)?;
        let is_dora = self.inner_blocks.iter().filter_map(|block| block.lora.as_ref()).any(|it| it.is_dora());
        check_config(!is_dora, "lora.dora", || {
            "needs the norms of whole rows, which are on several ranks".to_owned()
        })?;
        let part =
            Part { whole: self.config.clone(), rank: peers.rank() as i64, ranks: peers.count() as i64 };
        let config = part.config();
        let of_block = |block: &Block| Block {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            lora: block.lora.as_ref().map(|lora| lora.part(|projection| part.of(projection))),
            peers: Some(peers.clone()),
            ..block.clone()
        };
        let units = self.units.iter().enumerate();
        let cuts = units
            .map(|(unit, spec)| (0..spec.params.len()).map(|param| self.cut_of(&part, unit, param)).collect())
            .collect();
        Ok(Decoder {
            plain_blocks: self.plain_blocks.iter().map(of_block).collect(),
            inner_blocks: self.inner_blocks.iter().map(of_block).collect(),
            units: self.units.clone(),
            units_of: self.units_of.clone(),
            embedding: self.embedding,
            head: self.head,
            rope_tables: self.rope_tables.clone(),
            guide: None,
            split: Some(Split { peers, part, cuts }),
            config,
        })
    }

    /// Returns copies of this rank's parts of the whole tensors of a unit.
    ///
    /// # Panics
    /// If the decoder is not split.
    pub fn own_part(&self, unit: usize, whole: &[Tensor]) -> Result<Vec<Tensor>> {
        let split = self.split.as_ref().expect("it is split");
        let tensors = whole.iter().zip(&split.cuts[unit]);
        tensors.map(|(tensor, cut)| split.part.copy(tensor, cut)).collect()
    }

    /// Returns the cut of a parameter of a unit.
    fn cut_of(&self, part: &Part, unit: usize, param: usize) -> Cut {
        let is_of = |units: &Vec<usize>| units.contains(&unit);
        match (1..=self.config.num_hidden_layers).find(|&block| is_of(&self.units_of[block])) {
            Some(block) if block == unit => part.of_block(&self.plain_blocks[block - 1], param),
            Some(block) => {
                let lora = self.inner_blocks[block - 1].lora.as_ref().expect("the unit is that of adapters");
                lora.cut(param, |projection| part.of(projection))
            }
            None if unit == 0 || param > 0 => part.of_vocabulary(),
            None => Cut::Whole,
        }
    }

    /// Returns the smallest of the numbers of all ranks that hold the decoder together.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    pub fn least_of_ranks(&self, own: usize, device: tch::Device) -> Result<usize> {
        let Some(Split { peers, .. }) = &self.split else { return Ok(own) };
        let own = Tensor::f_from_slice(&[own as i64])?.f_to_device(device)?;
        let least = peers.all_gather(&own)?.f_min()?;
        Ok(i64::try_from(least)? as usize)
    }
}

impl Part {
    /// Returns the sizes of the part.
    fn config(&self) -> DecoderConfig {
        let whole = &self.whole;
        let len = |range: Range<i64>| range.end - range.start;
        let experts = whole.experts.as_ref().map(|experts| ExpertsConfig {
            moe_intermediate_size: experts.moe_intermediate_size / self.ranks,
            ..experts.clone()
        });
        DecoderConfig {
            num_attention_heads: len(self.own(whole.num_attention_heads)),
            num_key_value_heads: len(self.own(whole.num_key_value_heads)),
            intermediate_size: whole.intermediate_size / self.ranks,
            experts,
            ..whole.clone()
        }
    }

    /// Returns this rank's part of `count` heads or columns. If there are fewer heads than ranks, several have the same.
    fn own(&self, count: i64) -> Range<i64> {
        let first = self.rank * count / self.ranks;
        first..first + (count / self.ranks).max(1)
    }

    /// Returns the number of tokens of a rank: the last has fewer.
    fn tokens(&self) -> i64 {
        (self.whole.vocab_size + self.ranks - 1) / self.ranks
    }

    fn of_vocabulary(&self) -> Cut {
        let (own, all) = (self.tokens(), self.whole.vocab_size);
        Cut::Padded((self.rank * own).min(all)..((self.rank + 1) * own).min(all), own)
    }

    /// Returns the part of a layer's matrix without experts.
    fn of(&self, projection: Projection) -> Cut {
        let DecoderConfig { num_attention_heads, num_key_value_heads, head_dim, .. } = self.whole;
        let heads = |first: i64, count: i64| {
            let own = self.own(count);
            (first + own.start) * head_dim..(first + own.end) * head_dim
        };
        match projection {
            Projection::Qkv => Cut::Rows(vec![
                heads(0, num_attention_heads),
                heads(num_attention_heads, num_key_value_heads),
                heads(num_attention_heads + num_key_value_heads, num_key_value_heads),
            ]),
            Projection::O => Cut::Columns(heads(0, num_attention_heads)),
            Projection::GateUp => self.of_gates(self.whole.intermediate_size, 1),
            Projection::Down => Cut::Columns(self.own(self.whole.intermediate_size)),
        }
    }

    /// Returns the rows of the gates and ups of `experts` MLPs of this width.
    fn of_gates(&self, width: i64, experts: i64) -> Cut {
        let own = self.own(width);
        Cut::Rows(
            (0..2 * experts).map(|matrix| matrix * width + own.start..matrix * width + own.end).collect(),
        )
    }

    /// Returns the part of a parameter of a layer's unit.
    fn of_block(&self, block: &Block, param: usize) -> Cut {
        let is = |index: Option<usize>| index == Some(param);
        let experts = block.experts.zip(self.whole.experts.as_ref());
        if param == block.qkv || is(block.qkv_bias) {
            self.of(Projection::Qkv)
        } else if param == block.o {
            self.of(Projection::O)
        } else if param == block.gate_up || is(block.gate_up_bias) {
            match experts {
                Some((experts, config)) => self.of_gates(config.moe_intermediate_size, experts.count),
                None => self.of(Projection::GateUp),
            }
        } else if param == block.down {
            match experts {
                Some((_, config)) => Cut::Columns(self.own(config.moe_intermediate_size)),
                None => self.of(Projection::Down),
            }
        } else if is(block.o_bias) || is(block.down_bias) {
            Cut::First
        } else {
            Cut::Whole
        }
    }

    /// Copies this rank's part of a tensor.
    fn copy(&self, whole: &Tensor, cut: &Cut) -> Result<Tensor> {
        let rows = |range: &Range<i64>| whole.f_narrow(0, range.start, range.end - range.start);
        Ok(match cut {
            Cut::Whole => copied(whole)?,
            Cut::Rows(ranges) => {
                let parts = ranges.iter().map(rows).collect::<Result<Vec<_>, _>>()?;
                Tensor::f_cat(&parts, 0)?
            }
            Cut::Columns(range) => copied(&whole.f_narrow(1, range.start, range.end - range.start)?)?,
            Cut::Padded(range, len) => {
                let own = rows(range)?;
                if own.size()[0] == *len { copied(&own)? } else { padded(&own, *len)? }
            }
            Cut::First if self.rank == 0 => copied(whole)?,
            Cut::First => whole.f_zeros_like()?,
        })
    }
}

impl Split {
    /// Returns the embeddings `[N, C]` of `tokens` `[N]`: each is on one rank, and the others add zeros.
    pub fn embed(&self, embedding: Embedding, weights: &Weights, tokens: &Tensor) -> Result<Tensor> {
        let count = self.part.tokens();
        let own = tokens.f_sub_scalar(self.part.rank * count)?;
        let is_own = own.f_ge(0)?.f_logical_and(&own.f_lt(count)?)?;
        let mut rows = embedding.forward(weights, &own.f_clamp(0, count - 1)?)?;
        drop(rows.f_masked_fill_(&is_own.f_logical_not()?.f_unsqueeze(1)?, 0.0)?);
        self.peers.sum_(&mut rows)?;
        Ok(rows)
    }

    /// Returns the logits `[R, V]` of all tokens, of this rank's `own`.
    pub fn join_logits(&self, own: &Tensor) -> Result<Tensor> {
        let all = self.peers.all_gather(own)?.f_transpose(0, 1)?.f_flatten(1, 2)?;
        Ok(all.f_narrow(1, 0, self.part.whole.vocab_size)?.f_contiguous()?)
    }
}

/// Returns a dense copy in memory of its own.
fn copied(x: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(x.size(), (x.kind(), x.device()))?;
    copy.f_copy_(x)?;
    Ok(copy)
}
