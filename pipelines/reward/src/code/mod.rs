//! Programs that a policy wrote, run against tests.

mod asserts;
mod extract;
mod http;
mod local;
mod tests_of;

use anyroll_config::{CodeConfig, Credit};
use anyroll_data::Record;

use super::{Completion, Error, Failure, Reward};
use asserts::Asserts;
use http::Http;
use local::{Input, Local};
use tests_of::{Expected, Tests};

/// The share of a record's tests that the completion's program passes, or 1 only for all of them.
///
/// The program is the last fenced block of the language, or the whole completion. Tests are in ROLL's columns, or in
/// the record's answer, as JSON:
/// `{"inputs": [...], "outputs": [...]}` are standard inputs and what is to be written to standard output;
/// `{"asserts": [...]}` are texts of Python, whose asserts are to hold for what the program computes.
#[derive(Debug)]
pub struct Code {
    credit: Credit,
    tolerance: f64,
    prelude: String,
    sandbox: Sandbox,
    asserts: Asserts,
}

/// The place where programs run.
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
        let (credit, tolerance, prelude) = (config.credit, config.tolerance, config.prelude.clone());
        Ok(Self { credit, tolerance, prelude, sandbox, asserts: Asserts::default() })
    }

    /// Name of the programs' language.
    fn language(&self) -> &str {
        match &self.sandbox {
            Sandbox::Local(_) => "python",
            Sandbox::Http(http) => http.language(),
        }
    }

    /// Returns true for each of `tests` that `program` passes. If all count, the first certain failure is the last result.
    fn passes(&self, program: &str, tests: &[Expected]) -> Result<Vec<bool>, Failure> {
        let run = |program: String, input: &str| self.run(program, Input::Secret(input));
        let mut passes = Vec::new();
        let mut told = Vec::new();
        for test in tests {
            let passed = match test {
                Expected::Output { input, output } => {
                    let written = self.run(program.to_owned(), Input::Named(input))?;
                    written.is_some_and(|written| same_output(&written, output, self.tolerance))
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

    /// Returns the output of `program`; `None` if it does not end well.
    fn run(&self, program: String, input: Input) -> Result<Option<String>, Failure> {
        match &self.sandbox {
            Sandbox::Local(local) => local.run(program, input),
            Sandbox::Http(http) => match input {
                Input::Named(text) | Input::Secret(text) => http.run(&program, text),
            },
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
        let program = after_prelude(&self.prelude, &extract::program(completion.text, self.language()));
        let passes = self.passes(&program, &tests.0).map_err(failed)?;
        let passed = passes.iter().filter(|&&passed| passed).count();
        if self.credit == Credit::All {
            return Ok(f64::from(passed == tests.0.len()));
        }
        Ok(passed as f64 / tests.0.len() as f64)
    }

    fn check(&self, record: &Record) -> Result<(), Error> {
        self.check_all(std::slice::from_ref(record))
    }

    /// Reads the asserts of many records at a time; with an endpoint they are not read.
    fn check_all(&self, records: &[Record]) -> Result<(), Error> {
        /// Number of texts read at a time.
        const TEXTS: usize = 100;
        let failed = |record: &Record, failure: Failure| Error::new(self.name(), record, failure);
        let run = |program: String, input: &str| self.run(program, Input::Secret(input));
        let mut texts: Vec<(&Record, String)> = Vec::new();
        for record in records {
            let tests = Tests::of(record).map_err(|why| failed(record, why.into()))?;
            for test in tests.0 {
                if let Expected::Asserts(asserts) = test {
                    self.reads_asserts().map_err(|failure| failed(record, failure))?;
                    texts.push((record, asserts));
                }
            }
        }
        if let Sandbox::Http(_) = self.sandbox {
            return Ok(());
        }
        for part in texts.chunks(TEXTS) {
            let asserts: Vec<&str> = part.iter().map(|(_, asserts)| asserts.as_str()).collect();
            let bad = asserts::first_bad(&asserts, &run).map_err(|failure| failed(part[0].0, failure))?;
            if let Some((index, why)) = bad {
                return Err(failed(part[index].0, why.into()));
            }
        }
        Ok(())
    }

    fn extracted(&self, completion: &Completion) -> Option<String> {
        Some(extract::program(completion.text, self.language()))
    }
}

/// Returns `program` with `prelude` before it, which Python's imports from `__future__` have to precede.
fn after_prelude(prelude: &str, program: &str) -> String {
    if prelude.is_empty() {
        return program.to_owned();
    }
    let is_future = |line: &&str| line.starts_with("from __future__ import") && !line.contains(['(', '\\']);
    let (future, rest): (Vec<&str>, Vec<&str>) = program.split_inclusive('\n').partition(is_future);
    let future: String = future.iter().map(|line| format!("{}\n", line.trim_end())).collect();
    format!("{future}{}\n{}", prelude.trim_end(), rest.concat())
}

/// Returns true if two outputs are equal apart from spaces at the ends of lines, empty lines at the end, and the form
/// of numbers: an integer may be `3.0`, and an expected fraction may differ by `tolerance`.
fn same_output(found: &str, expected: &str, tolerance: f64) -> bool {
    let lines = |text: &str| -> Vec<String> {
        text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect()
    };
    let (found, expected) = (lines(found), lines(expected));
    let same_line = |(found, expected): (&String, &String)| {
        let [found, expected] = [found, expected].map(|line| line.split(' ').collect::<Vec<_>>());
        found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| same_word(a, b, tolerance))
    };
    found.len() == expected.len() && found.iter().zip(&expected).all(same_line)
}

/// Returns true if two words are equal, or are equal numbers. With a tolerance of 0 they must match exactly.
fn same_word(found: &str, expected: &str, tolerance: f64) -> bool {
    let number = |word: &str| {
        let is_plain = word.chars().all(|it| it.is_ascii_digit() || "+-.eE".contains(it));
        word.parse::<f64>().ok().filter(|number| is_plain && number.is_finite())
    };
    let is_integer = |word: &str| word.trim_start_matches('-').chars().all(|it| it.is_ascii_digit());
    if found == expected || tolerance == 0.0 || is_integer(found) && is_integer(expected) {
        return found == expected;
    }
    let most = if is_integer(expected) { 0.0 } else { tolerance };
    let (Some(found), Some(expected)) = (number(found), number(expected)) else { return false };
    // Doubles do not count integers beyond.
    expected.abs() < 1e15 && (found - expected).abs() <= most * expected.abs().max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prelude_stands_before_the_program() {
        for (prelude, program, expected) in [
            ("", "a\n", "a\n"),
            ("import math\n", "a\n", "import math\na\n"),
            (
                "import math",
                "# x\nfrom __future__ import annotations\na",
                "from __future__ import annotations\nimport math\n# x\na",
            ),
        ] {
            assert_eq!(after_prelude(prelude, program), expected);
        }
    }

    #[test]
    fn numbers_may_be_written_otherwise() {
        for (found, expected, same) in [
            ("0.3333333333333333", "0.333333", true),
            ("3.0000000 1.0", "3 1", true),
            ("1e-3", "0.001", true),
            ("0.3334", "0.3333", false),
            ("3.0000001", "3", false),
            ("10000000000000001", "10000000000000000", false),
            ("007", "7", false),
            ("nan", "0.5", false),
            ("inf", "1.5", false),
            ("0.5  1", "0.5 1", false),
            ("x", "0.5", false),
        ] {
            assert_eq!(same_output(found, expected, 1e-6), same, "{found:?} {expected:?}");
        }
    }

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
            assert_eq!(same_output(found, expected, 0.0), same, "{found:?} {expected:?}");
        }
    }
}
