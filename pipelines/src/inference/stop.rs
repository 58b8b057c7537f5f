//! Stop strings: a completion ends when one of them appears in its text.

use std::sync::Arc;

use anyroll_data::Tokenizer;
use anyroll_models::generation::StopCondition;
use serde::Deserialize;

/// Stop strings in a request: one text, or a list.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "neither a text nor a list of texts")]
pub enum Texts {
    /// One.
    One(String),
    /// A list.
    Several(Vec<String>),
}

impl Texts {
    /// All of them.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Texts::One(text) => vec![text],
            Texts::Several(texts) => texts,
        }
    }
}

/// A condition that ends a completion with any of `strings`, which may be special tokens; `None` without
/// strings.
pub fn stop_condition(tokenizer: &Arc<Tokenizer>, strings: &[String]) -> Option<StopCondition> {
    let longest = strings.iter().map(String::len).max()?;
    let special: Vec<i64> = strings.iter().filter_map(|string| tokenizer.special_token(string)).collect();
    let (tokenizer, strings) = (tokenizer.clone(), strings.to_vec());
    Some(StopCondition(Arc::new(move |tokens| {
        if tokens.last().is_some_and(|last| special.contains(last)) {
            return true;
        }
        // A token has at least one byte, except special tokens and those with an incomplete character.
        let tail = &tokens[tokens.len().saturating_sub(longest + 8)..];
        let text = tokenizer.decode(tail);
        strings.iter().any(|string| text.contains(string))
    })))
}

/// The text before the first of `strings` in it.
pub fn cut<'a>(text: &'a str, strings: &[String]) -> &'a str {
    let first = strings.iter().filter_map(|string| text.find(string)).min();
    &text[..first.unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use anyroll_models::hf::ModelFolder;

    use super::*;
    use anyroll_config::FolderConfig;
    use anyroll_data::CharTokenizer;

    #[test]
    fn a_text_ends_before_its_first_stop_string() {
        let characters: BTreeSet<char> = "abcd\n".chars().collect();
        let tokenizer = Arc::new(Tokenizer::Characters(CharTokenizer::new(&characters)));
        let strings = ["\n\n".to_owned(), "dd".to_owned()];
        let condition = stop_condition(&tokenizer, &strings).unwrap();
        let check = |text: &str, ends: bool, before: &str| {
            let tokens: Vec<i64> = text
                .chars()
                .map(|c| characters.iter().position(|&other| other == c).unwrap() as i64)
                .collect();
            assert_eq!((condition.0(&tokens), cut(text, &strings)), (ends, before), "{text:?}");
        };
        check("abcd", false, "abcd");
        check("a\nb\n", false, "a\nb\n");
        check("ab\n\n", true, "ab");
        check("abddab\n\n", true, "ab");
        assert!(stop_condition(&tokenizer, &[]).is_none());
    }

    /// Special tokens, such as one that starts a turn, are not part of the decoded text.
    #[test]
    fn a_stop_string_may_be_a_special_token() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model");
        let config = FolderConfig { path: path.clone(), chat: false, system_prompt: None, lora: None };
        let tokenizer = Tokenizer::of_folder(&ModelFolder::open(&path).unwrap(), &config).unwrap();
        let [begin, end] = ["<|im_start|>", "<|im_end|>"].map(|it| tokenizer.special_token(it).unwrap());
        assert_eq!(tokenizer.special_token("a"), None);
        let condition = stop_condition(&Arc::new(tokenizer), &["<|im_start|>".to_owned()]).unwrap();
        assert!(condition.0(&[64, begin]) && !condition.0(&[64, end]));
    }
}
