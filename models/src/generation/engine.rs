//! The engine: requests in, completions out as they end.
//!
//! A step is one pass over prompts that wait, if there is room for some, and one token of every live sequence. A
//! prompt that is longer than a pass takes goes through in pieces, one a step, so that the others go on meanwhile.
//! Where blocks run short, the sequence that came last gives its own up and waits; later its tokens run again, and it
//! goes on from where it was.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use tch::Tensor;

use super::{
    Completion, Ending, KvCache, Request,
    block_pool::BlockPool,
    kv_cache::{BLOCK_TOKENS, blocks_of},
    pass::Passes,
    sampling::Sampled,
    sequence::{Group, Sequence},
};
use crate::{Decoder, Error, Result};

/// A sample's number, in the order in which they were asked for.
pub type SampleId = u64;

/// What an engine takes on at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that are live together.
    pub sequences: usize,
    /// Prompt tokens of a pass: bounds the activations, and how long live sequences wait for a long prompt. At least
    /// a block's, 16.
    pub prefill_tokens: usize,
}

impl Limits {
    /// So many sequences, and passes of up to 16,384 tokens.
    pub fn new(sequences: usize) -> Limits {
        Limits { sequences, prefill_tokens: 1 << 14 }
    }
}

/// What an engine is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Samples that wait for room.
    pub waiting: usize,
    /// Samples that get a token a step, or whose prompt is under way.
    pub live: usize,
    /// Blocks that sequences can have.
    pub blocks: usize,
    /// Blocks that no sequence has.
    pub free_blocks: usize,
    /// How often a sequence had to give its blocks up, since the engine was made.
    pub preemptions: u64,
}

/// Generates with fixed weights. After an error it is of no more use.
#[derive(Debug)]
pub struct Engine {
    passes: Passes,
    version: u64,
    pool: BlockPool,
    limits: Limits,
    next_id: SampleId,
    waiting: VecDeque<Group>,
    /// A long prompt under way, and how many of its tokens have run.
    long: Option<(Group, usize)>,
    /// In the order of their admission.
    live: Vec<Sequence>,
    ended: Vec<(SampleId, Completion)>,
    preemptions: u64,
}

impl Engine {
    /// An engine over `weights`, the tensors of every unit of the decoder, which completions are marked with as
    /// policy `version`. What `cache` held is overwritten.
    pub fn new(
        decoder: Arc<Decoder>,
        weights: Vec<Vec<Tensor>>,
        version: u64,
        cache: KvCache,
        limits: Limits,
    ) -> Result<Engine> {
        let least = |value: usize, least: usize, what| {
            let problem = format!("is {value}, must be at least {least}");
            if value >= least { Ok(()) } else { Err(Error::Input { what, problem }) }
        };
        least(limits.sequences, 1, "sequences")?;
        least(limits.prefill_tokens, BLOCK_TOKENS, "prefill_tokens")?;
        let pool = BlockPool::new(cache.blocks());
        Ok(Engine {
            passes: Passes::new(decoder, weights, cache, limits.sequences)?,
            version,
            pool,
            limits,
            next_id: 0,
            waiting: VecDeque::new(),
            long: None,
            live: Vec::new(),
            ended: Vec::new(),
            preemptions: 0,
        })
    }

    /// Takes a request on. Returns the ids of its samples, in their order.
    ///
    /// # Errors
    /// [`Error::Input`] for an empty prompt, one that with its completion does not fit into the cache or the
    /// model's positions, or parameters out of range.
    pub fn submit(&mut self, request: Request) -> Result<Range<SampleId>> {
        self.check(&request)?;
        let Request { prompt, params, stop, samples } = request;
        let prompt: Arc<[i64]> = prompt.into();
        let first = self.next_id;
        self.next_id += samples.len() as u64;
        let mut fresh = Vec::new();
        for (id, sample) in (first..).zip(samples) {
            let completion = Completion { ending: None, ..sample.begun };
            let (prompt, params, stop) = (prompt.clone(), params.clone(), stop.clone());
            let sequence =
                Sequence { id, prompt, params, stop, seed: sample.seed, completion, blocks: Vec::new() };
            if sequence.completion.tokens.len() >= sequence.params.max_new_tokens {
                self.ended.push((id, Completion { ending: Some(Ending::Length), ..sequence.completion }));
            } else if sequence.completion.tokens.is_empty() {
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

    /// Runs the samples that were asked for until all have ended, and hands each over as it ends.
    pub fn run(&mut self, mut each: impl FnMut(SampleId, Completion)) -> Result<()> {
        while !self.is_idle() {
            for (id, completion) in self.step()? {
                each(id, completion);
            }
        }
        Ok(())
    }

    /// One step: see the module. Returns what has ended.
    pub fn step(&mut self) -> Result<Vec<(SampleId, Completion)>> {
        self.prefill()?;
        self.decode()?;
        Ok(std::mem::take(&mut self.ended))
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.live.is_empty() && self.waiting.is_empty() && self.long.is_none() && self.ended.is_empty()
    }

    /// What there is of each sample that gets tokens. One that gave its blocks up gets none, and is not among them.
    pub fn live(&self) -> impl Iterator<Item = (SampleId, &Completion)> {
        self.live.iter().map(|sequence| (sequence.id, &sequence.completion))
    }

    /// Gives a sample up that has not ended, and returns what there is of it.
    pub fn abort(&mut self, id: SampleId) -> Option<Completion> {
        let mut sequence = self.remove(id)?;
        self.pool.give_back(sequence.blocks.drain(..));
        Some(sequence.completion)
    }

    /// What it is at.
    pub fn load(&self) -> Load {
        let long = self.long.iter().map(|(group, _)| group.sequences.len()).sum::<usize>();
        Load {
            waiting: self.waiting.iter().map(|group| group.sequences.len()).sum(),
            live: self.live.len() + long,
            blocks: self.pool.capacity(),
            free_blocks: self.pool.free(),
            preemptions: self.preemptions,
        }
    }

    fn check(&self, request: &Request) -> Result<()> {
        request.params.validate()?;
        let refuse = |what, problem| Err(Error::Input { what, problem });
        if request.prompt.is_empty() {
            return refuse("prompt", "is empty".to_owned());
        }
        // The last token is never an input.
        let longest = request.prompt.len() + request.params.max_new_tokens - 1;
        self.passes.decoder().check_length(longest as i64)?;
        let begun = request.samples.iter().flat_map(|sample| &sample.begun.tokens);
        self.passes.decoder().check_tokens(request.prompt.iter().chain(begun).copied())?;
        let (wanted, capacity) = (blocks_of(longest), self.pool.capacity());
        if wanted > capacity {
            let problem = format!(
                "with its completion has {longest} tokens, {wanted} blocks of the cache, which has {capacity}"
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

/// The two halves of a step.
impl Engine {
    /// Runs prompts that wait, or the next piece of a long one.
    fn prefill(&mut self) -> Result<()> {
        let Some((group, done)) = self.long.take() else {
            let admitted = self.admit();
            let chosen = self.passes.prompts(&admitted)?;
            self.begin(admitted.into_iter().flat_map(|group| group.sequences), chosen);
            return Ok(());
        };
        let end = group.len().min(done + self.limits.prefill_tokens / BLOCK_TOKENS * BLOCK_TOKENS);
        let chosen = self.passes.piece(&group, done..end)?;
        if end < group.len() {
            self.long = Some((group, end));
        } else {
            self.begin(group.sequences, chosen);
        }
        Ok(())
    }

    /// Gives sequences whose tokens have run the token that was chosen for each.
    fn begin(&mut self, sequences: impl IntoIterator<Item = Sequence>, chosen: Vec<Sampled>) {
        for (mut sequence, sampled) in sequences.into_iter().zip(chosen) {
            sequence.extend(sampled, self.version);
            self.live.push(sequence);
        }
        self.retire();
    }

    /// Runs the last token of every live sequence, and those that come of it where the host looks only now and then.
    fn decode(&mut self) -> Result<()> {
        self.reserve(self.passes.steps_ahead());
        if self.live.is_empty() {
            return Ok(());
        }
        for chosen in self.passes.steps(&self.live)? {
            for (sequence, sampled) in self.live.iter_mut().zip(chosen) {
                if sequence.completion.ending.is_none() {
                    sequence.extend(sampled, self.version);
                }
            }
        }
        self.retire();
        Ok(())
    }

    /// Takes out what has ended.
    fn retire(&mut self) {
        for mut sequence in self.live.extract_if(.., |sequence| sequence.completion.ending.is_some()) {
            self.pool.give_back(sequence.blocks.drain(..));
            self.ended.push((sequence.id, sequence.completion));
        }
    }
}

/// Who gets room.
impl Engine {
    /// Groups whose prompts one pass takes, with their blocks; a prompt that is too long for that becomes the long
    /// one, if it is its turn.
    fn admit(&mut self) -> Vec<Group> {
        let (mut admitted, mut sequences, mut tokens) = (Vec::new(), self.live.len(), 0);
        while let Some(mut group) = self.waiting.pop_front() {
            if sequences == 0 {
                // Nobody will make room, so it has to be enough: for one sequence it is.
                while group.blocks_wanted() > self.pool.free() {
                    let rest = group.sequences.split_off(group.sequences.len() / 2);
                    self.waiting.push_front(Group { sequences: rest });
                }
            }
            // Each live sequence is left a block to grow into, so that it is not preempted at once.
            let has_room = group.blocks_wanted() + sequences <= self.pool.free() || sequences == 0;
            let is_live_too = sequences + group.sequences.len() <= self.limits.sequences;
            let is_long = group.len() > self.limits.prefill_tokens;
            let runs_now = admitted.is_empty()
                || (!is_long
                    && tokens + group.len() <= self.limits.prefill_tokens
                    && admitted.len() < self.passes.most_prompts());
            if !(has_room && is_live_too && runs_now) {
                self.waiting.push_front(group);
                break;
            }
            group.take_blocks(&mut self.pool);
            if is_long {
                self.long = Some((group, 0));
                break;
            }
            sequences += group.sequences.len();
            tokens += group.len();
            admitted.push(group);
        }
        admitted
    }

    /// Gives every live sequence the blocks that its next `tokens` tokens lie in. Where there are none left, those
    /// that came last wait again.
    fn reserve(&mut self, tokens: usize) {
        let mut index = 0;
        while index < self.live.len() {
            let sequence = &mut self.live[index];
            let wanted = blocks_of((sequence.len() + tokens - 1).min(sequence.most_cached()));
            if sequence.blocks.len() >= wanted {
                index += 1;
            } else if let Some(block) = self.pool.take() {
                sequence.blocks.push(block);
            } else {
                self.preempt_last();
            }
        }
    }

    /// Takes the blocks of who came last, and lets it wait before all others.
    fn preempt_last(&mut self) {
        let last = match self.long.take() {
            Some((group, _)) => Some(group),
            None => self.live.pop().map(|sequence| Group { sequences: vec![sequence] }),
        };
        let mut group = last.expect("a sequence that wants a block is live");
        self.preemptions += group.sequences.len() as u64;
        group.give_blocks_back(&mut self.pool);
        self.waiting.push_front(group);
    }
}
