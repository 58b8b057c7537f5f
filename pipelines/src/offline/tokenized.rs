//! Tokenized records: prompt and answer.

use std::ops::Range;

use anyroll_config::{Keep, Objective, PrmConfig, Turns};
use anyroll_data::{Cut, Record, Tokenizer, TokenizerError};
use anyroll_models::{PackedBatch, Sequence, targets_in};
use tch::Device;

use super::Pass;
use crate::{Result, train::sample_seed};

/// A prompt with an answer; a conversation may have several answers, each after its messages. A solution in steps has
/// one for each labelled step: the token after the step, before which the step's score is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokenized {
    /// Prompt, then answer, with an end token.
    pub tokens: Vec<i64>,
    /// Ranges of the answers, in order; at least one, the last up to the end of the tokens.
    pub answers: Vec<Range<usize>>,
    /// False for the worse answer of a pair, and for one labelled undesirable.
    pub desirable: bool,
    /// Reward of the answers, if the objective learns values.
    pub reward: Option<f64>,
    /// Labels of the steps; empty for other answers.
    pub step_labels: Vec<f64>,
}

impl Tokenized {
    /// In a text without a prompt the first token cannot be predicted.
    fn new(prompt: &[i64], answer: &[i64]) -> Self {
        let behind = prompt.len().max(1)..prompt.len() + answer.len();
        Self::of([prompt, answer].concat(), vec![behind])
    }

    /// Desirable answers without a reward or steps.
    fn of(tokens: Vec<i64>, answers: Vec<Range<usize>>) -> Self {
        Self { tokens, answers, desirable: true, reward: None, step_labels: Vec::new() }
    }

    /// A record's prompt with its labelled steps, or only the last one.
    fn in_steps(tokenizer: &Tokenizer, prm: &PrmConfig, record: &Record) -> Result<Self, TokenizerError> {
        let (mut tokens, ends) = tokenizer.encode_steps(record, &prm.step_separator)?;
        let first = if prm.train_on_last_step_only { ends.len() - 1 } else { 0 };
        // The last step that is left of a record that is cut.
        let most = record.cut.map_or(tokens.len(), |cut| cut.tokens);
        let learnt = ends.iter().zip(&record.steps).skip(first).filter(|(end, _)| **end <= most);
        let (answers, step_labels): (Vec<_>, Vec<_>) =
            learnt.map(|(&end, step)| (end..end + 1, step.label)).unzip();
        tokens.truncate(answers.last().expect("a record of which nothing is left is left out").start);
        tokens.push(ANY_TOKEN);
        Ok(Self { step_labels, ..Self::of(tokens, answers) })
    }

    /// Truncates the tokens and the answers; the last answer ends the tokens. Part of an answer must remain.
    fn cut(self, Cut { tokens: most, keep }: Cut) -> Self {
        let excess = self.tokens.len().saturating_sub(most);
        let first = if keep == Keep::KeepEnd { excess } else { 0 };
        let end = first + most.min(self.tokens.len());
        let left = |answer: &Range<usize>| {
            let left = answer.start.max(first + 1) - first..answer.end.min(end).saturating_sub(first);
            (!left.is_empty()).then_some(left)
        };
        let answers: Vec<Range<usize>> = self.answers.iter().filter_map(left).collect();
        let last = answers.last().expect("a record of which nothing is left is left out").end;
        Self { tokens: self.tokens[first..][..last].to_vec(), answers, ..self }
    }

    /// Tokens of the answers, including end tokens.
    pub fn answer_len(&self) -> usize {
        self.answers.iter().map(ExactSizeIterator::len).sum()
    }

    fn prompt_len(&self) -> usize {
        self.answers[0].start
    }
}

/// Tokenizes records for `objective`: each prompt with its answer, followed by the worse answer with the same
/// prompt if the objective compares. For a reward model all of that is the prompt, followed by the token that the
/// scalar is read at.
pub fn read(
    tokenizer: &Tokenizer,
    objective: &Objective,
    turns: Turns,
    records: &[Record],
) -> Result<Vec<Tokenized>, TokenizerError> {
    let mut read = Vec::with_capacity(2 * records.len());
    for record in records {
        let mut push = |written: Tokenized| {
            // The second sequence is the worse answer to the same prompt.
            let is_worse = objective.compares() && read.len() % 2 == 1;
            let desirable = !is_worse && record.desirable != Some(false);
            let written = Tokenized { desirable, reward: record.reward, ..written };
            read.push(match record.cut {
                Some(cut) => written.cut(cut),
                None => written,
            });
        };
        let worse = if objective.compares() { record.rejected() } else { None };
        let records = [Some(record), worse.as_ref()].into_iter().flatten();
        if let Some(prm) = objective.prm() {
            read.push(Tokenized::in_steps(tokenizer, prm, record)?);
        } else if objective.is_of_numbers() {
            for record in records {
                push(Tokenized::new(&tokenizer.encode_whole(record)?, &[ANY_TOKEN]));
            }
        } else if turns == Turns::All && !record.is_text() {
            let (tokens, answers) = tokenizer.encode_turns(record)?;
            push(Tokenized::of(tokens, answers));
        } else {
            let prompt = tokenizer.encode_prompt(record)?;
            for record in records {
                push(Tokenized::new(&prompt, &tokenizer.encode_answer(record)?));
            }
        }
    }
    Ok(read)
}

/// Mismatched records: those in `range`, each with the answer of the record before it. The first of all records gets
/// the answer of the last. Answers are truncated to `most` tokens. The shift is over the records of all ranks, so
/// their division among ranks does not matter.
pub fn mismatched(records: &[Record], range: Range<usize>, most: usize) -> Vec<Record> {
    let of = |index: usize| {
        let before = &records[(index + records.len() - 1) % records.len()];
        let cut = records[index].cut.unwrap_or(Cut { tokens: most, keep: Keep::KeepStart });
        Record { answer: before.answer.clone(), cut: Some(cut), ..records[index].clone() }
    };
    range.map(of).collect()
}

/// The scalar is read before the token is, so any token will do.
const ANY_TOKEN: i64 = 0;

/// Packs sequences for a forward pass. A prefix shared with the sequence before is computed once.
pub fn pack(sequences: &[Tokenized], device: Device) -> Result<PackedBatch> {
    answers_of(sequences, PackedBatch::sharing(&borrowed(sequences), 1.0, device)?)
}

/// Packs sequences for training. If adapters have dropout, each sequence gets its own mask and nothing is
/// shared.
pub fn pack_to_train(
    drops: bool,
    sequences: &[Tokenized],
    pass: Pass,
    device: Device,
) -> Result<PackedBatch> {
    if !drops {
        return pack(sequences, device);
    }
    let numbers = pass.first..pass.first + sequences.len();
    let keys: Vec<u64> =
        numbers.map(|number| sample_seed(pass.purpose, pass.seed, pass.number, number)).collect();
    let packed = PackedBatch::new(&borrowed(sequences), 1.0, device)?.with_dropout(&keys)?;
    answers_of(sequences, packed)
}

fn borrowed(sequences: &[Tokenized]) -> Vec<Sequence<'_>> {
    sequences.iter().map(|it| Sequence { tokens: &it.tokens, prompt_len: it.prompt_len() }).collect()
}

/// Excludes the messages between answers from the batch's targets.
fn answers_of(sequences: &[Tokenized], packed: PackedBatch) -> Result<PackedBatch> {
    if sequences.iter().all(|sequence| sequence.answers.len() == 1) {
        return Ok(packed);
    }
    let answers = borrowed(sequences).into_iter().zip(sequences.iter().map(|it| &it.answers[..]));
    Ok(packed.keeping(&targets_in(answers))?)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use anyroll_models::hf::ModelFolder;
    use serde_json::{Value, json};

    use super::*;
    use anyroll_config::FolderConfig;
    use anyroll_data::Step;

    fn tiny_model() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tiny_model"))
    }

    fn tokenizer(folder: &Path) -> Tokenizer {
        let config = FolderConfig { path: folder.to_owned(), chat: true, system_prompt: None, lora: None };
        Tokenizer::of_folder(&ModelFolder::open(folder).unwrap(), &config).unwrap()
    }

    /// The first `messages` messages of a conversation, and the answer to them.
    fn record(messages: usize) -> Record {
        let said = [
            "What is 2 + 2?",
            "4",
            "And 3 more?",
            " It's\n\n7 then.",
            "Thanks <|im_end|>",
            "You're welcome.",
        ];
        let message = |(number, content): (usize, &&str)| {
            let role = if number % 2 == 0 { "user" } else { "assistant" };
            json!({"role": role, "content": content})
        };
        let messages: Vec<Value> = said[..messages].iter().enumerate().map(message).collect();
        let answer = said[messages.len()].to_owned();
        Record { id: "line 1".to_owned(), messages, answer, ..Record::default() }
    }

    #[test]
    fn a_turn_is_learnt_as_the_answer_to_what_is_before_it() {
        let tokenizer = tokenizer(tiny_model());
        let read = |turns, record| {
            let mut read = read(&tokenizer, &Objective::Sft, turns, &[record]).unwrap();
            assert_eq!(read.len(), 1);
            read.remove(0)
        };
        let whole = read(Turns::All, record(5));
        assert_eq!(whole.answers.len(), 3);
        for (answer, messages) in whole.answers.iter().zip([1, 3, 5]) {
            let shorter = read(Turns::Last, record(messages));
            assert_eq!((&whole.tokens[..answer.end], answer), (&shorter.tokens[..], &shorter.answers[0]));
        }
        let packed = pack(&[whole.clone(), read(Turns::Last, record(1))], Device::Cpu).unwrap();
        assert_eq!(packed.targets() as usize, whole.answer_len() + 2);
    }

    /// Equal to transformers' causal models with a text as its own labels, which they shift by one.
    #[test]
    fn of_a_text_every_token_is_learnt_but_the_first() {
        let tokenizer = tokenizer(tiny_model());
        let stop = tokenizer.stop_tokens()[0];
        let said = |text: &str| tokenizer.encode_text(text).unwrap();
        for (text, ends) in [("And 3 more?", true), ("And 3 more?<|im_end|>", false)] {
            let record = Record { answer: text.to_owned(), ..Record::default() };
            for turns in [Turns::Last, Turns::All] {
                let read = read(&tokenizer, &Objective::Sft, turns, std::slice::from_ref(&record)).unwrap();
                let tokens = if ends { [said(text), vec![stop]].concat() } else { said(text) };
                let behind_the_first = 1..tokens.len();
                let answers = vec![behind_the_first];
                assert_eq!(read, [Tokenized::of(tokens, answers)], "{text}");
            }
        }
    }

    /// Tokens and labels are those of TRL's PRMTrainer (tests/python/make_prm_golden.py), but for the token at the end.
    #[test]
    fn steps_are_labelled_at_their_separators() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        let golden = fs::read_to_string(folder.join("prm/steps.json")).unwrap();
        let golden: Value = serde_json::from_str(&golden).unwrap();
        let config =
            FolderConfig { path: folder.join("tiny_model"), chat: false, system_prompt: None, lora: None };
        let tokenizer = Tokenizer::of_folder(&ModelFolder::open(&config.path).unwrap(), &config).unwrap();
        let check = |record: &Record, prm: PrmConfig, expected: &Value| {
            let objective = Objective::Prm(prm);
            let read = read(&tokenizer, &objective, Turns::Last, std::slice::from_ref(record)).unwrap();
            let [Tokenized { tokens, answers, desirable: true, reward: None, step_labels }] = &read[..]
            else {
                panic!("{read:?}")
            };
            let ids: Vec<i64> = serde_json::from_value(expected["input_ids"].clone()).unwrap();
            let labels: Vec<i64> = serde_json::from_value(expected["labels"].clone()).unwrap();
            let labelled = labels.iter().enumerate().filter(|(_, label)| **label != -100);
            let (ends, labels): (Vec<usize>, Vec<f64>) =
                labelled.map(|(at, label)| (at + 1, *label as f64)).unzip();
            let last = *ends.last().unwrap();
            assert_eq!(tokens[..], [&ids[..last], &[0]].concat());
            assert_eq!(answers.iter().map(|answer| answer.start).collect::<Vec<_>>(), ends);
            assert!(answers.iter().all(|answer| answer.len() == 1));
            assert_eq!(*step_labels, labels);
            // Each step is a target of the batch.
            let targets = pack(&read, Device::Cpu).unwrap().targets();
            assert_eq!(targets as usize, labels.len());
            ids.len()
        };
        let mut cut = 0;
        for it in golden["records"].as_array().unwrap() {
            let steps = it["completions"].as_array().unwrap().iter().zip(it["labels"].as_array().unwrap());
            let steps = steps.map(|(text, label)| Step {
                text: text.as_str().unwrap().to_owned(),
                label: f64::from(u8::from(label == true)),
            });
            let (id, prompt) = ("line 1".to_owned(), it["prompt"].as_str().unwrap().to_owned());
            let record = Record { id, prompt, steps: steps.collect(), ..Record::default() };
            for (separator, expected) in it["read"].as_object().unwrap() {
                let prm = PrmConfig { step_separator: separator.clone(), ..PrmConfig::default() };
                check(&record, prm, expected);
            }
            let last_only = PrmConfig { train_on_last_step_only: true, ..PrmConfig::default() };
            assert_eq!(Objective::Prm(last_only.clone()).evaluated(), Objective::Prm(PrmConfig::default()));
            let length = check(&record, last_only, &it["last_only"]);
            if record.steps.len() > 1 {
                let shorter = Some(Cut { tokens: length - 1, keep: Keep::KeepStart });
                check(&Record { cut: shorter, ..record }, PrmConfig::default(), &it["cut"]);
                cut += 1;
            }
        }
        assert_eq!(cut, 3);
    }

    #[test]
    fn every_prompt_meets_the_answer_before_its_own() {
        let record = |prompt: &str, answer: &str| Record {
            prompt: prompt.to_owned(),
            answer: answer.to_owned(),
            ..Record::default()
        };
        let records = [record("a", "1"), record("b", "2"), record("c", "3")];
        let texts = |range| {
            let found = mismatched(&records, range, 9);
            found.into_iter().map(|it| it.prompt + &it.answer).collect::<Vec<_>>()
        };
        assert_eq!(texts(0..3), ["a3", "b1", "c2"]);
        assert_eq!(texts(1..3), ["b1", "c2"], "a rank has its part of these");
    }

    #[test]
    fn what_is_cut_keeps_answers_where_they_were() {
        let (tokens, answers) = ((0..12).collect(), vec![2..5, 7..12]);
        let whole = Tokenized::of(tokens, answers);
        let cut = |tokens, keep| {
            let cut = whole.clone().cut(Cut { tokens, keep });
            (cut.tokens, cut.answers)
        };
        let only = |answer: Range<usize>| vec![answer];
        for tokens in [12, 13] {
            assert_eq!(cut(tokens, Keep::KeepStart), (whole.tokens.clone(), whole.answers.clone()));
            assert_eq!(cut(tokens, Keep::KeepEnd), (whole.tokens.clone(), whole.answers.clone()));
        }
        assert_eq!(cut(9, Keep::KeepStart), ((0..9).collect(), vec![2..5, 7..9]));
        // The last answer ends the tokens.
        for tokens in [5, 6, 7] {
            assert_eq!(cut(tokens, Keep::KeepStart), ((0..5).collect(), only(2..5)));
        }
        assert_eq!(cut(9, Keep::KeepEnd), ((3..12).collect(), vec![1..2, 4..9]));
        assert_eq!(cut(2, Keep::KeepEnd), (vec![10, 11], only(1..2)), "its first token follows nothing");
    }

    #[test]
    fn a_template_that_changes_what_was_said_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(tiny_model()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let file = folder.path().join("tokenizer_config.json");
        let trimmed =
            fs::read_to_string(&file).unwrap().replace("message['content']", "message['content'] | trim");
        fs::write(&file, trimmed).unwrap();
        let error = read(&tokenizer(folder.path()), &Objective::Sft, Turns::All, &[record(5)])
            .unwrap_err()
            .to_string();
        assert!(error.contains("message 4 of line 1") && error.contains("turns: last"), "{error}");
    }
}
