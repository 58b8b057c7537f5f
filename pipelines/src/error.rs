//! What can end a run.

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names folders in a sentence.
fn folders(paths: &[std::path::PathBuf]) -> String {
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    format!("the folder{} {}", if names.len() == 1 { "" } else { "s" }, names.join(" and "))
}

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
        failure: crate::reward::Failure,
    },
    /// The environment cannot be used.
    #[error("`pipeline.rlvr.rollout.environment` does not start")]
    NoEnvironment(#[source] crate::reward::Failure),
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
        source: Option<crate::reward::Error>,
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
    /// A run's last checkpoint cannot be read, and there is a whole one before it.
    #[error(
        "the last checkpoint cannot be read: remove {}, and the run goes on from {}",
        folders(broken),
        older.display()
    )]
    LastCheckpoint {
        /// The folders of the last one, and of those before it that cannot be read either.
        broken: Vec<std::path::PathBuf>,
        /// That of the newest one that is whole.
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
}
