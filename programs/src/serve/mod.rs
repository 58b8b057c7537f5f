//! HTTP server with OpenAI's API for completions and chat.
//!
//! One thread owns the engine (`worker`). Handlers parse bodies into requests (`received`, `fields`, `body`, `format`)
//! and convert tokens to responses (`text`, `tool_calls`, `answer`), whole or as server-sent events. All requests
//! share the engine's batch. `connections` bounds what a client may hold.

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
mod received;
mod refusal;
mod text;
mod tool_calls;
mod worker;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyroll_pipelines::{Error, Result, inference::Room, loaded::LoadedModel};
use axum::{
    Json, Router,
    extract::Path,
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::{Value, json};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};
use tokio::{net::TcpListener, sync::watch, time::timeout};

pub(crate) use access::{Access, Host, Key, Origin};
use answer::now_s;
pub(crate) use compiler::{TRY_FORMATS, answer_trials};
use connections::Connections;
pub(crate) use connections::Limits;
use refusal::Refusal;

/// Name of the only model.
const MODEL: &str = "anyroll";

/// Environment variable with the key that clients send.
pub(crate) const KEY_VARIABLE: &str = "ANYROLL_API_KEY";

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
}

/// Serves until a signal, or until the engine fails. Running requests then have `grace` to finish; a second
/// signal ends the process at once. `ready` gets the address.
///
/// # Errors
/// An address that cannot be listened on, or the engine's error.
pub(crate) fn serve(
    model: LoadedModel,
    room: Room,
    options: Options,
    ready: impl FnOnce(SocketAddr),
) -> Result<()> {
    let failure = Arc::new(Mutex::new(None));
    let (stop, mut stopped) = watch::channel(false);
    let (to_failure, to_stop) = (failure.clone(), stop.clone());
    let failed = move |error| {
        *to_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        to_stop.send_replace(true);
    };
    let (routes, engine) = completions::start(model, room, failed)?;
    let routes = options.access.guard(router(routes));
    stop_by_signal(stop)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(THREAD_STACK_BYTES)
        .build()
        .map_err(Error::Serve)?;
    let served = runtime.block_on(async {
        let listener = TcpListener::bind(options.address).await?;
        let connections = Connections::new(options.limits)?;
        ready(listener.local_addr()?);
        let mut to_stop = stopped.clone();
        let stop = async move {
            let _ = to_stop.wait_for(|stop| *stop).await;
        };
        let server = tokio::spawn(connections.serve(listener, routes, stop));
        let _ = stopped.wait_for(|stop| *stop).await;
        match timeout(options.grace, server).await {
            Ok(served) => served.map_err(std::io::Error::other),
            Err(_) => {
                tracing::warn!(grace_s = options.grace.as_secs(), "unfinished requests are aborted");
                Ok(())
            }
        }
    });
    // Drops the remaining requests, so that the engine ends before its libraries do.
    drop(runtime);
    let _ = engine.join();
    served.map_err(Error::Serve)?;
    let failure = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
    failure.map_or(Ok(()), |error| Err(error.into()))
}

/// Threads that tokenize requests and compile formats, so that neither delays responses.
const BLOCKING_THREADS: usize = 6;
/// Twice the stack on which formats are tried.
const THREAD_STACK_BYTES: usize = 4 << 20;

/// The first signal sets `stop`; a second one has its default effect.
fn stop_by_signal(stop: watch::Sender<bool>) -> Result<()> {
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

/// The routes of every model, beside those of one kind.
fn router(routes: Router) -> Router {
    let created_s = now_s();
    let about = move || json!({"id": MODEL, "object": "model", "created": created_s, "owned_by": MODEL});
    routes
        .route("/v1/models", get(move || async move { Json(json!({"object": "list", "data": [about()]})) }))
        .route("/v1/models/{name}", get(move |Path(name)| async move { model(name, about()) }))
        .route("/health", get(|| async { "ok" }))
        .fallback(unknown)
        .method_not_allowed_fallback(|| async {
            let message = "this address does not take this method".to_owned();
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message)
        })
}

async fn unknown(uri: Uri) -> Refusal {
    let message = format!(
        "unknown path {}: use /v1/completions, /v1/chat/completions, /v1/models, /health or /metrics",
        uri.path()
    );
    Refusal::new(StatusCode::NOT_FOUND, message)
}

/// The model of this name, `about` which there is this.
fn model(name: String, about: Value) -> Response {
    if name == MODEL {
        return Json(about).into_response();
    }
    let message = format!("unknown model {name:?}: only `{MODEL}` is served");
    Refusal::new(StatusCode::NOT_FOUND, message).into_response()
}
