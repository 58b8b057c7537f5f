//! [`Leader`]: the supervisor of host 0, which decides for all hosts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyroll_config::error_chain::one_line;

use super::super::orders::{News, Order, Orders};
use super::super::supervise::{
    BLAME_TIMEOUT, CERTAIN, CONSEQUENCE, END_TIMEOUT, End, LINGER_TIMEOUT, STALLED,
};
use super::super::{Error, Interrupts, LaunchPlan, Outcome, POLL_INTERVAL, bind, run};
use super::{Hello, Hosts, Message, Report, Seat};
use crate::link::{Arrivals, Link, Lost};

/// Time from the order to end ranks to the news that they have ended: SIGTERM, SIGKILL and the way there and back.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(END_TIMEOUT.as_secs() * 2 + 6);
/// Time from the last words of a job to the end of the connections.
const PART_TIMEOUT: Duration = Duration::from_secs(5);
/// Wait after which the user is told of it.
const TELL_AFTER: Duration = Duration::from_secs(5);

/// See the module's description.
pub struct Leader<'a> {
    hosts: Hosts,
    hello: Hello,
    /// Address at which sockets for other hosts are bound: any of this host.
    any: IpAddr,
    arrivals: Arrivals<Message>,
    followers: BTreeMap<usize, Follower>,
    /// Names of hosts that have been here.
    names: BTreeMap<usize, String>,
    attempt: u32,
    /// Returns true if the job can go on with so many hosts.
    fits: &'a dyn Fn(usize) -> bool,
    /// Hosts that did not come back, and are not waited for again.
    given_up: BTreeSet<usize>,
    /// Hosts of the attempt, in order; host 0 is the first.
    members: Vec<usize>,
}

#[derive(Debug)]
struct Follower {
    name: String,
    link: Link<Message>,
}

impl<'a> Leader<'a> {
    /// Listens to the other hosts, of which each has as many ranks as this one. `fits` tells with which
    /// smaller numbers of hosts the job can go on after one is lost.
    ///
    /// # Errors
    /// If the port cannot be bound.
    pub fn listen(hosts: &Hosts, local_ranks: usize, fits: &'a dyn Fn(usize) -> bool) -> Result<Self, Error> {
        let port = hosts.master_port;
        let listen = |source| Error::Listen { port, source };
        let has_v4 = hosts.resolve().map_err(listen)?.iter().any(|address| address.is_ipv4());
        let any = if has_v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let listener = TcpListener::bind((any, port)).map_err(listen)?;
        let arrivals = Arrivals::at(listener).map_err(listen)?;
        let hello = Hello::of(hosts, local_ranks);
        Ok(Self {
            hosts: hosts.clone(),
            hello,
            any,
            arrivals,
            followers: BTreeMap::new(),
            names: BTreeMap::new(),
            attempt: 0,
            fits,
            given_up: BTreeSet::new(),
            members: (0..hosts.nnodes).collect(),
        })
    }

    /// Waits until all hosts have come, starts the ranks of all and waits until they have ended, as
    /// [`launch`](super::super::launch) does for one host. With `resume` the ranks continue the run in this folder, on this
    /// host by the arguments of `plan`. `tell` takes a line on hosts that the job goes on without.
    ///
    /// # Errors
    /// Errors of the host to blame, and of hosts that do not come or are gone.
    pub fn launch(
        &mut self,
        plan: &LaunchPlan,
        resume: Option<&Path>,
        interrupts: &mut Interrupts,
        tell: impl Fn(&str),
    ) -> Result<Outcome, Error> {
        if !self.gather(interrupts, tell)? {
            return Ok(Outcome::Interrupted);
        }
        let (listener, port) = bind(self.any)?;
        self.attempt += 1;
        let hosts = self.members.len();
        for (index, host) in self.members.iter().enumerate() {
            if let Some(follower) = self.followers.get(host) {
                let (attempt, resume) = (self.attempt, resume.map(Path::to_owned));
                follower.link.send(&Message::Start { attempt, port, seat: Seat { index, hosts }, resume });
            }
        }
        let part = self.hosts.part(Seat { index: 0, hosts }, plan.local_ranks, port, listener);
        let mut attempt = Attempt::new(self, interrupts);
        let end = run(plan, &part, &mut attempt);
        attempt.conclude(&end)
    }

    /// Tells all hosts that the job is over, and waits until they have heard it.
    pub fn part(mut self, outcome: Result<Outcome, &Error>) {
        let over = Message::Over(outcome.map_err(|error| one_line(error)));
        self.send_all(&over);
        let deadline = Instant::now() + PART_TIMEOUT;
        while !self.followers.is_empty() && Instant::now() < deadline {
            self.heard();
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until all hosts are there, or all that are left of an elastic job; false after an interrupt.
    fn gather(&mut self, interrupts: &mut Interrupts, tell: impl Fn(&str)) -> Result<bool, Error> {
        let started = Instant::now();
        let mut is_told = false;
        loop {
            let heard = self.heard();
            let by_others =
                heard.iter().any(|(_, heard)| matches!(heard, Ok(Message::Interrupt(_) | Message::Kill)));
            if by_others || interrupts.pending().next().is_some() {
                return Ok(false);
            }
            self.welcome();
            let absent = self.absent();
            let waited = self.hosts.join_timeout;
            if absent.iter().all(|host| self.given_up.contains(host)) || started.elapsed() >= waited {
                self.choose(&absent, tell)?;
                return Ok(true);
            }
            if !is_told && started.elapsed() >= TELL_AFTER {
                is_told = true;
                tracing::warn!("waits for {}, {} s at most", self.named(&absent), waited.as_secs());
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Chooses the hosts of the next attempt: all, or the most of those that are there with which an elastic job can go on.
    fn choose(&mut self, absent: &[usize], tell: impl Fn(&str)) -> Result<(), Error> {
        let all = self.hosts.nnodes;
        let present: Vec<usize> = (0..all).filter(|host| !absent.contains(host)).collect();
        // Before the first attempt, a host that is not there is a mistake.
        let fits = |count: usize| count == all || self.attempt > 0 && (self.fits)(count);
        let Some(count) = (1..=present.len()).rev().find(|&count| fits(count)) else {
            return Err(Error::Absent { absent: self.named(absent), waited: self.hosts.join_timeout });
        };
        if count < all && count != self.members.len() {
            let absent = self.named(absent);
            tell(&format!("{absent} did not come back: the run goes on with {count} of {all} hosts"));
        } else if count == all && self.members.len() < all {
            tell(&format!("all {all} hosts are there again"));
        }
        self.given_up = absent.iter().copied().collect();
        self.members = present[..count].to_vec();
        Ok(())
    }

    /// Hosts that are not there.
    fn absent(&self) -> Vec<usize> {
        (1..self.hosts.nnodes).filter(|host| !self.followers.contains_key(host)).collect()
    }

    /// Hosts in words.
    fn named(&self, hosts: &[usize]) -> String {
        let named = hosts.iter().map(|host| match self.names.get(host) {
            Some(name) => format!("host {host} ({name})"),
            None => format!("host {host}"),
        });
        named.collect::<Vec<_>>().join(", ")
    }

    /// Takes those who have come, and refuses those who cannot be part of the job.
    fn welcome(&mut self) {
        while let Some((first, link)) = self.arrivals.next() {
            let Message::Hello(hello) = first else { continue };
            match self.objection(&hello) {
                Some(reason) => link.send(&Message::Refused(reason)),
                None => {
                    let Hello { node_rank, name, .. } = hello;
                    self.names.insert(node_rank, name.clone());
                    self.followers.insert(node_rank, Follower { name, link });
                }
            }
        }
    }

    fn objection(&self, hello: &Hello) -> Option<String> {
        let Hello { version, nnodes, node_rank, local_ranks, .. } = &self.hello;
        let differs = |what: &str, theirs: &str, ours: &str| {
            (theirs != ours).then(|| format!("its {what} is {theirs}, and that of host 0 is {ours}"))
        };
        let number =
            |what: &str, theirs: usize, ours: &usize| differs(what, &theirs.to_string(), &ours.to_string());
        differs("version", &hello.version, version)
            .or_else(|| number("--nnodes", hello.nnodes, nnodes))
            .or_else(|| number("number of ranks, from `devices`,", hello.local_ranks, local_ranks))
            .or_else(|| {
                let range = node_rank + 1..*nnodes;
                let is_in = range.contains(&hello.node_rank);
                (!is_in)
                    .then(|| format!("its --node-rank is {}, must be 1 to {}", hello.node_rank, nnodes - 1))
            })
            .or_else(|| {
                let there = self.followers.get(&hello.node_rank)?;
                Some(format!("{} is there as --node-rank {} already", there.name, hello.node_rank))
            })
    }

    /// Words of the followers since the last call. Those who are gone are removed.
    fn heard(&mut self) -> Vec<(usize, Result<Message, Lost>)> {
        let mut heard = Vec::new();
        for (&host, follower) in &self.followers {
            loop {
                match follower.link.poll() {
                    Ok(None) => break,
                    Ok(Some(message)) => heard.push((host, Ok(message))),
                    Err(lost) => {
                        heard.push((host, Err(lost)));
                        break;
                    }
                }
            }
        }
        for (host, _) in heard.iter().filter(|(_, heard)| heard.is_err()) {
            self.followers.remove(host);
        }
        heard
    }

    fn send_all(&self, message: &Message) {
        self.followers.values().for_each(|follower| follower.link.send(message));
    }

    fn name(&self, host: usize) -> String {
        let own = (host == 0).then(|| self.hello.name.clone());
        own.or_else(|| self.names.get(&host).cloned()).unwrap_or_default()
    }
}

/// An attempt to run the job on all hosts.
struct Attempt<'a, 'f> {
    leader: &'a mut Leader<'f>,
    interrupts: &'a mut Interrupts,
    /// Orders of followers to this host's ranks.
    orders: VecDeque<Order>,
    /// Followers whose ranks have not ended.
    running: BTreeSet<usize>,
    /// Failures, with the host of each, in the order in which they were told.
    reports: Vec<(usize, Report)>,
    first_report: Option<Instant>,
    /// All hosts were told to end their ranks.
    is_ended: bool,
    is_interrupted: bool,
}

impl<'a, 'f> Attempt<'a, 'f> {
    fn new(leader: &'a mut Leader<'f>, interrupts: &'a mut Interrupts) -> Self {
        let running = leader.members[1..].iter().copied().collect();
        Self {
            leader,
            interrupts,
            orders: VecDeque::new(),
            running,
            reports: Vec::new(),
            first_report: None,
            is_ended: false,
            is_interrupted: false,
        }
    }

    /// Takes the followers' words.
    fn listen(&mut self) {
        for (host, heard) in self.leader.heard() {
            match heard {
                Ok(Message::Interrupt(signal)) => self.orders.push_back(Order::Interrupt(signal)),
                Ok(Message::Kill) => self.orders.push_back(Order::Kill),
                Ok(Message::Failed(report)) => self.report(host, report),
                Ok(Message::Ended(outcome)) => {
                    self.running.remove(&host);
                    self.is_interrupted |= outcome == Some(Outcome::Interrupted);
                }
                Err(lost) => {
                    if self.running.remove(&host) {
                        self.lose(host, &lost.to_string());
                    }
                }
                Ok(_) => {} // no word of a follower
            }
        }
        // One that was lost may be back already, for the next attempt.
        self.leader.welcome();
    }

    fn report(&mut self, host: usize, report: Report) {
        self.first_report.get_or_insert_with(Instant::now);
        self.reports.push((host, report));
    }

    /// Reports a host that is gone. The signs differ between two losses of one kind, so that they are no part of the cause.
    fn lose(&mut self, host: usize, problem: &str) {
        let reason = format!("it is gone: {problem}");
        self.report(host, Report { likelihood: CERTAIN, reason, cause: format!("host {host} is gone") });
    }

    /// Ends the ranks of all hosts if one of them failed for certain, or if no better reason came in time. Returns true if
    /// this call did it.
    fn end_after_failure(&mut self) -> bool {
        let is_certain = self.reports.iter().any(|(_, report)| report.likelihood == CERTAIN);
        let is_late = self.first_report.is_some_and(|first| first.elapsed() >= BLAME_TIMEOUT);
        if self.is_ended || !(is_certain || is_late) {
            return false;
        }
        self.is_ended = true;
        if !is_certain {
            self.find_stalled();
        }
        self.leader.send_all(&Message::End);
        true
    }

    /// Blames hosts that report nothing, if all that do report blame others: they kept the others waiting.
    fn find_stalled(&mut self) {
        let Some((waiting, first)) = self.reports.first().cloned() else { return };
        let has_reported = |host| self.reports.iter().any(|(other, _)| *other == host);
        if self.reports.iter().any(|(_, report)| report.likelihood < CONSEQUENCE) {
            return;
        }
        let silent: Vec<usize> = self.running.iter().copied().filter(|host| !has_reported(*host)).collect();
        for host in silent {
            let name = self.leader.name(waiting);
            let reason =
                format!("its ranks stalled: they still ran after host {waiting} ({name}): {}", first.reason);
            self.report(host, Report { likelihood: STALLED, reason, cause: first.cause.clone() });
        }
    }

    /// Waits for the other hosts after the end of this one's ranks. Returns the outcome of all.
    fn conclude(mut self, own: &End) -> Result<Outcome, Error> {
        let mut deadline = Instant::now() + LINGER_TIMEOUT;
        self.is_interrupted |= matches!(own, End::Done(Outcome::Interrupted));
        if self.is_ended {
            deadline = Instant::now() + FOLLOW_TIMEOUT;
        }
        while !self.running.is_empty() {
            self.listen();
            while let Some(order) = self.orders.pop_front() {
                self.pass_on(order);
            }
            let signal = self.interrupts.pending().next();
            if let Some(signal) = signal {
                self.pass_on(if self.is_interrupted { Order::Kill } else { Order::Interrupt(signal) });
            }
            if self.end_after_failure() {
                deadline = Instant::now() + FOLLOW_TIMEOUT;
            }
            if Instant::now() >= deadline {
                for host in std::mem::take(&mut self.running) {
                    self.leader.followers.remove(&host);
                    self.lose(host, "its ranks did not end when those of host 0 had");
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
        // Of equally likely ones the first.
        let blamed = self.reports.iter().min_by_key(|(_, report)| report.likelihood);
        match blamed {
            Some((host, Report { reason, cause, .. })) => Err(Error::OnHost {
                host: *host,
                name: self.leader.name(*host),
                reason: reason.clone(),
                cause: cause.clone(),
            }),
            None if self.is_interrupted => Ok(Outcome::Interrupted),
            None => Ok(Outcome::Finished),
        }
    }

    /// Passes a follower's or the user's order on to all hosts, once this one's ranks have ended.
    fn pass_on(&mut self, order: Order) {
        self.is_interrupted = true;
        match order {
            Order::Interrupt(signal) | Order::Signal(signal) => {
                self.leader.send_all(&Message::Interrupt(signal))
            }
            Order::Kill => self.leader.send_all(&Message::Kill),
            Order::End => {}
        }
    }
}

impl Orders for Attempt<'_, '_> {
    fn next(&mut self) -> Option<Order> {
        if let Some(signal) = self.interrupts.pending().next() {
            return Some(Order::Signal(signal));
        }
        self.listen();
        if self.end_after_failure() { Some(Order::End) } else { self.orders.pop_front() }
    }

    fn tell(&mut self, news: News<'_>) {
        match news {
            News::Interrupted(signal) => self.leader.send_all(&Message::Interrupt(signal)),
            News::Killed => self.leader.send_all(&Message::Kill),
            News::Failed(blame) => {
                self.report(0, Report::of(blame));
                self.end_after_failure();
            }
        }
    }
}
