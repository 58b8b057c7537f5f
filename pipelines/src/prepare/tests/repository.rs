//! The configs of the repository.

use super::*;

#[test]
fn every_config_of_the_repository_is_valid() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs"));
    let teacher = references::published(SMALL, &["model.decoder.max_length=32"]);
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let (_data, mut sets) = brought(&text);
        sets.extend(text.contains("path: runs/teacher").then(|| references::path_of(&teacher)));
        let loaded = Loaded::read(&path, &sets).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(Some(loaded.config.name.as_str()), path.file_stem().unwrap().to_str());
        // A machine with everything that the file requests, of any vendor.
        let mut machine = machine();
        if machine.backends.iter().all(|facts| facts.name != loaded.config.backend) {
            machine.backends.push(facts(&loaded.config.backend, true, Some(4)));
        }
        let run = loaded.resolve(&machine).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(read(&run.config.to_yaml(), &[]).unwrap().config, run.config);
        let readme = std::fs::read_to_string(folder.join("README.md")).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(readme.contains(&format!("`{name}`")), "{name} is in configs/README.md");
        count += 1;
    }
    assert!(count >= 4, "{count} configs");
}

/// Files of a config that trains a published model: a tiny folder, and a file of problems or texts.
pub fn brought(text: &str) -> (tempfile::NamedTempFile, Vec<String>) {
    let data = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    if text.contains("diffusers: models/Wan") {
        let prompts = format!("embeddings: {golden}/tiny_wan/prompts.safetensors, height: 16, width: 16");
        let sets = vec![
            format!("model.diffusers={golden}/tiny_wan/model"),
            format!("pipeline.diffusion.data.prompts={{{prompts}, frames: 5}}"),
            format!("pipeline.diffusion.reward.torchscript.path={golden}/tiny_wan/scorer.pt"),
        ];
        return (data, sets);
    }
    if text.contains("diffusers: models/") {
        let prompts = format!("embeddings: {golden}/tiny_sd3/prompts.safetensors, height: 16, width: 16");
        let sets = vec![
            format!("model.diffusers={golden}/tiny_sd3/model"),
            format!("pipeline.diffusion.data.prompts={{{prompts}}}"),
            // The function is not called, so any file will do.
            format!("pipeline.diffusion.reward.python.path={}", data.path().display()),
        ];
        return (data, sets);
    }
    if text.contains("path: configs/steps/") {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/steps/sort.jsonl");
        return (data, vec![format!("pipeline.offline.data.file.path={file}")]);
    }
    if text.contains("path: configs/environments/") {
        // Paths in configs are relative to the repository's root.
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/environments");
        let sets = vec![
            format!("pipeline.rlvr.data.file.path={folder}/guess.jsonl"),
            format!("pipeline.rlvr.rollout.environment.path={folder}/guess.py"),
        ];
        return (data, sets);
    }
    if !text.contains("path: models/") {
        return (data, Vec::new());
    }
    // Either name that the configs use.
    let problem =
        |n: u32| format!("{{\"prompt\": \"2 x {n}?\", \"question\": \"2 x {n}?\", \"answer\": {}}}\n", 2 * n);
    std::fs::write(data.path(), (0..3000).map(problem).collect::<String>()).unwrap();
    let sets = vec![
        format!("model.path={golden}/tiny_model"),
        format!("pipeline.rlvr.data.file.path={}", data.path().display()),
    ];
    (data, sets)
}
