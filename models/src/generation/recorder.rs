//! Recorded decoding steps: a step is one call, and several run before the host checks the results.
//!
//! A recording has a fixed number of rows and a maximum length, and rows are either of a sequence each or several of one.
//! Tokens, positions and block tables lie in the
//! device's memory, and each step writes the inputs of the next. Rows that a batch lacks are padded and use
//! the scratch block.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use anyroll_backends::{
    Device, Graph, MemoryInfo, Stream,
    ops::{self, AttentionParts},
};
use tch::{Kind, Tensor};

use super::{
    SamplingParams,
    format::masked,
    sampling::{Sampled, uniform},
    sequence::Row,
    speculation::checked_rows,
    top_logprobs::TopLogprobs,
};
use crate::{
    Decoder, KvCache, Result, Room, RouteShape, Runs,
    decoder::{
        StepMemory, StepTables,
        kv_cache::{BLOCK_TOKENS, SCRATCH_BLOCK, blocks_of},
    },
    model::Weights,
};

/// Number of steps between two checks of the host. A sequence that has ended runs for fewer further steps
/// than this; their results are discarded.
pub(super) const STEPS_AHEAD: usize = 16;

/// Numbers per row of [`ops::Sampling`].
const NUMBERS_OF_A_CHOICE: usize = 5;
const TOKENS_OF_A_WORD: usize = 32;

/// Recordings that an engine leaves to the next one: as many as a rollout needs whose sequences end one by one.
const MOST_KEPT: usize = 16;
/// Bytes of their attention.
const MOST_KEPT_BYTES: usize = 64 << 20;

/// Recordings have this length times a power of two, so that there are few.
const LEAST_TOKENS: usize = 256;

/// The recordings of an engine.
#[derive(Debug)]
pub(super) struct Recorder {
    device: Arc<dyn Device>,
    memory: StepMemory,
    /// int32; a recording's `[rows, W]` is at the front.
    tables: Tensor,
    /// Inputs and outputs of [`ops::Sampling`], for all rows of [`STEPS_AHEAD`] steps in order.
    choices: Tensor,
    uniforms: Tensor,
    seen: Tensor,
    chosen: Tensor,
    logprobs: Tensor,
    /// Routes of all rows of [`STEPS_AHEAD`] steps, `[steps, rows, layers, J]`, if they are recorded; a step with fewer rows
    /// is at the front of its part.
    routes: Option<(RouteShape, Tensor)>,
    /// Words per row of `seen`.
    words: usize,
    /// Maximum sequence length.
    longest: usize,
    /// True if log-probs must be bitwise equal to training's.
    is_strict: bool,
    recorded: HashMap<Key, Recorded>,
    /// Addresses of the weights that the recordings read.
    weights_at: Vec<usize>,
    /// Number of calls of [`Self::steps`].
    calls: u64,
}

/// Number of rows, and maximum length, of a recording; true if several rows may be of one sequence.
type Key = (usize, usize, bool);

/// A recorded step for a number of rows and a maximum length.
#[derive(Debug)]
struct Recorded {
    graph: Graph,
    /// Memory of its attention.
    parts: AttentionParts,
    /// The last call that used it.
    used: u64,
}

impl Recorder {
    /// Returns the bytes that a recorder for up to `rows` rows takes between two engines, at most.
    pub fn kept_bytes(decoder: &Decoder, rows: usize, runs: Runs) -> Result<usize> {
        let (config, rows) = (decoder.config(), rows_of(rows));
        let words = (config.vocab_size as usize).div_ceil(TOKENS_OF_A_WORD);
        let blocks = blocks_of(tokens_of(config.max_position_embeddings as usize));
        let routes = decoder.route_shape().map_or(0, RouteShape::token_bytes);
        // Tokens, random numbers and log-probs.
        let of_step = 2 * size_of::<i64>() + size_of::<f32>() + routes;
        let of_row = (blocks + NUMBERS_OF_A_CHOICE + words) * size_of::<i32>() + STEPS_AHEAD * of_step;
        Ok(StepMemory::bytes(decoder, rows, runs)? + rows * of_row + MOST_KEPT_BYTES)
    }

    /// Prepares steps of up to `rows` rows. Returns the reason if the device or the decoder does not
    /// support it.
    pub fn new(
        decoder: &Decoder,
        like: &Tensor,
        cache: &KvCache,
        rows: usize,
    ) -> Result<Result<Recorder, String>> {
        if decoder.is_guided() {
            return Ok(Err("the decoder's completions are guided by other heads".to_owned()));
        }
        let config = decoder.config();
        let device = ops::recording_device(like, config.head_dim, config.vocab_size);
        let device = match decoder.decodes_in_place(like).and(device) {
            Ok(device) => device,
            Err(reason) => return Ok(Err(reason)),
        };
        Recorder::on(device, decoder, like, cache, rows).map(Ok)
    }

    fn on(
        device: Arc<dyn Device>,
        decoder: &Decoder,
        like: &Tensor,
        cache: &KvCache,
        rows: usize,
    ) -> Result<Recorder> {
        let (config, at) = (decoder.config(), like.device());
        let rows = rows_of(rows);
        let words = (config.vocab_size as usize).div_ceil(TOKENS_OF_A_WORD);
        let longest = longest(decoder, cache);
        let zeros = |count: usize, kind| Tensor::f_zeros([count as i64], (kind, at));
        Ok(Recorder {
            device,
            memory: StepMemory::new(decoder, rows as i64, like.kind(), at)?,
            tables: zeros(rows * blocks_of(tokens_of(longest)), Kind::Int)?,
            choices: zeros(rows * NUMBERS_OF_A_CHOICE, Kind::Float)?,
            uniforms: zeros(rows * STEPS_AHEAD, Kind::Double)?,
            seen: zeros(rows * words, Kind::Int)?,
            chosen: zeros(rows * STEPS_AHEAD, Kind::Int64)?,
            logprobs: zeros(rows * STEPS_AHEAD, Kind::Float)?,
            routes: None,
            words,
            longest,
            is_strict: decoder.is_strict(),
            recorded: HashMap::new(),
            weights_at: Vec::new(),
            calls: 0,
        })
    }

    /// Begins to generate with `weights`, and a cache whose addresses are those of all recordings. Recordings of weights
    /// elsewhere are dropped.
    pub fn begin(&mut self, decoder: &Decoder, weights: &[Vec<Tensor>], cache: &KvCache) {
        let at: Vec<usize> = weights.iter().flatten().map(|tensor| tensor.data_ptr() as usize).collect();
        if self.weights_at != at {
            self.recorded.clear();
            self.weights_at = at;
        }
        self.longest = longest(decoder, cache);
    }

    /// Returns the memory of the device.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(self.device.memory_info()?)
    }

    /// Drops recordings so that the rest, used last, are few and take little memory until the next engine.
    pub fn trim(&mut self) {
        let recorded = self.recorded.iter().map(|(&key, it)| (key, it.used, it.parts.bytes()));
        let kept = kept(recorded.collect());
        self.recorded.retain(|key, _| kept.contains(key));
    }

    /// Records the routes of tokens, before the first step of an engine.
    pub fn keep_routes(&mut self, shape: RouteShape) -> Result<()> {
        if self.routes.is_some() {
            return Ok(());
        }
        self.memory.keep_routes(shape)?;
        let rows = self.memory.tokens.size()[0];
        let size = [STEPS_AHEAD as i64, rows, shape.layers as i64, shape.per_token as i64];
        self.routes = Some((shape, Tensor::f_zeros(size, (shape.kind(), self.tables.device()))?));
        Ok(())
    }

    /// Runs up to `most` steps, [`STEPS_AHEAD`] at most, for which the sequences already have blocks. Runs one step if
    /// a sequence has a format, which the host tracks, or several rows. Returns the tokens of each step.
    pub fn steps(
        &mut self,
        (decoder, weights, cache): (&Decoder, &[Weights], &KvCache),
        rows: &[Row],
        most: usize,
    ) -> Result<Vec<Vec<Sampled>>> {
        let left = |row: &Row| row.params().max_new_tokens - row.index();
        let together = rows.iter().any(|row| !row.proposed.is_empty());
        let alone = together || rows.iter().any(|row| row.sequence.format_state.is_some());
        let most = if alone { 1 } else { most.min(STEPS_AHEAD) };
        let steps = rows.iter().map(left).max().unwrap_or(0).min(most);
        let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0) + steps;
        // Results past the maximum position are discarded.
        let count = if together { checked_rows(rows.len()) } else { rows_of(rows.len()) };
        let key = (count, tokens_of(longest.min(self.longest)), together);
        if !self.recorded.contains_key(&key) {
            let recorded = self.record(decoder, weights, cache, key)?;
            self.recorded.insert(key, recorded);
        }
        self.calls += 1;
        self.recorded.get_mut(&key).expect("just inserted").used = self.calls;
        self.upload_inputs(rows, key)?;
        let stream = Stream::torch(&self.device)?;
        let memory = self.memory.first(rows.len() as i64)?;
        let (logits, routes) = (&memory.logits, memory.routes()?);
        let mut top_logprobs = Vec::with_capacity(steps);
        for step in 0..steps {
            self.recorded[&key].graph.launch(&stream)?;
            if step == 0 {
                // Overlaps with the device's work.
                self.upload_choices(rows, steps)?;
            }
            if let (Some(of_step), Some((_, all))) = (&routes, &self.routes) {
                all.f_get(step as i64)?.f_narrow(0, 0, rows.len() as i64)?.f_copy_(of_step)?;
            }
            top_logprobs.push(TopLogprobs::of(logits, rows)?);
            self.sample(logits, rows, step)?;
        }
        let room = self.memory.room();
        room.map_or(Ok(()), Room::watch)?;
        let mut sampled = self.read(rows.len(), steps)?;
        self.read_routes(&mut sampled)?;
        room.map_or(Ok(()), Room::check)?;
        for (of_step, sampled) in top_logprobs.iter().zip(&mut sampled) {
            if let Some(of_step) = of_step {
                of_step.write_to(rows, sampled)?;
            }
        }
        Ok(sampled)
    }

    /// Chooses a token for each row of `logits`, for at most as many rows as the recorder was created for.
    pub fn choose(&mut self, logits: &Tensor, rows: &[Row]) -> Result<Vec<Sampled>> {
        self.upload_choices(rows, 1)?;
        let top_logprobs = TopLogprobs::of(logits, rows)?;
        self.sample(logits, rows, 0)?;
        let mut sampled = self.read(rows.len(), 1)?.remove(0);
        if let Some(top_logprobs) = top_logprobs {
            top_logprobs.write_to(rows, &mut sampled)?;
        }
        Ok(sampled)
    }

    fn record(
        &mut self,
        decoder: &Decoder,
        weights: &[Weights],
        cache: &KvCache,
        (rows, tokens, together): Key,
    ) -> Result<Recorded> {
        let config = decoder.config();
        let tables = StepTables { blocks: self.tables_of(rows, tokens)?, together };
        let mut memory = self.memory.first(rows as i64)?;
        // The step runs once before it is recorded, and must not write to a sequence's block.
        drop(self.tables.f_zero_()?);
        drop(self.memory.positions.f_zero_()?);
        let (heads, dim) = (config.num_attention_heads, config.head_dim);
        let mut parts = AttentionParts::new(rows as i64, heads, dim, tokens as i64, self.tables.device())?;
        let graph = Graph::record(&self.device, || {
            decoder.decode_in_place(weights, &mut memory, &tables, &mut parts, cache)
        })?;
        Ok(Recorded { graph, parts, used: 0 })
    }

    /// Uploads the inputs of the first step: every value of the recording's rows, since earlier steps changed
    /// them.
    fn upload_inputs(&self, rows: &[Row], (count, tokens, _): Key) -> Result<()> {
        let table_len = blocks_of(tokens);
        let (mut tables, mut next) = (vec![SCRATCH_BLOCK as i32; count * table_len], vec![0; count]);
        let mut positions = next.clone();
        for (index, row) in rows.iter().enumerate() {
            let table = &mut tables[index * table_len..][..table_len];
            table.iter_mut().zip(&row.sequence.blocks).for_each(|(entry, &block)| *entry = block as i32);
            next[index] = row.token();
            positions[index] = row.len() as i64 - 1;
        }
        write_front(&self.tables, &tables)?;
        write_front(&self.memory.tokens, &next)?;
        write_front(&self.memory.positions, &positions)
    }

    /// Uploads the sampling parameters of the rows' next tokens.
    fn upload_choices(&self, rows: &[Row], steps: usize) -> Result<()> {
        let choices: Vec<f32> = rows.iter().flat_map(|row| choice(row.params())).collect();
        let of_step =
            |step: usize| rows.iter().map(move |row| uniform(row.sequence.seed, row.index() + step));
        let uniforms: Vec<f64> = (0..steps).flat_map(of_step).collect();
        write_front(&self.choices, &choices)?;
        write_front(&self.uniforms, &uniforms)?;
        // Rows without a penalty are not read.
        if rows.iter().any(|row| row.params().penalizes()) {
            write_front(&self.seen, &seen(rows, self.words))?;
        }
        Ok(())
    }

    /// Chooses a token for each row of `logits`.
    fn sample(&mut self, logits: &Tensor, rows: &[Row], step: usize) -> Result<()> {
        let count = rows.len() as i64;
        let of_step = |tensor: &Tensor| tensor.f_narrow(0, step as i64 * count, count);
        let mut memory = self.memory.first(count)?;
        let sampling = ops::Sampling {
            choices: &of_rows(&self.choices, count, NUMBERS_OF_A_CHOICE)?,
            uniforms: &of_step(&self.uniforms)?,
            seen: &mut of_rows(&self.seen, count, self.words)?,
            tokens: &mut memory.tokens,
            positions: &mut memory.positions,
            chosen: &mut of_step(&self.chosen)?,
            logprobs: &mut of_step(&self.logprobs)?,
        };
        let masked = masked(logits, rows)?;
        ops::sample_into(masked.as_ref().unwrap_or(logits), sampling)?;
        self.score(logits, rows, step)
    }

    /// Recomputes log-probs of chosen tokens with training's own operation. If they must be bitwise equal to
    /// training's, it does so for all sequences. Otherwise it does so for those with a format, whose
    /// log-probs are over all tokens as well.
    fn score(&mut self, logits: &Tensor, rows: &[Row], step: usize) -> Result<()> {
        let temperature = |row: &Row| row.params().softmax_temperature();
        let (mut start, first) = (0, (step * rows.len()) as i64);
        let wants = |row: &Row| self.is_strict || row.sequence.format_state.is_some();
        let alike =
            |one: &Row, other: &Row| (temperature(one), wants(one)) == (temperature(other), wants(other));
        for alike in rows.chunk_by(alike) {
            let count = alike.len() as i64;
            if !wants(&alike[0]) {
                start += count;
                continue;
            }
            let of_rows = |tensor: &Tensor| tensor.f_narrow(0, first + start, count);
            let chosen = of_rows(&self.chosen)?;
            let scores = ops::logprobs(&logits.f_narrow(0, start, count)?, &chosen, temperature(&alike[0]))?;
            of_rows(&self.logprobs)?.f_copy_(&scores.logprobs)?;
            start += count;
        }
        Ok(())
    }

    /// Waits for the steps and returns the tokens that they chose.
    fn read(&self, rows: usize, steps: usize) -> Result<Vec<Vec<Sampled>>> {
        // A copy waiting for compute would block other copies, such as offloads that free memory.
        Stream::torch(&self.device)?.synchronize()?;
        let count = (rows * steps) as i64;
        let tokens: Vec<i64> =
            self.chosen.f_narrow(0, 0, count)?.f_to_device(tch::Device::Cpu)?.try_into()?;
        let logprobs: Vec<f32> =
            self.logprobs.f_narrow(0, 0, count)?.f_to_device(tch::Device::Cpu)?.try_into()?;
        let sampled = tokens.iter().zip(&logprobs).map(|(&token, &logprob)| Sampled::new(token, logprob));
        let sampled: Vec<Sampled> = sampled.collect();
        Ok(sampled.chunks(rows).map(<[Sampled]>::to_vec).collect())
    }

    /// Adds the routes of the steps' rows, if they are recorded, to the tokens that their passes chose.
    fn read_routes(&self, sampled: &mut [Vec<Sampled>]) -> Result<()> {
        let Some((shape, all)) = &self.routes else { return Ok(()) };
        let rows = sampled.first().map_or(0, Vec::len) as i64;
        let routes = all.f_narrow(0, 0, sampled.len() as i64)?.f_narrow(1, 0, rows)?;
        let of_rows = shape.of_rows(&routes)?;
        sampled.iter_mut().flatten().zip(of_rows).for_each(|(sampled, route)| sampled.route = route);
        Ok(())
    }

    fn tables_of(&self, rows: usize, tokens: usize) -> Result<Tensor> {
        of_rows(&self.tables, rows as i64, blocks_of(tokens))
    }
}

/// Returns the front of a tensor as `[rows, width]`.
fn of_rows(tensor: &Tensor, rows: i64, width: usize) -> Result<Tensor> {
    let width = width as i64;
    Ok(tensor.f_narrow(0, 0, rows * width)?.f_view([rows, width])?)
}

/// Writes values to the front of a tensor, in stream order.
fn write_front<T: tch::kind::Element>(tensor: &Tensor, values: &[T]) -> Result<()> {
    let uploaded = ops::upload(values, tensor.device())?;
    Ok(tensor.f_narrow(0, 0, values.len() as i64)?.f_copy_(&uploaded)?)
}

/// Returns the maximum length of a sequence.
fn longest(decoder: &Decoder, cache: &KvCache) -> usize {
    cache.tokens().min(decoder.config().max_position_embeddings as usize)
}

/// Returns the recordings to keep of `recorded`, each with the call that used it last and its bytes.
fn kept(mut recorded: Vec<(Key, u64, usize)>) -> Vec<Key> {
    recorded.sort_by_key(|&(_, used, _)| Reverse(used));
    let sums = recorded.iter().scan(0, |sum, &(key, _, bytes)| {
        *sum += bytes;
        Some((key, *sum))
    });
    sums.take(MOST_KEPT).take_while(|&(_, sum)| sum <= MOST_KEPT_BYTES).map(|(key, _)| key).collect()
}

/// Returns the rows of a recording for `rows` rows: powers of two, and the numbers halfway between them.
fn rows_of(rows: usize) -> usize {
    let power = rows.next_power_of_two();
    if power >= 8 && rows <= power / 4 * 3 { power / 4 * 3 } else { power }
}

/// Returns the maximum length of a recording for sequences of `tokens` tokens.
fn tokens_of(tokens: usize) -> usize {
    tokens.next_multiple_of(BLOCK_TOKENS).div_ceil(LEAST_TOKENS).next_power_of_two() * LEAST_TOKENS
}

/// Returns the parameters in the layout of [`ops::Sampling`].
fn choice(params: &SamplingParams) -> [f32; NUMBERS_OF_A_CHOICE] {
    let sign = if params.is_greedy() { -1.0 } else { 1.0 };
    let inverse = sign * params.inverse_temperature();
    let penalty = params.repetition_penalty as f32;
    [inverse, params.top_p as f32, params.min_p as f32, params.top_k as f32, penalty]
}

/// Returns the tokens of rows with a penalty in the layout of [`ops::Sampling`], `words` words per row.
fn seen(rows: &[Row], words: usize) -> Vec<i32> {
    let mut seen = vec![0; rows.len() * words];
    for (of_row, row) in seen.chunks_exact_mut(words).zip(rows) {
        if row.params().penalizes() {
            for token in row.tokens().map(|token| token as usize) {
                of_row[token / TOKENS_OF_A_WORD] |= 1 << (token % TOKENS_OF_A_WORD);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use anyroll_backends::{BackendKind, DType, DeviceId, open};

    use super::*;
    use crate::{
        DecoderConfig,
        generation::{Completion, model_runner::choose_on_host, sequence::Sequence},
    };

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

    #[test]
    fn recordings_used_last_are_kept_within_the_limits() {
        let of = |count: usize, bytes: usize| {
            (0..count).map(|index| ((index, 256, false), 100 + index as u64, bytes)).collect::<Vec<_>>()
        };
        assert_eq!(kept(of(20, 1)), (4..20).rev().map(|index| (index, 256, false)).collect::<Vec<_>>());
        assert_eq!(kept(of(5, MOST_KEPT_BYTES / 2)), [(4, 256, false), (3, 256, false)]);
        assert_eq!(kept(of(2, MOST_KEPT_BYTES + 1)), []);
    }

    /// Returns the first device with kernels. Without one, prints a skip message past the harness, which
    /// hides the output of passing tests.
    fn device() -> Option<Arc<dyn Device>> {
        let kinds = BackendKind::all().filter(|kind| kind.runs_models() && !kind.is_host());
        let mut devices = kinds.filter_map(|backend| open(DeviceId { backend, ordinal: 0 }).ok());
        let device = devices.find(|device| device.has_kernels());
        if device.is_none() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: no device here compiles kernels");
        }
        device
    }

    const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

    /// Creates a recorder for `rows` rows.
    fn recorder(device: &Arc<dyn Device>, (dtype, vocab_size): (DType, i64), rows: usize) -> Recorder {
        let config = DecoderConfig {
            vocab_size,
            intermediate_size: 32,
            rope_theta: 1000.0,
            tie_word_embeddings: true,
            initializer_range: 0.2,
            ..DecoderConfig::plain(1, 32, 2)
        };
        let at = device.torch_device().unwrap().tch();
        let cache = KvCache::new(&config, 2, dtype, &Stream::torch(device).unwrap()).unwrap();
        let like = Tensor::zeros([1], (dtype.kind(), at));
        let decoder = Decoder::new(config, at).unwrap();
        Recorder::new(&decoder, &like, &cache, rows).unwrap().unwrap()
    }

    #[test]
    fn steps_are_recorded_in_every_precision() {
        let Some(device) = device() else { return };
        for dtype in DTYPES {
            assert_eq!(recorder(&device, (dtype, 1003), 3).memory.logits.kind(), dtype.kind());
        }
    }

    /// Returns sequences with every sampling method, with penalties and without, if `penalty` keeps them.
    fn sequences(vocab: i64, penalty: impl Fn(f64) -> f64) -> Vec<Sequence> {
        let free = SamplingParams::default();
        let all = SamplingParams { top_k: 50, top_p: 0.9, min_p: 0.02, temperature: 1.3, ..free.clone() };
        let ways = [
            (free.clone(), 1.0),
            (free.clone(), 1.3),
            (free.clone(), 0.7),
            (SamplingParams { temperature: 0.0, ..free.clone() }, 1.0),
            (SamplingParams { temperature: 0.0, ..free.clone() }, 1.3),
            (SamplingParams { top_k: 5, ..free.clone() }, 1.3),
            (SamplingParams { top_k: 5, ..free.clone() }, 1.0),
            (SamplingParams { top_p: 0.8, ..free.clone() }, 1.5),
            (SamplingParams { top_p: 0.8, ..free.clone() }, 1.0),
            (SamplingParams { min_p: 0.1, temperature: 0.7, ..free }, 1.2),
            (all.clone(), 1.1),
            (all, 1.0),
        ];
        let sequence = |(row, (way, of_way))| Sequence {
            id: row,
            // About half of all tokens, most of them several times.
            prompt: (0..vocab).map(|i| (i * i + row as i64) % vocab).collect(),
            params: Arc::new(SamplingParams {
                repetition_penalty: penalty(of_way),
                max_new_tokens: 99,
                ..way
            }),
            stop: None,
            format_state: None,
            seed: 100 + row,
            keep: false,
            follows: None,
            // Further tokens follow.
            completion: Completion { tokens: vec![row as i64 * 3 + 1; 2], ..Completion::default() },
            blocks: Vec::new(),
        };
        (0..).zip(ways).map(sequence).collect()
    }

    /// Returns the tokens chosen from each step's logits `[rows, V]`, without a check in between.
    fn choose(recorder: &mut Recorder, logits: &[Tensor], sequences: &[Sequence]) -> Vec<Vec<Sampled>> {
        let rows: Vec<Row> = sequences.iter().map(Row::last_of).collect();
        recorder.upload_choices(&rows, logits.len()).unwrap();
        for (step, logits) in logits.iter().enumerate() {
            recorder.sample(&logits.to_device(recorder.tables.device()), &rows, step).unwrap();
        }
        recorder.read(sequences.len(), logits.len()).unwrap()
    }

    fn check_choices(device: &Arc<dyn Device>, dtype: DType, vocab: i64) {
        const STEPS: i64 = 6;
        let mut sequences = sequences(vocab, |penalty| penalty);
        let indices: Vec<usize> = (0..sequences.len()).collect();
        let mut recorder = recorder(device, (dtype, vocab), indices.len());
        // In 16 bits first, so that many values are equal.
        let narrow = if dtype == DType::F16 { Kind::Half } else { Kind::BFloat16 };
        let values = Tensor::arange(STEPS * indices.len() as i64 * vocab, (Kind::Double, tch::Device::Cpu));
        let values = (&values * 0.37).sin() * 4.0 + (&values * &values * 0.011).cos() * 3.0;
        let values = values.to_kind(narrow).to_kind(dtype.kind());
        let logits = values.view([STEPS, -1, vocab]).unbind(0);
        let found = choose(&mut recorder, &logits, &sequences);
        let unpenalized = choose(&mut recorder, &logits, &self::sequences(vocab, |_| 1.0));
        for (step, logits) in logits.iter().enumerate() {
            let rows: Vec<Row> = sequences.iter().map(Row::last_of).collect();
            let expected = choose_on_host(logits, &indices, &rows).unwrap();
            for (row, sequence) in sequences.iter_mut().enumerate() {
                let (found, expected) = (found[step][row].clone(), &expected[row]);
                let what = format!("{dtype:?}, {vocab} tokens, step {step}, {:?}", sequence.params);
                assert_eq!(found.token, expected.token, "{what}");
                assert!((found.logprob - expected.logprob).abs() < 1e-4, "{found:?}, {expected:?}: {what}");
                // Penalties of other sequences have no effect.
                assert!(sequence.params.penalizes() || found == unpenalized[step][row], "{found:?}: {what}");
                sequence.extend(found, 0);
            }
        }
        let penalties = sequences.iter().enumerate().filter(|(_, sequence)| sequence.params.penalizes());
        let changed = penalties
            .filter(|(row, _)| found.iter().zip(&unpenalized).any(|(a, b)| a[*row].token != b[*row].token));
        assert!(changed.count() > 3, "the test needs penalties that change tokens");
    }

    /// Logits of a model that has diverged.
    #[test]
    fn logits_that_are_no_numbers_give_a_token() {
        const VOCAB: i64 = 1003;
        let Some(device) = device() else { return };
        let sequences = sequences(VOCAB, |penalty| penalty);
        let mut recorder = recorder(&device, (DType::F32, VOCAB), sequences.len());
        let numbers = Tensor::zeros([sequences.len() as i64, VOCAB], (Kind::Float, tch::Device::Cpu));
        let some = numbers.copy();
        let _ = some.narrow(1, 300, 200).fill_(f64::NAN);
        let steps = [numbers.full_like(f64::NAN), some, numbers.full_like(f64::NEG_INFINITY)];
        for chosen in choose(&mut recorder, &steps, &sequences).concat() {
            assert!((0..VOCAB).contains(&chosen.token), "{chosen:?}");
        }
    }

    #[test]
    fn a_device_chooses_as_the_host_does() {
        let Some(device) = device() else { return };
        for dtype in DTYPES {
            // Vocabularies in which vectorized loads are unaligned, and aligned.
            check_choices(&device, dtype, 1003);
            check_choices(&device, dtype, 20_000);
        }
    }
}
