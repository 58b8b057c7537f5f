//! `anyroll generate`: completions of prompts.

use std::{collections::BTreeMap, fs, iter, path::PathBuf, sync::Arc};

use anyroll_config::error_chain::one_line;
use anyroll_data::{CellTypes, Record, is_table, stream};
use anyroll_models::{
    Request,
    generation::{Completion, Ending, Sample},
};
use anyroll_pipelines::{
    Error, Result,
    inference::{Capacity, Formats, Spec, Texts, Vocabulary, cut, stop_condition},
    loaded::{Options, check_numbers},
};
use clap::{Args, builder::NonEmptyStringValueParser};
use rand_chacha::rand_core::Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    columns::Columns,
    lines::{of_line, parsed},
    model_args::{CapacityArgs, GuidanceArgs, ModelArgs, SamplingArgs},
    prompt_lines::{Fields, NUMBERS, to_pass_on},
    stdout::print,
};

#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A prompt; repeatable. Completions are printed as text, in the order of the prompts
    #[arg(long = "prompt", value_name = "TEXT", required_unless_present = "file", conflicts_with = "file")]
    prompts: Vec<String>,
    /// Lines of {"prompt": ...}, with `--chat` a text or messages; a line may also set "temperature",
    /// "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens" and "stop"; or a .json, .csv, .parquet or
    /// .arrow file of such records; `-` reads standard input. Completions are printed as JSON, in the order of the lines, each with the line's other fields
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Fields of a line with the prompt and the answer, as in a config's `columns`: prompt=question,answer=gold, or
    /// roll, verl, trl or openrlhf
    #[arg(long, value_name = "PART=NAME,...", value_parser = Columns::of_prompts, requires = "file")]
    columns: Option<Columns>,
    /// Completions per prompt
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    samples: u64,
    /// Seed; a completion depends on it, the index of its prompt and its own index
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Text that ends a completion and is cut off from it; repeatable
    #[arg(long = "stop", value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stops: Vec<String>,
    /// Use the model's chat template, with a prompt as the user's message; without it, a run's model is
    /// prompted as in the run
    #[arg(long)]
    chat: bool,
    /// The system message of `--chat`
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// A file with a JSON schema that completions must match
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    schema: Option<PathBuf>,
    /// A regular expression that a whole completion must match
    #[arg(long, value_name = "PATTERN")]
    regex: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    guidance: GuidanceArgs,
    #[command(flatten)]
    capacity: CapacityArgs,
}

/// Constant of this command's random stream.
const PURPOSE: u64 = 0x6765_6e65;

#[derive(Debug, Deserialize)]
struct Line {
    prompt: Prompt,
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    max_new_tokens: Option<usize>,
    stop: Option<Texts>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl Line {
    /// Settings for all lines, overridden by those of this line.
    fn sampling(&self, all: SamplingArgs) -> SamplingArgs {
        SamplingArgs {
            temperature: self.temperature.unwrap_or(all.temperature),
            top_k: self.top_k.unwrap_or(all.top_k),
            top_p: self.top_p.unwrap_or(all.top_p),
            min_p: self.min_p.unwrap_or(all.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(all.repetition_penalty),
            max_new_tokens: self.max_new_tokens.or(all.max_new_tokens),
        }
    }
}

/// Fields that a line must not have: settings under another name, and settings for all lines.
const NOT_OF_A_LINE: [(&str, &str); 5] = [
    ("max_tokens", "it is called `max_new_tokens` here"),
    ("n", "pass `--samples`, for all lines"),
    ("samples", "pass `--samples`, for all lines"),
    ("seed", "pass `--seed`, for all lines"),
    ("system", "pass `--system`, for all lines, or start the messages of `prompt` with it"),
];

/// A prompt with its settings.
struct PromptRequest {
    line: usize,
    prompt: Prompt,
    sampling: SamplingArgs,
    stops: Vec<String>,
    /// The line's fields, for its completions.
    fields: Map<String, Value>,
}

/// A text or a conversation.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "neither a text nor messages")]
enum Prompt {
    Text(String),
    Messages(Vec<Map<String, Value>>),
}

impl Prompt {
    fn record(self, id: String) -> Record {
        match self {
            Self::Text(prompt) => Record { id, prompt, ..Record::default() },
            Self::Messages(messages) => {
                let messages = messages.into_iter().map(Value::Object).collect();
                Record { id, messages, ..Record::default() }
            }
        }
    }
}

/// JSON line of a completion, as `anyroll reward` reads it.
#[derive(Debug, Serialize)]
struct Completed<'a> {
    /// Line of the prompt in the file, from 1.
    line: usize,
    sample: u64,
    completion: &'a str,
    /// True if it ended before the length limit.
    finished: bool,
    tokens: usize,
    /// `stop` or `length`; `broken` if the grammar of its schema or pattern failed.
    ending: &'static str,
    logprob: f64,
    /// All other fields of the line, its prompt and answer among them.
    #[serde(flatten)]
    fields: &'a Map<String, Value>,
}

/// Schema or pattern that completions must match, with the name of its option.
fn spec(args: &GenerateArgs) -> Result<Option<(&'static str, Spec)>> {
    const SCHEMA: &str = "--schema";
    let Some(path) = &args.schema else {
        return Ok(args.regex.clone().map(|pattern| ("--regex", Spec::Regex(pattern))));
    };
    let unreadable = |problem: String| refused(SCHEMA, format!("{}: {problem}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| unreadable(error.to_string()))?;
    let schema = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
    Ok(Some((SCHEMA, Spec::Json(schema))))
}

fn refused(what: &'static str, problem: String) -> Error {
    anyroll_models::Error::Input { what, problem }.into()
}

pub(super) fn generate(args: &GenerateArgs) -> Result<u8> {
    let prompts = asked(args)?;
    let spec = spec(args)?;
    let (system_prompt, guidance) = (args.system.clone(), args.guidance.guidance);
    let options = Options { chat: args.chat, system_prompt, guidance, ..Options::default() };
    let mut model = args.model.load(options)?;
    let tokenizer = model.tokenizer.clone();
    // A run's model is prompted as in the run.
    if !args.chat && !args.model.is_of_run() && tokenizer.has_unused_template() {
        eprintln!("hint: the model has a chat template; `--chat` puts prompts into it as a user's messages");
    }
    let format = spec.map(|(what, spec)| {
        let formats = Vocabulary::of(&tokenizer).and_then(|vocabulary| Formats::new(&vocabulary));
        formats.and_then(|formats| formats.compile(&spec)).map_err(|problem| refused(what, problem))
    });
    let format = format.transpose()?;
    let mut encoded = Vec::with_capacity(prompts.len());
    for PromptRequest { line, prompt, sampling, stops, fields } in prompts {
        let refuse = |problem| match &args.file {
            Some(path) => Error::InputLine { path: path.clone(), line, problem },
            None => refused("--prompt", problem),
        };
        if matches!(&prompt, Prompt::Messages(messages) if messages.is_empty()) {
            return Err(refuse("it has no messages".to_owned()));
        }
        let prompt = tokenizer.encode_prompt(&prompt.record(format!("prompt {line}")));
        let prompt = prompt.map_err(|error| refuse(one_line(&error)))?;
        let behind = model.max_length().saturating_sub(prompt.len());
        let params = sampling.params(tokenizer.stop_tokens(), behind);
        if args.file.is_some() {
            params.validate().map_err(|error| refuse(one_line(&error)))?;
        }
        if prompt.is_empty() {
            return Err(refuse("it has no tokens".to_owned()));
        }
        if params.max_new_tokens > behind {
            let (tokens, new, most) = (prompt.len(), params.max_new_tokens, model.max_length());
            let why = model.why_no_longer();
            let problem =
                format!("it has {tokens} tokens, and with {new} new ones more than the model's {most}{why}");
            return Err(refuse(problem));
        }
        encoded.push((line, prompt, Arc::new(params), stops, fields));
    }
    let lengths = encoded.iter().map(|(_, prompt, params, ..)| prompt.len() + params.max_new_tokens);
    let longest = lengths.max().unwrap_or(0);
    let wanted = encoded.len() * args.samples as usize;
    let capacity = Capacity {
        sequences: args.capacity.sequences.min(wanted).max(1),
        longest,
        memory: args.capacity.memory,
        speculation: None,
    };
    let mut engine = model.engine(capacity)?;
    let mut asked = Vec::with_capacity(wanted);
    for (index, (line, prompt, params, stops, fields)) in encoded.into_iter().enumerate() {
        let first = index as u64 * args.samples;
        let seed = |sample| stream(PURPOSE, args.seed, first + sample).next_u64();
        let sample = |number| Sample { seed: seed(number), ..Sample::default() };
        let samples = (0..args.samples).map(sample).collect();
        let stop = stop_condition(&tokenizer, &stops);
        let stops: Arc<[String]> = stops.into();
        engine.submit(Request { prompt, params, stop, format: format.clone(), samples })?;
        let fields = Arc::new(fields);
        asked.extend((0..args.samples).map(|sample| (line, sample, stops.clone(), fields.clone())));
    }
    // In the order of the prompts.
    let (mut waiting, mut next) = (BTreeMap::new(), 0);
    while !engine.is_idle() {
        for (id, completion) in engine.step()? {
            check_numbers(&completion.logprobs)?;
            let (line, sample, stops, fields) = &asked[id as usize];
            let text = tokenizer.decode(&completion.tokens);
            let text = cut(&text, stops);
            let told = match args.file {
                None => text.to_owned(),
                Some(_) => json((*line, *sample), text, &completion, fields),
            };
            waiting.insert(id, told);
            let ready = iter::from_fn(|| waiting.remove(&next).inspect(|_| next += 1));
            let ready: String = ready.map(|text| text + "\n").collect();
            if !print(ready)? {
                return Ok(0);
            }
        }
    }
    Ok(0)
}

/// Prompts of the arguments, or of the lines of `--file`.
fn asked(args: &GenerateArgs) -> Result<Vec<PromptRequest>> {
    let sampling = args.sampling;
    sampling.params(Vec::new(), 1).validate()?;
    let Some(file) = &args.file else {
        let texts = (1..).zip(args.prompts.iter().cloned().map(Prompt::Text));
        let asked = |(line, prompt)| PromptRequest {
            line,
            prompt,
            sampling,
            stops: args.stops.clone(),
            fields: Map::new(),
        };
        return Ok(texts.map(asked).collect());
    };
    let cells = CellTypes { numbers: NUMBERS.to_vec(), ..CellTypes::default() };
    let lines = parsed::<Fields>(file, &cells)?.into_iter();
    let asked = lines.map(|(number, fields)| {
        let refuse = |problem: String| Error::InputLine { path: file.clone(), line: number, problem };
        let mut fields = fields.with(args.columns.as_ref()).map_err(refuse)?;
        // A cell may have messages as JSON, as in the data of a run.
        if is_table(file)
            && let Some(value) = fields.get_mut("prompt")
            && let Ok((_, messages)) = anyroll_data::prompt(value)
            && !messages.is_empty()
        {
            *value = messages.into();
        }
        let line: Line = of_line(&Value::Object(fields.clone()).to_string()).map_err(refuse)?;
        if let Some((field, help)) = NOT_OF_A_LINE.iter().find(|(field, _)| line.others.contains_key(*field))
        {
            return Err(refuse(format!("a line cannot set `{field}`: {help}")));
        }
        let sampling = line.sampling(sampling);
        let stops = line.stop.map_or_else(|| args.stops.clone(), Texts::into_vec);
        if stops.iter().any(String::is_empty) {
            return Err(refuse("`stop` has an empty text".to_owned()));
        }
        Ok(PromptRequest { line: number, prompt: line.prompt, sampling, stops, fields: to_pass_on(fields) })
    });
    asked.collect()
}

fn json(
    (line, sample): (usize, u64),
    text: &str,
    completion: &Completion,
    fields: &Map<String, Value>,
) -> String {
    let ending = match completion.ending {
        Some(Ending::Stop) => "stop",
        Some(Ending::Broken) => "broken",
        Some(Ending::Length) | None => "length",
    };
    let logprob = completion.logprobs.iter().copied().map(f64::from).sum();
    let finished = completion.ending == Some(Ending::Stop);
    let tokens = completion.tokens.len();
    let line = Completed { line, sample, completion: text, finished, tokens, ending, logprob, fields };
    serde_json::to_string(&line).expect("plain data")
}
