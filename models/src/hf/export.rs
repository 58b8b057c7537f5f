//! Writes a folder that `transformers` loads, from any source of weights.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::config::Task;
use super::gemma;
use super::rope::rope_scaling;
use super::weights::index_name;
use super::{Error, Result};
use crate::decoder::{
    Activation, DecoderConfig, ExpertNames, ExpertsConfig, Multipliers, NormPlaces, OtherRope, QkNorm,
    RopeScaling, SlidingWindow, ValueHead, lora,
};
use crate::diffusion::EXPERTS;
use crate::init::WeightSource;
use crate::model::{ParamSpec, Unit};

/// Prefix of diffusers' weight file names.
pub(super) const DIFFUSERS_STEM: &str = "diffusion_pytorch_model";
/// Maximum bytes of weights per file, unless a single tensor has more.
const MAX_FILE_BYTES: usize = 5 << 30;
/// Maximum number of values in memory at a time.
const CHUNK: usize = 1 << 20;

/// The dtype of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportDtype {
    /// 32-bit IEEE.
    Fp32,
    /// bfloat16.
    Bf16,
    /// 16-bit IEEE.
    Fp16,
}

/// Kind of a folder's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderKind {
    /// A model: `config.json` and `model.safetensors`.
    Model,
    /// A diffusion model in diffusers' format: `config.json` and `diffusion_pytorch_model.safetensors`.
    Transformer,
    /// An adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.
    Adapter,
    /// An adapter of a diffusion model in the format of diffusers' pipelines: only
    /// `pytorch_lora_weights.safetensors`.
    ImageAdapter,
}

/// Contents of a folder.
pub struct FolderContents<'a> {
    /// Kind of the contents.
    pub kind: FolderKind,
    /// The configuration, if the folder has one; a model's without the dtype.
    pub config: Map<String, Value>,
    /// Other files, copied unchanged, such as the tokenizer's.
    pub copied: &'a [PathBuf],
    /// Files created by the caller, by name.
    pub made: &'a [(&'a str, Vec<u8>)],
    /// The model's parameters.
    pub units: &'a [Unit],
    /// The parameters' values.
    pub weights: &'a dyn WeightSource,
    /// Element type of the written values.
    pub dtype: ExportDtype,
}

/// Writes the new folder `path`, under a temporary name until it is complete and on disk.
///
/// # Errors
/// [`Error::Write`] if `path` exists or cannot be written, [`Error::Read`] for a file to copy, or the
/// source's error.
pub fn write_folder(path: &Path, contents: &FolderContents) -> crate::Result<()> {
    write_whole(path, |aside| {
        write_weights(aside, contents)?;
        let mut config = contents.config.clone();
        if contents.kind == FolderKind::Model {
            config.remove("dtype");
            config.insert("torch_dtype".to_owned(), contents.dtype.torch_name().into());
        }
        if let Some(name) = contents.kind.config_name() {
            write_file(&aside.join(name), &pretty(&config.into()))?;
        }
        for (name, bytes) in contents.made {
            write_file(&aside.join(name), bytes)?;
        }
        for source in contents.copied {
            let bytes =
                fs::read(source).map_err(|error| Error::Read { path: source.clone(), source: error })?;
            write_file(&aside.join(source.file_name().expect("a file has a name")), &bytes)?;
        }
        Ok(())
    })
}

/// Creates the new folder `to` from the contents that `fill` writes to a temporary folder, which is renamed
/// once it is complete and on disk.
pub(super) fn write_whole(to: &Path, fill: impl FnOnce(&Path) -> crate::Result<()>) -> crate::Result<()> {
    if to.exists() {
        return Err(failed(to)(io::ErrorKind::AlreadyExists.into()).into());
    }
    let aside = to.with_extension("partial");
    // Leftovers of an interrupted export.
    match fs::remove_dir_all(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&aside)(error).into()),
        _ => fs::create_dir_all(&aside).map_err(failed(&aside))?,
    }
    fill(&aside)?;
    sync_folder(&aside)?;
    fs::rename(&aside, to).map_err(failed(to))?;
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(sync_folder(parent.unwrap_or(Path::new(".")))?)
}

/// Returns the `config.json` of a classifier with this head, from that of the language model below it. It has
/// no padding token: a sequence classifier scores a text that ends with it before its end.
pub fn scorer_config_file(mut config: Map<String, Value>, head: ValueHead) -> Map<String, Value> {
    let architectures = config.get("architectures").and_then(Value::as_array).cloned().unwrap_or_default();
    let of_scorer =
        |name: &Value| Value::from(Task::Value(head).of_language(name.as_str().unwrap_or_default()));
    let (names, numbers) = match head {
        ValueHead::Number => (json!({"0": "LABEL_0"}), json!({"LABEL_0": 0})),
        ValueHead::Classes => (json!({"0": "LABEL_0", "1": "LABEL_1"}), json!({"LABEL_0": 0, "LABEL_1": 1})),
    };
    config.insert("architectures".to_owned(), architectures.iter().map(of_scorer).collect());
    config.insert("id2label".to_owned(), names);
    config.insert("label2id".to_owned(), numbers);
    config.insert("pad_token_id".to_owned(), Value::Null);
    config
}

/// Returns the `config.json` of a decoder, of the family that has its shape.
///
/// # Errors
/// [`Error::Field`] for a decoder that no family has. Examples:
/// - both biases and query and key norms, or neither and a window in some layers;
/// - experts without norms;
/// - multipliers in a decoder that otherwise differs from Llama.
pub fn config_file(config: &DecoderConfig, stop_tokens: &[i64]) -> Result<Map<String, Value>> {
    let (tokens, slides) = match &config.sliding_window {
        Some(SlidingWindow { tokens, layers }) => (Some(tokens), layers.clone()),
        None => (None, vec![false; config.num_hidden_layers]),
    };
    let (architecture, model_type) = family_of(config, &slides)?;
    let first_window = slides.iter().position(|&slides| slides).unwrap_or(slides.len());
    let kind = |&slides: &bool| if slides { "sliding_attention" } else { "full_attention" };
    let layer_types: Vec<&str> = slides.iter().map(kind).collect();
    let file = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling(&config.rope_scaling),
        "sliding_window": tokens,
        "use_sliding_window": tokens.is_some(),
        // From this layer on; earlier layers see the whole text.
        "max_window_layers": first_window,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "attention_dropout": 0.0,
        "eos_token_id": stop_tokens,
    });
    let Value::Object(mut file) = file else { unreachable!("written as an object above") };
    if matches!(model_type, "qwen2" | "qwen3" | "smollm3" | "olmo3" | gemma::MODEL_TYPE) {
        file.insert("layer_types".to_owned(), layer_types.into());
    }
    if model_type == "smollm3" {
        let still = config.other_rope.as_ref().map(|other| &other.layers[..]).unwrap_or_default();
        let turned: Vec<i64> = still.iter().map(|&still| i64::from(!still)).collect();
        file.insert("no_rope_layers".to_owned(), turned.into());
    }
    if model_type == "phi3" {
        file.insert("partial_rotary_factor".to_owned(), config.partial_rotary_factor.into());
        let longest = config.max_position_embeddings;
        let (longest, original) = match config.rope_scaling {
            RopeScaling::LongRope { max_position_embeddings, original_max_position_embeddings, .. } => {
                (max_position_embeddings as i64, original_max_position_embeddings as i64)
            }
            _ => (longest, longest),
        };
        file.insert("max_position_embeddings".to_owned(), longest.into());
        file.insert("original_max_position_embeddings".to_owned(), original.into());
        // The class would use its own default ids, which exceed a small vocabulary.
        file.insert("pad_token_id".to_owned(), Value::Null);
        file.insert("resid_pdrop".to_owned(), 0.0.into());
    }
    if model_type == "granite" {
        file.extend(fields_multiplied(config));
    }
    if model_type == gemma::MODEL_TYPE {
        file.remove("hidden_act");
        file.extend(gemma::fields(config));
    }
    if let Some(experts) = &config.experts {
        file.extend(fields_of(experts, model_type));
    }
    Ok(file)
}

/// Returns the family that has the shape of a decoder, as architecture and `model_type`. `slides` is true for
/// layers with a window.
fn family_of(config: &DecoderConfig, slides: &[bool]) -> Result<(&'static str, &'static str)> {
    let refuse = |field: &str, problem: &str| {
        let (field, problem) = (field.to_owned(), problem.to_owned());
        Err(Error::Field { path: "config.json".into(), field, problem })
    };
    let is_gemma = config.norms == NormPlaces::Both
        || config.norm_offset != 0.0
        || config.activation != Activation::Silu
        || config.multipliers.rounds_embedding;
    if is_gemma {
        return match gemma::check(config, slides) {
            Ok(()) => Ok(("Gemma3ForCausalLM", gemma::MODEL_TYPE)),
            Err((field, problem)) => refuse(field, problem),
        };
    }
    let biases = (config.qkv_bias, config.o_bias, config.mlp_bias);
    if config.fused_projections {
        let is_scaled = !matches!(config.rope_scaling, RopeScaling::None | RopeScaling::LongRope { .. });
        let plain = DecoderConfig {
            fused_projections: false,
            partial_rotary_factor: 1.0,
            rope_scaling: RopeScaling::None,
            ..config.clone()
        };
        return match family_of(&plain, slides)? {
            ("LlamaForCausalLM", _) | ("MistralForCausalLM", _)
                if biases == (false, false, false) && !is_scaled =>
            {
                Ok(("Phi3ForCausalLM", "phi3"))
            }
            _ => refuse("fused_projections", "are set in a decoder that otherwise differs from Phi-3"),
        };
    }
    if let RopeScaling::LongRope { .. } = config.rope_scaling {
        return refuse("rope_scaling", "is `longrope`, which only Phi-3 has");
    }
    if config.partial_rotary_factor != 1.0 {
        return refuse("partial_rotary_factor", "is not 1, which only Phi-3 has");
    }
    if config.multipliers != Multipliers::default() {
        let plain = DecoderConfig { multipliers: Multipliers::default(), ..config.clone() };
        return match family_of(&plain, slides)? {
            ("LlamaForCausalLM", _) => Ok(("GraniteForCausalLM", "granite")),
            _ => refuse(
                "residual_multiplier",
                "or another multiplier is set in a decoder that otherwise differs from Llama",
            ),
        };
    }
    if let Some(experts) = &config.experts {
        let (all_have, slide) = (!experts.layers.contains(&false), slides.contains(&true));
        let is_mixtral = experts.names == ExpertNames::Mixtral;
        return match (biases, config.qk_norm, &config.other_rope) {
            ((false, false, false), None, None)
                if is_mixtral && all_have && experts.norm_topk_prob && slide != slides.contains(&false) =>
            {
                Ok(("MixtralForCausalLM", "mixtral"))
            }
            _ if is_mixtral => {
                refuse("num_local_experts", "is set in a decoder that otherwise differs from Mixtral")
            }
            ((true, true, false) | (false, false, false), Some(QkNorm::Together), None)
                if all_have
                    && !slide
                    && config.head_dim * config.num_attention_heads == config.hidden_size =>
            {
                Ok(("OlmoeForCausalLM", "olmoe"))
            }
            ((true, true, false) | (false, false, false), Some(QkNorm::PerHead), None) => {
                if slides.contains(&true) && slides.contains(&false) {
                    return refuse(
                        "sliding_window",
                        "is set for some layers only, which no family with experts has",
                    );
                }
                Ok(("Qwen3MoeForCausalLM", "qwen3_moe"))
            }
            _ => refuse(
                "num_experts",
                "is set, but families with experts have query and key norms, and biases on all of attention or none",
            ),
        };
    }
    match (config.norms, config.qk_norm, &config.other_rope) {
        (NormPlaces::After, Some(QkNorm::Together), other) => {
            // In this family the layers with a window are the ones without scaling.
            let is_scaled = slides.contains(&true) && config.rope_scaling != RopeScaling::None;
            let unscaled = || OtherRope { theta: Some(config.rope_theta), layers: slides.to_vec() };
            match (biases, *other == is_scaled.then(unscaled)) {
                ((true, true, false) | (false, false, false), true) if slides.contains(&true) => {
                    Ok(("Olmo3ForCausalLM", "olmo3"))
                }
                ((true, true, false) | (false, false, false), true) => Ok(("Olmo2ForCausalLM", "olmo2")),
                (_, true) => refuse(
                    "o_bias",
                    "and the other biases differ from OLMo's, the only family with norms on branch outputs",
                ),
                (_, false) => {
                    refuse("other_rope", "differs from OLMo's, the only family with norms on branch outputs")
                }
            }
        }
        (NormPlaces::After | NormPlaces::Both, _, _) | (_, Some(QkNorm::Together), _) => {
            refuse("norms", "are on branch outputs or span all heads; only OLMo has these, and has both")
        }
        (NormPlaces::Before, None, Some(OtherRope { theta: None, .. }))
            if config.qkv_bias == config.o_bias =>
        {
            Ok(("SmolLM3ForCausalLM", "smollm3"))
        }
        (NormPlaces::Before, _, Some(_)) => {
            refuse("other_rope", "is set in a decoder that no published family with such layers matches")
        }
        (NormPlaces::Before, qk_norm, None) => {
            usual_family(biases, qk_norm.is_some(), slides).or_else(|(field, problem)| refuse(field, problem))
        }
    }
}

/// Returns the family of a decoder whose layers all rotate alike, with norms on branch inputs. Depends on its
/// biases, and on query and key norms. Without one, returns a field and the problem.
fn usual_family(
    biases: (bool, bool, bool),
    qk_norm: bool,
    slides: &[bool],
) -> Result<(&'static str, &'static str), (&'static str, &'static str)> {
    let (has_windows, all_slide) = (slides.contains(&true), !slides.contains(&false));
    match (biases, qk_norm, has_windows) {
        ((true, false, _), true, _) => {
            Err(("qkv_bias", "is set with qk_norm, but no published family has these two alone"))
        }
        ((true, false, false), false, _) => Ok(("Qwen2ForCausalLM", "qwen2")),
        ((true, true, false) | (false, false, false), true, _) => Ok(("Qwen3ForCausalLM", "qwen3")),
        ((false, false, false), false, true) if !all_slide => Err((
            "sliding_window",
            "is set for some layers only, which no family without biases or norms has",
        )),
        ((false, false, false), false, true) => Ok(("MistralForCausalLM", "mistral")),
        ((true, true, _) | (false, false, _), false, false) => Ok(("LlamaForCausalLM", "llama")),
        _ => Err(("o_bias", "and the other biases match no published family")),
    }
}

/// Returns the fields of multipliers.
fn fields_multiplied(config: &DecoderConfig) -> Map<String, Value> {
    let multipliers = &config.multipliers;
    let fields = [
        ("embedding_multiplier", multipliers.embedding),
        ("attention_multiplier", config.attention_multiplier()),
        ("residual_multiplier", multipliers.residual),
        ("logits_scaling", multipliers.logits_scaling),
    ];
    fields.into_iter().map(|(name, number)| (name.to_owned(), number.into())).collect()
}

/// Returns the fields of a mixture.
fn fields_of(experts: &ExpertsConfig, model_type: &str) -> Map<String, Value> {
    let plain = experts.layers.iter().enumerate().filter(|(_, has_experts)| !**has_experts);
    let fields = json!({
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": plain.map(|(layer, _)| layer).collect::<Vec<_>>(),
        "output_router_logits": false,
    });
    let Value::Object(mut fields) = fields else { unreachable!("written as an object above") };
    // If all layers have experts, they are as wide as the MLP that they replace.
    if matches!(model_type, "mixtral" | "olmoe") {
        fields.insert("intermediate_size".to_owned(), experts.moe_intermediate_size.into());
        fields.insert("num_local_experts".to_owned(), experts.num_experts.into());
    }
    fields
}

/// A tensor of the folder: the values `range` of a parameter.
struct Tensor<'a> {
    name: Cow<'a, str>,
    shape: Vec<usize>,
    spec: &'a ParamSpec,
    range: Range<usize>,
}

fn write_weights(folder: &Path, contents: &FolderContents) -> crate::Result<()> {
    let files = files(contents);
    let (count, stem) = (files.len(), contents.kind.weights_stem());
    let mut weight_map = BTreeMap::new();
    let mut total_bytes = 0;
    for (index, tensors) in files.iter().enumerate() {
        let name = match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", index + 1),
        };
        write_weight_file(&folder.join(&name), tensors, contents)?;
        for tensor in tensors {
            weight_map.insert(&*tensor.name, name.clone());
            total_bytes += tensor.range.len() * contents.dtype.bytes();
        }
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": total_bytes}, "weight_map": weight_map});
        write_file(&folder.join(index_name(stem)), &pretty(&index))?;
    }
    Ok(())
}

/// Returns the tensors of each file.
fn files<'a>(contents: &FolderContents<'a>) -> Vec<Vec<Tensor<'a>>> {
    let mut files = vec![Vec::new()];
    let mut bytes = 0;
    for spec in contents.units.iter().flat_map(|unit| &unit.params) {
        let row = spec.elements() / spec.shape[0] as usize;
        let mut start = 0;
        for part in &spec.parts {
            let range = start..start + part.rows as usize * row;
            start = range.end;
            let shape = [part.rows].iter().chain(&spec.shape[1..]).map(|&size| size as usize).collect();
            let tensor_bytes = range.len() * contents.dtype.bytes();
            if bytes > 0 && bytes + tensor_bytes > MAX_FILE_BYTES {
                files.push(Vec::new());
                bytes = 0;
            }
            bytes += tensor_bytes;
            let file = files.last_mut().expect("there is always one");
            file.push(Tensor { name: contents.kind.name_of(&part.name), shape, spec, range });
        }
    }
    files
}

fn write_weight_file(path: &Path, tensors: &[Tensor], contents: &FolderContents) -> crate::Result<()> {
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = end;
        end += tensor.range.len() * contents.dtype.bytes();
        let (dtype, shape) = (contents.dtype.safetensors(), tensor.shape.clone());
        (tensor.name.to_string(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    });
    let mut file = BufWriter::new(File::create(path).map_err(failed(path))?);
    file.write_all(&header(infos.collect())).map_err(failed(path))?;
    let mut values = vec![0.0; CHUNK];
    for tensor in tensors {
        for start in tensor.range.clone().step_by(CHUNK) {
            let range = start..(start + CHUNK).min(tensor.range.end);
            let values = &mut values[..range.len()];
            contents.weights.read(tensor.spec, range, values)?;
            if tensor.spec.offset != 0.0 {
                values.iter_mut().for_each(|value| *value -= tensor.spec.offset);
            }
            file.write_all(&contents.dtype.encode(values)).map_err(failed(path))?;
        }
    }
    let file = file.into_inner().map_err(|error| failed(path)(error.into_error()))?;
    Ok(file.sync_all().map_err(failed(path))?)
}

/// Returns the header of a file of these tensors in order.
pub(super) fn header(tensors: Vec<(String, TensorInfo)>) -> Vec<u8> {
    // `transformers` refuses a file without this entry.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), tensors).expect("offsets are contiguous");
    let mut header = serde_json::to_vec(&metadata).expect("a header is plain data");
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header].concat()
}

impl FolderKind {
    fn config_name(self) -> Option<&'static str> {
        match self {
            FolderKind::Model | FolderKind::Transformer => Some("config.json"),
            FolderKind::Adapter => Some("adapter_config.json"),
            FolderKind::ImageAdapter => None,
        }
    }

    /// Returns the name in the file of the tensor `name`.
    fn name_of(self, name: &str) -> Cow<'_, str> {
        // Each transformer of a pair has its own folder.
        let of_one = |name: &str| {
            EXPERTS.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name).to_owned()
        };
        match (self, name.strip_prefix(lora::PREFIX)) {
            // A pipeline has several models; this prefix names the transformer.
            (FolderKind::ImageAdapter, Some(module)) => format!("transformer.{}", of_one(module)).into(),
            (FolderKind::Transformer, _) => of_one(name).into(),
            _ => name.into(),
        }
    }

    pub(super) fn weights_stem(self) -> &'static str {
        match self {
            FolderKind::Model => "model",
            FolderKind::Transformer => DIFFUSERS_STEM,
            FolderKind::Adapter => "adapter_model",
            FolderKind::ImageAdapter => "pytorch_lora_weights",
        }
    }
}

impl ExportDtype {
    pub(super) fn bytes(self) -> usize {
        match self {
            ExportDtype::Fp32 => 4,
            ExportDtype::Bf16 | ExportDtype::Fp16 => 2,
        }
    }

    fn torch_name(self) -> &'static str {
        match self {
            ExportDtype::Fp32 => "float32",
            ExportDtype::Bf16 => "bfloat16",
            ExportDtype::Fp16 => "float16",
        }
    }

    pub(super) fn safetensors(self) -> Dtype {
        match self {
            ExportDtype::Fp32 => Dtype::F32,
            ExportDtype::Bf16 => Dtype::BF16,
            ExportDtype::Fp16 => Dtype::F16,
        }
    }

    pub(super) fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            ExportDtype::Fp32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            ExportDtype::Bf16 => {
                values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
            }
            ExportDtype::Fp16 => {
                values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect()
            }
        }
    }
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(failed(path))
}

pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(failed(path))
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("a value is plain data");
    text.push(b'\n');
    text
}

pub(super) fn failed(path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Write { path: path.clone(), source }
}
