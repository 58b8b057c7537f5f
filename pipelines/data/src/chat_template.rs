//! Chat templates: render messages to the text that a model was trained on.
//!
//! Published models have a Jinja template with a few Python idioms. The result equals that of
//! `apply_chat_template` in `transformers`, to the byte. `strftime_now` is omitted on purpose, since prompts
//! would change from day to day. Templates that test whether it is defined use a fixed date.

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, escape_formatter};
use serde::Serialize;
use serde_json::Map;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Variables such as `bos_token` and `eos_token`.
    special_tokens: Map<String, serde_json::Value>,
}

/// Input of a template.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Conversation<'a> {
    /// Objects with `role`, `content` and other fields that the template supports.
    pub messages: &'a [serde_json::Value],
    /// JSON schemas of the functions that the model may call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<&'a [serde_json::Value]>,
    /// Adds the start of the assistant's next message.
    pub add_generation_prompt: bool,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses the template; `special_tokens` are its variables in addition to the conversation.
    ///
    /// # Errors
    /// The line of the template that is not valid Jinja.
    pub fn new(
        source: String,
        special_tokens: Map<String, serde_json::Value>,
    ) -> Result<ChatTemplate, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // Python's spelling of these values.
        environment.set_formatter(|out, state, value| match (value.kind(), value.is_true()) {
            (ValueKind::Bool, true) => Ok(out.write_str("True")?),
            (ValueKind::Bool, false) => Ok(out.write_str("False")?),
            (ValueKind::None, _) => Ok(out.write_str("None")?),
            _ => escape_formatter(out, state, value),
        });
        environment.add_template_owned(NAME, source)?;
        Ok(ChatTemplate { environment, special_tokens })
    }

    /// Renders the conversation. `variables` are further variables of the template, such as `enable_thinking`
    /// of Qwen3.
    ///
    /// # Errors
    /// An exception of the template, for example for roles that do not alternate, or a value of the wrong
    /// type.
    pub fn render(
        &self,
        conversation: Conversation,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String, Error> {
        let mut context = self.special_tokens.clone();
        let conversation = serde_json::to_value(conversation).expect("messages are plain data");
        let serde_json::Value::Object(conversation) = conversation else { unreachable!("a struct") };
        context.extend(conversation);
        context.extend(variables.clone());
        self.environment.get_template(NAME)?.render(Serde(&context))
    }
}

/// Python's `json.dumps`, with the options that templates use.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Characters are never escaped, which is the default of the templates' environment.
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    if ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson has no ensure_ascii"));
    }
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, PythonFormatter)),
        Some(width) => {
            let indent = vec![b' '; width];
            value
                .serialize(&mut Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(&indent)))
        }
    };
    written.map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "a value cannot be written as JSON").with_source(error)
    })?;
    Ok(String::from_utf8(bytes).expect("JSON is UTF-8"))
}

/// JSON with a space after commas and colons: `{"a": 1, "b": [1, 2]}`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    /// Expected values are from `transformers`: tests/python/make_chat_golden.py.
    #[test]
    fn conversations_read_as_in_transformers() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/chat");
        let golden = std::fs::read_to_string(folder.join("golden.json")).unwrap();
        let golden: Value = serde_json::from_str(&golden).unwrap();
        let (mut rendered, mut raised) = (0, 0);
        for (style, cases) in golden.as_object().unwrap() {
            let source = std::fs::read_to_string(folder.join(style).with_extension("jinja")).unwrap();
            for case in cases.as_array().unwrap() {
                let special_tokens = json!({"bos_token": "<s>", "eos_token": "</s>"});
                let special_tokens = special_tokens.as_object().unwrap().clone();
                let template = ChatTemplate::new(source.clone(), special_tokens).unwrap();
                let conversation = Conversation {
                    messages: case["messages"].as_array().unwrap(),
                    tools: case["tools"].as_array().map(Vec::as_slice),
                    add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                };
                let found = template.render(conversation, case["variables"].as_object().unwrap());
                let what = format!("{style}: {}", case["name"]);
                match (found, &case["rendered"], &case["raised"]) {
                    (Ok(found), Value::String(expected), _) => assert_eq!(found, *expected, "{what}"),
                    (Err(error), _, Value::String(message)) => {
                        assert!(error.to_string().contains(message), "{what}: {error}");
                        raised += 1;
                    }
                    (found, expected, _) => panic!("{what}: {found:?} instead of {expected}"),
                }
                rendered += 1;
            }
        }
        assert!(rendered >= 50 && raised >= 3, "{rendered} cases, {raised} of them errors");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let check = |value: Value, expected: &str| {
            let template = ChatTemplate::new("{{ messages[0] | tojson }}".to_owned(), Map::new()).unwrap();
            let conversation = Conversation { messages: &[value], ..Conversation::default() };
            assert_eq!(template.render(conversation, &Map::new()).unwrap(), expected);
        };
        check(json!({"b": [1, 2.5, null], "a": {"c": true}}), r#"{"b": [1, 2.5, null], "a": {"c": true}}"#);
        check(json!({}), "{}");
        check(json!([]), "[]");
        check(json!("<ü> \"\n"), r#""<ü> \"\n""#);
    }

    #[test]
    fn a_template_that_is_none_names_its_line() {
        let error = ChatTemplate::new("a\n{% if %}".to_owned(), Map::new()).unwrap_err();
        assert_eq!(error.line(), Some(2));
    }
}
