//! One token a character.

use std::collections::{BTreeMap, BTreeSet};

use super::Record;

/// The characters in order of their code, then a padding and an end token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CharTokenizer {
    characters: Vec<char>,
    tokens: BTreeMap<char, i64>,
}

/// A character that the vocabulary lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "record {record}: the character {character:?} is not in the vocabulary, \
     which holds the characters of the training records"
)]
pub struct UnknownCharacter {
    /// The record's id.
    pub record: String,
    /// The character.
    pub character: char,
}

impl CharTokenizer {
    /// A vocabulary of these characters.
    pub fn new(characters: &BTreeSet<char>) -> Self {
        let tokens = characters.iter().copied().zip(0..).collect();
        Self { characters: characters.iter().copied().collect(), tokens }
    }

    /// Number of tokens, the special ones included.
    pub fn vocab_size(&self) -> usize {
        self.characters.len() + 2
    }

    /// The token that fills up a batch; no text has it.
    pub fn pad(&self) -> i64 {
        self.characters.len() as i64
    }

    /// The token that ends a completion.
    pub fn eos(&self) -> i64 {
        self.characters.len() as i64 + 1
    }

    /// The tokens of a record's prompt.
    pub fn encode_prompt(&self, record: &Record) -> Result<Vec<i64>, UnknownCharacter> {
        self.encode(&record.id, &record.prompt)
    }

    /// The tokens of a record's answer and the end token: the completion that earns the reward.
    pub fn encode_answer(&self, record: &Record) -> Result<Vec<i64>, UnknownCharacter> {
        let mut tokens = self.encode(&record.id, &record.answer)?;
        tokens.push(self.eos());
        Ok(tokens)
    }

    /// The text of tokens; special tokens have none.
    pub fn decode(&self, tokens: &[i64]) -> String {
        tokens.iter().filter_map(|&token| self.characters.get(usize::try_from(token).ok()?)).collect()
    }

    fn encode(&self, record: &str, text: &str) -> Result<Vec<i64>, UnknownCharacter> {
        text.chars()
            .map(|character| {
                let token = self.tokens.get(&character).copied();
                token.ok_or_else(|| UnknownCharacter { record: record.to_owned(), character })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(prompt: &str, answer: &str) -> Record {
        Record { id: "line 3".into(), prompt: prompt.into(), answer: answer.into(), ..Record::default() }
    }

    #[test]
    fn text_comes_back() {
        let tokenizer = CharTokenizer::new(&"3>1äß".chars().collect());
        assert_eq!((tokenizer.vocab_size(), tokenizer.pad(), tokenizer.eos()), (7, 5, 6));
        // In the order of the code points: 1 3 > ß ä.
        let record = record("31ä>", "ß1");
        assert_eq!(tokenizer.encode_prompt(&record), Ok(vec![1, 0, 4, 2]));
        assert_eq!(tokenizer.encode_answer(&record), Ok(vec![3, 0, 6]));
        assert_eq!(tokenizer.decode(&[1, 0, 4, 2, 6, 5, 5]), "31ä>");
    }

    #[test]
    fn an_unknown_character_names_its_record() {
        let tokenizer = CharTokenizer::new(&"01".chars().collect());
        let error = tokenizer.encode_prompt(&record("0x1", "")).unwrap_err();
        assert_eq!(error, UnknownCharacter { record: "line 3".to_owned(), character: 'x' });
        assert!(error.to_string().starts_with("record line 3: the character 'x' is not in the vocabulary"));
    }
}
