//! ROLL's losses: PPO's by the default worker, others by `ActorPGWorker`, and the correction for a different
//! sampler.

use serde_json::{Value, json};

use crate::{ledger::Ledger, shared::R, values};

const WORKER: &str = "actor_train.worker_cls";
const VARIANT: &str = "actor_train.pg_variant";

pub(super) fn loss(ledger: &mut Ledger, a: &str) {
    let by_variant = ledger.text(WORKER).is_some_and(|class| class.ends_with("ActorPGWorker"));
    let by_sequence = ledger.text("importance_sampling").as_deref() == Some("seq");
    let field = format!("{a}.loss");
    if by_variant {
        ledger.assume(&[(VARIANT, json!("vanilla"))]);
        variant(ledger, &field);
        ledger.idle_all(&[("importance_sampling", "this worker does not read it")]);
    } else {
        let kind = if by_sequence { "gspo" } else { "clipped" };
        if ledger.peek("importance_sampling").is_some() {
            ledger.map("importance_sampling", &field, json!({kind: {}}));
        }
        clips(ledger, &format!("{field}.{kind}"), kind);
    }
    ledger.idle_all(&[
        (VARIANT, "only `ActorPGWorker` reads it"),
        ("pg_variant", "ROLL reads the one in `actor_train`"),
    ]);
    let why = "only for another loss";
    ledger.idle_all(&[
        ("pg_clip*", why),
        ("use_pg_clip_range", why),
        ("dual_clip_loss", why),
        ("actor_train.topr_*", why),
        ("actor_train.cispo_*", why),
        ("actor_train.tis_*", why),
        ("actor_train.kimi15_*", why),
    ]);
    correction(ledger, a);
}

/// Losses of `ActorPGWorker`. Bounds of a ratio are written as ratios here.
fn variant(ledger: &mut Ledger, field: &str) {
    let number = |ledger: &Ledger, key: &str, usual: f64| {
        ledger.number(&format!("actor_train.{key}")).unwrap_or(usual)
    };
    match ledger.text(VARIANT).as_deref() {
        Some("vanilla") => ledger.map(VARIANT, field, "reinforce"),
        Some("ppo") => {
            ledger.map(VARIANT, field, json!({"clipped": {}}));
            clips(ledger, &format!("{field}.clipped"), "clipped");
        }
        Some("topr") => {
            let [positive, negative] =
                ["topr_positive_weight", "topr_negative_weight"].map(|key| number(ledger, key, 1.0));
            let topr = json!({"topr": {"positive_weight": positive, "negative_weight": negative}});
            ledger.change(VARIANT, field, topr, "by the sign of the advantage, where ROLL uses the reward's");
            fold_all(ledger, &["topr_positive_weight", "topr_negative_weight"], "a weight of `topr`");
        }
        Some("cispo") => {
            let low = (1.0 - number(ledger, "cispo_epsilon_low", 0.1)).max(0.0);
            let high = 1.0 + number(ledger, "cispo_epsilon_high", 0.1);
            bounded(ledger, field, low, high);
            fold_all(ledger, &["cispo_epsilon_low", "cispo_epsilon_high"], "a bound of `cispo`");
            let why = "clipped tokens keep their gradient";
            ledger.refuse_all(&[("actor_train.cispo_use_unified_mask", why)]);
        }
        Some("tis") => {
            let [low, high] = [("tis_lower_bound", 0.0), ("tis_upper_bound", 1.0)]
                .map(|(key, usual)| number(ledger, key, usual));
            bounded(ledger, field, low, high);
            fold_all(ledger, &["tis_lower_bound", "tis_upper_bound"], "a bound of `cispo`");
        }
        _ => ledger.refuse(VARIANT, "losses are ppo, tis, topr, cispo and vanilla"),
    }
}

fn bounded(ledger: &mut Ledger, field: &str, low: f64, high: f64) {
    let [low, high] = [low, high].map(values::json);
    ledger.map(VARIANT, field, json!({"cispo": {"min_ratio": low, "max_ratio": high}}));
}

fn fold_all(ledger: &mut Ledger, names: &[&str], why: &str) {
    for key in names.iter().map(|name| format!("actor_train.{name}")) {
        if ledger.peek(&key).is_some() {
            ledger.fold(&key, why);
        }
    }
}

fn clips(ledger: &mut Ledger, field: &str, kind: &str) {
    let clip = ledger.number("pg_clip").unwrap_or(0.2);
    match ledger.truth("use_pg_clip_range") {
        Some(true) => {
            ledger.assume(&[("pg_clip_low", json!(0.2)), ("pg_clip_high", json!(0.2))]);
            ledger.copy_number("pg_clip_low", &format!("{field}.clip_low"));
            ledger.copy_number("pg_clip_high", &format!("{field}.clip_high"));
            ledger.fold("use_pg_clip_range", "the low and the high clip are set");
            ledger.idle_all(&[("pg_clip", "the low and the high clip are set")]);
        }
        _ => {
            ledger.fill(&format!("{field}.clip_high"), clip);
            ledger.copy_number("pg_clip", &format!("{field}.clip_low"));
            ledger.idle_all(&[("use_pg_clip_range", "off"), ("pg_clip_*", "use_pg_clip_range is off")]);
        }
    }
    match ledger.truth("dual_clip_loss") {
        Some(true) if kind == "clipped" => {
            let field = format!("{field}.dual_clip");
            ledger.change("dual_clip_loss", &field, 1.0 + 2.0 * clip, "ROLL's constant is 1 + 2 pg_clip");
        }
        Some(true) => ledger.refuse("dual_clip_loss", "only the ratio of a token has a second clip"),
        Some(false) => ledger.idle("dual_clip_loss", "off"),
        None => {}
    }
}

/// Correction of sampling log-probs that differ from training's.
fn correction(ledger: &mut Ledger, a: &str) {
    let key = |name: &str| format!("train_infer_correction.is_weight.{name}");
    let [enabled, level_key, bound] = ["enabled", "weight_type", "upper_bound"].map(key);
    if ledger.truth(&enabled) == Some(true) {
        let max = ledger.number(&bound).unwrap_or(1.2);
        let is_unbounded = ledger.peek(&bound).is_some_and(values::is_unset);
        match ledger.text(&level_key).as_deref().unwrap_or("token") {
            _ if is_unbounded => ledger.refuse(&enabled, "weights have an upper bound"),
            level @ ("token" | "geometric" | "sequence") => {
                ledger.fill(&format!("{a}.old_logprobs"), "recompute");
                let truncate = json!({"truncate": {"level": level, "max": max}});
                ledger.map(&enabled, &format!("{a}.rollout_correction"), truncate);
                ledger.fold_all(&[
                    (&level_key, "in `rollout_correction`"),
                    (&bound, "in `rollout_correction`"),
                ]);
            }
            _ => ledger.refuse(&enabled, "levels are token, geometric and sequence"),
        }
    }
    let off = "the correction is off";
    ledger.idle_all(&[
        (&enabled, "off"),
        (&level_key, off),
        (&bound, off),
        (&key("lower_bound"), "weights have an upper bound only"),
    ]);
    let filters = "train_infer_correction.filters";
    let is_on = |filter: &Value| filter.get("enabled").and_then(values::truth) == Some(true);
    match ledger.peek(filters) {
        Some(Value::Array(all)) if !all.iter().any(is_on) => ledger.idle(filters, "off"),
        _ => ledger.refuse_all(&[(filters, "see `algorithm.rollout_correction: mask`")]),
    }
    let recompute = "enable_old_logprobs_recompute";
    match ledger.truth(recompute) {
        Some(true) => ledger.map(recompute, &format!("{R}.algorithm.old_logprobs"), "recompute"),
        _ => ledger.idle_all(&[(recompute, "one engine does sampling and training")]),
    }
    ledger.idle_all(&[("force_disable_old_logprobs_recompute", "one engine does sampling and training")]);
}
