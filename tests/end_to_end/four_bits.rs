//! `strategy.frozen_weights: nf4`: adapters beside matrices in 4 bits.

use std::fs;

use anyroll_models::{DecoderConfig, hf::ModelFolder};

use super::merged_adapters::{LORA, completions, planned, trained};
use super::{anyroll, assert_same, fail, lasting_metrics, published_model, resume, series, succeed};

const NF4: &str = "strategy.frozen_weights=nf4";
const MERGE: &str = "pipeline.rlvr.rollout.merge_adapters=true";
const FP8: &str = "pipeline.rlvr.rollout.weights=fp8";
const LAYERS: usize = 8;
/// Values in the matrices of the layers of a larger model: q, k and v together, o, gate and up together, down.
const MATRICES: f64 = (LAYERS as i64 * 64 * (128 + 64 + 2 * 128 + 128)) as f64;

/// Sampling has the weights that training widens. Stages are bitwise equal, and a resumed run is the whole one.
#[test]
fn runs_are_those_of_every_stage_and_resume_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| trained(&folder, name, &[&[NF4, LORA], sets].concat());
    let whole = run("replicated", &["devices=2", "strategy.zero_stage=0"]);
    let sharded = run("sharded", &["devices=2", "strategy.zero_stage=3"]);
    assert_same(&whole, &sharded);
    fs::remove_dir_all(sharded.join("checkpoints/step_000006")).unwrap();
    succeed(resume(&sharded));
    assert_same(&whole, &sharded);
    let apart = series(&whole, "rollout/logprob_diff_max");
    assert!(apart.iter().all(|&apart| apart < 1e-3), "{apart:?}");
    let wide = trained(&folder, "wide", &["devices=2", "strategy.zero_stage=0", LORA]);
    assert_ne!(lasting_metrics(&wide)[0], lasting_metrics(&whole)[0], "nothing was rounded");
}

/// The merged export and `generate` have the rounded weights, which the adapters were trained beside.
#[test]
fn what_is_exported_was_trained() {
    let folder = tempfile::tempdir().unwrap();
    let run = trained(&folder, "run", &[NF4, LORA, MERGE, "strategy.precision=fp32"]);
    let merged = folder.path().join("merged");
    let to = ["--to", merged.to_str().unwrap(), "--dtype", "fp32"];
    succeed(anyroll([&["export", run.to_str().unwrap()], &to[..]].concat()));
    let path = format!("model.path={}", merged.display());
    let (again, command) = published_model::run(&folder, "again", &[&path, "pipeline.rlvr.steps=1"]);
    succeed(command);
    let (last, first) = (completions(&run, 6), completions(&again, 0));
    assert!(!last.is_empty() && first == last, "{last:?} is not {first:?}");
    let written = |model: &std::path::Path| {
        let how = ["--prompt", "2 x 2?", "--chat", "--temperature", "0", "--max-new-tokens", "12"];
        succeed(anyroll([&["generate", model.to_str().unwrap()][..], &how].concat())).stdout
    };
    assert_eq!(written(&run), written(&merged));
}

/// The plan is what is held, and sampling in 8 bits holds no copy of all matrices in the precision.
#[test]
fn the_plan_counts_four_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (model, tiny) = (folder.path().join("model"), ModelFolder::open(&published_model::model()).unwrap());
    let shape = DecoderConfig {
        num_hidden_layers: LAYERS,
        hidden_size: 64,
        head_dim: 16,
        intermediate_size: 128,
        ..tiny.decoder_config().clone()
    };
    published_model::write_random(&model, shape);
    let base = [
        &format!("model.path={}", model.display()),
        LORA,
        "strategy.precision=bf16",
        "strategy.zero_stage=1",
    ];
    let held = |name: &str, sets: &[&str]| {
        let run = trained(&folder, name, &[&base, sets].concat());
        let least = |name| series(&run, name)[1..].iter().copied().fold(f64::INFINITY, f64::min);
        let [sampling, training] = ["perf/generate_allocated_bytes", "perf/allocated_bytes"].map(least);
        (sampling, training, planned(&run))
    };
    let (wide, four) = (held("wide", &[]), held("four", &[NF4]));
    let copied = held("merged", &[NF4, MERGE]);
    for (sampling, _, planned) in [wide, four, copied] {
        assert!((sampling - planned).abs() <= 8.0, "{sampling} held, {planned} planned");
    }
    // 36 bytes for 64 values of 16 bits, and one layer while it is used. Arenas are whole pages.
    let saved = (wide.1 - four.1) / MATRICES;
    assert!(saved > 1.0 && saved < 1.45, "{saved} bytes a value less while it trains: {wide:?}, {four:?}");
    // Matrices in 8 bits are libtorch's, which no measure here has: without the copy, and with them in the plan.
    let narrow = held("merged in 8 bits", &[NF4, MERGE, FP8]);
    let [held, planned] = [copied.0 - narrow.0, copied.2 - narrow.2].map(|bytes| bytes / MATRICES);
    assert!(held > 1.8, "{held} bytes a value less are held: {copied:?}, {narrow:?}");
    assert!(
        planned > 0.5 && planned < 1.0,
        "{planned} bytes a value less are planned: {copied:?}, {narrow:?}"
    );
}

#[test]
fn what_has_no_frozen_matrices_is_refused_before_a_device_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    for (sets, problem) in [
        (&[NF4][..], "`model.lora`"),
        (&[NF4, "model.lora={rank: 2, dora: true}"], "`lora.dora`"),
        (&[NF4, LORA, "devices=2", "strategy.tensor_parallel=2"], "`strategy.tensor_parallel`"),
    ] {
        let (run, command) = published_model::run(&folder, "refused", sets);
        let error = fail(command);
        assert!(error.contains("strategy.frozen_weights") && error.contains(problem), "{problem}: {error}");
        assert!(!run.exists(), "{}", run.display());
    }
}
