//! Selection of the groups to train on from the batches that were drawn.

use std::mem;

use anyroll_config::MixedGroupsConfig;

use super::{
    Task,
    rollout::Round,
    rows::{Row, Scored},
};
use crate::{
    Result,
    inference::Sample,
    metrics::Metrics,
    samples::Columns,
    train::{Exchange, Reduce},
};

/// A group: index of its batch, and index in the batch.
type Place = (usize, usize);

/// Selected groups of several batches.
struct Selection {
    /// Places of the groups, in the order of the batches.
    places: Vec<Place>,
    /// Number of groups that teach something, of all that were drawn.
    teaching: usize,
    /// Number of batches that were drawn.
    batches: usize,
}

/// Dynamic sampling: draws batches after `drawn` until there are enough groups that teach something, or `max_batches`.
/// `draw` draws a batch, given the number of previous ones. Every rank must call this.
pub fn until_mixed(
    task: &Task,
    MixedGroupsConfig { max_batches }: MixedGroupsConfig,
    round: &mut Round,
    drawn: Scored,
    mut draw: impl FnMut(&mut Round, u64) -> Result<Scored>,
) -> Result<Scored> {
    let mut batches = vec![drawn];
    while select(task, &batches).teaching < task.share.prompts && (batches.len() as u64) < max_batches {
        round.stop |= batches.iter().any(|batch| batch.stop);
        batches.push(draw(round, batches.len() as u64)?);
    }
    select(task, &batches).pick(task, round.exchange, &batches)
}

/// Selects groups that teach something: their measures differ, and the mean is in range. Others fill up the step.
fn select(task: &Task, batches: &[Scored]) -> Selection {
    let prompts = task.share.prompts;
    let mut places = places(task, batches, true);
    let teaching = places.len();
    places.extend(self::places(task, batches, false));
    places.truncate(prompts);
    places.sort_unstable();
    Selection { places, teaching, batches: batches.len() }
}

/// Groups that teach something, or all others if `teaching` is false.
fn places(task: &Task, batches: &[Scored], teaching: bool) -> Vec<Place> {
    let group_size = task.share.group_size;
    let all = batches.iter().enumerate().flat_map(|(index, scored)| {
        scored.rows.chunks(group_size).enumerate().map(move |(number, group)| (index, number, group))
    });
    let wanted = all.filter(|(_, _, group)| {
        let differs = group.iter().any(|row| row.measured != group[0].measured);
        (differs && is_in_range(task, group)) == teaching
    });
    wanted.map(|(batch, number, _)| (batch, number)).collect()
}

/// Returns true if the mean measure of a group is neither too low nor too high.
fn is_in_range(task: &Task, group: &[Row]) -> bool {
    let mean = group.iter().map(|row| row.measured).sum::<f64>() / group.len() as f64;
    task.config.selection.difficulty.is_none_or(|range| (range.min..=range.max).contains(&mean))
}

/// Excludes groups that are too hard or too easy from training, without dynamic sampling.
pub fn leave_out_difficulties(task: &Task, mut scored: Scored) -> Scored {
    for group in scored.rows.chunks_mut(task.share.group_size) {
        if !is_in_range(task, group) {
            group.iter_mut().for_each(|row| row.trained = false);
        }
    }
    scored
}

impl Selection {
    /// Returns the samples of the selected groups from all `batches`. Every rank gets the same number of groups, and
    /// the selection does not depend on the number of ranks. Every rank must call this.
    fn pick(&self, task: &Task, exchange: &Exchange, batches: &[Scored]) -> Result<Scored> {
        let group_size = task.share.group_size;
        let (own, columns) = self.deal(task, exchange, batches)?;
        let mut picked = Scored {
            own,
            columns,
            batches: batches.len() as u64,
            selection: self.metrics(task),
            ..Scored::default()
        };
        for &(batch, group) in &self.places {
            let rows = group * group_size..(group + 1) * group_size;
            picked.rows.extend(batches[batch].rows[rows].iter().cloned());
            picked.greedy.extend(batches[batch].greedy.get(group));
        }
        for batch in batches {
            picked.terms.reduce(batch.terms.clone());
            picked.stop |= batch.stop;
        }
        Ok(picked)
    }

    /// Metrics of the selection.
    fn metrics(&self, task: &Task) -> Metrics {
        let prompts = task.share.prompts;
        let mut metrics = Metrics::new();
        metrics.insert("selection/batches", self.batches as f64);
        metrics.insert("selection/teaching_groups", self.teaching as f64 / (self.batches * prompts) as f64);
        let missing = prompts.saturating_sub(self.teaching);
        metrics.insert("selection/filled_up", missing as f64 / prompts as f64);
        metrics
    }

    /// This rank's samples of the selected groups with their columns, in its own order. Every rank sends all of its selected samples as
    /// JSON, since the format of checkpoints omits empty fields.
    fn deal(
        &self,
        task: &Task,
        exchange: &Exchange,
        batches: &[Scored],
    ) -> Result<(Vec<Sample>, Vec<Columns>)> {
        let (rank, group_size) = (exchange.rank(), task.share.group_size);
        let mut own: Vec<(usize, &[Sample], &[Columns])> = Vec::new();
        for (place, &(batch, group)) in self.places.iter().enumerate() {
            let held = task.share.prompts_of(rank).position(|prompt| prompt == group);
            if let Some(at) = held {
                let group = at * group_size..(at + 1) * group_size;
                let Scored { own: samples, columns, .. } = &batches[batch];
                own.push((place, &samples[group.clone()], &columns[group]));
            }
        }
        let own = serde_json::to_string(&own).expect("plain data");
        let mut groups: Vec<Vec<(Sample, Columns)>> = vec![Vec::new(); self.places.len()];
        for text in exchange.gather(&own)? {
            let of_rank: Vec<(usize, Vec<Sample>, Vec<Columns>)> =
                serde_json::from_str(&text).expect("what a rank has written");
            for (place, samples, columns) in of_rank {
                groups[place] = samples.into_iter().zip(columns).collect();
            }
        }
        Ok(task.share.prompts_of(rank).flat_map(|prompt| mem::take(&mut groups[prompt])).unzip())
    }
}
