//! Records as a model learns them: prompt and answer in tokens.

use std::ops::Range;

use anyroll_models::{PackedBatch, Sequence, targets_in};
use tch::Device;

use super::Pass;
use crate::{
    Result,
    config::{Objective, Turns},
    data::{Record, Tokenizer, TokenizerError},
    train::sample_seed,
};

/// A prompt and an answer to it; of a conversation perhaps several, each with what is said to it in front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Prompt, then answer, with an end.
    pub tokens: Vec<i64>,
    /// Where the answers lie, one behind the other; at least one, up to the end of the tokens.
    pub answers: Vec<Range<usize>>,
}

impl Written {
    fn new(prompt: &[i64], answer: &[i64]) -> Self {
        let behind = prompt.len()..prompt.len() + answer.len();
        Self { tokens: [prompt, answer].concat(), answers: vec![behind] }
    }

    /// Tokens of the answers, their ends included.
    pub fn answer_len(&self) -> usize {
        self.answers.iter().map(ExactSizeIterator::len).sum()
    }

    fn prompt_len(&self) -> usize {
        self.answers[0].start
    }
}

/// What `objective` reads of the records: the prompt with its answer, and behind it, where answers are compared, the same
/// prompt with the worse one. Where it is a number that is learnt, all of that is the prompt, and behind it is the token
/// whose number is the text's.
pub fn read(
    tokenizer: &Tokenizer,
    objective: &Objective,
    turns: Turns,
    records: &[Record],
) -> Result<Vec<Written>, TokenizerError> {
    let mut read = Vec::with_capacity(2 * records.len());
    for record in records {
        let worse = if objective.compares() { record.rejected() } else { None };
        let records = [Some(record), worse.as_ref()].into_iter().flatten();
        if objective.is_of_numbers() {
            for record in records {
                read.push(Written::new(&tokenizer.encode_whole(record)?, &[ANY_TOKEN]));
            }
        } else if turns == Turns::All {
            let (tokens, answers) = tokenizer.encode_turns(record)?;
            read.push(Written { tokens, answers });
        } else {
            let prompt = tokenizer.encode_prompt(record)?;
            for record in records {
                read.push(Written::new(&prompt, &tokenizer.encode_answer(record)?));
            }
        }
    }
    Ok(read)
}

/// The number of a token is read before the token is: any will do.
const ANY_TOKEN: i64 = 0;

/// The sequences for a forward pass; what one begins with as the one before it does is computed once.
pub fn pack(sequences: &[Written], device: Device) -> Result<PackedBatch> {
    answers_of(sequences, PackedBatch::sharing(&borrowed(sequences), 1.0, device)?)
}

/// The sequences to train a model on; where its adapters drop values, of each sequence others.
pub fn pack_to_train(drops: bool, sequences: &[Written], pass: Pass, device: Device) -> Result<PackedBatch> {
    if !drops {
        return pack(sequences, device);
    }
    let numbers = pass.first..pass.first + sequences.len();
    let keys: Vec<u64> =
        numbers.map(|number| sample_seed(pass.purpose, pass.seed, pass.number, number)).collect();
    let packed = PackedBatch::new(&borrowed(sequences), 1.0, device)?.with_dropout(&keys)?;
    answers_of(sequences, packed)
}

fn borrowed(sequences: &[Written]) -> Vec<Sequence<'_>> {
    sequences.iter().map(|it| Sequence { tokens: &it.tokens, prompt_len: it.prompt_len() }).collect()
}

/// The batch without what is said between answers.
fn answers_of(sequences: &[Written], packed: PackedBatch) -> Result<PackedBatch> {
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
    use crate::config::FolderConfig;

    fn tiny_model() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tiny_model"))
    }

    fn tokenizer(folder: &Path) -> Tokenizer {
        let config = FolderConfig { path: folder.to_owned(), chat: true, system_prompt: None, lora: None };
        Tokenizer::of_folder(&ModelFolder::open(folder).unwrap(), &config).unwrap()
    }

    /// The first so many messages of a conversation, and the answer to them.
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
