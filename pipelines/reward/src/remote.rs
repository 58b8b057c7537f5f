//! The `remote` reward: scores of a reward model behind an endpoint, in the form of OpenRLHF's remote reward models.
//!
//! `{"query": [...], "prompts": [...], "labels": [...]}` is answered with `{"rewards": [...]}`. A query is the prompt
//! followed by the completion. Beyond OpenRLHF's fields, `messages` has the prompts as conversations, and `finished` tells
//! which completions ended by themselves.

use std::num::NonZeroUsize;

use anyroll_config::RemoteConfig;
use anyroll_data::Record;
use serde::Deserialize;
use serde_json::{Value, json};

use super::endpoint::{Endpoint, Trouble};
use super::{Completion, Error, Failure, Reward, Takes};

/// Name in metrics and errors.
const NAME: &str = "remote";

/// Has batches of completions scored by an endpoint.
#[derive(Debug)]
pub struct Remote {
    endpoint: Endpoint,
    batch_size: NonZeroUsize,
}

#[derive(Deserialize)]
struct Reply {
    rewards: Vec<Number>,
}

/// A number, or a list of one, as a tensor of shape `[N, 1]` is written.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Alone(f64),
    Listed([f64; 1]),
}

impl Remote {
    /// Reads the key. Sends no request.
    ///
    /// # Errors
    /// If the key is not in the environment.
    pub fn new(config: &RemoteConfig) -> Result<Self, Failure> {
        let batch_size = NonZeroUsize::new(config.batch_size).expect("a config that was checked");
        Ok(Self { endpoint: Endpoint::new(&config.endpoint(), "")?, batch_size })
    }

    /// Scores of all cases, or the failure of the request.
    fn ask(&self, cases: &[(&Record, Completion)]) -> Result<Vec<f64>, Failure> {
        let texts = |text: &dyn Fn(&Record, &Completion) -> Value| -> Vec<Value> {
            cases.iter().map(|(record, completion)| text(record, completion)).collect()
        };
        let body = json!({
            "query": texts(&|record, completion| format!("{}{}", record.prompt, completion.text).into()),
            "prompts": texts(&|record, _| record.prompt.clone().into()),
            "labels": texts(&|record, _| record.answer.clone().into()),
            "messages": texts(&|record, _| record.conversation().into()),
            "finished": texts(&|_, completion| completion.finished.into()),
        });
        let url = self.endpoint.url();
        let scores = self.endpoint.ask(&body, |text| {
            let scores = scores(text, cases.len());
            scores.map_err(|problem| Trouble::Lasting(format!("{url} {problem}").into()))
        })?;
        scores.ok_or_else(|| format!("{url} answered without an end").into())
    }
}

/// Scores in an answer, as many as there are completions.
fn scores(text: &str, count: usize) -> Result<Vec<f64>, String> {
    let said = || text.chars().take(200).collect::<String>();
    let reply: Reply =
        serde_json::from_str(text).map_err(|_| format!("answered without `rewards`: {}", said()))?;
    let scores: Vec<f64> = reply
        .rewards
        .into_iter()
        .map(|it| match it {
            Number::Alone(it) | Number::Listed([it]) => it,
        })
        .collect();
    match scores.len() == count {
        true => Ok(scores),
        false => Err(format!("answered with {} rewards for {count} completions", scores.len())),
    }
}

impl Reward for Remote {
    fn name(&self) -> &'static str {
        NAME
    }

    fn takes(&self) -> Takes {
        Takes::Batches(self.batch_size)
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        self.score_many(&[(record, *completion)]).pop().expect("as many as there are cases")
    }

    fn score_many(&self, cases: &[(&Record, Completion)]) -> Vec<Result<f64, Error>> {
        match self.ask(cases) {
            Ok(scores) => scores.into_iter().map(Ok).collect(),
            // One completion that cannot be scored fails its batch, so each is asked for alone.
            Err(Failure::Other(_)) if cases.len() > 1 => {
                cases.iter().map(|(record, completion)| self.score(record, completion)).collect()
            }
            Err(failure) => {
                cases.iter().map(|(record, _)| Err(Error::new(NAME, record, failure.clone()))).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use anyroll_config::error_chain::one_line;

    use super::super::endpoint::stub::stub;
    use super::*;

    fn remote(url: String) -> Remote {
        let config = RemoteConfig {
            url,
            batch_size: 3,
            key_variable: Some("PATH".into()),
            concurrency: 2,
            retries: 1,
            retry_s: 0.01,
            timeout_s: 5.0,
        };
        Remote::new(&config).unwrap()
    }

    fn record(prompt: &str) -> Record {
        Record { id: prompt.into(), prompt: prompt.into(), answer: "gold".into(), ..Record::default() }
    }

    fn completion(text: &str, finished: bool) -> Completion<'_> {
        Completion { text, tokens: None, finished }
    }

    #[test]
    fn a_batch_is_one_request_in_the_form_of_openrlhf() {
        let (url, seen) =
            stub(|_, _| (200, r#"{"rewards": [0.5, [-2]], "scores": []}"#.into()), Duration::ZERO);
        let messages =
            vec![json!({"role": "system", "content": "s"}), json!({"role": "user", "content": "b"})];
        let (one, two) = (record("a "), Record { messages: messages.clone(), ..record("b") });
        let cases = [(&one, completion("x", true)), (&two, completion("y", false))];
        let remote = remote(url);
        let found: Vec<f64> = remote.score_many(&cases).into_iter().map(Result::unwrap).collect();
        assert_eq!((found, remote.takes()), (vec![0.5, -2.0], Takes::Batches(NonZeroUsize::new(3).unwrap())));
        let expected = json!({
            "query": ["a x", "by"], "prompts": ["a ", "b"], "labels": ["gold", "gold"],
            "messages": [[{"role": "user", "content": "a "}], messages], "finished": [true, false],
        });
        assert_eq!(*seen.bodies.lock().unwrap(), [expected]);
        assert!(seen.authorizations.lock().unwrap()[0].contains("Bearer "));
    }

    #[test]
    fn a_completion_that_cannot_be_scored_fails_alone() {
        let answer = |_, body: &Value| match body["query"].as_array().unwrap() {
            queries if queries.contains(&"ab".into()) => (400, "it is too long".to_owned()),
            queries => (200, json!({"rewards": vec![1.0; queries.len()]}).to_string()),
        };
        let (url, seen) = stub(answer, Duration::ZERO);
        let (a, b) = (record("a"), record("b"));
        let cases = [(&a, completion("a", true)), (&a, completion("b", true)), (&b, completion("b", true))];
        let found = remote(url).score_many(&cases);
        assert_eq!((found[0].as_ref().unwrap(), found[2].as_ref().unwrap()), (&1.0, &1.0));
        let error = one_line(found[1].as_ref().unwrap_err());
        assert!(error.contains("record a") && error.contains("it is too long"), "{error}");
        assert_eq!(seen.requests.load(Ordering::SeqCst), 4);
    }

    #[test]
    fn answers_without_as_many_rewards_are_failures() {
        for (answer, words) in [
            ("{}", "without `rewards`"),
            (r#"{"rewards": 1}"#, "without `rewards`"),
            (r#"{"rewards": [null]}"#, "without `rewards`"),
            (r#"{"rewards": [1, 2]}"#, "2 rewards for 1"),
        ] {
            let (url, _) = stub(move |_, _| (200, answer.into()), Duration::ZERO);
            let error = one_line(&remote(url).score(&record("a"), &completion("a", true)).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
