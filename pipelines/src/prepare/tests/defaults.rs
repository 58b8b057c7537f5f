//! Configs without the fields that only say how a run is carried out.

use super::*;
use anyroll_config::ZeroStage;

/// `SMALL` without its strategy, and with as little of the rollout as can be.
fn open() -> String {
    SMALL.replace("strategy: {micro_batch_size: 8}\n", "").replace(", batch_size: 16", "")
}

#[test]
fn a_config_without_a_strategy_takes_the_fastest_stage_that_fits() {
    let run = |sets: &[&str]| read(&open(), sets).unwrap().resolve(&machine()).unwrap();
    for (sets, stage) in [(&[][..], 0), (&["devices=2"], 1)] {
        let run = run(sets);
        assert_eq!(run.policy.strategy.zero_stage, stage);
        let yaml = run.to_yaml();
        assert!(yaml.starts_with("# strategy.zero_stage: auto is "), "{yaml}");
        let written: Config = {
            let again = read(&yaml, &[]).unwrap();
            assert_eq!(again.resolve(&machine()).unwrap().policy, run.policy, "{yaml}");
            again.config
        };
        assert_eq!(written.strategy.zero_stage, ZeroStage::Stage(stage));
        assert_eq!(written.strategy.micro_batch_size, 8);
        let PipelineConfig::Rlvr(rlvr) = written.pipeline else { panic!("another pipeline") };
        assert_eq!(rlvr.rollout.batch_size, 64);
    }
    // A strategy that says anything has the defaults of its fields.
    assert_eq!(run(&["devices=2", "strategy.precision=fp32"]).policy.strategy.zero_stage, 0);
    let small = devices_too_small(&open());
    assert!(small.field == "strategy.zero_stage" && small.message.contains("no stage fits"), "{small}");
}

fn devices_too_small(text: &str) -> Invalid {
    let mut machine = machine();
    machine.backends.iter_mut().for_each(|facts| facts.memory_bytes = Some(1000));
    only_problem(read(text, &[]).unwrap().resolve(&machine).unwrap_err())
}

/// Nothing plans such runs.
#[test]
fn a_reward_model_without_a_strategy_is_not_sharded() {
    let offline = "pipeline={offline: {data: {sort: {digits: 6}}, objective: {reward_model: {}}, steps: 4, \
                   batch_size: 8, optimizer: {adamw: {learning_rate: 1}}}}";
    let run = read(&open(), &[offline, "devices=2"]).unwrap().resolve(&machine()).unwrap();
    assert_eq!((run.policy.strategy.zero_stage, run.stage_reason), (0, None));
}
