//! One step: prompts -> groups -> scored rows -> advantages -> update.

use std::time::Instant;

use anyroll_backends::profile::span;

use super::{
    Carried, Rlvr, Task,
    prepare::prepare,
    rollout::{Groups, Rollout, Round, Spent},
    rows::Scored,
    select::{leave_out_difficulties, until_mixed},
    step_metrics::{Clock, batch_metrics, step_metrics},
    update::update,
    written::Written,
};
use crate::{
    Result,
    train::{Exchange, StepOutcome, allocated_bytes},
};

/// Runs step `step`, from 0. `stop` is this rank's request to end the run after the step. Every rank must call this.
pub fn step(
    rlvr: &mut Rlvr,
    exchange: &Exchange,
    step: u64,
    carried: &mut Carried,
    stop: bool,
) -> Result<StepOutcome> {
    let Rlvr { task, dataset, models, rollout, rewards, .. } = rlvr;
    let mut clock = Clock::start();
    let named = span(format_args!("gather weights"));
    models.make_room()?;
    let waited = clock.lap();
    let weights = rollout.weights(&mut models.learner)?;
    models.learner.model.group().stream().synchronize()?; // only to measure how long ranks wait for each other's shards
    clock.gather = clock.lap();
    drop(named);

    let (learner, spent) = (&mut models.learner, Spent { waited, ..Spent::default() });
    let mut round = Round { step, stop, exchange, weights: &weights, learner, rewards, spent };
    let scored = collect(task, &mut **rollout, &mut round, carried.batches)?;
    clock.spent = round.spent;
    clock.lap();
    models.learner.finish_leaving()?; // waits only after a rollout that was shorter than the copies
    clock.generate_bytes = allocated_bytes(&models.learner.model)?;
    drop(weights);
    let copied = clock.lap();
    clock.spent.waited += copied;

    if models.critic.is_none() {
        models.learner.load()?; // overlaps all work before the first optimizer step
    }
    let named = span(format_args!("prepare"));
    let batch = prepare(task, models, exchange, &scored, carried)?;
    drop(named);
    let named = span(format_args!("update"));
    let updated = update(task, models, exchange, &scored, &batch, step)?;
    drop(named);
    clock.train = clock.lap();

    let mut metrics = step_metrics(task, rewards, &scored, &updated);
    metrics.merge(batch_metrics(&batch, exchange, &scored)?);
    metrics.merge(clock.metrics(task, scored.tokens()));
    *carried = Carried {
        batches: carried.batches + scored.batches,
        kl_coef: batch.kl.and_then(|kl| kl.next_coef(task.config.algorithm.kl_in, &scored)),
        rewards: batch.reward_moments,
    };
    let written = Written { task, dataset, grader: &rewards.grader, exchange, step: step + 1 };
    let samples = written.lines(&scored, &batch.advantages)?;
    Ok(StepOutcome { metrics, samples, stop: scored.stop })
}

/// Returns the samples that step `round.step` trains on, from batch `first` on. Every rank must call this.
///
/// With dynamic sampling, further batches are drawn until there are enough groups that teach something.
fn collect(task: &Task, rollout: &mut dyn Rollout, round: &mut Round, first: u64) -> Result<Scored> {
    let drawn = batch(rollout, round, first)?;
    match task.config.selection.mixed_groups {
        Some(mixed) => until_mixed(task, mixed, round, drawn, |round, drawn_before| {
            batch(rollout, round, first + drawn_before)
        }),
        None => Ok(leave_out_difficulties(task, drawn)),
    }
}

/// Samples and scores the groups of batch `number`. Previous batches must have been taken.
fn batch(rollout: &mut dyn Rollout, round: &mut Round, number: u64) -> Result<Scored> {
    let (started, waited) = (Instant::now(), round.spent.waited);
    let named = span(format_args!("rollout"));
    let Groups { taken, scoring, effort, staleness } = rollout.groups(round, number)?;
    drop(named);
    round.make_room_to_score()?;
    let sampled = Instant::now();
    let _named = span(format_args!("score"));
    let outcomes = round.rewards.grader.finish(round.exchange, scoring)?;
    round.spent.rewarding += sampled.elapsed();
    round.spent.generating += sampled - started - (round.spent.waited - waited);
    round.spent.effort = round.spent.effort.joined(effort);
    round.rewards.score(round.exchange, taken, outcomes, staleness, number, round.stop)
}
