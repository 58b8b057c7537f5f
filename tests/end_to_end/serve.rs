//! Models served over HTTP: a trained one of single characters, and a tiny published one with a chat
//! template.

mod access;
mod bodies;
mod formats;
mod limits;
mod rewards;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    Process, anyroll, fail,
    inference::{evaluated, trained},
    published_model, wait_until,
};

/// The tiny published model's greedy continuation, which never ends.
const ENDLESS: &str = "text text";

/// A separate server for each test.
pub(super) struct Server {
    address: String,
    process: Process,
}

impl Server {
    pub(super) fn start(model: &str, args: &[&str]) -> Self {
        Self::of(anyroll(["serve", model, "--port", "0"].iter().chain(args)))
    }

    /// Starts the server of a command.
    fn of(command: Command) -> Self {
        let process = Process::start(command);
        let said = process.output.path().join("stderr");
        let mut address = String::new();
        wait_until("the server listens", || {
            let text = fs::read_to_string(&said).unwrap();
            let found = text.split_once("http://").and_then(|(_, rest)| rest.split_once(';'));
            found.inspect(|(found, _)| (*found).clone_into(&mut address)).is_some()
        });
        Self { address, process }
    }

    /// Starts the tiny published model, which accepts up to 2048 tokens.
    fn published(args: &[&str]) -> Self {
        Self::start(published_model::model().to_str().unwrap(), args)
    }

    /// Returns a connection on which a request was sent.
    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        self.send_raw(&self.request(method, path, "", body))
    }

    fn send_raw(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    /// Text of a request with more headers, each with its line end.
    fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let (host, length) = (&self.address, body.len());
        format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n\
             {headers}Content-Length: {length}\r\n\r\n{body}"
        )
    }

    /// Returns the whole answer to a request: status line, headers and body.
    pub(super) fn ask(&self, method: &str, path: &str, body: &str) -> String {
        self.ask_with(method, path, "", body)
    }

    fn ask_with(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        self.ask_raw(&self.request(method, path, headers, body))
    }

    fn ask_raw(&self, request: &str) -> String {
        let mut answer = String::new();
        self.send_raw(request).read_to_string(&mut answer).unwrap();
        answer
    }

    fn complete(&self, body: &Value) -> String {
        self.ask("POST", "/v1/completions", &body.to_string())
    }

    fn chat(&self, body: &Value) -> String {
        self.ask("POST", "/v1/chat/completions", &body.to_string())
    }

    fn metric(&self, name: &str) -> u64 {
        let page = self.ask("GET", "/metrics", "");
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("anyroll_{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
    }
}

/// Returns the body of a successful answer.
#[track_caller]
fn body(answer: &str) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

/// Returns the events of a streamed answer, except for the final end marker.
#[track_caller]
fn events(answer: &str) -> Vec<Value> {
    let events: Vec<&str> = answer.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (last, parts) = events.split_last().unwrap_or_else(|| panic!("no events: {answer}"));
    assert_eq!(*last, "[DONE]", "{answer}");
    parts.iter().map(|part| serde_json::from_str(part).unwrap()).collect()
}

#[track_caller]
fn refused(answer: &str, words: &[&str]) {
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(words.iter().all(|word| answer.contains(word)), "{words:?}: {answer}");
}

fn strings(values: &Value) -> Vec<&str> {
    values.as_array().unwrap().iter().map(|value| value.as_str().unwrap()).collect()
}

/// Returns `body` with one more field.
fn with(body: &Value, field: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[field] = value;
    body
}

#[test]
fn a_server_answers_as_clients_expect() {
    let (_folder, run) = trained();
    let server = Server::start(run.to_str().unwrap(), &[]);
    let (prompt, expected) = evaluated(&run).remove(0);
    let greedy = json!({"prompt": prompt, "temperature": 0, "max_tokens": 4, "logprobs": 0});
    let whole = body(&server.complete(&greedy));
    let choice = &whole["choices"][0];
    assert_eq!(choice["text"], expected.as_str(), "{whole}");
    // Here a token is a character, and the end is a token without text.
    let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["token_logprobs"].as_array().unwrap().len(), tokens);
    let mut characters: Vec<String> = expected.chars().map(String::from).collect();
    characters.resize(tokens, String::new());
    assert_eq!(strings(&logprobs["tokens"]), characters);
    assert_eq!(logprobs["text_offset"], json!((0..tokens).collect::<Vec<_>>()));

    let streamed = with(&greedy, "stream", json!(true));
    let parts = events(&server.complete(&streamed));
    let text: String = parts.iter().map(|part| part["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, expected);
    assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], choice["finish_reason"]);
    assert!(parts.iter().all(|part| part.get("usage").is_none()));
    let mut parts =
        events(&server.complete(&with(&streamed, "stream_options", json!({"include_usage": true}))));
    let last = parts.pop().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
    assert!(parts.iter().all(|part| part["usage"].is_null() && part.get("usage").is_some()));

    let several = body(&server.complete(&json!({"prompt": "314>", "n": 3, "max_tokens": 4, "seed": 1})));
    assert_eq!(several["choices"].as_array().unwrap().len(), 3);
    refused(&server.complete(&json!({"prompt": "x>"})), &["'x'"]);
    refused(&server.complete(&json!({"prompt": [99]})), &["token 99"]);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    refused(&server.chat(&chat), &["chat template"]);

    assert_eq!(server.metric("requests_total"), 4);
    assert!(server.ask("GET", "/health", "").ends_with("ok"));
    let models = body(&server.ask("GET", "/v1/models", ""));
    // The run's folder, which is the name in answers too.
    assert_eq!((&models["data"][0]["id"], &whole["model"]), (&json!("run"), &json!("run")));
    assert_eq!(body(&server.ask("GET", "/v1/models/run", "")), models["data"][0]);
    let other = server.ask("GET", "/v1/models/other", "");
    assert!(other.starts_with("HTTP/1.1 404") && other.contains("`run`"), "{other}");
    assert_eq!(body(&server.complete(&with(&greedy, "model", json!("run"))))["choices"], whole["choices"]);
    let other = server.complete(&with(&greedy, "model", json!("gpt-4")));
    assert!(other.starts_with("HTTP/1.1 404") && other.contains("\"code\":\"model_not_found\""), "{other}");
}

/// A server tells that it loads, and has the names that it is given.
#[test]
fn a_server_has_the_names_it_is_given() {
    let server = Server::published(&["--served-model-name", "org/tiny", "--served-model-name", "tiny"]);
    let said = fs::read_to_string(server.process.output.path().join("stderr")).unwrap();
    let [loading, listening] = ["loading ", "listening on http://"].map(|words| said.find(words).unwrap());
    assert!(loading < listening && said.contains("for the model `org/tiny`"), "{said}");
    for name in ["org/tiny", "tiny"] {
        let asked = json!({"prompt": "12 + 34", "max_tokens": 1, "temperature": 0, "model": name});
        assert_eq!(body(&server.complete(&asked))["model"], "org/tiny");
        assert_eq!(body(&server.ask("GET", &format!("/v1/models/{name}"), ""))["id"], name);
    }
}

/// The cache of a host is not resident before it is used: here it is larger than the process.
#[test]
fn a_server_takes_memory_as_it_needs_it() {
    let server = Server::published(&["--sequences", "16384"]);
    // Keys and values of 16 tokens, in two layers, of two heads of four numbers.
    let cache = server.metric("kv_blocks") * 2 * 16 * 2 * 2 * 4 * 4;
    assert!(cache > 2 << 30, "{cache} bytes");
    let resident = || {
        let status = fs::read_to_string(format!("/proc/{}/status", server.process.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().to_owned();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    let before = resident();
    assert!(before < 1 << 30, "{before} bytes are resident before the first request");
    let asked = json!({"prompt": ENDLESS, "max_tokens": 64, "temperature": 0});
    assert_eq!(body(&server.complete(&asked))["usage"]["completion_tokens"], 64);
    assert!(resident() < before + (512 << 20));
}

#[test]
fn what_is_not_done_is_refused_by_name_and_what_asks_for_nothing_is_not() {
    let server = Server::published(&["--max-length", "32"]);
    let least = json!({"prompt": "12 + 34", "max_tokens": 1});
    let greedy = with(&least, "temperature", json!(0));
    let expected = body(&server.complete(&greedy))["choices"].clone();
    for field in
        ["stream", "stop", "n", "seed", "logprobs", "presence_penalty", "logit_bias", "best_of", "user"]
    {
        assert_eq!(
            body(&server.complete(&with(&greedy, field, Value::Null)))["choices"],
            expected,
            "{field}"
        );
    }
    for (field, value) in [
        ("top_k", json!(-1)),
        ("prompt", json!(["12 + 34"])),
        ("prompt", json!([[16, 17, 220, 10, 220, 18, 19]])), // the same, by tests/golden/tiny_model/tokens.json
        ("prompt", json!([16, 17, 220, 10, 220, 18, 19])),
    ] {
        assert_eq!(body(&server.complete(&with(&greedy, field, value)))["choices"], expected, "{field}");
    }
    for (field, value, word) in [
        ("n", json!(0), "from 1 to 128"),
        ("n", json!(1_000_000_000_000_000_u64), "from 1 to 128"),
        ("n", json!(u64::MAX), "from 1 to 128"),
        ("max_tokens", json!(-1), "at least 1"),
        ("max_tokens", json!(0), "at least 1"),
        ("max_tokens", json!(303), "at most 25"),
        ("max_tokens", json!(u64::MAX), "at most 25"),
        ("seed", json!(-1), "at least 0"),
        ("top_k", json!(-2), "an integer"),
        ("top_p", json!(2), "(0, 1]"),
        ("temperature", json!(-1), "1e-6"),
        ("stop", json!(""), "1 to 256 bytes"),
        ("logprobs", json!("yes"), "from 0 to 20"),
        ("logprobs", json!(21), "from 0 to 20"),
        ("best_of", json!(3), "must be 1"),
        ("prompt", json!(vec!["a"; 2049]), "2049 prompts, must have at most 2048"),
        ("prompt", json!(["a", ""]), "prompt"),
        ("prompt", json!(["a", "1".repeat(32)]), "32 tokens"),
        ("stream_options", json!({"include_nothing": true}), "include_nothing"),
        ("mirostat", json!(1), "leave it out"),
    ] {
        // A streamed request is refused with the same status, before the stream begins.
        for stream in [false, true] {
            let asked = with(&with(&least, field, value.clone()), "stream", json!(stream));
            refused(&server.complete(&asked), &[field, word]);
        }
    }
    for (text, problem) in [("[]", "must be a JSON object"), ("{", "the body is not JSON: EOF")] {
        refused(&server.ask("POST", "/v1/completions", text), &[problem]);
    }
    let large = server.ask("POST", "/v1/completions", &json!("1".repeat(3 << 20)).to_string());
    assert!(large.starts_with("HTTP/1.1 413") && large.contains("more than 2 MB"), "{large}");
    refused(&server.complete(&json!({"prompt": "1".repeat(32)})), &["32 tokens", "shorter"]);
    // Three tokens, and as many more as there is room for.
    let endless = json!({"prompt": ENDLESS, "temperature": 0});
    for asked in [endless.clone(), with(&endless, "max_tokens", json!(29))] {
        assert_eq!(body(&server.complete(&asked))["usage"]["total_tokens"], 32);
    }
}

#[test]
fn a_longest_sequence_is_one_that_the_model_has_room_for() {
    let model = published_model::model();
    for wrong in ["0", "1", "2049"] {
        let args = ["serve", model.to_str().unwrap(), "--port", "0", "--max-length", wrong];
        let error = fail(anyroll(args));
        assert!(error.contains("--max-length") && error.contains("from 2 to 2048"), "{error}");
    }
}

#[test]
fn a_chat_is_answered_whole_and_streamed_with_the_texts_of_its_tokens() {
    let server = Server::published(&[]);
    let parts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]);
    let asked = |content: Value| {
        json!({"messages": [{"role": "user", "content": content}], "max_tokens": 40, "seed": 3, "n": 2,
               "logprobs": true, "tool_choice": "none", "response_format": {"type": "text"}})
    };
    let whole = body(&server.chat(&asked(json!("one\ntwo"))));
    assert_eq!(body(&server.chat(&asked(parts)))["choices"], whole["choices"]);

    let streamed = events(&server.chat(&with(&asked(json!("one\ntwo")), "stream", json!(true))));
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let text = choice["message"]["content"].as_str().unwrap();
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(joined, text);
        let bytes = tokens.iter().flat_map(|token| token["bytes"].as_array().unwrap());
        assert_eq!(bytes.map(|byte| byte.as_u64().unwrap() as u8).collect::<Vec<_>>(), text.as_bytes());
        assert!(tokens.iter().all(|token| token["logprob"].as_f64().unwrap() <= 0.0));

        let parts = streamed.iter().map(|part| &part["choices"][0]).filter(|part| part["index"] == index);
        let parts: Vec<&Value> = parts.collect();
        let said: String = parts.iter().map(|part| part["delta"]["content"].as_str().unwrap()).collect();
        assert_eq!(said, text);
        let found = parts.iter().flat_map(|part| part["logprobs"]["content"].as_array().unwrap());
        assert_eq!(found.collect::<Vec<_>>(), tokens.iter().collect::<Vec<_>>());
        assert_eq!(parts.iter().filter(|part| part["delta"].get("role").is_some()).count(), 1);
    }

    let chat = asked(json!("hi"));
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    refused(&server.chat(&with(&chat, "tools", tool.clone())), &["tool_choice"]);
    // The tiny model's template has no tools.
    let of_tools = json!({"messages": [{"role": "user", "content": "hi"}], "tools": tool});
    refused(&server.chat(&of_tools), &["`tools`", "not supported by this model"]);
    refused(&server.chat(&with(&of_tools, "tools", json!([1]))), &["`tools` must be a list of functions"]);
    refused(&server.chat(&json!({"messages": []})), &["`messages` must be"]);
    refused(&server.chat(&with(&chat, "top_logprobs", json!(21))), &["top_logprobs", "from 0 to 20"]);
    let alone = with(&with(&chat, "top_logprobs", json!(2)), "logprobs", json!(false));
    refused(&server.chat(&alone), &["`top_logprobs` requires `logprobs`"]);
    refused(&server.chat(&with(&chat, "logprobs", json!(1))), &["logprobs", "true or false"]);
    refused(&server.chat(&asked(json!([{"type": "image_url"}]))), &["messages[0].content"]);
    refused(&server.chat(&json!({})), &["`messages` is missing"]);
}

/// The weights are random: any structure comes from the requested format.
#[test]
fn answers_are_held_to_a_format() {
    let server = Server::published(&[]);
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["colour", "sizes"], "properties": {
        "colour": {"enum": ["red", "grün"]},
        "sizes": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "integer", "minimum": 0, "maximum": 9}}
    }});
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "seed": 1, "logprobs": true});
    let named = json!({"type": "json_schema", "json_schema": {"name": "shirt", "strict": true, "schema": schema.clone()}});
    let held = with(&with(&chat, "n", json!(3)), "response_format", named);
    let whole = body(&server.chat(&held));
    for choice in whole["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert_eq!(choice["finish_reason"], "stop", "{text}");
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert!([json!("red"), json!("grün")].contains(&value["colour"]), "{text}");
        assert!((1..=2).contains(&value["sizes"].as_array().unwrap().len()), "{text}");
    }
    let streamed = events(&server.chat(&with(&held, "stream", json!(true))));
    let of_first = streamed.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == 0);
    let text: String = of_first.filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text);

    let completion = json!({"prompt": "12 + 34", "max_tokens": 40, "seed": 2});
    let told = |outputs: Value| {
        body(&server.complete(&with(&completion, "structured_outputs", outputs)))["choices"][0].clone()
    };
    assert!(["yes", "no"].contains(&told(json!({"choice": ["yes", "no"]}))["text"].as_str().unwrap()));
    let number = told(json!({"regex": "[0-9]{4}"}));
    assert!(number["text"].as_str().unwrap().parse::<u16>().is_ok_and(|it| it < 10_000), "{number}");
    let object = told(json!({"json": schema}));
    assert_eq!(object["text"].as_str().unwrap().as_bytes()[0], b'{');
    let cut =
        with(&with(&completion, "structured_outputs", json!({"regex": "[0-9]{9}"})), "max_tokens", json!(4));
    assert_eq!(body(&server.complete(&cut))["choices"][0]["finish_reason"], "length");

    for (format, words) in [
        (json!({"type": "xml"}), ["`type` must be", "json_schema"]),
        (json!({"type": "json_schema"}), ["`json_schema` must be", "schema"]),
        (json!({"type": "json_schema", "json_schema": {"name": "x"}}), ["no `schema`", "response_format"]),
        (
            json!({"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}),
            ["is not supported", "thing"],
        ),
        (json!({"type": "json_object", "schema": {}}), ["`schema` is not supported", "response_format"]),
        (json!("json"), ["`response_format` must be", "object"]),
    ] {
        refused(&server.chat(&with(&chat, "response_format", format)), &words);
    }
    let both = with(
        &with(&chat, "response_format", json!({"type": "json_object"})),
        "structured_outputs",
        json!({"regex": "a"}),
    );
    refused(&server.chat(&both), &["leave one out"]);
    let two = json!({"regex": "a", "choice": ["a"]});
    refused(
        &server.complete(&with(&completion, "structured_outputs", two)),
        &["structured_outputs", "one of"],
    );
}

/// Copies the tiny published model.
fn copied() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(published_model::model()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// Copies it with another chat template.
fn with_template(template: &str) -> TempDir {
    let folder = copied();
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

#[test]
fn several_prompts_are_answered_in_their_order() {
    let server = Server::published(&[]);
    let asked = |prompt: Value| json!({"prompt": prompt, "max_tokens": 5, "temperature": 0, "n": 2});
    let text = |body: &Value, index: usize| body["choices"][index]["text"].as_str().unwrap().to_owned();
    let alone = ["12 + 34", ENDLESS].map(|prompt| body(&server.complete(&asked(json!(prompt)))));
    let together = asked(json!(["12 + 34", ENDLESS]));
    let all = body(&server.complete(&together));
    let indices: Vec<u64> =
        all["choices"].as_array().unwrap().iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    for (index, expected) in [(0, &alone[0]), (1, &alone[0]), (2, &alone[1]), (3, &alone[1])] {
        assert_eq!(text(&all, index), text(expected, index % 2));
    }
    let used = |body: &Value| body["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(used(&all), used(&alone[0]) + used(&alone[1]));
    let mut streamed = vec![String::new(); 4];
    for event in events(&server.complete(&with(&together, "stream", json!(true)))) {
        let choice = &event["choices"][0];
        streamed[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert_eq!(streamed, [0, 1, 2, 3].map(|index| text(&all, index)));
    assert_eq!(server.metric("requests_total"), 4);
}

/// In a greedy answer the sampled token is the most likely.
#[test]
fn the_likeliest_tokens_are_told_as_openai_has_them() {
    let server = Server::published(&[]);
    let asked = json!({"prompt": ENDLESS, "max_tokens": 4, "temperature": 0, "logprobs": 3});
    let found = body(&server.complete(&asked))["choices"][0]["logprobs"].clone();
    let tops = found["top_logprobs"].as_array().unwrap();
    assert_eq!(tops.len(), 4);
    for (at, top) in tops.iter().enumerate() {
        let values: Vec<f64> =
            top.as_object().unwrap().values().map(|value| value.as_f64().unwrap()).collect();
        assert!(values.len() <= 3 && values.is_sorted_by(|a, b| a >= b), "{top}");
        assert_eq!(top[found["tokens"][at].as_str().unwrap()], found["token_logprobs"][at]);
        assert_eq!(values[0], found["token_logprobs"][at].as_f64().unwrap());
    }
    let none = body(&server.complete(&with(&asked, "logprobs", json!(0))));
    assert_eq!(none["choices"][0]["logprobs"]["top_logprobs"], Value::Null);

    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0,
                      "logprobs": true, "top_logprobs": 2});
    let streamed = events(&server.chat(&with(&chat, "stream", json!(true))));
    let streamed =
        streamed.iter().flat_map(|part| part["choices"][0]["logprobs"]["content"].as_array().unwrap());
    let whole = body(&server.chat(&chat))["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(streamed.cloned().collect::<Vec<_>>(), *whole.as_array().unwrap());
    for token in whole.as_array().unwrap() {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        for field in ["token", "logprob", "bytes"] {
            assert_eq!(top[0][field], token[field], "{token}");
        }
        assert!(top[1]["logprob"].as_f64() <= top[0]["logprob"].as_f64());
    }
}

#[test]
fn a_model_that_computes_no_numbers_is_an_error_of_the_server() {
    let folder = copied();
    let path = folder.path().join("model.safetensors");
    let mut weights = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    weights[header..].fill(0xff); // NaN in every dtype
    fs::write(&path, weights).unwrap();
    let server = Server::start(folder.path().to_str().unwrap(), &[]);
    for stream in [false, true] {
        let asked = json!({"prompt": "12", "max_tokens": 3, "stream": stream});
        let answer = server.complete(&asked);
        assert!(answer.starts_with("HTTP/1.1 500") && answer.contains("log-probs are NaN"), "{answer}");
        assert!(answer.contains("server_error"), "{answer}");
    }
    assert!(server.ask("GET", "/health", "").ends_with("ok"));
}

/// In the format of `transformers`: arguments are objects, not JSON strings.
#[test]
fn calls_of_tools_and_variables_reach_the_chat_template() {
    let folder = with_template(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}\
         {% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ last }}",
    );
    let server = Server::start(folder.path().to_str().unwrap(), &[]);
    let tokens = |body: Value| body["usage"]["prompt_tokens"].as_u64().unwrap();
    let length = |text: &str| tokens(body(&server.complete(&json!({"prompt": text, "max_tokens": 1}))));
    let arguments = r#"{"a":1}"#;
    let call = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
    let chat = json!({"max_tokens": 1, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": call},
    ]});
    assert_eq!(tokens(body(&server.chat(&chat))), length(r#"hi{"a": 1}"#));
    let told = with(&chat, "tools", json!([{"b": 2}]));
    assert_eq!(tokens(body(&server.chat(&told))), length(r#"hi{"a": 1}[{"b": 2}]"#));
    let varied = with(&chat, "chat_template_kwargs", json!({"last": "the end"}));
    assert_eq!(tokens(body(&server.chat(&varied))), length(r#"hi{"a": 1}the end"#));
    refused(
        &server.chat(&with(&chat, "chat_template_kwargs", json!(1))),
        &["`chat_template_kwargs` must be"],
    );
}

#[test]
fn an_address_that_is_not_there_is_answered_as_all_else() {
    let server = Server::published(&[]);
    for (method, path, status) in [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)] {
        let answer = server.ask(method, path, "");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
        let error = &serde_json::from_str::<Value>(body).unwrap()["error"];
        assert_eq!(error["type"], "invalid_request_error", "{answer}");
        assert!(error.get("param").is_some() && error.get("code").is_some(), "{answer}");
    }
}

#[test]
fn samples_of_a_client_that_left_are_given_up_while_they_wait() {
    let server = Server::published(&["--sequences", "1"]);
    let long = json!({"prompt": ENDLESS, "temperature": 0, "max_tokens": 2000, "stream": true}).to_string();
    let mut busy = BufReader::new(server.send("POST", "/v1/completions", &long)).lines();
    assert!(busy.next().unwrap().unwrap().starts_with("HTTP/1.1 200"));
    let many = json!({"prompt": ENDLESS, "n": 50, "max_tokens": 2000, "stream": true}).to_string();
    let waiting = server.send("POST", "/v1/completions", &many);
    wait_until("the samples wait", || server.metric("samples_waiting") == 50);
    drop(waiting);
    wait_until("the samples are given up", || server.metric("samples_waiting") == 0);
    // None of them ever ran: the busy sequence is still running.
    assert_eq!(server.metric("samples_live"), 1);
    assert_eq!(busy.last().map(|line| line.unwrap()), Some(String::new()));
    assert_eq!(server.metric("generated_tokens_total"), 2000);
}

#[test]
fn a_long_prompt_holds_nobody_up() {
    let server = Server::published(&[]);
    let long = json!({"prompt": "a longer text ".repeat(140_000)}).to_string();
    let mut waiting = server.send("POST", "/v1/completions", &long);
    // Once the server answers this small later request, it has read the whole long one and tokenizes it.
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(200) {
        let asked = Instant::now();
        server.ask("GET", "/health", "");
        assert!(asked.elapsed() < Duration::from_millis(200), "{:?}", asked.elapsed());
    }
    let mut answer = String::new();
    waiting.read_to_string(&mut answer).unwrap();
    refused(&answer, &["make it shorter"]);
}

#[test]
fn requests_that_run_end_before_the_server_does() {
    let long = json!({"prompt": ENDLESS, "temperature": 0, "max_tokens": 2000, "stream": true}).to_string();
    let begun = |server: &Server| {
        let mut stream = BufReader::new(server.send("POST", "/v1/completions", &long)).lines();
        assert!(stream.next().unwrap().unwrap().starts_with("HTTP/1.1 200"));
        server.process.send(Signal::SIGTERM);
        wait_until("nobody listens", || TcpStream::connect(&server.address).is_err());
        stream
    };
    let server = Server::published(&[]);
    let lines: Vec<String> = begun(&server).map(Result::unwrap).collect();
    assert!(lines.contains(&"data: [DONE]".to_owned()), "{:?}", lines.last());
    assert_eq!(server.process.finish().code, Some(0));

    let server = Server::published(&["--grace", "0"]);
    let lines: Vec<String> = begun(&server).map_while(Result::ok).collect();
    assert!(!lines.contains(&"data: [DONE]".to_owned()));
    let ended = server.process.finish();
    assert!(ended.code == Some(0) && ended.stderr.contains("aborted"), "{ended:#?}");
}
