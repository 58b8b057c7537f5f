//! Runs with `keep_logits`.

use std::path::Path;

use super::*;

#[test]
fn logits_are_kept_where_there_are_some() {
    let keep = "strategy.keep_logits=true";
    assert!(resolve(&[keep], &machine()).unwrap().policy.strategy.keep_logits);
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let read = |name: &str| Loaded::read(&configs.join(name), &[keep.to_owned()]).map(drop);
    read("offline_dpo_sort_cpu.yaml").unwrap();
    for name in ["offline_reward_model_sort_cpu.yaml", "diffusion_refl_shapes_cpu.yaml"] {
        let error = read(name).unwrap_err().to_string();
        assert!(error.contains("strategy.keep_logits: what this trains makes no logits"), "{error}");
    }
}
