//! The advice of a run: `advice.jsonl`.

use std::collections::HashSet;
use std::path::Path;

use super::{Advice, Recent, advice};
use crate::json_lines::{self, JsonLines};
use crate::output_error::Result;

/// The log of a run's advice, open for appending.
#[derive(Debug)]
pub struct AdviceLog {
    lines: JsonLines,
    said: HashSet<String>,
}

impl AdviceLog {
    /// Creates the log of a new run.
    ///
    /// # Errors
    /// If the file exists or cannot be created.
    pub fn create(path: &Path) -> Result<AdviceLog> {
        Ok(AdviceLog { lines: JsonLines::create(path)?, said: HashSet::new() })
    }

    /// Continues the log of a run that resumes at `next_step`. Advice of that step and later ones is forgotten, since
    /// the steps are repeated. A run that had none before starts one.
    ///
    /// # Errors
    /// If the file cannot be read or written, or has a line that is no advice.
    pub fn resume(path: &Path, next_step: u64) -> Result<AdviceLog> {
        if !path.exists() {
            return AdviceLog::create(path);
        }
        let lines = JsonLines::resume(path, next_step)?;
        let said = json_lines::read::<Advice>(path)?.into_iter().map(|it| it.rule).collect();
        Ok(AdviceLog { lines, said })
    }

    /// Appends and returns the advice of a history that was not said before.
    pub fn news(&mut self, history: &Recent) -> Result<Vec<Advice>> {
        let news: Vec<Advice> =
            advice(history).into_iter().filter(|it| !self.said.contains(&it.rule)).collect();
        for it in &news {
            self.lines.append(it)?;
            self.said.insert(it.rule.clone());
        }
        Ok(news)
    }

    /// Flushes all advice to disk, for the same reason as [`crate::metrics::MetricsLog::sync`].
    ///
    /// # Errors
    /// If the file cannot be flushed.
    pub fn sync(&self) -> Result<()> {
        self.lines.sync()
    }
}

/// Reads the advice of a run, in order; none if the file is missing, as in runs of earlier versions.
///
/// # Errors
/// If the file cannot be read, or has a line that is no advice.
pub fn read_advice(path: &Path) -> Result<Vec<Advice>> {
    if path.exists() { json_lines::read(path) } else { Ok(Vec::new()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    /// All completions are cut from step `cut_from` on.
    fn history(steps: u64, cut_from: u64) -> Recent {
        let mut history = Recent::default();
        for step in 0..=steps {
            let mut metrics = Metrics::new();
            metrics.insert("response_length/clipped", if step >= cut_from { 1.0 } else { 0.0 });
            history.push(step, &metrics);
        }
        history
    }

    #[test]
    fn each_advice_comes_once_also_after_a_resume() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("advice.jsonl");
        let mut log = AdviceLog::create(&path).unwrap();
        let mut steps = Vec::new();
        for step in 1..=40 {
            steps.extend(log.news(&history(step, 5)).unwrap().iter().map(|it| it.step));
        }
        assert_eq!(steps, [10], "the tenth step is the first with ten");
        assert_eq!(read_advice(&path).unwrap().len(), 1);
        // Resumed behind it, and before it.
        assert!(AdviceLog::resume(&path, 30).unwrap().news(&history(40, 5)).unwrap().is_empty());
        let mut log = AdviceLog::resume(&path, 7).unwrap();
        assert!(read_advice(&path).unwrap().is_empty());
        assert_eq!(log.news(&history(12, 5)).unwrap()[0].rule, "cut");
        assert!(read_advice(&folder.path().join("none.jsonl")).unwrap().is_empty());
    }
}
