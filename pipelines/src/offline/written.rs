//! Records as a model learns them: prompt and answer in tokens.

use anyroll_models::{PackedBatch, Sequence};
use tch::Device;

use super::Pass;
use crate::{
    Result,
    config::Objective,
    data::{Record, Tokenizer, TokenizerError},
    train::sample_seed,
};

/// A prompt and an answer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Prompt, then answer, with an end.
    pub tokens: Vec<i64>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
}

impl Written {
    /// Tokens of the answer, its end included.
    pub fn answer_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }
}

/// What `objective` reads of the records: the prompt with its answer, and behind it, where answers are compared, the same
/// prompt with the worse one. Where it is a number that is learnt, all of that is the prompt, and behind it is the token
/// whose number is the text's.
pub fn read(
    tokenizer: &Tokenizer,
    objective: &Objective,
    records: &[Record],
) -> Result<Vec<Written>, TokenizerError> {
    let mut read = Vec::with_capacity(2 * records.len());
    for record in records {
        let worse = if objective.compares() { record.rejected() } else { None };
        let records = [Some(record), worse.as_ref()].into_iter().flatten();
        let mut push = |prompt: &[i64], answer: &[i64]| {
            read.push(Written { prompt_len: prompt.len(), tokens: [prompt, answer].concat() });
        };
        if objective.is_of_numbers() {
            for record in records {
                push(&tokenizer.encode_whole(record)?, &[ANY_TOKEN]);
            }
        } else {
            let prompt = tokenizer.encode_prompt(record)?;
            for record in records {
                push(&prompt, &tokenizer.encode_answer(record)?);
            }
        }
    }
    Ok(read)
}

/// The number of a token is read before the token is: any will do.
const ANY_TOKEN: i64 = 0;

/// The sequences for a forward pass; what one begins with as the one before it does is computed once.
pub fn pack(sequences: &[Written], device: Device) -> Result<PackedBatch> {
    Ok(PackedBatch::sharing(&borrowed(sequences), 1.0, device)?)
}

/// The sequences to train a model on; where its adapters drop values, of each sequence others.
pub fn pack_to_train(drops: bool, sequences: &[Written], pass: Pass, device: Device) -> Result<PackedBatch> {
    if !drops {
        return pack(sequences, device);
    }
    let numbers = pass.first..pass.first + sequences.len();
    let keys: Vec<u64> =
        numbers.map(|number| sample_seed(pass.purpose, pass.seed, pass.number, number)).collect();
    Ok(PackedBatch::new(&borrowed(sequences), 1.0, device)?.with_dropout(&keys)?)
}

fn borrowed(sequences: &[Written]) -> Vec<Sequence<'_>> {
    sequences.iter().map(|it| Sequence { tokens: &it.tokens, prompt_len: it.prompt_len }).collect()
}
