//! Memory of a decoder's passes, in the order in which its code creates and drops tensors.

use anyroll_backends::ops::padded_rows;
use num_integer::Integer;

use super::{
    Decoder, ExpertsConfig, NormPlaces, QkNorm, head,
    layer_block::LayerBlock,
    lora::{Lora, Projection},
    split::Split,
    spread_experts::SpreadUnits,
};
use crate::batch::{
    self,
    padding::{self, Padding},
};
use crate::footprint::{BlockBytes, Footprint, Runs};
use crate::model::{Model, Unit};

const F32: usize = size_of::<f32>();
/// Peak number of fp32 tensors of a chunk's logits that a divergence creates; its gradient has the most.
const MADE_OF_LOGITS: usize = 7;

/// Memory of the second half of a layer.
struct MlpBytes {
    /// Saved memory that thinning drops, and saved memory that remains.
    gate_up: usize,
    choice: usize,
    /// Like in [`BlockBytes`], in addition to earlier memory.
    forward: usize,
    scoring: usize,
    backward: usize,
}

/// Size of a [`crate::PackedBatch`], or of a rank's part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedSize {
    /// Number of sequences.
    pub sequences: usize,
    /// Rows of the longest sequence.
    pub longest: usize,
    /// Rows N of all sequences; shared ones count once.
    pub tokens: usize,
    /// Rows that attention reads if it needs copies of shared ones: one for each of their tokens.
    pub copies: usize,
    /// Targets M of all sequences.
    pub targets: usize,
    /// True if the batch has a teacher.
    pub is_taught: bool,
    /// Number of ranks that run the batch together. Rows and targets are those of one rank.
    pub ranks: usize,
}

impl PackedSize {
    /// Returns the size of `sequences` sequences of equal length: `prompt` tokens, then `completion` tokens,
    /// of which the last is no input.
    pub fn uniform(sequences: usize, prompt: usize, completion: usize) -> PackedSize {
        let longest = (prompt + completion).saturating_sub(1);
        let tokens = sequences * longest;
        let targets = sequences * completion;
        PackedSize { sequences, longest, tokens, copies: tokens, targets, is_taught: false, ranks: 1 }
    }

    /// Returns the largest part of a rank if `ranks` ranks run the batch together.
    #[must_use]
    pub fn over(self, ranks: usize) -> PackedSize {
        let (tokens, copies) = (self.tokens.div_ceil(ranks), self.copies.div_ceil(ranks));
        // Consecutive rows may all have targets, and rows that sequences share have several.
        let targets = self.targets.min(tokens + self.copies - self.tokens);
        PackedSize { tokens, copies, targets, ranks, ..self }
    }

    /// Returns the size with the padding that a batch of one rank has off the host.
    #[must_use]
    pub(crate) fn padded(self, runs: Runs) -> PackedSize {
        if runs.on_host || self.ranks > 1 {
            return self;
        }
        let tokens = Padding::DEVICE.rows(self.tokens);
        let rows = tokens - self.tokens;
        PackedSize {
            sequences: self.sequences + padding::lengths(rows, self.longest).count(),
            tokens,
            copies: self.copies + rows,
            targets: Padding::DEVICE.rows(self.targets),
            ..self
        }
    }

    /// Returns the size with at most `tokens` tokens, of as many of the sequences as can be.
    #[must_use]
    pub fn within(self, tokens: usize) -> PackedSize {
        PackedSize {
            sequences: self.sequences.min(tokens),
            tokens: self.tokens.min(tokens),
            copies: self.copies.min(tokens),
            targets: self.targets.min(tokens),
            ..self
        }
    }

    /// Returns the largest size of `sequences` consecutive sequences, out of groups that share their prompt,
    /// if the cut ignores groups. They are packed by [`crate::PackedBatch::sharing`].
    pub fn of_groups(sequences: usize, group: usize, prompt: usize, completion: usize) -> PackedSize {
        let apart = PackedSize::uniform(sequences, prompt, completion);
        // Largest possible offset of the first sequence in its group.
        let into = group - sequences.gcd(&group);
        let prompts = (into + sequences).div_ceil(group).min(sequences);
        let common = prompt.min(apart.longest);
        let tokens = apart.tokens - (sequences - prompts) * common;
        if batch::is_worth_sharing(tokens, apart.tokens) { PackedSize { tokens, ..apart } } else { apart }
    }
}

/// Returns the memory of sorting indices. Off the host, they are sorted before their rows are summed: values
/// and order, and the library's copies of both.
pub(super) fn sorting_bytes(indices: usize, runs: Runs) -> usize {
    if runs.on_host { 0 } else { 4 * indices * size_of::<i64>() }
}

impl Footprint for Decoder {
    type Size = PackedSize;

    fn block_bytes(&self, block: usize, size: &PackedSize, runs: Runs, _: bool) -> BlockBytes {
        let size = size.padded(runs);
        match block {
            0 => self.embedding_bytes(&size, runs),
            _ if block + 1 == self.blocks() => self.head_bytes(&size, runs),
            _ => self.layer_bytes(block - 1, &size, runs),
        }
    }
}

impl Decoder {
    /// Returns the peak memory of sampling: a pass over prompts with `prompt_tokens` tokens in total, or the
    /// logits of a step of `rows`.
    pub fn sampling_bytes(&self, rows: usize, prompt_tokens: usize, longest: usize, runs: Runs) -> usize {
        let (tokens, copies) = (prompt_tokens, prompt_tokens);
        let size =
            PackedSize { sequences: 1, longest, tokens, copies, targets: 0, is_taught: false, ranks: 1 };
        let size = size.padded(runs);
        // In addition to the block's own: copies of the cached keys and values.
        let kv = 2 * self.config.num_key_value_heads as usize * self.config.head_dim as usize;
        let layers = (0..self.inner_blocks.len()).map(|layer| self.layer_bytes(layer, &size, runs));
        let layer = layers.map(|layer| layer.input + layer.scoring).max().unwrap_or(0);
        let prefill = layer + prompt_tokens * kv * runs.size();
        // The product's output, its fp32 copy, and the scaled one.
        let logits = padded_rows(rows) * self.config.vocab_size as usize;
        prefill.max(logits * (runs.size() + 2 * F32))
    }

    fn embedding_bytes(&self, size: &PackedSize, runs: Runs) -> BlockBytes {
        let output = size.tokens * self.config.hidden_size as usize * runs.size();
        let multiplied = if self.embedding.multiplies() { output } else { 0 };
        let backward = multiplied + sorting_bytes(size.tokens, runs);
        BlockBytes {
            forward: output,
            scoring: output,
            output_grad: output,
            backward,
            ..BlockBytes::default()
        }
    }

    fn layer_bytes(&self, layer: usize, size: &PackedSize, runs: Runs) -> BlockBytes {
        let adapted = &self.inner_blocks[layer];
        let (config, block) = match adapted {
            LayerBlock::Written(block) => (&self.config, &**block),
            LayerBlock::Expressed(block) => {
                let units: Vec<&Unit> =
                    self.units_of[layer + 1].iter().map(|&unit| &self.units[unit]).collect();
                return block.block_bytes(&self.config, &units, self.attention_bytes(size, runs), size, runs);
            }
        };
        let [heads, kv_heads, dim] =
            [config.num_attention_heads, config.num_key_value_heads, config.head_dim].map(|it| it as usize);
        let rows = |width: usize| size.tokens * width * runs.size();
        let floats = |width: usize| size.tokens * width * F32;
        let (x, mlp) = (rows(config.hidden_size as usize), rows(config.intermediate_size as usize));
        let (q, kv) = (rows(heads * dim), rows(kv_heads * dim));
        let qkv = q + 2 * kv;
        // Inputs of attention over all rows, if ranks that run the batch together share the heads: each has one key head at
        // least.
        let (is_split, shares_heads) = (size.ranks > 1, config.shares_heads(size.ranks));
        let inputs = if is_split { q + 2 * rows(kv_heads.max(size.ranks) * dim) } else { 0 };
        let by_heads = is_split && shares_heads;
        let normed = if by_heads { inputs } else { q + kv };
        let qk_norm = match config.qk_norm {
            Some(QkNorm::PerHead) => normed + floats(heads + kv_heads),
            Some(QkNorm::Together) => normed + floats(2),
            None => 0,
        };
        let saved_qkv = if by_heads && config.qk_norm.is_none() { inputs } else { qkv };
        // Sent and received rows exist in addition. Without shared heads these are keys and values of all rows, and in backward
        // their gradients, too. Attention reads them with a row for each token of the rank's two pieces, which are a quarter
        // more at most for one sequence on two ranks or more. The output is copied behind its padding.
        let of_all = 2 * kv * size.ranks;
        let (travels, travels_back) = match (is_split, shares_heads) {
            (false, _) => (0, 0),
            (true, true) => (3 * inputs, (6 * q).max(2 * q + 3 * inputs)),
            (true, false) => (2 * kv + 5 * of_all / 2 + q, 2 * kv + 9 * of_all / 2),
        };
        // Input of a branch norm, or output of the norm before the MLP.
        let (of_branch, h2) = match config.norms {
            NormPlaces::Before => (0, x),
            NormPlaces::After => (x + floats(1), 0),
            NormPlaces::Both => (x + floats(1), x),
        };
        let lse = floats(heads);
        // Keys and values with a row for each token, if sequences share some.
        let copied = if size.copies > size.tokens { 2 * kv / size.tokens * size.copies } else { 0 };
        // Rows between an adapter's two products: the widest adapter, and all adapters of a projection.
        let between = rows(adapted.ranks().flatten().max().unwrap_or(0));
        let all_between = rows(adapted.ranks().map(|ranks| ranks.iter().sum()).max().unwrap_or(0));
        // With magnitudes, a matrix and its product.
        let dora = block.lora.as_ref().is_some_and(Lora::is_dora);
        // Widest output with one adapter.
        let (of_qkv, of_mlp) = match config.fused_projections {
            true => (heads + 2 * kv_heads, 2 * config.intermediate_size as usize),
            false => (heads, config.intermediate_size as usize),
        };
        let widest = config.hidden_size as usize * of_mlp.max(of_qkv * dim);
        let sum = if dora { widest * runs.size() } else { 0 };
        // With dropout, an adapter's view of its input of this size; in backward, its part of the gradient
        // first.
        let dropped = |input: usize| if adapted.drops() { input } else { 0 };

        // x, rstd, qkv, attended, lse, x2, rstd2, gate_up; with qk-norm q, k and their deviations. Norms on
        // branch outputs save their deviations in addition to their inputs.
        let rstd = if h2 > 0 { floats(1) } else { 0 };
        let before_mlp = x + rstd + saved_qkv + q + lse + x + rstd + qk_norm + 2 * of_branch;
        let gate_up = 2 * mlp;
        let seen = 2 * between + dropped(mlp);
        let with_adapters = match (dora, adapted.drops()) {
            (false, _) => seen,
            // The block's output is no longer computed in place.
            (true, false) => x.max(seen + sum),
            (true, true) => seen + sum.max(2 * x),
        };
        // Before the MLP's activation, with magnitudes and dropout: an adapter's input, and its columns
        // twice.
        let in_gate_up = if dora { 2 * between + dropped(x) + sum.max(2 * dropped(rows(of_mlp))) } else { 0 };
        // Memory of adapters at a projection. With magnitudes: the gradient before them and, for their own
        // gradient, a column's products.
        let at_projection = |output: usize, input: usize, column: usize| match dora {
            false => 2 * dropped(input),
            true if adapted.drops() => output + sum.max(2 * input + column),
            true => output + sum.max(column),
        };
        // For norms on branch outputs: the gradients of a norm's output and of its input; the latter reuses
        // the input's memory.
        let in_norm = if of_branch == 0 { 0 } else { 2 * x };
        // If branches are multiplied, their output and the product's gradient need their own memory.
        let multiplied = if block.residual_multiplier == 1.0 { 0 } else { x };
        // Without experts, the outputs of the second norm, of SwiGLU and of the block come last.
        let of_mixture = config.experts_of(layer).map(|it| self.mixture_bytes(it, layer, size, runs));
        let mlp_bytes = of_mixture.unwrap_or(MlpBytes {
            gate_up,
            choice: 0,
            forward: gate_up + h2 + (mlp + x + with_adapters).max(in_gate_up),
            scoring: gate_up + h2 + mlp + 2 * between + if dora { x + sum } else { multiplied },
            backward: (mlp + at_projection(x, mlp, x) + multiplied)
                .max(mlp + h2 + at_projection(gate_up, x, rows(of_mlp)))
                .max(in_norm),
        });
        let saved = before_mlp + mlp_bytes.gate_up + mlp_bytes.choice;
        let (scores, scores_backward) = self.attention_bytes(size, runs);
        // While scores exist, nothing of the second half does.
        let attending = rstd + qkv + qk_norm + q + lse + copied + scores + travels;
        // The MLP's memory is freed. Attention has its output's gradient, the gradients of the projection and
        // of normed heads, and the library's workspace.
        let qk_norm_backward = if config.qk_norm.is_some() { q + kv } else { 0 };
        let in_attention = q + qkv + qk_norm_backward + 2 * copied + scores_backward;
        let in_attention = in_attention + travels_back;
        let in_attention =
            in_attention.max(q + at_projection(x, q, x) + of_branch + multiplied).max(in_norm + of_branch);
        // After attention, its inputs are freed, and the first norm's output is computed.
        let after = (qkv + x + at_projection(qkv, x, rows(of_qkv * dim)))
            .saturating_sub(q + saved_qkv + lse + qk_norm);
        let in_mlp = mlp_bytes.gate_up + mlp_bytes.choice + 2 * of_branch;
        let attention_backward = in_attention.max(after).saturating_sub(in_mlp);
        // What ranks that hold the layer together send to each other, and do not add in place.
        let sent = if self.split.is_some() { 2 * x } else { 0 };
        BlockBytes {
            input: x,
            saved,
            thinned: saved - mlp_bytes.gate_up,
            forward: (before_mlp - x + mlp_bytes.forward + sent).max(attending),
            // The residual stream of an MLP stays in place, or a norm's input exists next to its output.
            // Nothing is dropped.
            scoring: (before_mlp - x + mlp_bytes.scoring + sent).max(attending),
            output_grad: x,
            backward: mlp_bytes.backward.max(attention_backward) + all_between + 2 * between + sent,
        }
    }

    /// Returns the memory of a layer's experts, instead of an MLP's.
    fn mixture_bytes(
        &self,
        experts: &ExpertsConfig,
        layer: usize,
        size: &PackedSize,
        runs: Runs,
    ) -> MlpBytes {
        const INDEX: usize = size_of::<i64>();
        let [count, per_token, width, hidden] = [
            experts.num_experts,
            experts.num_experts_per_tok,
            experts.moe_intermediate_size,
            self.config.hidden_size,
        ]
        .map(|it| it as usize);
        let (tokens, rows) = (size.tokens, size.tokens * per_token);
        let x = tokens * hidden * runs.size();
        let (spread, activated) = (rows * hidden * runs.size(), rows * width * runs.size());
        let (logits, probs) = (tokens * count * runs.size(), tokens * count * F32);
        let (gate_up, choice) = (2 * activated, probs + rows * INDEX);
        // Token and place of each row; probabilities and rows are sorted with their indices.
        let dispatch = 2 * rows * INDEX + count * size_of::<i32>();
        let dispatch = if self.spread.is_some() { 2 * dispatch } else { dispatch };
        let sorting = (logits + 2 * probs + tokens * count * INDEX).max(choice + 2 * dispatch);
        // The sum in fp32, the addend, and in 16 bits the previous value.
        let narrow = if runs.size() == F32 { 0 } else { x };
        let adding = 2 * tokens * hidden * F32 + narrow;
        // Rows on their way between ranks are there twice, as sent and as received. Each rank's experts have as many rows as its
        // tokens on average.
        let sent = if self.spread.is_some() { spread } else { 0 };
        // Between the products of experts' adapters: of all of a projection, and beside one product.
        let lora = self.inner_blocks[layer].lora();
        let ranks = |projection| {
            lora.filter(|lora| lora.is_of_experts(projection)).map_or(0, |lora| lora.rank_sum(projection))
        };
        let [between, between_down] =
            [Projection::GateUp, Projection::Down].map(|it| ranks(it) * rows * runs.size());
        let beside = |between: usize, product: usize| if between > 0 { product } else { 0 };
        let in_products = [
            x + spread + sent,
            spread + gate_up + between + beside(between, activated),
            gate_up + activated + spread + between_down + beside(between_down, spread),
            gate_up + spread + adding.max(sent),
        ];
        let forward = in_products.into_iter().max().unwrap_or(0) + choice + dispatch + rows * F32;
        let forward = forward.max(x + sorting);
        // If libtorch computes the gradient of all matrices in one operation, it returns a new tensor.
        let is_trained = self.units[layer + 1].trainable && !runs.on_host && runs.size() != F32;
        let own = count / self.spread.as_ref().map_or(1, SpreadUnits::ranks);
        let gradient = |matrices: usize| {
            if is_trained { matrices * own * width * hidden * runs.size() } else { 0 }
        };
        let of_rows = logits + rows * F32;
        let backward = [
            spread + sent.max(3 * activated) + between_down,
            spread + activated + of_rows + gradient(1) + 2 * between_down,
            spread + of_rows + sent.max(x + adding).max(beside(between, spread)) + between,
            x + of_rows + spread + sent.max(gradient(2)) + 2 * between,
        ];
        let backward = dispatch + backward.into_iter().max().unwrap_or(0);
        MlpBytes { gate_up, choice, forward, scoring: forward, backward }
    }

    /// Returns the memory of attention in addition to its arguments and results, forward and backward.
    fn attention_bytes(&self, size: &PackedSize, runs: Runs) -> (usize, usize) {
        let (heads, dim) = (self.config.num_attention_heads as usize, self.config.head_dim as usize);
        if runs.on_host {
            return (0, 0);
        }
        let shares_heads = self.config.shares_heads(size.ranks);
        if runs.size() == F32 {
            // A composition over all scores of a padded batch: three tensors of that size forward, five
            // backward.
            let heads = if shares_heads { heads / size.ranks } else { heads };
            let scores = size.sequences * heads * size.longest * size.longest * F32;
            return (3 * scores, 5 * scores);
        }
        // FlashAttention-2: sums of the queries' gradients and one number per query in fp32. If several query
        // heads share a key head, also gradients of keys and values per query head.
        let sums = size.tokens * heads * (dim + 1) * F32;
        let is_grouped = self.config.num_key_value_heads != self.config.num_attention_heads;
        let keys = if shares_heads { size.copies } else { size.copies * size.ranks };
        (0, sums + if is_grouped { 2 * keys * heads * dim * runs.size() } else { 0 })
    }

    fn head_bytes(&self, size: &PackedSize, runs: Runs) -> BlockBytes {
        let hidden = self.config.hidden_size as usize;
        let (rows, all) = (size.targets * hidden * runs.size(), size.tokens * hidden * runs.size());
        let per_target = size.targets * F32;
        let vocab = self.split.as_ref().map_or(self.config.vocab_size, Split::vocabulary_rows) as usize;
        let logits_of = |targets: usize| targets * vocab * runs.size();
        let logits = match size.is_taught {
            false => logits_of(size.targets.min(head::chunk_rows(vocab, runs.size()))),
            // The teacher's logits, too, assumed to be as many, and the fp32 log-probs of both with their
            // intermediate results.
            true => {
                let rows = size.targets.min(head::taught_chunk_rows(vocab, runs.size()));
                2 * logits_of(rows) + MADE_OF_LOGITS * rows * vocab * F32
            }
        };
        let (kept, again) = if self.head.keeps_logits { (logits_of(size.targets), 0) } else { (0, logits) };
        // Numbers of all targets, as ranks that run the batch together send, receive and order them.
        let joined = if size.ranks > 1 { 3 * (size.ranks + 2) * size.ranks * per_target } else { 0 };
        // The rows of targets, their norm and deviations; log-probs, entropies and sums; logits in addition.
        let forward = 2 * rows + per_target + 3 * per_target + joined;
        let saved = 2 * rows + 3 * per_target + kept;
        BlockBytes {
            input: all,
            saved,
            thinned: saved,
            forward: forward + logits.max(kept),
            scoring: forward + logits,
            // Gradients of log-probs and entropies, in addition to these.
            output_grad: 4 * per_target + joined,
            // Kept logits are freed after the products.
            backward: rows + again.max((rows + all + sorting_bytes(size.targets, runs)).saturating_sub(kept)),
        }
    }
}
