//! OPO: rewards minus the mean weighted by lengths.

use super::{Earned, Estimator};
use crate::{groups, is_constant};

/// OPO: rewards minus the mean weighted by lengths.
#[derive(Debug)]
pub struct Opo;

impl Estimator for Opo {
    fn title(&self, _: bool) -> &'static str {
        "OPO"
    }

    fn refuses_turns(&self) -> Option<&'static str> {
        Some("`opo` weighs rewards by the length of whole completions")
    }

    /// r - sum(l r) / sum(l) over the group (Hao et al., 2025).
    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        let Earned { rewards, lengths, group_size, .. } = *earned;
        let mut advantages = Vec::with_capacity(rewards.len());
        for (group, lengths) in groups(rewards, group_size).zip(groups(lengths, group_size)) {
            if is_constant(group) {
                advantages.extend(std::iter::repeat_n(0.0, group.len()));
                continue;
            }
            let weighted: f64 = group.iter().zip(lengths).map(|(reward, length)| reward * length).sum();
            let mean = weighted / lengths.iter().sum::<f64>();
            advantages.extend(group.iter().map(|reward| reward - mean));
        }
        advantages
    }
}
