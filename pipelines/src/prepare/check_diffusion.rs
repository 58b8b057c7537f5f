//! What must hold between the fields of `pipeline.diffusion` on any machine.

use super::check::Check;
use crate::config::*;
use crate::diffusion as images;

impl Check<'_> {
    pub(super) fn dit(&self, dit: &DitConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("model.dit.{name}");
        for (name, size) in [
            ("patch_size", dit.patch_size),
            ("hidden_size", dit.hidden_size),
            ("layers", dit.layers),
            ("heads", dit.heads),
            ("intermediate_size", dit.intermediate_size),
        ] {
            self.positive(&field(name), size)?;
        }
        self.ensure(
            images::SIZE.is_multiple_of(dit.patch_size),
            &field("patch_size"),
            format!("patches of {} pixels do not make images of {}", dit.patch_size, images::SIZE),
            format!("write a divisor of {}", images::SIZE),
        )?;
        self.ensure(
            dit.hidden_size.is_multiple_of(dit.heads),
            &field("hidden_size"),
            format!("{} heads of one width do not make {}", dit.heads, dit.hidden_size),
            format!("write a multiple of {}", dit.heads),
        )
    }

    pub(super) fn diffusion(&self, diffusion: &DiffusionConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.diffusion.{name}");
        self.positive(&field("steps"), diffusion.steps)?;
        self.positive(&field("prompts_per_step"), diffusion.prompts_per_step)?;
        self.positive(&field("group_size"), diffusion.group_size)?;
        self.positive(&field("mini_batches"), diffusion.mini_batches)?;
        let (prompts, mini_batches) = (diffusion.prompts_per_step, diffusion.mini_batches);
        self.ensure(
            prompts.is_multiple_of(mini_batches),
            &field("mini_batches"),
            format!(
                "{prompts} prompts are no multiple of {mini_batches} mini-batches, which hold whole groups"
            ),
            "write a divisor of `prompts_per_step`",
        )?;
        self.sampler(&diffusion.sampler)?;
        self.image_rewards(&field("reward"), &diffusion.reward)?;
        self.method(diffusion)?;
        self.optimizer(&field("optimizer"), &diffusion.optimizer)?;
        self.schedule(&field("optimizer"), &diffusion.optimizer, diffusion.steps)?;
        if let Some(warmup) = &diffusion.warmup {
            self.positive(&field("warmup.batch_size"), warmup.batch_size)?;
            let dropout = warmup.class_dropout;
            let holds = (0.0..=1.0).contains(&dropout);
            self.number(&field("warmup.class_dropout"), dropout, holds, "from 0 to 1")?;
            self.optimizer(&field("warmup.optimizer"), &warmup.optimizer)?;
            self.schedule(&field("warmup.optimizer"), &warmup.optimizer, warmup.steps)?;
        }
        for (name, value) in [
            ("evaluation.every", diffusion.evaluation.every),
            ("checkpoint.every", diffusion.checkpoint.every),
            ("checkpoint.keep_last", diffusion.checkpoint.keep_last as u64),
        ] {
            self.positive(&field(name), value)?;
        }
        self.ensure(
            !diffusion.checkpoint.keep_best,
            &field("checkpoint.keep_best"),
            "it goes by `eval/greedy`, which a language model has",
            "leave it out",
        )?;
        let images = diffusion.evaluation.images;
        self.ensure(
            (1..=MOST_EVALUATED).contains(&images),
            &field("evaluation.images"),
            format!("{images} is out of range"),
            format!("write 1 or above, at most {MOST_EVALUATED}"),
        )
    }

    /// What holds for images of classes.
    pub(super) fn shapes(&self, diffusion: &DiffusionConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.diffusion.{name}");
        self.ensure(
            diffusion.data == ImageDataConfig::Shapes,
            &field("data"),
            "a `dit` reads classes, and no text",
            "write `shapes`, or `model: {diffusers: DIR}`",
        )?;
        for (at, reward) in diffusion.reward.fields() {
            self.reward_of_shapes(&format!("{}{at}", field("reward")), reward)?;
        }
        self.ensure(
            diffusion.sampler.decode_frames.is_none(),
            &field("sampler.decode_frames"),
            "the shapes are images, which have no frames",
            "leave it out",
        )?;
        self.ensure(
            diffusion.sampler.decode_tiles.is_none(),
            &field("sampler.decode_tiles"),
            "the shapes are pixels, which nothing decodes",
            "leave it out",
        )?;
        self.second_guidance(&diffusion.sampler, None)?;
        self.seen_frames(&diffusion.reward, None)?;
        if let Some(warmup) = &diffusion.warmup {
            self.ensure(
                !diffusion.sampler.is_guided() || warmup.class_dropout > 0.0,
                &field("sampler.guidance"),
                "it leads away from what the model says of no class, which it never learns",
                "write 1, or `warmup.class_dropout` above 0, such as 0.1",
            )?;
        }
        let images = diffusion.evaluation.images;
        self.ensure(
            images >= images::CLASSES,
            &field("evaluation.images"),
            format!("{images} are fewer than the classes"),
            format!("write {} or above, one for each class", images::CLASSES),
        )
    }

    fn sampler(&self, sampler: &SamplerConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.diffusion.sampler.{name}");
        self.positive(&field("steps"), sampler.steps)?;
        // Stochastic steps divide by 1 minus the second sigma.
        self.ensure(sampler.steps >= 2, &field("steps"), "one step is no walk", "write 2 or above")?;
        let shift = sampler.shift.unwrap_or(1.0);
        self.number(&field("shift"), shift, shift > 0.0, "above 0")?;
        self.number(&field("guidance"), sampler.guidance, sampler.guidance >= 0.0, "0 or above")?;
        let second = sampler.guidance_2.unwrap_or(1.0);
        self.number(&field("guidance_2"), second, second >= 0.0, "0 or above")?;
        self.positive(&field("decode_batch_size"), sampler.decode_batch_size)?;
        self.positive(&field("batch_size"), sampler.batch_size)
    }

    fn method(&self, diffusion: &DiffusionConfig) -> Result<(), Problem> {
        let method = &diffusion.method;
        let name = method.name();
        let field = |rest: &str| format!("pipeline.diffusion.method.{name}.{rest}");
        let kl_coef = method.kl_coef();
        self.number(&field("kl_coef"), kl_coef, kl_coef >= 0.0, "0 or above")?;
        if method.differentiates_reward() {
            self.followed_reward(diffusion)?;
        } else {
            self.ensure(
                diffusion.group_size >= 2,
                "pipeline.diffusion.group_size",
                format!("`{name}` compares the images of a group, and a group is {}", diffusion.group_size),
                "write 2 or above",
            )?;
        }
        let steps = diffusion.sampler.steps;
        match method {
            MethodConfig::Refl(refl) => {
                self.ensure(
                    refl.mid_step < steps,
                    &field("mid_step"),
                    format!(
                        "{} is behind the last of {steps} steps, so that none has a gradient",
                        refl.mid_step
                    ),
                    format!("write {} or below", steps - 1),
                )?;
                self.number(&field("score_mean"), refl.score_mean, true, "that is finite")?;
                self.number(&field("score_std"), refl.score_std, refl.score_std > 0.0, "above 0")?;
                self.number(&field("score_scale"), refl.score_scale, refl.score_scale > 0.0, "above 0")
            }
            MethodConfig::DraftK(draft) => self.ensure(
                (1..=steps).contains(&draft.k),
                &field("k"),
                format!("{} of {steps} denoising steps cannot have a gradient", draft.k),
                format!("write 1 to {steps}"),
            ),
            MethodConfig::FlowGrpo(grpo) => {
                let level = grpo.noise_level;
                self.number(&field("noise_level"), level, level > 0.0, "above 0")?;
                self.clips(&field, grpo.timestep_fraction, grpo.clip, grpo.advantage_clip)
            }
            MethodConfig::DanceGrpo(grpo) => {
                self.number(&field("eta"), grpo.eta, grpo.eta > 0.0, "above 0")?;
                self.clips(&field, grpo.timestep_fraction, grpo.clip, grpo.advantage_clip)
            }
            MethodConfig::DiffusionNft(nft) => self.nft(&field, nft, &diffusion.sampler),
        }
    }

    fn clips(
        &self,
        field: &impl Fn(&str) -> String,
        timestep_fraction: f64,
        clip: f64,
        advantage_clip: f64,
    ) -> Result<(), Problem> {
        let holds = timestep_fraction > 0.0 && timestep_fraction <= 1.0;
        self.number(&field("timestep_fraction"), timestep_fraction, holds, "above 0, at most 1")?;
        self.number(&field("clip"), clip, clip > 0.0 && clip < 1.0, "above 0 and below 1")?;
        self.number(&field("advantage_clip"), advantage_clip, advantage_clip > 0.0, "above 0")
    }

    fn nft(
        &self,
        field: &impl Fn(&str) -> String,
        nft: &NftConfig,
        sampler: &SamplerConfig,
    ) -> Result<(), Problem> {
        self.number(&field("beta"), nft.beta, nft.beta > 0.0, "above 0")?;
        self.ensure(
            (1..=sampler.steps).contains(&nft.timesteps),
            &field("timesteps"),
            format!("{} of the sampler's {} sigmas cannot be drawn", nft.timesteps, sampler.steps),
            format!("write 1 to {}", sampler.steps),
        )?;
        self.number(&field("advantage_clip"), nft.advantage_clip, nft.advantage_clip > 0.0, "above 0")?;
        let (rate, max) = (nft.old_decay_rate, nft.old_decay_max);
        self.number(&field("old_decay_rate"), rate, rate >= 0.0, "0 or above")?;
        self.number(&field("old_decay_max"), max, (0.0..1.0).contains(&max), "from 0 to below 1")?;
        self.ensure(
            !sampler.is_guided(),
            &format!("pipeline.diffusion.sampler.{}", sampler.guided_by().unwrap_or_default()),
            "`diffusion_nft` trains one velocity a point, and guidance takes two",
            "write 1: what guidance does, the method teaches",
        )
    }
}

/// Images of an evaluation: beyond, somebody has mistyped.
const MOST_EVALUATED: usize = 1_000_000;
