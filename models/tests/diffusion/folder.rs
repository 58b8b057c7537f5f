//! A published model's folder, compared with images of diffusers' own pipeline, and the folder written again.

use std::path::{Path, PathBuf};

use anyroll_close::{assert_close, largest_difference};
use anyroll_models::diffusion::{
    Guidance, LatentBatch, Lora, Sampler, TextWidths, Texts, Transformer, TransformerConfig, VaeDecoder,
    WanVaeDecoder, sigmas_of_diffusers, velocity,
};
use anyroll_models::hf::{
    DiffusersFolder, ExportDtype, ImageAdapterFiles, LatentDecoderConfig, TextEmbeddings,
    write_diffusers_folder, write_image_adapter,
};
use anyroll_models::init::{self, Seed, WeightSource};
use anyroll_models::{Model, Unit, passes};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::golden::goldens;
use crate::passes::TOLERANCE;

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
    let folder = DiffusersFolder::open(&golden("model"), None).unwrap();
    let model = transformer(&folder);
    let tensors = Tensor::read_safetensors(golden("golden.safetensors")).unwrap();
    let expected = |name: &str| tensors.iter().find(|(known, _)| known == name).unwrap().1.shallow_clone();
    let sampler = Sampler {
        sigmas: sigmas_of_diffusers(4, folder.shift()).unwrap(),
        guidance: vec![Guidance { scale: 2.5, no_class: 4, adapters: true }; 4],
    };
    let own = weights(model.units(), &folder);
    let labels = Tensor::arange(4, (Kind::Int64, Device::Cpu));
    let walk = sampler.walk(&model, &slices(&own), expected("noise"), &labels, None).unwrap();
    let latents = walk.points.last().unwrap().shallow_clone();
    assert_close("latents", &latents, &expected("latents"), TOLERANCE);

    let decoder = folder.decoder().unwrap();
    let LatentDecoderConfig::Images(config) = decoder.config() else { panic!("it decodes images") };
    let vae = VaeDecoder::new(config.clone(), false).unwrap();
    let own = weights(vae.units(), decoder);
    let batch = LatentBatch { latents, latents_grad: false };
    let (images, _) = passes::forward(&vae, &slices(&own), &batch, false).unwrap();
    assert_close("images", &(images * 0.5 + 0.5).clamp(0.0, 1.0), &expected("images"), TOLERANCE);
}

#[test]
fn a_folder_written_again_is_the_same() {
    let folder = DiffusersFolder::open(&golden("model"), None).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("again");
    let write = || write_diffusers_folder(&to, &folder, &folder, ExportDtype::Fp32);
    write().unwrap();
    assert!(write().is_err(), "it is there already");
    for part in ["transformer", "vae"] {
        let name = format!("{part}/diffusion_pytorch_model.safetensors");
        let (ours, theirs) = (tensors(&to.join(&name)), tensors(&golden("model").join(&name)));
        assert_eq!(ours.len(), theirs.len(), "{part}");
        for ((name, ours), (other, theirs)) in ours.iter().zip(&theirs) {
            assert_eq!(name, other);
            let error = largest_difference(ours, theirs);
            // diffusers' own table of positions is computed and not stored, up to the last bit.
            assert!(error <= if name == "pos_embed.pos_embed" { 1e-6 } else { 0.0 }, "{name}: {error}");
        }
    }
    for file in ["model_index.json", "scheduler/scheduler_config.json", "vae/config.json"] {
        assert_eq!(std::fs::read(to.join(file)).unwrap(), std::fs::read(golden("model").join(file)).unwrap());
    }
    DiffusersFolder::open(&to, None).unwrap();
}

#[test]
fn a_folder_of_videos_written_again_is_the_same() {
    let golden = videos("model");
    let folder = DiffusersFolder::open(&golden, None).unwrap();
    assert_eq!(folder.shift(), 3.0);
    assert_eq!(folder.latent_sizes([81, 480, 832]), Some([21, 60, 104]));
    assert_eq!(folder.latent_sizes([80, 480, 832]), None);
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("again");
    write_diffusers_folder(&to, &folder, &folder, ExportDtype::Fp32).unwrap();
    let name = "transformer/diffusion_pytorch_model.safetensors";
    let (ours, theirs) = (tensors(&to.join(name)), tensors(&golden.join(name)));
    assert!(ours == theirs && !ours.is_empty());
}

fn videos(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_wan").join(name)
}

#[test]
fn videos_are_those_of_diffusers_decoder() {
    let folder = DiffusersFolder::open(&videos("model"), None).unwrap();
    let decoder = folder.decoder().unwrap();
    let LatentDecoderConfig::Videos(config) = decoder.config() else { panic!("it decodes videos") };
    assert_eq!(decoder.config().zoom(), folder.zoom());
    let model = WanVaeDecoder::new(config.clone()).unwrap();
    let own = weights(model.units(), decoder);
    let [(_, latents), (_, expected)] = &tensors(&videos("videos.safetensors"))[..] else { panic!() };
    let (found, _) = model.decode(&slices(&own), latents, 1, false).unwrap();
    assert_close("videos", &found.clamp(-1.0, 1.0), expected, TOLERANCE);
}

/// Uses the golden file of such a decoder, next to the tiny transformer.
#[test]
fn the_decoder_of_the_5b_is_read_from_its_folder() {
    let (mut config, golden) =
        goldens("wan_vae").into_iter().find(|(config, _)| config["is_residual"] == true).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let path = copied(&videos("model"), scratch.path(), "vae/config.json");
    config["_class_name"] = "AutoencoderKLWan".into();
    std::fs::write(&path, config.to_string()).unwrap();
    let is_weight = |name: &&str| name.starts_with("decoder.") || name.starts_with("post_quant_conv.");
    let of_decoder: Vec<_> = golden.names().filter(is_weight).map(|name| (name, golden.get(name))).collect();
    Tensor::write_safetensors(&of_decoder, path.with_file_name("diffusion_pytorch_model.safetensors"))
        .unwrap();
    let folder = DiffusersFolder::open(scratch.path(), None).unwrap();
    assert_eq!(folder.zoom(), (2, 8));
    assert_eq!(folder.latent_sizes([7, 16, 24]), Some([4, 2, 3]));
    let decoder = folder.decoder().unwrap();
    let LatentDecoderConfig::Videos(config) = decoder.config() else { panic!("it decodes videos") };
    let model = WanVaeDecoder::new(config.clone()).unwrap();
    let own = weights(model.units(), decoder);
    let (found, _) = model.decode(&slices(&own), &golden.get("latents"), 1, false).unwrap();
    golden.assert_close("output", &found.clamp(-1.0, 1.0));
}

/// The model opens anyway, since its latents alone are useful.
#[test]
fn what_keeps_videos_from_being_decoded_is_named() {
    let check = |change: (&str, &str), expected: &str| {
        let scratch = tempfile::tempdir().unwrap();
        let path = copied(&videos("model"), scratch.path(), "vae/config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(change.0), "{text}");
        std::fs::write(&path, text.replace(change.0, change.1)).unwrap();
        let folder = DiffusersFolder::open(scratch.path(), None).unwrap();
        let error = folder.decoder().unwrap_err().to_string();
        assert!(error.contains("vae") && error.contains(expected), "{error}");
    };
    check(
        ("\"is_residual\": false", "\"is_residual\": true"),
        "decoder.up_blocks.0.upsampler.resample.1.bias` is missing",
    );
    check(
        ("\"patch_size\": null", "\"patch_size\": 2"),
        "`out_channels` is 3, must be a multiple of the 4 pixels",
    );
    check(("\"z_dim\": 4", "\"z_dim\": 3"), "`latents_mean` is [0.1, -0.2, 0.3, 0.0], must be 3 numbers");
    check(("\"scale_factor_spatial\": 8", "\"scale_factor_spatial\": 16"), "`scale_factor_spatial` is 16");
    check(("\"num_res_blocks\": 1,", ""), "cannot parse");
    let scratch = tempfile::tempdir().unwrap();
    let config = copied(&videos("model"), scratch.path(), "vae/config.json");
    std::fs::remove_file(config.with_file_name("diffusion_pytorch_model.safetensors")).unwrap();
    let folder = DiffusersFolder::open(scratch.path(), None).unwrap();
    let error = folder.decoder().unwrap_err().to_string();
    assert!(error.contains("vae") && error.contains("diffusion_pytorch_model"), "{error}");
}

/// Copies a model's folder, and returns the copy's path of `file`.
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

/// Returns all tensors of a file, by name.
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
        let error = DiffusersFolder::open(scratch.path(), None).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(expected), "{error}");
    };
    let transformer = "transformer/config.json";
    check(transformer, ("SD3Transformer2DModel", "FluxTransformer2DModel"), "is FluxTransformer2DModel");
    check(transformer, ("\"rms_norm\"", "\"layer_norm\""), "`qk_norm` is `layer_norm`");
    check(
        transformer,
        ("\"caption_projection_dim\": 16", "\"caption_projection_dim\": 8"),
        "must be the inner size 16",
    );
    check("vae/config.json", ("\"silu\"", "\"gelu\""), "`act_fn`");
    check("scheduler/scheduler_config.json", ("\"shift\": 3.0", "\"shift\": 0.0"), "`shift` must be above 0");
    let scheduler = "scheduler/scheduler_config.json";
    let karras = ("\"use_karras_sigmas\": false", "\"use_karras_sigmas\": true");
    check(scheduler, karras, "`use_karras_sigmas` is set");
    check(scheduler, ("\"shift_terminal\": null", "\"shift_terminal\": 0.1"), "`shift_terminal` is set");
    let few = ("\"num_train_timesteps\": 1000", "\"num_train_timesteps\": 500");
    check(scheduler, few, "`num_train_timesteps` must be 1000");
    check(transformer, ("\"num_layers\": 2", "\"num_layers\": 2000000000"), "`num_layers` is 2000000000");
    let widths = |token: i64| TextWidths { token, pooled: Some(10) };
    let wide = TextEmbeddings::open(&golden("prompts.safetensors"), widths(13)).unwrap_err().to_string();
    assert!(wide.contains("prompt_embeds") && wide.contains("13"), "{wide}");
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("prompts.safetensors");
    let mut texts = tensors(&golden("prompts.safetensors"));
    texts.iter_mut().for_each(|(_, tensor)| *tensor = &*tensor / 0.0);
    Tensor::write_safetensors(&texts, &path).unwrap();
    let texts = TextEmbeddings::open(&path, widths(12)).unwrap();
    let infinite = texts.load(tch::Device::Cpu).unwrap_err().to_string();
    assert!(infinite.contains("prompt_embeds") && infinite.contains("not finite"), "{infinite}");
}

/// Creates a pair from the tiny Wan: the second transformer has twice the first one's weights.
fn pair(boundary: &str) -> tempfile::TempDir {
    let scratch = tempfile::tempdir().unwrap();
    copied(&videos("model"), scratch.path(), "");
    let second = scratch.path().join("transformer_2");
    std::fs::create_dir(&second).unwrap();
    let first = scratch.path().join("transformer");
    std::fs::copy(first.join("config.json"), second.join("config.json")).unwrap();
    let name = "diffusion_pytorch_model.safetensors";
    let doubled: Vec<_> =
        tensors(&first.join(name)).into_iter().map(|(name, tensor)| (name, tensor * 2.0)).collect();
    Tensor::write_safetensors(&doubled, second.join(name)).unwrap();
    std::fs::write(scratch.path().join("model_index.json"), boundary).unwrap();
    scratch
}

#[test]
fn a_pair_of_transformers_is_read_and_written() {
    let scratch = pair("{\"boundary_ratio\": 0.875}");
    let folder = DiffusersFolder::open(scratch.path(), None).unwrap();
    assert_eq!(folder.transformer_config().boundary(), Some(0.875));
    let inside = write_diffusers_folder(&scratch.path().join("again"), &folder, &folder, ExportDtype::Fp32);
    let error = inside.unwrap_err();
    let cause = std::error::Error::source(&error).map(ToString::to_string);
    assert!(format!("{error} {cause:?}").contains("again"), "{error} {cause:?}");
    assert!(!scratch.path().join("again.partial").exists());
    let elsewhere = tempfile::tempdir().unwrap();
    let to = elsewhere.path().join("again");
    write_diffusers_folder(&to, &folder, &folder, ExportDtype::Fp32).unwrap();
    for part in ["transformer", "transformer_2"] {
        let name = format!("{part}/diffusion_pytorch_model.safetensors");
        let (ours, theirs) = (tensors(&to.join(&name)), tensors(&scratch.path().join(&name)));
        assert!(ours == theirs && !ours.is_empty(), "{part}");
        assert!(to.join(part).join("config.json").exists());
    }
}

/// Compared with the two transformers, each opened as its own model.
#[test]
fn a_pair_walks_with_one_transformer_and_then_with_the_other() {
    let scratch = pair("{\"boundary_ratio\": 0.9}");
    let both = DiffusersFolder::open(scratch.path(), None).unwrap();
    let single = ["transformer", "transformer_2"].map(|part| {
        let alone = tempfile::tempdir().unwrap();
        copied(&videos("model"), alone.path(), "");
        let name = "transformer/diffusion_pytorch_model.safetensors";
        std::fs::copy(
            scratch.path().join(name.replace("transformer/", &format!("{part}/"))),
            alone.path().join(name),
        )
        .unwrap();
        DiffusersFolder::open(alone.path(), None).unwrap()
    });
    let texts = || Texts::new(Tensor::randn([3, 3, 6], (Kind::Float, Device::Cpu)), None).unwrap();
    tch::manual_seed(1);
    let start = Tensor::randn([2, 4, 2, 4, 4], (Kind::Float, Device::Cpu));
    let labels = Tensor::from_slice(&[0i64, 1]);
    let model_of = |folder: &DiffusersFolder| {
        tch::manual_seed(0);
        folder.transformer_config().build(None, Some(texts()), Device::Cpu).unwrap()
    };
    // At 0.9 and above the first with a guidance of 3, below it the second with a guidance of 1.
    let sigmas = vec![1.0, 0.9, 0.5, 0.0];
    let guided = |scale| Guidance { scale, no_class: 2, adapters: true };
    let guidance = vec![guided(3.0), guided(3.0), guided(1.0)];
    let model = model_of(&both);
    let own = weights(model.units(), &both);
    let sampler = Sampler { sigmas: sigmas.clone(), guidance: guidance.clone() };
    let found = sampler.walk(&model, &slices(&own), start.shallow_clone(), &labels, None).unwrap();
    let mut x = start;
    for step in 0..3 {
        let folder = &single[usize::from(step == 2)];
        let model = model_of(folder);
        let own = weights(model.units(), folder);
        let batch = guidance[step].batch(&x, sigmas[step], &labels, false).unwrap();
        let v = guidance[step].combine(&velocity(&model, &slices(&own), &batch).unwrap()).unwrap();
        x = &x + v * (sigmas[step + 1] - sigmas[step]);
        assert_close("point", &found.points[step + 1], &x, TOLERANCE);
    }
}

#[test]
fn what_is_wrong_with_a_pair_is_named() {
    let check = |boundary: &str, change: fn(&Path), expected: &str| {
        let scratch = pair(boundary);
        change(scratch.path());
        let error = DiffusersFolder::open(scratch.path(), None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let index = "{\"boundary_ratio\": 0.9}";
    check("{}", |_| (), "`boundary_ratio` is missing");
    check("{\"boundary_ratio\": null}", |_| (), "`boundary_ratio` is missing");
    check("{\"boundary_ratio\": 900}", |_| (), "`boundary_ratio` is 900, must be from 0 to 1");
    check(
        index,
        |folder| std::fs::remove_dir_all(folder.join("transformer_2")).unwrap(),
        "transformer_2 does not exist",
    );
    let other_size = |folder: &Path| {
        let path = folder.join("transformer_2/config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"num_layers\": 2", "\"num_layers\": 1")).unwrap();
    };
    check(index, other_size, "differs from `transformer`");
    let cut = |folder: &Path| {
        std::fs::remove_file(folder.join("transformer_2/diffusion_pytorch_model.safetensors")).unwrap();
    };
    check(index, cut, "transformer_2/diffusion_pytorch_model.safetensors");
}

/// Adapters of one transformer and of a pair, with different initial values.
#[test]
fn adapters_that_were_written_are_read_again() {
    let (one, two) = (videos("model"), pair("{\"boundary_ratio\": 0.9}"));
    for (folder, chosen) in [(&*one, "blocks.0"), (two.path(), "attn1.to_q"), (two.path(), "transformer_2")] {
        let folder = DiffusersFolder::open(folder, None).unwrap();
        let config = folder.transformer_config();
        let modules = config.modules().into_iter().filter(|name| name.contains(chosen)).collect();
        let lora = Lora { rank: 3, scale: 1.0, modules };
        let units = config.adapter_units(&lora).unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let to = scratch.path().join("adapter");
        write_image_adapter(&to, (config, &lora), &Seed(7), ExportDtype::Fp32).unwrap();
        assert_eq!(to.join("pytorch_lora_weights.safetensors").exists(), config.boundary().is_none());
        let read = ImageAdapterFiles::open(&to, config).unwrap();
        assert_eq!(read.lora(), &Lora { modules: sorted(&lora.modules), ..lora });
        assert!(weights(&units, &read) == weights(&units, &Seed(7)));
    }
}

fn sorted(names: &[String]) -> Vec<String> {
    let mut names = names.to_vec();
    names.sort();
    names
}

#[test]
fn what_is_wrong_with_an_adapter_is_named() {
    let folder = DiffusersFolder::open(&videos("model"), None).unwrap();
    let matrix = |rows: i64, columns: i64| Tensor::ones([rows, columns], (Kind::Float, Device::Cpu));
    let pair = |module: &str| {
        [("A", matrix(2, 24)), ("B", matrix(24, 2))]
            .map(|(which, matrix)| (format!("{module}.lora_{which}.weight"), matrix))
    };
    let check = |tensors: Vec<(String, Tensor)>, expected: &str| {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("some_name.safetensors");
        Tensor::write_safetensors(&tensors, &path).unwrap();
        match ImageAdapterFiles::open(&path, folder.transformer_config()) {
            Ok(adapter) => assert_eq!(format!("{:?}", adapter.lora().modules), expected),
            Err(error) => assert!(error.to_string().contains(expected), "{error}"),
        }
    };
    let good = pair("transformer.blocks.1.attn2.to_k");
    let and = |name: &str, tensor: Tensor| {
        let copies = good.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        copies.chain([(name.to_owned(), tensor)]).collect::<Vec<_>>()
    };
    check(and("transformer.blocks.1.attn2.to_k.lora_B.bias", matrix(1, 1)), "lora_B.bias` is not part");
    check(
        and("transformer.blocks.1.attn2.to_v.lora_A.weight", matrix(3, 24)),
        "to_v.lora_A.weight` has shape [3, 24]",
    );
    check(
        and("transformer.blocks.1.attn2.to_v.lora_A.weight", matrix(2, 24)),
        "to_v.lora_B.weight` is missing",
    );
    check(pair("transformer.blocks.9.attn2.to_k").into(), "is not part of the model");
    check(
        pair("diffusion_model.blocks.1.cross_attn.k").into(),
        "it has no tensor with a name like diffusers' `transformer.LAYER",
    );
    let pair = DiffusersFolder::open(self::pair("{\"boundary_ratio\": 0.9}").path(), None).unwrap();
    let error = ImageAdapterFiles::open(&videos("model"), pair.transformer_config()).unwrap_err().to_string();
    assert!(error.contains("transformer/pytorch_lora_weights.safetensors"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    let error = ImageAdapterFiles::open(empty.path(), pair.transformer_config()).unwrap_err().to_string();
    assert!(error.contains("it has no folder `transformer` or `transformer_2`"), "{error}");
    check(good.into(), "[\"blocks.1.attn2.to_k\"]");
}

/// diffusers stores PEFT's configuration in the header of the file.
#[test]
fn the_header_of_an_adapter_says_what_its_products_are_multiplied_by() {
    let folder = DiffusersFolder::open(&videos("model"), None).unwrap();
    let of_rank_2 = |said: &str| {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("some_name.safetensors");
        let name = "transformer.blocks.1.attn2.to_k";
        let tensors = [("A", [2, 24]), ("B", [24, 2])].map(|(which, shape)| {
            (format!("{name}.lora_{which}.weight"), Tensor::ones(shape, (Kind::Float, Device::Cpu)))
        });
        Tensor::write_safetensors(&tensors, &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let (length, rest) = bytes.split_at(8);
        let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        let mut header: Value = serde_json::from_slice(header).unwrap();
        header["__metadata__"] = json!({"format": "pt", "lora_adapter_metadata": said});
        let header = header.to_string().into_bytes();
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), &*header, data].concat()).unwrap();
        ImageAdapterFiles::open(&path, folder.transformer_config())
            .map(|adapter| adapter.lora().scale)
            .map_err(|error| error.to_string())
    };
    assert_eq!(of_rank_2("{}"), Ok(1.0));
    assert_eq!(of_rank_2(r#"{"transformer.r": 2, "transformer.lora_alpha": 8}"#), Ok(4.0));
    let stabilized = r#"{"transformer.lora_alpha": 8, "transformer.use_rslora": true}"#;
    assert_eq!(of_rank_2(stabilized), Ok(8.0 / 2.0f64.sqrt()));
    let refused = |said: &str, field: &str| {
        let error = of_rank_2(said).unwrap_err();
        assert!(error.contains("some_name.safetensors") && error.contains(field), "{error}");
    };
    refused(r#"{"transformer.use_dora": true}"#, "`use_dora`");
    refused(r#"{"transformer.rank_pattern": {"to_q": 4}}"#, "`rank_pattern`");
    refused("{", "some_name.safetensors");
}
