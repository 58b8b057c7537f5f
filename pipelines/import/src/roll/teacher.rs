//! ROLL's on-policy distillation: a teacher's divergence instead of rewards, or in addition to them.

use crate::{
    ledger::Ledger,
    shared::{DOWNLOAD, ONE_PLACE},
};

/// Renames the student's sections to those of a run without a teacher. Returns true if these exist, or the
/// config says so: the teacher is then the only training signal.
pub(super) fn is_alone(ledger: &mut Ledger) -> bool {
    let roles = [("student_train.", "actor_train."), ("student_infer.", "actor_infer.")];
    let renamed = |key: &String| {
        let (old, new) = roles.iter().find(|(old, _)| key.starts_with(old))?;
        Some((key.clone(), key.replacen(old, new, 1)))
    };
    let names: Vec<(String, String)> = ledger.keys().filter_map(renamed).collect();
    let pairs: Vec<(&str, &str)> = names.iter().map(|(old, new)| (&**old, &**new)).collect();
    ledger.rename(&pairs);
    !names.is_empty() || ledger.truth("is_pure_opd") == Some(true)
}

/// Returns true if there is a teacher: `alone`, or in addition to rewards.
pub(super) fn has_teacher(ledger: &Ledger, alone: bool) -> bool {
    alone || ledger.truth("use_opd") == Some(true)
}

/// The teacher, and its divergence in the advantages of `algorithm`.
pub(super) fn apply(ledger: &mut Ledger, algorithm: &str, alone: bool) {
    let (kl_in, coef) = (format!("{algorithm}.kl_in"), format!("{algorithm}.kl_coef"));
    for key in ["is_pure_opd", "use_opd"] {
        match ledger.truth(key) {
            Some(true) => ledger.map(key, &kl_in, "advantage"),
            Some(false) => ledger.idle(key, "off"),
            None => {}
        }
    }
    ledger.fill(&kl_in, "advantage");
    if alone {
        let why = "only the teacher's divergence";
        ledger.change("adv_estimator", &format!("{algorithm}.advantage"), "none", why);
        ledger.idle_all(&[("gamma", why), ("lambd", why), ("pure_opd_pipeline_type", why)]);
    }
    ledger.copy_number("teacher.opd_kl_coef", &coef);
    ledger.fill(&coef, 1);
    let model = "teacher.model_args.model_name_or_path";
    if let Some(name) = ledger.text(model) {
        ledger.change(model, "roles.reference.path", name, DOWNLOAD);
    }
    match ledger.text("kl_penalty").as_deref() {
        Some("kl") => ledger.idle("kl_penalty", "k1"),
        Some(_) => ledger.refuse("kl_penalty", "the divergence of a teacher is k1"),
        None => {}
    }
    ledger.idle_all(&[
        ("init_kl_coef", "the teacher has its own coefficient"),
        ("teacher.device_mapping", ONE_PLACE),
        ("teacher.infer_batch_size", "scoring uses `strategy.micro_batch_size`"),
        ("teacher.model_args.*", "the teacher uses the policy's strategy, or `roles.reference.strategy`"),
        ("teacher.strategy_args*", "the teacher uses the policy's strategy, or `roles.reference.strategy`"),
        ("teacher.sequence_packing_args*", "sequences are always packed"),
        ("teacher.use_sequence_packing", "sequences are always packed"),
    ]);
}
