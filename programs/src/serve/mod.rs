//! HTTP server with OpenAI's API for completions and chat, and with the rewards of a reward model.
//!
//! One thread owns the engine (`worker`). Handlers parse bodies into requests (`received`, `fields`, `body`, `format`)
//! and convert tokens to responses (`text`, `tool_calls`, `answer`), whole or as server-sent events. All requests
//! share the engine's batch. `rewards` has the routes of a reward model. `connections` bounds what a client may hold.

mod access;
mod answer;
mod body;
mod compiler;
mod completions;
mod connections;
mod counters;
mod fields;
mod format;
mod messages;
mod names;
mod received;
mod refusal;
mod rewards;
mod text;
mod tool_calls;
mod worker;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyroll_pipelines::{
    Error, Result,
    inference::Capacity,
    loaded::{LoadedModel, LoadedScorer},
};
use axum::{
    Json, Router,
    extract::Path,
    http::{StatusCode, Uri},
    routing::get,
};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};
use tokio::{net::TcpListener, sync::watch, time::timeout};

pub(crate) use access::{Access, Host, Key, Origin};
pub(crate) use compiler::{TRY_FORMATS, answer_trials};
pub(crate) use connections::{Connection, Connections, Limits};
pub(crate) use names::Names;
use refusal::Refusal;

/// Environment variable with the key that clients send.
pub(crate) const KEY_VARIABLE: &str = "ANYROLL_API_KEY";

/// A model to serve.
pub(crate) enum Served {
    /// One that generates text, with the capacity of its engine.
    Text(LoadedModel, Capacity),
    /// A reward model.
    Scorer(LoadedScorer),
}

/// Options of a server.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Address to listen on.
    pub address: SocketAddr,
    /// Time for running requests after a signal.
    pub grace: Duration,
    /// Bounds on clients.
    pub limits: Limits,
    /// Clients that are answered.
    pub access: Access,
    /// Names of the model.
    pub names: Names,
}

/// Serves until a signal, or until the engine fails. Running requests then have `grace` to finish; a second
/// signal ends the process at once. `ready` gets the address.
///
/// # Errors
/// An address that cannot be listened on, or the engine's error.
pub(crate) fn serve(model: Served, options: Options, ready: impl FnOnce(SocketAddr)) -> Result<()> {
    let failure = Arc::new(Mutex::new(None));
    let (stop, mut stopped) = watch::channel(false);
    let (to_failure, to_stop) = (failure.clone(), stop.clone());
    let failed = move |error| {
        *to_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        to_stop.send_replace(true);
    };
    let generates = matches!(model, Served::Text(..));
    let (routes, engine) = match model {
        Served::Text(model, capacity) => completions::start(model, capacity, options.names.clone(), failed)?,
        Served::Scorer(model) => rewards::start(model, options.names.clone(), failed)?,
    };
    let routes = options.access.guard(router(routes, options.names.clone(), generates));
    stop_by_signal(stop)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(THREAD_STACK_BYTES)
        .build()
        .map_err(Error::Serve)?;
    let served = runtime.block_on(async {
        let address = options.address;
        let listener =
            TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })?;
        let connections = Connections::new(options.limits).map_err(Error::Serve)?;
        ready(listener.local_addr().map_err(Error::Serve)?);
        let mut to_stop = stopped.clone();
        let stop = async move {
            let _ = to_stop.wait_for(|stop| *stop).await;
        };
        let server = tokio::spawn(connections.serve(listener, routes, stop));
        let _ = stopped.wait_for(|stop| *stop).await;
        match timeout(options.grace, server).await {
            Ok(served) => served.map_err(|error| Error::Serve(std::io::Error::other(error))),
            Err(_) => {
                tracing::warn!(grace_s = options.grace.as_secs(), "unfinished requests are aborted");
                Ok(())
            }
        }
    });
    // Drops the remaining requests, so that the engine ends before its libraries do.
    drop(runtime);
    let _ = engine.join();
    served?;
    let failure = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
    failure.map_or(Ok(()), Err)
}

/// Threads that tokenize requests and compile formats, so that neither delays responses.
const BLOCKING_THREADS: usize = 6;
/// Twice the stack on which formats are tried.
const THREAD_STACK_BYTES: usize = 4 << 20;

/// The first signal sets `stop`; a second one has its default effect.
pub(crate) fn stop_by_signal(stop: watch::Sender<bool>) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(Error::Signals)?;
    thread::spawn(move || {
        for signal in signals.forever() {
            if stop.send_replace(true) {
                let _ = emulate_default_handler(signal);
            }
        }
    });
    Ok(())
}

/// Routes of a model that generates text.
const TEXT_ROUTES: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];
/// Routes of a reward model.
const REWARD_ROUTES: [&str; 3] = ["/v1/rewards", "/score", "/v1/score"];

/// The routes of every model, beside those of one that `generates` text, or of a reward model.
fn router(routes: Router, names: Names, generates: bool) -> Router {
    let all = names.clone();
    routes
        .route("/v1/models", get(move || async move { Json(all.list()) }))
        // A name may have a slash.
        .route(
            "/v1/models/{*name}",
            get(move |Path(name): Path<String>| async move { names.about_one(&name) }),
        )
        .route("/health", get(|| async { "ok" }))
        .fallback(move |uri: Uri| async move { unknown(uri.path(), generates) })
        .method_not_allowed_fallback(|| async {
            let message = "this address does not take this method".to_owned();
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message)
        })
}

fn unknown(path: &str, generates: bool) -> Refusal {
    let (own, others) = match generates {
        true => (&TEXT_ROUTES[..], &REWARD_ROUTES[..]),
        false => (&REWARD_ROUTES[..], &TEXT_ROUTES[..]),
    };
    let own = own.join(", ");
    let message = match (others.contains(&path), generates) {
        (true, true) => format!("the model generates text, and {path} is for a reward model: use {own}"),
        (true, false) => {
            format!("the model is a reward model, and {path} is for one that generates text: use {own}")
        }
        (false, _) => format!("unknown path {path}: use {own}, /v1/models, /health or /metrics"),
    };
    Refusal::new(StatusCode::NOT_FOUND, message)
}
