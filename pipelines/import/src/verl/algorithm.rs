//! verl's advantages and losses, with the sections that configure them.

use serde_json::{Value, json};

use super::{ACTOR, distillation, optimizer};
use crate::{ledger::Ledger, rules, shared::R, values};

const NO_CRITIC: &str = "the advantage needs no critic";
const CRITIC: &str = "the critic uses the policy's model, mini-batches and strategy, or `roles.critic`";

pub(super) fn apply(ledger: &mut Ledger) {
    let a = format!("{R}.algorithm");
    advantage(ledger, &a);
    distillation::apply(ledger, &a);
    loss(ledger, &a);
    ledger.copy_number(&format!("{ACTOR}.entropy_coeff"), &format!("{a}.entropy_coef"));
    kl(ledger, &a);
    filter_groups(ledger);
    correction(ledger, &a);
}

fn advantage(ledger: &mut Ledger, a: &str) {
    let (key, field, whiten) =
        ("algorithm.adv_estimator", format!("{a}.advantage"), format!("{a}.whiten_advantages"));
    let by_std = "algorithm.norm_adv_by_std_in_grpo";
    let [gamma, lambda] =
        ["gamma", "lam"].map(|name| ledger.number(&format!("algorithm.{name}")).unwrap_or(1.0));
    match ledger.text(key).as_deref() {
        Some(_) if distillation::is_alone(ledger) => {
            ledger.change(key, &field, "none", "only the teacher's divergence");
        }
        Some("grpo" | "grpo_vectorized") => {
            let scale = if ledger.truth(by_std) == Some(false) { "none" } else { "group_std" };
            ledger.map(key, &field, json!({"grpo": {"scale": scale, "eps": 1e-6}}));
            if ledger.peek(by_std).is_some() {
                ledger.fold(by_std, format!("part of the advantage, `scale: {scale}`"));
            }
        }
        Some(kind @ ("gae" | "reinforce_plus_plus" | "reinforce_plus_plus_baseline")) => {
            ledger.fill(&whiten, true);
            let advantage = match kind {
                "gae" => json!({"gae": {"gamma": gamma, "lambda": lambda}}),
                "reinforce_plus_plus" => json!({"reinforce": {"gamma": gamma}}),
                _ => json!({"grpo": {"scale": "none"}}),
            };
            ledger.map(key, &field, advantage);
            if kind != "reinforce_plus_plus_baseline" {
                rules::fold_number(ledger, "algorithm.gamma", "part of the advantage");
            }
            if kind == "gae" {
                rules::fold_number(ledger, "algorithm.lam", "part of the advantage");
                critic(ledger);
            }
        }
        Some(kind @ ("rloo" | "rloo_vectorized" | "remax" | "opo" | "gpg")) => {
            ledger.map(key, &field, kind.trim_end_matches("_vectorized"));
        }
        Some(_) => ledger.refuse(key, "see docs/reference/algorithms.md for supported advantages"),
        None => {}
    }
    ledger.idle_all(&[
        ("algorithm.gamma", "the advantage does not read it"),
        ("algorithm.lam", "the advantage does not read it"),
        (by_std, "only for grpo"),
        ("trainer.critic_warmup", NO_CRITIC),
        ("critic.cliprange_value", NO_CRITIC),
        ("critic.grad_clip", NO_CRITIC),
        ("critic.model.path", NO_CRITIC),
        ("critic.model.lora_*", NO_CRITIC),
        ("critic.model.target_modules", NO_CRITIC),
        ("critic.model.external_lib", NO_CRITIC),
        ("critic.rollout_n", NO_CRITIC),
    ]);
    for table in [&CRITIC_CHANGED[..], &CRITIC_IDLE, &CRITIC_OPTIM] {
        for name in table {
            ledger.idle_all(&[(name, NO_CRITIC)]);
        }
    }
}

fn critic(ledger: &mut Ledger) {
    let critic = format!("{R}.critic");
    ledger.assume(&[
        ("critic.optim.lr", json!(1e-5)),
        ("critic.optim.weight_decay", json!(0.01)),
        ("critic.grad_clip", json!(1.0)),
        ("critic.cliprange_value", json!(0.5)),
    ]);
    optimizer(ledger, "critic.optim", &critic);
    ledger.copy_number("critic.cliprange_value", &format!("{critic}.value_clip"));
    ledger.copy_number("trainer.critic_warmup", &format!("{critic}.warmup_steps"));
    let path = "critic.model.path";
    match (ledger.text(path), ledger.draft("model.path").and_then(Value::as_str)) {
        (None, _) => {}
        (Some(own), Some(policy)) if own == policy => {
            ledger.idle(path, "the critic starts from the policy's weights");
        }
        _ => ledger.refuse(
            path,
            "the critic starts from the policy's weights: leave it out, or name the same model",
        ),
    }
    ledger.fold_all(&CRITIC_CHANGED.map(|name| (name, CRITIC)));
    ledger.idle_all(&CRITIC_IDLE.map(|name| (name, CRITIC)));
}

/// The critic's settings that may differ from the policy's in verl.
const CRITIC_CHANGED: [&str; 11] = [
    "critic.ppo_mini_batch_size",
    "critic.ppo_epochs",
    "critic.loss_agg_mode",
    "critic.strategy",
    "critic.shuffle",
    "critic.fsdp*",
    "critic.megatron.*",
    "critic.model.enable_gradient_checkpointing",
    "critic.model.fsdp_config.*",
    "critic.model.override_config*",
    "critic.optim.override_optimizer_config*",
];

/// The critic's optimizer, which [`optimizer`] maps if there is a critic.
const CRITIC_OPTIM: [&str; 12] = [
    "critic.optim.lr",
    "critic.optim.lr_*",
    "critic.optim.weight_decay",
    "critic.optim.betas",
    "critic.optim.min_lr_ratio",
    "critic.optim.num_cycles",
    "critic.optim.warmup_style",
    "critic.optim.clip_grad",
    "critic.optim.optimizer",
    "critic.optim.optimizer_impl",
    "critic.optim.min_lr",
    "critic.optim.override_*",
];

/// The critic's settings that decide no result.
const CRITIC_IDLE: [&str; 20] = [
    "critic.enable",
    "critic.ppo_micro_batch_size*",
    "critic.ppo_max_token_len_per_gpu",
    "critic.ppo_infer_max_token_len_per_gpu",
    "critic.forward_*",
    "critic.use_dynamic_bsz",
    "critic.profiler.*",
    "critic.checkpoint.*",
    "critic.data_loader_seed",
    "critic.load_weight",
    "critic.nccl_timeout",
    "critic.model_engine",
    "critic.ulysses_sequence_parallel_size",
    "critic.model.tokenizer_path",
    "critic.model.use_remove_padding",
    "critic.model.use_shm",
    "critic.model.trust_remote_code",
    "critic.model.enable_activation_offload",
    "critic.optim.total_training_steps",
    "critic.optim.zero_indexed_step",
];

fn loss(ledger: &mut Ledger, a: &str) {
    let key = format!("{ACTOR}.policy_loss.loss_mode");
    let kind = match ledger.text(&key).as_deref() {
        Some("vanilla") => "clipped",
        Some("gspo") => "gspo",
        Some("cispo") => "cispo",
        Some("sapo") => "sapo",
        Some("geo_mean") => "gmpo",
        Some("gpg") => "reinforce",
        _ => {
            aggregation(ledger, a, "");
            ledger.refuse(&key, "see docs/reference/algorithms.md for supported losses");
            return ledger.idle_all(&[(&format!("{ACTOR}.clip_ratio*"), "part of the loss")]);
        }
    };
    aggregation(ledger, a, kind);
    let field = format!("{a}.loss.{kind}");
    clips(ledger, &field, kind);
    match kind {
        "reinforce" => ledger.map(&key, &format!("{a}.loss"), "reinforce"),
        _ => ledger.fold(&key, format!("its constants make it `{kind}`")),
    }
    ledger.idle_all(&[
        (&format!("{ACTOR}.policy_loss.clip_cov_*"), "only for another loss"),
        (&format!("{ACTOR}.policy_loss.kl_cov_*"), "only for another loss"),
        (&format!("{ACTOR}.policy_loss.ppo_kl_coef"), "only for another loss"),
        (&format!("{ACTOR}.policy_loss.rollout_correction.*"), "set by `algorithm.rollout_correction`"),
        (&format!("{ACTOR}.tau_*"), "only for another loss"),
    ]);
}

/// verl reads a low and a high clip, each 0.2 by default; older versions have one for both.
fn clips(ledger: &mut Ledger, field: &str, kind: &str) {
    let [both, low, high, dual] = ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]
        .map(|name| format!("{ACTOR}.{name}"));
    if matches!(kind, "sapo" | "reinforce") {
        if kind == "sapo" {
            ledger.assume(&[
                (&format!("{ACTOR}.tau_pos"), json!(1.0)),
                (&format!("{ACTOR}.tau_neg"), json!(1.05)),
            ]);
            ledger.copy_number(&format!("{ACTOR}.tau_pos"), &format!("{field}.tau_positive"));
            ledger.copy_number(&format!("{ACTOR}.tau_neg"), &format!("{field}.tau_negative"));
        }
        let why = "the loss has no clip";
        return ledger.idle_all(&[(&both, why), (&low, why), (&high, why), (&dual, why)]);
    }
    let given = ledger.number(&both).unwrap_or(0.2);
    ledger.assume(&[(&low, values::json(given)), (&high, values::json(given))]);
    ledger.idle_all(&[(&both, "the default of the low and the high clip")]);
    match (kind, ledger.number(&low), ledger.number(&high)) {
        ("cispo", Some(below), Some(above)) => {
            let least = values::json((1.0 - below).max(0.0));
            ledger.change(&low, &format!("{field}.min_ratio"), least, "bounds here are ratios");
            ledger.change(
                &high,
                &format!("{field}.max_ratio"),
                values::json(1.0 + above),
                "bounds here are ratios",
            );
        }
        _ => {
            ledger.copy_number(&low, &format!("{field}.clip_low"));
            ledger.copy_number(&high, &format!("{field}.clip_high"));
        }
    }
    if kind == "clipped" {
        ledger.assume(&[(&dual, json!(3.0))]);
        ledger.copy_number(&dual, &format!("{field}.dual_clip"));
    }
    ledger.idle_all(&[(&dual, "only the ratio of a token has a second clip")]);
}

fn aggregation(ledger: &mut Ledger, a: &str, kind: &str) {
    let (key, length) = (format!("{ACTOR}.loss_agg_mode"), format!("{ACTOR}.loss_scale_factor"));
    let field = format!("{a}.aggregation");
    rules::leave_unset(ledger, &[&length]);
    match ledger.text(&key).as_deref() {
        _ if matches!(kind, "gspo" | "sapo" | "gmpo") => {
            ledger.change(
                &key,
                &field,
                "seq_mean_token_mean",
                "verl aggregates this loss by sequence, whatever is set here",
            );
        }
        Some(mode @ ("token-mean" | "seq-mean-token-sum" | "seq-mean-token-mean")) => {
            ledger.map(&key, &field, mode.replace('-', "_"));
        }
        Some("seq-mean-token-sum-norm") => {
            let longest = ledger.draft(&format!("{R}.rollout.max_new_tokens")).and_then(Value::as_u64);
            let length = rules::count(ledger, &length, longest.unwrap_or(512));
            ledger.map(&key, &field, json!({"seq_mean_token_sum_norm": {"length": length}}));
        }
        _ => ledger.refuse(&key, "see `algorithm.aggregation`"),
    }
    ledger.idle_all(&[(&length, "part of the aggregation, if that has a length")]);
}

fn kl(ledger: &mut Ledger, a: &str) {
    let (field, coefficient) = (format!("{a}.kl_in"), format!("{a}.kl_coef"));
    let [in_loss, loss_coefficient, estimator] =
        ["use_kl_loss", "kl_loss_coef", "kl_loss_type"].map(|name| format!("{ACTOR}.{name}"));
    if ledger.truth(&in_loss) == Some(true) {
        ledger.assume(&[(&loss_coefficient, json!(0.001)), (&estimator, json!("low_var_kl"))]);
        let ours = match ledger.text(&estimator).as_deref() {
            Some("kl" | "k1") => Some("k1"),
            Some("mse" | "k2") => Some("k2"),
            Some("low_var_kl" | "k3") => Some("k3"),
            _ => None,
        };
        match ours {
            Some(ours) => ledger.map(&estimator, &field, json!({"loss": {"estimator": ours}})),
            None => ledger.refuse(&estimator, "the KL term is k1, k2 or k3, unmodified"),
        }
        ledger.fold(&in_loss, "in `kl_in`");
        ledger.copy_number(&loss_coefficient, &coefficient);
    }
    let why = "use_kl_loss is off";
    ledger.idle_all(&[(&in_loss, "off"), (&loss_coefficient, why), (&estimator, why)]);
    let in_reward = "algorithm.use_kl_in_reward";
    if ledger.truth(in_reward) == Some(true) {
        kl_in_reward(ledger, in_reward, &field, &coefficient);
    }
    let why = "use_kl_in_reward is off";
    ledger.idle_all(&[(in_reward, "off"), ("algorithm.kl_penalty", why)]);
    for name in ["type", "kl_coef", "target_kl", "horizon"] {
        ledger.idle_all(&[(&format!("algorithm.kl_ctrl.{name}"), why)]);
    }
}

fn kl_in_reward(ledger: &mut Ledger, key: &str, field: &str, coefficient: &str) {
    ledger.assume(&[("algorithm.kl_ctrl.kl_coef", json!(0.001)), ("algorithm.kl_penalty", json!("kl"))]);
    let [target, horizon] = [("target_kl", 0.1), ("horizon", 10_000.0)]
        .map(|(name, usual)| ledger.number(&format!("algorithm.kl_ctrl.{name}")).unwrap_or(usual));
    let kind = "algorithm.kl_ctrl.type";
    let is_adaptive = ledger.text(kind).as_deref() == Some("adaptive");
    let kl_in = match is_adaptive {
        true => json!({"reward": {"adaptive": {"target": target, "horizon": horizon}}}),
        false => json!({"reward": {}}),
    };
    match ledger.text(kind).as_deref() {
        None | Some("adaptive" | "fixed") => ledger.fold_all(&[(kind, "in `kl_in`")]),
        Some(_) => ledger.refuse(kind, "must be fixed or adaptive"),
    }
    if is_adaptive {
        for name in ["target_kl", "horizon"] {
            rules::fold_number(ledger, &format!("algorithm.kl_ctrl.{name}"), "in `kl_in`");
        }
    }
    ledger.map(key, field, kl_in);
    ledger.copy_number("algorithm.kl_ctrl.kl_coef", coefficient);
    match ledger.text("algorithm.kl_penalty").as_deref() {
        Some("kl" | "k1") => ledger.idle("algorithm.kl_penalty", "in rewards the KL penalty is k1"),
        _ => ledger
            .refuse("algorithm.kl_penalty", "in rewards the KL penalty is k1; k2 and k3 go into the loss"),
    }
    let fixed = "the coefficient is fixed";
    ledger.idle_all(&[("algorithm.kl_ctrl.target_kl", fixed), ("algorithm.kl_ctrl.horizon", fixed)]);
}

/// DAPO's dynamic sampling; 0 batches mean no limit.
fn filter_groups(ledger: &mut Ledger) {
    let key = |name: &str| format!("algorithm.filter_groups.{name}");
    let (enable, most) = (key("enable"), key("max_num_gen_batches"));
    if ledger.truth(&enable) == Some(true) {
        let batches = ledger.whole(&most).filter(|most| *most > 0).unwrap_or(10);
        let why =
            "groups whose completions have equal scores are replaced, from up to this many batches per step";
        ledger.change(&enable, &format!("{R}.selection.mixed_groups"), json!({"max_batches": batches}), why);
        rules::fold_number(ledger, &most, "in `mixed_groups`");
        ledger.fold_all(&[(&key("metric"), "completions are compared by the evaluation's score")]);
    }
    match ledger.truth(&enable) {
        Some(false) => ledger.idle_all(&[(&key("*"), "off")]),
        _ if ledger.peek(&enable).is_some() => ledger.refuse(&enable, "neither true nor false"),
        _ => ledger.idle_all(&[(&key("*"), "not enabled")]),
    }
}

fn correction(ledger: &mut Ledger, a: &str) {
    let key = |name: &str| format!("algorithm.rollout_correction.{name}");
    let (weights, cap) = (key("rollout_is"), key("rollout_is_threshold"));
    rules::leave_unset(ledger, &[&weights]);
    match ledger.text(&weights).as_deref() {
        Some(level @ ("token" | "sequence")) => {
            let max = ledger.number(&cap).unwrap_or(2.0);
            ledger.fill(&format!("{a}.old_logprobs"), "recompute");
            let truncate = json!({"truncate": {"level": level, "max": max}});
            ledger.map(&weights, &format!("{a}.rollout_correction"), truncate);
            rules::fold_number(ledger, &cap, "in `rollout_correction`");
        }
        Some(_) => ledger.refuse(&weights, "levels are token and sequence"),
        None => ledger.idle_all(&[(&cap, "rollout_is is off")]),
    }
    ledger.refuse_all(&[
        (&key("rollout_rs"), "see `algorithm.rollout_correction: mask`"),
        (&key("rollout_is_batch_normalize"), "weights are not normalized"),
        (&key("rollout_token_veto_threshold"), "see `algorithm.rollout_correction: mask`"),
    ]);
    let one_engine = "one engine computes the log-probs of sampling and of training";
    ledger.idle_all(&[
        (&key("bypass_mode"), one_engine),
        (&key("loss_type"), one_engine),
        (&key("use_policy_gradient"), one_engine),
        (&key("rollout_rs_threshold*"), "used with `rollout_rs` only"),
    ]);
    let legacy = format!("{ACTOR}.tis_imp_ratio_cap");
    match ledger.number(&legacy) {
        Some(max) if max > 0.0 => {
            ledger.fill(&format!("{a}.old_logprobs"), "recompute");
            let truncate = json!({"truncate": {"level": "token", "max": max}});
            ledger.map(&legacy, &format!("{a}.rollout_correction"), truncate);
        }
        _ => ledger.idle_all(&[(&legacy, "off")]),
    }
}
