//! The engine: takes requests and returns completions as they end.
//!
//! A step runs one pass over waiting prompts, if there is room for some, and tokens of every live sequence
//! otherwise, more of them with [`Speculation`]: few sequences take nearly as long for a token as many. A prompt
//! longer than a pass is split into chunks, one per step, and other sequences get tokens in the same step. Tokens
//! of kept samples are not run again for the samples that follow them. If blocks run out, kept samples are freed
//! first. Then the sequence admitted last is preempted: it frees its blocks and waits; later its tokens run again,
//! and it continues.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use anyroll_backends::profile::span;
use tch::Tensor;

use super::{
    Completion, Ending, Request, Sample,
    block_pool::BlockPool,
    format::FormatState,
    kept::KeptSteps,
    model_runner::ModelRunner,
    prefix_cache::PrefixCache,
    sampling::Sampled,
    sequence::{Group, Row, Sequence},
    speculation::{Pace, Speculated, Speculation},
};
use crate::{
    Decoder, Error, KvCache, Result,
    decoder::kv_cache::{BLOCK_TOKENS, blocks_of},
};

/// A sample's index, in the order of submission.
pub type SampleId = u64;

/// Limits on concurrent work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of live sequences.
    pub sequences: usize,
    /// Maximum number of prompt tokens per pass: bounds the activations, and the time that live sequences
    /// wait for a long prompt. At least one block, 16.
    pub prefill_tokens: usize,
    /// Speculation: `None` for steps of one token of every sequence.
    pub speculation: Option<Speculation>,
}

impl Limits {
    /// Limits to `sequences` sequences, and passes of up to 16,384 tokens, without speculation.
    pub fn new(sequences: usize) -> Limits {
        Limits { sequences, prefill_tokens: 1 << 14, speculation: None }
    }

    /// Returns the maximum number of rows of a step.
    pub fn rows(self) -> usize {
        let speculated = self.speculation.map_or(0, |speculation| speculation.rows(self.sequences));
        self.sequences.max(speculated)
    }
}

/// Current load of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Samples that wait for room.
    pub waiting: usize,
    /// Samples that get a token per step, or whose prompt is being processed.
    pub live: usize,
    /// Blocks available to sequences.
    pub blocks: usize,
    /// Blocks that are neither used nor kept.
    pub free_blocks: usize,
    /// Samples that have ended and are kept.
    pub kept: usize,
    /// Tokens taken from the cache of earlier samples, since the engine was created.
    pub reused_tokens: u64,
    /// Number of preemptions since the engine was created.
    pub preemptions: u64,
    /// Proposals since the engine was created.
    pub speculated: Speculated,
}

/// Generates with fixed weights. Unusable after an error.
#[derive(Debug)]
pub struct Engine {
    runner: ModelRunner,
    version: u64,
    pool: BlockPool,
    limits: Limits,
    next_id: SampleId,
    waiting: VecDeque<Group>,
    /// A long prompt in progress.
    long: Option<UnderWay>,
    /// In order of admission.
    live: Vec<Sequence>,
    prefix_cache: PrefixCache,
    ended: Vec<(SampleId, Completion)>,
    preemptions: u64,
    reused_tokens: u64,
    speculated: Speculated,
    pace: Pace,
}

/// A group, and the number of its tokens that have run.
type UnderWay = (Group, usize);

impl Engine {
    /// Creates an engine over `weights`, the tensors of every unit of the decoder. Completions are marked
    /// with the policy `version`. Overwrites the contents of `cache`.
    pub fn new(
        decoder: Arc<Decoder>,
        weights: Vec<Vec<Tensor>>,
        version: u64,
        cache: KvCache,
        limits: Limits,
    ) -> Result<Engine> {
        Engine::over(version, limits, || ModelRunner::new(decoder, weights, cache, limits.rows(), None))
    }

    /// Like [`Self::new`], with `blocks` blocks of the cache of an engine that has ended, and with its recorded steps: see
    /// [`Self::into_kept`]. The caller has checked that they [fit](KeptSteps::fits).
    pub fn with_kept(
        kept: KeptSteps,
        weights: Vec<Vec<Tensor>>,
        version: u64,
        blocks: usize,
        limits: Limits,
    ) -> Result<Engine> {
        Engine::over(version, limits, || {
            let KeptSteps { decoder, mut cache, recorder, .. } = kept;
            cache.restore(blocks)?;
            ModelRunner::new(decoder, weights, cache, limits.rows(), Some(recorder))
        })
    }

    fn over(version: u64, limits: Limits, runner: impl FnOnce() -> Result<ModelRunner>) -> Result<Engine> {
        let least = |value: usize, least: usize, what| {
            let problem = format!("is {value}, must be at least {least}");
            if value >= least { Ok(()) } else { Err(Error::Input { what, problem }) }
        };
        least(limits.sequences, 1, "sequences")?;
        least(limits.prefill_tokens, BLOCK_TOKENS, "prefill_tokens")?;
        limits.speculation.map_or(Ok(()), Speculation::validate)?;
        let runner = runner()?;
        Ok(Engine {
            pool: BlockPool::new(runner.blocks()),
            runner,
            version,
            limits,
            next_id: 0,
            waiting: VecDeque::new(),
            long: None,
            live: Vec::new(),
            prefix_cache: PrefixCache::default(),
            ended: Vec::new(),
            preemptions: 0,
            reused_tokens: 0,
            speculated: Speculated::default(),
            pace: Pace::default(),
        })
    }

    /// Ends the engine, and returns its recorded steps for the next one; `None` if none were recorded. Samples that have not
    /// ended are dropped. The cache's memory is given back.
    ///
    /// # Errors
    /// The device's.
    pub fn into_kept(self) -> Result<Option<KeptSteps>> {
        self.runner.into_kept(self.limits.rows())
    }

    /// Makes completions carry their [routes](Completion::routes), before the first request.
    ///
    /// # Errors
    /// [`Error::Input`] if no layer has experts that tell their choice, or libtorch's error (out of memory).
    pub fn recording_routes(mut self) -> Result<Engine> {
        self.runner.record_routes()?;
        Ok(self)
    }

    /// Submits a request. Returns the ids of its samples, in order.
    ///
    /// # Errors
    /// [`Error::Input`] for:
    /// - an empty prompt, or one that does not begin with the sample it follows;
    /// - a sample to follow whose routes are missing, if they are recorded;
    /// - a prompt that with its completion exceeds the cache or the model's positions;
    /// - a format that fails at the start, or parameters out of range.
    pub fn submit(&mut self, request: Request) -> Result<Range<SampleId>> {
        self.check(&request)?;
        let Request { prompt, params, stop, format, samples } = request;
        let begin = |sample: &Sample| {
            let state = format.as_ref().map(|format| FormatState::begin(format, &sample.begun.tokens));
            state.transpose().map_err(|problem| Error::Input { what: "format", problem })
        };
        let states = samples.iter().map(begin).collect::<Result<Vec<_>>>()?;
        let prompt: Arc<[i64]> = prompt.into();
        let first = self.next_id;
        self.next_id += samples.len() as u64;
        let mut fresh = Vec::new();
        for ((id, sample), format_state) in (first..).zip(samples).zip(states) {
            let completion = Completion { ending: None, ..sample.begun };
            let (prompt, params, stop) = (prompt.clone(), params.clone(), stop.clone());
            let Sample { seed, keep, follows, .. } = sample;
            let blocks = Vec::new();
            let sequence =
                Sequence { id, prompt, params, stop, format_state, seed, keep, follows, completion, blocks };
            if sequence.completion.tokens.len() >= sequence.params.max_new_tokens {
                self.ended.push((id, Completion { ending: Some(Ending::Length), ..sequence.completion }));
            } else if sequence.completion.tokens.is_empty() && self.prefix_cache.cached(follows) == 0 {
                fresh.push(sequence);
            } else {
                self.waiting.push_back(Group { sequences: vec![sequence] });
            }
        }
        while !fresh.is_empty() {
            let rest = fresh.split_off(fresh.len().min(self.limits.sequences));
            self.waiting.push_back(Group { sequences: std::mem::replace(&mut fresh, rest) });
        }
        Ok(first..self.next_id)
    }

    /// Runs all submitted samples to their end, and passes each to `each` as it ends.
    pub fn run(&mut self, mut each: impl FnMut(SampleId, Completion)) -> Result<()> {
        while !self.is_idle() {
            for (id, completion) in self.step()? {
                each(id, completion);
            }
        }
        Ok(())
    }

    /// Runs one step: see the module. Returns the samples that ended.
    pub fn step(&mut self) -> Result<Vec<(SampleId, Completion)>> {
        if !self.prefill()? {
            self.decode()?;
        }
        Ok(std::mem::take(&mut self.ended))
    }

    /// Returns true if there is nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.live.is_empty() && self.waiting.is_empty() && self.long.is_none() && self.ended.is_empty()
    }

    /// Returns the current completion of each sample that gets tokens. Preempted samples are not among them.
    pub fn live(&self) -> impl Iterator<Item = (SampleId, &Completion)> {
        self.live.iter().map(|sequence| (sequence.id, &sequence.completion))
    }

    /// Aborts a sample that has not ended, and returns its completion so far.
    pub fn abort(&mut self, id: SampleId) -> Option<Completion> {
        let mut sequence = self.remove(id)?;
        self.pool.give_back(sequence.blocks.drain(..));
        Some(sequence.completion)
    }

    /// Frees the kept tokens of an ended sample, if any.
    pub fn release(&mut self, id: SampleId) {
        self.pool.give_back(self.prefix_cache.take(Some(id)));
    }

    /// Returns the current load.
    pub fn load(&self) -> Load {
        let long = self.long.iter().map(|(group, _)| group.sequences.len()).sum::<usize>();
        Load {
            waiting: self.waiting.iter().map(|group| group.sequences.len()).sum(),
            live: self.live.len() + long,
            blocks: self.pool.capacity(),
            free_blocks: self.pool.free(),
            kept: self.prefix_cache.len(),
            reused_tokens: self.reused_tokens,
            preemptions: self.preemptions,
            speculated: self.speculated,
        }
    }

    fn check(&self, request: &Request) -> Result<()> {
        request.params.validate()?;
        let refuse = |what, problem| Err(Error::Input { what, problem });
        if request.prompt.is_empty() {
            return refuse("prompt", "is empty".to_owned());
        }
        let mut follows =
            request.samples.iter().filter_map(|sample| self.prefix_cache.tokens(sample.follows?));
        if follows.any(|tokens| !request.prompt.starts_with(tokens)) {
            let problem = "does not begin with the tokens of the sample it follows";
            return refuse("prompt", problem.to_owned());
        }
        if let Some(shape) = self.runner.routes() {
            let known = |sample: &Sample| {
                sample.begun.routes.tokens(shape) >= self.prefix_cache.cached(sample.follows)
            };
            if !request.samples.iter().all(known) {
                return refuse("begun.routes", "lack those of the sample that is followed".to_owned());
            }
        }
        // The last token is never an input.
        let longest = request.prompt.len() + request.params.max_new_tokens - 1;
        self.runner.decoder().check_length(longest as i64)?;
        let begun = request.samples.iter().flat_map(|sample| &sample.begun.tokens);
        self.runner.decoder().check_tokens(request.prompt.iter().chain(begun).copied())?;
        let (wanted, capacity) = (blocks_of(longest), self.pool.capacity());
        if wanted > capacity {
            let problem = format!(
                "needs {wanted} cache blocks for {longest} tokens with its completion; the cache has {capacity}"
            );
            return refuse("prompt", problem);
        }
        Ok(())
    }

    fn remove(&mut self, id: SampleId) -> Option<Sequence> {
        let is_it = |sequence: &Sequence| sequence.id == id;
        if let Some(index) = self.live.iter().position(is_it) {
            return Some(self.live.remove(index));
        }
        let under_way = self.long.iter_mut().map(|(group, _)| group).chain(&mut self.waiting);
        let found = under_way
            .filter_map(|group| {
                let index = group.sequences.iter().position(is_it)?;
                Some(group.sequences.remove(index))
            })
            .next();
        self.long.take_if(|(group, _)| group.sequences.is_empty());
        self.waiting.retain(|group| !group.sequences.is_empty());
        found
    }
}

/// The two kinds of a step.
impl Engine {
    /// Runs waiting prompts, or the next chunk of a long prompt. Returns true if whole prompts ran, and further ones may wait.
    fn prefill(&mut self) -> Result<bool> {
        let _named = span(format_args!("prefill"));
        let Some((group, done)) = self.long.take() else {
            let admitted = self.admit();
            let is_whole = !admitted.is_empty();
            let (new, following): (Vec<UnderWay>, Vec<UnderWay>) =
                admitted.into_iter().partition(|(_, done)| *done == 0);
            let mut new: Vec<Group> = new.into_iter().map(|(group, _)| group).collect();
            let chosen = self.runner.prompts(&mut new)?;
            self.begin(new.into_iter().flat_map(|group| group.sequences), chosen);
            let rest = |(group, done): UnderWay| {
                let end = group.len();
                (group, done..end)
            };
            let mut rests: Vec<_> = following.into_iter().map(rest).collect();
            let chosen = self.runner.pieces(&mut rests)?;
            self.begin(rests.into_iter().flat_map(|(group, _)| group.sequences), chosen);
            return Ok(is_whole);
        };
        let end = group.len().min(done + self.limits.prefill_tokens / BLOCK_TOKENS * BLOCK_TOKENS);
        let mut pieces = [(group, done..end)];
        let chosen = self.runner.pieces(&mut pieces)?;
        let [(group, _)] = pieces;
        if end < group.len() {
            self.long = Some((group, end));
        } else {
            self.begin(group.sequences, chosen);
        }
        Ok(false)
    }

    /// Appends to each sequence, whose tokens have run, the token chosen for it.
    fn begin(&mut self, sequences: impl IntoIterator<Item = Sequence>, chosen: Vec<Sampled>) {
        for (mut sequence, sampled) in sequences.into_iter().zip(chosen) {
            sequence.extend(sampled, self.version);
            self.live.push(sequence);
        }
        self.retire();
    }

    /// Runs the last token of every live sequence and the tokens proposed behind it. Without proposals, runs several
    /// further steps if the host only checks now and then.
    fn decode(&mut self) -> Result<()> {
        let ahead = self.runner.steps_ahead();
        let Some(speculation) = self.limits.speculation.filter(|it| self.live.len() <= it.sequences) else {
            return self.decode_ahead(ahead);
        };
        if let Some(steps) = self.pace.take(ahead) {
            return self.decode_ahead(steps);
        }
        let proposed: Vec<Vec<i64>> =
            self.live.iter().map(|sequence| speculation.propose(sequence)).collect();
        if proposed.iter().all(Vec::is_empty) {
            return self.decode_ahead(ahead);
        }
        self.check_proposals(proposed)
    }

    /// Runs the last token of every live sequence, and up to `most` - 1 further steps.
    fn decode_ahead(&mut self, most: usize) -> Result<()> {
        self.reserve(most);
        if self.live.is_empty() {
            return Ok(());
        }
        let _named = span(format_args!("decode {}", self.live.len()));
        let rows: Vec<Row> = self.live.iter().map(Row::last_of).collect();
        for chosen in self.runner.steps(&rows, most)? {
            for (sequence, sampled) in self.live.iter_mut().zip(chosen) {
                if sequence.completion.ending.is_none() {
                    sequence.extend(sampled, self.version);
                }
            }
        }
        self.retire();
        Ok(())
    }

    /// Runs the last token of every live sequence and the tokens `proposed` behind it, and appends those that are chosen: up
    /// to the first that is not the proposed one.
    fn check_proposals(&mut self, mut proposed: Vec<Vec<i64>>) -> Result<()> {
        self.reserve(1 + proposed.iter().map(Vec::len).max().unwrap_or(0));
        proposed.truncate(self.live.len());
        if self.live.is_empty() {
            return Ok(());
        }
        let _named = span(format_args!("check {}", self.live.len()));
        let pairs = self.live.iter().zip(&proposed);
        let rows: Vec<Row> = pairs.flat_map(|(sequence, proposed)| Row::all_of(sequence, proposed)).collect();
        let mut chosen = self.runner.steps(&rows, 1)?.remove(0).into_iter();
        let accepted_before = self.speculated.accepted;
        for (sequence, proposed) in self.live.iter_mut().zip(&proposed) {
            let chosen: Vec<Sampled> = chosen.by_ref().take(1 + proposed.len()).collect();
            let same =
                chosen.iter().zip(proposed).take_while(|(chosen, proposed)| chosen.token == **proposed);
            let (accepted, begun) = (same.count(), sequence.completion.tokens.len());
            for sampled in chosen.into_iter().take(accepted + 1) {
                if sequence.completion.ending.is_none() {
                    sequence.extend(sampled, self.version);
                }
            }
            if !proposed.is_empty() {
                let accepted = accepted.min(sequence.completion.tokens.len() - begun);
                self.speculated.count(proposed.len(), accepted);
            }
        }
        self.pace.count(self.live.len(), (self.speculated.accepted - accepted_before) as usize);
        self.retire();
        Ok(())
    }

    /// Removes the sequences that have ended.
    fn retire(&mut self) {
        for mut sequence in self.live.extract_if(.., |sequence| sequence.completion.ending.is_some()) {
            match sequence.keep {
                true => self.prefix_cache.keep(&mut sequence, &mut self.pool),
                false => self.pool.give_back(sequence.blocks.drain(..)),
            }
            self.ended.push((sequence.id, sequence.completion));
        }
    }
}

/// Admission and preemption.
impl Engine {
    /// Admits groups whose prompts fit in one pass, and allocates their blocks. A prompt longer than a pass
    /// becomes the long prompt when its turn comes.
    fn admit(&mut self) -> Vec<UnderWay> {
        let (mut admitted, mut sequences, mut tokens) = (Vec::new(), self.live.len(), 0);
        while let Some(mut group) = self.waiting.pop_front() {
            let may_be_live = sequences + group.sequences.len() <= self.limits.sequences;
            let has_room = may_be_live && self.make_room(&mut group, sequences);
            let follows = group.first().follows;
            let done = self.prefix_cache.cached(follows);
            let left = group.len() - done;
            let is_long = left > self.limits.prefill_tokens;
            let runs_now = admitted.is_empty()
                || (!is_long
                    && tokens + left <= self.limits.prefill_tokens
                    && admitted.len() < self.runner.most_prompts());
            if !(has_room && runs_now) {
                self.waiting.push_front(group);
                break;
            }
            group.take_blocks(self.prefix_cache.take(follows), &mut self.pool);
            self.reused_tokens += done as u64;
            if is_long {
                self.long = Some((group, done));
                break;
            }
            sequences += group.sequences.len();
            tokens += left;
            admitted.push((group, done));
        }
        admitted
    }

    /// Returns true if there are free blocks for a group besides `sequences` live sequences. Frees kept
    /// samples as far as that helps.
    fn make_room(&mut self, group: &mut Group, sequences: usize) -> bool {
        let follows = group.first().follows;
        loop {
            let own = blocks_of(self.prefix_cache.cached(follows));
            // Each live sequence has a block to grow into, so that it is not preempted at once.
            let wanted = group.blocks_wanted() - own + sequences;
            let short = wanted.saturating_sub(self.pool.free());
            if short == 0 {
                return true;
            }
            if sequences > 0 && short > self.prefix_cache.freeable(follows, &self.pool) {
                return false;
            }
            if self.prefix_cache.give_back_last(follows, &mut self.pool) {
                continue;
            }
            // No other sequence can free blocks, so there must be enough: for one sequence there are, if
            // nothing is kept.
            match own {
                0 => {
                    let rest = group.sequences.split_off(group.sequences.len() / 2);
                    self.waiting.push_front(Group { sequences: rest });
                }
                _ => self.pool.give_back(self.prefix_cache.take(follows)),
            }
        }
    }

    /// Gives every live sequence the blocks for its next `tokens` tokens. If blocks run out, frees kept
    /// samples, then preempts the sequences admitted last.
    fn reserve(&mut self, tokens: usize) {
        let mut index = 0;
        while index < self.live.len() {
            let sequence = &mut self.live[index];
            let wanted = blocks_of((sequence.len() + tokens - 1).min(sequence.most_cached()));
            if sequence.blocks.len() >= wanted {
                index += 1;
            } else if let Some(block) = self.pool.take() {
                sequence.blocks.push(block);
            } else if !self.prefix_cache.give_back_last(None, &mut self.pool) {
                self.preempt_last();
            }
        }
    }

    /// Frees the blocks of the sequence admitted last, and queues it before all others.
    fn preempt_last(&mut self) {
        let last = match self.long.take() {
            Some((group, _)) => Some(group),
            None => self.live.pop().map(|sequence| Group { sequences: vec![sequence] }),
        };
        let mut group = last.expect("a sequence that needs a block is live");
        self.preemptions += group.sequences.len() as u64;
        group.give_blocks_back(&mut self.pool);
        self.waiting.push_front(group);
    }
}
