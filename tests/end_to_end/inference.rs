//! Using a trained model: generation and scoring.

use std::{fs, io::Write as _, path::Path, process::Stdio};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tch::Tensor;
use tempfile::TempDir;

use super::{
    ONE_RANK, Process, anyroll, fail, finish, published_model, run_tiny, succeed, wait_until, whole_lines,
};

pub(super) fn trained() -> (TempDir, std::path::PathBuf) {
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

/// Returns the greedy completions of the last evaluation as prompt and text.
pub(super) fn evaluated(run: &Path) -> Vec<(String, String)> {
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

    // The training forward gives the same log-probs.
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

/// Prompts are printed in order even if later ones end first, with all samples of a prompt together.
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

/// Exits like the signal's default, which shells report as 130.
#[test]
fn an_interrupt_ends_it_at_once_behind_what_is_printed() {
    if ignores_interrupts() {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: interrupts are ignored here, as in a shell's background jobs"
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let endless = json!({"prompt": "text text", "temperature": 0, "max_new_tokens": 2000});
    let asked = [json!({"prompt": "12", "max_new_tokens": 1}), endless];
    let file = lines(&folder, "prompts.jsonl", &asked);
    let process =
        Process::start(anyroll(["generate", published_model::model().to_str().unwrap(), "--file", &file]));
    let said = process.output.path().join("stdout");
    wait_until("a completion is printed", || fs::read_to_string(&said).unwrap().ends_with('\n'));
    process.send(Signal::SIGINT);
    let ended = process.finish();
    assert_eq!(ended.code, None, "{ended:#?}");
    let printed = parsed(&ended.stdout);
    assert_eq!(printed.iter().map(|it| it["line"].as_u64().unwrap()).collect::<Vec<_>>(), [1]);
}

/// Returns true if this process ignores interrupts, which its children inherit.
fn ignores_interrupts() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & (1 << (Signal::SIGINT as u32 - 1)) != 0
}

#[test]
fn what_cannot_be_used_is_named() {
    let (folder, run) = trained();
    let run = run.to_str().unwrap();
    let no_model = folder.path().to_str().unwrap();
    assert!(
        fail(anyroll(["generate", no_model, "--prompt", "1"]))
            .contains("is not a run folder, a checkpoint in one, a model folder")
    );
    assert!(fail(anyroll(["generate", run, "--prompt", "x>"])).contains("'x'"));
    assert!(fail(anyroll(["generate", run, "--prompt", "1>", "--temperature=-1"])).contains("temperature"));
    let error = fail(anyroll(["generate", run, "--prompt", "1>", "--chat"]));
    assert!(error.contains("`--chat`") && error.contains("no chat template"), "{error}");
    let ended = finish(anyroll(["generate", run, "--prompt", "1>", "--sequences", "0"]));
    assert!(ended.code == Some(2) && ended.stderr.contains("an integer of at least 1"), "{ended:#?}");
    let file = lines(&folder, "long.jsonl", &[json!({"prompt": "1>"}), json!({"prompt": "1".repeat(99)})]);
    let error = fail(anyroll(["generate", run, "--file", &file]));
    assert!(error.contains("long.jsonl:2: it has 99 tokens"), "{error}");
    let most = usize::MAX.to_string();
    let error = fail(anyroll(["generate", run, "--prompt", "1>", "--max-new-tokens", &most]));
    assert!(error.contains("`--prompt`: it has 2 tokens, and with"), "{error}");
    let file = lines(&folder, "list.jsonl", &[json!([])]);
    assert!(
        fail(anyroll(["generate", run, "--file", &file])).contains("list.jsonl:1: it is not a JSON object")
    );
    let file = lines(&folder, "wrong.jsonl", &[json!({"prompt": "1>"}), json!({"promt": "1>"})]);
    assert!(fail(anyroll(["generate", run, "--file", &file])).contains("wrong.jsonl:2"));
    assert!(fail(anyroll(["score", run, "--file", &file])).contains("wrong.jsonl:2"));
    let file = lines(&folder, "setting.jsonl", &[json!({"prompt": "1>", "seed": 1})]);
    let error = fail(anyroll(["generate", run, "--file", &file]));
    assert!(error.contains("setting.jsonl:1: a line cannot set `seed`"), "{error}");
    let file = lines(&folder, "hot.jsonl", &[json!({"prompt": "1>", "temperature": -1})]);
    let error = fail(anyroll(["generate", run, "--file", &file]));
    assert!(error.contains("hot.jsonl:1: `temperature`: -1"), "{error}");
    let file =
        lines(&folder, "typed.jsonl", &[json!({"prompt": "1>"}), json!({"prompt": "1>", "top_k": "5"})]);
    let error = fail(anyroll(["generate", run, "--file", &file]));
    assert!(
        error.contains("typed.jsonl:2: `top_k`: invalid type: string \"5\", expected a whole"),
        "{error}"
    );
    let file = lines(&folder, "twice.jsonl", &[json!({"prompt": "1>"})]);
    fs::write(&file, r#"{"prompt": "1>", "prompt": "2>"}"#).unwrap();
    let error = fail(anyroll(["generate", run, "--file", &file]));
    assert!(error.contains("twice.jsonl:1: duplicate field `prompt`"), "{error}");
    let file = lines(&folder, "tokens.jsonl", &[json!({"tokens": [1, 2]}), json!({"tokens": [1, 999]})]);
    let error = fail(anyroll(["score", run, "--file", &file]));
    assert!(error.contains("tokens.jsonl:2: `tokens`: there is no token 999"), "{error}");
}

#[test]
fn a_model_that_computes_no_numbers_says_so() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(published_model::model()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let weights = folder.path().join("model.safetensors");
    let spoilt: Vec<_> = Tensor::read_safetensors(&weights).unwrap();
    let spoilt: Vec<_> = spoilt
        .into_iter()
        .map(
            |(name, tensor)| {
                if name == "model.norm.weight" { (name, tensor * f64::NAN) } else { (name, tensor) }
            },
        )
        .collect();
    Tensor::write_safetensors(&spoilt, &weights).unwrap();
    let model = folder.path().to_str().unwrap();
    let file = lines(&folder, "texts.jsonl", &[json!({"prompt": "12 + 34"})]);
    for args in [["generate", model, "--prompt", "12 + 34"], ["score", model, "--file", &file]] {
        let error = fail(anyroll(args));
        assert!(error.contains("log-probs are NaN: look for infinity, NaN"), "{error}");
    }
}

/// Sampling options on a line apply to its own prompt, and equal the arguments that apply to all.
#[test]
fn a_line_may_say_how_it_is_sampled() {
    let (folder, run) = trained();
    let generate = |name: &str, line: Value, args: &[&str]| {
        let file =
            lines(&folder, name, &[json!({"prompt": "314>", "max_new_tokens": 1, "answer": "5"}), line]);
        let always = ["generate", run.to_str().unwrap(), "--file", &file];
        let found = parsed(&succeed(anyroll(always.iter().chain(args))).stdout);
        found.into_iter().find(|line| line["line"] == 2).unwrap()
    };
    let said = json!({"prompt": "314>", "temperature": 0, "max_new_tokens": 3, "stop": "4"});
    let args = ["--temperature", "0", "--max-new-tokens", "3", "--stop", "4"];
    let expected = generate("args.jsonl", json!({"prompt": "314>"}), &args);
    assert_eq!(generate("line.jsonl", said, &[]), expected);
}

/// Completions come in the order of the file with its other fields, and a reward reads them from a pipe.
#[test]
fn completions_of_a_file_are_scored_by_a_reward() {
    let (folder, run) = trained();
    // Those of many tokens come first, so that they end last.
    let asked: Vec<Value> = evaluated(&run)
        .into_iter()
        .zip([4, 1, 3, 1, 2, 1].into_iter().cycle())
        .map(|((prompt, _), most)| {
            let mut digits: Vec<char> = prompt.trim_end_matches('>').chars().collect();
            digits.sort_unstable();
            json!({"question": prompt, "gold": String::from_iter(digits), "level": most, "max_new_tokens": most})
        })
        .collect();
    let file = lines(&folder, "cases.jsonl", &asked);
    let args =
        ["generate", run.to_str().unwrap(), "--file", &file, "--columns", "prompt=question,answer=gold"];
    let generated = succeed(anyroll(args.into_iter().chain(["--temperature", "0", "--samples", "2"]))).stdout;
    let completions = parsed(&generated);
    assert_eq!(completions.len(), 2 * asked.len());
    for (index, line) in completions.iter().enumerate() {
        let asked = &asked[index / 2];
        assert_eq!((&line["line"], &line["sample"]), (&json!(index / 2 + 1), &json!(index % 2)));
        assert_eq!((&line["prompt"], &line["answer"]), (&asked["question"], &asked["gold"]));
        assert_eq!((&line["level"], &line["finished"]), (&asked["level"], &json!(line["ending"] == "stop")));
        assert!(line.get("question").is_none() && line.get("max_new_tokens").is_none(), "{line}");
    }
    let right = |line: &Value| line["finished"] == true && line["completion"] == line["answer"];
    let expected = completions.iter().filter(|line| right(line)).count();
    assert!(expected > 0, "{generated}");
    let mut reward = anyroll(["reward", "exact", "--file", "-"]);
    let mut reward =
        reward.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    reward.stdin.take().unwrap().write_all(generated.as_bytes()).unwrap();
    let ended = reward.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let scores = parsed(&String::from_utf8(ended.stdout).unwrap());
    let sum: f64 = scores.iter().map(|line| line["score"].as_f64().unwrap()).sum();
    assert_eq!((scores.len(), sum), (completions.len(), expected as f64));

    let file = lines(&folder, "taken.jsonl", &[json!({"prompt": "1>", "completion": "1"})]);
    let error = fail(anyroll(["generate", run.to_str().unwrap(), "--file", &file]));
    assert!(error.contains("taken.jsonl:1: `completion` is a field of its completions"), "{error}");
}

/// Without `--chat` a model with a chat template reads the plain text, which is told once.
#[test]
fn a_chat_template_that_is_not_used_is_told() {
    let generate = |model: &str, more: &[&str]| {
        let args = ["generate", model, "--prompt", "12 + 34", "--max-new-tokens", "1"];
        succeed(anyroll(args.iter().chain(more))).stderr
    };
    let model = published_model::model();
    let told = generate(model.to_str().unwrap(), &[]);
    assert!(
        told.starts_with("hint: the model has a chat template; `--chat`") && told.lines().count() == 1,
        "{told}"
    );
    assert_eq!(generate(model.to_str().unwrap(), &["--chat"]), "");
}

/// A prompt of messages is put into the chat template, like a single user message.
#[test]
fn a_prompt_may_be_messages() {
    let folder = tempfile::tempdir().unwrap();
    let model = published_model::model();
    let generate = |prompt: Value, args: &[&str]| {
        let file = lines(&folder, "prompts.jsonl", &[json!({"prompt": prompt})]);
        let always = ["generate", model.to_str().unwrap(), "--file", &file, "--temperature", "0"];
        anyroll(always.iter().chain(args))
    };
    let text = |prompt: Value| {
        let stdout = succeed(generate(prompt, &["--chat", "--max-new-tokens", "8"])).stdout;
        parsed(&stdout)[0]["completion"].clone()
    };
    let user = json!({"role": "user", "content": "12 + 34"});
    assert_eq!(text(json!([user])), text(json!("12 + 34")));
    let error = fail(generate(json!([user]), &[]));
    assert!(error.contains("prompts.jsonl:1: the prompt of prompt 1 is messages"), "{error}");
    let error = fail(generate(json!([]), &["--chat"]));
    assert!(error.contains("prompts.jsonl:1: it has no messages"), "{error}");
    let error = fail(generate(json!(5), &["--chat"]));
    assert!(error.contains("prompts.jsonl:1: `prompt`: neither a text nor messages"), "{error}");
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
