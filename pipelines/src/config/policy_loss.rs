//! The ranges of the `algorithm.loss` field, whose sections stand with their formulas in [`crate::algorithm::losses`].

use super::algorithm::PolicyLoss;
use super::problem::Section;
use crate::algorithm::losses::Range;

impl PolicyLoss {
    pub(super) fn validate(self, at: &Section) {
        let at = at.below(self.name());
        for Range { field, value, holds, range, given } in self.formula().ranges() {
            at.given(given.as_slice()).number(field, value, holds, range);
        }
    }
}
