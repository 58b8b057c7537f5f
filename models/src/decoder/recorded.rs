//! A decoding step that can be recorded on a device and run again: the same blocks over memory that stays in place.

use anyroll_backends::ops::{self, AttentionParts, Causal, Normed, PagedCache, StepRotation};
use tch::{Device, Kind, Tensor};

use super::{Decoder, NormPlaces, QkNorm, block::Block, lora::Site, math::Math};
use crate::Result;
use crate::generation::KvCache;
use crate::model::{Model, Weights};

/// What a step reads and writes: of up to B rows, or views of the first of them. `tokens` and `positions` are of the
/// next step when `ops::sample_into` is done with them.
#[derive(Debug)]
pub(crate) struct StepMemory {
    /// int64 `[B]`.
    pub tokens: Tensor,
    /// int64 `[B]`.
    pub positions: Tensor,
    /// `[B, V]`.
    pub logits: Tensor,
    /// The residual stream `[B, C]`, and its norm.
    x: Tensor,
    h: Normed,
    /// `[B, H + 2 K, D]`.
    qkv: Tensor,
    /// `[B, H D]`.
    attended: Tensor,
    /// `[B, 2 F]`.
    gate_up: Tensor,
    /// `[B, F]`.
    activated: Tensor,
    scratch: Scratch,
}

/// What is between the products of an adapter.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Of its first matrix: room for any adapter's rank; without adapters `[B, 0]`.
    between: Tensor,
    /// Of its second one before that is added, where that is rounded by itself: room for any adapter's columns.
    product: Tensor,
}

impl Scratch {
    fn new(decoder: &Decoder, rows: i64, options: (Kind, Device)) -> Result<Scratch> {
        let config = &decoder.config;
        let rank = decoder.inner_blocks.iter().flat_map(Block::ranks).flatten().max();
        let widths =
            [config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim];
        let adds_apart = rank.is_some() && decoder.is_strict();
        let widest = widths.into_iter().max().filter(|_| adds_apart).unwrap_or(0);
        let values = |width: i64| Tensor::f_zeros([rows, width], options);
        Ok(Scratch { between: values(rank.unwrap_or(0) as i64)?, product: values(widest)? })
    }

    fn first(&self, rows: i64) -> Result<Scratch> {
        let first = |tensor: &Tensor| tensor.f_narrow(0, 0, rows);
        Ok(Scratch { between: first(&self.between)?, product: first(&self.product)? })
    }

    /// Its first product, of this rank.
    pub fn between(&self, rank: i64) -> Result<Tensor> {
        first_columns(&self.between, rank)
    }

    /// Its second product, of so many columns.
    pub fn product(&self, columns: i64) -> Result<Tensor> {
        first_columns(&self.product, columns)
    }
}

/// The beginning of a tensor's memory, as so many columns without gaps.
fn first_columns(tensor: &Tensor, columns: i64) -> Result<Tensor> {
    let rows = tensor.size()[0];
    Ok(tensor.f_flatten(0, 1)?.f_narrow(0, 0, rows * columns)?.f_view([rows, columns])?)
}

impl StepMemory {
    /// Memory for up to `rows` rows of `kind`.
    pub fn new(decoder: &Decoder, rows: i64, kind: Kind, device: Device) -> Result<StepMemory> {
        let config = &decoder.config;
        let (heads, kv_heads, dim) =
            (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
        let zeros = |size: &[i64], kind| Tensor::f_zeros(size, (kind, device));
        let values = |width: i64| zeros(&[rows, width], kind);
        Ok(StepMemory {
            tokens: zeros(&[rows], Kind::Int64)?,
            positions: zeros(&[rows], Kind::Int64)?,
            logits: values(config.vocab_size)?,
            x: values(config.hidden_size)?,
            h: Normed::new(rows, config.hidden_size, kind, device)?,
            qkv: zeros(&[rows, heads + 2 * kv_heads, dim], kind)?,
            attended: values(heads * dim)?,
            gate_up: values(2 * config.intermediate_size)?,
            activated: values(config.intermediate_size)?,
            scratch: Scratch::new(decoder, rows, (kind, device))?,
        })
    }

    /// Views of the first `rows` rows.
    pub fn first(&self, rows: i64) -> Result<StepMemory> {
        let first = |tensor: &Tensor| tensor.f_narrow(0, 0, rows);
        Ok(StepMemory {
            tokens: first(&self.tokens)?,
            positions: first(&self.positions)?,
            logits: first(&self.logits)?,
            x: first(&self.x)?,
            h: self.h.first(rows)?,
            qkv: first(&self.qkv)?,
            attended: first(&self.attended)?,
            gate_up: first(&self.gate_up)?,
            activated: first(&self.activated)?,
            scratch: self.scratch.first(rows)?,
        })
    }
}

impl Decoder {
    /// Whether [`Self::decode_in_place`] computes a decoder of this shape; the reason if it does not.
    pub(crate) fn decodes_in_place(&self) -> Result<(), String> {
        match (self.config.norms, self.config.qk_norm) {
            _ if self.config.experts.is_some() => Err("it has experts".to_owned()),
            (NormPlaces::After, _) => Err("it has norms behind attention and the MLP".to_owned()),
            (_, Some(QkNorm::Together)) => Err("it norms all heads together".to_owned()),
            (NormPlaces::Before, Some(QkNorm::PerHead) | None) => Ok(()),
        }
    }

    /// Runs the tokens of `memory` at their positions, one of each sequence: its logits are there then. `tables`, int32
    /// `[B, W]`, has the blocks of each sequence.
    pub(crate) fn decode_in_place(
        &self,
        weights: &[Weights],
        memory: &mut StepMemory,
        tables: &Tensor,
        parts: &mut AttentionParts,
        cache: &KvCache,
    ) -> Result<()> {
        let head_weights = &weights[self.blocks() - 1];
        let norm_before = |layer: usize| match self.plain_blocks.get(layer) {
            Some(block) => weights[layer + 1].get(0, block.input_norm.expect(IN_FRONT)),
            None => self.head.norm(head_weights),
        };
        drop(weights[0].get(0, 0).f_index_select_out(&memory.x, 0, &memory.tokens)?);
        memory.h.become_norm_of(&memory.x, norm_before(0), self.config.rms_norm_eps)?;
        for (layer, block) in self.inner_blocks.iter().enumerate() {
            let (keys, values) = cache.layer(layer);
            let cache = PagedCache { keys, values, tables };
            let rope_table = self.rope_tables.of(layer);
            let how = (self.causal(layer), &rope_table);
            let next_norm = norm_before(layer + 1);
            block.decode_in_place(&weights[layer + 1], next_norm, memory, how, cache, parts)?;
        }
        let lm_head = self.head.lm_head(head_weights);
        self.head.math.linear_into(&mut memory.h, lm_head, None, &mut memory.logits)
    }
}

/// What [`Decoder::decodes_in_place`] saw to.
const IN_FRONT: &str = "only decoders with norms in front of both branches are recorded";

impl Block {
    /// Takes the norm of the residual stream, and leaves the one with the weights `next_norm`.
    fn decode_in_place(
        &self,
        weights: &Weights,
        next_norm: &Tensor,
        memory: &mut StepMemory,
        (causal, rope_table): (Causal, &Tensor),
        cache: PagedCache,
        parts: &mut AttentionParts,
    ) -> Result<()> {
        let StepMemory { positions, x, h, qkv, attended, gate_up, activated, scratch, .. } = memory;
        let of = |param: usize| weights.get(0, param);
        let mut qkv_rows = qkv.f_flatten(1, 2)?;
        self.math.linear_into(h, of(self.qkv), self.inner_bias(Site::Qkv, weights), &mut qkv_rows)?;
        if self.adapts(Site::Qkv) {
            self.adapt_in_place(Site::Qkv, weights, h.values()?, scratch, &mut qkv_rows)?;
        }
        let norms = self.qk_norm.map(|(q, k)| (of(q), of(k), self.eps));
        let rotation = StepRotation { norms, table: rope_table };
        ops::attend_into(qkv, rotation, positions, cache, causal, parts, attended)?;
        let norm = of(self.mlp_input_norm.expect(IN_FRONT));
        self.add_and_norm_in_place(Site::O, weights, attended, norm, (x, h, scratch))?;
        let apart = self.gate_up_bias.is_some() || self.adapts(Site::GateUp);
        if self.math == Math::ByRows || apart {
            self.math.linear_into(h, of(self.gate_up), self.inner_bias(Site::GateUp, weights), gate_up)?;
            self.adapt_in_place(Site::GateUp, weights, h.values()?, scratch, gate_up)?;
            ops::swiglu_into(gate_up, activated)?;
        } else {
            ops::swiglu_linear_into(h, of(self.gate_up), gate_up, activated)?;
        }
        self.add_and_norm_in_place(Site::Down, weights, activated, next_norm, (x, h, scratch))
    }

    /// Adds the product of `y` at `site`, the end of a branch, to the residual stream `x`, and makes its norm.
    /// With adapters somewhere the norm is made at once, since they take its values.
    fn add_and_norm_in_place(
        &self,
        site: Site,
        weights: &Weights,
        y: &Tensor,
        norm: &Tensor,
        (x, h, scratch): (&mut Tensor, &mut Normed, &mut Scratch),
    ) -> Result<()> {
        let (matrix, bias) = (weights.get(0, self.params_at(site).0), self.inner_bias(site, weights));
        match self.math {
            Math::Fast if self.lora.is_none() && bias.is_none() => {
                return Ok(ops::add_linear_and_norm_(x, y, matrix, (norm, self.eps), h)?);
            }
            Math::Fast if !self.scales(site) => {
                ops::add_linear_(x, y, matrix)?;
                if let Some(bias) = bias {
                    drop(x.f_add_(bias)?);
                }
                self.adapt_in_place(site, weights, y, scratch, x)?;
            }
            // Rounded where `forward` rounds, in the memory of the norm that comes next.
            math => {
                let mut product = h.values()?.shallow_clone();
                let is_whole = site == Site::O || self.scales(site);
                match math {
                    Math::Fast => drop(y.f_mm_out(&product, &matrix.f_tr()?)?),
                    Math::ByRows => {
                        ops::linear_by_rows_into(y, matrix, bias.filter(|_| is_whole), &mut product)?;
                    }
                }
                if is_whole {
                    self.adapt_in_place(site, weights, y, scratch, &mut product)?;
                    drop(x.f_add_(&product)?);
                } else {
                    drop(x.f_add_(&product)?);
                    if let Some(bias) = bias {
                        drop(x.f_add_(bias)?);
                    }
                    self.adapt_in_place(site, weights, y, scratch, x)?;
                }
            }
        }
        Ok(h.become_norm_of(x, norm, self.eps)?)
    }
}
