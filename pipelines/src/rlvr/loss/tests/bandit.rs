//! A policy with one logit that takes action 1 with probability p. The exact gradient of its expected reward is
//! p (1 - p) (reward of 1 - reward of 0). Unbiased estimators have this gradient as their mean. For the others the
//! tests state the mean.

use anyroll_algorithm::{Earned, Moments, gae};
use anyroll_config::{
    Advantage, GaeConfig, GrpoConfig, KlEstimator, KlLossConfig, KlTerm, Level, ReinforceConfig,
    RolloutCorrection, Scale, TruncateConfig,
};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use super::*;

const REWARDS: [f64; 2] = [0.2, 1.0];
const GROUP_SIZE: usize = 4;
const SAMPLES: usize = 100_000;
/// The probability of action 1 under the policy whose gradient is estimated.
const P: f64 = 0.3;
/// Probability of action 1 under another policy, for off-policy samples.
const OTHER: f64 = 0.5;

/// The critic's value of the only state; not the expected reward, since a critic may be wrong.
const VALUE: f64 = 0.7;

/// Mean over independent groups, and its standard error.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    mean: f64,
    error: f64,
}

impl Estimate {
    /// Returns true within 4 standard errors. By chance one test in 16000 fails; the seed is fixed.
    fn is(self, expected: f64) -> bool {
        (self.mean - expected).abs() < 4.0 * self.error
    }
}

/// The sampling policy, the policy of the ratio's denominator, and the estimator. The gradient is at `P`.
#[derive(Clone, Copy)]
struct Setting {
    sampled_by: f64,
    old: f64,
    advantage: Advantage,
    whiten: bool,
    loss: PolicyLoss,
    correction: RolloutCorrection,
}

const ON_POLICY: Setting = Setting {
    sampled_by: P,
    old: P,
    advantage: RETURN,
    whiten: false,
    loss: PolicyLoss::Reinforce,
    correction: RolloutCorrection::None,
};

const RETURN: Advantage = Advantage::Reinforce(ReinforceConfig { gamma: 1.0 });
const DR_GRPO: Advantage = Advantage::Grpo(GrpoConfig { scale: Scale::None, eps: 1e-6 });

/// The estimated gradient of the expected reward with respect to the logit.
fn estimate(setting: Setting) -> Estimate {
    let mut random = ChaCha8Rng::seed_from_u64(17);
    let mut uniform = || f64::from(random.next_u32()) / f64::from(u32::MAX);
    let actions: Vec<usize> = (0..SAMPLES).map(|_| usize::from(uniform() < setting.sampled_by)).collect();
    let rewards: Vec<f64> = actions.iter().map(|&action| REWARDS[action]).collect();
    let mut advantages = match setting.advantage {
        // A sequence of one token in one state, with the value `VALUE` for every action.
        Advantage::Gae(GaeConfig { gamma, lambda }) => {
            rewards.iter().flat_map(|reward| gae(lambda, &[gamma], &[*reward], &[VALUE])).collect()
        }
        advantage => {
            // The more likely action is the greedy one.
            let greedy = vec![REWARDS[usize::from(setting.sampled_by > 0.5)]; SAMPLES / GROUP_SIZE];
            let (lengths, group_size) = (vec![1.0; SAMPLES], GROUP_SIZE);
            let earned = Earned { rewards: &rewards, lengths: &lengths, greedy: &greedy, group_size };
            advantage.formula().of_samples(&earned)
        }
    };
    if setting.whiten {
        Moments::of(&advantages).whiten(&mut advantages);
    }
    let logprobs = |p: f64| -> Vec<f64> { actions.iter().map(|&action| [1.0 - p, p][action].ln()).collect() };
    let lengths = vec![1; SAMPLES];
    let (old, rollout) =
        (Tensor::from_slice(&logprobs(setting.old)), Tensor::from_slice(&logprobs(setting.sampled_by)));
    let correction = Correction::new(&setting.correction, &old, &rollout, &lengths).unwrap();
    let targets = Targets {
        token_weights: old.ones_like(),
        advantages: Tensor::from_slice(&advantages),
        policy_weights: correction.map(|it| it.weights),
        rollout_logprobs: rollout,
        old_logprobs: old,
        ref_logprobs: None,
        lengths,
    };
    let algorithm = AlgorithmConfig { loss: setting.loss, ..AlgorithmConfig::default() };
    // With a count of 1 each token keeps its own gradient, and the loss falls as the reward rises.
    let (gradient, _) = gradient(&algorithm, &logprobs(P), &targets, 1.0);
    let of_logit: Vec<f64> =
        gradient.iter().zip(&actions).map(|(gradient, &action)| -gradient * (action as f64 - P)).collect();
    mean_of_groups(&of_logit)
}

fn mean_of_groups(values: &[f64]) -> Estimate {
    let means: Vec<f64> =
        values.chunks(GROUP_SIZE).map(|group| group.iter().sum::<f64>() / group.len() as f64).collect();
    let count = means.len() as f64;
    let mean = means.iter().sum::<f64>() / count;
    let variance = means.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / (count - 1.0);
    Estimate { mean, error: (variance / count).sqrt() }
}

fn exact() -> f64 {
    P * (1.0 - P) * (REWARDS[1] - REWARDS[0])
}

/// Mean over both actions of a weighted policy gradient with the plain reward.
fn enumerated(sampled_by: f64, weight: impl Fn(f64) -> f64) -> f64 {
    let of_action = |action: usize| {
        let (drawn, policy) = ([1.0 - sampled_by, sampled_by][action], [1.0 - P, P][action]);
        drawn * weight(policy / drawn) * REWARDS[action] * (action as f64 - P)
    };
    of_action(0) + of_action(1)
}

#[test]
fn on_policy_the_unbiased_estimators_have_the_exact_mean() {
    for advantage in [RETURN, Advantage::Rloo, Advantage::Remax, Advantage::Gae(GaeConfig::default())] {
        for loss in losses() {
            let found = estimate(Setting { advantage, loss, ..ON_POLICY });
            assert!(found.is(exact()), "{advantage:?}, {loss:?}: {found:?} is not {}", exact());
            assert!(found.error < 0.03 * exact(), "{found:?} proves nothing");
        }
    }
}

/// On-policy distillation, by enumeration of both actions. With a token's own log ratio as its advantage, or k2 as a
/// loss, the mean is the gradient of KL(policy || teacher).
#[test]
fn a_teacher_has_the_gradient_of_the_reverse_kl() {
    const TEACHER: f64 = 0.8;
    let [own, theirs] = [P, TEACHER].map(|p| [(1.0 - p).ln(), p.ln()]);
    let exact = P * (1.0 - P) * ((own[1] - theirs[1]) - (own[0] - theirs[0]));
    let off_advantage = [theirs[0] - own[0], theirs[1] - own[1]];
    let k2 = KlTerm::Loss(KlLossConfig { estimator: KlEstimator::K2, weighted: false });
    for (advantages, kl_in) in [(off_advantage, KlTerm::Advantage), ([0.0; 2], k2)] {
        for loss in losses() {
            let old = Tensor::from_slice(&own);
            let targets = Targets {
                lengths: vec![1, 1],
                token_weights: old.ones_like(),
                advantages: Tensor::from_slice(&advantages),
                policy_weights: None,
                rollout_logprobs: old.shallow_clone(),
                old_logprobs: old,
                ref_logprobs: matches!(kl_in, KlTerm::Loss(_)).then(|| Tensor::from_slice(&theirs)),
            };
            let algorithm = AlgorithmConfig { loss, kl_in, kl_coef: 1.0, ..AlgorithmConfig::default() };
            let (gradient, _) = gradient(&algorithm, &own, &targets, 1.0);
            let mean = (1.0 - P) * gradient[0] * -P + P * gradient[1] * (1.0 - P);
            assert!((mean - exact).abs() < 1e-6, "{kl_in:?}, {loss:?}: {mean} is not {exact}");
        }
    }
}

#[test]
fn the_groups_own_mean_shrinks_the_gradient() {
    // A sample's own reward is in its baseline, so 1 - 1 / n of the gradient remains. The same holds for OPO with
    // equal lengths.
    let left = exact() * (1.0 - 1.0 / GROUP_SIZE as f64);
    for advantage in [DR_GRPO, Advantage::Opo] {
        let found = estimate(Setting { advantage, ..ON_POLICY });
        assert!(found.is(left) && !found.is(exact()), "{advantage:?}: {found:?} is not {left}");
    }
    // GPG rescales for groups without a gradient, which is a different factor, though nearly the same here.
    let mixed = 1.0 - P.powi(GROUP_SIZE as i32) - (1.0 - P).powi(GROUP_SIZE as i32);
    let found = estimate(Setting { advantage: Advantage::Gpg, ..ON_POLICY });
    assert!(found.is(left / mixed) && !found.is(left), "{found:?} is not {}", left / mixed);
}

#[test]
fn deviations_rescale_the_gradient() {
    // Whitening divides by the standard deviation of all rewards, a constant in the limit.
    let deviation = (P * (1.0 - P)).sqrt() * (REWARDS[1] - REWARDS[0]);
    let found = estimate(Setting { whiten: true, ..ON_POLICY });
    assert!(found.is(exact() / deviation) && !found.is(exact()), "{found:?}");
    // A group's standard deviation weighs groups by the rarity of their mix: by enumeration over the number of 1s.
    let n = GROUP_SIZE as f64;
    let of_group = |ones: f64| {
        let ways = [0.0, 4.0, 6.0, 4.0, 0.0][ones as usize];
        let chance = ways * P.powf(ones) * (1.0 - P).powf(n - ones);
        let (mean, spread) = (ones / n, (ones * (n - ones) / n / (n - 1.0)).sqrt());
        let score = ones * (1.0 - mean) * (1.0 - P) + (n - ones) * mean * P;
        chance * score / spread / n
    };
    let expected: f64 =
        (0..=GROUP_SIZE).map(|ones| ones as f64).filter(|&ones| ones > 0.0 && ones < n).map(of_group).sum();
    let found = estimate(Setting { advantage: Advantage::default(), ..ON_POLICY });
    assert!(found.is(expected) && !found.is(exact()), "{found:?} is not {expected}");
}

#[test]
fn off_policy_whole_ratios_are_unbiased_and_bounded_ones_are_not() {
    let wide = PolicyLoss::Clipped(ClippedConfig { clip_low: 0.999, clip_high: 1e3, dual_clip: None });
    let cispo = |max_ratio| PolicyLoss::Cispo(CispoConfig { min_ratio: 0.0, max_ratio });
    let off_policy = Setting { sampled_by: OTHER, old: OTHER, ..ON_POLICY };
    for loss in [wide, cispo(1e3)] {
        let found = estimate(Setting { loss, ..off_policy });
        assert!(found.is(exact()), "{loss:?}: {found:?} is not {}", exact());
    }
    type Weight = fn(f64) -> f64;
    let biased: [(PolicyLoss, Weight); 3] = [
        (cispo(1.0), |ratio| ratio.min(1.0)),
        (PolicyLoss::Reinforce, |_| 1.0),
        // All rewards are positive, for which TOPR omits the ratio.
        (PolicyLoss::Topr(ToprConfig::default()), |_| 1.0),
    ];
    for (loss, weight) in biased {
        let (found, expected) = (estimate(Setting { loss, ..off_policy }), enumerated(OTHER, weight));
        assert!(found.is(expected) && !found.is(exact()), "{loss:?}: {found:?} is not {expected}");
    }
}

#[test]
fn the_rollouts_correction_is_unbiased_until_it_truncates() {
    let corrected = |max| {
        let correction = RolloutCorrection::Truncate(TruncateConfig { level: Level::Token, max });
        estimate(Setting { sampled_by: OTHER, correction, ..ON_POLICY })
    };
    assert!(corrected(1e3).is(exact()), "{:?} is not {}", corrected(1e3), exact());
    let expected = enumerated(OTHER, |ratio| ratio.min(1.2));
    let found = corrected(1.2);
    assert!(found.is(expected) && !found.is(exact()), "{found:?} is not {expected}");
}
