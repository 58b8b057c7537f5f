//! A trained model in use: generated from, scored and served.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{ONE_RANK, Process, anyroll, fail, run_tiny, succeed, wait_until, whole_lines};

fn trained() -> (TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &[]);
    (folder, run)
}

/// Writes lines to a file and returns its path.
fn lines(folder: &TempDir, name: &str, lines: &[Value]) -> String {
    let path = folder.path().join(name);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn parsed(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Greedy completions of the last evaluation, as prompt and text.
fn evaluated(run: &Path) -> Vec<(String, String)> {
    let samples = whole_lines(&run.join("samples.jsonl"));
    let samples = samples.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let text = |sample: &Value, key: &str| sample[key].as_str().unwrap().to_owned();
    samples
        .filter(|sample| sample["phase"] == "after")
        .map(|sample| (text(&sample, "prompt"), text(&sample, "completion")))
        .collect()
}

#[test]
fn a_run_generates_what_its_evaluation_saw_and_scores_it() {
    let (folder, run) = trained();
    let run_path = run.to_str().unwrap();
    let expected = evaluated(&run);
    assert!(expected.len() > 5);
    let prompts: Vec<Value> = expected.iter().map(|(prompt, _)| json!({"prompt": prompt})).collect();
    let file = lines(&folder, "prompts.jsonl", &prompts);
    let greedy = ["--temperature", "0", "--max-new-tokens", "4"];
    let generate = |model: &str, file: &str| {
        let args = ["generate", model, "--file", file, "--sequences", "3"];
        parsed(&succeed(anyroll(args.into_iter().chain(greedy))).stdout)
    };
    let generated = generate(run_path, &file);
    assert_eq!(generated.len(), expected.len());
    for line in &generated {
        let (_, completion) = &expected[line["line"].as_u64().unwrap() as usize - 1];
        assert_eq!(line["completion"], completion.as_str(), "{line}");
    }
    let checkpoint = run.join("checkpoints/step_000012");
    assert_eq!(generate(checkpoint.to_str().unwrap(), &file), generated);
    let older = run.join("checkpoints/step_000008");
    assert_ne!(generate(older.to_str().unwrap(), &file), generated);

    // The same log-probs by the training forward.
    let texts: Vec<Value> = generated
        .iter()
        .map(|line| {
            let prompt = &expected[line["line"].as_u64().unwrap() as usize - 1].0;
            json!({"prompt": prompt, "completion": line["completion"], "finished": line["ending"] == "stop"})
        })
        .collect();
    let file = lines(&folder, "texts.jsonl", &texts);
    let scored = parsed(&succeed(anyroll(["score", run_path, "--file", &file])).stdout);
    let nothing = json!({"prompt": expected[0].0, "completion": ""});
    let file = lines(&folder, "nothing.jsonl", &[nothing]);
    let of_nothing = parsed(&succeed(anyroll(["score", run_path, "--file", &file])).stdout);
    assert_eq!(of_nothing, [json!({"line": 1, "logprob": 0.0, "tokens": [], "logprobs": []})]);
    for (generated, scored) in generated.iter().zip(&scored) {
        let [generated, scored] = [generated, scored].map(|line| line["logprob"].as_f64().unwrap());
        assert!((generated - scored).abs() < 1e-4, "{generated} {scored}");
    }
}

#[test]
fn samples_follow_from_the_seed_and_end_at_stop_strings() {
    let (_folder, run) = trained();
    let sample = |extra: &[&str]| {
        // As many tokens as there is room for.
        let args = ["generate", run.to_str().unwrap(), "--prompt", "314>"];
        succeed(anyroll(args.into_iter().chain(extra.iter().copied()))).stdout
    };
    let several = sample(&["--samples", "20", "--temperature", "3"]);
    assert_eq!(several, sample(&["--samples", "20", "--temperature", "3"]));
    assert_ne!(several, sample(&["--samples", "20", "--temperature", "3", "--seed", "1"]));
    let cut = sample(&["--samples", "20", "--temperature", "3", "--stop", "1"]);
    assert!(several.contains('1') && !cut.contains('1'), "{several} {cut}");
}

/// Whichever ends first, and a prompt's samples beside one another.
#[test]
fn texts_come_in_the_order_of_their_prompts() {
    let (_folder, run) = trained();
    let generate = |prompts: &[&str]| {
        let args = ["generate", run.to_str().unwrap(), "--temperature", "0", "--samples", "2"];
        let prompts = prompts.iter().flat_map(|prompt| ["--prompt", prompt]);
        succeed(anyroll(args.into_iter().chain(prompts))).stdout
    };
    let prompts = ["314>", "9>", "55>"];
    let apart: String = prompts.iter().map(|prompt| generate(&[prompt])).collect();
    assert_eq!(generate(&prompts), apart);
}

#[test]
fn what_cannot_be_used_is_named() {
    let (folder, run) = trained();
    let run = run.to_str().unwrap();
    let no_model = folder.path().to_str().unwrap();
    assert!(fail(anyroll(["generate", no_model, "--prompt", "1"])).contains("no model's folder"));
    assert!(fail(anyroll(["generate", run, "--prompt", "x>"])).contains("'x'"));
    assert!(fail(anyroll(["generate", run, "--prompt", "1>", "--temperature=-1"])).contains("temperature"));
    let file = lines(&folder, "wrong.jsonl", &[json!({"prompt": "1>"}), json!({"promt": "1>"})]);
    assert!(fail(anyroll(["generate", run, "--file", &file])).contains("wrong.jsonl:2"));
    assert!(fail(anyroll(["score", run, "--file", &file])).contains("wrong.jsonl:2"));
    let file = lines(&folder, "tokens.jsonl", &[json!({"tokens": [1, 2]}), json!({"tokens": [1, 999]})]);
    let error = fail(anyroll(["score", run, "--file", &file]));
    assert!(error.contains("tokens.jsonl:2: there is no token 999"), "{error}");
}

/// A request and the whole answer: status line, headers and body.
fn ask(address: &str, method: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn body(answer: &str) -> Value {
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

#[test]
fn a_server_answers_as_clients_expect() {
    let (_folder, run) = trained();
    let server = Process::start(anyroll(["serve", run.to_str().unwrap(), "--port", "0"]));
    let said = server.output.path().join("stderr");
    let mut address = String::new();
    wait_until("the server listens", || {
        let text = fs::read_to_string(&said).unwrap();
        let found = text.split_once("http://").and_then(|(_, rest)| rest.split_once(';'));
        found.inspect(|(found, _)| (*found).clone_into(&mut address)).is_some()
    });
    let post = |body: Value| ask(&address, "POST", "/v1/completions", &body.to_string());

    let (prompt, expected) = evaluated(&run).remove(0);
    let greedy = json!({"prompt": prompt, "temperature": 0, "max_tokens": 4, "logprobs": 1});
    let whole = body(&post(greedy.clone()));
    assert_eq!(whole["choices"][0]["text"], expected.as_str(), "{whole}");
    let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(whole["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), tokens);

    let mut streamed = greedy;
    streamed["stream"] = json!(true);
    let answer = post(streamed);
    let events: Vec<&str> = answer.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (last, parts) = events.split_last().unwrap();
    assert_eq!(*last, "[DONE]", "{answer}");
    let parts: Vec<Value> = parts.iter().map(|part| serde_json::from_str(part).unwrap()).collect();
    let text: String = parts.iter().map(|part| part["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, expected);
    assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);

    let several = body(&post(json!({"prompt": "314>", "n": 3, "max_tokens": 4, "seed": 1})));
    assert_eq!(several["choices"].as_array().unwrap().len(), 3);
    let refused = |answer: String, word: &str| {
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(word), "{word}: {answer}");
    };
    refused(post(json!({"prompt": "314>", "best_of": 3})), "best_of");
    refused(post(json!({"prompt": "x>"})), "'x'");
    refused(post(json!({"prompt": [99]})), "token 99");
    refused(post(json!({"prompt": "314>", "top_p": 2})), "top_p");
    refused(post(json!({"prompt": "314>", "max_tokens": 9999})), "longer");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]}).to_string();
    refused(ask(&address, "POST", "/v1/chat/completions", &chat), "chat template");

    let metrics = ask(&address, "GET", "/metrics", "");
    assert!(metrics.contains("anyroll_requests_total 5\n"), "{metrics}");
    assert!(ask(&address, "GET", "/health", "").ends_with("ok"));
    assert_eq!(body(&ask(&address, "GET", "/v1/models", ""))["data"][0]["id"], "anyroll");
}

#[test]
fn a_stop_string_ends_a_completion_and_stays_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "stop", ONE_RANK, &["pipeline.rlvr.rollout.stop=['7', '42']"]);
    let mut stopped = 0;
    for line in whole_lines(&run.join("samples.jsonl")) {
        let sample: Value = serde_json::from_str(&line).unwrap();
        let text = sample["completion"].as_str().unwrap();
        if let Some(end) = ["7", "42"].iter().filter_map(|stop| Some(text.find(stop)? + stop.len())).min() {
            assert_eq!(end, text.len(), "{sample}");
            stopped += 1;
        }
    }
    assert!(stopped > 0, "no sample has a stop string");
}
