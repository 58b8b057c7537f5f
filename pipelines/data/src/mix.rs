//! Assignment of prompts to the sources of a mix.

/// Prompts in a cycle, so that weights are met to a thousandth.
const CYCLE: usize = 1000;

/// A fixed order of sources, in which each occurs in proportion to its weight and as evenly as possible.
#[derive(Clone, Debug)]
pub(super) struct Mix {
    /// For each position of a cycle its source, and the number of that source's prompts before it in the
    /// cycle.
    places: Vec<(usize, u64)>,
    /// Prompts of each source in a cycle.
    counts: Vec<u64>,
}

impl Mix {
    /// Each position takes the source that is furthest behind its weight.
    pub(super) fn new(weights: &[f64]) -> Self {
        let total: f64 = weights.iter().sum();
        let mut counts = vec![0; weights.len()];
        let places = (1..=CYCLE)
            .map(|place| {
                let behind = |source: usize| weights[source] / total * place as f64 - counts[source] as f64;
                let next = (0..weights.len()).max_by(|&a, &b| behind(a).total_cmp(&behind(b)));
                let next = next.expect("a config that was checked has a source");
                counts[next] += 1;
                (next, counts[next] - 1)
            })
            .collect();
        Self { places, counts }
    }

    /// Share of each source in the prompts.
    pub(super) fn shares(&self) -> impl Iterator<Item = f64> {
        self.counts.iter().map(|&count| count as f64 / CYCLE as f64)
    }

    /// The source of the prompt at `position` of the run, and its position among that source's.
    pub(super) fn at(&self, position: u64) -> (usize, u64) {
        let (cycle, place) = (position / CYCLE as u64, (position % CYCLE as u64) as usize);
        let (source, before) = self.places[place];
        (source, cycle * self.counts[source] + before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_come_by_their_weights_and_evenly() {
        for weights in [&[1.0][..], &[0.7, 0.3], &[1.0, 2.0, 1.0], &[0.999, 0.001]] {
            let mix = Mix::new(weights);
            let total: f64 = weights.iter().sum();
            let mut seen = vec![0u64; weights.len()];
            for position in 0..2500 {
                let (source, own) = mix.at(position);
                assert_eq!(own, seen[source], "{weights:?}: each position of a source once, in order");
                seen[source] += 1;
                for (seen, weight) in seen.iter().zip(weights) {
                    let share = weight / total * (position + 1) as f64;
                    assert!(
                        (*seen as f64 - share).abs() < 2.0,
                        "{weights:?} at {position}: {seen} of {share}"
                    );
                }
            }
        }
    }
}
