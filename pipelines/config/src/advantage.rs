//! The checks of the `algorithm.advantage` field, whose sections stand with their formulas in [`anyroll_algorithm`].

use super::algorithm::{Advantage, GaeConfig, GdpoConfig, GrpoConfig, ReinforceConfig};
use super::problem::Section;

/// Returns true if it compares the completions of a prompt.
pub(super) fn needs_groups(advantage: Advantage) -> bool {
    match advantage {
        Advantage::Grpo(_) | Advantage::Gdpo(_) | Advantage::Rloo | Advantage::Opo | Advantage::Gpg => true,
        Advantage::Reinforce(_) | Advantage::Remax | Advantage::Gae(_) | Advantage::None => false,
    }
}

/// Reason why turns cannot have credit of their own; `None` if they can.
pub(super) fn why_no_turns(advantage: Advantage) -> Option<&'static str> {
    match advantage {
        Advantage::Grpo(_) | Advantage::Rloo | Advantage::Reinforce(_) | Advantage::Gae(_) => None,
        Advantage::Opo => Some("`opo` weighs rewards by the length of whole completions"),
        Advantage::Gpg => Some("`gpg` counts groups whose rewards are equal, and those of turns are many"),
        Advantage::Gdpo(_) => Some("`gdpo` normalizes what terms say of whole completions"),
        Advantage::None => Some("`none` has rewards move nothing"),
        Advantage::Remax => Some("`remax` compares with a greedy episode, whose turns are others"),
    }
}

pub(super) fn validate(advantage: Advantage, at: &Section) {
    match advantage {
        Advantage::Grpo(GrpoConfig { eps, .. }) => at.number("grpo.eps", eps, eps > 0.0, "above 0"),
        Advantage::Gdpo(GdpoConfig { eps }) => at.number("gdpo.eps", eps, eps > 0.0, "above 0"),
        Advantage::Reinforce(ReinforceConfig { gamma }) => {
            at.number("reinforce.gamma", gamma, gamma > 0.0 && gamma <= 1.0, "above 0, at most 1")
        }
        Advantage::Gae(GaeConfig { gamma, lambda }) => {
            at.number("gae.gamma", gamma, gamma > 0.0 && gamma <= 1.0, "above 0, at most 1");
            at.number("gae.lambda", lambda, (0.0..=1.0).contains(&lambda), "from 0 to 1")
        }
        Advantage::Rloo | Advantage::Opo | Advantage::Gpg | Advantage::Remax | Advantage::None => true,
    };
}
