//! Tokenizer with one token per character.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::{Record, TokenBytes};

/// Name of the padding token in files.
const PAD: &str = "<pad>";
/// Name of the end token in files.
const EOS: &str = "<eos>";

/// A vocabulary of characters sorted by code point, then a padding and an end token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CharTokenizer {
    characters: Vec<char>,
    tokens: BTreeMap<char, i64>,
}

/// A character is missing in the vocabulary.
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
    /// Creates a tokenizer for these characters.
    pub fn new(characters: &BTreeSet<char>) -> Self {
        let tokens = characters.iter().copied().zip(0..).collect();
        Self { characters: characters.iter().copied().collect(), tokens }
    }

    /// Number of tokens, the special ones included.
    pub fn vocab_size(&self) -> usize {
        self.characters.len() + 2
    }

    /// The token that pads a batch; no text contains it.
    pub fn pad(&self) -> i64 {
        self.characters.len() as i64
    }

    /// The token that ends a completion.
    pub fn eos(&self) -> i64 {
        self.characters.len() as i64 + 1
    }

    /// Content of every token, indexed by id.
    pub(super) fn token_bytes(&self) -> Vec<TokenBytes> {
        let text = |character: &char| TokenBytes::Text(character.to_string().into_bytes());
        let special = |name: &str| TokenBytes::Special(name.to_owned());
        self.characters.iter().map(text).chain([special(PAD), special(EOS)]).collect()
    }

    /// Every token with its text, including the special ones.
    pub fn vocabulary(&self) -> impl Iterator<Item = (String, i64)> + '_ {
        let characters = self.tokens.iter().map(|(character, token)| (character.to_string(), *token));
        characters.chain([(PAD.to_owned(), self.pad()), (EOS.to_owned(), self.eos())])
    }

    /// Encodes a record's prompt.
    pub fn encode_prompt(&self, record: &Record) -> Result<Vec<i64>, UnknownCharacter> {
        self.encode(&record.id, &record.prompt)
    }

    /// Encodes a record's answer with the end token: a completion with full reward.
    pub fn encode_answer(&self, record: &Record) -> Result<Vec<i64>, UnknownCharacter> {
        let mut tokens = self.encode(&record.id, &record.answer)?;
        tokens.push(self.eos());
        Ok(tokens)
    }

    /// Decodes tokens; special tokens have no text.
    pub fn decode(&self, tokens: &[i64]) -> String {
        tokens.iter().filter_map(|&token| self.characters.get(usize::try_from(token).ok()?)).collect()
    }

    /// The tokenizer as files that `transformers` and the `tokenizers` crate load. Unknown characters are an
    /// error there, too.
    pub fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let special = |id: i64, content: &str| {
            json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false,
                   "lstrip": false, "rstrip": false})
        };
        let characters = self.tokens.iter().map(|(character, token)| (character.to_string(), json!(token)));
        let vocabulary: Map<String, Value> = characters.collect();
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [special(self.pad(), PAD), special(self.eos(), EOS)],
            "normalizer": null,
            "pre_tokenizer": {
                "type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": false,
            },
            "post_processor": null,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        });
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": false,
        });
        vec![
            ("tokenizer.json", tokenizer.to_string().into_bytes()),
            ("tokenizer_config.json", config.to_string().into_bytes()),
        ]
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
        // Sorted by code point: 1 3 > ß ä.
        let record = record("31ä>", "ß1");
        assert_eq!(tokenizer.encode_prompt(&record), Ok(vec![1, 0, 4, 2]));
        assert_eq!(tokenizer.encode_answer(&record), Ok(vec![3, 0, 6]));
        assert_eq!(tokenizer.decode(&[1, 0, 4, 2, 6, 5, 5]), "31ä>");
    }

    #[test]
    fn its_files_are_the_same_tokenizer() {
        let tokenizer = CharTokenizer::new(&"3>1ä\n ".chars().collect());
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in tokenizer.files() {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        let files = crate::HfTokenizer::open(folder.path()).unwrap();
        assert_eq!(files.eos(), Some(tokenizer.eos()));
        for text in ["31ä>", "\n \n", "", "1  1"] {
            let tokens = tokenizer.encode("", text).unwrap();
            assert_eq!(files.encode(text, true).unwrap(), tokens, "{text:?}");
            assert_eq!(files.decode(&[&tokens[..], &[tokenizer.eos()]].concat()).unwrap(), text);
        }
        assert!(files.encode("x", true).is_err());
    }

    #[test]
    fn an_unknown_character_names_its_record() {
        let tokenizer = CharTokenizer::new(&"01".chars().collect());
        let error = tokenizer.encode_prompt(&record("0x1", "")).unwrap_err();
        assert_eq!(error, UnknownCharacter { record: "line 3".to_owned(), character: 'x' });
        assert!(error.to_string().starts_with("record line 3: the character 'x' is not in the vocabulary"));
    }
}
