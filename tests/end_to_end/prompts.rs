//! From prompts to training: a tiny published model's text encoders match diffusers' pipelines, and their
//! output is trained on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyroll_close::largest_difference;
use nix::sys::signal::Signal;
use tch::{Kind, Tensor};
use tempfile::TempDir;

use super::diffusers::{Case, by_function};
use super::{
    Process, anyroll, assert_same, copy_folder, fail, interrupt, resume, series, succeed, wait_until,
};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

/// Creates the tiny model `name` with its text encoders, in diffusers' format.
fn model(folder: &TempDir, name: &str) -> PathBuf {
    let model = folder.path().join(name);
    copy_folder(&golden(&format!("tiny_{name}/model")), &model);
    copy_folder(&golden(&format!("text_encoders/{name}")), &model);
    model
}

fn embed(model: &Path, file: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = anyroll(["embed"]);
    command.arg(model).arg("--file").arg(file).arg("--out").arg(out);
    // Four prompts and then one, so that a batch is short.
    command.args(["--max-sequence-length", "16", "--batch-size", "4", "--negative", "blue dog"]).args(more);
    command
}

#[track_caller]
fn assert_near(found: &Path, wanted: &Path, most: f64) {
    let (found, wanted) =
        (Tensor::read_safetensors(found).unwrap(), Tensor::read_safetensors(wanted).unwrap());
    assert_eq!(found.len(), wanted.len());
    for (name, wanted) in &wanted {
        let found = &found.iter().find(|(known, _)| known == name).unwrap().1;
        let apart = largest_difference(found, wanted);
        assert!(apart < most, "{name}: {apart:e}"); // false for NaN
    }
}

#[test]
fn a_stable_diffusion_3_is_trained_on_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "sd3");
    let (texts, out) = (model.join("texts.jsonl"), folder.path().join("prompts.safetensors"));
    let ended = succeed(embed(&model, &texts, &out, &["--backend", "cpu"]));
    assert_near(&out, &golden("text_encoders/sd3/prompts.safetensors"), 1e-5);
    assert!(ended.stdout.contains("6 prompts of 28 tokens each are in"), "{}", ended.stdout);
    assert!(ended.stderr.contains("have more than the 12 tokens of `tokenizer_2`"), "{}", ended.stderr);
    assert!(ended.stderr.contains("have more than the 16 tokens of `tokenizer_3`"), "{}", ended.stderr);

    let mut case = by_function();
    let (records, out) = (texts.display(), out.display());
    let data = format!("{{embeddings: {out}, records: {records}, height: 16, width: 16}}");
    case.sets.push(format!("model.diffusers={}", model.display()));
    case.sets.push(format!("pipeline.diffusion.data.prompts={data}"));
    let run = case.run("trained", &["pipeline.diffusion.sampler.guidance=2"]);
    assert!(series(&run, "grad_norm").iter().all(|&norm| norm > 0.0 && norm.is_finite()));
}

#[test]
fn a_third_encoder_may_be_missing_and_texts_may_be_plain() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "sd3");
    let (texts, out) = (model.join("texts.jsonl"), folder.path().join("whole.safetensors"));
    succeed(embed(&model, &texts, &out, &["--precision", "bf16"]));
    let whole = Tensor::read_safetensors(&out).unwrap();
    assert!(whole.iter().all(|(_, tensor)| tensor.kind() == Kind::BFloat16));
    assert_near(&out, &golden("text_encoders/sd3/prompts.safetensors"), 0.1);

    fs::remove_dir_all(model.join("text_encoder_3")).unwrap();
    let out = folder.path().join("without.safetensors");
    let log = succeed(embed(&model, &texts, &out, &[])).stderr;
    assert!(log.contains("has no text_encoder_3: its tokens are zeros"), "{log}");
    assert_near(&out, &golden("text_encoders/sd3/prompts_without_t5.safetensors"), 1e-5);

    let plain = folder.path().join("texts.txt");
    fs::write(&plain, "a red cat\n\nwow! a cat!!\n").unwrap();
    let out = folder.path().join("plain.safetensors");
    succeed(embed(&model, &plain, &out, &[]));
    let plain = Tensor::read_safetensors(&out).unwrap();
    let wanted =
        Tensor::read_safetensors(golden("text_encoders/sd3/prompts_without_t5.safetensors")).unwrap();
    let pooled = |tensors: &[(String, Tensor)]| {
        tensors.iter().find(|(name, _)| name == "pooled_prompt_embeds").unwrap().1.shallow_clone()
    };
    let wanted = pooled(&wanted).index_select(0, &Tensor::from_slice(&[0i64, 4]));
    assert!(largest_difference(&pooled(&plain), &wanted) < 1e-5);
}

#[test]
fn each_encoder_may_have_its_text_and_layers_may_be_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "sd3");
    let (texts, out) = (model.join("texts_apart.jsonl"), folder.path().join("prompts.safetensors"));
    let apart = ["--negative-2", "red", "--negative-3", "a cat", "--clip-skip", "1"];
    succeed(embed(&model, &texts, &out, &apart));
    assert_near(&out, &golden("text_encoders/sd3/prompts_apart.safetensors"), 1e-5);
    let check = |model: &Path, file: &Path, more: &[&str], words: &str| {
        let error = fail(embed(model, file, &folder.path().join("none.safetensors"), more));
        assert!(error.contains(words), "{error}");
    };
    check(&model, &texts, &["--clip-skip", "3"], "`clip_skip`: is 3: write a number up to 2");
    check(&model, &texts, &["--variant", "fp16"], "no folder in it has weights of the variant `fp16`");
    let wrong = folder.path().join("wrong.jsonl");
    fs::write(&wrong, "{\"prompt\": \"a cat\", \"prompt_2\": 2}\n").unwrap();
    check(&model, &wrong, &[], "`prompt_2` is not a string");
    let wan = self::model(&folder, "wan");
    check(&wan, &texts, &[], "the model has one text encoder");
    check(&wan, &model.join("texts.jsonl"), &["--clip-skip", "1"], "the model has no CLIP");
}

/// Returns a run on the texts of the model's own folder; `how` sets how they are encoded.
fn encoded(model: &Path, records: &Path, how: &str) -> Case {
    let mut case = by_function();
    let data = format!("{{{how}, records: {}, height: 16, width: 16}}", records.display());
    case.sets.push(format!("model.diffusers={}", model.display()));
    case.sets.push(format!("pipeline.diffusion.data.prompts={data}"));
    case.sets.push("pipeline.diffusion.sampler.guidance=2".to_owned());
    case
}

#[test]
fn a_run_encodes_its_prompts_to_what_embed_writes() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "sd3");
    // A repeated text is encoded once.
    let records = folder.path().join("texts.jsonl");
    let lines = fs::read_to_string(model.join("texts_apart.jsonl")).unwrap();
    fs::write(&records, format!("{lines}{lines}{{\"prompt\": \"a red cat\"}}\n")).unwrap();
    let out = folder.path().join("prompts.safetensors");
    succeed(embed(&model, &records, &out, &["--clip-skip", "1", "--negative-3", "red"]));
    let of_file = encoded(&model, &records, &format!("embeddings: {}", out.display()));
    let how = "encode: {max_sequence_length: 16, batch_size: 4, negative_prompt: blue dog, negative_prompt_3: red, \
               clip_skip: 1}";
    let own = encoded(&model, &records, how);
    for sets in [&["devices=1"], &["devices=2"]] {
        let [of_file, own] = [&of_file, &own].map(|case| case.run(sets[0], sets));
        assert_same(&of_file, &own);
        let made = fs::read_dir(&own).unwrap().map(|entry| entry.unwrap().path());
        let made = made.into_iter().find(|path| path.extension().is_some_and(|it| it == "safetensors"));
        assert!(fs::read(made.unwrap()).unwrap() == fs::read(&out).unwrap(), "the files differ");
    }
    // Also on the host, and in bf16.
    let more =
        ["pipeline.diffusion.data.prompts.encode={on: host, precision: bf16}", "pipeline.diffusion.steps=1"];
    let run = own.run("host", &more);
    assert!(series(&run, "grad_norm").iter().all(|&norm| norm > 0.0 && norm.is_finite()));
}

#[test]
fn a_run_that_encoded_its_prompts_goes_on_with_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "sd3");
    let records = folder.path().join("texts.txt");
    fs::write(&records, "a red cat\na blue dog\n\nwow! a cat!!\n").unwrap();
    let mut case = encoded(&model, &records, "encode: {}");
    case.sets.push("pipeline.diffusion.steps=12".to_owned());
    let whole = case.run("whole", &[]);
    let run = case.folder.path().join("interrupted");
    interrupt(case.command(&run, &[]), &run, 5);
    // Existing embeddings are kept: re-encoding would give bf16 values.
    fs::write(&records, "a red cat\na blue dog\nanother\n").unwrap();
    let error = fail(resume(&run));
    assert!(error.contains("its data have changed since"), "{error}");
    fs::write(&records, "a red cat\na blue dog\nwow! a cat!!\n").unwrap();
    succeed(resume(&run));
    assert_same(&whole, &run);
}

#[test]
fn a_run_that_is_interrupted_while_it_encodes_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "sd3");
    let records = folder.path().join("texts.txt");
    let texts = |count: usize| (0..count).map(|number| format!("a cat {number}\n")).collect::<String>();
    fs::write(&records, texts(6000)).unwrap();
    let case = encoded(&model, &records, "encode: {batch_size: 1}");
    let run = case.folder.path().join("interrupted");
    let files = |end: &str| {
        let names = fs::read_dir(&run).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().ends_with(end)).count()
    };
    let process = Process::start(case.command(&run, &["devices=2"]));
    wait_until("texts are encoded", || files(".safetensors.partial") == 1);
    process.send(Signal::SIGINT);
    let ended = process.finish();
    assert!(ended.code == Some(130) && ended.stderr.contains("interrupted while encoding"), "{ended:#?}");
    assert_eq!(files(".partial") + files(".safetensors"), 0);
    fs::write(&records, texts(8)).unwrap();
    succeed(resume(&run));
    assert!(files(".safetensors") == 1 && series(&run, "grad_norm").len() == 3);
}

#[test]
fn prompts_that_a_run_cannot_encode_are_refused_by_their_field() {
    let folder = tempfile::tempdir().unwrap();
    let (sd3, wan) = (model(&folder, "sd3"), model(&folder, "wan"));
    let texts = sd3.join("texts.jsonl");
    let check = |model: &Path, records: &Path, how: &str, more: &[&str], words: &[&str]| {
        let case = encoded(model, records, how);
        let error = fail(case.command(&case.folder.path().join("never"), more));
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert!(!case.folder.path().join("never").exists());
    };
    let prompts = "pipeline.diffusion.data.prompts";
    let without = format!("{prompts}.records=null");
    check(&sd3, &texts, "encode: {}", &[&without], &["prompts.records", "`encode` reads the texts there"]);
    let both =
        format!("encode: {{}}, embeddings: {}", golden("text_encoders/wan/prompts.safetensors").display());
    check(&sd3, &texts, &both, &[], &["data.prompts", "one of `embeddings` and `encode`"]);
    check(&sd3, &texts, "held_out: 0", &[], &["data.prompts", "one of `embeddings` and `encode`"]);
    let skip = "encode: {clip_skip: 3}";
    check(&sd3, &texts, skip, &[], &["encode.clip_skip", "is 3: write a number up to 2"]);
    check(&sd3, &texts, "encode: {batch_size: 0}", &[], &["encode.batch_size"]);
    check(&sd3, &texts, "encode: {precision: fp16}", &[], &["encode.precision", "fp16 overflows in T5"]);
    check(
        &sd3,
        &texts,
        "encode: {max_sequence_length: 513}",
        &[],
        &["encode.max_sequence_length", "at most 512"],
    );
    check(&sd3, &texts, "encode: {}, held_out: 6", &[], &["held_out", "6 of 6 texts leave none"]);
    let variant = "model.variant=fp16";
    check(&sd3, &texts, "encode: {}", &[variant], &["model.variant", "the variant `fp16`"]);
    fs::remove_dir_all(sd3.join("tokenizer_2")).unwrap();
    check(&sd3, &texts, "encode: {}", &[], &["data.prompts.encode", "tokenizer_2"]);
    let apart = golden("text_encoders/sd3/texts_apart.jsonl");
    check(
        &wan,
        &apart,
        "encode: {}",
        &["model.lora=null"],
        &["prompts.records", "the model has one text encoder"],
    );
}

#[test]
fn wan_reads_what_is_left_of_a_prompt_when_it_is_cleaned() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "wan");
    let out = folder.path().join("prompts.safetensors");
    succeed(embed(&model, &model.join("texts.jsonl"), &out, &[]));
    assert_near(&out, &golden("text_encoders/wan/prompts.safetensors"), 1e-5);
}

#[test]
fn prompts_that_cannot_be_embedded_are_refused_and_leave_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder, "sd3");
    let (texts, out) = (model.join("texts.jsonl"), folder.path().join("prompts.safetensors"));
    let check = |file: &Path, more: &[&str], words: &[&str]| {
        let error = fail(embed(&model, file, &out, more));
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        let files = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(files.into_iter().all(|name| !name.to_string_lossy().starts_with("prompts")));
    };
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "\n").unwrap();
    check(&empty, &[], &["`--file`", "empty.txt has no prompt"]);
    check(&folder.path().join("none.jsonl"), &[], &["cannot read", "none.jsonl"]);
    check(&texts, &["--device", "99", "--backend", "cuda"], &["cuda"]);
    let far = ["--max-sequence-length=513"];
    let mut command = anyroll(["embed"]);
    command.arg(&model).arg("--file").arg(&texts).arg("--out").arg(&out).args(far);
    assert!(fail(command).contains("`max_sequence_length`: is 513: write a number above 0, at most 512"));
    let third = model.join("tokenizer_3");
    fs::rename(third.join("tokenizer.json"), third.join("spiece.model")).unwrap();
    check(&texts, &[], &["tokenizer_3 has a spiece.model but no tokenizer.json", "save_pretrained"]);
    fs::rename(third.join("spiece.model"), third.join("tokenizer.json")).unwrap();
    // Found only while encoding.
    let first = model.join("text_encoder/model.safetensors");
    let weights: Vec<_> = Tensor::read_safetensors(&first).unwrap();
    let broken: Vec<_> = weights.iter().map(|(name, tensor)| (name, tensor / 0.0)).collect();
    Tensor::write_safetensors(&broken, &first).unwrap();
    check(&texts, &[], &["prompts.safetensors", "`prompt_embeds` has values that are not finite"]);
    Tensor::write_safetensors(&weights, &first).unwrap();
    fs::remove_file(model.join("tokenizer/merges.txt")).unwrap();
    check(&texts, &[], &["cannot read", "tokenizer/merges.txt"]);
    copy_folder(&golden("text_encoders/sd3/tokenizer"), &model.join("tokenizer"));
    fs::write(&out, "mine").unwrap();
    let error = fail(embed(&model, &texts, &out, &[]));
    assert!(error.contains("cannot write") && error.contains("exists"), "{error}");
    assert_eq!(fs::read_to_string(&out).unwrap(), "mine");
}
