//! The memory of a decoder's passes, in the order in which its code makes and drops tensors.

use anyroll_backends::ops::padded_rows;

use super::{Decoder, ExpertsConfig, NormPlaces, QkNorm, head, lora::Lora};
use crate::batch;
use crate::footprint::{BlockBytes, Footprint, Runs};
use crate::model::Model;

const F32: usize = size_of::<f32>();
/// Tensors of a chunk's logits in fp32 that a divergence makes of them at a time, of the most that its gradient holds.
const MADE_OF_LOGITS: usize = 7;

/// The memory of the second half of a layer.
struct MlpBytes {
    /// What it saves that thinning drops, and what stays.
    gate_up: usize,
    choice: usize,
    /// As in [`BlockBytes`], beside what was there before.
    forward: usize,
    scoring: usize,
    backward: usize,
}

/// The size of a [`crate::PackedBatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedSize {
    /// How many sequences.
    pub sequences: usize,
    /// Rows of the longest one.
    pub longest: usize,
    /// Rows N of all; those that sequences have in common count once.
    pub tokens: usize,
    /// Rows that attention sees where it needs copies of those that sequences have in common: one for each of their tokens.
    pub copies: usize,
    /// Targets M of all.
    pub targets: usize,
    /// Whether a teacher is beside them.
    pub is_taught: bool,
}

impl PackedSize {
    /// So many sequences of equal length: `prompt` tokens, then `completion` ones, of which the last is no input.
    pub fn uniform(sequences: usize, prompt: usize, completion: usize) -> PackedSize {
        let longest = (prompt + completion).saturating_sub(1);
        let tokens = sequences * longest;
        let targets = sequences * completion;
        PackedSize { sequences, longest, tokens, copies: tokens, targets, is_taught: false }
    }

    /// The most that so many sequences in a row can be of groups that have their prompt in common and are cut without regard
    /// to them, packed by [`crate::PackedBatch::sharing`].
    pub fn of_groups(sequences: usize, group: usize, prompt: usize, completion: usize) -> PackedSize {
        let apart = PackedSize::uniform(sequences, prompt, completion);
        // The first one is at the latest so far into its group.
        let into = group - gcd(sequences, group);
        let prompts = (into + sequences).div_ceil(group).min(sequences);
        let common = prompt.min(apart.longest);
        let tokens = apart.tokens - (sequences - prompts) * common;
        if batch::is_worth_sharing(tokens, apart.tokens) { PackedSize { tokens, ..apart } } else { apart }
    }
}

/// Off the host, indices are sorted before their rows are summed: values and order, and the library's own copies of both.
pub(super) fn sorting_bytes(indices: usize, runs: Runs) -> usize {
    if runs.on_host { 0 } else { 4 * indices * size_of::<i64>() }
}

/// Greatest common divisor, of numbers above 0.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Footprint for Decoder {
    type Size = PackedSize;

    fn block_bytes(&self, block: usize, size: &PackedSize, runs: Runs, _: bool) -> BlockBytes {
        match block {
            0 => self.embedding_bytes(size, runs),
            _ if block + 1 == self.blocks() => self.head_bytes(size, runs),
            _ => self.layer_bytes(block - 1, size, runs),
        }
    }
}

impl Decoder {
    /// What sampling makes at a time: the largest of a pass over prompts of `prompt_tokens` tokens together and the
    /// logits of a step of `sequences`.
    pub fn sampling_bytes(
        &self,
        sequences: usize,
        prompt_tokens: usize,
        longest: usize,
        runs: Runs,
    ) -> usize {
        let (tokens, copies) = (prompt_tokens, prompt_tokens);
        let size = PackedSize { sequences: 1, longest, tokens, copies, targets: 0, is_taught: false };
        // Beside the block's own, copies of the keys and values that are cached.
        let kv = 2 * self.config.num_key_value_heads as usize * self.config.head_dim as usize;
        let layers = (0..self.inner_blocks.len()).map(|layer| self.layer_bytes(layer, &size, runs));
        let layer = layers.map(|layer| layer.input + layer.scoring).max().unwrap_or(0);
        let prefill = layer + prompt_tokens * kv * runs.size();
        // As they come out of the product, in fp32, and scaled.
        let logits = padded_rows(sequences) * self.config.vocab_size as usize;
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
        let (config, block) = (&self.config, &self.inner_blocks[layer]);
        let [heads, kv_heads, dim] =
            [config.num_attention_heads, config.num_key_value_heads, config.head_dim].map(|it| it as usize);
        let rows = |width: usize| size.tokens * width * runs.size();
        let floats = |width: usize| size.tokens * width * F32;
        let (x, mlp) = (rows(config.hidden_size as usize), rows(config.intermediate_size as usize));
        let (q, kv) = (rows(heads * dim), rows(kv_heads * dim));
        let qkv = q + 2 * kv;
        let qk_norm = match config.qk_norm {
            Some(QkNorm::PerHead) => q + kv + floats(heads + kv_heads),
            Some(QkNorm::Together) => q + kv + floats(2),
            None => 0,
        };
        // What the norm of a branch reads, or the output of the one in front of the MLP.
        let (of_branch, h2) = match config.norms {
            NormPlaces::Before => (0, x),
            NormPlaces::After => (x + floats(1), 0),
            NormPlaces::Both => (x + floats(1), x),
        };
        let lse = floats(heads);
        let copied =
            |bytes: usize| if size.copies > size.tokens { bytes / size.tokens * size.copies } else { 0 };
        // What is between an adapter's products: of the widest, and of all at a site.
        let between = rows(block.ranks().flatten().max().unwrap_or(0));
        let all_between = rows(block.ranks().map(|ranks| ranks.iter().sum()).max().unwrap_or(0));
        // With magnitudes, a matrix with its product.
        let dora = block.lora.as_ref().is_some_and(Lora::is_dora);
        // The widest that has one adapter.
        let (of_qkv, of_mlp) = match config.fused_projections {
            true => (heads + 2 * kv_heads, 2 * config.intermediate_size as usize),
            false => (heads, config.intermediate_size as usize),
        };
        let widest = config.hidden_size as usize * of_mlp.max(of_qkv * dim);
        let sum = if dora { widest * runs.size() } else { 0 };
        // Where adapters drop values, what one sees of its input of this size; backward, its part of the gradient first.
        let dropped = |input: usize| if block.drops() { input } else { 0 };

        // x, rstd, qkv, attended, lse, x2, rstd2, gate_up; with qk-norm q, k and their deviations. Norms of branches have their
        // deviations beside what they read.
        let rstd = if h2 > 0 { floats(1) } else { 0 };
        let before_mlp = x + rstd + qkv + q + lse + x + rstd + qk_norm + 2 * of_branch;
        let gate_up = 2 * mlp;
        let seen = 2 * between + dropped(mlp);
        let with_adapters = match (dora, block.drops()) {
            (false, _) => seen,
            // The block's output is no longer made in place.
            (true, false) => x.max(seen + sum),
            (true, true) => seen + sum.max(2 * x),
        };
        // In front of the MLP's activation, with magnitudes and dropout: what an adapter sees, and its columns twice.
        let in_gate_up = if dora { 2 * between + dropped(x) + sum.max(2 * dropped(rows(of_mlp))) } else { 0 };
        // What adapters take at a site: with magnitudes the gradient in front of them and, for theirs, a column's products.
        let at_site = |output: usize, input: usize, column: usize| match dora {
            false => 2 * dropped(input),
            true if block.drops() => output + sum.max(2 * input + column),
            true => output + sum.max(column),
        };
        // Where branches are normed, the gradients of a norm's output and of what it reads, and then the latter, which is the
        // memory of what it read.
        let in_norm = if of_branch == 0 { 0 } else { 2 * x };
        // Where branches are multiplied, what is added is there apart, and the gradient of the product as well.
        let multiplied = if block.residual_multiplier == 1.0 { 0 } else { x };
        // Of an MLP the second norm's output, SwiGLU's, and the block's come at the end.
        let of_mixture = config.experts_of(layer).map(|it| self.mixture_bytes(it, layer, size, runs));
        let mlp_bytes = of_mixture.unwrap_or(MlpBytes {
            gate_up,
            choice: 0,
            forward: gate_up + h2 + (mlp + x + with_adapters).max(in_gate_up),
            scoring: gate_up + h2 + mlp + 2 * between + if dora { x + sum } else { multiplied },
            backward: (mlp + at_site(x, mlp, x) + multiplied)
                .max(mlp + h2 + at_site(gate_up, x, rows(of_mlp)))
                .max(in_norm),
        });
        let saved = before_mlp + mlp_bytes.gate_up + mlp_bytes.choice;
        let (scores, scores_backward) = self.attention_bytes(size, runs);
        // While scores exist, nothing of the second half does.
        let attending = rstd + qkv + qk_norm + q + lse + copied(qkv + q + lse) + scores;
        // What the MLP had is gone. Of attention there is its output's gradient, that of the projection and of normed heads, and
        // what the library needs.
        let qk_norm_backward = if config.qk_norm.is_some() { q + kv } else { 0 };
        let in_attention = q + qkv + qk_norm_backward + 2 * copied(qkv + q) + copied(lse) + scores_backward;
        let in_attention =
            in_attention.max(q + at_site(x, q, x) + of_branch + multiplied).max(in_norm + of_branch);
        // After it, all that it read is gone, and the first norm's output comes.
        let after = (qkv + x + at_site(qkv, x, rows(of_qkv * dim))).saturating_sub(q + qkv + lse + qk_norm);
        let in_mlp = mlp_bytes.gate_up + mlp_bytes.choice + 2 * of_branch;
        let attention_backward = in_attention.max(after).saturating_sub(in_mlp);
        BlockBytes {
            input: x,
            saved,
            thinned: saved - mlp_bytes.gate_up,
            forward: (before_mlp - x + mlp_bytes.forward).max(attending),
            // The residual stream of an MLP stays in one place, or one of the norms' inputs is there beside its output; nothing is
            // dropped.
            scoring: (before_mlp - x + mlp_bytes.scoring).max(attending),
            output_grad: x,
            backward: mlp_bytes.backward.max(attention_backward) + all_between + 2 * between,
        }
    }

    /// The memory of a layer's experts instead of an MLP.
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
        // Of each row its token and its place; probabilities are sorted with their indices, and rows likewise.
        let dispatch = 2 * rows * INDEX + count * size_of::<i32>();
        let sorting = (logits + 2 * probs + tokens * count * INDEX).max(choice + 2 * dispatch);
        // The sum in fp32, what it adds, and in 16 bits that as it was before.
        let narrow = if runs.size() == F32 { 0 } else { x };
        let adding = 2 * tokens * hidden * F32 + narrow;
        let in_products =
            [x + spread, spread + gate_up, gate_up + activated + spread, gate_up + spread + adding];
        let forward = in_products.into_iter().max().unwrap_or(0) + choice + dispatch + rows * F32;
        let forward = forward.max(x + sorting);
        // libtorch returns the gradient of all matrices, where it makes it in one operation.
        let is_trained = self.units[layer + 1].trainable && !runs.on_host && runs.size() != F32;
        let gradient = |matrices: usize| {
            if is_trained { matrices * count * width * hidden * runs.size() } else { 0 }
        };
        let of_rows = logits + rows * F32;
        let backward = [
            spread + 3 * activated,
            spread + activated + of_rows + gradient(1),
            spread + of_rows + x + adding,
            x + of_rows + spread + gradient(2),
        ];
        let backward = dispatch + backward.into_iter().max().unwrap_or(0);
        MlpBytes { gate_up, choice, forward, scoring: forward, backward }
    }

    /// What attention needs beside its arguments and results, forward and backward.
    fn attention_bytes(&self, size: &PackedSize, runs: Runs) -> (usize, usize) {
        let (heads, dim) = (self.config.num_attention_heads as usize, self.config.head_dim as usize);
        if runs.on_host {
            return (0, 0);
        }
        if runs.size() == F32 {
            // A composition, over all scores of a padded batch: three of that size forward, five backward.
            let scores = size.sequences * heads * size.longest * size.longest * F32;
            return (3 * scores, 5 * scores);
        }
        // FlashAttention-2: sums of the queries' gradients and one number a query in fp32, and gradients of keys and
        // values for each query head where several read one.
        let sums = size.copies * heads * (dim + 1) * F32;
        let is_grouped = self.config.num_key_value_heads != self.config.num_attention_heads;
        (0, sums + if is_grouped { 2 * size.copies * heads * dim * runs.size() } else { 0 })
    }

    fn head_bytes(&self, size: &PackedSize, runs: Runs) -> BlockBytes {
        let hidden = self.config.hidden_size as usize;
        let (rows, all) = (size.targets * hidden * runs.size(), size.tokens * hidden * runs.size());
        let per_target = size.targets * F32;
        let vocab = self.config.vocab_size as usize;
        let logits_of = |targets: usize| targets * vocab * runs.size();
        let logits = match size.is_taught {
            false => logits_of(size.targets.min(head::chunk_rows(vocab, runs.size()))),
            // The teacher's as well, taken to have as many, and in fp32 log-probs of both with what is made of them.
            true => {
                let rows = size.targets.min(head::taught_chunk_rows(vocab, runs.size()));
                2 * logits_of(rows) + MADE_OF_LOGITS * rows * vocab * F32
            }
        };
        let (kept, again) = if self.head.keeps_logits { (logits_of(size.targets), 0) } else { (0, logits) };
        // The rows of targets, their norm and deviations; log-probabilities, entropies and sums; logits come beside them.
        let forward = 2 * rows + per_target + 3 * per_target;
        let saved = 2 * rows + 3 * per_target + kept;
        BlockBytes {
            input: all,
            saved,
            thinned: saved,
            forward: forward + logits.max(kept),
            scoring: forward + logits,
            // Of log-probabilities and entropies, which themselves are still there.
            output_grad: 4 * per_target,
            // Kept logits are gone behind the products.
            backward: rows + again.max((rows + all + sorting_bytes(size.targets, runs)).saturating_sub(kept)),
        }
    }
}
