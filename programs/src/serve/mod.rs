//! HTTP server with OpenAI's API for completions and chat.
//!
//! One thread owns the engine (`worker`). Handlers parse bodies into requests (`fields`, `body`, `format`)
//! and convert tokens to responses (`text`, `calls`, `answer`), whole or as server-sent events. All requests
//! share the engine's batch.

mod answer;
mod body;
mod counters;
mod fields;
mod format;
mod messages;
mod text;
mod tool_calls;
mod worker;

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyroll_data::Tokenizer;
use anyroll_pipelines::{
    Error, Result,
    inference::{Formats, Room},
    loaded::LoadedModel,
};
use axum::{
    Json, Router,
    extract::{Path, State, rejection::JsonRejection},
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};
use tokio::{net::TcpListener, sync::watch, time::timeout};

use answer::{Refusal, Shape, answer, now_s};
use body::ParsedRequest;
use counters::Counters;
use fields::Fields;
use worker::Worker;

/// Name of the only model.
const MODEL: &str = "anyroll";

/// State shared by handlers.
struct App {
    worker: Worker,
    tokenizer: Arc<Tokenizer>,
    formats: Formats,
    counters: Arc<Counters>,
    /// Maximum length of a sequence.
    max_length: usize,
    requests: AtomicU64,
    /// Number of requests without a seed.
    unseeded: AtomicU64,
    /// Start time.
    created_s: u64,
}

impl App {
    fn next_id(&self) -> String {
        format!("anyroll-{}", self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// A distinct seed for each request without one.
    fn next_seed(&self) -> u64 {
        self.unseeded.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Serves until a signal, or until the engine fails. Running requests then have `grace` to finish; a second
/// signal ends the process at once. `ready` gets the address.
///
/// # Errors
/// An address that cannot be listened on, or the engine's error.
pub fn serve(
    mut model: LoadedModel,
    room: Room,
    address: SocketAddr,
    grace: Duration,
    ready: impl FnOnce(SocketAddr),
) -> Result<()> {
    let counters = Arc::new(Counters::default());
    let engine = model.engine(room)?;
    counters.set_load(engine.load());
    let failure = Arc::new(Mutex::new(None));
    let (stop, mut stopped) = watch::channel(false);
    let (to_failure, to_stop) = (failure.clone(), stop.clone());
    let failed = move |error| {
        *to_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        to_stop.send_replace(true);
    };
    let (worker, engine) = Worker::start(engine, counters.clone(), failed).map_err(Error::Serve)?;
    let app = Arc::new(App {
        worker,
        tokenizer: model.tokenizer.clone(),
        formats: Formats::new(model.tokenizer.clone()),
        counters,
        max_length: room.longest,
        requests: AtomicU64::new(0),
        unseeded: AtomicU64::new(0),
        created_s: now_s(),
    });
    stop_by_signal(stop)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(READERS)
        .build()
        .map_err(Error::Serve)?;
    let served = runtime.block_on(async {
        let listener = TcpListener::bind(address).await?;
        ready(listener.local_addr()?);
        let mut to_stop = stopped.clone();
        let server = axum::serve(listener, router(app)).with_graceful_shutdown(async move {
            let _ = to_stop.wait_for(|stop| *stop).await;
        });
        let server = tokio::spawn(server.into_future());
        let _ = stopped.wait_for(|stop| *stop).await;
        match timeout(grace, server).await {
            Ok(served) => served.map_err(std::io::Error::other)?,
            Err(_) => {
                tracing::warn!(grace_s = grace.as_secs(), "unfinished requests are aborted");
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

/// Threads that tokenize requests, so that a long prompt does not delay responses.
const READERS: usize = 4;

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

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/health", get(|| async { "ok" }))
        .route("/metrics", get(|State(app): State<Arc<App>>| async move { app.counters.text() }))
        .fallback(unknown)
        .method_not_allowed_fallback(|| async {
            let message = "this address does not take this method".to_owned();
            Refusal { status: StatusCode::METHOD_NOT_ALLOWED, message }
        })
        .with_state(app)
}

async fn unknown(uri: Uri) -> Refusal {
    let message = format!(
        "unknown path {}: use /v1/completions, /v1/chat/completions, /v1/models, /health or /metrics",
        uri.path()
    );
    Refusal { status: StatusCode::NOT_FOUND, message }
}

/// A parsed body, or the reason why it is invalid.
type Body = Result<Json<Value>, JsonRejection>;

/// Parser of a request's fields.
type Read = fn(Fields, &App) -> Result<ParsedRequest, String>;

async fn completions(State(app): State<Arc<App>>, body: Body) -> Response {
    respond(app, Shape::Text, body, body::completion).await
}

async fn chat(State(app): State<Arc<App>>, body: Body) -> Response {
    respond(app, Shape::Chat, body, body::chat).await
}

async fn respond(app: Arc<App>, shape: Shape, body: Body, read: Read) -> Response {
    let fields = match body {
        Ok(Json(Value::Object(fields))) => Fields(fields),
        Ok(_) => return Refusal::bad_request("the body must be a JSON object".to_owned()).into_response(),
        Err(error) => return not_json(&error).into_response(),
    };
    let reader = app.clone();
    let asked = tokio::task::spawn_blocking(move || read(fields, &reader)).await;
    match asked.expect("what refuses a request does not panic") {
        Ok(asked) => answer(&app, shape, asked).await,
        Err(problem) => Refusal::bad_request(problem).into_response(),
    }
}

/// Error for a body that is not JSON.
fn not_json(error: &JsonRejection) -> Refusal {
    let message = match error {
        JsonRejection::MissingJsonContentType(_) => "`Content-Type` must be application/json".to_owned(),
        JsonRejection::JsonSyntaxError(error) => {
            let mut innermost: &dyn std::error::Error = error;
            while let Some(source) = innermost.source() {
                innermost = source;
            }
            format!("the body is not JSON: {innermost}")
        }
        _ if error.status() == StatusCode::PAYLOAD_TOO_LARGE => "the body has more than 2 MB".to_owned(),
        _ => error.body_text(),
    };
    Refusal { status: error.status(), message }
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [about(&app)]}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    if name == MODEL {
        return Json(about(&app)).into_response();
    }
    let message = format!("unknown model {name:?}: only `{MODEL}` is served");
    Refusal { status: StatusCode::NOT_FOUND, message }.into_response()
}

fn about(app: &App) -> Value {
    json!({"id": MODEL, "object": "model", "created": app.created_s, "owned_by": MODEL})
}
