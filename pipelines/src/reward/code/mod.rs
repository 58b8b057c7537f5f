//! Programs that a policy wrote, run against tests.

mod extract;
mod http;
mod local;
mod tests_of;

use std::sync::{Mutex, PoisonError};

use rand_chacha::rand_core::Rng;

use super::{Completion, Error, Failure, Reward};
use crate::config::{CodeConfig, Credit};
use crate::data::{Record, stream};
use http::Http;
use local::Local;
use tests_of::{Expected, Tests};

/// The share of a record's tests that the completion's program passes, or 1 only for all of them.
///
/// The program is the last fenced block of the completion, or all of it. Tests are in the record's answer, as JSON:
/// `{"inputs": [...], "outputs": [...]}` are standard inputs and what is to be written to standard output;
/// `{"asserts": [...]}` are lines of Python that run behind the program.
#[derive(Debug)]
pub struct Code {
    credit: Credit,
    sandbox: Sandbox,
    /// Counts programs, so that each has a secret of its own.
    started: Mutex<u64>,
}

/// Where programs run.
#[derive(Debug)]
enum Sandbox {
    Local(Local),
    Http(Http),
}

impl Code {
    /// Tries a sandbox of this machine once; one behind an endpoint is not asked yet.
    ///
    /// # Errors
    /// If this machine cannot protect itself as `config` requires, or the endpoint's key is not in the environment.
    pub fn new(config: &CodeConfig) -> Result<Self, Failure> {
        let sandbox = match &config.http {
            None => Sandbox::Local(Local::new(config)?),
            Some(http) => Sandbox::Http(Http::new(config, http)?),
        };
        Ok(Self { credit: config.credit, sandbox, started: Mutex::new(0) })
    }

    /// Whether `program` passes a test.
    fn passes(&self, program: &str, expected: &Expected) -> Result<bool, Failure> {
        match expected {
            Expected::Output { input, output } => {
                let written = self.run(program.to_owned(), input)?;
                Ok(written.is_some_and(|written| same_output(&written, output)))
            }
            Expected::Asserts(asserts) => {
                if let Sandbox::Http(http) = &self.sandbox
                    && http.language() != "python"
                {
                    return Err(
                        format!("its asserts are Python, and `language` is {}", http.language()).into()
                    );
                }
                // Only who came to the last line knows what to write: a program that ends early does not pass.
                let secret = self.secret();
                let whole = format!("{program}\n\n{asserts}\nprint('\\n' + input())\n");
                let written = self.run(whole, &secret)?;
                Ok(written.is_some_and(|written| written.lines().last() == Some(&secret)))
            }
        }
    }

    /// What `program` writes; `None` if it does not end well.
    fn run(&self, program: String, input: &str) -> Result<Option<String>, Failure> {
        match &self.sandbox {
            Sandbox::Local(local) => local.run(program, input),
            Sandbox::Http(http) => http.run(&program, input),
        }
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
            if !right && self.credit == Credit::All {
                return Ok(0.0);
            }
        }
        Ok(passed as f64 / tests.0.len() as f64)
    }

    fn extracted(&self, completion: &Completion) -> Option<String> {
        Some(extract::program(completion.text).to_owned())
    }
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
