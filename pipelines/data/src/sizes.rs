//! Numbers of records, for reports before a run.

use super::{Dataset, Records};

/// Number of records of a source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceSize<'a> {
    /// Domain of the source; empty without a mix.
    pub domain: &'a str,
    /// Share of the training records that are drawn from the source; 1 without a mix.
    pub share: f64,
    /// Training records and held-out ones; `None` for records that are generated.
    pub records: Option<[usize; 2]>,
}

impl Dataset {
    /// Sizes of all sources; one without a mix.
    pub fn sizes(&self) -> Vec<SourceSize<'_>> {
        let of = |domain, share, dataset: &Dataset| {
            let records = match &dataset.0 {
                Records::Listed { train, held_out } => Some([train.len(), held_out.len()]),
                Records::Synthetic { .. } | Records::Mixed { .. } => None,
            };
            SourceSize { domain, share, records }
        };
        match &self.0 {
            Records::Mixed { mix, sources } => {
                let sources = mix.shares().zip(sources);
                sources.map(|(share, (domain, dataset))| of(domain, share, dataset)).collect()
            }
            Records::Listed { .. } | Records::Synthetic { .. } => vec![of("", 1.0, self)],
        }
    }
}
