//! A reference that is another model: a teacher.

use anyroll_models::hf::{ExportDtype, FolderContents, FolderKind, config_file, write_folder};
use anyroll_models::{Decoder, Model, init::Seed};

use super::*;
use crate::plan::{Planner, Stages};

/// Writes the config's own model as `anyroll export` does, with `sets`: a folder with the same tokens.
pub(super) fn published(text: &str, sets: &[&str]) -> tempfile::TempDir {
    let loaded = read(text, sets).unwrap();
    let base = loaded.opened.into_texts().unwrap().base;
    let decoder = Decoder::new(base.config.clone(), tch::Device::Cpu).unwrap();
    let anyroll_data::Tokenizer::Characters(tokenizer) = &*base.tokenizer else { unreachable!() };
    let folder = tempfile::tempdir().unwrap();
    let contents = FolderContents {
        kind: FolderKind::Model,
        config: config_file(&base.config, &base.tokenizer.stop_tokens()).unwrap(),
        copied: &[],
        made: &tokenizer.files(),
        units: decoder.units(),
        weights: &Seed(1),
        dtype: ExportDtype::Fp32,
    };
    write_folder(&folder.path().join("teacher"), &contents).unwrap();
    folder
}

pub(super) fn path_of(folder: &tempfile::TempDir) -> String {
    format!("roles.reference.path={}", folder.path().join("teacher").display())
}

const DISTILLS: [&str; 3] = [
    "pipeline.rlvr.algorithm={advantage: none, kl_in: advantage, kl_coef: 1}",
    "pipeline.rlvr.group_size=1",
    "pipeline.rlvr.prompts_per_step=16",
];

/// `--set`s of a run that learns from the reference at `path`.
fn with(path: &str) -> Vec<&str> {
    [&[path][..], &DISTILLS].concat()
}

#[test]
fn a_published_reference_is_held_and_planned() {
    let wide = "model.decoder.hidden_size=64";
    let folder = published(SMALL, &[wide]);
    let path = path_of(&folder);
    let sets = with(&path);
    let loaded = read(SMALL, &sets).unwrap();
    let run = loaded.resolve(&machine()).unwrap();
    assert!(run.held_reference().is_some());
    let again = read(&run.to_yaml(), &[]).unwrap().resolve(&machine()).unwrap();
    assert_eq!(again, run);
    // With a policy of width 16, a reference of width 64 is larger than a copy.
    let score = |sets: &[&str]| {
        let loaded = read(SMALL, sets).unwrap();
        let run = loaded.resolve(&machine()).unwrap();
        let planner = Planner::new(&run, &loaded.opened).unwrap();
        planner.plan_at(&run, Stages::of(&run)).score.unwrap()
    };
    let rewarded = "pipeline.rlvr.algorithm.advantage=reinforce";
    let itself = [&DISTILLS[..], &[rewarded]].concat();
    let (teacher, copy) = (score(&sets), score(&itself));
    let own = score(&[&[wide][..], &itself].concat());
    assert!(teacher.weights > copy.weights && teacher.activations > copy.activations, "{teacher:?} {copy:?}");
    assert!(teacher.weights < own.weights, "the policy is small: {teacher:?} {own:?}");
}

#[test]
fn a_teacher_of_written_answers_is_planned_beside_the_policys_head() {
    let folder = published(SMALL, &["model.decoder.hidden_size=64"]);
    let train = |objective: &str, path: &str| {
        let pipeline = format!(
            "pipeline={{offline: {{data: {{sort: {{digits: 6}}}}, objective: {objective}, steps: 4, batch_size: 64, \
             optimizer: {{adamw: {{learning_rate: 1}}}}}}}}"
        );
        let loaded = read(SMALL, &[&pipeline, path]).unwrap();
        let run = loaded.resolve(&machine()).unwrap();
        let planner = Planner::new(&run, &loaded.opened).unwrap();
        planner.plan_at(&run, Stages::of(&run)).train
    };
    let (distill, sft) = (train("{distill: {}}", &path_of(&folder)), train("sft", "seed=0"));
    // The rows of 64 answers of 7 tokens, and the head's matrix over 13 tokens.
    let said = (64 * 7 + 13) * 64 * size_of::<f32>();
    assert!(distill.activations >= sft.activations + said, "{distill:?} {sft:?}");
}

#[test]
fn a_reference_that_cannot_compare_names_the_field() {
    let check = |sets: &[&str], field: &str, message: &str, help: &str| {
        let error = invalid(SMALL, sets);
        assert_eq!(error.field, field, "{error}");
        assert!(error.message.contains(message) && error.help.contains(help), "{error}");
    };
    let path = "roles.reference.path";
    check(&with("roles.reference.path=gone"), path, "gone", "`anyroll export`");
    let other = published(SMALL, &["pipeline.rlvr.data={addition: {digits: 2}}"]);
    check(&with(&path_of(&other)), path, "it reads other tokens: the policy's", "the same tokenizer");
    let short = published(SMALL, &["model.decoder.max_length=14", "pipeline.rlvr.rollout.max_new_tokens=7"]);
    check(
        &with(&path_of(&short)),
        path,
        "it has room for 14 tokens, and the policy's sequences have up to 15",
        "",
    );
    let field = "pipeline.rlvr.algorithm.kl_coef";
    check(&["pipeline.rlvr.algorithm={kl_in: advantage}"], field, "nothing is taken off", "such as 1");
    let field = "pipeline.rlvr.algorithm.advantage";
    check(&["pipeline.rlvr.algorithm={advantage: none}"], field, "nothing to learn", "`kl_coef: 1`");
    check(
        &["pipeline.rlvr.algorithm={kl_in: advantage, kl_coef: 1, loss: gspo}"],
        "pipeline.rlvr.algorithm.loss",
        "these advantages differ",
        "",
    );
    let offline = "pipeline={offline: {data: {sort: {digits: 6}}, objective: {distill: {}}, steps: 4, batch_size: 8, \
                   optimizer: {adamw: {learning_rate: 1}}}}";
    check(&[offline], path, "`objective: distill` learns from the model there", "name the folder");
    let beta = offline.replace("{distill: {}}", "{distill: {beta: 1.5}}");
    check(&[&beta], "pipeline.offline.objective.distill.beta", "1.5 is out of range", "from 0 to 1");
}
