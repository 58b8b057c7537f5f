//! What can end a run.

use anyroll_strategy::Error as StrategyError;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a run: mostly one of a lower layer, told as that layer tells it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is not one that can run.
    #[error(transparent)]
    Config(#[from] crate::config::Error),
    /// The ranks' environment is not one that a launcher makes.
    #[error(transparent)]
    Rank(#[from] crate::launch::RankError),
    /// A rank of this host failed.
    #[error(transparent)]
    Launch(#[from] crate::launch::Error),
    /// A device or a collective failed.
    #[error(transparent)]
    Backend(#[from] anyroll_backends::Error),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] anyroll_models::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] anyroll_strategy::Error),
    /// libtorch raised an exception.
    #[error("libtorch refused an operation")]
    Torch(#[from] tch::TchError),
    /// The data do not fit.
    #[error(transparent)]
    Data(#[from] crate::data::Error),
    /// A text could not be turned into tokens, or back.
    #[error(transparent)]
    Tokenizer(#[from] crate::data::TokenizerError),
    /// Another system's config could not be imported.
    #[error(transparent)]
    Import(#[from] crate::import::Error),
    /// A thread could not be started.
    #[error("a thread that samples or scores could not be started")]
    Thread(#[source] std::io::Error),
    /// A reward cannot be used.
    #[error("the reward `{name}` does not start")]
    Start {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        failure: crate::failure::Failure,
    },
    /// The environment cannot be used.
    #[error("`pipeline.rlvr.rollout.environment` does not start")]
    NoEnvironment(#[source] crate::failure::Failure),
    /// A reward failed more often than its config allows.
    #[error(
        "the reward `{name}` failed on {failed} of {samples} samples, and `max_error_rate` is {max_error_rate}"
    )]
    Reward {
        /// Its name.
        name: String,
        /// On how many it failed, over all ranks.
        failed: usize,
        /// How many there were, over all ranks.
        samples: usize,
        /// The share that may fail.
        max_error_rate: f64,
        /// The last failure of this rank; `None` if the failures are others'.
        source: Option<crate::failure::RewardError>,
    },
    /// With `rollout.strict`, log-probs of the rollout and of training differ.
    #[error(
        "`rollout.strict` promises equal log-probs in sampling and in training, and they differ by up to {largest}"
    )]
    NotStrict {
        /// By how much, at most.
        largest: f64,
    },
    /// `rollout.strict` is not there for this model on this device.
    #[error("`pipeline.rlvr.rollout.strict` cannot be had for this model: {reason}; leave it out")]
    NoStrict {
        /// What is missing.
        reason: String,
    },
    /// Not a single held-out prompt could be measured.
    #[error("no held-out prompt could be measured, since a reward failed on each")]
    NothingMeasured,
    /// A file of the run folder could not be written or read.
    #[error(transparent)]
    Output(#[from] crate::output_error::OutputError),
    /// The ranks that check a backend could not be started or heard.
    #[error("the conformance suite could not run")]
    Conformance(#[source] std::io::Error),
    /// The ranks that measure could not be started or heard.
    #[error("the devices could not be measured")]
    Bench(#[source] std::io::Error),
    /// A line of a file is not what it should be.
    #[error("{}:{line}: {problem}", path.display())]
    InputLine {
        /// The file.
        path: std::path::PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A folder that no model can be loaded from.
    #[error("{} is no run's folder, no checkpoint in one, no model's folder with a config.json, and no adapter's", path.display())]
    NoModel {
        /// The folder.
        path: std::path::PathBuf,
    },
    /// A run's model that writes no text.
    #[error("{} trained {trained}", run.display())]
    NoText {
        /// The run's folder.
        run: std::path::PathBuf,
        /// What it trained, and what that is for.
        trained: &'static str,
    },
    /// A model whose log-probs are NaN.
    #[error(
        "the model's log-probs are NaN: look for infinity, NaN and very large numbers in its weights, or take `--precision \
         fp32`"
    )]
    NoNumbers,
    /// No port is free to meet on.
    #[error("cannot find a free port")]
    Port(#[source] std::io::Error),
    /// The server could not listen, or not go on.
    #[error("cannot serve")]
    Serve(#[source] std::io::Error),
    /// Nobody can read the metrics at this address.
    #[error("cannot serve metrics at {address}: choose another `metrics.prometheus`")]
    Prometheus {
        /// The address.
        address: std::net::SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The user's Python could not write a run for Weights & Biases.
    #[error("{} could not write the run for wandb: {problem}", python.display())]
    Wandb {
        /// The Python.
        python: std::path::PathBuf,
        /// Why.
        problem: String,
    },
    /// Signals could not be caught.
    #[error("cannot catch Ctrl-C")]
    Signals(#[source] std::io::Error),
    /// Nothing of the conformance suite was asked for.
    #[error(
        "no case of the conformance suite has `{filter}` in its name: `ANYROLL_LOG=info` shows them as they run"
    )]
    NoCase {
        /// What their names were to contain.
        filter: String,
    },
    /// `--set` stands beside `--resume`.
    #[error("a run goes on with {} as it is: change the field there, and leave `--set` out", resolved.display())]
    Resumed {
        /// What the run goes on with.
        resolved: std::path::PathBuf,
    },
    /// The training of a reward model is not planned.
    #[error(
        "`anyroll plan` plans runs of models that write or paint, and not those that train a reward model"
    )]
    NoPlan,
    /// Ranks have different configs or data. What `zero_stage: auto` comes to is a part of a config.
    #[error(
        "rank {rank} has {own} where rank 0 has {first}: start all ranks with one config and the same files"
    )]
    Configs {
        /// The first rank with another one.
        rank: usize,
        /// The first line of its config that differs.
        own: String,
        /// That of rank 0.
        first: String,
    },
    /// A host has another folder there, or none.
    #[error(
        "rank {rank} does not find the run's folder {}, into which every rank writes its part of checkpoints: \
         put --output on a file system that all hosts share", folder.display()
    )]
    NotShared {
        /// The first such rank.
        rank: usize,
        /// The folder, as rank 0 has it.
        folder: std::path::PathBuf,
    },
    /// A run's model cannot be exported.
    #[error("cannot export {}: {problem}", run.display())]
    Export {
        /// The run folder.
        run: std::path::PathBuf,
        /// Why.
        problem: String,
    },
    /// A run's last checkpoint cannot be read, and there is one before it.
    #[error(
        "the last checkpoint cannot be read: remove the folder {}, and the run goes on from {}",
        last.display(),
        older.display()
    )]
    LastCheckpoint {
        /// The last one's folder.
        last: std::path::PathBuf,
        /// That of the one before it.
        older: std::path::PathBuf,
        /// What is wrong with the last one.
        source: Box<anyroll_strategy::Error>,
    },
    /// A run cannot go on from where it is said to have stopped.
    #[error("cannot resume {}: {problem}", run.display())]
    Resume {
        /// The run folder.
        run: std::path::PathBuf,
        /// Why.
        problem: String,
    },
}

impl Error {
    /// Whether the cause most likely lies with another rank.
    pub fn is_from_peer(&self) -> bool {
        match self {
            Self::Backend(error) => error.is_from_peer(),
            Self::Strategy(error) => error.is_from_peer(),
            Self::Reward { source, .. } => source.is_none(),
            _ => false,
        }
    }

    /// Help for a user whose run ended with this error, if there is any; `told` is the error's
    /// [`one_line`](crate::error_chain::one_line).
    pub fn help(&self, told: &str) -> Option<&'static str> {
        match self {
            Self::Strategy(error) => help_with_gradients(error),
            _ => None,
        }
        .or_else(|| help_with_memory(told))
    }
}

/// What keeps gradients finite.
fn help_with_gradients(error: &StrategyError) -> Option<&'static str> {
    match error {
        StrategyError::AllSkipped { .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; weights that have infinity or NaN in them, in the folder of \
             `model.path` say, overflow in each",
        ),
        StrategyError::NonFiniteGradient { loss_scale: Some(_), .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; a lower `optimizer.adamw.learning_rate` keeps weights from \
             growing out of it",
        ),
        StrategyError::NonFiniteGradient { step: 1, .. } => Some(
            "nothing was learnt before: look for infinity, NaN and very large numbers in the weights of `model.path`, or \
             for a warm-up whose `optimizer.adamw.learning_rate` is too high",
        ),
        StrategyError::NonFiniteGradient { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` or `optimizer.max_grad_norm`, or more `warmup_steps` in its schedule, \
             keep steps small; `--resume` goes on from the last checkpoint as the folder's `resolved.yaml` says",
        ),
        StrategyError::NonFiniteWeights { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` keeps weights from growing out of `strategy.precision`",
        ),
        _ => None,
    }
}

/// What takes less memory, if an error that ended a run is that a device or the host has no more. Drivers and libtorch
/// have no code for that in common, but words.
fn help_with_memory(error: &str) -> Option<&'static str> {
    let is_full = ["out of memory", "can't allocate memory"].iter().any(|words| error.contains(words));
    is_full.then_some(
        "a smaller `strategy.micro_batch_size`, `strategy.recompute: full`, a higher `strategy.zero_stage`, or fewer \
         samples at a time in `rollout.batch_size` take less; `anyroll plan` shows what each phase takes",
    )
}

#[cfg(test)]
mod tests {
    use super::Error;
    use crate::error_chain::one_line;

    /// What libtorch says of it is told, and not its backtrace.
    #[test]
    fn memory_that_is_not_there_is_told_with_what_takes_less() {
        let tebibytes = tch::Tensor::f_empty([1 << 50], (tch::Kind::Uint8, tch::Device::Cpu));
        let error = Error::from(tebibytes.unwrap_err());
        let told = one_line(&error);
        assert!(told.contains("you tried to allocate 1125899906842624 bytes"), "{told}");
        assert!(!told.contains("frame #") && !told.contains('\n'), "{told}");
        let full = Error::NothingMeasured;
        assert!(full.help(&told).is_some_and(|help| help.contains("micro_batch_size")));
        assert_eq!(full.help("the disk is full"), None);
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_told_with_what_may_mend_it() {
        let check = |step, loss_scale, words: &str| {
            let source = anyroll_strategy::Error::NonFiniteGradient { step, grad_norm: f64::NAN, loss_scale };
            let error = Error::from(source);
            let help = error.help(&one_line(&error)).unwrap();
            assert!(help.contains(words), "{help}");
        };
        check(1, None, "`model.path`");
        check(2, None, "a lower `optimizer.adamw.learning_rate`");
        check(1, Some(1.0), "`strategy.precision: bf16`");
    }
}
