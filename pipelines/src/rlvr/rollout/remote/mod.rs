//! Engines in processes of other hosts, which come and go.
//!
//! ```text
//! rollout host                      trainer
//! Hello                    ->       rank 0, at the port of the config
//!                          <-       Seat: the rank with the fewest engines
//! Here                     ->       that rank
//!                          <-       Join: a communicator of two and the form of the weights
//!                          <-       Weights, then each unit by a broadcast
//! Received                 ->
//!                          <-       Begin and Request
//! Pass, Sample, then Done  ->
//!                          <-       Over
//! ```
//!
//! Control goes over a [`Link`](crate::link::Link), on which each side hears that the other is there. Weights go through
//! a communicator of each engine and its rank, so that one that breaks takes no other with it.

mod door;
mod engine;
mod host;
mod units;

use std::{collections::VecDeque, net::IpAddr, time::Duration};

use anyroll_backends::{CollectiveGroup, Event, Work};
use anyroll_config::RlvrConfig;
use anyroll_models::generation::Speculated;
use serde::{Deserialize, Serialize};

pub use door::Door;
pub use host::{Served, Trainer, serve};

use super::devices::Goal;
use crate::{
    Result,
    inference::{Sample, SampleRequest},
    link,
    run::Run,
};
use units::Form;

/// Interval between looks at the link and at other conditions.
const POLL: Duration = Duration::from_millis(20);

/// Words of a trainer and an engine.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    /// An engine has come to rank 0.
    Hello(Hello),
    /// Rank 0 does not take it.
    Refused(String),
    /// The rank that it samples for.
    Seat(Seat),
    /// An engine has come to its rank.
    Here(Here),
    /// The rank takes it.
    Join(Join),
    /// The weights of step `version` follow through the communicator.
    Weights { version: u64 },
    /// They have come.
    Received { version: u64 },
    /// Number of requests that follow, to be sampled until the goal.
    Begin { goal: Goal, requests: usize },
    /// A request, with its number among those of all engines.
    Request { number: usize, request: SampleRequest },
    /// Sampling has made a pass since the last word.
    Pass,
    /// A sample that has ended; before `Done` also one that has not.
    Sample { index: usize, sample: Sample },
    /// All requests are sampled as far as asked, with the weights of step `version`.
    Done { version: u64, passes: usize, speculated: Speculated },
    /// The engine ends with this error.
    Failed(String),
    /// The run has ended.
    Over,
}

impl link::Message for Word {}

/// First words of an engine.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    version: String,
    /// Parts of the config that decide on samples: name of the field, and its value as text.
    config: Vec<(String, String)>,
}

impl Hello {
    fn of(run: &Run, config: &RlvrConfig) -> Self {
        let text = |value: serde_json::Result<String>| value.expect("a config is plain data");
        let precision = run.policy.strategy.precision;
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: vec![
                ("model".into(), text(serde_json::to_string(&run.config.model))),
                ("strategy.precision".into(), text(serde_json::to_string(&precision))),
                ("pipeline.rlvr.rollout".into(), text(serde_json::to_string(&config.rollout))),
            ],
        }
    }

    /// Returns the reason why an engine is not taken, if there is one.
    fn objection(&self, other: &Self) -> Option<String> {
        if self.version != other.version {
            return Some(format!("its version is {}, and the trainer's is {}", other.version, self.version));
        }
        let mut differs = self.config.iter().zip(&other.config).filter(|(own, other)| own != other);
        let ((field, own), (_, other)) = differs.next()?;
        Some(format!("its `{field}` is {other}, and the trainer's is {own}: take the same config"))
    }
}

/// Place of an engine.
#[derive(Debug, Serialize, Deserialize)]
struct Seat {
    /// Address of the rank's host; `None`: that of rank 0.
    host: Option<IpAddr>,
    /// Port at which the rank listens.
    port: u16,
}

/// First words of an engine to its rank.
#[derive(Debug, Serialize, Deserialize)]
struct Here {
    /// Host of the engine.
    name: String,
    /// Backend of its device.
    backend: String,
}

/// A rank's words to an engine that it takes.
#[derive(Debug, Serialize, Deserialize)]
struct Join {
    /// Port of the rendezvous of the two, on the rank's host.
    port: u16,
    /// True if weights go through the hosts' memory, since the two devices are of different backends.
    through_host: bool,
    /// The weights of each unit.
    units: Vec<Form>,
    /// Time of a collective in seconds.
    timeout_s: f64,
    /// CPU threads of the ranks' math, since their number may change rounding.
    threads: usize,
}

/// Broadcasts in flight, oldest first.
#[derive(Default)]
struct InFlight(VecDeque<(Work, Event)>);

impl InFlight {
    /// Adds one that `group` has begun.
    fn push(&mut self, work: Work, group: &CollectiveGroup) -> Result<()> {
        self.0.push_back((work, group.stream().record()?));
        Ok(())
    }

    /// Waits until at most `most` are in flight, as long as `is_there` reports no error of the other side.
    fn wait(&mut self, most: usize, mut is_there: impl FnMut() -> Result<()>) -> Result<()> {
        while self.0.len() > most {
            let (work, done) = &self.0[0];
            while !done.wait_for(POLL)? {
                is_there()?;
            }
            work.wait()?;
            self.0.pop_front();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_of_another_version_or_config_are_refused() {
        let hello = |version: &str, model: &str| Hello {
            version: version.to_owned(),
            config: vec![("model".to_owned(), model.to_owned()), ("rollout".to_owned(), "{}".to_owned())],
        };
        let own = hello("1", "a");
        assert_eq!(own.objection(&hello("1", "a")), None);
        assert_eq!(own.objection(&hello("2", "a")).unwrap(), "its version is 2, and the trainer's is 1");
        let words = own.objection(&hello("1", "b")).unwrap();
        assert!(words.starts_with("its `model` is b, and the trainer's is a: "), "{words}");
    }
}
