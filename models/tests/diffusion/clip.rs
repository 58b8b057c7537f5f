//! CLIP against `transformers`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyroll_models::clip::{Clip, ClipConfig};
use anyroll_models::hf::ClipFolder;
use anyroll_models::init;
use tch::{Device, Kind, Tensor};

use crate::passes::assert_close;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/clip").join(name)
}

/// A model, and the weights of its two towers.
fn open(name: &str) -> (Clip, [Vec<Tensor>; 2]) {
    let folder = ClipFolder::open(&path(name)).unwrap();
    let clip = Clip::new(folder.config().clone()).unwrap();
    let weights = clip.units().each_ref().map(|unit| {
        let read = |spec| init::whole(&folder, spec, Kind::Float, Device::Cpu).unwrap();
        unit.params.iter().map(read).collect()
    });
    (clip, weights)
}

#[test]
fn vectors_and_gradients_equal_transformers() {
    for name in ["plain", "first"] {
        let (clip, [of_images, of_texts]) = open(name);
        let tensors = Tensor::read_safetensors(path(name).join("golden.safetensors")).unwrap();
        let tensors: HashMap<String, Tensor> = tensors.into_iter().collect();
        let get = |what: &str, number: usize| &tensors[&format!("{what}.{number}")];
        // Texts of three lengths, at once.
        let texts: Vec<Vec<i64>> = (0..3).map(|number| get("tokens", number).try_into().unwrap()).collect();
        let said = clip.embed_texts(&of_texts, &texts).unwrap();
        for number in 0..3 {
            let what = |part: &str| format!("{name}: {part} {number}");
            let text = said.get(number as i64);
            assert_close(&what("text"), &text, get("text", number));
            let images = get("images", number).detach().set_requires_grad(true);
            let seen = clip.embed_images(&of_images, &images).unwrap();
            assert_close(&what("images"), &seen, get("seen", number));
            let cosines = seen.mv(&text);
            assert_close(&what("cosines"), &cosines, get("cosines", number));
            let gradient = Tensor::run_backward(&[cosines.sum(Kind::Float)], &[&images], false, false);
            assert_close(&what("gradient"), &gradient[0], get("gradient", number));
        }
    }
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
    check("text_config", |config| config.text_config.num_attention_heads = 5);
    check("vision_config", |config| config.vision_config.layer_norm_eps = 0.0);
    check("patch_size", |config| config.patch_size = 9);
    check("eos_token_id", |config| config.eos_token_id = config.vocab_size);
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
