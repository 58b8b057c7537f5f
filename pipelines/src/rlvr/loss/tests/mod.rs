//! Losses against an independent implementation, gradients against finite differences, and splits against the whole.
//! Also means against enumeration, and the selected tokens of several turns against a mask.

mod bandit;
mod golden;
mod split;
mod turns;

use anyroll_config::{
    Aggregation, CispoConfig, ClippedConfig, GmpoConfig, GspoConfig, NormConfig, PolicyLoss, SapoConfig,
    ToprConfig, VespoConfig,
};

use super::{stats::LossSums, *};

const AGGREGATIONS: [Aggregation; 4] = [
    Aggregation::TokenMean,
    Aggregation::SeqMeanTokenMean,
    Aggregation::SeqMeanTokenSum,
    Aggregation::SeqMeanTokenSumNorm(NormConfig { length: 5 }),
];

/// One loss of each kind, with all bounds of `clipped`.
fn losses() -> Vec<PolicyLoss> {
    let mut losses = PolicyLoss::all();
    losses[0] = PolicyLoss::Clipped(ClippedConfig { dual_clip: Some(3.0), ..ClippedConfig::default() });
    losses
}

/// The gradient of the loss in fp64, and the statistics of [`LossStats`].
fn gradient(
    algorithm: &AlgorithmConfig,
    logprobs: &[f64],
    targets: &Targets,
    count: f64,
) -> (Vec<f64>, LossSums) {
    let logprobs = Tensor::from_slice(logprobs);
    let scores = Scores { entropy: logprobs.zeros_like(), logprobs, divergence: None };
    let mut stats = LossStats::default();
    let grad = policy_loss(algorithm, &scores, targets, count, &mut stats).unwrap();
    let gradient = grad.logprobs;
    (Vec::try_from(gradient).unwrap(), stats.read().unwrap().sums)
}

#[track_caller]
fn check_near(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < tolerance, "{index}: {found} is not {expected}");
    }
}
