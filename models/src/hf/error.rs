//! Why a published model's folder could not be read or written.

use std::{io, path::PathBuf};

/// An error about a folder, which names the file and what in it is wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not the JSON that it should be.
    #[error("{} cannot be understood", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A model of another kind.
    #[error("{}: the architecture is {found}, and there is only {known}", path.display())]
    Architecture {
        /// The configuration.
        path: PathBuf,
        /// What it names.
        found: String,
        /// What there is.
        known: String,
    },
    /// A field of a configuration is missing, or says what this crate does not do.
    #[error("{}: field `{field}` {problem}", path.display())]
    Field {
        /// The configuration.
        path: PathBuf,
        /// The field.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A safetensors file, or the index over several, that contradicts itself.
    #[error("{} is broken: {problem}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Weights that are there in another variant than is asked for, such as `fp16`.
    #[error("{}: {problem}", path.display())]
    Variant {
        /// The model's folder, or that of a part.
        path: PathBuf,
        /// Which are there, and which are not.
        problem: String,
    },
    /// A tensor that is missing, too many, or not as the configuration says.
    #[error("{}: tensor `{name}` {problem}", path.display())]
    Tensor {
        /// The folder or the file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// The result of this module's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;
