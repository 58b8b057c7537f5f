//! [`Offered`]: the address at which the other ranks reach this host.
//!
//! A host's own name is no help: many systems resolve it to loopback (Debian's `/etc/hosts` has 127.0.1.1). The route to
//! the rendezvous is the way to the others. Where the rendezvous is this very host that route may be loopback too, and the
//! others tell at which address they found it.

use std::{
    fmt,
    net::{IpAddr, ToSocketAddrs, UdpSocket},
};

use nix::{ifaddrs::getifaddrs, sys::socket::SockaddrStorage};

use super::rendezvous::{Rendezvous, Store};
use crate::Result;

/// Offer of one rank to the others.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Offered {
    /// Names, separated by commas.
    Interfaces(String),
    /// Address of this host.
    Address(IpAddr),
}

impl fmt::Display for Offered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Offered::Interfaces(names) => write!(f, "the interface {names} (GLOO_SOCKET_IFNAME)"),
            Offered::Address(address) => write!(f, "the address {address}"),
        }
    }
}

impl Offered {
    /// Returns the address: of interfaces that of the first which has one, of IPv4 before IPv6.
    ///
    /// # Errors
    /// The names, if none of them has an address, or the system's words.
    pub(super) fn address(&self) -> Result<IpAddr, String> {
        let names = match self {
            Offered::Address(address) => return Ok(*address),
            Offered::Interfaces(names) => names,
        };
        let found: Vec<(String, IpAddr)> = getifaddrs()
            .map_err(|error| format!("the interfaces of this host: {error}"))?
            .filter_map(|interface| Some((interface.interface_name, ip(&interface.address?)?)))
            .collect();
        let of = |name: &str| {
            let addresses = || found.iter().filter(|(of, _)| of == name).map(|(_, address)| *address);
            addresses().find(IpAddr::is_ipv4).or_else(|| addresses().next())
        };
        names
            .split(',')
            .find_map(|name| of(name.trim()))
            .ok_or_else(|| "no such interface has an address".to_owned())
    }

    /// Finds the address for the ranks of `store`.
    ///
    /// # Errors
    /// [`crate::Error::Rendezvous`] if the rendezvous has no address, or its store does not answer.
    pub(super) fn to_ranks_of(store: &Store) -> Result<Self> {
        let rendezvous = store.rendezvous();
        let route = Route::to(rendezvous)?;
        // No other host reaches a rendezvous at a loopback address.
        let is_here = route.from.is_loopback() && rendezvous.master_addr.parse() == Ok(route.from);
        let is_alone = rendezvous.world_size == 1 || is_here;
        let key = |rank: usize| format!("route/{rank}");
        if !is_alone {
            store.set(&key(rendezvous.rank), route.to_string().as_bytes())?;
        }
        if let Some(names) = &rendezvous.interfaces {
            return Ok(Offered::Interfaces(names.clone()));
        }
        if is_alone || !route.from.is_loopback() {
            return Ok(Offered::Address(route.from));
        }
        let mut routes = Vec::with_capacity(rendezvous.world_size);
        for rank in 0..rendezvous.world_size {
            let text = String::from_utf8_lossy(&store.get(&key(rank))?).into_owned();
            let route = text.parse().map_err(|()| rendezvous.error(format!("{} is {text:?}", key(rank))))?;
            routes.push(route);
        }
        Ok(Offered::Address(seen_by_others(route.from, &routes, is_of_this_host)))
    }
}

/// Returns the address, unless it is of another family or counts on one link only.
fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    let of_v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    let of_v6 =
        || address.as_sockaddr_in6().map(|address| address.ip()).filter(|ip| !ip.is_unicast_link_local());
    of_v4.or_else(|| of_v6().map(IpAddr::V6))
}

/// Both ends of the way from a rank to the rendezvous.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Route {
    from: IpAddr,
    to: IpAddr,
}

impl Route {
    /// Asks the system for the way, on which nothing is sent.
    fn to(rendezvous: &Rendezvous) -> Result<Self> {
        let place = (rendezvous.master_addr.as_str(), rendezvous.master_port);
        let mut problem = format!("{} has no address", rendezvous.master_addr);
        let places = place.to_socket_addrs().map_err(|error| rendezvous.error(error.to_string()))?;
        for to in places {
            let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
            let from = UdpSocket::bind((any, 0)).and_then(|socket| {
                socket.connect(to)?;
                socket.local_addr()
            });
            match from {
                Ok(from) => return Ok(Self { from: from.ip(), to: to.ip() }),
                Err(error) => problem = format!("no way to {to}: {error}"),
            }
        }
        Err(rendezvous.error(problem))
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.from, self.to)
    }
}

impl std::str::FromStr for Route {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (from, to) = text.split_once(' ').ok_or(())?;
        Ok(Self { from: from.parse().map_err(drop)?, to: to.parse().map_err(drop)? })
    }
}

/// Address of a host whose own way to the rendezvous is loopback: the one that a rank of another host found the rendezvous
/// at. Without other hosts loopback is right.
fn seen_by_others(loopback: IpAddr, routes: &[Route], is_local: impl Fn(IpAddr) -> bool) -> IpAddr {
    let of_others = routes.iter().filter(|route| !route.from.is_loopback()).map(|route| route.to);
    of_others.into_iter().find(|&to| is_local(to)).unwrap_or(loopback)
}

fn is_of_this_host(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_whose_name_is_loopback_is_reached_as_others_found_it() {
        let route = |text: &str| text.parse::<Route>().unwrap();
        let loopback: IpAddr = "127.0.1.1".parse().unwrap();
        let own: IpAddr = "10.0.0.1".parse().unwrap();
        let one_host = [route("127.0.0.1 127.0.1.1"), route("127.0.0.1 127.0.1.1")];
        assert_eq!(seen_by_others(loopback, &one_host, |_| true), loopback);
        let two_hosts = [route("127.0.0.1 127.0.1.1"), route("10.0.0.2 10.0.0.1")];
        assert_eq!(seen_by_others(loopback, &two_hosts, |address| address == own), own);
        // Reached through a forwarded address, which is not this host's.
        assert_eq!(seen_by_others(loopback, &two_hosts, |_| false), loopback);
        assert!("10.0.0.1".parse::<Route>().is_err() && "a b".parse::<Route>().is_err());
    }

    #[test]
    fn the_way_to_a_rendezvous_on_this_host_is_found_without_a_name() {
        let timeout = std::time::Duration::from_secs(1);
        let route = Route::to(&Rendezvous::on_this_host(0, 2, 1, timeout)).unwrap();
        assert_eq!(route.to_string(), "127.0.0.1 127.0.0.1");
        let nowhere =
            Rendezvous { master_addr: "no host".into(), ..Rendezvous::on_this_host(0, 2, 1, timeout) };
        let error = Route::to(&nowhere).unwrap_err().to_string();
        assert!(error.contains("rank 0 of 2 found no rendezvous at no host:1"), "{error}");
    }
}
