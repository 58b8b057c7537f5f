//! Constrained decoding: completions that match a JSON schema, a pattern, or a list of texts.
//!
//! `llguidance` tracks the completion and computes the allowed next tokens.

use std::sync::{Arc, Mutex, PoisonError};

use anyroll_data::{TokenBytes, Tokenizer};
use anyroll_models::generation::{Format, FormatTracker};
use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Format of a completion.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
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
                // One terminal, so that the texts become one automaton. As alternatives of a rule each would be a
                // terminal of its own, of which the parser follows few.
                let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: TEXT\nTEXT: {}", texts.join(" | ")))
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

/// Tokens of a model, as formats follow them.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Vocabulary {
    /// Bytes of each token.
    words: Vec<Vec<u8>>,
    /// Tokens that end a completion.
    stop_tokens: Vec<u32>,
}

impl Vocabulary {
    /// Tokens of a tokenizer.
    ///
    /// # Errors
    /// A tokenizer whose tokens have unknown bytes.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, String> {
        let words: Vec<Vec<u8>> = tokenizer.token_bytes()?.into_iter().map(word).collect();
        let stop_tokens: Vec<u32> = tokenizer.stop_tokens().into_iter().map(|token| token as u32).collect();
        match stop_tokens.iter().find(|&&token| token as usize >= words.len()) {
            Some(token) => {
                Err(format!("the token {token}, which ends a completion, is not in the tokenizer"))
            }
            None => Ok(Self { words, stop_tokens }),
        }
    }
}

/// Compiler of formats for a model's tokens.
pub struct Formats(ParserFactory);

impl Formats {
    /// Builds the tables that formats share.
    ///
    /// # Errors
    /// Tokens that cannot be followed.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, String> {
        let Vocabulary { words, stop_tokens } = vocabulary;
        let info = TokRxInfo::new(words.len() as u32, stop_tokens[0]);
        let trie = TokTrie::from(&info, words).with_eos_tokens(stop_tokens);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut parsers = ParserFactory::new_simple(&tokens).map_err(|error| problem(&error))?;
        parsers.quiet();
        let limits = parsers.limits_mut();
        limits.verbose_errors = false;
        // Objects with some thousand optional properties.
        limits.max_items_in_row = 10_000;
        // Some 100 MB, in which a format's texts are followed.
        limits.max_lexer_states = 50_000;
        // Symbols have 16 bits.
        limits.max_grammar_size = 60_000;
        Ok(Self(parsers))
    }

    /// Compiles `spec`.
    ///
    /// # Errors
    /// An unsupported schema or pattern.
    pub fn compile(&self, spec: &Spec) -> Result<Format, String> {
        let mut fresh = Matcher::new(self.0.create_parser(spec.grammar()));
        // Errors show at the first token, or when the next computation begins.
        for _ in 0..2 {
            fresh.compute_mask_or_eos().map_err(|error| problem(&error))?;
        }
        let fresh = Mutex::new(fresh);
        let begin = move || -> Box<dyn FormatTracker> {
            // Completions share what was computed of the format's texts.
            Box::new(Followed(fresh.lock().unwrap_or_else(PoisonError::into_inner).clone()))
        };
        Ok(Format(Arc::new(begin)))
    }
}

impl std::fmt::Debug for Formats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Formats")
    }
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
    // A panic has a backtrace with paths.
    if text.trim_start().starts_with("panic:") || text.contains("<backtrace>") {
        return "its compiler fails on it".to_owned();
    }
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

    fn formats(tokenizer: &Tokenizer) -> Formats {
        Formats::new(&Vocabulary::of(tokenizer).unwrap()).unwrap()
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
        let formats = formats(&tokenizer);
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
        let formats = formats(&tokenizer);
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
        let format = formats(&tokenizer).compile(&Spec::Regex("(ab|b){1,2}c?".to_owned())).unwrap();
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
        let of_bytes = formats(&bytes());
        for (spec, word) in [
            (Spec::Json(json!({"type": "thing"})), "thing"),
            (Spec::Json(json!(3)), "schema"),
            (Spec::Json(json!({"$ref": "#/nowhere"})), "nowhere"),
            (Spec::Json(json!({"$ref": "#"})), ""),
            (Spec::Json(json!({"allOf": [{"$ref": "#/allOf/0"}]})), ""),
            (Spec::Json(json!({"type": "string", "enum": []})), ""),
            (Spec::Regex("a(".to_owned()), "unclosed group"),
        ] {
            let problem = of_bytes.compile(&spec).unwrap_err();
            assert!(problem.contains(word) && !problem.is_empty(), "{spec:?}: {problem}");
            assert!(!problem.contains("Extension") && !problem.contains('\n'), "{spec:?}: {problem}");
        }
        let problem = formats(&characters("ab")).compile(&Spec::Choice(vec!["c".to_owned()])).unwrap_err();
        assert_eq!(problem, "no token of the model continues it");
    }

    /// Walks of several completions, which share tables.
    #[test]
    fn many_texts_are_one_of_which_is_written() {
        let tokenizer = bytes();
        let texts: Vec<String> = (0..3000).map(|number| format!("word{} {number}", number % 7)).collect();
        let format = formats(&tokenizer).compile(&Spec::Choice(texts.clone())).unwrap();
        for seed in 0..20 {
            let text = random(&format, &tokenizer, &mut ChaCha8Rng::seed_from_u64(seed)).unwrap();
            assert!(texts.contains(&text), "{text}");
        }
        assert!(takes(&format, &tokenizer, "word0 2996") && !takes(&format, &tokenizer, "word1 2996"));
    }

    #[test]
    fn objects_may_have_many_optional_properties() {
        let tokenizer = bytes();
        let properties: serde_json::Map<String, Value> =
            (0..1500).map(|number| (format!("name{number}"), json!({"type": "boolean"}))).collect();
        let schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
        let format = formats(&tokenizer).compile(&Spec::Json(schema)).unwrap();
        assert!(takes(&format, &tokenizer, "{\"name3\": true, \"name1499\": false}"));
        assert!(!takes(&format, &tokenizer, "{\"name1500\": true}"));
    }

    /// Formats that fail within the compiler, or while a text is followed: no panic, backtrace or path is told.
    #[test]
    fn failures_of_the_compiler_are_told_in_plain_words() {
        let formats = formats(&bytes());
        let panic = "panic: assertion failed\n<backtrace>\n/home/x.rs\n</backtrace>";
        assert_eq!(problem(&panic), "its compiler fails on it");
        let alternatives: Vec<Value> =
            (0..70_000).map(|number| json!({"type": "array", "prefixItems": [{"const": number}]})).collect();
        let told = formats.compile(&Spec::Json(json!({"anyOf": alternatives}))).unwrap_err();
        assert!(!told.contains("panic") && !told.contains(".rs") && told.lines().count() == 1, "{told}");
    }
}
