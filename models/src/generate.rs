//! Generation: prompts to completions, all live sequences together, with a KV cache.
//!
//! Prompts are run by the training forward, equal prompts in a row only once (the samples of a group). Then
//! each step runs the last token of every sequence that has not stopped. A completion depends on its prompt
//! and its seed only, not on what shares its batch, up to the rounding of matrix products of other sizes.

use anyroll_backends::ops::Packing;
use tch::{Device, Kind, Tensor};

use crate::decoder::{Prefill, Step};
use crate::kv_cache::KvCache;
use crate::model::{Model, Weights};
use crate::sampling::{SamplingParams, sample};
use crate::{Decoder, Error, Result};

/// The most prompt tokens that one pass takes, unless a prompt alone is longer: bounds the activations.
const MAX_PREFILL_TOKENS: usize = 1 << 14;

/// What a prompt was continued with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// The new tokens, a stop token included.
    pub tokens: Vec<i64>,
    /// The log-probability of each under softmax(logits / temperature) over the whole vocabulary, as the
    /// training forward computes it: `top_k` and `top_p` are not in it, and at temperature 0 it is that of
    /// temperature 1.
    pub logprobs: Vec<f32>,
    /// Whether it ended with a stop token, and not for its length.
    pub finished: bool,
}

/// Continues each prompt. `weights` are the tensors of every unit of the decoder, `seeds` one number a prompt;
/// equal prompts should stand side by side, so that they are run once. What `cache` held is overwritten.
///
/// # Errors
/// [`Error::Input`] for an empty prompt, one that with its completion does not fit into the cache or the
/// model's positions, or parameters out of range; or libtorch's error (out of memory, an unknown token).
pub fn generate(
    decoder: &Decoder,
    weights: &[&[Tensor]],
    prompts: &[Vec<i64>],
    params: &SamplingParams,
    seeds: &[u64],
    cache: &mut KvCache,
) -> Result<Vec<Completion>> {
    check(decoder, prompts, params, seeds, cache)?;
    let units: Vec<Vec<&[Tensor]>> = (0..decoder.blocks())
        .map(|block| decoder.units_of(block).iter().map(|&unit| weights[unit]).collect())
        .collect();
    let weights: Vec<Weights> = units.iter().map(|units| Weights::new(units)).collect();
    let mut batch = Batch {
        decoder,
        weights: &weights,
        params,
        seeds,
        device: weights[0].get(0, 0).device(),
        completions: vec![Completion::default(); prompts.len()],
        live: Vec::with_capacity(prompts.len()),
    };
    batch.prefill(prompts, cache)?;
    while !batch.live.is_empty() {
        batch.step(prompts, cache)?;
    }
    Ok(batch.completions)
}

fn check(
    decoder: &Decoder,
    prompts: &[Vec<i64>],
    params: &SamplingParams,
    seeds: &[u64],
    cache: &KvCache,
) -> Result<()> {
    params.validate()?;
    let refuse = |what, problem| Err(Error::Input { what, problem });
    if seeds.len() != prompts.len() {
        return refuse("seeds", format!("{} seeds for {} prompts", seeds.len(), prompts.len()));
    }
    if prompts.len() > cache.sequences() {
        let problem = format!("{} prompts for a cache of {} sequences", prompts.len(), cache.sequences());
        return refuse("prompts", problem);
    }
    if let Some(index) = prompts.iter().position(Vec::is_empty) {
        return refuse("prompts", format!("prompt {index} is empty"));
    }
    // The last token is never an input.
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + params.max_new_tokens - 1;
    if longest > cache.max_len() {
        let problem = format!("with their completions {longest} tokens, the cache holds {}", cache.max_len());
        return refuse("prompts", problem);
    }
    decoder.check_length(longest as i64)
}

/// A batch on its way.
struct Batch<'a> {
    decoder: &'a Decoder,
    weights: &'a [Weights<'a>],
    params: &'a SamplingParams,
    seeds: &'a [u64],
    device: Device,
    completions: Vec<Completion>,
    /// The samples that have not ended, ascending; a sample's index is its sequence in the cache.
    live: Vec<usize>,
}

impl Batch<'_> {
    fn prefill(&mut self, prompts: &[Vec<i64>], cache: &mut KvCache) -> Result<()> {
        let groups: Vec<&[Vec<i64>]> = prompts.chunk_by(|a, b| a == b).collect();
        let (mut first_sample, mut rest) = (0, groups.as_slice());
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|group| {
                tokens += group[0].len();
                tokens <= MAX_PREFILL_TOKENS
            });
            let (chunk, after) = rest.split_at(fits.count().max(1));
            let inputs = self.prefill_inputs(chunk, first_sample, cache.max_len())?;
            let logits = Logits::read(&self.decoder.prefill(self.weights, &inputs, cache)?)?;
            for (row, group) in chunk.iter().enumerate() {
                for sample in first_sample..first_sample + group.len() {
                    self.extend(sample, logits.row(row));
                }
                first_sample += group.len();
            }
            rest = after;
        }
        Ok(())
    }

    /// The prompts of some groups, each once; its keys and values go to all samples of the group.
    fn prefill_inputs(&self, groups: &[&[Vec<i64>]], first_sample: usize, max_len: usize) -> Result<Prefill> {
        let (mut tokens, mut lengths, mut last_rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        let mut sample = first_sample;
        for group in groups {
            let (prompt, start) = (&group[0], tokens.len() as i64);
            let len = prompt.len() as i64;
            tokens.extend_from_slice(prompt);
            lengths.push(len);
            last_rows.push(start + len - 1);
            for slot in sample..sample + group.len() {
                rows.extend(start..start + len);
                places.extend((0..len).map(|position| (slot * max_len) as i64 + position));
            }
            sample += group.len();
        }
        Ok(Prefill {
            tokens: self.upload(&tokens)?,
            packing: Packing::new(&lengths, self.device)?,
            last_rows: self.upload(&last_rows)?,
            rows: self.upload(&rows)?,
            places: self.upload(&places)?,
        })
    }

    /// Runs the last token of every live sequence and chooses the next.
    fn step(&mut self, prompts: &[Vec<i64>], cache: &mut KvCache) -> Result<()> {
        let live = std::mem::take(&mut self.live);
        let of_live = |value: &dyn Fn(usize) -> i64| -> Result<Tensor> {
            self.upload(&live.iter().map(|&sample| value(sample)).collect::<Vec<i64>>())
        };
        let completion = |sample: usize| &self.completions[sample].tokens;
        let position = |sample: usize| (prompts[sample].len() + completion(sample).len() - 1) as i64;
        let max_len = cache.max_len() as i64;
        let inputs = Step {
            tokens: of_live(&|sample| completion(sample)[completion(sample).len() - 1])?,
            positions: of_live(&position)?,
            slots: of_live(&|sample| sample as i64)?,
            lengths: of_live(&|sample| position(sample) + 1)?,
            places: of_live(&|sample| sample as i64 * max_len + position(sample))?,
        };
        let logits = Logits::read(&self.decoder.decode(self.weights, &inputs, cache)?)?;
        for (row, &sample) in live.iter().enumerate() {
            self.extend(sample, logits.row(row));
        }
        Ok(())
    }

    /// Chooses a sample's next token, and keeps it live if that does not end it.
    fn extend(&mut self, index: usize, logits: &[f32]) {
        let completion = &mut self.completions[index];
        let sampled = sample(logits, self.params, self.seeds[index], completion.tokens.len());
        completion.tokens.push(sampled.token);
        completion.logprobs.push(sampled.logprob);
        completion.finished = self.params.stop_tokens.contains(&sampled.token);
        if !completion.finished && completion.tokens.len() < self.params.max_new_tokens {
            self.live.push(index);
        }
    }

    fn upload(&self, values: &[i64]) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(values)?.f_to_device(self.device)?)
    }
}

/// Logits on the host.
struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    fn read(logits: &Tensor) -> Result<Logits> {
        let logits = logits.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?;
        let mut values = vec![0.0; logits.numel()];
        logits.f_copy_data(&mut values, logits.numel())?;
        Ok(Logits { values, vocab_size: logits.size()[1] as usize })
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocab_size..][..self.vocab_size]
    }
}
