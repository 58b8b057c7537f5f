//! trlx's YAML: `train`, `model`, `tokenizer`, `optimizer`, `scheduler` and `method`.

use serde_json::{Value, json};

use super::{Became, Import, Keys, Rule, Source, trl, value};
use Rule::{Ignored, Refused, Same, Together, Unless, With};

pub(super) const SOURCE: Source = Source { rules: RULES, whole };

const LOGGING: &str = "everything lands in the run folder";
const MODEL: &str = "give the model in `model:`";

const RULES: &[(&str, Rule)] = &[
    ("train.seq_length", Refused("give `rollout.max_new_tokens`, and the longest prompt in `data:`")),
    ("train.total_steps", Same("pipeline.rlvr.steps")),
    ("train.epochs", Ignored("`steps` counts")),
    ("train.batch_size", Together),
    ("train.minibatch_size", Same("strategy.micro_batch_size")),
    ("train.checkpoint_interval", Same("pipeline.rlvr.checkpoint.every")),
    ("train.eval_interval", Same("pipeline.rlvr.evaluation.every")),
    ("train.pipeline", Ignored("`pipeline:` says what is run")),
    ("train.trainer", With(trainer)),
    ("train.trainer_kwargs.*", Refused("it is for a trainer of trlx's")),
    ("train.run_name", With(trl::name)),
    ("train.project_name", Ignored(LOGGING)),
    ("train.entity_name", Ignored(LOGGING)),
    ("train.group_name", Ignored(LOGGING)),
    ("train.checkpoint_dir", Ignored(LOGGING)),
    ("train.rollout_logging_dir", Ignored(LOGGING)),
    ("train.logging_dir", Ignored(LOGGING)),
    ("train.tracker", Ignored(LOGGING)),
    ("train.tags", Ignored(LOGGING)),
    ("train.save_best", Ignored("the newest checkpoints are kept")),
    ("train.save_optimizer", Unless(&["true"], "a checkpoint can be resumed")),
    ("train.resume_from_checkpoint", Ignored("`anyroll run --resume` goes on")),
    ("train.seed", Same("seed")),
    ("model.model_path", Refused(MODEL)),
    ("model.model_arch_type", Unless(&["\"causal\""], "models are decoders")),
    ("model.num_layers_unfrozen", Unless(&["-1"], MODEL)),
    ("model.peft_config.*", Refused("give adapters in `model:`")),
    ("model.delta_kwargs", Refused("give adapters in `model:`")),
    ("tokenizer.*", Refused(MODEL)),
    ("optimizer.name", Unless(&["\"adamw\"", "\"adam\""], "the optimizer is AdamW")),
    ("optimizer.kwargs.lr", Same("pipeline.rlvr.optimizer.adamw.learning_rate")),
    ("optimizer.kwargs.betas", Same("pipeline.rlvr.optimizer.adamw.betas")),
    ("optimizer.kwargs.eps", Same("pipeline.rlvr.optimizer.adamw.eps")),
    ("optimizer.kwargs.weight_decay", Same("pipeline.rlvr.optimizer.adamw.weight_decay")),
    ("scheduler.name", Together),
    ("scheduler.kwargs.T_max", Ignored("the schedule ends with the run")),
    ("scheduler.kwargs.eta_min", Together),
    ("scheduler.kwargs.*", Refused("see the fields of `schedule:`")),
    ("method.name", Together),
    ("method.ppo_epochs", Same("pipeline.rlvr.epochs")),
    ("method.num_rollouts", Same("pipeline.rlvr.prompts_per_step")),
    ("method.chunk_size", Same("pipeline.rlvr.rollout.batch_size")),
    ("method.init_kl_coef", Same("pipeline.rlvr.algorithm.kl_coef")),
    ("method.target", Together),
    ("method.horizon", Together),
    ("method.gamma", Together),
    ("method.lam", Together),
    ("method.cliprange", Together),
    ("method.cliprange_value", Together),
    ("method.vf_coef", Refused("the critic is a model of its own, with its own learning rate")),
    (
        "method.scale_reward",
        Unless(&["\"ignored\"", "false"], "give `whiten_advantages`, or a weight to the reward"),
    ),
    ("method.ref_mean", Ignored("rewards are not scaled")),
    ("method.ref_std", Ignored("rewards are not scaled")),
    ("method.cliprange_reward", Same("pipeline.rlvr.algorithm.reward_clip")),
    ("method.num_value_layers_unfrozen", Unless(&["0"], "the critic is a model of its own")),
    ("method.gen_kwargs.max_new_tokens", Same("pipeline.rlvr.rollout.max_new_tokens")),
    ("method.gen_kwargs.temperature", Same("pipeline.rlvr.rollout.temperature")),
    ("method.gen_kwargs.top_k", Same("pipeline.rlvr.rollout.top_k")),
    ("method.gen_kwargs.top_p", Same("pipeline.rlvr.rollout.top_p")),
    ("method.gen_kwargs.do_sample", Unless(&["true"], "training samples; evaluation is greedy beside")),
    ("method.gen_kwargs.*", Refused("see the fields of `rollout:`")),
    ("method.gen_experience_kwargs.*", Refused("see the fields of `rollout:`")),
];

fn trainer(value: &Value, _: &mut Import) -> Became {
    match value.as_str() {
        Some("AcceleratePPOTrainer") => Became::Mapped("pipeline.rlvr".into()),
        _ => Became::Refused("only PPO is taken over".into()),
    }
}

fn whole(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let name = keys.get("method.name").and_then(Value::as_str).unwrap_or_default().to_lowercase();
    let became = match name.as_str() {
        "ppoconfig" => Became::Mapped(format!("{algorithm}.advantage.gae")),
        _ => Became::Refused("only PPO is taken over".into()),
    };
    import.note(keys, "method.name", became);
    // One completion a prompt: PPO's advantages have a critic and no group.
    import.set("pipeline.rlvr.group_size", 1);
    let field = format!("{algorithm}.advantage.gae");
    let number = |key, default| keys.number(key).unwrap_or(default);
    let gae = json!({
        "gamma": number("method.gamma", 1.0),
        "lambda": number("method.lam", 0.95),
        "critic": {"value_clip": number("method.cliprange_value", 0.2)},
    });
    import.set(&field, gae);
    import.set(&format!("{algorithm}.whiten_advantages"), true);
    for key in ["method.gamma", "method.lam", "method.cliprange_value"] {
        import.note(keys, key, Became::Mapped(field.clone()));
    }
    let clip = number("method.cliprange", 0.2);
    let field = format!("{algorithm}.loss.clipped");
    import.set(&field, json!({"clip_low": clip, "clip_high": clip}));
    import.note(keys, "method.cliprange", Became::Mapped(field));
    divergence(keys, import);
    batches(keys, import);
    schedule(keys, import);
}

fn divergence(keys: &Keys, import: &mut Import) {
    let field = "pipeline.rlvr.algorithm.kl_in.reward";
    if keys.number("method.init_kl_coef").unwrap_or(0.0) > 0.0 {
        import.set(field, json!({}));
        if let Some(target) = keys.number("method.target") {
            let horizon = keys.number("method.horizon").unwrap_or(10_000.0);
            import.set(&format!("{field}.adaptive"), json!({"target": target, "horizon": horizon}));
        }
    }
    for key in ["method.target", "method.horizon"] {
        let became = match keys.get("method.target") {
            Some(_) => Became::Mapped(format!("{field}.adaptive")),
            None => Became::NoEffect("the coefficient is fixed".into()),
        };
        import.note(keys, key, became);
    }
}

fn batches(keys: &Keys, import: &mut Import) {
    let Some(batch) = keys.number("train.batch_size") else { return };
    let rollouts = keys.number("method.num_rollouts").unwrap_or(128.0);
    let field = "pipeline.rlvr.mini_batches";
    let updates = (rollouts / batch).max(1.0).round();
    import.set(field, value::whole(updates));
    let why = format!("{rollouts} rollouts are {updates} updates of {batch}");
    import.note(keys, "train.batch_size", Became::Changed(field.into(), why));
}

fn schedule(keys: &Keys, import: &mut Import) {
    let Some(name) = keys.get("scheduler.name").and_then(Value::as_str) else { return };
    let kind = match name {
        "cosine_annealing" => "cosine",
        "linear" => "linear",
        other => {
            import.note(keys, "scheduler.name", Became::Refused(format!("there is no `{other}`")));
            return;
        }
    };
    let field = format!("pipeline.rlvr.optimizer.schedule.{kind}");
    import.set(&field, json!({}));
    import.note(keys, "scheduler.name", Became::Mapped(field.clone()));
    let rates = (keys.number("scheduler.kwargs.eta_min"), keys.number("optimizer.kwargs.lr"));
    if let (Some(last), Some(peak)) = rates {
        import.set(&format!("{field}.final_ratio"), last / peak);
        let why = format!("{last} of {peak}");
        import.note(keys, "scheduler.kwargs.eta_min", Became::Changed(format!("{field}.final_ratio"), why));
    }
}
