//! Returns: sums of rewards from a turn, or from a token, to the end.

use crate::Earned;
use crate::advantages::Advantage;

/// Advantage of each turn of each sample, from the rewards of turns, a list for each sample.
///
/// A turn's return is the sum of rewards from that turn on, discounted by `gamma` for each turn, as in GTPO (Ding et
/// al., 2025, 2511.14846). [`Estimator::of_samples`](crate::advantages::Estimator::of_samples) compares the return with
/// the returns of the same turn in the group, as in MT-GRPO (Zeng et al., 2025, 2505.11821). An episode that has ended
/// has a return of 0: a group is therefore complete at each turn. The baseline of `rloo` does not depend on any action
/// of its sample, and therefore leaves the gradient unbiased.
///
/// # Panics
///
/// Panics for advantages that `config` refuses with turns.
pub fn turn_advantages(
    advantage: &Advantage,
    gamma: f64,
    rewards: &[Vec<f64>],
    group_size: usize,
) -> Vec<Vec<f64>> {
    let of_sample = |turns: &Vec<f64>| returns(turns, &vec![gamma; turns.len()]);
    let mut of_turns: Vec<Vec<f64>> = rewards.iter().map(of_sample).collect();
    let lengths = vec![1.0; rewards.len()]; // read by `opo` alone
    for turn in 0..rewards.iter().map(Vec::len).max().unwrap_or(0) {
        let rewards: Vec<f64> =
            of_turns.iter().map(|returns| returns.get(turn).copied().unwrap_or(0.0)).collect();
        let earned = Earned { rewards: &rewards, lengths: &lengths, greedy: &[], group_size };
        let advantages = advantage.formula().of_samples(&earned);
        for (sample, advantage) in of_turns.iter_mut().zip(advantages) {
            sample.get_mut(turn).into_iter().for_each(|it| *it = advantage);
        }
    }
    of_turns
}

/// Computes the return of each token of a sequence: the token's reward, plus the next token's return times the token's
/// own entry of `gammas`.
///
/// # Panics
///
/// Panics if rewards and gammas differ in number.
pub fn returns(rewards: &[f64], gammas: &[f64]) -> Vec<f64> {
    assert_eq!(rewards.len(), gammas.len(), "a reward and a gamma for each token");
    let mut following = 0.0;
    let mut returns: Vec<f64> = rewards
        .iter()
        .zip(gammas)
        .rev()
        .map(|(reward, gamma)| {
            following = reward + gamma * following;
            following
        })
        .collect();
    returns.reverse();
    returns
}
