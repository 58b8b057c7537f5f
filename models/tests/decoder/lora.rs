//! Adapters compared with PEFT: tests/python/make_lora_golden.py.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyroll_close::{assert_close, largest_difference};
use anyroll_models::hf::{
    AdapterFolder, Adapters, ExportDtype, FolderContents, FolderKind, Merged, ModelFolder, NewAdapter,
    WithAdapter, adapter_config_file, write_folder,
};
use anyroll_models::init::{self, Seed, WeightSource};
use anyroll_models::model::Part;
use anyroll_models::{
    Decoder, LoraConfig, LoraTarget, LoraTargets, Model, PackedBatch, ParamSpec, SamplingParams, Sequence,
};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::generation;
use crate::holder::Holder;

const TOLERANCE: f64 = 1e-4;

struct Golden {
    base: ModelFolder,
    adapter: AdapterFolder,
    /// Results of the model alone, and with the adapter.
    alone: HashMap<String, Tensor>,
    adapted: HashMap<String, Tensor>,
}

/// Returns the golden files of an adapter with one rank and alpha.
fn golden() -> Golden {
    golden_of("lora")
}

fn golden_of(name: &str) -> Golden {
    let tensors = |path: &str| {
        Tensor::read_safetensors(folder(path).join("golden.safetensors")).unwrap().into_iter().collect()
    };
    let config = fs::read(folder(name).join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let path = format!("hf/{}", config["base_model_name_or_path"].as_str().unwrap());
    let base = ModelFolder::open(&folder(&path)).unwrap();
    let adapter = AdapterFolder::open(&folder(name), base.decoder_config()).unwrap();
    Golden { base, adapter, alone: tensors(&path), adapted: tensors(name) }
}

impl Golden {
    fn decoder(&self) -> Decoder {
        let config = self.base.decoder_config().clone();
        Decoder::with_lora(config, self.adapter.lora_config(), Device::Cpu).unwrap()
    }

    fn holder(&self, kind: Kind) -> Holder {
        let source = WithAdapter { base: &self.base, adapter: &self.adapter };
        Holder::from_source(self.decoder(), &source, kind)
    }

    fn batch(&self) -> PackedBatch {
        let all = self.sequences();
        let sequences: Vec<Sequence> =
            all.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
        PackedBatch::new(&sequences, 1.0, Device::Cpu).unwrap()
    }

    /// Returns tokens, and the number of prompt tokens.
    fn sequences(&self) -> Vec<(Vec<i64>, usize)> {
        let integers = |which: &str| Vec::<i64>::try_from(&self.alone[which]).unwrap();
        let (tokens, lengths, prompt_lens) =
            (integers("tokens"), integers("lengths"), integers("prompt_lens"));
        let mut rest = tokens.as_slice();
        let sequences = lengths.iter().zip(&prompt_lens).map(|(&length, &prompt_len)| {
            let (tokens, after) = rest.split_at(length as usize);
            rest = after;
            (tokens.to_vec(), prompt_len as usize)
        });
        sequences.collect()
    }
}

#[test]
fn scores_and_gradients_equal_peft() {
    let golden = golden();
    let expected = LoraConfig::new(
        3,
        5.0,
        vec![LoraTarget::Q, LoraTarget::V, LoraTarget::O, LoraTarget::Up, LoraTarget::Down],
    );
    assert_eq!(*golden.adapter.lora_config(), expected);
    check_scores_and_gradients(&golden, 2 * 5);
    let golden = golden_of("lora_patterns");
    let found = golden.adapter.lora_config();
    let ranks: Vec<_> = found.rank_pattern.iter().map(|(pattern, rank)| (pattern.as_str(), *rank)).collect();
    let expected = [("(.*1.self_attn.q)_proj", 5), ("(q|v)_proj", 2), ("model.layers.0.mlp.down_proj", 1)];
    assert_eq!((found.rslora, ranks), (true, expected.to_vec()));
    check_scores_and_gradients(&golden, 2 * 5);
    let golden = golden_of("lora_layers");
    let found = golden.adapter.lora_config();
    let expected = vec![LoraTarget::Q, LoraTarget::V, LoraTarget::Up, LoraTarget::Down];
    assert_eq!(found.targets, LoraTargets::ByLayer([(1, expected)].into()));
    check_scores_and_gradients(&golden, 4);
    let golden = golden_of("lora_unequal");
    let expected =
        vec![vec![LoraTarget::Q, LoraTarget::O], vec![LoraTarget::V, LoraTarget::Up, LoraTarget::Down]];
    assert_eq!(golden.adapter.lora_config().targets, LoraTargets::of_layers(expected));
    check_scores_and_gradients(&golden, 5);
    let golden = golden_of("lora_dora");
    assert!(golden.adapter.lora_config().dora);
    check_scores_and_gradients(&golden, 2 * 7);
    check_scores_and_gradients(&golden_of("lora_olmo3"), 2 * 7);
    check_scores_and_gradients(&golden_of("lora_dora_olmo3"), 4 * 7);
    check_scores_and_gradients(&golden_of("lora_granite"), 2 * 7);
    check_scores_and_gradients(&golden_of("lora_dora_granite"), 3 * 7);
    check_scores_and_gradients(&golden_of("lora_gemma3"), 2 * 7);
    check_scores_and_gradients(&golden_of("lora_dora_gemma3"), 4 * 7);
    let golden = golden_of("lora_phi3");
    let found = golden.adapter.lora_config();
    assert_eq!(found.targets, LoraTargets::Everywhere(LoraTarget::FUSED.to_vec()));
    assert_eq!((found.rslora, found.rank_pattern[0].1), (true, 5));
    check_scores_and_gradients(&golden, 2 * 4);
    check_scores_and_gradients(&golden_of("lora_dora_phi3"), 2 * 4);
    check_scores_and_gradients(&golden_of("lora_deepseek_v3"), (5 + 2) + 2 * (5 + 1));
    check_scores_and_gradients(&golden_of("lora_glm4"), 2 * 5);
    // Of experts, each with its own names in files, and of a layer without experts between them.
    check_scores_and_gradients(&golden_of("lora_qwen3_moe"), 3 * 7);
    check_scores_and_gradients(&golden_of("lora_mixtral"), 2 * 3);
}

/// Compared with PEFT given the same masks.
#[test]
fn scores_and_gradients_under_dropout_equal_peft() {
    check_scores_and_gradients(&golden_of("lora_dropout"), 2 * 5);
    check_scores_and_gradients(&golden_of("lora_dora_dropout"), 2 * 7);
    check_scores_and_gradients(&golden_of("lora_phi3_dropout"), 2 * 2);
    check_scores_and_gradients(&golden_of("lora_dora_phi3_dropout"), 2 * 4);
}

fn check_scores_and_gradients(golden: &Golden, adapters: usize) {
    let (mut holder, batch) = (golden.holder(Kind::Float), golden.keyed(KEYS));
    let (scores, saved) = holder.forward(&batch, true);
    assert_close("logprobs", &scores.logprobs, &golden.adapted["logprobs"], TOLERANCE);
    // Thinned and refilled, like in selective recomputation: the refill includes the adapters.
    let saved = saved.into_iter().enumerate().map(|(block, saved)| {
        let thin = holder.decoder.thin(block, saved);
        holder.with_weights(block, |weights| holder.decoder.refill(block, weights, thin, &batch).unwrap())
    });
    let saved = saved.collect();
    holder.backward(&batch, saved, golden.alone["d_logprobs"].shallow_clone(), None);
    let mut compared = 0;
    for (unit, grads) in holder.decoder.units().iter().zip(&holder.grads) {
        assert_eq!(unit.trainable, unit.name.ends_with(".lora"), "{}", unit.name);
        for (spec, grad) in unit.params.iter().zip(grads.views()).filter(|_| unit.trainable) {
            let part = |part: &Part| &golden.adapted[&format!("grad.{}", part.name)];
            let expected = Tensor::cat(&spec.parts.iter().map(part).collect::<Vec<_>>(), 0);
            assert_close(&spec.name, grad, &expected, TOLERANCE);
            compared += 1;
        }
    }
    let tensors = if golden.adapter.lora_config().dora { 3 } else { 2 };
    assert_eq!(compared, adapters * tensors);
}

impl Golden {
    /// Returns the adapter's model with dropout, and adapters without zeros.
    fn dropping(&self) -> Holder {
        let lora = LoraConfig { dropout: 0.4, ..self.adapter.lora_config().clone() };
        let config = self.base.decoder_config().clone();
        let decoder = Decoder::with_lora(config, &lora, Device::Cpu).unwrap();
        let source = WithAdapter { base: &self.base, adapter: &self.adapter };
        Holder::from_source(decoder, &source, Kind::Float)
    }

    /// Returns a training batch with these keys, one per sequence.
    fn keyed(&self, keys: [u64; 5]) -> PackedBatch {
        self.batch().with_dropout(&keys).unwrap()
    }
}

/// Keys of tests/python/make_lora_golden.py.
const KEYS: [u64; 5] = [9, 1 << 60, 0, 77, 3];

#[test]
fn what_is_dropped_depends_on_a_sequences_key_alone() {
    let golden = golden();
    let holder = golden.dropping();
    let scores = |batch: &PackedBatch| holder.forward(batch, false).0.logprobs;
    let (batch, first) = (golden.keyed(KEYS), scores(&golden.keyed(KEYS)));
    assert!(scores(&batch).equal(&first), "again");
    // Saved, thinned and refilled tensors are bitwise equal.
    for (block, saved) in holder.forward(&batch, true).1.into_iter().enumerate() {
        let whole = saved.tensors();
        let thin = holder.decoder.thin(block, saved);
        let again = holder.with_weights(block, |weights| holder.decoder.refill(block, weights, thin, &batch));
        let again = again.unwrap().tensors();
        assert!(again.iter().zip(&whole).all(|(again, whole)| again.equal(whole)), "block {block}");
    }
    // Other keys drop other values; sequences with equal keys keep theirs.
    let differs = |keys: [u64; 5]| {
        let sequences = golden.sequences();
        let lengths: Vec<i64> =
            sequences.iter().map(|(tokens, prompt_len)| (tokens.len() - prompt_len) as i64).collect();
        let changes = (scores(&golden.keyed(keys)) - &first).abs().split_with_sizes(&lengths, 0);
        changes.iter().map(|it| it.numel() > 0 && it.max().double_value(&[]) > 1e-3).collect::<Vec<bool>>()
    };
    assert_eq!(differs([8, 1 << 60, 1, 77, 3]), [true, false, true, false, false]);
    // Without keys nothing is dropped, like in sampling and scoring.
    let plain = golden.holder(Kind::Float).forward(&golden.batch(), false).0.logprobs;
    assert!(scores(&golden.batch()).equal(&plain));
    assert!(scores(&golden.batch().without_adapters()).equal(&scores(&batch.without_adapters())));
    let error = golden.batch().with_dropout(&[1]).unwrap_err().to_string();
    assert!(error.contains("are 1, must be one for each of 5 sequences"), "{error}");
}

#[test]
fn adapters_that_are_off_leave_the_model_as_it_was() {
    let golden = golden();
    let off = golden.holder(Kind::Float).forward(&golden.batch().without_adapters(), false).0;
    let alone = Decoder::new(golden.base.decoder_config().clone(), Device::Cpu).unwrap();
    let alone = Holder::from_source(alone, &golden.base, Kind::Float).forward(&golden.batch(), false).0;
    assert_eq!(off.logprobs, alone.logprobs);
}

/// In a new adapter one factor is 0, and magnitudes are norms.
#[test]
fn adapters_that_have_just_been_made_change_nothing() {
    for (name, tolerance) in [("lora", 0.0), ("lora_dora", 1e-5)] {
        let golden = golden_of(name);
        let source = NewAdapter { base: &golden.base, seed: Seed(3) };
        let fresh = Holder::from_source(golden.decoder(), &source, Kind::Float);
        let found = fresh.forward(&golden.batch(), false).0.logprobs;
        let off = fresh.forward(&golden.batch().without_adapters(), false).0.logprobs;
        let error = largest_difference(&found, &off);
        assert!(error <= tolerance, "{name}: {error}");
    }
    // A range of magnitudes equals that part of all.
    let golden = golden_of("lora_dora");
    let (source, decoder) = (NewAdapter { base: &golden.base, seed: Seed(3) }, golden.decoder());
    let is_magnitude = |spec: &&ParamSpec| spec.name.ends_with("magnitude_vector");
    for spec in decoder.units().iter().flat_map(|unit| &unit.params).filter(is_magnitude) {
        let whole = init::whole(&source, spec, Kind::Float, Device::Cpu).unwrap();
        let (values, cut) = (Vec::<f32>::try_from(whole).unwrap(), 3..spec.elements() - 2);
        let mut found = vec![f32::NAN; cut.len()];
        source.read(spec, cut.clone(), &mut found).unwrap();
        assert_eq!(found, values[cut], "{}", spec.name);
    }
}

#[test]
fn merged_weights_equal_those_of_peft() {
    check_merged(&golden());
    check_merged(&golden_of("lora_patterns"));
    check_merged(&golden_of("lora_layers"));
    check_merged(&golden_of("lora_unequal"));
    check_merged(&golden_of("lora_dora"));
    check_merged(&golden_of("lora_dora_olmo3"));
    check_merged(&golden_of("lora_dora_granite"));
    check_merged(&golden_of("lora_dora_gemma3"));
    check_merged(&golden_of("lora_phi3"));
    check_merged(&golden_of("lora_dora_phi3"));
    check_merged(&golden_of("lora_deepseek_v3"));
    check_merged(&golden_of("lora_glm4"));
    check_merged(&golden_of("lora_qwen3_moe"));
    check_merged(&golden_of("lora_mixtral"));
}

/// Checks weights merged by a source, and by the decoder.
fn check_merged(golden: &Golden) {
    let merged = Merged { base: &golden.base, adapter: &golden.adapter, lora: golden.adapter.lora_config() };
    let plain = Decoder::new(golden.base.decoder_config().clone(), Device::Cpu).unwrap();
    let holder = Holder::from_source(plain, &merged, Kind::Float);
    let in_place = merged_holder(golden, Kind::Float);
    let weights = holder.weights.iter().zip(&in_place.weights);
    for (unit, (weights, in_place)) in holder.decoder.units().iter().zip(weights) {
        for (spec, (weight, in_place)) in unit.params.iter().zip(weights.iter().zip(in_place)) {
            let part = |part: &Part| &golden.adapted[&format!("merged.{}", part.name)];
            let parts: Vec<&Tensor> = spec.parts.iter().map(part).collect();
            let expected = Tensor::cat(&parts, 0) + f64::from(spec.offset);
            assert_close(&spec.name, weight, &expected, TOLERANCE);
            assert_close(&spec.name, in_place, &expected, TOLERANCE);
            // A range that begins and ends within rows.
            let (values, cut) =
                (Vec::<f32>::try_from(&weight.flatten(0, -1)).unwrap(), 3..spec.elements() - 2);
            let mut found = vec![f32::NAN; cut.len()];
            merged.read(spec, cut.clone(), &mut found).unwrap();
            for (found, expected) in found.iter().zip(&values[cut]) {
                assert!((found - expected).abs() <= 1e-6, "{}: {found} {expected}", spec.name);
            }
        }
    }
}

/// Returns the decoder without adapters, and the merged weights.
fn merged_holder(golden: &Golden, kind: Kind) -> Holder {
    let Holder { decoder, weights, grads } = golden.holder(kind);
    let before: Vec<Vec<Tensor>> =
        weights.iter().map(|unit| unit.iter().map(Tensor::shallow_clone).collect()).collect();
    let values: Vec<Vec<Tensor>> =
        weights.iter().map(|unit| unit.iter().map(Tensor::copy).collect()).collect();
    let merged = decoder.merge(weights).unwrap();
    for (unit, (merged, before)) in merged.iter().zip(&before).enumerate() {
        for (param, (merged, before)) in merged.iter().zip(before).enumerate() {
            assert_eq!(merged.data_ptr(), before.data_ptr(), "merged in place");
            let is_changed = decoder.merges_into(unit, param);
            assert_eq!(!merged.equal(&values[unit][param]), is_changed, "{unit} {param}");
        }
    }
    Holder { decoder: Arc::new(decoder.merged()), weights: merged, grads }
}

/// W + s B A is rounded once: within half a rounding step of the exact sum.
#[test]
fn merged_weights_in_16_bits_are_rounded_once() {
    for (kind, half_a_step) in [(Kind::BFloat16, 2f64.powi(-8)), (Kind::Half, 2f64.powi(-11))] {
        let golden = golden();
        let Holder { decoder, weights, .. } = golden.holder(kind);
        let specs = decoder.units().iter().flat_map(|unit| &unit.params);
        let exact: HashMap<&str, Tensor> = specs
            .zip(weights.iter().flatten())
            .map(|(spec, tensor)| (spec.name.as_str(), tensor.to_kind(Kind::Double)))
            .collect();
        let lora = golden.adapter.lora_config();
        let product = |part: &Part| {
            let module =
                part.name.strip_suffix(".weight").filter(|_| lora.adapter_of(&part.name).is_some())?;
            let [a, b] = ["A", "B"].map(|it| &exact[&*format!("base_model.model.{module}.lora_{it}.weight")]);
            Some(b.matmul(a) * (lora.alpha / lora.rank as f64))
        };
        let merged =
            decoder.merge(weights.iter().map(|unit| unit.iter().map(Tensor::copy).collect()).collect());
        let merged = merged.unwrap();
        let mut compared = 0;
        for (spec, merged) in
            decoder.units().iter().flat_map(|unit| &unit.params).zip(merged.iter().flatten())
        {
            assert_eq!(merged.kind(), kind);
            let sum = exact[spec.name.as_str()].copy();
            let mut start = 0;
            for part in &spec.parts {
                if let Some(product) = product(part) {
                    let mut rows = sum.narrow(0, start, part.rows);
                    let _ = rows.g_add_(&product);
                    compared += 1;
                }
                start += part.rows;
            }
            let most = sum.abs() * (half_a_step * 1.001) + 1e-7;
            let error = (merged.to_kind(Kind::Double) - &sum).abs();
            assert!(bool::try_from(error.le_tensor(&most).all()).unwrap(), "{} {kind:?}", spec.name);
        }
        assert_eq!(compared, 2 * 5);
    }
}

#[test]
fn merged_weights_sample_what_adapters_do() {
    for (name, kind, tolerance) in [
        ("lora", Kind::Float, 1e-4),
        ("lora_layers", Kind::Float, 1e-4),
        ("lora_dora", Kind::Float, 1e-4),
        ("lora_olmo3", Kind::Float, 1e-4),
        ("lora_dora_olmo3", Kind::Float, 1e-4),
        ("lora_granite", Kind::Float, 1e-4),
        ("lora_dora_granite", Kind::Float, 1e-4),
        ("lora_gemma3", Kind::Float, 1e-4),
        ("lora_dora_gemma3", Kind::Float, 1e-4),
        ("lora_phi3", Kind::Float, 1e-4),
        ("lora_dora_phi3", Kind::Float, 1e-4),
        ("lora_deepseek_v3", Kind::Float, 1e-4),
        ("lora", Kind::BFloat16, 0.1),
        ("lora_dora", Kind::BFloat16, 0.1),
    ] {
        let golden = golden_of(name);
        let prompts: Vec<Vec<i64>> = golden
            .sequences()
            .into_iter()
            .map(|(tokens, prompt_len)| tokens[..prompt_len].to_vec())
            .collect();
        let greedy = SamplingParams { temperature: 0.0, max_new_tokens: 12, ..SamplingParams::default() };
        let sampled = |holder: &Holder| generation::run(holder, &prompts, &greedy, &vec![0; prompts.len()]);
        let (separate, merged) = (sampled(&golden.holder(kind)), sampled(&merged_holder(&golden, kind)));
        for (separate, merged) in separate.iter().zip(&merged) {
            if kind == Kind::Float {
                assert_eq!(merged.tokens, separate.tokens, "{name}");
            }
            // Up to tokens that are equally likely.
            let same = separate.tokens.iter().zip(&merged.tokens).take_while(|(a, b)| a == b).count();
            for (merged, separate) in merged.logprobs[..same].iter().zip(&separate.logprobs) {
                assert!((merged - separate).abs() <= tolerance, "{name} {kind:?}: {merged} {separate}");
            }
        }
    }
}

#[test]
fn an_adapter_is_written_as_peft_reads_it() {
    check_written("lora");
    check_written("lora_patterns");
    check_written("lora_layers");
    check_written("lora_unequal");
    check_written("lora_dora_dropout");
    check_written("lora_phi3");
    check_written("lora_dora_phi3_dropout");
    check_written("lora_deepseek_v3");
    check_written("lora_qwen3_moe");
    check_written("lora_mixtral");
}

fn check_written(name: &str) {
    let golden = golden_of(name);
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("adapter");
    let decoder = golden.decoder();
    let units: Vec<_> = decoder.units().iter().filter(|unit| unit.trainable).cloned().collect();
    let contents = FolderContents {
        kind: FolderKind::Adapter,
        config: adapter_config_file(
            (golden.adapter.lora_config(), golden.base.decoder_config()),
            "qwen2",
            None,
        ),
        copied: &[],
        made: &[],
        units: &units,
        weights: &golden.adapter,
        dtype: ExportDtype::Fp32,
    };
    write_folder(&to, &contents).unwrap();
    let back = AdapterFolder::open(&to, golden.base.decoder_config()).unwrap();
    assert_eq!(back.lora_config(), golden.adapter.lora_config());
    let tensors = |path: PathBuf| -> HashMap<String, Tensor> {
        Tensor::read_safetensors(path.join("adapter_model.safetensors")).unwrap().into_iter().collect()
    };
    assert_eq!(tensors(to), tensors(folder(name)));
}

#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let golden = golden();
    let check = |field: &str, value: Value, expected: &[&str]| {
        let scratch = tempfile::tempdir().unwrap();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(folder("lora").join(name), scratch.path().join(name)).unwrap();
        }
        let file = scratch.path().join("adapter_config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        config[field] = value;
        fs::write(&file, config.to_string()).unwrap();
        let error =
            AdapterFolder::open(scratch.path(), golden.base.decoder_config()).unwrap_err().to_string();
        assert!(expected.iter().all(|word| error.contains(word)), "{error} has not {expected:?}");
    };
    check("peft_type", json!("IA3"), &["adapter_config.json", "`peft_type` must be `LORA`"]);
    check("use_dora", json!(true), &["down_proj.lora_magnitude_vector` is missing"]);
    check("init_lora_weights", json!("pissa_niter_4"), &["`init_lora_weights` changes the model's weights"]);
    check(
        "modules_to_save",
        json!(["lm_head"]),
        &["`modules_to_save` names `lm_head`, a fully trained module"],
    );
    check("trainable_token_indices", json!([3]), &["`trainable_token_indices` is not supported"]);
    check("rank_pattern", json!({"q_proj": 8}), &["q_proj.lora_A.weight", "has shape [3, ", "requires [8, "]);
    check("rank_pattern", json!({"q_proj": 0}), &["`lora.rank` is 0"]);
    check("rank_pattern", json!({"q_proj": "8"}), &["`rank_pattern.q_proj` is \"8\""]);
    check(
        "alpha_pattern",
        json!({"(?<=q)_proj": 8}),
        &["`alpha_pattern.(?<=q)_proj` is not a supported regular"],
    );
    check("alpha_pattern", json!({"q_proj": -1}), &["`lora.alpha` is -1"]);
    check("alora_invocation_tokens", json!([1, 2]), &["`alora_invocation_tokens` is not supported"]);
    check("use_qalora", json!(true), &["`use_qalora` is not supported"]);
    check("r", json!(4), &["lora_A.weight", "has shape [3, ", "requires [4, "]);
}

/// From a report: tensors saved by `torch.save`'s like instead of PEFT's.
#[test]
fn tensors_with_the_adapters_name_in_theirs_are_read() {
    let golden = golden();
    for name in ["lora", "lora_dora"] {
        let scratch = tempfile::tempdir().unwrap();
        let (config, weights) = ("adapter_config.json", "adapter_model.safetensors");
        fs::copy(folder(name).join(config), scratch.path().join(config)).unwrap();
        let tensors = Tensor::read_safetensors(folder(name).join(weights)).unwrap();
        let named: Vec<(String, Tensor)> = tensors
            .into_iter()
            .map(|(name, tensor)| (format!("{}.default.weight", name.trim_end_matches(".weight")), tensor))
            .collect();
        Tensor::write_safetensors(&named, scratch.path().join(weights)).unwrap();
        let open = |path: &Path| AdapterFolder::open(path, golden.base.decoder_config()).unwrap();
        let [found, saved] = [scratch.path(), &folder(name)].map(open);
        assert_eq!(format!("{:?}", found.lora_config()), format!("{:?}", saved.lora_config()), "{name}");
    }
}

/// From reports: a pair without its half, a resized embedding beside the pairs, and the name for all matrices.
#[test]
fn tensors_that_an_adapter_lacks_or_has_beside_are_refused_by_name() {
    let golden = golden();
    type Tensors = Vec<(String, Tensor)>;
    let open = |targets: Option<Value>, change: &dyn Fn(&mut Tensors)| {
        let scratch = tempfile::tempdir().unwrap();
        let file = folder("lora").join("adapter_config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        if let Some(targets) = targets {
            config["target_modules"] = targets;
        }
        fs::write(scratch.path().join("adapter_config.json"), config.to_string()).unwrap();
        let mut tensors = Tensor::read_safetensors(folder("lora").join("adapter_model.safetensors")).unwrap();
        change(&mut tensors);
        Tensor::write_safetensors(&tensors, scratch.path().join("adapter_model.safetensors")).unwrap();
        AdapterFolder::open(scratch.path(), golden.base.decoder_config()).map_err(|error| error.to_string())
    };
    let missing = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight";
    let error = open(None, &|tensors| tensors.retain(|(name, _)| name != missing)).unwrap_err();
    assert!(error.contains("v_proj.lora_B.weight` is missing"), "{error}");
    let ones = || Tensor::ones([41, 16], (Kind::Float, Device::Cpu));
    let embedding = "base_model.model.model.embed_tokens.weight";
    let error = open(None, &|tensors| tensors.push((embedding.to_owned(), ones()))).unwrap_err();
    assert!(error.contains("embed_tokens.weight` is not part of the model"), "{error}");

    // Adds a pair to the two matrices of a layer that the golden adapter leaves out.
    let complete = |tensors: &mut Tensors| {
        let likes = [("self_attn.v_proj", "self_attn.k_proj"), ("mlp.up_proj", "mlp.gate_proj")];
        for (like, new) in likes {
            let pairs = tensors.iter().filter(|(name, _)| name.contains(like));
            let pairs: Vec<_> = pairs.map(|(name, it)| (name.replace(like, new), it.copy())).collect();
            tensors.extend(pairs);
        }
    };
    let all = open(Some(json!("all-linear")), &complete).unwrap();
    let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let named = open(Some(json!(modules)), &complete).unwrap();
    let units = |adapter: &AdapterFolder| {
        let config = golden.base.decoder_config().clone();
        format!("{:?}", Decoder::with_lora(config, adapter.lora_config(), Device::Cpu).unwrap().units())
    };
    assert_eq!(units(&all), units(&named));
}

/// A fused tensor has one adapter, and separate tensors have one each.
#[test]
fn adapters_of_matrices_that_another_family_has_are_refused_by_name() {
    let check = |adapter: &str, other: &str, module: &str, names: &str| {
        let model = ModelFolder::open(&folder(&format!("hf/{other}"))).unwrap();
        let expected = format!(
            "has `model.layers.0.self_attn.{module}`, which this model does not have: choose from {names}"
        );
        let error = AdapterFolder::open(&folder(adapter), model.decoder_config()).unwrap_err().to_string();
        assert!(
            error.contains("adapter_config.json: field `lora.targets`") && error.contains(&expected),
            "{error}"
        );
        let golden = golden_of(adapter);
        let lora = golden.adapter.lora_config();
        let error = Decoder::with_lora(model.decoder_config().clone(), lora, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains(&expected), "{error}");
    };
    check("lora", "phi3", "q_proj", "self_attn.qkv_proj, self_attn.o_proj, mlp.gate_up_proj, mlp.down_proj");
    check("lora_phi3", "qwen2", "qkv_proj", "self_attn.q_proj, self_attn.k_proj, ");
}

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path)
}
