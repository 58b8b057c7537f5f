//! GGUF files, compared with folders whose values are those of llama.cpp's Python package:
//! tests/python/make_gguf_golden.py.

use std::fs;
use std::path::{Path, PathBuf};

use anyroll_models::hf::{ModelFolder, PublishedFiles};
use anyroll_models::init::WeightSource;
use anyroll_models::{Decoder, Model, RopeScaling};
use tch::Device;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf").join(name)
}

#[test]
fn a_file_of_every_type_is_bitwise_its_folder() {
    let (file, folder) =
        (ModelFolder::open(&golden("llama.gguf")).unwrap(), ModelFolder::open(&golden("llama")).unwrap());
    assert_eq!(file.decoder_config(), folder.decoder_config());
    assert_eq!(file.stop_tokens(), folder.stop_tokens());
    let decoder = Decoder::new(file.decoder_config().clone(), Device::Cpu).unwrap();
    for spec in decoder.units().iter().flat_map(|unit| &unit.params) {
        let count = spec.elements();
        // Ranges of ranks begin and end within blocks and within rows of heads.
        for range in [0..count, 1..2, count / 3..count / 3 * 2 + 1, count - 1..count, 5..count / 2] {
            let read = |source: &ModelFolder| {
                let mut values = vec![f32::NAN; range.len()];
                source.read(spec, range.clone(), &mut values).unwrap();
                values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert!(read(&file) == read(&folder), "{} differs in {range:?}", spec.name);
        }
    }
}

#[test]
fn factors_of_rotations_become_the_scaling_of_llama_3_1() {
    let folder = ModelFolder::open_shape(&golden("llama3.gguf")).unwrap();
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192.0,
    };
    assert_eq!(folder.decoder_config().rope_scaling, expected);
    let bytes = fs::read(golden("llama3.gguf")).unwrap();
    let (scratch, factors) = (tempfile::tempdir().unwrap(), 8_f32.to_le_bytes());
    let path = scratch.path().join("other.gguf");
    fs::write(&path, replaced(&bytes, &factors, &7_f32.to_le_bytes())).unwrap();
    let error = ModelFolder::open_shape(&path).unwrap_err().to_string();
    assert!(error.contains("other.gguf: tensor `rope_freqs.weight`"), "{error}");
}

#[test]
fn a_folder_may_have_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |to: &str| fs::copy(golden("llama.gguf"), folder.path().join(to)).unwrap();
    copy("model-q4.gguf");
    assert!(ModelFolder::is_at(folder.path()));
    let opened = ModelFolder::open(folder.path()).unwrap();
    assert_eq!(opened.decoder_config().num_hidden_layers, 3);
    copy("model-q8.GGUF");
    let error = ModelFolder::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("name one of them, such as model-q4.gguf, model-q8.GGUF"), "{error}");
}

#[test]
fn a_tokenizer_beside_the_file_replaces_the_metadata() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::copy(golden("llama.gguf"), &path).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    let files = PublishedFiles::open(&path).unwrap();
    // Alone it may belong to another model.
    assert!(files.read("tokenizer_config.json").unwrap().len() > 2);
    fs::write(folder.path().join("tokenizer.json"), "beside").unwrap();
    let files = PublishedFiles::open(&path).unwrap();
    assert_eq!(&*files.read("tokenizer.json").unwrap(), b"beside");
    assert_eq!(&*files.read("tokenizer_config.json").unwrap(), b"{}");
    assert_eq!(files.copied(&["tokenizer.json"]), [folder.path().join("tokenizer.json")]);
    assert!(files.made(&["tokenizer.json", "tokenizer_config.json"]).is_empty());
}

/// Returns `bytes` with `to` in place of the last `from`, of the same length.
fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let at = bytes.windows(from.len()).rposition(|it| it == from).expect("it is there");
    bytes.splice(at..at + from.len(), to.iter().copied());
    bytes
}

/// Returns `bytes` with a number of 32 or 64 bits, `skipped` bytes behind the name `name`.
fn with_number(bytes: &[u8], name: &str, skipped: usize, number: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let at = bytes.windows(name.len()).position(|it| it == name.as_bytes()).expect("it is there");
    let at = at + name.len() + skipped;
    bytes[at..at + number.len()].copy_from_slice(number);
    bytes
}

#[test]
fn damaged_and_other_files_are_told_by_key_or_tensor() {
    let good = fs::read(golden("llama.gguf")).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("a.gguf");
    let check = |bytes: &[u8], words: &[&str]| {
        fs::write(&path, bytes).unwrap();
        let error = ModelFolder::open(&path).unwrap_err().to_string();
        assert!(
            words.iter().all(|word| error.contains(word)) && error.contains("a.gguf"),
            "{error}: {words:?}"
        );
    };
    check(b"GG", &["does not begin with `GGUF`"]);
    check(b"version https://git-lfs.github.com/spec/v1\n", &["git lfs pull"]);
    check(&good[..10], &["ends within its header"]);
    check(&good[..good.len() - 1], &["tensor `", "ends behind the file's", "download it again"]);
    check(&replaced(&good, b"llama.block_count", b"llama.bl0ck_count"), &["`llama.bl0ck_count` is set"]);
    let (version, count) = (1_u32.to_le_bytes(), (1_u64 << 60).to_le_bytes());
    check(&with_number(&good, "GGUF", 0, &version), &["version 1"]);
    check(&with_number(&good, "GGUF", 4, &count), &["tensors, more than"]);
    check(&with_number(&good, "GGUF", 12, &count), &["keys, more than"]);
    // A list's type and the type of its items come before its count.
    let tokens = "tokenizer.ggml.tokens";
    check(&with_number(&good, tokens, 8, &count), &["items of `tokenizer.ggml.tokens`, more than"]);
    // A matrix has a count of dimensions, both, its type and its offset.
    let (up, kind, offset) = ("blk.0.ffn_up.weight", 17_u32.to_le_bytes(), 0_u64.to_le_bytes());
    check(
        &with_number(&good, up, 20, &kind),
        &["`blk.0.ffn_up.weight` has the type 17 (an IQ type)", "Q4_K"],
    );
    check(&with_number(&good, up, 24, &offset), &["begins within `"]);
    check(&with_number(&good, up, 4, &count), &["`blk.0.ffn_up.weight`", "ends behind"]);
    check(
        &with_number(&good, "llama.attention.head_count", 4, &3_u32.to_le_bytes()),
        &["`llama.rope.dimension_count` is 8", "must be 10"],
    );
    check(
        &replaced(&good, b"blk.2.ffn_up.weight", b"blk.2.ffn_xp.weight"),
        &["mlp.up_proj.weight", "is missing"],
    );
    let pre = replaced(&good, b"tokenizer.ggml.pre", b"tokenizer.ggml.prx");
    check(
        &pre,
        &["`tokenizer.ggml.pre` is missing", "put the published model's tokenizer.json beside the file"],
    );
    let architecture = with_number(&good, "general.architecture", 12, b"mamba");
    check(&architecture, &["mamba", "llama, qwen2, qwen3"]);
}
