//! Which prompts a rank completes in which step, and how.

use std::sync::Arc;

use anyroll_config::Advantage;
use anyroll_data::{Dataset, Draw, Record, Tokenizer};

use super::{Group, GroupQueue};
use crate::{
    Result,
    inference::{Asked, Sample, Sampling},
    rlvr::Task,
    train::{Purpose, sample_seed},
};

/// Draws a rank's prompts. Its prompts are numbered from the run's first on, over the parts that it has of each batch.
#[derive(Clone)]
pub struct Prompts {
    /// Source of the records.
    pub dataset: Arc<Dataset>,
    /// Text to tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// The run's options.
    pub task: Arc<Task>,
    /// This rank.
    pub rank: usize,
}

/// A prompt of this rank.
pub struct Prompt {
    /// The batch that it is of.
    pub batch: u64,
    /// Its number there.
    pub number: usize,
    /// The record.
    pub record: Arc<Record>,
}

impl Prompts {
    /// This rank's prompts of a batch.
    pub fn per_batch(&self) -> usize {
        self.task.share.prompts / self.task.share.world_size
    }

    /// Completions of each prompt that the policy is trained on.
    pub fn group_size(&self) -> usize {
        self.task.config.group_size
    }

    /// Steps whose prompts are begun beside those of step `step`, as far as there are any.
    pub fn ahead(&self, step: u64) -> u64 {
        self.task.config.rollout.asynchronous.ahead.min(self.task.steps - 1 - step)
    }

    /// Fills up `queue` with the groups of batch `batch` and of the `ahead` ones behind it, and returns the prompts of
    /// all groups in it.
    pub fn begin(&self, queue: &mut GroupQueue, batch: u64, ahead: u64) -> Result<Vec<Prompt>> {
        let per_batch = self.per_batch() as u64;
        let begun = queue.groups.len();
        let taken = batch * per_batch;
        let fresh = taken + begun as u64..taken + per_batch * (1 + ahead);
        let numbers: Vec<u64> = queue.groups.iter().map(|group| group.number).chain(fresh).collect();
        let prompts = self.numbered(&numbers);
        // Beside the others, since sampling takes as long as its longest completion.
        let greedy = usize::from(self.task.config.algorithm.advantage == Advantage::Remax);
        for (&number, prompt) in numbers.iter().zip(&prompts).skip(begun) {
            let sample = Sample::begin(self.tokenizer.encode_prompt(&prompt.record)?);
            queue.groups.push(Group { number, samples: vec![sample; self.group_size() + greedy] });
        }
        Ok(prompts)
    }

    /// The prompts of these numbers.
    fn numbered(&self, numbers: &[u64]) -> Vec<Prompt> {
        let own: Vec<usize> = self.task.share.prompts_of(self.rank).collect();
        let per_batch = own.len() as u64;
        let of_batches = numbers.chunk_by(|a, b| a / per_batch == b / per_batch);
        let of_batch = |numbers: &[u64]| {
            let batch = numbers[0] / per_batch;
            let records =
                self.dataset.train_batch(Draw::Rollout, self.task.seed, batch, self.task.share.prompts);
            let prompt = |number: &u64| {
                let number = own[(number % per_batch) as usize];
                Prompt { batch, number, record: Arc::new(records[number].clone()) }
            };
            numbers.iter().map(prompt).collect::<Vec<Prompt>>()
        };
        of_batches.flat_map(of_batch).collect()
    }

    /// The request to continue `sample`, which has the index `at` in its group; the one behind the group is greedy.
    pub fn asked(&self, prompt: &Prompt, at: usize, sample: Sample) -> Asked {
        let (rollout, group_size) = (&self.task.config.rollout, self.group_size());
        if at == group_size {
            return Asked { sample, seed: 0, how: Sampling::GREEDY };
        }
        let how = Sampling {
            temperature: rollout.temperature,
            top_k: rollout.top_k,
            top_p: rollout.top_p,
            min_p: rollout.min_p,
            repetition_penalty: rollout.repetition_penalty,
        };
        let number = prompt.number * group_size + at;
        Asked { sample, seed: sample_seed(Purpose::Rollout, self.task.seed, prompt.batch, number), how }
    }

    /// The number under which the sample `at` of the group `index` is scored among `groups` that are scored together:
    /// first those of the groups, in order, then greedy ones.
    pub fn place(&self, index: usize, at: usize, groups: usize) -> usize {
        let group_size = self.group_size();
        if at < group_size { index * group_size + at } else { groups * group_size + index }
    }
}
