//! Formats that take much time or memory.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};

use super::{Server, body, refused, with};

fn held(format: Value) -> Value {
    json!({"prompt": "12 + 34", "max_tokens": 400, "seed": 2, "structured_outputs": format})
}

fn words(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("word {} {number}", number % 7)).collect()
}

/// Resident memory of a process in MB.
fn resident_mb(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.process.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
}

#[test]
fn thousands_of_texts_are_one_format_and_more_are_refused_at_once() {
    let server = Server::published(&[]);
    for count in [1, 3000, 10_000] {
        let texts = words(count);
        let asked = with(&held(json!({"choice": texts})), "n", json!(4));
        for choice in body(&server.complete(&asked))["choices"].as_array().unwrap() {
            let text = choice["text"].as_str().unwrap();
            assert!(texts.iter().any(|it| it == text) && choice["finish_reason"] == "stop", "{text}");
        }
    }
    let asked = held(json!({"choice": vec!["a"; 100_000]}));
    let started = Instant::now();
    let answer = server.complete(&asked);
    refused(&answer, &["structured_outputs", "`choice`", "100000", "at most 10000"]);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

/// Formats of few bytes that take gigabytes or minutes to compile, and some that are large.
fn exploding() -> Vec<Value> {
    let multiples: Vec<Value> =
        (0..10).map(|number| json!({"type": "integer", "multipleOf": 1_000_003 + number})).collect();
    let patterns: Vec<Value> =
        (0..60).map(|number| json!({"type": "string", "pattern": format!("x.{{{number}}}y")})).collect();
    let properties = |count: usize| -> Map<String, Value> {
        words(count).into_iter().map(|word| (word, json!({"type": "integer"}))).collect()
    };
    let either = |number: usize| {
        let one = |name: &str| json!({"type": "object", "properties": {format!("{name}{number}"): {"type": "string"}}});
        json!({"anyOf": [one("a"), one("b")]})
    };
    vec![
        json!({"json": {"type": "integer", "multipleOf": 1_000_003}}),
        json!({"json": {"allOf": multiples}}),
        json!({"json": {"type": "string", "allOf": patterns}}),
        json!({"json": {"type": "object", "properties": properties(20_000)}}),
        json!({"json": {"allOf": (0..14).map(either).collect::<Vec<_>>()}}),
        json!({"json": {"enum": (0..100_000).map(|number| json!({"a": number})).collect::<Vec<_>>()}}),
        json!({"regex": "[a-z]?".repeat(20_000)}),
        json!({"regex": r"\w?".repeat(20_000)}),
        json!({"regex": "(".repeat(20_000)}),
    ]
}

#[test]
fn formats_that_explode_are_refused_within_seconds_and_hold_nobody_up() {
    let server = Server::published(&[]);
    body(&server.complete(&held(json!({"choice": ["a"]}))));
    let plain = json!({"prompt": "12", "max_tokens": 2}).to_string();
    let before_mb = resident_mb(&server);
    thread::scope(|scope| {
        let answers: Vec<_> = exploding()
            .into_iter()
            .map(|format| {
                let server = &server;
                scope.spawn(move || {
                    let started = Instant::now();
                    loop {
                        let answer = server.complete(&held(format.clone()));
                        if !answer.starts_with("HTTP/1.1 503") {
                            return (format, answer, started.elapsed());
                        }
                        // Others are being tried.
                        thread::sleep(Duration::from_millis(500));
                    }
                })
            })
            .collect();
        let mut slowest = Duration::ZERO;
        while answers.iter().any(|answer| !answer.is_finished()) {
            let started = Instant::now();
            assert!(server.ask("POST", "/v1/completions", &plain).starts_with("HTTP/1.1 200"));
            slowest = slowest.max(started.elapsed());
            thread::sleep(Duration::from_millis(20));
        }
        assert!(slowest < Duration::from_secs(5), "{slowest:?}");
        for answer in answers {
            let (format, answer, took) = answer.join().unwrap();
            let format: String = format.to_string().chars().take(100).collect();
            assert!(answer.starts_with("HTTP/1.1 400"), "{format}: {answer}");
            assert!(took < Duration::from_secs(120), "{format}: {took:?}");
            for inner in ["panic", "backtrace", ".rs:", "/root", "/home", "registry"] {
                assert!(!answer.contains(inner), "{format}: {answer}");
            }
        }
    });
    // The memory of trials ends with their processes. Bodies of megabytes leave some to the allocator.
    let after_mb = resident_mb(&server);
    assert!(after_mb < before_mb + 128, "{before_mb} to {after_mb} MB");
    // The server still compiles.
    body(&server.complete(&held(json!({"regex": "[0-9]{3}"}))));
}

/// Processes that try the formats of clients who have left.
#[test]
fn a_format_of_a_client_that_left_is_given_up() {
    let server = Server::published(&[]);
    body(&server.complete(&held(json!({"choice": ["a"]}))));
    let asked = held(json!({"json": {"type": "integer", "multipleOf": 1_000_003}})).to_string();
    for _ in 0..6 {
        drop(server.send("POST", "/v1/completions", &asked));
    }
    // Behind six others it would be refused.
    body(&server.complete(&held(json!({"choice": ["b"]}))));
}

/// Paths of the server's machine in reasons that a client is told.
#[test]
fn reasons_have_no_paths() {
    let server = Server::start("tests/golden/tiny_model", &[]);
    let chat = json!({"messages": [{"role": "assistant", "content": "x"}, {"role": "nobody", "content": "x"}],
                      "chat_template_kwargs": {"x": {"y": [1]}}});
    for answer in [
        server.chat(&chat),
        server.complete(&held(json!({"regex": "a(?=b)"}))),
        server.complete(&held(json!({"json": {"$ref": "file:///etc/passwd"}}))),
        server.complete(&held(json!({"json": {"$ref": "http://localhost:1/a"}}))),
        server.complete(&json!({"prompt": [99_999_999]})),
    ] {
        assert!(
            !answer.contains("golden/") && !answer.contains(".jinja") && !answer.contains("root:"),
            "{answer}"
        );
    }
}
