//! Facts on a run's data for `anyroll check`: numbers of records, lengths of prompts, and epochs.

use anyroll_config::{Config, PipelineConfig};
use anyroll_data::SourceSize;

use crate::{
    Result,
    format::number,
    opened::{Opened, Texts},
    run::Run,
};

/// Returns the facts on the data of a run, a line each.
///
/// # Errors
/// A prompt that cannot be encoded; `prepare` has reported it before.
pub fn data_facts(run: &Run, opened: &Opened) -> Result<Vec<String>> {
    match opened {
        Opened::Texts(texts) => of_texts(run, texts),
        Opened::Images(images) => {
            let records = images.records().map_or(0, <[_]>::len);
            Ok((records > 0).then(|| format!("data: {records} prompts")).into_iter().collect())
        }
        Opened::Shapes(_) => Ok(Vec::new()),
    }
}

fn of_texts(run: &Run, texts: &Texts) -> Result<Vec<String>> {
    let pipeline = &run.config.pipeline;
    let sizes = texts.dataset.sizes();
    let mut lines: Vec<String> = sizes.iter().map(|size| size_of(size, &run.config)).collect();
    lines.extend(lengths(texts)?);
    let (_, per_step) = pipeline.steps_and_their_size();
    let drawn = run.steps as f64 * per_step as f64;
    let samples_further =
        matches!(pipeline, PipelineConfig::Rlvr(rlvr) if rlvr.selection.mixed_groups.is_some());
    let epochs = sizes.iter().filter_map(|size| {
        let [train, _] = size.records?;
        let epochs = number(drawn * size.share / train as f64);
        let least = if samples_further { "at least " } else { "" };
        Some(format!("{least}{epochs} epochs{}", of_domain(size)))
    });
    let epochs: Vec<String> = epochs.collect();
    if !epochs.is_empty() {
        let (steps, what) = (run.steps, what(&run.config));
        lines.push(format!("{steps} steps of {per_step} {what}: {}", epochs.join(", ")));
    }
    Ok(lines)
}

/// Name of a record: RL only reads prompts.
fn what(config: &Config) -> &'static str {
    if matches!(config.pipeline, PipelineConfig::Rlvr(_)) { "prompts" } else { "records" }
}

fn of_domain(size: &SourceSize) -> String {
    if size.domain.is_empty() { String::new() } else { format!(" of `{}`", size.domain) }
}

fn size_of(size: &SourceSize, config: &Config) -> String {
    let what = what(config);
    let records = match size.records {
        Some([train, held_out]) => format!("{train} {what} trained on, {held_out} held out"),
        None => format!("{what} generated for each step"),
    };
    format!("data{}: {records}", of_domain(size))
}

/// Mean and maximum number of tokens in a prompt, chat template included; `None` for texts without prompts.
fn lengths(texts: &Texts) -> Result<Option<String>> {
    let records = texts.dataset.examples();
    let prompts = records.iter().filter(|record| !record.is_text());
    let lengths = prompts.map(|record| Ok(texts.base.tokenizer.encode_prompt(record)?.len()));
    let lengths = lengths.collect::<Result<Vec<_>>>()?;
    let Some(longest) = lengths.iter().max() else { return Ok(None) };
    let mean = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
    Ok(Some(format!("tokens of a prompt: {} on average, {longest} at most", number(mean))))
}
