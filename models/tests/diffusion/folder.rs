//! A published model's folder: what diffusers' own pipeline paints with it, and the folder written again.

use std::path::{Path, PathBuf};

use anyroll_models::diffusion::{
    Guidance, LatentBatch, Sampler, Transformer, TransformerConfig, VaeDecoder, WanVaeDecoder,
    sigmas_of_diffusers,
};
use anyroll_models::hf::{
    DiffusersFolder, ExportDtype, FolderContents, FolderKind, LatentDecoderConfig, TextEmbeddings,
    write_diffusers_folder,
};
use anyroll_models::init::{self, WeightSource};
use anyroll_models::{Model, Unit, passes};
use tch::{Device, Kind, Tensor};

use crate::passes::assert_close;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_sd3").join(name)
}

fn texts(config: &TransformerConfig) -> TextEmbeddings {
    TextEmbeddings::open(&golden("prompts.safetensors"), config.text_widths()).unwrap()
}

fn weights(units: &[Unit], source: &dyn WeightSource) -> Vec<Vec<Tensor>> {
    let read = |spec| init::whole(source, spec, Kind::Float, Device::Cpu).unwrap();
    units.iter().map(|unit| unit.params.iter().map(read).collect()).collect()
}

fn slices(weights: &[Vec<Tensor>]) -> Vec<&[Tensor]> {
    weights.iter().map(Vec::as_slice).collect()
}

fn transformer(folder: &DiffusersFolder) -> Transformer {
    let config = folder.transformer_config();
    let texts = texts(config).load(Device::Cpu).unwrap();
    config.build(None, Some(texts), Device::Cpu).unwrap()
}

#[test]
fn images_are_those_of_diffusers_pipeline() {
    let folder = DiffusersFolder::open(&golden("model")).unwrap();
    let model = transformer(&folder);
    let tensors = Tensor::read_safetensors(golden("golden.safetensors")).unwrap();
    let expected = |name: &str| tensors.iter().find(|(known, _)| known == name).unwrap().1.shallow_clone();
    let sampler = Sampler {
        sigmas: sigmas_of_diffusers(4, folder.shift()).unwrap(),
        guidance: Guidance { scale: 2.5, no_class: 4, adapters: true },
    };
    let own = weights(model.units(), &folder);
    let labels = Tensor::arange(4, (Kind::Int64, Device::Cpu));
    let walk = sampler.walk(&model, &slices(&own), expected("noise"), &labels, None).unwrap();
    let latents = walk.points.last().unwrap().shallow_clone();
    assert_close("latents", &latents, &expected("latents"));

    let decoder = folder.decoder().unwrap();
    let LatentDecoderConfig::Images(config) = decoder.config() else { panic!("it is of images") };
    let vae = VaeDecoder::new(config.clone(), false).unwrap();
    let own = weights(vae.units(), decoder);
    let batch = LatentBatch { latents, latents_grad: false };
    let (images, _) = passes::forward(&vae, &slices(&own), &batch, false).unwrap();
    assert_close("images", &(images * 0.5 + 0.5).clamp(0.0, 1.0), &expected("images"));
}

#[test]
fn a_folder_written_again_is_the_same() {
    let folder = DiffusersFolder::open(&golden("model")).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("again");
    let units = folder.transformer_config().units();
    let contents = FolderContents {
        kind: FolderKind::Transformer,
        config: folder.transformer_config_file().unwrap(),
        copied: &[],
        made: &[],
        units: &units,
        weights: &folder,
        dtype: ExportDtype::Fp32,
    };
    write_diffusers_folder(&to, &folder, &contents).unwrap();
    assert!(write_diffusers_folder(&to, &folder, &contents).is_err(), "it is there already");
    for part in ["transformer", "vae"] {
        let name = format!("{part}/diffusion_pytorch_model.safetensors");
        let (ours, theirs) = (tensors(&to.join(&name)), tensors(&golden("model").join(&name)));
        assert_eq!(ours.len(), theirs.len(), "{part}");
        for ((name, ours), (other, theirs)) in ours.iter().zip(&theirs) {
            assert_eq!(name, other);
            let error = (ours - theirs).abs().max().double_value(&[]);
            // diffusers' own table of positions is computed, and not kept, to the last bit.
            assert!(error <= if name == "pos_embed.pos_embed" { 1e-6 } else { 0.0 }, "{name}: {error}");
        }
    }
    for file in ["model_index.json", "scheduler/scheduler_config.json", "vae/config.json"] {
        assert_eq!(std::fs::read(to.join(file)).unwrap(), std::fs::read(golden("model").join(file)).unwrap());
    }
    DiffusersFolder::open(&to).unwrap();
}

#[test]
fn a_folder_of_videos_written_again_is_the_same() {
    let golden = videos("model");
    let folder = DiffusersFolder::open(&golden).unwrap();
    assert_eq!(folder.shift(), 3.0);
    assert_eq!(folder.latent_sizes([81, 480, 832]), Some([21, 60, 104]));
    assert_eq!(folder.latent_sizes([80, 480, 832]), None);
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("again");
    let contents = FolderContents {
        kind: FolderKind::Transformer,
        config: folder.transformer_config_file().unwrap(),
        copied: &[],
        made: &[],
        units: &folder.transformer_config().units(),
        weights: &folder,
        dtype: ExportDtype::Fp32,
    };
    write_diffusers_folder(&to, &folder, &contents).unwrap();
    let name = "transformer/diffusion_pytorch_model.safetensors";
    let (ours, theirs) = (tensors(&to.join(name)), tensors(&golden.join(name)));
    assert!(ours == theirs && !ours.is_empty());
}

fn videos(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_wan").join(name)
}

#[test]
fn videos_are_those_of_diffusers_decoder() {
    let folder = DiffusersFolder::open(&videos("model")).unwrap();
    let decoder = folder.decoder().unwrap();
    let LatentDecoderConfig::Videos(config) = decoder.config() else { panic!("it is of videos") };
    assert_eq!(decoder.config().zoom(), folder.zoom());
    let model = WanVaeDecoder::new(config.clone()).unwrap();
    let own = weights(model.units(), decoder);
    let [(_, latents), (_, expected)] = &tensors(&videos("videos.safetensors"))[..] else { panic!() };
    let (found, _) = model.decode(&slices(&own), latents, 1, false).unwrap();
    assert_close("videos", &found, expected);
}

/// Its latents can be of use all the same.
#[test]
fn what_keeps_videos_from_being_decoded_is_named() {
    let check = |change: (&str, &str), expected: &str| {
        let scratch = tempfile::tempdir().unwrap();
        let path = copied(&videos("model"), scratch.path(), "vae/config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(change.0), "{text}");
        std::fs::write(&path, text.replace(change.0, change.1)).unwrap();
        let folder = DiffusersFolder::open(scratch.path()).unwrap();
        let error = folder.decoder().unwrap_err().to_string();
        assert!(error.contains("vae/config.json") && error.contains(expected), "{error}");
    };
    check(("\"is_residual\": false", "\"is_residual\": true"), "`is_residual` is true");
    check(("\"patch_size\": null", "\"patch_size\": 2"), "`patch_size` is there");
    check(("\"z_dim\": 4", "\"z_dim\": 3"), "`latents_mean` is [0.1, -0.2, 0.3, 0.0], must be 3 numbers");
    check(("\"scale_factor_spatial\": 8", "\"scale_factor_spatial\": 16"), "`scale_factor_spatial` is 16");
    check(("\"num_res_blocks\": 1,", ""), "cannot be understood");
    let scratch = tempfile::tempdir().unwrap();
    let config = copied(&videos("model"), scratch.path(), "vae/config.json");
    std::fs::remove_file(config.with_file_name("diffusion_pytorch_model.safetensors")).unwrap();
    let folder = DiffusersFolder::open(scratch.path()).unwrap();
    let error = folder.decoder().unwrap_err().to_string();
    assert!(error.contains("vae") && error.contains("diffusion_pytorch_model"), "{error}");
}

/// Copies a model's folder, and says where a file of it is now.
fn copied(from: &Path, to: &Path, file: &str) -> PathBuf {
    for part in ["transformer", "vae", "scheduler"] {
        std::fs::create_dir(to.join(part)).unwrap();
        for entry in std::fs::read_dir(from.join(part)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(part).join(entry.file_name())).unwrap();
        }
    }
    to.join(file)
}

/// All of a file, by name.
fn tensors(path: &Path) -> Vec<(String, Tensor)> {
    let mut tensors = Tensor::read_safetensors(path).unwrap();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

#[test]
fn what_is_wrong_with_a_folder_is_named() {
    let check = |file: &str, change: (&str, &str), expected: &str| {
        let scratch = tempfile::tempdir().unwrap();
        let path = copied(&golden("model"), scratch.path(), file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(change.0), "{text}");
        std::fs::write(&path, text.replace(change.0, change.1)).unwrap();
        let error = DiffusersFolder::open(scratch.path()).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(expected), "{error}");
    };
    let transformer = "transformer/config.json";
    check(transformer, ("SD3Transformer2DModel", "FluxTransformer2DModel"), "is FluxTransformer2DModel");
    check(transformer, ("\"rms_norm\"", "\"layer_norm\""), "`qk_norm` is `layer_norm`");
    check(transformer, ("\"caption_projection_dim\": 16", "\"caption_projection_dim\": 8"), "as wide as 16");
    check("vae/config.json", ("\"silu\"", "\"gelu\""), "`act_fn`");
    check("scheduler/scheduler_config.json", ("\"shift\": 3.0", "\"shift\": 0.0"), "`shift` is not above 0");
    let scheduler = "scheduler/scheduler_config.json";
    let karras = ("\"use_karras_sigmas\": false", "\"use_karras_sigmas\": true");
    check(scheduler, karras, "`use_karras_sigmas` is there");
    check(scheduler, ("\"shift_terminal\": null", "\"shift_terminal\": 0.1"), "`shift_terminal` is there");
    let few = ("\"num_train_timesteps\": 1000", "\"num_train_timesteps\": 500");
    check(scheduler, few, "`num_train_timesteps` is not 1000");
    check(transformer, ("\"num_layers\": 2", "\"num_layers\": 2000000000"), "`num_layers` is 2000000000");
    let wide = TextEmbeddings::open(&golden("prompts.safetensors"), (13, Some(10))).unwrap_err().to_string();
    assert!(wide.contains("prompt_embeds") && wide.contains("13"), "{wide}");
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("prompts.safetensors");
    let mut texts = tensors(&golden("prompts.safetensors"));
    texts.iter_mut().for_each(|(_, tensor)| *tensor = &*tensor / 0.0);
    Tensor::write_safetensors(&texts, &path).unwrap();
    let texts = TextEmbeddings::open(&path, (12, Some(10))).unwrap();
    let infinite = texts.load(tch::Device::Cpu).unwrap_err().to_string();
    assert!(infinite.contains("prompt_embeds") && infinite.contains("not finite"), "{infinite}");
}

#[test]
fn a_pair_of_transformers_is_refused() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_wan/model");
    let scratch = tempfile::tempdir().unwrap();
    for part in ["transformer", "vae", "scheduler"] {
        std::os::unix::fs::symlink(golden.join(part), scratch.path().join(part)).unwrap();
    }
    DiffusersFolder::open(scratch.path()).unwrap();
    std::fs::create_dir(scratch.path().join("transformer_2")).unwrap();
    let error = DiffusersFolder::open(scratch.path()).unwrap_err().to_string();
    assert!(error.contains("`transformer_2` is there"), "{error}");
}
