//! A decoding step that can be recorded on a device and run again: the same blocks over memory that stays in place.

use anyroll_backends::ops::{self, AttentionParts, Causal, PagedCache};
use tch::{Device, Kind, Tensor};

use super::{Decoder, block::Block};
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
    /// The residual stream `[B, C]`, and the output of the second half's first matrix.
    x: Tensor,
    x2: Tensor,
    /// What a norm wrote `[B, C]`, and its reciprocal deviations, fp32 `[B]`.
    h: Tensor,
    rstd: Tensor,
    /// `[B, H + 2 K, D]`.
    qkv: Tensor,
    /// `[B, H D]`.
    attended: Tensor,
    /// `[B, 2 F]`.
    gate_up: Tensor,
    /// `[B, F]`.
    activated: Tensor,
    /// What is between an adapter's two matrices, `[B, rank]`; without adapters `[B, 0]`.
    between: Tensor,
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
            x2: values(config.hidden_size)?,
            h: values(config.hidden_size)?,
            rstd: zeros(&[rows], Kind::Float)?,
            qkv: zeros(&[rows, heads + 2 * kv_heads, dim], kind)?,
            attended: values(heads * dim)?,
            gate_up: values(2 * config.intermediate_size)?,
            activated: values(config.intermediate_size)?,
            between: values(decoder.block.adapters().1 as i64)?,
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
            x2: first(&self.x2)?,
            h: first(&self.h)?,
            rstd: first(&self.rstd)?,
            qkv: first(&self.qkv)?,
            attended: first(&self.attended)?,
            gate_up: first(&self.gate_up)?,
            activated: first(&self.activated)?,
            between: first(&self.between)?,
        })
    }
}

impl Decoder {
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
        let rope_table = self.rope_table();
        drop(weights[0].get(0, 0).f_index_select_out(&memory.x, 0, &memory.tokens)?);
        for layer in 0..self.config.num_hidden_layers {
            let (keys, values) = cache.layer(layer);
            let cache = PagedCache { keys, values, tables };
            let how = (self.causal(layer), &rope_table);
            self.block.decode_in_place(&weights[layer + 1], memory, how, cache, parts)?;
        }
        self.head.logits_in_place(&weights[self.blocks() - 1], memory)
    }
}

impl Block {
    fn decode_in_place(
        &self,
        weights: &Weights,
        memory: &mut StepMemory,
        (causal, rope_table): (Causal, &Tensor),
        cache: PagedCache,
        parts: &mut AttentionParts,
    ) -> Result<()> {
        let StepMemory { positions, x, x2, h, rstd, qkv, attended, gate_up, activated, between, .. } = memory;
        let of = |param: usize| weights.get(0, param);
        ops::rms_norm_into(x, None, of(self.input_norm), self.eps, (h, rstd))?;
        let mut qkv_rows = qkv.f_flatten(1, 2)?;
        ops::linear_into(h, of(self.qkv), self.qkv_bias.map(of), &mut qkv_rows)?;
        self.adapt_in_place(|lora| &lora.qkv, weights, h, between, &qkv_rows)?;
        let norms = self.qk_norm.map(|(q, k)| (of(q), of(k), self.eps));
        ops::rope_into_cache_(qkv, norms, positions, rope_table, cache)?;
        ops::attend_into(qkv, positions, cache, causal, parts, attended)?;
        ops::linear_into(attended, of(self.o), None, x2)?;
        self.adapt_in_place(|lora| &lora.o, weights, attended, between, x2)?;
        ops::rms_norm_into(x2, Some(x), of(self.post_attention_norm), self.eps, (h, rstd))?;
        if self.adapts(|lora| &lora.gate_up) {
            ops::linear_into(h, of(self.gate_up), None, gate_up)?;
            self.adapt_in_place(|lora| &lora.gate_up, weights, h, between, gate_up)?;
            ops::swiglu_into(gate_up, activated)?;
        } else {
            ops::swiglu_linear_into(h, of(self.gate_up), gate_up, activated)?;
        }
        ops::add_linear_(x2, activated, of(self.down))?;
        self.adapt_in_place(|lora| &lora.down, weights, activated, between, x2)?;
        std::mem::swap(x, x2); // the next block's residual stream
        Ok(())
    }
}

impl super::Head {
    fn logits_in_place(&self, weights: &Weights, memory: &mut StepMemory) -> Result<()> {
        let StepMemory { x, h, rstd, logits, .. } = memory;
        ops::rms_norm_into(x, None, self.norm(weights), self.eps, (h, rstd))?;
        Ok(ops::linear_into(h, self.lm_head(weights), None, logits)?)
    }
}
