//! Groups that have begun and are not yet trained on.
//!
//! A rank's queue has the groups of its part of the step, and of the steps that it is `ahead`. The oldest whole
//! groups are trained on. The others stay, with their unfinished completions and tokens.

use serde::{Deserialize, Serialize};

use crate::inference::Sample;

/// Groups of a rank, in the order of their prompts. The order is also that of the groups' age, since the
/// engine starts earlier requests first. Checkpoints contain the queue as JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupQueue {
    /// Whole and unfinished groups.
    pub groups: Vec<Group>,
}

/// The completions of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Number of the prompt among the rank's, from the start of the run.
    pub number: u64,
    /// Completions of the group; with `remax` followed by the greedy one.
    pub samples: Vec<Sample>,
}

impl Group {
    /// Returns true if all completions have ended.
    pub fn is_whole(&self) -> bool {
        self.samples.iter().all(|sample| sample.ending.is_some())
    }

    /// Steps from the weights of the oldest token to those of step `step`.
    pub fn age(&self, step: u64) -> u64 {
        let oldest = self.samples.iter().filter_map(|sample| Some(sample.policies.first()?.version)).min();
        step - oldest.unwrap_or(step)
    }
}

impl GroupQueue {
    /// Returns true if `wanted` groups are whole, and step `step` can leave the others to later steps. No group may
    /// then be older than `bound` when a step takes it.
    pub fn is_enough(&self, step: u64, wanted: usize, bound: u64) -> bool {
        let whole = |group: &&Group| group.is_whole();
        if self.groups.iter().filter(whole).count() < wanted {
            return false;
        }
        // Groups that can wait for at most `rest` steps must fit into that many steps.
        (0..=bound.min(self.groups.len() as u64)).all(|rest| {
            let due = || self.groups.iter().filter(|group| group.age(step) + rest >= bound);
            let taken = due().filter(whole).count().min(wanted);
            due().count() - taken <= rest as usize * wanted
        })
    }

    /// Removes and returns the first `wanted` whole groups.
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

/// Unfinished samples: index of the group, and index in the group.
pub fn unfinished(groups: &[Group]) -> Vec<(usize, usize)> {
    let of_group = |(index, group): (usize, &Group)| {
        let open = group.samples.iter().enumerate().filter(|(_, sample)| sample.ending.is_none());
        open.map(|(at, _)| (index, at)).collect::<Vec<_>>()
    };
    groups.iter().enumerate().flat_map(of_group).collect()
}

/// Writes `samples` back to the places from [`unfinished`].
pub fn write_back(groups: &mut [Group], places: Vec<(usize, usize)>, samples: Vec<Sample>) {
    for ((index, at), sample) in places.into_iter().zip(samples) {
        groups[index].samples[at] = sample;
    }
}

#[cfg(test)]
mod tests {
    use anyroll_models::generation::{Ending, PolicySpan};

    use super::*;

    /// A group of two that began with the weights of step `version`, if it has begun.
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

    fn queue(groups: &[(Option<u64>, bool)]) -> GroupQueue {
        let groups = (0..).zip(groups).map(|(number, &(version, whole))| group(number, version, whole));
        GroupQueue { groups: groups.collect() }
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
        let mut queue = queue(&[(Some(0), false), (Some(0), true), (Some(1), true), (Some(1), true)]);
        let numbers = |groups: &[Group]| groups.iter().map(|group| group.number).collect::<Vec<_>>();
        assert_eq!(numbers(&queue.take(2)), [1, 2]);
        assert_eq!(numbers(&queue.groups), [0, 3]);
    }

    #[test]
    fn a_step_is_complete_when_all_others_can_wait() {
        let (open, whole) = (false, true);
        let enough = |groups: &[(Option<u64>, bool)], bound| queue(groups).is_enough(2, 2, bound);
        // On-policy: all groups must be whole, and there are no others.
        assert!(!enough(&[(None, open), (Some(2), whole)], 0));
        assert!(enough(&[(Some(2), whole), (Some(2), whole)], 0));
        // One step ahead: groups of the previous step must be whole.
        let late = [(Some(1), open), (Some(1), whole), (Some(2), whole), (Some(2), whole)];
        assert!(!enough(&late, 1));
        assert!(enough(&late, 2), "it may be a step later");
        assert!(
            !enough(&[(Some(1), open), (Some(1), open), (Some(2), whole), (None, open)], 2),
            "one is too few"
        );
        // Two steps take two groups each: of six groups of which all must fit, the first step must take two old ones.
        let old = [(Some(1), open), (Some(1), open), (Some(1), whole), (Some(1), whole)];
        let young = [(Some(2), whole), (Some(2), whole)];
        assert!(enough(&[&old[..], &young[..]].concat(), 2));
        assert!(
            !enough(&[&[(Some(1), open)], &old[..3], &young[..]].concat(), 2),
            "three would be left for one step"
        );
    }

    /// Completions of a prompt that end after `left` more tokens.
    #[derive(Clone)]
    struct Simulated {
        number: u64,
        version: Option<u64>,
        left: u64,
    }

    /// For any lengths, the bound holds, and each prompt is taken once.
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
                    // One completion in ten may be ten times as long.
                    let most = if below(10) == 0 { 100 } else { 10 };
                    simulated.push(Simulated { number, version: None, left: 1 + below(most) });
                }
                let groups = |of: &[Simulated]| {
                    let groups = of.iter().map(|it| group(it.number, it.version, it.left == 0));
                    GroupQueue { groups: groups.collect() }
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
