//! The control of an experiment: rewards of random samples.

use anyroll_data::{shuffle, stream};

use super::{advantages::fitted, rows::Row};

/// Gives each sample the rewards of a random sample. A sample without a score keeps none.
pub fn deal(rows: &mut [Row], seed: u64, batch: u64) {
    const PURPOSE: u64 = u64::from_le_bytes(*b"control!");
    let mut order: Vec<usize> = (0..rows.len()).collect();
    shuffle(&mut order, &mut stream(PURPOSE, seed, batch));
    let earned = rows.to_vec();
    for (row, from) in rows.iter_mut().zip(order) {
        let from = &earned[from];
        (row.reward, row.measured, row.decoupled) = (from.reward, from.measured, from.decoupled);
        if !from.turn_rewards.is_empty() {
            row.turn_rewards = fitted(&from.turn_rewards, row.turns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_keeps_what_was_earned_and_not_who_earned_it() {
        let rewards: Vec<f64> = (0..1000).map(f64::from).collect();
        let row = |&reward: &f64| Row { reward, measured: reward, ..Row::default() };
        let rows: Vec<Row> = rewards.iter().map(row).collect();
        let dealt = |seed, batch| {
            let mut rows = rows.clone();
            deal(&mut rows, seed, batch);
            assert!(rows.iter().all(|row| row.reward == row.measured));
            rows.iter().map(|row| row.reward).collect::<Vec<f64>>()
        };
        let first = dealt(3, 11);
        let mut sorted = first.clone();
        sorted.sort_by(f64::total_cmp);
        assert_eq!(sorted, rewards);
        // In a random permutation of any size, one element stays in place on average.
        assert!(first.iter().zip(&rewards).filter(|(a, b)| a == b).count() < 10);
        assert_eq!(first, dealt(3, 11));
        assert_ne!(first, dealt(3, 12));
        assert_ne!(first, dealt(4, 11));
    }
}
