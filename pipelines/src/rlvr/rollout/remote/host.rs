//! An engine of a rollout host, which samples for a rank of a trainer.

use std::{
    cell::{Cell, RefCell},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyroll_backends::{Buffer, CollectiveGroup, Device, Listener, Stream};
use anyroll_config::{RlvrConfig, error_chain::one_line};
use anyroll_models::{Decoder, Model};

use super::{
    super::{
        SamplingDevice,
        devices::{Dealt, RolloutEngine},
    },
    Hello, Here, InFlight, Join, POLL, Word,
    door::Pair,
};
use crate::{
    Error, Result,
    base_model::BaseModel,
    inference::Sample,
    launch::host_name,
    link::{Link, Lost},
    rlvr::setup,
    run::Run,
    train::{open_device, torch_device},
};

/// Interval between attempts to find the trainer.
const RETRY_EVERY: Duration = Duration::from_millis(500);
/// Time to the trainer's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which an engine says that it makes passes.
const PASS_EVERY: Duration = Duration::from_secs(1);

/// The trainer, seen from a rollout host.
pub struct Trainer<'a> {
    /// Host of rank 0.
    pub host: &'a str,
    /// Port at which rank 0 takes rollout hosts.
    pub port: u16,
    /// Most time to wait for it.
    pub join_timeout: Duration,
    /// Interfaces whose address the trainer is offered.
    pub interfaces: Option<String>,
}

/// End of an engine that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The trainer's run has ended.
    Over,
    /// The flag to stop was set.
    Stopped,
}

/// Samples on the device `ordinal` for a trainer until its run has ended or `stop` is set.
///
/// # Errors
/// A trainer that is not found, refuses or is gone.
pub fn serve(
    (run, config): (&Run, &RlvrConfig),
    base: &BaseModel,
    ordinal: usize,
    trainer: &Trainer,
    stop: &AtomicBool,
) -> Result<Served> {
    let role = run.rollout.as_ref().expect("a run with rollout hosts");
    let device = open_device(&role.backend, ordinal)?;
    let model = setup::policy(run, config, base, torch_device(&*device)?)?;
    let sampled = setup::sampled(&config.rollout, &model);
    let merged = config.rollout.merge_adapters.then(|| model.clone());
    let tokenizer = base.tokenizer.clone();
    let sampling = SamplingDevice::new(&config.rollout, &device, (sampled, merged), tokenizer)?;
    let Some(seat) = trainer.find(Hello::of(run, config), stop)? else { return Ok(Served::Stopped) };
    let (name, backend) = (host_name(), role.backend.clone());
    seat.rank.send(&Word::Here(Here { name, backend }));
    let mut host = Host { trainer, seat, device, model, sampling, stop };
    let served = host.serve();
    if let Err(error) = &served {
        host.seat.rank.send(&Word::Failed(one_line(error)));
    }
    served
}

/// Links of an engine.
struct Place {
    /// To its rank.
    rank: Link<Word>,
    /// To rank 0, which knows by it that the engine is there.
    _registrar: Link<Word>,
}

impl Trainer<'_> {
    /// Finds the trainer and the rank to sample for; `None` once `stop` is set.
    fn find(&self, hello: Hello, stop: &AtomicBool) -> Result<Option<Place>> {
        let started = Instant::now();
        let registrar = loop {
            let source = match Link::to((self.host, self.port)) {
                Ok(link) => break link,
                Err(source) => source,
            };
            if started.elapsed() >= self.join_timeout {
                let (address, waited) = (self.address(), self.join_timeout);
                return Err(Error::NoTrainer { address, waited, source });
            }
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            thread::sleep(RETRY_EVERY);
        };
        registrar.send(&Word::Hello(hello));
        let seat = match registrar.wait(ANSWER_TIMEOUT) {
            Ok(Some(Word::Seat(seat))) => seat,
            Ok(Some(Word::Refused(reason))) => return Err(self.refused(reason)),
            Ok(_) => return Err(self.refused(format!("no answer within {ANSWER_TIMEOUT:?}"))),
            Err(lost) => return Err(self.gone(lost)),
        };
        let host = seat.host.unwrap_or(registrar.other_address()).to_string();
        let rank = Link::to((&host, seat.port)).map_err(|source| Error::NoTrainer {
            address: format!("{host}:{}", seat.port),
            waited: started.elapsed(),
            source,
        })?;
        Ok(Some(Place { rank, _registrar: registrar }))
    }

    fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    fn refused(&self, reason: String) -> Error {
        Error::TrainerRefuses { address: self.address(), reason }
    }

    fn gone(&self, problem: Lost) -> Error {
        Error::TrainerGone { address: self.address(), problem }
    }
}

struct Host<'a> {
    trainer: &'a Trainer<'a>,
    seat: Place,
    device: Arc<dyn Device>,
    /// The policy's model, whose weights come.
    model: Arc<Decoder>,
    sampling: SamplingDevice,
    stop: &'a AtomicBool,
}

/// The communicator with the rank, and the memory of each unit.
struct Joined {
    group: CollectiveGroup,
    compute: Stream,
    units: Vec<Buffer>,
}

impl Host<'_> {
    /// Does what the rank says until the run is over.
    fn serve(&mut self) -> Result<Served> {
        let mut joined = None;
        loop {
            match (self.hear()?, &joined) {
                (None, _) if self.stop.load(Ordering::Relaxed) => return Ok(Served::Stopped),
                (None, _) => {}
                (Some(Word::Over), _) => return Ok(Served::Over),
                (Some(Word::Join(join)), None) => joined = Some(self.join(&join)?),
                (Some(Word::Weights { version }), Some(joined)) => self.receive(joined, version)?,
                (Some(Word::Begin { goal, requests }), Some(_)) => {
                    let dealt =
                        self.requests(Dealt { numbers: Vec::new(), asked: Vec::new(), goal }, requests)?;
                    if let Some(served) = self.sample(&dealt)? {
                        return Ok(served);
                    }
                }
                (Some(_), _) => return Err(self.trainer.gone(Lost::Garbled)),
            }
        }
    }

    /// The next word, if one comes soon.
    fn hear(&self) -> Result<Option<Word>> {
        self.seat.rank.wait(POLL).map_err(|lost| self.trainer.gone(lost))
    }

    /// Connects to the rank, and makes memory for the weights.
    fn join(&mut self, Join { port, through_host, units, timeout_s, threads }: &Join) -> Result<Joined> {
        let own = self.model.units().iter();
        let own = own.map(|unit| unit.params.iter().map(|param| param.shape.clone()).collect::<Vec<_>>());
        if !own.eq(units.iter().map(|form| form.shapes.clone())) {
            let reason = "its model has other shapes than the trainer's: take the same files";
            return Err(self.trainer.refused(reason.to_owned()));
        }
        // The number of threads may change rounding.
        tch::set_num_threads(*threads as i32);
        let address = self.seat.rank.other_address();
        let (listener, interfaces) = (Listener::default(), self.trainer.interfaces.clone());
        let timeout = Duration::from_secs_f64(*timeout_s);
        let pair = Pair { rank: 1, address, port: *port, listener, interfaces, timeout };
        let group = pair.connect(&self.device, *through_host, &host_name())?;
        let compute = Stream::torch(&self.device)?;
        let memory = units.iter().map(|form| form.memory(&compute)).collect::<Result<Vec<_>>>()?;
        let (units, weights) = memory.into_iter().unzip();
        self.sampling.weights = weights;
        Ok(Joined { group, compute, units })
    }

    /// Receives the weights of step `version` into the device's own.
    fn receive(&mut self, Joined { group, compute, units }: &Joined, version: u64) -> Result<()> {
        let mut in_flight = InFlight::default();
        for unit in units {
            in_flight.push(group.broadcast(unit, 0, compute)?, group)?;
        }
        // The rank says nothing before all have come.
        in_flight.wait(0, || self.seat.rank.poll().map(drop).map_err(|lost| self.trainer.gone(lost)))?;
        self.sampling.take(version)?;
        self.seat.rank.send(&Word::Received { version });
        Ok(())
    }

    /// Adds so many requests.
    fn requests(&self, mut dealt: Dealt, requests: usize) -> Result<Dealt> {
        while dealt.asked.len() < requests {
            match self.hear()? {
                Some(Word::Request { number, request }) => {
                    dealt.numbers.push(number);
                    dealt.asked.push(request);
                }
                Some(_) => return Err(self.trainer.gone(Lost::Garbled)),
                None => {} // the link ends if the rank does
            }
        }
        Ok(dealt)
    }

    /// Samples and sends the samples as they end. Returns the end of the engine, if it has come.
    fn sample(&mut self, dealt: &Dealt) -> Result<Option<Served>> {
        let (rank, stop) = (&self.seat.rank, self.stop);
        let heard = RefCell::new(Ok(None));
        let told = Cell::new(Instant::now());
        let ended =
            |index: usize, sample: &Sample| rank.send(&Word::Sample { index, sample: sample.clone() });
        let stops = || {
            if told.get().elapsed() >= PASS_EVERY {
                told.set(Instant::now());
                rank.send(&Word::Pass);
            }
            let word = rank.poll();
            let ends = !matches!(word, Ok(None));
            if ends {
                *heard.borrow_mut() = word;
            }
            ends || stop.load(Ordering::Relaxed)
        };
        let sampled = self.sampling.sample(dealt, &ended, &stops)?;
        match heard.into_inner() {
            Ok(None) if stop.load(Ordering::Relaxed) => return Ok(Some(Served::Stopped)),
            Ok(None) => {}
            Ok(Some(Word::Over)) => return Ok(Some(Served::Over)),
            Ok(Some(_)) => return Err(self.trainer.gone(Lost::Garbled)),
            Err(lost) => return Err(self.trainer.gone(lost)),
        }
        for (index, sample) in sampled.samples.into_iter().enumerate().filter(|(_, it)| it.ending.is_none()) {
            rank.send(&Word::Sample { index, sample });
        }
        let (version, passes, speculated) = (self.sampling.version, sampled.passes, sampled.speculated);
        rank.send(&Word::Done { version, passes, speculated });
        Ok(None)
    }
}
