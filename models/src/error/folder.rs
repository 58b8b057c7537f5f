//! Errors of reading or writing a published model's folder.

use std::{io, path::PathBuf};

/// An error about a folder, which names the file and the problem in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// There is nothing at the path.
    #[error("there is no folder {}", path.display())]
    NoFolder {
        /// The path.
        path: PathBuf,
    },
    /// There is a file at the path, and no GGUF file.
    #[error("{} is a file: give the folder of a model, or a GGUF file", path.display())]
    NotAFolder {
        /// The file.
        path: PathBuf,
    },
    /// There are several GGUF files in a folder without a `config.json`.
    #[error("{} has several GGUF files: name one of them, such as {}", path.display(), files.join(", "))]
    SeveralGguf {
        /// The folder.
        path: PathBuf,
        /// Names of the first files.
        files: Vec<String>,
    },
    /// A file is not fetched yet.
    #[error("{} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`", path.display())]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// The weights exist only in a format that can run code when it is read.
    #[error(
        "{} has its weights only as {found}, which is not read: save them as safetensors with \
         `AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)` of transformers", path.display()
    )]
    Pickle {
        /// The folder.
        path: PathBuf,
        /// The file.
        found: String,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file is not the expected JSON.
    #[error("cannot parse {}{hint}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// A cause that the position does not tell, with its fix, in brackets; or nothing.
        hint: &'static str,
        /// The position and the problem.
        source: serde_json::Error,
    },
    /// The model has another architecture.
    #[error("{}: the architecture {found} is not supported, only {known}", path.display())]
    Architecture {
        /// The configuration.
        path: PathBuf,
        /// The architecture that it names.
        found: String,
        /// The supported architectures.
        known: String,
    },
    /// A field of a configuration is missing, or has an unsupported value.
    #[error("{}: field `{field}` {problem}", path.display())]
    Field {
        /// The configuration.
        path: PathBuf,
        /// The field.
        field: String,
        /// The problem.
        problem: String,
    },
    /// A file of weights, or the index of several, contradicts itself.
    #[error("{} is broken: {problem}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The weights exist in another variant than the requested one, such as `fp16`.
    #[error("{}: {problem}", path.display())]
    Variant {
        /// The folder of the model, or of a part of it.
        path: PathBuf,
        /// The existing and the missing variants.
        problem: String,
    },
    /// A tensor is missing, unknown, or differs from the configuration.
    #[error("{}: tensor `{name}` {problem}", path.display())]
    Tensor {
        /// The folder or the file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The problem.
        problem: String,
    },
}

/// Result of [`hf`](crate::hf)'s functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;
