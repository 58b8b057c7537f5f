//! Importer of trlx's ILQL: the sections of [`trlx`] with the method `ilqlconfig`, which become an offline run.

use super::{ledger::Ledger, rules, trlx, values};

/// Pipeline of the imported configs.
const P: &str = "pipeline.offline";

const GREEDY: &str = "evaluations complete greedily; `anyroll generate` has options for sampling";

const IDLE: [(&str, &str); 9] = [
    ("train.seq_length", "records that do not fit the model are an error; `max_tokens` leaves them out"),
    ("method.gen_kwargs.max_new_tokens", "completions are as long as the longest answer at most"),
    ("method.gen_kwargs.max_length", "completions are as long as the longest answer at most"),
    ("method.gen_kwargs.top_k", GREEDY),
    ("method.gen_kwargs.top_p", GREEDY),
    ("method.gen_kwargs.temperature", GREEDY),
    ("method.gen_kwargs.do_sample", GREEDY),
    ("train.trainer_kwargs*", "the objective is `ilql`"),
    ("method.gen_experience_kwargs", "nothing is sampled for training"),
];

const REFUSED: [(&str, &str); 4] = [
    ("model.num_layers_unfrozen", "all layers are trained"),
    ("model.peft_config*", "a model with the heads of `ilql` has no adapters"),
    ("model.delta_kwargs*", "a model with the heads of `ilql` has no adapters"),
    ("method.gen_kwargs.logit_mask", "all tokens may be sampled"),
];

/// Returns true if the method is ILQL, and the trainer is no other one.
pub(super) fn is_ilql(ledger: &Ledger) -> bool {
    let is = |key: &str, name: &str| {
        let value = ledger.peek(key).filter(|value| !values::is_unset(value));
        value.map(|value| values::text(value).eq_ignore_ascii_case(name))
    };
    let names = [is("method.name", "ilqlconfig"), is("train.trainer", "accelerateilqltrainer")];
    names.contains(&Some(true)) && !names.contains(&Some(false))
}

pub(super) fn apply(ledger: &mut Ledger) {
    trlx::model(ledger);
    for key in ["method.name", "train.trainer"] {
        ledger.idle_all(&[(key, "the objective is `ilql`")]);
    }
    ledger.copy_number("train.seed", "seed");
    batches(ledger);
    rules::updates_to_steps(ledger, "train.total_steps", &format!("{P}.steps"), 1);
    rules::data_epochs(ledger, "train.epochs", &format!("{P}.steps"), "the number of `total_steps`");
    for (key, name) in [("checkpoint_interval", "checkpoint"), ("eval_interval", "evaluation")] {
        rules::updates_to_steps(ledger, &format!("train.{key}"), &format!("{P}.{name}.every"), 1);
    }
    trlx::optimizer(ledger, P);
    method(ledger);
    if ledger.number("model.num_layers_unfrozen") == Some(-1.0) {
        ledger.idle("model.num_layers_unfrozen", "all layers are trained");
    }
    ledger.idle_all(&IDLE);
    ledger.idle_all(&trlx::IDLE);
    ledger.refuse_all(&REFUSED);
}

/// trlx has batches for each process, and divides them into `minibatch_size` sequences.
fn batches(ledger: &mut Ledger) {
    let micro_batch = "strategy.micro_batch_size";
    rules::leave_unset(ledger, &["train.minibatch_size"]);
    rules::map_count(ledger, "train.minibatch_size", micro_batch, 1);
    let batch = rules::map_count(ledger, "train.batch_size", &format!("{P}.batch_size"), 1);
    ledger.fill(micro_batch, batch);
}

fn method(ledger: &mut Ledger) {
    let ilql = format!("{P}.objective.ilql");
    for name in ["tau", "gamma", "cql_scale", "awac_scale", "beta", "alpha"] {
        ledger.copy_number(&format!("method.{name}"), &format!("{ilql}.{name}"));
    }
    let key = "method.steps_for_target_q_sync";
    rules::map_count(ledger, key, &format!("{ilql}.steps_for_target_q_sync"), 1);
    ledger.flag("method.two_qs", &format!("{ilql}.two_qs"));
    let key = "method.gen_kwargs.beta";
    match ledger.peek(key) {
        Some(value) if values::number(value).is_none() => {
            ledger.refuse(
                key,
                "not a number: write one, and pass each of a list to `anyroll generate RUN --guidance`",
            );
        }
        _ => ledger.copy_number(key, &format!("{ilql}.guidance")),
    }
    ledger.fill(&format!("{ilql}.guidance"), 1);
}
