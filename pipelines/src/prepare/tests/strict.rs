//! Configs with `rollout.strict`.

use super::*;

#[test]
fn strict_rollouts_want_backends_that_have_them_in_any_precision() {
    let mut machine = machine();
    machine.backends[1].adds_by_rows = true;
    let strict = ["backend=gpu", "pipeline.rlvr.rollout.strict=true"];
    assert_eq!(resolve(&strict, &machine).unwrap().policy.backend, "gpu");
    let set = "roles.rollout.backend=cpu";
    let error = resolve(&[strict[0], strict[1], set], &machine).unwrap_err().to_string();
    let expected = "roles.rollout.backend: `rollout.strict` wants the bits of the policy's";
    assert!(error.contains(expected), "{error}");
    for backend in ["backend=cpu", strict[0]] {
        resolve(&[backend, strict[1], "strategy.precision=fp16"], &machine).unwrap();
    }
}
