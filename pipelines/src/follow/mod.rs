//! A run's state, curves and samples, kept up to date from the files of its folder while it is written.
//!
//! A [`Follower`] reads each log from where it stopped (`tail`), and keeps a bounded part of it. [`Follower::update`]
//! makes a message for the page ([`crate::page`]): all of it, or the part since the last message. `state` tells how the
//! run is doing, `figures` has the curves that are drawn, and `rows`, `sample_table`, `training_table` and `gallery`
//! have texts and pictures.

mod about;
mod figures;
mod gallery;
mod rows;
mod sample_table;
mod state;
mod tail;
mod training_table;
mod update;

use std::collections::VecDeque;
use std::path::Path;

pub use figures::{FIGURES, FigurePlan};
pub use state::State;
pub use update::{Cursor, Head, Tile, Update};

use about::About;
use gallery::Shot;
use rows::Rows;
use tail::Tail;

use crate::advice::{Advice, read_advice};
use crate::metrics::{History, Record};
use crate::output_error::{OutputError, Result};
use crate::run_dir::RunDir;
use crate::run_log::LogLine;
use crate::samples::{Ends, Sample};

/// Most lines of the log that are kept, the newest ones.
const LOG_LINES: usize = 300;

/// A run that is read while it is written.
#[derive(Debug)]
pub struct Follower {
    dir: RunDir,
    about: About,
    config: String,
    metrics: Tail,
    warmup: Tail,
    samples: Tail,
    log: Tail,
    history: History,
    warmup_history: History,
    ends: Ends,
    rows: Rows,
    lines: VecDeque<LogLine>,
    /// Number of all lines of the log.
    line_count: u64,
    advice: Vec<Advice>,
    /// Steps of the pictures that are shown.
    pictured: Vec<u64>,
    gallery: Vec<Shot>,
    state: State,
    /// Number of times that a log was replaced.
    generation: u64,
}

impl Follower {
    /// Opens the run in the folder at `path`, whose logs are read by [`Self::poll`].
    ///
    /// # Errors
    /// If there is no run, or its config cannot be read.
    pub fn open(path: &Path) -> Result<Follower> {
        let dir = RunDir::open(path)?;
        let resolved = dir.resolved();
        let config = std::fs::read_to_string(&resolved)
            .map_err(|source| OutputError::io("read", &resolved, source))?;
        let mut follower = Follower {
            about: About::new(&config),
            metrics: Tail::new(dir.metrics()),
            warmup: Tail::new(dir.warmup()),
            samples: Tail::new(dir.samples()),
            log: Tail::new(dir.log()),
            dir,
            config,
            history: History::default(),
            warmup_history: History::default(),
            ends: Ends::default(),
            rows: Rows::default(),
            lines: VecDeque::new(),
            line_count: 0,
            advice: Vec::new(),
            pictured: Vec::new(),
            gallery: Vec::new(),
            state: State::Stopped,
            generation: 0,
        };
        follower.state = follower.current_state();
        Ok(follower)
    }

    /// Folder of the run.
    pub fn dir(&self) -> &RunDir {
        &self.dir
    }

    /// State of the run at the last poll.
    pub fn state(&self) -> State {
        self.state
    }

    /// Reads what was written since the last call. Returns true if anything changed.
    ///
    /// # Errors
    /// If a file cannot be read, or has a line that is not a record of it. The next call tries again.
    pub fn poll(&mut self) -> Result<bool> {
        let mut changed = self.restart_if_replaced()?;
        changed |= self.read_log()?;
        changed |= self.read_metrics()?;
        changed |= self.read_samples()?;
        changed |= self.read_pictures()?;
        let state = self.current_state();
        changed |= state != self.state;
        self.state = state;
        if changed {
            self.advice = read_advice(&self.dir.advice())?;
        }
        Ok(changed)
    }

    /// Forgets all that was read if a log was replaced, as by a resumed run.
    fn restart_if_replaced(&mut self) -> Result<bool> {
        let mut replaced = false;
        for tail in [&mut self.metrics, &mut self.warmup, &mut self.samples, &mut self.log] {
            replaced |= tail.reopen_if_replaced()?;
        }
        if replaced {
            for (tail, path) in [
                (&mut self.metrics, self.dir.metrics()),
                (&mut self.warmup, self.dir.warmup()),
                (&mut self.samples, self.dir.samples()),
                (&mut self.log, self.dir.log()),
            ] {
                *tail = Tail::new(path);
                tail.reopen_if_replaced()?;
            }
            (self.history, self.warmup_history, self.ends, self.rows) = Default::default();
            self.lines.clear();
            self.line_count = 0;
            self.generation += 1;
        }
        Ok(replaced)
    }

    fn read_metrics(&mut self) -> Result<bool> {
        let mut changed = false;
        for (tail, history) in
            [(&mut self.warmup, &mut self.warmup_history), (&mut self.metrics, &mut self.history)]
        {
            changed |= tail.each(|path, number, line| {
                let record: Record = parse(path, number, line)?;
                history.add(&record);
                Ok(())
            })?;
        }
        Ok(changed)
    }

    fn read_samples(&mut self) -> Result<bool> {
        let (ends, rows) = (&mut self.ends, &mut self.rows);
        self.samples.each(|path, number, line| {
            let sample: Sample = parse(path, number, line)?;
            rows.add(&sample);
            ends.add(sample, training_table::STEPS);
            Ok(())
        })
    }

    /// Reads the log, of which a torn line is skipped: nothing is computed from it.
    fn read_log(&mut self) -> Result<bool> {
        let (lines, count) = (&mut self.lines, &mut self.line_count);
        self.log.each(|_, _, line| {
            if let Ok(line) = serde_json::from_slice::<LogLine>(line) {
                self.about.hear(&line);
                if lines.len() == LOG_LINES {
                    lines.pop_front();
                }
                lines.push_back(line);
                *count += 1;
            }
            Ok(())
        })
    }

    fn read_pictures(&mut self) -> Result<bool> {
        let pictured = gallery::shown(&self.dir.pictured_steps()?);
        if pictured == self.pictured {
            return Ok(false);
        }
        self.gallery = gallery::read(&self.dir, &pictured)?;
        self.pictured = pictured;
        Ok(true)
    }

    fn current_state(&self) -> State {
        let done = self.history.steps().map(|(_, last)| last);
        State::of(self.about.ended(), self.dir.is_in_use(), done, self.about.steps())
    }
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path, line: usize, bytes: &[u8]) -> Result<T> {
    let malformed = |source| OutputError::Malformed { path: path.to_owned(), line, source };
    serde_json::from_slice(bytes).map_err(malformed)
}

#[cfg(test)]
mod tests;
