//! Log of samples of evaluations and of training steps: `samples.jsonl`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::json_lines::{self, JsonLines};
use crate::output_error::Result;

/// The part of a run in which a sample was drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The evaluation before the first update.
    Before,
    /// An evaluation during training.
    Eval,
    /// The evaluation after the last update.
    After,
    /// A training step.
    Train,
}

/// Values of the columns that each term of the reward logged for a sample, by the term's name.
pub type Columns = BTreeMap<String, BTreeMap<String, Value>>;

/// One sample: a line of `samples.jsonl`.
///
/// If an evaluation draws several samples of a prompt, the report shows the first, so the greedy one should
/// be written first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// Number of steps done; for a sample of training, those including its own.
    pub step: u64,
    /// The evaluation that it belongs to, or training.
    pub phase: Phase,
    /// Prompt.
    pub prompt: String,
    /// Completion; of an episode all turns, with the environment's observations between them.
    pub completion: String,
    /// The turns, if there is an environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<Turn>,
    /// Gold answer.
    pub answer: String,
    /// Reward of the completion; 1 is a right answer. In training it is the weighted sum of the terms. A reward that is
    /// not finite reads back as NaN.
    #[serde(deserialize_with = "nan_for_null")]
    pub reward: f64,
    /// Columns that reward functions logged.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub columns: Columns,
    /// Facts of a sample of training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
}

/// Facts of a sample that a step trains on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Index of its group in the step.
    pub group: usize,
    /// Score of each term of the reward, without its weight; `None` if the term does not apply or failed.
    pub terms: BTreeMap<String, Option<f64>>,
    /// Mean advantage of its tokens.
    #[serde(deserialize_with = "nan_for_null")]
    pub advantage: f64,
    /// Tokens of the completion.
    pub tokens: usize,
    /// True if it was cut at the maximum length.
    pub cut: bool,
    /// True if it is trained on, false if it is left out.
    pub trained: bool,
}

/// A turn of a sample.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turn {
    /// The model's text.
    pub text: String,
    /// The environment's reward for it, if any.
    pub reward: Option<f64>,
    /// The environment's observation after it, if another turn followed.
    pub observation: Option<String>,
}

/// The log of a run's samples, open for appending.
#[derive(Debug)]
pub struct SamplesLog {
    lines: JsonLines,
}

impl SamplesLog {
    /// Creates the log of a new run.
    ///
    /// # Errors
    /// If the file exists or cannot be created.
    pub fn create(path: &Path) -> Result<SamplesLog> {
        Ok(SamplesLog { lines: JsonLines::create(path)? })
    }

    /// Continues the log of a run that resumes at `next_step`, as [`crate::metrics::MetricsLog::resume`]
    /// does.
    ///
    /// # Errors
    /// If the file cannot be read or written, or has a line that is not a sample.
    pub fn resume(path: &Path, next_step: u64) -> Result<SamplesLog> {
        Ok(SamplesLog { lines: JsonLines::resume(path, next_step)? })
    }

    /// Appends a sample and hands it to the operating system. A reward that is not finite is written as
    /// `null`.
    pub fn append(&mut self, sample: &Sample) -> Result<()> {
        self.lines.append(sample)
    }

    /// Flushes all samples to disk, for the same reason as [`crate::metrics::MetricsLog::sync`].
    pub fn sync(&self) -> Result<()> {
        self.lines.sync()
    }
}

/// Reads the samples of a `samples.jsonl`, in order; the run may still be writing it.
///
/// # Errors
/// If the file cannot be read, or has a line that is not a sample.
pub fn read_samples(path: &Path) -> Result<Vec<Sample>> {
    json_lines::read(path)
}

/// Samples of the first and of the last evaluation, and of the last steps of training, each in order.
#[derive(Debug, Default, PartialEq)]
pub struct Ends {
    /// Samples of the first evaluation.
    pub first: Vec<Sample>,
    /// Samples of the last evaluation; empty if that is the first.
    pub last: Vec<Sample>,
    /// Samples of training, by step.
    pub training: BTreeMap<u64, Vec<Sample>>,
}

impl Ends {
    /// Takes the next sample of a run, and keeps the last `steps` of training.
    pub fn add(&mut self, sample: Sample, steps: usize) {
        let is_of = |samples: &[Sample], step| samples.first().is_none_or(|sample| sample.step == step);
        if sample.phase == Phase::Train {
            self.training.entry(sample.step).or_default().push(sample);
            if self.training.len() > steps {
                self.training.pop_first();
            }
        } else if is_of(&self.first, sample.step) {
            self.first.push(sample);
        } else {
            if !is_of(&self.last, sample.step) {
                self.last.clear();
            }
            self.last.push(sample);
        }
    }
}

/// Reads null as NaN, since JSON has no NaN and serde writes it as null.
fn nan_for_null<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn sample(step: u64, phase: Phase, completion: &str) -> Sample {
        let [prompt, answer] = ["sort 31", "13"].map(String::from);
        Sample {
            step,
            phase,
            prompt,
            completion: completion.into(),
            turns: Vec::new(),
            answer,
            reward: 0.0,
            columns: Columns::new(),
            training: None,
        }
    }

    #[test]
    fn writes_one_object_a_sample_and_resumes_with_a_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let mut log = SamplesLog::create(&path).unwrap();
        let samples = [
            sample(0, Phase::Before, "31"),
            sample(10, Phase::Eval, "line\nbreak \"and\" <b>é"),
            sample(20, Phase::After, "13"),
        ];
        for sample in &samples {
            log.append(sample).unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        let first =
            r#"{"step":0,"phase":"before","prompt":"sort 31","completion":"31","answer":"13","reward":0.0}"#;
        assert_eq!(text.lines().next(), Some(first));
        assert_eq!(read_samples(&path).unwrap(), samples);

        let mut log = SamplesLog::resume(&path, 11).unwrap();
        log.append(&samples[2]).unwrap();
        assert_eq!(read_samples(&path).unwrap(), samples);
    }

    #[test]
    fn a_report_reads_the_first_and_the_last_evaluation_and_the_last_steps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let mut log = SamplesLog::create(&path).unwrap();
        let evaluated = |step| ["a", "b"].map(|text| sample(step, Phase::Eval, text));
        let trained = |step| ["c", "d"].map(|text| sample(step, Phase::Train, text));
        let all = (0..=40u64).flat_map(|step| {
            let evaluated = evaluated(step).into_iter().filter(move |_| step % 10 == 0);
            trained(step).into_iter().chain(evaluated)
        });
        all.for_each(|sample| log.append(&sample).unwrap());
        let mut ends = Ends::default();
        read_samples(&path).unwrap().into_iter().for_each(|sample| ends.add(sample, 2));
        assert_eq!((ends.first, ends.last), (evaluated(0).to_vec(), evaluated(40).to_vec()));
        assert_eq!(
            ends.training.into_values().flatten().collect::<Vec<_>>(),
            [trained(39), trained(40)].concat()
        );
    }

    #[test]
    fn a_reward_that_is_not_finite_reads_back_as_nan() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let broken = Sample { reward: f64::INFINITY, ..sample(0, Phase::Eval, "") };
        SamplesLog::create(&path).unwrap().append(&broken).unwrap();
        assert!(read_samples(&path).unwrap()[0].reward.is_nan());
    }
}
