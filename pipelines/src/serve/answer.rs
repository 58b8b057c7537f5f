//! Answers, whole or as they come, in the shapes of OpenAI's interface.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
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
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_stream::Stream;

use super::{
    App,
    body::Asked,
    text::TextStream,
    worker::{Heard, Tokens},
};

/// Which of the two interfaces answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Text,
    Chat,
}

/// Why there is no answer, as clients are told it.
#[derive(Debug)]
pub(super) struct Refusal {
    pub status: StatusCode,
    pub message: String,
}

/// Runs a request and answers it.
pub(super) async fn answer(app: &App, shape: Shape, asked: Asked) -> Response {
    let mut telling = Telling::new(app, shape, &asked);
    let (stream, usage) = (asked.stream, asked.usage);
    let mut heard = app.worker.ask(asked.request);
    // The header says that all is well, so a stream has none before it is known that the request runs.
    let first = match understood(heard.recv().await) {
        Ok(tokens) => telling.part(tokens),
        Err(refusal) => return refusal.into_response(),
    };
    if !stream {
        let body = telling.whole(first, heard).await;
        return body.map_or_else(Refusal::into_response, |body| Json(body).into_response());
    }
    let mut events = Events { heard, telling, usage, ready: VecDeque::new() };
    events.tell(first);
    Sse::new(events).into_response()
}

/// What was heard, or why nothing more will be.
fn understood(heard: Option<Heard>) -> Result<Tokens, Refusal> {
    heard
        .ok_or_else(|| Refusal {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            message: "the engine has failed".to_owned(),
        })?
        .map_err(Refusal::bad_request)
}

impl Refusal {
    pub fn bad_request(message: String) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message }
    }

    fn body(&self) -> Value {
        let kind = if self.status.is_server_error() { "server_error" } else { "invalid_request_error" };
        json!({"error": {"message": self.message, "type": kind, "param": null, "code": null}})
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(self.body())).into_response()
    }
}

/// An answer on its way.
struct Telling {
    shape: Shape,
    id: String,
    created_s: u64,
    with_logprobs: bool,
    prompt_tokens: usize,
    choices: Vec<Choice>,
    /// Choices that have not ended.
    left: usize,
}

/// How far one of its samples is.
struct Choice {
    text: TextStream,
    tokens: usize,
    /// Characters that the tokens so far have.
    characters: usize,
}

/// What is new of a sample.
#[derive(Default)]
struct Part {
    index: usize,
    /// Whether there was nothing of it before.
    is_first: bool,
    text: String,
    tokens: Vec<Token>,
    ending: Option<Ending>,
}

struct Token {
    text: String,
    logprob: f32,
    /// Characters of the completion before it.
    offset: usize,
}

impl Telling {
    fn new(app: &App, shape: Shape, asked: &Asked) -> Self {
        let text = || TextStream::new(app.tokenizer.clone(), asked.stops.clone());
        let choice = |_| Choice { text: text(), tokens: 0, characters: 0 };
        let choices: Vec<Choice> = asked.request.samples.iter().map(choice).collect();
        Self {
            shape,
            id: app.next_id(),
            created_s: now_s(),
            with_logprobs: asked.logprobs,
            prompt_tokens: asked.request.prompt.len(),
            left: choices.len(),
            choices,
        }
    }

    fn part(&mut self, Tokens { sample, tokens, logprobs, ending }: Tokens) -> Part {
        let choice = &mut self.choices[sample];
        let added = choice.text.push(&tokens, ending.is_some());
        let is_first = choice.tokens == 0;
        choice.tokens += tokens.len();
        self.left -= usize::from(ending.is_some());
        let tokens = added.pieces.into_iter().zip(logprobs).map(|(text, logprob)| {
            let offset = choice.characters;
            choice.characters += text.chars().count();
            Token { text, logprob, offset }
        });
        Part { index: sample, is_first, text: added.text, tokens: tokens.collect(), ending }
    }

    /// The whole answer, which begins with `first`.
    async fn whole(mut self, first: Part, mut heard: UnboundedReceiver<Heard>) -> Result<Value, Refusal> {
        let mut wholes: Vec<Part> =
            (0..self.choices.len()).map(|index| Part { index, ..Part::default() }).collect();
        wholes[first.index].extend(first);
        while self.left > 0 {
            let part = self.part(understood(heard.recv().await)?);
            wholes[part.index].extend(part);
        }
        let choices = wholes.into_iter().map(|part| {
            let content = match self.shape {
                Shape::Text => ("text", json!(part.text)),
                Shape::Chat => ("message", json!({"role": "assistant", "content": part.text})),
            };
            self.entry(content, &part)
        });
        let object = match self.shape {
            Shape::Text => "text_completion",
            Shape::Chat => "chat.completion",
        };
        let mut body = self.envelope(object, choices.collect());
        body["usage"] = self.usage();
        Ok(body)
    }

    /// One event of a stream.
    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object = match self.shape {
            Shape::Text => "text_completion",
            Shape::Chat => "chat.completion.chunk",
        };
        self.envelope(object, choices)
    }

    fn chunk_entry(&self, part: &Part) -> Value {
        let content = match (self.shape, part.is_first) {
            (Shape::Text, _) => ("text", json!(part.text)),
            // Clients join what comes under the same key, so the role comes once.
            (Shape::Chat, true) => ("delta", json!({"role": "assistant", "content": part.text})),
            (Shape::Chat, false) => ("delta", json!({"content": part.text})),
        };
        self.entry(content, part)
    }

    fn entry(&self, (key, content): (&str, Value), part: &Part) -> Value {
        let reason = part.ending.map(|ending| match ending {
            Ending::Stop => "stop",
            Ending::Length => "length",
        });
        let logprobs = self.with_logprobs.then(|| logprobs(self.shape, &part.tokens));
        json!({"index": part.index, key: content, "finish_reason": reason, "logprobs": logprobs})
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        let (id, created_s) = (&self.id, self.created_s);
        json!({"id": id, "object": object, "created": created_s, "model": super::MODEL, "choices": choices})
    }

    fn usage(&self) -> Value {
        let (prompt_tokens, generated) =
            (self.prompt_tokens, self.choices.iter().map(|choice| choice.tokens).sum::<usize>());
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        })
    }
}

impl Part {
    fn extend(&mut self, next: Part) {
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
        self.ending = next.ending;
    }
}

/// The tokens' texts and log-probs; those of likelier tokens are not known.
fn logprobs(shape: Shape, tokens: &[Token]) -> Value {
    match shape {
        Shape::Text => json!({
            "tokens": tokens.iter().map(|token| &token.text).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
            "text_offset": tokens.iter().map(|token| token.offset).collect::<Vec<_>>(),
            "top_logprobs": null,
        }),
        Shape::Chat => {
            let token = |Token { text, logprob, .. }: &Token| json!({"token": text, "logprob": logprob, "bytes": text.as_bytes(), "top_logprobs": []});
            json!({"content": tokens.iter().map(token).collect::<Vec<_>>(), "refusal": null})
        }
    }
}

/// An answer as events. A client that leaves drops them, and with them the receiver, so the engine gives the samples up.
struct Events {
    heard: UnboundedReceiver<Heard>,
    telling: Telling,
    usage: bool,
    /// Data of events that are to be sent.
    ready: VecDeque<String>,
}

impl Events {
    fn tell(&mut self, part: Part) {
        let mut chunk = self.telling.chunk(vec![self.telling.chunk_entry(&part)]);
        if self.usage {
            chunk["usage"] = Value::Null;
        }
        self.ready.push_back(chunk.to_string());
        if self.telling.left > 0 {
            return;
        }
        if self.usage {
            let mut chunk = self.telling.chunk(Vec::new());
            chunk["usage"] = self.telling.usage();
            self.ready.push_back(chunk.to_string());
        }
        self.ready.push_back("[DONE]".to_owned());
    }

    fn fail(&mut self, refusal: &Refusal) {
        self.telling.left = 0;
        self.ready.extend([refusal.body().to_string(), "[DONE]".to_owned()]);
    }
}

impl Stream for Events {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<Option<Self::Item>> {
        if self.ready.is_empty() && self.telling.left > 0 {
            match understood(ready!(self.heard.poll_recv(context))) {
                Ok(tokens) => {
                    let part = self.telling.part(tokens);
                    self.tell(part);
                }
                Err(refusal) => self.fail(&refusal),
            }
        }
        Poll::Ready(self.ready.pop_front().map(|data| Ok(Event::default().data(data))))
    }
}

/// Seconds since 1970.
pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
