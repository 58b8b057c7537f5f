//! Forward passes: turns the engine's sequences into tensors, and logits into tokens.

use std::{ops::Range, sync::Arc};

use anyroll_backends::ops::{self, Packing, padded_rows, upload};
use tch::{Device, Kind, Tensor};

use super::{
    kept::KeptSteps,
    recorder::{Recorder, STEPS_AHEAD},
    sampling::Sampled,
    sequence::{Group, Row},
    top_logprobs::TopLogprobs,
};
use crate::{
    Decoder, Error, KvCache, Result, RouteShape,
    batch::padding::{self, Padding},
    decoder::{
        Chosen, Pieces, Prefill, Step,
        kv_cache::{SCRATCH_BLOCK, blocks_of},
    },
    model::{Model, Weights},
};

/// Maximum number of logits of a prefill: 256 MiB on the host.
const MAX_LOGITS: usize = 1 << 26;

/// A decoder with its weights and its cache.
#[derive(Debug)]
pub(super) struct ModelRunner {
    decoder: Arc<Decoder>,
    weights: Vec<Vec<Tensor>>,
    cache: KvCache,
    device: Device,
    /// `None` if the device or the decoder does not support recording.
    recorder: Option<Recorder>,
    /// Sizes of a token's routes, if they are recorded.
    routes: Option<RouteShape>,
}

impl ModelRunner {
    /// Prepares passes with steps of up to `rows` rows, with the recorder of an engine before if there is one.
    pub fn new(
        decoder: Arc<Decoder>,
        weights: Vec<Vec<Tensor>>,
        cache: KvCache,
        rows: usize,
        kept: Option<Recorder>,
    ) -> Result<ModelRunner> {
        let like = &weights[0][0];
        let recorder = match (decoder.multiplies_in_place(&weights), kept) {
            (Ok(()), Some(kept)) => Ok(kept),
            (Ok(()), None) => Recorder::new(&decoder, like, &cache, rows)?,
            (Err(reason), _) => Err(reason),
        };
        if let Err(reason) = &recorder {
            tracing::debug!("steps are not recorded: {reason}");
        }
        let (device, mut recorder) = (like.device(), recorder.ok());
        let weights = decoder.prepare(weights)?;
        if let Some(recorder) = &mut recorder {
            recorder.begin(&decoder, &weights, &cache);
        }
        Ok(ModelRunner { decoder, weights, cache, device, recorder, routes: None })
    }

    /// Returns what remains of an engine's passes with steps of up to `rows` rows: see [`KeptSteps`].
    pub fn into_kept(self, rows: usize) -> Result<Option<KeptSteps>> {
        let ModelRunner { decoder, cache, recorder, .. } = self;
        // Ranks that hold a decoder together record at once, so that all would have to keep the same steps.
        let recorder = recorder.filter(|_| !decoder.is_split());
        recorder.map(|recorder| KeptSteps::new(decoder, cache, recorder, rows)).transpose()
    }

    /// Records the routes of tokens from now on.
    ///
    /// # Errors
    /// [`Error::Input`] if no layer has experts that tell their choice, or libtorch's error (out of memory).
    pub fn record_routes(&mut self) -> Result<()> {
        let problem = "no layer has experts that tell their choice".to_owned();
        let shape = self.decoder.route_shape().ok_or(Error::Input { what: "routes", problem })?;
        self.routes = Some(shape);
        self.recorder.as_mut().map_or(Ok(()), |recorder| recorder.keep_routes(shape))
    }

    /// Returns the sizes of a token's routes, if they are recorded.
    pub fn routes(&self) -> Option<RouteShape> {
        self.routes
    }

    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Returns the number of the cache's blocks.
    pub fn blocks(&self) -> usize {
        self.cache.blocks()
    }

    /// Returns the maximum number of prompts per pass.
    pub fn most_prompts(&self) -> usize {
        (MAX_LOGITS / self.decoder.config().vocab_size as usize).max(1)
    }

    /// Runs the tokens of each group from the start, with the training forward. Returns a token for each
    /// sequence.
    pub fn prompts(&mut self, groups: &mut [Group]) -> Result<Vec<Sampled>> {
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        let (mut tokens, mut lengths, mut last_rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        for group in &*groups {
            group.destinations(0..group.len(), tokens.len(), &mut rows, &mut places);
            tokens.extend(group.first().tokens());
            lengths.push(group.len() as i64);
            last_rows.push(tokens.len() as i64 - 1);
        }
        let longest = groups.iter().map(Group::len).max().unwrap_or(0);
        let padded = Padding::on(self.device).rows(padded_rows(tokens.len()));
        lengths.extend(padding::lengths(padded - tokens.len(), longest));
        tokens.resize(padded, padding::TOKEN);
        pad(&mut last_rows);
        let inputs = Prefill {
            tokens: self.upload(&tokens)?,
            packing: Packing::new(&lengths, self.device)?,
            last_rows: self.upload(&last_rows)?,
            rows: self.upload(&rows)?,
            places: self.upload(&places)?,
        };
        let mut chosen = self.routes.map(|_| Vec::new());
        let logits =
            self.run(|decoder, weights, cache| decoder.prefill(weights, &inputs, cache, &mut chosen))?;
        self.add_routes(groups.iter_mut().map(|group| (0..group.len(), group)), chosen)?;
        let of_rows = groups.iter().enumerate();
        self.choose(&logits, of_rows.flat_map(|(row, group)| group.last_rows().map(move |it| (row, it))))
    }

    /// Runs the tokens of groups at the given positions; earlier tokens are cached. Returns a token for each
    /// sequence of the groups whose last token is among them.
    pub fn pieces(&mut self, pieces: &mut [(Group, Range<usize>)]) -> Result<Vec<Sampled>> {
        if pieces.is_empty() {
            return Ok(Vec::new());
        }
        let (mut tokens, mut positions, mut contexts) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        let mut last_rows = Vec::new();
        for (group, of_group) in &*pieces {
            group.destinations(of_group.clone(), tokens.len(), &mut rows, &mut places);
            tokens.extend(group.first().tokens().skip(of_group.start).take(of_group.len()));
            positions.extend(of_group.clone().map(|position| position as i64));
            let context: Vec<i64> = (0..of_group.end).map(|position| group.first().place(position)).collect();
            contexts.push((of_group.len() as i64, self.upload(&context)?));
            if of_group.end == group.len() {
                last_rows.push(tokens.len() as i64 - 1);
            }
        }
        let padded = padded_rows(tokens.len());
        if tokens.len() < padded {
            // A padding sequence in the scratch block.
            let scratch: Vec<i64> = (0..(padded - tokens.len()) as i64).collect();
            rows.extend(scratch.iter().map(|row| tokens.len() as i64 + row));
            places.extend(&scratch);
            positions.extend(&scratch);
            contexts.push((scratch.len() as i64, self.upload(&scratch)?));
            tokens.resize(padded, 0);
        }
        let inputs = Pieces {
            tokens: self.upload(&tokens)?,
            positions: self.upload(&positions)?,
            rows: self.upload(&rows)?,
            places: self.upload(&places)?,
            contexts,
        };
        let mut chosen = self.routes.map(|_| Vec::new());
        let hidden =
            self.run(|decoder, weights, cache| decoder.extend(weights, &inputs, cache, &mut chosen))?;
        self.add_routes(pieces.iter_mut().map(|(group, of_group)| (of_group.clone(), group)), chosen)?;
        if last_rows.is_empty() {
            return Ok(Vec::new());
        }
        pad(&mut last_rows);
        let last = hidden.f_index_select(0, &self.upload(&last_rows)?)?;
        let logits = self.run(|decoder, weights, _| decoder.logits(weights, &last))?;
        let ending = pieces.iter().filter(|(group, of_group)| of_group.end == group.len());
        let of_rows = ending.map(|(group, _)| group).enumerate();
        self.choose(&logits, of_rows.flat_map(|(row, group)| group.last_rows().map(move |it| (row, it))))
    }

    /// Returns the maximum number of tokens per row that [`Self::steps`] runs.
    pub fn steps_ahead(&self) -> usize {
        if self.recorder.is_some() { STEPS_AHEAD } else { 1 }
    }

    /// Runs a step of the rows, and then further steps, `most` at most. Returns the tokens of each step. If several rows are
    /// of one sequence, `most` is 1.
    pub fn steps(&mut self, rows: &[Row], most: usize) -> Result<Vec<Vec<Sampled>>> {
        let ModelRunner { decoder, weights, cache, recorder: Some(recorder), .. } = self else {
            return Ok(vec![self.step(rows)?]);
        };
        with_weights(decoder, weights, |weights| recorder.steps((decoder, weights, cache), rows, most))
    }

    fn step(&mut self, rows: &[Row]) -> Result<Vec<Sampled>> {
        // The last row is repeated as padding: it writes the same key and value to its slot several times.
        let of_rows = |value: &dyn Fn(Row) -> i64| {
            let mut values: Vec<i64> = rows.iter().map(|&row| value(row)).collect();
            pad(&mut values);
            self.upload(&values)
        };
        let table_len = rows.iter().map(|row| blocks_of(row.len())).max().unwrap_or(0);
        let mut tables = vec![i64::from(SCRATCH_BLOCK); padded_rows(rows.len()) * table_len];
        let last = rows.last().into_iter().cycle();
        for (table, row) in tables.chunks_exact_mut(table_len).zip(rows.iter().chain(last)) {
            let blocks = &row.sequence.blocks[..table_len.min(row.sequence.blocks.len())];
            table.iter_mut().zip(blocks).for_each(|(entry, &block)| *entry = i64::from(block));
        }
        let inputs = Step {
            tokens: of_rows(&|row| row.token())?,
            positions: of_rows(&|row| row.len() as i64 - 1)?,
            lengths: of_rows(&|row| row.len() as i64)?,
            places: of_rows(&|row| row.place())?,
            tables: self.upload(&tables)?.f_view([-1, table_len as i64])?,
        };
        let mut chosen = self.routes.map(|_| Vec::new());
        let logits =
            self.run(|decoder, weights, cache| decoder.decode(weights, &inputs, cache, &mut chosen))?;
        let mut sampled = self.choose(&logits, rows.iter().copied().enumerate())?;
        if let (Some(shape), Some(chosen)) = (self.routes, chosen) {
            let routes = shape.of_rows(&Tensor::f_stack(&chosen, 1)?)?;
            sampled.iter_mut().zip(routes).for_each(|(sampled, route)| sampled.route = route);
        }
        Ok(sampled)
    }

    /// Adds the experts of a pass's rows, if they are recorded, to the groups that have the rows one after the other.
    fn add_routes<'a>(
        &self,
        groups: impl Iterator<Item = (Range<usize>, &'a mut Group)>,
        chosen: Chosen,
    ) -> Result<()> {
        let (Some(shape), Some(chosen)) = (self.routes, chosen) else { return Ok(()) };
        let bytes = shape.bytes_of(&Tensor::f_stack(&chosen, 1)?)?;
        let mut rest = bytes.as_slice();
        for (positions, group) in groups {
            let (own, behind) = rest.split_at(positions.len() * shape.token_bytes());
            group.add_routes(shape, positions, own);
            rest = behind; // at last the padding's
        }
        Ok(())
    }

    fn run(
        &mut self,
        pass: impl FnOnce(&Decoder, &[Weights], &mut KvCache) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let ModelRunner { decoder, weights, cache, .. } = self;
        with_weights(decoder, weights, |weights| pass(decoder, weights, cache))
    }

    /// Chooses a token for each row from `logits` `[rows, V]`, of which it has the row with the given index.
    fn choose<'a>(
        &mut self,
        logits: &Tensor,
        rows: impl Iterator<Item = (usize, Row<'a>)>,
    ) -> Result<Vec<Sampled>> {
        let (indices, rows): (Vec<usize>, Vec<Row>) = rows.unzip();
        match &mut self.recorder {
            Some(recorder) => {
                let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
                let indices = upload(&indices, self.device)?;
                recorder.choose(&logits.f_index_select(0, &indices)?, &rows)
            }
            None => choose_on_host(logits, &indices, &rows),
        }
    }

    fn upload(&self, values: &[i64]) -> Result<Tensor> {
        Ok(upload(values, self.device)?)
    }
}

/// Repeats the last value up to the number of rows of a product.
fn pad(values: &mut Vec<i64>) {
    if let Some(&last) = values.last() {
        values.resize(padded_rows(values.len()), last);
    }
}

/// Calls `body` with the weights of each block.
fn with_weights<R>(decoder: &Decoder, weights: &[Vec<Tensor>], body: impl FnOnce(&[Weights]) -> R) -> R {
    let units: Vec<Vec<&[Tensor]>> = (0..decoder.blocks())
        .map(|block| decoder.units_of(block).iter().map(|&unit| &*weights[unit]).collect())
        .collect();
    body(&units.iter().map(|units| Weights::new(units).prepared()).collect::<Vec<Weights>>())
}

/// Chooses tokens on the host. Log-probs are computed by the training loss's operation, on the same logits.
pub(super) fn choose_on_host(logits: &Tensor, indices: &[usize], rows: &[Row]) -> Result<Vec<Sampled>> {
    let (vocab_size, device) = (logits.size()[1] as usize, logits.device());
    let on_host = logits.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?;
    let mut values = vec![0.0; on_host.numel()];
    on_host.f_copy_data(&mut values, on_host.numel())?;
    let logits_at = |index: usize| &values[index * vocab_size..][..vocab_size];
    let chosen: Vec<(usize, i64, f64)> = rows
        .iter()
        .zip(indices)
        .map(|(row, &index)| (index, row.choose(logits_at(index)), row.params().softmax_temperature()))
        .collect();
    let mut sampled = Vec::with_capacity(chosen.len());
    for chunk in chosen.chunk_by(|(_, _, temperature), (_, _, other)| temperature == other) {
        let indices: Vec<i64> = chunk.iter().map(|(index, ..)| *index as i64).collect();
        let tokens: Vec<i64> = chunk.iter().map(|(_, token, _)| *token).collect();
        let of_rows = logits.f_index_select(0, &upload(&indices, device)?)?;
        let scores = ops::logprobs(&of_rows, &upload(&tokens, device)?, chunk[0].2)?;
        let logprobs: Vec<f32> = scores.logprobs.f_to_device(Device::Cpu)?.try_into()?;
        sampled.extend(tokens.iter().zip(logprobs).map(|(&token, logprob)| Sampled::new(token, logprob)));
    }
    if rows.iter().any(|row| row.params().top_logprobs > 0) {
        let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let of_rows = logits.f_index_select(0, &upload(&indices, device)?)?;
        if let Some(top_logprobs) = TopLogprobs::of(&of_rows, rows)? {
            top_logprobs.write_to(rows, &mut sampled)?;
        }
    }
    Ok(sampled)
}
