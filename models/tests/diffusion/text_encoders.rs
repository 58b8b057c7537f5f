//! Text encoders of image models, compared with `transformers`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyroll_close::{assert_close, largest_difference};
use anyroll_models::clip::TextEncoder;
use anyroll_models::diffusion::TextWidths;
use anyroll_models::hf::{
    ClipTextFolder, EmbeddingsShape, ExportDtype, T5Folder, TextEmbeddings, TextEmbeddingsWriter,
    TextEncoderFolders,
};
use anyroll_models::init::{self, WeightSource};
use anyroll_models::model::Unit;
use anyroll_models::t5::T5Encoder;
use tch::{Device, Kind, Tensor};

use crate::passes::TOLERANCE;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/text_encoders").join(name)
}

fn tensors(name: &str) -> HashMap<String, Tensor> {
    Tensor::read_safetensors(golden(name)).unwrap().into_iter().collect()
}

fn weights(folder: &dyn WeightSource, unit: &Unit, kind: Kind) -> Vec<Tensor> {
    unit.params.iter().map(|spec| init::whole(folder, spec, kind, Device::Cpu).unwrap()).collect()
}

fn t5(name: &str, kind: Kind) -> (T5Encoder, Vec<Tensor>) {
    let folder = T5Folder::open(&golden(name), None).unwrap();
    let encoder = T5Encoder::new(folder.config().clone()).unwrap();
    let weights = weights(&folder, encoder.unit(), kind);
    (encoder, weights)
}

#[test]
fn states_of_t5_and_umt5_equal_transformers() {
    let wanted = tensors("sd3/encoders.safetensors");
    let (encoder, weights) = t5("sd3/text_encoder_3", Kind::Float);
    let found = encoder.encode(&weights, &wanted["t5.tokens"], None).unwrap();
    assert_close("t5", &found, &wanted["t5.hidden"], TOLERANCE);

    let wanted = tensors("wan/encoders.safetensors");
    let lengths: Vec<i64> = (&wanted["lengths"]).try_into().unwrap();
    let (encoder, weights) = t5("wan/text_encoder", Kind::Float);
    let found = encoder.encode(&weights, &wanted["tokens"], Some(&lengths)).unwrap();
    let tokens = found.size()[1];
    let lengths = wanted["lengths"].view([-1, 1, 1]);
    let is_text = Tensor::arange(tokens, (Kind::Int64, Device::Cpu)).view([1, -1, 1]).lt_tensor(&lengths);
    assert_close(
        "umt5",
        &found.where_self(&is_text, &Tensor::zeros_like(&found)),
        &wanted["hidden"],
        TOLERANCE,
    );
    // Each head's distance biases matter, near and far: with another head's, the states differ.
    let shuffled: Vec<Tensor> = weights
        .iter()
        .zip(&encoder.unit().params)
        .map(|(weight, spec)| match spec.name.contains("relative_attention_bias") {
            true => weight.flip([0]),
            false => weight.shallow_clone(),
        })
        .collect();
    let others = encoder.encode(&shuffled, &wanted["tokens"], None).unwrap();
    assert!((others - found).abs().max().double_value(&[]) > 0.1);
}

#[test]
fn states_and_vectors_of_clips_equal_transformers() {
    let wanted = tensors("sd3/encoders.safetensors");
    for (number, name) in ["sd3/text_encoder", "sd3/text_encoder_2"].into_iter().enumerate() {
        let folder = ClipTextFolder::open(&golden(name), None).unwrap();
        let encoder = TextEncoder::new(folder.config().clone(), folder.projection_dim()).unwrap();
        let weights = weights(&folder, encoder.unit(), Kind::Float);
        let get = |what: &str| &wanted[&format!("clip.{number}.{what}")];
        let found = encoder.encode(&weights, get("tokens"), 0).unwrap();
        assert_close(&format!("{name}: hidden"), &found.hidden, get("hidden"), TOLERANCE);
        assert_close(&format!("{name}: pooled"), &found.pooled, get("pooled"), TOLERANCE);
    }
}

#[test]
fn states_in_16_bits_are_near() {
    let wanted = tensors("sd3/encoders.safetensors");
    let (encoder, weights) = t5("sd3/text_encoder_3", Kind::BFloat16);
    let found = encoder.encode(&weights, &wanted["t5.tokens"], None).unwrap();
    assert_eq!(found.kind(), Kind::BFloat16);
    let apart = (found.to_kind(Kind::Float) - &wanted["t5.hidden"]).abs().mean(Kind::Float);
    assert!(apart.double_value(&[]) < 0.02, "{apart}");
}

/// Copies a folder, to be changed.
fn copied(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// Asserts the error for a folder whose `config.json` has `to` instead of `from`.
fn check_config<E: ToString>(
    name: &str,
    open: impl Fn(&Path) -> Result<(), E>,
    (from, to): (&str, &str),
    words: &str,
) {
    let folder = copied(name);
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(&config, text.replace(from, to)).unwrap();
    let error = open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains(words), "{error}");
}

#[test]
fn an_encoder_of_t5_that_cannot_be_used_is_named() {
    let open = |path: &Path| T5Folder::open(path, None).map(drop);
    let check = |change, words| check_config("sd3/text_encoder_3", open, change, words);
    check(("\"t5\"", "\"bart\""), "`model_type` is `bart`, must be t5 or umt5");
    check(("\"gated-gelu\"", "\"relu\""), "`feed_forward_proj` is `relu`");
    check(("_num_buckets\": 8", "_num_buckets\": 6"), "`relative_attention_num_buckets` is 6");
    check(("_max_distance\": 11", "_max_distance\": 2"), "`relative_attention_max_distance` is 2");
    check(("\"pad_token_id\": 0", "\"pad_token_id\": 63"), "`pad_token_id` is 63, no token");
    let folder = copied("sd3/text_encoder_3");
    fs::remove_file(folder.path().join("model-00003-of-00005.safetensors")).unwrap();
    assert!(open(folder.path()).unwrap_err().to_string().contains("model-00003-of-00005"));
}

#[test]
fn the_embedding_may_have_the_encoders_own_name() {
    let folder = copied("wan/text_encoder");
    let path = folder.path().join("model.safetensors");
    let own = "encoder.embed_tokens.weight";
    let read = Tensor::read_safetensors(&path).unwrap();
    let named: Vec<(&str, &Tensor)> = read
        .iter()
        .map(|(name, tensor)| (if name == T5Encoder::EMBEDDING { own } else { name.as_str() }, tensor))
        .collect();
    Tensor::write_safetensors(&named, &path).unwrap();
    T5Folder::open(folder.path(), None).unwrap();
    let embedding = &read.iter().find(|(name, _)| name == T5Encoder::EMBEDDING).unwrap().1;
    let other = embedding + 1;
    let mut both: Vec<(&str, &Tensor)> = read.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    both.push((own, embedding));
    Tensor::write_safetensors(&both, &path).unwrap();
    T5Folder::open(folder.path(), None).unwrap();
    both.pop();
    both.push((own, &other));
    Tensor::write_safetensors(&both, &path).unwrap();
    let error = T5Folder::open(folder.path(), None).unwrap_err().to_string();
    assert!(error.contains("`encoder.embed_tokens.weight` differs from `shared.weight`"), "{error}");
}

/// Returns the folder of the tiny model `name` with the golden text encoders.
fn model(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let transformer = golden("..").join(format!("tiny_{name}/model/transformer/config.json"));
    fs::create_dir(folder.path().join("transformer")).unwrap();
    fs::copy(transformer, folder.path().join("transformer/config.json")).unwrap();
    for part in ["text_encoder", "text_encoder_2", "text_encoder_3"] {
        let from = golden(name).join(part);
        if from.exists() {
            std::os::unix::fs::symlink(fs::canonicalize(from).unwrap(), folder.path().join(part)).unwrap();
        }
    }
    folder
}

#[test]
fn encoders_fit_the_transformer_beside_them_or_say_why_not() {
    let (sd3, wan) = (model("sd3"), model("wan"));
    assert!(matches!(
        TextEncoderFolders::open(sd3.path(), None).unwrap(),
        TextEncoderFolders::Sd3 { t5: Some(_), width: 12, .. }
    ));
    assert!(matches!(TextEncoderFolders::open(wan.path(), None).unwrap(), TextEncoderFolders::Wan { .. }));
    let check = |model: &Path, (from, to): (&str, &str), file: &str, words: &str| {
        let config = model.join("transformer/config.json");
        let text = fs::read_to_string(&config).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&config, text.replace(from, to)).unwrap();
        let error = TextEncoderFolders::open(model, None).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(words), "{error}");
        fs::write(&config, text).unwrap();
    };
    let wide = ("\"joint_attention_dim\": 12", "\"joint_attention_dim\": 16");
    check(sd3.path(), wide, "text_encoder_3/config.json", "`d_model` is 12");
    let narrow = ("\"joint_attention_dim\": 12", "\"joint_attention_dim\": 9");
    check(sd3.path(), narrow, "text_encoder_2/config.json", "`hidden_size` is 6, and 4 in text_encoder");
    let pooled = ("\"pooled_projection_dim\": 10", "\"pooled_projection_dim\": 12");
    check(sd3.path(), pooled, "text_encoder_2/config.json", "`projection_dim` is 7");
    check(wan.path(), ("\"text_dim\": 6", "\"text_dim\": 8"), "text_encoder/config.json", "`d_model` is 6");
    fs::remove_file(sd3.path().join("text_encoder_3")).unwrap();
    let without = TextEncoderFolders::open(sd3.path(), None).unwrap();
    assert!(matches!(without, TextEncoderFolders::Sd3 { t5: None, .. }));
    fs::remove_file(sd3.path().join("text_encoder_2")).unwrap();
    let error = TextEncoderFolders::open(sd3.path(), None).unwrap_err().to_string();
    assert!(error.contains("text_encoder_2/config.json"), "{error}");
    let open = |path: &Path| ClipTextFolder::open(path, None).map(drop);
    let check = |change, words| check_config("sd3/text_encoder", open, change, words);
    check(("clip_text_model", "clip"), "`model_type` is `clip`");
    check(("quick_gelu", "relu"), "`hidden_act` is `relu`");
    check(("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 0"), "has no layer");
}

/// Compared with diffusers called with `variant="fp16"`.
#[test]
fn weights_of_a_variant_are_read_where_it_is_asked_for() {
    let open = |model: &Path, variant: Option<&str>| TextEncoderFolders::open(model, variant);
    let own = |model: &tempfile::TempDir, part: &str| {
        // Replaces the link.
        let folder = model.path().join(part);
        fs::remove_file(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        for entry in fs::read_dir(golden("sd3").join(part)).unwrap().map(Result::unwrap) {
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        folder
    };
    let first = |folders: &TextEncoderFolders| {
        let TextEncoderFolders::Sd3 { clips, .. } = folders else { panic!("it is Stable Diffusion 3") };
        let encoder = TextEncoder::new(clips[0].config().clone(), clips[0].projection_dim()).unwrap();
        weights(&clips[0], encoder.unit(), Kind::Float).remove(0)
    };
    let sd3 = model("sd3");
    let error = open(sd3.path(), Some("fp16")).unwrap_err().to_string();
    assert!(error.contains("no folder in it has weights of the variant `fp16`"), "{error}");

    // A single file, next to plain ones in the other folders.
    let clip = own(&sd3, "text_encoder");
    let plain = Tensor::read_safetensors(clip.join("model.safetensors")).unwrap();
    let halves: Vec<_> = plain.iter().map(|(name, it)| (name, (it * 2).to_kind(Kind::Half))).collect();
    Tensor::write_safetensors(&halves, clip.join("model.fp16.safetensors")).unwrap();
    let [of_plain, of_variant] =
        [None, Some("fp16")].map(|variant| first(&open(sd3.path(), variant).unwrap()));
    assert!(largest_difference(&of_variant, &(of_plain * 2)) < 0.01);

    // Several files with an index.
    let t5 = own(&sd3, "text_encoder_3");
    fs::rename(t5.join("model.safetensors.index.json"), t5.join("model.safetensors.index.fp16.json"))
        .unwrap();
    open(sd3.path(), Some("fp16")).unwrap();
    for variant in [None, Some("bf16")] {
        let error = open(sd3.path(), variant).unwrap_err().to_string();
        let words = match variant {
            None => "its weights exist only as the variant `fp16`: request that variant",
            Some(_) => "of the variant `bf16`",
        };
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn embeddings_are_written_a_part_at_a_time_as_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, pooled) in [(ExportDtype::Fp32, true), (ExportDtype::Bf16, true), (ExportDtype::Fp32, false)]
    {
        let path = folder.path().join("prompts.safetensors");
        let kind = if dtype == ExportDtype::Bf16 { Kind::BFloat16 } else { Kind::Float };
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
        let (tokens, wholes) = (random(&[6, 3, 4]), random(&[6, 5]));
        let whole = |first: i64, count: i64| pooled.then(|| wholes.narrow(0, first, count));
        let widths = TextWidths { token: 4, pooled: pooled.then_some(5) };
        let shape = EmbeddingsShape { count: 5, tokens: 3, widths };
        let mut writer = TextEmbeddingsWriter::create(&path, shape, dtype).unwrap();
        // In any order; the third row's text is also the fifth's.
        for (first, places) in [(2, vec![vec![2, 4], vec![3]]), (0, vec![vec![0], vec![1]])] {
            writer.put(&places, &tokens.narrow(0, first, 2), whole(first, 2).as_ref()).unwrap();
        }
        let rows = Tensor::from_slice(&[0i64, 1, 2, 3, 2]);
        assert!(!path.exists(), "the file has a temporary name until it is complete");
        writer.finish(&tokens.narrow(0, 5, 1), whole(5, 1).as_ref()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let texts = TextEmbeddings::open(&path, widths).unwrap();
        assert!(texts.count() == 5 && texts.has_negative());
        let read: HashMap<String, Tensor> = Tensor::read_safetensors(&path).unwrap().into_iter().collect();
        assert_eq!(read.len(), if pooled { 4 } else { 2 });
        assert!(read["prompt_embeds"].equal(&tokens.index_select(0, &rows)));
        assert!(read["negative_prompt_embeds"].equal(&tokens.narrow(0, 5, 1)));
        if pooled {
            assert!(read["pooled_prompt_embeds"].equal(&wholes.index_select(0, &rows)));
            assert!(read["negative_pooled_prompt_embeds"].equal(&wholes.narrow(0, 5, 1)));
        }
        let error = TextEmbeddingsWriter::create(&path, shape, dtype).unwrap_err().to_string();
        assert!(error.contains("prompts.safetensors"), "{error}");
        fs::remove_file(&path).unwrap();
        let mut writer = TextEmbeddingsWriter::create(&path, shape, dtype).unwrap();
        let broken = (&tokens / 0.0).narrow(0, 0, 2);
        let error = writer.put(&[vec![0], vec![1]], &broken, whole(0, 2).as_ref()).unwrap_err();
        assert!(error.to_string().contains("`prompt_embeds` has values that are not finite"), "{error}");
        drop(writer);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
