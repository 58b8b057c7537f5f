//! A tiny video model: ROLL's recipe with a network on latents and with rewards of frames, functions that
//! receive videos, and the pictures shown.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tch::{CModule, Device, Kind, Tensor};
use tempfile::TempDir;

use super::{
    anyroll, assert_same_steps, fail, finish, last_checkpoint, lasting_metrics, python_with, series, succeed,
};

const CONFIG: &str = "configs/diffusion_refl_wan_zero2_cuda.yaml";
const GOLDEN: &str = "tests/golden/tiny_wan";
const REWARD: &str = "pipeline.diffusion.reward";

/// Changes that make a run of the published config take seconds, on the host. Videos have 5 frames of 16 x 32
/// pixels.
const TINY: [&str; 12] = [
    "backend=cpu",
    "devices=2",
    "threads=1",
    "model.diffusers=tests/golden/tiny_wan/model",
    "strategy.precision=fp32",
    "strategy.micro_batch_size=2",
    "pipeline.diffusion.data.prompts={embeddings: tests/golden/tiny_wan/prompts.safetensors, height: 16, width: 32, frames: 5}",
    "pipeline.diffusion.reward={torchscript: {path: tests/golden/tiny_wan/scorer.pt, input: latents}}",
    "pipeline.diffusion.steps=12",
    "pipeline.diffusion.optimizer.adamw.learning_rate=0.01",
    "pipeline.diffusion.optimizer.schedule={constant: {warmup_steps: 0}}",
    "pipeline.diffusion.evaluation.every=12",
];

/// Changes that make it a policy gradient of a few steps.
const BY_POLICY_GRADIENT: [&str; 4] = [
    "pipeline.diffusion.method={flow_grpo: {}}",
    "pipeline.diffusion.group_size=2",
    "pipeline.diffusion.prompts_per_step=4",
    "pipeline.diffusion.steps=2",
];

fn command(run: &Path, sets: &[&str]) -> Command {
    let mut command = anyroll(["run", CONFIG]);
    for set in TINY.iter().chain(sets) {
        command.args(["--set", set]);
    }
    command.arg("--output").arg(run);
    command
}

fn run(folder: &TempDir, name: &str, sets: &[&str]) -> PathBuf {
    let run = folder.path().join(name);
    succeed(command(&run, sets));
    run
}

/// Runs at ZeRO 2, and at ZeRO 3 without the config's memory savings, which gives the same results.
fn run_however_held(folder: &TempDir, sets: &[&str]) -> PathBuf {
    let zero2 = run(folder, "2", sets);
    let other = ["strategy.zero_stage=3", "strategy.recompute=none", "strategy.offload.optimizer=none"];
    let zero3 = run(folder, "3", &[sets, &other].concat());
    assert_same_steps(&lasting_metrics(&zero2), &lasting_metrics(&zero3));
    assert!(last_checkpoint(&zero2) == last_checkpoint(&zero3), "stage 3 differs");
    zero2
}

/// Writes a network for videos: the redness of the last frame.
fn network(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("scorer.pt");
    let sample = [Tensor::ones([2, 3, 5, 16, 32], (Kind::Float, Device::Cpu))];
    let mut redness = |inputs: &[Tensor]| {
        let means = inputs[0].select(2, 4).mean_dim([2, 3].as_slice(), false, None);
        vec![means.select(1, 0) - (means.select(1, 1) + means.select(1, 2)) * 0.5]
    };
    CModule::create_by_tracing("scorer", "forward", &sample, &mut redness).unwrap().save(&path).unwrap();
    path
}

#[test]
fn a_network_of_latents_is_followed_however_the_model_is_held() {
    let folder = tempfile::tempdir().unwrap();
    let zero2 = run_however_held(&folder, &[]);
    let rewards = series(&zero2, "eval/reward");
    assert!(rewards[1] > rewards[0] + 0.01, "{rewards:?}");
}

#[test]
fn rewards_of_frames_are_followed_through_the_decoder() {
    let folder = tempfile::tempdir().unwrap();
    let texts = folder.path().join("texts.jsonl");
    let lines = ["a red cat", "a blue dog", "2 cat on a red", "unknown"];
    let lines = lines.map(|text| format!("{{\"prompt\": \"{text}\"}}\n"));
    fs::write(&texts, lines.concat()).unwrap();
    let clip = "tests/golden/clip/plain";
    let head = "tests/golden/aesthetic/head.safetensors";
    let reward = format!(
        "{REWARD}=[{{torchscript: {{path: {}}}, weight: 4}}, {{clip: {{path: {clip}}}, frames: 2}}, \
         {{aesthetic: {{clip: {clip}, head: {head}}}, weight: 0.1, frames: 3}}]",
        network(&folder).display()
    );
    let records = format!("pipeline.diffusion.data.prompts.records={}", texts.display());
    let method = "pipeline.diffusion.method={refl: {mid_step: 4, noise: fixed}}";
    let zero2 = run_however_held(&folder, &[&reward, &records, method]);
    let rewards = series(&zero2, "eval/reward");
    assert!(rewards[1] > rewards[0] + 0.01, "{rewards:?}");
    for name in ["eval/torchscript", "eval/clip", "eval/aesthetic"] {
        assert!(series(&zero2, name).iter().all(|value| value.is_finite()), "{name}");
    }
    // Four rows of five frames, 32 x 16 pixels each, with gaps.
    let png = fs::read(zero2.join("pictures/step_000000.png")).unwrap();
    let side = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
    assert_eq!((side(16), side(20)), (4 + 5 * 36, 4 + 4 * 20));
    assert!(fs::read_to_string(zero2.join("report.html")).unwrap().contains("data:image/png"));
}

#[test]
fn videos_are_decoded_in_tiles_and_followed_back_through_them() {
    let folder = tempfile::tempdir().unwrap();
    let reward = format!("{REWARD}={{torchscript: {{path: {}}}}}", network(&folder).display());
    let sets = [&reward, "pipeline.diffusion.method={refl: {mid_step: 4, noise: fixed}}"];
    let tiles = "pipeline.diffusion.sampler.decode_tiles={size: 16, stride: 8}";
    let rewards = [run(&folder, "whole", &sets), run(&folder, "tiled", &[&sets[..], &[tiles]].concat())]
        .map(|run| series(&run, "eval/reward"));
    let apart = (rewards[0][0] - rewards[1][0]).abs();
    assert!(apart > 0.0 && apart < 0.1, "{rewards:?}");
    assert!(rewards[1][1] > rewards[1][0] + 0.005, "{rewards:?}");
}

/// A video of which only the first frames are decoded is judged by these.
#[test]
fn functions_get_the_frames_that_are_decoded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reward.py");
    let function = "def score(images, prompts):\n    (video,) = images\n    assert all(it[:4] == b'\\x89PNG' for it in video)\n    \
                    return [len(video) if prompts != ['1'] else None]\n";
    fs::write(&path, function).unwrap();
    let reward = |frames: &str| {
        format!("{REWARD}=[{{python: {{path: {}, function: score}}{frames}}}]", path.display())
    };
    let decoded = |set: &str, reward: &str| {
        let sets = [&BY_POLICY_GRADIENT[..], &["devices=1", set, reward]].concat();
        let run = run(&folder, &format!("run{}", fs::read_dir(folder.path()).unwrap().count()), &sets);
        let counts = series(&run, "eval/reward");
        assert!(series(&run, "eval/dropped").iter().all(|&count| count == 2.0));
        assert!(counts.windows(2).all(|two| two[0] == two[1]));
        counts[0]
    };
    assert_eq!(decoded("devices=1", &reward("")), 5.0);
    assert_eq!(decoded("devices=1", &reward(", frames: 3")), 3.0);
    assert_eq!(decoded("pipeline.diffusion.sampler.decode_frames=1", &reward("")), 1.0);
}

#[test]
fn arrays_of_videos_have_the_pixels_that_a_network_reads() {
    let Some(python) = python_with("numpy", "no function got videos as arrays") else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reward.py");
    let function = "def score(images):\n    (video,) = images\n    assert video.shape == (5, 16, 32, 3)\n    \
                    red, green, blue = video[4].mean((0, 1))\n    return [float(red - (green + blue) / 2)]\n";
    fs::write(&path, function).unwrap();
    let reward = format!(
        "{REWARD}=[{{python: {{path: {}, function: score, python: {python}, images: float32}}}}, \
         {{torchscript: {{path: {}}}}}]",
        path.display(),
        network(&folder).display()
    );
    let run = run(&folder, "run", &[&BY_POLICY_GRADIENT[..], &[&reward]].concat());
    let [arrays, tensors] = ["reward/python/mean", "reward/torchscript/mean"].map(|name| series(&run, name));
    assert!(arrays.iter().zip(&tensors).all(|(array, tensor)| (array - tensor).abs() < 1e-5));
    assert!(!arrays.is_empty());
}

#[test]
fn what_does_not_fit_a_model_of_videos_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let check = |sets: &[&str], field: &str, problem: &str| {
        let error = fail(command(&folder.path().join("never"), sets));
        assert!(error.contains(field) && error.contains(problem), "{error}");
    };
    let sampler = "pipeline.diffusion.sampler";
    check(&[&format!("{sampler}.decode_frames=4")], "decode_frames", "4 of 5 frames cannot be decoded");
    check(&[&format!("{sampler}.decode_frames=9")], "decode_frames", "9 of 5 frames");
    let script = network(&folder);
    let reward = |input: &str, frames: usize| {
        let path = script.display();
        format!("{REWARD}=[{{torchscript: {{path: {path}, input: {input}}}, frames: {frames}}}]")
    };
    check(&[&reward("images", 6)], "reward[0].frames", "6 frames are out of range");
    check(&[&reward("latents", 1)], "reward[0].frames", "it sees latents");
    check(&[&format!("{sampler}.guidance_2=3")], "sampler.guidance_2", "no second transformer");
    // Without a supported decoder, only its latents can be scored.
    let model = copy_of_model(&folder);
    let path = model.join("vae/config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"is_residual\": false", "\"is_residual\": true")).unwrap();
    let model = format!("model.diffusers={}", model.display());
    let missing = "upsampler.resample.1.bias` is missing";
    check(&[&model, &reward("images", 1)], "pipeline.diffusion.reward[0]", missing);
    check(&[&model, &format!("{sampler}.decode_frames=1")], "decode_frames", missing);
    check(&[&model, &format!("{sampler}.decode_tiles={{size: 16}}")], "decode_tiles", missing);
    let run = folder.path().join("latents");
    let log = succeed(command(&run, &[&model, "pipeline.diffusion.steps=1", "devices=1"])).stderr;
    assert!(log.contains("videos are not decoded") && log.contains(missing), "{log}");
    assert!(!run.join("pictures").exists(), "latents have no picture");
}

/// Copies the tiny model, to be changed.
fn copy_of_model(folder: &TempDir) -> PathBuf {
    let model = folder.path().join("model");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(GOLDEN).join("model");
    for part in ["transformer", "vae", "scheduler"] {
        fs::create_dir_all(model.join(part)).unwrap();
        for entry in fs::read_dir(golden.join(part)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), model.join(part).join(entry.file_name())).unwrap();
        }
    }
    model
}

/// Creates a pair like Wan 2.2's 14B, the second with twice the first one's weights. Half of the tiny runs'
/// sigmas are below the boundary.
fn pair(folder: &TempDir) -> PathBuf {
    let model = copy_of_model(folder);
    let [first, second] = ["transformer", "transformer_2"].map(|part| model.join(part));
    fs::create_dir(&second).unwrap();
    fs::copy(first.join("config.json"), second.join("config.json")).unwrap();
    let name = "diffusion_pytorch_model.safetensors";
    let doubled: Vec<_> = Tensor::read_safetensors(first.join(name)).unwrap();
    let doubled: Vec<_> = doubled.into_iter().map(|(name, tensor)| (name, tensor * 2.0)).collect();
    Tensor::write_safetensors(&doubled, second.join(name)).unwrap();
    fs::write(model.join("model_index.json"), "{\"boundary_ratio\": 0.875}").unwrap();
    model
}

const LORA: &str = "model.lora.targets=['.*[.]attn1[.]to_q', '.*[.]ffn.net.2']";
const OF_SECOND: &str = "model.lora.targets=['transformer_2[.].*[.]to_q']";

/// Writes a run's model to a new folder.
fn export(run: &Path, to: &Path, options: &[&str]) {
    let mut command = anyroll(["export", "--dtype", "fp32"]);
    command.args(options).arg("--to").arg(to).arg(run);
    succeed(command);
}

/// Returns the norms of a run's trained adapters, for each transformer of a pair.
fn norms_of_adapters(run: &Path, to: &Path) -> [f64; 2] {
    export(run, to, &["--adapter"]);
    ["transformer", "transformer_2"].map(|part| {
        let file = to.join(part).join("pytorch_lora_weights.safetensors");
        let tensors = Tensor::read_safetensors(file).unwrap_or_default();
        let second = tensors.iter().filter(|(name, _)| name.ends_with(".lora_B.weight"));
        second.map(|(_, tensor)| tensor.square().sum(Kind::Double).double_value(&[])).sum()
    })
}

#[test]
fn both_of_a_pair_learn_however_they_are_held_and_go_on_from_their_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let model = format!("model.diffusers={}", pair(&folder).display());
    let guided = "pipeline.diffusion.sampler.guidance_2=1.0";
    // Points of a batch have sigmas on both sides of the boundary.
    let by_forward_process = [
        &BY_POLICY_GRADIENT[1..],
        &[
            &model,
            LORA,
            guided,
            "pipeline.diffusion.method={diffusion_nft: {timesteps: 4}}",
            "pipeline.diffusion.steps=3",
        ],
    ]
    .concat();
    let zero2 = run_however_held(&folder, &by_forward_process);
    let adapters = folder.path().join("adapters");
    let norms = norms_of_adapters(&zero2, &adapters);
    assert!(norms.iter().all(|&norm| norm > 0.0), "{norms:?}");

    // A run that continues from another's adapters begins with its final results.
    let path = format!("model.lora.path={}", adapters.display());
    let onward = run(&folder, "onward", &[&by_forward_process[..], &[&path]].concat());
    let [before, after] = [&zero2, &onward].map(|run| series(run, "eval/reward"));
    assert!((before.last().unwrap() - after[0]).abs() < 1e-5, "{before:?} {after:?}");
    let other = [&by_forward_process[..], &[&path, "model.lora.targets=[attn1.to_q]"]].concat();
    let error = finish(command(&folder.path().join("never"), &other)).stderr;
    assert!(error.contains("model.lora.path: the adapter there has another shape"), "{error}");
    assert!(error.contains("rank: 32, alpha: 32.0, targets: [attn1.to_q, ffn.net.2]"), "{error}");
}

#[test]
fn only_what_steps_with_a_gradient_meet_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let model = format!("model.diffusers={}", pair(&folder).display());
    let check = |sets: &[&str], field: &str, problem: &str| {
        let error = fail(command(&folder.path().join("never"), &[&[&*model], sets].concat()));
        assert!(error.contains(field) && error.contains(problem), "{error}");
    };
    let unmet = "no step with a gradient is at or above the boundary 0.875, where `transformer` paints";
    check(&[LORA], "model.lora.targets", unmet);
    check(&["model.lora.targets=['blocks[.].*']"], "model.lora.targets", "names no layer of a block");
    let guided = [OF_SECOND, "pipeline.diffusion.sampler.guidance_2=3"];
    check(&guided, "pipeline.diffusion.sampler.guidance_2", "guidance leads away from a text");
    let sets = [&*model, OF_SECOND, "pipeline.diffusion.steps=3"];
    let zero2 = run_however_held(&folder, &sets);
    let norms = norms_of_adapters(&zero2, &folder.path().join("adapters"));
    assert!(norms[0] == 0.0 && norms[1] > 0.0, "{norms:?}");
    // Whole folders of both, of which the first is unchanged.
    let whole = folder.path().join("whole");
    export(&zero2, &whole, &[]);
    let read = |folder: &Path, part: &str| {
        let path = folder.join(part).join("diffusion_pytorch_model.safetensors");
        let mut tensors = Tensor::read_safetensors(path).unwrap();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    };
    let base = folder.path().join("model");
    assert!(whole.join("model_index.json").exists());
    for (part, is_same) in [("transformer", true), ("transformer_2", false)] {
        let (ours, theirs) = (read(&whole, part), read(&base, part));
        assert!(ours.iter().map(|it| &it.0).eq(theirs.iter().map(|it| &it.0)), "{part}");
        assert_eq!(ours == theirs, is_same, "{part}");
    }
}
