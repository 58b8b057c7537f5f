//! Answers, whole or as they come, in the shapes of OpenAI's interface.

use std::{
    convert::Infallible,
    time::{SystemTime, UNIX_EPOCH},
};

use anyroll_models::generation::Ending;
use axum::{
    Json,
    http::StatusCode,
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::{App, body::Asked, text::TextStream, worker::Heard};

/// Which of the two interfaces answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Text,
    Chat,
}

/// One sample on its way.
struct Choice {
    text: TextStream,
    whole: String,
    tokens: usize,
    logprobs: Vec<f32>,
    ending: Option<Ending>,
}

/// Runs a request and answers it.
pub(super) async fn answer(app: &App, shape: Shape, asked: Asked) -> Response {
    let count = asked.request.samples.len();
    let prompt_tokens = asked.request.prompt.len();
    let choice = || Choice {
        text: TextStream::new(app.tokenizer.clone(), asked.stops.clone()),
        whole: String::new(),
        tokens: 0,
        logprobs: Vec::new(),
        ending: None,
    };
    let choices: Vec<Choice> = (0..count).map(|_| choice()).collect();
    let heard = app.worker.ask(asked.request);
    let id = app.next_id();
    if asked.stream {
        return stream(shape, id, heard, choices, asked.logprobs);
    }
    whole(shape, id, heard, choices, prompt_tokens, asked.logprobs).await
}

/// An error as clients know it.
pub(super) fn refusal(status: StatusCode, message: &str) -> Response {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    (status, Json(json!({"error": {"message": message, "type": kind}}))).into_response()
}

async fn whole(
    shape: Shape,
    id: String,
    mut heard: UnboundedReceiver<Heard>,
    mut choices: Vec<Choice>,
    prompt_tokens: usize,
    with_logprobs: bool,
) -> Response {
    while choices.iter().any(|choice| choice.ending.is_none()) {
        match heard.recv().await {
            Some(Heard::Tokens { sample, tokens, logprobs, ending }) => {
                let choice = &mut choices[sample];
                let new = choice.text.push(&tokens, ending.is_some());
                choice.whole.push_str(&new);
                choice.tokens += tokens.len();
                choice.logprobs.extend(logprobs);
                choice.ending = ending;
            }
            Some(Heard::Refused(message)) => return refusal(StatusCode::BAD_REQUEST, &message),
            None => return refusal(StatusCode::INTERNAL_SERVER_ERROR, "the engine has failed"),
        }
    }
    let generated: usize = choices.iter().map(|choice| choice.tokens).sum();
    let choices: Vec<Value> = choices
        .into_iter()
        .enumerate()
        .map(|(index, choice)| {
            let content = match shape {
                Shape::Text => ("text", json!(choice.whole)),
                Shape::Chat => ("message", json!({"role": "assistant", "content": choice.whole})),
            };
            entry(index, content, choice.ending, with_logprobs.then_some(choice.logprobs))
        })
        .collect();
    let usage = json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
    });
    let mut body = envelope(shape, &id, false, choices);
    body["usage"] = usage;
    Json(body).into_response()
}

fn stream(
    shape: Shape,
    id: String,
    mut heard: UnboundedReceiver<Heard>,
    mut choices: Vec<Choice>,
    with_logprobs: bool,
) -> Response {
    let (out, events) = unbounded_channel::<Result<Event, Infallible>>();
    tokio::spawn(async move {
        let mut left = choices.len();
        // Where the client has gone, `send` fails, and with the receiver dropped the engine gives the samples up.
        let send = |value: String| out.send(Ok(Event::default().data(value))).is_ok();
        while left > 0 {
            let value = match heard.recv().await {
                Some(Heard::Tokens { sample, tokens, logprobs, ending }) => {
                    let new = choices[sample].text.push(&tokens, ending.is_some());
                    left -= usize::from(ending.is_some());
                    let content = match shape {
                        Shape::Text => ("text", json!(new)),
                        Shape::Chat => ("delta", json!({"role": "assistant", "content": new})),
                    };
                    let entry = entry(sample, content, ending, with_logprobs.then_some(logprobs));
                    envelope(shape, &id, true, vec![entry])
                }
                Some(Heard::Refused(message)) => {
                    left = 0;
                    json!({"error": {"message": message, "type": "invalid_request_error"}})
                }
                None => {
                    left = 0;
                    json!({"error": {"message": "the engine has failed", "type": "server_error"}})
                }
            };
            if !send(value.to_string()) {
                return;
            }
        }
        send("[DONE]".to_owned());
    });
    Sse::new(UnboundedReceiverStream::new(events)).into_response()
}

fn entry(
    index: usize,
    (key, content): (&str, Value),
    ending: Option<Ending>,
    logprobs: Option<Vec<f32>>,
) -> Value {
    let reason = ending.map(|ending| match ending {
        Ending::Stop => "stop",
        Ending::Length => "length",
    });
    let logprobs = logprobs.map(|logprobs| json!({"token_logprobs": logprobs}));
    json!({"index": index, key: content, "finish_reason": reason, "logprobs": logprobs})
}

fn envelope(shape: Shape, id: &str, is_part: bool, choices: Vec<Value>) -> Value {
    let object = match (shape, is_part) {
        (Shape::Text, _) => "text_completion",
        (Shape::Chat, true) => "chat.completion.chunk",
        (Shape::Chat, false) => "chat.completion",
    };
    let created_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    json!({"id": id, "object": object, "created": created_s, "model": super::MODEL, "choices": choices})
}
