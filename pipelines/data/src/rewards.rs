//! Scale of the rewards of a source's answers.

use super::Record;

/// Scaling of rewards, and the bound between desirable and other answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    /// Mean of the rewards.
    mean: f64,
    /// A scaled reward is the reward minus `shift`, divided by `divisor`.
    shift: f64,
    divisor: f64,
}

impl Scale {
    /// The scale of generated answers, half of which are desirable.
    pub(super) fn of_halves(normalize: bool) -> Self {
        const HALF: f64 = 0.5;
        Self::new(HALF, HALF, normalize)
    }

    /// The scale of the rewards of `records`. The deviation is that of a sample, as in trlx.
    pub(super) fn of(records: &[Record], normalize: bool) -> Self {
        let rewards: Vec<f64> = records.iter().filter_map(reward).collect();
        let count = rewards.len() as f64;
        let is_same = rewards.iter().all(|reward| *reward == rewards[0]);
        // Without rounding, if all are the same.
        let mean = if is_same {
            rewards.first().copied().unwrap_or(0.0)
        } else {
            rewards.iter().sum::<f64>() / count
        };
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        let deviation = if is_same { 1.0 } else { (squares / (count - 1.0)).sqrt() };
        Self::new(mean, deviation, normalize)
    }

    fn new(mean: f64, deviation: f64, normalize: bool) -> Self {
        match normalize {
            true => Self { mean, shift: mean, divisor: deviation + f64::EPSILON },
            false => Self { mean, shift: 0.0, divisor: 1.0 },
        }
    }

    /// The record with its scaled reward. Without a label it is desirable if its reward is above the mean.
    pub(super) fn applied(self, record: Record) -> Record {
        let Some(reward) = reward(&record) else { return record };
        let desirable = Some(record.desirable.unwrap_or(reward > self.mean));
        Record { desirable, reward: Some((reward - self.shift) / self.divisor), ..record }
    }
}

/// A record's reward: its own, or 1 for a desirable answer and 0 for another.
fn reward(record: &Record) -> Option<f64> {
    record.reward.or(record.desirable.map(|desirable| f64::from(u8::from(desirable))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(reward: f64) -> Record {
        Record { reward: Some(reward), ..Record::default() }
    }

    /// Equal to trlx's `make_experience` (tests/python/make_ilql_golden.py).
    #[test]
    fn rewards_are_scaled_as_in_trlx() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/golden/ilql.json")).unwrap();
        let numbers = |name: &str| -> Vec<f64> { serde_json::from_value(golden[name].clone()).unwrap() };
        let records: Vec<Record> = numbers("returns").into_iter().map(of).collect();
        let scale = Scale::of(&records, true);
        for (record, expected) in records.iter().zip(numbers("normalized")) {
            let found = scale.applied(record.clone());
            assert!((found.reward.unwrap() - expected).abs() < 1e-14, "{found:?}, not {expected}");
            assert_eq!(found.desirable, Some(expected > 0.0));
        }
        let one = [of(2.0)];
        assert_eq!(Scale::of(&one, true).applied(one[0].clone()).reward, Some(numbers("one")[0]));
        let unscaled = Scale::of(&records, false).applied(of(3.0));
        assert_eq!((unscaled.reward, unscaled.desirable), (Some(3.0), Some(true)));
    }

    #[test]
    fn a_label_is_a_reward_of_1_or_0() {
        let label = |desirable: bool| Record { desirable: Some(desirable), ..Record::default() };
        let records = [label(true), label(false), label(true), label(true)];
        let found = records.clone().map(|record| Scale::of(&records, false).applied(record));
        assert_eq!(
            found.map(|it| (it.reward, it.desirable)),
            [1.0, 0.0, 1.0, 1.0].map(|it| (Some(it), Some(it > 0.5)))
        );
        let halves = [true, false].map(|desirable| Scale::of_halves(true).applied(label(desirable)).reward);
        assert!(
            (halves[0].unwrap() - 1.0).abs() < 1e-12 && (halves[1].unwrap() + 1.0).abs() < 1e-12,
            "{halves:?}"
        );
        assert_eq!(
            Scale::of(&records, true).applied(Record::default()),
            Record::default(),
            "it has no reward"
        );
    }

    #[test]
    fn rewards_that_are_all_the_same_are_0() {
        let same = vec![of(0.1); 3];
        assert_eq!(Scale::of(&same, true).applied(of(0.1)).reward, Some(0.0));
    }
}
