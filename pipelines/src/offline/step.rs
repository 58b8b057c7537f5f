//! One step: read records, score them with the reference, train.

use std::{ops::Range, time::Instant};

use anyroll_config::{IlqlConfig, Objective, Turns, WarmupConfig};
use anyroll_data::{Dataset, Draw, Record, Tokenizer};
use anyroll_models::Decoder;
use anyroll_strategy::Zero;

use super::{
    Batch, Pass, Tokenized, Whole,
    gradient::{Answering, Seen},
    learn,
    objective::{Sums, likelihood_weight},
    pipeline::{TextModels, TextTask},
    read,
    tokenized::mismatched,
};
use crate::{
    Result,
    metrics::Metrics,
    train::{Exchange, MicroBatch, Purpose, StepOutcome, WarmupStep, learning_rate, reduced},
};

/// Source of records, and their tokenizer.
#[derive(Clone, Copy)]
pub struct Lesson<'a> {
    /// The records.
    pub dataset: &'a Dataset,
    /// Tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The run's seed.
    pub seed: u64,
    /// The turns of a conversation that are learnt.
    pub turns: Turns,
    /// Weight of the loss that balances experts.
    pub router_aux_loss_coef: f64,
}

impl Lesson<'_> {
    /// The `count` records of a step, over all ranks, and the range of this rank's equal part.
    fn records(
        &self,
        exchange: &Exchange,
        draw: Draw,
        step: u64,
        count: usize,
    ) -> (Vec<Record>, Range<usize>) {
        let per_rank = count / exchange.world_size();
        let first = exchange.rank() * per_rank;
        (self.dataset.train_batch(draw, self.seed, step, count), first..first + per_rank)
    }

    /// Tokenizes the records in the form that `objective` reads.
    fn read(&self, objective: &Objective, records: &[Record]) -> Result<Vec<Tokenized>> {
        Ok(read(self.tokenizer, objective, self.turns, records)?)
    }

    /// Runs one supervised warm-up step of `policy` on the answers. The loss is the mean negative
    /// log-likelihood of the answers' tokens. `micro_batch` applies if the warm-up sets no size of its own.
    pub fn warmup_step(
        &self,
        policy: &mut Zero<Decoder>,
        exchange: &Exchange,
        warmup: &WarmupConfig,
        micro_batch: MicroBatch,
        step: u64,
    ) -> Result<WarmupStep> {
        let (records, own) = self.records(exchange, Draw::Warmup, step, warmup.batch_size);
        let sequences = self.read(&Objective::Sft, &records[own])?;
        let tokens = exchange.reduce(&answer_tokens(&sequences))?;
        let records = warmup.batch_size as f64;
        let batch = Batch {
            sequences: &sequences,
            micro_batch: warmup.micro_batch_size.map_or(micro_batch, MicroBatch::of_sequences),
            reference: None,
            taught: None,
            router_aux_loss_coef: self.router_aux_loss_coef,
            whole: Whole { records, better: records, worse: 0.0, tokens, kl: 0.0 },
        };
        let first = exchange.rank() * sequences.len();
        let pass = Pass { purpose: Purpose::WarmupDropout, seed: self.seed, number: step, first };
        let seen = learn(policy, &Objective::Sft, &batch, pass)?;
        let learning_rate = learning_rate(&warmup.optimizer, step, warmup.steps);
        let stats = policy.step(learning_rate)?;
        policy.finish_step(&stats)?;
        Ok(WarmupStep { loss: seen.read(exchange)?.objective.nll / tokens, learning_rate })
    }
}

/// Number of tokens of the answers.
fn answer_tokens(sequences: &[Tokenized]) -> f64 {
    sequences.iter().map(|sequence| sequence.answer_len() as f64).sum()
}

reduced! {
    /// Counts of answers.
    pub struct Counts {
        /// Number of better or desirable answers.
        sum better: f64,
        /// Number of other answers.
        sum worse: f64,
        /// Tokens of the better answers, of all answers if they have rewards, or labelled steps.
        sum tokens: f64,
    }
}

impl Counts {
    /// Counts the answers of `sequences`.
    pub fn of(sequences: &[Tokenized]) -> Self {
        let count = sequences.iter().filter(|sequence| sequence.desirable).count();
        let learnt = sequences.iter().filter(|sequence| sequence.desirable || sequence.reward.is_some());
        let tokens = learnt.map(|sequence| sequence.answer_len() as f64).sum();
        Self { better: count as f64, worse: (sequences.len() - count) as f64, tokens }
    }
}

reduced! {
    /// Counts of a step's sequences.
    struct Drawn {
        /// Tokens of all answers.
        sum answered: f64,
        /// Tokens of prompts and answers.
        sum tokens: f64,
        /// True if some rank was asked to stop.
        any stop: bool,
        /// Statistics of the answers.
        nested counts: Counts,
    }
}

impl TextTask {
    /// Runs step `step`, from 0. `stop` is this rank's request to end the run after the step. Every rank must call
    /// this.
    pub fn step<M: Answering>(
        &self,
        models: &mut TextModels<M>,
        exchange: &Exchange,
        step: u64,
        stop: bool,
    ) -> Result<StepOutcome> {
        let started = Instant::now();
        let (config, objective) = (&self.config, &self.config.objective);
        models.learner.load()?; // offloaded by an evaluation, or by loading a checkpoint
        let lesson = self.lesson();
        let (drawn, own) = lesson.records(exchange, Draw::Rollout, step, config.batch_size);
        let sequences = lesson.read(objective, &drawn[own.clone()])?;
        let strangers =
            if objective.estimates_kl() { mismatched(&drawn, own, self.room) } else { Vec::new() };
        let strangers = lesson.read(objective, &strangers)?;
        let own = Drawn {
            answered: answer_tokens(&sequences),
            tokens: sequences.iter().map(|sequence| sequence.tokens.len() as f64).sum(),
            stop,
            counts: Counts::of(&sequences),
        };
        let drawn = exchange.reduce(&own)?;
        let Counts { better, worse, tokens } = drawn.counts;
        let records = config.batch_size as f64;
        let reference = self.reference_logprobs(models, &sequences, &strangers)?;
        let taught = models.taught(&sequences)?;
        let learner = &mut models.learner;
        let of_kl = (strangers.len(), records);
        let kl = self.kl(learner, exchange, &strangers, &reference, of_kl)?;
        let batch = Batch {
            sequences: &sequences,
            micro_batch: learner.micro_batch,
            reference: reference.map(|compared| compared.sequences),
            taught: taught.as_ref(),
            router_aux_loss_coef: config.router_aux_loss_coef,
            whole: Whole { records, better, worse, tokens, kl },
        };
        let first = exchange.rank() * sequences.len();
        let pass = Pass { purpose: Purpose::Dropout, seed: self.seed, number: step, first };
        let mut seen = Seen::default();
        let update = learner.update(step, 1, 1, |model, _| {
            seen = learn(model, objective, &batch, pass)?;
            M::follow(model, objective, step)
        })?;
        let stepped = learner.finish(update)?;

        let mut metrics = self.learnt(exchange, &seen, batch.whole, drawn.answered)?;
        metrics.merge(seen.routers.metrics(exchange, config.router_aux_loss_coef > 0.0, false)?);
        metrics.merge(stepped.metrics);
        metrics.merge(stepped.costs);
        metrics.insert("perf/shared_rows", 1.0 - seen.rows as f64 / seen.inputs as f64);
        let step_s = started.elapsed().as_secs_f64();
        metrics.insert("perf/tokens_per_s", drawn.tokens / step_s);
        metrics.insert("time/step_s", step_s);
        Ok(StepOutcome { metrics, samples: Vec::new(), stop: drawn.stop })
    }

    /// Metrics of a step, over all ranks.
    fn learnt(&self, exchange: &Exchange, seen: &Seen, whole: Whole, answered: f64) -> Result<Metrics> {
        let sums = seen.read(exchange)?;
        let mut metrics = self.objective_metrics(&sums.objective, whole);
        if !self.config.objective.is_of_numbers() {
            metrics.insert("entropy", sums.entropy / answered);
        }
        Ok(metrics)
    }

    /// Metrics of sums over all ranks, as means.
    pub fn objective_metrics(&self, sums: &Sums, whole: Whole) -> Metrics {
        let objective = &self.config.objective;
        let (nll, preference) = (sums.nll / whole.tokens, sums.preference / whole.records);
        let likelihood_weight = likelihood_weight(objective);
        let mut metrics = Metrics::new();
        // Labelled answers may all be undesirable, and the likelihood is that of desirable ones.
        let likelihood = if likelihood_weight > 0.0 { likelihood_weight * nll } else { 0.0 };
        let divergence = objective.distills().map(|_| sums.divergence / whole.tokens);
        let values = objective.ilql().map(|ilql| ilql_metrics(&mut metrics, ilql, sums, whole));
        metrics.insert("loss", preference + likelihood + divergence.or(values).unwrap_or(0.0));
        if let Some(divergence) = divergence {
            metrics.insert("loss/divergence", divergence);
        }
        if !objective.is_of_numbers() && whole.tokens > 0.0 {
            metrics.insert("loss/nll", nll);
        }
        if objective.compares() {
            metrics.insert("loss/preference", preference);
            metrics.insert("reward/chosen", sums.chosen / whole.records);
            metrics.insert("reward/rejected", sums.rejected / whole.records);
            metrics.insert("reward/accuracy", sums.right / whole.records);
            metrics.insert("reward/margin", (sums.chosen - sums.rejected) / whole.records);
        }
        if objective.judged().is_some() {
            self.judged_metrics(&mut metrics, sums, whole);
        }
        if objective.prm().is_some() {
            metrics.insert("steps/accuracy", sums.right / whole.tokens);
            metrics.insert("steps/right", sums.labels / whole.tokens);
        }
        metrics
    }

    /// Adds the metrics of labelled answers. A step without desirable answers has no mean of these, and likewise for
    /// undesirable ones.
    fn judged_metrics(&self, metrics: &mut Metrics, sums: &Sums, whole: Whole) {
        metrics.insert("loss/preference", sums.preference / whole.records);
        let [chosen, rejected, margin] = judged_means(sums, whole);
        let kl = self.config.objective.estimates_kl().then_some(whole.kl);
        for (name, value) in [
            ("reward/chosen", chosen),
            ("reward/rejected", rejected),
            ("reward/margin", margin),
            ("kl/reference", kl),
        ] {
            if let Some(value) = value {
                metrics.insert(name, value);
            }
        }
    }
}

/// Means over desirable answers, over the others, and their difference; `None` without such answers.
fn judged_means(sums: &Sums, whole: Whole) -> [Option<f64>; 3] {
    let of = |sum: f64, count: f64| (count > 0.0).then(|| sum / count);
    let (chosen, rejected) = (of(sums.chosen, whole.better), of(sums.rejected, whole.worse));
    [chosen, rejected, chosen.zip(rejected).map(|(chosen, rejected)| chosen - rejected)]
}

/// Adds the metrics of ILQL, and returns the loss.
fn ilql_metrics(metrics: &mut Metrics, ilql: &IlqlConfig, sums: &Sums, whole: Whole) -> f64 {
    let [q, v, cql, awac] = [sums.q_loss, sums.v_loss, sums.cql, sums.awac].map(|sum| sum / whole.tokens);
    for (name, value) in [("loss/q", q), ("loss/v", v), ("loss/cql", cql), ("loss/awac", awac)] {
        metrics.insert(name, value);
    }
    metrics.insert("values/v", sums.values / whole.tokens);
    metrics.insert("values/awac_weight", sums.awac_weights / whole.tokens);
    let names = ["values/q_desirable", "values/q_other", "values/q_margin"];
    for (name, value) in names.into_iter().zip(judged_means(sums, whole)) {
        if let Some(value) = value {
            metrics.insert(name, value);
        }
    }
    q + v + ilql.cql_scale * cql + ilql.awac_scale * awac
}
