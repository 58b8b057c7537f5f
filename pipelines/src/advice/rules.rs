//! The rules, with their thresholds and remedies.

use super::history::{Recent, mean};

/// Steps over which most rules take a mean.
const STEPS: usize = 10;

/// Steps of rules that look for a trend or for no change.
const MANY_STEPS: usize = 20;

/// A part of the run, empty for the whole, and what was observed of it.
pub type Observed = Vec<(String, String)>;

/// A rule of advice.
pub struct Rule {
    /// Name in `advice.jsonl`.
    pub name: &'static str,
    /// Condition, for the page.
    pub when: &'static str,
    /// Remedy.
    pub remedy: &'static str,
    /// Observations that satisfy the condition.
    pub observe: fn(&Recent) -> Observed,
}

/// All rules.
pub static RULES: [Rule; 10] = [
    Rule {
        name: "all_wrong",
        when: "mean of `group/all_wrong` over 10 steps is 0.95 or above",
        remedy: "look at `samples.jsonl` or pass `--show`; then give easier prompts or a `warmup`, correct the answer's \
                 form in the prompt, or give the reward partial scores",
        observe: |history| groups(history, "group/all_wrong", "without a right completion"),
    },
    Rule {
        name: "all_right",
        when: "mean of `group/all_right` over 10 steps is 0.95 or above",
        remedy: "give harder prompts, replace such groups with `selection.mixed_groups`, or end the run",
        observe: |history| groups(history, "group/all_right", "with right completions alone"),
    },
    Rule {
        name: "no_gradient",
        when: "mean of `group/mixed` over 20 steps is 0.1 or below, and neither of the two above holds",
        remedy: "raise `group_size` or `rollout.temperature`, or replace such groups with `selection.mixed_groups`",
        observe: no_gradient,
    },
    Rule {
        name: "cut",
        when: "mean of `response_length/clipped` over 10 steps is 0.5 or above",
        remedy: "raise `rollout.max_new_tokens`, set `rollout.stop`, or add a `length` term to the reward; a cut \
                 completion has seldom reached its answer",
        observe: |history| {
            let share = history.mean("response_length/clipped", STEPS).filter(|share| *share >= 0.5);
            whole(share.map(|share| {
                format!("{} of the completions of 10 steps were cut at the length limit", percent(share))
            }))
        },
    },
    Rule {
        name: "entropy",
        when: "mean of `entropy` over 10 steps is below a tenth of that of the first 10, while `group/all_right` is below \
               0.5",
        remedy: "lower the learning rate, raise `clip_high` of the loss or `rollout.temperature`, or add a KL term with \
                 `algorithm.kl_coef`; the completions of a prompt hardly differ any more",
        observe: entropy,
    },
    Rule {
        name: "kl",
        when: "mean over 10 steps of `kl/old` is 0.2 nats or above, or that of `kl/reference` 2 nats or above",
        remedy: "lower the learning rate or `max_grad_norm`, take fewer `epochs`, or raise `algorithm.kl_coef`",
        observe: kl,
    },
    Rule {
        name: "ratio",
        when: "median of `ratio/max` over 10 steps is 20 or above",
        remedy: "lower the learning rate, or take fewer `epochs` and `mini_batches`; with `rollout.async` lower `ahead`, \
                 or set `algorithm.rollout_correction`",
        observe: |history| {
            let mut ratios = history.last("ratio/max", STEPS).unwrap_or_default();
            ratios.sort_by(f64::total_cmp);
            let median = ratios.get(STEPS / 2).copied().filter(|median| *median >= 20.0);
            whole(median.map(|median| {
                format!(
                    "in half of 10 steps a token became {median:.0} times as likely as when it was sampled"
                )
            }))
        },
    },
    Rule {
        name: "falling",
        when: "the linear trend of `reward/mean` over 20 steps falls by 5 standard errors of its slope, and by a tenth of \
               its start or of `reward/std`",
        remedy: "lower the learning rate, and go on from a checkpoint before the fall; look at `samples.jsonl` for what \
                 has changed",
        observe: falling,
    },
    Rule {
        name: "apart",
        when: "mean of `rollout/logprob_diff_mean` over 10 steps is 0.05 nats or above",
        remedy: "in bf16 try `strategy.precision: fp16`; find the cause with `rollout.strict: true`; or set \
                 `algorithm.rollout_correction`; with `rollout.async` lower `ahead`",
        observe: |history| {
            let apart = history.mean("rollout/logprob_diff_mean", STEPS).filter(|apart| *apart >= 0.05);
            whole(apart.map(|apart| {
                format!("log-probs of sampling and training differ by {apart:.3} nats a token, over 10 steps")
            }))
        },
    },
    Rule {
        name: "constant_term",
        when: "`reward/TERM/mean` has the same value in 20 steps; of a reward with one term only if the value is neither 0 \
               nor 1",
        remedy: "look at its scores with `anyroll reward` on lines of `samples.jsonl`: a term that never varies teaches \
                 nothing",
        observe: constant_terms,
    },
];

/// Observation of the whole run.
fn whole(observed: Option<String>) -> Observed {
    observed.into_iter().map(|observed| (String::new(), observed)).collect()
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn groups(history: &Recent, metric: &str, which: &str) -> Observed {
    let share = history.mean(metric, STEPS).filter(|share| *share >= 0.95);
    whole(share.map(|share| {
        format!("{} of the groups of 10 steps were {which}, so that they teach nothing", percent(share))
    }))
}

fn no_gradient(history: &Recent) -> Observed {
    let is_told = ["group/all_wrong", "group/all_right"]
        .iter()
        .any(|metric| history.mean(metric, STEPS).is_some_and(|share| share >= 0.95));
    let mixed = history.mean("group/mixed", MANY_STEPS).filter(|mixed| *mixed <= 0.1 && !is_told);
    whole(mixed.map(|mixed| {
        format!("only {} of the groups of 20 steps had completions of different value", percent(mixed))
    }))
}

fn entropy(history: &Recent) -> Observed {
    let found = || {
        let (first, last) = (history.mean_at_start("entropy")?, history.mean("entropy", STEPS)?);
        let solved = history.mean("group/all_right", STEPS).is_some_and(|share| share >= 0.5);
        (last < 0.1 * first && !solved)
            .then(|| format!("the entropy fell from {first:.3} to {last:.3} nats a token"))
    };
    whole(found())
}

fn kl(history: &Recent) -> Observed {
    let over = |metric: &str, limit: f64, from: &str| {
        let kl = history.mean(metric, STEPS).filter(|kl| *kl >= limit)?;
        Some(format!("the policy is {kl:.2} nats a token from {from}, over 10 steps"))
    };
    let of_step = over("kl/old", 0.2, "the one that sampled the step");
    whole(of_step.or_else(|| over("kl/reference", 2.0, "the reference")))
}

/// Ordinary least squares over the step's number.
fn falling(history: &Recent) -> Observed {
    let found = || {
        let rewards = history.last("reward/mean", MANY_STEPS)?;
        let std = history.mean("reward/std", MANY_STEPS).unwrap_or(0.0);
        let n = MANY_STEPS as f64;
        let (middle, level) = ((n - 1.0) / 2.0, mean(&rewards));
        let at = |index: usize| index as f64 - middle;
        let spread: f64 = (0..MANY_STEPS).map(|index| at(index).powi(2)).sum();
        let slope =
            rewards.iter().enumerate().map(|(index, reward)| at(index) * reward).sum::<f64>() / spread;
        let left = rewards.iter().enumerate().map(|(index, reward)| reward - level - slope * at(index));
        let error = (left.map(|left| left.powi(2)).sum::<f64>() / (n - 2.0) / spread).sqrt();
        let (start, end) = (level - slope * middle, level + slope * middle);
        let is_clear = slope < -5.0 * error && start - end >= 0.1 * start.abs().max(std);
        is_clear.then(|| format!("the reward fell from {start:.3} to {end:.3} in 20 steps"))
    };
    whole(found())
}

fn constant_terms(history: &Recent) -> Observed {
    let term = |name: &str| Some(name.strip_prefix("reward/")?.strip_suffix("/mean")?.to_owned());
    let terms: Vec<String> = history.names().filter_map(term).collect();
    let is_alone = terms.len() == 1;
    let constant = |term: String| {
        let values = history.last(&format!("reward/{term}/mean"), MANY_STEPS)?;
        let value = values[0];
        let is_told = is_alone && [0.0, 1.0].contains(&value);
        (values.iter().all(|other| *other == value) && !is_told).then(|| {
            let observed = format!("the reward's term `{term}` was {value} on average in each of 20 steps");
            (term, observed)
        })
    };
    terms.into_iter().filter_map(constant).collect()
}

const HEAD: &str = "\
# Advice

While a run is in progress, it says once what goes wrong and how to mend it: on the terminal, in `advice.jsonl` of the run
folder, and in the report. Each advice comes once per run, also after a resume. The rules read [metrics](metrics.md) of
training steps and change nothing. Their thresholds are rules of thumb.

This page is generated from `pipelines/src/advice/rules.rs`.

| rule | condition | remedy |
|---|---|---|
";

/// `docs/reference/advice.md`.
pub fn page() -> String {
    let rows =
        RULES.iter().map(|Rule { name, when, remedy, .. }| format!("| `{name}` | {when} | {remedy} |\n"));
    HEAD.to_owned() + &rows.collect::<String>()
}

#[cfg(test)]
mod tests;
