//! Checks that both transformers of a pair are trained; each paints at some of the sigmas.

use anyroll_config::{DiffusionConfig, MethodConfig, Section, is_of_second};
use anyroll_models::diffusion::{EXPERTS, Lora};

/// Refuses to train a transformer of a pair if its side of `boundary` has no denoising step with a gradient. Without
/// one, its adapters would not change, and its full weights would decay. `shift` is the sampler's.
pub(super) fn check_both_learn(
    lora: Option<&Lora>,
    diffusion: &DiffusionConfig,
    boundary: f64,
    shift: f64,
    root: &Section,
) {
    let at = root.given(&["pipeline.diffusion.sampler", "pipeline.diffusion.method"]);
    let sampler = &diffusion.sampler;
    let first = match &diffusion.method {
        MethodConfig::Refl(refl) => refl.mid_step,
        MethodConfig::DraftK(draft) => sampler.steps.saturating_sub(draft.k),
        MethodConfig::FlowGrpo(_) | MethodConfig::DanceGrpo(_) | MethodConfig::DiffusionNft(_) => 0,
    };
    // The sampler refuses numbers that give no sigmas.
    let sigmas = sampler.sigmas(shift).unwrap_or_default();
    let trained = sigmas.get(first..sampler.steps).unwrap_or_default();
    let is_met = |second: bool| trained.iter().any(|&sigma| is_of_second(sigma, boundary) == second);
    for (prefix, second) in EXPERTS.into_iter().zip([false, true]) {
        let has_adapters = lora.map(|lora| lora.modules.iter().any(|module| module.starts_with(prefix)));
        let name = prefix.trim_end_matches('.');
        let side = if second { "below" } else { "at or above" };
        let problem =
            format!("no step with a gradient is {side} the boundary {boundary}, where `{name}` paints");
        match has_adapters {
            _ if trained.is_empty() || is_met(second) => {}
            Some(false) => {}
            Some(true) => {
                let other = EXPERTS[usize::from(!second)].trim_end_matches('.');
                let help = format!("name the other's layers alone, such as '{other}[.].*[.]to_q'");
                at.refuse("model.lora.targets", problem, help);
            }
            None => {
                let decays = diffusion.optimizer.adamw.weight_decay > 0.0;
                let field = "pipeline.diffusion.optimizer.adamw.weight_decay";
                at.ensure(!decays, field, problem, "write 0: nothing else would change its weights");
            }
        }
    }
}
