//! Responses in the format of OpenAI's API, whole or streamed.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{SystemTime, UNIX_EPOCH},
};

use anyroll_data::Tokenizer;
use anyroll_models::generation::Ending;
use axum::{
    Json,
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_stream::Stream;

use super::{
    body::ParsedRequest,
    completions::App,
    connections::Busy,
    refusal::Refusal,
    text::TextStream,
    tool_calls::{Call, Calls},
    worker::{Message, Problem, Tokens},
};

/// API of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Text,
    Chat,
}

/// Runs a request and responds to it. The connection stays `busy` to the end of a stream.
pub(super) async fn answer(app: &App, shape: Shape, asked: ParsedRequest, busy: Busy) -> Response {
    let mut response =
        PartialResponse::new((app.next_id(), app.names.first()), &app.tokenizer, shape, &asked);
    let (stream, usage) = (asked.stream, asked.usage);
    let mut heard = app.worker.ask(asked.requests);
    // A stream starts with status 200, so it is not opened before the request is known to run.
    let first = match understood(heard.recv().await) {
        Ok(tokens) => response.part(tokens),
        Err(refusal) => return refusal.into_response(),
    };
    if !stream {
        let body = response.whole(first, heard).await;
        return body.map_or_else(Refusal::into_response, |body| Json(body).into_response());
    }
    let mut events = Events { heard, response, usage, ready: VecDeque::new(), _busy: busy };
    events.tell(first);
    Sse::new(events).into_response()
}

/// Tokens of a message, or the reason why no more follow.
fn understood(heard: Option<Message>) -> Result<Tokens, Refusal> {
    heard.ok_or_else(|| Refusal::failed("the engine has failed".to_owned()))?.map_err(|problem| match problem
    {
        Problem::Request(message) => Refusal::bad_request(message),
        Problem::Model(message) => Refusal::failed(message),
        Problem::Format => Refusal::failed("generation was aborted: the format's grammar failed".to_owned()),
    })
}

/// A response in progress.
struct PartialResponse {
    shape: Shape,
    /// Name of the model.
    model: String,
    id: String,
    created_s: u64,
    /// [`ParsedRequest::logprobs`].
    logprobs: Option<usize>,
    prompt_tokens: usize,
    choices: Vec<Choice>,
    /// Choices in progress.
    left: usize,
}

/// State of a sample.
struct Choice {
    text: TextStream,
    /// Parser of tool calls, if there are tools.
    calls: Option<Calls>,
    tokens: usize,
    /// Characters decoded so far.
    characters: usize,
}

/// New output of a sample.
#[derive(Default)]
struct Part {
    index: usize,
    /// True for the first part of the sample.
    is_first: bool,
    text: String,
    calls: Vec<Call>,
    tokens: Vec<Token>,
    ending: Option<Ending>,
}

struct Token {
    text: String,
    logprob: f32,
    /// Texts and log-probs of the likeliest tokens at its position.
    likeliest: Vec<(String, f32)>,
    /// Characters of the completion before it.
    offset: usize,
}

impl PartialResponse {
    fn new(
        (id, model): (String, &str),
        tokenizer: &Arc<Tokenizer>,
        shape: Shape,
        asked: &ParsedRequest,
    ) -> Self {
        let text = || TextStream::new(tokenizer.clone(), asked.stops.clone());
        let calls = || asked.tools.clone().map(Calls::new);
        let choice = |_| Choice { text: text(), calls: calls(), tokens: 0, characters: 0 };
        let samples = asked.requests.iter().flat_map(|request| &request.samples);
        let choices: Vec<Choice> = samples.map(choice).collect();
        Self {
            shape,
            model: model.to_owned(),
            id,
            created_s: now_s(),
            logprobs: asked.logprobs,
            prompt_tokens: asked.requests.iter().map(|request| request.prompt.len()).sum(),
            left: choices.len(),
            choices,
        }
    }

    fn part(&mut self, Tokens { sample, tokens: ids, logprobs, likeliest, ending }: Tokens) -> Part {
        let choice = &mut self.choices[sample];
        let added = choice.text.push(&ids, &likeliest, ending.is_some());
        let (text, calls) = match &mut choice.calls {
            Some(calls) => calls.push(&added.text, ending.is_some()),
            None => (added.text, Vec::new()),
        };
        let is_first = choice.tokens == 0;
        choice.tokens += ids.len();
        self.left -= usize::from(ending.is_some());
        let mut tokens = Vec::with_capacity(ids.len());
        for (at, (text, others)) in added.pieces.into_iter().zip(added.others).enumerate() {
            let (offset, logprob) = (choice.characters, logprobs[at]);
            choice.characters += text.chars().count();
            // The token itself has the same text and log-prob.
            let told = |(other, (id, value)): (String, &(i64, f32))| match *id == ids[at] {
                true => (text.clone(), logprob),
                false => (other, *value),
            };
            let likeliest =
                others.into_iter().zip(likeliest.get(at).into_iter().flatten()).map(told).collect();
            tokens.push(Token { text, logprob, likeliest, offset });
        }
        Part { index: sample, is_first, text, calls, tokens, ending }
    }

    /// Collects the complete response, which starts with `first`.
    async fn whole(mut self, first: Part, mut heard: UnboundedReceiver<Message>) -> Result<Value, Refusal> {
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
                Shape::Chat => ("message", self.message(&part)),
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

    /// An event of a stream.
    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object = match self.shape {
            Shape::Text => "text_completion",
            Shape::Chat => "chat.completion.chunk",
        };
        self.envelope(object, choices)
    }

    fn chunk_entry(&self, part: &Part) -> Value {
        let content = match self.shape {
            Shape::Text => ("text", json!(part.text)),
            Shape::Chat => ("delta", self.delta(part)),
        };
        self.entry(content, part)
    }

    fn message(&self, part: &Part) -> Value {
        let mut message = json!({"role": "assistant", "content": content(part)});
        if !part.calls.is_empty() {
            message["tool_calls"] = self.tool_calls(part).collect();
        }
        message
    }

    /// New output of a message. Clients concatenate values of the same key, so the role is sent once; calls
    /// are sent whole.
    fn delta(&self, part: &Part) -> Value {
        let mut delta = json!({"content": content(part)});
        if part.is_first {
            delta["role"] = "assistant".into();
        }
        if !part.calls.is_empty() {
            let numbered = self.tool_calls(part).enumerate().map(|(index, mut call)| {
                call["index"] = index.into();
                call
            });
            delta["tool_calls"] = numbered.collect();
        }
        delta
    }

    fn tool_calls(&self, part: &Part) -> impl Iterator<Item = Value> {
        part.calls.iter().enumerate().map(|(number, Call { name, arguments })| {
            let id = format!("call-{}-{}-{number}", self.id, part.index);
            json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        })
    }

    fn entry(&self, (key, content): (&str, Value), part: &Part) -> Value {
        let reason = part.ending.map(|ending| match ending {
            Ending::Stop if !part.calls.is_empty() => "tool_calls",
            Ending::Stop => "stop",
            Ending::Length => "length",
            Ending::Broken => unreachable!("it is told as a problem"),
        });
        let logprobs = self.logprobs.map(|likeliest| logprobs(self.shape, &part.tokens, likeliest));
        json!({"index": part.index, key: content, "finish_reason": reason, "logprobs": logprobs})
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        let (id, created_s) = (&self.id, self.created_s);
        json!({"id": id, "object": object, "created": created_s, "model": self.model, "choices": choices})
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
        self.calls.extend(next.calls);
        self.tokens.extend(next.tokens);
        self.ending = next.ending;
    }
}

/// Text of a message; null if it consists of calls only.
fn content(part: &Part) -> Value {
    if part.text.is_empty() && !part.calls.is_empty() { Value::Null } else { json!(part.text) }
}

/// Texts and log-probs of the tokens, with the `likeliest` ones at each position.
fn logprobs(shape: Shape, tokens: &[Token], likeliest: usize) -> Value {
    let told =
        |text: &str, logprob: f32| json!({"token": text, "logprob": logprob, "bytes": text.as_bytes()});
    match shape {
        Shape::Text => json!({
            "tokens": tokens.iter().map(|token| &token.text).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
            "text_offset": tokens.iter().map(|token| token.offset).collect::<Vec<_>>(),
            "top_logprobs": (likeliest > 0).then(|| tokens.iter().map(by_text).collect::<Vec<_>>()),
        }),
        Shape::Chat => {
            let token = |token: &Token| {
                let mut entry = told(&token.text, token.logprob);
                let likeliest = token.likeliest.iter().map(|(text, logprob)| told(text, *logprob));
                entry["top_logprobs"] = likeliest.collect();
                entry
            };
            json!({"content": tokens.iter().map(token).collect::<Vec<_>>(), "refusal": null})
        }
    }
}

/// The likeliest tokens and the sampled one by text; of equal texts the likelier.
fn by_text(token: &Token) -> Value {
    let mut entries = Map::new();
    let sampled = (token.text.clone(), token.logprob);
    for (text, logprob) in token.likeliest.iter().chain([&sampled]) {
        entries.entry(text.clone()).or_insert_with(|| json!(logprob));
    }
    entries.into()
}

/// A response as events. If the client disconnects, this is dropped with its receiver, and the engine aborts
/// the samples.
struct Events {
    heard: UnboundedReceiver<Message>,
    response: PartialResponse,
    usage: bool,
    /// Data of events to send.
    ready: VecDeque<String>,
    _busy: Busy,
}

impl Events {
    fn tell(&mut self, part: Part) {
        let mut chunk = self.response.chunk(vec![self.response.chunk_entry(&part)]);
        if self.usage {
            chunk["usage"] = Value::Null;
        }
        self.ready.push_back(chunk.to_string());
        if self.response.left > 0 {
            return;
        }
        if self.usage {
            let mut chunk = self.response.chunk(Vec::new());
            chunk["usage"] = self.response.usage();
            self.ready.push_back(chunk.to_string());
        }
        self.ready.push_back("[DONE]".to_owned());
    }

    fn fail(&mut self, refusal: &Refusal) {
        self.response.left = 0;
        self.ready.extend([refusal.body().to_string(), "[DONE]".to_owned()]);
    }
}

impl Stream for Events {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<Option<Self::Item>> {
        if self.ready.is_empty() && self.response.left > 0 {
            match understood(ready!(self.heard.poll_recv(context))) {
                Ok(tokens) => {
                    let part = self.response.part(tokens);
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use anyroll_models::{Request, SamplingParams, generation::Sample, hf::ModelFolder};

    use super::*;
    use anyroll_config::FolderConfig;

    /// A chat with a tool `f`, and the answer's tokens.
    fn response(answer: &str) -> (PartialResponse, Vec<Tokens>) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model");
        let config = FolderConfig { path: path.clone(), chat: true, system_prompt: None, lora: None };
        let folder = ModelFolder::open(&path).unwrap();
        let tokenizer = Arc::new(Tokenizer::of_folder(&folder, &config).unwrap());
        let params = Arc::new(SamplingParams::default());
        let request =
            Request { prompt: vec![1], params, stop: None, format: None, samples: vec![Sample::default()] };
        let tools = Some(["f".to_owned()].into());
        let (requests, stops) = (vec![request], [].into());
        let asked = ParsedRequest {
            requests,
            format: None,
            stops,
            stream: true,
            usage: false,
            logprobs: None,
            tools,
        };
        let ids = tokenizer.encode_text(answer).unwrap();
        let last = ids.len() - 1;
        let tokens = ids.iter().enumerate().map(|(at, &id)| Tokens {
            sample: 0,
            tokens: vec![id],
            logprobs: vec![-1.0],
            likeliest: Vec::new(),
            ending: (at == last).then_some(Ending::Stop),
        });
        (PartialResponse::new(("x".to_owned(), "m"), &tokenizer, Shape::Chat, &asked), tokens.collect())
    }

    #[test]
    fn calls_are_told_whole_and_streamed() {
        let answer = "Hm.\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
        let call = json!({"id": "call-x-0-0", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
        let (mut whole, tokens) = response(answer);
        let (out, heard) = tokio::sync::mpsc::unbounded_channel();
        let mut tokens = tokens.into_iter();
        let first = whole.part(tokens.next().unwrap());
        tokens.for_each(|tokens| out.send(Ok(tokens)).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let body = runtime.block_on(whole.whole(first, heard)).unwrap();
        let message = json!({"role": "assistant", "content": "Hm.", "tool_calls": [call.clone()]});
        assert_eq!(body["choices"][0]["message"], message);
        assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");

        let (mut streamed, tokens) = response(answer);
        let parts: Vec<Part> = tokens.into_iter().map(|tokens| streamed.part(tokens)).collect();
        let parts: Vec<Value> = parts.iter().map(|part| streamed.chunk_entry(part)).collect();
        let text: String = parts.iter().filter_map(|part| part["delta"]["content"].as_str()).collect();
        assert_eq!(text, "Hm.");
        let (last, before) = parts.split_last().unwrap();
        let mut numbered = call;
        numbered["index"] = 0.into();
        assert_eq!(
            (&last["delta"]["tool_calls"], &last["finish_reason"]),
            (&json!([numbered]), &json!("tool_calls"))
        );
        assert!(before.iter().all(|part| part["delta"].get("tool_calls").is_none()));
        assert_eq!(parts.iter().filter(|part| part["delta"].get("role").is_some()).count(), 1);
    }

    #[test]
    fn an_answer_of_calls_alone_has_no_content() {
        let (mut whole, tokens) = response("{\"name\": \"f\", \"parameters\": {}}");
        let mut parts: Vec<Part> = tokens.into_iter().map(|tokens| whole.part(tokens)).collect();
        let last = parts.pop().unwrap();
        assert!(parts.iter().all(|part| part.text.is_empty()));
        let message = whole.message(&last);
        assert_eq!(
            (&message["content"], &message["tool_calls"][0]["function"]["name"]),
            (&Value::Null, &json!("f"))
        );
    }
}
