//! A decoder-only language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU; the shapes of
//! Qwen2, Qwen2.5, Qwen3 (with experts as well), Llama, Mistral, SmolLM3, OLMo 2 and 3, and Granite. Other layers are
//! expressed in operations (`expressed`).
//!
//! Its blocks are the embedding, the decoder blocks and the head. Each has its own unit of weights; a tied
//! head also reads the embedding's unit.
//!
//! Letters in shapes: N tokens of the packed batch, C hidden size, H query heads, K key/value heads, D head
//! dim, F intermediate size, V vocabulary, M targets; in mixtures E experts, J experts per token, and R = N J
//! rows.

mod block;
mod block_params;
mod cached;
mod config;
mod eight_bits;
mod embedding;
mod expert_rows;
mod experts;
mod expressed;
mod footprint;
mod gathered;
mod head;
mod hidden;
mod ilql;
pub(crate) mod kv_cache;
mod layer;
mod layer_block;
pub(crate) mod lora;
mod math;
mod multipliers;
mod recorded;
mod rope;
mod routing;
mod split;
mod spread;
mod spread_experts;
mod value;
mod work;

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

pub use anyroll_backends::ops::Activation;
pub(crate) use cached::{Chosen, Pieces, Prefill, Step};
pub use config::{DecoderConfig, ExpertNames, ExpertsConfig, NormPlaces, QkNorm, SlidingWindow};
pub use expressed::{DeepseekV3, Expressed, Pairs};
pub use footprint::PackedSize;
pub use hidden::HiddenModel;
pub use ilql::{IlqlGrad, IlqlModel, IlqlScores, OfAction, WithIlqlHeads};
pub use kv_cache::KvCache;
pub use lora::{AdapterShape, LoraConfig, LoraTarget, LoraTargets, ModulePattern, lora_scale};
pub use multipliers::Multipliers;
pub(crate) use recorded::{StepMemory, StepTables};
pub use rope::{OtherRope, RopeScaling};
pub use value::{ValueHead, ValueModel};
pub use work::BlockWork;

use crate::Error;
use crate::cut::copied;
use crate::error::check_config;
use crate::model::{
    Grads, Init, Model, Output, OutputGrad, ParamSpec, Part, Saved, Scores, ScoresGrad, Unit, Weights,
};
use crate::{Cut, PackedBatch, Peers, Result, RouteShape, Sharers};
use embedding::Embedding;
use head::Head;
use ilql::Guide;
use layer::Layer;
use layer_block::LayerBlock;
use lora::{AdapterDropout, Lora};
use math::Math;
use rope::RopeTables;
use routing::LayerRouting;
pub use split::ExpertParts;
use split::Split;
use spread_experts::SpreadUnits;

/// A decoder for one device. It holds no weights.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: DecoderConfig,
    units: Vec<Unit>,
    /// Units of each block.
    units_of: Vec<Vec<usize>>,
    embedding: Embedding,
    /// Decoder block of each layer, with its adapters off.
    plain_blocks: Vec<LayerBlock>,
    /// Decoder block of each layer with its adapters, if there are any.
    inner_blocks: Vec<LayerBlock>,
    head: Head,
    rope_tables: RopeTables,
    /// Heads of values that guide completions, if there are any.
    guide: Option<Guide>,
    /// This rank's part, if several ranks hold the matrices together.
    split: Option<Split>,
    /// Units of experts, if these are spread over ranks.
    spread: Option<SpreadUnits>,
}

impl Decoder {
    /// Lays out a decoder whose weights and batches will be on `device`.
    ///
    /// # Errors
    /// [`Error::Config`] for invalid sizes, or libtorch's error.
    pub fn new(config: DecoderConfig, device: Device) -> Result<Decoder> {
        Decoder::lay_out(config, None, device)
    }

    /// Like [`Self::new`], with adapters for matrices of the layers. All other weights are frozen.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn with_lora(config: DecoderConfig, lora: &LoraConfig, device: Device) -> Result<Decoder> {
        Decoder::lay_out(config, Some(lora), device)
    }

    fn lay_out(config: DecoderConfig, lora: Option<&LoraConfig>, device: Device) -> Result<Decoder> {
        config.validate()?;
        let layers = config.num_hidden_layers;
        let (mut units, plain_blocks, head) = layout(&config);
        let mut units_of: Vec<Vec<usize>> = (0..=layers).map(|unit| vec![unit]).collect();
        units_of.push(if config.tie_word_embeddings { vec![layers + 1, 0] } else { vec![layers + 1] });
        let mut inner_blocks = plain_blocks.clone();
        if let Some(lora) = lora {
            lora.validate(&config)?;
            units.iter_mut().for_each(|unit| unit.trainable = false);
            for (layer, adapters) in lora::layout(&config, lora, &plain_blocks).into_iter().enumerate() {
                let Some((unit, adapters)) = adapters else { continue };
                units_of[layer + 1].push(units.len());
                units.push(unit);
                inner_blocks[layer] = plain_blocks[layer].with_lora(adapters);
            }
        }
        let rope_tables = RopeTables::new(&config, device)?;
        let embedding = Embedding::new(&config);
        Ok(Decoder {
            config,
            units,
            units_of,
            embedding,
            plain_blocks,
            inner_blocks,
            head,
            rope_tables,
            guide: None,
            split: None,
            spread: None,
        })
    }

    /// Makes gradients bitwise repeatable (the default), or lets them differ between runs if that is faster.
    #[must_use]
    pub fn deterministic(mut self, deterministic: bool) -> Decoder {
        self.all_blocks().for_each(|block| block.set_deterministic(deterministic));
        self
    }

    /// Makes forward keep the logits for backward (default: off). Saves one product, for the memory of all
    /// targets' logits.
    #[must_use]
    pub fn keeping_logits(mut self, keeps_logits: bool) -> Decoder {
        self.head.keeps_logits = keeps_logits;
        self
    }

    /// Copies the decoder for weights and batches on `device`.
    ///
    /// # Errors
    /// libtorch's error (out of memory).
    pub fn on(&self, device: Device) -> Result<Decoder> {
        Ok(Decoder { rope_tables: self.rope_tables.on(device)?, ..self.clone() })
    }

    /// Freezes the units that `is_frozen` accepts.
    #[must_use]
    pub fn freeze(mut self, is_frozen: impl Fn(&Unit) -> bool) -> Decoder {
        for unit in &mut self.units {
            unit.trainable &= !is_frozen(unit);
        }
        self
    }

    /// Returns the shape.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns true if the adapters have dropout in training. A training batch then needs
    /// [`PackedBatch::with_dropout`].
    pub fn drops(&self) -> bool {
        self.inner_blocks.iter().any(LayerBlock::drops)
    }

    /// If `strict`, makes a token's results bitwise equal in training, scoring and generation, in any batch;
    /// otherwise they agree up to the order of sums. Strict passes fail if
    /// [`anyroll_backends::ops::exist_by_rows`] is false. Layers that libtorch differentiates have one order of sums,
    /// which depends on the number of rows.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Decoder {
        let math = if strict { Math::ByRows } else { Math::Fast };
        self.all_blocks().for_each(|block| block.set_math(math));
        self.head.math = math;
        self
    }

    /// Rounds the rows that the layers multiply with matrices [in 8 bits](Self::in_eight_bits) to 8 bits, too: for sampling.
    #[must_use]
    pub fn rounding_rows(mut self) -> Decoder {
        self.all_blocks().for_each(|block| block.set_math(Math::EightBits));
        self
    }

    /// Returns true if heads of values guide completions.
    pub(crate) fn is_guided(&self) -> bool {
        self.guide.is_some()
    }

    /// Returns true if several ranks hold the decoder together.
    pub(crate) fn is_split(&self) -> bool {
        self.split.is_some()
    }

    /// Returns true if [`Self::strict`] is on.
    pub(crate) fn is_strict(&self) -> bool {
        self.head.math == Math::ByRows
    }

    /// Computes results of the weights alone once, for many passes that follow. Returns the tensors of every
    /// unit. See [`Weights::prepared`].
    pub(crate) fn prepare(&self, mut weights: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>> {
        for (own, adapters, lora) in self.adapted() {
            let factors = lora.all_factors(&Weights::new(&[&weights[own], &weights[adapters]]))?;
            for (magnitude, factor) in factors {
                weights[adapters][magnitude] = factor;
            }
        }
        Ok(weights)
    }

    /// Returns the decoder without adapters, which runs on the weights that [`Self::merge`] returns.
    pub fn merged(&self) -> Decoder {
        let layers = self.config.num_hidden_layers;
        // Units of adapters come after all others.
        let own = layers + 2;
        let without = |units: &Vec<usize>| units.iter().copied().filter(|&unit| unit < own).collect();
        Decoder {
            units: self.units[..own].to_vec(),
            units_of: self.units_of.iter().map(without).collect(),
            inner_blocks: self.plain_blocks.clone(),
            guide: None,
            spread: None,
            ..self.clone()
        }
    }

    /// Returns true if [`Self::merge`] changes the parameter `param` of the unit `unit`.
    pub fn merges_into(&self, unit: usize, param: usize) -> bool {
        let layer = unit.checked_sub(1).and_then(|layer| self.inner_blocks.get(layer));
        let lora = layer.and_then(LayerBlock::lora);
        lora.is_some_and(|lora| lora.matrices().any(|matrix| matrix == param))
    }

    /// Merges the adapters into their matrices, in place, and returns the weights without adapters, for
    /// [`Self::merged`]. `weights` are the whole tensors of every unit; nothing else may use those that
    /// [`Self::merges_into`] names. Sums are fp32 and rounded once, so 16-bit weights lose the part of a
    /// product below their rounding step.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    pub fn merge(&self, mut weights: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>> {
        for (own, adapters, lora) in self.adapted() {
            lora.merge_(&Weights::new(&[&weights[own], &weights[adapters]]))?;
        }
        weights.truncate(self.config.num_hidden_layers + 2);
        Ok(weights)
    }

    /// Returns the unit of adapters that [`Self::merge_unit`] merges into the unit `unit`, if it has one.
    pub fn adapters_of(&self, unit: usize) -> Option<usize> {
        self.adapted().find_map(|(own, adapters, _)| (own == unit).then_some(adapters))
    }

    /// Returns the weights of the unit `unit` with its `adapters`, the weights of [`Self::adapters_of`], merged into copies of
    /// their matrices. Otherwise like [`Self::merge`].
    ///
    /// # Errors
    /// libtorch's (out of memory).
    pub fn merge_unit(&self, unit: usize, weights: &[Tensor], adapters: &[Tensor]) -> Result<Vec<Tensor>> {
        let own = weights.iter().enumerate().map(|(param, tensor)| match self.merges_into(unit, param) {
            true => copied(tensor),
            false => Ok(tensor.shallow_clone()),
        });
        let own = own.collect::<Result<Vec<_>>>()?;
        let (_, _, lora) = self.adapted().find(|it| it.0 == unit).expect("a layer with adapters");
        lora.merge_(&Weights::new(&[&own, adapters]))?;
        Ok(own)
    }

    /// Lists the layers with adapters: the layer's unit, the adapters' unit, and their indices in it.
    fn adapted(&self) -> impl Iterator<Item = (usize, usize, &Lora)> {
        let layers = self.units_of[1..].iter().zip(&self.inner_blocks);
        layers.filter_map(|(units, block)| match (units.as_slice(), block.lora()) {
            (&[own, adapters], Some(lora)) => Some((own, adapters, lora)),
            _ => None,
        })
    }

    /// Returns true if experts of some layer have adapters.
    fn adapts_experts(&self) -> bool {
        self.inner_blocks.iter().filter_map(LayerBlock::lora).any(|lora| lora.first_of_experts().is_some())
    }

    fn all_blocks(&mut self) -> impl Iterator<Item = &mut LayerBlock> {
        self.plain_blocks.iter_mut().chain(&mut self.inner_blocks)
    }

    fn block_for(&self, block: usize, batch: &PackedBatch) -> &LayerBlock {
        if batch.adapters { &self.inner_blocks[block - 1] } else { &self.plain_blocks[block - 1] }
    }

    /// Returns the inputs of an inner block that depend on the batch and the layer.
    fn layer<'a>(&self, block: usize, batch: &'a PackedBatch) -> Result<Layer<'a>> {
        let layer = block - 1;
        Ok(Layer {
            packing: &batch.packing,
            slice: batch.slice.as_ref(),
            rope_table: self.rope_tables.of(layer),
            window: self.config.window_of(layer),
            drops: drops_of(batch),
            routing: self.routing_of(layer, batch)?,
        })
    }

    /// Returns the routing of a layer's experts for a batch.
    fn routing_of<'a>(&self, layer: usize, batch: &'a PackedBatch) -> Result<LayerRouting<'a>> {
        if self.config.experts_of(layer).is_none() {
            return Ok(LayerRouting::default());
        }
        let before = (0..layer).filter(|&layer| self.config.experts_of(layer).is_some()).count();
        LayerRouting::new(before, batch.routes.as_ref(), batch.router.as_ref())
    }

    /// Returns the sizes of a token's routes; `None` if no layer has experts that tell their choice.
    pub fn route_shape(&self) -> Option<RouteShape> {
        let experts = self.config.experts.as_ref().filter(|_| self.config.expressed.is_none())?;
        Some(RouteShape {
            layers: experts.layers.iter().filter(|&&has_experts| has_experts).count(),
            per_token: experts.num_experts_per_tok as usize,
            experts: experts.num_experts,
        })
    }

    /// Forward of a block below the head, for a model that has other scores.
    fn forward_below_head<S>(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &PackedBatch,
        save: bool,
    ) -> Result<(Output<S>, Saved)> {
        match self.forward(block, weights, x, batch, save)? {
            (Output::Hidden(hidden), saved) => Ok((Output::Hidden(hidden), saved)),
            (Output::Scores(_), _) => unreachable!("only the last block has scores"),
        }
    }

    /// Returns true if the block is neither the embedding nor the head.
    fn is_inner(&self, block: usize) -> bool {
        (1..=self.config.num_hidden_layers).contains(&block)
    }
}

/// Returns the dropout of adapters in a batch, if it has any.
fn drops_of(batch: &PackedBatch) -> Option<AdapterDropout<'_>> {
    batch.row_keys.as_ref().map(|keys| AdapterDropout { keys })
}

impl Model for Decoder {
    type Batch = PackedBatch;
    type Scores = Scores;
    type ScoresGrad = ScoresGrad;

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn blocks(&self) -> usize {
        self.config.num_hidden_layers + 2
    }

    fn units_of(&self, block: usize) -> &[usize] {
        &self.units_of[block]
    }

    fn forward(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &PackedBatch,
        save: bool,
    ) -> Result<(Output<Scores>, Saved)> {
        if block == 0 {
            self.check_length(batch.packing.max_len())?;
            self.check_tokens(batch.extremes.into_iter().flatten())?;
            let hidden = self.embed(weights, &batch.tokens)?;
            return Ok((Output::Hidden(hidden), Saved::default()));
        }
        let x = x.expect("only the first block has no input");
        if block + 1 == self.blocks() {
            let (scores, saved) = self.head.forward(weights, x, batch, save, self.split.as_ref())?;
            return Ok((Output::Scores(scores), saved));
        }
        let layer = self.layer(block, batch)?;
        let (hidden, saved) = self.block_for(block, batch).forward(weights, x, &layer, save)?;
        Ok((Output::Hidden(hidden), saved))
    }

    fn layer_matrices(&self, unit: usize) -> Vec<usize> {
        if self.is_of_experts(unit) {
            return (0..self.units[unit].params.len()).collect();
        }
        let Some([qkv, o, gate_up, down]) = self.matrices_of(unit) else { return Vec::new() };
        // Spread experts have a unit of their own.
        match self.spread.is_some() && self.config.experts_of(unit - 1).is_some() {
            true => vec![qkv, o],
            false => vec![qkv, o, gate_up, down],
        }
    }

    fn thin(&self, block: usize, saved: Saved) -> Saved {
        if self.is_inner(block) { self.plain_blocks[block - 1].thin(saved) } else { saved }
    }

    fn refill(&self, block: usize, weights: &Weights, saved: Saved, batch: &PackedBatch) -> Result<Saved> {
        if !self.is_inner(block) {
            return Ok(saved);
        }
        self.block_for(block, batch).refill(weights, saved, drops_of(batch))
    }

    fn backward(
        &self,
        block: usize,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        grad_output: OutputGrad<ScoresGrad>,
        batch: &PackedBatch,
    ) -> Result<Option<Tensor>> {
        match grad_output {
            OutputGrad::Hidden(dy) if block == 0 => {
                match &self.split {
                    None => self.embedding.backward(grads, &dy, &batch.tokens)?,
                    Some(split) => split.embed_backward(self.embedding, grads, &dy, &batch.tokens)?,
                }
                Ok(None)
            }
            OutputGrad::Hidden(dy) => {
                let layer = self.layer(block, batch)?;
                Ok(Some(self.block_for(block, batch).backward(weights, grads, saved, dy, &layer)?))
            }
            OutputGrad::Scores(grad) => {
                let (split, grad) = (self.split.as_ref(), (&grad, None));
                Ok(Some(self.head.backward(weights, grads, saved, grad, batch, split)?))
            }
        }
    }

    fn split_over(&self, peers: &Arc<dyn Peers>) -> Result<Decoder> {
        check_config(!self.adapts_experts(), "lora.targets", || {
            "names matrices of experts, whose adapters are not trained in parts".to_owned()
        })?;
        self.split(peers.clone(), ExpertParts::Columns)
    }

    fn spread_experts(&self, peers: &Arc<dyn Peers>) -> Result<Option<Decoder>> {
        self.spread(peers)
    }

    fn has_experts(&self, unit: usize) -> bool {
        let of_adapters = |(_, adapters, lora): (usize, usize, &Lora)| {
            adapters == unit && lora.first_of_experts().is_some()
        };
        match self.is_inner(unit) {
            true => self.config.experts_of(unit - 1).is_some(),
            false => self.adapted().any(of_adapters),
        }
    }

    fn whole_place(&self, unit: usize, param: usize) -> (usize, usize) {
        self.spread.as_ref().map_or((unit, param), |spread| spread.whole_place(unit, param))
    }

    fn is_of_experts(&self, unit: usize) -> bool {
        self.spread.as_ref().is_some_and(|spread| spread.is_of_experts(unit))
    }

    fn cut_on(&self, rank: usize, unit: usize, param: usize) -> Cut {
        match (&self.split, &self.spread) {
            (Some(split), _) => split.cut_on(rank, unit, param),
            (None, Some(spread)) => spread.cut_on(rank, unit, param),
            (None, None) => Cut::Whole,
        }
    }

    fn cut(&self, batch: &PackedBatch, sharers: &Sharers) -> Result<Vec<PackedBatch>> {
        let Some(rows) = &sharers.rows else { return batch.cut(sharers, false) };
        self.config.check_slices()?;
        // Where a rank attends for its own rows alone, not all attend to as many.
        batch.cut(sharers, !self.config.shares_heads(rows.count()))
    }

    fn join_scores(&self, scores: Scores, part: &PackedBatch) -> Result<Scores> {
        let Scores { logprobs, entropy, .. } = scores;
        let [logprobs, entropy] = part.join([&logprobs, &entropy])?;
        Ok(Scores { logprobs, entropy, divergence: None })
    }

    fn cut_grad(&self, grad: Option<ScoresGrad>, part: &PackedBatch) -> Result<ScoresGrad> {
        let grad = grad.map(|ScoresGrad { logprobs, entropy, .. }| {
            let entropy = entropy.map_or_else(|| logprobs.f_zeros_like(), Ok)?;
            Ok::<_, Error>([logprobs, entropy])
        });
        let [logprobs, entropy] = part.cut_numbers(grad.transpose()?)?;
        Ok(ScoresGrad { logprobs, entropy: Some(entropy), divergence: None })
    }
}

/// Returns the units of a decoder, from the embedding's to the head's.
pub(crate) fn units(config: &DecoderConfig) -> Vec<Unit> {
    layout(config).0
}

/// Returns the units of adapters, one for each layer that has some.
pub(crate) fn lora_units(config: &DecoderConfig, lora: &LoraConfig) -> Vec<Unit> {
    let blocks = layout(config).1;
    lora::layout(config, lora, &blocks).into_iter().flatten().map(|(unit, _)| unit).collect()
}

fn layout(config: &DecoderConfig) -> (Vec<Unit>, Vec<LayerBlock>, Head) {
    let mut units = vec![embedding::unit(config)];
    let (mut block_units, blocks) = layer_block::layout(config);
    units.append(&mut block_units);
    let (head_unit, head) = head::layout(config);
    units.push(head_unit);
    (units, blocks, head)
}

/// Values in fp32 at least.
fn wide(values: &Tensor) -> Result<Tensor> {
    let kind = if values.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    Ok(values.f_to_kind(kind)?)
}

/// Returns the spec of a norm's weight.
fn norm_spec(name: String, size: i64, offset: f32) -> ParamSpec {
    let parts = vec![Part { name: name.clone(), rows: size }];
    ParamSpec { name, shape: vec![size], parts, init: Init::Ones, decay: false, offset }
}

/// Returns the spec of a matrix `[rows, columns]` with one name.
fn matrix_spec(name: String, rows: i64, columns: i64, std: f64) -> ParamSpec {
    let parts = vec![Part { name: name.clone(), rows }];
    ParamSpec {
        name,
        shape: vec![rows, columns],
        parts,
        init: Init::Normal { std },
        decay: true,
        offset: 0.0,
    }
}
