//! Conversion of messages from OpenAI's format to that of chat templates.

use serde_json::{Map, Value};

use super::fields::must_be;

/// Messages with contents as text and call arguments as objects. A list of text parts becomes lines.
pub(super) fn of_template(mut messages: Vec<Value>) -> Result<Vec<Value>, String> {
    if messages.is_empty() {
        return Err(must_be("messages", "a list of at least one message"));
    }
    for (number, message) in messages.iter_mut().enumerate() {
        let field = format!("messages[{number}]");
        let fields = message.as_object_mut().ok_or_else(|| must_be(&field, "an object with a `role`"))?;
        if !fields.get("role").is_some_and(Value::is_string) {
            return Err(must_be(&format!("{field}.role"), "a text, such as \"user\""));
        }
        join_parts(fields, &format!("{field}.content"))?;
        read_arguments(fields, &format!("{field}.tool_calls"))?;
    }
    Ok(messages)
}

/// Converts a message's content to text. An assistant's message with calls may have none.
fn join_parts(message: &mut Map<String, Value>, field: &str) -> Result<(), String> {
    let says_nothing = message["role"] == "assistant";
    let text =
        |part: &Value| part.get("text")?.as_str().filter(|_| part["type"] == "text").map(str::to_owned);
    let joined = match message.get("content") {
        None | Some(Value::Null) if says_nothing => return Ok(()),
        Some(Value::String(_)) => return Ok(()),
        Some(Value::Array(parts)) => parts.iter().map(text).collect::<Option<Vec<String>>>(),
        _ => None,
    };
    let texts = joined.ok_or_else(|| must_be(field, r#"a text, or parts {"type": "text", "text": ...}"#))?;
    message.insert("content".to_owned(), texts.join("\n").into());
    Ok(())
}

/// Parses the arguments of calls. OpenAI sends them as JSON text; templates serialize objects themselves.
fn read_arguments(message: &mut Map<String, Value>, field: &str) -> Result<(), String> {
    let calls = match message.get_mut("tool_calls") {
        None | Some(Value::Null) => return Ok(()),
        Some(calls) => calls.as_array_mut().ok_or_else(|| must_be(field, "a list of calls"))?,
    };
    for (number, call) in calls.iter_mut().enumerate() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let Some(text) = arguments.as_str() else { continue };
        let read: Map<String, Value> = serde_json::from_str(if text.is_empty() { "{}" } else { text })
            .map_err(|_| {
                must_be(&format!("{field}[{number}].function.arguments"), "a JSON object as a text")
            })?;
        *arguments = read.into();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parts_of_a_message_are_joined_to_a_text() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let messages = vec![
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": parts}),
            json!({"role": "assistant", "content": null}),
        ];
        let found = of_template(messages.clone()).unwrap();
        assert_eq!(found[1], json!({"role": "user", "content": "a\nb"}));
        assert_eq!([&found[0], &found[2]], [&messages[0], &messages[2]]);
    }

    #[test]
    fn arguments_of_calls_are_objects() {
        let calls = |arguments: Value| json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
        let message = |arguments| json!({"role": "assistant", "tool_calls": calls(arguments)});
        for (said, read) in
            [(json!(r#"{"b": 1, "a": [2]}"#), json!({"b": 1, "a": [2]})), (json!(""), json!({}))]
        {
            assert_eq!(of_template(vec![message(said)]).unwrap(), [message(read.clone())]);
            assert_eq!(of_template(vec![message(read.clone())]).unwrap(), [message(read)]);
        }
        let error = of_template(vec![message(json!("[1]"))]).unwrap_err();
        assert!(error.starts_with("`messages[0].tool_calls[0].function.arguments` must be"), "{error}");
    }

    #[test]
    fn what_is_no_message_is_refused_by_its_place() {
        let user = json!({"role": "user", "content": "hi"});
        for (wrong, field) in [
            (json!(1), "`messages[1]`"),
            (json!({"content": "x"}), "`messages[1].role`"),
            (json!({"role": 1, "content": "x"}), "`messages[1].role`"),
            (json!({"role": "user"}), "`messages[1].content`"),
            (json!({"role": "tool", "content": null}), "`messages[1].content`"),
            (json!({"role": "user", "content": 5}), "`messages[1].content`"),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
                "`messages[1].content`",
            ),
            (json!({"role": "assistant", "tool_calls": 1}), "`messages[1].tool_calls`"),
        ] {
            let error = of_template(vec![user.clone(), wrong]).unwrap_err();
            assert!(error.starts_with(&format!("{field} must be")), "{error}");
        }
        assert!(of_template(Vec::new()).unwrap_err().starts_with("`messages` must be"));
    }
}
