//! The supervisors of hosts other than 0: they start and end ranks as the leader says.

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use anyroll_backends::Listener;

use super::super::orders::{News, Order, Orders};
use super::super::supervise::End;
use super::super::{Error, Interrupts, LaunchPlan, Outcome, POLL_INTERVAL, run};
use super::{Hello, Hosts, Message, Report};
use crate::link::{Link, Lost};

/// Interval between attempts to connect.
const RETRY_EVERY: Duration = Duration::from_millis(500);
/// Time from an interrupt between attempts to the leader's last word.
const PART_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the ranks of this host as often as host 0 says, and returns the outcome of the job. `resumed` are the arguments
/// of ranks that continue the run in a folder. If `waits`, a leader that is gone is waited for.
///
/// # Errors
/// Error of the job, as host 0 tells it, or if there is no host 0.
pub fn follow(
    hosts: &Hosts,
    plan: &LaunchPlan,
    waits: bool,
    resumed: impl Fn(&Path) -> Vec<OsString>,
) -> Result<Outcome, Error> {
    let mut interrupts = Interrupts::catch()?;
    loop {
        let Some(link) = connect(hosts, plan.local_ranks, &mut interrupts)? else {
            return Ok(Outcome::Interrupted);
        };
        let mut follower = Follower { hosts, link, interrupts: &mut interrupts, lost: None };
        let problem = match follower.serve(plan, &resumed) {
            Ok(outcome) => return outcome,
            Err(problem) => problem,
        };
        let error = Error::Gone { host: 0, name: hosts.address(), problem };
        if !waits {
            return Err(error);
        }
        tracing::warn!("{error}; waits for it, {} s at most", hosts.join_timeout.as_secs());
    }
}

/// Finds the leader; `None` after an interrupt.
fn connect(
    hosts: &Hosts,
    local_ranks: usize,
    interrupts: &mut Interrupts,
) -> Result<Option<Link<Message>>, Error> {
    let started = Instant::now();
    loop {
        let source = match Link::to((&hosts.master_addr, hosts.master_port)) {
            Ok(link) => {
                link.send(&Message::Hello(Hello::of(hosts, local_ranks)));
                return Ok(Some(link));
            }
            Err(source) => source,
        };
        let waited = hosts.join_timeout;
        if started.elapsed() >= waited {
            return Err(Error::NoLeader { address: hosts.address(), waited, source });
        }
        if interrupts.arrives_within(RETRY_EVERY) {
            return Ok(None);
        }
    }
}

struct Follower<'a> {
    hosts: &'a Hosts,
    link: Link<Message>,
    interrupts: &'a mut Interrupts,
    lost: Option<Lost>,
}

impl Follower<'_> {
    /// Does what the leader says until the job is over. The outer error: the leader is gone.
    fn serve(
        &mut self,
        plan: &LaunchPlan,
        resumed: &impl Fn(&Path) -> Vec<OsString>,
    ) -> Result<Result<Outcome, Error>, Lost> {
        let mut interrupted: Option<Instant> = None;
        loop {
            if let Some(signal) = self.interrupts.pending().next() {
                self.link.send(&Message::Interrupt(signal));
                interrupted.get_or_insert_with(Instant::now);
            }
            if interrupted.is_some_and(|since| since.elapsed() >= PART_TIMEOUT) {
                return Ok(Ok(Outcome::Interrupted));
            }
            match self.link.wait(POLL_INTERVAL)? {
                Some(Message::Start { attempt, port, seat, resume }) => {
                    if attempt > 1 {
                        tracing::warn!("the ranks start again, attempt {attempt}");
                    }
                    let args = resume.map_or_else(|| plan.args.clone(), |folder| resumed(&folder));
                    let plan = LaunchPlan { args, ..plan.clone() };
                    let part = self.hosts.part(seat, plan.local_ranks, port, Listener::default());
                    let outcome = match run(&plan, &part, self) {
                        End::Done(outcome) => Some(outcome),
                        End::Failed(_) | End::Ordered => None,
                    };
                    if let Some(lost) = self.lost {
                        return Err(lost);
                    }
                    self.link.send(&Message::Ended(outcome));
                }
                Some(Message::Over(outcome)) => return Ok(outcome.map_err(Error::Told)),
                Some(Message::Refused(reason)) => {
                    return Ok(Err(Error::Refused { address: self.hosts.address(), reason }));
                }
                Some(_) | None => {} // orders to ranks that have ended
            }
        }
    }
}

impl Orders for Follower<'_> {
    fn next(&mut self) -> Option<Order> {
        if let Some(signal) = self.interrupts.pending().next() {
            return Some(Order::Signal(signal));
        }
        match self.link.poll() {
            Ok(Some(Message::Interrupt(signal))) => Some(Order::Interrupt(signal)),
            Ok(Some(Message::Kill)) => Some(Order::Kill),
            Ok(Some(Message::End)) => Some(Order::End),
            Ok(_) => None,
            Err(lost) => {
                self.lost = Some(lost);
                Some(Order::End)
            }
        }
    }

    fn tell(&mut self, news: News<'_>) {
        self.link.send(&match news {
            News::Interrupted(signal) => Message::Interrupt(signal),
            News::Killed => Message::Kill,
            News::Failed(blame) => Message::Failed(Report::of(blame)),
        });
    }
}
