//! Errors of the strategy layer.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::State;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error while a strategy trains, scores or saves.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device or a collective failed.
    #[error(transparent)]
    Backend(#[from] anyroll_backends::Error),
    /// A tensor operation got invalid arguments, or libtorch failed.
    #[error(transparent)]
    Op(#[from] anyroll_backends::ops::Error),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] anyroll_models::Error),
    /// libtorch raised an exception.
    #[error("libtorch refused an operation")]
    Torch(#[from] tch::TchError),
    /// The ZeRO stage does not exist.
    #[error("zero_stage is 0, 1, 2 or 3, not {0}")]
    ZeroStage(u64),
    /// A training call on a strategy that was created without an optimizer.
    #[error("{call}: this strategy holds frozen weights and has no optimizer")]
    Frozen {
        /// The call.
        call: &'static str,
    },
    /// An optimizer for a model without trainable weights.
    #[error("every unit of the model is frozen: there is nothing to train")]
    NothingToTrain,
    /// The call needs states that are offloaded.
    #[error("{op}: the {state} are offloaded; call `load_states` first")]
    Offloaded {
        /// The call.
        op: &'static str,
        /// The state that it needs.
        state: State,
    },
    /// The gradient norm is NaN or infinite, and a smaller loss scale cannot help. The step changed no
    /// weights.
    #[error("optimizer step {step}: the gradient norm is {grad_norm}; the weights are unchanged")]
    NonFiniteGradient {
        /// Number of the step, from 1, since the optimizer was created.
        step: u64,
        /// The norm.
        grad_norm: f64,
        /// Loss scale of the step, in fp16.
        loss_scale: Option<f64>,
    },
    /// Weights have become infinite or NaN.
    #[error("{elements} of the trained weights are infinite or NaN")]
    NonFiniteWeights {
        /// Number of such weights.
        elements: u64,
    },
    /// In fp16, the gradient of every step overflowed.
    #[error(
        "the gradients overflowed fp16 in all {steps} optimizer steps, so every step was skipped and nothing was learned"
    )]
    AllSkipped {
        /// Number of steps since the optimizer was created.
        steps: u64,
    },
    /// A checkpoint's file could not be read or written.
    #[error("checkpoint {}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another rank could not write its part of a checkpoint; that rank reports the cause.
    #[error("checkpoint {}: rank {rank} could not write its part", path.display())]
    CheckpointOfPeer {
        /// The folder.
        path: PathBuf,
        /// The rank.
        rank: usize,
    },
    /// A file of a checkpoint is damaged.
    #[error("checkpoint {} is damaged: {problem}", path.display())]
    CheckpointDamaged {
        /// The file.
        path: PathBuf,
        /// The evidence.
        problem: String,
    },
    /// A file of a checkpoint is intact, but belongs to another rank, step, run or layout.
    #[error("checkpoint {}: it does not belong here: {problem}", path.display())]
    CheckpointForeign {
        /// The file.
        path: PathBuf,
        /// The difference.
        problem: String,
    },
    /// A checkpoint belongs to another model or run.
    #[error("checkpoint {}: {problem}", path.display())]
    CheckpointMismatch {
        /// The file or folder.
        path: PathBuf,
        /// The saved and the expected value.
        problem: String,
    },
}

impl Error {
    /// Returns true if the cause most likely lies with another rank.
    pub fn is_from_peer(&self) -> bool {
        match self {
            Self::Backend(error) => error.is_from_peer(),
            Self::CheckpointOfPeer { .. } => true,
            _ => false,
        }
    }

    /// Returns true if the error is about a checkpoint's file in `folder`.
    pub fn is_in(&self, folder: &Path) -> bool {
        match self {
            Self::Checkpoint { path, .. }
            | Self::CheckpointDamaged { path, .. }
            | Self::CheckpointForeign { path, .. } => path.starts_with(folder),
            _ => false,
        }
    }

    /// Returns true if a file of a checkpoint is missing, unreadable, damaged or foreign, so that an older
    /// checkpoint may work.
    pub fn is_of_a_file(&self) -> bool {
        matches!(
            self,
            Self::Checkpoint { .. } | Self::CheckpointDamaged { .. } | Self::CheckpointForeign { .. }
        )
    }
}
