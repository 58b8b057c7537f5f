//! One step: read, compare with the reference, learn.

use std::time::Instant;

use anyroll_models::Decoder;
use anyroll_strategy::Zero;

use super::{
    Batch, Pass, Whole, Written, learn,
    learn::{Answering, Seen},
    objective::{SUMS, likelihood_weight},
    pipeline::{Roles, Setup},
    read,
};
use crate::{
    Result,
    config::{Objective, Turns, WarmupConfig},
    data::{Dataset, Draw, Tokenizer},
    metrics::Metrics,
    train::{Exchange, Purpose, StepOutcome, allocated_bytes, finish_steps, learning_rate},
};

/// What records are drawn from, and by what they are read.
#[derive(Clone, Copy)]
pub struct Lesson<'a> {
    /// The records.
    pub dataset: &'a Dataset,
    /// Text to tokens.
    pub tokenizer: &'a Tokenizer,
    /// The run's seed.
    pub seed: u64,
    /// What is learnt of conversations.
    pub turns: Turns,
}

impl Lesson<'_> {
    /// This rank's equal part of the `count` records of a step, as `objective` reads them.
    fn own(
        &self,
        exchange: &Exchange,
        objective: &Objective,
        draw: Draw,
        step: u64,
        count: usize,
    ) -> Result<Vec<Written>> {
        let records = self.dataset.train_batch(draw, self.seed, step, count);
        let per_rank = count / exchange.world_size();
        Ok(read(self.tokenizer, objective, self.turns, &records[exchange.rank() * per_rank..][..per_rank])?)
    }

    /// One supervised step of `policy` on the answers, as warm-ups have them: the mean negative log-likelihood of the
    /// answers' tokens, which is returned. `micro_batch_size` is for a warm-up that has none of its own.
    pub fn warmup_step(
        &self,
        policy: &mut Zero<Decoder>,
        exchange: &Exchange,
        warmup: &WarmupConfig,
        micro_batch_size: usize,
        step: u64,
    ) -> Result<f64> {
        let sequences = self.own(exchange, &Objective::Sft, Draw::Warmup, step, warmup.batch_size)?;
        let tokens = exchange.sum(&[answer_tokens(&sequences, 1)])?[0];
        let batch = Batch {
            sequences: &sequences,
            micro_batch_size: warmup.micro_batch_size.unwrap_or(micro_batch_size),
            reference: None,
            whole: Whole { records: warmup.batch_size as f64, tokens },
        };
        let first = exchange.rank() * sequences.len();
        let pass = Pass { purpose: Purpose::WarmupDropout, seed: self.seed, number: step, first };
        let seen = learn(policy, &Objective::Sft, &batch, pass)?;
        let stats = policy.step(learning_rate(&warmup.optimizer, step, warmup.steps))?;
        policy.finish_step(&stats)?;
        let (sums, _) = seen.read()?;
        Ok(exchange.sum(&sums[..1])?[0] / tokens)
    }
}

/// Tokens of every `stride`-th answer from the first: of all with 1, of the better ones of pairs with 2.
pub fn answer_tokens(sequences: &[Written], stride: usize) -> f64 {
    sequences.iter().step_by(stride).map(|sequence| sequence.answer_len() as f64).sum()
}

impl Setup {
    /// Step `step`, from 0. Every rank calls; `stop` is this rank's wish to end the run after the step.
    pub fn step<M: Answering>(
        &self,
        roles: &mut Roles<M>,
        exchange: &Exchange,
        step: u64,
        stop: bool,
    ) -> Result<StepOutcome> {
        let started = Instant::now();
        let (config, objective) = (&self.config, &self.config.objective);
        roles.policy.load_states(&self.offloaded)?; // away since an evaluation, or a checkpoint that was loaded
        let sequences = self.lesson().own(exchange, objective, Draw::Rollout, step, config.batch_size)?;
        let own = [
            answer_tokens(&sequences, 1),
            answer_tokens(&sequences, objective.answers()),
            sequences.iter().map(|sequence| sequence.tokens.len() as f64).sum(),
            f64::from(u8::from(stop)),
        ];
        let [answered, better, all, stops] = exchange.sum(&own)?[..] else { unreachable!("as many sums") };
        let reference = self.reference_logprobs(roles, &sequences)?;
        let batch = Batch {
            sequences: &sequences,
            micro_batch_size: self.micro_batch_size,
            reference,
            whole: Whole { records: config.batch_size as f64, tokens: better },
        };
        let first = exchange.rank() * sequences.len();
        let pass = Pass { purpose: Purpose::Dropout, seed: self.seed, number: step, first };
        let seen = learn(&mut roles.policy, objective, &batch, pass)?;
        let learning_rate = learning_rate(&config.optimizer, step, config.steps.number());
        let stats = roles.policy.step(learning_rate)?;
        let train_bytes = allocated_bytes(&roles.policy)?;
        let stepped = finish_steps(&roles.policy, &[stats])?;

        let mut metrics = self.learnt(exchange, &seen, batch.whole, answered)?;
        metrics.merge(stepped);
        metrics.insert("learning_rate", learning_rate);
        metrics.insert("perf/allocated_bytes", train_bytes);
        metrics.insert("perf/shared_rows", 1.0 - seen.rows as f64 / seen.inputs as f64);
        let step_s = started.elapsed().as_secs_f64();
        metrics.insert("perf/tokens_per_s", all / step_s);
        metrics.insert("time/step_s", step_s);
        Ok(StepOutcome { metrics, stop: stops > 0.0 })
    }

    /// What a step showed, over all ranks.
    fn learnt(&self, exchange: &Exchange, seen: &Seen, whole: Whole, answered: f64) -> Result<Metrics> {
        let (sums, entropy) = seen.read()?;
        let all = exchange.sum(&[&sums[..], &[entropy]].concat())?;
        let mut metrics = self.objective_metrics(&all[..SUMS.len()], whole);
        if !self.config.objective.is_of_numbers() {
            metrics.insert("entropy", all[SUMS.len()] / answered);
        }
        Ok(metrics)
    }

    /// The means that sums over all ranks come to: `loss`, and what [`SUMS`] names.
    pub fn objective_metrics(&self, sums: &[f64], whole: Whole) -> Metrics {
        let objective = &self.config.objective;
        let (nll, preference) = (sums[0] / whole.tokens, sums[1] / whole.records);
        let mut metrics = Metrics::new();
        metrics.insert("loss", preference + likelihood_weight(objective) * nll);
        if !objective.is_of_numbers() {
            metrics.insert(SUMS[0], nll);
        }
        if objective.compares() {
            for (name, sum) in SUMS.into_iter().zip(sums).skip(1) {
                metrics.insert(name, sum / whole.records);
            }
            metrics.insert("reward/margin", (sums[2] - sums[3]) / whole.records);
        }
        metrics
    }
}
