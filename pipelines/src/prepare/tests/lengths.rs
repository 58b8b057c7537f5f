//! Maximum length of records.

use anyroll_data::Tokenizer;
use anyroll_models::hf::ModelFolder;

use super::*;

#[test]
fn prompts_are_bounded_in_tokens_with_their_template() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs"));
    let text = std::fs::read_to_string(folder.join("rlvr_math_qwen2.5_0.5b_cuda.yaml")).unwrap();
    let (_data, brought) = brought(&text);
    let read = |more: &[&str]| {
        let few = "pipeline.rlvr.evaluation.prompts=10";
        let sets = brought.iter().map(String::as_str).chain([few]).chain(more.iter().copied());
        read(&text, &sets.collect::<Vec<_>>())
    };
    let all = read(&[]).unwrap();
    let ModelConfig::Folder(model) = &all.config.model else { panic!("it trains a published model") };
    let opened = ModelFolder::open(&model.path).unwrap();
    let tokenizer = Tokenizer::of_folder(&opened, model).unwrap();
    let lengths = |loaded: &Loaded| -> Vec<usize> {
        let examples = loaded.dataset().unwrap().examples();
        examples.iter().map(|record| tokenizer.encode_prompt(record).unwrap().len()).collect()
    };
    let all = lengths(&all);
    let longest = *all.iter().max().unwrap();
    // Longer than the prompts alone: the template counts.
    assert!(all.iter().all(|&length| length > "2 x 1000?".len()));
    let bound = format!("pipeline.rlvr.data.file.max_prompt_tokens={}", longest - 1);
    let kept = lengths(&read(&[&bound]).unwrap());
    assert_eq!(kept.len(), all.iter().filter(|&&length| length < longest).count());
    assert!(kept.len() < all.len() && kept.iter().all(|&length| length < longest));
    let error = read(&[&bound, "pipeline.rlvr.data.file.long_prompts=refuse"]).unwrap_err().to_string();
    let words = format!("the prompt has {longest} tokens, and `max_prompt_tokens` is {}", longest - 1);
    assert!(error.contains("pipeline.rlvr.data.file.long_prompts") && error.contains(&words), "{error}");
    assert!(error.contains("write `leave_out`"), "{error}");
}

#[test]
fn only_answers_that_are_written_need_room() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("programs.jsonl");
    let record = |number: usize| {
        let tests = serde_json::json!({"inputs": vec!["1 2"; 9], "outputs": vec!["3"; 9]});
        serde_json::json!({"prompt": format!("{number}>"), "answer": tests}).to_string()
    };
    std::fs::write(&path, (0..40).map(record).collect::<Vec<_>>().join("\n")).unwrap();
    let read = |more: &[&str]| {
        let data = format!("pipeline.rlvr.data={{file: {{path: {}, held_out_percent: 50}}}}", path.display());
        let sets = [data.as_str(), "pipeline.rlvr.evaluation.prompts=5"];
        read(SMALL, &[&sets, more].concat()).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(read(&["pipeline.rlvr.reward=[{math: {}}]"]), Ok(()));
    let warmup =
        "pipeline.rlvr.warmup={steps: 1, batch_size: 4, optimizer: {adamw: {learning_rate: 1.0e-3}}}";
    for sets in [
        &[][..],
        &["pipeline.rlvr.reward=[{math: {}}, {exact: {}}]"],
        &["pipeline.rlvr.reward=[{math: {}}]", warmup],
    ] {
        assert!(read(sets).unwrap_err().contains("the longest answer and its end are 1"), "{sets:?}");
    }
}
