//! Devices of a reward model, and its placement over the ranks.

use super::*;

/// A reward model with these fields after its folder.
fn reward(fields: &str) -> String {
    let path = std::path::absolute("../tests/golden/reward_model").unwrap();
    format!("pipeline.rlvr.reward=[{{exact: {{}}}}, {{model: {{path: {}{fields}}}}}]", path.display())
}

fn held(fields: &str, sets: &[&str]) -> Option<Role> {
    let run = resolve(&[&[&*reward(fields)], sets].concat(), &machine()).unwrap();
    let again = read(&run.to_yaml(), &[]).unwrap().resolve(&machine()).unwrap();
    assert_eq!(again, run);
    assert_eq!(run.reward_models.len(), 1);
    run.reward_models.into_iter().next().unwrap()
}

#[test]
fn a_reward_model_is_on_the_host_or_held_by_the_ranks() {
    let gpus = ["backend=gpu", "devices=[1, 2]"];
    assert_eq!(held("", &gpus), None);
    assert_eq!(held(", backend: cpu, dtype: bf16", &gpus), None);
    // `auto` chooses any backend of this machine; none of these is the host.
    let place = |fields: &str, sets: &[&str]| {
        let role = held(fields, sets).unwrap();
        (role.backend, role.ordinals)
    };
    assert_eq!(place(", backend: gpu", &gpus), ("gpu".into(), vec![1, 2]));
    assert_eq!(place(", backend: auto", &gpus), ("gpu".into(), vec![1, 2]));
    assert_eq!(place(", backend: gpu, devices: [3, 0]", &gpus), ("gpu".into(), vec![3, 0]));
    assert_eq!(place(", backend: gpu", &["devices=2"]), ("gpu".into(), vec![0, 1]));
    assert_eq!(place(", strategy: {}", &gpus), ("cpu".into(), vec![0, 0]));
    assert_eq!(place(", devices: 2", &["devices=2"]), ("cpu".into(), vec![0, 0]));

    let fields = ", backend: gpu, dtype: bf16, batch_size: 3, strategy: {zero_stage: 3}";
    let Strategy { zero_stage, precision, offload, micro_batch_size, .. } =
        held(fields, &gpus).unwrap().strategy;
    assert_eq!((zero_stage, precision, micro_batch_size), (3, Precision::Bf16, 3));
    assert_eq!((offload.optimizer, offload.params), (OptimizerOffload::None, Offload::BetweenSteps));
    let offload = |fields: &str, sets: &[&str]| held(fields, sets).unwrap().strategy.offload.params;
    assert_eq!(offload(", backend: gpu, strategy: {offload: {params: cpu}}", &gpus), Offload::Cpu);
}

#[test]
fn only_what_has_devices_of_its_own_is_elsewhere() {
    let elsewhere = |fields: &str| {
        let gpus = ["backend=gpu", "devices=2"];
        resolve(&[&[&*reward(fields)], &gpus[..]].concat(), &machine()).unwrap().elsewhere()
    };
    assert_eq!(elsewhere(""), [""; 0]);
    assert_eq!(elsewhere(", backend: gpu, strategy: {zero_stage: 3}"), [""; 0]);
    assert_eq!(elsewhere(", backend: gpu, devices: [2, 3]"), ["a reward model on gpu [2, 3]"]);
    assert_eq!(elsewhere(", strategy: {}"), ["a reward model on cpu [0, 0]"]);
}

#[test]
fn what_the_ranks_cannot_hold_names_the_field() {
    let check = |fields: &str, field: &str, message: &str, help: &str| {
        let sets = [&*reward(fields), "devices=2"];
        let error = only_problem(read(SMALL, &sets).and_then(|it| it.resolve(&machine())).unwrap_err());
        assert_eq!(error.field, format!("pipeline.rlvr.reward[1].model.{field}"), "{error}");
        assert!(error.message.contains(message) && error.help.contains(help), "{error}");
    };
    let whole_or_sharded = "is whole on every rank, 0, or sharded, 3";
    check(", strategy: {zero_stage: 1}", "strategy.zero_stage", whole_or_sharded, "write 0, 3 or auto");
    check(", strategy: {precision: bf16}", "strategy.precision", "no such field", "`zero_stage`");
    let timeout = "strategy.collective_timeout_s";
    check(", strategy: {collective_timeout_s: 0}", timeout, "0.0 is out of range", "at most a day");
    check(", devices: 1", "devices", "they are 1, and there are 2 ranks", "write 2");
    check(", backend: gpu, devices: [0, 7]", "devices", "`gpu` has 4 here", "0 to 3");
    check(", devices: [0, 1]", "devices", "`cpu` has no devices to choose from", "a number of ranks");
    check(", backend: gpv", "backend", "no backend `gpv`", "did you mean `gpu`?");
}

#[test]
fn a_reward_that_stands_alone_has_no_ranks() {
    let check = |set: &str, field: &str| {
        let path = std::path::absolute("../tests/golden/reward_model").unwrap();
        let sets = [format!("path={}", path.display()), set.to_owned()];
        let error = only_problem(read_reward("model", &sets).unwrap_err());
        assert_eq!(error.field, field, "{error}");
        assert!(error.help.contains("leave it out"), "{error}");
    };
    check("backend=gpu", "model.backend");
    check("devices=2", "model.devices");
    check("strategy={}", "model.strategy");
}
