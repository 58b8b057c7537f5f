//! [`RemoteEngine`]: a rank's side of an engine in another process.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use anyroll_backends::{CollectiveGroup, Stream};
use anyroll_config::error_chain::one_line;
use anyroll_strategy::Weights;

use super::{
    super::devices::{Dealt, RolloutEngine},
    InFlight, POLL, Word,
    units::Form,
};
use crate::{
    Error, Result,
    inference::{Sample, Sampled},
    link::Link,
};

/// Units of which the copies are in memory at once: one travels while the next one is copied.
const COPIES: usize = 2;

/// An engine in another process. One that is lost samples no more, which is no error of the run.
#[derive(Debug)]
pub(super) struct RemoteEngine {
    /// Its host.
    pub(super) name: String,
    pub(super) link: Link<Word>,
    /// This rank and the engine.
    pub(super) group: CollectiveGroup,
    /// The stream on which the policy's weights are ready.
    pub(super) compute: Stream,
    /// Time without a word after which a pass or a transfer is given up.
    pub(super) timeout: Duration,
    /// Version of its weights.
    pub(super) version: u64,
    pub(super) is_lost: bool,
}

impl RemoteEngine {
    fn lose(&mut self, reason: &str) {
        self.is_lost = true;
        self.group.abort();
        tracing::warn!("an engine on {} samples no more: {reason}", self.name);
    }

    fn error(&self, problem: impl Into<String>) -> Error {
        Error::LostEngine { host: self.name.clone(), problem: problem.into() }
    }

    /// The next word, if one comes within `time`.
    fn hear(&self, time: Duration) -> Result<Option<Word>> {
        match self.link.wait(time) {
            Ok(Some(Word::Failed(reason))) => Err(self.error(reason)),
            Ok(word) => Ok(word),
            Err(lost) => Err(self.error(lost.to_string())),
        }
    }

    fn hand_over(&mut self, weights: &Weights, version: u64) -> Result<()> {
        self.link.send(&Word::Weights { version });
        let mut in_flight = InFlight::default();
        // The engine may have all of the weights before this side knows that they are gone.
        let answer = Cell::new(None);
        let is_there = || {
            if let Some(word) = self.hear(Duration::ZERO)? {
                answer.set(Some(word));
            }
            Ok(())
        };
        for (unit, form) in weights.iter().zip(Form::all(weights)) {
            in_flight.wait(COPIES - 1, is_there)?;
            let (buffer, mut copies) = form.memory(&self.compute)?;
            for (copy, tensor) in copies.iter_mut().zip(unit) {
                copy.f_copy_(tensor)?;
            }
            in_flight.push(self.group.broadcast(&buffer, 0, &self.compute)?, &self.group)?;
        }
        in_flight.wait(0, is_there)?;
        let answer = match answer.take() {
            None => self.hear(self.timeout)?,
            answer => answer,
        };
        match answer {
            Some(Word::Received { version: received }) if received == version => {}
            Some(_) => return Err(self.error("it says what no engine says")),
            None => return Err(self.error(format!("the weights did not come within {:?}", self.timeout))),
        }
        self.version = version;
        Ok(())
    }

    fn sample_there(
        &self,
        Dealt { numbers, asked, goal }: &Dealt,
        ended: &dyn Fn(usize, &Sample),
        stops: &dyn Fn() -> bool,
        sampled: &mut Sampled,
    ) -> Result<()> {
        self.link.send(&Word::Begin { goal: *goal, requests: asked.len() });
        for (&number, request) in numbers.iter().zip(asked) {
            self.link.send(&Word::Request { number, request: request.clone() });
        }
        let mut heard = Instant::now();
        while !stops() {
            let word = self.hear(POLL)?;
            if word.is_none() && heard.elapsed() > self.timeout {
                return Err(self.error(format!("it has made no pass for {:?}", self.timeout)));
            }
            heard = if word.is_some() { Instant::now() } else { heard };
            match word {
                None | Some(Word::Pass) => {}
                Some(Word::Sample { index, sample }) if index < asked.len() => {
                    if sample.ending.is_some() {
                        ended(index, &sample);
                    }
                    sampled.samples[index] = sample;
                }
                Some(Word::Done { version, passes, speculated }) if version == self.version => {
                    (sampled.passes, sampled.speculated) = (passes, speculated);
                    return Ok(());
                }
                Some(_) => return Err(self.error("it says what no engine says")),
            }
        }
        Ok(())
    }
}

impl RolloutEngine for RemoteEngine {
    fn receive(&mut self, weights: &Weights, version: u64) -> Result<()> {
        if let Err(error) = self.hand_over(weights, version) {
            self.lose(&one_line(&error));
        }
        Ok(())
    }

    /// Samples of a lost engine stay as they were sent, unless they have come back.
    fn sample(
        &mut self,
        dealt: &Dealt,
        ended: &dyn Fn(usize, &Sample),
        stops: &dyn Fn() -> bool,
    ) -> Result<Sampled> {
        let samples = dealt.asked.iter().map(|asked| asked.sample.clone()).collect();
        let mut sampled = Sampled::none_of(samples);
        if self.is_lost || dealt.asked.is_empty() {
            return Ok(sampled);
        }
        if let Err(error) = self.sample_there(dealt, ended, stops, &mut sampled) {
            self.lose(&one_line(&error));
        }
        Ok(sampled)
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn end(&mut self) {
        self.link.send(&Word::Over);
    }
}
