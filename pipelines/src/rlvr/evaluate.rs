//! Evaluation of the policy on held-out prompts.

use std::{collections::BTreeMap, sync::Arc};

use anyroll_config::EvaluationConfig;
use anyroll_data::Record;
use anyroll_reward::Score;

use super::{
    Rlvr,
    answers::{Answering, Answers, Asking, Measured},
    grader::Grader,
    terms::TermSums,
    written::turns,
};
use crate::{
    Error, Result,
    inference::{Sample, Sampling},
    metrics::Metrics,
    samples::{Phase, Sample as SampleLine},
    train::{Evaluation, Exchange, Reduce, reduced},
};

/// Number of completions written to `samples.jsonl` at each evaluation.
const SHOWN: usize = 16;

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

/// Samples a greedy completion and `evaluation.samples` others of each held-out prompt. Returns
/// `eval/greedy`, `eval/pass@1`, `eval/pass@k` and `eval/maj@k` over all ranks, for several domains also for each.
/// Also returns this rank's first greedy completions. A prompt with a completion that cannot be scored is excluded.
pub fn evaluate(rlvr: &mut Rlvr, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation> {
    let Rlvr { task, held_out, engine, rewards, models, .. } = rlvr;
    models.learner.offload()?;
    let weights = engine.weights(&mut models.learner.model)?;
    let EvaluationConfig { samples, temperature, top_p, .. } = task.config.evaluation;
    let asking = Asking {
        samples,
        how: Sampling { temperature, top_p, ..Sampling::FREE },
        max_new_tokens: task.config.evaluation.max_new_tokens(task.config.rollout.max_new_tokens),
        seed: task.seed,
    };
    let (records, first) = own_part(held_out, exchange);
    let grader = &mut rewards.grader;
    let mut answering =
        Answering { engine, weights: &weights, grader, exchange, version: step, progress: &|_| () };
    let answers = answering.answers(records, first, &asking)?;
    let mut terms = answers.greedy.terms.clone();
    terms.reduce(answers.drawn.terms.clone());
    let failed: f64 = terms.iter().map(|sums| sums.failed).sum();
    let domains = of_domains(samples, held_out, records, &answers, &rewards.grader);
    let mut metrics = summary(samples, domains, exchange)?;
    if failed > 0.0 {
        metrics.insert("eval/errors", failed);
    }
    metrics.merge(TermSums::logged_in_evaluation(&terms, rewards.grader.sum.names()));
    let value = |name| metrics.get(name).unwrap_or(f64::NAN);
    let summary = format!("held-out greedy {:.3}, pass@1 {:.3}", value("eval/greedy"), value("eval/pass@1"));
    let samples = lines(&rewards.grader, records, &answers.greedy, step, phase);
    Ok(Evaluation { metrics, samples, picture: None, summary })
}

/// Lines of `samples.jsonl`.
fn lines(
    grader: &Grader,
    records: &[Arc<Record>],
    best: &Measured,
    step: u64,
    phase: Phase,
) -> Vec<SampleLine> {
    let tokenizer = &grader.tokenizer;
    let shown = records.iter().zip(&best.samples).zip(&best.scores).take(SHOWN);
    let line = |((record, sample), score): ((&Arc<Record>, &Sample), &Result<Score, String>)| {
        let (prompt, answer) = (record.prompt.clone(), record.answer.clone());
        let (completion, reward) =
            (sample.transcript(tokenizer), score.as_ref().map_or(f64::NAN, |it| it.measured));
        let columns = score.as_ref().map(|score| grader.columns_of(score)).unwrap_or_default();
        let turns = turns(tokenizer, sample);
        SampleLine { step, phase, prompt, completion, turns, answer, reward, columns, training: None }
    };
    shown.map(line).collect()
}

/// Sums over this rank's prompts of each domain. All ranks list the same domains, even those without prompts here.
fn of_domains<'a>(
    samples: usize,
    held_out: &'a [Arc<Record>],
    records: &[Arc<Record>],
    answers: &Answers,
    grader: &Grader,
) -> BTreeMap<&'a str, DomainSums> {
    let domains = held_out.iter().map(|record| (record.domain.as_str(), DomainSums::default()));
    let mut sums: BTreeMap<&str, DomainSums> = domains.collect();
    for (index, record) in records.iter().enumerate() {
        let Some(verdicts) = answers.verdicts(index, record, samples, grader) else { continue };
        let sums = sums.get_mut(record.domain.as_str()).expect("a held-out record's");
        sums.reduce(DomainSums {
            prompts: 1.0,
            greedy: verdicts.greedy,
            pass_1: verdicts.pass_at(1),
            pass_k: verdicts.pass_at(samples),
            maj_k: verdicts.majority(),
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
