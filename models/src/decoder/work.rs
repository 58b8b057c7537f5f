//! Arithmetic and memory traffic of a decoder's passes, computed from shapes, for plans of a step's time.

use super::{Decoder, NormPlaces, PackedSize, layer_block::LayerBlock};
use crate::footprint::Runs;
use crate::model::{Model, ParamSpec, Unit};

/// Backward of attention has five products of the square, forward two.
const ATTENTION_BACKWARD: f64 = 2.5;

/// Work of one block over one batch. A product of `[n, k]` and `[k, m]` counts 2 n k m floating-point operations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockWork {
    /// Operations of matrix products in forward.
    pub products: f64,
    /// Operations of matrix products in backward: gradients of inputs and of trained matrices.
    pub products_backward: f64,
    /// Operations of matrix products that backward repeats if it keeps fewer activations, or no logits.
    pub products_again: f64,
    /// Operations of attention in forward, over existing pairs of a query and a key.
    pub attention: f64,
    /// Operations of attention in backward.
    pub attention_backward: f64,
    /// Bytes that operations other than products and attention read and write in forward.
    pub traffic: f64,
    /// The same in backward.
    pub traffic_backward: f64,
    /// Bytes of rows that ranks which run the batch together exchange in forward, of all of a rank's rows.
    pub exchanged: f64,
    /// The same in backward.
    pub exchanged_backward: f64,
    /// Bytes of keys and values of all ranks' rows, if each gathers them: in forward, and again in backward.
    pub gathered: f64,
}

impl Decoder {
    /// Returns the work of a block; `None` for a block that libtorch differentiates, whose operations nobody counts.
    /// With `thins`, backward repeats the products that [`Model::thin`] drops.
    pub fn work(&self, block: usize, size: &PackedSize, runs: Runs, thins: bool) -> Option<BlockWork> {
        let last = self.blocks() - 1;
        Some(match block {
            0 => self.embedding_work(size, runs),
            _ if block == last => self.head_work(size, runs),
            _ => match &self.inner_blocks[block - 1] {
                LayerBlock::Written(_) => self.layer_work(block - 1, size, runs, thins),
                LayerBlock::Expressed(_) => return None,
            },
        })
    }

    /// Returns the weights that a token reads in products of a decoding step: all but the embedding's matrix, and of
    /// experts those of the token.
    pub fn active_weights(&self) -> f64 {
        let layers = (0..self.config.num_hidden_layers).map(|layer| {
            let [own, adapters, _] = self.matrices(layer);
            own + adapters
        });
        layers.sum::<f64>() + (self.config.vocab_size * self.config.hidden_size) as f64
    }

    /// A row is read and written; its gradient is read and added.
    fn embedding_work(&self, size: &PackedSize, runs: Runs) -> BlockWork {
        let rows = (size.tokens * self.config.hidden_size as usize * runs.size()) as f64;
        BlockWork { traffic: 2.0 * rows, traffic_backward: 3.0 * rows, ..BlockWork::default() }
    }

    fn head_work(&self, size: &PackedSize, runs: Runs) -> BlockWork {
        let [targets, width, vocab] =
            [size.targets as i64, self.config.hidden_size, self.config.vocab_size].map(|it| it as f64);
        let products = 2.0 * targets * width * vocab;
        let is_trained = |unit: usize| self.units[unit].trainable;
        let trains = self.units_of[self.blocks() - 1].iter().any(|&unit| is_trained(unit));
        let bytes = runs.size() as f64;
        // Norm, and log-probs out of logits. Backward reads logits, and writes their gradient in place.
        let (norm, logits) = (targets * width * bytes, targets * vocab * bytes);
        BlockWork {
            products,
            products_backward: if trains { 2.0 } else { 1.0 } * products,
            products_again: if self.head.keeps_logits { 0.0 } else { products },
            traffic: 3.0 * norm + 2.0 * logits,
            traffic_backward: 5.0 * norm + 3.0 * logits,
            ..BlockWork::default()
        }
    }

    fn layer_work(&self, layer: usize, size: &PackedSize, runs: Runs, thins: bool) -> BlockWork {
        let config = &self.config;
        let [hidden, heads, kv_heads, dim] =
            [config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim]
                .map(|it| it as f64);
        let rows = size.tokens as f64;
        let [own, adapters, gate_up] = self.matrices(layer).map(|elements| 2.0 * rows * elements);
        let is_trained = self.units_of[layer + 1].first().is_some_and(|&unit| self.units[unit].trainable);
        let ranks = size.ranks as f64;
        let shares_heads = config.shares_heads(size.ranks);
        let attention = 4.0 * self.pairs(layer, size) * heads * dim / ranks;

        // Elements of a row, as the operations read and write them: norms with the sum of the residual, rotation, and
        // the activation of the MLP. Backward computes the outputs of norms and of the activation again.
        let (q, kv) = (heads * dim, kv_heads * dim);
        let mlp = match config.experts_of(layer) {
            Some(of) => (of.num_experts_per_tok * of.moe_intermediate_size) as f64,
            None => config.intermediate_size as f64,
        };
        let norms = if config.norms == NormPlaces::Both { 4.0 } else { 2.0 };
        let rotated = 2.0 * (q + kv) * if config.qk_norm.is_some() { 2.0 } else { 1.0 };
        let biases = if config.qkv_bias { q + 2.0 * kv } else { 0.0 };
        let bytes = rows * runs.size() as f64;
        let (sent, sent_back, gathered) = match (size.ranks, shares_heads) {
            (1, _) => (0.0, 0.0, 0.0),
            // Queries, keys, values and the output; in backward their gradients, and the output again.
            (_, true) => {
                let sent = q + 2.0 * kv.max(ranks * dim) + q;
                (sent, sent + q, 0.0)
            }
            // In backward the gradients of what was gathered.
            (_, false) => (0.0, ranks * 2.0 * kv, ranks * 2.0 * kv),
        };
        BlockWork {
            products: own + adapters,
            products_backward: own * if is_trained { 2.0 } else { 1.0 } + 2.0 * adapters,
            products_again: if thins { gate_up } else { 0.0 },
            attention,
            attention_backward: ATTENTION_BACKWARD * attention,
            traffic: (4.0 * norms * hidden + rotated + 3.0 * mlp) * bytes,
            traffic_backward: (5.0 * norms * hidden + rotated + 6.0 * mlp + biases) * bytes,
            exchanged: sent * bytes,
            exchanged_backward: sent_back * bytes,
            gathered: gathered * bytes,
        }
    }

    /// Elements of a layer's matrices that a token reads: its own ones, the adapters', and of its own those of the MLP's
    /// first product.
    fn matrices(&self, layer: usize) -> [f64; 3] {
        let config = &self.config;
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let attention = hidden * dim * (2 * heads + 2 * kv_heads);
        let (width, router) = match config.experts_of(layer) {
            Some(of) => (of.num_experts_per_tok * of.moe_intermediate_size, of.num_experts * hidden),
            None => (config.intermediate_size, 0),
        };
        // Of experts' adapters, those of its own experts.
        let chosen = config
            .experts_of(layer)
            .map_or((1, 1), |of| (of.num_experts_per_tok as usize, of.num_experts as usize));
        let read = |param: &ParamSpec| match param.parts.len() {
            1 => param.elements(),
            _ => param.elements() * chosen.0 / chosen.1,
        };
        let elements = |unit: &Unit| -> usize {
            let matrices = unit.params.iter().filter(|param| param.shape.len() == 2);
            matrices.map(read).sum()
        };
        let adapters: usize =
            self.units_of[layer + 1].iter().skip(1).map(|&unit| elements(&self.units[unit])).sum();
        [(attention + 3 * width * hidden + router) as f64, adapters as f64, (2 * width * hidden) as f64]
    }

    /// Pairs of a query and a key that it sees, about: half of the square of each sequence, or its window. A prompt that
    /// sequences share has its pairs once.
    fn pairs(&self, layer: usize, size: &PackedSize) -> f64 {
        let window = self.config.window_of(layer).map(|window| window as f64);
        let seen = |length: f64| {
            let window = window.unwrap_or(length).min(length);
            window * (length - window / 2.0)
        };
        let longest = size.longest as f64;
        // All ranks' rows, of which each has a part of the heads.
        let ranks = size.ranks as f64;
        let copies = size.copies as f64 * ranks;
        let shared = (size.copies - size.tokens) as f64 * ranks;
        let completion = size.targets as f64 * ranks / size.sequences.max(1) as f64;
        let prompt = (longest + 1.0 - completion).max(0.0);
        let once = if prompt > 0.0 { shared / prompt * seen(prompt) } else { 0.0 };
        copies / longest.max(1.0) * seen(longest) - once
    }
}

#[cfg(test)]
mod tests {
    use anyroll_backends::DType;

    use super::BlockWork;
    use crate::decoder::{Decoder, DecoderConfig, PackedSize};
    use crate::footprint::Runs;

    const RUNS: Runs = Runs { dtype: DType::Bf16, on_host: false };

    fn decoder() -> Decoder {
        let shape = DecoderConfig {
            vocab_size: 50,
            num_key_value_heads: 2,
            intermediate_size: 24,
            ..DecoderConfig::plain(1, 16, 4)
        };
        Decoder::new(shape, tch::Device::Cpu).unwrap()
    }

    #[test]
    fn products_are_those_of_the_matrices() {
        let (decoder, size) = (decoder(), PackedSize::uniform(3, 4, 7)); // 10 rows each, 7 targets
        let layer = decoder.work(1, &size, RUNS, true).unwrap();
        // q, k, v, o: 16 x (16 + 8 + 8 + 16); gate, up, down: 3 x 16 x 24.
        let matrices = 16 * 48 + 3 * 16 * 24;
        assert_eq!(layer.products, f64::from(2 * 30 * matrices));
        assert_eq!(layer.products_backward, 2.0 * layer.products);
        assert_eq!(layer.products_again, f64::from(2 * 30 * 2 * 16 * 24));
        // Two products over half of 10 x 10, of width 16, for three sequences.
        assert_eq!(layer.attention, f64::from(3 * 2 * 2 * 50 * 16));
        let head = decoder.work(2, &size, RUNS, false).unwrap();
        assert_eq!(head.products, f64::from(2 * 21 * 16 * 50));
        assert_eq!(head.products_again, head.products);
        assert_eq!(decoder.active_weights(), f64::from(matrices + 16 * 50));
        assert_eq!(decoder.work(0, &size, RUNS, false).unwrap().products, 0.0);
    }

    #[test]
    fn frozen_matrices_kept_logits_and_shared_prompts_are_less_work() {
        let size = PackedSize::uniform(4, 6, 5);
        let frozen = decoder().freeze(|unit| unit.name.starts_with("model.layers"));
        let layer = frozen.work(1, &size, RUNS, false).unwrap();
        assert_eq!((layer.products_backward, layer.products_again), (layer.products, 0.0));
        let kept = decoder().keeping_logits(true).work(2, &size, RUNS, false).unwrap();
        assert_eq!(kept.products_again, 0.0);
        // Four sequences of 10 rows in one group: three prompts of 6 are not computed again.
        let shared = PackedSize::of_groups(4, 4, 6, 5);
        assert_eq!((shared.tokens, shared.copies), (40 - 18, 40));
        let pairs = |size: &PackedSize| decoder().work(1, size, RUNS, false).unwrap().attention / 64.0;
        assert_eq!((pairs(&size), pairs(&shared)), (4.0 * 50.0, 4.0 * 50.0 - 3.0 * 18.0));
    }

    #[test]
    fn ranks_that_run_a_batch_together_have_a_part_each() {
        let decoder = decoder();
        let whole = PackedSize::uniform(2, 1, 40);
        let of = |size: &PackedSize| decoder.work(1, size, RUNS, false).unwrap();
        let (one, two) = (of(&whole), of(&whole.over(2)));
        let half = |part: fn(&BlockWork) -> f64| assert_eq!(part(&two), part(&one) / 2.0);
        half(|it| it.products);
        half(|it| it.attention);
        half(|it| it.traffic);
        // Queries, keys, values and the output of 40 rows: 16 + 8 + 8 + 16 elements of two bytes.
        assert_eq!((one.exchanged, two.exchanged), (0.0, f64::from(40 * 48 * 2)));
        assert_eq!(two.exchanged_backward, f64::from(40 * 64 * 2));
    }

    #[test]
    fn keys_that_ranks_gather_are_those_of_all_rows() {
        let of = |size: &PackedSize| decoder().work(1, size, RUNS, false).unwrap();
        let whole = PackedSize::uniform(1, 1, 30);
        let three = of(&whole.over(3)); // four heads
        // Keys and values of 30 rows, 8 + 8 elements of two bytes.
        let bytes = f64::from(30 * 16 * 2);
        assert_eq!([three.exchanged, three.exchanged_backward, three.gathered], [0.0, bytes, bytes]);
        assert_eq!(three.attention, of(&whole).attention / 3.0);
    }

    #[test]
    fn a_window_bounds_the_pairs() {
        use crate::decoder::SlidingWindow;
        let size = PackedSize::uniform(1, 1, 32);
        let shape = decoder().config().clone();
        let windowed =
            DecoderConfig { sliding_window: Some(SlidingWindow { tokens: 8, layers: vec![true] }), ..shape };
        let windowed = Decoder::new(windowed, tch::Device::Cpu).unwrap();
        // The first eight see half of their square, the others eight each.
        assert_eq!(windowed.work(1, &size, RUNS, false).unwrap().attention / 64.0, 32.0 + 24.0 * 8.0);
    }
}
