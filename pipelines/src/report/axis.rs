//! Axes: a range of values, its round ticks and their labels.

use crate::format;

/// A range with round ticks; `low < high`, both finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    tick_step: f64,
}

impl Axis {
    /// An axis that holds `low` to `high`, with about `ticks` ticks.
    pub(super) fn new(low: f64, high: f64, ticks: usize) -> Axis {
        // A curve that is constant still needs a range to lie in.
        let (low, high) = if high > low { (low, high) } else { (low - pad(low), low + pad(low)) };
        Axis { low, high, tick_step: round_step((high - low) / ticks as f64) }
    }

    /// Position of `value`: 0 at the low end, 1 at the high one.
    pub(super) fn fraction(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// The ticks with their labels, from low to high.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let first = (self.low / self.tick_step - 1e-9).ceil() as i64;
        let last = (self.high / self.tick_step + 1e-9).floor() as i64;
        (first..=last).map(|tick| tick as f64 * self.tick_step).map(|tick| (tick, self.label(tick))).collect()
    }

    fn label(&self, tick: f64) -> String {
        let largest = self.low.abs().max(self.high.abs());
        // Rounding may give minus zero.
        if tick.abs() < self.tick_step / 2.0 {
            "0".to_owned()
        } else if largest < 2e-3 {
            // Enough digits to distinguish the ticks.
            let digits = (tick.abs().log10().floor() - self.tick_step.log10().floor()).max(0.0) as usize;
            format!("{tick:.digits$e}")
        } else if largest >= 1e4 && self.tick_step >= 1e3 {
            let short = tick / 1e3;
            if largest < 1e6 { format!("{short}k") } else { format::count(tick) }
        } else {
            let decimals = (-self.tick_step.log10().floor()).max(0.0) as usize;
            format!("{tick:.decimals$}")
        }
    }
}

fn pad(value: f64) -> f64 {
    if value == 0.0 { 1.0 } else { value.abs() / 2.0 }
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `step`, with a small tolerance: fractions
/// that add up to slightly more than one get the ticks of one.
fn round_step(step: f64) -> f64 {
    let magnitude = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * magnitude >= step * 0.98);
    factor.unwrap_or(10.0) * magnitude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_labelled() {
        let check = |low, high, expected: &[&str]| {
            let axis = Axis::new(low, high, 5);
            let labels: Vec<_> = axis.ticks().into_iter().map(|tick| tick.1).collect();
            assert_eq!(labels, expected, "{low} to {high}");
        };
        check(0.0, 1.0, &["0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        check(0.0, 0.3, &["0", "0.1", "0.2", "0.3"]);
        check(0.03, 0.97, &["0.2", "0.4", "0.6", "0.8"]);
        check(-0.013, 0.021, &["-0.01", "0", "0.01", "0.02"]);
        check(0.0, 0.000_17, &["0", "5e-5", "1.0e-4", "1.5e-4"]);
        check(0.0, 15_300.0, &["0", "5k", "10k", "15k"]);
        check(0.0, 3_100_000.0, &["0", "1.00M", "2.00M", "3.00M"]);
        check(6.0, 6.0, &["4", "6", "8"]);
        check(0.0, 0.0, &["-1.0", "-0.5", "0", "0.5", "1.0"]);
        check(1.0, 200.0, &["50", "100", "150", "200"]);
    }

    #[test]
    fn the_ends_are_zero_and_one() {
        let axis = Axis::new(1.0, 201.0, 5);
        assert_eq!([1.0, 101.0, 201.0].map(|value| axis.fraction(value)), [0.0, 0.5, 1.0]);
    }
}
