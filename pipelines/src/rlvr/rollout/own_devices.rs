//! Rollout on devices of its own, which continue while the step trains.
//!
//! Steps take whole batches in the order of their prompts. While step k trains, the devices sample the batches from k + 1 to
//! k + `ahead`, the oldest first, until k + 1 is whole and its longest completion's part of a step is sampled; then they wait
//! for the weights of step k + 1, with which they continue. If they did not wait, a clock would decide which weights sample a
//! token.
//!
//! It is known of a completion from the beginning which step trains on it. So a batch has a [`Scoring`] from its beginning,
//! to which the devices' threads hand over each completion as it ends. Completions keep their numbers there across a
//! resume, so that the same ones are scored together.

use std::{collections::BTreeMap, mem, sync::Arc, time::Duration};

use anyroll_data::Record;
use anyroll_models::Decoder;
use anyroll_reward::Scoring;
use anyroll_strategy::Weights;

use super::{
    Effort, Group, GroupQueue, Groups, Prompts, Rollout, Round, Staleness,
    devices::{Devices, Goal},
    prompts::Prompt,
    queue::unfinished,
};
use crate::{
    Result,
    inference::Sample,
    rlvr::rewards::{Rewards, case},
    train::Learner,
};

/// Samples on devices that do nothing else.
pub struct OwnDevicesRollout {
    prompts: Prompts,
    /// Groups that are begun and not yet trained on; of those that the devices sample just now, what they began with.
    queue: GroupQueue,
    devices: Devices,
    /// Samples in the devices' hands: the number of the group and the index in it, in the order in which they were asked.
    asked: Vec<(u64, usize)>,
    /// Scorings of the batches in the queue.
    scorings: BTreeMap<u64, Scoring>,
    /// Work of the devices since a step last asked.
    done: Effort,
}

impl OwnDevicesRollout {
    /// Nothing begun yet.
    pub fn new(prompts: Prompts, devices: Devices) -> Self {
        let (queue, asked) = (GroupQueue::default(), Vec::new());
        Self { prompts, queue, devices, asked, scorings: BTreeMap::new(), done: Effort::default() }
    }

    /// Lets the devices continue what is unfinished of the first groups in the queue, those of `prompts`, of which the
    /// first step's are due.
    fn ask(&mut self, round: &Round, prompts: &[Prompt]) -> Result<()> {
        self.begin_scoring(round.rewards, prompts);
        let groups = &self.queue.groups;
        let open = unfinished(&groups[..prompts.len()]);
        if open.is_empty() {
            return Ok(());
        }
        let of_step = prompts.len().min(self.prompts.per_batch());
        let lengths = groups[..of_step].iter().flat_map(|group| &group.samples).map(Sample::completion_len);
        let goal = Goal {
            due: open.iter().filter(|(index, _)| *index < of_step).count(),
            longest: lengths.max().unwrap_or(0),
            part: self.prompts.task.config.rollout.asynchronous.ahead.max(1) as usize,
        };
        let asked = |&(index, at): &(usize, usize)| {
            self.prompts.asked(&prompts[index], at, groups[index].samples[at].clone())
        };
        let asked = open.iter().map(asked).collect();
        let case_of = |&(index, at): &(usize, usize)| {
            let prompt = &prompts[index];
            let scoring = self.scorings[&prompt.batch].clone();
            (scoring, self.place_in_batch(&groups[index], at), prompt.record.clone())
        };
        let cases: Vec<(Scoring, usize, Arc<Record>)> = open.iter().map(case_of).collect();
        let tokenizer = self.prompts.tokenizer.clone();
        self.devices.start(round.weights, round.step, asked, goal, move |number, sample| {
            let (scoring, place, record) = &cases[number];
            scoring.hand_over(*place, case(&tokenizer, record, sample));
        })?;
        self.asked = open.into_iter().map(|(index, at)| (groups[index].number, at)).collect();
        Ok(())
    }

    /// Begins to score the batches of `prompts` that are not being scored yet. Only after a resume has any of their
    /// completions ended.
    fn begin_scoring(&mut self, rewards: &Rewards, prompts: &[Prompt]) {
        let numbered: Vec<(&Prompt, &Group)> = prompts.iter().zip(&self.queue.groups).collect();
        let mut begun = Vec::new();
        for batch in numbered.chunk_by(|(a, _), (b, _)| a.batch == b.batch) {
            let number = batch[0].0.batch;
            if self.scorings.contains_key(&number) {
                continue;
            }
            let scoring = rewards.begin();
            for (prompt, group) in batch {
                let has_ended = |(_, sample): &(usize, &Sample)| sample.ending.is_some();
                for (at, sample) in group.samples.iter().enumerate().filter(has_ended) {
                    let place = self.place_in_batch(group, at);
                    scoring.hand_over(place, rewards.case(&prompt.record, sample));
                }
            }
            begun.push((number, scoring));
        }
        self.scorings.extend(begun);
    }

    /// The number of a completion among those of this rank's part of its batch.
    fn place_in_batch(&self, group: &Group, at: usize) -> usize {
        let per_batch = self.prompts.per_batch();
        self.prompts.place((group.number % per_batch as u64) as usize, at, per_batch)
    }
}

impl Rollout for OwnDevicesRollout {
    /// Not merged: the devices merge adapters themselves.
    fn weights(&self, learner: &mut Learner<Decoder>) -> Result<Weights> {
        Ok(learner.model.weights()?)
    }

    fn groups(&mut self, round: &mut Round, batch: u64) -> Result<Groups> {
        let ahead = self.prompts.ahead(round.step);
        let prompts = self.prompts.begin(&mut self.queue, batch, ahead)?;
        let wanted = self.prompts.per_batch();
        self.settle()?;
        // What the step before has not asked for: all of it in the first step, and where nothing is ahead.
        self.ask(round, &prompts[..wanted])?;
        self.settle()?;
        let own_devices = self.done.own_devices.or(Some(Duration::ZERO));
        let effort = Effort { own_devices, ..mem::take(&mut self.done) };
        let taken = self.queue.take(wanted);
        let scoring = self.scorings.remove(&batch).expect("it was asked for");
        self.ask(round, &prompts[wanted..])?;
        let asynchronous = self.prompts.task.config.rollout.asynchronous;
        let bound = asynchronous.staleness_bound();
        let staleness =
            (asynchronous.ahead > 0).then(|| Staleness::of(&taken, &self.queue, round.step, bound));
        Ok(Groups { taken, scoring, effort, staleness })
    }

    fn settle(&mut self) -> Result<()> {
        let Some((sampled, took)) = self.devices.wait()? else { return Ok(()) };
        for ((number, at), sample) in mem::take(&mut self.asked).into_iter().zip(sampled.samples) {
            let group = self.queue.groups.iter_mut().find(|group| group.number == number);
            group.expect("it stays until it is whole").samples[at] = sample;
        }
        let done = Effort { passes: sampled.passes, kept_tokens: 0, own_devices: Some(took) };
        self.done = self.done.joined(done);
        Ok(())
    }

    fn in_flight(&self) -> Option<&GroupQueue> {
        (self.prompts.task.config.rollout.asynchronous.ahead > 0).then_some(&self.queue)
    }

    fn restore(&mut self, groups: GroupQueue) {
        self.queue = groups;
    }
}
