//! The samples that a step trains on: whole groups from rollout, scored, and selected.

use std::time::{Duration, Instant};

use super::{
    Task,
    rollout::{Effort, Groups, Rollout, Round},
    rows::Scored,
    select::{leave_out_difficulties, select},
};
use crate::{Result, config::MixedGroupsConfig, metrics::Metrics};

/// A step's samples.
pub struct Collected {
    /// Scored, in the step's order.
    pub scored: Scored,
    /// Batches of prompts that were drawn.
    pub batches: u64,
    /// How they were selected, and how old they are.
    pub metrics: Metrics,
    /// What they took on this rank.
    pub spent: Spent,
}

/// What sampling and scoring took on a rank.
#[derive(Clone, Copy, Default)]
pub struct Spent {
    /// Of its engine.
    pub effort: Effort,
    /// Time spent sampling.
    pub generating: Duration,
    /// Time spent scoring beyond that.
    pub rewarding: Duration,
}

/// Collects the samples of step `round.step`, from batch `first` on. Every rank calls.
///
/// With dynamic sampling it draws further batches until there are enough groups that teach something, or `max_batches`.
pub fn collect(task: &Task, rollout: &mut dyn Rollout, round: &mut Round, first: u64) -> Result<Collected> {
    let mut spent = Spent::default();
    let mut drawn = vec![batch(task, rollout, round, (first, &mut spent))?];
    let mut batches = 1;
    let (scored, mut metrics) = match task.config.selection.mixed_groups {
        Some(MixedGroupsConfig { max_batches }) => {
            while select(task, &drawn).teaching < task.share.prompts && batches < max_batches {
                round.stop |= drawn.iter().any(|scored| scored.stop);
                drawn.push(batch(task, rollout, round, (first + batches, &mut spent))?);
                batches += 1;
            }
            let selection = select(task, &drawn);
            (selection.pick(task, round.exchange, &drawn)?, selection.metrics(task))
        }
        None => (leave_out_difficulties(task, drawn.remove(0)), Metrics::new()),
    };
    if let Some(staleness) = &scored.staleness {
        metrics.merge(staleness.metrics(task.share.prompts));
    }
    Ok(Collected { scored, batches, metrics, spent })
}

/// Samples and scores the groups of batch `number`. The batches before it have been taken.
fn batch(
    task: &Task,
    rollout: &mut dyn Rollout,
    round: &mut Round,
    (number, spent): (u64, &mut Spent),
) -> Result<Scored> {
    let (started, waited) = (Instant::now(), round.waited);
    let Groups { taken, scoring, effort, staleness } = rollout.groups(round, number)?;
    round.make_room_to_score()?;
    let sampled = Instant::now();
    let outcomes = round.rewards.finish(scoring)?;
    spent.rewarding += sampled.elapsed();
    spent.generating += sampled - started - (round.waited - waited);
    spent.effort = spent.effort.joined(effort);
    // A greedy completion is scored, and that is all.
    let own = taken.into_iter().flat_map(|group| group.samples.into_iter().take(task.share.group_size));
    let drawn = (number, round.stop);
    round.rewards.score(round.exchange, own.collect(), outcomes, staleness, drawn)
}
