//! Environments of multi-turn rollouts: episodes of a user's Python class, in separate processes.
//!
//! An [`Environment`] owns the processes, and [`Episodes`] are those of one call of the sampler. A sample's
//! episode has a process to itself from `reset` to its end, so that a crash or a hang fails only that sample.
//! Sampling never waits for a process while other samples have tokens to sample: answers are taken as they
//! arrive, and awaited with a deadline only if nothing else is left to do. The order of arrival varies, but
//! samples do not depend on it, since each turn has its own random numbers.

mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyroll_config::error_chain::one_line;
use anyroll_config::{EnvironmentConfig, RolloutConfig};
use anyroll_data::{Record, Tokenizer};
use anyroll_models::generation::Ending;
use anyroll_reward::{Failure, missing};

use crate::inference::{AnswersTurns, Episode, Replies, Sample};
use worker::{Answer, Output, Worker};

/// The processes of a rank.
#[derive(Debug)]
pub struct Environment {
    config: EnvironmentConfig,
    /// Limit of open episodes.
    most_open: usize,
    tokenizer: Arc<Tokenizer>,
    /// Parameters of `reset` that have no default.
    needs: Vec<String>,
    pool: Mutex<Pool>,
}

#[derive(Debug)]
struct Pool {
    /// Processes without an episode.
    idle: Vec<Worker>,
    /// Output of all processes.
    heard: Receiver<Output>,
    tell: Sender<Output>,
    /// Number of the next process.
    next: u64,
}

impl Environment {
    /// Creates the environment of `rollout`, if it has one. Starts a first process, which checks that the
    /// file has the class.
    ///
    /// # Errors
    /// If Python does not start, or the file fails.
    pub fn new(rollout: &RolloutConfig, tokenizer: Arc<Tokenizer>) -> Result<Option<Self>, Failure> {
        let Some(config) = rollout.environment.clone() else { return Ok(None) };
        let (tell, heard) = mpsc::channel();
        let mut pool = Pool { idle: Vec::new(), heard, tell, next: 0 };
        let mut first = pool.start(&config)?;
        let line = pool.heard.recv_timeout(first.patience(&config));
        let (_, line) = line.map_err(|_| Failure::TimedOut(first.patience(&config)))?;
        first.hear(line.as_deref()).map_err(|failure| does_not_load(&config, &failure))?;
        let needs = first.needs.clone();
        pool.idle.push(first);
        let most_open = rollout.open_episodes();
        Ok(Some(Self { config, most_open, tokenizer, needs, pool: Mutex::new(pool) }))
    }

    /// Returns the problem of a parameter of `reset` that `record` does not give.
    pub fn missing(&self, record: &Record) -> Option<String> {
        missing(&self.needs, &["prompt", "answer", "messages"], Some(&record.columns))
    }

    /// Creates episodes for samples of these records, in order.
    pub fn episodes(&self, records: Vec<Arc<Record>>) -> Episodes<'_> {
        Episodes {
            environment: self,
            pool: self.pool.lock().unwrap_or_else(PoisonError::into_inner),
            waiting: (0..records.len()).collect(),
            records,
            open: BTreeMap::new(),
            replies: Replies::default(),
        }
    }

    /// Tokens of an observation after a turn that ends with `last`.
    fn encode(&self, observation: &str, last: i64) -> Result<Vec<i64>, Failure> {
        let role = self.tokenizer.speaker(self.config.role).role();
        self.tokenizer
            .encode_observation(observation, role, last)
            .map_err(|error| format!("its observation cannot be encoded: {}", one_line(&error)).into())
    }
}

fn does_not_load(config: &EnvironmentConfig, why: &Failure) -> Failure {
    format!("{} does not load: {why}", config.path.display()).into()
}

impl Pool {
    fn start(&mut self, config: &EnvironmentConfig) -> Result<Worker, Failure> {
        let number = self.next;
        self.next += 1;
        Worker::start(config, number, self.tell.clone())
    }

    /// An idle process, or a new one.
    fn worker(&mut self, config: &EnvironmentConfig) -> Result<Worker, Failure> {
        match self.idle.pop() {
            Some(worker) => Ok(worker),
            None => self.start(config),
        }
    }
}

/// Episodes by sample number. Dropping this ends the processes of open episodes.
#[derive(Debug)]
pub struct Episodes<'a> {
    environment: &'a Environment,
    pool: MutexGuard<'a, Pool>,
    records: Vec<Arc<Record>>,
    /// Samples whose episode has not started, in order.
    waiting: VecDeque<usize>,
    open: BTreeMap<usize, Open>,
    /// Results for the next `listen`.
    replies: Replies,
}

/// An open episode.
#[derive(Debug)]
struct Open {
    worker: Worker,
    /// Deadline of the answer; `None` while the model writes.
    due: Option<Instant>,
}

impl AnswersTurns for Episodes<'_> {
    fn is_idle(&self) -> bool {
        self.open.is_empty() && self.waiting.is_empty() && self.replies.ended.is_empty()
    }

    fn tell(&mut self, number: usize, sample: &mut Sample) {
        let config = &self.environment.config;
        let open = self.open.get_mut(&number).expect("only open episodes are sampled");
        if sample.ending == Some(Ending::Length) {
            self.close(number);
        } else if open.worker.is_of_use() {
            sample.ending = None;
            open.worker.step(&sample.text(&self.environment.tokenizer));
            open.due = Some(Instant::now() + open.worker.patience(config));
        } else {
            self.fail(number, sample, "the Python process ended while the model wrote".into());
        }
    }

    fn listen(&mut self, samples: &mut [Sample], limits: &[usize], wait: bool) -> Replies {
        loop {
            while let Ok(heard) = self.pool.heard.try_recv() {
                self.take(heard, samples, limits);
            }
            self.give_up(samples);
            // Uses the processes of ended episodes, except those that have exited.
            self.begin(samples);
            let is_something = !self.replies.next.is_empty() || !self.replies.ended.is_empty();
            let due = self.open.values().filter_map(|open| open.due).min().filter(|_| wait && !is_something);
            let Some(due) = due else { break };
            if let Ok(heard) = self.pool.heard.recv_timeout(due.saturating_duration_since(Instant::now())) {
                self.take(heard, samples, limits);
            }
        }
        let mut replies = mem::take(&mut self.replies);
        replies.next.sort_unstable();
        replies.ended.sort_unstable();
        replies
    }
}

impl Episodes<'_> {
    /// Starts episodes up to the limit of open ones.
    fn begin(&mut self, samples: &mut [Sample]) {
        let Environment { config, most_open, .. } = self.environment;
        while self.open.len() < *most_open
            && let Some(number) = self.waiting.pop_front()
        {
            samples[number].episode = Some(Episode::default());
            match self.pool.worker(config) {
                Ok(worker) => {
                    worker.reset(&self.records[number]);
                    let due = Some(Instant::now() + worker.patience(config));
                    self.open.insert(number, Open { worker, due });
                }
                Err(failure) => self.fail(number, &mut samples[number], failure),
            }
        }
    }

    /// Handles a line of output.
    fn take(&mut self, (worker, line): Output, samples: &mut [Sample], limits: &[usize]) {
        let config = &self.environment.config;
        let of_worker = self.open.iter_mut().find(|(_, open)| open.worker.number == worker);
        let Some((&number, Open { worker, due })) = of_worker else {
            // A process without an episode: most likely it has exited.
            return self.pool.idle.retain(|idle| idle.number != worker);
        };
        let was_asked = due.is_some();
        match worker.hear(line.as_deref()) {
            // Output while the model writes: the process has exited.
            _ if !was_asked => {}
            Ok(None) => *due = Some(Instant::now() + worker.patience(config)),
            Ok(Some(said)) => {
                *due = None;
                self.go_on(number, &mut samples[number], said, limits[number]);
            }
            Err(failure) => {
                let loads = worker.is_of_use() || line.is_none();
                let failure = if loads { failure } else { does_not_load(config, &failure) };
                self.fail(number, &mut samples[number], failure);
            }
        }
    }

    /// Continues a sample with the answer of its episode.
    fn go_on(&mut self, number: usize, sample: &mut Sample, said: Answer, limit: usize) {
        let episode = sample.episode.as_mut().expect("it has begun");
        if sample.logprobs.is_empty() {
            return match self.first(number, said.observation, limit) {
                Ok(Some(prompt)) => {
                    *sample = Sample { episode: sample.episode.take(), ..Sample::begin(prompt) };
                    self.replies.next.push(number);
                }
                Ok(None) => self.replies.next.push(number),
                Err(failure) => self.fail(number, sample, failure),
            };
        }
        episode.rewards.push(said.reward);
        if said.done || episode.rewards.len() >= self.environment.config.max_turns {
            sample.ending = Some(if said.done { Ending::Stop } else { Ending::Length });
            return self.close(number);
        }
        let last = *sample.tokens.last().expect("a prompt");
        match self.environment.encode(&said.observation.unwrap_or_default(), last) {
            Ok(tokens) if sample.tokens.len() + tokens.len() < limit => {
                sample.hear(&tokens);
                self.replies.next.push(number);
            }
            Ok(_) => {
                sample.ending = Some(Ending::Length); // there is no room for a token behind it
                self.close(number);
            }
            Err(failure) => self.fail(number, sample, failure),
        }
    }

    /// The prompt, with the observation of `reset` if there is one.
    fn first(
        &self,
        number: usize,
        observation: Option<String>,
        limit: usize,
    ) -> Result<Option<Vec<i64>>, Failure> {
        let Some(observation) = observation else { return Ok(None) };
        let record = self.records[number].followed_by(&observation);
        let record = record
            .ok_or("the observation of `reset` cannot be added: the prompt's last message is not text")?;
        let prompt = self.environment.tokenizer.encode_prompt(&record);
        let prompt =
            prompt.map_err(|error| format!("its observation cannot be encoded: {}", one_line(&error)))?;
        if prompt.len() >= limit {
            let tokens = prompt.len();
            let problem =
                format!("with the observation of `reset` the prompt has {tokens} tokens, of {limit} in all");
            return Err(problem.into());
        }
        Ok(Some(prompt))
    }

    /// Fails episodes that are past their deadline.
    fn give_up(&mut self, samples: &mut [Sample]) {
        let now = Instant::now();
        let is_late = |open: &Open| open.due.is_some_and(|due| due <= now);
        let late = self.open.iter().filter(|(_, open)| is_late(open)).map(|(&number, _)| number);
        for number in late.collect::<Vec<usize>>() {
            let open = self.open.remove(&number).expect("it is open");
            let patience = open.worker.patience(&self.environment.config);
            self.fail(number, &mut samples[number], Failure::TimedOut(patience));
        }
    }

    /// Ends an episode with a failure; its sample counts as truncated.
    fn fail(&mut self, number: usize, sample: &mut Sample, failure: Failure) {
        sample.ending = Some(Ending::Length);
        sample.episode.as_mut().expect("it has begun").failure = Some(failure);
        self.close(number);
    }

    /// Ends an episode. Its process is kept for the next one if it still works.
    fn close(&mut self, number: usize) {
        let worker = self.open.remove(&number).map(|open| open.worker);
        self.pool.idle.extend(worker.filter(Worker::is_of_use));
        self.replies.ended.push(number);
    }
}

#[cfg(test)]
mod tests;
