//! Speeds of published cards, for plans of runs on devices that are not here. Nothing of a run depends on them.

/// Figures of a card's data sheet. A plan multiplies them by fractions that were measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// Name, as a user writes it.
    pub name: &'static str,
    /// Dense matrix products in 16 bits, FLOP/s.
    pub flops: f64,
    /// Memory, bytes/s.
    pub memory: f64,
    /// To other cards of its host and, at the same time, from them, bytes/s each.
    pub in_host: f64,
    /// To host memory and, at the same time, from it, bytes/s each.
    pub host_link: f64,
}

/// Data sheets of the makers: "A100 80GB SXM" (2021), "H100 SXM" (2022), "H200 SXM" (2023), "HGX B200" (2024) and "MI300X"
/// (2023). Sums of both directions are halved. The link to the host is PCIe 4.0 x16 or 5.0 x16 less its encoding.
///
/// `anyroll doctor --bench` measured an H200's memory and host link at 88 % of these (docs/results/hardware.md).
const CARDS: [Card; 5] = [
    Card { name: "A100", flops: 312e12, memory: 2.039e12, in_host: 300e9, host_link: 31.5e9 },
    Card { name: "H100", flops: 989.4e12, memory: 3.35e12, in_host: 450e9, host_link: 63e9 },
    Card { name: "H200", flops: 989.4e12, memory: 4.8e12, in_host: 450e9, host_link: 63e9 },
    Card { name: "B200", flops: 2250e12, memory: 7.7e12, in_host: 900e9, host_link: 63e9 },
    Card { name: "MI300X", flops: 1307.4e12, memory: 5.3e12, in_host: 448e9, host_link: 63e9 },
];

impl Card {
    /// Returns the card called `name`, in any case.
    pub fn find(name: &str) -> Option<Self> {
        Self::all().find(|card| card.name.eq_ignore_ascii_case(name))
    }

    /// Every card of the table.
    pub fn all() -> impl Iterator<Item = Self> {
        CARDS.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::Card;

    #[test]
    fn cards_are_found_by_name() {
        assert_eq!(Card::find("h200").map(|card| card.name), Some("H200"));
        assert_eq!(Card::find("H2000"), None);
        assert!(Card::all().all(|card| card.flops > card.memory && card.memory > card.in_host));
    }
}
