//! Programs that a policy wrote, run against tests.

mod asserts;
mod extract;
mod http;
mod local;
mod tests_of;

use super::{Completion, Error, Failure, Reward};
use crate::config::{CodeConfig, Credit};
use crate::data::Record;
use asserts::Asserts;
use http::Http;
use local::Local;
use tests_of::{Expected, Tests};

/// The share of a record's tests that the completion's program passes, or 1 only for all of them.
///
/// The program is the last fenced block of the completion, or all of it. Tests are in columns as ROLL has them, or in the record's
/// answer, as JSON:
/// `{"inputs": [...], "outputs": [...]}` are standard inputs and what is to be written to standard output;
/// `{"asserts": [...]}` are texts of Python, whose asserts are to hold for what the program computes.
#[derive(Debug)]
pub struct Code {
    credit: Credit,
    sandbox: Sandbox,
    asserts: Asserts,
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
        Ok(Self { credit: config.credit, sandbox, asserts: Asserts::default() })
    }

    /// Whether `program` passes each of `tests`, up to the first one that it surely fails if all count.
    fn passes(&self, program: &str, tests: &[Expected]) -> Result<Vec<bool>, Failure> {
        let run = |program: String, input: &str| self.run(program, input);
        let mut passes = Vec::new();
        let mut told = Vec::new();
        for test in tests {
            let passed = match test {
                Expected::Output { input, output } => {
                    let written = self.run(program.to_owned(), input)?;
                    written.is_some_and(|written| same_output(&written, output))
                }
                Expected::Asserts(asserts) => {
                    self.reads_asserts()?;
                    let values = self.asserts.ask(program, asserts, &run)?;
                    let came_to_their_end = values.is_some();
                    told.extend(values.map(|values| (passes.len(), values)));
                    came_to_their_end
                }
            };
            passes.push(passed);
            if !passed && self.credit == Credit::All {
                return Ok(passes);
            }
        }
        let (tests, told): (Vec<usize>, Vec<_>) = told.into_iter().unzip();
        for (test, hold) in tests.into_iter().zip(asserts::decide(&told, &run)?) {
            passes[test] = hold;
        }
        Ok(passes)
    }

    fn reads_asserts(&self) -> Result<(), Failure> {
        match &self.sandbox {
            Sandbox::Http(http) if http.language() != "python" => {
                Err(format!("its asserts are Python, and `language` is {}", http.language()).into())
            }
            _ => Ok(()),
        }
    }

    /// What `program` writes; `None` if it does not end well.
    fn run(&self, program: String, input: &str) -> Result<Option<String>, Failure> {
        match &self.sandbox {
            Sandbox::Local(local) => local.run(program, input),
            Sandbox::Http(http) => http.run(&program, input),
        }
    }
}

impl Reward for Code {
    fn name(&self) -> &'static str {
        "code"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let failed = |failure: Failure| Error::new(self.name(), record, failure);
        let tests = Tests::of(record).map_err(|why| failed(why.into()))?;
        if !completion.finished {
            return Ok(0.0);
        }
        let program = extract::program(completion.text);
        let passes = self.passes(program, &tests.0).map_err(failed)?;
        let passed = passes.iter().filter(|&&passed| passed).count();
        if self.credit == Credit::All {
            return Ok(f64::from(passed == tests.0.len()));
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
