//! A model behind HTTP, with OpenAI's interface for completions and chat.
//!
//! One thread owns the engine (`worker`); handlers turn bodies into requests (`fields`, `body`) and tokens into answers
//! (`text`, `answer`), whole or as server-sent events. All requests share the engine's batch.

mod answer;
mod body;
mod counters;
mod fields;
mod text;
mod worker;

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::{
    Json, Router,
    extract::{Path, State, rejection::JsonRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Map, Value, json};
use tokio::{net::TcpListener, sync::Notify};

use crate::{
    Error, Result,
    data::Tokenizer,
    inference::{LoadedModel, Room},
};
use answer::{Refusal, Shape, answer, now_s};
use body::Asked;
use counters::Counters;
use fields::Fields;
use worker::Worker;

/// What the one model is called.
const MODEL: &str = "anyroll";

/// What handlers share.
struct App {
    worker: Worker,
    tokenizer: Arc<Tokenizer>,
    counters: Arc<Counters>,
    /// Tokens of the longest sequence.
    max_length: usize,
    requests: AtomicU64,
    /// When it was started.
    created_s: u64,
}

impl App {
    fn next_id(&self) -> String {
        format!("anyroll-{}", self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// A request that names no seed has one of its own.
    fn next_seed(&self) -> u64 {
        self.requests.load(Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Serves until the process is ended, or the engine fails. `ready` gets the address that is listened on.
///
/// # Errors
/// An address that cannot be listened on, or the engine's error.
pub fn serve(
    mut model: LoadedModel,
    room: Room,
    address: SocketAddr,
    ready: impl FnOnce(SocketAddr),
) -> Result<()> {
    let counters = Arc::new(Counters::default());
    let engine = model.engine(room)?;
    counters.set_load(engine.load());
    let (failure, ended) = (Arc::new(Mutex::new(None)), Arc::new(Notify::new()));
    let (to_failure, to_ended) = (failure.clone(), ended.clone());
    let failed = move |error| {
        *to_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        to_ended.notify_one();
    };
    let app = Arc::new(App {
        worker: Worker::start(engine, counters.clone(), failed).map_err(Error::Serve)?,
        tokenizer: model.tokenizer.clone(),
        counters,
        max_length: room.longest,
        requests: AtomicU64::new(0),
        created_s: now_s(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Serve)?;
    let served = runtime.block_on(async {
        let listener = TcpListener::bind(address).await?;
        ready(listener.local_addr()?);
        axum::serve(listener, router(app)).with_graceful_shutdown(async move { ended.notified().await }).await
    });
    served.map_err(Error::Serve)?;
    let failure = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
    failure.map_or(Ok(()), |error| Err(error.into()))
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/health", get(|| async { "ok" }))
        .route("/metrics", get(|State(app): State<Arc<App>>| async move { app.counters.text() }))
        .with_state(app)
}

/// A request's body, or why it is none.
type Body = Result<Json<Map<String, Value>>, JsonRejection>;

async fn completions(State(app): State<Arc<App>>, body: Body) -> Response {
    respond(&app, Shape::Text, body, body::completion).await
}

async fn chat(State(app): State<Arc<App>>, body: Body) -> Response {
    respond(&app, Shape::Chat, body, body::chat).await
}

async fn respond(
    app: &App,
    shape: Shape,
    body: Body,
    read: impl Fn(Fields, &App) -> Result<Asked, String>,
) -> Response {
    let asked = match body {
        Ok(Json(fields)) => read(Fields(fields), app).map_err(Refusal::bad_request),
        Err(error) => Err(Refusal { status: error.status(), message: error.body_text() }),
    };
    match asked {
        Ok(asked) => answer(app, shape, asked).await,
        Err(refusal) => refusal.into_response(),
    }
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [about(&app)]}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    if name == MODEL {
        return Json(about(&app)).into_response();
    }
    let message = format!("there is no model {name:?}: the one that is served is `{MODEL}`");
    Refusal { status: StatusCode::NOT_FOUND, message }.into_response()
}

fn about(app: &App) -> Value {
    json!({"id": MODEL, "object": "model", "created": app.created_s, "owned_by": MODEL})
}
