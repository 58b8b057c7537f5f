//! Checks of the records and their lengths for an offline objective.

use anyroll_config::{OfflineConfig, PipelineConfig, PrmConfig, Section};
use anyroll_data::{Dataset, Record};

use super::data::evaluated;
use super::texts::{LengthLimit, Policy, refuse_unread, without_messages};
use crate::offline::read;
use crate::opened::Opened;

/// Number of held-out records whose prompts the policy could complete in an evaluation.
fn to_complete(offline: &OfflineConfig, dataset: &Dataset) -> usize {
    let records = dataset.held_out(evaluated(offline.evaluation.prompts, dataset)).unwrap_or_default();
    records.iter().filter(|record| record.is_to_complete()).count()
}

/// Writes the number of prompts that an evaluation completes into the `pipeline` of a valid config, and returns it.
pub(super) fn fill(pipeline: &mut PipelineConfig, opened: &Opened) -> usize {
    let (PipelineConfig::Offline(offline), Some(dataset)) = (pipeline, opened.dataset()) else { return 0 };
    let completions = offline.completions_of(to_complete(offline, dataset));
    *offline.evaluation.completions.insert(completions)
}

/// Checks that every record has the fields of the objective and fits into the model. Returns the tokens of the
/// longest sequence, or `None` and a problem.
pub(super) fn check(
    offline: &OfflineConfig,
    policy: &Policy,
    dataset: &Dataset,
    root: &Section,
) -> Option<usize> {
    let at = root.below("pipeline.offline").given(&["objective"]);
    let examples = dataset.examples();
    let lacks = |record: &&Record| record.rejected.is_none();
    if let Some(record) = examples.iter().find(lacks).filter(|_| offline.objective.compares()) {
        at.refuse(
            "data",
            format!("record {} has no worse answer to compare with", record.id),
            "name its column, `columns: {answer: chosen, rejected: rejected}`, or write `objective: sft`",
        );
        return None;
    }
    check_steps(offline, &examples, &at)?;
    check_answers(offline, &examples, &at);
    check_rewards(offline, &examples, &at)?;
    check_labels(offline, &examples, &at);
    let warms_up = offline.warmup.as_ref().is_some_and(|warmup| warmup.steps > 0);
    at.given(&["data"]).ensure(
        !warms_up || offline.objective.judged().is_none() || dataset.desirable().is_some(),
        "warmup",
        "it learns desirable answers, and a source of the data has none",
        "leave it out, or add some",
    );
    let records = evaluated(offline.evaluation.prompts, dataset);
    let prompts = to_complete(offline, dataset);
    let completions = offline.completions_of(prompts);
    at.ensure(
        completions <= prompts,
        "evaluation.completions",
        format!(
            "{completions} completions are asked for, and {prompts} of the {records} held-out records can be completed"
        ),
        format!("write {prompts} or fewer, or more `evaluation.prompts`"),
    );
    let longest = match policy.tokenizer() {
        None => without_messages(dataset, root)?.longest_record() + 1,
        Some(tokenizer) => {
            let read = read(tokenizer, &offline.objective, offline.turns, &examples);
            let sequences = read.inspect_err(|error| refuse_unread(error, root)).ok()?;
            sequences.iter().map(|it| it.tokens.len()).max().unwrap_or(0)
        }
    };
    let LengthLimit { field, max_length, why } = policy.length_limit();
    let root = root.given(&["pipeline.offline.objective", "pipeline.offline.turns", "pipeline.offline.data"]);
    let fits = root.ensure(
        longest <= max_length,
        field,
        format!(
            "the longest prompt with its answer is {longest} tokens, and it has room for {max_length}{why}"
        ),
        format!(
            "allow {longest} or above, or write `max_tokens: {max_length}` beside the file's path, which leaves longer \
             records out; with `long_prompts: {{truncate: keep_start}}` it cuts them"
        ),
    );
    fits.then_some(longest)
}

/// Reports steps that the objective does not read, and missing ones that it does. Warns of steps that a reward would
/// divide. Returns `None` after a problem.
fn check_steps(offline: &OfflineConfig, examples: &[Record], at: &Section) -> Option<()> {
    let prm = offline.objective.prm();
    if let Some(record) = examples.iter().find(|record| record.steps.is_empty() == prm.is_some()) {
        let (message, help) = match prm {
            Some(_) => (
                "has no labelled steps",
                "name a file with them and their columns, `columns: {steps: completions, step_labels: labels}`",
            ),
            None => (
                "has labelled steps, and the objective reads none",
                "leave `columns.steps` and `columns.step_labels` out, or write `objective: {prm: {}}`",
            ),
        };
        at.refuse("data", format!("record {} {message}", record.id), help);
        return None;
    }
    let Some(PrmConfig { step_separator, .. }) = prm.filter(|_| at.is_config_sound()) else {
        return Some(());
    };
    let is_divided = |record: &&Record| record.steps.iter().any(|step| step.text.contains(step_separator));
    let divided: Vec<&Record> = examples.iter().filter(is_divided).collect();
    if let Some(first) = divided.first() {
        let (records, first) = (divided.len(), &first.id);
        tracing::warn!(
            records,
            first,
            "steps contain the `step_separator`: as a reward the model reads each of these as several steps"
        );
    }
    let labels = || examples.iter().flat_map(|record| &record.steps).map(|step| step.label);
    if labels().all(|label| label > 0.5) || labels().all(|label| label <= 0.5) {
        tracing::warn!("the labels of all steps are of one kind: nothing is held against them");
    }
    Some(())
}

/// Reports rewards that the objective does not read, and missing ones that it does. Warns of rewards that are all the
/// same. Returns `None` after a problem.
fn check_rewards(offline: &OfflineConfig, examples: &[Record], at: &Section) -> Option<()> {
    let reads = offline.objective.ilql().is_some();
    if let Some(record) = examples.iter().find(|record| record.reward.is_some() != reads) {
        let (message, help) = match reads {
            true => (
                "has no reward",
                "name the column of its answer's reward, `columns: {reward: reward}`, that of a label, or that of a \
                 worse answer",
            ),
            false => (
                "has a reward, and the objective reads none",
                "leave `columns.reward` out, or write `objective: {ilql: {}}`",
            ),
        };
        at.refuse("data", format!("record {} {message}", record.id), help);
        return None;
    }
    if reads && at.is_config_sound() && examples.iter().all(|record| record.reward == examples[0].reward) {
        tracing::warn!("the rewards of all answers are the same: nothing is held against them");
    }
    Some(())
}

/// Reports labels that the objective does not read, and missing ones that it does. Warns of weights that do not
/// balance the labels.
fn check_labels(offline: &OfflineConfig, examples: &[Record], at: &Section) {
    if offline.objective.ilql().is_some() {
        return; // a label is a reward
    }
    let judged = offline.objective.judged();
    if let Some(record) = examples.iter().find(|record| record.desirable.is_some() != judged.is_some()) {
        let (message, help) = match judged {
            Some(_) => (
                "does not say whether its answer is desirable",
                "name the column that does, `columns: {answer: completion, label: label}`, or that of a worse \
                 answer, `columns: {answer: chosen, rejected: rejected}`",
            ),
            None => (
                "has a label, and the objective reads none",
                "leave `columns.label` out, or write `objective: {kto: {}}`",
            ),
        };
        at.refuse("data", format!("record {} {message}", record.id), help);
        return;
    }
    let Some(weights) = judged.filter(|_| at.is_config_sound()) else { return };
    let desirable = examples.iter().filter(|record| record.desirable == Some(true)).count();
    let undesirable = examples.len() - desirable;
    if desirable == 0 || undesirable == 0 {
        tracing::warn!(desirable, undesirable, "all answers are of one kind: nothing is held against them");
    } else if desirable != undesirable {
        // Recommended by TRL's KTOTrainer.
        let balance =
            weights.desirable_weight * desirable as f64 / (weights.undesirable_weight * undesirable as f64);
        if !(1.0..=4.0 / 3.0).contains(&balance) {
            tracing::warn!(
                desirable,
                undesirable,
                balance,
                "weights are best where desirable_weight x desirable is 1 to 4/3 of undesirable_weight x undesirable"
            );
        }
    }
}

/// Warns of empty answers, and of pairs with equal answers; reports data in which all pairs are equal.
fn check_answers(offline: &OfflineConfig, examples: &[Record], at: &Section) {
    let empty: Vec<&Record> = examples.iter().filter(|record| record.answer.is_empty()).collect();
    if let Some(first) = empty.first().filter(|_| at.is_config_sound()) {
        let (records, first) = (empty.len(), &first.id);
        tracing::warn!(records, first, "answers are empty: what they teach is to end at once");
    }
    let is_equal = |record: &&Record| record.rejected.as_ref() == Some(&record.answer);
    let equal: Vec<&Record> = examples.iter().filter(is_equal).collect();
    let Some(first) = equal.first().filter(|_| offline.objective.compares()) else { return };
    let (records, id) = (equal.len(), &first.id);
    let teaches = at.ensure(
        records < examples.len(),
        "data",
        "in every record the better answer and the worse one are the same",
        "name another column for one of them, `columns: {answer: chosen, rejected: rejected}`",
    );
    if teaches && at.is_config_sound() {
        tracing::warn!(
            records,
            first = id,
            "the better answer and the worse one are the same: nothing is compared"
        );
    }
}
