//! Evaluation of the policy on held-out prompts.

use std::{
    collections::BTreeMap,
    ops::{ControlFlow, Range},
    sync::Arc,
};

use anyroll_algorithm::{majority, pass_at_k};
use anyroll_config::EvaluationConfig;
use anyroll_data::{Record, Tokenizer};
use anyroll_reward::Outcome;
use anyroll_strategy::Weights;

use super::{Rlvr, rewards::Rewards, rollout::Engine, terms::TermSums};
use crate::{
    Error, Result,
    inference::{Sample, SampleRequest, Sampling},
    metrics::Metrics,
    samples::{Phase, Sample as SampleLine, Turn},
    train::{Evaluation, Exchange, Purpose, Reduce, reduced, sample_seed},
};

/// Number of completions written to `samples.jsonl` at each evaluation.
const SHOWN: usize = 16;

/// Completions with the measure of each: `None` if its reward failed.
struct Measured {
    samples: Vec<Sample>,
    values: Vec<Option<f64>>,
    failed: Vec<f64>,
}

reduced! {
    /// Sums over the prompts of a domain whose completions were all scored.
    struct DomainSums {
        /// Number of prompts.
        sum prompts: f64,
        /// Measure of the greedy completion.
        sum greedy: f64,
        /// Probability that one sample is right.
        sum pass_1: f64,
        /// Probability that at least one of all samples is right.
        sum pass_k: f64,
        /// Probability that the most frequent answer is right.
        sum maj_k: f64,
    }
}

reduced! {
    /// Failures of an evaluation.
    struct Failures {
        /// Number of all completions.
        sum completions: u64,
        /// Number of completions on which each term of the reward failed.
        nested failed: Vec<f64>,
    }
}

/// Samples a greedy completion and `evaluation.samples` others of each held-out prompt. Returns
/// `eval/greedy`, `eval/pass@1`, `eval/pass@k` and `eval/maj@k` over all ranks, for several domains also for each.
/// Also returns this rank's first greedy completions. A prompt with a completion that cannot be scored is excluded.
pub fn evaluate(rlvr: &mut Rlvr, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation> {
    let Rlvr { task, held_out, engine, rewards, models, .. } = rlvr;
    models.learner.offload()?;
    let weights = engine.weights(&mut models.learner.model)?;
    let EvaluationConfig { samples, temperature, top_p, .. } = task.config.evaluation;
    let max_new_tokens = task.config.evaluation.max_new_tokens(task.config.rollout.max_new_tokens);
    let (records, first) = own_part(held_out, exchange);
    let greedy = records.iter().map(|record| {
        let sample = Sample::begin(rewards.tokenizer.encode_prompt(record)?);
        Ok((record, SampleRequest { sample, seed: 0, how: Sampling::GREEDY, max_new_tokens }))
    });
    let greedy = greedy.collect::<Result<Vec<_>>>()?;
    let mut measuring = Measuring { engine, weights: &weights, rewards, exchange, step };
    let best = measuring.measure(greedy.clone())?;

    let how = Sampling { temperature, top_p, ..Sampling::FREE };
    let mut asked = Vec::with_capacity(records.len() * samples);
    for (index, (record, greedy)) in greedy.iter().enumerate() {
        // Every evaluation has the same random numbers, so that only the policy changes the result.
        let seed =
            |sample| sample_seed(Purpose::Evaluation, task.seed, 0, (first + index) * samples + sample);
        for sample in 0..samples {
            asked.push((*record, SampleRequest { seed: seed(sample), how, ..greedy.clone() }));
        }
    }
    let drawn = measuring.measure(asked)?;
    let failed: f64 = best.failed.iter().chain(&drawn.failed).sum();
    let domains = of_domains(samples, held_out, records, &best, &drawn, rewards);
    let mut metrics = summary(samples, domains, exchange)?;
    if failed > 0.0 {
        metrics.insert("eval/errors", failed);
    }
    let value = |name| metrics.get(name).unwrap_or(f64::NAN);
    let summary = format!("held-out greedy {:.3}, pass@1 {:.3}", value("eval/greedy"), value("eval/pass@1"));
    let samples = lines(&rewards.tokenizer, records, &best, step, phase);
    Ok(Evaluation { metrics, samples, picture: None, summary })
}

/// The policy, sampler and rewards of an evaluation.
struct Measuring<'a> {
    engine: &'a Engine,
    weights: &'a Weights,
    rewards: &'a mut Rewards,
    exchange: &'a Exchange,
    /// Version of the weights.
    step: u64,
}

impl Measuring<'_> {
    /// Samples, and scores completions in the meantime. Every rank must call this.
    fn measure(&mut self, asked: Vec<(&Arc<Record>, SampleRequest)>) -> Result<Measured> {
        let Self { engine, weights, rewards, exchange, step } = self;
        let (records, asked): (Vec<&Arc<Record>>, Vec<SampleRequest>) = asked.into_iter().unzip();
        let scoring = rewards.begin();
        let sampled = engine.sample(weights, *step, &asked, records.iter().copied(), |samples, ended| {
            for &index in ended {
                scoring.hand_over(index, rewards.case(records[index], &samples[index]));
            }
            ControlFlow::Continue(())
        })?;
        let outcomes = rewards.finish(exchange, scoring)?;
        let values = outcomes.iter().map(|outcome| match outcome {
            Outcome::Scored(score) => Some(score.measured),
            Outcome::Failed { .. } => None,
        });
        let values = values.collect();
        let terms = TermSums::of(rewards.sum.names().len(), outcomes.iter());
        let failed = terms.iter().map(|sums| sums.failed).collect();
        let Failures { completions, failed } =
            exchange.reduce(&Failures { completions: asked.len() as u64, failed })?;
        rewards.check_error_rates(&failed, completions as usize, outcomes)?;
        Ok(Measured { samples: sampled.samples, values, failed })
    }
}

/// Lines of `samples.jsonl`.
fn lines(
    tokenizer: &Tokenizer,
    records: &[Arc<Record>],
    best: &Measured,
    step: u64,
    phase: Phase,
) -> Vec<SampleLine> {
    let shown = records.iter().zip(&best.samples).zip(&best.values).take(SHOWN);
    let line = |((record, sample), value): ((&Arc<Record>, &Sample), &Option<f64>)| {
        let (prompt, answer) = (record.prompt.clone(), record.answer.clone());
        let (completion, reward) = (sample.transcript(tokenizer), value.unwrap_or(f64::NAN));
        let turns = turns(tokenizer, sample);
        SampleLine { step, phase, prompt, completion, turns, answer, reward }
    };
    shown.map(line).collect()
}

/// Turns of a completion in `samples.jsonl`; none without an environment.
fn turns(tokenizer: &Tokenizer, sample: &Sample) -> Vec<Turn> {
    let Some(episode) = &sample.episode else { return Vec::new() };
    let text = |range: Range<usize>| tokenizer.decode(&sample.tokens[range]);
    let turn = |(number, range): (usize, Range<usize>)| Turn {
        text: text(range),
        reward: episode.rewards.get(number).copied().flatten(),
        observation: episode.observations.get(number).cloned().map(text),
    };
    sample.turns().into_iter().enumerate().map(turn).collect()
}

/// Sums over this rank's prompts of each domain. All ranks list the same domains, even those without prompts here.
fn of_domains<'a>(
    samples: usize,
    held_out: &'a [Arc<Record>],
    records: &[Arc<Record>],
    best: &Measured,
    drawn: &Measured,
    rewards: &Rewards,
) -> BTreeMap<&'a str, DomainSums> {
    let domains = held_out.iter().map(|record| (record.domain.as_str(), DomainSums::default()));
    let mut sums: BTreeMap<&str, DomainSums> = domains.collect();
    for (index, (record, greedy)) in records.iter().zip(&best.values).enumerate() {
        let range = index * samples..(index + 1) * samples;
        let values: Option<Vec<f64>> = drawn.values[range.clone()].iter().copied().collect();
        let (Some(greedy), Some(values)) = (greedy, values) else { continue };
        let right: Vec<bool> = values.iter().map(|&value| value >= 1.0).collect();
        let correct = right.iter().filter(|it| **it).count();
        let answers =
            drawn.samples[range].iter().map(|sample| rewards.sum.answer(&rewards.case(record, sample)));
        let voted: Vec<(String, bool)> = answers.zip(right).collect();
        let sums = sums.get_mut(record.domain.as_str()).expect("a held-out record's");
        sums.reduce(DomainSums {
            prompts: 1.0,
            greedy: *greedy,
            pass_1: pass_at_k(samples, correct, 1),
            pass_k: pass_at_k(samples, correct, samples),
            maj_k: majority(&voted),
        });
    }
    sums
}

/// Means over all ranks' prompts, and over those of each domain if there are several.
fn summary(samples: usize, own: BTreeMap<&str, DomainSums>, exchange: &Exchange) -> Result<Metrics> {
    let (domains, own): (Vec<&str>, Vec<DomainSums>) = own.into_iter().unzip();
    let all = exchange.reduce(&own)?;
    let mut total = DomainSums::default();
    all.iter().for_each(|sums| total.reduce(sums.clone()));
    if total.prompts == 0.0 {
        return Err(Error::NothingMeasured);
    }
    let mut metrics = Metrics::new();
    let mut insert = |prefix: &str, sums: &DomainSums| {
        metrics.insert(format!("{prefix}/greedy"), sums.greedy / sums.prompts);
        metrics.insert(format!("{prefix}/pass@1"), sums.pass_1 / sums.prompts);
        if samples > 1 {
            metrics.insert(format!("{prefix}/pass@{samples}"), sums.pass_k / sums.prompts);
            metrics.insert(format!("{prefix}/maj@{samples}"), sums.maj_k / sums.prompts);
        }
    };
    insert("eval", &total);
    if domains.len() > 1 {
        domains.iter().zip(&all).for_each(|(domain, sums)| insert(&format!("eval/{domain}"), sums));
    }
    Ok(metrics)
}

/// This rank's part of the held-out prompts, and the index of its first prompt.
fn own_part<'a>(held_out: &'a [Arc<Record>], exchange: &Exchange) -> (&'a [Arc<Record>], usize) {
    let per_rank = held_out.len().div_ceil(exchange.world_size());
    let start = (exchange.rank() * per_rank).min(held_out.len());
    let end = (start + per_rank).min(held_out.len());
    (&held_out[start..end], start)
}
