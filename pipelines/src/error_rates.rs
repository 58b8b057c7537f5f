//! The bound on failures of rewards.

use anyroll_config::error_chain::one_line;
use anyroll_reward::Error as RewardError;
use indexmap::IndexMap;

use crate::{Error, Result};

/// Fails if a term failed on more of `samples` than its allowed fraction. `terms` are names, these fractions,
/// and the failures over all ranks; `own` are the failures of this rank, each with the index of its term.
pub fn check_error_rates<'a>(
    terms: impl Iterator<Item = (&'a str, f64, f64)>,
    samples: usize,
    own: Vec<(usize, RewardError)>,
) -> Result<()> {
    warn_of(own.iter().map(|(_, error)| error));
    for (index, (name, max_error_rate, failed)) in terms.enumerate() {
        if failed > max_error_rate * samples as f64 {
            let source = own.into_iter().rfind(|(term, _)| *term == index).map(|(_, error)| error);
            let (name, failed) = (name.to_owned(), failed as usize);
            return Err(Error::Reward { name, failed, samples, max_error_rate, source });
        }
    }
    Ok(())
}

/// Warns of failures, once for all samples with the same cause, since a broken reward fails on each.
fn warn_of<'a>(failures: impl Iterator<Item = &'a RewardError>) {
    const MOST_TOLD: usize = 5;
    let mut alike: IndexMap<(&str, String), Vec<&RewardError>> = IndexMap::new();
    for error in failures {
        alike.entry((error.name, error.failure.to_string())).or_default().push(error);
    }
    for errors in alike.values().take(MOST_TOLD) {
        tracing::warn!(samples = errors.len(), first = one_line(errors[0]), "samples could not be scored");
    }
    if alike.len() > MOST_TOLD {
        let samples: usize = alike.values().skip(MOST_TOLD).map(Vec::len).sum();
        tracing::warn!(samples, "more samples could not be scored, for other reasons");
    }
}
