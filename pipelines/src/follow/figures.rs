//! Curves of the page, which draws those whose metrics were logged.

use serde::Serialize;

/// A chart, drawn if its metrics exist.
#[derive(Debug, Serialize)]
pub struct FigurePlan {
    title: &'static str,
    kind: Kind,
    range: Range,
    /// Metrics are divided by this to get the unit in the title.
    unit: f64,
    /// Least number of curves of a run: a single term is the reward itself.
    least: usize,
    /// Metrics and their labels. A part in braces stands for a name of the run's own, and is the same in both. Metrics
    /// of `warmup/` are drawn over the steps of the warm-up.
    series: &'static [(&'static str, &'static str)],
}

/// Style of a chart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// One point per step: faint points with their trend.
    Noisy,
    /// One point per step, without noise.
    Exact,
    /// A few marked points, connected by lines.
    Marked,
    /// Parts of a whole per step, as stacked areas of their trends.
    Stacked,
}

/// Limits of the vertical axis.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Range {
    /// 0 to 1.
    Unit,
    /// 0 to the highest value, or from the lowest if that is negative.
    FromZero,
    /// The lowest to the highest value.
    Data,
}

/// All charts, in the order of the page.
pub const FIGURES: [FigurePlan; 33] = [
    FigurePlan {
        title: "Reward",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("reward/mean", "reward")],
    },
    FigurePlan {
        title: "Reward terms",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 2,
        series: &[("reward/{term}/mean", "{term}")],
    },
    FigurePlan {
        title: "Logged by reward functions",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        least: 1,
        series: &[("logged/{term}/{metric}", "{term} {metric}")],
    },
    FigurePlan {
        title: "Held-out accuracy",
        kind: Kind::Marked,
        range: Range::Unit,
        unit: 1.0,
        least: 1,
        series: &[("eval/greedy", "greedy"), ("eval/pass@{k}", "pass@{k}")],
    },
    FigurePlan {
        title: "Held-out accuracy by domain",
        kind: Kind::Marked,
        range: Range::Unit,
        unit: 1.0,
        least: 1,
        series: &[("eval/{domain}/pass@1", "{domain}")],
    },
    FigurePlan {
        title: "Held-out reward",
        kind: Kind::Marked,
        range: Range::Data,
        unit: 1.0,
        least: 1,
        series: &[("eval/reward", "reward"), ("eval/brightness", "brightness")],
    },
    FigurePlan {
        title: "Logged on held-out prompts",
        kind: Kind::Marked,
        range: Range::Data,
        unit: 1.0,
        least: 1,
        series: &[("eval/logged/{term}/{metric}", "{term} {metric}")],
    },
    FigurePlan {
        title: "Held-out loss",
        kind: Kind::Marked,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[
            ("eval/loss", "loss"),
            ("eval/nll", "answers, per token"),
            ("eval/divergence", "from the teacher, per token"),
        ],
    },
    FigurePlan {
        title: "Held-out answers",
        kind: Kind::Marked,
        range: Range::Unit,
        unit: 1.0,
        least: 1,
        series: &[("eval/exact", "exact"), ("eval/accuracy", "pairs"), ("eval/step_accuracy", "steps")],
    },
    FigurePlan {
        title: "Training loss",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        least: 1,
        series: &[("loss", "loss"), ("loss/nll", "answers, per token")],
    },
    FigurePlan {
        title: "Better and worse answers",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        least: 1,
        series: &[("reward/chosen", "better"), ("reward/rejected", "worse"), ("reward/margin", "margin")],
    },
    FigurePlan {
        title: "Drift",
        kind: Kind::Marked,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("eval/drift", "drift")],
    },
    FigurePlan {
        title: "KL divergence",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("kl/old", "to sampling policy"), ("kl/reference", "to reference")],
    },
    FigurePlan {
        title: "Entropy",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("entropy", "entropy")],
    },
    FigurePlan {
        title: "Groups",
        kind: Kind::Stacked,
        range: Range::Unit,
        unit: 1.0,
        least: 1,
        series: &[
            ("group/all_right", "all right"),
            ("group/mixed", "mixed"),
            ("group/all_wrong", "all wrong"),
        ],
    },
    FigurePlan {
        title: "Response length",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[
            ("response_length/mean", "mean"),
            ("response_length/max", "longest"),
            ("response_length/min", "shortest"),
        ],
    },
    FigurePlan {
        title: "Turns",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("turns/mean", "mean"), ("turns/max", "most"), ("turns/min", "fewest")],
    },
    FigurePlan {
        title: "Gradient norm",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("grad_norm", "norm")],
    },
    FigurePlan {
        title: "Clip fraction",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("clip_fraction/low", "below"), ("clip_fraction/high", "above")],
    },
    FigurePlan {
        title: "Loss",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        least: 1,
        series: &[("loss/policy", "policy"), ("loss/kl", "kl")],
    },
    FigurePlan {
        title: "Rollout against training",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("rollout/logprob_diff_mean", "mean"), ("rollout/logprob_diff_max", "largest")],
    },
    FigurePlan {
        title: "Staleness",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("staleness/mean", "mean"), ("staleness/max", "largest")],
    },
    FigurePlan {
        title: "Step time in seconds",
        kind: Kind::Stacked,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("time/train_s", "train"), ("time/generate_s", "generate"), ("time/reward_s", "reward")],
    },
    FigurePlan {
        title: "Tokens per second",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("perf/tokens_per_s", "tokens/s")],
    },
    FigurePlan {
        title: "Images per second",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("perf/images_per_s", "images/s")],
    },
    FigurePlan {
        title: "Learning rate",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("learning_rate", "rate")],
    },
    FigurePlan {
        title: "Learning rate of the critic",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("critic/learning_rate", "rate")],
    },
    FigurePlan {
        title: "Critic",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        least: 1,
        series: &[("critic/vf_loss", "loss"), ("critic/vf_explained_var", "explained variance")],
    },
    FigurePlan {
        title: "Device memory in MiB",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1_048_576.0,
        least: 1,
        series: &[
            ("perf/allocated_bytes", "training"),
            ("perf/generate_allocated_bytes", "generating"),
            ("perf/device_used_bytes", "in use, all processes"),
        ],
    },
    FigurePlan {
        title: "Device utilization",
        kind: Kind::Noisy,
        range: Range::Unit,
        unit: 1.0,
        least: 1,
        series: &[("perf/device_utilization", "share of the time")],
    },
    FigurePlan {
        title: "Memory of a process in MiB",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1_048_576.0,
        least: 1,
        series: &[("perf/resident_bytes", "resident")],
    },
    FigurePlan {
        title: "Warm-up loss",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("warmup/loss", "loss")],
    },
    FigurePlan {
        title: "Learning rate of the warm-up",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1.0,
        least: 1,
        series: &[("warmup/learning_rate", "rate")],
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::DECLARED;

    #[test]
    fn every_curve_is_a_declared_metric() {
        for (metric, _) in FIGURES.iter().flat_map(|figure| figure.series) {
            assert!(DECLARED.iter().any(|it| it.name == *metric), "{metric} is not declared");
        }
    }
}
