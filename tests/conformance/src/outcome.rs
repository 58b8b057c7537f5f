//! [`Outcome`]: what a case ended with, and the table in which a user reads many of them.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// Status of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The part of the suite: `device`, `collective, world size 4`.
    pub group: String,
    /// The rule that was checked.
    pub name: String,
    /// The verdict.
    #[serde(flatten)]
    pub status: Status,
    /// Duration on this rank, in seconds.
    pub elapsed_s: f64,
}

/// A verdict. A skip says why, and never counts as passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", content = "reason", rename_all = "lowercase")]
pub enum Status {
    /// The rule holds.
    Passed,
    /// It does not, for this reason.
    Failed(String),
    /// It could not be checked, for this reason.
    Skipped(String),
}

/// Number of cases of each status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Rules that hold.
    pub passed: usize,
    /// Rules that do not.
    pub failed: usize,
    /// Rules that were not checked.
    pub skipped: usize,
}

impl Counts {
    /// Counts `outcomes`.
    pub fn of<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> Self {
        let mut counts = Self::default();
        for outcome in outcomes {
            match outcome.status {
                Status::Passed => counts.passed += 1,
                Status::Failed(_) => counts.failed += 1,
                Status::Skipped(_) => counts.skipped += 1,
            }
        }
        counts
    }
}

/// The counts of each group, then every failure and every skip with its reason.
pub fn table(outcomes: &[Outcome]) -> String {
    let groups = groups(outcomes);
    let width = groups.iter().map(|group| group.len()).max().unwrap_or(0).max("group".len());
    let mut text = format!("{:width$}  passed  failed  skipped  seconds\n", "group");
    let mut line = |name: &str, of: &dyn Fn(&&Outcome) -> bool| {
        let counts = Counts::of(outcomes.iter().filter(of));
        let elapsed_s: f64 = outcomes.iter().filter(of).map(|outcome| outcome.elapsed_s).sum();
        let Counts { passed, failed, skipped } = counts;
        let _ = writeln!(text, "{name:width$}  {passed:6}  {failed:6}  {skipped:7}  {elapsed_s:7.1}");
    };
    for group in &groups {
        line(group, &|outcome| outcome.group == **group);
    }
    line("total", &|_| true);
    for Outcome { group, name, status, .. } in outcomes {
        let (word, reason) = match status {
            Status::Passed => continue,
            Status::Failed(reason) => ("FAILED", reason),
            Status::Skipped(reason) => ("skipped", reason),
        };
        let _ = writeln!(text, "\n{word}: {group}: {name}\n    {}", reason.replace('\n', "\n    "));
    }
    text
}

/// Names of the groups in the order of their first case.
fn groups(outcomes: &[Outcome]) -> Vec<&str> {
    let mut groups: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if !groups.contains(&outcome.group.as_str()) {
            groups.push(&outcome.group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes() -> Vec<Outcome> {
        let outcome = |group: &str, name: &str, status| Outcome {
            group: group.into(),
            name: name.into(),
            status,
            elapsed_s: 0.25,
        };
        vec![
            outcome("device", "fill", Status::Passed),
            outcome("device", "copy", Status::Failed("byte 3\nis 7".into())),
            outcome("failures", "abort", Status::Skipped("needs two ranks".into())),
        ]
    }

    #[test]
    fn the_table_counts_by_group_and_explains_what_did_not_pass() {
        let expected = "\
group     passed  failed  skipped  seconds
device         1       1        0      0.5
failures       0       0        1      0.2
total          1       1        1      0.8

FAILED: device: copy
    byte 3
    is 7

skipped: failures: abort
    needs two ranks
";
        assert_eq!(table(&outcomes()), expected);
    }

    #[test]
    fn an_outcome_as_json_says_its_status_and_is_read_back() {
        let json = serde_json::to_value(outcomes()).unwrap();
        assert_eq!(json[1]["status"], "failed");
        assert_eq!(json[1]["reason"], "byte 3\nis 7");
        assert_eq!(serde_json::from_value::<Vec<Outcome>>(json).unwrap(), outcomes());
        let counts = serde_json::to_value(Counts::of(&outcomes())).unwrap();
        assert_eq!(counts, serde_json::json!({ "passed": 1, "failed": 1, "skipped": 1 }));
    }
}
