//! The time of sampling: prompts, and decoding token by token.

use anyroll_backends::DType;
use anyroll_models::{Decoder, KvCache};

use super::{demand::Demand, rates::Rates};

/// Waits between a layer's kernels in a decoding step: 22 us at 0.5B and 1.5B with 64 rows, by the mean of a step less
/// the bytes of weights, keys and values (docs/results/decoding.md).
const LAYER_S: f64 = 22e-6;
/// Rows up to which a step's products are kernels that compute while they read weights (docs/guides/cuda.md). The library's,
/// for more rows, take the time of their operations in addition.
const FEW_ROWS: usize = 64;
/// Recording of steps, and other host work at the start of sampling: fitted to 0.411 s of sampling in a step of four H200s
/// (docs/results/rl_step.md).
const START_S: f64 = 0.05;
/// An exchange between ranks that sample together, two per layer: 7B on two devices (the same page).
const EXCHANGE_S: f64 = 8e-6;

/// A rank's sampling of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sampling {
    /// Completions of a rank, or of all ranks that sample together.
    pub sequences: usize,
    /// Sequences in flight at a time.
    pub in_flight: usize,
    /// Prompts that are read: each once, however many completions it has.
    pub prompts: usize,
    /// Tokens of a prompt, and of a completion.
    pub prompt: usize,
    pub completion: usize,
    /// Ranks that sample together.
    pub together: usize,
}

impl Sampling {
    /// Time and demand of reading prompts and of decoding.
    pub fn time(&self, model: &Decoder, dtype: DType, rates: &Rates) -> (f64, Demand) {
        let read = self.reading(model, rates);
        let (step, demand) = self.step(model, dtype, rates);
        let passes = (self.sequences.div_ceil(self.in_flight) * self.completion) as f64;
        let scaled = |seconds: f64| seconds * passes;
        let decode = Demand {
            compute_s: scaled(demand.compute_s),
            memory_s: scaled(demand.memory_s),
            launches_s: START_S + scaled(demand.launches_s),
            ..Demand::default()
        };
        (START_S + read + scaled(step), decode + Demand { compute_s: read, ..Demand::default() })
    }

    fn reading(&self, model: &Decoder, rates: &Rates) -> f64 {
        let tokens = (self.prompts * self.prompt) as f64;
        let shape = model.config();
        let head = (shape.vocab_size * shape.hidden_size) as f64;
        // Only the last token of a prompt has logits.
        2.0 * tokens * (model.active_weights() - head) / self.together as f64 / rates.prefill
    }

    /// A decoding step over all sequences in flight, at the mean length of their contexts.
    pub fn step(&self, model: &Decoder, dtype: DType, rates: &Rates) -> (f64, Demand) {
        let (shape, parts) = (model.config(), self.together as f64);
        let layers = shape.num_hidden_layers as f64;
        let size = dtype.size_bytes() as f64;
        let context = self.prompt + self.completion / 2;
        let one = KvCache::bytes_of(shape, dtype, KvCache::blocks_for(1, context));
        let none = KvCache::bytes_of(shape, dtype, KvCache::blocks_for(1, 0));
        let cached = (one - none) as f64 * self.in_flight as f64 / parts;
        let weights = model.active_weights() * self.read_experts(model) * size / parts;
        let exchanges = if self.together > 1 { 2.0 * layers * EXCHANGE_S } else { 0.0 };
        let demand = Demand {
            compute_s: 2.0 * self.in_flight as f64 * model.active_weights() / parts / rates.products,
            memory_s: (weights + cached) / rates.memory,
            launches_s: layers * LAYER_S + exchanges,
            ..Demand::default()
        };
        let device = match self.in_flight <= FEW_ROWS {
            true => demand.compute_s.max(demand.memory_s),
            false => demand.compute_s + demand.memory_s,
        };
        (device + demand.launches_s, demand)
    }

    /// Weights that a step reads, over those of one token: with experts, more of them the more tokens choose.
    fn read_experts(&self, model: &Decoder) -> f64 {
        let Some(experts) = &model.config().experts else { return 1.0 };
        let (all, chosen) = (experts.num_experts as f64, experts.num_experts_per_tok as f64);
        let read = all * (1.0 - (1.0 - chosen / all).powi(self.in_flight as i32));
        let of_layers = experts.layers.iter().filter(|&&has| has).count() as f64;
        let width = 3.0 * (model.config().hidden_size * experts.moe_intermediate_size) as f64;
        1.0 + of_layers * (read - chosen) * width / model.active_weights()
    }
}

#[cfg(test)]
mod tests {
    use anyroll_backends::DType;
    use anyroll_models::{Decoder, DecoderConfig};

    use super::{LAYER_S, START_S, Sampling};
    use crate::plan::time::rates::{Rates, Sheet};

    #[test]
    fn a_decoding_step_reads_weights_keys_and_values() {
        let model = Decoder::new(DecoderConfig::plain(1, 16, 4), tch::Device::Cpu).unwrap();
        let sheet = Sheet { flops: 1e12, memory: 1e6, in_host: 1e9, host_link: 1e9 };
        let rates = Rates::new(sheet, 1, true);
        let sampling =
            Sampling { sequences: 4, in_flight: 2, prompts: 1, prompt: 8, completion: 16, together: 1 };
        // Matrices of the layer and the head in bf16, and 16 tokens of keys and values of each of two sequences.
        let bytes = f64::from(2 * (4 * 16 * 16 + 3 * 16 * 64 + 12 * 16) + 2 * 16 * (2 * 16 * 2));
        let (step, demand) = sampling.step(&model, DType::Bf16, &rates);
        assert_eq!(demand.memory_s, bytes / rates.memory);
        assert_eq!(step, demand.memory_s + LAYER_S);
        // Twice 16 steps for four sequences, and a prompt of eight tokens without logits.
        let (seconds, _) = sampling.time(&model, DType::Bf16, &rates);
        let read = f64::from(2 * 8 * (4 * 16 * 16 + 3 * 16 * 64)) / rates.prefill;
        assert!((seconds - (32.0 * step + read + START_S)).abs() < 1e-9, "{seconds}");
        // Two ranks have half of it each, and exchange rows twice per layer.
        let (both, _) = Sampling { together: 2, ..sampling }.step(&model, DType::Bf16, &rates);
        assert!(both < step && both > step / 2.0);
    }
}
