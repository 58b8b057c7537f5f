//! Asserts of a task, which are divided: the program's interpreter computes its values, and another one, where the program
//! never was, knows what they should be.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use anyroll_data::stream;
use rand_chacha::rand_core::Rng;
use serde::Deserialize;
use serde_json::json;

use crate::Failure;

/// Divides asserts, and decides them by what was told. Its comment has the rules.
const DIVIDE: &str = concat!(include_str!("harness.py"), "\n\n", include_str!("asserts.py"));

/// Runs a program and what asks it for its values. The function's name is none that the program could know.
const PROGRAM: &str = include_str!("program.py");

/// Texts that are kept divided: the completions of a group are all tested by the same ones.
const KEPT: usize = 1024;

/// Runs a Python program on an input, and returns what it writes; `None` if it does not end well.
pub(super) type Run<'a> = dyn Fn(String, &str) -> Result<Option<String>, Failure> + 'a;

/// Divided asserts, by their texts.
#[derive(Debug, Default)]
pub(super) struct Asserts {
    divided: Mutex<HashMap<String, Divided>>,
    /// Counts programs, so that each has secrets of its own.
    started: Mutex<u64>,
}

/// A program's values for a text of asserts, one line per assert.
pub(super) struct Told<'a> {
    asserts: &'a str,
    lines: Vec<String>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Told(Divided),
    /// A text that is not valid Python.
    Error(String),
    /// A text that tests nothing, or that needs a module or fixture the sandbox lacks.
    Bad(String),
}

/// Part of an asserts text that runs in the program's interpreter.
#[derive(Clone, Debug, Deserialize)]
struct Divided {
    text: String,
    /// True if an assert may depend on the program.
    depends: bool,
}

impl Asserts {
    /// Returns the values of `program` for `asserts`; `None` if it does not reach their end.
    ///
    /// # Errors
    /// If the asserts are not valid Python, assert nothing or need a missing module, and errors of `run`.
    pub(super) fn ask<'a>(
        &self,
        program: &str,
        asserts: &'a str,
        run: &Run,
    ) -> Result<Option<Told<'a>>, Failure> {
        let told = self.divided(asserts, run)?;
        let [secret, name] = [self.secret(), self.secret()];
        let written = run(asking(program, &told.text, &name), &secret)?;
        let mut lines: Vec<String> = written
            .iter()
            .flat_map(|written| written.lines())
            .filter_map(|line| Some(line.strip_prefix(&secret)?.to_owned()))
            .collect();
        let end = lines.pop().unwrap_or_default();
        let Some(reached) = end.strip_prefix("end ").and_then(|count| count.parse::<u64>().ok()) else {
            return Ok(None);
        };
        match reached > 0 || !lines.is_empty() {
            true => Ok(Some(Told { asserts, lines })),
            // A program may have kept the text from asserting anything, or have told the end of it itself.
            false if told.depends || is_reached(asserts, run)? => Ok(None),
            false => Err(format!("its asserts are never reached: {asserts}").into()),
        }
    }

    /// Returns the part of `asserts` that runs in the program's interpreter.
    fn divided(&self, asserts: &str, run: &Run) -> Result<Divided, Failure> {
        let locked = || self.divided.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = locked().get(asserts) {
            return Ok(told.clone());
        }
        let written = run(DIVIDE.into(), &json!({"asserts": [asserts]}).to_string())?.unwrap_or_default();
        let answer: Result<[Answer; 1], _> = serde_json::from_str(&written);
        let told = match answer {
            Ok([Answer::Told(told)]) => told,
            Ok([Answer::Error(why)]) => {
                return Err(format!("its asserts are no Python: {asserts}: {why}").into());
            }
            Ok([Answer::Bad(why)]) => {
                return Err(format!("its asserts test nothing: {why}: {asserts}").into());
            }
            Err(_) => {
                let why = "they take longer than `timeout_s` to read, or more than `output_kib`";
                return Err(format!("its asserts cannot be read, {why}: {asserts}").into());
            }
        };
        let mut divided = locked();
        if divided.len() == KEPT {
            divided.clear();
        }
        divided.insert(asserts.to_owned(), told.clone());
        Ok(told)
    }

    fn secret(&self) -> String {
        const PURPOSE: u64 = u64::from_le_bytes(*b"codetest");
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        *started += 1;
        format!("{:016x}", stream(PURPOSE, u64::from(std::process::id()), *started).next_u64())
    }
}

/// Returns true if `asserts` assert something where no program keeps them from it, or do not end there.
///
/// # Errors
/// Errors of `run`.
fn is_reached(asserts: &str, run: &Run) -> Result<bool, Failure> {
    let written = run(DIVIDE.into(), &json!({"asserts": [asserts], "only_reached": true}).to_string())?;
    let answer = written.and_then(|written| serde_json::from_str::<[bool; 1]>(&written).ok());
    Ok(answer.is_none_or(|[is_reached]| is_reached))
}

/// Returns the first text of asserts that [`Asserts::ask`] refuses for every program, with the reason.
///
/// # Errors
/// Errors of `run`, and if the texts cannot be read.
pub(super) fn first_bad(asserts: &[&str], run: &Run) -> Result<Option<(usize, String)>, Failure> {
    let written = run(DIVIDE.into(), &json!({"asserts": asserts, "only_checks": true}).to_string())?;
    let answers: Vec<Answer> = serde_json::from_str(&written.unwrap_or_default())
        .map_err(|_| "its asserts cannot be read within `timeout_s`")?;
    let why = answers.into_iter().map(|answer| match answer {
        Answer::Told(_) => None,
        Answer::Error(why) => Some(format!("its asserts are no Python: {why}")),
        Answer::Bad(why) => Some(format!("its asserts test nothing: {why}")),
    });
    Ok(why.enumerate().find_map(|(index, why)| Some((index, why?))))
}

/// Returns true for each text whose asserts hold for the values of a program. If the comparison does not end well, all
/// texts are false.
///
/// # Errors
/// Errors of `run`.
pub(super) fn decide(told: &[Told], run: &Run) -> Result<Vec<bool>, Failure> {
    if told.is_empty() {
        return Ok(Vec::new());
    }
    let asserts: Vec<&str> = told.iter().map(|told| told.asserts).collect();
    let values: Vec<&[String]> = told.iter().map(|told| &told.lines[..]).collect();
    let written = run(DIVIDE.into(), &json!({"asserts": asserts, "values": values}).to_string())?;
    let hold = written.and_then(|written| serde_json::from_str(&written).ok());
    Ok(hold.unwrap_or_else(|| vec![false; told.len()]))
}

/// Python that runs `program`, and then `asserts`, which tell their values behind the secret of its standard input. That is
/// read before the program begins, which finds an empty one.
fn asking(program: &str, asserts: &str, name: &str) -> String {
    let json = |text| serde_json::to_string(text).expect("a string is JSON");
    // As texts of JSON, which Python reads alike: the program's `from __future__` has to come first in it.
    let (program, asserts) = (json(program), json(asserts));
    let name = format!("_{name}");
    PROGRAM.replace("__NAME__", &name) + &format!("{name}(input(), globals(), {program}, {asserts})\n")
}
