//! The page as a whole, from logs as a run writes them.

use std::fs;
use std::path::Path;
use std::time::Instant;

use serde_json::Value;

use super::*;
use crate::metrics::{Metrics, MetricsLog};
use crate::run_log::{LogKind, RunLog};
use crate::samples::{Phase, Sample, SamplesLog};

/// Noise in [-1, 1] that is the same everywhere (splitmix64).
fn noise(seed: u64) -> f64 {
    let mut z = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

const DESCRIPTION: &str = "GRPO on sort-6, 104k parameters, cpu, world size 1, seed 0";

/// A folder of a run of `steps` steps.
fn empty_run(path: &Path, steps: u64) -> RunDir {
    let config = format!(
        "name: sort\nseed: 0\nbackend: cpu\npipeline:\n  rlvr:\n    steps: {steps}\n    note: <not a tag>\n"
    );
    let run = RunDir::create(path, &config, &config).unwrap();
    RunLog::open(&run.log()).unwrap().append(LogKind::Start, DESCRIPTION).unwrap();
    run
}

/// A run like those of the sort task, `steps` long.
fn demo_run(path: &Path, steps: u64) -> RunDir {
    let run = empty_run(path, steps);
    let mut log = MetricsLog::create(&run.metrics()).unwrap();
    for step in 0..=steps {
        log.append(step, &demo_metrics(step, steps)).unwrap();
    }
    let mut log = SamplesLog::create(&run.samples()).unwrap();
    for (step, phase) in [(0, Phase::Before), (steps / 2, Phase::Eval), (steps, Phase::After)] {
        for prompt in 0..40u64 {
            log.append(&demo_sample(step, phase, prompt)).unwrap();
        }
    }
    run
}

fn demo_metrics(step: u64, steps: u64) -> Metrics {
    let done = step as f64 / steps as f64;
    let learned = 1.0 - (-4.0 * done).exp();
    let noisy = |index: u64, size: f64| size * noise(step * 64 + index);
    let mut metrics = Metrics::new();
    if step > 0 {
        let reward = (0.07 + 0.86 * learned + noisy(0, 0.05)).clamp(0.0, 1.0);
        let all_right = reward.powi(3);
        let all_wrong = (1.0 - reward).powi(3);
        let entropy = 1.1 * (-3.0 * done).exp() + 0.02 + noisy(1, 0.02).abs();
        let pairs = [
            ("reward/mean", reward),
            ("reward/std", (reward * (1.0 - reward)).sqrt()),
            ("group/all_right", all_right),
            ("group/mixed", 1.0 - all_right - all_wrong),
            ("group/all_wrong", all_wrong),
            ("loss/policy", noisy(2, 0.02) - 0.005),
            ("kl/old", 2e-3 + noisy(3, 1.5e-3)),
            ("kl/reference", 0.08 * learned + noisy(4, 4e-3)),
            ("entropy", entropy),
            ("clip_fraction/low", 0.01 + noisy(5, 0.01)),
            ("clip_fraction/high", 0.02 + noisy(6, 0.015)),
            ("grad_norm", 0.4 + 0.5 * entropy + noisy(7, 0.2).abs()),
            ("learning_rate", 5e-4 * (step as f64 / 10.0).min(1.0)),
            ("response_length/mean", 7.0 + noisy(8, 0.3)),
            ("response_length/max", (9.5 + noisy(9, 2.0)).round()),
            ("response_length/min", (5.5 + noisy(10, 1.5)).round()),
            ("rollout/logprob_diff_mean", 2e-7 + noisy(11, 1e-7)),
            ("rollout/logprob_diff_max", 1.4e-6 + noisy(12, 6e-7)),
            ("perf/tokens_per_s", 12_500.0 + noisy(13, 900.0)),
            ("perf/allocated_bytes", 31.5e6),
            ("time/generate_s", 0.06 + noisy(14, 0.01)),
            ("time/reward_s", 0.004 + noisy(15, 0.001)),
            ("time/train_s", 0.14 + noisy(16, 0.02)),
            ("time/step_s", 0.21 + noisy(17, 0.02)),
        ];
        for (name, value) in pairs {
            metrics.insert(name, value);
        }
    }
    if step.is_multiple_of(steps / 10) {
        metrics.insert("eval/greedy", 0.634 + 0.31 * learned);
        metrics.insert("eval/pass@1", 0.071 + 0.84 * learned);
        metrics.insert("eval/pass@4", 0.250 + 0.72 * learned);
        metrics.insert("time/eval_s", 0.8);
    }
    metrics
}

fn demo_sample(step: u64, phase: Phase, prompt: u64) -> Sample {
    let digits: Vec<u64> =
        (0..6).map(|digit| ((noise(prompt * 8 + digit) + 1.0) * 5.0) as u64 % 10).collect();
    let text = |digits: &[u64]| digits.iter().map(u64::to_string).collect::<String>();
    let mut sorted = digits.clone();
    sorted.sort();
    let learned = noise(prompt + 1_000) < if step == 0 { -0.8 } else { 0.75 };
    let mut given = sorted.clone();
    if !learned {
        given.swap(prompt as usize % 5, prompt as usize % 5 + 1);
        given[5] = prompt % 10;
    }
    let [prompt, completion, answer] = [&digits, &given, &sorted].map(|digits| text(digits));
    let reward = f64::from(u8::from(completion == answer));
    Sample {
        step,
        phase,
        prompt: format!("sort {prompt} ="),
        completion,
        turns: Vec::new(),
        answer,
        reward,
        columns: Default::default(),
        training: None,
    }
}

fn report_of(run: &RunDir) -> String {
    write_report(run).unwrap();
    fs::read_to_string(run.report()).unwrap()
}

/// The data of a page, and the page without its scripts and styles.
fn parts(html: &str) -> (Value, String) {
    let (_, data) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    let data = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    let mut rest = html.to_owned();
    for (start, end) in [("<script", "</script>"), ("<style>", "</style>")] {
        while let Some(at) = rest.find(start) {
            let to = at + rest[at..].find(end).unwrap() + end.len();
            rest.replace_range(at..to, "");
        }
    }
    (data, rest)
}

#[test]
fn the_page_has_every_part_and_fetches_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let html = report_of(&demo_run(&folder.path().join("rlvr_sort"), 200));
    let (data, rest) = parts(&html);
    // Seen without scripts, too.
    for part in ["rlvr_sort", "finished", "world size 1", "step 200 of 200", "pass@1", "0.896", "+0.825"] {
        assert!(rest.contains(part), "no {part} in {rest}");
    }
    let update = &data["updates"][0];
    assert_eq!(update["before_and_after"]["rows"].as_array().unwrap().len(), 16);
    assert_eq!(update["before_and_after"]["after"], "after (step 200)");
    assert_eq!(update["rows"].as_array().unwrap().len(), 120);
    assert_eq!(update["curves"]["of"]["reward/mean"]["at"].as_array().unwrap().len(), 200);
    assert!(update["config"].as_str().unwrap().contains("<not a tag>"));
    assert!(update["notes"]["grad_norm"].as_str().unwrap().starts_with("Norm"));
    for fetch in ["http:", "https:", "url(", "src=", "@import"] {
        assert!(!rest.contains(fetch), "the page holds {fetch}");
    }
    assert!(rest.contains("default-src 'none'; script-src 'nonce-") && rest.contains("connect-src 'none'"));
    assert!(html.contains("Copyright (c) 2022 Leon Sorokin"), "the chart library's licence");
    assert_eq!(html.matches("<script").count(), 3);
    assert_eq!(html.matches("</script").count(), 3);
}

#[test]
fn whatever_text_comes_in_is_escaped() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = "</pre></script><script>alert(1)</script><!--\"'&";
    let run = empty_run(&folder.path().join("run <b>"), 1);
    let mut log = RunLog::open(&run.log()).unwrap();
    log.append(LogKind::Start, hostile).unwrap();
    log.append(LogKind::Failed, hostile).unwrap();
    MetricsLog::create(&run.metrics()).unwrap();
    let text = || hostile.to_owned();
    let of_training = crate::sample_text::tests::sample(1, 0, hostile, 0.5);
    let sample = Sample { prompt: text(), answer: text(), ..of_training };
    SamplesLog::create(&run.samples()).unwrap().append(&sample).unwrap();
    let html = report_of(&run);
    let (data, rest) = parts(&html);
    assert_eq!((html.matches("<script").count(), html.matches("<!--").count()), (3, 0));
    assert!(rest.contains("&lt;script&gt;alert(1)") && rest.contains("run &lt;b&gt;"), "{rest}");
    let update = &data["updates"][0];
    for shown in [
        &update["head"]["description"],
        &update["head"]["reason"],
        &update["rows"][0]["prompt"],
        &update["rows"][0]["completion"],
        &update["rows"][0]["answer"],
        &update["training"]["rows"][0]["cells"][0]["completion"],
        &update["log"][2]["text"],
    ] {
        assert_eq!(shown, hostile);
    }
}

#[test]
fn a_run_that_just_began_has_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let run = empty_run(&folder.path().join("run"), 200);
    MetricsLog::create(&run.metrics()).unwrap();
    SamplesLog::create(&run.samples()).unwrap();
    let (data, rest) = parts(&report_of(&run));
    assert!(rest.contains("step 0 of 200"), "{rest}");
    assert_eq!(data["updates"][0]["curves"]["of"], serde_json::json!({}));
}

#[test]
fn numbers_that_are_not_finite_are_null() {
    let folder = tempfile::tempdir().unwrap();
    let run = empty_run(&folder.path().join("run"), 200);
    let mut log = MetricsLog::create(&run.metrics()).unwrap();
    for step in 1..=3 {
        let mut metrics = demo_metrics(step, 200);
        metrics.insert("grad_norm", if step > 1 { f64::NAN } else { 1.0 });
        log.append(step, &metrics).unwrap();
    }
    SamplesLog::create(&run.samples()).unwrap();
    let (data, _) = parts(&report_of(&run));
    assert_eq!(data["updates"][0]["curves"]["of"]["grad_norm"]["mean"], serde_json::json!([1.0, null, null]));
}

#[test]
fn a_long_run_has_a_page_of_bounded_size_in_bounded_time() {
    let folder = tempfile::tempdir().unwrap();
    let run = demo_run(&folder.path().join("run"), 10_000);
    let started = Instant::now();
    let html = report_of(&run);
    let elapsed = started.elapsed();
    println!("10k steps: {} KiB in {elapsed:?}", html.len() / 1024);
    assert!(html.len() < 2_000_000, "{} bytes", html.len());
    // Without optimization and on a busy machine; an optimized build takes a twentieth of this.
    assert!(elapsed.as_secs_f64() < 5.0, "{elapsed:?}");
}
