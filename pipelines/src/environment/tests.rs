use std::path::PathBuf;

use anyroll_data::CharTokenizer;
use anyroll_models::Completion;

use super::*;

const FILE: &str = r#"
import os, time

class Echo:
    """Counts, and does as it is told."""
    def reset(self, prompt, bonus=0):
        self.turns, self.bonus = 0, bonus
        print("printed while it begins")
        if prompt == "abc":
            return "de"
        if prompt == "aaaa":
            return "e" * 100
        if prompt == "bad":
            raise ValueError("a prompt that it does not like")

    def step(self, text):
        self.turns += 1
        if text == "a":
            os._exit(3)
        if text == "b":
            time.sleep(600)
        if text == "c":
            raise KeyError("c")
        if text == "d":
            return {"done": True, "reward": self.turns + self.bonus}
        if text == "e":
            return {"observation": None}
        if text == "ee":
            return {"observation": "x"}
        if text == "ed":
            return {"observation": "e" * 40}
        return {"observation": "abc"[: self.turns], "reward": 0.5}

class Later:
    async def reset(self):
        pass

    async def step(self, text):
        return {"done": True}

class Half:
    def reset(self):
        pass
"#;

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::Characters(CharTokenizer::new(&"abcde".chars().collect())))
}

fn environment(class: &str, workers: usize) -> (tempfile::TempDir, Result<Environment, Failure>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("environment.py");
    std::fs::write(&path, FILE).unwrap();
    let environment = Environment::new(&rollout(path, class, workers), tokenizer());
    (folder, environment.map(Option::unwrap))
}

fn rollout(path: PathBuf, class: &str, workers: usize) -> RolloutConfig {
    let environment = serde_json::json!({
        "path": path, "class": class, "max_turns": 3, "workers": workers, "timeout_s": 3.0,
    });
    let rollout = serde_json::json!({"max_new_tokens": 30, "batch_size": 4, "environment": environment});
    serde_json::from_value(rollout).unwrap()
}

/// Plays episodes with the texts in `turns`, one per turn; a text without an end is truncated.
fn play(environment: &Environment, games: &[(&str, &[&str])]) -> Vec<Sample> {
    let record = |&(prompt, _): &(&str, &[&str])| {
        let columns = [("bonus".to_owned(), 10.into())].into_iter().collect();
        Arc::new(Record { id: prompt.into(), prompt: prompt.into(), columns, ..Record::default() })
    };
    let records: Vec<Arc<Record>> = games.iter().map(record).collect();
    let begin = |record: &Arc<Record>| Sample::begin(environment.tokenizer.encode_prompt(record).unwrap());
    let mut samples: Vec<Sample> = records.iter().map(begin).collect();
    let limits: Vec<usize> = samples.iter().map(|sample| sample.prompt_len + 30).collect();
    let mut episodes = environment.episodes(records);
    let (mut ended, eos) = (Vec::new(), environment.tokenizer.stop_tokens()[0]);
    while !episodes.is_idle() {
        let replies = episodes.listen(&mut samples, &limits, true);
        assert!(!replies.next.is_empty() || !replies.ended.is_empty(), "it was waited for nothing");
        ended.extend(replies.ended);
        for number in replies.next {
            let turn = samples[number].turns().len() - 1;
            let (mut tokens, mut ending) = (vec![0; 2], Ending::Length);
            if let Some(text) = games[number].1.get(turn) {
                tokens = environment.tokenizer.encode_text(text).unwrap();
                tokens.push(eos);
                ending = Ending::Stop;
            }
            let logprobs = vec![-1.0; tokens.len()];
            let turn = Completion { tokens, logprobs, ending: Some(ending), ..Completion::default() };
            samples[number].go_on(turn);
            episodes.tell(number, &mut samples[number]);
        }
    }
    ended.sort_unstable();
    assert_eq!(ended, (0..games.len()).collect::<Vec<_>>(), "each ends once");
    samples
}

fn text(sample: &Sample) -> String {
    sample.transcript(&tokenizer())
}

fn failure(sample: &Sample) -> String {
    assert_eq!(sample.ending, Some(Ending::Length));
    sample.episode.as_ref().unwrap().reward().unwrap_err().to_string()
}

#[test]
fn turns_and_what_is_said_between_them_follow_one_another() {
    // Fewer processes than episodes, which wait for one another.
    for workers in [1, 2, 8] {
        let (_folder, environment) = environment("Echo", workers);
        let environment = environment.unwrap();
        let games: [(&str, &[&str]); 5] = [
            ("ab", &["d"]),
            ("ab", &["cc", "d"]),
            ("abc", &["cc", "dd", "ae"]),
            ("ab", &["cc"]),
            ("ab", &["ed", "d"]),
        ];
        let samples = play(&environment, &games);
        let found: Vec<_> = samples
            .iter()
            .map(|sample| (text(sample), sample.episode.as_ref().unwrap().rewards.clone(), sample.finished()))
            .collect();
        let expected = [
            // Done at once, with a column of its record.
            ("d".to_owned(), vec![Some(11.0)], true),
            ("ccad".to_owned(), vec![Some(0.5), Some(12.0)], true),
            // Not done after three turns, the maximum.
            ("ccaddabae".to_owned(), vec![Some(0.5); 3], false),
            // A truncated turn, which is not sent.
            ("ccaaa".to_owned(), vec![Some(0.5)], false),
            // The observation does not fit.
            ("ed".to_owned(), vec![None], false),
        ];
        assert_eq!(found, expected, "{workers} processes");
        assert_eq!(samples[2].prompt_len, 5, "what `reset` says is behind the prompt");
        let turns: Vec<i64> =
            samples[1].turns().into_iter().flatten().map(|at| samples[1].tokens[at]).collect();
        assert_eq!(turns, [2, 2, 6, 3, 6], "what was sampled, ends included");
    }
}

#[test]
fn what_goes_wrong_costs_its_sample_and_no_other() {
    let (_folder, environment) = environment("Echo", 3);
    let environment = environment.unwrap();
    let games: [(&str, &[&str]); 9] = [
        ("bad", &[]),
        ("ab", &["d"]),
        ("ab", &["cc", "a"]),
        ("ab", &["b"]),
        ("ab", &["c"]),
        ("ab", &["e"]),
        ("ab", &["ee"]),
        ("aaaa", &["d"]),
        ("ab", &["cc", "d"]),
    ];
    let samples = play(&environment, &games);
    for (number, words) in [
        (0, "a prompt that it does not like"),
        (2, "ended with exit status: 3"),
        (3, "no answer in 3 s"),
        (4, "KeyError: 'c'"),
        (5, "there is no observation"),
        (6, "the character 'x' is not in the vocabulary"),
        (7, "the prompt has 104 tokens, of 34"),
    ] {
        let failure = failure(&samples[number]);
        assert!(failure.contains(words), "{number}: {failure}");
    }
    for (number, reward) in [(1, 11.0), (8, 12.5)] {
        assert_eq!(samples[number].episode.as_ref().unwrap().reward(), Ok(reward), "{number}");
    }
    // The crashed episode had two turns, of which the first was complete.
    assert_eq!((text(&samples[2]), samples[2].turns().len()), ("ccaa".to_owned(), 2));
}

#[test]
fn methods_may_be_coroutines() {
    let (_folder, environment) = environment("Later", 1);
    let samples = play(&environment.unwrap(), &[("ab", &["d"]), ("ab", &["cc"])]);
    assert!(
        samples.iter().all(|sample| sample.episode.as_ref().unwrap().rewards == [None] && sample.finished())
    );
}

#[test]
fn a_file_that_cannot_be_used_is_told_at_the_start() {
    for (class, words) in [("No", "no class `No`"), ("Half", "`Half` in "), ("Half", "has no method `step`")]
    {
        let (_folder, environment) = environment(class, 1);
        let failure = environment.unwrap_err().to_string();
        assert!(failure.contains("does not load") && failure.contains(words), "{failure}");
    }
}
