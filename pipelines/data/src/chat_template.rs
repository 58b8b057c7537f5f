//! Chat templates: render messages to the text that a model was trained on.
//!
//! Published models have a Jinja template with a few Python idioms. The result equals that of
//! `apply_chat_template` in `transformers`, to the byte. `strftime_now` is omitted on purpose, since prompts
//! would change from day to day. Templates that test whether it is defined use a fixed date.
//!
//! minijinja renders the template. [`dialect`] translates what it lacks or does otherwise than Jinja2, and
//! [`bounds`] ends a render that takes too long or makes too much text.

mod bounds;
mod dialect;
mod expression;
mod filters;
mod json;
mod methods;
mod operators;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::Map;

use super::panics::caught;

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

/// Longest source of a template; the longest of published ones has 60 KiB.
const MAX_SOURCE: usize = 1 << 20;

impl ChatTemplate {
    /// Parses the template; `special_tokens` are its variables in addition to the conversation.
    ///
    /// # Errors
    /// The line of the template that is not valid Jinja.
    pub fn new(
        source: String,
        special_tokens: Map<String, serde_json::Value>,
    ) -> Result<ChatTemplate, Error> {
        if source.len() > MAX_SOURCE {
            return Err(bounds::error(format!("it is longer than {} KiB", MAX_SOURCE >> 10)));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(bounds::FUEL));
        environment.set_unknown_method_callback(methods::call);
        environment.set_formatter(|out, _, value| Ok(out.write_str(&bounds::text(value)?)?));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(bounds::error(message))
        });
        filters::add(&mut environment);
        // Names that `dialect` writes.
        environment.add_function("__joined", |left: Value, right: Value| operators::joined(&left, &right));
        environment.add_function("__modulo", |left: Value, right: Value| operators::modulo(&left, &right));
        environment.add_function("__slice", |value: Value, start: Value, stop: Value, step: Value| {
            operators::slice(&value, start, stop, step)
        });
        environment.add_function("__checked", bounds::checked);
        environment.add_function("__kept", bounds::kept);
        environment.add_function("__round", bounds::spend);
        let source = dialect::translated(&source).map_err(bounds::error)?;
        let added = caught(|| environment.add_template_owned(NAME, source));
        added.unwrap_or_else(|panic| Err(bounds::error(panic)))?;
        Ok(ChatTemplate { environment, special_tokens })
    }

    /// Renders the conversation. `variables` are further variables of the template, such as `enable_thinking`
    /// of Qwen3.
    ///
    /// # Errors
    /// An exception of the template, for example for roles that do not alternate, a value of the wrong type,
    /// or a bound on time or text that it exceeds.
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
        bounds::start();
        let rendered = caught(|| self.environment.get_template(NAME)?.render(Serde(&context)));
        let rendered = rendered.unwrap_or_else(|panic| Err(bounds::error(panic)));
        rendered.map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => {
                bounds::error(format!("it is not at its end after {} instructions", bounds::FUEL))
            }
            _ => error,
        })
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

    fn rendered(template: &str) -> Result<String, String> {
        let messages = [("user", "hi a"), ("assistant", "yo"), ("user", "ok")];
        let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
        let template =
            ChatTemplate::new(template.to_owned(), Map::new()).map_err(|error| error.to_string())?;
        let conversation = Conversation { messages: &messages, ..Conversation::default() };
        template.render(conversation, &Map::new()).map_err(|error| error.to_string())
    }

    /// Expected values are from `transformers`: tests/python/make_chat_golden.py.
    #[test]
    fn pythons_operators_methods_and_filters_read_as_in_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/chat/snippets.json");
        let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for case in &cases {
            let template = case["template"].as_str().unwrap();
            let found = rendered(template);
            assert_eq!(found.as_deref().ok(), case["rendered"].as_str(), "{template}: {found:?}");
        }
        assert!(cases.len() > 400);
    }

    #[test]
    fn a_render_ends_within_bounds() {
        let doubled = |value: &str| {
            let round = format!("{{% set ns.x = {value} %}}");
            format!(
                "{{% set ns = namespace(x='xxxxxxxx', y=[1]) %}}{{% for i in range(60) %}}{round}{{% endfor %}}{{{{ ns.x }}}}"
            )
        };
        let nested = |body: &str| {
            let round = "{% for a in range(100000) %}";
            format!("{round}{round}{round}{body}{{% endfor %}}{{% endfor %}}{{% endfor %}}")
        };
        for (template, words) in [
            (nested(""), "not at its end after"),
            (nested(&"y".repeat(5000)), "more than 1024 MiB of text"),
            (doubled("ns.x ~ ns.x"), "a text of more than 16 MiB"),
            (doubled("ns.x + ns.x"), "a text of more than 16 MiB"),
            (doubled("ns.x.replace('x', ns.x)"), "a text of more than 16 MiB"),
            (doubled("ns.x.join(ns.x)"), "a text of more than 16 MiB"),
            (doubled("[ns.x, ns.x]"), "more than"),
            (doubled("[[[[[[[[ns.x]]]]]]]]"), "deep"),
            (doubled("ns"), "deep"),
            (doubled("ns.y + [ns.x] * 1000000"), "more than"),
            ("{{ 'a'.ljust(1000000000) }}".to_owned(), "a text of more than 16 MiB"),
            ("{{ '%1000000000s' % 5 }}".to_owned(), "a text of more than 16 MiB"),
            ("{{ '{:1000000000}'.format(5) }}".to_owned(), "a width of more than"),
            ("{{ [1]|tojson(indent=1000000000) }}".to_owned(), "more than 1000"),
            (format!("{{{{ {}1 }}}}", "1+".repeat(100_000)), "more than 500 operators"),
            (format!("{{{{ {}1 }}}}", "not ".repeat(100_000)), "more than 500 operators"),
            (format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)), "recursion limit"),
            ("y".repeat(2 << 20), "longer than 1024 KiB"),
        ] {
            let found = rendered(&template);
            let start: String = template.chars().take(80).collect();
            assert!(found.as_ref().is_err_and(|error| error.contains(words)), "{start}: {found:?}");
        }
    }

    #[test]
    fn a_template_that_is_none_names_its_line() {
        let line = |source: &str| ChatTemplate::new(source.to_owned(), Map::new()).unwrap_err().line();
        assert_eq!(line("a\n{% if %}"), Some(2));
        assert_eq!(line("{{ 'a\\\nb'\n ~ 1 }}\n{% for a in [1,\n2] %}\n{{ a[1:\n2] }}\n{% if %}"), Some(8));
        assert_eq!(line("a\n{{ '\\N{DASH}' }}"), Some(2));
    }
}
