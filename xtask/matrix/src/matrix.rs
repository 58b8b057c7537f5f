//! Contents of `ci/matrix.yaml`, and the resulting cells.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Result;

/// All checks of the matrix.
#[derive(Debug)]
pub struct Matrix {
    /// Backends by name, as in `anyroll doctor`.
    pub backends: BTreeMap<String, Backend>,
    /// Pipelines by name.
    pub pipelines: BTreeMap<String, Pipeline>,
    /// Cells, in the file's order.
    pub cells: Vec<Cell>,
}

/// Runners of a backend's cells, and their golden curves.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backend {
    /// Labels of its runners in CI. The first one is `self-hosted` unless the runner is a hosted one.
    pub runs_on: Vec<String>,
    /// Commands that a runner starts with.
    #[serde(default)]
    pub setup: Vec<String>,
    /// Folder in `ci/golden` of the curves to compare with: its own, or another backend's until it has its
    /// own.
    pub curves: String,
    /// True if one device holds any number of ranks, like a CPU.
    #[serde(default)]
    pub ranks_share_a_device: bool,
}

impl Backend {
    /// Returns true if its runners are self-hosted machines.
    pub fn is_self_hosted(&self) -> bool {
        self.runs_on.first().is_some_and(|label| label == "self-hosted")
    }
}

/// Command of a cell.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pipeline {
    /// `anyroll conformance`: the contract of a backend.
    Conformance,
    /// `anyroll run`.
    Train(Train),
}

/// A run of a config, and its required results.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// The config. The cell determines backend, devices, ZeRO stage and precision.
    pub config: PathBuf,
    /// Further changes to it, each like an argument of `--set`.
    #[serde(default)]
    pub set: Vec<String>,
    /// Changes after those, so that `set` may be another pipeline's.
    #[serde(default)]
    pub also_set: Vec<String>,
    /// Pipeline with whose golden curves it is compared; by default its own.
    #[serde(default)]
    pub curves_of: Option<String>,
    /// Metrics that are compared with the golden ones, step by step.
    #[serde(default)]
    pub curves: Vec<String>,
    /// Last step that is compared; by default the last step of the run.
    #[serde(default = "last")]
    pub until_step: u64,
    /// Minimum last values of metrics.
    #[serde(default)]
    pub at_least: BTreeMap<String, f64>,
}

/// Allowed distance from the golden value: `absolute + relative * |golden|`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerance {
    /// In the metric's unit.
    pub absolute: f64,
    /// Fraction of the golden value.
    pub relative: f64,
}

/// A single run of the matrix.
#[derive(Debug)]
pub struct Cell {
    /// Name built from the fields below except the last two, such as `cpu-x2-zero3-fp32-rlvr_sort`.
    pub name: String,
    /// Name of the backend.
    pub backend: String,
    /// Number of devices, one rank each.
    pub devices: usize,
    /// `None` if nothing is trained.
    pub zero_stage: Option<u8>,
    /// Value of `strategy.precision`; `None` if nothing is trained.
    pub precision: Option<String>,
    /// Name of the pipeline.
    pub pipeline: String,
    /// Tolerance of its curves, if it has any.
    pub tolerance: Option<Tolerance>,
    /// Time limit, after which it has failed.
    pub time_limit_s: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    backends: BTreeMap<String, Backend>,
    pipelines: BTreeMap<String, Pipeline>,
    cells: Vec<Product>,
}

/// The cells of one pipeline: every combination of the listed values.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Product {
    pipeline: String,
    backend: Vec<String>,
    devices: Vec<usize>,
    #[serde(default)]
    zero_stage: Vec<u8>,
    #[serde(default)]
    precision: Vec<String>,
    #[serde(default)]
    tolerance: Option<Tolerance>,
    time_limit_s: u64,
}

impl Matrix {
    /// Reads `ci/matrix.yaml` of a checkout.
    pub fn read(root: &Path) -> Result<Self> {
        let path = root.join("ci/matrix.yaml");
        let text = fs::read_to_string(&path).map_err(|error| {
            format!("cannot read {}: {error}: start this in the checkout", path.display())
        })?;
        Self::parse(&text).map_err(|message| format!("ci/matrix.yaml: {message}"))
    }

    fn parse(text: &str) -> Result<Self> {
        let File { backends, pipelines, cells: products } =
            serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        let mut matrix = Self { backends, pipelines, cells: Vec::new() };
        for product in products {
            for backend in &product.backend {
                matrix.check(&product, backend)?;
                let cells = product.cells(backend);
                matrix.cells.extend(cells);
            }
        }
        let mut names: Vec<&str> = matrix.cells.iter().map(|cell| cell.name.as_str()).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("{} is listed twice", pair[0])),
            None => Ok(matrix),
        }
    }

    fn check(&self, product: &Product, backend: &str) -> Result<()> {
        let (name, known) = (&product.pipeline, self.pipelines.get(&product.pipeline));
        let trains = product.zero_stage.is_empty() == product.precision.is_empty();
        match known {
            _ if !self.backends.contains_key(backend) => {
                Err(format!("`{backend}` in `cells` is not in `backends`"))
            }
            None => Err(format!("`{name}` in `cells` is not in `pipelines`")),
            Some(Pipeline::Conformance) if !product.zero_stage.is_empty() || !trains => {
                Err(format!("{name} trains nothing: remove `zero_stage` and `precision`"))
            }
            Some(Pipeline::Train(_)) if product.zero_stage.is_empty() || !trains => {
                Err(format!("the cells of {name} need `zero_stage` and `precision`"))
            }
            Some(Pipeline::Train(train)) if train.curves.is_empty() && train.at_least.is_empty() => {
                Err(format!("{name} cannot fail: add `curves` or `at_least`"))
            }
            Some(Pipeline::Train(train)) if train.curves.is_empty() == product.tolerance.is_some() => {
                Err(format!("the cells of {name} need `tolerance` if and only if it has `curves`"))
            }
            Some(Pipeline::Train(Train { curves_of: Some(other), .. }))
                if !self.pipelines.contains_key(other) =>
            {
                Err(format!("`curves_of: {other}` of {name} is not in `pipelines`"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Returns the cell with this name.
    pub fn cell(&self, name: &str) -> Result<&Cell> {
        let found = self.cells.iter().find(|cell| cell.name == name);
        found.ok_or_else(|| format!("no cell {name} in ci/matrix.yaml: `cargo xtask matrix list` lists them"))
    }

    /// Returns all cells of a backend.
    pub fn cells_of(&self, backend: &str) -> Result<Vec<&Cell>> {
        let found: Vec<_> = self.cells.iter().filter(|cell| cell.backend == backend).collect();
        if found.is_empty() {
            let known: Vec<&str> = self.backends.keys().map(String::as_str).collect();
            return Err(format!("no cells of {backend} in ci/matrix.yaml: it has {}", known.join(", ")));
        }
        Ok(found)
    }

    /// Returns the path of a cell's golden curves.
    pub fn golden(&self, root: &Path, cell: &Cell) -> PathBuf {
        let precision = cell.precision.as_deref().unwrap_or_default();
        let folder = &self.backends[&cell.backend].curves;
        let pipeline = match &self.pipelines[&cell.pipeline] {
            Pipeline::Train(Train { curves_of: Some(other), .. }) => other,
            _ => &cell.pipeline,
        };
        root.join("ci/golden").join(folder).join(format!("{pipeline}-{precision}.tsv"))
    }
}

impl Product {
    fn cells(&self, backend: &str) -> Vec<Cell> {
        let stages: Vec<Option<u8>> = optional(&self.zero_stage);
        let precisions: Vec<Option<String>> = optional(&self.precision);
        let mut cells = Vec::new();
        for &devices in &self.devices {
            for &zero_stage in &stages {
                for precision in &precisions {
                    let trained = zero_stage.zip(precision.as_deref());
                    let trained = trained
                        .map_or(String::new(), |(stage, precision)| format!("-zero{stage}-{precision}"));
                    cells.push(Cell {
                        name: format!("{backend}-x{devices}{trained}-{}", self.pipeline),
                        backend: backend.to_owned(),
                        devices,
                        zero_stage,
                        precision: precision.clone(),
                        pipeline: self.pipeline.clone(),
                        tolerance: self.tolerance,
                        time_limit_s: self.time_limit_s,
                    });
                }
            }
        }
        cells
    }
}

// serde's attributes accept only functions.
fn last() -> u64 {
    u64::MAX
}

/// Returns a single `None` if nothing is listed.
fn optional<T: Clone>(listed: &[T]) -> Vec<Option<T>> {
    if listed.is_empty() { vec![None] } else { listed.iter().cloned().map(Some).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::root;

    const FILE: &str = "
backends:
  cpu: {runs_on: [a-runner], curves: cpu}
pipelines:
  conformance: conformance
  sort: {train: {config: sort.yaml, curves: [loss]}}
cells:
  - {pipeline: conformance, backend: [cpu], devices: [1, 4], time_limit_s: 9}
  - pipeline: sort
    backend: [cpu]
    devices: [2]
    zero_stage: [0, 3]
    precision: [fp32, bf16]
    tolerance: {absolute: 1.0e-6, relative: 0.01}
    time_limit_s: 9
";

    #[test]
    fn a_product_has_every_combination() {
        let matrix = Matrix::parse(FILE).unwrap();
        let names: Vec<&str> = matrix.cells.iter().map(|cell| cell.name.as_str()).collect();
        let of_sort = ["cpu-x2-zero0-fp32-sort", "cpu-x2-zero0-bf16-sort"];
        assert_eq!(names[..4], ["cpu-x1-conformance", "cpu-x4-conformance", of_sort[0], of_sort[1]]);
        assert_eq!(names.len(), 6);
        assert!(matrix.golden(Path::new(""), &matrix.cells[3]).ends_with("golden/cpu/sort-bf16.tsv"));
        let other = FILE.replace("curves: [loss]", "curves: [loss], curves_of: conformance");
        let matrix = Matrix::parse(&other).unwrap();
        assert!(matrix.golden(Path::new(""), &matrix.cells[3]).ends_with("cpu/conformance-bf16.tsv"));
    }

    #[test]
    fn what_cannot_be_is_named() {
        let check = |from: &str, to: &str, words: &str| {
            let message = Matrix::parse(&FILE.replacen(from, to, 1)).unwrap_err();
            assert!(message.contains(words), "{message}");
        };
        check("backend: [cpu]", "backend: [tpu]", "`tpu` in `cells` is not in `backends`");
        check("pipeline: sort", "pipeline: sorts", "`sorts` in `cells` is not in `pipelines`");
        check("devices: [1, 4]", "devices: [1, 1]", "cpu-x1-conformance is listed twice");
        check("devices: [1, 4],", "devices: [1], zero_stage: [0],", "trains nothing");
        check("    precision: [fp32, bf16]\n", "", "need `zero_stage` and `precision`");
        check(", curves: [loss]", "", "cannot fail");
        check("    tolerance: {absolute: 1.0e-6, relative: 0.01}\n", "", "`tolerance` if and only if");
        check("curves: [loss]", "curves: [loss], curves_of: sorts", "`curves_of: sorts` of sort is not in");
        check("curves: cpu", "curve: cpu", "curve");
    }

    #[test]
    fn every_cell_of_the_checkout_can_be_judged() {
        let matrix = Matrix::read(root()).unwrap();
        for cell in &matrix.cells {
            let Pipeline::Train(train) = &matrix.pipelines[&cell.pipeline] else { continue };
            assert!(root().join(&train.config).is_file(), "{}: no {}", cell.name, train.config.display());
            let golden = matrix.golden(root(), cell);
            assert!(train.curves.is_empty() || golden.is_file(), "{}: no {}", cell.name, golden.display());
        }
    }
}
