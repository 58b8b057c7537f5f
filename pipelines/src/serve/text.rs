//! Tokens to text as they come: whole characters only, and nothing of a stop string.

use std::sync::Arc;

use crate::{data::Tokenizer, inference::cut};

/// The text of one completion on its way.
#[derive(Debug)]
pub(super) struct TextStream {
    tokenizer: Arc<Tokenizer>,
    stops: Arc<[String]>,
    tokens: Vec<i64>,
    /// Bytes that were handed out.
    given: usize,
}

impl TextStream {
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Arc<[String]>) -> Self {
        Self { tokenizer, stops, tokens: Vec::new(), given: 0 }
    }

    /// What can be said of the text now that these tokens are there; all the rest of it at the `end`.
    pub fn push(&mut self, tokens: &[i64], end: bool) -> String {
        self.tokens.extend_from_slice(tokens);
        // From the start, since a token's text may depend on those before it.
        let text = self.tokenizer.decode(&self.tokens);
        let text = cut(&text, &self.stops);
        let sure = if end { text } else { &text[..text.len() - self.unsure(text)] };
        let new = sure.get(self.given..).unwrap_or_default().to_owned();
        self.given += new.len();
        new
    }

    /// Bytes at the text's end that the next token may change: a character that is not whole, or the beginning of a
    /// stop string.
    fn unsure(&self, text: &str) -> usize {
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let begins = |stop: &String| {
            let beginnings = stop.char_indices().map(|(at, _)| at).skip(1).chain([stop.len()]);
            beginnings.filter(|&len| whole.ends_with(&stop[..len])).max().unwrap_or(0)
        };
        text.len() - whole.len() + self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::data::CharTokenizer;

    #[test]
    fn what_may_become_a_stop_string_is_held_back() {
        let characters: BTreeSet<char> = ('a'..='e').collect();
        let tokenizer = Arc::new(Tokenizer::Characters(CharTokenizer::new(&characters)));
        let stops: Arc<[String]> = ["cde".to_owned(), "dd".to_owned()].into();
        let check = |text: &str, expected: &[&str]| {
            let mut stream = TextStream::new(tokenizer.clone(), stops.clone());
            let count = text.len();
            let tokens = text.bytes().map(|byte| i64::from(byte - b'a'));
            let found: Vec<String> =
                tokens.enumerate().map(|(index, token)| stream.push(&[token], index + 1 == count)).collect();
            assert_eq!(found, expected, "{text}");
        };
        check("abcab", &["a", "b", "", "ca", "b"]);
        check("acde", &["a", "", "", ""]);
        check("acdb", &["a", "", "", "cdb"]);
        check("abd", &["a", "b", "d"]);
    }
}
