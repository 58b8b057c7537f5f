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
                let secret = self.secret();
                let written = self.run(with_asserts(program, asserts, &self.secret()), &secret)?;
                let last = written.as_deref().and_then(|written| written.lines().last());
                match last.and_then(|line| line.strip_prefix(&secret)) {
                    Some(NO_PYTHON) => Err(format!("its asserts are no Python: {asserts}").into()),
                    told => Ok(told == Some("")),
                }
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

/// What is written behind the secret if the asserts, and not the program, are at fault.
const NO_PYTHON: &str = " no Python";

/// Python that runs `program` and `asserts`, and then writes the secret of its standard input: a program that ends early does
/// not pass. Asserts that are no Python are told before the program begins. The secret is read before the program begins, and then in a function whose name the program cannot know; it finds
/// an empty standard input.
fn with_asserts(program: &str, asserts: &str, name: &str) -> String {
    let json = |text| serde_json::to_string(text).expect("a string is JSON");
    // As texts of JSON, which Python reads alike: the program's `from __future__` has to come first in it.
    let (program, asserts) = (json(program), json(asserts));
    // What the program makes of `print`, `exec`, or of what `print` writes to, is its own affair.
    format!(
        "\
def _{name}(secret, flush, write, run, names, asserts):
    def tell(why=''):
        flush(), write(1, ('\\n' + secret + why + '\\n').encode())
    try:
        asserts = compile(asserts, 'asserts', 'exec', dont_inherit=True)
    except (SyntaxError, ValueError):
        tell('{NO_PYTHON}')
        raise SystemExit(0)
    return lambda: (run(asserts, names), tell())
_{name} = _{name}(input(), __import__('sys').stdout.flush, __import__('os').write, exec, globals(), {asserts})
exec(compile({program}, 'program', 'exec', dont_inherit=True))
_{name}()
"
    )
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

    /// What Python itself makes of programs, honest and other.
    #[test]
    fn a_program_passes_that_comes_to_the_end_of_its_asserts() {
        let told = |program: &str, asserts: &str| {
            let mut python = std::process::Command::new("python3");
            python.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
            python.args(["-c", &with_asserts(program, asserts, "0123")]);
            let mut python = python.stderr(std::process::Stdio::null()).spawn().unwrap();
            std::io::Write::write_all(&mut python.stdin.take().unwrap(), b"secret").unwrap();
            let ended = python.wait_with_output().unwrap();
            let written = String::from_utf8(ended.stdout).unwrap();
            ended.status.success().then(|| written.lines().last().unwrap_or_default().to_owned())
        };
        let passes = |program: &str| told(program, "assert add(1, 2) == 3") == Some("secret".into());
        for (program, right) in [
            ("def add(a, b):\n    return a + b", true),
            ("add = lambda a, b: a + b\nprint('\\u00fc \\n \\\\', 'ü', \"'\", end='')", true),
            (
                "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nadd = lambda a, b: P(a).x + b",
                true,
            ),
            ("import sys\nprint = sys.stdout = None\ndef add(a, b): return a + b", true),
            ("if __name__ == '__main__':\n    def add(a, b): return a + b", true),
            ("def add(a, b):\n    return a - b", false),
            ("print(input())", false),
            ("import os\nos._exit(0)", false),
            ("exec = compile = globals = lambda *_: None\ndef add(a, b): return a + b", true),
            ("import builtins\nbuiltins.exec = lambda *_: None\ndef add(a, b): return a - b", false),
            ("import sys\nprint(sys.stdin.read())\nsys.exit()", false),
            ("def add(a, b):\n    raise SystemExit(0)", false),
            ("def add(", false),
        ] {
            assert_eq!(passes(program), right, "{program}");
        }
        // Whatever the program is, bad data are told as such.
        for program in ["def add(", "add = 1", "import os\nos._exit(0)"] {
            assert_eq!(
                told(program, "assert add(1, 2) = 3"),
                Some(format!("secret{NO_PYTHON}")),
                "{program}"
            );
        }
        assert_eq!(told("", "assert undefined"), None);
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
            assert_eq!(same_output(found, expected), same, "{found:?} {expected:?}");
        }
    }
}
