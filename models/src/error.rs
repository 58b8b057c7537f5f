//! Why a model could not be built or run.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model's configuration contradicts itself.
    #[error("model field `{field}`: {problem}")]
    Config {
        /// The field of the configuration.
        field: &'static str,
        /// What is wrong with it, and what it should be.
        problem: String,
    },
    /// A batch, prompt or sampling parameter that the model cannot take.
    #[error("`{what}`: {problem}")]
    Input {
        /// The argument.
        what: &'static str,
        /// What is wrong with it, and what it should be.
        problem: String,
    },
    /// A published model's folder cannot be used.
    #[error(transparent)]
    Folder(#[from] crate::hf::Error),
    /// A source of weights failed.
    #[error("cannot read the weights")]
    Weights(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A device could not do what was asked of it (out of memory).
    #[error(transparent)]
    Device(#[from] anyroll_backends::Error),
    /// A tensor operation failed.
    #[error("tensor operation failed")]
    Op(#[from] anyroll_backends::ops::Error),
    /// libtorch refused a call.
    #[error("libtorch refused an operation")]
    Torch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// [`Error::Config`] about `field` unless `holds`.
pub(crate) fn check_config(holds: bool, field: &'static str, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Config { field, problem: problem() }) }
}

/// Checks that there are no more layers than any model has, before memory is asked for so many.
pub(crate) fn check_layers(field: &'static str, layers: usize) -> Result<()> {
    const MOST: usize = 1 << 16;
    check_config(layers <= MOST, field, || format!("is {layers}, must be at most {MOST}"))
}
