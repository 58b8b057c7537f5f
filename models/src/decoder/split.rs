//! A decoder that several ranks hold together: each has some heads and some columns of every layer, and some tokens of the
//! embedding and the head (Megatron-LM, Shoeybi et al. 2019).
//!
//! Queries, keys, values, gates and ups are cut by their output, and what reads them by its input. So a branch needs one
//! sum over the ranks at its end, and its backward one at the branch's begin. The residual stream, its gradient and the
//! logits have the same bits on every rank, and so do the chosen tokens and the gradients of what is whole on every rank.
//! Each rank has some columns of every expert of a mixture, or some experts whole ([`ExpertParts`]). Every rank has all rows and
//! the router, so that no row travels, and the sum over the ranks is the same.
//!
//! In training no rank has the logits of all tokens: log-probs and entropies come from each rank's own, and three numbers
//! per target travel.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use anyroll_backends::ops::{self, LogProbs};
use tch::{Device, Kind, Tensor};

use super::block::Block;
use super::embedding::Embedding;
use super::layer_block::LayerBlock;
use super::lora::{Lora, Projection};
use super::{Decoder, DecoderConfig, ExpertsConfig, QkNorm};
use crate::error::check_config;
use crate::model::{self, Grads, ParamSpec, Unit, Weights};
use crate::slice::join_columns;
use crate::{Cut, Peers, Result, Room};

/// Number of rows of which the head has a multiple.
const EVEN: i64 = 64;
/// Logit of a row of zeros behind those of tokens. Its probability is 0, in every element type.
const NEVER: f64 = -30000.0;

/// Parts of a mixture's experts that ranks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertParts {
    /// Some columns of every expert.
    Columns,
    /// Some experts, whole; for sampling alone.
    Whole,
}

/// A rank's part of a decoder's sizes.
#[derive(Clone, Debug)]
pub(super) struct Part {
    whole: DecoderConfig,
    experts: ExpertParts,
    rank: i64,
    ranks: i64,
}

/// A rank's part of a decoder, and the ranks that have the others.
#[derive(Clone, Debug)]
pub(super) struct Split {
    peers: Arc<dyn Peers>,
    part: Part,
    /// See [`Part::places`]. Behind a lock only because tch's tensors are not `Sync`; nothing writes to it.
    places: Arc<Mutex<Tensor>>,
    /// Cut of each parameter of each unit, on each rank.
    cuts: Vec<Vec<Vec<Cut>>>,
}

impl DecoderConfig {
    /// Checks that `ranks` ranks can hold the decoder together.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field that they cannot share.
    pub fn check_split(&self, ranks: i64, parts: ExpertParts) -> Result<()> {
        self.check_slices()?;
        self.check_heads(ranks)?;
        let experts = self.experts.as_ref();
        let of_experts = match parts {
            ExpertParts::Columns => {
                ("moe_intermediate_size", experts.map(|experts| experts.moe_intermediate_size))
            }
            ExpertParts::Whole => ("num_experts", experts.map(|experts| experts.num_experts)),
        };
        let widths = [("intermediate_size", Some(self.intermediate_size)), of_experts];
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

    /// Returns the sizes of each of `ranks` ranks that hold the decoder together ([`Self::check_split`]): all have the same
    /// number of heads and columns. The vocabulary stays whole, since logits do, and so do the sizes of experts of which ranks
    /// have some.
    pub fn part(&self, ranks: i64, parts: ExpertParts) -> DecoderConfig {
        let cut = if parts == ExpertParts::Columns { ranks } else { 1 };
        let experts = self.experts.as_ref().map(|experts| ExpertsConfig {
            moe_intermediate_size: experts.moe_intermediate_size / cut,
            ..experts.clone()
        });
        DecoderConfig {
            num_attention_heads: self.num_attention_heads / ranks,
            num_key_value_heads: (self.num_key_value_heads / ranks).max(1),
            intermediate_size: self.intermediate_size / ranks,
            experts,
            ..self.clone()
        }
    }
}

impl Decoder {
    /// Returns this rank's part of the decoder, which `peers` hold together, for the weights that [`Self::own_part`]
    /// returns. Its config has the sizes of the part, but the whole vocabulary.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for sizes that the ranks cannot share, or adapters with magnitudes.
    pub fn split(&self, peers: Arc<dyn Peers>, experts: ExpertParts) -> Result<Decoder> {
        self.config.check_split(peers.count() as i64, experts)?;
        let is_dora = self.inner_blocks.iter().filter_map(LayerBlock::lora).any(Lora::is_dora);
        check_config(!is_dora, "lora.dora", || {
            "needs the norms of whole rows, which are on several ranks".to_owned()
        })?;
        let (rank, ranks) = (peers.rank() as i64, peers.count() as i64);
        let part = Part { whole: self.config.clone(), experts, rank, ranks };
        let config = self.config.part(part.ranks, experts);
        let of_block = |block: &LayerBlock| {
            let block = block.written();
            LayerBlock::Written(Box::new(Block {
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                kv_sharers: part.ranks / part.ranks.min(part.whole.num_key_value_heads),
                lora: block.lora.as_ref().map(|lora| lora.part(|it| part.of_adapters(lora, it), &peers)),
                experts: block.experts.map(|of| match experts {
                    ExpertParts::Columns => of,
                    ExpertParts::Whole => of.part(rank, ranks),
                }),
                peers: Some(peers.clone()),
                ..block.clone()
            }))
        };
        let places = Arc::new(Mutex::new(part.places(self.rope_tables.of(0).device())?));
        let cuts_of = |rank: i64| -> Vec<Vec<Cut>> {
            let part = Part { rank, ..part.clone() };
            let cuts = |(unit, of): (usize, &Unit)| {
                (0..of.params.len()).map(|param| self.cut_of(&part, unit, param)).collect()
            };
            self.units.iter().enumerate().map(cuts).collect()
        };
        let cuts: Vec<_> = (0..part.ranks).map(cuts_of).collect();
        let own = &cuts[peers.rank()];
        let units = self.units.iter().zip(own).map(|(unit, cuts)| part_of_unit(unit, cuts)).collect();
        Ok(Decoder {
            plain_blocks: self.plain_blocks.iter().map(of_block).collect(),
            inner_blocks: self.inner_blocks.iter().map(of_block).collect(),
            units,
            units_of: self.units_of.clone(),
            embedding: self.embedding,
            head: self.head,
            rope_tables: self.rope_tables.clone(),
            guide: None,
            split: Some(Split { peers, part, places, cuts }),
            spread: None,
            config,
        })
    }

    /// Returns copies of this rank's parts of the whole tensors of a unit.
    ///
    /// # Panics
    /// If the decoder is not split.
    pub fn own_part(&self, unit: usize, whole: &[Tensor]) -> Result<Vec<Tensor>> {
        let split = self.split.as_ref().expect("it is split");
        let tensors = whole.iter().zip(&split.cuts[split.part.rank as usize][unit]);
        tensors.map(|(tensor, cut)| cut.copy(tensor)).collect()
    }

    /// Returns the cut of a parameter of a unit.
    fn cut_of(&self, part: &Part, unit: usize, param: usize) -> Cut {
        let is_of = |units: &Vec<usize>| units.contains(&unit);
        match (1..=self.config.num_hidden_layers).find(|&block| is_of(&self.units_of[block])) {
            Some(block) if block == unit => part.of_block(self.plain_blocks[block - 1].written(), param),
            Some(block) => {
                let lora = self.inner_blocks[block - 1].lora().expect("the unit is that of adapters");
                match lora.of_experts(param, &self.units[unit]).zip(self.config.experts.as_ref()) {
                    Some((rows, config)) if part.experts == ExpertParts::Whole => {
                        part.of_experts(config.num_experts, rows / config.num_experts)
                    }
                    of_experts => {
                        let experts = of_experts.map_or(1, |(_, config)| config.num_experts);
                        lora.cut(param, experts, |projection| part.of_adapters(lora, projection))
                    }
                }
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
    /// Returns this rank's part of `count` heads or columns. If there are fewer heads than ranks, several have the same.
    fn own(&self, count: i64) -> Range<i64> {
        let first = self.rank * count / self.ranks;
        first..first + (count / self.ranks).max(1)
    }

    /// Returns the tokens of a rank; the last ranks may have fewer.
    fn tokens(&self, rank: i64) -> Range<i64> {
        let (own, all) = ((self.whole.vocab_size + self.ranks - 1) / self.ranks, self.whole.vocab_size);
        (rank * own).min(all)..((rank + 1) * own).min(all)
    }

    /// Returns the number of rows of a rank's embeddings and of its head: at least one of zeros is behind those of its
    /// tokens. Products want an even width.
    fn vocabulary_rows(&self) -> i64 {
        let most = self.tokens(0).end + 1;
        (most + EVEN - 1) / EVEN * EVEN
    }

    fn of_vocabulary(&self) -> Cut {
        Cut::Padded(self.tokens(self.rank), self.vocabulary_rows())
    }

    /// Returns the place of each token in this rank's embeddings, int64 `[V]`: that of zeros if it is another rank's.
    fn places(&self, device: Device) -> Result<Tensor> {
        let own = self.tokens(self.rank);
        let zeros = self.vocabulary_rows() - 1;
        let place = |token: i64| if own.contains(&token) { token - own.start } else { zeros };
        let places: Vec<i64> = (0..self.whole.vocab_size).map(place).collect();
        Ok(Tensor::f_from_slice(&places)?.f_to_device(device)?)
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

    /// Returns the part of a matrix with adapters: of one expert's, if they are of experts.
    fn of_adapters(&self, lora: &Lora, projection: Projection) -> Cut {
        let of_experts = self.whole.experts.as_ref().filter(|_| lora.is_of_experts(projection));
        let Some(config) = of_experts else { return self.of(projection) };
        let width = config.moe_intermediate_size;
        match (self.experts, projection) {
            (ExpertParts::Whole, _) => Cut::Whole,
            (ExpertParts::Columns, Projection::Down) => Cut::Columns(self.own(width)),
            (ExpertParts::Columns, _) => self.of_gates(width, 1),
        }
    }

    /// Returns the rows of the gates and ups of `experts` MLPs of this width.
    fn of_gates(&self, width: i64, experts: i64) -> Cut {
        let own = self.own(width);
        Cut::Rows(
            (0..2 * experts).map(|matrix| matrix * width + own.start..matrix * width + own.end).collect(),
        )
    }

    /// Returns the rows of this rank's experts, of stacked matrices with so many rows each.
    fn of_experts(&self, experts: i64, rows: i64) -> Cut {
        let own = self.own(experts);
        Cut::Rows(std::iter::once(own.start * rows..own.end * rows).collect())
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
                Some((experts, config)) if self.experts == ExpertParts::Whole => {
                    self.of_experts(experts.count, 2 * config.moe_intermediate_size)
                }
                Some((experts, config)) => self.of_gates(config.moe_intermediate_size, experts.count),
                None => self.of(Projection::GateUp),
            }
        } else if param == block.down {
            match experts {
                Some((experts, _)) if self.experts == ExpertParts::Whole => {
                    self.of_experts(experts.count, self.whole.hidden_size)
                }
                Some((_, config)) => Cut::Columns(self.own(config.moe_intermediate_size)),
                None => self.of(Projection::Down),
            }
        } else if is(block.o_bias) || is(block.down_bias) {
            // It enters the ranks' sum once.
            if self.rank == 0 { Cut::Whole } else { Cut::Zeros }
        } else {
            Cut::Whole
        }
    }
}

/// Returns the unit of a rank with these parts of its parameters.
pub(super) fn part_of_unit(unit: &Unit, cuts: &[Cut]) -> Unit {
    let params = unit.params.iter().zip(cuts).map(|(spec, cut)| {
        let shape = cut.shape(&spec.shape);
        let parts = vec![model::Part { name: spec.name.clone(), rows: shape[0] }];
        ParamSpec { shape, parts, ..spec.clone() }
    });
    Unit { params: params.collect(), ..unit.clone() }
}

impl Split {
    /// Returns the embeddings `[N, C]` of `tokens` `[N]`: each is on one rank, and the others add zeros.
    pub fn embed(&self, embedding: Embedding, weights: &Weights, tokens: &Tensor) -> Result<Tensor> {
        let mut rows = embedding.forward(weights, &self.places_of(tokens)?)?;
        self.peers.sum_(&mut rows)?;
        Ok(rows)
    }

    /// Returns the logits `[R, V]` of all tokens, of those of this rank's rows.
    pub fn join_logits(&self, own: &Tensor) -> Result<Tensor> {
        let size = [own.size()[0], self.part.whole.vocab_size];
        let mut logits = Tensor::f_empty(size, (own.kind(), own.device()))?;
        join_columns(&self.peers.all_gather(own)?, self.part.tokens(0).end, &mut logits)?;
        Ok(logits)
    }

    /// Adds the gradient `dy` `[N, C]` of [`Self::embed`].
    pub fn embed_backward(
        &self,
        embedding: Embedding,
        grads: &mut Grads,
        dy: &Tensor,
        tokens: &Tensor,
    ) -> Result<()> {
        embedding.backward(grads, dy, &self.places_of(tokens)?)?;
        grads.put(0, 0, |buffer, _| {
            let own = self.own_tokens();
            drop(buffer.f_narrow(0, own, buffer.size()[0] - own)?.f_zero_()?);
            Ok(())
        })
    }

    /// Scores `targets` `[M]` like [`ops::logprobs`], from this rank's `logits` `[M, _]`. Sets those of no token to
    /// [`NEVER`].
    pub fn logprobs(&self, logits: &Tensor, targets: &Tensor, temperature: f64) -> Result<LogProbs> {
        let width = logits.size()[1] - self.own_tokens();
        drop(logits.f_narrow(1, self.own_tokens(), width)?.f_fill_(NEVER)?);
        let own = ops::logprobs(logits, &self.places_of(targets)?, temperature)?;
        let sent = Tensor::f_stack(&[&own.logprobs, &own.entropy, &own.lse], 0)?;
        let all = self.peers.all_gather(&sent)?;
        let of_ranks = |number: i64| all.f_select(1, number);
        let (logprobs, entropies, sums) = (of_ranks(0)?, of_ranks(1)?, of_ranks(2)?);
        let lse = sums.f_logsumexp([0].as_slice(), false)?;
        // Log-probability that a token is one of the rank's.
        let log_shares = sums.f_sub(&lse)?;
        let owners = targets.f_floor_divide_scalar(self.part.tokens(0).end)?.f_unsqueeze(0)?;
        let logprobs = logprobs.f_add(&log_shares)?.f_gather(0, &owners, false)?.f_squeeze_dim(0)?;
        let entropy = entropies.f_sub(&log_shares)?.f_mul(&log_shares.f_exp()?)?;
        let entropy = entropy.f_sum_dim_intlist([0].as_slice(), false, None)?;
        Ok(LogProbs { logprobs, entropy, lse })
    }

    /// Sets the gradient of logits of no token to 0.
    pub fn clear_padding(&self, dlogits: &Tensor) -> Result<()> {
        let own = self.own_tokens();
        drop(dlogits.f_narrow(1, own, dlogits.size()[1] - own)?.f_zero_()?);
        Ok(())
    }

    /// Returns the places of `tokens` among this rank's: that of a row of zeros for those of other ranks.
    pub fn places_of(&self, tokens: &Tensor) -> Result<Tensor> {
        Ok(self.places().f_index_select(0, tokens)?)
    }

    /// Returns the part that `rank` has of a parameter.
    pub fn cut_on(&self, rank: usize, unit: usize, param: usize) -> Cut {
        self.cuts[rank][unit][param].clone()
    }

    /// Returns the number of rows of this rank's part of the head.
    pub fn vocabulary_rows(&self) -> i64 {
        self.part.vocabulary_rows()
    }

    /// The ranks that hold the decoder together.
    pub fn peers(&self) -> &dyn Peers {
        &*self.peers
    }

    /// Returns the number of this rank's tokens.
    fn own_tokens(&self) -> i64 {
        let own = self.part.tokens(self.part.rank);
        own.end - own.start
    }

    fn places(&self) -> Tensor {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).shallow_clone()
    }

    /// Returns true if steps can be recorded.
    pub fn is_recorded(&self) -> bool {
        self.peers.are_recorded()
    }
}

/// Memory for what the ranks of a split decoder exchange in a recorded step, for up to B rows.
#[derive(Debug)]
pub(super) struct SplitMemory {
    split: Split,
    room: Arc<dyn Room>,
    /// Place of each row's token in this rank's embeddings, int64 `[B]`.
    places: Tensor,
}

impl SplitMemory {
    /// Allocates memory for `rows` rows of the type and on the device of `like`.
    pub fn new(split: &Split, rows: i64, like: &Tensor) -> Result<SplitMemory> {
        let widest = split.part.vocabulary_rows().max(split.part.whole.hidden_size);
        let room = split.peers.room(rows * widest, like)?;
        let places = Tensor::f_zeros([rows], (Kind::Int64, like.device()))?;
        Ok(SplitMemory { split: split.clone(), room, places })
    }

    /// Returns views of the first `rows` rows.
    pub fn first(&self, rows: i64) -> Result<SplitMemory> {
        let places = self.places.f_narrow(0, 0, rows)?;
        Ok(SplitMemory { split: self.split.clone(), room: self.room.clone(), places })
    }

    /// The memory of exchanges.
    pub fn room(&self) -> &dyn Room {
        &*self.room
    }

    /// Computes the embeddings of `tokens` `[B]`.
    pub fn embed_into(
        &mut self,
        embedding: Embedding,
        weights: &Weights,
        tokens: &Tensor,
        rows: &mut Tensor,
    ) -> Result<()> {
        drop(self.split.places().f_index_select_out(&self.places, 0, tokens)?);
        embedding.forward_into(weights, &self.places, &mut self.room.own(&rows.size())?)?;
        self.room.sum_into(rows, false)
    }

    /// Returns the memory of the logits `[B, _]` of this rank's tokens.
    pub fn own_logits(&self, rows: i64) -> Result<Tensor> {
        self.room.own(&[rows, self.split.part.vocabulary_rows()])
    }

    /// Writes the logits `[B, V]` of all tokens, after each rank wrote those of its own to [`Self::own_logits`].
    pub fn join_logits_into(&self, logits: &mut Tensor) -> Result<()> {
        let part = &self.split.part;
        self.room.join_into(logits, [part.vocabulary_rows(), part.tokens(0).end])
    }
}
