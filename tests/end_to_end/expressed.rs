//! RLVR on a model whose layers libtorch differentiates: a tiny random DeepSeek-V3.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyroll_models::hf::ModelFolder;
use anyroll_models::{DecoderConfig, DeepseekV3, Expressed, Pairs};
use tempfile::TempDir;

use super::published_model::{model, run, write_random};
use super::{anyroll, fail, series, succeed};

/// Writes a random model with the tokenizer of the tiny one.
fn latent(folder: &TempDir) -> PathBuf {
    let (tiny, to) = (ModelFolder::open(&model()).unwrap(), folder.path().join("latent"));
    let shape = tiny.decoder_config();
    let expressed = DeepseekV3 {
        q_lora_rank: Some(12),
        kv_lora_rank: 8,
        qk_rope_head_dim: 4,
        v_head_dim: 6,
        pairs: Pairs::Adjacent,
        mscale_all_dim: 0.0,
        first_k_dense_replace: 1,
        n_routed_experts: 8,
        num_experts_per_tok: 3,
        moe_intermediate_size: 12,
        n_shared_experts: 1,
        n_group: 4,
        topk_group: 2,
        norm_topk_prob: true,
        routed_scaling_factor: 2.5,
    };
    let config = DecoderConfig {
        vocab_size: shape.vocab_size,
        head_dim: 10,
        intermediate_size: 24,
        initializer_range: 0.3,
        max_position_embeddings: shape.max_position_embeddings,
        expressed: Some(Expressed::DeepseekV3(expressed)),
        ..DecoderConfig::plain(2, 16, 4)
    };
    write_random(&to, config);
    to
}

fn run_latent(folder: &TempDir, name: &str, sets: &[&str]) -> (PathBuf, Command) {
    let path = format!("model.path={}", folder.path().join("latent").display());
    run(folder, name, &[&[path.as_str()], sets].concat())
}

#[test]
fn a_model_that_nobody_differentiated_by_hand_learns_at_stage_3() {
    let folder = tempfile::tempdir().unwrap();
    latent(&folder);
    let (run, command) =
        run_latent(&folder, "run", &["devices=2", "strategy.zero_stage=3", "pipeline.rlvr.steps=10"]);
    succeed(command);
    let rewards = series(&run, "reward/mean");
    assert!(rewards[0] < 0.2 && rewards[9] > 0.6, "{rewards:?}");
    assert!(series(&run, "rollout/logprob_diff_max").iter().all(|&difference| difference < 1e-3));

    let exported = folder.path().join("exported");
    let paths = [&run, &exported].map(|path| path.to_str().unwrap());
    succeed(anyroll(["export", paths[0], "--to", paths[1], "--dtype", "fp32"]));
    let shape = |path: &Path| ModelFolder::open(path).unwrap().decoder_config().clone();
    assert_eq!(shape(&exported), shape(&folder.path().join("latent")));
}

#[test]
fn what_such_a_model_cannot_do_is_refused_by_name_before_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    latent(&folder);
    let check = |sets: &[&str], expected: &[&str]| {
        let (run, command) = run_latent(&folder, "run", sets);
        let error = fail(command);
        assert!(expected.iter().all(|words| error.contains(words)), "{error} has not {expected:?}");
        assert!(!run.exists());
    };
    let differentiated = "libtorch differentiates";
    check(&["pipeline.rlvr.rollout.strict=true"], &["rollout.strict", differentiated]);
    check(&["devices=2", "strategy.sequence_parallel=2"], &["strategy.sequence_parallel", differentiated]);
    check(&["devices=2", "strategy.tensor_parallel=2"], &["strategy.tensor_parallel", differentiated]);
    check(&["model.lora={rank: 2, dora: true}"], &["model.lora.dora", differentiated]);
    check(&["model.lora={rank: 2, dropout: 0.1}"], &["model.lora.dropout", differentiated]);
    let experts = "model.lora={rank: 2, targets: [experts.0.up_proj]}";
    check(&[experts], &["model.lora.targets", "`experts.0.up_proj` names no matrix"]);
}
