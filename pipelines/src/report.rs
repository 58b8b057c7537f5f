//! `report.html`: a run's results on one page that opens from the disk.
//!
//! The page is one file without scripts, and its content security policy forbids it to fetch anything. All
//! external text (completions may hold HTML) is escaped by the template engine.
//!
//! Read `report/page.html` for the page, then `report/figures.rs` for its curves, then `report/chart.rs`.

mod axis;
mod chart;
mod curve;
mod figures;
mod gallery;
mod sample_table;
mod training_table;

use std::fs;

use minijinja::Environment;
use minijinja::value::{Serde, Value};
use serde::Serialize;

use crate::advice::{Advice, read_advice};
use crate::atomic_file::write_atomic;
use crate::format;
use crate::headline::{Comparison, Headline, LOSS, TRAINING_LOSS};
use crate::metrics::History;
use crate::output_error::{OutputError, Result};
use crate::run_dir::RunDir;
use crate::samples::{Ends, read_ends};
use figures::Figure;
use gallery::Shot;
use sample_table::SampleTable;
use training_table::TrainingTable;

const TEMPLATE: &str = include_str!("report/page.html");
const STYLE: &str = include_str!("report/style.css");

/// Facts on the page that no log contains.
#[derive(Debug, Clone, Copy)]
pub struct ReportInfo<'a> {
    /// The title: the name of the run.
    pub name: &'a str,
    /// One line below it, as in "GRPO on sort-6, 104k parameters, cpu, world size 1, seed 0".
    pub description: &'a str,
    /// Total number of steps, which shows whether the run is finished.
    pub steps: u64,
}

/// Writes `report.html` of a run from its `metrics.jsonl`, `samples.jsonl`, pictures and `resolved.yaml`,
/// replacing an existing one. Curves of missing metrics are left out.
///
/// # Errors
/// If one of the files cannot be read, or the page cannot be written.
pub fn write_report(run: &RunDir, info: &ReportInfo) -> Result<()> {
    let history = History::read(&run.metrics())?;
    let samples = read_ends(&run.samples(), training_table::STEPS)?;
    let gallery = gallery::gallery(run)?;
    let resolved = run.resolved();
    let config =
        fs::read_to_string(&resolved).map_err(|source| OutputError::io("read", &resolved, source))?;
    let advice = read_advice(&run.advice())?;
    let page = page(info, (&history, &advice), gallery, samples, &config);
    write_atomic(&run.report(), page.as_bytes())
}

/// Values of the template.
#[derive(Serialize)]
struct Page<'a> {
    style: Value,
    name: &'a str,
    description: &'a str,
    status: String,
    finished: bool,
    tiles: Vec<Tile>,
    figures: Vec<Figure<'a>>,
    gallery: Vec<Shot>,
    samples: Option<SampleTable<'a>>,
    training: Option<TrainingTable>,
    advice: &'a [Advice],
    config: &'a str,
}

/// A number with its name and its change.
#[derive(Serialize)]
struct Tile {
    name: String,
    value: String,
    change: Option<String>,
    direction: &'static str,
    detail: String,
}

fn page(
    info: &ReportInfo,
    (history, advice): (&History, &[Advice]),
    gallery: Vec<Shot>,
    samples: Ends,
    config: &str,
) -> String {
    let headline = Headline::new(history);
    let finished = headline.step >= info.steps;
    let page = Page {
        style: Value::from_safe_string(STYLE.to_owned()),
        name: info.name,
        description: info.description,
        status: if finished {
            "finished".into()
        } else {
            format!("step {} of {}", headline.step, info.steps)
        },
        finished,
        tiles: tiles(&headline),
        figures: figures::figures(history),
        gallery,
        samples: SampleTable::new(&samples.evaluated),
        training: TrainingTable::new(&samples.training),
        advice,
        config,
    };
    let mut environment = Environment::new();
    // The extension `.html` turns on HTML escaping.
    environment.add_template("page.html", TEMPLATE).expect("the template is well formed");
    let template = environment.get_template("page.html").expect("it was just added");
    template.render(Serde(page)).expect("the template names only fields of the page")
}

fn tiles(headline: &Headline) -> Vec<Tile> {
    let plain =
        |name: &str, value, detail| Tile { name: name.into(), value, change: None, direction: "", detail };
    let time = headline
        .time_s
        .map(|time_s| plain("time", format::duration(time_s), format!("for {} steps", headline.step)));
    let speed =
        headline.speed.map(|(speed, unit)| plain(unit, format::count(speed), "while training".into()));
    let comparisons = headline.comparisons.iter().filter_map(comparison_tile);
    comparisons.chain(time).chain(speed).collect()
}

fn comparison_tile(&Comparison { name, before, after, steps }: &Comparison) -> Option<Tile> {
    let before = before?;
    let less_is_better = [LOSS, TRAINING_LOSS].contains(&name);
    let name = steps.map_or_else(|| name.to_owned(), |steps| format!("{name}, {steps}-step mean"));
    let tile = |value, change, direction, detail| {
        Some(Tile { name, value: format::score(value), change, direction, detail })
    };
    let Some(after) = after else { return tile(before, None, "", "before training".into()) };
    let change = after - before;
    let direction = if (change >= 0.0) != less_is_better { "up" } else { "down" };
    tile(after, Some(format!("{change:+.3}")), direction, format!("from {}", format::score(before)))
}

#[cfg(test)]
mod tests;
