//! [`Door`]: the way of engines to a rank.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, ToSocketAddrs, UdpSocket},
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

use anyroll_backends::{
    CollectiveGroup, Device, Listener, Rendezvous, Store, Stream, connect, connect_through_host,
};
use anyroll_config::{RlvrConfig, RolloutHostsConfig, error_chain::one_line};
use anyroll_strategy::Weights;

use super::{
    super::devices::RolloutEngine, Hello, Here, Join, POLL, Seat, Word, engine::RemoteEngine, units::Form,
};
use crate::{
    Error, Result,
    launch::Rank,
    link::{Arrivals, Link},
    run::Run,
    train::{Exchange, Place},
};

/// Longest wait for engines between two looks at the other ranks.
const PATIENCE: Duration = Duration::from_secs(1);

/// Takes engines for a rank.
#[derive(Debug)]
pub struct Door {
    arrivals: Arrivals<Word>,
    device: Arc<dyn Device>,
    compute: Stream,
    backend: String,
    interfaces: Option<String>,
    /// Time of a transfer, or of a pass of an engine.
    timeout: Duration,
    threads: usize,
    /// Number of engines without which the rank does not sample: that of the config at first, then 1.
    least: usize,
    join_timeout: Duration,
    /// Since when engines are missing.
    missing_since: Option<Instant>,
    /// The thread that gives engines their ranks, on rank 0, ends with it.
    _registrar: Option<Arc<()>>,
}

impl Door {
    /// Begins to listen for engines. Every rank must call this.
    ///
    /// # Errors
    /// If a port cannot be bound.
    pub fn open(
        run: &Run,
        config: &RlvrConfig,
        hosts: RolloutHostsConfig,
        place: &Place,
        rank: &Rank,
    ) -> Result<Self> {
        let any = any_address(rank);
        let listen = |port: u16| {
            let refused = |source| Error::RolloutPort { port, source };
            TcpListener::bind((any, port)).map_err(refused)
        };
        let own = listen(0)?;
        let port = own.local_addr().map_err(Error::Port)?.port();
        let first = (rank.rank == 0).then(|| listen(hosts.port)).transpose()?;
        let places = Exchange::new(place.group())?.gather(&(own_address(rank), port))?;
        let registrar = first.map(|listener| register(listener, Hello::of(run, config), places));
        let role = run.rollout.as_ref().expect("a run with rollout hosts");
        Ok(Self {
            arrivals: Arrivals::at(own).map_err(Error::Port)?,
            device: place.device.clone(),
            compute: Stream::torch(&place.device)?,
            backend: run.policy.backend.clone(),
            interfaces: rank.interfaces.clone(),
            // Other ranks may wait for this one while it waits for an engine.
            timeout: place.group().timeout() / 2,
            threads: run.threads,
            least: role.devices_of(rank.rank, run.world_size),
            join_timeout: Duration::from_secs_f64(hosts.join_timeout_s),
            missing_since: None,
            _registrar: registrar.transpose()?,
        })
    }

    /// Adds engines that have come to `engines`. Waits a little if there are too few, and returns false if there still are.
    ///
    /// # Errors
    /// If there were too few for too long.
    pub fn fill(&mut self, engines: &mut Vec<Box<dyn RolloutEngine>>, weights: &Weights) -> Result<bool> {
        let started = Instant::now();
        loop {
            while let Some((first, link)) = self.arrivals.next() {
                let Word::Here(here) = first else { continue };
                let name = here.name.clone();
                match self.join(here, link, weights) {
                    Ok(engine) => {
                        tracing::info!("an engine on {name} has joined");
                        engines.push(Box::new(engine));
                    }
                    Err(error) => tracing::warn!("an engine on {name} did not join: {}", one_line(&error)),
                }
            }
            if engines.len() >= self.least {
                (self.least, self.missing_since) = (1, None);
                return Ok(true);
            }
            let waited = self.missing_since.get_or_insert(started).elapsed();
            if waited >= self.join_timeout {
                let (least, there) = (self.least, engines.len());
                return Err(Error::NoRolloutHost { least, there, waited: self.join_timeout });
            }
            if started.elapsed() >= PATIENCE {
                return Ok(false);
            }
            thread::sleep(POLL);
        }
    }

    /// Connects to an engine.
    fn join(&self, here: Here, link: Link<Word>, weights: &Weights) -> Result<RemoteEngine> {
        let (listener, port) = Listener::bind(link.own_address()).map_err(Error::Port)?;
        let through_host = here.backend != self.backend;
        link.send(&Word::Join(Join {
            port,
            through_host,
            units: Form::all(weights),
            timeout_s: self.timeout.as_secs_f64(),
            threads: self.threads,
        }));
        let (interfaces, address) = (self.interfaces.clone(), link.own_address());
        let place = Pair { rank: 0, address, port, listener, interfaces, timeout: self.timeout };
        let group = place.connect(&self.device, through_host, &here.name)?;
        let (compute, timeout) = (self.compute.clone(), self.timeout);
        Ok(RemoteEngine { name: here.name, link, group, compute, timeout, version: 0, is_lost: false })
    }

    /// Tells those who wait at the door that the run has ended.
    pub fn close(&self) {
        while let Some((_, link)) = self.arrivals.next() {
            link.send(&Word::Over);
        }
    }
}

/// One side of a communicator of a rank, which is 0, and an engine.
pub(super) struct Pair {
    pub(super) rank: usize,
    /// Address of the rank's host.
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) listener: Listener,
    pub(super) interfaces: Option<String>,
    pub(super) timeout: Duration,
}

impl Pair {
    /// Connects to the other side, which is on host `name` or serves it.
    pub(super) fn connect(
        self,
        device: &Arc<dyn Device>,
        through_host: bool,
        name: &str,
    ) -> Result<CollectiveGroup> {
        let Self { rank, address, port, listener, interfaces, timeout } = self;
        let rendezvous = Rendezvous {
            master_addr: address.to_string(),
            listener,
            interfaces,
            ..Rendezvous::on_this_host(rank, 2, port, timeout)
        };
        let comm = match through_host {
            true => connect_through_host(Store::connect(&rendezvous)?.next_part()?)?,
            false => connect(&**device, &rendezvous)?,
        };
        Ok(CollectiveGroup::new(format!("weights for {name}"), comm, device, timeout)?)
    }
}

/// Gives each engine that comes to rank 0 the rank with the fewest. `places` are the ranks' addresses and ports. The thread
/// ends with the returned value.
fn register(listener: TcpListener, own: Hello, places: Vec<(Option<IpAddr>, u16)>) -> Result<Arc<()>> {
    let arrivals = Arrivals::<Word>::at(listener).map_err(Error::Port)?;
    let open = Arc::new(());
    let lasting = Arc::downgrade(&open);
    let work = move || give_seats(&arrivals, &own, &places, &lasting);
    thread::Builder::new().name("registrar".into()).spawn(work).map_err(Error::Thread)?;
    Ok(open)
}

fn give_seats(arrivals: &Arrivals<Word>, own: &Hello, places: &[(Option<IpAddr>, u16)], lasting: &Weak<()>) {
    // An engine keeps its link as long as it lives.
    let mut taken: Vec<(usize, Link<Word>)> = Vec::new();
    while lasting.strong_count() > 0 {
        taken.retain(|(_, link)| link.poll().is_ok());
        while let Some((first, link)) = arrivals.next() {
            let Word::Hello(hello) = first else { continue };
            if let Some(reason) = own.objection(&hello) {
                tracing::warn!("a rollout host is refused: {reason}");
                link.send(&Word::Refused(reason));
                continue;
            }
            let rank = fewest(taken.iter().map(|(rank, _)| *rank), places.len());
            let (host, port) = places[rank];
            // Ranks on rank 0's host are reached at the address at which rank 0 was.
            let host = host.filter(|_| host != places[0].0);
            link.send(&Word::Seat(Seat { host, port }));
            taken.push((rank, link));
        }
        thread::sleep(POLL);
    }
}

/// The first rank of `ranks` with the fewest engines.
fn fewest(taken: impl Iterator<Item = usize>, ranks: usize) -> usize {
    let mut counts = vec![0; ranks];
    taken.for_each(|rank| counts[rank] += 1);
    let least = counts.iter().enumerate().min_by_key(|(_, count)| **count);
    least.expect("a run has ranks").0
}

/// Any address of this host, of the kind that the ranks use.
fn any_address(rank: &Rank) -> IpAddr {
    let addresses = (rank.master_addr.as_str(), rank.master_port).to_socket_addrs();
    let is_v6 = addresses.is_ok_and(|mut addresses| addresses.all(|address| address.is_ipv6()));
    if is_v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
}

/// Address of this host on the way to rank 0; `None` if that is loopback.
fn own_address(rank: &Rank) -> Option<IpAddr> {
    let socket = UdpSocket::bind((any_address(rank), 0)).ok()?;
    socket.connect((rank.master_addr.as_str(), rank.master_port)).ok()?;
    let own = socket.local_addr().ok()?.ip();
    (!own.is_loopback()).then_some(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_goes_to_the_first_rank_with_the_fewest() {
        let seats = |taken: &[usize]| fewest(taken.iter().copied(), 3);
        assert_eq!([seats(&[]), seats(&[0]), seats(&[0, 1]), seats(&[0, 1, 2])], [0, 1, 2, 0]);
        assert_eq!(seats(&[0, 2, 0, 2]), 1, "that of rank 1 is gone");
    }
}
