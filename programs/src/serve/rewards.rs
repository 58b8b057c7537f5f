//! The routes of a reward model: OpenRLHF's remote rewards, and vLLM's scores.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
};

use anyroll_data::Record;
use anyroll_pipelines::{
    Error, Result,
    inference::Texts,
    loaded::{LoadedScorer, ScoredTexts},
};
use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::{sync::oneshot, task::spawn_blocking};

use super::{
    answer::now_s,
    counters::Counters,
    fields::{Fields, must_be},
    names::Names,
    received::Received,
    refusal::{Refusal, untokenized},
};

/// Limit of texts per request.
const MOST_TEXTS: usize = 2048;

/// State shared by handlers.
struct App {
    jobs: Sender<Job>,
    reader: Arc<ScoredTexts>,
    counters: Arc<Counters>,
    names: Names,
    requests: AtomicU64,
}

/// Texts to score. Dropping the receiver of `out` gives them up.
struct Job {
    texts: Vec<Vec<i64>>,
    out: oneshot::Sender<Vec<f64>>,
}

/// A request, ready to be scored.
struct Asked {
    texts: Vec<Vec<i64>>,
    /// Maps scores to 0 to 1.
    sigmoid: bool,
}

/// Starts the model's thread, whose error `failed` gets, and returns it with its routes.
///
/// # Errors
/// If the thread cannot be created.
pub(super) fn start(
    model: LoadedScorer,
    names: Names,
    failed: impl FnOnce(Error) + Send + 'static,
) -> Result<(Router, JoinHandle<()>)> {
    let (jobs, inbox) = mpsc::channel();
    let (reader, counters) = (model.reader.clone(), Arc::new(Counters::default()));
    let thread = thread::Builder::new().name("scorer".into()).spawn(move || {
        if let Err(error) = work(model, &inbox) {
            failed(error);
        }
    });
    let thread = thread.map_err(Error::Serve)?;
    let app = Arc::new(App { jobs, reader, counters, names, requests: AtomicU64::new(0) });
    let router = Router::new()
        .route("/v1/rewards", post(rewards))
        .route("/score", post(score))
        .route("/v1/score", post(score))
        .route("/metrics", get(|State(app): State<Arc<App>>| async move { app.counters.text() }))
        .with_state(app);
    Ok((router, thread))
}

fn work(mut model: LoadedScorer, inbox: &Receiver<Job>) -> Result<()> {
    for Job { texts, out } in inbox {
        let mut scores = Vec::with_capacity(texts.len());
        for batch in texts.chunks(LoadedScorer::BATCH_SIZE) {
            // The client has left.
            if out.is_closed() {
                break;
            }
            scores.extend(model.scores(batch)?);
        }
        // The client may leave.
        let _ = out.send(scores);
    }
    Ok(())
}

async fn rewards(State(app): State<Arc<App>>, received: Received) -> Response {
    respond(
        &app,
        received,
        of_openrlhf,
        |_, scores, _| json!({"rewards": scores, "scores": scores, "extra_logs": {}}),
    )
    .await
}

async fn score(State(app): State<Arc<App>>, received: Received) -> Response {
    let model = app.names.first();
    respond(&app, received, of_vllm, |id, scores, tokens| {
        let entry = |(index, score)| json!({"index": index, "object": "score", "score": score});
        let data: Vec<Value> = scores.iter().enumerate().map(entry).collect();
        json!({
            "id": id,
            "object": "list",
            "created": now_s(),
            "model": model,
            "data": data,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        })
    })
    .await
}

/// Parser of a request's fields.
type Read = fn(Fields, &ScoredTexts) -> Result<Asked, String>;

/// Scores a request. `answer` gets an id, the scores and the number of tokens.
async fn respond(
    app: &App,
    received: Received,
    read: Read,
    answer: impl Fn(String, &[f64], usize) -> Value,
) -> Response {
    let Received { mut fields, busy: _busy } = received;
    if let Err(refusal) = app.names.check(&mut fields) {
        return refusal.into_response();
    }
    let reader = app.reader.clone();
    let Asked { texts, sigmoid } = match spawn_blocking(move || read(fields, &reader)).await {
        Ok(Ok(asked)) => asked,
        Ok(Err(problem)) => return Refusal::bad_request(problem).into_response(),
        Err(_) => return Refusal::failed("the request could not be read".to_owned()).into_response(),
    };
    let tokens = texts.iter().map(Vec::len).sum();
    app.counters.request(tokens);
    let (out, scores) = oneshot::channel();
    // If the thread is gone, `out` is dropped.
    let _ = app.jobs.send(Job { texts, out });
    let Ok(mut scores) = scores.await else {
        return Refusal::failed("the model has failed".to_owned()).into_response();
    };
    if let Some(at) = scores.iter().position(|score| !score.is_finite()) {
        return Refusal::failed(format!("the score of text {at} is {}", scores[at])).into_response();
    }
    if sigmoid {
        scores.iter_mut().for_each(|score| *score = 1.0 / (1.0 + (-*score).exp()));
    }
    let id = format!("anyroll-{}", app.requests.fetch_add(1, Ordering::Relaxed));
    Json(answer(id, &scores, tokens)).into_response()
}

/// Parses `POST /v1/rewards`.
fn of_openrlhf(mut fields: Fields, reader: &ScoredTexts) -> Result<Asked, String> {
    let texts = "a text or a list of texts";
    let queries: Option<Texts> = fields.take("query", texts)?;
    let queries = queries.ok_or("`query` is missing: give the texts of prompts with their completions")?;
    let queries = counted("query", queries.into_vec())?;
    let prompts: Option<Texts> = fields.take("prompts", texts)?;
    let prompts = prompts.map(Texts::into_vec);
    let messages: Option<Vec<Vec<Value>>> = fields.take("messages", "a list of messages for each query")?;
    let finished: Option<Vec<bool>> = fields.take("finished", "a list of true or false")?;
    // A reward model has no use for right answers.
    fields.0.remove("labels");
    fields.finish()?;
    let lengths = [
        ("prompts", prompts.as_ref().map(Vec::len)),
        ("messages", messages.as_ref().map(Vec::len)),
        ("finished", finished.as_ref().map(Vec::len)),
    ];
    for (field, length) in lengths.into_iter().filter_map(|(field, length)| Some((field, length?))) {
        if length != queries.len() {
            return Err(format!(
                "`{field}` has {length} entries, must have {}, as `query` has",
                queries.len()
            ));
        }
    }
    if messages.is_some() && prompts.is_none() {
        return Err("`messages` needs `prompts`, with which each query begins".to_owned());
    }
    let encode = |(at, query): (usize, &String)| {
        let finished = finished.as_ref().is_none_or(|finished| finished[at]);
        let prompt = prompts.as_ref().map(|prompts| &prompts[at]);
        let tokens = match prompt {
            Some(prompt) => {
                let completion = query.strip_prefix(prompt.as_str());
                let completion =
                    completion.ok_or_else(|| format!("`query[{at}]` must begin with `prompts[{at}]`"))?;
                let messages = messages.as_ref().map_or(Vec::new(), |messages| messages[at].clone());
                let record = Record { prompt: prompt.clone(), messages, ..Record::default() };
                match reader.is_rendered(&record) {
                    true => reader.encode_text(query, finished),
                    false => reader.encode(&record, completion, finished),
                }
            }
            None => reader.encode_text(query, finished),
        };
        let tokens = tokens.map_err(|error| format!("`query[{at}]`: {}", untokenized(&error)))?;
        fitting(reader, &format!("query[{at}]"), tokens)
    };
    let texts = queries.iter().enumerate().map(encode).collect::<Result<_, String>>()?;
    Ok(Asked { texts, sigmoid: false })
}

/// Parses `POST /score`. The first texts are prompts, the second ones completions.
fn of_vllm(mut fields: Fields, reader: &ScoredTexts) -> Result<Asked, String> {
    const NAMES: [[&str; 2]; 3] = [["text_1", "text_2"], ["queries", "documents"], ["data_1", "data_2"]];
    let given = NAMES.into_iter().find(|names| names.iter().any(|name| fields.0.contains_key(*name)));
    let [first, second] = given.unwrap_or(NAMES[0]);
    let mut texts = |field: &'static str| {
        let texts: Option<Texts> = fields.take(field, "a text or a list of texts")?;
        let texts = texts.ok_or_else(|| format!("`{field}` is missing: give `{first}` and `{second}`"))?;
        counted(field, texts.into_vec())
    };
    let (prompts, completions) = (texts(first)?, texts(second)?);
    let sigmoid = fields.flag("use_activation")?;
    fields.finish()?;
    if prompts.len() != 1 && prompts.len() != completions.len() {
        let (given, expected) = (prompts.len(), completions.len());
        return Err(format!("`{first}` has {given} texts, must have 1, or {expected} as `{second}` has"));
    }
    let encode = |(at, completion): (usize, &String)| {
        let prompt = prompts[at.min(prompts.len() - 1)].clone();
        let tokens = reader.encode(&Record { prompt, ..Record::default() }, completion, true);
        let tokens = tokens.map_err(|error| format!("`{second}[{at}]`: {}", untokenized(&error)))?;
        fitting(reader, &format!("{second}[{at}]"), tokens)
    };
    let texts = completions.iter().enumerate().map(encode).collect::<Result<_, String>>()?;
    Ok(Asked { texts, sigmoid })
}

/// Texts of a field, if there are any and not too many.
fn counted(field: &str, texts: Vec<String>) -> Result<Vec<String>, String> {
    match texts.len() {
        0 => Err(must_be(field, "a list of at least one text")),
        1..=MOST_TEXTS => Ok(texts),
        count => Err(format!("`{field}` has {count} texts, must have at most {MOST_TEXTS}")),
    }
}

/// Tokens of a text that the model can read.
fn fitting(reader: &ScoredTexts, field: &str, tokens: Vec<i64>) -> Result<Vec<i64>, String> {
    match (1..=reader.longest()).contains(&tokens.len()) {
        true => Ok(tokens),
        false => Err(format!("`{field}` has {} tokens, must have 1 to {}", tokens.len(), reader.longest())),
    }
}
