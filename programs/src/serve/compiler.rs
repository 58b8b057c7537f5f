//! Compilation of formats, none of which holds up the server.
//!
//! A small schema or pattern may take any time and memory. So a process of its own, with bounded memory, compiles each
//! format first, and is ended after some seconds. The server compiles only what has passed there.

use std::{
    io::{self, BufRead, Write},
    num::NonZeroUsize,
    process::Stdio,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use anyroll_backends::give_back_freed_memory;
use anyroll_data::Tokenizer;
use anyroll_models::generation::Format;
use anyroll_pipelines::{
    inference::{Formats, Spec, Vocabulary},
    process_memory::size_bytes,
};
use axum::http::StatusCode;
use nix::sys::{
    prctl,
    resource::{Resource, getrlimit, setrlimit},
    signal::Signal,
};
use serde::Serialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::Semaphore,
    task::spawn_blocking,
    time::timeout,
};

use super::refusal::Refusal;

/// Name of the command that [`answer_trials`].
pub(crate) const TRY_FORMATS: &str = "try-formats";

/// Time of a trial, and of the wait for one.
const MOST_TIME: Duration = Duration::from_secs(5);
/// Time for a process to start and to read the vocabulary.
const START: Duration = Duration::from_secs(60);
/// Memory of a trial beyond the vocabulary's.
const MOST_MEMORY_MB: u64 = 128;
/// Text of a format that takes many times as much memory as a value.
const LARGE_BYTES: usize = 1 << 16;
/// Stack of the thread that compiles, in a trial. The server's threads have more.
const TRIAL_STACK_BYTES: usize = 2 << 20;

/// Compiler of requests' formats.
pub(super) struct Compiler {
    tokenizer: Arc<Tokenizer>,
    /// Built with the first format.
    formats: OnceLock<Result<Formats, String>>,
    turns: Semaphore,
    /// Processes without a trial.
    idle: Mutex<Vec<Trial>>,
}

/// A process that tries formats. It is killed when dropped.
struct Trial {
    _process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Compiler {
    /// Tries formats on up to half of the cores.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Arc<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let turns = Semaphore::new((cores / 2).max(1));
        Arc::new(Self { tokenizer, formats: OnceLock::new(), turns, idle: Mutex::default() })
    }

    /// Compiles the format of the request's `field`.
    pub async fn compile(self: &Arc<Self>, field: &'static str, spec: Spec) -> Result<Format, Refusal> {
        let Ok(turn) = timeout(MOST_TIME, self.turns.acquire()).await else {
            let message = "other formats are being compiled: try again later".to_owned();
            return Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, message));
        };
        let failed = |_| Refusal::failed(format!("`{field}` cannot be compiled"));
        let told = spawn_blocking(move || (line(&spec), spec)).await;
        let (told, spec) = told.map_err(failed)?;
        if let Err(refusal) = self.try_out(field, &told).await {
            let is_large = told.len() > LARGE_BYTES;
            drop((told, spec));
            if is_large {
                let _ = spawn_blocking(give_back_freed_memory).await;
            }
            return Err(refusal);
        }
        let compiler = self.clone();
        let compiled = spawn_blocking(move || compiler.formats()?.compile(&spec)).await;
        drop(turn);
        compiled.map_err(failed)?.map_err(|problem| unsupported(field, &problem))
    }

    fn formats(&self) -> Result<&Formats, String> {
        let build = || Formats::new(&Vocabulary::of(&self.tokenizer)?);
        self.formats.get_or_init(build).as_ref().map_err(Clone::clone)
    }

    /// Compiles a format, told in a line, in a process. If the client leaves meanwhile, the process is killed.
    async fn try_out(&self, field: &'static str, spec: &str) -> Result<(), Refusal> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut trial = match idle {
            Some(trial) => trial,
            None => self.start(field).await?,
        };
        let too_much = |what: String| {
            let message = format!("`{field}` takes more than {what} to compile: make it smaller");
            Err(Refusal::bad_request(message))
        };
        match timeout(MOST_TIME, trial.ask(spec)).await {
            Err(_) => too_much(format!("{} s", MOST_TIME.as_secs())),
            Ok(Err(_)) => too_much(format!("{MOST_MEMORY_MB} MB, or a deeper stack than there is,")),
            Ok(Ok(outcome)) => {
                self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(trial);
                outcome.map_err(|problem| unsupported(field, &problem))
            }
        }
    }

    async fn start(&self, field: &'static str) -> Result<Trial, Refusal> {
        let failed = || Refusal::failed(format!("`{field}` cannot be compiled now"));
        let tokenizer = self.tokenizer.clone();
        let told = spawn_blocking(move || Ok(line(&Vocabulary::of(&tokenizer)?))).await;
        let told = told.map_err(|_| failed())?.map_err(|problem: String| unsupported(field, &problem))?;
        match timeout(START, Trial::start(&told)).await {
            Ok(Ok(Ok(trial))) => Ok(trial),
            Ok(Ok(Err(problem))) => Err(unsupported(field, &problem)),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the process that tries formats does not start");
                Err(failed())
            }
            Err(_) => Err(failed()),
        }
    }
}

fn unsupported(field: &str, problem: &str) -> Refusal {
    Refusal::bad_request(format!("`{field}` is not supported: {problem}"))
}

impl Trial {
    async fn start(vocabulary: &str) -> io::Result<Result<Self, String>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(TRY_FORMATS).env_remove(super::KEY_VARIABLE).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { unreachable!("both are piped") };
        let mut trial = Self { _process: process, input, output: BufReader::new(output) };
        let ready = trial.ask(vocabulary).await?;
        Ok(ready.map(|()| trial))
    }

    /// Sends a line and reads the line that answers it.
    async fn ask(&mut self, line: &str) -> io::Result<Result<(), String>> {
        self.input.write_all(line.as_bytes()).await?;
        let mut answer = String::new();
        self.output.read_line(&mut answer).await?;
        Ok(serde_json::from_str(&answer)?)
    }
}

/// A line of JSON.
fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain data") + "\n"
}

/// Reads a vocabulary and formats, a line each, from standard input, and writes for each if it can be used.
///
/// # Errors
/// Input that is not the server's.
pub(crate) fn answer_trials() -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    let thread = thread::Builder::new().stack_size(TRIAL_STACK_BYTES).spawn(|| -> io::Result<()> {
        let mut lines = io::stdin().lock().lines();
        let Some(vocabulary) = lines.next() else { return Ok(()) };
        let formats = Formats::new(&serde_json::from_str(&vocabulary?)?);
        say(&formats.as_ref().map(|_| ()))?;
        let Ok(formats) = formats else { return Ok(()) };
        for line in lines {
            let spec = serde_json::from_str(&line?)?;
            limit_memory()?;
            say(&formats.compile(&spec).map(|_| ()))?;
        }
        Ok(())
    })?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a format could not be tried")))
}

fn say(answer: &impl Serialize) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(line(answer).as_bytes())?;
    output.flush()
}

/// Bounds the memory that this process may take from now on.
fn limit_memory() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_AS)?;
    let most = (size_bytes("VmSize")? + (MOST_MEMORY_MB << 20)).min(hard);
    Ok(setrlimit(Resource::RLIMIT_AS, most, hard)?)
}
