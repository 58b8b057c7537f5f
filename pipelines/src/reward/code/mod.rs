//! Programs that a policy wrote, run against tests.

mod extract;
mod tests_of;

use std::sync::{Mutex, PoisonError};

use anyroll_sandbox::{Ended, File, Finished, Limits, Protection, Sandbox};
use rand_chacha::rand_core::Rng;

use super::{Completion, Error, Failure, Reward};
use crate::config::{CodeConfig, Credit, Isolation};
use crate::data::{Record, stream};
use tests_of::{Expected, Tests};

/// The share of a record's tests that the completion's program passes, or 1 only for all of them.
///
/// The program is the last fenced block of the completion, or all of it. Tests are in the record's answer, as JSON:
/// `{"inputs": [...], "outputs": [...]}` are standard inputs and what is to be written to standard output;
/// `{"asserts": [...]}` are lines of Python that run behind the program.
#[derive(Debug)]
pub struct Code {
    config: CodeConfig,
    sandbox: Sandbox,
    /// Counts programs, so that each has a secret of its own.
    started: Mutex<u64>,
}

impl Code {
    /// Tries the sandbox once.
    ///
    /// # Errors
    /// If this machine cannot protect itself as `config` requires.
    pub fn new(config: &CodeConfig) -> Result<Self, Failure> {
        let helper =
            std::env::current_exe().map_err(|error| error.to_string())?.with_file_name("anyroll-sandbox");
        let limits = Limits {
            wall_s: config.timeout_s,
            memory_bytes: config.memory_mib << 20,
            processes: config.processes,
            disk_bytes: config.disk_mib << 20,
            output_bytes: config.output_kib << 10,
        };
        let required = match config.isolation {
            Isolation::Full => Protection::ALL.to_vec(),
            Isolation::Namespaces => {
                Protection::ALL.into_iter().filter(|it| *it != Protection::Landlock).collect()
            }
        };
        let sandbox = Sandbox::new(helper, limits, config.readable.clone(), required);
        let held = sandbox.probe().map_err(told)?;
        let names: Vec<String> = held.iter().map(Protection::to_string).collect();
        tracing::info!(protections = names.join(", "), "programs run in a sandbox");
        Ok(Self { config: config.clone(), sandbox, started: Mutex::new(0) })
    }

    /// Whether `program` passes a test.
    fn passes(&self, program: &str, expected: &Expected) -> Result<bool, Failure> {
        match expected {
            Expected::Output { input, output } => {
                let Finished { ended, stdout, .. } = self.run(program.to_owned(), input)?;
                Ok(ended == Ended::Well && same_output(&String::from_utf8_lossy(&stdout), output))
            }
            Expected::Asserts(asserts) => {
                // Only who came to the last line knows what to write: a program that ends early does not pass.
                let secret = self.secret();
                let whole = format!("{program}\n\n{asserts}\nprint('\\n' + input())\n");
                let Finished { ended, stdout, .. } = self.run(whole, &secret)?;
                let said = String::from_utf8_lossy(&stdout);
                Ok(ended == Ended::Well && said.lines().last() == Some(&secret))
            }
        }
    }

    fn run(&self, program: String, input: &str) -> Result<Finished, Failure> {
        let command = [self.config.python.as_str(), "-I", "main.py"].map(str::to_owned);
        let files = [File { name: "main.py".into(), text: program }];
        self.sandbox.run(&command, &files, input).map_err(told)
    }

    fn secret(&self) -> String {
        const PURPOSE: u64 = u64::from_le_bytes(*b"codetest");
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        *started += 1;
        format!("{:016x}", stream(PURPOSE, u64::from(std::process::id()), *started).next_u64())
    }
}

impl Reward for Code {
    fn name(&self) -> &'static str {
        "code"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let failed = |failure: Failure| Error::new(self.name(), record, failure);
        let tests = Tests::read(&record.answer).map_err(|why| failed(why.into()))?;
        if !completion.finished {
            return Ok(0.0);
        }
        let program = extract::program(completion.text);
        let mut passed = 0;
        for test in &tests.0 {
            let right = self.passes(program, test).map_err(failed)?;
            passed += usize::from(right);
            if !right && self.config.credit == Credit::All {
                return Ok(0.0);
            }
        }
        Ok(passed as f64 / tests.0.len() as f64)
    }

    fn extracted(&self, completion: &Completion) -> Option<String> {
        Some(extract::program(completion.text).to_owned())
    }
}

fn told(error: anyroll_sandbox::Error) -> Failure {
    crate::error_chain::one_line(&error).into()
}

/// Whether two outputs are the same but for spaces at the ends of lines and empty lines at the end.
fn same_output(found: &str, expected: &str) -> bool {
    let lines = |text: &str| -> Vec<String> {
        text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect()
    };
    lines(found) == lines(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_may_differ_in_trailing_spaces_only() {
        for (found, expected, same) in [
            ("1 2\n3\n", "1 2\n3", true),
            ("1 2 \n3\n\n", "1 2\n3", true),
            ("1  2\n3", "1 2\n3", false),
            (" 1", "1", false),
            ("", "\n", true),
            ("1\n\n2", "1\n2", false),
        ] {
            assert_eq!(same_output(found, expected), same, "{found:?} {expected:?}");
        }
    }
}
