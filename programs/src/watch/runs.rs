//! The runs that a page shows: those that were named, and those of named folders.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyroll_config::error_chain::one_line;
use anyroll_pipelines::{
    Error, Result,
    follow::{Cursor, Follower},
    output_error::OutputError,
    run_dir::RunDir,
};
use serde_json::json;

/// Most runs of a page, which has a line for each.
const MOST: usize = 32;
/// Looks at the runs' files between two looks for new runs.
const POLLS_PER_SCAN: u32 = 4;

/// Runs by index, which stays.
pub(crate) struct Runs {
    runs: Vec<Watched>,
    /// Folders in which runs may begin.
    folders: Vec<PathBuf>,
    polls: u32,
    /// Problem with the folders.
    problem: Option<String>,
}

struct Watched {
    follower: Follower,
    /// Number of times that anything changed.
    changes: u64,
    problem: Option<String>,
}

/// End of what a page knows of a run.
#[derive(Default)]
pub(super) struct Known {
    cursor: Cursor,
    changes: u64,
}

impl Runs {
    /// Opens the runs at `paths`; each is a run folder, or a folder whose sub-folders are runs.
    ///
    /// # Errors
    /// If a path is neither, or there are more runs than a page shows.
    pub fn open(paths: &[PathBuf]) -> Result<Runs> {
        let mut runs = Runs { runs: Vec::new(), folders: Vec::new(), polls: 0, problem: None };
        let mut found = Vec::new();
        for path in paths {
            if RunDir::open(path).is_ok() {
                found.push(path.clone());
                continue;
            }
            let of_folder = runs_in(path)?;
            if of_folder.is_empty() {
                let problem = "it is no run folder (no resolved.yaml is in it), and none of its folders is: name the \
                               folder of a run (its `--output`) or a folder of runs";
                return Err(refused(path, problem.to_owned()));
            }
            found.extend(of_folder);
            runs.folders.push(path.clone());
        }
        let mut distinct: Vec<PathBuf> = Vec::new();
        found.into_iter().for_each(|path| {
            if !distinct.contains(&path) {
                distinct.push(path)
            }
        });
        if distinct.len() > MOST {
            let problem =
                format!("there are {} runs, and a page shows {MOST}: name those to watch", distinct.len());
            return Err(refused(&paths[0], problem));
        }
        for path in distinct {
            runs.add(&path)?;
        }
        Ok(runs)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let follower = Follower::open(path)?;
        self.runs.push(Watched { follower, changes: 1, problem: None });
        Ok(())
    }

    /// Number of runs.
    pub fn count(&self) -> usize {
        self.runs.len()
    }

    /// Reads what is new in the files. Returns true if anything is.
    pub fn poll(&mut self) -> bool {
        let mut changed = self.polls.is_multiple_of(POLLS_PER_SCAN) && self.scan();
        self.polls = self.polls.wrapping_add(1);
        for run in &mut self.runs {
            let (new, problem) = match run.follower.poll() {
                Ok(new) => (new, None),
                Err(error) => (false, Some(one_line(&error))),
            };
            if new || problem != run.problem {
                run.changes += 1;
                changed = true;
            }
            run.problem = problem;
        }
        changed
    }

    /// Adds runs that began in a folder. Returns true if there is one.
    fn scan(&mut self) -> bool {
        let before = (self.runs.len(), self.problem.take());
        for folder in self.folders.clone() {
            match runs_in(&folder) {
                Ok(paths) => paths.iter().for_each(|path| self.add_if_new(path)),
                Err(error) => self.problem = Some(one_line(&error)),
            }
        }
        before != (self.runs.len(), self.problem.clone())
    }

    fn add_if_new(&mut self, path: &Path) {
        if self.runs.iter().any(|run| run.follower.dir().path() == path) {
            return;
        }
        if self.runs.len() == MOST {
            self.problem =
                Some(format!("{} began, and a page shows {MOST} runs: name those to watch", path.display()));
        } else if let Err(error) = self.add(path) {
            self.problem = Some(one_line(&error));
        }
    }

    /// The event for a page that knows the run up to `known`; `None` if nothing is new.
    pub(super) fn news(&self, index: usize, known: &mut Known) -> Option<String> {
        let run = &self.runs[index];
        if run.changes == known.changes {
            return None;
        }
        known.changes = run.changes;
        let update = run.follower.update(&mut known.cursor);
        Some(json!({"run": index, "update": update}).to_string())
    }

    /// Problems with the runs' files, for people.
    pub(super) fn problems(&self) -> Vec<String> {
        self.runs.iter().filter_map(|run| run.problem.clone()).chain(self.problem.clone()).collect()
    }
}

/// Runs in the folder at `path`, those that began first before others.
fn runs_in(path: &Path) -> Result<Vec<PathBuf>> {
    let metadata = fs::metadata(path).map_err(|_| {
        let problem = format!(
            "it does not exist: begin the run first, as in `anyroll run CONFIG --output {}`, or name another",
            path.display()
        );
        refused(path, problem)
    })?;
    if !metadata.is_dir() {
        return Err(refused(path, "it is a file: name the run's folder".to_owned()));
    }
    let entries = fs::read_dir(path).map_err(|source| OutputError::io("read", path, source))?;
    let mut runs: Vec<(std::time::SystemTime, PathBuf)> = entries
        .filter_map(|entry| {
            let run = entry.ok()?.path();
            let began = fs::metadata(RunDir::open(&run).ok()?.resolved()).ok()?.modified().ok()?;
            Some((began, run))
        })
        .collect();
    runs.sort();
    Ok(runs.into_iter().map(|(_, run)| run).collect())
}

fn refused(path: &Path, problem: String) -> Error {
    Error::Watch { path: path.to_owned(), problem }
}
