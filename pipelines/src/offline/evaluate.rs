//! Evaluation of the policy on held-out records.

use std::ops::ControlFlow;

use anyroll_data::Record;
use anyroll_strategy::Weights;
use tch::{Device, Kind, Tensor};

use super::{
    Tokenized, Whole,
    gradient::{Answering, Said, labels, lengths, rewards, score},
    objective::{Sums, terms},
    pipeline::{TextModels, TextTask},
    step::Counts,
};
use crate::{
    Result,
    inference::{Sample, SampleRequest, Sampler, Sampling},
    metrics::Metrics,
    samples::{Phase, Sample as SampleLine},
    train::{Evaluation, Exchange, Learner, reduced},
};

/// Number of completions written to `samples.jsonl` at each evaluation.
const SHOWN: usize = 16;

reduced! {
    /// Sums over held-out records.
    struct HeldOutSums {
        /// Sums of the objective.
        nested objective: Sums,
        /// Statistics of the answers.
        nested counts: Counts,
    }
}

impl TextTask {
    /// Evaluates the objective on the held-out records, over all ranks: `eval/loss`, `eval/nll` and `eval/perplexity`
    /// of the answers, and `eval/kl`. Pairs have `eval/accuracy`, steps have `eval/step_accuracy`, and pairs and labelled
    /// answers have `eval/margin`. Answers with rewards have `eval/q_desirable`, `eval/q_other` and `eval/q_margin`.
    /// Also samples greedy completions; `eval/exact` is the fraction of them that equal the answer.
    pub fn evaluate<M: Answering>(
        &self,
        models: &mut TextModels<M>,
        exchange: &Exchange,
        step: u64,
        phase: Phase,
    ) -> Result<Evaluation> {
        let mut metrics = self.measure(models, exchange)?;
        let value = |name| metrics.get(name).unwrap_or(f64::NAN);
        let mut summary = format!("held-out loss {:.4}", value("eval/loss"));
        if self.config.objective.compares() {
            summary += &format!(", {:.3} of pairs right", value("eval/accuracy"));
        }
        if self.config.objective.prm().is_some() {
            summary += &format!(", {:.3} of steps right", value("eval/step_accuracy"));
        }
        if let Some(margin) = metrics.get("eval/q_margin") {
            summary += &format!(", Q of desirable answers {margin:+.3}");
        }
        let completions = self.completed.len();
        let mut samples = Vec::new();
        let sampler = self.sampler.as_ref().filter(|_| completions > 0);
        if sampler.is_some() {
            models.learner.offload()?;
        }
        if let Some(sampler) = sampler {
            let weights = M::weights_to_write(&mut models.learner.model)?;
            samples = self.complete((&weights, sampler), exchange, step, phase)?;
            let right: f64 = samples.iter().map(|sample| sample.reward).sum();
            let exact = exchange.reduce(&right)? / completions as f64;
            metrics.insert("eval/exact", exact);
            summary += &format!(", {exact:.3} completed exactly");
            samples.truncate(SHOWN);
        }
        Ok(Evaluation { metrics, samples, picture: None, summary })
    }

    fn measure<M: Answering>(&self, models: &mut TextModels<M>, exchange: &Exchange) -> Result<Metrics> {
        if models.of_held_out.is_none() {
            models.of_held_out =
                self.reference_logprobs(models, &self.held_out_own, &self.held_out_strangers)?;
        }
        let (strangers, reference) = (&self.held_out_strangers, &models.of_held_out);
        let records = self.held_out.len() as f64;
        let kl =
            self.kl(&mut models.learner, exchange, strangers, reference, (self.held_out_count, records))?;
        let said = self.held_out_said(models)?;
        let stride = self.config.objective.answers();
        let count = stride * self.held_out_count;
        let own = &self.held_out_own[..count];
        let labels = labels(own, Device::Cpu)?;
        let outputs = labels.numel();
        let tokens: usize = own.iter().map(Tokenized::answer_len).sum();
        let first = |all: &Tensor| all.f_narrow(0, 0, outputs as i64)?.f_to_device(Device::Cpu);
        let reference = models.of_held_out.as_ref().map(|it| first(&it.sequences)).transpose()?;
        let said = said.first(if said.heads.is_some() { tokens } else { outputs } as i64, Device::Cpu)?;
        let lengths = lengths(own, Device::Cpu)?.f_to_kind(Kind::Double)?;
        let answers = said.answers(lengths, labels, rewards(own, Device::Cpu)?, reference)?;
        // Only the sums are read, not the loss, which would need the totals of the whole step.
        let alone = Whole { records: 1.0, better: 1.0, worse: 1.0, tokens: 1.0, kl };
        let sums = Sums::read(&terms(&self.config.objective, &answers, alone)?.sums.stack()?)?;
        let all = exchange.reduce(&HeldOutSums { objective: sums, counts: Counts::of(own) })?;
        let Counts { better, worse, tokens } = all.counts;
        let whole = Whole { records, better, worse, tokens, kl };
        let found = self.objective_metrics(&all.objective, whole);
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
        rename("steps/accuracy", "eval/step_accuracy");
        rename("reward/margin", "eval/margin");
        rename("kl/reference", "eval/kl");
        rename("values/q_desirable", "eval/q_desirable");
        rename("values/q_other", "eval/q_other");
        rename("values/q_margin", "eval/q_margin");
        if let Some(nll) = found.get("loss/nll") {
            metrics.insert("eval/perplexity", nll.exp());
        }
        Ok(metrics)
    }

    /// The policy's outputs for this rank's held-out answers. With a teacher, at most a step's answers are scored at
    /// a time, since the teacher's rows need memory.
    fn held_out_said<M: Answering>(&self, models: &mut TextModels<M>) -> Result<Said> {
        let of_a_step = self.config.batch_size / models.learner.model.group().world_size();
        let at_a_time = if models.teacher.is_some() { of_a_step } else { self.held_out_own.len().max(1) };
        let parts = self.held_out_own.chunks(at_a_time).map(|part| {
            let taught = models.taught(part)?;
            let Learner { model, micro_batch, .. } = &mut models.learner;
            score(model, part, *micro_batch, true, taught.as_ref())
        });
        Ok(Said::join(&parts.collect::<Result<Vec<_>>>()?)?)
    }

    /// This rank's part of the greedy completions. The reward is 1 for a completion that equals its record's answer,
    /// else 0.
    fn complete(
        &self,
        (weights, sampler): (&Weights, &Sampler),
        exchange: &Exchange,
        step: u64,
        phase: Phase,
    ) -> Result<Vec<SampleLine>> {
        let per_rank = self.completed.len().div_ceil(exchange.world_size());
        let own = self.completed.chunks(per_rank).nth(exchange.rank()).unwrap_or_default();
        let asked = own.iter().map(|record| {
            let sample = Sample::begin(self.tokenizer.encode_prompt(record)?);
            let max_new_tokens = self.completion_tokens;
            Ok(SampleRequest { sample, seed: 0, how: Sampling::GREEDY, max_new_tokens })
        });
        let asked = asked.collect::<Result<Vec<_>>>()?;
        let sampled = sampler.sample(weights, step, &asked, None, |_, _| ControlFlow::Continue(()))?;
        let line = |(record, sample): (&Record, &Sample)| {
            let (prompt, answer) = (record.prompt.clone(), record.answer.clone());
            let completion = sample.text(&self.tokenizer);
            let reward = f64::from(u8::from(sample.finished() && completion == answer));
            let (turns, columns) = Default::default();
            SampleLine { step, phase, prompt, completion, turns, answer, reward, columns, training: None }
        };
        Ok(own.iter().zip(&sampled.samples).map(line).collect())
    }
}
