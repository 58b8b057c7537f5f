//! A GGUF file as a model, compared with the folder that has its values in fp32.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::serve::Server;
use super::{ONE_RANK, anyroll, assert_same_steps, lasting_metrics, published_model, succeed};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf").join(name)
}

#[test]
fn a_file_generates_as_its_folder_and_is_warned_of_once() {
    let generate = |model: &Path| {
        let model = model.to_str().unwrap();
        let args = ["generate", model, "--prompt", "12 + 34", "--temperature", "0", "--max-new-tokens", "24"];
        [succeed(anyroll(args)), succeed(anyroll(args.into_iter().chain(["--chat"])))]
    };
    let (file, folder) = (generate(&golden("llama.gguf")), generate(&golden("llama")));
    for (file, folder) in file.iter().zip(&folder) {
        assert!(!file.stdout.trim().is_empty(), "{file:#?}");
        assert_eq!(file.stdout, folder.stdout);
        assert_eq!(file.stderr.matches("has quantized weights").count(), 1, "{}", file.stderr);
        assert!(!folder.stderr.contains("quantized"), "{}", folder.stderr);
    }
}

#[test]
fn a_file_trains_as_its_folder_and_exports_one() {
    let folder = tempfile::tempdir().unwrap();
    // A random model seldom ends a completion, for which other rewards ask.
    let function = folder.path().join("reward.py");
    let vowels = "def vowels(completions):\n    return [sum(c in 'aeiou' for c in text) / 10 for text in completions]\n";
    fs::write(&function, vowels).unwrap();
    let reward =
        format!("pipeline.rlvr.reward=[{{python: {{path: {}, function: vowels}}}}]", function.display());
    let trained = |name: &str, model: &Path| {
        let set = format!("model.path={}", model.display());
        let (run, command) = published_model::run(&folder, name, &[&set, &reward]);
        succeed(command);
        run
    };
    let (of_file, of_folder) = (trained("file", &golden("llama.gguf")), trained("folder", &golden("llama")));
    // Checkpoints have a number of their config, which names the model; the exported weights are compared below.
    assert_same_steps(&lasting_metrics(&of_file), &lasting_metrics(&of_folder));
    let exported = |run: &Path| {
        let to = run.with_extension("exported");
        succeed(anyroll(["export", run.to_str().unwrap(), "--to", to.to_str().unwrap(), "--dtype", "fp32"]));
        to
    };
    let (of_file, of_folder) = (exported(&of_file), exported(&of_folder));
    let read = |folder: &Path, name: &str| fs::read(folder.join(name)).unwrap();
    assert!(read(&of_file, "model.safetensors") == read(&of_folder, "model.safetensors"));
    let config: Value = serde_json::from_slice(&read(&of_file, "config.json")).unwrap();
    assert_eq!((&config["model_type"], &config["eos_token_id"]), (&"llama".into(), &321.into()));
    let generate = |model: &Path| {
        let model = model.to_str().unwrap();
        succeed(anyroll(["generate", model, "--prompt", "2 x 3?", "--chat", "--temperature", "0"])).stdout
    };
    assert_eq!(generate(&of_file), generate(&of_folder));
}

#[test]
fn a_file_is_planned_checked_evaluated_and_served() {
    let folder = tempfile::tempdir().unwrap();
    let model = golden("llama.gguf");
    let data = folder.path().join("data.jsonl");
    let lines = (0..100).map(|number| format!("{{\"prompt\": \"1 + {number}\", \"answer\": \"2\"}}\n"));
    fs::write(&data, lines.collect::<String>()).unwrap();
    let sets = [
        format!("model={{path: {}}}", model.display()),
        format!("pipeline.rlvr.data={{file: {{path: {}, held_out_percent: 50}}}}", data.display()),
        "pipeline.rlvr.warmup=null".to_owned(),
        "pipeline.rlvr.prompts_per_step=8".to_owned(),
        "pipeline.rlvr.evaluation.prompts=8".to_owned(),
    ];
    for command in ["check", "plan"] {
        let mut asked = anyroll([command, ONE_RANK]);
        for set in &sets {
            asked.args(["--set", set]);
        }
        succeed(asked);
    }
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let evaluate = ["evaluate", model, "--data", data, "--reward", "exact", "--max-new-tokens", "8"];
    succeed(anyroll(evaluate));
    let server = Server::start(model, &["--max-length", "64", "--served-model-name", "anyroll"]);
    let body = r#"{"prompt": "12 + 34", "max_tokens": 4}"#;
    assert!(server.ask("POST", "/v1/completions", body).starts_with("HTTP/1.1 200"));
}
