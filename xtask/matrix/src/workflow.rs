//! The matrix as a workflow of GitHub Actions: one job per backend, and one that shows all results.

use crate::matrix::{Backend, Matrix};

/// Time that a runner needs to build, in minutes.
const BUILD_MINUTES: u64 = 30;

const HEAD: &str = "\
# Written by `cargo xtask matrix workflow` from ci/matrix.yaml, and a test compares: change that file instead.
#
# Somebody's own machines never run a pull request. They are asked only where the repository has the variable that is
# named, such as MATRIX_CUDA = true; elsewhere their cells are shown as not run.
name: matrix
on:
  push:
    branches: [main]
  pull_request:
  schedule:
    - cron: \"0 3 * * *\"
  workflow_dispatch:

permissions:
  contents: read

concurrency:
  group: matrix-${{ github.ref }}

jobs:
";

const CACHE: &str = "      - uses: actions/cache@v4
        with:
          path: |
            ~/.cargo/registry
            .torch
            target
          key: matrix-${{ runner.os }}-${{ runner.arch }}-${{ hashFiles('Cargo.lock', 'xtask/**') }}
          restore-keys: matrix-${{ runner.os }}-${{ runner.arch }}-
";

/// Returns the text of the workflow.
pub fn text(matrix: &Matrix) -> String {
    let backends: Vec<(&String, &Backend)> =
        matrix.backends.iter().filter(|(name, _)| matrix.cells_of(name).is_ok()).collect();
    let jobs: Vec<String> = backends.iter().map(|(name, backend)| job(matrix, name, backend)).collect();
    let names: Vec<&str> = backends.iter().map(|(name, _)| name.as_str()).collect();
    [HEAD, &jobs.join("\n"), "\n", &report(&names)].concat()
}

fn job(matrix: &Matrix, name: &str, backend: &Backend) -> String {
    let cells = matrix.cells_of(name).unwrap_or_default();
    let limit_s: u64 = cells.iter().map(|cell| cell.time_limit_s).sum();
    let minutes = limit_s.div_ceil(60) + BUILD_MINUTES;
    let mut text = format!("  {name}:\n");
    if backend.is_self_hosted() {
        let variable = format!("MATRIX_{}", name.to_uppercase());
        text += &format!("    if: vars.{variable} == 'true' && github.event_name != 'pull_request'\n");
    }
    let labels = backend.runs_on.join(", ");
    text += &format!("    runs-on: [{labels}]\n    timeout-minutes: {minutes}\n    steps:\n");
    text += "      - uses: actions/checkout@v4\n";
    if !backend.is_self_hosted() {
        text += CACHE;
    }
    let run = format!("ci/run --backend {name}");
    for command in backend.setup.iter().chain([&run]) {
        text += &format!("      - run: {command}\n");
    }
    text + &format!(
        "      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: matrix-{name}
          path: runs/matrix/*.jsonl
          if-no-files-found: ignore
"
    )
}

/// Adds the results to those of earlier days, which the cache keeps, and shows them on the run's page.
fn report(backends: &[&str]) -> String {
    format!(
        "  report:
    needs: [{}]
    if: always()
    runs-on: [ubuntu-latest]
    timeout-minutes: {BUILD_MINUTES}
    steps:
      - uses: actions/checkout@v4
{CACHE}      - uses: actions/cache@v4
        with:
          path: runs/matrix
          key: matrix-history-${{{{ github.run_id }}}}
          restore-keys: matrix-history-
      - uses: actions/download-artifact@v4
        with:
          pattern: matrix-*
          path: results
      - run: mkdir --parents runs/matrix results && find results -name '*.jsonl' -exec cat {{}} + >> runs/matrix/history.jsonl
      - run: ci/report --html matrix.html >> \"$GITHUB_STEP_SUMMARY\"
      - uses: actions/upload-artifact@v4
        with:
          name: report
          path: |
            matrix.html
            runs/matrix/history.jsonl
",
        backends.join(", ")
    )
}
