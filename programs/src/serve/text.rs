//! Incremental decoding of tokens: whole characters only, without stop strings.

use std::sync::Arc;

use anyroll_data::Tokenizer;
use anyroll_pipelines::inference::cut;

/// Text stream of one completion.
#[derive(Debug)]
pub(super) struct TextStream {
    pieces: Pieces,
    stops: Arc<[String]>,
    /// Text that may become a stop string with the next token, or that follows one.
    held: String,
}

/// Output of new tokens.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Added {
    /// Text that can be sent.
    pub text: String,
    /// Text of each token, before stop strings are cut off. A character of several tokens belongs to the last
    /// one.
    pub pieces: Vec<String>,
    /// Texts of the alternative tokens at each position, as many as requested.
    pub others: Vec<Vec<String>>,
}

impl TextStream {
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Arc<[String]>) -> Self {
        Self { pieces: Pieces::new(tokenizer), stops, held: String::new() }
    }

    /// Adds tokens; at the `end` all remaining text is released. `others` are alternative tokens at each
    /// position, or empty.
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

    /// Bytes at the end of the text that may start a stop string.
    fn unsure(&self, text: &str) -> usize {
        let begins = |stop: &String| {
            let beginnings = stop.char_indices().map(|(at, _)| at).skip(1).chain([stop.len()]);
            beginnings.filter(|&len| text.ends_with(&stop[..len])).max().unwrap_or(0)
        };
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

/// Text of each token. It may depend on earlier tokens: those that share a character with it, and whether
/// there are any, since a leading space may be dropped. So tokens since the last whole character are decoded
/// together, after the ones before.
#[derive(Debug)]
struct Pieces {
    tokenizer: Arc<Tokenizer>,
    tokens: Vec<i64>,
    /// Number of these tokens that are only context.
    before: usize,
    /// Bytes of their text already returned.
    given: usize,
}

impl Pieces {
    fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, tokens: Vec::new(), before: 0, given: 0 }
    }

    fn push(&mut self, token: i64) -> String {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        // The next token may complete the character that this replaces.
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let new = whole.get(self.given..).unwrap_or_default().to_owned();
        self.given += new.len();
        // Tokens without text, such as special ones, cannot be the context.
        if whole.len() == text.len() && !new.is_empty() {
            self.tokens.drain(..self.before);
            self.before = self.tokens.len();
            self.given = self.tokenizer.decode(&self.tokens).len();
        }
        new
    }

    /// Text that `token` would add instead of the last one; an incomplete character is shown by its
    /// replacement.
    fn instead(&mut self, token: i64) -> String {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        self.tokens.pop();
        text.get(self.given..).unwrap_or_default().to_owned()
    }

    /// Text that no further token completes.
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
    use anyroll_config::FolderConfig;
    use anyroll_data::CharTokenizer;

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

    /// A tokenizer with a token per byte, and some for several bytes: tests/golden/tiny_model.
    fn bytes() -> Arc<Tokenizer> {
        opened(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model"))
    }

    /// The same vocabulary with another decoder, which drops a leading space.
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
        // An incomplete character at the end is decoded with its replacement.
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
        // Only a leading space is dropped.
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
        // Tokens of whole characters or parts, special or unknown, with many spaces.
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
