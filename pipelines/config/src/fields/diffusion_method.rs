//! The `method` of `pipeline.diffusion`, which turns rewards into gradients.

use serde::{Deserialize, Serialize};

use super::sampler::SamplerConfig;
use crate::document::Section;

/// Method that turns rewards into gradients.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MethodConfig {
    /// Backpropagation of the reward through the last denoising steps, as in ROLL's reward flow.
    Refl(ReflConfig),
    /// The same without a KL term and without normalization of scores: DRaFT-K.
    DraftK(DraftKConfig),
    /// Policy gradients on the log-probs of stochastic denoising steps.
    FlowGrpo(FlowGrpoConfig),
    /// The same with constant noise, and with equal start noise within a group.
    DanceGrpo(DanceGrpoConfig),
    /// Flow matching towards good samples and away from bad ones.
    DiffusionNft(NftConfig),
}

/// ROLL's reward flow. The loss is `-(score - score_mean) / score_std * score_scale + kl_coef * kl`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReflConfig {
    /// Index of the first denoising step with a gradient, from 0; the steps before it have none.
    pub mid_step: usize,
    /// Start noise of each step's images. Default free.
    #[serde(default)]
    pub noise: StartNoise,
    /// Weight of the KL divergence from the reference, `mean((v - v_ref)^2 / (2 sigma^2))`, a mean over the steps with
    /// a gradient; 0 needs no reference. Default 0.
    #[serde(default)]
    pub kl_coef: f64,
    /// Subtracted from a score; any finite number. Default 0.
    #[serde(default)]
    pub score_mean: f64,
    /// Divisor of the difference; above 0. Default 1.
    #[serde(default = "one_f64")]
    pub score_std: f64,
    /// Factor on the quotient; above 0. Default 1.
    #[serde(default = "one_f64")]
    pub score_scale: f64,
}

/// Start noise of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StartNoise {
    /// New noise in each step.
    #[default]
    Free,
    /// The same noise in each step, as in ROLL.
    Fixed,
}

/// DRaFT-K (Clark et al., 2024).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DraftKConfig {
    /// Number of denoising steps at the end that have a gradient.
    pub k: usize,
}

/// Flow-GRPO (Liu et al., 2025).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlowGrpoConfig {
    /// Noise of the denoising steps; above 0. Default 0.7.
    pub noise_level: f64,
    /// Fraction of a step's denoising steps that is trained on, drawn anew in each step; above 0, at most 1. Default 1.
    pub timestep_fraction: f64,
    /// Ratios are clipped at 1 minus and plus this value; above 0 and below 1. The value is small, since a log-prob is
    /// a mean over an image's values. Default 1e-4.
    pub clip: f64,
    /// Bound that advantages are clamped to, from minus to plus this value; above 0. Default 5.
    pub advantage_clip: f64,
    /// Weight of the KL divergence from the reference; 0 needs no reference. Default 0.
    pub kl_coef: f64,
    /// Divisor of the KL divergence of two denoising steps. Default `noise`.
    pub kl_scale: KlScale,
}

impl Default for FlowGrpoConfig {
    fn default() -> Self {
        Self {
            noise_level: 0.7,
            timestep_fraction: 1.0,
            clip: 1e-4,
            advantage_clip: 5.0,
            kl_coef: 0.0,
            kl_scale: KlScale::default(),
        }
    }
}

/// Divisor of the squared distance of two denoising steps' means, apart from the factor 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlScale {
    /// The square of the noise per root of time, as in Flow-GRPO's code.
    #[default]
    Noise,
    /// The step's variance, which includes the step's length: the divergence of the two Gaussians.
    Variance,
}

/// DanceGRPO (Xue et al., 2025).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DanceGrpoConfig {
    /// Noise of the denoising steps, the same at every sigma; above 0. Default 0.3.
    pub eta: f64,
    /// The same as in `flow_grpo`. Default 1.
    pub timestep_fraction: f64,
    /// The same as in `flow_grpo`. Default 1e-4.
    pub clip: f64,
    /// The same as in `flow_grpo`. Default 5.
    pub advantage_clip: f64,
}

impl Default for DanceGrpoConfig {
    fn default() -> Self {
        Self { eta: 0.3, timestep_fraction: 1.0, clip: 1e-4, advantage_clip: 5.0 }
    }
}

/// DiffusionNFT (Zheng et al., 2025).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct NftConfig {
    /// Distance of the implicit positive and negative policies from the old policy; above 0. Default 1.
    pub beta: f64,
    /// Number of sigmas, drawn at random, that each image is trained at. Default 1.
    pub timesteps: usize,
    /// Bound that advantages are clamped to, from minus to plus this value, and that divides the clamped advantages;
    /// above 0. Default 5.
    pub advantage_clip: f64,
    /// Weight of `mean((v - v_ref)^2)`, with the reference's velocity; 0 needs no reference. Default 0.
    pub kl_coef: f64,
    /// Rate of the old policy's decay; 0 or above. After step `i`, from 1, the old policy keeps
    /// `min(old_decay_rate i, old_decay_max)` of itself. Default 0.001.
    pub old_decay_rate: f64,
    /// Upper bound of the decay, see `old_decay_rate`; 0 to below 1. Default 0.5.
    pub old_decay_max: f64,
}

impl Default for NftConfig {
    fn default() -> Self {
        Self {
            beta: 1.0,
            timesteps: 1,
            advantage_clip: 5.0,
            kl_coef: 0.0,
            old_decay_rate: 0.001,
            old_decay_max: 0.5,
        }
    }
}

impl MethodConfig {
    /// Returns the weight of the KL divergence from the reference.
    pub fn kl_coef(&self) -> f64 {
        match self {
            Self::Refl(refl) => refl.kl_coef,
            Self::FlowGrpo(grpo) => grpo.kl_coef,
            Self::DiffusionNft(nft) => nft.kl_coef,
            Self::DraftK(_) | Self::DanceGrpo(_) => 0.0,
        }
    }

    /// Returns the method's name in YAML.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Refl(_) => "refl",
            Self::DraftK(_) => "draft_k",
            Self::FlowGrpo(_) => "flow_grpo",
            Self::DanceGrpo(_) => "dance_grpo",
            Self::DiffusionNft(_) => "diffusion_nft",
        }
    }

    /// Returns true if the method differentiates the reward.
    pub fn differentiates_reward(&self) -> bool {
        matches!(self, Self::Refl(_) | Self::DraftK(_))
    }
}

impl MethodConfig {
    /// Reports invalid fields, with `sampler` and groups of `group_size`. `at` is the pipeline.
    pub(super) fn validate(&self, sampler: &SamplerConfig, group_size: usize, at: &Section) {
        let name = self.name();
        if !self.differentiates_reward() {
            at.given(&["method"]).ensure(
                group_size >= 2,
                "group_size",
                format!("`{name}` compares the images of a group, and a group is {group_size}"),
                "write 2 or above",
            );
        }
        let at = at.below("method").below(name);
        let kl_coef = self.kl_coef();
        at.number("kl_coef", kl_coef, kl_coef >= 0.0, "0 or above");
        let of_steps = at.when(at.root().is_sound("pipeline.diffusion.sampler.steps"));
        let steps = sampler.steps;
        match self {
            Self::Refl(refl) => refl.validate(steps, &at, &of_steps),
            Self::DraftK(draft) => {
                of_steps.ensure(
                    (1..=steps).contains(&draft.k),
                    "k",
                    format!("{} of {steps} denoising steps cannot have a gradient", draft.k),
                    format!("write 1 to {steps}"),
                );
            }
            Self::FlowGrpo(grpo) => {
                at.number("noise_level", grpo.noise_level, grpo.noise_level > 0.0, "above 0");
                validate_clips(&at, grpo.timestep_fraction, grpo.clip, grpo.advantage_clip);
            }
            Self::DanceGrpo(grpo) => {
                at.number("eta", grpo.eta, grpo.eta > 0.0, "above 0");
                validate_clips(&at, grpo.timestep_fraction, grpo.clip, grpo.advantage_clip);
            }
            Self::DiffusionNft(nft) => nft.validate(sampler, &at, &of_steps),
        }
    }
}

fn validate_clips(at: &Section, timestep_fraction: f64, clip: f64, advantage_clip: f64) {
    let holds = timestep_fraction > 0.0 && timestep_fraction <= 1.0;
    at.number("timestep_fraction", timestep_fraction, holds, "above 0, at most 1");
    at.number("clip", clip, clip > 0.0 && clip < 1.0, "above 0 and below 1");
    at.number("advantage_clip", advantage_clip, advantage_clip > 0.0, "above 0");
}

impl ReflConfig {
    fn validate(&self, steps: usize, at: &Section, of_steps: &Section) {
        of_steps.ensure(
            self.mid_step < steps,
            "mid_step",
            format!("{} is behind the last of {steps} steps, so that none has a gradient", self.mid_step),
            format!("write {} or below", steps.saturating_sub(1)),
        );
        at.number("score_mean", self.score_mean, true, "that is finite");
        at.number("score_std", self.score_std, self.score_std > 0.0, "above 0");
        at.number("score_scale", self.score_scale, self.score_scale > 0.0, "above 0");
    }
}

impl NftConfig {
    fn validate(&self, sampler: &SamplerConfig, at: &Section, of_steps: &Section) {
        at.number("beta", self.beta, self.beta > 0.0, "above 0");
        let steps = sampler.steps;
        of_steps.ensure(
            (1..=steps).contains(&self.timesteps),
            "timesteps",
            format!("{} of the sampler's {steps} sigmas cannot be drawn", self.timesteps),
            format!("write 1 to {steps}"),
        );
        at.number("advantage_clip", self.advantage_clip, self.advantage_clip > 0.0, "above 0");
        let (rate, max) = (self.old_decay_rate, self.old_decay_max);
        at.number("old_decay_rate", rate, rate >= 0.0, "0 or above");
        at.number("old_decay_max", max, (0.0..1.0).contains(&max), "from 0 to below 1");
        if let Some(name) = sampler.guided_by() {
            at.root().refuse(
                &format!("pipeline.diffusion.sampler.{name}"),
                "`diffusion_nft` trains one velocity a point, and guidance takes two",
                "write 1: what guidance does, the method teaches",
            );
        }
    }
}

// serde's attributes take functions only.

fn one_f64() -> f64 {
    1.0
}
