//! Number of held-out prompts of an evaluation.

use super::*;

/// A file of `count` records with distinct prompts.
fn records(count: usize) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    let record = |number: usize| format!("{{\"prompt\": \"{number}\", \"answer\": \"{number}\"}}\n");
    std::fs::write(file.path(), (0..count).map(record).collect::<String>()).unwrap();
    file
}

/// Number of records that are evaluated with `data`. The dataset has that many, and the resolved config keeps the
/// number.
fn evaluated(pipeline: &str, data: &str, more: &[&str]) -> Result<usize, String> {
    let text = SMALL.replace("      sort: {digits: 6}\n", &format!("      {data}\n"));
    let offline = "pipeline={offline: {data: DATA, steps: 2, batch_size: 4, optimizer: {adamw: {learning_rate: 1.0e-3}}}}"
        .replace("DATA", &format!("{{{data}}}"));
    let mut sets = vec![offline.as_str()];
    sets.retain(|_| pipeline == "offline");
    sets.extend(more);
    let loaded = read(&text, &sets).map_err(|error| error.to_string())?;
    let count = |config: &Config| match &config.pipeline {
        PipelineConfig::Rlvr(rlvr) => rlvr.evaluation.prompts.unwrap(),
        PipelineConfig::Offline(offline) => offline.evaluation.prompts.unwrap(),
        PipelineConfig::Diffusion(_) => unreachable!(),
    };
    let run = loaded.resolve(&machine()).map_err(|error| error.to_string())?;
    let prompts = count(&run.config);
    assert_eq!(run.evaluated, prompts);
    let dataset = loaded.dataset().unwrap();
    assert_eq!(dataset.held_out(prompts).unwrap().len(), prompts, "{data}");
    let again = read(&run.config.to_yaml(), &[]).unwrap().resolve(&machine()).unwrap();
    assert_eq!(count(&again.config), prompts, "{data}");
    Ok(prompts)
}

#[test]
fn all_are_evaluated_where_there_are_fewer_than_usual() {
    let (file, own) = (records(100), records(37));
    let file = format!("file: {{path: {}, held_out: {}}}", file.path().display(), own.path().display());
    for pipeline in ["rlvr", "offline"] {
        let count = |data: &str, more: &[&str]| evaluated(pipeline, data, more);
        let prompts = |count: usize| format!("pipeline.{pipeline}.evaluation.prompts={count}");
        assert_eq!(count("sort: {digits: 6}", &[]), Ok(500));
        assert_eq!(count(&file, &[]), Ok(37));
        assert_eq!(count(&file, &[&prompts(36)]), Ok(36));
        let error = count(&file, &[&prompts(38)]).unwrap_err();
        assert!(error.contains("38 held-out prompts are asked for, and there are 37"), "{error}");
        assert!(error.contains("write 37 or fewer, or leave it out"), "{error}");
    }
}

#[test]
fn of_mixed_data_as_many_as_the_shortest_source_allows() {
    let (file, own) = (records(100), records(37));
    let file = format!("file: {{path: {}, held_out: {}}}", file.path().display(), own.path().display());
    let mix =
        |other: &str| format!("mix: [{{domain: a, data: {{{file}}}}}, {{domain: b, data: {{{other}}}}}]");
    // The sources alternate: after 37 of each, the next prompt is from the first or the second.
    let long = records(1000);
    let long = format!("file: {{path: {}, held_out_percent: 50}}", long.path().display());
    for other in ["sort: {digits: 6}", &long] {
        let count = evaluated("rlvr", &mix(other), &[]).unwrap();
        assert!((74..=75).contains(&count), "{other}: {count}");
        let error =
            evaluated("rlvr", &mix(other), &[&format!("pipeline.rlvr.evaluation.prompts={}", count + 1)]);
        let error = error.unwrap_err();
        assert!(error.contains(&format!("write {count} or fewer")), "{error}");
    }
}
