//! `strategy.moments: 8bit`.

use std::{fs, path::Path};

use serde_json::Value;

use super::merged_adapters::trained;
use super::{anyroll, assert_same, lasting_metrics, resume, succeed};

const ROUNDED: &str = "strategy.moments=8bit";
/// Slow enough that more than two steps learn.
const SLOWLY: &str = "pipeline.rlvr.optimizer.adamw.learning_rate=1.0e-3";

/// Stages are bitwise equal, and a resumed run is the whole one, also with states that leave the device or stay on the host.
#[test]
fn runs_are_those_of_every_stage_and_resume_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let run =
        |name: &str, sets: &[&str]| trained(&folder, name, &[&[ROUNDED, SLOWLY, "devices=2"], sets].concat());
    let whole = run("replicated", &["strategy.zero_stage=0"]);
    let sharded = run("sharded", &["strategy.zero_stage=3"]);
    assert_same(&whole, &sharded);
    fs::remove_dir_all(sharded.join("checkpoints/step_000006")).unwrap();
    succeed(resume(&sharded));
    assert_same(&whole, &sharded);
    let on_host = run("on the host", &["strategy.zero_stage=1", "strategy.offload={optimizer: cpu_step}"]);
    assert_same(&whole, &on_host);
    let wide = trained(&folder, "wide", &[SLOWLY, "devices=2", "strategy.zero_stage=0"]);
    assert!(planned(&whole) < 0.7 * planned(&wide), "{} of {}", planned(&whole), planned(&wide));
    assert_ne!(lasting_metrics(&wide)[2], lasting_metrics(&whole)[2], "nothing was rounded");
}

/// Returns the bytes of the optimizer in a run's plan.
fn planned(run: &Path) -> f64 {
    let report = succeed(anyroll(["plan", run.join("resolved.yaml").to_str().unwrap(), "--json"])).stdout;
    let report: Value = serde_json::from_str(&report).unwrap();
    report["configured"]["plan"]["train"]["optimizer"].as_f64().unwrap()
}
