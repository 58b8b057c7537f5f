//! The thread that owns the engine: requests arrive over a channel, tokens leave over one channel per
//! request.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
};

use anyroll_config::error_chain::one_line;
use anyroll_models::{
    Completion, Engine, Request,
    generation::{Ending, SampleId},
};
use anyroll_pipelines::loaded::check_numbers;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::counters::Counters;

/// Message to a request: new tokens of one of its samples, or a failure.
pub(super) type Message = Result<Tokens, Problem>;

/// Failure of a request.
#[derive(Debug)]
pub(super) enum Problem {
    /// It is invalid.
    Request(String),
    /// The model's outputs are NaN.
    Model(String),
    /// The grammar of its format failed.
    Format,
}

/// New tokens of a sample, and the reason if it ended.
#[derive(Debug)]
pub(super) struct Tokens {
    pub sample: usize,
    pub tokens: Vec<i64>,
    pub logprobs: Vec<f32>,
    /// [`Completion::top_logprobs`].
    pub likeliest: Vec<Vec<(i64, f32)>>,
    pub ending: Option<Ending>,
}

/// Handle of the engine's thread.
#[derive(Clone, Debug)]
pub(super) struct Worker {
    jobs: Sender<Job>,
}

#[derive(Debug)]
struct Job {
    requests: Vec<Request>,
    out: UnboundedSender<Message>,
}

/// A sample with its receiver.
struct ActiveSample {
    sample: usize,
    out: UnboundedSender<Message>,
    /// Number of tokens already sent.
    told: usize,
}

impl Worker {
    /// Starts the thread. It ends when the last handle is dropped and no request is left, or with the
    /// engine's error, which `failed` gets.
    pub fn start(
        engine: Engine,
        counters: Arc<Counters>,
        failed: impl FnOnce(anyroll_models::Error) + Send + 'static,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (jobs, inbox) = mpsc::channel();
        let thread = thread::Builder::new().name("engine".into()).spawn(move || {
            if let Err(error) = work(engine, &inbox, &counters) {
                failed(error);
            }
        })?;
        Ok((Self { jobs }, thread))
    }

    /// Submits requests, whose samples are numbered consecutively. Dropping the receiver aborts them.
    pub fn ask(&self, requests: Vec<Request>) -> UnboundedReceiver<Message> {
        let (out, heard) = unbounded_channel();
        // If the thread is gone, `out` is dropped, and the receiver sees the end.
        let _ = self.jobs.send(Job { requests, out });
        heard
    }
}

fn work(mut engine: Engine, inbox: &Receiver<Job>, counters: &Counters) -> anyroll_models::Result<()> {
    let mut watched: HashMap<SampleId, ActiveSample> = HashMap::new();
    loop {
        if engine.is_idle() {
            match inbox.recv() {
                Ok(job) => take_on(&mut engine, job, &mut watched, counters),
                Err(_) => return Ok(()),
            }
        }
        while let Ok(job) = inbox.try_recv() {
            take_on(&mut engine, job, &mut watched, counters);
        }
        for (id, completion) in engine.step()? {
            if let Some(mut one) = watched.remove(&id) {
                tell(&mut one, &completion, counters);
            }
        }
        for (id, completion) in engine.live() {
            if let Some(one) = watched.get_mut(&id) {
                tell(one, completion, counters);
            }
        }
        for (id, _) in watched.extract_if(|_, one| one.out.is_closed()) {
            engine.abort(id);
        }
        counters.set_load(engine.load());
    }
}

fn take_on(
    engine: &mut Engine,
    Job { requests, out }: Job,
    watched: &mut HashMap<SampleId, ActiveSample>,
    counters: &Counters,
) {
    let (mut ids, mut prompt_tokens) = (Vec::new(), 0);
    for request in requests {
        prompt_tokens += request.prompt.len();
        match engine.submit(request) {
            Ok(of_request) => ids.extend(of_request),
            Err(error) => {
                for id in ids {
                    engine.abort(id);
                }
                // The client may be gone.
                let _ = out.send(Err(Problem::Request(one_line(&error))));
                return;
            }
        }
    }
    counters.request(prompt_tokens);
    let samples = ids.into_iter().enumerate();
    watched.extend(samples.map(|(sample, id)| (id, ActiveSample { sample, out: out.clone(), told: 0 })));
}

/// Sends the new tokens of a sample.
fn tell(one: &mut ActiveSample, completion: &Completion, counters: &Counters) {
    let (tokens, logprobs) = (&completion.tokens[one.told..], &completion.logprobs[one.told..]);
    if tokens.is_empty() && completion.ending.is_none() {
        return;
    }
    let heard = match check_numbers(logprobs) {
        Ok(()) if completion.ending == Some(Ending::Broken) => Err(Problem::Format),
        Ok(()) => Ok(Tokens {
            sample: one.sample,
            tokens: tokens.to_vec(),
            logprobs: logprobs.to_vec(),
            likeliest: completion.top_logprobs.get(one.told..).unwrap_or_default().to_vec(),
            ending: completion.ending,
        }),
        Err(error) => Err(Problem::Model(one_line(&error))),
    };
    one.told = completion.tokens.len();
    counters.tokens(tokens.len());
    // If the client is gone, the sample is aborted.
    let _ = one.out.send(heard);
}
