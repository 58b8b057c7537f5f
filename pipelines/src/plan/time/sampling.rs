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
