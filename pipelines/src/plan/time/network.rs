//! Times of collectives over hosts with equally many devices, on paper.
//!
//! A device sends to all others of its host at `in_host`. All devices of a host share its link to other hosts. Both ways
//! carry their part at the same time, so that the slower one counts.

/// A collective's launch, and a turn of a ring in a host: an all-gather of 1 MB over 2 and 4 devices took 13 and 15 us
/// (docs/results/hardware.md), of which 2 are its bytes.
const LAUNCH_S: f64 = 10e-6;
const TURN_IN_HOST_S: f64 = 1e-6;
/// A turn of a ring from a host to the next. Assumed: no network between hosts was measured.
const TURN_BETWEEN_S: f64 = 15e-6;

/// Hosts and the rates of their links, in bytes/s each way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Number of hosts.
    pub hosts: usize,
    /// Devices of a host.
    pub devices_per_host: usize,
    /// Rate from a device to others of its host.
    pub in_host: f64,
    /// Rate from a host to others, shared by its devices.
    pub between: f64,
}

/// Ranks of a collective, equally many on each of their hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of their hosts.
    pub hosts: usize,
    /// Groups that use a host's link at the same time.
    pub at_once: usize,
}

/// Time of a collective by its parts, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes in the host.
    pub in_host: f64,
    /// Bytes between hosts.
    pub between: f64,
    /// Launch and turns.
    pub latency: f64,
}

impl Cost {
    /// Returns the time of all of it.
    pub fn seconds(self) -> f64 {
        self.in_host.max(self.between) + self.latency
    }
}

impl Network {
    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.hosts * self.devices_per_host
    }

    /// Returns the `ranks` neighbours of which one rank is; `None` if they are not equally many on each host, or do not
    /// divide all ranks.
    pub fn neighbours(&self, ranks: usize) -> Option<Group> {
        let per_host = self.devices_per_host;
        let is_even = ranks > 0
            && self.world_size().is_multiple_of(ranks)
            && (per_host.is_multiple_of(ranks) || ranks.is_multiple_of(per_host));
        is_even.then(|| Group { ranks, hosts: ranks.div_ceil(per_host), at_once: (per_host / ranks).max(1) })
    }

    /// Returns the ranks that hold the same shards, if `group` shares one set of them.
    pub fn replicas(&self, group: Group) -> Group {
        let ranks = self.world_size() / group.ranks;
        Group { ranks, hosts: ranks.min(self.hosts / group.hosts), at_once: group.ranks / group.hosts }
    }

    /// All-gather of `bytes` in all, as a ring: each link passes on all but one part.
    pub fn gather(&self, group: Group, bytes: f64) -> Cost {
        let passed = bytes * (group.ranks - 1) as f64 / group.ranks as f64;
        let turns_between = group.hosts.saturating_sub(1);
        self.cost(group, passed, passed, turns_between)
    }

    /// Reduce-scatter of `bytes` by the library, as the same ring in the other direction.
    pub fn reduce_scatter(&self, group: Group, bytes: f64) -> Cost {
        self.gather(group, bytes)
    }

    /// All-to-all of a rank's `bytes`: a slice for each rank, so that nothing is summed on the way. A host sends slices of
    /// each of its ranks.
    pub fn exchange(&self, group: Group, bytes: f64) -> Cost {
        let per_host = group.ranks / group.hosts;
        let slice = bytes / group.ranks as f64;
        let in_host = slice * (per_host - 1) as f64;
        let between = slice * (group.ranks - per_host) as f64 * per_host as f64;
        self.cost(group, in_host, between, usize::from(group.hosts > 1))
    }

    /// `in_host` are bytes of a rank, `between` of a host.
    fn cost(&self, group: Group, in_host: f64, between: f64, turns_between: usize) -> Cost {
        if group.ranks == 1 {
            return Cost::default();
        }
        let is_between = group.hosts > 1;
        let has_neighbours = group.ranks > group.hosts;
        let turns_in_host = group.ranks - 1 - turns_between.min(group.ranks - 1);
        Cost {
            in_host: if has_neighbours { in_host / self.in_host } else { 0.0 },
            between: if is_between { between * group.at_once as f64 / self.between } else { 0.0 },
            latency: LAUNCH_S + turns_in_host as f64 * TURN_IN_HOST_S + turns_between as f64 * TURN_BETWEEN_S,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Group, Network};

    const NETWORK: Network = Network { hosts: 4, devices_per_host: 8, in_host: 100.0, between: 10.0 };

    fn group(ranks: usize) -> Group {
        NETWORK.neighbours(ranks).unwrap()
    }

    #[test]
    fn groups_are_whole_hosts_or_parts_of_one() {
        assert_eq!(group(8), Group { ranks: 8, hosts: 1, at_once: 1 });
        assert_eq!(group(32), Group { ranks: 32, hosts: 4, at_once: 1 });
        assert_eq!(group(2), Group { ranks: 2, hosts: 1, at_once: 4 });
        assert!([0, 3, 12, 24, 64].iter().all(|&ranks| NETWORK.neighbours(ranks).is_none()));
        assert_eq!(NETWORK.replicas(group(8)), Group { ranks: 4, hosts: 4, at_once: 8 });
        assert_eq!(NETWORK.replicas(group(16)), Group { ranks: 2, hosts: 2, at_once: 8 });
        assert_eq!(NETWORK.replicas(group(2)), Group { ranks: 16, hosts: 4, at_once: 2 });
        assert_eq!(NETWORK.replicas(group(32)).ranks, 1);
    }

    #[test]
    fn bytes_are_those_of_rings_and_of_slices() {
        // 31 of 32 parts of 3,200 bytes pass each link.
        let gather = NETWORK.gather(group(32), 3200.0);
        assert_eq!((gather.in_host, gather.between), (31.0, 310.0));
        assert_eq!(NETWORK.reduce_scatter(group(32), 3200.0), gather);
        // Seven slices of 100 bytes go to neighbours; each of eight ranks sends 24 to other hosts.
        let exchange = NETWORK.exchange(group(32), 3200.0);
        assert_eq!((exchange.in_host, exchange.between), (7.0, 8.0 * 24.0 * 10.0));
        let inside = NETWORK.gather(group(8), 800.0);
        assert_eq!((inside.in_host, inside.between), (7.0, 0.0));
        assert_eq!(NETWORK.exchange(group(8), 800.0).in_host, 7.0);
        // Replicas on four hosts, eight groups of them on each link.
        let replicas = NETWORK.gather(NETWORK.replicas(group(8)), 400.0);
        assert_eq!((replicas.in_host, replicas.between), (0.0, 300.0 * 8.0 / 10.0));
        assert_eq!(NETWORK.gather(group(1), 800.0).seconds(), 0.0);
    }

    #[test]
    fn slower_links_are_never_faster_and_more_hosts_never_less() {
        let at = |hosts, between| {
            let network = Network { hosts, between, ..NETWORK };
            let all = network.neighbours(network.world_size()).unwrap();
            [network.gather(all, 1e3).seconds(), network.exchange(all, 1e3).seconds()]
        };
        for hosts in [1, 2, 4, 8] {
            for (fast, slow) in at(hosts, 20.0).into_iter().zip(at(hosts, 10.0)) {
                assert!(slow >= fast && (hosts == 1 || slow > fast), "{hosts} hosts: {slow} and {fast}");
            }
            for (few, many) in at(hosts, 10.0).into_iter().zip(at(2 * hosts, 10.0)) {
                assert!(many > few, "{hosts} hosts: {few}, twice: {many}");
            }
        }
    }
}
