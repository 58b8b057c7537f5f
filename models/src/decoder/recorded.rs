//! A decoding step that can be recorded on a device and replayed: the same blocks, over memory with fixed
//! addresses.

use anyroll_backends::ops::{
    self, AttentionParts, Causal, EightBitRows, Normed, PagedCache, Routing, StepRotation,
};
use tch::{Device, Kind, Tensor};

use super::{
    Decoder, ExpertsConfig, KvCache, NormPlaces, block::Block, experts::Experts, layer_block::LayerBlock,
    lora::Projection, math::Math, multipliers::multiply_, split::SplitMemory,
};
use crate::measured::Paper;
use crate::model::{Model, Weights};
use crate::{Result, Room, Runs, routes::RouteShape};

/// Memory that a step reads and writes, for up to B rows, or views of the first of them. After
/// `ops::sample_into`, `tokens` and `positions` belong to the next step.
#[derive(Debug)]
pub(crate) struct StepMemory {
    /// int64 `[B]`.
    pub tokens: Tensor,
    /// int64 `[B]`.
    pub positions: Tensor,
    /// `[B, V]`.
    pub logits: Tensor,
    /// Residual stream `[B, C]`, and its norm.
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
    /// Memory of experts, if there are any.
    mixture: Option<MixtureMemory>,
    /// Memory of exchanges, if several ranks hold the decoder together.
    split: Option<SplitMemory>,
}

/// Memory of a layer with experts, where each of B rows chooses J: R = B J.
#[derive(Debug)]
struct MixtureMemory {
    /// `[B, E]`.
    logits: Tensor,
    routing: Routing,
    /// `[R, F]`.
    activated: Tensor,
    /// `[R, C]`.
    made: Tensor,
    /// Experts of every layer that has some, int32 `[layers, B, J]`, if they are kept.
    kept: Option<Tensor>,
}

impl MixtureMemory {
    fn new(
        decoder: &Decoder,
        config: &ExpertsConfig,
        rows: i64,
        at: (Kind, Device),
    ) -> Result<MixtureMemory> {
        let of_block = |block: &LayerBlock| match block {
            LayerBlock::Written(block) => block.experts,
            LayerBlock::Expressed(_) => None,
        };
        let own = decoder.inner_blocks.iter().find_map(of_block).map(|of| of.own);
        let hidden = decoder.config.hidden_size;
        let (experts, per_token) = (config.num_experts, config.num_experts_per_tok);
        let zeros = |rows: i64, width: i64| Tensor::f_zeros([rows, width], at);
        Ok(MixtureMemory {
            logits: zeros(rows, experts)?,
            routing: Routing::new(rows, experts, per_token, at.1)?.of_experts(own.unwrap_or((0, experts))),
            activated: zeros(rows * per_token, config.moe_intermediate_size)?,
            made: zeros(rows * per_token, hidden)?,
            kept: None,
        })
    }

    /// Lets the `index`-th layer with experts write its choice to the kept ones, if they are kept.
    fn turn_to(&mut self, index: usize) -> Result<()> {
        if let Some(kept) = &self.kept {
            self.routing = self.routing.choosing_into(kept.f_select(0, index as i64)?);
        }
        Ok(())
    }

    fn first(&self, rows: i64) -> Result<MixtureMemory> {
        let sorted = self.made.size()[0] / self.logits.size()[0] * rows;
        Ok(MixtureMemory {
            logits: self.logits.f_narrow(0, 0, rows)?,
            routing: self.routing.first(rows)?,
            activated: self.activated.f_narrow(0, 0, sorted)?,
            made: self.made.f_narrow(0, 0, sorted)?,
            kept: self.kept.as_ref().map(|kept| kept.f_narrow(1, 0, rows)).transpose()?,
        })
    }
}

/// Intermediate results between two products.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Rows in 8 bits, if rows are rounded.
    eight: Option<EightBitRows>,
    /// Result of the first matrix, wide enough for any adapter's rank; without adapters `[B, 0]`.
    between: Tensor,
    /// Result of the second matrix before it is added, if it is rounded separately; wide enough for any
    /// adapter's columns.
    product: Tensor,
}

impl Scratch {
    fn new(decoder: &Decoder, rows: i64, options: (Kind, Device)) -> Result<Scratch> {
        let rank = decoder.inner_blocks.iter().flat_map(LayerBlock::ranks).flatten().max();
        let widths = decoder.inner_blocks.iter().filter_map(|block| Some(block.lora()?.widest()));
        let widest = widths.max().filter(|_| decoder.is_strict()).unwrap_or(0);
        let values = |width: i64| Tensor::f_zeros([rows, width], options);
        let rounds = decoder.rounds_rows();
        let eight = rounds.then(|| EightBitRows::new(rows, decoder.widest_row() as i64, options.1));
        Ok(Scratch {
            eight: eight.transpose()?,
            between: values(rank.unwrap_or(0) as i64)?,
            product: values(widest)?,
        })
    }

    fn first(&self, rows: i64) -> Result<Scratch> {
        let first = |tensor: &Tensor| tensor.f_narrow(0, 0, rows);
        let eight = self.eight.as_ref().map(EightBitRows::shared);
        Ok(Scratch { eight, between: first(&self.between)?, product: first(&self.product)? })
    }

    /// Returns the memory for rows in 8 bits if they are rounded before their product with this matrix.
    fn eight_for(&self, math: Math, matrix: &Tensor) -> Option<&EightBitRows> {
        self.eight.as_ref().filter(|_| math.rounds_rows_of(matrix))
    }

    /// Returns the memory of the first product, of rank `rank`.
    pub fn between(&self, rank: i64) -> Result<Tensor> {
        first_columns(&self.between, rank)
    }

    /// Returns the memory of the second product, of `columns` columns.
    pub fn product(&self, columns: i64) -> Result<Tensor> {
        first_columns(&self.product, columns)
    }
}

/// Returns the beginning of a tensor's memory as a dense matrix of `columns` columns.
fn first_columns(tensor: &Tensor, columns: i64) -> Result<Tensor> {
    let rows = tensor.size()[0];
    Ok(tensor.f_flatten(0, 1)?.f_narrow(0, 0, rows * columns)?.f_view([rows, columns])?)
}

/// The residual stream of a step.
struct Stream<'a> {
    x: &'a mut Tensor,
    /// Its norm.
    h: &'a mut Normed,
    scratch: &'a mut Scratch,
    split: Option<&'a SplitMemory>,
}

/// Weights of the norms at the end of a branch.
struct BranchNorms<'a> {
    /// Norm of the branch's output.
    output: Option<&'a Tensor>,
    /// Norm of the stream behind it.
    next: Option<&'a Tensor>,
}

impl StepMemory {
    /// Returns the bytes for up to `rows` rows of a decoder that is not split, with routes if it has experts.
    pub fn bytes(decoder: &Decoder, rows: usize, runs: Runs) -> Result<usize> {
        let paper = Paper::new(runs)?;
        let like = paper.tensor(&[0])?;
        let make = || {
            let mut memory = StepMemory::new(decoder, rows as i64, like.kind(), like.device())?;
            decoder.route_shape().map_or(Ok(()), |shape| memory.keep_routes(shape))?;
            Ok(memory)
        };
        Ok(paper.peak(make)?.1)
    }

    /// Allocates memory for up to `rows` rows of `kind`.
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
            mixture: (config.experts.as_ref())
                .map(|experts| MixtureMemory::new(decoder, experts, rows, (kind, device)))
                .transpose()?,
            split: (decoder.split.as_ref())
                .map(|split| SplitMemory::new(split, rows, &zeros(&[0], kind)?))
                .transpose()?,
        })
    }

    /// Keeps the experts that rows choose in every layer of a step, from the next recording on.
    pub fn keep_routes(&mut self, shape: RouteShape) -> Result<()> {
        let size = [shape.layers as i64, self.tokens.size()[0], shape.per_token as i64];
        let mixture = self.mixture.as_mut().expect("a decoder with routes has experts");
        mixture.kept = Some(Tensor::f_zeros(size, (Kind::Int, self.tokens.device()))?);
        Ok(())
    }

    /// Returns the experts that the rows chose in the last step, int32 `[B, layers, J]`, if they are kept.
    pub fn routes(&self) -> Result<Option<Tensor>> {
        let kept = self.mixture.as_ref().and_then(|mixture| mixture.kept.as_ref());
        Ok(kept.map(|kept| kept.f_transpose(0, 1)).transpose()?)
    }

    /// Memory of exchanges, if several ranks hold the decoder together.
    pub fn room(&self) -> Option<&dyn Room> {
        self.split.as_ref().map(SplitMemory::room)
    }

    /// Returns views of the first `rows` rows.
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
            mixture: self.mixture.as_ref().map(|mixture| mixture.first(rows)).transpose()?,
            split: self.split.as_ref().map(|split| split.first(rows)).transpose()?,
        })
    }
}

/// Places of a step's rows in the cache.
#[derive(Debug)]
pub(crate) struct StepTables {
    /// Blocks of each row's sequence: int32 `[B, W]`.
    pub blocks: Tensor,
    /// True if several rows may be of one sequence.
    pub together: bool,
}

/// A layer's keys and values, as a step's rows read them.
struct LayerCache<'a> {
    pages: PagedCache<'a>,
    /// See [`StepTables::together`].
    together: bool,
}

impl Decoder {
    /// Checks that [`Self::decode_in_place`] supports this decoder with weights like `like`. Otherwise
    /// returns the reason.
    pub(crate) fn decodes_in_place(&self, like: &Tensor) -> Result<(), String> {
        if self.split.as_ref().is_some_and(|split| !split.is_recorded()) {
            return Err("the collectives of the ranks that hold it together are not recorded".to_owned());
        }
        if self.config.expressed.is_some() {
            return Err("libtorch differentiates its layers, which have no kernels of their own".to_owned());
        }
        if self.config.norms == NormPlaces::Both || self.config.activation != ops::Activation::Silu {
            return Err("it has norms on both sides of branches, or an activation other than SiLU".to_owned());
        }
        if self.adapts_experts() {
            return Err("its experts have adapters, which are not merged".to_owned());
        }
        match &self.config.experts {
            Some(_) if self.is_strict() => Err("it has experts, and is strict".to_owned()),
            Some(experts) => {
                let sizes = [self.config.hidden_size, experts.moe_intermediate_size];
                ops::routes_in_place(like, experts.num_experts, sizes)
            }
            None => Ok(()),
        }
    }

    /// Decodes the tokens of `memory` at their positions, which lie in the cache as `tables` says, and writes the logits
    /// to `memory`.
    pub(crate) fn decode_in_place(
        &self,
        weights: &[Weights],
        memory: &mut StepMemory,
        tables: &StepTables,
        parts: &mut AttentionParts,
        cache: &KvCache,
    ) -> Result<()> {
        let head_weights = &weights[self.blocks() - 1];
        let norm_before = |layer: usize| match self.plain_blocks.get(layer) {
            Some(block) => block.written().input_norm.map(|norm| weights[layer + 1].get(0, norm)),
            None => Some(self.head.norm(head_weights)),
        };
        match &mut memory.split {
            None => self.embedding.forward_into(&weights[0], &memory.tokens, &mut memory.x)?,
            Some(split) => {
                split.embed_into(self.embedding, &weights[0], &memory.tokens, &mut memory.x)?;
            }
        }
        if let Some(norm) = norm_before(0) {
            memory.h.become_norm_of(&memory.x, norm, self.config.rms_norm_eps)?;
        }
        let mut with_experts = 0..;
        for (layer, block) in self.inner_blocks.iter().enumerate() {
            if let (Some(mixture), Some(_)) = (&mut memory.mixture, block.written().experts) {
                mixture.turn_to(with_experts.next().expect("the range has no end"))?;
            }
            let (keys, values) = cache.layer(layer);
            let pages = PagedCache { keys, values, tables: &tables.blocks };
            let cache = LayerCache { pages, together: tables.together };
            let rope_table = self.rope_tables.of(layer);
            let how = (self.causal(layer), &rope_table);
            let next_norm = norm_before(layer + 1);
            block.written().decode_in_place(&weights[layer + 1], next_norm, memory, how, cache, parts)?;
        }
        let StepMemory { h, logits, split, .. } = memory;
        let Some(split) = split else { return self.head.logits_into(head_weights, h, logits) };
        self.head.logits_into(head_weights, h, &mut split.own_logits(logits.size()[0])?)?;
        split.join_logits_into(logits)
    }
}

impl Block {
    /// Reads the norm of the residual stream, if the block begins with one, and leaves the norm with the
    /// weights `next_norm`.
    fn decode_in_place(
        &self,
        weights: &Weights,
        next_norm: Option<&Tensor>,
        memory: &mut StepMemory,
        (causal, rope_table): (Causal, &Tensor),
        cache: LayerCache,
        parts: &mut AttentionParts,
    ) -> Result<()> {
        let StepMemory {
            positions, x, h, qkv, attended, gate_up, activated, scratch, mixture, split, ..
        } = memory;
        let split = split.as_ref();
        let of = |param: usize| weights.get(0, param);
        let mut stream = Normed::unscaled(x);
        let input = if self.input_norm.is_some() { &mut *h } else { &mut stream };
        let mut qkv_rows = qkv.f_flatten(1, 2)?;
        self.math.linear_into(
            input,
            of(self.qkv),
            self.inner_bias(Projection::Qkv, weights),
            &mut qkv_rows,
            scratch.eight.as_ref(),
        )?;
        if self.adapts(Projection::Qkv) {
            self.adapt_in_place(Projection::Qkv, weights, input.values()?, scratch, &mut qkv_rows)?;
        }
        let norms = match self.qk_norm {
            Some((q, k)) if self.norms_heads_together => {
                let [queries, keys, _] = self.split(qkv)?;
                ops::rms_norm_(&mut queries.f_flatten(1, 2)?, of(q), self.eps)?;
                ops::rms_norm_(&mut keys.f_flatten(1, 2)?, of(k), self.eps)?;
                None
            }
            norms => norms.map(|(q, k)| (of(q), of(k), self.eps)),
        };
        let rotation = StepRotation { norms, table: rope_table };
        let LayerCache { pages, together } = cache;
        if together {
            ops::turn_rows_(qkv, rotation, positions, pages)?;
        }
        ops::attend_into(qkv, (!together).then_some(rotation), positions, pages, causal, parts, attended)?;
        let norms = BranchNorms { output: self.attention_norm.map(of), next: self.mlp_input_norm.map(of) };
        self.end_branch_in_place(Projection::O, weights, attended, norms, Stream { x, h, scratch, split })?;
        if let (Some(experts), Some(mixture)) = (self.experts, mixture) {
            return self.mix_in_place(experts, weights, next_norm, Stream { x, h, scratch, split }, mixture);
        }
        let input = if self.mlp_input_norm.is_some() { &mut *h } else { &mut stream };
        let apart = self.gate_up_bias.is_some() || self.adapts(Projection::GateUp);
        if self.math == Math::ByRows || apart {
            self.math.linear_into(
                input,
                of(self.gate_up),
                self.inner_bias(Projection::GateUp, weights),
                gate_up,
                scratch.eight.as_ref(),
            )?;
            self.adapt_in_place(Projection::GateUp, weights, input.values()?, scratch, gate_up)?;
            ops::swiglu_into(gate_up, activated)?;
        } else if let Some(rows) = scratch.eight_for(self.math, of(self.gate_up)) {
            rows.swiglu_linear_into(input, of(self.gate_up), gate_up, activated)?;
        } else {
            ops::swiglu_linear_into(input, of(self.gate_up), gate_up, activated)?;
        }
        let norms = BranchNorms { output: self.mlp_norm.map(of), next: next_norm };
        self.end_branch_in_place(Projection::Down, weights, activated, norms, Stream { x, h, scratch, split })
    }

    /// Adds the experts' output for the stream's norm to the stream, and computes its next norm.
    fn mix_in_place(
        &self,
        experts: Experts,
        weights: &Weights,
        next_norm: Option<&Tensor>,
        Stream { x, h, split, .. }: Stream,
        mixture: &mut MixtureMemory,
    ) -> Result<()> {
        let MixtureMemory { logits, routing, activated, made, .. } = mixture;
        let of = |param: usize| weights.get(0, param);
        self.math.linear_into(h, of(experts.router), None, logits, None)?;
        routing.become_of(logits, experts.is_normalized)?;
        routing.swiglu_linear_into(h.values()?, of(self.gate_up), activated)?;
        match split {
            None => routing.add_linear_(x, activated, of(self.down), made)?,
            Some(split) => {
                let mut own = split.room().own(&x.size())?.f_zero_()?;
                routing.add_linear_(&mut own, activated, of(self.down), made)?;
                split.room().sum_into(x, true)?;
            }
        }
        let norm = next_norm.expect("blocks with experts have norms on branch inputs");
        Ok(h.become_norm_of(x, norm, self.eps)?)
    }

    /// Adds the product of `y` at `projection`, the end of a branch, to the residual stream, after the
    /// branch's norm and multiplier if there are any. Computes the stream's next norm.
    fn end_branch_in_place(
        &self,
        projection: Projection,
        weights: &Weights,
        y: &Tensor,
        norms: BranchNorms,
        stream: Stream,
    ) -> Result<()> {
        let is_plain = norms.output.is_none() && self.residual_multiplier == 1.0;
        if is_plain && stream.split.is_none() {
            let next = norms.next.expect("branches have a norm on their input or output");
            return self.add_and_norm_in_place(projection, weights, y, next, stream);
        }
        let Stream { x, h, scratch, split } = stream;
        // Uses the memory of the next norm, or of none.
        let mut product = h.values()?.shallow_clone();
        let mut own =
            split.map_or_else(|| Ok(product.shallow_clone()), |split| split.room().own(&x.size()))?;
        let (matrix, bias) =
            (weights.get(0, self.params_at(projection).0), self.inner_bias(projection, weights));
        self.math.linear_into(&mut Normed::unscaled(y), matrix, bias, &mut own, scratch.eight.as_ref())?;
        self.adapt_in_place(projection, weights, y, scratch, &mut own)?;
        if let Some(split) = split {
            split.room().sum_into(if is_plain { x } else { &mut product }, is_plain)?;
        }
        if let Some(norm) = norms.output {
            ops::rms_norm_(&mut product, norm, self.eps)?;
        }
        if !is_plain {
            multiply_(&mut product, self.residual_multiplier)?;
            drop(x.f_add_(&product)?);
        }
        match norms.next {
            Some(norm) => Ok(h.become_norm_of(x, norm, self.eps)?),
            None => Ok(()),
        }
    }

    /// Adds the product of `y` at `projection`, the end of a branch, to the residual stream, and computes
    /// its norm. With adapters or experts the norm is computed at once, since they read its values.
    fn add_and_norm_in_place(
        &self,
        projection: Projection,
        weights: &Weights,
        y: &Tensor,
        norm: &Tensor,
        Stream { x, h, scratch, .. }: Stream,
    ) -> Result<()> {
        let (matrix, bias) =
            (weights.get(0, self.params_at(projection).0), self.inner_bias(projection, weights));
        let is_alone = self.lora.is_none() && self.experts.is_none() && bias.is_none();
        match (self.math, scratch.eight_for(self.math, matrix)) {
            (_, Some(rows)) if is_alone => {
                return Ok(rows.add_linear_and_norm_(x, y, matrix, (norm, self.eps), h)?);
            }
            (Math::Fast | Math::EightBits, None) if is_alone => {
                return Ok(ops::add_linear_and_norm_(x, y, matrix, (norm, self.eps), h)?);
            }
            (Math::Fast | Math::EightBits, None) if !self.scales(projection) => {
                ops::add_linear_(x, y, matrix)?;
                if let Some(bias) = bias {
                    drop(x.f_add_(bias)?);
                }
                self.adapt_in_place(projection, weights, y, scratch, x)?;
            }
            // Rounded where `forward` rounds, in the memory of the next norm.
            (math, rows) => {
                let mut product = h.values()?.shallow_clone();
                let is_whole = projection == Projection::O || self.scales(projection);
                let own = bias.filter(|_| is_whole);
                math.linear_into(&mut Normed::unscaled(y), matrix, own, &mut product, rows)?;
                if is_whole {
                    self.adapt_in_place(projection, weights, y, scratch, &mut product)?;
                    drop(x.f_add_(&product)?);
                } else {
                    drop(x.f_add_(&product)?);
                    if let Some(bias) = bias {
                        drop(x.f_add_(bias)?);
                    }
                    self.adapt_in_place(projection, weights, y, scratch, x)?;
                }
            }
        }
        Ok(h.become_norm_of(x, norm, self.eps)?)
    }
}

#[cfg(test)]
mod tests {
    use anyroll_backends::{DType, tensor_peak_bytes};

    use super::*;
    use crate::{DecoderConfig, LoraConfig, LoraTarget};

    #[test]
    fn memory_of_a_step_is_what_is_planned() {
        let plain = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::plain(2, 256, 4) };
        let experts = ExpertsConfig::plain(vec![false, true], 16, 4, 64);
        let mixture = DecoderConfig { experts: Some(experts), ..plain.clone() };
        let lora = LoraConfig::new(8, 6.0, LoraTarget::ALL.to_vec());
        let adapted = || Decoder::with_lora(plain.clone(), &lora, Device::Cpu).unwrap();
        let [plain_decoder, mixture] =
            [&plain, &mixture].map(|it| Decoder::new(it.clone(), Device::Cpu).unwrap());
        for decoder in [plain_decoder, mixture, adapted(), adapted().strict(true), adapted().rounding_rows()]
        {
            for (rows, kind) in [(8, Kind::Float), (96, Kind::BFloat16)] {
                let make = || {
                    let mut memory = StepMemory::new(&decoder, rows, kind, Device::Cpu).unwrap();
                    if let Some(shape) = decoder.route_shape() {
                        memory.keep_routes(shape).unwrap();
                    }
                    memory
                };
                let (_, measured) = tensor_peak_bytes(make).unwrap();
                let runs = Runs { dtype: DType::of(kind).unwrap(), on_host: true };
                let planned = StepMemory::bytes(&decoder, rows as usize, runs).unwrap();
                // libtorch's tensors take whole lines.
                assert!(planned <= measured && measured < planned + 4096, "{measured} for {planned}");
            }
        }
    }
}
