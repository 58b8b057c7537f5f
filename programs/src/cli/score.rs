//! `anyroll score`: log-probs of given texts, computed by training's forward pass.

use std::path::PathBuf;

use anyroll_config::error_chain::one_line;
use anyroll_data::{CellTypes, Record};
use anyroll_models::Sequence;
use anyroll_pipelines::{
    Error, Result,
    loaded::{LoadedModel, Options, check_numbers},
};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::{lines::parsed, model_args::ModelArgs, stdout::print};

#[derive(Debug, Args)]
pub(super) struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Lines of {"prompt": ..., "completion": ...} (with "finished": true, the end token is scored too), of
    /// {"prompt": ...} alone, scored from its second token on, or of {"tokens": [...], "prompt_len": N}; or a .json,
    /// .csv, .parquet or .arrow file of such records; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Divides the logits; above 0
    #[arg(long, default_value_t = 1.0)]
    temperature: f64,
    /// Use the model's chat template, with a prompt as the user's message
    #[arg(long)]
    chat: bool,
    /// Tokens in a forward pass
    #[arg(long, default_value_t = 16_384)]
    batch_tokens: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    prompt: Option<String>,
    completion: Option<String>,
    #[serde(default)]
    finished: bool,
    tokens: Option<Vec<i64>>,
    prompt_len: Option<usize>,
}

/// Tokens of a text; the first `prompt_len` are not scored.
struct Text {
    line: usize,
    tokens: Vec<i64>,
    prompt_len: usize,
}

#[derive(Debug, Serialize)]
struct Scored<'a> {
    line: usize,
    /// Sum of `logprobs`.
    logprob: f64,
    tokens: &'a [i64],
    logprobs: &'a [f32],
}

pub(super) fn score(args: &ScoreArgs) -> Result<u8> {
    let cells = CellTypes { flags: vec!["finished"], numbers: vec!["prompt_len"], lists: vec!["tokens"] };
    let inputs = parsed::<Input>(&args.file, &cells)?;
    let mut model = args.model.load(Options { chat: args.chat, ..Options::default() })?;
    let mut texts = Vec::with_capacity(inputs.len());
    for (line, input) in inputs {
        texts.push(encode(args, &model, line, input)?);
    }
    let mut rest = texts.as_slice();
    while !rest.is_empty() {
        let mut tokens = 0;
        let fits = rest.iter().take_while(|text| {
            tokens += text.tokens.len();
            tokens <= args.batch_tokens
        });
        let (batch, after) = rest.split_at(fits.count().max(1));
        let sequences: Vec<Sequence> =
            batch.iter().map(|text| Sequence { tokens: &text.tokens, prompt_len: text.prompt_len }).collect();
        let scored = model.logprobs(&sequences, args.temperature)?;
        for (text, logprobs) in batch.iter().zip(&scored) {
            check_numbers(logprobs)?;
            let line = Scored {
                line: text.line,
                logprob: logprobs.iter().fold(0.0, |sum, logprob| sum + f64::from(*logprob)),
                tokens: &text.tokens[text.prompt_len..],
                logprobs,
            };
            let line = serde_json::to_string(&line).expect("plain data");
            if !print(line + "\n")? {
                return Ok(0);
            }
        }
        rest = after;
    }
    Ok(0)
}

fn encode(args: &ScoreArgs, model: &LoadedModel, line: usize, input: Input) -> Result<Text> {
    let refuse = |problem: String| Err(Error::InputLine { path: args.file.clone(), line, problem });
    let tokenizer = &model.tokenizer;
    let (tokens, prompt_len) = match input {
        Input { prompt: None, completion: None, finished: false, tokens: Some(tokens), prompt_len } => {
            (tokens, prompt_len.unwrap_or(1))
        }
        Input { prompt: Some(prompt), completion, finished, tokens: None, prompt_len: None } => {
            let is_alone = completion.is_none() && !finished;
            let answer = completion.unwrap_or_default();
            let record = Record { id: format!("line {line}"), prompt, answer, ..Record::default() };
            let mut tokens = tokenizer.encode_prompt(&record)?;
            let prompt_len = if is_alone { 1 } else { tokens.len() };
            if !is_alone {
                let mut answer = tokenizer.encode_answer(&record)?;
                answer.truncate(answer.len() - usize::from(!finished));
                tokens.extend(answer);
            }
            (tokens, prompt_len)
        }
        _ => {
            let forms = "write {prompt, completion, finished}, {prompt} or {tokens, prompt_len}";
            return refuse(forms.to_owned());
        }
    };
    if prompt_len == 0 || prompt_len > tokens.len() {
        return refuse("its prompt must have at least one token, and no more than the text".to_owned());
    }
    if let Err(error) = model.check_tokens(&tokens) {
        return refuse(one_line(&error));
    }
    let most = model.max_length();
    if tokens.len() > most {
        let (tokens, why) = (tokens.len(), model.why_no_longer());
        return refuse(format!("it has {tokens} tokens, and the model reads at most {most}{why}"));
    }
    Ok(Text { line, tokens, prompt_len })
}
