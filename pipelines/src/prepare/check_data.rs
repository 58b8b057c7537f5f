//! What must hold for data, and between data and a language model.

use anyroll_models::hf::ModelFolder;

use super::check::Check;
use crate::config::{
    Config, DataConfig, FileConfig, FolderConfig, LongPrompts, MixedConfig, ModelConfig, PipelineConfig,
    Problem, RewardConfig, RewardTerm, RlvrConfig, Turns,
};
use crate::data::{self, Counted, Dataset, Reading, Record, Tokenizer, TokenizerError};
use crate::error_chain::one_line;

/// Prompts of an evaluation; their count is found by hashing candidates one by one.
const MOST_EVALUATED: usize = 1_000_000;

/// Prompts of an evaluation where the config does not say how many, if there are as many.
const USUALLY_EVALUATED: usize = 500;

/// What to do about a model's folder that cannot be used.
const MEND_FOLDER: &str =
    "mend the folder; `model.chat: false` gives prompts as they are, without a chat template";

/// What to do about prompts that are messages.
const TEXTS_OR_CHAT: &str =
    "give a model's folder with `chat: true`, or name a column of texts: `columns: {prompt: ...}`";

/// What to do about files that are not there.
const GIVE_FILES: &str =
    "give the path of a .jsonl, .parquet or .arrow file; a relative one starts at the current folder";

/// What to do about a table that is none.
const MEND_TABLE: &str =
    "write it anew: Parquet with Snappy, zstd or gzip, or Arrow with zstd, or either plain";

/// What a pipeline does with its data.
pub(super) struct Use {
    /// Held-out records that are evaluated, where the config says how many; 0 if there is no evaluation.
    pub(super) evaluated: Option<usize>,
    /// What is learnt of conversations.
    pub(super) turns: Turns,
    /// Whether a pair's answers are read each by itself.
    pub(super) unpaired: bool,
}

/// How many held-out records are evaluated if the config asks for so many, or does not say.
pub(super) fn evaluated(asked: Option<usize>, dataset: &Dataset) -> usize {
    asked.unwrap_or_else(|| dataset.most_held_out(USUALLY_EVALUATED))
}

/// Writes how many held-out records are evaluated into a `config` that is checked.
pub(super) fn settle(config: &mut Config, dataset: &Dataset) {
    let prompts = match &mut config.pipeline {
        PipelineConfig::Rlvr(rlvr) => &mut rlvr.evaluation.prompts,
        PipelineConfig::Offline(offline) => &mut offline.evaluation.prompts,
        PipelineConfig::Diffusion(_) => return,
    };
    *prompts = Some(evaluated(*prompts, dataset));
}

/// How many tokens of a record are `counted`. Without a published model's tokenizer a token is a character.
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
        // A text's first token follows from nothing.
        (Counted::Unlearnt, _) if record.is_text() => Ok(1),
        (Counted::Unlearnt, Some(tokenizer)) if turns == Turns::All => {
            tokenizer.encode_turns(record).map(|(_, turns)| turns[0].start)
        }
        (Counted::Unlearnt, _) => count(tokenizer, turns, record, Counted::Prompt),
    }
}

impl Check<'_> {
    /// The data of the pipeline at `path`, which does this with them. `tokenizer` is a published model's.
    pub(super) fn data(
        &self,
        path: &str,
        data: &DataConfig,
        Use { evaluated: asked, turns, unpaired }: Use,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Dataset, Problem> {
        let field = |name: &str| format!("{path}.{name}");
        self.data_ranges(&field("data"), data)?;
        let tokens = |record: &Record, counted: Counted| count(tokenizer, turns, record, counted);
        let reading = Reading { tokens: &tokens, holds_out: asked != Some(0) };
        let dataset = Dataset::open(data, reading).map_err(|error| {
            let (name, help) = match error {
                data::Error::Tokens(error) => return self.not_read(&error),
                data::Error::LongRecord { .. } => {
                    ("long_prompts", "write `leave_out`, or allow records as long as this one")
                }
                data::Error::Line { .. } => {
                    ("path", "mend it, or name its parts: `columns: {prompt: ..., answer: ...}`")
                }
                data::Error::Table { .. } => ("path", MEND_TABLE),
                data::Error::Format { .. } => ("path", "give files whose names end so"),
                data::Error::Split { .. } if path == "pipeline.offline" => (
                    "path",
                    "add records, change `held_out_percent`, or hold none out with `evaluation: {prompts: 0}`",
                ),
                data::Error::Split { .. } => ("path", "add records, or change `held_out_percent`"),
                data::Error::Twice { .. } => ("path", "name it once"),
                _ => ("path", GIVE_FILES),
            };
            self.problem(&field(&format!("data.file.{name}")), one_line(&error), help)
        })?;
        let dataset = if unpaired { dataset.unpaired() } else { dataset };
        self.evaluated(&field("evaluation.prompts"), asked, &dataset)?;
        Ok(dataset)
    }

    /// Whether there are as many held-out records as `field` asks for, or any at all if it does not say.
    fn evaluated(&self, field: &str, asked: Option<usize>, dataset: &Dataset) -> Result<(), Problem> {
        let Some(asked) = asked else {
            return self.ensure(
                evaluated(None, dataset) > 0,
                field,
                "no prompts are held out to evaluate",
                "hold some out, or give larger data",
            );
        };
        self.ensure(
            asked <= MOST_EVALUATED,
            field,
            format!("{asked} are too many"),
            format!("write {MOST_EVALUATED} or fewer"),
        )?;
        let most = dataset.most_held_out(asked);
        self.ensure(
            most == asked,
            field,
            format!("{asked} held-out prompts are asked for, and there are {most}"),
            format!("write {most} or fewer, or leave it out"),
        )
    }

    /// Whether the model has room for the data, and can read them; returns the most tokens of a sequence.
    pub(super) fn data_and_model(
        &self,
        config: &Config,
        rlvr: &RlvrConfig,
        published: Option<&(Tokenizer, ModelFolder)>,
        dataset: &Dataset,
    ) -> Result<usize, Problem> {
        if rlvr.rollout.merge_adapters {
            self.merging(config, rlvr)?;
        }
        match (&config.model, published) {
            (ModelConfig::Decoder(decoder), _) => {
                self.texts(&dataset.examples())?;
                let answer = if writes_answers(rlvr) { dataset.longest_answer() + 1 } else { 0 };
                let lengths = (dataset.longest_prompt(), answer);
                self.lengths(rlvr, lengths, ("model.decoder.max_length", decoder.max_length, ""))
            }
            (ModelConfig::Folder(model), Some((tokenizer, folder))) => {
                let longest = self.tokens(rlvr, tokenizer, folder, dataset)?;
                match &model.lora {
                    Some(lora) => {
                        self.ensure(
                            !rlvr.rollout.strict || lora.dropout == 0.0,
                            "model.lora.dropout",
                            "training drops values and sampling does not, and `rollout.strict` wants them equal",
                            "leave one of the two out",
                        )?;
                        self.ensure(
                            rlvr.share_prompts != Some(true) || lora.dropout == 0.0,
                            "pipeline.rlvr.share_prompts",
                            "adapters drop values of a prompt, for each of its samples others",
                            "leave it out, or `model.lora.dropout`",
                        )?;
                        self.lora(lora, folder, &config.roles.reference)?;
                        Ok(longest)
                    }
                    None => Ok(longest),
                }
            }
            _ => unreachable!("a folder was opened, and a model of images refused"),
        }
    }

    /// Whether there is something to merge, and nothing wants training's own bits.
    fn merging(&self, config: &Config, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let field = "pipeline.rlvr.rollout.merge_adapters";
        let has_adapters = matches!(&config.model, ModelConfig::Folder(folder) if folder.lora.is_some());
        let help = "leave it out, or give the model some by `model.lora`";
        self.ensure(has_adapters, field, "the model has no adapters", help)?;
        self.ensure(
            !rlvr.rollout.strict,
            field,
            "`rollout.strict` wants the log-probs of training, which does not merge, and merged weights round otherwise",
            "leave one of the two out",
        )
    }

    /// A model of characters reads no messages.
    pub(super) fn texts(&self, records: &[Record]) -> Result<(), Problem> {
        let messages = records.iter().find(|record| !record.messages.is_empty());
        messages.map_or(Ok(()), |record| {
            let error = TokenizerError::Messages { record: record.id.clone() };
            Err(self.problem("model.decoder", one_line(&error), TEXTS_OR_CHAT))
        })
    }

    pub(super) fn tokenizer(&self, model: &FolderConfig, folder: &ModelFolder) -> Result<Tokenizer, Problem> {
        Tokenizer::of_folder(folder, model).map_err(|error| self.not_read(&error))
    }

    /// A published model's tokenizer cannot read the data.
    pub(super) fn not_read(&self, error: &TokenizerError) -> Problem {
        match error {
            TokenizerError::Messages { .. } => self.problem("model.chat", one_line(error), TEXTS_OR_CHAT),
            _ => self.problem("model.path", one_line(error), MEND_FOLDER),
        }
    }

    /// Whether a published model's tokenizer can read the data, and the model has room for them, as [`Self::lengths`].
    fn tokens(
        &self,
        rlvr: &RlvrConfig,
        tokenizer: &Tokenizer,
        folder: &ModelFolder,
        dataset: &Dataset,
    ) -> Result<usize, Problem> {
        let refused = |error: TokenizerError| self.not_read(&error);
        let (mut prompt, mut answer) = (0, 0);
        for record in dataset.examples() {
            prompt = prompt.max(tokenizer.encode_prompt(&record).map_err(refused)?.len());
            if writes_answers(rlvr) {
                answer = answer.max(tokenizer.encode_answer(&record).map_err(refused)?.len());
            }
        }
        let model = folder.decoder_config();
        let max_length = model.max_position_embeddings as usize;
        self.lengths(rlvr, (prompt, answer), ("model.path", max_length, model.why_no_longer()))
    }

    /// Whether the longest prompt and the longest answer to write fit: `max_length` is a field, how many tokens it
    /// allows, and why no more. Returns the most tokens of a prompt and a completion.
    fn lengths(
        &self,
        rlvr: &RlvrConfig,
        (prompt, answer): (usize, usize),
        (field, max_length, why): (&str, usize, &str),
    ) -> Result<usize, Problem> {
        let new_tokens = rlvr.rollout.max_new_tokens;
        self.ensure(
            new_tokens >= answer,
            "pipeline.rlvr.rollout.max_new_tokens",
            format!("the longest answer and its end are {answer} tokens, and only {new_tokens} are sampled"),
            format!("write {answer} or above"),
        )?;
        let sum = prompt + new_tokens;
        self.ensure(
            sum <= max_length,
            field,
            format!(
                "the longest prompt is {prompt} tokens, and with `rollout.max_new_tokens`, {new_tokens}, \
                 it exceeds {max_length}{why}"
            ),
            format!("write {sum} or above, or fewer new tokens"),
        )?;
        Ok(sum)
    }

    fn data_ranges(&self, path: &str, data: &DataConfig) -> Result<(), Problem> {
        let (name, value, range) = match data {
            DataConfig::Sort(sort) => ("sort.digits", sort.digits, 2..=18),
            DataConfig::Addition(addition) => ("addition.digits", addition.digits, 1..=9),
            DataConfig::Countdown(countdown) => ("countdown.numbers", countdown.numbers, 2..=5),
            DataConfig::File(file) => {
                self.file_data(&format!("{path}.file"), file)?;
                ("file.held_out_percent", file.held_out_percent.unwrap_or(1), 1..=99)
            }
            DataConfig::Mix(sources) => return self.mix(&format!("{path}.mix"), sources),
        };
        self.ensure(
            range.contains(&value),
            &format!("{path}.{name}"),
            format!("{value} is out of range"),
            format!("write a whole number from {} to {}", range.start(), range.end()),
        )
    }

    fn file_data(&self, path: &str, file: &FileConfig) -> Result<(), Problem> {
        let help = "name a file, such as `train.jsonl`";
        self.ensure(!file.path.0.is_empty(), &format!("{path}.path"), "the list is empty", help)?;
        if let Some(held_out) = &file.held_out {
            let field = format!("{path}.held_out");
            self.ensure(!held_out.0.is_empty(), &field, "the list is empty", help)?;
            let message = "with `held_out` none of these prompts is";
            let percent = format!("{path}.held_out_percent");
            self.ensure(file.held_out_percent.is_none(), &percent, message, "leave one of the two out")?;
        }
        self.ensure(
            file.domains.is_empty() || file.columns.named().domain.is_some(),
            &format!("{path}.domains"),
            "its records have no domain",
            "name the column that has it: `columns: {domain: ...}`",
        )?;
        let columns = file.columns.named();
        self.ensure(
            columns.text.is_none() || (columns.rejected.is_none() && columns.label.is_none()),
            &format!("{path}.columns.text"),
            "a text by itself has no worse answer and no label",
            "leave these out, or name a `prompt` and an `answer` in place of `text`",
        )?;
        self.ensure(
            columns.label.is_none() || columns.rejected.is_none(),
            &format!("{path}.columns.label"),
            "of a better and a worse answer each is judged by that",
            "leave `label` or `rejected` out",
        )?;
        self.positive(&format!("{path}.max_records"), file.max_records.unwrap_or(1))?;
        let bounds = [
            ("max_prompt_chars", file.max_prompt_chars),
            ("max_prompt_tokens", file.max_prompt_tokens),
            ("max_tokens", file.max_tokens),
        ];
        for (name, bound) in bounds {
            self.positive(&format!("{path}.{name}"), bound.unwrap_or(1))?;
        }
        if let LongPrompts::Truncate(_) = file.long_prompts {
            return self.ensure(
                file.max_tokens.is_some_and(|most| most >= 2),
                &format!("{path}.long_prompts.truncate"),
                "records are cut to `max_tokens`, and there is no such number of 2 or above",
                "write `max_tokens: 1024`, say",
            );
        }
        let bounded = bounds.iter().any(|(_, bound)| bound.is_some());
        self.ensure(
            bounded || file.long_prompts == LongPrompts::LeaveOut,
            &format!("{path}.long_prompts"),
            "no record is too long: there is no `max_prompt_tokens` or `max_tokens`",
            "add it, or leave this out",
        )
    }

    fn mix(&self, path: &str, sources: &[MixedConfig]) -> Result<(), Problem> {
        let help = "add a source, such as `- {domain: sums, data: {addition: {digits: 2}}}`";
        self.ensure(!sources.is_empty(), path, "the list is empty", help)?;
        for (index, MixedConfig { domain, weight, data }) in sources.iter().enumerate() {
            let field = format!("{path}[{index}]");
            let first = sources.iter().position(|other| other.domain == *domain);
            let help = "give each source a name of its own";
            self.ensure(
                first == Some(index) && !domain.is_empty(),
                &format!("{field}.domain"),
                format!("`{domain}` is no name of its own"),
                help,
            )?;
            self.number(&format!("{field}.weight"), *weight, *weight > 0.0, "above 0")?;
            let nested = matches!(data, DataConfig::Mix(_));
            self.ensure(!nested, &format!("{field}.data"), "it is a mix itself", "list its sources here")?;
            self.data_ranges(&format!("{field}.data"), data)?;
        }
        Ok(())
    }

    /// Completions are of prompts, which are put to the model whole.
    pub(super) fn has_prompts(&self, path: &str, data: &DataConfig) -> Result<(), Problem> {
        match data {
            DataConfig::File(file) => {
                let field = format!("{path}.file.columns.text");
                let message = "a text by itself has no prompt to complete";
                let help = "name a column of prompts, `columns: {prompt: ...}`; `offline` learns texts";
                self.ensure(file.columns.named().text.is_none(), &field, message, help)?;
                let field = format!("{path}.file.columns.label");
                let message = "what is completed is judged by its reward";
                self.ensure(file.columns.named().label.is_none(), &field, message, "leave it out")?;
                let cuts = matches!(file.long_prompts, LongPrompts::Truncate(_));
                let field = format!("{path}.file.long_prompts.truncate");
                self.ensure(!cuts, &field, "prompts are not cut", "write `leave_out` or `refuse`")
            }
            DataConfig::Mix(sources) => sources.iter().enumerate().try_for_each(|(index, source)| {
                self.has_prompts(&format!("{path}.mix[{index}].data"), &source.data)
            }),
            DataConfig::Sort(_) | DataConfig::Addition(_) | DataConfig::Countdown(_) => Ok(()),
        }
    }

    /// Whoever reads answers has some: `reader` is a field and what it wants with them, of those `domains` of a mix or, if
    /// there are none, of all.
    pub(super) fn answers(
        &self,
        path: &str,
        data: &DataConfig,
        reader: (&str, &str),
        domains: &[String],
    ) -> Result<(), Problem> {
        match data {
            DataConfig::File(file) => {
                let (field, wants) = reader;
                let message = format!("`{field}` {wants}, and records have no answers");
                let help = "name the column of their answers";
                let has = file.columns.named().answer.is_some();
                self.ensure(has, &format!("{path}.file.columns.answer"), message, help)
            }
            DataConfig::Mix(sources) => {
                let read = |source: &MixedConfig| domains.is_empty() || domains.contains(&source.domain);
                let mut read = sources.iter().enumerate().filter(|(_, source)| read(source));
                read.try_for_each(|(index, source)| {
                    self.answers(&format!("{path}.mix[{index}].data"), &source.data, reader, &[])
                })
            }
            DataConfig::Sort(_) | DataConfig::Addition(_) | DataConfig::Countdown(_) => Ok(()),
        }
    }

    /// Whatever compares with answers has some.
    pub(super) fn rewards_have_answers(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let path = "pipeline.rlvr.data";
        if rlvr.warmup.is_some() {
            self.answers(path, &rlvr.data, ("warmup", "learns answers"), &[])?;
        }
        let RewardConfig::Sum(terms) = &rlvr.reward else {
            return self.answers(path, &rlvr.data, ("reward: exact", "compares with an answer"), &[]);
        };
        for RewardTerm { kind, domains, .. } in terms {
            if let Some(name) = kind.compares() {
                self.answers(path, &rlvr.data, (name, "compares with an answer"), domains)?;
            }
        }
        Ok(())
    }

    /// Every record has a reward.
    pub(super) fn domains(&self, rlvr: &RlvrConfig, dataset: &Dataset) -> Result<(), Problem> {
        let RewardConfig::Sum(terms) = &rlvr.reward else { return Ok(()) };
        for domain in dataset.domains() {
            let has =
                |term: &RewardTerm| term.domains.is_empty() || term.domains.iter().any(|it| it == domain);
            self.ensure(
                terms.iter().any(has),
                "pipeline.rlvr.reward",
                format!("no term is for the records of the domain `{domain}`"),
                "add it to a term's `domains`, or leave a term's `domains` out",
            )?;
        }
        for (index, term) in terms.iter().enumerate() {
            for domain in term.domains.iter().filter(|domain| !dataset.domains().contains(domain.as_str())) {
                let term = format!("pipeline.rlvr.reward[{index}]");
                tracing::warn!(term, domain, "no record is of this domain, which the term is for");
            }
        }
        Ok(())
    }
}

/// Whether completions are to be about as long as answers: the warm-up learns these, or the reward wants them.
fn writes_answers(rlvr: &RlvrConfig) -> bool {
    rlvr.warmup.as_ref().is_some_and(|warmup| warmup.steps > 0) || rlvr.reward.wants_answers()
}
