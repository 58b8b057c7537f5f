//! [`Schedule`]: the learning rate of each step.

/// Shape of the learning rate over a run: linear warm-up, then one of four decays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    /// Constant at the peak.
    Constant {
        /// Number of warm-up steps.
        warmup_steps: u64,
    },
    /// Linear decay.
    Linear {
        /// Number of warm-up steps.
        warmup_steps: u64,
        /// Last step's rate divided by the peak.
        final_ratio: f64,
    },
    /// Cosine decay (Loshchilov and Hutter 2017).
    Cosine {
        /// Number of warm-up steps.
        warmup_steps: u64,
        /// Last step's rate divided by the peak.
        final_ratio: f64,
    },
    /// Warm-up, stable, decay: constant at the peak, then linear decay at the end (Hu et al. 2024).
    Wsd {
        /// Number of warm-up steps.
        warmup_steps: u64,
        /// Number of decay steps, at the end of the run.
        decay_steps: u64,
        /// Last step's rate divided by the peak.
        final_ratio: f64,
    },
}

impl Schedule {
    /// Returns the learning rate's factor on its peak at `step`, counted from 0, of `steps`. The first
    /// warm-up step has `1 / warmup_steps`, the last step of the run `final_ratio`.
    pub fn factor(&self, step: u64, steps: u64) -> f64 {
        let (Self::Constant { warmup_steps }
        | Self::Linear { warmup_steps, .. }
        | Self::Cosine { warmup_steps, .. }
        | Self::Wsd { warmup_steps, .. }) = *self;
        if step < warmup_steps {
            return (step + 1) as f64 / warmup_steps as f64;
        }
        let span = steps.saturating_sub(warmup_steps + 1).max(1);
        let progress = ((step - warmup_steps) as f64 / span as f64).min(1.0);
        match *self {
            Self::Constant { .. } => 1.0,
            Self::Linear { final_ratio, .. } => 1.0 - (1.0 - final_ratio) * progress,
            Self::Cosine { final_ratio, .. } => {
                final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
            Self::Wsd { decay_steps, final_ratio, .. } => {
                let falling = (step + 1).min(steps).saturating_sub(steps - decay_steps.min(steps));
                1.0 - (1.0 - final_ratio) * falling as f64 / decay_steps.max(1) as f64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule;

    fn check(schedule: Schedule, expected: &[(u64, f64)]) {
        for &(step, factor) in expected {
            let actual = schedule.factor(step, 101);
            assert!((actual - factor).abs() < 1e-12, "{schedule:?} at {step}: {actual}, not {factor}");
        }
    }

    #[test]
    fn shapes() {
        check(Schedule::Constant { warmup_steps: 4 }, &[(0, 0.25), (3, 1.0), (4, 1.0), (100, 1.0)]);
        check(Schedule::Constant { warmup_steps: 0 }, &[(0, 1.0)]);
        check(
            Schedule::Linear { warmup_steps: 0, final_ratio: 0.1 },
            &[(0, 1.0), (50, 0.55), (100, 0.1), (900, 0.1)],
        );
        check(Schedule::Cosine { warmup_steps: 0, final_ratio: 0.0 }, &[(0, 1.0), (50, 0.5), (100, 0.0)]);
        check(
            Schedule::Wsd { warmup_steps: 2, decay_steps: 10, final_ratio: 0.5 },
            &[(0, 0.5), (2, 1.0), (90, 1.0), (91, 0.95), (95, 0.75), (100, 0.5), (900, 0.5)],
        );
        check(Schedule::Wsd { warmup_steps: 0, decay_steps: 0, final_ratio: 0.5 }, &[(0, 1.0), (100, 1.0)]);
        check(Schedule::Cosine { warmup_steps: 100, final_ratio: 0.0 }, &[(99, 1.0), (100, 1.0)]);
    }
}
