//! Rewards of images: the inputs of a function, a head on a CLIP, and functions and networks for shapes.

use std::fs;
use std::path::{Path, PathBuf};

use tch::{CModule, Device, Kind, Tensor};

use super::diffusers::Case;
use super::diffusion::{METHODS, run_tiny, tiny};
use super::{fail, python_with, series};

const FIELD: &str = "pipeline.diffusion.reward";

/// The same redness for arrays of either dtype, and for the text's record.
const ARRAYS: &str = r#"
def redness(image, most):
    assert image.shape == (16, 16, 3)
    image *= 1  # it can be written to
    red, green, blue = (image[..., colour].mean() / most for colour in range(3))
    return [red - (green + blue) / 2]

def of_bytes(images):
    assert images[0].dtype == "uint8"
    return redness(images[0], 255)

def of_floats(images, prompts):
    assert images[0].dtype == "float32" and 0 <= images[0].min() and images[0].max() <= 1
    return [None] if prompts == ["1"] else redness(images[0], 1)
"#;

/// Brightness of gray images in a PNG file; those of the top left have no score.
const SHAPES: &str = r#"
import struct, zlib
NAMES = ["top left", "top right", "bottom left", "bottom right"]

def light(images, prompts, label):
    data = images[0]
    assert prompts == [NAMES[label[0]]]
    assert struct.unpack(">IIBB", data[16:26]) == (8, 8, 8, 0)
    return [None] if label == [0] else [zlib.crc32(data) % 1000 / 1000]

def nothing(images, prompts, label):
    return [None]
"#;

/// Writes a network for images like `sample` to `folder`.
fn network(folder: &Path, sample: &[i64], mut of: impl FnMut(&Tensor) -> Tensor) -> PathBuf {
    let path = folder.join("scorer.pt");
    let sample = [Tensor::ones(sample, (Kind::Float, Device::Cpu))];
    let mut closure = |inputs: &[Tensor]| vec![of(&inputs[0])];
    CModule::create_by_tracing("scorer", "forward", &sample, &mut closure).unwrap().save(&path).unwrap();
    path
}

#[test]
fn arrays_have_the_pixels_that_a_network_reads() {
    let Some(python) = python_with("numpy", "no function got images as arrays") else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reward.py");
    fs::write(&path, ARRAYS).unwrap();
    let scorer = network(folder.path(), &[2, 3, 16, 16], |images| {
        let means = images.clamp(0.0, 1.0).mean_dim([2, 3].as_slice(), false, None);
        means.select(1, 0) - (means.select(1, 1) + means.select(1, 2)) * 0.5
    });
    let function = |name: &str, images: &str| {
        let path = path.display();
        format!("{{python: {{path: {path}, function: {name}, python: {python}, images: {images}}}}}")
    };
    let [bytes, floats] = [function("of_bytes", "uint8"), function("of_floats", "float32")];
    let sum = format!("{FIELD}=[{bytes}, {floats}, {{torchscript: {{path: {}}}}}]", scorer.display());
    let case = Case { folder, sets: vec![sum] };
    let run = case.run("run", &["devices=2", "pipeline.diffusion.steps=6"]);
    let means = |name: &str| series(&run, &format!("reward/{name}/mean"));
    let dropped = series(&run, "reward/dropped");
    assert_eq!(dropped.iter().sum::<f64>(), series(&run, "reward/python_2/dropped").iter().sum::<f64>());
    for (step, of_bytes) in means("python").into_iter().enumerate() {
        let (of_floats, of_network) = (means("python_2")[step], means("torchscript")[step]);
        assert!((of_bytes - of_network).abs() < 1.0 / 255.0, "{of_bytes} {of_network}");
        // The function has no score for images of one text.
        assert!(dropped[step] > 0.0 || (of_floats - of_network).abs() < 1e-6, "{of_floats} {of_network}");
    }
    assert!(dropped.contains(&0.0) && dropped.iter().any(|&count| count > 0.0), "{dropped:?}");
}

/// A tiny head on a tiny CLIP.
fn by_aesthetics() -> Case {
    let reward = "aesthetic: {clip: tests/golden/clip/plain, head: tests/golden/aesthetic/head.safetensors}";
    Case { folder: tempfile::tempdir().unwrap(), sets: vec![format!("{FIELD}={{{reward}}}")] }
}

#[test]
fn a_head_on_a_clip_scores_and_is_followed_back() {
    let case = by_aesthetics();
    let scored = case.run("by policy gradient", &["devices=2"]);
    assert!(series(&scored, "reward/std").iter().all(|&deviation| deviation > 0.0));
    let followed = case.run(
        "followed",
        &[
            "pipeline.diffusion.steps=10",
            "pipeline.diffusion.prompts_per_step=8",
            "pipeline.diffusion.group_size=1",
            "pipeline.diffusion.sampler.guidance=1",
            "pipeline.diffusion.method={refl: {mid_step: 1}}",
            "pipeline.diffusion.optimizer.adamw.learning_rate=0.03",
            "pipeline.diffusion.evaluation={every: 10, images: 16}",
        ],
    );
    let rewards = series(&followed, "eval/reward");
    assert!(rewards.last().unwrap() > &(rewards[0] + 0.01), "{rewards:?}");
}

#[test]
fn a_head_that_cannot_be_used_is_refused_by_its_field() {
    let case = by_aesthetics();
    let check = |set: &str, field: &str, problem: &str| {
        let error =
            fail(case.command(&case.folder.path().join("never"), &[&format!("{FIELD}.aesthetic.{set}")]));
        assert!(error.contains(&format!("aesthetic.{field}")) && error.contains(problem), "{error}");
    };
    check("clip=configs", "clip", "config.json");
    check("head=configs/none.safetensors", "head", "there is no file configs/none.safetensors");
    check("head=README.md", "head", "README.md");
    check("head=tests/golden/clip/plain/model.safetensors", "head", "is not part of a head");
    let path = case.folder.path().join("wide.safetensors");
    let [weight, bias] = [&[1, 768][..], &[1]].map(|size| Tensor::zeros(size, (Kind::Float, Device::Cpu)));
    Tensor::write_safetensors(&[("layers.0.weight", weight), ("layers.0.bias", bias)], &path).unwrap();
    let words = "wide.safetensors: tensor `layers.0.weight` has shape [1, 768], must be [1, 6]";
    check(&format!("head={}", path.display()), "head", words);
}

#[test]
fn shapes_are_scored_by_functions_and_networks() {
    let folder = tempfile::tempdir().unwrap();
    let [(refl, of_refl), (flow_grpo, of_flow_grpo), _] = METHODS;
    let path = folder.path().join("reward.py");
    fs::write(&path, SHAPES).unwrap();
    let function = format!("{{python: {{path: {}, function: light}}}}", path.display());
    let alone =
        run_tiny(&folder, "function", flow_grpo, &[of_flow_grpo, &[&format!("{FIELD}={function}")]].concat());
    // A quarter of the evaluated images belong to the class without a score.
    assert!(series(&alone, "eval/dropped").iter().all(|&count| count == 8.0));
    assert!(series(&alone, "eval/reward").iter().all(|&reward| reward > 0.0 && reward < 1.0));
    assert!(series(&alone, "eval/brightness").is_empty(), "only configured rewards are measured");

    // Without any score there is no reward; a score of 0 would give one.
    let none = format!("{FIELD}={}", function.replace("light", "nothing"));
    let none = run_tiny(&folder, "none", flow_grpo, &[of_flow_grpo, &[&none]].concat());
    assert!(series(&none, "eval/reward").is_empty() && series(&none, "reward/mean").is_empty());
    assert!(series(&none, "reward/dropped").iter().all(|&count| count > 0.0));

    let sum = format!("{FIELD}=[{{lit: {{}}}}, {function}]");
    let summed = run_tiny(&folder, "sum", flow_grpo, &[of_flow_grpo, &[&sum]].concat());
    for name in ["eval/reward", "eval/lit", "eval/python"] {
        assert_eq!(series(&summed, name).len(), series(&alone, "eval/reward").len(), "{name}");
    }

    let light = |images: &Tensor| images.mean_dim([1, 2, 3].as_slice(), false, None);
    let scorer = network(folder.path(), &[2, 1, 8, 8], light);
    let network = format!("{FIELD}={{torchscript: {{path: {}}}}}", scorer.display());
    let fast = "pipeline.diffusion.optimizer.adamw.learning_rate=0.01";
    let followed = run_tiny(&folder, "network", refl, &[of_refl, &[&network, fast]].concat());
    let rewards = series(&followed, "eval/reward");
    assert!(rewards.last().unwrap() > &(rewards[0] + 0.01), "{rewards:?}");

    let refused = |reward: &str, words: &str| {
        let set = format!("{FIELD}={reward}");
        let error = fail(tiny(flow_grpo, &folder.path().join("never"), &[of_flow_grpo, &[&set]].concat()));
        assert!(error.contains(FIELD) && error.contains(words), "{error}");
    };
    refused("{clip: {path: tests/golden/clip/plain}}", "it reads texts, and the shapes have classes");
    refused("{aesthetic: {clip: a, head: b}}", "it reads colours, and the shapes are grey");
    refused("{python: {path: none.py, function: f}}", "there is no file none.py");
    refused("{torchscript: {path: README.md}}", "README.md");
    refused("[{lit: {}, frames: 2}]", "images have no frames");
}
