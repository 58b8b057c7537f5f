//! Values and gradients at one point.

use anyroll_algorithm::losses::Terms;
use anyroll_config::{KlLossConfig, Level, MaskConfig, RolloutCorrection, TruncateConfig};
use anyroll_models::model::Scores;

use super::*;

struct Golden(serde_json::Value);

impl Golden {
    fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/losses.json");
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        serde_json::from_value(self.0[name].clone()).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn number(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap_or_else(|| panic!("{name}"))
    }

    fn lengths(&self) -> Vec<i64> {
        serde_json::from_value(self.0["lengths"].clone()).unwrap()
    }

    fn tensor(&self, name: &str) -> Tensor {
        Tensor::from_slice(&self.numbers(name))
    }

    fn targets(&self, aggregation: Aggregation) -> Targets {
        let weights: Vec<f64> =
            token_weights(aggregation, &self.lengths()).into_iter().map(f64::from).collect();
        Targets {
            lengths: self.lengths(),
            rollout_logprobs: self.tensor("rollout_logp"),
            old_logprobs: self.tensor("old_logp"),
            advantages: self.tensor("adv"),
            ref_logprobs: Some(self.tensor("ref_logp")),
            policy_weights: None,
            token_weights: Tensor::from_slice(&weights),
        }
    }

    fn count(&self, aggregation: Aggregation) -> f64 {
        let lengths: Vec<f64> = self.lengths().into_iter().map(|length| length as f64).collect();
        count(aggregation, &lengths)
    }

    /// The loss and its gradient at `logprobs`, including KL.
    fn loss(&self, algorithm: &AlgorithmConfig, logprobs: &[f64]) -> (f64, Vec<f64>) {
        let aggregation = algorithm.aggregation;
        let count = self.count(aggregation);
        let (gradient, sums) = gradient(algorithm, logprobs, &self.targets(aggregation), count);
        ((sums.policy + algorithm.kl_coef * sums.kl) / count, gradient)
    }

    /// The loss of each token.
    fn terms(&self, loss: &PolicyLoss) -> Terms {
        let Targets { old_logprobs, advantages, lengths, .. } = self.targets(Aggregation::TokenMean);
        let logprobs = self.tensor("logp");
        let (logprobs, old_logprobs, advantages) = (&logprobs, &old_logprobs, &advantages);
        loss.formula().terms(&Tokens { logprobs, old_logprobs, advantages, lengths: &lengths }).unwrap()
    }
}

fn clipped(dual_clip: Option<f64>) -> PolicyLoss {
    PolicyLoss::Clipped(ClippedConfig { dual_clip, ..ClippedConfig::default() })
}

#[test]
fn losses_of_tokens_equal_the_reference() {
    let golden = Golden::read();
    for (loss, name) in
        [(clipped(None), "ppo_clip_lo0.2_hi0.28_mat"), (clipped(Some(3.0)), "ppo_dual_c3_mat")]
    {
        let found: Vec<f64> = golden.terms(&loss).loss.try_into().unwrap();
        check_near(&found, &golden.numbers(name), 1e-12);
    }
    let ratio: Vec<f64> = golden.terms(&PolicyLoss::Gspo(GspoConfig::default())).ratio.try_into().unwrap();
    let lengths = golden.lengths();
    let firsts: Vec<f64> =
        (0..lengths.len()).map(|sequence| ratio[lengths[..sequence].iter().sum::<i64>() as usize]).collect();
    check_near(&firsts, &golden.numbers("gspo_ratio"), 1e-12);
}

#[test]
fn aggregated_losses_equal_the_reference() {
    let golden = Golden::read();
    let cispo = |min_ratio, max_ratio| PolicyLoss::Cispo(CispoConfig { min_ratio, max_ratio });
    let (token_mean, seq_mean) = (Aggregation::TokenMean, Aggregation::SeqMeanTokenMean);
    let dual = clipped(Some(3.0));
    for (loss, aggregation, name) in [
        (dual, AGGREGATIONS[0], "dual_token-mean"),
        (dual, AGGREGATIONS[1], "dual_seq-mean-token-mean"),
        (dual, AGGREGATIONS[2], "dual_seq-mean-token-sum"),
        (dual, AGGREGATIONS[3], "dual_seq-mean-token-sum-norm"),
        (PolicyLoss::Gspo(GspoConfig::default()), seq_mean, "gspo_lo3e-4_hi4e-4"),
        (PolicyLoss::Sapo(SapoConfig::default()), seq_mean, "sapo"),
        (cispo(0.0, 5.0), token_mean, "cispo_trl_max5_token-mean"),
        (cispo(0.8, 1.28), token_mean, "cispo_verl_lo0.2_hi0.28_token-mean"),
    ] {
        let algorithm = AlgorithmConfig { loss, aggregation, ..AlgorithmConfig::default() };
        let (found, _) = golden.loss(&algorithm, &golden.numbers("logp"));
        let expected = golden.number(name);
        assert!((found - expected).abs() < 1e-6, "{name}: {found} is not {expected}");
    }
}

fn papers() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/papers.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Losses with weights that have no gradient, and SAPO's, with values of `make_papers_golden.py`.
#[test]
fn losses_and_gradients_are_those_of_the_papers() {
    let (golden, papers) = (Golden::read(), papers());
    let sapo = |tau_positive, tau_negative| PolicyLoss::Sapo(SapoConfig { tau_positive, tau_negative });
    let cispo = |min_ratio, max_ratio| PolicyLoss::Cispo(CispoConfig { min_ratio, max_ratio });
    let topr =
        |positive_weight, negative_weight| PolicyLoss::Topr(ToprConfig { positive_weight, negative_weight });
    let gmpo = |clip_low, clip_high| PolicyLoss::Gmpo(GmpoConfig { clip_low, clip_high });
    let vespo = VespoConfig { k_positive: 1.0, lambda_positive: 2.0, k_negative: 0.0, lambda_negative: 0.5 };
    let vespo = PolicyLoss::Vespo(vespo);
    let (of_tokens, of_sequences) = (Aggregation::TokenMean, Aggregation::SeqMeanTokenMean);
    for (name, loss, aggregation) in [
        ("sapo", sapo(1.0, 1.05), of_sequences),
        ("sapo_2_0.5", sapo(2.0, 0.5), of_sequences),
        ("cispo_0_5", cispo(0.0, 5.0), of_tokens),
        ("cispo_0.8_1.28", cispo(0.8, 1.28), of_tokens),
        ("topr", topr(1.0, 1.0), of_tokens),
        ("topr_2_0.5", topr(2.0, 0.5), of_tokens),
        ("gmpo", gmpo(0.4, 0.4), of_sequences),
        ("gmpo_0.05_0.1", gmpo(0.05, 0.1), of_sequences),
        ("vespo", PolicyLoss::Vespo(VespoConfig::default()), of_tokens),
        ("vespo_1_2_0_0.5", vespo, of_tokens),
    ] {
        let algorithm = AlgorithmConfig { loss, aggregation, ..AlgorithmConfig::default() };
        let (found, gradient) = golden.loss(&algorithm, &golden.numbers("logp"));
        let expected = papers[name]["loss"].as_f64().unwrap();
        assert!((found - expected).abs() < 1e-6, "{name}: {found} is not {expected}");
        let expected: Vec<f64> = serde_json::from_value(papers[name]["gradient"].clone()).unwrap();
        check_near(&gradient, &expected, 1e-6);
    }
}

#[test]
fn tokens_are_left_out_as_the_papers_do() {
    let (golden, papers) = (Golden::read(), papers());
    let numbers = |name: &str| -> Vec<f64> { serde_json::from_value(papers[name].clone()).unwrap() };
    let kept = numbers("off_policy_0.05");
    let logprobs = golden.numbers("logp");
    let algorithm = AlgorithmConfig { off_policy_mask: Some(0.05), ..AlgorithmConfig::default() };
    let (_, masked) = golden.loss(&algorithm, &logprobs);
    let (_, whole) = golden.loss(&AlgorithmConfig::default(), &logprobs);
    let expected: Vec<f64> = whole.iter().zip(&kept).map(|(gradient, kept)| gradient * kept).collect();
    assert_ne!(whole, expected);
    check_near(&masked, &expected, 1e-12);
    let (targets, count) = (golden.targets(Aggregation::TokenMean), golden.count(Aggregation::TokenMean));
    let (_, sums) = gradient(&algorithm, &logprobs, &targets, count);
    assert_eq!(sums.off_policy, kept.iter().map(|kept| 1.0 - kept).sum::<f64>());

    let entropies = numbers("entropies");
    for share in [0.2, 0.55] {
        let chosen = most_uncertain(share, &entropies, entropies.clone());
        let chosen: Vec<f64> = chosen.into_iter().map(f64::from).collect();
        assert_eq!(chosen, numbers(&format!("top_entropy_{share}")));
    }
    assert_eq!(most_uncertain(0.5, &[], Vec::new()), Vec::<f32>::new());
}

#[test]
fn a_weighted_divergence_is_the_papers() {
    let (golden, papers) = (Golden::read(), papers());
    let logprobs = golden.numbers("logp");
    let with = |kl_coef: f64| {
        let kl_in = KlTerm::Loss(KlLossConfig { estimator: KlEstimator::K3, weighted: true });
        golden.loss(&AlgorithmConfig { kl_in, kl_coef, ..AlgorithmConfig::default() }, &logprobs)
    };
    let ((loss, gradient), (without, other)) = (with(1.0), with(0.0));
    let found: Vec<f64> = gradient.iter().zip(&other).map(|(with, without)| with - without).collect();
    let expected: Vec<f64> = serde_json::from_value(papers["weighted_k3"]["gradient"].clone()).unwrap();
    check_near(&found, &expected, 1e-12);
    assert!((loss - without - papers["weighted_k3"]["loss"].as_f64().unwrap()).abs() < 1e-12);
}

#[test]
fn weights_of_the_rollout_are_those_of_the_papers() {
    let (golden, papers) = (Golden::read(), papers());
    let (token, sequence) = (Level::Token, Level::Sequence);
    let truncate = |level, max| RolloutCorrection::Truncate(TruncateConfig { level, max });
    let mask = |level, min, max| RolloutCorrection::Mask(MaskConfig { level, min, max });
    for (name, config) in [
        ("tis_token_1.1", truncate(token, 1.1)),
        ("tis_sequence_1.3", truncate(sequence, 1.3)),
        ("mis_token_0.8_1.2", mask(token, 0.8, 1.2)),
        ("mis_sequence_0.6_1.3", mask(sequence, 0.6, 1.3)),
    ] {
        let (old, rollout) = (golden.tensor("old_logp"), golden.tensor("rollout_logp"));
        let correction = Correction::new(&config, &old, &rollout, &golden.lengths()).unwrap().unwrap();
        let expected: Vec<f64> = serde_json::from_value(papers[name].clone()).unwrap();
        check_near(&Vec::<f64>::try_from(correction.weights).unwrap(), &expected, 1e-12);
    }
}

#[test]
fn value_losses_equal_the_reference() {
    let golden = Golden::read();
    let lengths = golden.lengths();
    let (old, values, returns) =
        (golden.numbers("values"), golden.numbers("vpreds"), golden.numbers("returns"));
    let loss = |clip, aggregation: Aggregation, values: &[f64]| {
        let weights: Vec<f64> = token_weights(aggregation, &lengths).into_iter().map(f64::from).collect();
        let targets = ValueTargets {
            lengths: lengths.clone(),
            old_values: Tensor::from_slice(&old),
            returns: Tensor::from_slice(&returns),
            token_weights: Tensor::from_slice(&weights),
        };
        let (count, mut stats) = (golden.count(aggregation), ValueStats::default());
        let gradient = value_loss(clip, &Tensor::from_slice(values), &targets, count, &mut stats).unwrap();
        let sums = stats.read().unwrap();
        (sums.loss / count, sums.clipped, Vec::<f64>::try_from(gradient).unwrap())
    };
    let (found, clipped, _) = loss(Some(0.5), Aggregation::TokenMean, &values);
    let expected = golden.number("value_loss_clip0.5_token-mean");
    assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
    assert_eq!(clipped, 2.0);

    // Without a bound the loss is half the mean square, and a bound that is never reached changes nothing.
    let squares = values.iter().zip(&returns).map(|(value, follows)| (value - follows).powi(2));
    let expected = squares.sum::<f64>() / 2.0 / values.len() as f64;
    for clip in [None, Some(1e3)] {
        let (found, clipped, gradient) = loss(clip, Aggregation::TokenMean, &values);
        assert!((found - expected).abs() < 1e-12, "{clip:?}: {found} is not {expected}");
        assert_eq!(clipped, 0.0);
        let expected: Vec<f64> = values
            .iter()
            .zip(&returns)
            .map(|(value, follows)| (value - follows) / values.len() as f64)
            .collect();
        check_near(&gradient, &expected, 1e-12);
    }

    for aggregation in AGGREGATIONS {
        let (_, _, gradient) = loss(Some(0.5), aggregation, &values);
        for token in 0..values.len() {
            let moved = |by: f64| {
                let mut moved = values.clone();
                moved[token] += by;
                loss(Some(0.5), aggregation, &moved).0
            };
            let expected = (moved(1e-6) - moved(-1e-6)) / 2e-6;
            assert!((gradient[token] - expected).abs() < 1e-7, "{aggregation:?}, token {token}");
        }
    }
}

#[test]
fn statistics_equal_the_reference() {
    let golden = Golden::read();
    for (estimator, name) in
        [(KlEstimator::K1, "kl_k1_mean"), (KlEstimator::K2, "kl_k2_mean"), (KlEstimator::K3, "kl_k3_mean")]
    {
        let kl_in = KlTerm::Loss(KlLossConfig { estimator, weighted: false });
        let algorithm = AlgorithmConfig { kl_in, ..AlgorithmConfig::default() };
        let targets = golden.targets(Aggregation::TokenMean);
        let count = golden.count(Aggregation::TokenMean);
        let (_, sums) = gradient(&algorithm, &golden.numbers("logp"), &targets, count);
        let found = [sums.kl, sums.kl_old, sums.clipped_low + sums.clipped_high].map(|sum| sum / count);
        let expected = [name, "ppo_kl_k1", "clipfrac"].map(|name| golden.number(name));
        check_near(&found, &expected, 1e-12);
    }
}

#[test]
fn weights_of_the_rollout_equal_the_reference() {
    let golden = Golden::read();
    let lengths = golden.lengths();
    let weights = |config: RolloutCorrection| {
        let (old, rollout) = (golden.tensor("old_logp"), golden.tensor("rollout_logp"));
        let correction = Correction::new(&config, &old, &rollout, &lengths).unwrap().unwrap();
        (
            Vec::<f64>::try_from(correction.weights).unwrap(),
            CorrectionSums::read(&correction.sums.stack().unwrap()).unwrap(),
        )
    };
    let of_tokens = |name: &str| {
        let of_sequences = golden.numbers(name);
        let repeated = of_sequences
            .iter()
            .zip(&lengths)
            .flat_map(|(weight, &length)| std::iter::repeat_n(*weight, length as usize));
        repeated.collect::<Vec<f64>>()
    };
    let truncate = |level, max| RolloutCorrection::Truncate(TruncateConfig { level, max });
    let mask = |level, min, max| RolloutCorrection::Mask(MaskConfig { level, min, max });

    let (tokens, sums) = weights(truncate(Level::Token, 2.0));
    check_near(&tokens, &golden.numbers("tis_token_C2"), 1e-12);
    check_near(
        &[sums.weights.powi(2) / sums.squares / tokens.len() as f64],
        &[golden.number("ess_token")],
        1e-12,
    );
    assert_eq!(sums.changed, 0.0);
    check_near(&weights(mask(Level::Token, 0.5, 5.0)).0, &golden.numbers("icepop_0.5_5"), 1e-12);
    check_near(&weights(truncate(Level::Sequence, 2.0)).0, &of_tokens("tis_seq_C2"), 1e-12);
    check_near(&weights(mask(Level::Sequence, 0.0, 3.0)).0, &of_tokens("mis_seq_C3"), 1e-12);
    check_near(&weights(mask(Level::Geometric, 0.5, 2.0)).0, &of_tokens("geo_ratio"), 1e-12);

    // Bounds that apply: only the third sequence's weight is above 1.3, and only the fourth's is below 0.6.
    let bound = |of: fn(f64) -> f64| of_tokens("tis_seq_C2").into_iter().map(of).collect::<Vec<f64>>();
    let (found, CorrectionSums { changed, .. }) = weights(truncate(Level::Sequence, 1.3));
    check_near(&found, &bound(|weight| weight.min(1.3)), 1e-12);
    assert_eq!(changed, lengths[2] as f64);
    let (found, CorrectionSums { changed, .. }) = weights(mask(Level::Sequence, 0.6, 1.3));
    check_near(&found, &bound(|weight| if (0.6..1.3).contains(&weight) { weight } else { 0.0 }), 1e-12);
    assert_eq!(changed, (lengths[2] + lengths[3]) as f64);
}

#[test]
fn the_correction_multiplies_the_policy_loss_and_nothing_else() {
    let golden = Golden::read();
    let logprobs = golden.numbers("logp");
    let algorithm = AlgorithmConfig { kl_coef: 0.1, ..AlgorithmConfig::default() };
    let with = |weight: f64, kl_coef| {
        let algorithm = AlgorithmConfig { kl_coef, ..algorithm.clone() };
        let mut targets = golden.targets(algorithm.aggregation);
        targets.policy_weights = Some(targets.advantages.full_like(weight));
        gradient(&algorithm, &logprobs, &targets, 1.0).0
    };
    let (policy, kl) = (with(1.0, 0.0), with(0.0, 0.1));
    let expected: Vec<f64> = policy.iter().zip(&kl).map(|(policy, kl)| 3.0 * policy + kl).collect();
    check_near(&with(3.0, 0.1), &expected, 1e-12);
    assert!(kl.iter().any(|it| it.abs() > 1e-3) && policy.iter().any(|it| it.abs() > 1e-3));
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let golden = Golden::read();
    let mut smooth = losses();
    smooth.retain(|loss| !matches!(loss, PolicyLoss::Cispo(_) | PolicyLoss::Topr(_) | PolicyLoss::Vespo(_)));
    for loss in smooth {
        for aggregation in AGGREGATIONS {
            let terms =
                [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3].map(|it| [(it, false), (it, true)]);
            for (estimator, weighted) in terms.concat() {
                let kl_in = KlTerm::Loss(KlLossConfig { estimator, weighted });
                let algorithm =
                    AlgorithmConfig { loss, aggregation, kl_in, kl_coef: 0.3, ..AlgorithmConfig::default() };
                let logprobs = golden.numbers("logp");
                let (_, found) = golden.loss(&algorithm, &logprobs);
                for token in 0..logprobs.len() {
                    const STEP: f64 = 1e-6;
                    let moved = |by: f64| {
                        let mut moved = logprobs.clone();
                        moved[token] += by;
                        golden.loss(&algorithm, &moved).0
                    };
                    let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                    let off = (found[token] - expected).abs();
                    assert!(off < 1e-7, "{algorithm:?}, token {token}: {} is not {expected}", found[token]);
                }
            }
        }
    }
}

/// Finite differences would include the change of the weights.
#[test]
fn no_gradient_flows_through_weights() {
    let golden = Golden::read();
    let (new, old) = (golden.numbers("logp"), golden.numbers("old_logp"));
    let advantages = golden.numbers("adv");
    let check = |loss: PolicyLoss, weight: &dyn Fn(f64, f64) -> f64| {
        let algorithm = AlgorithmConfig { loss, ..AlgorithmConfig::default() };
        let (_, found) = golden.loss(&algorithm, &new);
        let expected: Vec<f64> = (0..new.len())
            .map(|token| {
                let (ratio, advantage) = ((new[token] - old[token]).exp(), advantages[token]);
                -weight(ratio, advantage) * advantage / new.len() as f64
            })
            .collect();
        check_near(&found, &expected, 1e-12);
    };
    check(PolicyLoss::Cispo(CispoConfig { min_ratio: 0.8, max_ratio: 1.28 }), &|ratio, _| {
        ratio.clamp(0.8, 1.28)
    });
    check(PolicyLoss::Cispo(CispoConfig { min_ratio: 0.0, max_ratio: 1.0 }), &|ratio, _| ratio.min(1.0));
    check(PolicyLoss::Reinforce, &|_, _| 1.0);
    check(PolicyLoss::Topr(ToprConfig::default()), &|ratio, advantage| {
        if advantage > 0.0 { 1.0 } else { ratio.min(1.0) }
    });
    check(
        PolicyLoss::Topr(ToprConfig { positive_weight: 2.0, negative_weight: 0.5 }),
        &|ratio, advantage| if advantage > 0.0 { 2.0 } else { 0.5 * ratio.min(1.0) },
    );
}

#[test]
fn the_entropy_bonus_is_weighted_as_the_loss_is() {
    let golden = Golden::read();
    for aggregation in AGGREGATIONS {
        let algorithm = AlgorithmConfig { aggregation, entropy_coef: 0.5, ..AlgorithmConfig::default() };
        let logprobs = golden.tensor("logp");
        let scores = Scores { entropy: logprobs.ones_like(), logprobs, divergence: None };
        let targets = golden.targets(aggregation);
        let grad = policy_loss(&algorithm, &scores, &targets, 4.0, &mut LossStats::default()).unwrap();
        let entropy = grad.entropy.expect("the loss has an entropy term");
        let weights: Vec<f64> = targets.token_weights.try_into().unwrap();
        let expected: Vec<f64> = weights.iter().map(|weight| -0.5 / 4.0 * weight).collect();
        check_near(&Vec::try_from(entropy).unwrap(), &expected, 1e-12);
    }
}
