//! What must hold between the fields of a config on any machine.

use std::fmt::Debug;

use anyroll_models::hf::{AdapterFolder, ModelFolder};
use anyroll_models::{LoraTarget, ModulePattern};

use super::check_data::Use;
use crate::config::*;
use crate::data::{Dataset, Tokenizer};
use crate::error_chain::one_line;

/// The largest first loss scale: a loss of 1 overflows fp16 long before.
const MOST_LOSS_SCALE: f64 = 16_777_216.0;

/// Checks `config`, read from `tree`, and opens its data to see whether they fit.
pub(super) fn check(config: &Config, tree: &Node) -> Result<Option<Dataset>, Problem> {
    let check = Check { tree };
    check.name(&config.name)?;
    if let Some(threads) = config.threads {
        check.number_of_threads("threads", threads)?;
    }
    let folder = check.model(&config.model)?;
    check.strategies(config)?;
    check.logits_exist(config)?;
    warn_of_idle_roles(config);
    check.published_roles(config)?;
    match (&config.pipeline, &config.model) {
        (pipeline, ModelConfig::Dit(_) | ModelConfig::Diffusers(_))
            if !matches!(pipeline, PipelineConfig::Diffusion(_)) =>
        {
            let message = format!("`{}` trains a language model", pipeline.name());
            Err(check.problem("model", message, "write `decoder` or `path`"))
        }
        (PipelineConfig::Offline(offline), _) => {
            check.offline(config, offline)?;
            let published = check.published(&config.model, folder)?;
            let tokenizer = published.as_ref().map(|(tokenizer, _)| tokenizer);
            let unpaired = offline.objective.judged().is_some();
            let wanted = Use { evaluated: offline.evaluation.prompts, turns: offline.turns, unpaired };
            check.answers(
                "pipeline.offline.data",
                &offline.data,
                ("objective", "learns from answers"),
                &[],
            )?;
            let dataset = check.data("pipeline.offline", &offline.data, wanted, tokenizer)?;
            let steps = check.length(&config.pipeline, &dataset)?.steps;
            check.schedule("pipeline.offline.optimizer", &offline.optimizer, steps)?;
            let longest = check.written(config, offline, published.as_ref(), &dataset)?;
            check.reference(config, tokenizer, &dataset, longest)?;
            Ok(Some(dataset))
        }
        (PipelineConfig::Rlvr(rlvr), _) => {
            check.rlvr(rlvr)?;
            let published = check.published(&config.model, folder)?;
            let tokenizer = published.as_ref().map(|(tokenizer, _)| tokenizer);
            check.environment(config, rlvr, tokenizer)?;
            check.rewards_have_answers(rlvr)?;
            check.has_prompts("pipeline.rlvr.data", &rlvr.data)?;
            let wanted = Use { evaluated: rlvr.evaluation.prompts, turns: Turns::Last, unpaired: false };
            let dataset = check.data("pipeline.rlvr", &rlvr.data, wanted, tokenizer)?;
            let steps = check.length(&config.pipeline, &dataset)?.steps;
            check.schedule("pipeline.rlvr.optimizer", &rlvr.optimizer, steps)?;
            rlvr.critic.as_ref().map_or(Ok(()), |critic| check.critic_over(critic, steps))?;
            check.domains(rlvr, &dataset)?;
            let longest = check.data_and_model(config, rlvr, published.as_ref(), &dataset)?;
            check.reference(config, tokenizer, &dataset, longest)?;
            Ok(Some(dataset))
        }
        (PipelineConfig::Diffusion(diffusion), ModelConfig::Dit(_)) => {
            check.diffusion(diffusion)?;
            check.shapes(diffusion)?;
            Ok(None)
        }
        (PipelineConfig::Diffusion(diffusion), ModelConfig::Diffusers(model)) => {
            check.diffusion(diffusion)?;
            check.diffusers(model, diffusion, &config.roles.reference)?;
            Ok(None)
        }
        (PipelineConfig::Diffusion(_), ModelConfig::Decoder(_) | ModelConfig::Folder(_)) => {
            let help = "write `dit`, or `diffusers` for a published one";
            Err(check.problem("model", "`diffusion` trains a model of images", help))
        }
    }
}

/// Tells of a role that the run has none of: the same file may be run with and without a KL term.
fn warn_of_idle_roles(config: &Config) {
    let RolesConfig { reference, critic, .. } = &config.roles;
    for (field, is_said, exists) in [
        ("roles.reference", *reference != Default::default(), config.pipeline.has_reference()),
        ("roles.critic", *critic != Default::default(), config.pipeline.has_critic()),
    ] {
        if !exists && is_said {
            tracing::warn!(field, "this run has no such role: what is said of it does nothing");
        }
    }
}

/// Errors that point at the field they name.
pub(super) struct Check<'a> {
    pub(super) tree: &'a Node,
}

impl Check<'_> {
    /// An error about `field` unless `holds`.
    pub(super) fn ensure(
        &self,
        holds: bool,
        field: &str,
        message: impl Into<String>,
        help: impl Into<String>,
    ) -> Result<(), Problem> {
        if holds { Ok(()) } else { Err(self.problem(field, message, help)) }
    }

    pub(super) fn problem(
        &self,
        field: &str,
        message: impl Into<String>,
        help: impl Into<String>,
    ) -> Problem {
        let origin = self.tree.origin_of(field);
        Problem { field: field.to_owned(), origin, message: message.into(), help: help.into() }
    }

    /// A size from 1 to a bound that keeps products of sizes within 64 bits.
    pub(super) fn positive(&self, field: &str, value: impl TryInto<u64>) -> Result<(), Problem> {
        const MOST: u64 = 1 << 31;
        let value = value.try_into().unwrap_or(u64::MAX);
        let message = if value == 0 { "it is 0" } else { "it is too large" };
        self.ensure(
            (1..=MOST).contains(&value),
            field,
            message,
            format!("write a whole number, 1 or above, at most {MOST}"),
        )
    }

    /// Threads or processes that this machine shall start.
    pub(super) fn number_of_threads(&self, field: &str, value: usize) -> Result<(), Problem> {
        const MOST: usize = 4096;
        let help = format!("write a whole number, 1 or above, at most {MOST}");
        self.ensure((1..=MOST).contains(&value), field, format!("{value} is out of range"), help)
    }

    /// `range` says in words what `holds` tests.
    pub(super) fn number(&self, field: &str, value: f64, holds: bool, range: &str) -> Result<(), Problem> {
        let holds = holds && value.is_finite();
        self.ensure(holds, field, format!("{value:?} is out of range"), format!("write a number {range}"))
    }

    fn name(&self, name: &str) -> Result<(), Problem> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let holds = name.chars().all(is_plain) && name.starts_with(|c: char| c.is_ascii_alphanumeric());
        let message = format!("`{name}` cannot start the name of a folder");
        self.ensure(holds, "name", message, "use letters, digits, `-`, `_` and `.`, first a letter or digit")
    }

    /// Opens the folder, if the model is one.
    fn model(&self, model: &ModelConfig) -> Result<Option<ModelFolder>, Problem> {
        match model {
            ModelConfig::Decoder(decoder) => self.decoder(decoder).map(|()| None),
            ModelConfig::Dit(dit) => self.dit(dit).map(|()| None),
            ModelConfig::Diffusers(_) => Ok(None), // with what it is to paint
            ModelConfig::Folder(folder) => match ModelFolder::open(&folder.path) {
                Ok(folder) => Ok(Some(folder)),
                Err(error) => {
                    let help = "give the folder of a model as Hugging Face publishes it; docs/guides/models.md has the families";
                    Err(self.problem("model.path", one_line(&error), help))
                }
            },
        }
    }

    /// A published model's tokenizer beside its folder; `None` for a model made from scratch.
    fn published(
        &self,
        model: &ModelConfig,
        folder: Option<ModelFolder>,
    ) -> Result<Option<(Tokenizer, ModelFolder)>, Problem> {
        match (model, folder) {
            (ModelConfig::Folder(model), Some(folder)) => Ok(Some((self.tokenizer(model, &folder)?, folder))),
            _ => Ok(None),
        }
    }

    fn decoder(&self, decoder: &DecoderConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("model.decoder.{name}");
        for (name, size) in [
            ("hidden_size", decoder.hidden_size),
            ("layers", decoder.layers),
            ("heads", decoder.heads),
            ("kv_heads", decoder.kv_heads.unwrap_or(decoder.heads)),
            ("intermediate_size", decoder.intermediate_size),
            ("max_length", decoder.max_length),
        ] {
            self.positive(&field(name), size)?;
        }
        self.experts(decoder)?;
        let DecoderConfig { hidden_size, heads, kv_heads, .. } = *decoder;
        let kv_heads = kv_heads.unwrap_or(heads);
        self.ensure(
            heads.is_multiple_of(kv_heads),
            &field("kv_heads"),
            format!("{heads} query heads cannot share {kv_heads} key and value heads evenly"),
            format!("write a divisor of `heads`, {heads}"),
        )?;
        self.ensure(
            hidden_size.is_multiple_of(2 * heads),
            &field("hidden_size"),
            format!("{heads} heads of an even width do not make {hidden_size}"),
            format!("write a multiple of {}: rotary positions turn pairs of a head's elements", 2 * heads),
        )?;
        self.number(&field("rope_theta"), decoder.rope_theta, decoder.rope_theta > 1.0, "above 1")?;
        self.number(&field("norm_eps"), decoder.norm_eps, decoder.norm_eps > 0.0, "above 0")
    }

    /// Whether a mixture of experts is whole, and one that a published family has.
    fn experts(&self, decoder: &DecoderConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("model.decoder.{name}");
        let DecoderConfig { num_experts, num_experts_per_tok, moe_intermediate_size, .. } = *decoder;
        let Some(experts) = num_experts else {
            let others = [
                ("num_experts_per_tok", num_experts_per_tok.is_some()),
                ("moe_intermediate_size", moe_intermediate_size.is_some()),
                ("norm_topk_prob", decoder.norm_topk_prob.is_some()),
                ("mlp_only_layers", decoder.mlp_only_layers.is_some()),
            ];
            return others.into_iter().try_for_each(|(name, is_there)| {
                let help = "write `num_experts` beside it, or leave it out";
                self.ensure(!is_there, &field(name), "there are no experts", help)
            });
        };
        self.positive(&field("num_experts"), experts)?;
        for (name, size) in
            [("num_experts_per_tok", num_experts_per_tok), ("moe_intermediate_size", moe_intermediate_size)]
        {
            let help = format!("write `{name}` beside it");
            let Some(size) = size else {
                return Err(self.problem(&field("num_experts"), format!("experts have no `{name}`"), help));
            };
            self.positive(&field(name), size)?;
        }
        let chosen = num_experts_per_tok.unwrap_or(1);
        let message = format!("a token cannot go to {chosen} of {experts} experts");
        let help = format!("write {experts} or fewer");
        self.ensure(chosen <= experts, &field("num_experts_per_tok"), message, help)?;
        let layers = decoder.layers;
        let plain = decoder.mlp_only_layers.as_deref().unwrap_or_default();
        let unknown = plain.iter().find(|&&layer| layer >= layers);
        let message = unknown.map_or_else(String::new, |layer| format!("there is no layer {layer}"));
        let help = format!("write some of 0 to {}", layers - 1);
        self.ensure(unknown.is_none(), &field("mlp_only_layers"), message, help)?;
        let message = "no layer has experts";
        let help = "leave a layer out, or all fields of experts";
        self.ensure((0..layers).any(|it| !plain.contains(&it)), &field("mlp_only_layers"), message, help)?;
        let message = "published families with experts have norms on queries and keys, and no biases";
        let is_published = decoder.qk_norm && !decoder.qkv_bias;
        self.ensure(is_published, &field("num_experts"), message, "write `qk_norm: true`, `qkv_bias: false`")
    }

    fn strategies(&self, config: &Config) -> Result<(), Problem> {
        let StrategyConfig {
            zero_stage, precision, recompute, micro_batch_size, collective_timeout_s, ..
        } = config.strategy;
        let OffloadConfig { optimizer, params } = config.strategy.offload;
        let top = StrategyOverride {
            zero_stage: Some(zero_stage),
            precision: Some(precision),
            recompute: Some(recompute),
            offload: OffloadOverride { optimizer: Some(optimizer), params: Some(params) },
            micro_batch_size: Some(micro_batch_size),
            collective_timeout_s: Some(collective_timeout_s),
        };
        let policy = &config.roles.policy.strategy;
        self.strategy("strategy", &top)?;
        self.strategy("roles.policy.strategy", policy)?;
        self.params_stay("strategy", &top.offload)?;
        self.params_stay("roles.policy.strategy", &policy.offload)?;
        self.strategy("roles.reference.strategy", &config.roles.reference.strategy)?;
        self.strategy("roles.critic.strategy", &config.roles.critic.strategy)
    }

    /// The memory of what trains a reward model is not planned.
    pub(super) fn stages_are_said(&self, config: &Config) -> Result<(), Problem> {
        let RolesConfig { policy, reference, critic, rollout: _ } = &config.roles;
        for (path, stage) in [
            ("strategy", Some(config.strategy.zero_stage)),
            ("roles.policy.strategy", policy.strategy.zero_stage),
            ("roles.reference.strategy", reference.strategy.zero_stage),
            ("roles.critic.strategy", critic.strategy.zero_stage),
        ] {
            let holds = stage != Some(ZeroStage::Auto);
            let message = "`auto` does not plan the training of a reward model";
            self.ensure(holds, &format!("{path}.zero_stage"), message, "write 0, 1, 2 or 3")?;
        }
        Ok(())
    }

    /// Only a loss of tokens has logits.
    fn logits_exist(&self, config: &Config) -> Result<(), Problem> {
        let has_none =
            matches!(config.pipeline, PipelineConfig::Diffusion(_)) || config.trains_a_reward_model();
        self.ensure(
            !(has_none && config.strategy.keep_logits == Some(true)),
            "strategy.keep_logits",
            "what this trains makes no logits",
            "leave it out",
        )
    }

    /// The policy generates between its steps.
    fn params_stay(&self, path: &str, offload: &OffloadOverride) -> Result<(), Problem> {
        self.ensure(
            offload.params != Some(Offload::BetweenSteps),
            &format!("{path}.offload.params"),
            "the policy's weights are needed at all times",
            "write `none` or `cpu`, or offload those of the reference: `roles.reference.strategy.offload.params`",
        )
    }

    fn strategy(&self, path: &str, strategy: &StrategyOverride) -> Result<(), Problem> {
        let field = |name: &str| format!("{path}.{name}");
        if let Some(ZeroStage::Stage(stage)) = strategy.zero_stage {
            let message = format!("there is no stage {stage}");
            self.ensure(stage <= 3, &field("zero_stage"), message, "write 0, 1, 2, 3 or auto")?;
        }
        if let Some(Precision::Fp16(Fp16Config { initial_scale, growth_interval })) = strategy.precision {
            let holds =
                (1.0..=MOST_LOSS_SCALE).contains(&initial_scale) && initial_scale.log2().fract() == 0.0;
            let range = "that is a power of two, 1 to 2^24";
            self.number(&field("precision.fp16.initial_scale"), initial_scale, holds, range)?;
            self.positive(&field("precision.fp16.growth_interval"), growth_interval)?;
        }
        if let Some(size) = strategy.micro_batch_size {
            self.positive(&field("micro_batch_size"), size)?;
        }
        if let Some(timeout_s) = strategy.collective_timeout_s {
            self.collective_timeout(&field("collective_timeout_s"), timeout_s)?;
        }
        Ok(())
    }

    pub(super) fn collective_timeout(&self, field: &str, timeout_s: f64) -> Result<(), Problem> {
        const DAY_S: f64 = 86_400.0;
        let holds = timeout_s > 0.0 && timeout_s <= DAY_S;
        self.number(field, timeout_s, holds, "of seconds above 0, at most a day, 86400")
    }

    fn rlvr(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.rlvr.{name}");
        self.positive(&field("prompts_per_step"), rlvr.prompts_per_step)?;
        self.positive(&field("group_size"), rlvr.group_size)?;
        self.ensure(
            rlvr.group_size >= 2 || !rlvr.algorithm.advantage.needs_groups(),
            &field("group_size"),
            format!("a group of {} has no mean to differ from", rlvr.group_size),
            "write 2 or above, or an advantage without groups: `reinforce`, `remax`, `gae` or `none`",
        )?;
        self.positive(&field("mini_batches"), rlvr.mini_batches)?;
        self.positive(&field("epochs"), rlvr.epochs)?;
        self.ensure(
            rlvr.prompts_per_step.is_multiple_of(rlvr.mini_batches),
            &field("mini_batches"),
            format!(
                "{} prompts are no multiple of {} mini-batches, which hold whole groups",
                rlvr.prompts_per_step, rlvr.mini_batches
            ),
            "write a divisor of `prompts_per_step`",
        )?;
        self.reward(&field("reward"), &rlvr.reward)?;
        self.number_of_threads(&field("scoring.workers"), rlvr.scoring.workers)?;
        self.selection(rlvr)?;
        self.rollout(&rlvr.rollout)?;
        self.asynchronous(rlvr)?;
        self.algorithm(rlvr)?;
        self.optimizer(&field("optimizer"), &rlvr.optimizer)?;
        self.critic(rlvr)?;
        if let Some(warmup) = &rlvr.warmup {
            self.warmup(&field("warmup"), warmup)?;
        }
        for (name, value) in [
            ("evaluation.every", rlvr.evaluation.every),
            ("evaluation.prompts", rlvr.evaluation.prompts.map_or(1, |prompts| prompts as u64)),
            ("evaluation.samples", rlvr.evaluation.samples as u64),
            ("checkpoint.every", rlvr.checkpoint.every),
            ("checkpoint.keep_last", rlvr.checkpoint.keep_last as u64),
        ] {
            self.positive(&field(name), value)?;
        }
        Ok(())
    }

    pub(super) fn warmup(&self, path: &str, warmup: &WarmupConfig) -> Result<(), Problem> {
        self.positive(&format!("{path}.batch_size"), warmup.batch_size)?;
        if let Some(size) = warmup.micro_batch_size {
            self.positive(&format!("{path}.micro_batch_size"), size)?;
        }
        let path = format!("{path}.optimizer");
        self.optimizer(&path, &warmup.optimizer)?;
        self.schedule(&path, &warmup.optimizer, warmup.steps)
    }

    fn selection(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let (selection, group_size) = (&rlvr.selection, rlvr.group_size);
        let field = |name: &str| format!("pipeline.rlvr.selection.{name}");
        if let Some(MixedGroupsConfig { max_batches }) = selection.mixed_groups {
            self.positive(&field("mixed_groups.max_batches"), max_batches)?;
            let message =
                "no group of 1 is mixed: each step would sample all of its batches, and drop most of them";
            let help = "leave it out, or write a `group_size` of 2 or above";
            self.ensure(group_size >= 2, &field("mixed_groups"), message, help)?;
        }
        let Some(DifficultyConfig { min, max }) = selection.difficulty else { return Ok(()) };
        self.number(&field("difficulty.min"), min, true, "such as 0.1")?;
        self.number(&field("difficulty.max"), max, max >= min, "not below `min`")
    }

    fn rollout(&self, rollout: &RolloutConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.rlvr.rollout.{name}");
        let RolloutConfig { temperature, top_p, min_p, repetition_penalty, kv_cache, .. } = *rollout;
        // Logits are divided by it.
        let range = "0.001 or above; evaluation is greedy beside";
        self.number(&field("temperature"), temperature, temperature >= 1e-3, range)?;
        self.number(&field("top_p"), top_p, top_p > 0.0 && top_p <= 1.0, "above 0, at most 1")?;
        self.number(&field("min_p"), min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        let name = "repetition_penalty";
        self.number(&field(name), repetition_penalty, repetition_penalty > 0.0, "above 0")?;
        let KvCacheConfig { memory } = kv_cache;
        self.number(&field("kv_cache.memory"), memory, memory > 0.0 && memory <= 1.0, "above 0, at most 1")?;
        let help = "write a text, such as \"</answer>\"";
        self.ensure(!rollout.stop.contains(&String::new()), &field("stop"), "a text is empty", help)?;
        self.positive(&field("max_new_tokens"), rollout.max_new_tokens)?;
        self.positive(&field("batch_size"), rollout.batch_size)
    }

    /// Whether what is begun ahead can be trained on in time.
    fn asynchronous(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let AsyncConfig { ahead, max_staleness } = rlvr.rollout.asynchronous;
        let field = |name: &str| format!("pipeline.rlvr.rollout.async.{name}");
        if ahead == 0 {
            let help = "leave it out, or write `ahead: 1`";
            let name = "max_staleness";
            return self.ensure(
                max_staleness.is_none(),
                &field(name),
                "with `ahead: 0` nothing is stale",
                help,
            );
        }
        self.ensure(
            max_staleness.is_none_or(|most| most >= ahead),
            &field("max_staleness"),
            format!("what is begun {ahead} steps ahead may be so many steps old"),
            format!("write {ahead} or above, or begin fewer steps ahead"),
        )?;
        self.ensure(
            rlvr.selection.mixed_groups.is_none(),
            &field("ahead"),
            "`selection.mixed_groups` samples whole batches until enough groups teach something: nothing is left over",
            "write `ahead: 0`, or leave `mixed_groups` out",
        )?;
        self.ensure(
            !rlvr.rollout.strict,
            &field("ahead"),
            "`rollout.strict` wants training's log-probs, and tokens of an earlier step have those of its weights",
            "write `ahead: 0`, or leave `strict` out",
        )
    }

    pub(super) fn optimizer(&self, path: &str, optimizer: &OptimizerConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("{path}.{name}");
        let AdamWConfig { learning_rate, betas, eps, weight_decay, decays: _ } = optimizer.adamw;
        self.number(&field("adamw.learning_rate"), learning_rate, learning_rate > 0.0, "above 0")?;
        for beta in betas {
            let holds = (0.0..1.0).contains(&beta);
            self.number(&field("adamw.betas"), beta, holds, "from 0 to below 1, twice")?;
        }
        self.number(&field("adamw.eps"), eps, eps > 0.0, "above 0")?;
        self.number(&field("adamw.weight_decay"), weight_decay, weight_decay >= 0.0, "0 or above")?;
        let norm = optimizer.max_grad_norm;
        self.number(&field("max_grad_norm"), norm, norm >= 0.0, "0 or above")?;
        let share = |name: &str, steps: Steps<Share>| match steps {
            Steps::Count(_) => Ok(()),
            Steps::By(Share { share }) => {
                let field = field(&format!("schedule.{name}.share"));
                self.number(&field, share, (0.0..=1.0).contains(&share), "from 0 to 1")
            }
        };
        match &optimizer.schedule {
            ScheduleConfig::Constant(constant) => share("constant.warmup_steps", constant.warmup_steps),
            ScheduleConfig::Linear(decay) => share("linear.warmup_steps", decay.warmup_steps),
            ScheduleConfig::Cosine(decay) => share("cosine.warmup_steps", decay.warmup_steps),
            ScheduleConfig::Wsd(wsd) => {
                share("wsd.warmup_steps", wsd.warmup_steps)?;
                share("wsd.decay_steps", wsd.decay_steps)
            }
        }
    }

    /// Whether the learning rate's way fits into `steps`.
    pub(super) fn schedule(
        &self,
        path: &str,
        optimizer: &OptimizerConfig,
        steps: u64,
    ) -> Result<(), Problem> {
        let field = |name: &str| format!("{path}.{name}");
        let (kind, warmup_steps, ratio) = match &optimizer.schedule {
            ScheduleConfig::Constant(_) => return Ok(()),
            ScheduleConfig::Linear(decay) => ("linear", decay.warmup_steps, decay.final_ratio),
            ScheduleConfig::Cosine(decay) => ("cosine", decay.warmup_steps, decay.final_ratio),
            ScheduleConfig::Wsd(wsd) => ("wsd", wsd.warmup_steps, wsd.final_ratio),
        };
        let holds = (0.0..=1.0).contains(&ratio);
        self.number(&field(&format!("schedule.{kind}.final_ratio")), ratio, holds, "from 0 to 1")?;
        let warmup_steps = warmup_steps.of(steps);
        self.ensure(
            warmup_steps < steps.max(1),
            &field(&format!("schedule.{kind}.warmup_steps")),
            format!("{warmup_steps} of {steps} steps leave none to fall"),
            "write fewer than the steps",
        )?;
        let ScheduleConfig::Wsd(WsdConfig { decay_steps, .. }) = optimizer.schedule else { return Ok(()) };
        let decay_steps = decay_steps.of(steps);
        self.ensure(
            decay_steps > 0 && decay_steps <= steps.max(1) - warmup_steps,
            &field("schedule.wsd.decay_steps"),
            format!("{decay_steps} do not fit in {steps} steps, {warmup_steps} of which are the warm-up"),
            "write 1 or above, and no more than are left; `constant` never falls",
        )
    }

    /// Whether the adapters fit the model, and nothing is asked of a reference that is the policy itself.
    pub(super) fn lora(
        &self,
        lora: &LoraConfig,
        folder: &ModelFolder,
        reference: &RoleConfig,
    ) -> Result<(), Problem> {
        self.lora_numbers(lora)?;
        let model = folder.decoder_config();
        let names: Vec<&str> = LoraTarget::all_of(model).iter().map(|target| target.name()).collect();
        let help =
            format!("write names, or patterns of the end of one; in a layer there is {}", list(&names));
        self.ensure(!lora.targets.is_empty(), "model.lora.targets", "the list is empty", help.clone())?;
        let layers = model.num_hidden_layers;
        self.lora_layers(lora, layers)?;
        let shape = lora.shape(model).map_err(|(field, entry)| {
            let message = format!("`{entry}` names no matrix of a layer");
            self.problem(&format!("model.lora.{field}"), message, help)
        })?;
        self.no_adapted_experts(&shape, folder)?;
        self.lora_patterns(&shape, layers)?;
        if let Some(path) = &lora.path {
            let help = "give the folder of an adapter for this model, as PEFT saves it";
            let adapter = AdapterFolder::open(path, model)
                .map_err(|error| self.problem("model.lora.path", one_line(&error), help))?;
            // What is dropped is a matter of training, and the file's is the training's that it came from.
            let found =
                anyroll_models::LoraConfig { dropout: shape.dropout, ..adapter.lora_config().clone() };
            self.ensure(
                found == shape,
                "model.lora.path",
                "the adapter there has another shape",
                format!("write its own: {}", fields_of(&found)),
            )?;
        }
        self.no_reference(reference)
    }

    /// Whether adapters stand beside no experts.
    fn no_adapted_experts(
        &self,
        shape: &anyroll_models::LoraConfig,
        folder: &ModelFolder,
    ) -> Result<(), Problem> {
        let Some(module) = shape.targets.first_of_experts(folder.decoder_config()) else { return Ok(()) };
        let message = format!("{module} is many experts', which have no adapters");
        let help = "write matrices of attention: [q_proj, k_proj, v_proj, o_proj], or some of them";
        Err(self.problem("model.lora.targets", message, help))
    }

    /// Whether the layers that have adapters are the model's.
    fn lora_layers(&self, lora: &LoraConfig, layers: usize) -> Result<(), Problem> {
        let Some(chosen) = &lora.layers else { return Ok(()) };
        let unknown = chosen.iter().find(|&&layer| layer >= layers);
        let message = match unknown {
            Some(layer) => format!("there is no layer {layer}"),
            None => "the list is empty".to_owned(),
        };
        let help = format!("write some of 0 to {}, or leave it out for all", layers - 1);
        self.ensure(!chosen.is_empty() && unknown.is_none(), "model.lora.layers", message, help)
    }

    /// Whether each pattern is one of a matrix that has an adapter.
    fn lora_patterns(&self, shape: &anyroll_models::LoraConfig, layers: usize) -> Result<(), Problem> {
        let modules = shape.modules(layers);
        let ranks = shape.rank_pattern.iter().map(|(pattern, _)| ("rank_pattern", pattern));
        let alphas = shape.alpha_pattern.iter().map(|(pattern, _)| ("alpha_pattern", pattern));
        for (field, pattern) in ranks.chain(alphas) {
            self.ensure(
                modules.iter().any(|module| pattern.matches(module)),
                &format!("model.lora.{field}"),
                format!("`{}` matches no matrix that has an adapter", pattern.as_str()),
                format!("write a pattern of the end of a name, such as {}", modules[0]),
            )?;
        }
        Ok(())
    }

    pub(super) fn lora_numbers(&self, lora: &LoraConfig) -> Result<(), Problem> {
        self.positive("model.lora.rank", lora.rank)?;
        let alpha = lora.alpha.unwrap_or(1.0);
        self.number("model.lora.alpha", alpha, alpha > 0.0, "above 0")?;
        lora.rank_pattern.values().try_for_each(|&rank| self.positive("model.lora.rank_pattern", rank))?;
        for &alpha in lora.alpha_pattern.values() {
            self.number("model.lora.alpha_pattern", alpha, alpha > 0.0, "above 0")?;
        }
        let holds = (0.0..1.0).contains(&lora.dropout);
        self.number("model.lora.dropout", lora.dropout, holds, "from 0 to below 1")
    }
}

/// The shape of an adapter as YAML has it.
fn fields_of(lora: &anyroll_models::LoraConfig) -> String {
    let anyroll_models::LoraConfig { rank, alpha, rank_pattern, alpha_pattern, .. } = lora;
    let (targets, layers) = lora.targets.names();
    let mut fields = format!("rank: {rank}, alpha: {alpha:?}, targets: [{}]", targets.join(", "));
    for (field, is_set) in [("rslora", lora.rslora), ("dora", lora.dora)] {
        if is_set {
            fields += &format!(", {field}: true");
        }
    }
    if let Some(layers) = layers {
        fields += &format!(", layers: {layers:?}");
    }
    fields + &entries("rank_pattern", rank_pattern) + &entries("alpha_pattern", alpha_pattern)
}

/// Patterns as YAML has them, behind other fields.
fn entries<T: Debug>(field: &str, patterns: &[(ModulePattern, T)]) -> String {
    if patterns.is_empty() {
        return String::new();
    }
    let entries: Vec<String> =
        patterns.iter().map(|(pattern, value)| format!("'{}': {value:?}", pattern.as_str())).collect();
    format!(", {field}: {{{}}}", entries.join(", "))
}

impl Precision {
    /// Its name in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16(_) => "fp16",
        }
    }
}
