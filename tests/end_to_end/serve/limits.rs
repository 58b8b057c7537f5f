//! Clients that send nothing, or half of a request, and hold nobody up.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{super::anyroll, ENDLESS, Server, published_model};

/// Beginnings of requests that never go on.
const HALVES: [&str; 4] = [
    "",
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le",
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
     Content-Length: 100\r\n\r\n{\"prompt\":",
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
     Transfer-Encoding: chunked\r\n\r\n5\r\n{\"mes\r\n",
];

fn connect(server: &Server, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream
}

/// Text of the server until it closes the connection.
fn rest(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    // The server may reset a connection on which it has not read all.
    let _ = stream.read_to_end(&mut text);
    String::from_utf8(text).unwrap()
}

#[test]
fn half_a_request_ends_with_its_time() {
    let server = Server::published(&["--header-timeout", "1", "--body-timeout", "2"]);
    let started = Instant::now();
    let mut halves = HALVES.map(|half| connect(&server, half));
    // A connection without a further request, once it has had one.
    let mut idle = connect(&server, "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    let [nothing, header, body, chunked] = halves.each_mut().map(rest);
    assert_eq!(nothing, "");
    assert!(header.is_empty() || header.starts_with("HTTP/1.1 408"), "{header}");
    for answer in [body, chunked] {
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("not complete after 2 s"), "{answer}");
    }
    assert!(rest(&mut idle).ends_with("ok"));
    let took = started.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_secs(10), "{took:?}");
    assert!(server.ask("GET", "/health", "").ends_with("ok"));
}

/// A byte now and then does not give a client more time.
#[test]
fn a_slow_client_has_no_more_time_than_others() {
    let server = Server::published(&["--header-timeout", "1", "--body-timeout", "1"]);
    for half in [HALVES[1], HALVES[2]] {
        let mut stream = connect(&server, half);
        let started = Instant::now();
        while stream.write_all(b" ").is_ok() {
            assert!(started.elapsed() < Duration::from_secs(10), "{half:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn idle_clients_keep_nobody_out() {
    let patient = ["--header-timeout", "600", "--body-timeout", "600"];
    let model = published_model::model();
    let plain = anyroll(["serve", model.to_str().unwrap(), "--port", "0"].iter().chain(&patient));
    let mut few_files = Command::new("sh");
    few_files
        .args(["-c", "ulimit -n 64 && exec \"$0\" \"$@\""])
        .arg(plain.get_program())
        .args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => few_files.env(name, value),
            None => few_files.env_remove(name),
        };
    }
    let few_places = [&patient[..], &["--max-connections", "4"]].concat();
    for server in [Server::of(few_files), Server::published(&few_places)] {
        let long =
            json!({"prompt": ENDLESS, "temperature": 0, "max_tokens": 2000, "stream": true}).to_string();
        let mut running = BufReader::new(server.send("POST", "/v1/completions", &long)).lines();
        assert!(running.next().unwrap().unwrap().starts_with("HTTP/1.1 200"));
        let idle: Vec<TcpStream> = (0..100).map(|n| connect(&server, HALVES[n % HALVES.len()])).collect();
        let started = Instant::now();
        for _ in 0..10 {
            assert!(server.ask("GET", "/health", "").ends_with("ok"));
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        // A request that is being answered is never closed for another.
        assert_eq!(running.map(Result::unwrap).filter(|line| line == "data: [DONE]").count(), 1);
        drop(idle);
    }
}

#[test]
fn bounds_are_checked() {
    for (option, value) in [("--header-timeout", "0"), ("--body-timeout", "x"), ("--max-connections", "0")] {
        let mut command = anyroll(["serve", "nowhere", option, value]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(option), "{said}");
    }
}
