//! Runs one case: on a thread of its own, so that a panic is a failure and a hang ends at the deadline.

use std::{
    any::Any,
    fmt::Debug,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use crate::{Outcome, Status};

/// A rule and the code that checks it, given what the suite has set up.
pub(crate) struct Case<C> {
    /// The rule.
    pub(crate) name: String,
    /// Checks it.
    pub(crate) check: Box<dyn FnOnce(&C) -> Verdict + Send>,
}

/// Result of a check. Errors of the backend are failures.
pub(crate) type Verdict = Result<(), Stop>;

/// Why a check ended before its end.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The rule does not hold.
    Failed(String),
    /// The rule does not apply here.
    Skipped(String),
}

impl<E: std::error::Error> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Ends the check as failed unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        match $condition {
            true => {}
            false => return Err($crate::runner::Stop::Failed(format!($($message)+))),
        }
    };
}
pub(crate) use ensure;

impl<C: Send + 'static> Case<C> {
    /// A case under its rule.
    pub(crate) fn new(name: impl Into<String>, check: impl FnOnce(&C) -> Verdict + Send + 'static) -> Self {
        Self { name: name.into(), check: Box::new(check) }
    }

    /// Runs the check. After `deadline` it is a failure, and its thread is left behind.
    pub(crate) fn run(self, group: &str, context: C, deadline: Duration) -> Outcome {
        let start = Instant::now();
        // Of a suite that ends by force this is all there is.
        tracing::info!("{group}: {}", self.name);
        let (verdict, ended) = mpsc::channel();
        let check = self.check;
        let spawned = thread::Builder::new().name(format!("case {}", self.name)).spawn(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| check(&context)));
            // What the case made ends before its verdict is in, so that the next case starts from the same state.
            drop(context);
            // Nobody listens after the deadline.
            let _ = verdict.send(outcome.unwrap_or_else(|panic| Err(Stop::Failed(words(&*panic)))));
        });
        let ended = match spawned {
            Ok(_) => ended.recv_timeout(deadline).unwrap_or_else(|_| {
                Err(Stop::Failed(format!("did not end within its deadline of {deadline:?}")))
            }),
            Err(error) => Err(error.into()),
        };
        let elapsed_s = start.elapsed().as_secs_f64();
        Outcome { group: group.into(), name: self.name, status: ended.into(), elapsed_s }
    }
}

impl From<Verdict> for Status {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Ok(()) => Self::Passed,
            Err(Stop::Failed(reason)) => Self::Failed(reason),
            Err(Stop::Skipped(reason)) => Self::Skipped(reason),
        }
    }
}

/// Fails unless `got` is `want`.
pub(crate) fn same<T: PartialEq + Debug>(what: &str, got: T, want: T) -> Verdict {
    ensure!(got == want, "{what}: got {got:?}, want {want:?}");
    Ok(())
}

/// Fails unless the bytes are equal, and tells where they first differ.
pub(crate) fn same_bytes(what: &str, got: &[u8], want: &[u8]) -> Verdict {
    same(&format!("{what}: length in bytes"), got.len(), want.len())?;
    let differ = got.iter().zip(want).filter(|(got, want)| got != want).count();
    if let Some(first) = got.iter().zip(want).position(|(got, want)| got != want) {
        let (got, want) = (got[first], want[first]);
        return Err(Stop::Failed(format!(
            "{what}: {differ} bytes differ, the first at {first}: got {got:#04x}, want {want:#04x}"
        )));
    }
    Ok(())
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_else(|| "without a message".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(deadline: Duration, check: impl FnOnce(&()) -> Verdict + Send + 'static) -> Status {
        Case::new("a rule", check).run("group", (), deadline).status
    }

    #[test]
    fn every_end_of_a_check_has_its_status() {
        let patient = |check: fn(&()) -> Verdict| status(Duration::from_secs(30), check);
        assert_eq!(patient(|()| Ok(())), Status::Passed);
        assert_eq!(patient(|()| Err(Stop::Skipped("no GPU".into()))), Status::Skipped("no GPU".into()));
        assert_eq!(patient(|()| same("sum", 1, 2)), Status::Failed("sum: got 1, want 2".into()));
        assert_eq!(
            patient(|()| same_bytes("copy", &[1, 2, 3, 4], &[1, 9, 3, 9])),
            Status::Failed("copy: 2 bytes differ, the first at 1: got 0x02, want 0x09".into())
        );
        assert_eq!(patient(|()| panic!("ouch")), Status::Failed("panicked: ouch".into()));
    }

    #[test]
    fn a_check_that_hangs_is_a_failure() {
        let (release, released) = mpsc::channel::<()>();
        let hang = move |_: &()| Ok(released.recv()?);
        let reason = "did not end within its deadline of 50ms";
        assert_eq!(status(Duration::from_millis(50), hang), Status::Failed(reason.into()));
        drop(release);
    }
}
