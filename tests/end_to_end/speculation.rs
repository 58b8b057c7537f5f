//! `rollout.speculation`: runs that propose tokens learn what others do.

use super::{
    ONE_RANK, TWO_RANKS, anyroll, assert_same_steps, fail, last_checkpoint, lasting_metrics, metrics,
    run_tiny, series,
};

const SPECULATION: &str =
    "pipeline.rlvr.rollout.speculation={prompt_lookup_min: 1, num_speculative_tokens: 3, max_sequences: 64}";

/// Hardly warmed up, so that completions are of all lengths.
const LONG: [&str; 4] = [
    "model.decoder.max_length=40",
    "pipeline.rlvr.steps=5",
    "pipeline.rlvr.warmup.steps=31",
    "pipeline.rlvr.rollout.max_new_tokens=24",
];

#[test]
fn proposed_tokens_change_nothing_but_passes() {
    let folder = tempfile::tempdir().unwrap();
    for (name, config, sets) in [
        ("one", ONE_RANK, &[][..]),
        ("strict", ONE_RANK, &["pipeline.rlvr.rollout.strict=true"]),
        ("ahead", ONE_RANK, &["pipeline.rlvr.rollout.async={ahead: 1}"]),
        ("together", TWO_RANKS, &["pipeline.rlvr.rollout.tensor_parallel=2"]),
    ] {
        let run = |kind: &str, set: &[&str]| {
            run_tiny(&folder, &format!("{name}-{kind}"), config, &[&LONG, sets, set].concat())
        };
        let (plain, proposing) = (run("plain", &[]), run("proposing", &[SPECULATION]));
        let [proposed, accepted, per_proposal] =
            ["proposed_tokens", "accepted_tokens", "tokens_per_proposal"]
                .map(|metric| series(&proposing, &format!("perf/{metric}")));
        assert!(series(&plain, "perf/proposed_tokens").is_empty());
        assert!(accepted.iter().sum::<f64>() > 0.0, "{name}: {accepted:?} of {proposed:?}");
        assert!(accepted.iter().zip(&proposed).all(|(accepted, proposed)| accepted <= proposed), "{name}");
        assert!(per_proposal.iter().all(|tokens| (1.0..=4.0).contains(tokens)), "{name}: {per_proposal:?}");
        if name == "ahead" {
            // Another number of passes leaves other completions in flight.
            assert_eq!(metrics(&plain).len(), metrics(&proposing).len());
            continue;
        }
        assert_same_steps(&lasting_metrics(&plain), &lasting_metrics(&proposing));
        assert!(last_checkpoint(&plain) == last_checkpoint(&proposing), "{name}: the checkpoints differ");
        let [plain, proposing] = [&plain, &proposing].map(|run| series(run, "perf/generate_passes"));
        assert!(proposing.iter().sum::<f64>() <= plain.iter().sum(), "{name}: {proposing:?} and {plain:?}");
    }
}

#[test]
fn impossible_speculation_is_refused() {
    for (fields, field) in [
        ("{num_speculative_tokens: 0}", "num_speculative_tokens"),
        ("{num_speculative_tokens: 16}", "num_speculative_tokens"),
        ("{prompt_lookup_min: 0}", "prompt_lookup_min"),
        ("{prompt_lookup_max: 1}", "prompt_lookup_max"),
        ("{max_sequences: 0}", "max_sequences"),
    ] {
        let set = format!("pipeline.rlvr.rollout.speculation={fields}");
        let error = fail(anyroll(["check", ONE_RANK, "--set", &set]));
        assert!(error.contains(&format!("pipeline.rlvr.rollout.speculation.{field}: ")), "{error}");
    }
}
