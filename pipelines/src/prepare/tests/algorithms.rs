//! Algorithms of the policy: `pipeline.rlvr.algorithm`.

use super::*;

#[test]
fn an_algorithm_is_read_with_its_constants() {
    let check = |algorithm: &str, expected: AlgorithmConfig| {
        let set = format!("pipeline.rlvr.algorithm={algorithm}");
        let config = read(SMALL, &[&set]).unwrap_or_else(|error| panic!("{error}")).config;
        let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { panic!("another pipeline") };
        assert_eq!(rlvr.algorithm, expected, "{algorithm}");
        assert_eq!(read(&config.to_yaml(), &[]).unwrap().config, config, "{algorithm}");
    };
    let default = AlgorithmConfig::default;
    check("{}", default());
    check("{advantage: grpo, loss: clipped, kl_in: loss}", default());
    let none = Some(RolloutCorrection::None);
    check("{rollout_correction: none}", AlgorithmConfig { rollout_correction: none, ..default() });
    let reinforce = Advantage::Reinforce(ReinforceConfig { gamma: 1.0 });
    check(
        "{advantage: reinforce, whiten_advantages: true, reward_clip: 10, advantage_clip: 2}",
        AlgorithmConfig {
            advantage: reinforce,
            whiten_advantages: true,
            reward_clip: Some(10.0),
            advantage_clip: Some(2.0),
            ..default()
        },
    );
    check(
        "{loss: {cispo: {max_ratio: 1}}, aggregation: {seq_mean_token_sum_norm: {length: 8}}}",
        AlgorithmConfig {
            loss: PolicyLoss::Cispo(CispoConfig { min_ratio: 0.0, max_ratio: 1.0 }),
            aggregation: Aggregation::SeqMeanTokenSumNorm(NormConfig { length: 8 }),
            ..default()
        },
    );
    check(
        "{kl_coef: 0.2, kl_in: {reward: {adaptive: {target: 0.5}}}, old_logprobs: recompute, rollout_correction: mask}",
        AlgorithmConfig {
            kl_coef: 0.2,
            kl_in: KlTerm::Reward(KlRewardConfig {
                adaptive: Some(AdaptiveKlConfig { target: 0.5, horizon: 10_000.0 }),
            }),
            old_logprobs: Some(OldLogprobs::Recompute),
            rollout_correction: Some(RolloutCorrection::Mask(MaskConfig::default())),
            ..default()
        },
    );
    check(
        "{loss: {gmpo: {clip_high: 0.5}}, off_policy_mask: 0.2, kl_coef: 0.1, kl_in: {loss: {weighted: true}}}",
        AlgorithmConfig {
            loss: PolicyLoss::Gmpo(GmpoConfig { clip_low: 0.4, clip_high: 0.5 }),
            off_policy_mask: Some(0.2),
            kl_coef: 0.1,
            kl_in: KlTerm::Loss(KlLossConfig { estimator: KlEstimator::K3, weighted: true }),
            ..default()
        },
    );
    let vespo = VespoConfig { k_positive: 2.0, lambda_positive: 3.0, k_negative: 1.0, lambda_negative: 2.0 };
    check(
        "{advantage: gdpo, loss: {vespo: {k_negative: 1}}, old_logprobs: recompute, top_entropy: 0.2}",
        AlgorithmConfig {
            advantage: Advantage::Gdpo(GdpoConfig { eps: 1e-4 }),
            loss: PolicyLoss::Vespo(vespo),
            old_logprobs: Some(OldLogprobs::Recompute),
            top_entropy: Some(0.2),
            ..default()
        },
    );
}

#[test]
fn losses_of_sequences_and_masks_are_checked() {
    for (algorithm, field, message, fix) in [
        ("{loss: {gmpo: {clip_low: 0}}}", "loss.gmpo.clip_low", "0.0 is out of range", "above 0"),
        ("{loss: {gmpo: {clip_high: -1}}}", "loss.gmpo.clip_high", "-1.0 is out of range", "above 0"),
        ("{loss: {vespo: {k_positive: -1}}}", "loss.vespo.k_positive", "-1.0 is out of range", "0 or above"),
        (
            "{loss: {vespo: {lambda_negative: 0}}}",
            "loss.vespo.lambda_negative",
            "0.0 is out of range",
            "above 0",
        ),
        ("{advantage: {gdpo: {eps: 0}}}", "advantage.gdpo.eps", "0.0 is out of range", "above 0"),
        (
            "{advantage: gdpo, reward_clip: 5}",
            "reward_clip",
            "of the sum of the reward's terms",
            "`advantage: grpo`",
        ),
        ("{advantage: gdpo, reward_norm: {std: batch}}", "reward_norm", "normalizes each", "leave it out"),
        ("{advantage: gdpo, kl_coef: 0.1, kl_in: reward}", "kl_in", "normalizes each", "leave it out"),
        ("{off_policy_mask: 0}", "off_policy_mask", "0.0 is out of range", "above 0"),
        ("{old_logprobs: recompute, top_entropy: 1}", "top_entropy", "1.0 is out of range", "leave it out"),
        (
            "{top_entropy: 0.2}",
            "top_entropy",
            "entropies before the first update",
            "`old_logprobs: recompute`",
        ),
        ("{loss: gmpo, advantage: {reinforce: {gamma: 0.9}}}", "loss", "one ratio a sequence", "`gamma: 1`"),
        (
            "{loss: vespo, old_logprobs: recompute, rollout_correction: truncate}",
            "rollout_correction",
            "would count it twice",
            "`old_logprobs: rollout`",
        ),
    ] {
        let error = invalid(SMALL, &[&format!("pipeline.rlvr.algorithm={algorithm}")]);
        assert_eq!(error.field, format!("pipeline.rlvr.algorithm.{field}"), "{error}");
        assert!(error.message.contains(message) && error.to_string().contains(fix), "{error}");
    }
}
