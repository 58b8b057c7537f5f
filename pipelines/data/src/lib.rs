//! Prompts with known answers, generated or read from files, with a part held out for evaluation.
//!
//! A hash of a prompt's text decides whether it is held out. So the split depends neither on the seed nor on
//! the file's order or its other records, and no training prompt is ever in an evaluation. The records of a
//! step are a function of the seed and the step, so a resumed run has no state to restore.

#![forbid(unsafe_code)]

mod arrow_lengths;
mod char_tokenizer;
mod chat_template;
pub mod countdown;
mod csv_file;
mod digest;
mod error;
mod evaluate;
mod file;
mod hf_tokenizer;
mod json_array;
mod mix;
mod panics;
mod random;
mod record;
mod rewards;
mod row;
mod sizes;
mod steps;
mod synthetic;
mod table;
mod token_bytes;
mod tokenizer;

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use anyroll_config::DataConfig;

pub use char_tokenizer::{CharTokenizer, UnknownCharacter};
pub use chat_template::{ChatTemplate, Conversation};
pub use csv_file::CellTypes;
pub use digest::digest;
pub use error::{Error, FORMATS};
pub use file::{files, find, is_data, prompt};
pub use hf_tokenizer::{HfTokenizer, TokenizerError};
pub use random::{shuffle, shuffled, stream};
pub use record::{Cut, Record, Step};
pub use sizes::SourceSize;
pub use table::{is_table, rows, without_mark};
pub use token_bytes::TokenBytes;
pub use tokenizer::{FolderTokenizer, Tokenizer};

use mix::Mix;
use rewards::Scale;
use synthetic::Synthetic;

/// Percentage of prompts held out: of generated ones, and by default of files.
const HELD_OUT_PERCENT: u32 = 10;

/// Part of a record whose tokens are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// The prompt.
    Prompt,
    /// The longest of its answers, with the end token.
    Answer,
    /// Tokens before the first trained one.
    Unlearnt,
}

/// Counts the tokens of a record's part.
pub type RecordTokens<'a> = dyn Fn(&Record, Counted) -> Result<usize, TokenizerError> + 'a;

/// Options of reading records.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// Counts tokens where the config limits them.
    pub tokens: &'a RecordTokens<'a>,
    /// Holds out a default percentage of a file's records if the config sets none.
    pub holds_out: bool,
    /// Text after each step of a solution; empty if steps are not read.
    pub step_separator: &'a str,
}

/// Phase of a run that draws records; each has its own order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// The supervised warm-up.
    Warmup,
    /// The steps after the warm-up.
    Rollout,
}

/// All records, split into training and held-out ones.
#[derive(Clone, Debug)]
pub struct Dataset(Records);

#[derive(Clone, Debug)]
enum Records {
    /// Too many to list, so a record is generated from its number. With `unpaired` it has one of its two
    /// answers.
    Synthetic {
        task: Synthetic,
        unpaired: bool,
        /// Scale of the answers' rewards, if they have some.
        rewards: Option<Scale>,
    },
    Listed {
        train: Vec<Record>,
        held_out: Vec<Record>,
    },
    /// Several sources, whose records carry the name of their domain.
    Mixed {
        mix: Mix,
        sources: Vec<(String, Dataset)>,
    },
}

impl Dataset {
    /// Reads the files, if there are any. Checks that there are training records, and held-out ones if they
    /// are needed.
    pub fn open(config: &DataConfig, reading: Reading) -> Result<Self, Error> {
        match config {
            DataConfig::Sort(sort) => Ok(Self::synthetic(Synthetic::Sort { digits: sort.digits })),
            DataConfig::Addition(addition) => {
                let (digits, reversed) = (addition.digits, addition.reversed);
                Ok(Self::synthetic(Synthetic::Addition { digits, reversed }))
            }
            DataConfig::Countdown(countdown) => {
                Self::listed(countdown::records(countdown.numbers), HELD_OUT_PERCENT)
            }
            DataConfig::File(file) => {
                let records = file::read(file, &file.path, file.max_records, reading)?;
                let usual = if reading.holds_out { HELD_OUT_PERCENT } else { 0 };
                match &file.held_out {
                    None => Self::listed(records, file.held_out_percent.unwrap_or(usual)),
                    Some(paths) => Self::apart(records, file::read(file, paths, None, reading)?),
                }
            }
            DataConfig::Mix(sources) => {
                let weights: Vec<f64> = sources.iter().map(|source| source.weight).collect();
                let opened: Result<Vec<_>, Error> = sources
                    .iter()
                    .map(|source| Ok((source.domain.clone(), Self::open(&source.data, reading)?)))
                    .collect();
                Ok(Self(Records::Mixed { mix: Mix::new(&weights), sources: opened? }))
            }
        }
    }

    fn synthetic(task: Synthetic) -> Self {
        Self(Records::Synthetic { task, unpaired: false, rewards: None })
    }

    /// Splits each pair into two records with one labelled answer each.
    pub fn unpaired(self) -> Self {
        let unpaired = |records: Vec<Record>| records.into_iter().flat_map(Record::unpaired).collect();
        Self(match self.0 {
            Records::Synthetic { task, rewards, .. } => Records::Synthetic { task, unpaired: true, rewards },
            Records::Listed { train, held_out } => {
                Records::Listed { train: unpaired(train), held_out: unpaired(held_out) }
            }
            Records::Mixed { mix, sources } => {
                let sources = sources.into_iter().map(|(domain, data)| (domain, data.unpaired()));
                Records::Mixed { mix, sources: sources.collect() }
            }
        })
    }

    /// Gives records of single answers scaled rewards; a label is a reward of 1 or 0. With `normalize` the training
    /// records of each source have rewards with mean 0 and standard deviation 1. Without a label an answer is
    /// desirable if its reward is above the mean.
    pub fn rewarded(self, normalize: bool) -> Self {
        Self(match self.0 {
            Records::Synthetic { task, unpaired, .. } => {
                Records::Synthetic { task, unpaired, rewards: Some(Scale::of_halves(normalize)) }
            }
            Records::Listed { train, held_out } => {
                let scale = Scale::of(&train, normalize);
                let scaled = |records: Vec<Record>| records.into_iter().map(|it| scale.applied(it)).collect();
                Records::Listed { train: scaled(train), held_out: scaled(held_out) }
            }
            Records::Mixed { mix, sources } => {
                let sources = sources.into_iter().map(|(domain, data)| (domain, data.rewarded(normalize)));
                Records::Mixed { mix, sources: sources.collect() }
            }
        })
    }

    /// The same dataset with desirable training answers only; `None` if a source has no others.
    pub fn desirable(&self) -> Option<Self> {
        Some(Self(match &self.0 {
            Records::Synthetic { task, .. } => {
                Records::Synthetic { task: *task, unpaired: false, rewards: None }
            }
            Records::Listed { train, held_out } => {
                let train: Vec<_> = train.iter().filter(|it| it.desirable != Some(false)).cloned().collect();
                if train.is_empty() {
                    return None;
                }
                Records::Listed { train, held_out: held_out.clone() }
            }
            Records::Mixed { mix, sources } => {
                let desirable = |(domain, data): &(String, Self)| Some((domain.clone(), data.desirable()?));
                let sources: Option<_> = sources.iter().map(desirable).collect();
                Records::Mixed { mix: mix.clone(), sources: sources? }
            }
        }))
    }

    fn listed(records: Vec<Record>, held_out_percent: u32) -> Result<Self, Error> {
        let (held_out, train): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| is_held_out(record.key(), held_out_percent));
        Self::split(train, held_out, held_out_percent > 0)
    }

    /// Combines records of separate training and held-out files. A prompt in both is held out.
    fn apart(mut train: Vec<Record>, held_out: Vec<Record>) -> Result<Self, Error> {
        let prompts: HashSet<&str> = held_out.iter().map(Record::key).collect();
        if train.iter().all(|record| prompts.contains(record.key())) {
            let trained: HashSet<&str> = train.iter().map(Record::key).collect();
            return Err(Error::AllHeldOut { prompts: trained.len() });
        }
        let before = train.len();
        train.retain(|record| !prompts.contains(record.key()));
        let left_out = before - train.len();
        if left_out > 0 {
            tracing::warn!(left_out, of = before, "held-out prompts are removed from the training data");
        }
        Self::split(train, held_out, true)
    }

    fn split(train: Vec<Record>, held_out: Vec<Record>, holds_out: bool) -> Result<Self, Error> {
        if train.is_empty() || (held_out.is_empty() && holds_out) {
            let records = train.len() + held_out.len();
            return Err(Error::Split { records, held_out: held_out.len() });
        }
        Ok(Self(Records::Listed { train, held_out: distinct(held_out) }))
    }

    /// Domains of all records, without duplicates.
    pub fn domains(&self) -> BTreeSet<&str> {
        match &self.0 {
            Records::Synthetic { .. } => BTreeSet::from([""]),
            Records::Listed { train, held_out } => {
                train.iter().chain(held_out).map(|record| record.domain.as_str()).collect()
            }
            Records::Mixed { sources, .. } => sources.iter().map(|(domain, _)| domain.as_str()).collect(),
        }
    }

    /// The `count` training records of a step, over all ranks. Generated records are drawn uniformly with
    /// replacement. A file's records are drawn in epochs, each with every record once in a new order.
    pub fn train_batch(&self, draw: Draw, seed: u64, step: u64, count: usize) -> Vec<Record> {
        match &self.0 {
            Records::Synthetic { task, unpaired, rewards } => {
                let mut rng = stream(draw as u64, seed, step);
                let mut next = || loop {
                    let record = task.record(random::below(&mut rng, task.size()));
                    if !is_held_out(&record.prompt, HELD_OUT_PERCENT) {
                        let record = match unpaired {
                            true => record.judged(random::below(&mut rng, 2) == 0),
                            false => record,
                        };
                        return rewarded(*rewards, record);
                    }
                };
                (0..count).map(|_| next()).collect()
            }
            Records::Listed { .. } | Records::Mixed { .. } => {
                let first = step * count as u64;
                self.train_range(draw, seed, first..first + count as u64)
            }
        }
    }

    /// Number of records in an epoch; `None` for generated records and for a mix, in which each source has
    /// its own.
    pub fn records_of_a_pass(&self) -> Option<usize> {
        match &self.0 {
            Records::Listed { train, .. } => Some(train.len()),
            Records::Synthetic { .. } | Records::Mixed { .. } => None,
        }
    }

    /// Training records at a range of positions in the run.
    fn train_range(&self, draw: Draw, seed: u64, positions: Range<u64>) -> Vec<Record> {
        match &self.0 {
            Records::Synthetic { .. } => {
                positions.flat_map(|at| self.train_batch(draw, seed, at, 1)).collect()
            }
            Records::Listed { train, .. } => {
                let mut order = (u64::MAX, Vec::new());
                let mut record = |position: u64| {
                    let epoch = position / train.len() as u64;
                    if order.0 != epoch {
                        order = (epoch, shuffled(train.len(), &mut stream(draw as u64, seed, epoch)));
                    }
                    train[order.1[(position % train.len() as u64) as usize]].clone()
                };
                positions.map(&mut record).collect()
            }
            Records::Mixed { mix, sources } => {
                let places: Vec<(usize, u64)> = positions.map(|position| mix.at(position)).collect();
                // The positions of one source are consecutive.
                let range = |source: usize| {
                    let mut own = places.iter().filter(|(it, _)| *it == source).map(|(_, own)| *own);
                    own.next().map_or(0..0, |first| first..own.next_back().unwrap_or(first) + 1)
                };
                let drawn = sources.iter().enumerate().map(|(source, (domain, data))| {
                    named(domain, data.train_range(draw, seed, range(source)))
                });
                interleaved(&places, drawn.collect())
            }
        }
    }

    /// The first `count` held-out records in a fixed order, with distinct prompts (distinct answers for
    /// records with labels, distinct solutions in steps). The order does not depend on the seed, so that runs can be compared. A smaller
    /// `count` gives a prefix.
    pub fn held_out(&self, count: usize) -> Result<Vec<Record>, Error> {
        let available = self.held_out_available(count);
        if available < count {
            return Err(Error::TooFewHeldOut { asked: count, available });
        }
        let mut rng = stream(u64::MAX, 0, 0);
        match &self.0 {
            Records::Synthetic { task, unpaired, rewards } => {
                let mut seen = HashSet::new();
                let mut records = Vec::with_capacity(count);
                while records.len() < count {
                    let record = task.record(random::below(&mut rng, task.size()));
                    if is_held_out(&record.prompt, HELD_OUT_PERCENT) && seen.insert(record.prompt.clone()) {
                        let desirable = records.len().is_multiple_of(2);
                        let record = if *unpaired { record.judged(desirable) } else { record };
                        records.push(rewarded(*rewards, record));
                    }
                }
                Ok(records)
            }
            Records::Listed { held_out, .. } => {
                let order = shuffled(held_out.len(), &mut rng);
                Ok(order[..count].iter().map(|&index| held_out[index].clone()).collect())
            }
            Records::Mixed { mix, sources } => {
                let places: Vec<(usize, u64)> = (0..count as u64).map(|position| mix.at(position)).collect();
                let drawn: Result<Vec<_>, Error> = sources
                    .iter()
                    .enumerate()
                    .map(|(source, (domain, data))| {
                        let own = places.iter().filter(|(it, _)| *it == source).count();
                        Ok(named(domain, data.held_out(own)?))
                    })
                    .collect();
                Ok(interleaved(&places, drawn?))
            }
        }
    }

    /// The largest number up to `limit` that [`Self::held_out`] can return.
    pub fn most_held_out(&self, limit: usize) -> usize {
        // In a mix, fewer records may be available than requested. The available number never grows when less
        // is requested, so the first match from above is the largest.
        let mut count = limit;
        loop {
            let available = self.held_out_available(count);
            if available == count {
                return count;
            }
            count = available;
        }
    }

    /// Number of distinct held-out prompts, counted up to `limit`.
    pub fn held_out_available(&self, limit: usize) -> usize {
        match &self.0 {
            Records::Synthetic { task, .. } => (0..task.size())
                .filter(|&number| is_held_out(&task.record(number).prompt, HELD_OUT_PERCENT))
                .take(limit)
                .count(),
            Records::Listed { held_out, .. } => held_out.len().min(limit),
            Records::Mixed { mix, sources } => {
                // All of them if each source has its share, else fewer.
                let asked = |source: usize| (0..limit as u64).filter(|at| mix.at(*at).0 == source).count();
                let parts = sources.iter().enumerate();
                parts.map(|(source, (_, data))| data.held_out_available(asked(source))).sum()
            }
        }
    }

    /// All characters in the records, including held-out ones: the vocabulary of a character tokenizer.
    pub fn characters(&self) -> BTreeSet<char> {
        match &self.0 {
            Records::Synthetic { task, .. } => task.characters(),
            Records::Listed { train, held_out } => {
                let texts = train
                    .iter()
                    .chain(held_out)
                    .flat_map(|record| [&record.prompt, &record.answer].into_iter().chain(&record.rejected));
                texts.flat_map(|text| text.chars()).collect()
            }
            Records::Mixed { sources, .. } => {
                sources.iter().flat_map(|(_, data)| data.characters()).collect()
            }
        }
    }

    /// Records among which the longest prompt and answer are searched: all of a file, including held-out
    /// ones, or the first generated ones, whose lengths are similar.
    pub fn examples(&self) -> Vec<Record> {
        const SYNTHETIC: u64 = 100;
        match &self.0 {
            Records::Synthetic { task, unpaired, rewards } => {
                let records = (0..task.size().min(SYNTHETIC)).map(|number| task.record(number));
                let records: Vec<Record> = match unpaired {
                    true => records.flat_map(Record::unpaired).collect(),
                    false => records.collect(),
                };
                records.into_iter().map(|record| rewarded(*rewards, record)).collect()
            }
            Records::Listed { train, held_out } => train.iter().chain(held_out).cloned().collect(),
            Records::Mixed { sources, .. } => sources.iter().flat_map(|(_, data)| data.examples()).collect(),
        }
    }

    /// Returns true if a record is truncated for training.
    pub fn is_cut(&self) -> bool {
        match &self.0 {
            Records::Synthetic { .. } => false,
            Records::Listed { train, held_out } => train.iter().chain(held_out).any(|it| it.cut.is_some()),
            Records::Mixed { sources, .. } => sources.iter().any(|(_, data)| data.is_cut()),
        }
    }

    /// Characters of the longest record after truncation, with the longer of its answers.
    pub fn longest_record(&self) -> usize {
        let of_task = |task: &Synthetic| task.prompt_length() + task.longest_answer();
        self.longest(&of_task, &|record| {
            let answers = [Some(&record.answer), record.rejected.as_ref()].into_iter().flatten();
            let answer = answers.map(|answer| answer.chars().count()).max().unwrap_or(0);
            let whole = record.prompt.chars().count() + answer;
            // The end token is not a character; steps have none.
            let end = usize::from(record.steps.is_empty());
            record.cut.map_or(whole, |cut| whole.min(cut.tokens - end))
        })
    }

    /// Characters of the longest prompt, including held-out ones.
    pub fn longest_prompt(&self) -> usize {
        self.longest(&|task| task.prompt_length(), &|record| record.prompt.chars().count())
    }

    /// Characters of the longest answer, including held-out and rejected ones.
    pub fn longest_answer(&self) -> usize {
        let rejected =
            self.longest(&|_| 0, &|record| record.rejected.iter().flat_map(|it| it.chars()).count());
        self.longest(&|task| task.longest_answer(), &|record| record.answer.chars().count()).max(rejected)
    }

    fn longest(&self, of_task: &dyn Fn(&Synthetic) -> usize, of_record: &dyn Fn(&Record) -> usize) -> usize {
        match &self.0 {
            Records::Synthetic { task, .. } => of_task(task),
            Records::Listed { train, held_out } => {
                train.iter().chain(held_out).map(of_record).max().unwrap_or(0)
            }
            Records::Mixed { sources, .. } => {
                let lengths = sources.iter().map(|(_, data)| data.longest(of_task, of_record));
                lengths.max().unwrap_or(0)
            }
        }
    }
}

fn rewarded(rewards: Option<Scale>, record: Record) -> Record {
    match rewards {
        Some(scale) => scale.applied(record),
        None => record,
    }
}

fn named(domain: &str, records: Vec<Record>) -> Vec<Record> {
    records.into_iter().map(|record| Record { domain: domain.to_owned(), ..record }).collect()
}

/// Merges the records of several sources: each of `places` takes the next record of its source.
fn interleaved(places: &[(usize, u64)], of_sources: Vec<Vec<Record>>) -> Vec<Record> {
    let mut of_sources: Vec<_> = of_sources.into_iter().map(Vec::into_iter).collect();
    places.iter().map(|(source, _)| of_sources[*source].next().expect("as many as places")).collect()
}

fn is_held_out(prompt: &str, percent: u32) -> bool {
    crc32fast::hash(prompt.as_bytes()) % 100 < percent
}

fn distinct(mut records: Vec<Record>) -> Vec<Record> {
    let mut seen = HashSet::new();
    let judged = |record: &Record| {
        let is_judged = record.desirable.is_some() || record.reward.is_some() || !record.steps.is_empty();
        is_judged.then(|| record.answer.clone())
    };
    records.retain(|record| seen.insert((record.key().to_owned(), judged(record))));
    records
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::file::tests::plain;
    use super::*;
    use anyroll_config::{AdditionConfig, FileConfig, MixedConfig, Paths, SortConfig};

    fn open(config: &DataConfig) -> Result<Dataset, Error> {
        let tokens = |record: &Record, _| Ok(record.prompt.chars().count());
        Dataset::open(config, Reading { tokens: &tokens, holds_out: true, step_separator: "" })
    }

    fn sort(digits: u32) -> DataConfig {
        DataConfig::Sort(SortConfig { digits })
    }

    fn addition(digits: u32, reversed: bool) -> DataConfig {
        DataConfig::Addition(AdditionConfig { digits, reversed })
    }

    fn jsonl(lines: &str) -> (tempfile::NamedTempFile, DataConfig) {
        let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
        file.write_all(lines.as_bytes()).unwrap();
        let config = FileConfig { path: Paths::from(file.path()), ..plain() };
        (file, DataConfig::File(Box::new(config)))
    }

    fn questions(count: usize) -> String {
        (0..count).map(|n| format!("{{\"prompt\": \"{n}*2=\", \"answer\": {}}}\n", 2 * n)).collect()
    }

    /// An independent implementation of every task's rule, on the text alone.
    fn is_right(record: &Record) -> bool {
        let (prompt, answer) = (&record.prompt, &record.answer);
        match prompt.chars().last().unwrap() {
            '>' => {
                let mut digits: Vec<char> = prompt.trim_end_matches('>').chars().collect();
                digits.sort_unstable();
                digits.into_iter().collect::<String>() == *answer
            }
            _ if prompt.contains('*') => {
                let number: u64 = prompt.trim_end_matches("*2=").parse().unwrap();
                answer.parse() == Ok(2 * number)
            }
            _ => {
                let sum: u64 =
                    prompt.trim_end_matches('=').split('+').map(|n| n.parse::<u64>().unwrap()).sum();
                let reversed: String = answer.chars().rev().collect();
                answer.parse() == Ok(sum) || reversed.parse() == Ok(sum)
            }
        }
    }

    fn check_split(config: &DataConfig, held_out: usize) {
        let data = open(config).unwrap();
        let evaluation = data.held_out(held_out).unwrap();
        let prompts: HashSet<&str> = evaluation.iter().map(|record| record.prompt.as_str()).collect();
        assert_eq!(prompts.len(), held_out, "{config:?}: prompts of the evaluation are distinct");
        assert_eq!(data.held_out(held_out / 2).unwrap(), evaluation[..held_out / 2], "{config:?}");

        for step in 0..50 {
            let batch = data.train_batch(Draw::Rollout, 7, step, 32);
            assert_eq!(batch, data.train_batch(Draw::Rollout, 7, step, 32), "{config:?}: a step repeats");
            for record in batch.iter().chain(&evaluation) {
                assert!(is_right(record), "{record:?}");
                assert!(record.prompt.chars().count() <= data.longest_prompt(), "{record:?}");
                assert!(record.answer.chars().count() <= data.longest_answer(), "{record:?}");
            }
            assert!(batch.iter().all(|record| !prompts.contains(record.prompt.as_str())), "{config:?}");
        }
        assert_ne!(data.train_batch(Draw::Rollout, 7, 0, 32), data.train_batch(Draw::Rollout, 7, 1, 32));
        assert_ne!(data.train_batch(Draw::Rollout, 7, 0, 32), data.train_batch(Draw::Rollout, 8, 0, 32));
        assert_ne!(data.train_batch(Draw::Rollout, 7, 0, 32), data.train_batch(Draw::Warmup, 7, 0, 32));
    }

    #[test]
    fn no_training_prompt_is_held_out() {
        check_split(&sort(6), 500);
        check_split(&sort(18), 500);
        check_split(&addition(2, false), 500);
        check_split(&addition(9, true), 500);
        let (_file, config) = jsonl(&questions(2000));
        check_split(&config, 100);
    }

    #[test]
    fn a_mix_has_each_source_by_its_weight() {
        let (_file, file) = jsonl(&questions(2000));
        let sources = [("sorting", 3.0, sort(6)), ("sums", 1.0, addition(2, false)), ("doubles", 1.0, file)];
        let config = DataConfig::Mix(
            sources
                .into_iter()
                .map(|(domain, weight, data)| MixedConfig { domain: domain.into(), weight, data })
                .collect(),
        );
        check_split(&config, 100);
        let data = open(&config).unwrap();
        assert_eq!(data.domains().into_iter().collect::<Vec<_>>(), ["doubles", "sorting", "sums"]);
        let share = |records: &[Record], domain: &str| {
            records.iter().filter(|record| record.domain == domain).count() as f64 / records.len() as f64
        };
        for records in [data.train_batch(Draw::Rollout, 3, 5, 100), data.held_out(100).unwrap()] {
            for (domain, expected) in [("sorting", 0.6), ("sums", 0.2), ("doubles", 0.2)] {
                assert!((share(&records, domain) - expected).abs() < 0.02, "{domain}");
            }
        }
        // A file in a mix has epochs, too.
        let drawn: Vec<Record> =
            (0..1000).flat_map(|step| data.train_batch(Draw::Rollout, 3, step, 10)).collect();
        let mut ids: Vec<&str> = drawn
            .iter()
            .filter(|record| record.domain == "doubles")
            .map(|record| record.id.as_str())
            .collect();
        assert_eq!(ids.len(), 2000);
        let epoch: HashSet<&str> = ids.drain(..1500).collect();
        assert_eq!(epoch.len(), 1500, "no record comes twice in an epoch");
    }

    #[test]
    fn about_a_tenth_is_held_out() {
        let data = open(&addition(2, false)).unwrap();
        let held_out = data.held_out_available(usize::MAX);
        assert!((900..1100).contains(&held_out), "{held_out} of 10000");
        // All of them can be requested, and no more.
        assert_eq!(data.held_out(held_out).unwrap().len(), held_out);
        let error = data.held_out(held_out + 1).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{} held-out prompts are requested, but only {held_out} exist", held_out + 1)
        );
    }

    #[test]
    fn files_of_their_own_are_held_out_and_not_trained_on() {
        let (_train, config) = jsonl(&questions(20));
        let (held_out, _) = jsonl(&(questions(5) + "\u{20}\n{\"prompt\": \"99*2=\", \"answer\": 198}\n"));
        let DataConfig::File(file) = config else { panic!("a file") };
        let config = FileConfig { held_out: Some(Paths::from(held_out.path())), ..*file };
        let data = open(&DataConfig::File(Box::new(config.clone()))).unwrap();
        assert_eq!(data.held_out_available(usize::MAX), 6);
        let Records::Listed { train, .. } = &data.0 else { panic!("a file is listed") };
        assert_eq!(train.len(), 15);
        let held_out = data.held_out(6).unwrap();
        assert!(held_out.iter().any(|record| record.prompt == "99*2="));
        assert!(train.iter().all(|record| held_out.iter().all(|other| other.prompt != record.prompt)));
        // A file whose prompts are all held out leaves nothing to train on.
        let all = FileConfig { held_out: Some(config.path.clone()), ..config };
        let error = open(&DataConfig::File(Box::new(all.clone()))).unwrap_err().to_string();
        assert!(error.contains("`held_out` has all 20 prompts of the training files"), "{error}");
        let (nothing, _) = jsonl("");
        let none = FileConfig { held_out: Some(Paths::from(nothing.path())), ..all };
        let error = open(&DataConfig::File(Box::new(none))).unwrap_err().to_string();
        assert!(error.contains("there is no record in ") && error.contains(".jsonl"), "{error}");
    }

    #[test]
    fn a_pairs_answers_are_judged_each_by_itself() {
        let line = |number: usize| format!("{{\"prompt\": \"{number}\", \"answer\": 1, \"worse\": 2}}\n");
        let (_file, config) = jsonl(&(0..90).map(line).collect::<String>());
        let DataConfig::File(file) = config else { panic!("a file") };
        let rejected = Some("worse".to_owned());
        let columns = anyroll_config::NamedColumns { rejected, ..Default::default() };
        let columns = anyroll_config::ColumnsConfig::Named(columns);
        let file = DataConfig::File(Box::new(FileConfig { columns, ..*file }));
        let pairs = open(&file).unwrap().records_of_a_pass().unwrap();
        for (config, digits) in [(&file, false), (&sort(6), true)] {
            let data = open(config).unwrap().unpaired();
            let is_fair = |record: &Record| match record.desirable {
                Some(desirable) if digits => is_right(record) == desirable,
                Some(desirable) => (record.answer == "1") == desirable,
                None => false,
            };
            let drawn = data.train_batch(Draw::Rollout, 3, 0, 2 * pairs);
            let held_out = data.held_out(8).unwrap();
            for records in [&drawn, &held_out] {
                assert!(records.iter().all(|it| is_fair(it) && it.rejected.is_none()), "{records:?}");
                let desirable = records.iter().filter(|it| it.desirable == Some(true)).count();
                assert!(desirable > records.len() / 8 && desirable < records.len(), "{desirable}");
            }
            let right = data.desirable().unwrap().train_batch(Draw::Warmup, 3, 0, 30);
            assert!(right.iter().all(|it| it.desirable != Some(false)), "{right:?}");
        }
        assert_eq!(open(&file).unwrap().unpaired().records_of_a_pass(), Some(2 * pairs));
    }

    #[test]
    fn nothing_is_held_out_that_nobody_asks_for() {
        let (_file, config) = jsonl(&questions(20));
        let tokens = |_: &Record, _| Ok(0);
        let read = |config: &DataConfig| {
            Dataset::open(config, Reading { tokens: &tokens, holds_out: false, step_separator: "" }).unwrap()
        };
        let all = read(&config);
        assert_eq!((all.records_of_a_pass(), all.held_out_available(9)), (Some(20), 0));
        assert!(all.held_out(0).unwrap().is_empty());
        let DataConfig::File(file) = config else { panic!("a file") };
        let some = read(&DataConfig::File(Box::new(FileConfig { held_out_percent: Some(50), ..*file })));
        assert!(some.records_of_a_pass().unwrap() < 20);
    }

    #[test]
    fn the_split_and_the_order_never_change() {
        // Pinned, so that an upgrade of a dependency cannot change the meaning of a seed.
        let prompts = |records: Vec<Record>| records.into_iter().map(|r| r.prompt).collect::<Vec<_>>();
        let data = open(&sort(6)).unwrap();
        assert_eq!(prompts(data.held_out(3).unwrap()), EVALUATION);
        assert_eq!(prompts(data.train_batch(Draw::Rollout, 0, 0, 3)), FIRST_STEP);
    }

    const EVALUATION: [&str; 3] = ["592689>", "454109>", "022088>"];
    const FIRST_STEP: [&str; 3] = ["381489>", "294927>", "798254>"];

    #[test]
    fn an_epoch_of_a_file_has_every_record_once() {
        let (_file, config) = jsonl(&questions(200));
        let data = open(&config).unwrap();
        let Records::Listed { train, .. } = &data.0 else { panic!("a file is listed") };
        // 7 does not divide the number of records, so a batch spans two epochs.
        let steps = train.len() as u64;
        let drawn: Vec<Record> =
            (0..steps).flat_map(|step| data.train_batch(Draw::Rollout, 3, step, 7)).collect();
        let epochs: Vec<Vec<&str>> = drawn
            .chunks(train.len())
            .map(|epoch| epoch.iter().map(|record| record.id.as_str()).collect())
            .collect();
        assert_eq!(epochs.len(), 7);
        for epoch in &epochs {
            assert_eq!(epoch.iter().collect::<HashSet<_>>().len(), train.len());
        }
        assert_ne!(epochs[0], epochs[1]);
    }

    #[test]
    fn bad_files_are_refused_with_their_line() {
        let check = |lines: &str, expected: &str| {
            let (_file, config) = jsonl(lines);
            let error = open(&config).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(
            "{\"prompt\": \"a\", \"answer\": \"b\"}\n{\"prompt\": \"a\"}\n",
            ":2: there is no column `answer`",
        );
        check("{\"prompt\": 1, \"answer\": \"b\"}\n", ":1: `prompt` is neither a text nor messages");
        check("{\"prompt\": \"a\", \"answer\": true}\n", ":1: `answer` is true or false");
        check("{\"prompt\": \"\", \"answer\": \"b\"}\n", ":1: `prompt` is empty");
        check("\n[1]\n", ":2: the line is not a JSON object");
        check("{\"prompt\": \n", ":1: the line is not a JSON object");
        check("", "there is no record in ");
        check("{\"prompt\": \"a\", \"answer\": \"b\"}\n", "of 1 records");
    }
}
