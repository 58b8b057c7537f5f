//! Curves of the report.

use minijinja::value::Value;
use serde::Serialize;

use super::chart::{self, Kind, Range, Series, Steps};
use crate::headline::of_several;
use crate::metrics::{History, declared};

/// A chart, drawn if its metrics exist.
struct Plan {
    title: &'static str,
    kind: Kind,
    range: Range,
    /// Metrics are divided by this to get the unit in the title.
    unit: f64,
    /// Metrics and their labels; at most four, as the style sheet has four colours.
    series: &'static [(&'static str, &'static str)],
}

/// Placeholder for the metric that [`of_several`] finds, whose name contains a number.
const OF_SEVERAL: (&str, &str) = ("", "");

const PLANS: [Plan; 24] = [
    Plan {
        title: "Reward",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("reward/mean", "reward")],
    },
    Plan {
        title: "Held-out accuracy",
        kind: Kind::Marked,
        range: Range::Unit,
        unit: 1.0,
        series: &[("eval/greedy", "greedy"), ("eval/pass@1", "pass@1"), OF_SEVERAL],
    },
    Plan {
        title: "Held-out reward",
        kind: Kind::Marked,
        range: Range::Data,
        unit: 1.0,
        series: &[("eval/reward", "reward"), ("eval/brightness", "brightness")],
    },
    Plan {
        title: "Held-out loss",
        kind: Kind::Marked,
        range: Range::FromZero,
        unit: 1.0,
        series: &[
            ("eval/loss", "loss"),
            ("eval/nll", "answers, per token"),
            ("eval/divergence", "from the teacher, per token"),
        ],
    },
    Plan {
        title: "Held-out answers",
        kind: Kind::Marked,
        range: Range::Unit,
        unit: 1.0,
        series: &[("eval/exact", "exact"), ("eval/accuracy", "pairs"), ("eval/step_accuracy", "steps")],
    },
    Plan {
        title: "Training loss",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        series: &[("loss", "loss"), ("loss/nll", "answers, per token")],
    },
    Plan {
        title: "Better and worse answers",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        series: &[("reward/chosen", "better"), ("reward/rejected", "worse"), ("reward/margin", "margin")],
    },
    Plan {
        title: "Drift",
        kind: Kind::Marked,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("eval/drift", "drift")],
    },
    Plan {
        title: "KL divergence",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("kl/old", "to sampling policy"), ("kl/reference", "to reference")],
    },
    Plan {
        title: "Entropy",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("entropy", "entropy")],
    },
    Plan {
        title: "Groups",
        kind: Kind::Stacked,
        range: Range::Unit,
        unit: 1.0,
        series: &[
            ("group/all_right", "all right"),
            ("group/mixed", "mixed"),
            ("group/all_wrong", "all wrong"),
        ],
    },
    Plan {
        title: "Response length",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[
            ("response_length/mean", "mean"),
            ("response_length/max", "longest"),
            ("response_length/min", "shortest"),
        ],
    },
    Plan {
        title: "Turns",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("turns/mean", "mean"), ("turns/max", "most"), ("turns/min", "fewest")],
    },
    Plan {
        title: "Gradient norm",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("grad_norm", "norm")],
    },
    Plan {
        title: "Clip fraction",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("clip_fraction/low", "below"), ("clip_fraction/high", "above")],
    },
    Plan {
        title: "Loss",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        series: &[("loss/policy", "policy"), ("loss/kl", "kl")],
    },
    Plan {
        title: "Rollout against training",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("rollout/logprob_diff_mean", "mean"), ("rollout/logprob_diff_max", "largest")],
    },
    Plan {
        title: "Staleness",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("staleness/mean", "mean"), ("staleness/max", "largest")],
    },
    Plan {
        title: "Step time in seconds",
        kind: Kind::Stacked,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("time/train_s", "train"), ("time/generate_s", "generate"), ("time/reward_s", "reward")],
    },
    Plan {
        title: "Tokens per second",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("perf/tokens_per_s", "tokens/s")],
    },
    Plan {
        title: "Images per second",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("perf/images_per_s", "images/s")],
    },
    Plan {
        title: "Learning rate",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("learning_rate", "rate")],
    },
    Plan {
        title: "Device memory in MiB",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1_048_576.0,
        series: &[("perf/allocated_bytes", "training"), ("perf/generate_allocated_bytes", "generating")],
    },
    Plan {
        title: "Warm-up loss",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("warmup/loss", "loss")],
    },
];

/// A chart with its title and note.
#[derive(Serialize)]
pub(super) struct Figure<'a> {
    title: &'static str,
    /// The sentences of its metrics.
    note: String,
    legend: Vec<&'a str>,
    svg: Value,
}

/// The charts whose metrics were logged, all over the same steps.
pub(super) fn figures(history: &History) -> Vec<Figure<'_>> {
    let Some((first, last)) = history.steps() else { return Vec::new() };
    let steps = Steps { first: first as f64, last: last as f64, width: history.width() };
    PLANS.iter().filter_map(|plan| figure(plan, history, steps)).collect()
}

fn figure<'a>(plan: &Plan, history: &'a History, steps: Steps) -> Option<Figure<'a>> {
    // A single point is not a curve, except for an evaluation, which has a mark.
    let least = if plan.kind == Kind::Marked { 1 } else { 2 };
    let mut sentences = Vec::new();
    let in_unit = |(step, value): (f64, f64)| (step, value / plan.unit);
    let series = |planned: &(&'static str, &'static str)| {
        let (metric, label) = match *planned {
            OF_SEVERAL => of_several(history.names()).map(|(name, metric)| (metric, name))?,
            named => named,
        };
        let curve = history.get(metric).filter(|curve| curve.point_count() >= least)?;
        sentences.extend(declared(metric).map(|metric| metric.sentence));
        let points = curve.means(steps.width).map(in_unit).collect();
        let extremes = curve.extremes(steps.width).map(in_unit).collect();
        Some(Series { label, points, extremes })
    };
    let series: Vec<Series> = plan.series.iter().filter_map(series).collect();
    let svg = chart::svg(plan.title, plan.kind, plan.range, steps, &series)?;
    let legend = series.iter().map(|series| series.label).collect();
    Some(Figure { title: plan.title, note: sentences.join(" "), legend, svg: Value::from_safe_string(svg) })
}
