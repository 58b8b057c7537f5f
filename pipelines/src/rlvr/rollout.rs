//! Completions as batches to train on, and as rewards see them.

use std::sync::Arc;

use anyroll_models::{PackedBatch, Sequence};

use super::Setup;
use crate::{
    Result,
    data::{Record, Tokenizer},
    inference::Sample,
    reward::Case,
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
        let pack =
            if self.rlvr.share_prompts == Some(true) { PackedBatch::sharing } else { PackedBatch::new };
        Ok(pack(&sequences, self.rlvr.rollout.temperature, device)?)
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

/// A completion as rewards see it.
pub fn case(tokenizer: &Tokenizer, record: &Arc<Record>, sample: &Sample) -> Case {
    let (tokens, finished) = (sample.completion_len(), sample.finished());
    Case { record: record.clone(), text: sample.text(tokenizer), tokens, finished }
}
