//! Groups that are begun and not yet trained on: what makes rollout asynchronous.
//!
//! A rank has as many groups under way as its part of the step and of the steps that it is `ahead` by. It samples until
//! as many as the step takes are whole. The oldest of these are trained on; the others stay, unfinished completions with
//! the tokens that they have, and go on in the next step with its weights. Each token keeps its log-prob and the version
//! of the weights that sampled it. With nothing ahead a step takes all that it begins, and nothing stays.
//!
//! Where rollout has devices of its own, these go on with what is left while the step trains, until the next step's is
//! whole: see `elsewhere`.

use std::{collections::BTreeMap, mem, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Setup, own_devices::OwnDevices};
use crate::{Result, inference::Sample, metrics::Metrics, reward::Scoring, train::Exchange};

/// The groups of a rank, in the order of their prompts. It is also that of their age, since the engine begins what was
/// asked for first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnderWay {
    /// Whole ones and others.
    pub groups: Vec<Group>,
}

/// Where a rank's groups are on their way.
#[derive(Default)]
pub struct Rollout {
    /// The groups; of those that its own devices sample just now, what they began with.
    pub under_way: UnderWay,
    /// Devices of its own, if it has any.
    pub devices: Option<OwnDevices>,
    /// What these sample: the number of the group and of the sample in it, in the order in which they were asked.
    pub asked: Vec<(u64, usize)>,
    /// Where they have each batch scored that is under way.
    pub scorings: BTreeMap<u64, Scoring>,
    /// What they have done since a step last asked.
    pub done: Effort,
}

/// What it took to sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effort {
    /// Passes through the model.
    pub passes: usize,
    /// Tokens that were not read again from one turn to the next.
    pub kept_tokens: u64,
    /// How long devices of rollout's own were at it.
    pub elsewhere: Duration,
}

impl Effort {
    /// This and the `other` one.
    pub fn joined(self, other: Self) -> Self {
        Self {
            passes: self.passes + other.passes,
            kept_tokens: self.kept_tokens + other.kept_tokens,
            elsewhere: self.elsewhere + other.elsewhere,
        }
    }
}

impl Rollout {
    /// Waits for what its own devices sample.
    pub fn finish(&mut self) -> Result<()> {
        let Some(devices) = &mut self.devices else { return Ok(()) };
        let Some((sampled, took)) = devices.wait()? else { return Ok(()) };
        for ((number, at), sample) in mem::take(&mut self.asked).into_iter().zip(sampled.samples) {
            let group = self.under_way.groups.iter_mut().find(|group| group.number == number);
            group.expect("it stays until it is whole").samples[at] = sample;
        }
        self.done.passes += sampled.passes;
        self.done.elsewhere += took;
        Ok(())
    }
}

/// The completions of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Which of the rank's prompts, from the run's first on.
    pub number: u64,
    /// As many as a group has; with `remax` the greedy one is behind them.
    pub samples: Vec<Sample>,
}

impl Group {
    /// Whether all of it has ended.
    pub fn is_whole(&self) -> bool {
        self.samples.iter().all(|sample| sample.ending.is_some())
    }

    /// Steps from the weights of its oldest token to those of step `step`.
    pub fn age(&self, step: u64) -> u64 {
        let oldest = self.samples.iter().filter_map(|sample| Some(sample.policies.first()?.version)).min();
        step - oldest.unwrap_or(step)
    }
}

impl UnderWay {
    /// Whether step `step` has the `wanted` groups that it takes, and can leave the others to later steps without any of
    /// them being older than `bound` when it is taken.
    pub fn is_enough(&self, step: u64, wanted: usize, bound: u64) -> bool {
        let whole = |group: &&Group| group.is_whole();
        if self.groups.iter().filter(whole).count() < wanted {
            return false;
        }
        // Those that can wait for `rest` steps at most have to have room in so many.
        (0..=bound.min(self.groups.len() as u64)).all(|rest| {
            let due = || self.groups.iter().filter(|group| group.age(step) + rest >= bound);
            let taken = due().filter(whole).count().min(wanted);
            due().count() - taken <= rest as usize * wanted
        })
    }

    /// Takes the first `wanted` whole groups.
    pub fn take(&mut self, wanted: usize) -> Vec<Group> {
        let mut left = wanted;
        let takes = |group: &mut Group| {
            let takes = left > 0 && group.is_whole();
            left -= usize::from(takes);
            takes
        };
        self.groups.extract_if(.., takes).collect()
    }
}

/// The samples that have not ended, by the index of the group and the number there.
pub fn open(groups: &[Group]) -> Vec<(usize, usize)> {
    let of_group = |(index, group): (usize, &Group)| {
        let open = group.samples.iter().enumerate().filter(|(_, sample)| sample.ending.is_none());
        open.map(|(at, _)| (index, at)).collect::<Vec<_>>()
    };
    groups.iter().enumerate().flat_map(of_group).collect()
}

impl Setup {
    /// How old the step's groups are, and what of others is under way, over all ranks; nothing if all is on-policy.
    pub(super) fn staleness(
        &self,
        exchange: &Exchange,
        taken: &[Group],
        under_way: &UnderWay,
        step: u64,
    ) -> Result<Metrics> {
        let asynchronous = self.rlvr.rollout.asynchronous;
        if asynchronous.ahead == 0 {
            return Ok(Metrics::new());
        }
        let samples: Vec<&Sample> = taken.iter().flat_map(|group| &group.samples).collect();
        let spans = || samples.iter().flat_map(|sample| &sample.policies);
        let stale = spans().map(|span| (step - span.version) as f64 * span.tokens as f64);
        let bound = asynchronous.staleness_bound();
        let waited_for = taken.iter().filter(|group| group.age(step) >= bound).count();
        let open = || {
            let all = under_way.groups.iter().flat_map(|group| &group.samples);
            all.filter(|sample| sample.ending.is_none() && sample.completion_len() > 0)
        };
        let sums = [
            spans().map(|span| span.tokens as f64).sum(),
            stale.sum(),
            samples.len() as f64,
            samples.iter().filter(|sample| sample.policies.len() > 1).count() as f64,
            waited_for as f64,
            open().count() as f64,
            open().map(|sample| sample.completion_len() as f64).sum(),
            under_way.groups.iter().filter(|group| group.is_whole()).count() as f64,
        ];
        let oldest = spans().map(|span| step - span.version).max().unwrap_or(0);
        let gathered = exchange.gather(&[&sums[..], &[oldest as f64]].concat())?;
        let sum = |index: usize| gathered.iter().map(|rank| rank[index]).sum::<f64>() + 0.0; // not -0
        let oldest = gathered.iter().map(|rank| rank[sums.len()]).fold(0.0, f64::max);
        let mut metrics = Metrics::new();
        for (name, value) in [
            ("staleness/mean", sum(1) / sum(0)),
            ("staleness/max", oldest),
            ("staleness/continued", sum(3) / sum(2)),
            ("staleness/waited_for", sum(4) / self.rlvr.prompts_per_step as f64),
            ("carried/sequences", sum(5)),
            ("carried/tokens", sum(6)),
            ("carried/whole_groups", sum(7)),
        ] {
            metrics.insert(name, value);
        }
        Ok(metrics)
    }
}

#[cfg(test)]
mod tests {
    use anyroll_models::generation::{Ending, PolicySpan};

    use super::*;

    /// A group of two that began with the weights of step `version`, if it has.
    fn group(number: u64, version: Option<u64>, whole: bool) -> Group {
        let span = |version| PolicySpan { version, tokens: 2 };
        let ended = Sample {
            policies: version.map(span).into_iter().collect(),
            ending: Some(Ending::Stop),
            ..Sample::begin(vec![1])
        };
        let open = Sample { ending: None, ..ended.clone() };
        Group { number, samples: vec![ended.clone(), if whole { ended } else { open }] }
    }

    fn under_way(groups: &[(Option<u64>, bool)]) -> UnderWay {
        let groups = (0..).zip(groups).map(|(number, &(version, whole))| group(number, version, whole));
        UnderWay { groups: groups.collect() }
    }

    #[test]
    fn a_group_is_as_old_as_its_oldest_token() {
        assert_eq!(group(0, Some(3), true).age(5), 2);
        assert_eq!(group(0, None, false).age(5), 0);
        let mut group = group(0, Some(4), false);
        group.samples[1].policies =
            vec![PolicySpan { version: 2, tokens: 1 }, PolicySpan { version: 4, tokens: 1 }];
        assert_eq!(group.age(5), 3);
    }

    #[test]
    fn the_oldest_whole_groups_are_taken() {
        let mut under_way = under_way(&[(Some(0), false), (Some(0), true), (Some(1), true), (Some(1), true)]);
        let numbers = |groups: &[Group]| groups.iter().map(|group| group.number).collect::<Vec<_>>();
        assert_eq!(numbers(&under_way.take(2)), [1, 2]);
        assert_eq!(numbers(&under_way.groups), [0, 3]);
    }

    #[test]
    fn a_step_is_complete_when_all_others_can_wait() {
        let (open, whole) = (false, true);
        let enough = |groups: &[(Option<u64>, bool)], bound| under_way(groups).is_enough(2, 2, bound);
        // On-policy: all of them, and there are no more.
        assert!(!enough(&[(None, open), (Some(2), whole)], 0));
        assert!(enough(&[(Some(2), whole), (Some(2), whole)], 0));
        // One step ahead: what is of the step before has to be whole, whatever else is.
        let late = [(Some(1), open), (Some(1), whole), (Some(2), whole), (Some(2), whole)];
        assert!(!enough(&late, 1));
        assert!(enough(&late, 2), "it may be a step later");
        assert!(
            !enough(&[(Some(1), open), (Some(1), open), (Some(2), whole), (None, open)], 2),
            "one is too few"
        );
        // Two steps take two groups each: of six that all have to be in those, two have to be old ones.
        let old = [(Some(1), open), (Some(1), open), (Some(1), whole), (Some(1), whole)];
        let young = [(Some(2), whole), (Some(2), whole)];
        assert!(enough(&[&old[..], &young[..]].concat(), 2));
        assert!(
            !enough(&[&[(Some(1), open)], &old[..3], &young[..]].concat(), 2),
            "three would be left for one step"
        );
    }

    /// A prompt's completions that end after so many tokens.
    #[derive(Clone)]
    struct Simulated {
        number: u64,
        version: Option<u64>,
        left: u64,
    }

    /// Whatever the lengths: the bound is kept, and each prompt is taken once.
    #[test]
    fn no_order_of_ends_breaks_the_bound() {
        const LIVE: usize = 5;
        let mut random = 1_u64;
        let mut below = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        for (ahead, bound) in [(0, 0), (1, 1), (1, 3), (2, 2), (3, 4)] {
            let (wanted, steps) = (3, 100);
            let (mut simulated, mut seen): (Vec<Simulated>, Vec<u64>) = (Vec::new(), Vec::new());
            for step in 0..steps {
                let begun = step * wanted as u64 + simulated.len() as u64;
                for number in begun..(step + 1 + ahead) * wanted as u64 {
                    // One in ten is ten times as long.
                    let most = if below(10) == 0 { 100 } else { 10 };
                    simulated.push(Simulated { number, version: None, left: 1 + below(most) });
                }
                let groups = |of: &[Simulated]| {
                    let groups = of.iter().map(|it| group(it.number, it.version, it.left == 0));
                    UnderWay { groups: groups.collect() }
                };
                while !groups(&simulated).is_enough(step, wanted, bound) {
                    for sequence in simulated.iter_mut().filter(|it| it.left > 0).take(LIVE) {
                        sequence.version.get_or_insert(step);
                        sequence.left -= 1;
                    }
                }
                let taken = groups(&simulated).take(wanted);
                assert_eq!(taken.len(), wanted);
                assert!(taken.iter().all(|it| it.age(step) <= bound), "{ahead}, {bound}, {step}: {taken:?}");
                seen.extend(taken.iter().map(|it| it.number));
                simulated.retain(|it| !seen.contains(&it.number));
            }
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), wanted * steps as usize);
        }
    }
}
