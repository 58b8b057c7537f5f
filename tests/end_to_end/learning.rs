//! A short run learns, and its control does not: evidence that training works.

use super::{ONE_RANK, run_tiny, series};

const CONTROL: &str = "configs/rlvr_sort_random_reward_cpu.yaml";

/// Four digits, and enough samples for a useful gradient.
pub(super) const SHORT: [&str; 9] = [
    "pipeline.rlvr.data.sort.digits=4",
    "pipeline.rlvr.rollout.max_new_tokens=5",
    "pipeline.rlvr.warmup.steps=60",
    "pipeline.rlvr.warmup.optimizer.schedule.constant.warmup_steps=10",
    "pipeline.rlvr.steps=40",
    "pipeline.rlvr.prompts_per_step=16",
    "pipeline.rlvr.group_size=8",
    "pipeline.rlvr.evaluation.every=40",
    "pipeline.rlvr.evaluation.prompts=200",
];

/// Groups that are started a step before they are trained on.
const LATE: [&str; 1] = ["pipeline.rlvr.rollout.async={ahead: 1}"];

#[test]
fn the_reward_teaches_and_its_control_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let [learned, control] = [ONE_RANK, CONTROL].map(|config| {
        let run = run_tiny(&folder, config, config, &SHORT);
        let pass_at_1 = series(&run, "eval/pass@1");
        (pass_at_1[0], pass_at_1[1])
    });
    // The same with a staleness of one step.
    let late = run_tiny(&folder, "late", ONE_RANK, &[&SHORT[..], &LATE].concat());
    let pass_at_1 = series(&late, "eval/pass@1");
    assert_eq!(pass_at_1[0], learned.0);
    assert!(pass_at_1[1] > learned.0 + 0.12, "a step late it went from {} to {}", learned.0, pass_at_1[1]);
    assert!(series(&late, "staleness/mean").iter().any(|&steps| steps > 0.5), "nothing was late");
    assert_eq!(learned.0, control.0, "both start from the same warm-up");
    assert!(learned.0 < 0.25, "the warm-up alone reaches {}", learned.0);
    assert!(learned.1 > learned.0 + 0.12, "held-out pass@1 went from {} to {}", learned.0, learned.1);
    assert!(control.1 < control.0 + 0.03, "without a reward it went from {} to {}", control.0, control.1);
}
