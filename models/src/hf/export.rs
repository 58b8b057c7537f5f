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
use super::weights::index_name;
use super::{Error, Result};
use crate::decoder::{ValueHead, lora};
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
