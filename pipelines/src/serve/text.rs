//! Tokens to text as they come: whole characters only, and nothing of a stop string.

use std::sync::Arc;

use crate::{data::Tokenizer, inference::cut};

/// The text of one completion on its way.
#[derive(Debug)]
pub(super) struct TextStream {
    pieces: Pieces,
    stops: Arc<[String]>,
    /// Text that the next token may turn into a stop string, or that stands behind one.
    held: String,
}

/// What tokens add to the text.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Added {
    /// What can be said of the text now.
    pub text: String,
    /// What each token gives to the text before it is cut, held back or not. A character that several tokens make is
    /// its last one's.
    pub pieces: Vec<String>,
    /// What other tokens would have given in the place of each, as many as were asked about.
    pub others: Vec<Vec<String>>,
}

impl TextStream {
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Arc<[String]>) -> Self {
        Self { pieces: Pieces::new(tokenizer), stops, held: String::new() }
    }

    /// Takes tokens; at the `end` all the rest of the text is said. `others` are tokens that might have been in the place of
    /// each, or none at all.
    pub fn push(&mut self, tokens: &[i64], others: &[Vec<(i64, f32)>], end: bool) -> Added {
        let (mut pieces, mut of_others) = (Vec::new(), Vec::new());
        for (at, &token) in tokens.iter().enumerate() {
            let others = others.get(at).map_or(&[][..], Vec::as_slice);
            of_others.push(others.iter().map(|&(other, _)| self.pieces.instead(other)).collect());
            pieces.push(self.pieces.push(token));
        }
        if let Some(last) = pieces.last_mut().filter(|_| end) {
            last.push_str(&self.pieces.rest());
        }
        self.held.extend(pieces.iter().map(String::as_str));
        let text = cut(&self.held, &self.stops);
        let sure = if end { text.len() } else { text.len() - self.unsure(text) };
        Added { text: self.held.drain(..sure).collect(), pieces, others: of_others }
    }

    /// Bytes at the text's end that may be the beginning of a stop string.
    fn unsure(&self, text: &str) -> usize {
        let begins = |stop: &String| {
            let beginnings = stop.char_indices().map(|(at, _)| at).skip(1).chain([stop.len()]);
            beginnings.filter(|&len| text.ends_with(&stop[..len])).max().unwrap_or(0)
        };
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

/// What each token adds to a text. A token's text may depend on those before it: on the ones that it shares a
/// character with, and on whether there are any, since a text's first space may be left out. So those since the text
/// last had whole characters only are decoded together, behind those before them.
#[derive(Debug)]
struct Pieces {
    tokenizer: Arc<Tokenizer>,
    tokens: Vec<i64>,
    /// Tokens of them that only are what the others stand behind.
    before: usize,
    /// Bytes of their text that were handed out.
    given: usize,
}

impl Pieces {
    fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, tokens: Vec::new(), before: 0, given: 0 }
    }

    fn push(&mut self, token: i64) -> String {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        // The next token may complete the character that this stands for.
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let new = whole.get(self.given..).unwrap_or_default().to_owned();
        self.given += new.len();
        // Where nothing was added, as by special tokens, there would be no text to stand behind.
        if whole.len() == text.len() && !new.is_empty() {
            self.tokens.drain(..self.before);
            self.before = self.tokens.len();
            self.given = self.tokenizer.decode(&self.tokens).len();
        }
        new
    }

    /// What `token` would add as the last one: of a character that it begins, what stands for that.
    fn instead(&mut self, token: i64) -> String {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        self.tokens.pop();
        text.get(self.given..).unwrap_or_default().to_owned()
    }

    /// What no further token completes.
    fn rest(&mut self) -> String {
        self.tokenizer.decode(&self.tokens).get(self.given..).unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use anyroll_models::hf::ModelFolder;
    use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
    use serde_json::{Value, json};

    use super::*;
    use crate::{config::FolderConfig, data::CharTokenizer};

    #[test]
    fn what_may_become_a_stop_string_is_held_back() {
        let characters: BTreeSet<char> = ('a'..='e').collect();
        let tokenizer = Arc::new(Tokenizer::Characters(CharTokenizer::new(&characters)));
        let stops: Arc<[String]> = ["cde".to_owned(), "dd".to_owned()].into();
        let check = |text: &str, expected: &[&str]| {
            let mut stream = TextStream::new(tokenizer.clone(), stops.clone());
            let count = text.len();
            let tokens = text.bytes().map(|byte| i64::from(byte - b'a'));
            let added =
                tokens.enumerate().map(|(index, token)| stream.push(&[token], &[], index + 1 == count));
            let (found, pieces): (Vec<String>, Vec<String>) =
                added.map(|added| (added.text, added.pieces.concat())).unzip();
            assert_eq!(found, expected, "{text}");
            assert_eq!(pieces.concat(), text);
        };
        check("abcab", &["a", "b", "", "ca", "b"]);
        check("acde", &["a", "", "", ""]);
        check("acdb", &["a", "", "", "cdb"]);
        check("abd", &["a", "b", "d"]);
    }

    /// A token a byte, but for some texts of several: that of tests/golden/tiny_model.
    fn bytes() -> Arc<Tokenizer> {
        opened(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model"))
    }

    /// The same vocabulary with another decoder, which takes a text's first space away.
    fn words() -> Arc<Tokenizer> {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model");
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"] {
            fs::copy(from.join(name), folder.path().join(name)).unwrap();
        }
        let text = fs::read_to_string(from.join("tokenizer.json")).unwrap().replace('Ġ', "▁");
        let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
        tokenizer["decoder"] =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        opened(folder.path())
    }

    fn opened(path: &Path) -> Arc<Tokenizer> {
        let config = FolderConfig { path: path.to_owned(), chat: false, system_prompt: None, lora: None };
        Arc::new(Tokenizer::of_folder(&ModelFolder::open(path).unwrap(), &config).unwrap())
    }

    #[test]
    fn a_character_is_its_last_tokens() {
        let tokenizer = bytes();
        let tokens = tokenizer.encode_text("é€ 😀!").unwrap();
        let expected = ["", "é", "", "", "€", " ", "", "", "", "😀", "!"];
        assert_eq!(tokens.len(), expected.len());
        let mut stream = TextStream::new(tokenizer.clone(), [].into());
        let found: Vec<Added> = tokens.iter().map(|&token| stream.push(&[token], &[], false)).collect();
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!((found.text.as_str(), found.pieces.concat().as_str()), (expected, expected));
        }
        // What is cut off within a character ends as it is decoded.
        let mut stream = TextStream::new(tokenizer, [].into());
        assert_eq!(stream.push(&tokens[..1], &[], false).text, "");
        assert_eq!(stream.push(&tokens[2..3], &[], true).pieces, ["\u{fffd}\u{fffd}"]);
    }

    #[test]
    fn another_token_has_the_text_that_it_would_have_had() {
        let (tokenizer, words) = (bytes(), words());
        let [first, second] = <[i64; 2]>::try_from(tokenizer.encode_text("é").unwrap()).unwrap();
        let mut stream = TextStream::new(tokenizer, [].into());
        let others = [vec![(64, 0.0), (first, 0.0)], vec![(second, 0.0), (64, 0.0)]];
        let added = stream.push(&[first, second], &others, false);
        assert_eq!(added.others, [["a", "\u{fffd}"], ["é", "\u{fffd}a"]]);
        assert_eq!(added.text, "é");
        // Only a text's first space is left out.
        let mut stream = TextStream::new(words, [].into());
        let added = stream.push(&[64, 220], &[vec![(220, 0.0)], vec![(220, 0.0)]], false);
        assert_eq!(added.others, [[""], [" "]]);
    }

    #[test]
    fn a_stop_string_may_end_and_begin_within_tokens() {
        let tokenizer = bytes();
        let tokens = tokenizer.encode_text("a tokenizer €").unwrap();
        let said = |stop: &str| {
            let mut stream = TextStream::new(tokenizer.clone(), [stop.to_owned()].into());
            let last = tokens.len() - 1;
            let added =
                tokens.iter().enumerate().map(|(at, &token)| stream.push(&[token], &[], at == last).text);
            added.collect::<String>()
        };
        assert_eq!(said("kenize"), "a to");
        assert_eq!(said("r €"), "a tokenize");
        assert_eq!(said("€€"), "a tokenizer €");
    }

    #[test]
    fn pieces_join_to_the_text_of_all() {
        // Whole characters or not, special or unknown, with many spaces and with halves of characters.
        let tokens = vec(prop_oneof![0..330i64, 94..200i64, Just(220i64), Just(320i64)], 0..60);
        for tokenizer in [bytes(), words()] {
            let mut runner = TestRunner::deterministic();
            let checked = runner.run(&(&tokens, 1..5usize), |(tokens, at_a_time)| {
                let mut stream = TextStream::new(tokenizer.clone(), [].into());
                let mut found = Added::default();
                let count = tokens.len().div_ceil(at_a_time);
                for (index, tokens) in tokens.chunks(at_a_time).enumerate() {
                    let added = stream.push(tokens, &[], index + 1 == count);
                    found.text += &added.text;
                    found.pieces.extend(added.pieces);
                }
                prop_assert_eq!(found.pieces.len(), tokens.len());
                prop_assert_eq!(found.pieces.concat(), tokenizer.decode(&tokens));
                prop_assert_eq!(found.text, tokenizer.decode(&tokens));
                Ok(())
            });
            checked.unwrap();
        }
        assert_eq!(words().decode(&[220, 220, 64]), " a");
    }
}
