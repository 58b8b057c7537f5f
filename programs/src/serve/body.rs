//! Parsing of requests in the format of OpenAI's API.

use std::sync::Arc;

use anyroll_models::{Request, SamplingParams, generation::Sample};
use anyroll_pipelines::inference::{Spec, Texts, stop_condition};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    completions::App,
    fields::{Fields, must_be},
    format::format,
    messages,
    refusal::untokenized,
};

/// Requests with one prompt each, and the format of the response.
pub(super) struct ParsedRequest {
    pub requests: Vec<Request>,
    /// Format of all completions that is yet to be compiled, with its field.
    pub format: Option<(&'static str, Spec)>,
    pub stops: Arc<[String]>,
    pub stream: bool,
    /// Ends a stream with the usage.
    pub usage: bool,
    /// Number of likeliest tokens whose log-probs are returned in addition; `None` for no log-probs.
    pub logprobs: Option<usize>,
    /// Names of tools whose calls are parsed from the response.
    pub tools: Option<Arc<[String]>>,
}

const DEFAULT_MAX_TOKENS: usize = 256;
/// Limit of OpenAI's API.
const MOST_SAMPLES: u64 = 128;
const MOST_LIKELIEST: u64 = 20;
/// Limit of completions per request.
const MOST_CHOICES: usize = 2048;
/// Limits on stop strings, since each is searched after every token.
const MOST_STOPS: usize = 16;
const MOST_STOP_BYTES: usize = 256;

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Tokens(Vec<i64>),
    Texts(Texts),
    Lists(Vec<Vec<i64>>),
}

/// Parses `POST /v1/completions`.
pub(super) fn completion(mut fields: Fields, app: &App) -> Result<ParsedRequest, String> {
    let logprobs = fields.count("logprobs", 0..=MOST_LIKELIEST)?.map(|count| count as usize);
    let prompts = prompts(&mut fields, app)?;
    asked(fields, app, prompts, logprobs, None)
}

/// Parses `POST /v1/chat/completions`.
pub(super) fn chat(mut fields: Fields, app: &App) -> Result<ParsedRequest, String> {
    let with_logprobs = fields.flag("logprobs")?;
    let likeliest = fields.count("top_logprobs", 0..=MOST_LIKELIEST)?.unwrap_or(0) as usize;
    if likeliest > 0 && !with_logprobs {
        return Err("`top_logprobs` requires `logprobs`: true".to_owned());
    }
    let logprobs = with_logprobs.then_some(likeliest);
    let messages = fields.take("messages", "a list of messages")?;
    let messages = messages::of_template(messages.ok_or("`messages` is missing: give the conversation")?)?;
    let tools: Option<Vec<Map<String, Value>>> = fields.take("tools", "a list of functions")?;
    let tools: Vec<Value> = tools.unwrap_or_default().into_iter().map(Value::Object).collect();
    let tools = Some(tools).filter(|tools| !tools.is_empty());
    // The model decides whether and how often it calls a tool.
    for (field, value) in [("tool_choice", json!("none")), ("parallel_tool_calls", json!(false))] {
        if tools.is_some() && fields.0.get(field) == Some(&value) {
            return Err(format!("`{field}` cannot be {value} with `tools`: leave one of them out"));
        }
    }
    let variables = fields.take("chat_template_kwargs", "an object with variables of the chat template")?;
    let variables = variables.unwrap_or_default();
    let encode = |tools: Option<&[Value]>| {
        app.tokenizer.encode_messages(&messages, tools, &variables).map_err(|error| untokenized(&error))
    };
    let prompt = encode(tools.as_deref())?;
    if tools.is_some() && encode(None)? == prompt {
        return Err("`tools` are not supported by this model's chat template".to_owned());
    }
    let names = tools.map(|tools| tools.iter().filter_map(name_of).collect());
    asked(fields, app, vec![prompt], logprobs, names)
}

/// Name of a tool, possibly nested under its type.
fn name_of(tool: &Value) -> Option<String> {
    Some(tool.get("function").unwrap_or(tool).get("name")?.as_str()?.to_owned())
}

/// Tokens of `prompt`: a text or token ids, or a list of either.
fn prompts(fields: &mut Fields, app: &App) -> Result<Vec<Vec<i64>>, String> {
    let prompt = fields.take("prompt", "a text or a list of token ids, or a list of such prompts")?;
    let texts = match prompt.ok_or("`prompt` is missing: give a text or a list of token ids")? {
        Prompt::Tokens(tokens) => return Ok(vec![tokens]),
        Prompt::Lists(lists) => return Ok(lists),
        Prompt::Texts(texts) => texts.into_vec(),
    };
    let encode = |text: &String| app.tokenizer.encode_text(text).map_err(|error| untokenized(&error));
    texts.iter().map(encode).collect()
}

/// Parses the fields of both APIs.
fn asked(
    mut fields: Fields,
    app: &App,
    prompts: Vec<Vec<i64>>,
    logprobs: Option<usize>,
    tools: Option<Arc<[String]>>,
) -> Result<ParsedRequest, String> {
    let params = SamplingParams { top_logprobs: logprobs.unwrap_or(0), ..params(&mut fields, app)? };
    let most = most_tokens(&mut fields)?;
    let stops = stops(&mut fields)?;
    let format = format(&mut fields)?;
    if format.is_some() && tools.is_some() {
        return Err("`tools` and a format cannot be combined: leave one out".to_owned());
    }
    let seed = fields.count("seed", 0..=u64::MAX)?.unwrap_or_else(|| app.next_seed());
    let count = fields.count("n", 1..=MOST_SAMPLES)?.unwrap_or(1);
    let stream = fields.flag("stream")?;
    let usage = usage(&mut fields)?;
    fields.finish()?;
    if prompts.len().saturating_mul(count as usize) > MOST_CHOICES {
        let (prompts, most) = (prompts.len(), MOST_CHOICES / count as usize);
        return Err(format!("`prompt` has {prompts} prompts, must have at most {most} with `n` of {count}"));
    }
    let sample = |number| Sample { seed: seed.wrapping_add(number), ..Sample::default() };
    let requests = (0..).step_by(count as usize).zip(prompts).map(|(first, prompt)| {
        let max_new_tokens = max_new_tokens(most, app.max_length, prompt.len())?;
        let samples = (first..first + count).map(sample).collect();
        let params = Arc::new(SamplingParams { max_new_tokens, ..params.clone() });
        let stop = stop_condition(&app.tokenizer, &stops);
        Ok(Request { prompt, params, stop, format: None, samples })
    });
    let requests = requests.collect::<Result<_, String>>()?;
    Ok(ParsedRequest { requests, format, stops, stream, usage, logprobs, tools })
}

/// Parses the option that ends a stream with the usage.
fn usage(fields: &mut Fields) -> Result<bool, String> {
    let field = "stream_options";
    let options: Option<Map<String, Value>> =
        fields.take(field, r#"{"include_usage": true}, or left out"#)?;
    let mut options = Fields(options.unwrap_or_default());
    let usage = options.flag("include_usage").and_then(|usage| options.finish().map(|()| usage));
    usage.map_err(|problem| format!("`{field}`: {problem}"))
}

/// Parses all sampling parameters except the length.
fn params(fields: &mut Fields, app: &App) -> Result<SamplingParams, String> {
    let top_k = "an integer, 0 or -1 for all tokens";
    let top_k = match fields.take::<i64>("top_k", top_k)?.unwrap_or(0) {
        ..-1 => return Err(must_be("top_k", top_k)),
        count => count.max(0) as usize,
    };
    Ok(SamplingParams {
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        top_k,
        top_p: fields.number("top_p")?.unwrap_or(1.0),
        min_p: fields.number("min_p")?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(1.0),
        stop_tokens: app.tokenizer.stop_tokens(),
        ..SamplingParams::default()
    })
}

/// Field that limits the completion's length, with its value.
fn most_tokens(fields: &mut Fields) -> Result<Option<(&'static str, u64)>, String> {
    let mut most = None;
    // The newer name takes precedence.
    for field in ["max_tokens", "max_completion_tokens"] {
        most = fields.count(field, 1..=u64::MAX)?.map(|asked| (field, asked)).or(most);
    }
    Ok(most)
}

fn max_new_tokens(most: Option<(&str, u64)>, max_length: usize, prompt_len: usize) -> Result<usize, String> {
    let room = max_length.saturating_sub(prompt_len);
    let why =
        format!("the prompt has {prompt_len} tokens, and a prompt with its completion at most {max_length}");
    if room == 0 {
        return Err(format!("{why}: make it shorter"));
    }
    let Some((field, asked)) = most else { return Ok(DEFAULT_MAX_TOKENS.min(room)) };
    let fits = usize::try_from(asked).ok().filter(|&asked| asked <= room);
    fits.ok_or_else(|| format!("`{field}` is {asked}, must be at most {room}: {why}"))
}

fn stops(fields: &mut Fields) -> Result<Arc<[String]>, String> {
    let expected = format!("a text or up to {MOST_STOPS}, each of 1 to {MOST_STOP_BYTES} bytes");
    let stops = fields.take("stop", &expected)?.map_or(Vec::new(), Texts::into_vec);
    let fits = |stop: &String| (1..=MOST_STOP_BYTES).contains(&stop.len());
    match stops.len() <= MOST_STOPS && stops.iter().all(fits) {
        true => Ok(stops.into()),
        false => Err(must_be("stop", &expected)),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fields::tests::fields, *};

    #[test]
    fn a_completion_has_as_many_tokens_as_there_is_room_for() {
        let tokens =
            |body: Value, prompt_len| max_new_tokens(most_tokens(&mut fields(body))?, 32, prompt_len);
        assert_eq!(tokens(json!({}), 4), Ok(28));
        assert_eq!(max_new_tokens(None, 8192, 4), Ok(256));
        assert_eq!(tokens(json!({"max_tokens": 28}), 4), Ok(28));
        assert_eq!(tokens(json!({"max_tokens": 5, "max_completion_tokens": 7}), 4), Ok(7));
        let refused = |body: Value, prompt_len, words: &[&str]| {
            let message = tokens(body, prompt_len).unwrap_err();
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        };
        refused(json!({"max_tokens": 29}), 4, &["`max_tokens` is 29", "at most 28", "4 tokens", "32"]);
        refused(json!({"max_completion_tokens": u64::MAX}), 4, &["`max_completion_tokens`", "at most 28"]);
        refused(json!({"max_tokens": 0}), 4, &["`max_tokens`", "at least 1"]);
        refused(json!({}), 32, &["32 tokens", "shorter"]);
    }

    #[test]
    fn stops_are_few_and_short() {
        let stops = |value: Value| stops(&mut fields(json!({"stop": value}))).map(|stops| stops.len());
        assert_eq!(stops(Value::Null), Ok(0));
        assert_eq!(stops(json!("a")), Ok(1));
        assert_eq!(stops(json!(vec!["a"; 16])), Ok(16));
        for wrong in [json!(vec!["a"; 17]), json!(""), json!(["a", ""]), json!("a".repeat(257)), json!(1)] {
            assert!(stops(wrong.clone()).unwrap_err().starts_with("`stop` must be"), "{wrong}");
        }
    }
}
