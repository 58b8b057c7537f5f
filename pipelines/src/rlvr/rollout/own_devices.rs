//! Rollout on separate devices, which continue during training.
//!
//! Steps take whole batches in the order of their prompts. While step k trains, the devices sample the batches
//! from k + 1 to k + `ahead`, the oldest first. The devices continue until batch k + 1 is whole and its longest
//! completion's part of a step is sampled. Then they wait for the weights of step k + 1. Without the wait, timing
//! would decide which weights sample a token.
//!
//! The step that trains on a completion is known when the completion begins. A batch therefore has a [`Scoring`] from
//! its beginning, to which the devices' threads hand over each completion when it ends. Completions keep their
//! indices in it across a resume, so that the same ones are scored together.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyroll_data::Record;
use anyroll_models::Decoder;
use anyroll_reward::Scoring;
use anyroll_strategy::Weights;

use super::{
    Effort, Group, GroupQueue, Groups, Prompts, Rollout, Round, Staleness,
    devices::{Devices, Done, Goal},
    prompts::Prompt,
    queue::unfinished,
};
use crate::{
    Error, Result,
    inference::{Sample, Sampled},
    rlvr::{grader::case, rewards::Rewards},
    train::Learner,
};

/// Samples on devices that are only for rollout.
pub struct OwnDevicesRollout {
    prompts: Prompts,
    /// Groups that have begun and are not yet trained on. For groups in flight on the devices, this is their state at
    /// the start.
    queue: GroupQueue,
    devices: Devices,
    /// Samples in flight on the devices: number of the group and index in the group, in the order of the requests.
    asked: Vec<(u64, usize)>,
    /// Scorings of the batches in the queue.
    scorings: BTreeMap<u64, Scoring>,
    /// Work of the devices since a step last took groups.
    done: Effort,
}

impl OwnDevicesRollout {
    /// Creates the rollout without any groups.
    pub fn new(prompts: Prompts, devices: Devices) -> Self {
        let (queue, asked) = (GroupQueue::default(), Vec::new());
        Self { prompts, queue, devices, asked, scorings: BTreeMap::new(), done: Effort::default() }
    }

    /// Starts the devices on the unfinished completions of the first groups in the queue, those of `prompts`. The
    /// first step's groups are due.
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

    /// Begins to score the batches of `prompts` that are not being scored yet. Their completions are all
    /// unfinished, except after a resume.
    fn begin_scoring(&mut self, rewards: &Rewards, prompts: &[Prompt]) {
        let numbered: Vec<(&Prompt, &Group)> = prompts.iter().zip(&self.queue.groups).collect();
        let mut begun = Vec::new();
        for batch in numbered.chunk_by(|(a, _), (b, _)| a.batch == b.batch) {
            let number = batch[0].0.batch;
            if self.scorings.contains_key(&number) {
                continue;
            }
            let scoring = rewards.grader.begin();
            for (prompt, group) in batch {
                let has_ended = |(_, sample): &(usize, &Sample)| sample.ending.is_some();
                for (at, sample) in group.samples.iter().enumerate().filter(has_ended) {
                    let place = self.place_in_batch(group, at);
                    scoring.hand_over(place, rewards.grader.case(&prompt.record, sample));
                }
            }
            begun.push((number, scoring));
        }
        self.scorings.extend(begun);
    }

    /// Index of a completion among those of this rank's part of its batch.
    fn place_in_batch(&self, group: &Group, at: usize) -> usize {
        let per_batch = self.prompts.per_batch();
        self.prompts.place((group.number % per_batch as u64) as usize, at, per_batch)
    }
}

impl Rollout for OwnDevicesRollout {
    /// Weights without merged adapters, since the devices merge them.
    fn weights(&self, learner: &mut Learner<Decoder>) -> Result<Weights> {
        Ok(learner.model.weights()?)
    }

    fn groups(&mut self, round: &mut Round, batch: u64) -> Result<Groups> {
        let ahead = self.prompts.ahead(round.step);
        let prompts = self.prompts.begin(&mut self.queue, batch, ahead)?;
        let wanted = self.prompts.per_batch();
        self.settle()?;
        // Completions that the previous step did not request: all in the first step, or without rollout ahead. And those of
        // engines that were lost.
        loop {
            self.ask(round, &prompts[..wanted])?;
            self.settle()?;
            if !self.devices.come_and_go() {
                break;
            }
            // Ranks go on together, since one may wait for engines for longer than a collective may take.
            let is_whole = self.queue.groups[..wanted].iter().all(Group::is_whole);
            if !round.exchange.any(!is_whole)? {
                break;
            }
            let stops = self.devices.is_empty() && round.rewards.grader.stop.load(Ordering::Relaxed);
            if round.exchange.any(stops)? {
                return Err(Error::Unscored);
            }
        }
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
        let Some(Done { sampled, took, sent, engines }) = self.devices.wait()? else { return Ok(()) };
        for ((number, at), sample) in mem::take(&mut self.asked).into_iter().zip(sampled.samples) {
            let group = self.queue.groups.iter_mut().find(|group| group.number == number);
            group.expect("it stays until it is whole").samples[at] = sample;
        }
        let Sampled { passes, kept_tokens, speculated, .. } = sampled;
        let done = Effort { passes, kept_tokens, speculated, own_devices: Some(took), sent, engines };
        self.done = self.done.joined(done);
        Ok(())
    }

    fn in_flight(&self) -> Option<&GroupQueue> {
        (self.prompts.task.config.rollout.asynchronous.ahead > 0).then_some(&self.queue)
    }

    fn restore(&mut self, groups: GroupQueue) {
        self.queue = groups;
    }

    fn end(&mut self) -> Result<()> {
        self.devices.end()
    }
}
