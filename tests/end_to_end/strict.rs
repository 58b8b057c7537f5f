//! `rollout.strict`: sampling and training agree bitwise.

use super::{ONE_RANK, TWO_RANKS, run_tiny, series};

#[test]
fn strict_rollouts_have_the_log_probs_of_training() {
    let folder = tempfile::tempdir().unwrap();
    let strict = "pipeline.rlvr.rollout.strict=true";
    let differences = |name: &str, config: &str, sets: &[&str]| {
        let run = run_tiny(&folder, name, config, sets);
        assert!(series(&run, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learned");
        series(&run, "rollout/logprob_diff_max")
    };
    let wide = "strategy.micro_batch_size=3"; // other rows share a batch than in sampling
    let narrow = ["strategy.precision=bf16", "pipeline.rlvr.rollout.batch_size=5"];
    for (name, config, sets) in [
        ("fp32", ONE_RANK, &[strict, wide][..]),
        ("bf16", ONE_RANK, &[strict, narrow[0], narrow[1]]),
        ("two ranks", TWO_RANKS, &[strict, "strategy.zero_stage=3", "strategy.recompute=full"]),
    ] {
        let found = differences(name, config, sets);
        assert_eq!(found, [0.0; 12], "{name}");
    }
    let found = differences("otherwise", ONE_RANK, &[wide]);
    assert!(found.iter().any(|&difference| difference > 0.0), "strict has no effect: {found:?}");
}
