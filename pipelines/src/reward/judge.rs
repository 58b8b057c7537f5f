//! Another model's opinion, asked for at an endpoint that speaks OpenAI's protocol.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use minijinja::{Environment, context};
use regex::Regex;
use serde::Deserialize;
use ureq::Agent;

use super::{Completion, Error, Failure, Reward};
use crate::config::JudgeConfig;
use crate::data::Record;

/// What a judge says of a completion: the number that `pattern` finds last in its answer, times `scale`.
#[derive(Debug)]
pub struct Judge {
    config: JudgeConfig,
    pattern: Regex,
    templates: Environment<'static>,
    agent: Agent,
    /// The `Authorization` header.
    authorization: Option<String>,
    places: Places,
}

/// Requests that may still be started, and who waits for one.
#[derive(Debug)]
struct Places {
    free: Mutex<usize>,
    left: Condvar,
}

#[derive(Deserialize)]
struct Reply {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
}

/// Why a request brought nothing.
enum Trouble {
    /// It may go better another time.
    Passing(Failure),
    Lasting(Failure),
}

impl Judge {
    /// Reads the pattern, the template and the key. Nothing is asked yet.
    ///
    /// # Errors
    /// If one of them cannot be used.
    pub fn new(config: &JudgeConfig) -> Result<Self, Failure> {
        let pattern = Regex::new(&config.pattern).map_err(|error| error.to_string())?;
        if pattern.captures_len() != 2 {
            return Err("`pattern` has one group, around the number".into());
        }
        let mut templates = Environment::new();
        templates.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
        let template = config.template.clone();
        templates.add_template_owned("judge", template).map_err(|error| error.to_string())?;
        let authorization = match &config.key_variable {
            Some(name) => Some(std::env::var(name).map_err(|_| format!("the variable {name} has no key"))?),
            None => None,
        };
        let timeout = Duration::from_secs_f64(config.timeout_s);
        let agent = Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .build()
            .new_agent();
        let places = Places { free: Mutex::new(config.concurrency), left: Condvar::new() };
        let authorization = authorization.map(|key| format!("Bearer {key}"));
        Ok(Self { config: config.clone(), pattern, templates, agent, authorization, places })
    }

    fn ask(&self, record: &Record, completion: &Completion) -> Result<f64, Failure> {
        let template = self.templates.get_template("judge").expect("it was added");
        let values = context! {
            prompt => &record.prompt,
            answer => &record.answer,
            completion => completion.text,
        };
        let question = template.render(values).map_err(|error| error.to_string())?;
        let _place = self.places.take();
        let mut wait = Duration::from_secs_f64(self.config.retry_s);
        for attempt in 0.. {
            match self.request(&question) {
                Ok(said) => return self.number(&said),
                Err(Trouble::Passing(_)) if attempt < self.config.retries => thread::sleep(wait),
                Err(Trouble::Passing(failure) | Trouble::Lasting(failure)) => return Err(failure),
            }
            wait *= 2;
        }
        unreachable!("the last attempt returns")
    }

    /// The judge's answer.
    fn request(&self, question: &str) -> Result<String, Trouble> {
        let body = serde_json::json!({
            "model": self.config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.config.max_tokens,
        });
        let url = format!("{}/chat/completions", self.config.url.trim_end_matches('/'));
        let mut request = self.agent.post(&url).header("Content-Type", "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let timeout = Duration::from_secs_f64(self.config.timeout_s);
        let failure = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => Trouble::Passing(Failure::TimedOut(timeout)),
            error => Trouble::Passing(format!("{url}: {error}").into()),
        };
        let mut response = request.send(body.to_string()).map_err(failure)?;
        let text = response.body_mut().read_to_string().map_err(failure)?;
        let status = response.status();
        if !status.is_success() {
            let said: String = text.chars().take(200).collect();
            let failure = format!("{url} answered {status}: {said}").into();
            let passing = status.is_server_error() || status.as_u16() == 429;
            return Err(if passing { Trouble::Passing(failure) } else { Trouble::Lasting(failure) });
        }
        let reply: Result<Reply, _> = serde_json::from_str(&text);
        let content = reply.ok().and_then(|reply| reply.choices.into_iter().next()?.message.content);
        content.ok_or_else(|| Trouble::Lasting(format!("{url} answered without a completion").into()))
    }

    fn number(&self, said: &str) -> Result<f64, Failure> {
        let found = self.pattern.captures_iter(said).last().and_then(|found| found.get(1));
        let number: Option<f64> = found.and_then(|found| found.as_str().parse().ok());
        match number.filter(|number| number.is_finite()) {
            Some(number) => Ok(number * self.config.scale),
            None => {
                let said: String = said.chars().take(100).collect();
                Err(format!("the judge's answer has no number that `pattern` finds: {said:?}").into())
            }
        }
    }
}

impl Reward for Judge {
    fn name(&self) -> &'static str {
        "judge"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        self.ask(record, completion).map_err(|failure| Error::new(self.name(), record, failure))
    }
}

impl Places {
    fn take(&self) -> Place<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = self.left.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        Place(self)
    }
}

struct Place<'a>(&'a Places);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use serde_json::{Value, json};

    use super::*;

    /// What a stub of an endpoint has seen.
    #[derive(Default)]
    struct Seen {
        requests: AtomicUsize,
        now: AtomicUsize,
        most_at_once: AtomicUsize,
        bodies: Mutex<Vec<Value>>,
        authorizations: Mutex<Vec<String>>,
    }

    /// An endpoint on a port of its own that answers request `n` with `answer(n)`, a status and a text, after a moment.
    fn stub(answer: fn(usize) -> (u16, String), pause: Duration) -> (String, Arc<Seen>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/", listener.local_addr().unwrap());
        let seen = Arc::new(Seen::default());
        let shared = seen.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, seen) = (stream.unwrap(), shared.clone());
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
                    seen.bodies.lock().unwrap().push(serde_json::from_slice(&body).unwrap());
                    thread::sleep(pause);
                    let (status, text) = answer(number);
                    let head = format!(
                        "HTTP/1.1 {status} -\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                        text.len()
                    );
                    // Before the answer, after which the next request may come.
                    seen.now.fetch_sub(1, Ordering::SeqCst);
                    // One who has hung up reads nothing.
                    let _ =
                        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(text.as_bytes()));
                });
            }
        });
        (url, seen)
    }

    fn says(text: &str) -> String {
        json!({"choices": [{"message": {"role": "assistant", "content": text}}]}).to_string()
    }

    fn judge(url: String, change: impl FnOnce(&mut JudgeConfig)) -> Judge {
        let mut config = JudgeConfig {
            url,
            model: "a-judge".into(),
            template: "Q: {{ prompt }}\nA: {{ completion }}\nGold: {{ answer }}".into(),
            pattern: r"Score: ([0-9.]+)".into(),
            scale: 0.1,
            key_variable: None,
            max_tokens: 64,
            concurrency: 2,
            retries: 2,
            retry_s: 0.01,
            timeout_s: 5.0,
        };
        change(&mut config);
        Judge::new(&config).unwrap()
    }

    fn score(judge: &Judge) -> Result<f64, Error> {
        let record = Record { id: "3".into(), prompt: "1+1".into(), answer: "2".into(), ..Record::default() };
        judge.score(&record, &Completion { text: "two", tokens: None, finished: true })
    }

    #[test]
    fn asks_by_its_template_and_reads_the_last_number() {
        let (url, seen) = stub(|_| (200, says("Score: 3? No. Score: 7.5")), Duration::ZERO);
        let judge = judge(url, |config| config.key_variable = Some("PATH".into()));
        assert_eq!(score(&judge).unwrap(), 0.75);
        let body = seen.bodies.lock().unwrap()[0].clone();
        assert_eq!(body["messages"][0]["content"], "Q: 1+1\nA: two\nGold: 2");
        assert_eq!((&body["model"], &body["max_tokens"]), (&json!("a-judge"), &json!(64)));
        assert!(seen.authorizations.lock().unwrap()[0].contains("Bearer "));
    }

    #[test]
    fn tries_again_where_that_may_help() {
        let (url, seen) =
            stub(|n| if n < 2 { (503, "busy".into()) } else { (200, says("Score: 10")) }, Duration::ZERO);
        assert_eq!(score(&judge(url, |_| {})).unwrap(), 1.0);
        assert_eq!(seen.requests.load(Ordering::SeqCst), 3);

        let fails = |answer, words: &str, requests| {
            let (url, seen) = stub(answer, Duration::ZERO);
            let error = score(&judge(url, |_| {})).unwrap_err();
            let told = crate::error_chain::one_line(&error);
            assert!(told.contains(words), "{told}");
            assert_eq!(seen.requests.load(Ordering::SeqCst), requests, "{told}");
        };
        fails(|_| (429, "slow down".into()), "429", 3);
        fails(|_| (401, "who are you".into()), "who are you", 1);
        fails(|_| (200, "{}".into()), "without a completion", 1);
        fails(|_| (200, says("splendid")), "no number", 1);
        let error = score(&judge("http://127.0.0.1:1/v1".into(), |_| {})).unwrap_err();
        assert!(crate::error_chain::one_line(&error).contains("127.0.0.1:1"));
    }

    #[test]
    fn a_judge_that_is_slow_is_left() {
        let (url, _) = stub(|_| (200, says("Score: 1")), Duration::from_secs(30));
        let judge = judge(url, |config| (config.timeout_s, config.retries) = (0.2, 1));
        let started = Instant::now();
        assert!(score(&judge).unwrap_err().failure.is_timeout());
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn no_more_requests_at_a_time_than_allowed() {
        let (url, seen) = stub(|_| (200, says("Score: 1")), Duration::from_millis(30));
        let judge = judge(url, |_| {});
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| score(&judge).unwrap());
            }
        });
        assert_eq!(seen.requests.load(Ordering::SeqCst), 8);
        assert_eq!(seen.most_at_once.load(Ordering::SeqCst), 2);
    }
}
