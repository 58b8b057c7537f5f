//! `pipeline.rlvr.balance_ranks`: a mini-batch's samples dealt to the ranks by their tokens.

use super::sequence::assert_near;
use super::{TWO_RANKS, assert_same_steps, lasting_metrics, run_tiny, series};

#[test]
fn ranks_with_even_shares_take_the_same_steps() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        // Hardly warmed up, so that completions are of all lengths; weights of tokens, and a reference.
        let shared = [
            "pipeline.rlvr.steps=6",
            "pipeline.rlvr.warmup.steps=31",
            "pipeline.rlvr.rollout.max_new_tokens=16",
            "pipeline.rlvr.algorithm.kl_coef=0.05",
            "pipeline.rlvr.algorithm.old_logprobs=recompute",
            "pipeline.rlvr.algorithm.top_entropy=0.8",
            "pipeline.rlvr.mini_batches=2",
            "strategy.micro_batch_tokens=64",
        ];
        run_tiny(&folder, name, TWO_RANKS, &[&shared[..], sets].concat())
    };
    let even = "pipeline.rlvr.balance_ranks=true";
    let drawn = run("drawn", &[]);
    let dealt = run("dealt", &[even]);
    assert_near(&drawn, &dealt);
    let [before, after] = [&drawn, &dealt].map(|run| series(run, "perf/rank_balance"));
    assert!(before.iter().zip(&after).all(|(before, after)| before < after), "{before:?} and {after:?}");
    assert_same_steps(
        &lasting_metrics(&dealt),
        &lasting_metrics(&run("sharded", &[even, "strategy.zero_stage=3"])),
    );
    let apart = run("apart", &[even, "pipeline.rlvr.share_prompts=false", "strategy.sequence_parallel=2"]);
    assert_near(&drawn, &apart);
}
