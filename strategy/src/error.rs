//! Errors of the strategy layer.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::State;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong while a strategy trains, scores or saves.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device or a collective failed.
    #[error(transparent)]
    Backend(#[from] anyroll_backends::Error),
    /// A tensor operation got arguments that it cannot take, or libtorch failed.
    #[error(transparent)]
    Op(#[from] anyroll_backends::ops::Error),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] anyroll_models::Error),
    /// libtorch raised an exception.
    #[error("libtorch refused an operation")]
    Torch(#[from] tch::TchError),
    /// A ZeRO stage that does not exist.
    #[error("zero_stage is 0, 1, 2 or 3, not {0}")]
    ZeroStage(u64),
    /// A training call on a strategy that was made without an optimizer.
    #[error("{call}: this strategy holds frozen weights and has no optimizer")]
    Frozen {
        /// The call.
        call: &'static str,
    },
    /// An optimizer for a model without anything to train.
    #[error("every unit of the model is frozen: there is nothing to train")]
    NothingToTrain,
    /// A call that needs states which are off the device.
    #[error("{op}: the {state} are offloaded; call `load_states` first")]
    Offloaded {
        /// The call.
        op: &'static str,
        /// What it needs.
        state: State,
    },
    /// The gradient norm is NaN or infinite, and no smaller loss scale can mend it. The step changed no weights.
    #[error("optimizer step {step}: the gradient norm is {grad_norm}; the weights are unchanged")]
    NonFiniteGradient {
        /// The step, from 1: those since the optimizer was made.
        step: u64,
        /// The norm.
        grad_norm: f64,
        /// In fp16, the factor that was on the loss.
        loss_scale: Option<f64>,
    },
    /// Weights have become infinite or NaN.
    #[error("{elements} of the weights that were trained are infinite or NaN")]
    NonFiniteWeights {
        /// How many.
        elements: u64,
    },
    /// In fp16, the gradient of every step overflowed.
    #[error(
        "the gradients of all {steps} optimizer steps overflowed fp16, so that each was skipped: nothing was learnt"
    )]
    AllSkipped {
        /// Steps since the optimizer was made.
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
    /// Another rank could not write its part of a checkpoint. Look for its own error.
    #[error("checkpoint {}: rank {rank} could not write its part", path.display())]
    CheckpointOfPeer {
        /// The folder.
        path: PathBuf,
        /// The rank.
        rank: usize,
    },
    /// A file of a checkpoint is not as it was written.
    #[error("checkpoint {}: it is damaged: {problem}", path.display())]
    CheckpointDamaged {
        /// The file.
        path: PathBuf,
        /// How that shows.
        problem: String,
    },
    /// A file of a checkpoint is whole, but belongs elsewhere.
    #[error("checkpoint {}: it does not belong here: {problem}", path.display())]
    CheckpointForeign {
        /// The file.
        path: PathBuf,
        /// Where it belongs.
        problem: String,
    },
    /// A checkpoint is of another model, or of another run's making.
    #[error("checkpoint {}: {problem}", path.display())]
    CheckpointMismatch {
        /// The file or folder.
        path: PathBuf,
        /// What is there, and what was expected.
        problem: String,
    },
}

impl Error {
    /// Whether the cause most likely lies with another rank.
    pub fn is_from_peer(&self) -> bool {
        match self {
            Self::Backend(error) => error.is_from_peer(),
            Self::CheckpointOfPeer { .. } => true,
            _ => false,
        }
    }

    /// Whether it is of a checkpoint's file that lies in `folder`.
    pub fn is_in(&self, folder: &Path) -> bool {
        match self {
            Self::Checkpoint { path, .. }
            | Self::CheckpointDamaged { path, .. }
            | Self::CheckpointForeign { path, .. } => path.starts_with(folder),
            _ => false,
        }
    }

    /// Whether a file of a checkpoint is missing, cannot be read, is damaged or belongs elsewhere, so that an older one
    /// may do.
    pub fn is_of_a_file(&self) -> bool {
        matches!(
            self,
            Self::Checkpoint { .. } | Self::CheckpointDamaged { .. } | Self::CheckpointForeign { .. }
        )
    }
}
