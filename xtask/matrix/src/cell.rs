//! Runs a cell and judges its result.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Result;
use crate::curves::Curves;
use crate::hardware::{Hardware, anyroll};
use crate::history::{Entry, FOLDER, Status};
use crate::matrix::{Cell, Matrix, Pipeline, Train};

/// Runs cells.
pub struct Runner<'a> {
    /// Root of the checkout.
    pub root: &'a Path,
    /// Its matrix.
    pub matrix: &'a Matrix,
    /// This machine.
    pub hardware: Hardware,
}

/// Result of a cell that passed.
struct Verdict {
    /// Largest distance from the golden curves, as a fraction of the tolerance.
    of_tolerance: Option<f64>,
}

impl Runner<'_> {
    /// Runs a cell, if this machine has its hardware.
    ///
    /// # Errors
    /// If nothing could be started. A failure within the cell is its result.
    pub fn run(&self, cell: &Cell) -> Result<Entry> {
        let device = self.hardware.device(&cell.backend);
        let mut entry = Entry::new(&cell.name, device, self.hardware.shims, &commit(self.root));
        if let Some(reason) = self.hardware.lacks(cell, &self.matrix.backends[&cell.backend]) {
            return Ok(Entry { status: Status::NotRun, reason, ..entry });
        }
        let start = Instant::now();
        let verdict = match &self.matrix.pipelines[&cell.pipeline] {
            Pipeline::Conformance => self.conformance(cell),
            Pipeline::Train(train) => self.train(cell, train).and_then(|run| self.judge(cell, train, &run)),
        };
        entry.elapsed_s = start.elapsed().as_secs_f64();
        Ok(match verdict {
            Ok(Verdict { of_tolerance }) => Entry { status: Status::Passed, of_tolerance, ..entry },
            Err(reason) => Entry { status: Status::Failed, reason, ..entry },
        })
    }

    /// Runs a cell and writes its curves as golden ones.
    pub fn record(&self, cell: &Cell) -> Result<PathBuf> {
        let Pipeline::Train(train) = &self.matrix.pipelines[&cell.pipeline] else {
            return Err(format!("{} trains nothing, so it has no curves", cell.name));
        };
        if let Some(reason) = self.hardware.lacks(cell, &self.matrix.backends[&cell.backend]) {
            return Err(format!("{} cannot be run here: {reason}", cell.name));
        }
        if self.hardware.shims {
            return Err("golden curves are those of hardware, and this machine's devices are shims".into());
        }
        if let Some(other) = &train.curves_of {
            return Err(format!("{} has the curves of {other}: record one of its cells", cell.name));
        }
        let curves =
            Curves::of_run(&self.train(cell, train)?.join("metrics.jsonl"), &train.curves, train.until_step)?;
        let path = self.matrix.golden(self.root, cell);
        crate::write(&path, &curves.text())?;
        Ok(path)
    }

    fn conformance(&self, cell: &Cell) -> Result<Verdict> {
        let folder = self.fresh_folder(cell)?;
        let report = folder.join("report.json");
        let mut command = anyroll()?;
        command.args(["conformance", "--backend", &cell.backend]);
        command.args(["--world-size", &cell.devices.to_string()]).arg("--report").arg(&report);
        let ended = self.finish(command, &folder, cell);
        // The report has more detail than the exit code.
        let text = fs::read_to_string(&report).unwrap_or_default();
        let count = |status: &str| {
            let counts = serde_json::from_str::<Value>(&text).ok()?["counts"].take();
            counts[status].as_u64().filter(|count| *count > 0)
        };
        match count("failed") {
            Some(failed) => Err(format!("{failed} rules do not hold: {}", report.display())),
            None => ended.map(|()| Verdict { of_tolerance: None }),
        }
    }

    /// Trains, and returns the run folder.
    fn train(&self, cell: &Cell, train: &Train) -> Result<PathBuf> {
        let folder = self.fresh_folder(cell)?;
        let run = folder.join("run");
        let mut command = anyroll()?;
        command.arg("run").arg(&train.config).arg("--output").arg(&run);
        let own = [
            format!("backend={}", cell.backend),
            format!("devices={}", cell.devices),
            format!("strategy.zero_stage={}", cell.zero_stage.unwrap_or_default()),
            format!("strategy.precision={}", cell.precision.as_deref().unwrap_or_default()),
        ];
        for set in own.iter().chain(&train.set).chain(&train.also_set) {
            command.args(["--set", set]);
        }
        self.finish(command, &folder, cell)?;
        Ok(run)
    }

    fn judge(&self, cell: &Cell, train: &Train, run: &Path) -> Result<Verdict> {
        let metrics = run.join("metrics.jsonl");
        let reached: Vec<String> = train.at_least.keys().cloned().collect();
        let last = Curves::of_run(&metrics, &reached, u64::MAX)?;
        for (name, least) in &train.at_least {
            let value = last.last(name).unwrap_or(f64::NAN);
            if value.is_nan() || value < *least {
                return Err(format!("{name} ends at {value}, must reach {least}"));
            }
        }
        let of_tolerance = match cell.tolerance {
            None => None,
            Some(tolerance) => {
                let golden = Curves::read(&self.matrix.golden(self.root, cell))?;
                let own = Curves::of_run(&metrics, &train.curves, train.until_step)?;
                Some(own.compare(&golden, tolerance)?)
            }
        };
        Ok(Verdict { of_tolerance })
    }

    /// Creates an empty folder for the results of a cell, which stays there for inspecting failures.
    fn fresh_folder(&self, cell: &Cell) -> Result<PathBuf> {
        let folder = self.root.join(FOLDER).join(&cell.name);
        let gone = fs::remove_dir_all(&folder);
        gone.or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })
        .and_then(|()| fs::create_dir_all(&folder))
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
        Ok(folder)
    }

    /// Runs a command to its end or to the cell's time limit, with its output in files.
    fn finish(&self, mut command: Command, folder: &Path, cell: &Cell) -> Result<()> {
        let file = |name: &str| {
            let path = folder.join(name);
            File::create(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))
        };
        command.current_dir(self.root).stdin(Stdio::null()).stdout(file("stdout")?).stderr(file("stderr")?);
        let mut child = command.spawn().map_err(|error| format!("anyroll did not start: {error}"))?;
        let limit = Duration::from_secs(cell.time_limit_s);
        let start = Instant::now();
        let status = loop {
            match child.try_wait().map_err(|error| error.to_string())? {
                Some(status) => break status,
                None if start.elapsed() < limit => thread::sleep(Duration::from_millis(10)),
                None => {
                    // Ranks end with their parent. Both calls fail if it has just ended.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("did not end within its time limit of {limit:?}"));
                }
            }
        };
        if status.success() {
            return Ok(());
        }
        let said = fs::read_to_string(folder.join("stderr")).unwrap_or_default();
        let error = said.lines().find_map(|line| line.strip_prefix("error: "));
        Err(error.map_or_else(|| format!("{status}: {}", folder.join("stderr").display()), str::to_owned))
    }
}

/// Returns the checked-out commit, with a `+` if files differ from it.
fn commit(root: &Path) -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").current_dir(root).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=10", "HEAD"]) else { return "unknown".into() };
    let is_changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|it| !it.is_empty());
    if is_changed { commit + "+" } else { commit }
}
