//! Evaluation of the policy on held-out records.

use std::ops::ControlFlow;

use anyroll_models::Decoder;
use anyroll_strategy::Zero;
use tch::{Device, Kind, Tensor};

use super::{
    Whole,
    learn::{Answering, Said, desirable, lengths, score},
    objective::{Answers, Sums, terms},
    pipeline::{Roles, Setup},
    step::counts,
};
use crate::{
    Result,
    data::Record,
    inference::{Asked, Sample, Sampler, Sampling},
    metrics::Metrics,
    samples::{Phase, Sample as SampleLine},
    train::{Evaluation, Exchange},
};

/// Number of completions written to `samples.jsonl` at each evaluation.
const SHOWN: usize = 16;

impl Setup {
    /// The objective on the held-out records, over all ranks: `eval/loss`, and `eval/nll` and
    /// `eval/perplexity` of the answers. Pairs have `eval/accuracy`, pairs and labelled answers
    /// `eval/margin`; KTO has `eval/kl`. Greedy completions have `eval/exact`, the fraction that equals the
    /// answer.
    pub fn evaluate<M: Answering>(
        &self,
        roles: &mut Roles<M>,
        exchange: &Exchange,
        step: u64,
        phase: Phase,
    ) -> Result<Evaluation> {
        let mut metrics = self.measure(roles, exchange)?;
        let value = |name| metrics.get(name).unwrap_or(f64::NAN);
        let mut summary = format!("held-out loss {:.4}", value("eval/loss"));
        if self.config.objective.compares() {
            summary += &format!(", {:.3} of pairs right", value("eval/accuracy"));
        }
        let completions = self.completed.len();
        let mut samples = Vec::new();
        let writer = M::writer(&mut roles.policy);
        if let (Some(policy), Some(sampler)) = (writer, self.sampler.as_ref().filter(|_| completions > 0)) {
            samples = self.complete((policy, sampler), exchange, step, phase)?;
            let right = samples.iter().map(|sample| sample.reward).sum();
            let exact = exchange.sum(&[right])?[0] / completions as f64;
            metrics.insert("eval/exact", exact);
            summary += &format!(", {exact:.3} completed exactly");
            samples.truncate(SHOWN);
        }
        Ok(Evaluation { metrics, samples, picture: None, summary })
    }

    fn measure<M: Answering>(&self, roles: &mut Roles<M>, exchange: &Exchange) -> Result<Metrics> {
        if roles.of_held_out.is_none() {
            roles.of_held_out =
                self.reference_logprobs(roles, &self.held_out_own, &self.held_out_strangers)?;
        }
        let (strangers, reference) = (&self.held_out_strangers, &roles.of_held_out);
        let records = self.held_out.len() as f64;
        let kl =
            self.kl(&mut roles.policy, exchange, strangers, reference, (self.held_out_count, records))?;
        let said = self.held_out_said(roles)?;
        let stride = self.config.objective.answers();
        let count = stride * self.held_out_count;
        let own = &self.held_out_own[..count];
        let first = |all: &Tensor| all.f_narrow(0, 0, count as i64)?.f_to_device(Device::Cpu);
        let reference = roles.of_held_out.as_ref().map(|it| first(&it.sequences)).transpose()?;
        let Said { logprobs, divergence } = said.first(count as i64, Device::Cpu)?;
        let lengths = lengths(own, Device::Cpu)?.f_to_kind(Kind::Double)?;
        let desirable = desirable(own, Device::Cpu)?;
        let answers = Answers { logprobs, lengths, desirable, reference, divergence };
        // Only sums are read. The loss is not: it would need the totals of the whole step.
        let alone = Whole { records: 1.0, better: 1.0, worse: 1.0, tokens: 1.0, kl };
        let sums = Vec::<f64>::try_from(terms(&self.config.objective, &answers, alone)?.sums)?;
        let all = exchange.sum(&[&sums[..], &counts(own)].concat())?;
        let (sums, &[better, worse, tokens]) = all.split_first_chunk().expect("as many sums") else {
            unreachable!("as many counts")
        };
        let whole = Whole { records, better, worse, tokens, kl };
        let found = self.objective_metrics(&Sums::of(*sums), whole);
        let mut metrics = Metrics::new();
        let mut rename = |from: &str, to: &str| {
            if let Some(value) = found.get(from) {
                metrics.insert(to, value);
            }
        };
        rename("loss", "eval/loss");
        rename("loss/nll", "eval/nll");
        rename("loss/divergence", "eval/divergence");
        rename("reward/accuracy", "eval/accuracy");
        rename("reward/margin", "eval/margin");
        rename("kl/reference", "eval/kl");
        if let Some(nll) = found.get("loss/nll") {
            metrics.insert("eval/perplexity", nll.exp());
        }
        Ok(metrics)
    }

    /// The policy's outputs for this rank's held-out answers. With a teacher, batches are no larger than in a
    /// step.
    fn held_out_said<M: Answering>(&self, roles: &mut Roles<M>) -> Result<Said> {
        let of_a_step = self.config.batch_size / roles.policy.group().world_size();
        let at_a_time = if roles.teacher.is_some() { of_a_step } else { self.held_out_own.len().max(1) };
        let parts = self.held_out_own.chunks(at_a_time).map(|part| {
            let taught = roles.taught(part)?;
            score(&mut roles.policy, part, self.micro_batch_size, true, taught.as_ref())
        });
        Ok(Said::join(&parts.collect::<Result<Vec<_>>>()?)?)
    }

    /// This rank's share of the greedy completions. The reward is 1 for one that equals its record's answer,
    /// else 0.
    fn complete(
        &self,
        (policy, sampler): (&mut Zero<Decoder>, &Sampler),
        exchange: &Exchange,
        step: u64,
        phase: Phase,
    ) -> Result<Vec<SampleLine>> {
        policy.offload_states(&self.offloaded)?;
        let weights = policy.weights()?;
        let per_rank = self.completed.len().div_ceil(exchange.world_size());
        let own = self.completed.chunks(per_rank).nth(exchange.rank()).unwrap_or_default();
        let asked = own.iter().map(|record| {
            let sample = Sample::begin(self.tokenizer.encode_prompt(record)?);
            Ok(Asked { sample, seed: 0, how: Sampling::GREEDY })
        });
        let asked = asked.collect::<Result<Vec<_>>>()?;
        let sampled = sampler.sample(&weights, step, &asked, None, |_, _| ControlFlow::Continue(()))?;
        let line = |(record, sample): (&Record, &Sample)| {
            let (prompt, answer) = (record.prompt.clone(), record.answer.clone());
            let completion = sample.text(&self.tokenizer);
            let reward = f64::from(u8::from(sample.finished() && completion == answer));
            SampleLine { step, phase, prompt, completion, turns: Vec::new(), answer, reward }
        };
        Ok(own.iter().zip(&sampled.samples).map(line).collect())
    }
}
