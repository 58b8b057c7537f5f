//! HTTP endpoint with JSON requests, a limit on concurrent requests, and retries.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyroll_config::EndpointConfig;
use serde_json::Value;
use ureq::Agent;

use super::Failure;

/// Longest answer that is read.
const MOST_ANSWER_BYTES: u64 = 16 << 20;

/// An endpoint with its connection settings.
#[derive(Debug)]
pub(super) struct Endpoint {
    url: String,
    agent: Agent,
    /// The `Authorization` header.
    authorization: Option<String>,
    permits: Permits,
    retries: u32,
    /// Delay before the first retry.
    wait: Duration,
    timeout: Duration,
}

/// Semaphore of concurrent requests.
#[derive(Debug)]
struct Permits {
    free: Mutex<usize>,
    left: Condvar,
}

/// A failed request.
pub(super) enum Trouble {
    /// A retry may succeed.
    Passing(Failure),
    Lasting(Failure),
}

/// Reads the key from the environment variable `variable`; the error says that it is not set.
pub fn key(variable: &str) -> Result<String, String> {
    std::env::var(variable).map_err(|_| format!("the environment has no key in `{variable}`"))
}

impl Endpoint {
    /// Creates the endpoint of `config`, with `path` appended to its URL. Sends no request.
    ///
    /// # Errors
    /// If its key is not in the environment.
    pub(super) fn new(config: &EndpointConfig, path: &str) -> Result<Self, Failure> {
        let key = config.key_variable.map(key).transpose()?;
        let authorization = key.map(|key| format!("Bearer {key}"));
        let timeout = Duration::from_secs_f64(config.timeout_s);
        let agent = Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .build()
            .new_agent();
        Ok(Self {
            url: format!("{}{path}", config.url.trim_end_matches('/')),
            agent,
            authorization,
            permits: Permits { free: Mutex::new(config.concurrency), left: Condvar::new() },
            retries: config.retries,
            wait: Duration::from_secs_f64(config.retry_s),
            timeout,
        })
    }

    /// URL of the endpoint.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Posts `body` and parses the answer with `read`; `None` if the answer is longer than 16 MiB.
    ///
    /// # Errors
    /// A permanent failure, or the failure of the last retry.
    pub(super) fn ask<T>(
        &self,
        body: &Value,
        read: impl Fn(&str) -> Result<T, Trouble>,
    ) -> Result<Option<T>, Failure> {
        let body = body.to_string();
        let _permit = self.permits.take();
        let mut wait = self.wait;
        for attempt in 0.. {
            let answer = self.request(&body).and_then(|text| text.map(|text| read(&text)).transpose());
            match answer {
                Ok(answer) => return Ok(answer),
                Err(Trouble::Passing(_)) if attempt < self.retries => thread::sleep(wait),
                Err(Trouble::Passing(failure) | Trouble::Lasting(failure)) => return Err(failure),
            }
            wait *= 2;
        }
        unreachable!("the last attempt returns")
    }

    fn request(&self, body: &str) -> Result<Option<String>, Trouble> {
        let url = &self.url;
        let mut request = self.agent.post(url).header("Content-Type", "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let failure = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => Trouble::Passing(Failure::TimedOut(self.timeout)),
            error => Trouble::Passing(format!("{url}: {error}").into()),
        };
        let mut response = request.send(body).map_err(failure)?;
        let text = match response.body_mut().with_config().limit(MOST_ANSWER_BYTES).read_to_string() {
            Ok(text) => Some(text),
            Err(ureq::Error::BodyExceedsLimit(_)) => None,
            Err(error) => return Err(failure(error)),
        };
        let status = response.status();
        if status.is_success() {
            return Ok(text);
        }
        let said: String = text.unwrap_or_default().chars().take(200).collect();
        let failure = format!("{url} answered {status}: {said}").into();
        let passing = status.is_server_error() || status.as_u16() == 429;
        Err(if passing { Trouble::Passing(failure) } else { Trouble::Lasting(failure) })
    }
}

impl Permits {
    fn take(&self) -> Permit<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = self.left.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        Permit(self)
    }
}

struct Permit<'a>(&'a Permits);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.left.notify_one();
    }
}

/// A server for tests.
#[cfg(test)]
pub(super) mod stub {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Requests that a stub of an endpoint has received.
    #[derive(Default)]
    pub(in super::super) struct Seen {
        pub(in super::super) requests: AtomicUsize,
        now: AtomicUsize,
        pub(in super::super) most_at_once: AtomicUsize,
        pub(in super::super) bodies: Mutex<Vec<Value>>,
        pub(in super::super) authorizations: Mutex<Vec<String>>,
    }

    /// Starts an endpoint on its own port. `answer` gives the status and the text for request `n` with its
    /// body, after a pause.
    pub(in super::super) fn stub(
        answer: impl Fn(usize, &Value) -> (u16, String) + Send + Sync + 'static,
        pause: Duration,
    ) -> (String, Arc<Seen>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/", listener.local_addr().unwrap());
        let (seen, answer) = (Arc::new(Seen::default()), Arc::new(answer));
        let shared = seen.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, seen, answer) = (stream.unwrap(), shared.clone(), answer.clone());
                thread::spawn(move || {
                    let number = seen.requests.fetch_add(1, Ordering::SeqCst);
                    let now = seen.now.fetch_add(1, Ordering::SeqCst) + 1;
                    seen.most_at_once.fetch_max(now, Ordering::SeqCst);
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    let mut length = 0;
                    loop {
                        let mut line = String::new();
                        reader.read_line(&mut line).unwrap();
                        let lower = line.to_lowercase();
                        if let Some(value) = lower.strip_prefix("content-length:") {
                            length = value.trim().parse().unwrap();
                        }
                        if lower.starts_with("authorization:") {
                            seen.authorizations.lock().unwrap().push(line.trim().to_owned());
                        }
                        if line.trim().is_empty() {
                            break;
                        }
                    }
                    let mut body = vec![0; length];
                    reader.read_exact(&mut body).unwrap();
                    let body: Value = serde_json::from_slice(&body).unwrap();
                    thread::sleep(pause);
                    let (status, text) = answer(number, &body);
                    seen.bodies.lock().unwrap().push(body);
                    let head = format!(
                        "HTTP/1.1 {status} -\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                        text.len()
                    );
                    // Decremented before the answer, since the next request may follow at once.
                    seen.now.fetch_sub(1, Ordering::SeqCst);
                    // A client that has disconnected reads nothing.
                    let _ =
                        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(text.as_bytes()));
                });
            }
        });
        (url, seen)
    }
}
