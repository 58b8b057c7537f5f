//! One step: prompts -> groups -> scored rows -> advantages -> update.

use anyroll_strategy::Weights;

use super::{
    Carried, Rlvr,
    collect::{Collected, collect},
    prepare::prepare,
    rollout::Round,
    step_metrics as metrics_of,
    step_metrics::Clock,
    update::update,
};
use crate::{
    Result,
    train::{Exchange, StepOutcome, allocated_bytes},
};

/// Step `step`, from 0. Every rank calls; `stop` is this rank's wish to end the run after the step.
pub fn step(
    rlvr: &mut Rlvr,
    exchange: &Exchange,
    step: u64,
    carried: &mut Carried,
    stop: bool,
) -> Result<StepOutcome> {
    let Rlvr { task, models, rollout, rewards, .. } = rlvr;
    let mut clock = Clock::start();
    models.make_room()?;
    clock.offload = clock.lap();
    let weights: Weights = rollout.weights(&mut models.learner)?;
    models.learner.model.group().stream().synchronize()?; // only to measure how long ranks wait for each other's parts
    clock.gather = clock.lap();

    let waited = clock.offload;
    let learner = &mut models.learner;
    let mut round = Round { step, stop, exchange, weights: &weights, learner, rewards, waited };
    let Collected { scored, batches, metrics, spent } =
        collect(task, &mut **rollout, &mut round, carried.batches)?;
    let waited = round.waited;
    clock.lap();
    models.learner.finish_leaving()?; // after a rollout that was shorter than the copies
    let generate_bytes = allocated_bytes(&models.learner.model)?;
    drop(weights);
    clock.offload = waited + clock.lap();

    if models.critic.is_none() {
        models.learner.load()?; // behind all that comes before the first step
    }
    let batch = prepare(task, models, exchange, &scored, carried)?;
    let (critic, policy) = update(task, models, exchange, &scored, (&batch, step))?;
    clock.train = clock.lap();
    (clock.generate, clock.reward) = (spent.generating, spent.rewarding);

    let mut all = metrics_of::of_rows(task, &scored);
    all.merge(metrics_of::of_terms(rewards, &scored));
    all.merge(metrics);
    all.merge(critic);
    if let Some(policy) = &policy {
        all.merge(metrics_of::of_update(task, &scored, policy));
    }
    all.merge(batch.metrics(exchange, &scored)?);
    all.merge(metrics_of::of_effort(task, &spent.effort, generate_bytes));
    all.merge(clock.metrics(scored.tokens()));
    *carried = Carried {
        batches: carried.batches + batches,
        kl_coef: batch.next_kl_coef(task.config.algorithm.kl_in, &scored),
        rewards: batch.reward_moments,
    };
    Ok(StepOutcome { metrics: all, stop: scored.stop })
}
