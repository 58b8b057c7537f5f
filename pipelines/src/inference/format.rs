//! Constrained decoding: completions that match a JSON schema, a pattern, or a list of texts.
//!
//! `llguidance` tracks the completion and computes the allowed next tokens.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyroll_data::{TokenBytes, Tokenizer};
use anyroll_models::generation::{Format, FormatTracker};
use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::{Value, json};

/// Format of a completion.
#[derive(Clone, Debug, PartialEq)]
pub enum Spec {
    /// JSON that matches a schema.
    Json(Value),
    /// A text that matches this pattern as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Spec {
    /// Any JSON object.
    pub fn json_object() -> Spec {
        Spec::Json(json!({"type": "object"}))
    }

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            Spec::Json(schema) => TopLevelGrammar::from_json_schema(with_bounded_space(schema.clone())),
            Spec::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            Spec::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
        }
    }
}

/// The schema with a limit on consecutive white space, which a model might otherwise write forever.
fn with_bounded_space(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        fields.entry("x-guidance").or_insert_with(|| json!({"whitespace_pattern": r"[ \n\r\t]{1,32}"}));
    }
    schema
}

/// Compiler of formats for a model's tokens. Shared tables are built with the first format.
pub struct Formats {
    tokenizer: Arc<Tokenizer>,
    parsers: OnceLock<Result<ParserFactory, String>>,
}

impl Formats {
    /// Creates the compiler for this tokenizer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, parsers: OnceLock::new() }
    }

    /// Compiles `spec`.
    ///
    /// # Errors
    /// An unsupported schema or pattern, or a tokenizer whose tokens have unknown bytes.
    pub fn compile(&self, spec: &Spec) -> Result<Format, String> {
        let parsers = self.parsers.get_or_init(|| parsers(&self.tokenizer));
        let parsers = parsers.as_ref().map_err(Clone::clone)?;
        let mut fresh = Matcher::new(parsers.create_parser(spec.grammar()));
        // Errors show at the first token at the latest.
        fresh.compute_mask_or_eos().map_err(|error| problem(&error))?;
        let fresh = Mutex::new(fresh);
        let begin = move || -> Box<dyn FormatTracker> {
            Box::new(Followed(fresh.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()))
        };
        Ok(Format(Arc::new(begin)))
    }
}

impl std::fmt::Debug for Formats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Formats")
    }
}

fn parsers(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let words: Vec<Vec<u8>> = tokenizer.token_bytes()?.into_iter().map(word).collect();
    let stop_tokens: Vec<u32> = tokenizer.stop_tokens().into_iter().map(|token| token as u32).collect();
    let vocab_size = words.len() as u32;
    if let Some(token) = stop_tokens.iter().find(|&&token| token >= vocab_size) {
        return Err(format!("the token {token}, which ends a completion, is not in the tokenizer"));
    }
    let info = TokRxInfo::new(vocab_size, stop_tokens[0]);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&stop_tokens);
    let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut parsers = ParserFactory::new_simple(&tokens).map_err(|error| problem(&error))?;
    parsers.quiet();
    parsers.limits_mut().verbose_errors = false;
    Ok(parsers)
}

/// Special tokens start with a byte that no text contains.
fn word(token: TokenBytes) -> Vec<u8> {
    match token {
        TokenBytes::Text(bytes) => bytes,
        TokenBytes::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat(),
    }
}

/// A parser's error on one line.
fn problem(error: &dyn std::fmt::Display) -> String {
    // Placeholder for the parser's state, which is not requested.
    let text = error.to_string().replace("<non-verbose/>", "");
    let words: Vec<&str> = text.split_whitespace().collect();
    match &words[..] {
        ["NoExtensionBias"] => "no token of the model continues it".to_owned(),
        words => words.join(" "),
    }
}

/// State of one completion.
struct Followed(Matcher);

impl FormatTracker for Followed {
    fn allowed(&mut self) -> Result<Vec<u32>, String> {
        let allowed = self.0.compute_mask_or_eos().map_err(|error| problem(&error))?;
        Ok(allowed.as_slice().to_vec())
    }

    fn push(&mut self, token: i64) -> Result<(), String> {
        self.0.consume_token(token as u32).map_err(|error| problem(&error))
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use anyroll_models::hf::ModelFolder;
    use rand_chacha::{
        ChaCha8Rng,
        rand_core::{Rng, SeedableRng},
    };

    use super::*;
    use anyroll_config::FolderConfig;
    use anyroll_data::CharTokenizer;

    /// A tokenizer with one token per byte, and some for several bytes.
    fn bytes() -> Arc<Tokenizer> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model");
        let config = FolderConfig { path: path.clone(), chat: false, system_prompt: None, lora: None };
        Arc::new(Tokenizer::of_folder(&ModelFolder::open(&path).unwrap(), &config).unwrap())
    }

    fn characters(characters: &str) -> Arc<Tokenizer> {
        Arc::new(Tokenizer::Characters(CharTokenizer::new(&characters.chars().collect())))
    }

    /// Tokens whose bit is set.
    fn tokens(allowed: &[u32]) -> Vec<i64> {
        let bits = (0..)
            .zip(allowed)
            .flat_map(|(word, bits)| (0..32).map(move |bit| (word * 32 + bit, bits >> bit & 1)));
        bits.filter(|(_, bit)| *bit == 1).map(|(token, _)| token).collect()
    }

    /// Samples uniformly among allowed tokens until the end; `None` if that takes too many tokens.
    fn random(format: &Format, tokenizer: &Tokenizer, random: &mut ChaCha8Rng) -> Option<String> {
        let (mut follow, mut chosen, stops) = (format.0(), Vec::new(), tokenizer.stop_tokens());
        for _ in 0..400 {
            let allowed = tokens(&follow.allowed().unwrap());
            let token = allowed[(random.next_u64() % allowed.len() as u64) as usize];
            if stops.contains(&token) {
                return Some(tokenizer.decode(&chosen));
            }
            chosen.push(token);
            follow.push(token).unwrap();
        }
        None
    }

    /// Returns true if a text is allowed and complete.
    fn takes(format: &Format, tokenizer: &Tokenizer, text: &str) -> bool {
        let mut follow = format.0();
        let written = tokenizer.encode_text(text).unwrap();
        let stop = tokenizer.stop_tokens()[0];
        written.into_iter().chain([stop]).all(|token| {
            let is_allowed = tokens(&follow.allowed().unwrap()).contains(&token);
            is_allowed && (token == stop || follow.push(token).is_ok())
        })
    }

    #[test]
    fn whatever_is_chosen_is_json_of_the_schema() {
        let tokenizer = bytes();
        let formats = Formats::new(tokenizer.clone());
        let is_text = |value: &Value| value.is_string();
        let is_list = |value: &Value| {
            let items = value.as_array().map_or(&[][..], Vec::as_slice);
            (1..=3).contains(&items.len()) && items.iter().all(Value::is_i64)
        };
        type Fits<'a> = &'a dyn Fn(&Value) -> bool;
        let fits: [(Value, Fits); 4] = [
            (json!({"enum": ["red", "grün", 3, null]}), &|value| {
                [json!("red"), json!("grün"), json!(3), json!(null)].contains(value)
            }),
            (
                json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3}),
                &is_list,
            ),
            (
                json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "is_old": {"type": "boolean"}},
                    "required": ["name", "is_old"], "additionalProperties": false}),
                &|value| {
                    value.as_object().is_some_and(|all| {
                        all.len() == 2 && is_text(&all["name"]) && all["is_old"].is_boolean()
                    })
                },
            ),
            (
                json!({"$defs": {"leaf": {"type": "object", "properties": {"n": {"type": "number", "minimum": 0, "maximum": 1}}, "required": ["n"],
                                       "additionalProperties": false}},
                    "type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}}, "required": ["left"],
                    "additionalProperties": false}),
                &|value| value["left"]["n"].is_number(),
            ),
        ];
        for (schema, fits) in fits {
            let format = formats.compile(&Spec::Json(schema.clone())).unwrap();
            let mut ended = 0;
            for seed in 0..40 {
                let Some(text) = random(&format, &tokenizer, &mut ChaCha8Rng::seed_from_u64(seed)) else {
                    continue;
                };
                let spaces = text.split(|it: char| !it.is_ascii_whitespace()).map(str::len).max();
                assert!(spaces <= Some(32), "{text:?}");
                let value: Value =
                    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
                assert!(fits(&value), "{schema}: {text}");
                ended += 1;
            }
            assert!(ended > 10, "{schema}: {ended} ended");
        }
    }

    #[test]
    fn what_fits_may_be_said_and_nothing_else() {
        let tokenizer = bytes();
        let formats = Formats::new(tokenizer.clone());
        let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]});
        for (spec, right, wrong) in [
            (
                Spec::Json(schema),
                &["{\"a\": \"é\\n€\"}", "{\"a\":\"\",\"b\":[1.5e3]}"][..],
                &["{}", "{\"a\": 1}", "[]"][..],
            ),
            (Spec::json_object(), &["{}", "{\"a\": {\"b\": [true]}}"], &["[1]", "{\"a\"}", "text"]),
            (Spec::Regex("[0-9]{2,3}(-x)?".to_owned()), &["12", "123-x"], &["1", "1234", "12-", "ab"]),
            (
                Spec::Choice(vec!["yes".to_owned(), "no \"x\"".to_owned()]),
                &["yes", "no \"x\""],
                &["no", "yesno", ""],
            ),
        ] {
            let format = formats.compile(&spec).unwrap();
            for text in right {
                assert!(takes(&format, &tokenizer, text), "{spec:?}: {text}");
            }
            for text in wrong {
                assert!(!takes(&format, &tokenizer, text), "{spec:?}: {text}");
            }
        }
    }

    /// Compared with all texts that a pattern matches.
    #[test]
    fn tokens_that_may_come_are_those_that_lead_somewhere() {
        let tokenizer = characters("abc");
        let format =
            Formats::new(tokenizer.clone()).compile(&Spec::Regex("(ab|b){1,2}c?".to_owned())).unwrap();
        let parts = ["ab", "b"];
        let words = parts.iter().flat_map(|one| {
            [String::new(), "ab".to_owned(), "b".to_owned()].map(|two| format!("{one}{two}"))
        });
        let all: BTreeSet<String> = words.flat_map(|word| [format!("{word}c"), word]).collect();
        let prefixes = all.iter().flat_map(|word| (0..=word.len()).map(|end| word[..end].to_owned()));
        for prefix in prefixes.collect::<BTreeSet<String>>() {
            let mut follow = format.0();
            tokenizer.encode_text(&prefix).unwrap().into_iter().for_each(|token| follow.push(token).unwrap());
            let goes_on = |next: char| all.iter().any(|word| word.starts_with(&format!("{prefix}{next}")));
            let mut expected: Vec<i64> =
                ('a'..='c').filter(|next| goes_on(*next)).map(|next| next as i64 - 'a' as i64).collect();
            expected.extend(all.contains(&prefix).then_some(tokenizer.stop_tokens()[0]));
            assert_eq!(tokens(&follow.allowed().unwrap()), expected, "{prefix:?}");
        }
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        let formats = Formats::new(bytes());
        for (spec, word) in [
            (Spec::Json(json!({"type": "thing"})), "thing"),
            (Spec::Json(json!(3)), "schema"),
            (Spec::Json(json!({"$ref": "#/nowhere"})), "nowhere"),
            (Spec::Json(json!({"type": "string", "enum": []})), ""),
            (Spec::Regex("a(".to_owned()), "unclosed group"),
        ] {
            let problem = formats.compile(&spec).unwrap_err();
            assert!(problem.contains(word) && !problem.is_empty(), "{spec:?}: {problem}");
        }
        let problem =
            Formats::new(characters("ab")).compile(&Spec::Choice(vec!["c".to_owned()])).unwrap_err();
        assert_eq!(problem, "no token of the model continues it");
    }
}
