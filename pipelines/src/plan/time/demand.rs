//! Seconds for which a phase needs each resource, and the resource that bounds it.

use std::ops::{Add, Sub};

use serde::Serialize;

use super::network::Cost;

/// Seconds of each resource, as if it worked alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Demand {
    /// Matrix products and attention.
    pub compute_s: f64,
    /// Device memory.
    pub memory_s: f64,
    /// Links in a host.
    pub in_host_s: f64,
    /// Links between hosts.
    pub between_hosts_s: f64,
    /// The link to host memory.
    pub host_link_s: f64,
    /// Launches of kernels and collectives.
    pub launches_s: f64,
}

impl Demand {
    /// The demand of a collective.
    pub(super) fn of(cost: Cost) -> Self {
        let Cost { in_host, between, latency } = cost;
        Self { in_host_s: in_host, between_hosts_s: between, launches_s: latency, ..Self::default() }
    }

    /// The resource that is needed longest. Products and memory passes follow one another, so that links compete with
    /// their sum.
    pub fn bound(&self) -> &'static str {
        let device = self.compute_s + self.memory_s;
        let on_device = if self.compute_s >= self.memory_s { "compute" } else { "device memory" };
        let all = [
            (device, on_device),
            (self.in_host_s, "links in a host"),
            (self.between_hosts_s, "links between hosts"),
            (self.host_link_s, "links to host memory"),
            (self.launches_s, "launches"),
        ];
        all.into_iter().fold((0.0, "nothing"), |most, it| if it.0 > most.0 { it } else { most }).1
    }

    /// Returns true if [`Self::bound`] is the device's compute or memory.
    pub(super) fn is_bound_by_device(&self) -> bool {
        ["compute", "device memory"].contains(&self.bound())
    }

    fn each(self, other: Self, with: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            compute_s: with(self.compute_s, other.compute_s),
            memory_s: with(self.memory_s, other.memory_s),
            in_host_s: with(self.in_host_s, other.in_host_s),
            between_hosts_s: with(self.between_hosts_s, other.between_hosts_s),
            host_link_s: with(self.host_link_s, other.host_link_s),
            launches_s: with(self.launches_s, other.launches_s),
        }
    }
}

impl Add for Demand {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.each(other, |a, b| a + b)
    }
}

impl Sub for Demand {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.each(other, |a, b| a - b)
    }
}

#[cfg(test)]
mod tests {
    use super::Demand;

    #[test]
    fn the_longest_demand_bounds() {
        let demand = Demand { compute_s: 2.0, memory_s: 1.0, between_hosts_s: 2.5, ..Demand::default() };
        assert_eq!(demand.bound(), "compute");
        assert_eq!(Demand { between_hosts_s: 3.5, ..demand }.bound(), "links between hosts");
        assert_eq!(Demand { memory_s: 2.5, ..demand }.bound(), "device memory");
        assert_eq!(Demand::default().bound(), "nothing");
        assert_eq!(demand + demand - demand, demand);
    }
}
