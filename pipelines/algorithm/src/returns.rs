//! Returns: the rewards from a turn, or from a token, to the end.

use crate::Earned;
use crate::advantages::Advantage;

/// The advantage of each turn of each sample, from what each turn earned, a list a sample.
///
/// A turn's reward is what is earned from it on, its return, in which what comes a turn later weighs `gamma`, as in GTPO (Ding
/// et al., 2025, 2511.14846). [`Estimator::of_samples`](crate::advantages::Estimator::of_samples) compares it with those of the same turn of the group, as MT-GRPO does (Zeng et al., 2025,
/// 2505.11821). An episode that has ended earns nothing more, and counts as 0: so a group is whole at each turn, and what a
/// turn is compared with by `rloo` depends on no action of its sample. That is a baseline which leaves the gradient
/// unbiased, whatever it is.
///
/// # Panics
///
/// For advantages that `config` refuses beside turns.
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

/// The return of each token of a sequence: its own reward, and the next token's return times its own of `gammas`.
///
/// # Panics
///
/// If rewards and gammas differ in number.
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
