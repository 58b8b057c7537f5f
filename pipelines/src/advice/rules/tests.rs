//! Each rule on a history that fires it, and on one that does not.

use std::{fs, path::Path};

use super::super::advice;
use super::*;
use crate::metrics::{Metrics, declared};

/// Names of the rules that fire after 30 steps with these metrics of each step.
fn fired(metrics: impl Fn(u64) -> Vec<(&'static str, f64)>) -> Vec<String> {
    let mut history = Recent::default();
    for step in 0..=30 {
        let mut of_step = Metrics::new();
        for (name, value) in metrics(step) {
            assert!(declared(name).is_some(), "`{name}` is no metric");
            of_step.insert(name, value);
        }
        history.push(step, &of_step);
    }
    advice(&history).into_iter().map(|it| it.rule).collect()
}

#[track_caller]
fn check(
    rule: &str,
    fires: impl Fn(u64) -> Vec<(&'static str, f64)>,
    silent: impl Fn(u64) -> Vec<(&'static str, f64)>,
) {
    assert_eq!(fired(fires), [rule]);
    assert_eq!(fired(silent), [""; 0]);
}

/// A number in [-1, 1] that differs from step to step.
fn noise(step: u64) -> f64 {
    ((step * 2_654_435_761) % 1000) as f64 / 500.0 - 1.0
}

#[test]
fn groups_that_teach_nothing() {
    check("all_wrong", |_| vec![("group/all_wrong", 0.96)], |_| vec![("group/all_wrong", 0.9)]);
    check("all_right", |_| vec![("group/all_right", 1.0)], |_| vec![("group/all_right", 0.94)]);
    // The last steps count, not the first ones.
    assert!(fired(|step| vec![("group/all_wrong", if step < 21 { 1.0 } else { 0.5 })]).is_empty());
    let shares = |wrong: f64, mixed: f64| vec![("group/all_wrong", wrong), ("group/mixed", mixed)];
    check("no_gradient", move |_| shares(0.6, 0.08), move |_| shares(0.6, 0.2));
    // The stronger rule alone is told.
    assert_eq!(fired(move |_| shares(1.0, 0.0)), ["all_wrong"]);
}

#[test]
fn completions_that_are_cut() {
    check("cut", |_| vec![("response_length/clipped", 0.6)], |_| vec![("response_length/clipped", 0.4)]);
    // A value that is not finite is no evidence.
    assert!(fired(|_| vec![("response_length/clipped", f64::NAN)]).is_empty());
}

#[test]
fn an_entropy_that_collapses() {
    let falls = |step: u64| 1.2 * (-0.15 * step as f64).exp();
    check(
        "entropy",
        move |step| vec![("entropy", falls(step)), ("group/all_right", 0.2)],
        |step| vec![("entropy", 1.2 - 0.03 * step as f64), ("group/all_right", 0.2)],
    );
    // A policy that has learned its task is sure of itself.
    assert!(fired(move |step| vec![("entropy", falls(step)), ("group/all_right", 0.8)]).is_empty());
}

#[test]
fn a_policy_that_runs_away() {
    check("kl", |_| vec![("kl/old", 0.3)], |_| vec![("kl/old", 0.05), ("kl/reference", 0.8)]);
    assert_eq!(fired(|_| vec![("kl/reference", 3.0)]), ["kl"]);
    let often = |step: u64| vec![("ratio/max", if step.is_multiple_of(3) { 2.0 } else { 45.0 })];
    let seldom = |step: u64| vec![("ratio/max", if step.is_multiple_of(5) { 300.0 } else { 3.0 })];
    check("ratio", often, seldom);
}

#[test]
fn a_reward_that_falls() {
    let falls =
        |step: u64| vec![("reward/mean", 0.8 - 0.01 * step as f64 + 0.02 * noise(step)), ("reward/std", 0.4)];
    let noisy = |step: u64| vec![("reward/mean", 0.5 + 0.1 * noise(step)), ("reward/std", 0.4)];
    check("falling", falls, noisy);
    // Clear, and too small to matter.
    assert!(fired(|step| vec![("reward/mean", 0.5 - 1e-4 * step as f64), ("reward/std", 0.4)]).is_empty());
    assert!(
        fired(|step| vec![("reward/mean", 0.01 * step as f64), ("reward/std", 0.4)]).is_empty(),
        "it rises"
    );
}

#[test]
fn sampling_and_training_apart() {
    let apart = "rollout/logprob_diff_mean";
    check("apart", move |_| vec![(apart, 0.08)], move |_| vec![(apart, 0.011)]);
}

#[test]
fn a_term_that_never_varies() {
    let (math, length) = ("reward/math/mean", "reward/length/mean");
    check(
        "constant_term length",
        move |step| vec![(math, 0.5 + 0.1 * noise(step)), (length, -0.25)],
        move |step| vec![(math, 0.5 + 0.1 * noise(step)), (length, -0.25 + 0.01 * noise(step))],
    );
    // Alone at 0 or 1 it is the groups' rule.
    check("constant_term math", move |_| vec![(math, 0.5)], move |_| vec![(math, 0.0)]);
}

#[test]
fn nothing_is_said_in_the_first_steps() {
    let mut history = Recent::default();
    let mut metrics = Metrics::new();
    metrics.insert("group/all_wrong", 1.0);
    for step in 0..10 {
        history.push(step, &metrics);
        assert!(advice(&history).is_empty(), "step {step}");
    }
    history.push(10, &metrics);
    let said = advice(&history);
    assert!(said[0].text.starts_with("100 % of the groups of 10 steps were without"), "{said:?}");
}

/// `ANYROLL_WRITE_DOCS=1 cargo test --release -p anyroll-pipelines the_page_of_advice` writes it.
#[test]
fn the_page_of_advice_has_the_rules() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/advice.md");
    if std::env::var_os("ANYROLL_WRITE_DOCS").is_some() {
        fs::write(&path, page()).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page(), "docs/reference/advice.md is stale: run this test with ANYROLL_WRITE_DOCS=1");
}
