//! Errors that end a run.

use anyroll_strategy::Error as StrategyError;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names folders in a sentence.
fn folders(paths: &[std::path::PathBuf]) -> String {
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    format!("the folder{} {}", if names.len() == 1 { "" } else { "s" }, names.join(" and "))
}

/// An error of a run, usually one of a lower layer, whose message is shown unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration cannot run.
    #[error(transparent)]
    Config(#[from] anyroll_config::Error),
    /// A launcher set the ranks' environment variables inconsistently.
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
    /// The data do not match the config.
    #[error(transparent)]
    Data(#[from] anyroll_data::Error),
    /// A text could not be encoded, or tokens could not be decoded.
    #[error(transparent)]
    Tokenizer(#[from] anyroll_data::TokenizerError),
    /// Another system's config could not be imported. The importer is a crate that this one does not use.
    #[error(transparent)]
    Import(Box<dyn std::error::Error + Send + Sync>),
    /// An engine of a rollout host is gone.
    #[error("the engine on {host} is gone: {problem}")]
    LostEngine {
        /// Its host.
        host: String,
        /// Sign of its end.
        problem: String,
    },
    /// Rollout hosts have not come.
    #[error(
        "this rank has {there} of {least} engines of rollout hosts, and waited for {waited:?}: start `anyroll rollout \
         CONFIG --trainer HOST` on them, or write a longer `roles.rollout.hosts.join_timeout_s`"
    )]
    NoRolloutHost {
        /// Engines that it needs.
        least: usize,
        /// Engines that it has.
        there: usize,
        /// Time for which it waited.
        waited: std::time::Duration,
    },
    /// The port for rollout hosts cannot be used.
    #[error(
        "cannot listen to rollout hosts at port {port}: write another `roles.rollout.hosts.port`, on all hosts"
    )]
    RolloutPort {
        /// The port.
        port: u16,
        /// Cause.
        source: std::io::Error,
    },
    /// A rollout host has not found the trainer.
    #[error(
        "no trainer was found at {address} within {waited:?}: is `anyroll run` started there, with this config?"
    )]
    NoTrainer {
        /// Its address and port.
        address: String,
        /// Time for which it was waited for.
        waited: std::time::Duration,
        /// Failure of the last attempt.
        source: std::io::Error,
    },
    /// A trainer does not take this rollout host.
    #[error("the trainer at {address} and this rollout host do not match: {reason}")]
    TrainerRefuses {
        /// Its address and port.
        address: String,
        /// The reason.
        reason: String,
    },
    /// The trainer of a rollout host has ended before its run has.
    #[error("the trainer at {address} is gone: {problem}")]
    TrainerGone {
        /// Its address and port.
        address: String,
        /// Sign of its end.
        problem: crate::link::Lost,
    },
    /// A thread could not be started.
    #[error("a thread that samples or scores could not be started")]
    Thread(#[source] std::io::Error),
    /// A reward cannot be used.
    #[error(transparent)]
    Start(#[from] anyroll_reward::StartError),
    /// The environment cannot be used.
    #[error("`pipeline.rlvr.rollout.environment` does not start")]
    NoEnvironment(#[source] anyroll_reward::Failure),
    /// A reward failed more often than its config allows.
    #[error(
        "the reward `{name}` failed on {failed} of {samples} samples, and `max_error_rate` is {max_error_rate}"
    )]
    Reward {
        /// Its name.
        name: String,
        /// Failed samples over all ranks.
        failed: usize,
        /// All samples, over all ranks.
        samples: usize,
        /// The fraction that may fail.
        max_error_rate: f64,
        /// The last failure on this rank; `None` if only other ranks had failures.
        source: Option<anyroll_reward::Error>,
    },
    /// With `rollout.strict`, log-probs of the rollout and of training differ.
    #[error(
        "`rollout.strict` requires equal log-probs in sampling and training, but they differ by up to {largest}"
    )]
    NotStrict {
        /// The largest difference.
        largest: f64,
    },
    /// `rollout.strict` is not supported for this model on this device.
    #[error("`pipeline.rlvr.rollout.strict` is not supported for this model: {reason}; leave it out")]
    NoStrict {
        /// The missing requirement.
        reason: String,
    },
    /// The run was to stop, and completions were not scored in time. The loop then ends it without the step.
    #[error("the run was to stop before all completions were scored")]
    Unscored,
    /// Not a single held-out prompt could be measured.
    #[error("no held-out prompt could be measured, since a reward failed on each")]
    NothingMeasured,
    /// A file of the run folder could not be written or read.
    #[error(transparent)]
    Output(#[from] crate::output_error::OutputError),
    /// The ranks that check a backend could not be started, or their results not read.
    #[error("the conformance suite could not run")]
    Conformance(#[source] std::io::Error),
    /// The ranks that run a benchmark could not be started, or their results not read.
    #[error("the devices could not be measured")]
    Bench(#[source] std::io::Error),
    /// A line of an input file is invalid.
    #[error("{}:{line}: {problem}", path.display())]
    InputLine {
        /// The file.
        path: std::path::PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem with it.
        problem: String,
    },
    /// A model that is neither a folder nor in the hub's cache.
    #[error("there is no folder {}, and {problem}: fetch it with `{command}`, or pass `--download`", path.display())]
    NotFetched {
        /// The path that the name would be.
        path: std::path::PathBuf,
        /// The problem with the cache or the download.
        problem: String,
        /// The command that downloads it.
        command: String,
    },
    /// A folder that no model can be loaded from.
    #[error("{} is not a run folder, a checkpoint in one, a model folder with a config.json, or an adapter folder", path.display())]
    NoModel {
        /// The folder.
        path: std::path::PathBuf,
    },
    /// A run's model that generates no text.
    #[error("{} trained {trained}", run.display())]
    NoText {
        /// The run's folder.
        run: std::path::PathBuf,
        /// The kind of model that it trained, and the command for it.
        trained: &'static str,
    },
    /// A model whose log-probs are NaN.
    #[error(
        "the model's log-probs are NaN: look for infinity, NaN and very large numbers in its weights, or take `--precision \
         fp32`"
    )]
    NoNumbers,
    /// No port is free for the ranks' rendezvous.
    #[error("cannot find a free port")]
    Port(#[source] std::io::Error),
    /// The server could not listen or stopped with an error.
    #[error("cannot serve")]
    Serve(#[source] std::io::Error),
    /// The address of a server cannot be used.
    #[error("cannot listen at {address}: choose another `--port` (0 takes a free one), or another `--host`")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// Cause.
        source: std::io::Error,
    },
    /// A path at which there is no run to watch.
    #[error("cannot watch {}: {problem}", path.display())]
    Watch {
        /// The path.
        path: std::path::PathBuf,
        /// The problem with it.
        problem: String,
    },
    /// The address of the metrics server cannot be used.
    #[error("cannot serve metrics at {address}: choose another `metrics.prometheus`")]
    Prometheus {
        /// The address.
        address: std::net::SocketAddr,
        /// Cause.
        source: std::io::Error,
    },
    /// The user's Python could not write a run for Weights & Biases.
    #[error("{} could not write the run for wandb: {problem}", python.display())]
    Wandb {
        /// The Python.
        python: std::path::PathBuf,
        /// The problem.
        problem: String,
    },
    /// A tracker did not get everything of a run.
    #[error("nothing more is sent: {problem}")]
    Upload {
        /// The problems.
        problem: String,
    },
    /// The file of the quickstart exists with other contents.
    #[error(
        "{} was changed: train with it by `anyroll run {}`, or delete it, and `quickstart` writes it anew",
        path.display(), path.display()
    )]
    Quickstart {
        /// The file.
        path: std::path::PathBuf,
    },
    /// The run that tests an installation failed.
    #[error("this installation does not train: {problem}")]
    Trial {
        /// The problem, with the output of the run.
        problem: String,
    },
    /// The programs of this installation could not be started.
    #[error("cannot start {}", program.display())]
    Program {
        /// The program.
        program: std::path::PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// Signals could not be caught.
    #[error("cannot catch Ctrl-C")]
    Signals(#[source] std::io::Error),
    /// No case of the conformance suite matches the filter.
    #[error(
        "no case of the conformance suite has `{filter}` in its name: `ANYROLL_LOG=info` lists them as they run"
    )]
    NoCase {
        /// Text that the names had to contain.
        filter: String,
    },
    /// `--set` was given with `--resume`.
    #[error("a resumed run uses {} unchanged: edit the field there, and leave out `--set`", resolved.display())]
    Resumed {
        /// Config of the resumed run.
        resolved: std::path::PathBuf,
    },
    /// `--restarts` was given to a rank of another launcher.
    #[error(
        "--restarts is for ranks that anyroll starts, and another launcher started this one: let that start them again \
         (torchrun has --max-restarts, Slurm --requeue), with --auto-resume in place of --restarts"
    )]
    Restarts,
    /// The run can go on with no smaller number of hosts.
    #[error("`elastic.min` is {min}, and with {nnodes} hosts the run could not go on without one: {problem}")]
    NotElastic {
        /// Least number of hosts.
        min: usize,
        /// Number of hosts.
        nnodes: usize,
        /// Problem of the largest smaller number.
        problem: String,
    },
    /// `--nnodes` was given to a rank of another launcher.
    #[error(
        "--nnodes is for hosts on which anyroll starts the ranks, and another launcher started this one, since RANK is set: \
         leave --nnodes out, or start one `anyroll run` on each host without that launcher"
    )]
    StartedHosts,
    /// The index of this host is out of range.
    #[error("--node-rank is {node_rank}, must be below --nnodes, which is {nnodes}")]
    NodeRank {
        /// The index.
        node_rank: u32,
        /// Number of hosts.
        nnodes: u32,
    },
    /// `--auto-resume` found a run of another config.
    #[error(
        "{} holds a run with {there} where this one has {here}: choose another --output, or continue that run with --resume",
        folder.display()
    )]
    OtherRun {
        /// The run's folder.
        folder: std::path::PathBuf,
        /// The first line of its config that differs.
        there: String,
        /// The same line of this config.
        here: String,
    },
    /// Memory plans do not cover the training of a reward model, or of the heads of ILQL.
    #[error(
        "`anyroll plan` supports runs of text and image models, not runs that train a reward model or `ilql`"
    )]
    NoPlan,
    /// A step's time is not known.
    #[error(transparent)]
    NoTime(#[from] crate::no_time::NoTime),
    /// Ranks have different configs or data. The choice of `zero_stage: auto` is part of a config.
    #[error(
        "rank {rank} has {own} where rank 0 has {first}: start all ranks with one config and the same files"
    )]
    Configs {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first line of its config that differs.
        own: String,
        /// The same line of rank 0.
        first: String,
    },
    /// A store of objects failed.
    #[error(transparent)]
    Storage(#[from] crate::storage::StorageError),
    /// The newest checkpoint could not be brought back from the store.
    #[error("the newest checkpoint could not be read from `checkpoint.storage`: {problem}")]
    NotRestored {
        /// The rank, and the reason.
        problem: String,
    },
    /// The run is over, and its last checkpoint is on this host only.
    #[error("{problem}; it is in the folders of the hosts")]
    NotStored {
        /// The checkpoint and the reason.
        problem: String,
    },
    /// A new run would mix its checkpoints with others.
    #[error(
        "`checkpoint.storage` {url} holds checkpoints of a run: continue it with --auto-resume, or name another place"
    )]
    Stored {
        /// The place.
        url: String,
    },
    /// A host has another folder at the run's path, or none.
    #[error(
        "rank {rank} does not see the run folder {}, where every rank writes its part of a checkpoint: \
         put --output on a file system that all hosts share, or name a store in `checkpoint.storage`", folder.display()
    )]
    NotShared {
        /// The first rank without it.
        rank: usize,
        /// The folder, as on rank 0.
        folder: std::path::PathBuf,
    },
    /// Rank 0 would encode a run's texts into a folder that other hosts do not see.
    #[error(
        "texts are encoded into the run's folder, which some hosts do not see: encode them before by `anyroll embed`, or put \
         --output on a file system that all hosts share"
    )]
    EncodesApart,
    /// A run's model cannot be exported.
    #[error("cannot export {}: {problem}", run.display())]
    Export {
        /// The run folder.
        run: std::path::PathBuf,
        /// The problem.
        problem: String,
    },
    /// A run's last checkpoint cannot be read, but an earlier complete one exists.
    #[error(
        "the last checkpoint cannot be read: remove {}, and the run resumes from {}",
        folders(broken),
        older.display()
    )]
    LastCheckpoint {
        /// Folders of the last checkpoint, and of those before it that cannot be read either.
        broken: Vec<std::path::PathBuf>,
        /// Folder of the newest complete one.
        older: std::path::PathBuf,
        /// The problem with the last one.
        source: Box<anyroll_strategy::Error>,
    },
    /// A run cannot resume from its folder or its checkpoint.
    #[error("cannot resume {}: {problem}", run.display())]
    Resume {
        /// The run folder.
        run: std::path::PathBuf,
        /// The problem.
        problem: String,
    },
}

impl Error {
    /// Returns true if the cause most likely lies with another rank.
    pub fn is_from_peer(&self) -> bool {
        match self {
            Self::Backend(error) => error.is_from_peer(),
            Self::Strategy(error) => error.is_from_peer(),
            Self::Reward { source, .. } => source.is_none(),
            _ => false,
        }
    }

    /// Help for a user whose run ended with this error, if there is any; `told` is the error's
    /// [`one_line`](anyroll_config::error_chain::one_line).
    pub fn help(&self, told: &str) -> Option<&'static str> {
        match self {
            Self::Strategy(error) => help_with_gradients(error),
            _ => None,
        }
        .or_else(|| help_with_memory(told))
    }
}

/// Advice that keeps gradients finite.
fn help_with_gradients(error: &StrategyError) -> Option<&'static str> {
    match error {
        StrategyError::AllSkipped { .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; weights with infinity or NaN, in the folder of \
             `model.path` for example, overflow in each step",
        ),
        StrategyError::NonFiniteGradient { loss_scale: Some(_), .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; a lower `optimizer.adamw.learning_rate` keeps weights from \
             growing out of it",
        ),
        StrategyError::NonFiniteGradient { step: 1, .. } => Some(
            "the weights were not trained before: look for infinity, NaN and very large numbers in the weights of `model.path`, or \
             for a warm-up whose `optimizer.adamw.learning_rate` is too high",
        ),
        StrategyError::NonFiniteGradient { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` or `optimizer.max_grad_norm`, or more `warmup_steps` in its schedule, \
             keep steps small; `--resume` continues from the last checkpoint with the folder's `resolved.yaml`",
        ),
        StrategyError::NonFiniteWeights { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` keeps weights from growing out of `strategy.precision`",
        ),
        _ => None,
    }
}

/// Advice that saves memory, if the device or the host is out of memory. Drivers and libtorch have no common
/// code for that, only messages.
fn help_with_memory(error: &str) -> Option<&'static str> {
    let is_full = ["out of memory", "can't allocate memory"].iter().any(|words| error.contains(words));
    is_full.then_some(
        "a smaller `strategy.micro_batch_size`, `strategy.recompute: full`, a higher `strategy.zero_stage`, or \
         a smaller `rollout.batch_size` need less memory; `anyroll plan` shows what each phase needs",
    )
}

#[cfg(test)]
mod tests {
    use super::Error;
    use anyroll_config::error_chain::one_line;

    /// libtorch's message is kept, its backtrace is not.
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
