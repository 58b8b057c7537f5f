//! Completions as batches to train on, and as rewards see them.

use std::{ops::Range, sync::Arc};

use anyroll_models::{PackedBatch, Sequence, targets_in};

use super::Setup;
use crate::{
    Result,
    data::{Record, Tokenizer},
    inference::{Episode, Sample},
    reward::Case,
    samples::Turn,
    train::{Purpose, sample_seed},
};

impl Setup {
    /// Packs samples for a forward pass of the policy.
    pub fn pack(&self, samples: &[Sample]) -> Result<PackedBatch> {
        self.pack_for(self.device, samples)
    }

    /// Packs samples for a forward pass of a model on `device`.
    pub fn pack_for(&self, device: tch::Device, samples: &[Sample]) -> Result<PackedBatch> {
        let sequences: Vec<Sequence> = samples.iter().map(Sample::sequence).collect();
        let pack = if self.shares_prompts { PackedBatch::sharing } else { PackedBatch::new };
        let packed = pack(&sequences, self.rlvr.rollout.temperature, device)?;
        if self.environment.is_none() {
            return Ok(packed);
        }
        // What an environment says is read, and nothing is learnt from it: it is no target.
        let turns: Vec<_> = samples.iter().map(Sample::turns).collect();
        let turns = sequences.into_iter().zip(turns.iter().map(Vec::as_slice));
        Ok(packed.keeping(&targets_in(turns))?)
    }

    /// `batch` to train on for the `pass`-th time: what adapters drop of a sequence follows from its number in that
    /// pass, over all ranks.
    pub fn to_train(
        &self,
        batch: PackedBatch,
        pass: u64,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<PackedBatch> {
        if !self.model.drops() {
            return Ok(batch);
        }
        let keys: Vec<u64> = numbers
            .into_iter()
            .map(|number| sample_seed(Purpose::Dropout, self.seed, pass, number))
            .collect();
        Ok(batch.with_dropout(&keys)?)
    }
}

/// A completion as rewards see it: of several turns the last one.
pub fn case(tokenizer: &Tokenizer, record: &Arc<Record>, sample: &Sample) -> Case {
    Case {
        record: record.clone(),
        text: sample.text(tokenizer),
        tokens: sample.completion_len(),
        finished: sample.finished(),
        episode: sample.episode.as_ref().map(Episode::reward),
    }
}

/// The turns of a completion as `samples.jsonl` has them; none without an environment.
pub fn turns(tokenizer: &Tokenizer, sample: &Sample) -> Vec<Turn> {
    let Some(episode) = &sample.episode else { return Vec::new() };
    let text = |range: Range<usize>| tokenizer.decode(&sample.tokens[range]);
    let turn = |(number, range): (usize, Range<usize>)| Turn {
        text: text(range),
        reward: episode.rewards.get(number).copied().flatten(),
        observation: episode.observations.get(number).cloned().map(text),
    };
    sample.turns().into_iter().enumerate().map(turn).collect()
}
