//! GAE: generalized advantage estimates of each token, from a critic's values.

use serde::{Deserialize, Serialize};

use super::{Earned, Estimator, Range};

/// The constants of generalized advantage estimation.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GaeConfig {
    /// Weight of a reward one token later; above 0, at most 1. Default 1.
    pub gamma: f64,
    /// Weight of the rewards beyond the next value: from 0, no weight, to 1, up to the end. Default 0.95.
    pub lambda: f64,
}

impl Default for GaeConfig {
    fn default() -> Self {
        Self { gamma: 1.0, lambda: 0.95 }
    }
}

impl Estimator for GaeConfig {
    fn title(&self, _: bool) -> &'static str {
        "PPO"
    }

    fn ranges(&self) -> Vec<Range> {
        let Self { gamma, lambda } = *self;
        vec![
            Range::new("gamma", gamma, gamma > 0.0 && gamma <= 1.0, "above 0, at most 1"),
            Range::new("lambda", lambda, (0.0..=1.0).contains(&lambda), "from 0 to 1"),
        ]
    }

    fn needs_groups(&self) -> bool {
        false
    }

    /// Never called: GAE has advantages of tokens, by [`gae`].
    fn of_samples(&self, _: &Earned) -> Vec<f64> {
        unreachable!("a critic's advantages are those of tokens")
    }
}

/// Generalized advantage estimates of a sequence's tokens (Schulman et al., 2016, 1506.02438, equation 16). The inputs
/// are the reward of each token, the value of the state before the token, and the weight of the next token. From the
/// last token to the first:
///
/// ```text
/// delta_t = r_t + gamma_t V_{t+1} - V_t        A_t = delta_t + gamma_t lambda A_{t+1}
/// ```
///
/// Beyond the last token both are 0, even if a completion was cut. `A_t + V_t` is the target of the token's value.
///
/// # Panics
///
/// Panics if rewards, values and gammas differ in number.
pub fn gae(lambda: f64, gammas: &[f64], rewards: &[f64], values: &[f64]) -> Vec<f64> {
    assert_eq!(rewards.len(), values.len(), "a reward and a value for each token");
    assert_eq!(rewards.len(), gammas.len(), "a reward and a gamma for each token");
    let (mut next_value, mut next) = (0.0, 0.0);
    let mut advantages: Vec<f64> = rewards
        .iter()
        .zip(values)
        .zip(gammas)
        .rev()
        .map(|((reward, value), gamma)| {
            let delta = reward + gamma * next_value - value;
            (next_value, next) = (*value, delta + gamma * lambda * next);
            next
        })
        .collect();
    advantages.reverse();
    advantages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{check_near, golden, numbers};
    use crate::{Moments, returns};

    #[test]
    fn estimates_and_returns_equal_the_reference() {
        let golden = golden();
        let [values, rewards] = ["values", "token_rewards"].map(|name| numbers(&golden[name]));
        let mut start = 0;
        let mut found = Vec::new();
        for length in numbers(&golden["lengths"]) {
            let own = start..start + length as usize;
            let gammas = vec![0.99; own.len()];
            found.extend(gae(0.95, &gammas, &rewards[own.clone()], &values[own.clone()]));
            start = own.end;
        }
        check_near(&found, &numbers(&golden["gae_g0.99_l0.95"]));
        let towards: Vec<f64> =
            found.iter().zip(&values).map(|(advantage, value)| advantage + value).collect();
        check_near(&towards, &numbers(&golden["gae_returns"]));
        Moments::of(&found).whiten(&mut found);
        check_near(&found, &numbers(&golden["gae_whitened"]));
    }

    #[test]
    fn lambda_goes_from_the_next_value_to_the_return() {
        let (rewards, values) = ([0.1, 0.0, 1.0], [0.4, -0.3, 0.7]);
        let at = |lambda| gae(lambda, &[0.9; 3], &rewards, &values);
        check_near(&at(0.0), &[0.1 + 0.9 * -0.3 - 0.4, 0.9 * 0.7 + 0.3, 1.0 - 0.7]);
        let expected: Vec<f64> =
            returns(&rewards, &[0.9; 3]).iter().zip(values).map(|(follows, value)| follows - value).collect();
        check_near(&at(1.0), &expected);
        assert!(gae(0.95, &[], &[], &[]).is_empty());
    }

    /// Two consecutive actions of a policy with one logit, with all outcomes enumerated.
    #[test]
    fn the_policy_gradient_is_biased_as_far_as_values_are_wrong_and_lambda_is_below_1() {
        const P: f64 = 0.3;
        const REWARDS: [[f64; 2]; 2] = [[0.2, 0.5], [0.1, 1.0]];
        let chance = |action: usize| [1.0 - P, P][action];
        let score = |action: usize| action as f64 - P;
        let outcomes = || (0..4).map(|outcome| (outcome / 2, outcome % 2));
        let exact: f64 =
            outcomes().map(|(a, b)| chance(a) * chance(b) * REWARDS[a][b] * (score(a) + score(b))).sum();
        let estimate = |lambda, first: f64, then: [f64; 2]| -> f64 {
            let of = |(a, b): (usize, usize)| {
                let advantages = gae(lambda, &[1.0; 2], &[0.0, REWARDS[a][b]], &[first, then[a]]);
                chance(a) * chance(b) * (advantages[0] * score(a) + advantages[1] * score(b))
            };
            outcomes().map(of).sum()
        };
        let expected_after = [0, 1].map(|a| (0..2).map(|b| chance(b) * REWARDS[a][b]).sum::<f64>());
        check_near(&[estimate(1.0, 5.0, [-3.0, 2.0]), estimate(0.0, 5.0, expected_after)], &[exact; 2]);
        // At lambda 0 the first action's credit is the difference between the values.
        let wrong: f64 = estimate(0.0, 5.0, [0.0, 0.0]);
        let second: f64 = outcomes().map(|(a, b)| chance(a) * chance(b) * REWARDS[a][b] * score(b)).sum();
        check_near(&[wrong], &[second]);
        assert!((wrong - exact).abs() > 0.1 * exact, "{wrong} and {exact}");
    }
}
