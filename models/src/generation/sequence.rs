//! Running sequences, single and in groups, and their cache blocks.

use std::{ops::Range, sync::Arc};

use super::{
    Completion, Ending, SampleId, SamplingParams, StopCondition,
    block_pool::BlockPool,
    format::FormatState,
    sampling::{Sampled, sample},
};
use crate::RouteShape;
use crate::decoder::kv_cache::{BLOCK_TOKENS, blocks_of};

/// A prompt with one completion so far.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: SampleId,
    pub prompt: Arc<[i64]>,
    pub params: Arc<SamplingParams>,
    pub stop: Option<StopCondition>,
    /// State of the format that it must follow.
    pub format_state: Option<FormatState>,
    pub seed: u64,
    /// True if its blocks are kept when it ends.
    pub keep: bool,
    /// Sample before it, whose blocks it reuses if they are still kept.
    pub follows: Option<SampleId>,
    pub completion: Completion,
    /// Cache blocks of its tokens, in order. Empty while it waits.
    pub blocks: Vec<u32>,
}

impl Sequence {
    /// Returns the number of tokens of prompt and completion.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.completion.tokens.len()
    }

    /// Returns the maximum number of its tokens in the cache: the last one of a completion is never an input.
    pub fn most_cached(&self) -> usize {
        self.prompt.len() + self.params.max_new_tokens - 1
    }

    pub fn tokens(&self) -> impl Iterator<Item = i64> + Clone {
        self.prompt.iter().chain(&self.completion.tokens).copied()
    }

    /// Returns the cache slot of the token at a position.
    pub fn place(&self, position: usize) -> i64 {
        i64::from(self.blocks[position / BLOCK_TOKENS]) * BLOCK_TOKENS as i64
            + (position % BLOCK_TOKENS) as i64
    }

    /// Appends a token, which may end the completion.
    pub fn extend(&mut self, sampled: Sampled, version: u64) {
        let token = sampled.token;
        self.completion.push(sampled, version);
        let tokens = &self.completion.tokens;
        let stops = self.params.stop_tokens.contains(&token)
            || self.stop.as_ref().is_some_and(|StopCondition(ends)| ends(tokens));
        if stops {
            self.completion.ending = Some(Ending::Stop);
        } else if tokens.len() >= self.params.max_new_tokens {
            self.completion.ending = Some(Ending::Length);
        } else if let Some(Err(problem)) = self.format_state.as_mut().map(|state| state.push(token)) {
            tracing::warn!(
                "a completion ends early because its format cannot compute the next tokens: {problem}"
            );
            self.completion.ending = Some(Ending::Broken);
        }
    }
}

/// A row of a decoding step: the last token of a sequence, or a token proposed behind it. Its output chooses the next token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    pub sequence: &'a Sequence,
    /// Proposed tokens behind those of the sequence, up to the row's own; empty if that is the sequence's last one.
    pub proposed: &'a [i64],
}

impl<'a> Row<'a> {
    /// Returns the row of a sequence's last token.
    pub fn last_of(sequence: &'a Sequence) -> Row<'a> {
        Row { sequence, proposed: &[] }
    }

    /// Returns the rows of a sequence's last token and of all tokens proposed behind it.
    pub fn all_of(sequence: &'a Sequence, proposed: &'a [i64]) -> impl Iterator<Item = Row<'a>> {
        (0..=proposed.len()).map(|count| Row { sequence, proposed: &proposed[..count] })
    }

    pub fn params(self) -> &'a SamplingParams {
        &self.sequence.params
    }

    /// Returns the number of tokens up to its own.
    pub fn len(self) -> usize {
        self.sequence.len() + self.proposed.len()
    }

    /// Returns the tokens up to its own.
    pub fn tokens(self) -> impl Iterator<Item = i64> + Clone + 'a {
        self.sequence.tokens().chain(self.proposed.iter().copied())
    }

    pub fn token(self) -> i64 {
        let Sequence { prompt, completion, .. } = self.sequence;
        let last = self.proposed.last().or(completion.tokens.last());
        *last.unwrap_or(&prompt[prompt.len() - 1])
    }

    /// Returns the cache slot of its token.
    pub fn place(self) -> i64 {
        self.sequence.place(self.len() - 1)
    }

    /// Returns the index, in the completion, of the token that it chooses.
    pub fn index(self) -> usize {
        self.sequence.completion.tokens.len() + self.proposed.len()
    }

    /// Chooses the next token, on the host.
    pub fn choose(self, logits: &[f32]) -> i64 {
        let masked = self.sequence.format_state.as_ref().map(|state| state.mask(logits));
        let logits = masked.as_deref().unwrap_or(logits);
        sample(logits, self.params(), self.sequence.seed, self.index(), self.tokens())
    }
}

/// Sequences with the same tokens so far, which run once for all of them. They share the full blocks of those
/// tokens. Each has its own last, partly filled block, since they will differ there.
#[derive(Debug)]
pub(super) struct Group {
    /// At least one.
    pub sequences: Vec<Sequence>,
}

impl Group {
    pub fn first(&self) -> &Sequence {
        &self.sequences[0]
    }

    /// Returns the number of tokens that have to run.
    pub fn len(&self) -> usize {
        self.first().len()
    }

    /// Returns the row of each sequence's last token.
    pub fn last_rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.sequences.iter().map(Row::last_of)
    }

    pub fn blocks_wanted(&self) -> usize {
        let full = self.len() / BLOCK_TOKENS;
        full + (blocks_of(self.len()) - full) * self.sequences.len()
    }

    /// Allocates the blocks, of which there are enough free. For a single sequence, `kept` are the blocks of
    /// its first tokens.
    pub fn take_blocks(&mut self, kept: Vec<u32>, pool: &mut BlockPool) {
        let len = self.len();
        if !kept.is_empty() {
            let more = kept.len()..blocks_of(len);
            let more = more.map(|_| pool.take().expect("free blocks were checked before"));
            self.sequences[0].blocks = kept.into_iter().chain(more).collect();
            return;
        }
        let mut take = |_| pool.take().expect("free blocks were checked before");
        let shared: Vec<u32> = (0..len / BLOCK_TOKENS).map(&mut take).collect();
        let own = shared.len()..blocks_of(len);
        for sequence in &mut self.sequences {
            sequence.blocks = shared.iter().copied().chain(own.clone().map(&mut take)).collect();
        }
        for _ in 1..self.sequences.len() {
            shared.iter().for_each(|&block| pool.share(block));
        }
    }

    /// Appends the routes of its tokens at `positions`, whose bytes are `bytes`, to those of every sequence, but those that it
    /// knows from earlier passes.
    pub fn add_routes(&mut self, shape: RouteShape, positions: Range<usize>, bytes: &[u8]) {
        for sequence in &mut self.sequences {
            let routes = &mut sequence.completion.routes;
            let known =
                routes.tokens(shape).checked_sub(positions.start).expect("earlier tokens have routes");
            routes.append(&bytes[(known * shape.token_bytes()).min(bytes.len())..]);
        }
    }

    pub fn give_blocks_back(&mut self, pool: &mut BlockPool) {
        self.sequences.iter_mut().for_each(|sequence| pool.give_back(sequence.blocks.drain(..)));
    }

    /// Computes the destinations of its tokens at `positions`; `row` is the row of the first. A row in an
    /// unshared block is written to every sequence's block.
    pub fn destinations(
        &self,
        positions: Range<usize>,
        row: usize,
        rows: &mut Vec<i64>,
        places: &mut Vec<i64>,
    ) {
        let shared = (self.len() / BLOCK_TOKENS * BLOCK_TOKENS).clamp(positions.start, positions.end);
        let mut store = |sequence: &Sequence, stored: Range<usize>| {
            rows.extend(stored.clone().map(|position| (row + position - positions.start) as i64));
            places.extend(stored.map(|position| sequence.place(position)));
        };
        store(self.first(), positions.start..shared);
        self.sequences.iter().for_each(|sequence| store(sequence, shared..positions.end));
    }
}
