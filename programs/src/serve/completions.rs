//! The routes of a model that generates text: completions and chats.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use anyroll_data::Tokenizer;
use anyroll_pipelines::{Error, Result, inference::Capacity, loaded::LoadedModel};
use axum::{
    Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use tokio::task::spawn_blocking;

use super::{
    answer::{Shape, answer},
    body::{self, ParsedRequest},
    compiler::Compiler,
    counters::Counters,
    fields::Fields,
    names::Names,
    received::Received,
    refusal::Refusal,
    worker::Worker,
};

/// State shared by handlers.
pub(super) struct App {
    pub worker: Worker,
    pub tokenizer: Arc<Tokenizer>,
    /// Names of the model.
    pub names: Names,
    compiler: Arc<Compiler>,
    counters: Arc<Counters>,
    /// Maximum length of a sequence.
    pub max_length: usize,
    requests: AtomicU64,
    /// Number of requests without a seed.
    unseeded: AtomicU64,
}

impl App {
    pub fn next_id(&self) -> String {
        format!("anyroll-{}", self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// A distinct seed for each request without one.
    pub fn next_seed(&self) -> u64 {
        self.unseeded.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Starts the engine's thread, whose error `failed` gets, and returns it with its routes.
///
/// # Errors
/// If the engine or the thread cannot be created.
pub(super) fn start(
    mut model: LoadedModel,
    capacity: Capacity,
    names: Names,
    failed: impl FnOnce(Error) + Send + 'static,
) -> Result<(Router, JoinHandle<()>)> {
    let counters = Arc::new(Counters::default());
    let engine = model.engine(capacity)?;
    counters.set_load(engine.load());
    let failed = |error: anyroll_models::Error| failed(error.into());
    let (worker, thread) = Worker::start(engine, counters.clone(), failed).map_err(Error::Serve)?;
    let app = Arc::new(App {
        worker,
        tokenizer: model.tokenizer.clone(),
        names,
        compiler: Compiler::new(model.tokenizer),
        counters,
        max_length: capacity.longest,
        requests: AtomicU64::new(0),
        unseeded: AtomicU64::new(0),
    });
    let router = Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/metrics", get(|State(app): State<Arc<App>>| async move { app.counters.text() }))
        .with_state(app);
    Ok((router, thread))
}

/// Parser of a request's fields.
type Read = fn(Fields, &App) -> Result<ParsedRequest, String>;

async fn completions(State(app): State<Arc<App>>, received: Received) -> Response {
    respond(app, Shape::Text, received, body::completion).await
}

async fn chat(State(app): State<Arc<App>>, received: Received) -> Response {
    respond(app, Shape::Chat, received, body::chat).await
}

async fn respond(app: Arc<App>, shape: Shape, received: Received, read: Read) -> Response {
    let Received { mut fields, busy } = received;
    if let Err(refusal) = app.names.check(&mut fields) {
        return refusal.into_response();
    }
    // The handler is dropped if the client leaves.
    let client = Arc::new(());
    let (reader, waits) = (app.clone(), Arc::downgrade(&client));
    let asked = spawn_blocking(move || waits.upgrade().map(|_| read(fields, &reader))).await;
    let mut asked = match asked {
        Ok(Some(Ok(asked))) => asked,
        Ok(Some(Err(problem))) => return Refusal::bad_request(problem).into_response(),
        Ok(None) | Err(_) => {
            return Refusal::failed("the request could not be read".to_owned()).into_response();
        }
    };
    if let Some((field, spec)) = asked.format.take() {
        match app.compiler.compile(field, spec).await {
            Ok(format) => {
                asked.requests.iter_mut().for_each(|request| request.format = Some(format.clone()));
            }
            Err(refusal) => return refusal.into_response(),
        }
    }
    answer(&app, shape, asked, busy).await
}
