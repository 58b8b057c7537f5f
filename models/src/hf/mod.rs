//! Models in Hugging Face's published format: a folder with `config.json`, safetensors files and a tokenizer.
//!
//! [`ModelFolder`] reads such a folder, and [`write_folder`] writes one that `transformers` loads.
//! [`DiffusersFolder`] and [`write_diffusers_folder`] do so for diffusion models; [`ClipFolder`] reads a
//! CLIP, [`HeadFile`] a head for one. [`TextEncoderFolders`] reads text encoders, and [`TextEmbeddings`]
//! their output. Opening a folder reads the configuration and the headers of the weights, and checks that
//! every tensor of the model exists in its shape. The weights themselves are read range by range, as ranks
//! need them, and never whole. A GGUF file is opened as the folder that it means.

mod adapter;
mod clip;
mod config;
mod diffusers;
mod embeddings;
mod encoding;
mod export;
mod family;
mod files;
mod four_bits;
mod gguf;
mod head;
mod image_adapter;
mod latent_decoder;
mod rope;
mod t5;
mod text_encoders;
mod weights;

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

pub use crate::error::folder::{Error, Result};
pub use adapter::{AdapterFolder, Adapters, Merged, NewAdapter, Unscaled, WithAdapter, adapter_config_file};
pub use clip::ClipFolder;
pub use diffusers::{DiffusersFolder, write_diffusers_folder, write_image_adapter};
pub use embeddings::{EmbeddingsShape, TextEmbeddings, TextEmbeddingsWriter};
pub use export::{ExportDtype, FolderContents, FolderKind, scorer_config_file, write_folder};
pub use family::config_file;
pub use files::PublishedFiles;
pub use four_bits::InFourBits;
pub use head::HeadFile;
pub use image_adapter::ImageAdapterFiles;
pub use latent_decoder::{LatentDecoderConfig, LatentDecoderFolder};
pub use t5::T5Folder;
pub use text_encoders::{ClipTextFolder, TextEncoderFolders};

use crate::decoder::{self, DecoderConfig, ValueHead, ValueModel, lora};
use config::{Architectures, ConfigFile, Task};
use family::Family;
use weights::{WeightFiles, reads_files};

/// A published model's folder, opened and checked.
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    /// Content of its `config.json`.
    file: Map<String, Value>,
    family: &'static Family,
    config: DecoderConfig,
    head: Option<ValueHead>,
    stop_tokens: Vec<i64>,
    weights: WeightFiles,
}

impl ModelFolder {
    /// Returns true if there is a folder of a model at `path`, or a GGUF file.
    pub fn is_at(path: &Path) -> bool {
        path.is_file()
            || path.join("config.json").is_file()
            || gguf::find(path).map_or(true, |it| it.is_some())
    }

    /// Opens the folder or the GGUF file at `path`.
    ///
    /// # Errors
    /// [`Error`], which names the file and the field or tensor in it. Causes are an unsupported architecture
    /// or feature, a tensor that is missing, unknown or of another shape, or a broken file.
    pub fn open(path: &Path) -> Result<ModelFolder> {
        Self::open_for(Task::Language, path)?.with_weights(Task::Language)
    }

    /// Opens the folder for its shape and tokenizer alone. Its weights need not be there, and none can be read.
    ///
    /// # Errors
    /// The errors of [`Self::open`] that do not concern weights.
    pub fn open_shape(path: &Path) -> Result<ModelFolder> {
        Self::open_for(Task::Language, path)
    }

    /// Opens the folder of a sequence classifier with one label, a reward model, or of a token classifier with
    /// two, a process reward model. The weights are those of a [`ValueModel`].
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn open_scorer(path: &Path) -> Result<ModelFolder> {
        check_folder(path)?;
        if let Some(path) = gguf::find(path)? {
            let problem = "is that of a language model: give the folder of a sequence classifier";
            return Err(field(&path, "general.architecture", problem));
        }
        let head = read_json::<Architectures>(&path.join("config.json"))?.value_head();
        Self::open_for(Task::Value(head), path)?.with_weights(Task::Value(head))
    }

    fn open_for(task: Task, path: &Path) -> Result<ModelFolder> {
        check_folder(path)?;
        let files = PublishedFiles::open(path)?;
        let (config_path, text) = (files.place("config.json"), files.read("config.json")?);
        let family = parse_json::<Architectures>(&config_path, &text)?.family(&config_path, task)?;
        let file: ConfigFile = parse_json(&config_path, &text)?;
        if file.auto_map.is_some() {
            let path = config_path.display();
            tracing::warn!(
                "{path} names code of its own (`auto_map`), which is not run: the model is a {}",
                family.name
            );
        }
        let config = family.decoder_config(&config_path, &file)?;
        let generation = "generation_config.json";
        let stop_tokens = match files.has(generation) {
            true => {
                let path = files.place(generation);
                parse_json::<GenerationConfig>(&path, &files.read(generation)?)?.eos_token_id
            }
            false => None,
        };
        let stop_tokens = stop_tokens.or(file.eos_token_id).map_or(Vec::new(), TokenIds::into_vec);
        let head = match task {
            Task::Language => None,
            Task::Value(head) => Some(head),
        };
        let file = parse_json(&config_path, &text)?;
        let weights = WeightFiles::empty(path);
        Ok(ModelFolder { path: path.to_owned(), file, family, config, head, stop_tokens, weights })
    }

    /// Opens and checks the weights.
    fn with_weights(self, task: Task) -> Result<ModelFolder> {
        let config = &self.config;
        let weights = match gguf::find(&self.path)? {
            Some(file) => gguf::weights(&file)?,
            None => with_usual_names(WeightFiles::open(&self.path, "model")?)?,
        };
        let units = match task {
            Task::Language => decoder::units(config),
            Task::Value(head) => ValueModel::units_of_config(config, head),
        };
        weights.check(&units, |name| is_derived(name, config.tie_word_embeddings))?;
        if config.tie_word_embeddings && !weights.begins_alike(HEAD, EMBEDDING)? {
            let problem = format!(
                "differs from `{EMBEDDING}`, though they are tied: set `tie_word_embeddings` in {} \
                                   to false",
                self.path.join("config.json").display()
            );
            return Err(weights.problem(HEAD, problem));
        }
        Ok(ModelFolder { weights, ..self })
    }

    /// Returns the path of the folder, or of the GGUF file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all of its `config.json`, with the architecture of a language model.
    pub fn config_file(&self) -> Map<String, Value> {
        let mut file = self.file.clone();
        file.insert("architectures".to_owned(), json!([Task::Language.architecture(self.family)]));
        file
    }

    /// Returns the shape of the model.
    pub fn decoder_config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the head of a [`ValueModel`]; `None` for a language model.
    pub fn value_head(&self) -> Option<ValueHead> {
        self.head
    }

    /// Returns the tokens that end a completion, as named in `generation_config.json`, or else in
    /// `config.json`.
    pub fn stop_tokens(&self) -> &[i64] {
        &self.stop_tokens
    }
}

reads_files!(ModelFolder);

/// Renames the tensors to the names of a model with a head. Those of a base model, saved by `AutoModel`, lack
/// `model.`, and those of a wrapped module begin with the wrapper's name.
fn with_usual_names(weights: WeightFiles) -> Result<WeightFiles> {
    const WRAPPERS: [&str; 2] = ["module.", "_orig_mod."];
    if let Some(name) = weights.names().into_iter().find(|name| name.starts_with(lora::PREFIX)) {
        let problem = "belongs to a model with an adapter: merge the adapter first with PEFT's `merge_and_unload`, or set \
                       `lora.path` to the adapter's own folder";
        return Err(weights.problem(name, problem.to_owned()));
    }
    let unwrapped = |name: &str| {
        let mut name = name;
        while let Some(inner) = WRAPPERS.iter().find_map(|wrapper| name.strip_prefix(wrapper)) {
            name = inner;
        }
        name.to_owned()
    };
    let is_base = weights.names().iter().any(|name| format!("model.{}", unwrapped(name)) == EMBEDDING);
    weights.renamed(|name| {
        let name = unwrapped(name);
        let is_inner = ["embed_tokens.", "layers.", "norm."].iter().any(|part| name.starts_with(part));
        if is_base && is_inner { format!("model.{name}") } else { name }
    })
}

/// Names of the head's matrix, and of the embedding that replaces it if they are tied.
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Returns true if a tensor follows from others: a tied head, and the frequencies in old Llama files.
fn is_derived(name: &str, tied: bool) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || (tied && name == HEAD)
}

/// The field read from `generation_config.json`.
#[derive(Debug, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<TokenIds>,
}

/// One token id or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "`eos_token_id` is neither a token id nor a list of token ids")]
enum TokenIds {
    One(i64),
    Several(Vec<i64>),
}

impl TokenIds {
    fn into_vec(self) -> Vec<i64> {
        match self {
            TokenIds::One(id) => vec![id],
            TokenIds::Several(ids) => ids,
        }
    }
}

/// Returns an error about a field of the file `path`.
fn field(path: &Path, field: impl Into<String>, problem: impl Into<String>) -> Error {
    Error::Field { path: path.to_owned(), field: field.into(), problem: problem.into() }
}

/// Turns the error of a shape's own check into one about the file `path`.
fn validated<T>(path: &Path, found: crate::Result<T>) -> Result<T> {
    match found {
        Ok(found) => Ok(found),
        Err(crate::Error::Config { field: name, problem }) => Err(field(path, name, problem)),
        Err(other) => unreachable!("validation names a field: {other}"),
    }
}

/// Refuses the first of `names` that is set among the `fields` of the file `path`, neither null nor false.
fn refuse_any(path: &Path, fields: &Map<String, Value>, names: &[&str], problem: &str) -> Result<()> {
    let is_off = |name: &str| matches!(fields.get(name), None | Some(Value::Null | Value::Bool(false)));
    match names.iter().find(|name| !is_off(name)) {
        Some(name) => Err(field(path, *name, problem)),
        None => Ok(()),
    }
}

/// Returns true if a file with this start is a Git LFS pointer, in place of the file itself.
pub fn is_lfs_pointer(start: &[u8]) -> bool {
    start.starts_with(b"version https://git-lfs.github.com/spec/")
}

/// Checks that there is a folder at `path`, or a GGUF file.
fn check_folder(path: &Path) -> Result<()> {
    match path.is_file() {
        _ if !path.exists() => Err(Error::NoFolder { path: path.to_owned() }),
        true if gguf::find(path)?.is_none() => Err(Error::NotAFolder { path: path.to_owned() }),
        _ => Ok(()),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    if is_lfs_pointer(&text) {
        return Err(Error::Pointer { path: path.to_owned() });
    }
    parse_json(path, &text)
}

/// Parses the JSON of the file `path`.
fn parse_json<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|source| {
        let line = text.split(|byte| *byte == b'\n').nth(source.line().saturating_sub(1)).unwrap_or_default();
        let has = |word: &[u8]| line.windows(word.len()).any(|it| it == word);
        let hint = match () {
            () if text.starts_with("\u{feff}".as_bytes()) => {
                " (it begins with a byte order mark: save it as UTF-8 without)"
            }
            () if has(b"NaN") || has(b"Infinity") => " (NaN and Infinity are values of Python, not of JSON)",
            () => "",
        };
        Error::Json { path: path.to_owned(), hint, source }
    })
}
