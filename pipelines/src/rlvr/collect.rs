//! The completions that a step trains on: sampled, scored while more are sampled, and selected.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyroll_strategy::Weights;

use super::{
    Setup,
    rollout::{Asked, Purpose, Sample, Sampling, sample_seed},
    score::Scored,
};
use crate::{
    Result,
    config::Advantage,
    data::{Draw, Record},
    metrics::Metrics,
    reward::Case,
    train::Exchange,
};

/// A step's completions.
pub struct Collected {
    /// This rank's, in its own order.
    pub samples: Vec<Sample>,
    /// What all ranks know of all.
    pub scored: Scored,
    /// Batches of prompts that were drawn.
    pub batches: u64,
    /// How many groups were passed over.
    pub metrics: Metrics,
    /// How long was sampled.
    pub generating: Duration,
    /// How long was scored beyond that.
    pub rewarding: Duration,
}

/// One batch of prompts, sampled and scored.
struct Batch {
    samples: Vec<Sample>,
    scored: Scored,
    generating: Duration,
    rewarding: Duration,
}

impl Setup {
    /// Collects the completions of step `step`, of the prompts from batch `first` on. `stop` is this rank's wish to end
    /// the run.
    pub(super) fn collect(
        &self,
        weights: &Weights,
        exchange: &Exchange,
        (step, first): (u64, u64),
        stop: bool,
    ) -> Result<Collected> {
        let batch = self.batch(weights, exchange, (step, first), stop)?;
        match self.rlvr.selection.mixed_groups {
            Some(mixed) => self.refill(weights, exchange, (step, first), mixed.max_batches, batch),
            None => {
                let Batch { samples, mut scored, generating, rewarding } = batch;
                self.leave_out_difficulties(&mut scored);
                Ok(Collected { samples, scored, batches: 1, metrics: Metrics::new(), generating, rewarding })
            }
        }
    }

    /// Samples and scores the groups of batch number `number`, with the weights of step `step`.
    fn batch(
        &self,
        weights: &Weights,
        exchange: &Exchange,
        (step, number): (u64, u64),
        stop: bool,
    ) -> Result<Batch> {
        let started = Instant::now();
        let rlvr = &self.rlvr;
        let records = self.dataset.train_batch(Draw::Rollout, self.seed, number, rlvr.prompts_per_step);
        let rollout = &rlvr.rollout;
        let how = Sampling {
            temperature: rollout.temperature,
            top_k: rollout.top_k,
            top_p: rollout.top_p,
            min_p: rollout.min_p,
            repetition_penalty: rollout.repetition_penalty,
        };
        let seed = |sample| sample_seed(Purpose::Rollout, self.seed, number, sample);
        let own = self.share.samples_of(exchange.rank());
        let one = |sample| Asked { record: &records[sample / rlvr.group_size], seed: seed(sample), how };
        let mut asked: Vec<Asked> = own.map(one).collect();
        let trained = asked.len();
        if rlvr.algorithm.advantage == Advantage::Remax {
            // Beside the others, since sampling takes as long as its longest completion. They are scored, and that is all.
            let greedy = |prompt: usize| Asked { record: &records[prompt], seed: 0, how: Sampling::GREEDY };
            asked.extend(self.share.prompts_of(exchange.rank()).map(greedy));
        }
        let workers = NonZeroUsize::new(rlvr.scoring.workers).expect("a config that was checked");
        let ((mut samples, generating), outcomes) = self.reward.score_while(workers, |hand_over| {
            let samples = self.sample(weights, step, &asked, |index, sample| {
                hand_over(index, self.case(asked[index].record, sample));
            })?;
            Ok::<_, crate::Error>((samples, started.elapsed()))
        })?;
        let rewarding = started.elapsed() - generating;
        samples.truncate(trained);
        let scored = self.score(exchange, &samples, outcomes, number, stop)?;
        Ok(Batch { samples, scored, generating, rewarding })
    }

    /// A sample as rewards see it.
    pub(super) fn case<'a>(&self, record: &'a Record, sample: &Sample) -> Case<'a> {
        let (tokens, finished) = (sample.completion_len(), sample.finished);
        Case { record, text: self.text(sample), tokens, finished }
    }

    /// Dynamic sampling: goes on with further batches until there are enough groups that teach something, or
    /// `max_batches`; then other groups fill up. The groups are dealt to the ranks anew, so that each has as many, and
    /// so that which they are does not depend on the number of ranks.
    fn refill(
        &self,
        weights: &Weights,
        exchange: &Exchange,
        (step, first): (u64, u64),
        max_batches: u64,
        batch: Batch,
    ) -> Result<Collected> {
        let prompts = self.rlvr.prompts_per_step;
        let mut batches = vec![batch];
        let teaching = |batches: &[Batch]| -> Vec<(usize, usize)> { self.groups(batches, true) };
        while teaching(&batches).len() < prompts && (batches.len() as u64) < max_batches {
            let last = batches.last().expect("there is one").scored.stop;
            let number = first + batches.len() as u64;
            batches.push(self.batch(weights, exchange, (step, number), last)?);
        }
        let mut picked = teaching(&batches);
        let found = picked.len();
        picked.extend(self.groups(&batches, false));
        picked.truncate(prompts);
        picked.sort_unstable();
        let mut metrics = Metrics::new();
        let drawn = batches.len() * prompts;
        metrics.insert("selection/batches", batches.len() as f64);
        metrics.insert("selection/teaching_groups", found as f64 / drawn as f64);
        metrics.insert("selection/filled_up", prompts.saturating_sub(found) as f64 / prompts as f64);
        Ok(Collected {
            samples: self.dealt(exchange, &batches, &picked)?,
            scored: self.picked(&batches, &picked),
            batches: batches.len() as u64,
            metrics,
            generating: batches.iter().map(|batch| batch.generating).sum(),
            rewarding: batches.iter().map(|batch| batch.rewarding).sum(),
        })
    }

    /// The groups that teach something, or those that do not: each by its batch and its number there.
    fn groups(&self, batches: &[Batch], teaching: bool) -> Vec<(usize, usize)> {
        let group_size = self.rlvr.group_size;
        let all = batches.iter().enumerate().flat_map(|(index, batch)| {
            let groups = batch.scored.measured.chunks(group_size).enumerate();
            groups.map(move |(number, measured)| (index, number, measured))
        });
        let wanted = all.filter(|(_, _, measured)| {
            let differs = measured.iter().any(|value| *value != measured[0]);
            (differs && self.is_in_range(measured)) == teaching
        });
        wanted.map(|(batch, number, _)| (batch, number)).collect()
    }

    fn is_in_range(&self, measured: &[f64]) -> bool {
        let mean = measured.iter().sum::<f64>() / measured.len() as f64;
        self.rlvr.selection.difficulty.is_none_or(|range| (range.min..=range.max).contains(&mean))
    }

    /// Groups that are too hard or too easy are not trained on.
    fn leave_out_difficulties(&self, scored: &mut Scored) {
        let group_size = self.rlvr.group_size;
        let groups = scored.measured.chunks(group_size).zip(scored.trained.chunks_mut(group_size));
        for (measured, trained) in groups {
            if !self.is_in_range(measured) {
                trained.fill(false);
            }
        }
    }

    /// What all ranks know of the picked groups.
    fn picked(&self, batches: &[Batch], picked: &[(usize, usize)]) -> Scored {
        let group_size = self.rlvr.group_size;
        let mut all = Scored::default();
        for &(batch, group) in picked {
            let scored = &batches[batch].scored;
            let samples = group * group_size..(group + 1) * group_size;
            all.rewards.extend(&scored.rewards[samples.clone()]);
            all.measured.extend(&scored.measured[samples.clone()]);
            all.lengths.extend(&scored.lengths[samples.clone()]);
            all.finished.extend(&scored.finished[samples.clone()]);
            all.trained.extend(&scored.trained[samples]);
            all.greedy.extend(scored.greedy.get(group));
        }
        for Batch { scored, .. } in batches {
            all.terms.merge(&scored.terms);
            all.stop |= scored.stop;
        }
        all
    }

    /// This rank's samples of the picked groups, in its own order. Every rank tells all that it has of them.
    fn dealt(
        &self,
        exchange: &Exchange,
        batches: &[Batch],
        picked: &[(usize, usize)],
    ) -> Result<Vec<Sample>> {
        let (rank, group_size) = (exchange.rank(), self.rlvr.group_size);
        let mut own: Vec<(usize, &[Sample])> = Vec::new();
        for (place, &(batch, group)) in picked.iter().enumerate() {
            let held = self.share.prompts_of(rank).position(|prompt| prompt == group);
            if let Some(at) = held {
                own.push((place, &batches[batch].samples[at * group_size..(at + 1) * group_size]));
            }
        }
        let told = serde_json::to_vec(&own).expect("plain data");
        let mut groups: Vec<Vec<Sample>> = vec![Vec::new(); picked.len()];
        for text in exchange.gather_texts(&told)? {
            let told: Vec<(usize, Vec<Sample>)> =
                serde_json::from_slice(&text).expect("what a rank has written");
            for (place, samples) in told {
                groups[place] = samples;
            }
        }
        Ok(self.share.prompts_of(rank).flat_map(|prompt| std::mem::take(&mut groups[prompt])).collect())
    }
}
