//! Rollout in the step: samples the groups that the step trains on, all with the step's weights.

use std::{ops::ControlFlow, sync::Arc};

use anyroll_models::Decoder;
use anyroll_strategy::Weights;

use super::{
    Effort, Engine, GroupQueue, Groups, Prompts, Rollout, Round,
    queue::{unfinished, write_back},
};
use crate::{
    Result,
    inference::{SampleRequest, Sampled},
    train::Learner,
};

/// Samples on the policy's device until every group is whole.
pub struct SyncRollout {
    /// The engine.
    pub engine: Arc<Engine>,
    /// The prompts of this rank.
    pub prompts: Prompts,
}

impl Rollout for SyncRollout {
    fn weights(&self, learner: &mut Learner<Decoder>) -> Result<Weights> {
        self.engine.weights(&mut learner.model)
    }

    fn groups(&mut self, round: &mut Round, batch: u64) -> Result<Groups> {
        let mut queue = GroupQueue::default();
        let prompts = self.prompts.begin(&mut queue, batch, 0)?;
        let open = unfinished(&queue.groups);
        let asked = |&(index, at): &(usize, usize)| {
            self.prompts.asked(&prompts[index], at, queue.groups[index].samples[at].clone())
        };
        let asked: Vec<SampleRequest> = open.iter().map(asked).collect();
        round.make_room(&self.engine, &asked)?;

        let Round { step, weights, learner, rewards, .. } = round;
        let scoring = rewards.grader.begin();
        let mut left = Ok(());
        let records = open.iter().map(|&(index, _)| &prompts[index].record);
        let sampled = self.engine.sample(weights, *step, &asked, records, |samples, ended| {
            if left.is_ok() {
                left = learner.model.give_back_left().map(drop);
            }
            for &number in ended {
                let (index, at) = open[number];
                let case = rewards.grader.case(&prompts[index].record, &samples[number]);
                scoring.hand_over(self.prompts.place(index, at, prompts.len()), case);
            }
            ControlFlow::Continue(())
        })?;
        left?;
        let Sampled { passes, kept_tokens, speculated, .. } = sampled;
        let effort = Effort { passes, kept_tokens, speculated, ..Effort::default() };
        write_back(&mut queue.groups, open, sampled.samples);
        Ok(Groups { taken: queue.groups, scoring, effort, staleness: None })
    }
}
