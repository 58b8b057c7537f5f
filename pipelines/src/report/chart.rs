//! A chart as inline SVG, without a script.
//!
//! Hand-written, since `plotters` has fixed colours in the file. Here colours are classes, so that the page's style
//! sheet supports light and dark mode. The style sheet also shows the values of the step under the pointer
//! (`.hit:hover`).

use std::fmt::Write;

use super::axis::Axis;
use super::curve::{Point, envelope, thinned, trend};
use crate::format;

/// Style of a chart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
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
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Range {
    /// 0 to 1.
    Unit,
    /// 0 to the highest value, or from the lowest if that is negative.
    FromZero,
    /// The lowest to the highest value.
    Data,
}

/// One curve. Steps ascend; a value that is not finite is a gap.
#[derive(Debug, Clone)]
pub(super) struct Series<'a> {
    pub(super) label: &'a str,
    pub(super) points: Vec<Point>,
    /// Lowest and highest value at each point, which differ where a point is the mean of several steps.
    pub(super) extremes: Vec<Point>,
}

/// Horizontal axis.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    pub(super) first: f64,
    pub(super) last: f64,
    /// Steps per point.
    pub(super) width: u64,
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 548.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 204.0;

/// Approximate number of ticks on an axis.
const TICKS: usize = 6;

/// Numbers of intervals of the faint curve, points of the bold curve, and steps that react to the pointer.
const STRETCHES: usize = 250;
const POINTS: usize = 250;
const HITS: usize = 100;

/// Draws a chart over `steps`; `None` if there is nothing to draw.
pub(super) fn svg(name: &str, kind: Kind, range: Range, steps: Steps, series: &[Series]) -> Option<String> {
    let stacked = (kind == Kind::Stacked).then(|| stack(series));
    let drawn: &[Series] = stacked.as_deref().unwrap_or(series);
    let y = vertical_axis(range, drawn)?;
    let frame = (steps.last > steps.first).then(|| Frame {
        x: Axis::new(steps.first, steps.last, TICKS),
        y,
        width: steps.width,
    })?;

    let mut svg = String::new();
    let name = minijinja::HtmlEscape(name);
    add(
        &mut svg,
        format_args!(r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name} by step">"#),
    );
    frame.draw(&mut svg);
    match kind {
        Kind::Noisy => draw_noisy(&mut svg, &frame, drawn),
        Kind::Exact => draw_points(&mut svg, &frame, drawn, "line"),
        Kind::Marked => draw_marked(&mut svg, &frame, drawn),
        Kind::Stacked => draw_stacked(&mut svg, &frame, drawn),
    }
    draw_hits(&mut svg, &frame, series, kind != Kind::Stacked);
    svg.push_str("</svg>");
    Some(svg)
}

fn vertical_axis(range: Range, series: &[Series]) -> Option<Axis> {
    let values =
        || series.iter().flat_map(|series| &series.extremes).map(|point| point.1).filter(|v| v.is_finite());
    let low = values().reduce(f64::min)?;
    let high = values().reduce(f64::max)?;
    // A little room, so that no curve touches the edge.
    let room = (high - low) * 0.05;
    Some(match range {
        Range::Unit => Axis::new(low.min(0.0), high.max(1.0), TICKS),
        Range::FromZero if high == 0.0 && low == 0.0 => Axis::new(0.0, 1.0, TICKS),
        Range::FromZero if low >= 0.0 => Axis::new(0.0, high * 1.05, TICKS),
        Range::FromZero | Range::Data => Axis::new(low - room, high + room, TICKS),
    })
}

/// Trends, each added to the sum of those before it, at steps where all series have a value.
fn stack<'a>(series: &[Series<'a>]) -> Vec<Series<'a>> {
    let value_at =
        |series: &Series, step: f64| value_at(&series.points, step).filter(|value| value.is_finite());
    let steps = || series.first().into_iter().flat_map(|first| first.points.iter().map(|point| point.0));
    let whole: Vec<f64> =
        steps().filter(|&step| series.iter().all(|s| value_at(s, step).is_some())).collect();
    let mut below = vec![0.0; whole.len().min(POINTS)];
    let upon = |one: &Series<'a>| {
        let parts: Vec<Point> =
            whole.iter().map(|&step| (step, value_at(one, step).unwrap_or(0.0))).collect();
        let add = |(below, part): (&mut f64, Point)| {
            *below += part.1;
            (part.0, *below)
        };
        let points: Vec<Point> = below.iter_mut().zip(trend(&parts, POINTS)).map(add).collect();
        Series { label: one.label, extremes: points.clone(), points }
    };
    series.iter().map(upon).collect()
}

/// Transformation from steps and values to coordinates.
struct Frame {
    x: Axis,
    y: Axis,
    /// Steps per point.
    width: u64,
}

impl Frame {
    fn x(&self, step: f64) -> f64 {
        LEFT + self.x.fraction(step) * (RIGHT - LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        BOTTOM - self.y.fraction(value) * (BOTTOM - TOP)
    }

    /// Names the steps of the point at `step`.
    fn steps_at(&self, step: f64) -> String {
        match self.width {
            1 => format!("step {step}"),
            width => format!("mean of steps {step} to {}", step + (width - 1) as f64),
        }
    }

    fn draw(&self, svg: &mut String) {
        for (value, label) in self.y.ticks() {
            let (x, y) = (LEFT - 7.0, self.y(value));
            let class = if value == 0.0 { "axis" } else { "grid" };
            add(svg, format_args!(r#"<path class="{class}" d="M{LEFT} {y:.1}H{RIGHT}"/>"#));
            let y = y + 4.0;
            add(svg, format_args!(r#"<text class="tick end" x="{x}" y="{y:.1}">{label}</text>"#));
        }
        let (x, y) = (LEFT - 16.0, BOTTOM + 17.0);
        add(svg, format_args!(r#"<text class="tick end" x="{x}" y="{y}">step</text>"#));
        for (step, label) in self.x.ticks() {
            let x = self.x(step);
            add(svg, format_args!(r#"<text class="tick middle" x="{x:.1}" y="{y}">{label}</text>"#));
        }
    }

    /// The points as the data of a path, which starts a new segment after a gap.
    fn path(&self, points: &[Point]) -> String {
        let mut path = String::with_capacity(points.len() * 12);
        let mut command = 'M';
        for &(step, value) in points {
            if value.is_finite() {
                add(&mut path, format_args!("{command}{:.1} {:.1}", self.x(step), self.y(value)));
                command = 'L';
            } else {
                command = 'M';
            }
        }
        path
    }
}

fn draw_noisy(svg: &mut String, frame: &Frame, series: &[Series]) {
    draw_points(svg, frame, series, "raw");
    for (index, Series { points, .. }) in series.iter().enumerate() {
        let path = frame.path(&trend(points, POINTS));
        add(svg, format_args!(r#"<path class="line s{index}" d="{path}"/>"#));
    }
}

fn draw_points(svg: &mut String, frame: &Frame, series: &[Series], class: &str) {
    for (index, Series { extremes, .. }) in series.iter().enumerate() {
        let path = frame.path(&envelope(extremes, STRETCHES));
        add(svg, format_args!(r#"<path class="{class} s{index}" d="{path}"/>"#));
    }
}

fn draw_marked(svg: &mut String, frame: &Frame, series: &[Series]) {
    for (index, Series { points, .. }) in series.iter().enumerate() {
        let points = thinned(points, POINTS);
        add(svg, format_args!(r#"<path class="line s{index}" d="{}"/>"#, frame.path(&points)));
        for (step, value) in points.into_iter().filter(|point| point.1.is_finite()) {
            let (x, y) = (frame.x(step), frame.y(value));
            add(svg, format_args!(r#"<circle class="dot s{index}" cx="{x:.1}" cy="{y:.1}" r="3"/>"#));
        }
    }
}

fn draw_stacked(svg: &mut String, frame: &Frame, series: &[Series]) {
    let mut below: Vec<Point> = series[0].points.iter().map(|point| (point.0, 0.0)).collect();
    for (index, Series { points: above, .. }) in series.iter().enumerate() {
        below.reverse();
        let back = frame.path(&below).replacen('M', "L", 1);
        let forth = frame.path(above);
        add(svg, format_args!(r#"<path class="area s{index}" d="{forth}{back}Z"/>"#));
        add(svg, format_args!(r#"<path class="edge s{index}" d="{forth}"/>"#));
        below.clone_from(above);
    }
}

/// Invisible columns, each of which shows the values of its step while the pointer is in it.
fn draw_hits(svg: &mut String, frame: &Frame, series: &[Series], with_dots: bool) {
    let Some(longest) = series.iter().max_by_key(|series| series.points.len()) else { return };
    let steps: Vec<f64> = thinned(&longest.points, HITS).iter().map(|point| point.0).collect();
    for (position, &step) in steps.iter().enumerate() {
        let middle = |other: Option<&f64>| other.map(|&other| frame.x((step + other) / 2.0));
        let left = middle(position.checked_sub(1).and_then(|before| steps.get(before))).unwrap_or(LEFT);
        let right = middle(steps.get(position + 1)).unwrap_or(RIGHT);
        let (x, width, height) = (frame.x(step), right - left, BOTTOM - TOP);
        add(
            svg,
            format_args!(
                r#"<g class="hit"><rect x="{left:.1}" y="{TOP}" width="{width:.1}" height="{height}"/>"#
            ),
        );
        add(svg, format_args!(r#"<path class="cursor" d="M{x:.1} {TOP}V{BOTTOM}"/>"#));
        let values =
            || series.iter().enumerate().filter_map(|(i, s)| Some((i, s.label, value_at(&s.points, step)?)));
        for (index, _, value) in values().filter(|(_, _, value)| with_dots && value.is_finite()) {
            let y = frame.y(value);
            add(svg, format_args!(r#"<circle class="dot s{index}" cx="{x:.1}" cy="{y:.1}" r="3.5"/>"#));
        }
        add(svg, format_args!(r#"<text class="readout end" x="{RIGHT}" y="13">{}"#, frame.steps_at(step)));
        for (index, label, value) in values() {
            let value = format::number(value);
            add(svg, format_args!(r#"<tspan class="s{index}" dx="10">{label}</tspan> {value}"#));
        }
        svg.push_str("</text></g>");
    }
}

/// The value at exactly `step`.
fn value_at(points: &[Point], step: f64) -> Option<f64> {
    let index = points.binary_search_by(|point| point.0.total_cmp(&step)).ok()?;
    Some(points[index].1)
}

fn add(text: &mut String, what: std::fmt::Arguments) {
    text.write_fmt(what).expect("a string takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(label: &'static str, points: &[Point]) -> Series<'static> {
        Series { label, points: points.to_vec(), extremes: points.to_vec() }
    }

    fn steps(last: f64) -> Steps {
        Steps { first: 0.0, last, width: 1 }
    }

    #[test]
    fn nothing_to_draw_is_no_chart() {
        let draw =
            |last, points: &[Point]| svg("x", Kind::Noisy, Range::Data, steps(last), &[series("a", points)]);
        assert_eq!(draw(10.0, &[]), None);
        assert_eq!(draw(10.0, &[(0.0, f64::NAN)]), None);
        assert_eq!(draw(0.0, &[(0.0, 1.0)]), None);
    }

    #[test]
    fn a_point_is_where_its_step_and_value_say() {
        let points = [(0.0, 0.0), (100.0, 1.0)];
        let svg = svg("x", Kind::Marked, Range::Unit, steps(100.0), &[series("greedy", &points)]).unwrap();
        let path = format!(r#"d="M{LEFT:.1} {BOTTOM:.1}L{RIGHT:.1} {TOP:.1}""#);
        assert!(svg.contains(&path), "{svg}");
        assert!(svg.contains(r#"step 100<tspan class="s0" dx="10">greedy</tspan> 1</text>"#), "{svg}");
    }

    #[test]
    fn a_gap_breaks_the_curve() {
        let frame = Frame { x: Axis::new(0.0, 3.0, 5), y: Axis::new(0.0, 1.0, 5), width: 1 };
        let path = frame.path(&[(0.0, 0.0), (1.0, 0.0), (2.0, f64::INFINITY), (3.0, 1.0)]);
        assert_eq!(path.matches('M').count(), 2);
        assert_eq!(path.matches('L').count(), 1);
    }

    #[test]
    fn areas_stand_upon_each_other_where_all_are_known() {
        let low = series("low", &[(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)]);
        let high = series("high", &[(0.0, 2.0), (2.0, 2.0)]);
        let stacked = stack(&[low, high]);
        assert_eq!(stacked[0].points, [(0.0, 1.0), (2.0, 1.0)]);
        assert_eq!(stacked[1].points, [(0.0, 3.0), (2.0, 3.0)]);
    }
}
