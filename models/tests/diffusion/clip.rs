//! CLIP and its heads compared with `transformers` and PyTorch.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyroll_close::assert_close;
use anyroll_models::clip::{Clip, ClipConfig};
use anyroll_models::hf::{ClipFolder, HeadFile};
use anyroll_models::init;
use tch::{Device, Kind, Tensor};

use crate::passes::TOLERANCE;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn path(name: &str) -> PathBuf {
    golden("clip").join(name)
}

fn read(path: &Path) -> HashMap<String, Tensor> {
    Tensor::read_safetensors(path).unwrap().into_iter().collect()
}

/// Opens a model, and reads the weights of its two towers.
fn open(name: &str) -> (Clip, [Vec<Tensor>; 2]) {
    let folder = ClipFolder::open(&path(name)).unwrap();
    let clip = Clip::new(folder.config().clone()).unwrap();
    let weights = clip.units().map(|unit| {
        let read = |spec| init::whole(&folder, spec, Kind::Float, Device::Cpu).unwrap();
        unit.params.iter().map(read).collect()
    });
    (clip, weights)
}

#[test]
fn vectors_and_gradients_equal_transformers() {
    for name in ["plain", "first"] {
        let (clip, [of_images, of_texts]) = open(name);
        let tensors = read(&path(name).join("golden.safetensors"));
        let get = |what: &str, number: usize| &tensors[&format!("{what}.{number}")];
        // A batch of texts of three lengths.
        let texts: Vec<Vec<i64>> = (0..3).map(|number| get("tokens", number).try_into().unwrap()).collect();
        let said = clip.embed_texts(&of_texts, &texts).unwrap();
        for number in 0..3 {
            let what = |part: &str| format!("{name}: {part} {number}");
            let text = said.get(number as i64);
            assert_close(&what("text"), &text, get("text", number), TOLERANCE);
            let images = get("images", number).detach().set_requires_grad(true);
            let seen = clip.embed_images(&of_images, &images).unwrap();
            assert_close(&what("images"), &seen, get("seen", number), TOLERANCE);
            let cosines = seen.mv(&text);
            assert_close(&what("cosines"), &cosines, get("cosines", number), TOLERANCE);
            let gradient = Tensor::run_backward(&[cosines.sum(Kind::Float)], &[&images], false, false);
            assert_close(&what("gradient"), &gradient[0], get("gradient", number), TOLERANCE);
        }
    }
}

#[test]
fn scores_of_a_head_and_their_gradients_equal_pytorch() {
    let (clip, [of_images, _]) = open("plain");
    let file = HeadFile::open(&golden("aesthetic/head.safetensors"), clip.config().projection_dim).unwrap();
    let head = file.load(Device::Cpu).unwrap();
    let tensors = read(&golden("aesthetic/golden.safetensors"));
    for number in 0..3 {
        let get = |what: &str| &tensors[&format!("{what}.{number}")];
        let images = get("images").detach().set_requires_grad(true);
        let scores = head.score(&clip.embed_images(&of_images, &images).unwrap()).unwrap();
        assert_close(&format!("scores {number}"), &scores, get("scores"), TOLERANCE);
        let gradient = Tensor::run_backward(&[scores.sum(Kind::Float)], &[&images], false, false);
        // The gradients are a hundredth at most; scaled to about 1 for the comparison.
        assert_close(
            &format!("gradient {number}"),
            &(&gradient[0] * 100),
            &(get("gradient") * 100),
            TOLERANCE,
        );
    }
}

#[test]
fn a_head_that_does_not_fit_names_its_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("head.safetensors");
    let check = |tensors: &[(&str, &[i64])], words: &str| {
        let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
        let tensors: Vec<_> = tensors.iter().map(|&(name, shape)| (name, zeros(shape))).collect();
        Tensor::write_safetensors(&tensors, &path).unwrap();
        let error = HeadFile::open(&path, 6).unwrap_err().to_string();
        assert!(error.contains("head.safetensors: tensor") && error.contains(words), "{error}");
    };
    let first: [(&str, &[i64]); 2] = [("layers.0.weight", &[4, 6]), ("layers.0.bias", &[4])];
    let and = |more: &[(&'static str, &'static [i64])]| [&first[..], more].concat();
    check(&[("layers.0.weight", &[4, 7]), first[1]], "`layers.0.weight` has shape [4, 7], must be [1, 6]");
    check(&first, "`layers.0.weight` has shape [4, 6], must be [1, 6]");
    let last: &[i64] = &[1, 5];
    check(&and(&[("layers.2.weight", last)]), "`layers.2.weight` has shape [1, 5], must be [1, 4]");
    check(&and(&[("layers.10.weight", &[1, 4])]), "`layers.10.bias` is missing");
    check(&and(&[("layers.10.weight", &[1, 4]), ("layers.10.bias", &[2])]), "[2], must be [1]");
    let foreign = "is not part of a head: names are `layers.N.weight` and `layers.N.bias`";
    check(&and(&[("layers.final.weight", &[1, 4])]), &format!("`layers.final.weight` {foreign}"));
    check(&[("weight", &[1, 6]), ("bias", &[1])], &format!("`bias` {foreign}"));
}

#[test]
fn contradictions_name_their_field() {
    let config = open("plain").0.config().clone();
    let check = |field: &str, change: fn(&mut ClipConfig)| {
        let mut config = config.clone();
        change(&mut config);
        let error = Clip::new(config).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")), "{error}");
    };
    check("text_config", |config| config.text_config.tower.num_attention_heads = 5);
    check("vision_config", |config| config.vision_config.layer_norm_eps = 0.0);
    check("patch_size", |config| config.patch_size = 9);
    check("vision_config", |config| config.vision_config.num_hidden_layers = 0);
    check("eos_token_id", |config| config.text_config.eos_token_id = config.text_config.vocab_size);
}

#[test]
fn a_folder_that_is_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(path("plain")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let check = |from: &str, to: &str, words: &str| {
        let config = folder.path().join("config.json");
        let text = fs::read_to_string(&config).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&config, text.replace(from, to)).unwrap();
        let error = ClipFolder::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains(words), "{error}");
        fs::write(&config, text).unwrap();
    };
    check("\"model_type\": \"clip\"", "\"model_type\": \"siglip\"", "`model_type`");
    check("\"hidden_act\": \"gelu\"", "\"hidden_act\": \"relu\"", "hidden_act");
    check("\"num_channels\": 3", "\"num_channels\": 1", "num_channels");
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert!(ClipFolder::open(folder.path()).unwrap_err().to_string().contains("model.safetensors"));
}
