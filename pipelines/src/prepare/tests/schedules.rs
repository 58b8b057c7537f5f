//! Learning-rate schedules whose parts are steps or shares.

use anyroll_config::{DecayConfig, Error, PipelineConfig, ScheduleConfig, Share, Steps};

use super::{SMALL, machine, only_problem, read};

fn schedule(of: &str) -> Result<ScheduleConfig, Error> {
    let set = format!("pipeline.rlvr.optimizer.schedule={of}");
    let run = read(SMALL, &[&set])?.resolve(&machine())?;
    // The resolved config has the same schedule.
    let again = read(&run.to_yaml(), &[]).unwrap();
    assert_eq!(again.config.pipeline, run.config.pipeline);
    let PipelineConfig::Rlvr(rlvr) = run.config.pipeline else { unreachable!("it is one") };
    Ok(rlvr.optimizer.schedule)
}

#[track_caller]
fn check_refused(of: &str, field: &str, message: &str) {
    let invalid = only_problem(schedule(of).unwrap_err());
    assert_eq!(invalid.field, format!("pipeline.rlvr.optimizer.schedule.{field}"));
    assert!(invalid.message.contains(message), "{}", invalid.message);
}

#[test]
fn parts_of_a_schedule_are_steps_or_shares() {
    let by = |share| Steps::By(Share { share });
    assert_eq!(
        schedule("{cosine: {warmup_steps: {share: 0.25}}}").unwrap(),
        ScheduleConfig::Cosine(DecayConfig { warmup_steps: by(0.25), final_ratio: 0.0 })
    );
    // Shares of 20 steps.
    schedule("{wsd: {warmup_steps: {share: 0.2}, decay_steps: {share: 0.8}}}").unwrap();
    let message = "17 do not fit in 20 steps, 4 of which";
    let too_many = "{wsd: {warmup_steps: {share: 0.2}, decay_steps: {share: 0.81}}}";
    check_refused(too_many, "wsd.decay_steps", message);
    check_refused("{linear: {warmup_steps: {share: 1}}}", "linear.warmup_steps", "20 of 20 steps");
    check_refused("{constant: {warmup_steps: {share: 1.1}}}", "constant.warmup_steps.share", "1.1 is out");
    check_refused("{constant: {warmup_steps: half}}", "constant.warmup_steps", "or {share: 0.1}");
}
