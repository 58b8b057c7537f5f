//! Measuring the policy on prompts that it is never trained on.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use anyroll_strategy::Weights;

use super::{
    Roles, Setup,
    rollout::{case, turns},
};
use crate::{
    Error, Result,
    algorithm::{majority, pass_at_k},
    data::Record,
    inference::{Asked, Sample, Sampling},
    metrics::Metrics,
    reward::{HeldModel, Outcome},
    samples::{Phase, Sample as SampleLine},
    train::{Evaluation, Exchange, Purpose, sample_seed},
};

/// Completions that go into `samples.jsonl` at each evaluation.
const SHOWN: usize = 16;

/// What is summed over the prompts of a domain: their number, greedy, pass@1, pass@k, maj@k.
const SUMS: usize = 5;

/// Completions, and what each was measured at: `None` where its reward failed.
struct Measured {
    samples: Vec<Sample>,
    values: Vec<Option<f64>>,
    failed: Vec<f64>,
}

impl Setup {
    /// Greedy completions, and `evaluation.samples` sampled ones at temperature 1, of the held-out prompts:
    /// `eval/greedy`, `eval/pass@1`, `eval/pass@k` and `eval/maj@k` over all ranks, in a mix also of each domain, and
    /// this rank's first greedy completions. A prompt of which a completion cannot be scored counts in none of them.
    pub fn evaluate(
        &self,
        roles: &mut Roles,
        exchange: &Exchange,
        step: u64,
        phase: Phase,
    ) -> Result<Evaluation> {
        let Roles { policy, reward_models, .. } = roles;
        policy.offload_states(&self.offloaded)?;
        let weights = self.weights_to_sample(policy)?;
        let samples = self.rlvr.evaluation.samples;
        let (records, first) = self.own_held_out(exchange);
        let greedy = records.iter().map(|record| {
            let sample = Sample::begin(self.tokenizer.encode_prompt(record)?);
            Ok((record, Asked { sample, seed: 0, how: Sampling::GREEDY }))
        });
        let greedy = greedy.collect::<Result<Vec<_>>>()?;
        let best = self.measure(&weights, reward_models, exchange, step, greedy.clone())?;
        let lines = self.lines(records, &best, step, phase);

        let mut asked = Vec::with_capacity(records.len() * samples);
        for (index, (record, greedy)) in greedy.iter().enumerate() {
            // The same random numbers at every evaluation, so that a change is the policy's.
            let seed =
                |sample| sample_seed(Purpose::Evaluation, self.seed, 0, (first + index) * samples + sample);
            for sample in 0..samples {
                asked.push((*record, Asked { seed: seed(sample), how: Sampling::FREE, ..greedy.clone() }));
            }
        }
        let drawn = self.measure(&weights, reward_models, exchange, step, asked)?;
        let failed: f64 = best.failed.iter().chain(&drawn.failed).sum();
        let mut metrics = self.summary(exchange, records, &best, &drawn)?;
        if failed > 0.0 {
            metrics.insert("eval/errors", failed);
        }
        let value = |name| metrics.get(name).unwrap_or(f64::NAN);
        let summary =
            format!("held-out greedy {:.3}, pass@1 {:.3}", value("eval/greedy"), value("eval/pass@1"));
        Ok(Evaluation { metrics, samples: lines, picture: None, summary })
    }

    /// Samples with the weights `version`, and measures while it samples.
    fn measure(
        &self,
        weights: &Weights,
        reward_models: &mut [HeldModel],
        exchange: &Exchange,
        version: u64,
        asked: Vec<(&Arc<Record>, Asked)>,
    ) -> Result<Measured> {
        let (records, asked): (Vec<&Arc<Record>>, Vec<Asked>) = asked.into_iter().unzip();
        let scoring = self.scorer.begin();
        let episodes = self.episodes(records.iter().copied());
        let sampled = self.sampler.sample(weights, version, &asked, episodes, |samples, ended| {
            for &index in ended {
                scoring.hand_over(index, case(&self.tokenizer, records[index], &samples[index]));
            }
            ControlFlow::Continue(())
        })?;
        let outcomes = scoring.finish(reward_models)?;
        let values = outcomes.iter().map(|outcome| match outcome {
            Outcome::Scored(score) => Some(score.measured),
            Outcome::Failed { .. } => None,
        });
        let values = values.collect();
        let mut numbers = vec![0.0; self.reward.names().len()];
        for outcome in &outcomes {
            if let Outcome::Failed { term, .. } = outcome {
                numbers[*term] += 1.0;
            }
        }
        numbers.push(asked.len() as f64);
        let mut failed = exchange.sum(&numbers)?;
        let completions = failed.pop().expect("the last of them") as usize;
        self.check_error_rates(&failed, completions, outcomes)?;
        Ok(Measured { samples: sampled.samples, values, failed })
    }

    fn lines(&self, records: &[Arc<Record>], best: &Measured, step: u64, phase: Phase) -> Vec<SampleLine> {
        let shown = records.iter().zip(&best.samples).zip(&best.values).take(SHOWN);
        let line = |((record, sample), value): ((&Arc<Record>, &Sample), &Option<f64>)| {
            let (prompt, answer) = (record.prompt.clone(), record.answer.clone());
            let (completion, reward) = (sample.transcript(&self.tokenizer), value.unwrap_or(f64::NAN));
            let turns = turns(&self.tokenizer, sample);
            SampleLine { step, phase, prompt, completion, turns, answer, reward }
        };
        shown.map(line).collect()
    }

    /// The means over all ranks' prompts, and over those of each domain if there are several.
    fn summary(
        &self,
        exchange: &Exchange,
        records: &[Arc<Record>],
        best: &Measured,
        drawn: &Measured,
    ) -> Result<Metrics> {
        let samples = self.rlvr.evaluation.samples;
        // All ranks list the same domains, in the same order, whichever prompts they have.
        let domains = self.held_out.iter().map(|record| (record.domain.as_str(), [0.0; SUMS]));
        let mut sums: BTreeMap<&str, [f64; SUMS]> = domains.collect();
        for (index, (record, greedy)) in records.iter().zip(&best.values).enumerate() {
            let range = index * samples..(index + 1) * samples;
            let values: Option<Vec<f64>> = drawn.values[range.clone()].iter().copied().collect();
            let (Some(greedy), Some(values)) = (greedy, values) else { continue };
            let right: Vec<bool> = values.iter().map(|&value| value >= 1.0).collect();
            let correct = right.iter().filter(|it| **it).count();
            let answers = drawn.samples[range]
                .iter()
                .map(|sample| self.reward.answer(&case(&self.tokenizer, record, sample)));
            let voted: Vec<(String, bool)> = answers.zip(right).collect();
            let own = [
                1.0,
                *greedy,
                pass_at_k(samples, correct, 1),
                pass_at_k(samples, correct, samples),
                majority(&voted),
            ];
            let sums = sums.get_mut(record.domain.as_str()).expect("a held-out record's");
            sums.iter_mut().zip(own).for_each(|(sum, value)| *sum += value);
        }
        let own: Vec<f64> = sums.values().flatten().copied().collect();
        let all = exchange.sum(&own)?;
        let mut metrics = Metrics::new();
        let mut insert = |prefix: &str, sums: &[f64]| {
            metrics.insert(format!("{prefix}/greedy"), sums[1] / sums[0]);
            metrics.insert(format!("{prefix}/pass@1"), sums[2] / sums[0]);
            if samples > 1 {
                metrics.insert(format!("{prefix}/pass@{samples}"), sums[3] / sums[0]);
                metrics.insert(format!("{prefix}/maj@{samples}"), sums[4] / sums[0]);
            }
        };
        let mut total = [0.0; SUMS];
        for of_domain in all.chunks_exact(SUMS) {
            total.iter_mut().zip(of_domain).for_each(|(sum, value)| *sum += value);
        }
        if total[0] == 0.0 {
            return Err(Error::NothingMeasured);
        }
        insert("eval", &total);
        if sums.len() > 1 {
            for (domain, of_domain) in sums.keys().zip(all.chunks_exact(SUMS)) {
                insert(&format!("eval/{domain}"), of_domain);
            }
        }
        Ok(metrics)
    }

    /// This rank's part of the held-out prompts, and the number of the first among all.
    fn own_held_out(&self, exchange: &Exchange) -> (&[Arc<Record>], usize) {
        let per_rank = self.held_out.len().div_ceil(exchange.world_size());
        let start = (exchange.rank() * per_rank).min(self.held_out.len());
        let end = (start + per_rank).min(self.held_out.len());
        (&self.held_out[start..end], start)
    }
}
