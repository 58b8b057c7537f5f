//! What a step takes from devices of rollout's own, and what these go on with while it trains.
//!
//! Steps take whole batches in the order of their prompts. While step k trains, the devices sample the batches from k + 1 to
//! k + `ahead`, the oldest first, until k + 1 is whole and its longest completion's part of a step is sampled; then they wait
//! for the weights of step k + 1, with which they go on. If they did not wait, a clock would decide which weights sample a
//! token.
//!
//! It is known of a completion from the beginning which step trains on it. So a batch has a [`Scoring`] from its beginning,
//! to which the devices' threads hand over each completion as it ends. Which numbers completions have there decides which are
//! scored together: they are the same after a resume.

use std::{collections::btree_map::Entry, mem, sync::Arc};

use anyroll_strategy::Weights;

use super::{
    Setup,
    collect::{Groups, Prompt},
    own_devices::Goal,
    rollout::case,
    under_way::{Group, Rollout, UnderWay, open},
};
use crate::{Result, data::Record, inference::Sample, reward::Scoring};

impl Setup {
    /// Takes batch `number`, which step `step` trains on, once it is whole; the devices then go on with what is left.
    pub(super) fn take_from_own_devices(
        &self,
        weights: &Weights,
        (step, number): (u64, u64),
        prompts: &[Prompt],
        rollout: &mut Rollout,
    ) -> Result<Groups> {
        let wanted = self.share.prompts / self.share.world_size;
        rollout.finish()?;
        // What the step before has not asked for: all of it in the first step, and where nothing is ahead.
        self.ask(weights, step, &prompts[..wanted], rollout)?;
        rollout.finish()?;
        let effort = mem::take(&mut rollout.done);
        let taken = rollout.under_way.take(wanted);
        let scoring = rollout.scorings.remove(&number).expect("it was asked for");
        self.ask(weights, step, &prompts[wanted..], rollout)?;
        Ok(Groups { taken, scoring, effort })
    }

    /// Lets the devices go on with what is open of the first groups under way, those of `prompts`, of which the first step's
    /// are due.
    fn ask(&self, weights: &Weights, step: u64, prompts: &[Prompt], rollout: &mut Rollout) -> Result<()> {
        self.begin_scoring(prompts, rollout);
        let Rollout { under_way: UnderWay { groups }, devices: Some(devices), scorings, .. } = rollout else {
            unreachable!("only what has devices is asked");
        };
        let open = open(&groups[..prompts.len()]);
        if open.is_empty() {
            return Ok(());
        }
        let of_step = prompts.len().min(self.share.prompts / self.share.world_size);
        let lengths = groups[..of_step].iter().flat_map(|group| &group.samples).map(Sample::completion_len);
        let goal = Goal {
            due: open.iter().filter(|(index, _)| *index < of_step).count(),
            longest: lengths.max().unwrap_or(0),
            part: self.rlvr.rollout.asynchronous.ahead.max(1) as usize,
        };
        let asked = |&(index, at): &(usize, usize)| {
            self.asked(&prompts[index], at, groups[index].samples[at].clone())
        };
        let asked = open.iter().map(asked).collect();
        let case_of = |&(index, at): &(usize, usize)| {
            let prompt = &prompts[index];
            (scorings[&prompt.batch].clone(), self.place_in_batch(&groups[index], at), prompt.record.clone())
        };
        let cases: Vec<(Scoring, usize, Arc<Record>)> = open.iter().map(case_of).collect();
        let tokenizer = self.tokenizer.clone();
        devices.start(weights, step, asked, goal, move |number, sample| {
            let (scoring, place, record) = &cases[number];
            scoring.hand_over(*place, case(&tokenizer, record, sample));
        })?;
        rollout.asked = open.into_iter().map(|(index, at)| (groups[index].number, at)).collect();
        Ok(())
    }

    /// Begins to score the batches of `prompts` that are not being scored yet. Only after a resume has anything of them ended.
    fn begin_scoring(&self, prompts: &[Prompt], rollout: &mut Rollout) {
        let groups = &rollout.under_way.groups;
        let numbered: Vec<(&Prompt, &Group)> = prompts.iter().zip(groups).collect();
        for batch in numbered.chunk_by(|(a, _), (b, _)| a.batch == b.batch) {
            let Entry::Vacant(entry) = rollout.scorings.entry(batch[0].0.batch) else { continue };
            let scoring = entry.insert(self.scorer.begin());
            for (prompt, group) in batch {
                let has_ended = |(_, sample): &(usize, &Sample)| sample.ending.is_some();
                for (at, sample) in group.samples.iter().enumerate().filter(has_ended) {
                    scoring.hand_over(
                        self.place_in_batch(group, at),
                        case(&self.tokenizer, &prompt.record, sample),
                    );
                }
            }
        }
    }

    /// The number of a completion among those of this rank's part of its batch.
    fn place_in_batch(&self, group: &Group, at: usize) -> usize {
        let prompts = self.share.prompts / self.share.world_size;
        self.place(((group.number % prompts as u64) as usize, at), prompts)
    }
}
