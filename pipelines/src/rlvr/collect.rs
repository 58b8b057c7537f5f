//! The completions that a step trains on: sampled, scored while more are sampled, and selected.

use std::mem;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyroll_strategy::{State, Weights, Zero};

use super::{
    Decoder, Setup,
    rollout::case,
    score::Scored,
    under_way::{Effort, Group, Rollout, UnderWay, open},
};
use crate::{
    Result,
    config::Advantage,
    data::{Draw, Record},
    inference::{Asked, Room, Sample, Sampling},
    metrics::Metrics,
    reward::{HeldModel, Scoring},
    train::{Exchange, Purpose, sample_seed},
};

/// A step's completions.
pub struct Collected {
    /// This rank's, in its own order.
    pub samples: Vec<Sample>,
    /// What all ranks know of all.
    pub scored: Scored,
    /// Batches of prompts that were drawn.
    pub batches: u64,
    /// How many groups were passed over, and how old the others are.
    pub metrics: Metrics,
    /// What it took this rank's engine.
    pub effort: Effort,
    /// How long was sampled.
    pub generating: Duration,
    /// How long was scored beyond that.
    pub rewarding: Duration,
}

/// What a step samples and scores with: the weights, the policy whose states may still be leaving to make room, and what
/// scores on devices.
pub struct Source<'a> {
    /// The policy's.
    pub weights: &'a Weights,
    /// Where they are from.
    pub policy: &'a mut Zero<Decoder>,
    /// What all ranks score with.
    pub reward_models: &'a mut [HeldModel],
    /// How long it was waited for room.
    pub waited: Duration,
}

impl Source<'_> {
    /// Waits for states that are leaving, as far as keys and values, and what is to be free beside them in the end, have
    /// no room yet. So the cache is as large as if it had waited for all.
    fn make_room(&mut self, model: &Decoder, room: Room) -> Result<()> {
        let started = Instant::now();
        let leaving_bytes = self.policy.leaving_bytes();
        if leaving_bytes > 0 {
            let free_bytes = self.policy.group().stream().device().memory_info()?.free_bytes + leaving_bytes;
            self.policy.make_room(room.wanted_bytes(model, self.weights, free_bytes))?;
        }
        self.waited += started.elapsed();
        Ok(())
    }

    /// Waits until all that is `leaving` has left, if room is needed for what scores.
    fn make_room_to_score(&mut self, leaving: &[State]) -> Result<()> {
        let started = Instant::now();
        if !self.reward_models.is_empty() {
            self.policy.offload_states(leaving)?;
        }
        self.waited += started.elapsed();
        Ok(())
    }
}

/// The groups of one batch of prompts, or as many that were under way, sampled and scored.
struct Batch {
    samples: Vec<Sample>,
    scored: Scored,
    metrics: Metrics,
    effort: Effort,
    generating: Duration,
    rewarding: Duration,
}

/// The groups that a step takes.
pub(super) struct Groups {
    pub taken: Vec<Group>,
    /// Where all of them are handed over.
    pub scoring: Scoring,
    pub effort: Effort,
}

/// A prompt of this rank.
pub(super) struct Prompt {
    /// The batch that it is of.
    pub batch: u64,
    /// Its number there.
    pub number: usize,
    pub record: Arc<Record>,
}

impl Setup {
    /// Collects the completions of step `step`, of what is under way and of the prompts from batch `first` on. `stop` is
    /// this rank's wish to end the run.
    pub(super) fn collect(
        &self,
        source: &mut Source,
        exchange: &Exchange,
        rollout: &mut Rollout,
        (step, first): (u64, u64),
        stop: bool,
    ) -> Result<Collected> {
        let batch = self.batch(source, exchange, rollout, (step, first), stop)?;
        match self.rlvr.selection.mixed_groups {
            Some(mixed) => self.refill(source, exchange, rollout, (step, first), mixed.max_batches, batch),
            None => {
                let Batch { samples, mut scored, metrics, effort, generating, rewarding } = batch;
                self.leave_out_difficulties(&mut scored);
                Ok(Collected { samples, scored, batches: 1, metrics, effort, generating, rewarding })
            }
        }
    }

    /// Samples and scores as many groups as a batch has, with the weights of step `step`. The batches before `number`
    /// have been taken.
    fn batch(
        &self,
        source: &mut Source,
        exchange: &Exchange,
        rollout: &mut Rollout,
        (step, number): (u64, u64),
        stop: bool,
    ) -> Result<Batch> {
        let (started, waited) = (Instant::now(), source.waited);
        let prompts = self.begin(&mut rollout.under_way, exchange.rank(), (step, number))?;
        let Groups { taken, scoring, effort } = match rollout.devices.is_some() {
            true => self.take_from_own_devices(source.weights, (step, number), &prompts, rollout)?,
            false => self.sample_groups(source, step, &prompts, &mut rollout.under_way)?,
        };
        source.make_room_to_score(&self.leaving)?;
        let sampled = Instant::now();
        let outcomes = scoring.finish(source.reward_models)?;
        let rewarding = sampled.elapsed();
        let generating = sampled - started - (source.waited - waited);
        let mut metrics = self.staleness(exchange, &taken, &rollout.under_way, step)?;
        if rollout.devices.is_some() {
            metrics.insert("time/rollout_s", effort.elsewhere.as_secs_f64());
        }
        // A greedy completion is scored, and that is all.
        let samples =
            taken.into_iter().flat_map(|group| group.samples.into_iter().take(self.rlvr.group_size));
        let samples: Vec<Sample> = samples.collect();
        let scored = self.score(exchange, &samples, outcomes, number, stop)?;
        Ok(Batch { samples, scored, metrics, effort, generating, rewarding })
    }

    /// Begins the groups that are not under way yet: those of the step and of the steps that it is ahead by, as far as
    /// there will be any. Returns the prompts of all groups.
    fn begin(
        &self,
        under_way: &mut UnderWay,
        rank: usize,
        (step, number): (u64, u64),
    ) -> Result<Vec<Prompt>> {
        let rlvr = &self.rlvr;
        let per_step = self.share.prompts / self.share.world_size;
        let ahead = rlvr.rollout.asynchronous.ahead.min(self.steps - 1 - step);
        let begun = under_way.groups.len();
        let taken = number * per_step as u64;
        let fresh = taken + begun as u64..taken + per_step as u64 * (1 + ahead);
        let numbers: Vec<u64> = under_way.groups.iter().map(|group| group.number).chain(fresh).collect();
        let prompts = self.prompts(rank, &numbers);
        // Beside the others, since sampling takes as long as its longest completion.
        let greedy = usize::from(rlvr.algorithm.advantage == Advantage::Remax);
        for (&number, prompt) in numbers.iter().zip(&prompts).skip(begun) {
            let sample = Sample::begin(self.tokenizer.encode_prompt(&prompt.record)?);
            under_way.groups.push(Group { number, samples: vec![sample; rlvr.group_size + greedy] });
        }
        Ok(prompts)
    }

    /// The prompts of these numbers, counted over the parts that `rank` has of each batch.
    fn prompts(&self, rank: usize, numbers: &[u64]) -> Vec<Prompt> {
        let own: Vec<usize> = self.share.prompts_of(rank).collect();
        let per_batch = own.len() as u64;
        let of_batches = numbers.chunk_by(|a, b| a / per_batch == b / per_batch);
        let of_batch = |numbers: &[u64]| {
            let batch = numbers[0] / per_batch;
            let records = self.dataset.train_batch(Draw::Rollout, self.seed, batch, self.share.prompts);
            let prompt = |number: &u64| {
                let number = own[(number % per_batch) as usize];
                Prompt { batch, number, record: Arc::new(records[number].clone()) }
            };
            numbers.iter().map(prompt).collect::<Vec<Prompt>>()
        };
        of_batches.flat_map(of_batch).collect()
    }

    /// Samples until the step's groups are whole, and takes them. Completions are handed over to be scored as soon as it is
    /// certain that they are among these: first those of the groups, in their order, then greedy ones.
    fn sample_groups(
        &self,
        source: &mut Source,
        step: u64,
        prompts: &[Prompt],
        under_way: &mut UnderWay,
    ) -> Result<Groups> {
        let group_size = self.rlvr.group_size;
        let wanted = self.share.prompts / self.share.world_size;
        let bound = self.rlvr.rollout.asynchronous.staleness_bound();
        let place = |index: usize, at: usize| self.place((index, at), prompts.len());
        let scoring = self.scorer.begin();
        let mut told = vec![false; prompts.len() * (group_size + 1)];
        let mut tell = |index: usize, group: &Group| {
            for (at, sample) in group.samples.iter().enumerate().filter(|(_, it)| it.ending.is_some()) {
                if !mem::replace(&mut told[place(index, at)], true) {
                    scoring
                        .hand_over(place(index, at), case(&self.tokenizer, &prompts[index].record, sample));
                }
            }
        };
        let is_certain =
            |index: usize, group: &Group| group.age(step) >= bound || (index < wanted && group.is_whole());
        for (index, group) in under_way.groups.iter().enumerate().filter(|(index, it)| is_certain(*index, it))
        {
            tell(index, group);
        }
        let mut effort = Effort::default();
        if !under_way.is_enough(step, wanted, bound) {
            let open = open(&under_way.groups);
            let asked = |&(index, at): &(usize, usize)| {
                self.asked(&prompts[index], at, under_way.groups[index].samples[at].clone())
            };
            let asked: Vec<Asked> = open.iter().map(asked).collect();
            source.make_room(&self.sampler.model, self.sampler.room(&asked))?;
            let mut left = Ok(());
            let mut ended = |number: usize, sample: &Sample| {
                let (index, at) = open[number];
                let group = &mut under_way.groups[index];
                group.samples[at] = sample.clone();
                if is_certain(index, group) {
                    tell(index, group);
                }
                group.is_whole() && under_way.is_enough(step, wanted, bound)
            };
            let episodes = self.episodes(open.iter().map(|&(index, _)| &prompts[index].record));
            let sampled =
                self.sampler.sample(source.weights, step, &asked, episodes, |samples, numbers| {
                    if left.is_ok() {
                        left = source.policy.give_back_left().map(drop);
                    }
                    let enough = numbers.iter().map(|&number| ended(number, &samples[number]));
                    match enough.fold(false, |enough, it| enough | it) {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                })?;
            left?;
            effort.passes = sampled.passes;
            effort.kept_tokens = sampled.kept_tokens;
            for ((index, at), sample) in open.into_iter().zip(sampled.samples) {
                under_way.groups[index].samples[at] = sample;
            }
        }
        let whole = under_way.groups.iter().enumerate().filter(|(_, group)| group.is_whole());
        whole.take(wanted).for_each(|(index, group)| tell(index, group));
        Ok(Groups { taken: under_way.take(wanted), scoring, effort })
    }

    /// The number under which a sample of a group is scored, of so many groups that are scored together: first come those of
    /// the groups, in their order, then greedy ones.
    pub(super) fn place(&self, (index, at): (usize, usize), groups: usize) -> usize {
        let group_size = self.rlvr.group_size;
        if at < group_size { index * group_size + at } else { groups * group_size + index }
    }

    /// What is asked for, to go on with the sample number `at` of a group.
    pub(super) fn asked(&self, prompt: &Prompt, at: usize, sample: Sample) -> Asked {
        let (rollout, group_size) = (&self.rlvr.rollout, self.rlvr.group_size);
        if at == group_size {
            return Asked { sample, seed: 0, how: Sampling::GREEDY };
        }
        let how = Sampling {
            temperature: rollout.temperature,
            top_k: rollout.top_k,
            top_p: rollout.top_p,
            min_p: rollout.min_p,
            repetition_penalty: rollout.repetition_penalty,
        };
        let number = prompt.number * group_size + at;
        Asked { sample, seed: sample_seed(Purpose::Rollout, self.seed, prompt.batch, number), how }
    }

    /// Dynamic sampling: goes on with further batches until there are enough groups that teach something, or
    /// `max_batches`; then other groups fill up. The groups are dealt to the ranks anew, so that each has as many, and
    /// so that which they are does not depend on the number of ranks.
    fn refill(
        &self,
        source: &mut Source,
        exchange: &Exchange,
        rollout: &mut Rollout,
        (step, first): (u64, u64),
        max_batches: u64,
        batch: Batch,
    ) -> Result<Collected> {
        let prompts = self.rlvr.prompts_per_step;
        let mut batches = vec![batch];
        let teaching = |batches: &[Batch]| -> Vec<(usize, usize)> { self.groups(batches, true) };
        while teaching(&batches).len() < prompts && (batches.len() as u64) < max_batches {
            let last = batches.last().expect("there is one").scored.stop;
            let number = first + batches.len() as u64;
            batches.push(self.batch(source, exchange, rollout, (step, number), last)?);
        }
        let mut picked = teaching(&batches);
        let found = picked.len();
        picked.extend(self.groups(&batches, false));
        picked.truncate(prompts);
        picked.sort_unstable();
        let mut metrics = Metrics::new();
        let drawn = batches.len() * prompts;
        metrics.insert("selection/batches", batches.len() as f64);
        metrics.insert("selection/teaching_groups", found as f64 / drawn as f64);
        metrics.insert("selection/filled_up", prompts.saturating_sub(found) as f64 / prompts as f64);
        Ok(Collected {
            samples: self.dealt(exchange, &batches, &picked)?,
            scored: self.picked(&batches, &picked),
            batches: batches.len() as u64,
            metrics,
            effort: batches.iter().map(|batch| batch.effort).fold(Effort::default(), Effort::joined),
            generating: batches.iter().map(|batch| batch.generating).sum(),
            rewarding: batches.iter().map(|batch| batch.rewarding).sum(),
        })
    }

    /// The groups that teach something, or those that do not: each by its batch and its number there.
    fn groups(&self, batches: &[Batch], teaching: bool) -> Vec<(usize, usize)> {
        let group_size = self.rlvr.group_size;
        let all = batches.iter().enumerate().flat_map(|(index, batch)| {
            let groups = batch.scored.measured.chunks(group_size).enumerate();
            groups.map(move |(number, measured)| (index, number, measured))
        });
        let wanted = all.filter(|(_, _, measured)| {
            let differs = measured.iter().any(|value| *value != measured[0]);
            (differs && self.is_in_range(measured)) == teaching
        });
        wanted.map(|(batch, number, _)| (batch, number)).collect()
    }

    fn is_in_range(&self, measured: &[f64]) -> bool {
        let mean = measured.iter().sum::<f64>() / measured.len() as f64;
        self.rlvr.selection.difficulty.is_none_or(|range| (range.min..=range.max).contains(&mean))
    }

    /// Groups that are too hard or too easy are not trained on.
    fn leave_out_difficulties(&self, scored: &mut Scored) {
        let group_size = self.rlvr.group_size;
        let groups = scored.measured.chunks(group_size).zip(scored.trained.chunks_mut(group_size));
        for (measured, trained) in groups {
            if !self.is_in_range(measured) {
                trained.fill(false);
            }
        }
    }

    /// What all ranks know of the picked groups.
    fn picked(&self, batches: &[Batch], picked: &[(usize, usize)]) -> Scored {
        let group_size = self.rlvr.group_size;
        let mut all = Scored::default();
        for &(batch, group) in picked {
            let scored = &batches[batch].scored;
            let samples = group * group_size..(group + 1) * group_size;
            all.rewards.extend(&scored.rewards[samples.clone()]);
            all.measured.extend(&scored.measured[samples.clone()]);
            all.lengths.extend(&scored.lengths[samples.clone()]);
            all.finished.extend(&scored.finished[samples.clone()]);
            all.turns.extend(&scored.turns[samples.clone()]);
            all.turn_rewards.extend(scored.turn_rewards.get(samples.clone()).into_iter().flatten().cloned());
            all.decoupled.extend(scored.decoupled.get(samples.clone()).into_iter().flatten());
            all.trained.extend(&scored.trained[samples]);
            all.greedy.extend(scored.greedy.get(group));
        }
        for Batch { scored, .. } in batches {
            all.terms.merge(&scored.terms);
            all.stop |= scored.stop;
        }
        all
    }

    /// This rank's samples of the picked groups, in its own order. Every rank tells all that it has of them.
    fn dealt(
        &self,
        exchange: &Exchange,
        batches: &[Batch],
        picked: &[(usize, usize)],
    ) -> Result<Vec<Sample>> {
        let (rank, group_size) = (exchange.rank(), self.rlvr.group_size);
        let mut own: Vec<(usize, &[Sample])> = Vec::new();
        for (place, &(batch, group)) in picked.iter().enumerate() {
            let held = self.share.prompts_of(rank).position(|prompt| prompt == group);
            if let Some(at) = held {
                own.push((place, &batches[batch].samples[at * group_size..(at + 1) * group_size]));
            }
        }
        let told = serde_json::to_vec(&own).expect("plain data");
        let mut groups: Vec<Vec<Sample>> = vec![Vec::new(); picked.len()];
        for text in exchange.gather_texts(&told)? {
            let told: Vec<(usize, Vec<Sample>)> =
                serde_json::from_slice(&text).expect("what a rank has written");
            for (place, samples) in told {
                groups[place] = samples;
            }
        }
        Ok(self.share.prompts_of(rank).flat_map(|prompt| std::mem::take(&mut groups[prompt])).collect())
    }
}
