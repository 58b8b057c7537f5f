//! Measuring the policy on prompts that it is never trained on.

use anyroll_strategy::Zero;

use super::{
    Decoder, Setup,
    rollout::{Purpose, Sampling, sample_seed},
};
use crate::{
    Result,
    algorithm::pass_at_k,
    data::Record,
    metrics::Metrics,
    samples::{Phase, Sample as SampleLine},
    train::{Evaluation, Exchange},
};

/// Completions that go into `samples.jsonl` at each evaluation.
const SHOWN: usize = 16;

impl Setup {
    /// Greedy completions, and `evaluation.samples` sampled ones at temperature 1, of the held-out prompts:
    /// `eval/greedy`, `eval/pass@1` and `eval/pass@k` over all ranks, and this rank's first greedy completions.
    pub fn evaluate(
        &self,
        policy: &mut Zero<Decoder>,
        exchange: &Exchange,
        step: u64,
        phase: Phase,
    ) -> Result<Evaluation> {
        policy.offload_states(&self.offloaded)?;
        let weights = policy.weights()?;
        let samples = self.rlvr.evaluation.samples;
        let (records, first) = self.own_held_out(exchange);
        let asked: Vec<(&Record, u64)> = records.iter().map(|record| (record, 0)).collect();
        let completions = self.sample(&weights, step, &asked, Sampling::GREEDY)?;
        let mut right = Vec::with_capacity(records.len());
        let mut lines = Vec::new();
        for (record, sample) in records.iter().zip(&completions) {
            let completion = self.text(sample)?;
            let reward = self.reward.measure(record, &sample.completion(&completion))?;
            right.push(reward);
            if lines.len() < SHOWN {
                let (prompt, answer) = (record.prompt.clone(), record.answer.clone());
                lines.push(SampleLine { step, phase, prompt, completion, answer, reward });
            }
        }

        let mut asked = Vec::with_capacity(records.len() * samples);
        for (index, record) in records.iter().enumerate() {
            // The same random numbers at every evaluation, so that a change is the policy's.
            let seed =
                |sample| sample_seed(Purpose::Evaluation, self.seed, 0, (first + index) * samples + sample);
            asked.extend((0..samples).map(|sample| (record, seed(sample))));
        }
        let completions = self.sample(&weights, step, &asked, Sampling::FREE)?;
        let mut passed = vec![0; records.len()];
        for (index, (sample, (record, _))) in completions.iter().zip(&asked).enumerate() {
            let reward = self.reward.measure(record, &sample.completion(&self.text(sample)?))?;
            passed[index / samples] += usize::from(reward >= 1.0);
        }
        let pass = |k| passed.iter().map(|&correct| pass_at_k(samples, correct, k)).sum::<f64>();
        let sums = exchange.sum(&[records.len() as f64, right.iter().sum(), pass(1), pass(samples)])?;
        let mut metrics = Metrics::new();
        metrics.insert("eval/greedy", sums[1] / sums[0]);
        metrics.insert("eval/pass@1", sums[2] / sums[0]);
        if samples > 1 {
            metrics.insert(format!("eval/pass@{samples}"), sums[3] / sums[0]);
        }
        let summary = format!("held-out greedy {:.3}, pass@1 {:.3}", sums[1] / sums[0], sums[2] / sums[0]);
        Ok(Evaluation { metrics, samples: lines, picture: None, summary })
    }

    /// This rank's part of the held-out prompts, and the number of the first among all.
    fn own_held_out(&self, exchange: &Exchange) -> (&[Record], usize) {
        let per_rank = self.held_out.len().div_ceil(exchange.world_size());
        let start = (exchange.rank() * per_rank).min(self.held_out.len());
        let end = (start + per_rank).min(self.held_out.len());
        (&self.held_out[start..end], start)
    }
}
