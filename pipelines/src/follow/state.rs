//! State of a run: running, or its end.

use serde::Serialize;

use crate::run_log::{LogKind, LogLine};

/// State of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// A process writes the run.
    Running,
    /// All steps are done.
    Finished,
    /// A signal ended the run, which may be resumed.
    Interrupted,
    /// An error ended the run.
    Failed,
    /// No process writes the run, and none reported its end: it was killed, or its machine went down.
    Stopped,
}

impl State {
    /// State of a run whose log says that it `ended`, that is in use by a process, and that has `done` steps of
    /// `steps`.
    pub(super) fn of(
        ended: Option<&LogLine>,
        is_in_use: bool,
        done: Option<u64>,
        steps: Option<u64>,
    ) -> State {
        match ended.map(|line| line.kind) {
            Some(LogKind::Finished) => State::Finished,
            Some(LogKind::Interrupted) => State::Interrupted,
            Some(LogKind::Failed) => State::Failed,
            _ if is_in_use => State::Running,
            // Runs of earlier versions have no log.
            _ if done.is_some() && done >= steps && steps.is_some() => State::Finished,
            _ => State::Stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_the_end_and_the_lock_the_rest() {
        let line = |kind| LogLine { time: String::new(), kind, text: String::new() };
        let check = |kind: Option<LogKind>, is_in_use, done, expected| {
            assert_eq!(State::of(kind.map(line).as_ref(), is_in_use, done, Some(10)), expected);
        };
        check(None, true, Some(3), State::Running);
        check(None, true, None, State::Running);
        check(None, false, Some(3), State::Stopped);
        check(None, false, None, State::Stopped);
        check(None, false, Some(10), State::Finished);
        // The last evaluation and the last checkpoint follow the last step.
        check(None, true, Some(10), State::Running);
        check(Some(LogKind::Finished), true, Some(10), State::Finished);
        check(Some(LogKind::Interrupted), false, Some(3), State::Interrupted);
        check(Some(LogKind::Failed), false, Some(3), State::Failed);
        assert_eq!(State::of(None, false, Some(3), None), State::Stopped);
    }
}
