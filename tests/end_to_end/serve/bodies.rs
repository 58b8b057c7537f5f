//! Damaged bodies: a server answers or refuses them in words, and goes on.

use crate::end_to_end::foreign_bytes::fuzz;

use super::Server;

/// Statuses of answers and of refusals that are the client's to mend.
const STATUSES: [&str; 6] = ["200", "400", "404", "413", "415", "422"];

const REQUESTS: [(&str, &str); 4] = [
    (
        "/v1/completions",
        r#"{"model": "anyroll", "prompt": ["two", [1, 2]], "max_tokens": 4, "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1,
            "stop": ["x"], "logprobs": 2, "echo": true}"#,
    ),
    (
        "/v1/completions",
        r#"{"prompt": "a", "max_tokens": 3, "structured_outputs": {"choice": ["text", "tex"]}, "stream": true}"#,
    ),
    (
        "/v1/chat/completions",
        r#"{"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}],
            "max_completion_tokens": 4, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "auto", "top_logprobs": 1, "logprobs": true}"#,
    ),
    (
        "/v1/chat/completions",
        r#"{"messages": [{"role": "user", "content": "d"}], "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}}}"#,
    ),
];

#[test]
fn damaged_bodies_are_answered_or_refused() {
    let server = Server::published(&["--max-length", "64", "--served-model-name", "anyroll"]);
    let good = REQUESTS.map(|(_, body)| body.as_bytes().to_vec());
    fuzz("bodies", &good, |number, bytes| {
        let answer = server.ask("POST", REQUESTS[number].0, &String::from_utf8_lossy(bytes));
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(STATUSES.contains(&status), "{answer}");
        assert!(!answer.contains("panicked") && !answer.contains(".rs:"), "{answer}");
    });
    assert!(server.ask("GET", "/health", "").starts_with("HTTP/1.1 200"));
}
