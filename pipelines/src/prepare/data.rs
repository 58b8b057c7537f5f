//! Data of a language model: reading them, and checks of their lengths.

use anyroll_config::error_chain::one_line;
use anyroll_config::{
    DataConfig, IlqlConfig, PipelineConfig, PrmConfig, RewardConfig, RewardTerm, RlvrConfig, Section, Turns,
};
use anyroll_data::{self, Counted, Dataset, Reading, Record, Tokenizer, TokenizerError};

use super::locate::give_data;
use super::texts::{LengthLimit, Policy, refuse_unread, without_messages};
use crate::opened::Opened;

/// Maximum number of prompts of an evaluation, since each is found by hashing candidates one by one.
const MOST_EVALUATED: usize = 1_000_000;

/// Default number of prompts of an evaluation; fewer if the data have fewer.
const USUALLY_EVALUATED: usize = 500;

/// Help for an invalid table.
const MEND_TABLE: &str =
    "write it anew: Parquet with Snappy, zstd or gzip, or Arrow with zstd, or either plain";

/// A pipeline's use of its data.
pub(super) struct Use<'a> {
    /// Held-out records of an evaluation, if the config sets their number; 0 without an evaluation.
    pub(super) evaluated: Option<usize>,
    /// Turns of conversations that are learnt.
    pub(super) turns: Turns,
    /// True if the answers of a pair are read separately.
    pub(super) unpaired: bool,
    /// The objective that reads solutions in steps; `None` for others.
    pub(super) prm: Option<&'a PrmConfig>,
    /// The objective that reads rewards; `None` for others.
    pub(super) ilql: Option<&'a IlqlConfig>,
}

/// Number of held-out records to evaluate, if the config asks for `asked` of them; `None` is the default.
pub(super) fn evaluated(asked: Option<usize>, dataset: &Dataset) -> usize {
    asked.unwrap_or_else(|| dataset.most_held_out(USUALLY_EVALUATED))
}

/// Writes the number of held-out records into the `pipeline` of a valid config, and returns it.
pub(super) fn fill(pipeline: &mut PipelineConfig, opened: &Opened) -> usize {
    let Some(dataset) = opened.dataset() else { return 0 };
    let prompts = match pipeline {
        PipelineConfig::Rlvr(rlvr) => &mut rlvr.evaluation.prompts,
        PipelineConfig::Offline(offline) => &mut offline.evaluation.prompts,
        PipelineConfig::Diffusion(_) => return 0,
    };
    *prompts.insert(evaluated(*prompts, dataset))
}

/// Number of `counted` tokens in a record. Without a published model's tokenizer a token is a character.
fn count(
    tokenizer: Option<&Tokenizer>,
    turns: Turns,
    record: &Record,
    counted: Counted,
) -> Result<usize, TokenizerError> {
    let of_answer = |record: &Record| match tokenizer {
        Some(tokenizer) => tokenizer.encode_answer(record).map(|tokens| tokens.len()),
        None => Ok(record.answer.chars().count() + 1),
    };
    match (counted, tokenizer) {
        (Counted::Prompt, Some(tokenizer)) => tokenizer.encode_prompt(record).map(|tokens| tokens.len()),
        (Counted::Prompt, None) => Ok(record.prompt.chars().count()),
        (Counted::Answer, _) => {
            let of_worse = record.rejected().as_ref().map(of_answer).transpose()?;
            Ok(of_answer(record)?.max(of_worse.unwrap_or(0)))
        }
        // The first token of a text has no context to be predicted from.
        (Counted::Unlearnt, _) if record.is_text() => Ok(1),
        (Counted::Unlearnt, Some(tokenizer)) if turns == Turns::All => {
            tokenizer.encode_turns(record).map(|(_, turns)| turns[0].start)
        }
        (Counted::Unlearnt, _) => count(tokenizer, turns, record, Counted::Prompt),
    }
}

/// [`count`] of a record with steps, whose answer ends at the last step's separator. A step is learnt at its
/// separator's last token.
fn count_steps(
    tokenizer: Option<&Tokenizer>,
    prm: &PrmConfig,
    record: &Record,
    counted: Counted,
) -> Result<usize, TokenizerError> {
    let prompt = count(tokenizer, Turns::Last, record, Counted::Prompt)?;
    let ends = match tokenizer {
        Some(tokenizer) => tokenizer.encode_steps(record, &prm.step_separator)?.1,
        None => {
            let after = prm.step_separator.chars().count();
            let steps = record.steps.iter().scan(prompt, |end, step| {
                *end += step.text.chars().count() + after;
                Some(*end)
            });
            steps.collect()
        }
    };
    let last = ends.len() - 1;
    Ok(match counted {
        Counted::Prompt => prompt,
        Counted::Answer => ends[last] - prompt,
        Counted::Unlearnt => ends[if prm.train_on_last_step_only { last } else { 0 }] - 1,
    })
}

/// Reads the data of the pipeline `at` for this use. Without a `policy` the length of records is not limited.
pub(super) fn open(
    data: &DataConfig,
    &Use { evaluated: asked, turns, unpaired, prm, ilql }: &Use,
    policy: Option<&Policy>,
    at: &Section,
) -> Option<Dataset> {
    let tokens = |record: &Record, counted: Counted| match policy {
        Some(policy) => match prm.filter(|_| !record.steps.is_empty()) {
            Some(prm) => count_steps(policy.tokenizer(), prm, record, counted),
            None => count(policy.tokenizer(), turns, record, counted),
        },
        None => Ok(0),
    };
    let step_separator = prm.map_or("", |prm| &prm.step_separator);
    let reading = Reading { tokens: &tokens, holds_out: asked != Some(0), step_separator };
    let dataset = match Dataset::open(data, reading) {
        Ok(dataset) => dataset,
        Err(error) => {
            refuse(&error, at);
            return None;
        }
    };
    let dataset = if unpaired { dataset.unpaired() } else { dataset };
    let dataset = match ilql {
        Some(ilql) => dataset.rewarded(ilql.normalize_rewards),
        None => dataset,
    };
    check_evaluated(asked, &dataset, at).then_some(dataset)
}

fn refuse(error: &anyroll_data::Error, at: &Section) {
    let give_files = give_data();
    let (name, help) = match error {
        anyroll_data::Error::Tokens(error) => return refuse_unread(error, &at.root()),
        anyroll_data::Error::LongRecord { .. } => {
            ("long_prompts", "write `leave_out`, or allow records as long as this one")
        }
        anyroll_data::Error::Line { .. } => {
            ("path", "mend it, or name its parts: `columns: {prompt: ..., answer: ...}`")
        }
        anyroll_data::Error::Table { .. } => ("path", MEND_TABLE),
        anyroll_data::Error::Format { .. } => {
            ("path", "rename it, or write its records in one of these formats")
        }
        anyroll_data::Error::Empty { rows: 0, .. } => {
            ("path", "give files with records; a line of JSON is one")
        }
        anyroll_data::Error::Empty { of_domains: 0, .. } => {
            ("domains", "name domains that the records have; `columns: {domain: ...}` names their column")
        }
        anyroll_data::Error::Empty { .. } => {
            ("path", "allow longer records, with `max_tokens`, `max_prompt_tokens` or `max_prompt_chars`")
        }
        anyroll_data::Error::AllHeldOut { .. } => {
            ("held_out", "name other files, or leave it out: a tenth is held out then, or `held_out_percent`")
        }
        anyroll_data::Error::Split { .. } if at.field("") == "pipeline.offline" => (
            "path",
            "add records, change `held_out_percent`, or hold none out with `evaluation: {prompts: 0}`",
        ),
        anyroll_data::Error::Split { .. } => ("path", "add records, or change `held_out_percent`"),
        anyroll_data::Error::Twice { .. } => ("path", "name it once"),
        _ => ("path", &*give_files),
    };
    at.refuse(&format!("data.file.{name}"), one_line(error), help);
}

/// Returns true if there are enough held-out records; by default one is enough. Otherwise reports a problem.
fn check_evaluated(asked: Option<usize>, dataset: &Dataset, at: &Section) -> bool {
    let field = "evaluation.prompts";
    let Some(asked) = asked else {
        let has_some = evaluated(None, dataset) > 0;
        let message = "no prompts are held out to evaluate";
        return at.ensure(has_some, field, message, "hold some out, or give larger data");
    };
    if asked > MOST_EVALUATED {
        let help = format!("write {MOST_EVALUATED} or fewer");
        return at.ensure(false, field, format!("{asked} are too many"), help);
    }
    let most = dataset.most_held_out(asked);
    at.ensure(
        most == asked,
        field,
        format!("{asked} held-out prompts are asked for, and there are {most}"),
        format!("write {most} or fewer, or leave it out"),
    )
}

/// Checks that the model can read the data, and that they fit. Returns the tokens of the longest sequence, or `None`
/// and a problem.
pub(super) fn check_lengths(
    rlvr: &RlvrConfig,
    policy: &Policy,
    dataset: &Dataset,
    at: &Section,
) -> Option<usize> {
    let writes_answers = writes_answers(rlvr);
    let (prompt, answer) = match policy.tokenizer() {
        None => {
            let dataset = without_messages(dataset, at)?;
            (dataset.longest_prompt(), if writes_answers { dataset.longest_answer() + 1 } else { 0 })
        }
        Some(tokenizer) => {
            let (mut prompt, mut answer) = (0, 0);
            let unread = |error: &TokenizerError| refuse_unread(error, at);
            for record in dataset.examples() {
                prompt = prompt.max(tokenizer.encode_prompt(&record).inspect_err(unread).ok()?.len());
                if writes_answers {
                    answer = answer.max(tokenizer.encode_answer(&record).inspect_err(unread).ok()?.len());
                }
            }
            (prompt, answer)
        }
    };
    let at = at.given(&["pipeline.rlvr.warmup.steps", "pipeline.rlvr.reward"]);
    let LengthLimit { max_length, why, .. } = policy.length_limit();
    let fits = |name: &str, new_tokens: usize| {
        let limit = format!("pipeline.rlvr.{name}");
        let is_enough = at.ensure(
            new_tokens >= answer,
            &limit,
            format!("the longest answer and its end are {answer} tokens, and only {new_tokens} are sampled"),
            format!("write {answer} or above"),
        );
        let sum = prompt.saturating_add(new_tokens);
        let (field, help) = remedy_of_length(policy, &limit, prompt, new_tokens);
        let fits = at.given(&[&limit]).ensure(
            sum <= max_length,
            field,
            format!(
                "the longest prompt is {prompt} tokens, and with `{name}`, {new_tokens}, it exceeds {max_length}{why}"
            ),
            help,
        );
        (is_enough && fits).then_some(sum)
    };
    let rollout = fits("rollout.max_new_tokens", rlvr.rollout.max_new_tokens);
    match rlvr.evaluation.max_new_tokens {
        Some(new_tokens) => fits("evaluation.max_new_tokens", new_tokens).and(rollout),
        None => rollout,
    }
}

/// Returns the field to change, and the fix, where the longest prompt and its new tokens exceed the model's length.
/// A published model has its length, so that its fix is in the limit or in the data.
fn remedy_of_length<'a>(
    policy: &Policy,
    limit: &'a str,
    prompt: usize,
    new_tokens: usize,
) -> (&'a str, String) {
    let LengthLimit { field, max_length, .. } = policy.length_limit();
    let shorter_prompts = |most: usize| {
        format!("write `max_prompt_tokens: {most}` beside the file's path, which leaves longer prompts out")
    };
    match policy {
        Policy::Made(_) => {
            (field, format!("write {} or above, or fewer new tokens", prompt.saturating_add(new_tokens)))
        }
        Policy::Published(_) if prompt < max_length => {
            let room = max_length - prompt;
            let help = match max_length.checked_sub(new_tokens).filter(|most| *most > 0) {
                Some(most) => format!("write {room} or fewer, or {}", shorter_prompts(most)),
                None => format!("write {room} or fewer"),
            };
            (limit, help)
        }
        Policy::Published(_) => {
            ("pipeline.rlvr.data", shorter_prompts(max_length.saturating_sub(new_tokens).max(1)))
        }
    }
}

/// Reports records without a reward.
pub(super) fn check_domains(rlvr: &RlvrConfig, dataset: &Dataset, at: &Section) {
    let RewardConfig::Sum(terms) = &rlvr.reward else { return };
    for domain in dataset.domains() {
        let has = |term: &RewardTerm| term.domains.is_empty() || term.domains.iter().any(|it| it == domain);
        at.given(&["reward"]).ensure(
            terms.iter().any(has),
            "reward",
            format!("no term is for the records of the domain `{domain}`"),
            "add it to a term's `domains`, or leave a term's `domains` out",
        );
    }
    if !at.is_config_sound() {
        return;
    }
    for (index, term) in terms.iter().enumerate() {
        for domain in term.domains.iter().filter(|domain| !dataset.domains().contains(domain.as_str())) {
            let term = format!("pipeline.rlvr.reward[{index}]");
            tracing::warn!(term, domain, "no record is of this domain, which the term is for");
        }
    }
}

/// Returns true if completions should be about as long as answers. The warm-up learns the answers, or the reward
/// compares with them.
fn writes_answers(rlvr: &RlvrConfig) -> bool {
    rlvr.warmup.as_ref().is_some_and(|warmup| warmup.steps > 0) || rlvr.reward.wants_answers()
}
