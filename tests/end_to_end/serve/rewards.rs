//! Reward models served, and a run that trains on their rewards.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{
    super::{ONE_RANK, anyroll, changed, fail, metrics, succeed, tiny},
    Server, body, refused,
};

const GOLDEN: &str = "tests/golden/reward_model";

impl Server {
    fn reward(&self, asked: &Value) -> Vec<f64> {
        let answer = body(&self.ask("POST", "/v1/rewards", &asked.to_string()));
        assert_eq!(answer["rewards"], answer["scores"], "{answer}");
        numbers(answer["rewards"].as_array().unwrap().iter())
    }

    fn score(&self, path: &str, asked: &Value) -> Vec<f64> {
        let answer = body(&self.ask("POST", path, &asked.to_string()));
        assert!(
            answer["usage"]["prompt_tokens"].as_u64() > Some(0) && answer["object"] == "list",
            "{answer}"
        );
        let data = answer["data"].as_array().unwrap();
        assert!(
            data.iter().enumerate().all(|(at, it)| it["index"] == at && it["object"] == "score"),
            "{answer}"
        );
        numbers(data.iter().map(|it| &it["score"]))
    }
}

fn numbers<'a>(values: impl Iterator<Item = &'a Value>) -> Vec<f64> {
    values.map(|value| value.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_near(found: &[f64], expected: &[f64]) {
    let is_near = |(one, two): (&f64, &f64)| (one - two).abs() < 1e-4;
    assert!(
        found.len() == expected.len() && found.iter().zip(expected).all(is_near),
        "{found:?} {expected:?}"
    );
}

/// Compared with the scores of transformers.
#[test]
fn a_classifier_is_served_in_the_forms_of_others() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let cases = fs::read_to_string(root.join(GOLDEN).join("scores.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    let texts = |name: &str| -> Vec<&str> { cases.iter().map(|case| case[name].as_str().unwrap()).collect() };
    let (prompts, completions) = (texts("prompt"), texts("completion"));
    let expected = numbers(cases.iter().map(|case| &case["chat"]));
    let queries: Vec<String> =
        prompts.iter().zip(&completions).map(|(prompt, text)| format!("{prompt}{text}")).collect();

    let server = Server::start(GOLDEN, &[]);
    let labels = vec!["x"; queries.len()];
    let asked = json!({"query": queries, "prompts": prompts, "labels": labels, "model": "reward_model"});
    assert_near(&server.reward(&asked), &expected);
    let other =
        server.ask("POST", "/score", &json!({"text_1": "a", "text_2": "b", "model": "other"}).to_string());
    assert!(other.starts_with("HTTP/1.1 404"), "{other}");
    let messages: Vec<Value> = prompts.iter().map(|it| json!([{"role": "user", "content": it}])).collect();
    assert_near(
        &server.reward(&json!({"query": queries, "prompts": prompts, "messages": messages})),
        &expected,
    );
    for (path, first, second) in [
        ("/score", "text_1", "text_2"),
        ("/v1/score", "queries", "documents"),
        ("/score", "data_1", "data_2"),
    ] {
        assert_near(&server.score(path, &json!({first: prompts, second: completions})), &expected);
    }
    let one = server.score("/score", &json!({"text_1": prompts[0], "text_2": completions[0]}));
    assert_near(&one, &expected[..1]);
    let beside =
        server.score("/score", &json!({"text_1": prompts[0], "text_2": [completions[0], completions[0]]}));
    assert_near(&beside, &[expected[0]; 2]);
    let activated = json!({"text_1": prompts[0], "text_2": completions[0], "use_activation": true});
    assert_near(&server.score("/score", &activated), &[1.0 / (1.0 + (-expected[0]).exp())]);

    let ask = |path: &str, asked: Value| server.ask("POST", path, &asked.to_string());
    for (asked, words) in [
        (json!({}), &["`query` is missing"][..]),
        (json!({"query": []}), &["`query` must be"]),
        (json!({"query": vec!["a"; 2049]}), &["`query` has 2049 texts", "at most 2048"]),
        (json!({"query": ["a", "b"], "prompts": ["a"]}), &["`prompts` has 1 entries, must have 2"]),
        (json!({"query": ["a"], "prompts": ["b"]}), &["`query[0]` must begin with `prompts[0]`"]),
        (json!({"query": ["a"], "messages": [[]]}), &["`messages` needs `prompts`"]),
        (json!({"query": ["a", "1 ".repeat(200)]}), &["`query[1]` has", "must have 1 to 128"]),
        (json!({"query": ["a"], "normalize": true}), &["`normalize` is not supported"]),
    ] {
        refused(&ask("/v1/rewards", asked), words);
    }
    refused(&ask("/score", json!({"text_1": "a"})), &["`text_2` is missing"]);
    refused(
        &ask("/score", json!({"queries": ["a", "b"], "documents": ["c"]})),
        &["`queries` has 2 texts, must have 1"],
    );
    let other = ask("/v1/chat/completions", json!({"messages": []}));
    assert!(other.starts_with("HTTP/1.1 404") && other.contains("is a reward model"), "{other}");
    assert_eq!(server.metric("requests_total"), 8);
    let error = fail(anyroll(["serve", GOLDEN, "--port", "0", "--max-length", "8"]));
    assert!(error.contains("--max-length"), "{error}");
    let text = Server::published(&[]).ask("POST", "/v1/rewards", "{}");
    assert!(text.starts_with("HTTP/1.1 404") && text.contains("generates text"), "{text}");
}

/// A run trains one step on a served run's rewards, which are those of the run's own reward `model`.
#[test]
fn a_run_trains_on_the_rewards_of_a_served_run() {
    let folder = tempfile::tempdir().unwrap();
    let trained = folder.path().join("scorer");
    succeed(changed(
        "configs/offline_reward_model_sort_cpu.yaml",
        &trained,
        &[
            "pipeline.offline.data.sort.digits=3",
            "pipeline.offline.steps=12",
            "pipeline.offline.optimizer.schedule.cosine.warmup_steps=5",
            "pipeline.offline.evaluation={every: 12, prompts: 51}",
            "strategy.micro_batch_size=8",
        ],
    ));
    let exported = folder.path().join("exported");
    let [run, to] = [&trained, &exported].map(|path| path.to_str().unwrap());
    succeed(anyroll(["export", run, "--to", to, "--dtype", "fp32"]));
    let server = Server::start(run, &["--api-key", "s3cret"]);
    let rewards = |name: &str, term: String| {
        let reward = format!("pipeline.rlvr.reward=[{{exact: {{}}}}, {{{term}, weight: 0.5}}]");
        let run = folder.path().join(name);
        let one_step = ["pipeline.rlvr.steps=1", "pipeline.rlvr.optimizer.schedule.linear.warmup_steps=0"];
        let mut command = tiny(ONE_RANK, &run, &[&reward, one_step[0], one_step[1]]);
        command.env("REWARD_KEY", "s3cret");
        succeed(command);
        let of_step = metrics(&run).into_iter().next_back().unwrap();
        let mean = of_step[&format!("reward/{name}/mean")].as_f64().unwrap();
        (mean, of_step["reward/mean"].as_f64().unwrap(), of_step["reward/errors"].clone())
    };
    let own = rewards("model", format!("model: {{path: {to}, chat: false}}"));
    let url = format!("http://{}/v1/rewards", server.address);
    let remote = rewards("remote", format!("remote: {{url: \"{url}\", key_variable: REWARD_KEY}}"));
    assert!(own.0 != 0.0 && (own.0 - remote.0).abs() < 1e-6, "{own:?} {remote:?}");
    assert!((own.1 - remote.1).abs() < 1e-6 && remote.2 == 0.0, "{own:?} {remote:?}");
    let page = server.ask_with("GET", "/metrics", "Authorization: Bearer s3cret\r\n", "");
    assert!(page.contains("anyroll_requests_total ") && !page.contains("anyroll_requests_total 0"), "{page}");
}
