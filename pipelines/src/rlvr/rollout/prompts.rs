//! Prompts of a rank, and the requests for their completions.

use std::sync::Arc;

use anyroll_config::Advantage;
use anyroll_data::{Dataset, Draw, Record, Tokenizer};

use super::{Group, GroupQueue};
use crate::{
    Result,
    inference::{Sample, SampleRequest, Sampling},
    rlvr::Task,
    train::{Purpose, sample_seed},
};

/// Draws a rank's prompts. They are numbered from the start of the run, over the rank's part of each batch.
#[derive(Clone)]
pub struct Prompts {
    /// Source of the records.
    pub dataset: Arc<Dataset>,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The run's options.
    pub task: Arc<Task>,
    /// This rank.
    pub rank: usize,
}

/// A prompt of this rank.
pub struct Prompt {
    /// Index of the prompt's batch.
    pub batch: u64,
    /// Index of the prompt in the batch.
    pub number: usize,
    /// The record.
    pub record: Arc<Record>,
}

impl Prompts {
    /// Number of this rank's prompts in a batch.
    pub fn per_batch(&self) -> usize {
        self.task.share.prompts / self.task.share.world_size
    }

    /// Number of trained completions of each prompt.
    pub fn group_size(&self) -> usize {
        self.task.config.group_size
    }

    /// Number of future steps whose prompts begin during step `step`; less than `ahead` at the end of the run.
    pub fn ahead(&self, step: u64) -> u64 {
        self.task.config.rollout.asynchronous.ahead.min(self.task.steps - 1 - step)
    }

    /// Fills `queue` with the groups of batch `batch` and of the next `ahead` batches. Returns the prompts of all
    /// groups in the queue.
    pub fn begin(&self, queue: &mut GroupQueue, batch: u64, ahead: u64) -> Result<Vec<Prompt>> {
        let per_batch = self.per_batch() as u64;
        let begun = queue.groups.len();
        let taken = batch * per_batch;
        let fresh = taken + begun as u64..taken + per_batch * (1 + ahead);
        let numbers: Vec<u64> = queue.groups.iter().map(|group| group.number).chain(fresh).collect();
        let prompts = self.numbered(&numbers);
        // Sampled together with the others, since sampling takes as long as the longest completion.
        let greedy = usize::from(self.task.config.algorithm.advantage == Advantage::Remax);
        for (&number, prompt) in numbers.iter().zip(&prompts).skip(begun) {
            let sample = Sample::begin(self.tokenizer.encode_prompt(&prompt.record)?);
            queue.groups.push(Group { number, samples: vec![sample; self.group_size() + greedy] });
        }
        Ok(prompts)
    }

    /// Prompts with these numbers.
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

    /// Request to continue `sample` with index `at` in its group; the sample after the group is greedy.
    pub fn asked(&self, prompt: &Prompt, at: usize, sample: Sample) -> SampleRequest {
        let (rollout, group_size) = (&self.task.config.rollout, self.group_size());
        let max_new_tokens = rollout.max_new_tokens;
        if at == group_size {
            return SampleRequest { sample, seed: 0, how: Sampling::GREEDY, max_new_tokens };
        }
        let how = Sampling {
            temperature: rollout.temperature,
            top_k: rollout.top_k,
            top_p: rollout.top_p,
            min_p: rollout.min_p,
            repetition_penalty: rollout.repetition_penalty,
        };
        let number = prompt.number * group_size + at;
        SampleRequest {
            sample,
            seed: sample_seed(Purpose::Rollout, self.task.seed, prompt.batch, number),
            how,
            max_new_tokens,
        }
    }

    /// Index under which sample `at` of group `index` is scored, among `groups` groups that are scored together.
    /// Samples of the groups come first, in order, then greedy ones.
    pub fn place(&self, index: usize, at: usize, groups: usize) -> usize {
        let group_size = self.group_size();
        if at < group_size { index * group_size + at } else { groups * group_size + index }
    }
}
