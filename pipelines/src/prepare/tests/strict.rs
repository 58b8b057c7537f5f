//! Configs with `rollout.strict`.

use super::*;

#[test]
fn strict_rollouts_want_backends_and_precisions_that_have_them() {
    let mut machine = machine();
    machine.backends[1].adds_by_rows = true;
    let strict = ["backend=gpu", "pipeline.rlvr.rollout.strict=true"];
    assert_eq!(resolve(&strict, &machine).unwrap().policy.backend, "gpu");
    for (set, expected) in [
        (
            "strategy.precision=fp16",
            "strategy.precision: with `rollout.strict` `gpu` computes in fp32 or bf16",
        ),
        (
            "roles.rollout.backend=cpu",
            "roles.rollout.backend: `rollout.strict` wants the bits of the policy's",
        ),
    ] {
        let error = resolve(&[strict[0], strict[1], set], &machine).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    resolve(&["backend=cpu", strict[1], "strategy.precision=fp16"], &machine).unwrap();
}
