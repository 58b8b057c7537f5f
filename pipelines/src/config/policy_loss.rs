//! The `algorithm.loss` field: the loss of a token.

use serde::{Deserialize, Serialize};

use super::problem::Section;

/// The loss of a token. A ratio is the token's new probability over its old one.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLoss {
    /// PPO's: the ratio is clipped where clipping makes the loss larger.
    Clipped(ClippedConfig),
    /// As `clipped`, with one ratio a sequence: the geometric mean of its tokens'.
    Gspo(GspoConfig),
    /// The geometric mean of a sequence's ratios, of which each is clipped before.
    Gmpo(GmpoConfig),
    /// The log-prob, weighted by the advantage and the clamped ratio, through which no gradient flows.
    Cispo(CispoConfig),
    /// The log-prob, weighted by the advantage: vanilla policy gradient, without a ratio.
    Reinforce,
    /// The ratio behind a soft gate instead of a clip.
    Sapo(SapoConfig),
    /// The log-prob, weighted by the advantage, and where that is negative by the ratio, at most 1.
    Topr(ToprConfig),
    /// The log-prob, weighted by the advantage and a smooth function of the sequence's ratio, the product of its tokens'.
    Vespo(VespoConfig),
}

impl Default for PolicyLoss {
    fn default() -> Self {
        Self::Clipped(ClippedConfig::default())
    }
}

/// PPO's clipping.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClippedConfig {
    /// The ratio is clipped below at `1 - clip_low`; 0 to 1, both excluded. Default 0.2.
    pub clip_low: f64,
    /// The ratio is clipped above at `1 + clip_high`; above 0. Default 0.28.
    pub clip_high: f64,
    /// Where the advantage is negative, the loss is at most so many times its absolute value; above 1.
    /// Default: no bound.
    pub dual_clip: Option<f64>,
}

impl Default for ClippedConfig {
    fn default() -> Self {
        Self { clip_low: 0.2, clip_high: 0.28, dual_clip: None }
    }
}

/// GSPO's clipping, much tighter than a token's, since the ratio is a mean over the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GspoConfig {
    /// The sequence's ratio is clipped below at `1 - clip_low`; 0 to 1, both excluded. Default 3e-4.
    pub clip_low: f64,
    /// The sequence's ratio is clipped above at `1 + clip_high`; above 0. Default 4e-4.
    pub clip_high: f64,
}

impl Default for GspoConfig {
    fn default() -> Self {
        Self { clip_low: 3e-4, clip_high: 4e-4 }
    }
}

/// GMPO's clipping, of the logarithm of a token's ratio, and wider, since it is before the mean.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GmpoConfig {
    /// The ratio is clipped below at `exp(-clip_low)`; above 0. Default 0.4.
    pub clip_low: f64,
    /// The ratio is clipped above at `exp(clip_high)`; above 0. Default 0.4.
    pub clip_high: f64,
}

impl Default for GmpoConfig {
    fn default() -> Self {
        Self { clip_low: 0.4, clip_high: 0.4 }
    }
}

/// CISPO's bounds of the ratio, as ratios. 0 to 5 is TRL's use of it, 0.8 to 1.28 verl's, and 0 to 1 truncated
/// importance sampling as a loss, ROLL's `tis`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CispoConfig {
    /// The least weight; 0 or above. Default 0, no bound.
    pub min_ratio: f64,
    /// The largest weight; above `min_ratio`. Default 5.
    pub max_ratio: f64,
}

impl Default for CispoConfig {
    fn default() -> Self {
        Self { min_ratio: 0.0, max_ratio: 5.0 }
    }
}

/// SAPO's gates.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SapoConfig {
    /// Steepness of the gate where the advantage is positive; above 0. Default 1.
    pub tau_positive: f64,
    /// Steepness of the gate elsewhere; above 0. Default 1.05.
    pub tau_negative: f64,
}

impl Default for SapoConfig {
    fn default() -> Self {
        Self { tau_positive: 1.0, tau_negative: 1.05 }
    }
}

/// TOPR's weights.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToprConfig {
    /// Weight of tokens with a positive advantage; 0 or above. Default 1.
    pub positive_weight: f64,
    /// Weight of the other tokens, beside their ratio; 0 or above. Default 1.
    pub negative_weight: f64,
}

impl Default for ToprConfig {
    fn default() -> Self {
        Self { positive_weight: 1.0, negative_weight: 1.0 }
    }
}

/// VESPO's weights: of a sequence's ratio W they are exp(lambda) W^k exp(-lambda W), which is 1 at W = 1.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct VespoConfig {
    /// The power where the advantage is 0 or above; 0 or above. Default 2.
    pub k_positive: f64,
    /// The decay there; above 0. Default 3.
    pub lambda_positive: f64,
    /// The power elsewhere; 0 or above. Default 3.
    pub k_negative: f64,
    /// The decay there; above 0. Default 2.
    pub lambda_negative: f64,
}

impl Default for VespoConfig {
    fn default() -> Self {
        Self { k_positive: 2.0, lambda_positive: 3.0, k_negative: 3.0, lambda_negative: 2.0 }
    }
}

impl PolicyLoss {
    /// Whether it has one ratio a sequence.
    pub(super) fn is_of_sequences(self) -> bool {
        matches!(self, Self::Gspo(_) | Self::Gmpo(_))
    }

    pub(super) fn validate(self, at: &Section) {
        let positive = |name: &str, value: f64| at.number(name, value, value > 0.0, "above 0");
        let not_negative = |name: &str, value: f64| at.number(name, value, value >= 0.0, "0 or above");
        let low = |name: &str, low: f64| at.number(name, low, low > 0.0 && low < 1.0, "above 0 and below 1");
        match self {
            Self::Clipped(ClippedConfig { clip_low, clip_high, dual_clip }) => {
                low("clipped.clip_low", clip_low);
                positive("clipped.clip_high", clip_high);
                let bound = dual_clip.unwrap_or(f64::MAX);
                let (holds, range) = (bound > 1.0 + clip_high, "above 1 + `clip_high`, or leave it out");
                at.given(&["clipped.clip_high"]).number("clipped.dual_clip", bound, holds, range);
            }
            Self::Gspo(GspoConfig { clip_low, clip_high }) => {
                low("gspo.clip_low", clip_low);
                positive("gspo.clip_high", clip_high);
            }
            Self::Gmpo(GmpoConfig { clip_low, clip_high }) => {
                positive("gmpo.clip_low", clip_low);
                positive("gmpo.clip_high", clip_high);
            }
            Self::Cispo(CispoConfig { min_ratio, max_ratio }) => {
                not_negative("cispo.min_ratio", min_ratio);
                let range =
                    "above `min_ratio`; both are ratios, so that 0.8 and 1.28 are 0.2 below and 0.28 above";
                let of_least = at.given(&["cispo.min_ratio"]);
                of_least.number("cispo.max_ratio", max_ratio, max_ratio > min_ratio, range);
            }
            Self::Reinforce => {}
            Self::Sapo(SapoConfig { tau_positive, tau_negative }) => {
                positive("sapo.tau_positive", tau_positive);
                positive("sapo.tau_negative", tau_negative);
            }
            Self::Topr(ToprConfig { positive_weight, negative_weight }) => {
                not_negative("topr.positive_weight", positive_weight);
                not_negative("topr.negative_weight", negative_weight);
            }
            Self::Vespo(VespoConfig { k_positive, lambda_positive, k_negative, lambda_negative }) => {
                not_negative("vespo.k_positive", k_positive);
                not_negative("vespo.k_negative", k_negative);
                positive("vespo.lambda_positive", lambda_positive);
                positive("vespo.lambda_negative", lambda_negative);
            }
        }
    }
}
