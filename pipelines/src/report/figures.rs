//! Curves of the report.

use std::collections::HashMap;

use minijinja::value::Value;
use serde::Serialize;

use super::chart::{self, Kind, Range, Series};
use super::curve::Point;
use crate::headline::of_several;
use crate::metrics::Record;

/// A chart, drawn if its metrics exist.
struct Plan {
    title: &'static str,
    note: &'static str,
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
        note: "Mean over the samples of each step, with its trend.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("reward/mean", "reward")],
    },
    Plan {
        title: "Held-out accuracy",
        note: "Fraction of right answers on prompts that are never trained on.",
        kind: Kind::Marked,
        range: Range::Unit,
        unit: 1.0,
        series: &[("eval/greedy", "greedy"), ("eval/pass@1", "pass@1"), OF_SEVERAL],
    },
    Plan {
        title: "Held-out reward",
        note: "The verifiable reward of images from noise that is never trained on.",
        kind: Kind::Marked,
        range: Range::Data,
        unit: 1.0,
        series: &[("eval/reward", "reward"), ("eval/brightness", "brightness")],
    },
    Plan {
        title: "Held-out loss",
        note: "The training loss on held-out records, and its part for the answers' likelihood.",
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
        note: "Fraction of greedy completions that equal the answer, and of pairs whose better answer has the higher reward.",
        kind: Kind::Marked,
        range: Range::Unit,
        unit: 1.0,
        series: &[("eval/exact", "exact"), ("eval/accuracy", "pairs")],
    },
    Plan {
        title: "Training loss",
        note: "Mean over the records of each step, with its trend.",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        series: &[("loss", "loss"), ("loss/nll", "answers, per token")],
    },
    Plan {
        title: "Better and worse answers",
        note: "Implicit rewards of the objective. Their level means little; the margin should rise.",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        series: &[("reward/chosen", "better"), ("reward/rejected", "worse"), ("reward/margin", "margin")],
    },
    Plan {
        title: "Drift",
        note: "Squared distance of pixels from the policy's images of the same noise before training.",
        kind: Kind::Marked,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("eval/drift", "drift")],
    },
    Plan {
        title: "KL divergence",
        note: "Divergence from the policy that sampled, and from the reference.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("kl/old", "to sampling policy"), ("kl/reference", "to reference")],
    },
    Plan {
        title: "Entropy",
        note: "Entropy of the policy per token, in nats. Near zero, samples no longer differ.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("entropy", "entropy")],
    },
    Plan {
        title: "Groups",
        note: "Groups by their rewards. Only mixed groups have a gradient.",
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
        note: "Tokens per sample.",
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
        note: "Turns per episode.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("turns/mean", "mean"), ("turns/max", "most"), ("turns/min", "fewest")],
    },
    Plan {
        title: "Gradient norm",
        note: "Norm before clipping.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("grad_norm", "norm")],
    },
    Plan {
        title: "Clip fraction",
        note: "Fraction of tokens whose ratio left the trust region below or above.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("clip_fraction/low", "below"), ("clip_fraction/high", "above")],
    },
    Plan {
        title: "Loss",
        note: "The minimized loss. Its level means little; jumps are a warning.",
        kind: Kind::Noisy,
        range: Range::Data,
        unit: 1.0,
        series: &[("loss/policy", "policy"), ("loss/kl", "kl")],
    },
    Plan {
        title: "Rollout against training",
        note: "Difference of a token's log-probability between the two forward passes.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("rollout/logprob_diff_mean", "mean"), ("rollout/logprob_diff_max", "largest")],
    },
    Plan {
        title: "Staleness",
        note: "Steps from the policy that sampled a token to the one that it trains, with asynchronous rollout.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("staleness/mean", "mean"), ("staleness/max", "largest")],
    },
    Plan {
        title: "Step time in seconds",
        note: "Stacked trends of the parts.",
        kind: Kind::Stacked,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("time/train_s", "train"), ("time/generate_s", "generate"), ("time/reward_s", "reward")],
    },
    Plan {
        title: "Tokens per second",
        note: "Generated or trained tokens, over the time of the whole step.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("perf/tokens_per_s", "tokens/s")],
    },
    Plan {
        title: "Images per second",
        note: "Sampled images over the time of the whole step.",
        kind: Kind::Noisy,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("perf/images_per_s", "images/s")],
    },
    Plan {
        title: "Learning rate",
        note: "After warm-up and decay.",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1.0,
        series: &[("learning_rate", "rate")],
    },
    Plan {
        title: "Device memory in MiB",
        note: "Allocated before a step's end, and while it generates; without activations and KV cache.",
        kind: Kind::Exact,
        range: Range::FromZero,
        unit: 1_048_576.0,
        series: &[("perf/allocated_bytes", "training"), ("perf/generate_allocated_bytes", "generating")],
    },
    Plan {
        title: "Warm-up loss",
        note: "Loss of the supervised steps on gold answers, before the first reward.",
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
    note: &'static str,
    legend: Vec<&'a str>,
    svg: Value,
}

/// The charts whose metrics are in `records`, all over the same steps.
pub(super) fn figures(records: &[Record]) -> Vec<Figure<'_>> {
    let steps = || records.iter().map(|record| record.step as f64);
    let steps = (steps().fold(f64::INFINITY, f64::min), steps().fold(0.0, f64::max));
    let curves = curves(records);
    PLANS.iter().filter_map(|plan| figure(plan, &curves, steps)).collect()
}

/// Curves of all metrics, collected in one pass over the records. A lookup per metric would take several
/// times as long in a run of ten thousand steps.
fn curves(records: &[Record]) -> HashMap<&str, Vec<Point>> {
    let mut curves: HashMap<&str, Vec<Point>> = HashMap::new();
    for record in records {
        for (metric, value) in record.metrics.iter() {
            curves.entry(metric).or_default().push((record.step as f64, value));
        }
    }
    curves
}

fn figure<'a>(plan: &Plan, curves: &HashMap<&'a str, Vec<Point>>, steps: (f64, f64)) -> Option<Figure<'a>> {
    // A single point is not a curve, except for an evaluation, which has a mark.
    let least = if plan.kind == Kind::Marked { 1 } else { 2 };
    let series = |planned: &(&'static str, &'static str)| {
        let (metric, label) = match *planned {
            OF_SEVERAL => of_several(curves.keys().copied()).map(|(name, metric)| (metric, name))?,
            named => named,
        };
        let curve = curves.get(metric).filter(|curve| curve.len() >= least)?;
        let points = curve.iter().map(|&(step, value)| (step, value / plan.unit)).collect();
        Some(Series { label, points })
    };
    let series: Vec<Series> = plan.series.iter().filter_map(series).collect();
    let svg = chart::svg(plan.title, plan.kind, plan.range, steps, &series)?;
    let legend = series.iter().map(|series| series.label).collect();
    Some(Figure { title: plan.title, note: plan.note, legend, svg: Value::from_safe_string(svg) })
}
