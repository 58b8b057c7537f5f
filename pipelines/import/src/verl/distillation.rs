//! verl's on-policy distillation: a teacher's divergence in the advantages, or as a term of the loss.

use serde_json::{Value, json};

use super::ACTOR;
use crate::{
    ledger::Ledger,
    shared::{DOWNLOAD, ONE_PLACE},
};

const ENABLED: &str = "distillation.enabled";
const TEACHERS: &str = "distillation.teacher_models.";

fn key(name: &str) -> String {
    format!("distillation.distillation_loss.{name}")
}

/// Returns true if a teacher is the only training signal: rewards then give no advantages.
pub(super) fn is_alone(ledger: &Ledger) -> bool {
    ledger.truth(ENABLED) == Some(true) && ledger.truth(&key("use_task_rewards")) == Some(false)
}

/// Imports the keys of `distillation`; the divergence goes into `a`, the algorithm.
pub(super) fn apply(ledger: &mut Ledger, a: &str) {
    if ledger.truth(ENABLED) == Some(true) {
        let defaults = [
            ("loss_mode", json!("k3")),
            ("use_policy_gradient", json!(false)),
            ("use_task_rewards", json!(true)),
            ("distillation_loss_coef", json!(1.0)),
        ];
        for (name, value) in defaults {
            ledger.assume(&[(&key(name), value)]);
        }
        teacher(ledger);
        loss(ledger, a);
    }
    ledger.idle_all(&[("distillation.*", "distillation is off")]);
}

/// The teacher, of which only one is supported.
fn teacher(ledger: &mut Ledger) {
    let is_path = |key: &&String| key.starts_with(TEACHERS) && key.ends_with(".model_path");
    let paths: Vec<String> = ledger.keys().filter(is_path).cloned().collect();
    for path in &paths {
        match (&paths[..], ledger.text(path)) {
            ([_], Some(name)) => ledger.change(path, "roles.reference.path", name, DOWNLOAD),
            _ => ledger.refuse(path, "only one teacher is supported, `roles.reference.path`"),
        }
    }
    ledger.idle_all(&[
        (&format!("{TEACHERS}*"), "the teacher uses the policy's strategy, or `roles.reference.strategy`"),
        ("distillation.n_gpus_per_node", ONE_PLACE),
        ("distillation.nnodes", ONE_PLACE),
        ("distillation.teacher_key", "only one teacher is supported"),
    ]);
}

fn loss(ledger: &mut Ledger, a: &str) {
    let [mode, policy_gradient, rewards, coef] =
        ["loss_mode", "use_policy_gradient", "use_task_rewards", "distillation_loss_coef"].map(key);
    let (field, weight) = (format!("{a}.kl_in"), format!("{a}.kl_coef"));
    let as_advantage = ledger.truth(&policy_gradient) == Some(true);
    let estimator = match ledger.text(&mode).as_deref() {
        Some("kl" | "k1") => Some("k1"),
        Some("mse" | "k2") => Some("k2"),
        Some("low_var_kl" | "k3") => Some("k3"),
        _ => None,
    };
    match (estimator, as_advantage) {
        (Some("k1"), true) => {
            ledger.map(&mode, &field, "advantage");
            ledger.fold(&policy_gradient, "in `kl_in`");
        }
        (Some(estimator @ ("k2" | "k3")), false) => {
            ledger.map(&mode, &field, json!({"loss": {"estimator": estimator}}));
            ledger.fold(&policy_gradient, "in `kl_in`");
        }
        (_, true) => ledger.refuse(&mode, "the divergence of a teacher in advantages is k1"),
        (_, false) => {
            ledger.refuse(&mode, "in the loss a teacher's divergence is k2 or k3 of the sampled tokens")
        }
    }
    match ledger.truth(&rewards) {
        Some(false) => {
            ledger.fold(&rewards, "the advantage is `none`");
            ledger.map(&coef, &weight, 1);
        }
        _ => {
            let why = "added to the rewards' advantages, and clipped with them";
            ledger.fold(&rewards, if as_advantage { why } else { "added to the rewards' advantages" });
            ledger.copy_number(&coef, &weight);
        }
    }
    for name in ["loss_max_clamp", "log_prob_min_clamp"] {
        let key = key(name);
        match ledger.number(&key) {
            Some(_) => ledger.fold(&key, "log-probs and their differences are not clamped"),
            None => ledger.idle_all(&[(&key, "off")]),
        }
    }
    for clip in ["clip_ratio", "clip_ratio_low", "clip_ratio_high"] {
        let of_policy =
            ledger.number(&format!("{ACTOR}.{clip}")).or(ledger.number(&format!("{ACTOR}.clip_ratio")));
        match (ledger.number(&key(clip)), of_policy) {
            (Some(clip_here), Some(usual)) if clip_here != usual && as_advantage => {
                ledger.refuse(&key(clip), "all advantages share one clip: set `algorithm.loss`");
            }
            _ => ledger.idle_all(&[(&key(clip), "the policy's clip")]),
        }
    }
    let policy_loss = key("policy_loss_mode");
    match ledger.peek(&policy_loss) {
        Some(Value::String(mode)) if mode != "vanilla" => {
            ledger.refuse(&policy_loss, "verl supports only vanilla")
        }
        _ => ledger.idle_all(&[(&policy_loss, "the policy's loss")]),
    }
    for name in ["topk", "use_chunked_topk", "chunked_topk_chunk_size"] {
        ledger.idle_all(&[(&key(name), "only for losses over whole distributions")]);
    }
}
