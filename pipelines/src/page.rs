//! The page of runs: one HTML file with its scripts, its style and the runs' data in it.
//!
//! The report is the page with data that do not change ([`Page::Frozen`]); `anyroll watch` serves the page without
//! data, which then come as events ([`Page::Live`]). The content security policy allows the page's own scripts alone,
//! by a nonce, and forbids it to load anything else. Texts of a run reach the page as JSON, and the scripts show them
//! as text.
//!
//! Read `page/page.html`, then `page/main.js`; `page/charts.js` draws with uPlot, which `page/uplot` has as published.

use std::hash::{BuildHasher, Hasher, RandomState};

use minijinja::Environment;
use minijinja::value::{Serde, Value};
use serde::Serialize;

use crate::follow::{FIGURES, FigurePlan, Head, Update};

const TEMPLATE: &str = include_str!("page/page.html");
const STYLES: [&str; 2] = [include_str!("page/uplot/uPlot.min.css"), include_str!("page/style.css")];
const CHARTS: &str = include_str!("page/uplot/uPlot.iife.min.js");
const CHARTS_LICENSE: &str = include_str!("page/uplot/LICENSE");
const SCRIPTS: [&str; 6] = [
    include_str!("page/texts.js"),
    include_str!("page/runs.js"),
    include_str!("page/trend.js"),
    include_str!("page/charts.js"),
    include_str!("page/tables.js"),
    include_str!("page/main.js"),
];

/// Content of the page.
#[derive(Debug)]
pub enum Page<'a> {
    /// A run as it is now.
    Frozen(&'a Update<'a>),
    /// Runs whose updates come as events.
    Live,
}

/// Data of the scripts.
#[derive(Serialize)]
struct Data<'a> {
    live: bool,
    figures: &'static [FigurePlan],
    updates: &'a [&'a Update<'a>],
}

#[derive(Serialize)]
struct Values<'a> {
    nonce: String,
    live: bool,
    style: Value,
    charts: Value,
    script: Value,
    data: Value,
    head: Option<&'a Head<'a>>,
    title: &'a str,
}

impl Page<'_> {
    /// The page as HTML.
    pub fn html(&self) -> String {
        let update = match self {
            Page::Frozen(update) => Some(*update),
            Page::Live => None,
        };
        let updates: Vec<&Update> = update.into_iter().collect();
        let data = Data { live: updates.is_empty(), figures: &FIGURES, updates: &updates };
        let values = Values {
            nonce: nonce(),
            live: updates.is_empty(),
            style: Value::from_safe_string(STYLES.concat()),
            charts: Value::from_safe_string(format!("/*\n{CHARTS_LICENSE}\n*/\n{CHARTS}")),
            script: Value::from_safe_string(format!("\"use strict\";\n{}", SCRIPTS.concat())),
            data: Value::from_safe_string(json_in_html(&data)),
            head: update.map(|update| &update.head),
            title: update.map_or("runs", |update| &update.head.name),
        };
        let mut environment = Environment::new();
        // The extension `.html` turns on HTML escaping.
        environment.add_template("page.html", TEMPLATE).expect("the template is well formed");
        let template = environment.get_template("page.html").expect("it was just added");
        template.render(Serde(values)).expect("the template names only fields of the page")
    }
}

/// JSON that cannot end the `script` element that holds it: `<` is only in strings, where it may be escaped.
fn json_in_html(data: &impl Serialize) -> String {
    serde_json::to_string(data).expect("data have string keys and plain values").replace('<', "\\u003c")
}

/// A number that nothing on the page can know before it is made.
fn nonce() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}
