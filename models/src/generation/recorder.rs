//! Decoding steps as recorded work: a step is one call, and several go by before the host looks.
//!
//! A recording has a number of rows and a greatest length; tokens, positions and block tables lie in the device's
//! memory, and each step writes what the next one reads. Rows that a batch lacks up to the recording's number run too,
//! on the scratch block.

use std::{collections::HashMap, sync::Arc};

use anyroll_backends::{
    Device, Graph, Stream,
    ops::{self, AttentionParts},
};
use tch::{Kind, Tensor};

use super::{
    KvCache, SamplingParams,
    kv_cache::{BLOCK_TOKENS, SCRATCH_BLOCK, blocks_of},
    sampling::{Sampled, uniform},
    sequence::Sequence,
};
use crate::{Decoder, Result, decoder::StepMemory, model::Weights};

/// Steps between two looks of the host: a sequence that has ended runs on for fewer than these, and what it makes is
/// thrown away.
pub(super) const STEPS_AHEAD: usize = 16;

/// Lengths of recordings are this times a power of two, so that there are few.
const LEAST_TOKENS: usize = 256;

/// The recordings of an engine.
#[derive(Debug)]
pub(super) struct Recorder {
    device: Arc<dyn Device>,
    memory: StepMemory,
    /// int32, the `[rows, W]` of a recording at its front.
    tables: Tensor,
    /// What [`ops::Sampling`] reads and writes, for all rows of [`STEPS_AHEAD`] steps one behind the other.
    choices: Tensor,
    uniforms: Tensor,
    chosen: Tensor,
    logprobs: Tensor,
    /// The longest sequence that there can be.
    longest: usize,
    /// Whether log-probs are to have the bits of training's.
    is_strict: bool,
    recorded: HashMap<(usize, usize), Recorded>,
}

/// Steps of a number of rows and a greatest length.
#[derive(Debug)]
struct Recorded {
    graph: Graph,
    /// The memory of its attention.
    _parts: AttentionParts,
}

impl Recorder {
    /// For steps of up to `rows` sequences; the reason if the device or the decoder is not one for it.
    pub fn new(
        decoder: &Decoder,
        like: &Tensor,
        cache: &KvCache,
        rows: usize,
    ) -> Result<Result<Recorder, String>> {
        let config = decoder.config();
        let device = match ops::recording_device(like, config.head_dim, config.vocab_size) {
            Ok(device) => device,
            Err(reason) => return Ok(Err(reason)),
        };
        let at = like.device();
        let rows = rows_of(rows);
        let longest = cache.tokens().min(config.max_position_embeddings as usize);
        let zeros = |count: usize, kind| Tensor::f_zeros([count as i64], (kind, at));
        Ok(Ok(Recorder {
            device,
            memory: StepMemory::new(decoder, rows as i64, like.kind(), at)?,
            tables: zeros(rows * blocks_of(tokens_of(longest)), Kind::Int)?,
            choices: zeros(rows * 4, Kind::Float)?,
            uniforms: zeros(rows * STEPS_AHEAD, Kind::Double)?,
            chosen: zeros(rows * STEPS_AHEAD, Kind::Int64)?,
            logprobs: zeros(rows * STEPS_AHEAD, Kind::Float)?,
            longest,
            is_strict: decoder.is_strict(),
            recorded: HashMap::new(),
        }))
    }

    /// Runs up to [`STEPS_AHEAD`] steps, whose blocks the sequences have. Returns the tokens of each step.
    pub fn steps(
        &mut self,
        decoder: &Decoder,
        weights: &[Weights],
        cache: &KvCache,
        live: &[Sequence],
    ) -> Result<Vec<Vec<Sampled>>> {
        let left = |sequence: &Sequence| sequence.params.max_new_tokens - sequence.completion.tokens.len();
        let steps = live.iter().map(left).max().unwrap_or(0).min(STEPS_AHEAD);
        let longest = live.iter().map(Sequence::len).max().unwrap_or(0) + steps;
        // What goes past the end of all positions is thrown away.
        let key = (rows_of(live.len()), tokens_of(longest.min(self.longest)));
        if !self.recorded.contains_key(&key) {
            let recorded = self.record(decoder, weights, cache, key)?;
            self.recorded.insert(key, recorded);
        }
        let sequences: Vec<&Sequence> = live.iter().collect();
        self.upload_inputs(&sequences, key)?;
        self.upload_choices(&sequences, steps)?;
        let stream = Stream::torch(&self.device)?;
        let logits = self.memory.first(live.len() as i64)?.logits;
        for step in 0..steps {
            self.recorded[&key].graph.launch(&stream)?;
            self.sample(&logits, &sequences, step)?;
        }
        self.read(live.len(), steps)
    }

    /// Chooses a token for each of at most as many sequences as it was made for, from its row of `logits`.
    pub fn choose(&mut self, logits: &Tensor, sequences: &[&Sequence]) -> Result<Vec<Sampled>> {
        self.upload_choices(sequences, 1)?;
        self.sample(logits, sequences, 0)?;
        Ok(self.read(sequences.len(), 1)?.remove(0))
    }

    fn record(
        &mut self,
        decoder: &Decoder,
        weights: &[Weights],
        cache: &KvCache,
        (rows, tokens): (usize, usize),
    ) -> Result<Recorded> {
        let config = decoder.config();
        let tables = self.tables_of(rows, tokens)?;
        let mut memory = self.memory.first(rows as i64)?;
        // The step runs once before it is recorded, and must not write to anybody's block.
        drop(self.tables.f_zero_()?);
        drop(self.memory.positions.f_zero_()?);
        let (heads, dim) = (config.num_attention_heads, config.head_dim);
        let mut parts = AttentionParts::new(rows as i64, heads, dim, tokens as i64, self.tables.device())?;
        let graph = Graph::record(&self.device, || {
            decoder.decode_in_place(weights, &mut memory, &tables, &mut parts, cache)
        })?;
        Ok(Recorded { graph, _parts: parts })
    }

    /// What the first step reads; every value of the recording's rows, since other steps went before.
    fn upload_inputs(&self, live: &[&Sequence], (rows, tokens): (usize, usize)) -> Result<()> {
        let table_len = blocks_of(tokens);
        let (mut tables, mut next) = (vec![SCRATCH_BLOCK as i32; rows * table_len], vec![0; rows]);
        let mut positions = next.clone();
        for (row, sequence) in live.iter().enumerate() {
            let table = &mut tables[row * table_len..][..table_len];
            table.iter_mut().zip(&sequence.blocks).for_each(|(entry, &block)| *entry = block as i32);
            next[row] = sequence.last_token();
            positions[row] = sequence.len() as i64 - 1;
        }
        write_front(&self.tables, &tables)?;
        write_front(&self.memory.tokens, &next)?;
        write_front(&self.memory.positions, &positions)
    }

    /// How the sequences' next tokens are sampled.
    fn upload_choices(&self, sequences: &[&Sequence], steps: usize) -> Result<()> {
        let choices: Vec<f32> = sequences.iter().flat_map(|sequence| choice(&sequence.params)).collect();
        let of_step = |step: usize| {
            let uniform =
                move |sequence: &&Sequence| uniform(sequence.seed, sequence.completion.tokens.len() + step);
            sequences.iter().map(uniform)
        };
        let uniforms: Vec<f64> = (0..steps).flat_map(of_step).collect();
        write_front(&self.choices, &choices)?;
        write_front(&self.uniforms, &uniforms)
    }

    /// Chooses a token for each row of `logits`, the sequence's of its number.
    fn sample(&mut self, logits: &Tensor, sequences: &[&Sequence], step: usize) -> Result<()> {
        let rows = logits.size()[0];
        let of_step = |tensor: &Tensor| tensor.f_narrow(0, step as i64 * rows, rows);
        let mut memory = self.memory.first(rows)?;
        let sampling = ops::Sampling {
            choices: &self.choices.f_narrow(0, 0, rows * 4)?.f_view([rows, 4])?,
            uniforms: &of_step(&self.uniforms)?,
            tokens: &mut memory.tokens,
            positions: &mut memory.positions,
            chosen: &mut of_step(&self.chosen)?,
            logprobs: &mut of_step(&self.logprobs)?,
        };
        ops::sample_into(logits, sampling)?;
        if self.is_strict { self.score(logits, sequences, step) } else { Ok(()) }
    }

    /// Makes log-probs of what was chosen anew, by training's own operation.
    fn score(&mut self, logits: &Tensor, sequences: &[&Sequence], step: usize) -> Result<()> {
        let temperature = |sequence: &Sequence| sequence.params.softmax_temperature();
        let (mut row, first) = (0, (step * sequences.len()) as i64);
        for alike in sequences.chunk_by(|one, other| temperature(one) == temperature(other)) {
            let count = alike.len() as i64;
            let of_rows = |tensor: &Tensor| tensor.f_narrow(0, first + row, count);
            let chosen = of_rows(&self.chosen)?;
            let scores = ops::logprobs(&logits.f_narrow(0, row, count)?, &chosen, temperature(alike[0]))?;
            of_rows(&self.logprobs)?.f_copy_(&scores.logprobs)?;
            row += count;
        }
        Ok(())
    }

    /// Waits for the steps, and returns what they chose.
    fn read(&self, rows: usize, steps: usize) -> Result<Vec<Vec<Sampled>>> {
        // A copy that waited for compute would hold up those of others, such as states that make room.
        Stream::torch(&self.device)?.synchronize()?;
        let count = (rows * steps) as i64;
        let tokens: Vec<i64> =
            self.chosen.f_narrow(0, 0, count)?.f_to_device(tch::Device::Cpu)?.try_into()?;
        let logprobs: Vec<f32> =
            self.logprobs.f_narrow(0, 0, count)?.f_to_device(tch::Device::Cpu)?.try_into()?;
        let sampled = tokens.iter().zip(&logprobs).map(|(&token, &logprob)| Sampled { token, logprob });
        let sampled: Vec<Sampled> = sampled.collect();
        Ok(sampled.chunks(rows).map(<[Sampled]>::to_vec).collect())
    }

    fn tables_of(&self, rows: usize, tokens: usize) -> Result<Tensor> {
        let table_len = blocks_of(tokens) as i64;
        Ok(self.tables.f_narrow(0, 0, rows as i64 * table_len)?.f_view([rows as i64, table_len])?)
    }
}

/// Writes values to the front of a tensor.
fn write_front<T: tch::kind::Element>(tensor: &Tensor, values: &[T]) -> Result<()> {
    Ok(tensor.f_narrow(0, 0, values.len() as i64)?.f_copy_(&Tensor::f_from_slice(values)?)?)
}

/// The rows of a recording for so many: powers of two and the steps half way between them.
fn rows_of(rows: usize) -> usize {
    let power = rows.next_power_of_two();
    if power >= 8 && rows <= power / 4 * 3 { power / 4 * 3 } else { power }
}

/// The greatest length of a recording for sequences of so many tokens.
fn tokens_of(tokens: usize) -> usize {
    tokens.next_multiple_of(BLOCK_TOKENS).div_ceil(LEAST_TOKENS).next_power_of_two() * LEAST_TOKENS
}

/// As [`ops::Sampling`] has it.
fn choice(params: &SamplingParams) -> [f32; 4] {
    let sign = if params.is_greedy() { -1.0 } else { 1.0 };
    let inverse = sign * params.inverse_temperature();
    [inverse, params.top_p as f32, params.min_p as f32, params.top_k as f32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_are_few_and_large_enough() {
        for (wanted, rows) in
            [(1, 1), (2, 2), (3, 4), (6, 6), (7, 8), (48, 48), (49, 64), (192, 192), (256, 256)]
        {
            assert_eq!(rows_of(wanted), rows, "{wanted} rows");
        }
        for (wanted, tokens) in [(1, 256), (256, 256), (257, 512), (513, 1024), (1024, 1024)] {
            assert_eq!(tokens_of(wanted), tokens, "{wanted} tokens");
        }
    }
}
