//! Rollout that leaves unfinished completions in flight; later steps continue them with newer weights.
//!
//! A step samples until enough groups are whole, and trains on the oldest of these. The others keep their tokens,
//! each with its log-prob and the version of the weights that sampled it.

use std::{mem, ops::ControlFlow, sync::Arc};

use anyroll_models::Decoder;
use anyroll_reward::Scoring;
use anyroll_strategy::Weights;

use super::{
    Effort, Engine, Group, GroupQueue, Groups, Prompts, Rollout, Round, Staleness,
    prompts::Prompt,
    queue::{unfinished, write_back},
};
use crate::{
    Result,
    inference::{Sample, SampleRequest, Sampled},
    rlvr::rewards::Rewards,
    train::Learner,
};

/// Samples on the policy's device until the step's groups are whole.
pub struct InFlightRollout {
    /// The engine.
    pub engine: Arc<Engine>,
    /// The prompts of this rank.
    pub prompts: Prompts,
    /// Groups that have begun and are not yet trained on.
    pub queue: GroupQueue,
}

/// Hands each completion over once, as soon as the step is certain to train on it.
struct HandOver<'a> {
    prompts: &'a Prompts,
    of_groups: &'a [Prompt],
    rewards: &'a Rewards,
    scoring: &'a Scoring,
    /// True for completions that were handed over, by the index under which they are scored.
    done: Vec<bool>,
    step: u64,
    /// Number of groups that the step takes.
    wanted: usize,
    /// Maximum staleness of a token in steps.
    bound: u64,
}

impl HandOver<'_> {
    /// Returns true if the step is certain to take this group.
    fn is_certain(&self, index: usize, group: &Group) -> bool {
        group.age(self.step) >= self.bound || (index < self.wanted && group.is_whole())
    }

    fn hand_over(&mut self, index: usize, group: &Group) {
        for (at, sample) in group.samples.iter().enumerate().filter(|(_, it)| it.ending.is_some()) {
            let place = self.prompts.place(index, at, self.of_groups.len());
            if !mem::replace(&mut self.done[place], true) {
                self.scoring
                    .hand_over(place, self.rewards.grader.case(&self.of_groups[index].record, sample));
            }
        }
    }

    fn hand_over_certain(&mut self, index: usize, group: &Group) {
        if self.is_certain(index, group) {
            self.hand_over(index, group);
        }
    }
}

impl Rollout for InFlightRollout {
    fn weights(&self, learner: &mut Learner<Decoder>) -> Result<Weights> {
        self.engine.weights(&mut learner.model)
    }

    fn groups(&mut self, round: &mut Round, batch: u64) -> Result<Groups> {
        let Self { engine, prompts, queue } = self;
        let (step, wanted) = (round.step, prompts.per_batch());
        let bound = prompts.task.config.rollout.asynchronous.staleness_bound();
        let of_groups = prompts.begin(queue, batch, prompts.ahead(step))?;
        let scoring = round.rewards.grader.begin();
        let open = unfinished(&queue.groups);
        let asked = |&(index, at): &(usize, usize)| {
            prompts.asked(&of_groups[index], at, queue.groups[index].samples[at].clone())
        };
        let asked: Vec<SampleRequest> = open.iter().map(asked).collect();
        let must_sample = !queue.is_enough(step, wanted, bound);
        if must_sample {
            round.make_room(engine, &asked)?;
        }

        let Round { weights, learner, rewards, .. } = round;
        let done = vec![false; of_groups.len() * (prompts.group_size() + 1)];
        let (of_groups, scoring_of) = (&of_groups[..], &scoring);
        let mut over =
            HandOver { prompts, of_groups, rewards, scoring: scoring_of, done, step, wanted, bound };
        queue.groups.iter().enumerate().for_each(|(index, group)| over.hand_over_certain(index, group));
        let mut effort = Effort::default();
        if must_sample {
            let mut left = Ok(());
            let mut ended = |number: usize, sample: &Sample| {
                let (index, at) = open[number];
                queue.groups[index].samples[at] = sample.clone();
                over.hand_over_certain(index, &queue.groups[index]);
                queue.groups[index].is_whole() && queue.is_enough(step, wanted, bound)
            };
            let records = open.iter().map(|&(index, _)| &of_groups[index].record);
            let sampled = engine.sample(weights, step, &asked, records, |samples, numbers| {
                if left.is_ok() {
                    left = learner.model.give_back_left().map(drop);
                }
                let enough = numbers.iter().map(|&number| ended(number, &samples[number]));
                match enough.fold(false, |enough, it| enough | it) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            })?;
            left?;
            let Sampled { passes, kept_tokens, speculated, .. } = sampled;
            effort = Effort { passes, kept_tokens, speculated, ..effort };
            write_back(&mut queue.groups, open, sampled.samples);
        }
        let whole = queue.groups.iter().enumerate().filter(|(_, group)| group.is_whole());
        whole.take(wanted).for_each(|(index, group)| over.hand_over(index, group));
        let taken = queue.take(wanted);
        let staleness = Staleness::of(&taken, queue, step, bound);
        Ok(Groups { taken, scoring, effort, staleness: Some(staleness) })
    }

    fn in_flight(&self) -> Option<&GroupQueue> {
        Some(&self.queue)
    }

    fn restore(&mut self, groups: GroupQueue) {
        self.queue = groups;
    }
}
