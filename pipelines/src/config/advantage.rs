//! The checks of the `algorithm.advantage` field, whose sections stand with their formulas in [`crate::algorithm`].

use super::algorithm::{Advantage, GaeConfig, GdpoConfig, GrpoConfig, ReinforceConfig};
use super::problem::Section;

impl Advantage {
    /// Returns true if it compares the completions of a prompt.
    pub(super) fn needs_groups(self) -> bool {
        match self {
            Self::Grpo(_) | Self::Gdpo(_) | Self::Rloo | Self::Opo | Self::Gpg => true,
            Self::Reinforce(_) | Self::Remax | Self::Gae(_) | Self::None => false,
        }
    }

    /// Reason why turns cannot have credit of their own; `None` if they can.
    pub(super) fn why_no_turns(self) -> Option<&'static str> {
        match self {
            Self::Grpo(_) | Self::Rloo | Self::Reinforce(_) | Self::Gae(_) => None,
            Self::Opo => Some("`opo` weighs rewards by the length of whole completions"),
            Self::Gpg => Some("`gpg` counts groups whose rewards are equal, and those of turns are many"),
            Self::Gdpo(_) => Some("`gdpo` normalizes what terms say of whole completions"),
            Self::None => Some("`none` has rewards move nothing"),
            Self::Remax => Some("`remax` compares with a greedy episode, whose turns are others"),
        }
    }

    pub(super) fn validate(self, at: &Section) {
        match self {
            Self::Grpo(GrpoConfig { eps, .. }) => at.number("grpo.eps", eps, eps > 0.0, "above 0"),
            Self::Gdpo(GdpoConfig { eps }) => at.number("gdpo.eps", eps, eps > 0.0, "above 0"),
            Self::Reinforce(ReinforceConfig { gamma }) => {
                at.number("reinforce.gamma", gamma, gamma > 0.0 && gamma <= 1.0, "above 0, at most 1")
            }
            Self::Gae(GaeConfig { gamma, lambda }) => {
                at.number("gae.gamma", gamma, gamma > 0.0 && gamma <= 1.0, "above 0, at most 1");
                at.number("gae.lambda", lambda, (0.0..=1.0).contains(&lambda), "from 0 to 1")
            }
            Self::Rloo | Self::Opo | Self::Gpg | Self::Remax | Self::None => true,
        };
    }
}
