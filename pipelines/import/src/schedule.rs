//! Learning-rate schedules under their `transformers` names.

use serde_json::{Value, json};

use super::{ledger::Ledger, values};

/// Keys of a foreign schedule, and the ratio of its steps to ours.
pub(super) struct Schedule<'a> {
    /// Pipeline that it is for.
    pub(super) pipeline: &'a str,
    /// Key of the schedule's name.
    pub(super) name: &'a str,
    /// Keys of the warm-up's steps, and of its share of all steps.
    pub(super) warmup: [&'a str; 2],
    /// Key of the final rate, as a ratio to the peak.
    pub(super) final_ratio: &'a str,
    /// Foreign steps in one step of ours.
    pub(super) updates_per_step: u64,
}

impl Schedule<'_> {
    pub(super) fn apply(&self, ledger: &mut Ledger) {
        let Some(name) = ledger.text(self.name) else { return };
        let kind = match name.to_ascii_lowercase().as_str() {
            "constant" | "constant_with_warmup" => "constant",
            "linear" => "linear",
            "cosine" | "cosine_with_min_lr" | "cosine_annealing" => "cosine",
            _ => {
                return ledger.refuse(self.name, "must be constant, linear or cosine, with a warm-up");
            }
        };
        self.warmup_steps(ledger, kind);
        let ratio = self.field(kind, "final_ratio");
        match kind {
            _ if ledger.peek(self.final_ratio).is_none() => {}
            "constant" => ledger.idle(self.final_ratio, "a constant rate does not decay"),
            _ => ledger.copy_number(self.final_ratio, &ratio),
        }
        ledger.map(self.name, &self.field(kind, "warmup_steps"), self.known_warmup(ledger, kind));
    }

    fn field(&self, kind: &str, name: &str) -> String {
        format!("{}.optimizer.schedule.{kind}.{name}", self.pipeline)
    }

    fn known_warmup(&self, ledger: &Ledger, kind: &str) -> Value {
        ledger.draft(&self.field(kind, "warmup_steps")).cloned().unwrap_or(json!(0))
    }

    fn warmup_steps(&self, ledger: &mut Ledger, kind: &str) {
        let [steps_key, ratio_key] = self.warmup;
        let field = self.field(kind, "warmup_steps");
        let steps = ledger.whole(steps_key);
        // transformers reads a number below 1 as a share of the steps.
        let is_share = ledger.number(steps_key).is_some_and(|steps| steps > 0.0 && steps < 1.0);
        if is_share {
            warmup_share(ledger, steps_key, &field, None);
        } else if ledger.peek(steps_key).is_some() {
            match (steps, self.updates_per_step) {
                (None, _) => ledger.refuse(steps_key, "not an integer"),
                (Some(0), _) => ledger.idle(steps_key, "none"),
                (Some(steps), 1) => ledger.map(steps_key, &field, steps),
                (Some(steps), updates) => {
                    let ours = steps.div_ceil(updates);
                    ledger.change(steps_key, &field, ours, format!("{updates} updates are one step here"));
                }
            }
        }
        if ledger.peek(ratio_key).is_some() {
            warmup_share(ledger, ratio_key, &field, steps);
        }
    }
}

/// The warm-up as a share of all steps from `key`, unless `steps` are set.
fn warmup_share(ledger: &mut Ledger, key: &str, field: &str, steps: Option<u64>) {
    match (ledger.number(key), steps) {
        (Some(0.0), _) => ledger.idle(key, "none"),
        (Some(_), Some(1..)) => ledger.idle(key, "the warm-up's steps are set as well"),
        (Some(share), _) => ledger.map(key, field, json!({"share": values::json(share)})),
        (None, _) => ledger.refuse(key, "not a number"),
    }
}
