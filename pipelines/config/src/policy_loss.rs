//! The ranges of the `algorithm.loss` field, whose sections stand with their formulas in [`anyroll_algorithm::losses`].

use anyroll_algorithm::losses::Range;

use super::algorithm::PolicyLoss;
use super::problem::Section;

/// Reports numbers out of their ranges. `at` is the field.
pub(super) fn validate(loss: &PolicyLoss, at: &Section) {
    let at = at.below(loss.name());
    for Range { field, value, holds, range, given } in loss.formula().ranges() {
        at.given(given.as_slice()).number(field, value, holds, range);
    }
}
