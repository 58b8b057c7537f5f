//! Errors of building or running a model.

pub(crate) mod folder;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model's configuration contradicts itself.
    #[error("model field `{field}`: {problem}")]
    Config {
        /// The field of the configuration.
        field: &'static str,
        /// The invalid value, and the valid ones.
        problem: String,
    },
    /// The model does not accept a batch, prompt or sampling parameter.
    #[error("`{what}`: {problem}")]
    Input {
        /// The argument.
        what: &'static str,
        /// The invalid value, and the valid ones.
        problem: String,
    },
    /// A published model's folder cannot be used.
    #[error(transparent)]
    Folder(#[from] folder::Error),
    /// A source of weights failed.
    #[error("cannot read the weights")]
    Weights(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A device failed (out of memory).
    #[error(transparent)]
    Device(#[from] anyroll_backends::Error),
    /// A tensor operation failed.
    #[error("tensor operation failed")]
    Op(#[from] anyroll_backends::ops::Error),
    /// libtorch refused a call.
    #[error("libtorch refused an operation")]
    Torch(#[from] tch::TchError),
}

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns [`Error::Config`] about `field` unless `holds`.
pub(crate) fn check_config(holds: bool, field: &'static str, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Config { field, problem: problem() }) }
}

/// Checks that the number of layers is plausible, before memory is allocated for them.
pub(crate) fn check_layers(field: &'static str, layers: usize) -> Result<()> {
    const MOST: usize = 1 << 16;
    check_config(layers <= MOST, field, || format!("is {layers}, must be at most {MOST}"))
}
