//! The `judge` reward: the score of another model, requested from an endpoint with OpenAI's API.

use anyroll_config::JudgeConfig;
use anyroll_data::Record;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value, context};
use regex::Regex;
use serde::Deserialize;

use super::endpoint::{Endpoint, Trouble};
use super::pattern::compile;
use super::{Completion, Error, Failure, Reward};

/// A judge's score of a completion: the last match of `pattern` in its answer, a number or a word with a
/// value, times `scale`.
#[derive(Debug)]
pub struct Judge {
    config: JudgeConfig,
    pattern: Regex,
    templates: Environment<'static>,
    endpoint: Endpoint,
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

/// Name of the template.
const TEMPLATE: &str = "judge";

impl Judge {
    /// Reads the key. Sends no request.
    ///
    /// # Errors
    /// If the key is not in the environment.
    ///
    /// # Panics
    /// If the pattern or the template is invalid, which the config's check excludes.
    pub fn new(config: &JudgeConfig) -> Result<Self, Failure> {
        let pattern = Self::pattern(&config.pattern).expect("a pattern that was checked");
        let templates = Self::templates(&config.template).expect("a template that was checked");
        let endpoint = Endpoint::new(&config.endpoint(), "/chat/completions")?;
        Ok(Self { config: config.clone(), pattern, templates, endpoint })
    }

    /// Compiles the pattern of a judge's number; the error is the problem with it.
    pub fn pattern(pattern: &str) -> Result<Regex, String> {
        let pattern = compile(pattern)?;
        match pattern.captures_len() - 1 {
            1 => Ok(pattern),
            groups => Err(format!("it has {groups} groups, must have one")),
        }
    }

    /// Parses the template of a judge's question; the error is the problem with it.
    pub fn templates(template: &str) -> Result<Environment<'static>, String> {
        let mut templates = Environment::new();
        templates.set_undefined_behavior(UndefinedBehavior::Strict);
        let told = |error: minijinja::Error| error.to_string();
        templates.add_template_owned(TEMPLATE, template.to_owned()).map_err(told)?;
        let template = templates.get_template(TEMPLATE).expect("it was added");
        let values = question("", "", "");
        let names = template.undeclared_variables(false);
        let is_there = |name: &str| {
            values.get_attr(name).is_ok_and(|value| !value.is_undefined())
                || templates.globals().any(|(global, _)| global == name)
        };
        if let Some(unknown) = names.iter().filter(|name| !is_there(name)).min() {
            return Err(format!("unknown variable `{unknown}`"));
        }
        // Filters and functions are looked up when they are called. Other failures depend on the texts.
        const UNKNOWN: [ErrorKind; 4] = [
            ErrorKind::UnknownFilter,
            ErrorKind::UnknownFunction,
            ErrorKind::UnknownMethod,
            ErrorKind::UnknownTest,
        ];
        match template.render(values) {
            Err(error) if UNKNOWN.contains(&error.kind()) => Err(told(error)),
            _ => Ok(templates),
        }
    }

    fn ask(&self, record: &Record, completion: &Completion) -> Result<f64, Failure> {
        let template = self.templates.get_template(TEMPLATE).expect("it was added");
        let values = question(&record.prompt, completion.text, &record.answer);
        let question = template.render(values).map_err(|error| error.to_string())?;
        let body = serde_json::json!({
            "model": self.config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.config.max_tokens,
        });
        let said = self.endpoint.ask(&body, |text| {
            let reply: Result<Reply, _> = serde_json::from_str(text);
            let content = reply.ok().and_then(|reply| reply.choices.into_iter().next()?.message.content);
            let failure = || format!("{} answered without a completion", self.endpoint.url()).into();
            content.ok_or_else(|| Trouble::Lasting(failure()))
        })?;
        self.number(&said.ok_or("the judge's answer has no end")?)
    }

    fn number(&self, said: &str) -> Result<f64, Failure> {
        let found = self.pattern.captures_iter(said).last().and_then(|found| found.get(1));
        let number: Option<f64> = found.and_then(|found| self.counts(found.as_str()));
        match number.filter(|number| number.is_finite()) {
            Some(number) => Ok(number * self.config.scale),
            None => {
                let said: String = said.chars().take(100).collect();
                Err(format!("the judge's answer has no number that `pattern` finds: {said:?}").into())
            }
        }
    }

    /// Value of a word or a number, before `scale`.
    fn counts(&self, found: &str) -> Option<f64> {
        match self.config.words.is_empty() {
            true => found.parse().ok(),
            false => self
                .config
                .words
                .iter()
                .find(|(word, _)| word.eq_ignore_ascii_case(found))
                .map(|(_, number)| *number),
        }
    }
}

/// Variables of a template.
fn question(prompt: &str, completion: &str, answer: &str) -> Value {
    context! { prompt, completion, answer }
}

impl Reward for Judge {
    fn name(&self) -> &'static str {
        "judge"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        self.ask(record, completion).map_err(|failure| Error::new(self.name(), record, failure))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::Ordering;
    use std::thread;
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::super::endpoint::stub::stub;
    use super::*;

    fn says(text: &str) -> String {
        json!({"choices": [{"message": {"role": "assistant", "content": text}}]}).to_string()
    }

    fn judge(url: String, change: impl FnOnce(&mut JudgeConfig)) -> Judge {
        let mut config = JudgeConfig {
            url,
            model: "a-judge".into(),
            template: "Q: {{ prompt }}\nA: {{ completion }}\nGold: {{ answer }}".into(),
            pattern: r"Score: ([0-9.]+)".into(),
            words: BTreeMap::new(),
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
        let (url, seen) = stub(|_, _| (200, says("Score: 3? No. Score: 7.5")), Duration::ZERO);
        let judge = judge(url, |config| config.key_variable = Some("PATH".into()));
        assert_eq!(score(&judge).unwrap(), 0.75);
        let body = seen.bodies.lock().unwrap()[0].clone();
        assert_eq!(body["messages"][0]["content"], "Q: 1+1\nA: two\nGold: 2");
        assert_eq!((&body["model"], &body["max_tokens"]), (&json!("a-judge"), &json!(64)));
        assert!(seen.authorizations.lock().unwrap()[0].contains("Bearer "));
    }

    #[test]
    fn what_is_no_pattern_or_template_is_told() {
        let pattern = |text: &str, words: &str| {
            let error = Judge::pattern(text).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        pattern("Score: (", "it is not a valid pattern: unclosed group");
        pattern("Score: [0-9]+", "it has 0 groups");
        pattern("(Score|Mark): ([0-9]+)", "it has 2 groups");
        assert!(Judge::pattern("(?:Score|Mark): ([0-9]+)").is_ok());
        let template = |text: &str, words: &str| {
            let error = Judge::templates(text).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        template("{{ prompt", "syntax error");
        template("{{ prompt }} {{ response }}", "unknown variable `response`");
        template("{% if false %}{{ gold.text }}{% endif %}", "unknown variable `gold`");
        template("{{ prompt | shorten }}", "filter shorten is unknown");
        template("{{ prompt.strip() }}", "has no method named strip");
        let loops =
            "{% for n in range(2) %}{{ n }}{{ loop.last }}{% endfor %}{% set a = answer %}{{ a | upper }}";
        for fine in [loops, "{{ completion[10:] }} {{ answer | int }}", "{{ prompt | replace('a', 'b') }}"] {
            assert!(Judge::templates(fine).is_ok(), "{fine}");
        }
    }

    #[test]
    fn tries_again_where_that_may_help() {
        let (url, seen) =
            stub(|n, _| if n < 2 { (503, "busy".into()) } else { (200, says("Score: 10")) }, Duration::ZERO);
        assert_eq!(score(&judge(url, |_| {})).unwrap(), 1.0);
        assert_eq!(seen.requests.load(Ordering::SeqCst), 3);

        let fails = |answer: fn(usize) -> (u16, String), words: &str, requests| {
            let (url, seen) = stub(move |n, _| answer(n), Duration::ZERO);
            let error = score(&judge(url, |_| {})).unwrap_err();
            let told = anyroll_config::error_chain::one_line(&error);
            assert!(told.contains(words), "{told}");
            assert_eq!(seen.requests.load(Ordering::SeqCst), requests, "{told}");
        };
        fails(|_| (429, "slow down".into()), "429", 3);
        fails(|_| (401, "who are you".into()), "who are you", 1);
        fails(|_| (200, "{}".into()), "without a completion", 1);
        fails(|_| (200, says("splendid")), "no number", 1);
        let error = score(&judge("http://127.0.0.1:1/v1".into(), |_| {})).unwrap_err();
        assert!(anyroll_config::error_chain::one_line(&error).contains("127.0.0.1:1"));
    }

    #[test]
    fn words_count_what_they_are_said_to() {
        let with = |config: &mut JudgeConfig| {
            config.pattern = r"(?i)\b(yes|no|maybe)\b".into();
            config.words = [("yes".to_owned(), 10.0), ("no".to_owned(), 0.0)].into();
        };
        for (said, counts) in [("YES", 1.0), ("no", 0.0), ("No, that is: Yes.", 1.0)] {
            let (url, _) = stub(move |_, _| (200, says(said)), Duration::ZERO);
            assert_eq!(score(&judge(url, with)).unwrap(), counts, "{said}");
        }
        for said in ["maybe", "1", "yesterday"] {
            let (url, _) = stub(move |_, _| (200, says(said)), Duration::ZERO);
            assert!(score(&judge(url, with)).is_err(), "{said}");
        }
    }

    #[test]
    fn a_judge_that_is_slow_is_left() {
        let (url, _) = stub(|_, _| (200, says("Score: 1")), Duration::from_secs(30));
        let judge = judge(url, |config| (config.timeout_s, config.retries) = (0.2, 1));
        let started = Instant::now();
        assert!(score(&judge).unwrap_err().failure.is_timeout());
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn no_more_requests_at_a_time_than_allowed() {
        let (url, seen) = stub(|_, _| (200, says("Score: 1")), Duration::from_millis(30));
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
