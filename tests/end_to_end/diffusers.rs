//! A tiny published image model, trained with a function's rewards and with a network's gradient. It is held
//! in every way, stopped, resumed, and exported.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyroll_close::largest_difference;
use tch::{CModule, Device, Kind, Tensor};
use tempfile::TempDir;

use super::{
    anyroll, assert_same, assert_same_steps, fail, interrupt, last_checkpoint, lasting_metrics, resume,
    series, succeed,
};

const CONFIG: &str = "configs/diffusion_flow_grpo_sd35_cuda.yaml";

/// Changes that make a run of the published config take about a second, on the host.
const TINY: [&str; 18] = [
    "backend=cpu",
    "devices=1",
    "threads=1",
    "model.diffusers=tests/golden/tiny_sd3/model",
    "model.lora.rank=2",
    "model.lora.alpha=4",
    "strategy.precision=fp32",
    "strategy.micro_batch_size=2",
    "pipeline.diffusion.data.prompts={embeddings: tests/golden/tiny_sd3/prompts.safetensors, height: 16, width: 16}",
    "pipeline.diffusion.steps=3",
    "pipeline.diffusion.prompts_per_step=4",
    "pipeline.diffusion.group_size=4",
    "pipeline.diffusion.sampler.steps=4",
    "pipeline.diffusion.sampler.batch_size=3",
    "pipeline.diffusion.evaluation={every: 2, images: 6}",
    "pipeline.diffusion.checkpoint={every: 2, keep_last: 2}",
    "pipeline.diffusion.method.flow_grpo.timestep_fraction=0.5",
    "pipeline.diffusion.optimizer.adamw.learning_rate=0.01",
];

/// A number computed from the pixels, and none for the second text.
const REWARD: &str = r#"
import zlib

def score(images, prompts):
    data = images[0]
    assert data.startswith(b"\x89PNG")
    at, packed = 8, b""
    while at < len(data):
        length = int.from_bytes(data[at:at + 4], "big")
        if data[at + 4:at + 8] == b"IDAT":
            packed += data[at + 8:at + 8 + length]
        at += length + 12
    return [None if prompts[0] == "1" else sum(zlib.decompress(packed)) % 1000 / 1000]
"#;

pub(super) struct Case {
    pub(super) folder: TempDir,
    pub(super) sets: Vec<String>,
}

/// Rewards of a function.
pub(super) fn by_function() -> Case {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reward.py");
    fs::write(&path, REWARD).unwrap();
    let reward =
        format!("pipeline.diffusion.reward={{python: {{path: {}, function: score}}}}", path.display());
    Case { folder, sets: vec![reward] }
}

/// Gradient of a network: the images' mean redness.
fn by_network() -> Case {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scorer.pt");
    let sample = [Tensor::ones([2, 3, 16, 16], (Kind::Float, Device::Cpu))];
    let mut redness = |inputs: &[Tensor]| {
        let means = inputs[0].mean_dim([2, 3].as_slice(), false, None);
        vec![means.select(1, 0) - means.select(1, 1) * 0.5 - means.select(1, 2) * 0.5]
    };
    CModule::create_by_tracing("scorer", "forward", &sample, &mut redness).unwrap().save(&path).unwrap();
    let sets = vec![
        format!("pipeline.diffusion.reward={{torchscript: {{path: {}}}}}", path.display()),
        "pipeline.diffusion.method={refl: {mid_step: 2, kl_coef: 0.001}}".to_owned(),
        "pipeline.diffusion.group_size=1".to_owned(),
    ];
    Case { folder, sets }
}

impl Case {
    pub(super) fn command(&self, run: &Path, sets: &[&str]) -> Command {
        let mut command = anyroll(["run", CONFIG]);
        let own = self.sets.iter().map(String::as_str);
        for set in TINY.into_iter().chain(own).chain(sets.iter().copied()) {
            command.args(["--set", set]);
        }
        command.arg("--output").arg(run);
        command
    }

    #[track_caller]
    pub(super) fn run(&self, name: &str, sets: &[&str]) -> PathBuf {
        let run = self.folder.path().join(name);
        succeed(self.command(&run, sets));
        run
    }
}

#[test]
fn a_published_model_is_held_in_every_way_with_the_same_numbers() {
    for case in [by_function(), by_network()] {
        let whole = case.run("0", &["devices=2", "strategy.zero_stage=0", "strategy.offload.optimizer=none"]);
        for (stage, more) in [
            (1, "strategy.offload.optimizer=cpu_step"),
            (2, "strategy.recompute=full"),
            (3, "strategy.offload.optimizer=between_steps"),
        ] {
            let stage_set = format!("strategy.zero_stage={stage}");
            let sharded = case.run(&stage.to_string(), &["devices=2", &stage_set, more]);
            assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&sharded));
            assert!(last_checkpoint(&whole) == last_checkpoint(&sharded), "stage {stage} differs");
        }
        assert!(series(&whole, "grad_norm").iter().all(|&norm| norm > 0.0));
        // New adapters have no effect yet.
        assert_eq!(series(&whole, "eval/drift")[0], 0.0);
        assert!(series(&whole, "eval/drift")[1] > 0.0);
        assert!(series(&whole, "loss/kl")[1..].iter().all(|&kl| kl > 0.0));
    }
}

#[test]
fn images_that_a_function_refuses_are_left_out_and_counted() {
    let case = by_function();
    let run = case.run("run", &["pipeline.diffusion.steps=6"]);
    let dropped = series(&run, "reward/dropped");
    assert!(dropped.iter().any(|&count| count > 0.0) && dropped.iter().all(|&count| count % 4.0 == 0.0));
    // The second and the sixth of the six evaluated images have that text.
    assert!(series(&run, "eval/dropped").iter().all(|&count| count == 2.0));
    assert!(series(&run, "rollout/logprob_diff_max").iter().all(|&diff| diff < 1e-4));
}

/// The text "1" is a quarter of all.
#[test]
fn images_that_a_function_fails_on_are_left_out_up_to_its_error_rate() {
    let case = by_function();
    let path = case.folder.path().join("fails.py");
    fs::write(&path, REWARD.replace("None if prompts[0] == \"1\"", "1 / 0 if prompts[0] == \"1\"")).unwrap();
    let term = |rate: f64| {
        let function = format!("python: {{path: {}, function: score}}", path.display());
        format!("pipeline.diffusion.reward=[{{{function}, max_error_rate: {rate}}}]")
    };
    let steps = "pipeline.diffusion.steps=6";
    let run = case.run("kept", &["devices=2", steps, &term(1.0)]);
    let (dropped, errors) = (series(&run, "reward/dropped"), series(&run, "reward/python/errors"));
    assert!(!errors.is_empty() && errors.iter().sum::<f64>() == dropped.iter().sum::<f64>());
    assert!(series(&run, "eval/dropped").iter().all(|&count| count == 2.0));
    assert!(series(&run, "grad_norm").iter().all(|&norm| norm.is_finite()));
    // In the first evaluation two of six fail.
    let error = fail(case.command(&case.folder.path().join("ended"), &[steps, &term(0.3)]));
    for words in ["`python` failed on 2 of 6 samples", "`max_error_rate` is 0.3", "ZeroDivisionError"] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_function_and_a_network_are_summed_and_counted_each() {
    let (function, network) = (by_function(), by_network());
    let kind = |case: &Case| {
        let (_, kind) = case.sets[0].split_once('=').unwrap();
        kind.strip_prefix('{').unwrap().strip_suffix('}').unwrap().to_owned()
    };
    let reward =
        format!("pipeline.diffusion.reward=[{{{}}}, {{{}, weight: -2}}]", kind(&function), kind(&network));
    let case = Case { folder: function.folder, sets: vec![reward] };
    let run = case.run("sum", &["devices=2", "pipeline.diffusion.steps=6"]);
    let sum = |name: &str| series(&run, name).iter().sum::<f64>();
    // All images have the network's score, but those of one text no score of the function; the sum excludes
    // them.
    assert!(sum("reward/dropped") > 0.0);
    assert_eq!(sum("reward/dropped"), sum("reward/python/dropped"));
    assert!(series(&run, "reward/torchscript/dropped").is_empty());
    assert!(series(&run, "eval/dropped").iter().all(|&count| count == 2.0));
    let scores = [("reward/python/mean", 6), ("reward/torchscript/mean", 6)];
    let evaluated = ["eval/reward", "eval/python", "eval/torchscript"].map(|name| (name, 4));
    for (name, count) in scores.into_iter().chain(evaluated) {
        let values = series(&run, name);
        assert!(values.len() == count && values.iter().all(|value| value.is_finite()), "{name}: {values:?}");
    }
    assert!(series(&run, "grad_norm").iter().all(|&norm| norm > 0.0));
}

/// Similarity of images and texts according to a tiny CLIP, with its gradient.
fn by_likeness() -> Case {
    let folder = tempfile::tempdir().unwrap();
    let records = folder.path().join("texts.jsonl");
    let texts = ["a red cat", "a blue dog", "2 cat on a red red red red dog", "unknown"];
    let lines: String = texts.iter().map(|text| format!("{{\"prompt\": \"{text}\"}}\n")).collect();
    fs::write(&records, lines).unwrap();
    let sets = vec![
        format!("pipeline.diffusion.data.prompts.records={}", records.display()),
        "pipeline.diffusion.reward={clip: {path: tests/golden/clip/plain}}".to_owned(),
        "pipeline.diffusion.method={refl: {mid_step: 2, kl_coef: 0.001}}".to_owned(),
        "pipeline.diffusion.group_size=1".to_owned(),
    ];
    Case { folder, sets }
}

#[test]
fn a_clip_scores_and_is_refused_by_its_field() {
    let case = by_likeness();
    let run = case.run(
        "by policy gradient",
        &["pipeline.diffusion.method=flow_grpo", "pipeline.diffusion.group_size=4"],
    );
    assert!(series(&run, "reward/mean").iter().all(|cosine| cosine.abs() < 1.0));
    assert!(series(&run, "reward/std").iter().all(|&deviation| deviation > 0.0));
    // The third text has eleven tokens, but the CLIP reads nine.
    let log = succeed(case.command(&case.folder.path().join("warned"), &[])).stderr;
    assert!(log.contains("1 of 4 texts have more than the 9 tokens"), "{log}");
    let prompts = "pipeline.diffusion.data.prompts";
    let check = |set: &str, field: &str, problem: &str| {
        let error = fail(case.command(&case.folder.path().join("never"), &[set]));
        assert!(error.contains(field) && error.contains(problem), "{error}");
    };
    check(&format!("{prompts}.records=null"), "pipeline.diffusion.reward", "it reads the texts");
    check("pipeline.diffusion.reward={clip: {path: configs}}", "reward.clip.path", "config.json");
}

#[test]
fn following_a_network_back_through_the_decoder_raises_its_score() {
    for (case, lora, rise) in
        [(by_network(), true, 0.02), (by_network(), false, 0.02), (by_likeness(), true, 0.01)]
    {
        let mut sets = vec![
            "pipeline.diffusion.steps=10",
            "pipeline.diffusion.prompts_per_step=8",
            "pipeline.diffusion.sampler.guidance=1",
            "pipeline.diffusion.method={refl: {mid_step: 1}}",
            "pipeline.diffusion.optimizer.adamw.learning_rate=0.03",
            "pipeline.diffusion.evaluation={every: 10, images: 16}",
        ];
        if !lora {
            sets.push("model={diffusers: tests/golden/tiny_sd3/model}");
        }
        let run = case.run(&format!("lora-{lora}"), &sets);
        let rewards = series(&run, "eval/reward");
        assert!(rewards.last().unwrap() > &(rewards[0] + rise), "{rewards:?}");
    }
}

#[test]
fn images_are_decoded_in_tiles_and_followed_back_through_them() {
    let case = by_network();
    let large = ["pipeline.diffusion.data.prompts.height=32", "pipeline.diffusion.data.prompts.width=24"];
    let run = |name: &str, tiles: &str| {
        let tiles = format!("pipeline.diffusion.sampler.decode_tiles={tiles}");
        case.run(name, &[&large[..], &[&tiles]].concat())
    };
    let (whole, tiled) = (run("whole", "null"), run("tiled", "{size: 16}"));
    // No larger than a tile: bitwise equal.
    assert_same(&whole, &run("large", "{size: 32, stride: 16}"));
    let rewards = [&whole, &tiled].map(|run| series(run, "eval/reward"));
    let apart = (rewards[0][0] - rewards[1][0]).abs();
    assert!(apart > 0.0 && apart < 0.1, "{rewards:?}");
    assert!(series(&tiled, "grad_norm").iter().all(|&norm| norm > 0.0 && norm.is_finite()));
    // The number decoded at a time does not matter.
    let at_a_time = "pipeline.diffusion.sampler.decode_batch_size=3";
    let tiles = "pipeline.diffusion.sampler.decode_tiles={size: 16}";
    let together = case.run("together", &[&large[..], &[tiles, at_a_time]].concat());
    let apart = rewards[1].iter().zip(series(&together, "eval/reward")).map(|(a, b)| (a - b).abs());
    assert!(apart.fold(0.0, f64::max) < 1e-4);
}

#[test]
fn an_interrupted_run_of_adapters_goes_on_bitwise_and_is_written_for_others() {
    let case = by_network();
    let sets = ["pipeline.diffusion.steps=30"];
    let whole = case.run("whole", &sets);
    let run = case.folder.path().join("interrupted");
    interrupt(case.command(&run, &sets), &run, 5);
    succeed(resume(&run));
    assert_same(&whole, &run);

    let (merged, adapter) = (case.folder.path().join("merged"), case.folder.path().join("adapter"));
    let export = |to: &Path, more: &[&str]| {
        let mut command = anyroll(["export"]);
        command.arg(&run).arg("--to").arg(to).args(["--dtype", "fp32"]).args(more);
        succeed(command);
    };
    export(&merged, &[]);
    export(&adapter, &["--adapter"]);
    let read = |path: PathBuf| Tensor::read_safetensors(path).unwrap();
    let weights = "transformer/diffusion_pytorch_model.safetensors";
    let adapters = read(adapter.join("pytorch_lora_weights.safetensors"));
    let matrix = |name: &str| adapters.iter().find(|(known, _)| known == name).unwrap().1.shallow_clone();
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_sd3/model");
    let before = read(published.join(weights));
    let after = read(merged.join(weights));
    assert_eq!(before.len(), after.len());
    let mut changed = 0;
    for (name, was) in &before {
        let is = &after.iter().find(|(known, _)| known == name).unwrap().1;
        let apart = largest_difference(is, was);
        let module = name.trim_end_matches(".weight");
        if !adapters.iter().any(|(known, _)| *known == format!("transformer.{module}.lora_A.weight")) {
            assert!(apart < 1e-6, "{name} is not what it was");
            continue;
        }
        changed += 1;
        if module == "transformer_blocks.1.attn.add_q_proj" {
            assert_eq!(apart, 0.0, "the last block's text queries are not used");
            continue;
        }
        let [a, b] = ["A", "B"].map(|it| matrix(&format!("transformer.{module}.lora_{it}.weight")));
        // B includes alpha over rank, which the file does not contain.
        let error = largest_difference(&(is - was), &b.matmul(&a));
        assert!(apart > 0.0 && error < 1e-4, "{name}: {apart} {error}");
    }
    // Eight layers in two blocks, the last of which has no output for the text.
    assert_eq!((changed, adapters.len()), (15, 30));
    assert_eq!(fs::read_dir(&adapter).unwrap().count(), 1);
    let metadata = fs::read(adapter.join("pytorch_lora_weights.safetensors")).unwrap();
    assert!(String::from_utf8_lossy(&metadata).contains(r#"{"format":"pt"}"#));
}

#[test]
fn what_does_not_fit_a_published_model_is_refused() {
    let case = by_function();
    let check = |sets: &[&str], field: &str, problem: &str| {
        let error = fail(case.command(&case.folder.path().join("never"), sets));
        assert!(error.contains(field) && error.contains(problem), "{error}");
    };
    check(&["model.diffusers=tests/golden"], "model.diffusers", "transformer/config.json");
    check(&["model.lora.targets=[attn.to_x]"], "model.lora.targets", "`attn.to_x` names no layer");
    check(&["model.lora.path=somewhere"], "model.lora.path", "there is no adapter somewhere");
    check(&["pipeline.diffusion.data=shapes"], "pipeline.diffusion.data", "paints texts");
    let prompts = "pipeline.diffusion.data.prompts";
    check(&[&format!("{prompts}.height=18")], "prompts.height", "does not paint 18");
    check(&[&format!("{prompts}.held_out=4")], "prompts.held_out", "4 of 4 texts leave none");
    check(&[&format!("{prompts}.embeddings=README.md")], "prompts.embeddings", "README.md");
    check(&[&format!("{prompts}.records=README.md")], "prompts.records", "not a JSON object");
    check(&["pipeline.diffusion.reward=lit"], "pipeline.diffusion.reward", "classes");
    check(&["pipeline.diffusion.reward={torchscript: {path: README.md}}"], "torchscript.path", "README.md");
    check(&["pipeline.diffusion.reward=[{lit: {}}]"], "pipeline.diffusion.reward[0]", "classes");
    check(&["pipeline.diffusion.reward=[{lit: {}, weight: 0}]"], "reward[0].weight", "out of range");
    let beside = "pipeline.diffusion.reward={torchscript: {path: README.md}, weight: 2}";
    check(&[beside], "pipeline.diffusion.reward", "`weight` stands beside a reward: write a list of one");
    check(&["pipeline.diffusion.reward=[]"], "pipeline.diffusion.reward", "the list is empty");
    check(&["pipeline.diffusion.sampler.decode_frames=1"], "sampler.decode_frames", "have no frames");
    let tiles = "pipeline.diffusion.sampler.decode_tiles";
    check(&[&format!("{tiles}={{size: 15}}")], "decode_tiles.size", "no tile of whole latents");
    check(&[&format!("{tiles}={{size: 2}}")], "decode_tiles.size", "no tile of whole latents");
    check(&[&format!("{tiles}={{size: 16, stride: 18}}")], "decode_tiles.stride", "by 18");
    check(
        &[&format!("{tiles}={{size: 16, stride: 6}}")],
        "decode_tiles.stride",
        "tiles of 16 pixels do not follow each other by 6",
    );
    check(&["model.variant=fp16"], "model.variant", "no folder in it has weights of the variant `fp16`");
    check(&["roles.reference.strategy.zero_stage=3"], "roles.reference", "adapters off");
    check(&["model.decoder={}"], "model", "decoder");
}
