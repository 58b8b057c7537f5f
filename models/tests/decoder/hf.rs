//! Folders written by `transformers`, compared with its results: tiny models of every family.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyroll_close::assert_close;
use anyroll_models::hf::{ExportDtype, FolderContents, FolderKind, ModelFolder, config_file, write_folder};
use anyroll_models::init::WeightSource;
use anyroll_models::{Decoder, Model, PackedBatch, SamplingParams, Sequence};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::holder::Holder;

const FAMILIES: [&str; 35] = [
    "qwen2",
    "qwen2_tied_yarn",
    "qwen2_window",
    "qwen3",
    "qwen3_biased",
    "qwen3_moe",
    "qwen3_moe_unnormed",
    "llama2",
    "llama3_sharded",
    "llama_linear",
    "llama_biased",
    "mistral",
    "mistral_window",
    "mixtral",
    "mixtral_window",
    "smollm3",
    "smollm3_window",
    "olmo2",
    "olmo3",
    "olmo3_biased",
    "olmoe",
    "olmoe_biased",
    "granite",
    "granite_biased",
    "phi3",
    "phi3_window",
    "phi3_partial",
    "phi3_longrope",
    "phi3_longrope_partial",
    "gemma3",
    "gemma3_scaled",
    "glm4",
    "glm4_unbiased",
    "deepseek_v3",
    "deepseek_v3_plain",
];

/// Tolerance of each value, relative to the largest of its tensor if that is above 1.
const TOLERANCE: f64 = 1e-4;

/// Padding of golden prompts and completions.
const NONE: i64 = 255;

/// A family's model, and the results of `transformers`.
struct Family {
    name: &'static str,
    folder: ModelFolder,
    golden: HashMap<String, Tensor>,
}

fn families() -> impl Iterator<Item = Family> {
    FAMILIES.into_iter().map(|name| {
        let golden = Tensor::read_safetensors(path(name).join("golden.safetensors")).unwrap();
        let folder = ModelFolder::open(&path(name)).unwrap();
        Family { name, folder, golden: golden.into_iter().collect() }
    })
}

impl Family {
    fn holder(&self, kind: Kind) -> Holder {
        let decoder = Decoder::new(self.folder.decoder_config().clone(), Device::Cpu).unwrap();
        Holder::from_source(decoder, &self.folder, kind)
    }

    fn integers(&self, which: &str) -> Vec<i64> {
        self.golden[which].to_kind(Kind::Int64).flatten(0, -1).try_into().unwrap()
    }

    /// Returns the rows of a padded matrix.
    fn rows(&self, which: &str) -> Vec<Vec<i64>> {
        let width = self.golden[which].size()[1] as usize;
        let row = |row: &[i64]| row.iter().copied().take_while(|&token| token != NONE).collect();
        self.integers(which).chunks(width).map(row).collect()
    }

    fn sequences(&self) -> Vec<(Vec<i64>, usize)> {
        let tokens = self.integers("tokens");
        let mut rest = tokens.as_slice();
        let mut cut = |length: i64| {
            let (sequence, after) = rest.split_at(length as usize);
            rest = after;
            sequence.to_vec()
        };
        let prompt_lens = self.integers("prompt_lens").into_iter().map(|len| len as usize);
        self.integers("lengths").into_iter().map(&mut cut).zip(prompt_lens).collect()
    }

    #[track_caller]
    fn assert_close(&self, what: &str, found: &Tensor, expected: &Tensor) {
        assert_close(&format!("{}: {what}", self.name), found, expected, TOLERANCE);
    }
}

/// Sequences are packed here and run one at a time in `transformers`, so packing is tested, too.
#[test]
fn scores_and_gradients_equal_transformers() {
    for family in families() {
        let mut holder = family.holder(Kind::Float);
        let batch = pack(&family.sequences());
        let (scores, saved) = holder.forward(&batch, true);
        family.assert_close("logprobs", &scores.logprobs, &family.golden["logprobs"]);
        holder.backward(&batch, saved, family.golden["d_logprobs"].shallow_clone(), None);
        for (unit, grads) in holder.decoder.units().iter().zip(&holder.grads) {
            for (spec, grad) in unit.params.iter().zip(grads.views()) {
                let mut row = 0;
                for part in &spec.parts {
                    let expected = &family.golden[&format!("grad.{}", part.name)];
                    family.assert_close(&part.name, &grad.narrow(0, row, part.rows), expected);
                    row += part.rows;
                }
            }
        }
    }
}

/// Compares every token's log-prob after each sequence with the softmax of the reference's logits.
#[test]
fn whole_distributions_equal_transformers() {
    for family in families() {
        let holder = family.holder(Kind::Float);
        let vocab_size = family.folder.decoder_config().vocab_size;
        let continued: Vec<(Vec<i64>, usize)> = family
            .sequences()
            .iter()
            .flat_map(|(tokens, _)| {
                (0..vocab_size).map(|token| ([tokens.as_slice(), &[token]].concat(), tokens.len()))
            })
            .collect();
        let found = holder.forward(&pack(&continued), false).0.logprobs.view([-1, vocab_size]);
        let expected = family.golden["logits"].log_softmax(-1, None);
        family.assert_close("logits", &found, &expected);
    }
}

#[test]
fn bfloat16_is_as_near_as_that_of_transformers() {
    for family in families() {
        let batch = pack(&family.sequences());
        let found = family.holder(Kind::BFloat16).forward(&batch, false).0.logprobs;
        let exact = &family.golden["logprobs"];
        let error = |found: &Tensor| (found - exact).square().mean(None).sqrt().double_value(&[]);
        let (ours, theirs) = (error(&found), error(&family.golden["bf16_logprobs"]));
        assert!(ours <= 1.5 * theirs, "{}: {ours} is above 1.5 x {theirs}", family.name);
    }
}

#[test]
fn greedy_generation_equals_transformers() {
    for family in families() {
        let holder = family.holder(Kind::Float);
        let (prompts, expected) = (family.rows("generate_prompts"), family.rows("generate_completions"));
        assert_eq!(family.folder.stop_tokens(), [1]);
        let params = SamplingParams {
            temperature: 0.0,
            max_new_tokens: 16,
            stop_tokens: family.folder.stop_tokens().to_vec(),
            ..SamplingParams::default()
        };
        let run = |prompts: &[Vec<i64>]| -> Vec<Vec<i64>> {
            let completions = crate::generation::run(&holder, prompts, &params, &vec![0; prompts.len()]);
            completions.into_iter().map(|completion| completion.tokens).collect()
        };
        assert_eq!(run(&prompts), expected, "{}: in one batch", family.name);
        for (prompt, expected) in prompts.iter().zip(&expected).step_by(10) {
            assert_eq!(run(std::slice::from_ref(prompt)).remove(0), *expected, "{}: alone", family.name);
        }
    }
}

#[test]
fn ranges_are_parts_of_the_whole() {
    for family in families() {
        for spec in family.holder(Kind::Float).decoder.units().iter().flat_map(|unit| &unit.params) {
            let read = |range: std::ops::Range<usize>| {
                let mut values = vec![f32::NAN; range.len()];
                family.folder.read(spec, range, &mut values).unwrap();
                values
            };
            let whole = read(0..spec.elements());
            for cut in [1, spec.elements() / 3, spec.elements() - 1] {
                assert_eq!([read(0..cut), read(cut..spec.elements())].concat(), whole, "{}", spec.name);
            }
        }
    }
}

#[test]
fn an_exported_folder_is_the_same_model() {
    let scratch = tempfile::tempdir().unwrap();
    for family in families() {
        let holder = family.holder(Kind::Float);
        for (name, dtype, kind) in [
            ("fp32", ExportDtype::Fp32, Kind::Float),
            ("bf16", ExportDtype::Bf16, Kind::BFloat16),
            ("fp16", ExportDtype::Fp16, Kind::Half),
        ] {
            let to = scratch.path().join(family.name).join(name);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            let contents = FolderContents {
                kind: FolderKind::Model,
                config: config_file(family.folder.decoder_config(), family.folder.stop_tokens()).unwrap(),
                copied: &[],
                made: &[("note.txt", b"made".to_vec())],
                units: holder.decoder.units(),
                weights: &family.folder,
                dtype,
            };
            write_folder(&to, &contents).unwrap();
            let error = write_folder(&to, &contents).unwrap_err();
            assert!(error.to_string().contains("cannot write"), "{error}");

            let back = ModelFolder::open(&to).unwrap();
            assert_eq!(back.decoder_config(), family.folder.decoder_config(), "{}", family.name);
            assert_eq!(back.stop_tokens(), family.folder.stop_tokens());
            assert_eq!(fs::read(to.join("note.txt")).unwrap(), b"made");
            let decoder = Decoder::new(back.decoder_config().clone(), Device::Cpu).unwrap();
            let found = Holder::from_source(decoder, &back, Kind::Float);
            let specs = holder.decoder.units().iter().flat_map(|unit| &unit.params);
            let weights = holder.weights.iter().flatten().zip(specs);
            for (found, (weight, spec)) in found.weights.iter().flatten().zip(weights) {
                // The values in files are rounded.
                let offset = f64::from(spec.offset);
                let expected = (weight - offset).to_kind(kind).to_kind(Kind::Float) + offset;
                assert_eq!(*found, expected, "{} {name}", family.name);
            }
        }
    }
}

/// Writes the folder of a family with its `tensors` changed by `change`.
fn changed(family: &str, to: &Path, change: impl FnOnce(&mut Vec<(String, Tensor)>)) {
    fs::create_dir_all(to).unwrap();
    let mut tensors = Tensor::read_safetensors(path(family).join("model.safetensors")).unwrap();
    change(&mut tensors);
    Tensor::write_safetensors(&tensors, to.join("model.safetensors")).unwrap();
    fs::copy(path(family).join("config.json"), to.join("config.json")).unwrap();
}

/// A file may hold each tensor in a precision of its own, and tensors that follow from others.
#[test]
fn tensors_of_several_precisions_and_derived_ones_are_read() {
    let scratch = tempfile::tempdir().unwrap();
    let family = families().find(|family| family.name == "qwen3").unwrap();
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
    let mut expected = Vec::new();
    changed("qwen3", scratch.path(), |tensors| {
        for (index, (name, tensor)) in tensors.iter_mut().enumerate() {
            *tensor = tensor.to_kind(kinds[index % 3]);
            expected.push((name.clone(), tensor.to_kind(Kind::Float)));
        }
        // A tied head that is there and equal, and the frequencies that older versions of transformers wrote.
        let embedding = tensors.iter().find(|(name, _)| name == "model.embed_tokens.weight").unwrap();
        let head = ("lm_head.weight".to_owned(), embedding.1.copy());
        tensors.retain(|(name, _)| *name != head.0);
        tensors.push(head);
        let frequencies = Tensor::ones([4], (Kind::Float, Device::Cpu));
        tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), frequencies));
    });
    let folder = ModelFolder::open(scratch.path()).unwrap();
    let decoder = Decoder::new(folder.decoder_config().clone(), Device::Cpu).unwrap();
    let found = Holder::from_source(decoder, &folder, Kind::Float);
    let specs = found.decoder.units().iter().flat_map(|unit| &unit.params);
    let mut compared = 0;
    for (found, spec) in found.weights.iter().flatten().zip(specs) {
        if let [part] = &spec.parts[..] {
            let (_, expected) = expected.iter().find(|(name, _)| *name == part.name).unwrap();
            assert_eq!(*found, expected + f64::from(spec.offset), "{}", part.name);
            compared += 1;
        }
    }
    assert!(compared > 4, "{compared} tensors were compared");
    assert_eq!(folder.decoder_config(), family.folder.decoder_config());

    let wide = scratch.path().join("wide");
    changed("qwen3", &wide, |tensors| {
        let (_, norm) = tensors.iter_mut().find(|(name, _)| name == "model.norm.weight").unwrap();
        *norm = norm.to_kind(Kind::Double);
    });
    let error = ModelFolder::open(&wide).unwrap_err().to_string();
    let words = ["model.safetensors", "`model.norm.weight` is F64, must be F32, BF16 or F16"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

/// A file of weights beside an index is of another version: the index counts.
#[test]
fn the_files_of_an_index_are_read_though_another_lies_beside() {
    let scratch = copied("llama3_sharded");
    fs::write(scratch.path().join("model.safetensors"), "not read").unwrap();
    let open = |path: &Path| {
        let folder = ModelFolder::open(path).unwrap();
        let decoder = Decoder::new(folder.decoder_config().clone(), Device::Cpu).unwrap();
        Holder::from_source(decoder, &folder, Kind::Float).weights
    };
    assert_eq!(open(scratch.path()), open(&path("llama3_sharded")));
}

/// Writes the folder of a family with renamed tensors and another architecture.
fn renamed(family: &str, to: &Path, architecture: &str, rename: impl Fn(&str) -> Option<String>) {
    changed(family, to, |tensors| {
        let named = tensors.drain(..).filter_map(|(name, tensor)| Some((rename(&name)?, tensor)));
        *tensors = named.collect();
    });
    set_field(to, "architectures", json!([architecture]));
}

fn set_field(folder: &Path, field: &str, value: Value) {
    let file = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config[field] = value;
    fs::write(&file, config.to_string()).unwrap();
}

/// Returns a copy of the folder of a family.
fn copied(family: &str) -> tempfile::TempDir {
    let scratch = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(path(family)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), scratch.path().join(entry.file_name())).unwrap();
    }
    scratch
}

#[test]
fn names_of_base_models_and_wrapped_ones_are_read() {
    let scratch = tempfile::tempdir().unwrap();
    let without = |prefix: &'static str| move |name: &str| Some(name.replacen(prefix, "", 1));
    let wrapped = |name: &str| Some(format!("_orig_mod.module.{name}"));
    // A tied model, so that a base model is complete.
    let family = families().find(|family| family.name == "qwen3").unwrap();
    let [base, module] = ["base", "module"].map(|name| scratch.path().join(name));
    renamed("qwen3", &base, "Qwen3Model", without("model."));
    renamed("qwen3", &module, "Qwen3ForCausalLM", wrapped);
    for folder in [base, module] {
        let folder = ModelFolder::open(&folder).unwrap();
        assert_eq!(folder.config_file()["architectures"], json!(["Qwen3ForCausalLM"]));
        let decoder = Decoder::new(folder.decoder_config().clone(), Device::Cpu).unwrap();
        let holder = Holder::from_source(decoder, &folder, Kind::Float);
        let found = holder.forward(&pack(&family.sequences()), false).0.logprobs;
        family.assert_close("logprobs", &found, &family.golden["logprobs"]);
    }
    let check = |name: &str, family: &str, rename: &dyn Fn(&str) -> Option<String>, expected: &str| {
        let to = scratch.path().join(name);
        renamed(family, &to, "Qwen2Model", rename);
        let error = ModelFolder::open(&to).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} has not {expected}");
    };
    let headless = |name: &str| name.strip_prefix("model.").map(str::to_owned);
    check("untied", "qwen2", &headless, "`lm_head.weight` is missing");
    let adapted = |name: &str| Some(format!("base_model.model.{name}"));
    check("adapted", "qwen2", &adapted, "merge the adapter first");
}

#[test]
fn broken_folders_are_refused_by_name() {
    type Damage<'a> = &'a dyn Fn(&Path);
    let check = |family: &str, damage: Damage, expected: &[&str]| {
        let scratch = copied(family);
        damage(scratch.path());
        let message = ModelFolder::open(scratch.path()).unwrap_err().to_string();
        assert!(expected.iter().all(|word| message.contains(word)), "{message} has not {expected:?}");
    };
    let set =
        |field: &'static str, value: Value| move |folder: &Path| set_field(folder, field, value.clone());
    let (weights, index) = ("model.safetensors", "model.safetensors.index.json");
    check(
        "qwen2",
        &|folder| fs::remove_file(folder.join("config.json")).unwrap(),
        &["cannot read", "config.json"],
    );
    check(
        "qwen2",
        &|folder| fs::write(folder.join("config.json"), "{").unwrap(),
        &["cannot parse", "config.json"],
    );
    check(
        "qwen2",
        &|folder| fs::write(folder.join("config.json"), "\u{feff}{}").unwrap(),
        &["cannot parse", "config.json (it begins with a byte order mark"],
    );
    check(
        "qwen2",
        &|folder| fs::write(folder.join("config.json"), "{\n\"rms_norm_eps\": Infinity}").unwrap(),
        &["cannot parse", "config.json (NaN and Infinity are values of Python"],
    );
    check("qwen2", &|folder| fs::remove_file(folder.join(weights)).unwrap(), &["cannot read", weights]);
    check(
        "qwen2",
        &set("architectures", json!(["Gemma2ForCausalLM"])),
        &["Gemma2ForCausalLM", "Qwen2ForCausalLM"],
    );
    check("qwen2", &set("num_hidden_layers", json!(3)), &["model.layers.2.", "is missing"]);
    check("qwen2", &set("num_hidden_layers", json!(1)), &["model.layers.1.", "not part of the model"]);
    check("qwen2", &set("vocab_size", json!(41)), &["has shape [40, 16]", "[41, 16]"]);
    check("llama2", &set("architectures", json!(["Qwen2ForCausalLM"])), &["k_proj.bias", "is missing"]);
    check(
        "llama3_sharded",
        &set("tie_word_embeddings", json!(true)),
        &["`lm_head.weight` differs from", "`tie_word_embeddings`", "to false"],
    );
    let shorten = |folder: &Path| {
        let file = folder.join(weights);
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    };
    check("qwen2", &shorten, &["model.safetensors is broken", "its header describes"]);
    check(
        "qwen2",
        &|folder| fs::write(folder.join(weights), "short").unwrap(),
        &["is broken: it has 5 bytes"],
    );
    let damage = |folder: &Path| {
        let file = folder.join(weights);
        let mut bytes = fs::read(&file).unwrap();
        bytes[9] = b'!';
        fs::write(&file, bytes).unwrap();
    };
    check("qwen2", &damage, &["is broken: its header is wrong"]);
    let rename = |from: &'static str, to: &'static str| {
        move |folder: &Path| {
            let file = folder.join(index);
            fs::write(&file, fs::read_to_string(&file).unwrap().replace(from, to)).unwrap();
        }
    };
    check("llama3_sharded", &rename("model-00001", "model-00009"), &["cannot read", "model-00009"]);
    check("llama3_sharded", &rename("\"model-00001", "\"../model-00001"), &["is broken", "`../model-00001"]);
    check("llama3_sharded", &rename("\"lm_head.weight", "\"head"), &["is broken", "`head` is not in"]);
}

/// `transformers` would rotate such a text by the long factors, from its first token on.
#[test]
fn texts_beyond_the_short_factors_of_longrope_are_refused() {
    let folder = ModelFolder::open(&path("phi3_longrope")).unwrap();
    let decoder = Decoder::new(folder.decoder_config().clone(), Device::Cpu).unwrap();
    let holder = Holder::from_source(decoder, &folder, Kind::Float);
    let forward = |len: usize| {
        let batch = pack(&[(vec![3; len], 1)]);
        holder.with_weights(0, |weights| holder.decoder.forward(0, weights, None, &batch, false).map(drop))
    };
    forward(64).unwrap();
    // The last token of a text is never an input.
    forward(65).unwrap();
    let error = forward(66).unwrap_err().to_string();
    let expected = "of 65 tokens is longer than max_position_embeddings = 64, its `original_max_position_embeddings`: longer";
    assert!(error.contains(expected), "{error}");
}

fn pack(sequences: &[(Vec<i64>, usize)]) -> PackedBatch {
    let sequences: Vec<Sequence> =
        sequences.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
    PackedBatch::new(&sequences, 1.0, Device::Cpu).unwrap()
}

fn path(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf").join(family)
}
