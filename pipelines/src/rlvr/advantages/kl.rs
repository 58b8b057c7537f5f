//! KL divergence from the reference, subtracted from rewards or advantages, and the controller of its weight.

use anyroll_config::{AdaptiveKlConfig, KlTerm};
use serde::{Deserialize, Serialize};

use super::{lengths, sequences, turns};
use crate::{
    Result,
    metrics::Metrics,
    rlvr::rows::Scored,
    train::{Exchange, Share},
};

/// KL divergences of a step's samples.
pub struct SampleKl {
    /// Old log-prob minus the reference's log-prob, for each of this rank's tokens.
    pub of_tokens: Vec<f64>,
    /// One row per sample of the step, in the step's order.
    pub rows: Vec<KlRow>,
    /// Weight of the divergences in this step.
    pub coef: f64,
}

/// Sums over a sample's tokens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct KlRow {
    /// Sum over all tokens.
    pub of_sample: f64,
    /// Sum over each turn; empty if rewards are per episode.
    pub of_turns: Vec<f64>,
}

impl SampleKl {
    /// Gathers the rows of all ranks from the divergences `of_tokens` of this rank's samples. Every rank must call
    /// this.
    pub fn gather(
        exchange: &Exchange,
        share: &Share,
        scored: &Scored,
        of_tokens: Vec<f64>,
        (coef, by_turns): (f64, bool),
    ) -> Result<Self> {
        let row = |(tokens, sample): (&[f64], _)| {
            let mut of_tokens = tokens.iter();
            let of_turn = |length| of_tokens.by_ref().take(length).sum::<f64>();
            let of_turns = if by_turns { turns::lengths(sample).map(of_turn).collect() } else { Vec::new() };
            KlRow { of_sample: tokens.iter().sum(), of_turns }
        };
        let lengths = lengths(&scored.own);
        let own: Vec<KlRow> = sequences(&of_tokens, &lengths).zip(&scored.own).map(row).collect();
        let rows = share.ordered(exchange.gather_rows(&own)?);
        Ok(Self { of_tokens, rows, coef })
    }

    /// Mean over samples of the mean over a sample's tokens.
    fn mean(&self, scored: &Scored) -> f64 {
        // A sample whose episode failed to start has no tokens.
        let of_samples = self.rows.iter().zip(&scored.rows);
        let means = of_samples.map(|(kl, row)| kl.of_sample / (row.tokens as f64).max(1.0));
        means.sum::<f64>() / scored.rows.len() as f64
    }

    /// Metrics: mean divergence and weight.
    pub fn metrics(&self, scored: &Scored) -> Metrics {
        let mut metrics = Metrics::new();
        metrics.insert("kl/reference", self.mean(scored));
        metrics.insert("kl/coef", self.coef);
        metrics
    }

    /// The next step's weight of the KL divergence in the reward; `None` without a controller.
    pub fn next_coef(&self, term: KlTerm, scored: &Scored) -> Option<f64> {
        let KlTerm::Reward(config) = term else { return None };
        config.adaptive.map(|config| next_coef(config, self.coef, self.mean(scored), scored.rows.len()))
    }
}

/// Controller of Ziegler et al. (2019), section 2.2. The change is proportional to the error of `kl`, at most a fifth
/// per `horizon` samples.
fn next_coef(config: AdaptiveKlConfig, coef: f64, kl: f64, samples: usize) -> f64 {
    let off = (kl / config.target - 1.0).clamp(-0.2, 0.2);
    coef * (1.0 + off * samples as f64 / config.horizon)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_moves_towards_the_target_by_at_most_a_fifth() {
        let config = AdaptiveKlConfig { target: 0.1, horizon: 1000.0 };
        for (kl, expected) in [(0.1, 0.5), (0.11, 0.505), (5.0, 0.51), (0.0, 0.49), (-3.0, 0.49)] {
            let found = next_coef(config, 0.5, kl, 100);
            assert!((found - expected).abs() < 1e-12, "{kl}: {found} is not {expected}");
        }
    }
}
