//! Results of all cells: a table in Markdown, and a page of badges.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::history::{Entry, Status};
use crate::matrix::{Cell, Matrix};

/// Number of earlier results in a row.
const SHOWN: usize = 10;

/// A cell and its results, oldest first.
pub struct Row<'a> {
    cell: &'a Cell,
    entries: Vec<&'a Entry>,
}

/// Conclusion of a cell's latest result about its hardware.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Passed,
    /// On a shim, which says nothing about hardware.
    OnShims,
    Failed,
    NotRun,
}

impl State {
    fn of(entry: Option<&Entry>) -> Self {
        match entry.map(|entry| (entry.status, entry.shims)) {
            None | Some((Status::NotRun, _)) => Self::NotRun,
            Some((Status::Failed, _)) => Self::Failed,
            Some((Status::Passed, true)) => Self::OnShims,
            Some((Status::Passed, false)) => Self::Passed,
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::OnShims => "passed on shims only",
            Self::Failed => "FAILED",
            Self::NotRun => "not run",
        }
    }

    const fn mark(self) -> char {
        match self {
            Self::Passed => '✓',
            Self::OnShims => '~',
            Self::Failed => '✗',
            Self::NotRun => '·',
        }
    }

    const fn class(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::OnShims => "shims",
            Self::Failed => "failed",
            Self::NotRun => "absent",
        }
    }
}

/// Returns each cell of the matrix with its results, without results of removed cells.
pub fn rows<'a>(matrix: &'a Matrix, entries: &'a [Entry]) -> Vec<Row<'a>> {
    let mut by_cell: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        by_cell.entry(&entry.cell).or_default().push(entry);
    }
    let row = |cell: &'a Cell| Row { cell, entries: by_cell.remove(cell.name.as_str()).unwrap_or_default() };
    matrix.cells.iter().map(row).collect()
}

impl Row<'_> {
    /// Returns the latest conclusive result: a machine without the hardware does not change it.
    fn latest(&self) -> Option<&Entry> {
        let ran = self.entries.iter().rev().find(|entry| entry.status != Status::NotRun);
        ran.or(self.entries.last()).copied()
    }

    fn state(&self) -> State {
        State::of(self.latest())
    }

    fn before(&self) -> String {
        let skipped = self.entries.len().saturating_sub(SHOWN);
        self.entries[skipped..].iter().map(|entry| State::of(Some(entry)).mark()).collect()
    }
}

/// Returns the number of cells in each state.
fn counts(rows: &[Row]) -> String {
    let count = |state| rows.iter().filter(|row| row.state() == state).count();
    let states = [State::Passed, State::OnShims, State::Failed, State::NotRun];
    let parts = states.map(|state| format!("{} {}", count(state), state.word()));
    format!("{} cells: {}.", rows.len(), parts.join(", "))
}

/// Returns one line per cell.
pub fn markdown(rows: &[Row]) -> String {
    let mut text = format!(
        "# Hardware matrix\n\n{}\n\n| cell | result | of its tolerance | seconds | device | commit | when | history |\n\
         |---|---|---|---|---|---|---|---|\n",
        counts(rows)
    );
    for row in rows {
        let state = row.state();
        let (mut columns, mut result) = ([const { String::new() }; 5], state.word().to_owned());
        if let Some(entry) = row.latest() {
            let device = entry.device.clone().unwrap_or_default();
            let ran = entry.status != Status::NotRun;
            let distance = entry.of_tolerance.map_or(String::new(), |part| format!("{part:.4}"));
            let seconds = if ran { format!("{:.1}", entry.elapsed_s) } else { String::new() };
            columns = [distance, seconds, device, entry.commit.clone(), entry.when()];
            if entry.status != Status::Passed {
                result += &format!(": {}", cell_text(&entry.reason));
            }
        }
        let columns = columns.map(|column| cell_text(&column)).join(" | ");
        let _ = writeln!(text, "| `{}` | {result} | {columns} | {} |", row.cell.name, row.before());
    }
    text
}

/// Returns text that stays in its column.
fn cell_text(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Returns a page with a badge for each cell: a column per backend and number of devices, a row per pipeline.
pub fn html(rows: &[Row]) -> String {
    let mut columns: Vec<(&str, usize)> = Vec::new();
    let mut lines: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        let column = (row.cell.backend.as_str(), row.cell.devices);
        if !columns.contains(&column) {
            columns.push(column);
        }
        let name = line_name(row.cell);
        match lines.iter_mut().find(|line| line.0 == name) {
            Some(line) => line.1.push(row),
            None => lines.push((name, vec![row])),
        }
    }
    // A backend's columns are adjacent.
    columns.sort_by_key(|(backend, devices)| {
        (rows.iter().position(|row| row.cell.backend == *backend), *devices)
    });
    let mut table = String::from("<tr><th></th>");
    for (backend, devices) in &columns {
        let _ = write!(table, "<th>{}<br>&times; {devices}</th>", escape(backend));
    }
    table += "</tr>\n";
    for (name, of_line) in &lines {
        let _ = write!(table, "<tr><th>{}</th>", escape(name));
        for column in &columns {
            let row = of_line.iter().find(|row| (row.cell.backend.as_str(), row.cell.devices) == *column);
            table += &row.map_or_else(|| "<td></td>".into(), |row| badge(row));
        }
        table += "</tr>\n";
    }
    format!("{HEAD}<h1>Hardware matrix</h1>\n<p>{}</p>\n<table>\n{table}</table>\n", escape(&counts(rows)))
}

/// `rlvr_sort, ZeRO 3, bf16`.
fn line_name(cell: &Cell) -> String {
    let stage = cell.zero_stage.map(|stage| format!(", ZeRO {stage}"));
    let precision = cell.precision.as_ref().map(|precision| format!(", {precision}"));
    [cell.pipeline.clone(), stage.unwrap_or_default(), precision.unwrap_or_default()].concat()
}

fn badge(row: &Row) -> String {
    let state = row.state();
    let entry = row.latest();
    let title = entry.map_or_else(
        || format!("{}: not run", row.cell.name),
        |entry| {
            let device = entry.device.as_deref().unwrap_or("no device");
            format!("{}: {}\n{device}, {}, {}", row.cell.name, entry.line(), entry.commit, entry.when())
        },
    );
    format!(
        "<td><span class=\"{}\" title=\"{}\">{}</span><br><small>{}</small></td>",
        state.class(),
        escape(&title),
        state.word(),
        row.before()
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const HEAD: &str =
    "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>Hardware matrix</title>\n<style>
body { font: 14px sans-serif; margin: 2em } table { border-collapse: collapse }
th { text-align: left; padding: 4px 8px } td { padding: 4px 8px; text-align: center }
span { border-radius: 4px; padding: 1px 8px; color: white; white-space: nowrap }
.passed { background: #1a7f37 } .failed { background: #cf222e } .shims { background: #7d8590 }
.absent { background: #eaeef2; color: #57606a } small { color: #57606a; letter-spacing: 1px }
</style>\n";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::root;

    /// Calls `check` with the rows of the first three cells of the checkout's matrix; the second failed and
    /// the third was not run.
    fn on_results(check: impl Fn(&[Row])) {
        let matrix = Matrix::read(root()).unwrap();
        let name = |index: usize| matrix.cells[index].name.as_str();
        let results = [
            (0, Status::Passed),
            (1, Status::Passed),
            (1, Status::Failed),
            (1, Status::NotRun),
            (2, Status::NotRun),
        ];
        let mut entries: Vec<Entry> =
            results.iter().map(|(index, status)| Entry::sample(name(*index), *status)).collect();
        entries[2].reason = "a | b\nc <d>".into();
        entries.push(Entry { cell: "gone".into(), ..Entry::sample("gone", Status::Failed) });
        check(&rows(&matrix, &entries));
    }

    #[test]
    fn a_cell_that_nobody_ran_has_not_passed() {
        on_results(|rows| {
            let text = markdown(rows);
            let line =
                |row: &Row| text.lines().find(|line| line.contains(&format!("`{}`", row.cell.name))).unwrap();
            assert!(line(&rows[0]).contains("| passed |"), "{text}");
            assert!(line(&rows[1]).contains("| FAILED: a \\| b c <d> |"), "{text}");
            assert!(line(&rows[1]).ends_with("| ✓✗· |"), "{text}");
            assert!(line(&rows[2]).contains("| not run: because |"), "{text}");
            assert!(line(&rows[3]).contains("| not run |"), "{text}");
            assert!(text.contains("1 passed, 0 passed on shims only, 1 FAILED"), "{text}");
            assert!(!text.contains("gone"), "{text}");
        });
    }

    #[test]
    fn a_pass_on_shims_is_none_on_hardware() {
        let matrix = Matrix::read(root()).unwrap();
        let entry = Entry { shims: true, ..Entry::sample(&matrix.cells[0].name, Status::Passed) };
        let text = counts(&rows(&matrix, &[entry]));
        assert!(text.contains("0 passed, 1 passed on shims only, 0 FAILED"), "{text}");
    }

    #[test]
    fn the_page_has_a_badge_for_each_cell_and_no_text_becomes_markup() {
        on_results(|rows| {
            let page = html(rows);
            assert_eq!(page.matches("<span ").count(), rows.len());
            assert_eq!(page.matches("<span class=\"passed\"").count(), 1);
            assert!(page.contains("c &lt;d&gt;") && !page.contains("<d>"), "{page}");
        });
    }
}
