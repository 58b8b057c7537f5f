//! Keys, hosts and origins.

use serde_json::{Value, json};

use super::{super::anyroll, Server, published_model};

const ASKED: [(&str, &str); 4] =
    [("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("GET", "/v1/nothing")];

/// The error of an answer with this status.
#[track_caller]
fn error(answer: &str, status: u16) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    let error = serde_json::from_str::<Value>(body).unwrap()["error"].take();
    assert!(error["message"].is_string() && error["type"] == "invalid_request_error", "{answer}");
    error
}

/// A key from the environment or the arguments, which neither `--help` nor the process's title tells.
#[test]
fn a_server_with_a_key_answers_nobody_without_it() {
    let model = published_model::model();
    let args = ["serve", model.to_str().unwrap(), "--port", "0"];
    let mut from_environment = anyroll(args);
    from_environment.env("ANYROLL_API_KEY", "s3cret");
    let from_arguments = anyroll(args.iter().chain(&["--api-key", "s3cret"]));
    for server in [Server::of(from_environment), Server::of(from_arguments)] {
        let body = json!({"prompt": "1", "max_tokens": 1}).to_string();
        for (method, path) in ASKED {
            for header in ["", "Authorization: Bearer s3cre\r\n", "Authorization: Basic s3cret\r\n"] {
                let error = error(&server.ask_with(method, path, header, &body), 401);
                assert_eq!(error["code"], "invalid_api_key");
            }
        }
        let header = "Authorization: Bearer s3cret\r\n";
        assert!(server.ask_with("POST", "/v1/completions", header, &body).starts_with("HTTP/1.1 200"));
        assert!(server.ask("GET", "/health", "").ends_with("ok"));
        // The process that tries formats works without it.
        let held =
            json!({"prompt": "1", "max_tokens": 9, "structured_outputs": {"choice": ["12"]}}).to_string();
        assert!(server.ask_with("POST", "/v1/completions", header, &held).starts_with("HTTP/1.1 200"));
    }
    let help = anyroll(["serve", "--help"]).env("ANYROLL_API_KEY", "s3cret").output().unwrap();
    assert!(!String::from_utf8_lossy(&help.stdout).contains("s3cret"));
    let empty = anyroll(args).env("ANYROLL_API_KEY", "").output().unwrap();
    assert!(String::from_utf8_lossy(&empty.stderr).contains("--api-key"), "{empty:?}");
}

#[test]
fn a_foreign_host_or_origin_is_refused() {
    let server = Server::published(&["--allowed-hosts", "my.server"]);
    let host = |host: &str| {
        server.ask_raw(&format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    };
    for own in [&*server.address, "localhost", "LOCALHOST:1234", "my.server:80", "[::1]"] {
        assert!(host(own).starts_with("HTTP/1.1 200"), "{own}");
    }
    for foreign in ["evil.example", "evil.example:80", "localhost.evil.example", "10.1.2.3"] {
        let message = error(&host(foreign), 403)["message"].to_string();
        assert!(message.contains(foreign) && message.contains("--allowed-hosts"), "{message}");
    }
    let origin = |method: &str, path: &str, origin: &str| {
        server.ask_with(method, path, &format!("Origin: {origin}\r\n"), &json!({"prompt": "1"}).to_string())
    };
    for (method, path) in ASKED {
        for foreign in ["http://evil.example", "http://localhost:3000", "null"] {
            let message = error(&origin(method, path, foreign), 403)["message"].to_string();
            assert!(message.contains("--allowed-origins"), "{message}");
        }
    }
    assert!(origin("GET", "/v1/models", &format!("http://{}", server.address)).starts_with("HTTP/1.1 200"));
}

/// The headers that a browser needs, for the pages that were named only.
#[test]
fn pages_of_an_allowed_origin_may_ask() {
    let page = "http://localhost:3000";
    let server = Server::published(&["--allowed-origins", page, "--api-key", "s3cret"]);
    let asks = format!(
        "Origin: {page}\r\nAccess-Control-Request-Method: POST\r\n\
         Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n"
    );
    let allowed = server.ask_with("OPTIONS", "/v1/chat/completions", &asks, "").to_lowercase();
    assert!(allowed.starts_with("http/1.1 200"), "{allowed}");
    for header in [
        &*format!("access-control-allow-origin: {page}"),
        "access-control-allow-headers: authorization,content-type,x-stainless-os",
        "access-control-allow-methods: get,post",
    ] {
        assert!(allowed.contains(header), "{header}: {allowed}");
    }
    // A page reads why it was refused.
    let refused = server.ask_with("GET", "/v1/models", &format!("Origin: {page}\r\n"), "").to_lowercase();
    assert!(refused.starts_with("http/1.1 401"), "{refused}");
    assert!(refused.contains(&format!("access-control-allow-origin: {page}")), "{refused}");
    let foreign = server.ask_with("OPTIONS", "/v1/models", &asks.replace("3000", "3001"), "");
    error(&foreign, 403);
    let plain = Server::published(&[]).ask("GET", "/v1/models", "").to_lowercase();
    assert!(plain.starts_with("http/1.1 200") && !plain.contains("access-control"), "{plain}");
}
