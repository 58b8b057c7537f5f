//! Learning-rate schedules by the names that `transformers` gave them.

use serde_json::{Value, json};

use super::{ledger::Ledger, values};

/// Foreign schedule keys, and how many of its steps are one of ours.
pub(super) struct Schedule<'a> {
    /// The pipeline that it is for.
    pub(super) pipeline: &'a str,
    /// The key of the name.
    pub(super) name: &'a str,
    /// The key of the warm-up's steps, and of its share of all steps.
    pub(super) warmup: [&'a str; 2],
    /// The key of what is left of the peak at the end, as a ratio.
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
                return ledger
                    .refuse(self.name, "schedules here are constant, linear and cosine, with a warm-up");
            }
        };
        self.warmup_steps(ledger, kind);
        let ratio = self.field(kind, "final_ratio");
        match kind {
            _ if ledger.peek(self.final_ratio).is_none() => {}
            "constant" => ledger.idle(self.final_ratio, "a constant rate does not fall"),
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
        // transformers takes a number below 1 for a share of the steps.
        let is_share = ledger.number(steps_key).is_some_and(|steps| steps > 0.0 && steps < 1.0);
        if is_share {
            warmup_share(ledger, steps_key, &field, None);
        } else if ledger.peek(steps_key).is_some() {
            match (steps, self.updates_per_step) {
                (None, _) => ledger.refuse(steps_key, "not a whole number"),
                (Some(0), _) => ledger.idle(steps_key, "none"),
                (Some(steps), 1) => ledger.map(steps_key, &field, steps),
                (Some(steps), updates) => {
                    let ours = steps.div_ceil(updates);
                    ledger.change(steps_key, &field, ours, format!("{updates} updates make a step of ours"));
                }
            }
        }
        if ledger.peek(ratio_key).is_some() {
            warmup_share(ledger, ratio_key, &field, steps);
        }
    }
}

/// The share of all steps that `key` says, unless `steps` are given.
fn warmup_share(ledger: &mut Ledger, key: &str, field: &str, steps: Option<u64>) {
    match (ledger.number(key), steps) {
        (Some(0.0), _) => ledger.idle(key, "none"),
        (Some(_), Some(1..)) => ledger.idle(key, "the warm-up's steps are given as well"),
        (Some(share), _) => ledger.map(key, field, json!({"share": values::json(share)})),
        (None, _) => ledger.refuse(key, "not a number"),
    }
}
