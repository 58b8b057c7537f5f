//! The image model of a run with its prompts.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyroll_config::{DiffusionConfig, DitConfig, error_chain::one_line};
use anyroll_data::{self, CellTypes, Record, is_table, rows, without_mark};
use anyroll_models::{
    diffusion::{self, Dit, Transformer},
    hf::WithAdapter,
    init::{Seed, WeightSource},
};
use serde_json::{Map, Value};
use tch::Device;

use super::opened::{EncodedTexts, PublishedModel};
use super::{decoder::ImageDecoder, prompts::OF_OTHERS, shapes};
use crate::{Result, run::Run};

/// An image model with its classes or texts.
pub struct ImageModel {
    /// The transformer.
    pub model: Transformer,
    /// Initial weights.
    pub weights: Box<dyn WeightSource>,
    /// True if adapters are trained; the reference is then the policy without adapters.
    pub has_adapters: bool,
    /// Shape of latents: channels, frames (videos only), height and width.
    pub latent_shape: Vec<i64>,
    /// Decoder of latents; `None` if pixels are denoised, or videos cannot be decoded.
    pub decoder: Option<ImageDecoder>,
    /// Number of labels to train on.
    pub trained: usize,
    /// Labels to evaluate.
    pub evaluated: Range<usize>,
    /// The unconditional label of guidance.
    pub no_class: i64,
    /// Sigma below which the second of a pair of transformers is used.
    pub boundary: Option<f64>,
    /// Record of each class or text.
    pub records: Vec<Record>,
}

impl ImageModel {
    /// Synthetic images and a model of shape `dit` with weights from `seed`.
    pub fn shapes(dit: &DitConfig, seed: u64) -> Result<Self> {
        let (size, classes) = (shapes::SIZE as i64, shapes::CLASSES);
        Ok(Self {
            model: Transformer::Dit(Box::new(dit_of(dit)?)),
            weights: Box::new(Seed(seed)),
            has_adapters: false,
            latent_shape: vec![1, size, size],
            decoder: None,
            trained: classes,
            evaluated: 0..classes,
            no_class: classes as i64,
            boundary: None,
            records: shapes::records(),
        })
    }

    /// A published model and its texts, on `device`.
    pub fn published(
        run: &Run,
        config: &DiffusionConfig,
        opened: PublishedModel,
        EncodedTexts { embeddings, records }: EncodedTexts,
        device: Device,
    ) -> Result<Self> {
        let count = embeddings.count();
        let held_out = config.data.held_out();
        let precision = run.policy.strategy.precision;
        let decoder = match opened.folder.decoder() {
            Ok(decoder) => {
                Some(ImageDecoder::new(decoder, opened.frames, &config.sampler, precision, device)?)
            }
            Err(error) => {
                tracing::warn!("videos are not decoded, so there are no pictures: {}", one_line(error));
                None
            }
        };
        let shape = opened.folder.transformer_config();
        let (latents, boundary, sides) = (shape.latents(), shape.boundary(), opened.sides);
        let sides = if latents.is_video { &sides[..] } else { &sides[1..] };
        let model = shape.build(opened.lora.as_ref(), Some(embeddings.load(device)?), device)?;
        let has_adapters = opened.lora.is_some();
        let (base, adapter) = opened.into_weights(run.config.seed);
        let trained = count - held_out;
        Ok(Self {
            model,
            weights: Box::new(WithAdapter { base, adapter }),
            has_adapters,
            latent_shape: [&[latents.channels], sides].concat(),
            decoder,
            trained,
            evaluated: if held_out == 0 { 0..count } else { trained..count },
            no_class: count as i64,
            boundary,
            records: records.unwrap_or_else(|| (0..count).map(numbered).collect()),
        })
    }
}

/// The model for shapes.
///
/// # Errors
/// For sizes that make no valid model.
pub fn dit_of(dit: &DitConfig) -> Result<Dit> {
    Ok(Dit::new(diffusion::DitConfig {
        image_size: shapes::SIZE as i64,
        channels: 1,
        patch_size: dit.patch_size as i64,
        classes: shapes::CLASSES as i64,
        hidden_size: dit.hidden_size as i64,
        layers: dit.layers,
        heads: dit.heads as i64,
        intermediate_size: dit.intermediate_size as i64,
    })?)
}

/// Record of a text without records.
fn numbered(number: usize) -> Record {
    Record { id: number.to_string(), prompt: number.to_string(), ..Record::default() }
}

/// Reads records, each with a `prompt`: JSON lines, a data file of another format, or in a `.txt` a prompt per line.
///
/// # Errors
/// [`anyroll_data::Error`] for a file that cannot be read, or an invalid line.
pub fn read_records(path: &Path) -> Result<Vec<Record>, anyroll_data::Error> {
    let wrong = |line, message: String| anyroll_data::Error::Line { path: path.to_owned(), line, message };
    if is_table(path) {
        let rows = rows(path, &CellTypes::default())?.into_iter();
        return rows.map(|(row, columns)| record("row", row, columns).map_err(|it| wrong(row, it))).collect();
    }
    let text = fs::read_to_string(path)
        .map_err(|source| anyroll_data::Error::Read { path: path.to_owned(), source })?;
    let is_plain = path.extension().is_some_and(|extension| extension == "txt");
    let parse = |(line, text): (usize, &str)| {
        let columns = match is_plain {
            true => Ok(Map::from_iter([("prompt".to_owned(), text.into())])),
            false => {
                serde_json::from_str(text).map_err(|error| format!("the line is not a JSON object: {error}"))
            }
        };
        columns.and_then(|columns| record("line", line, columns)).map_err(|problem| wrong(line, problem))
    };
    let lines = (1..).zip(without_mark(&text).lines());
    lines.filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
}

/// The record with the id `kind number`, or its problem.
fn record(kind: &str, number: usize, mut columns: Map<String, Value>) -> Result<Record, String> {
    let Some(Value::String(prompt)) = columns.shift_remove("prompt") else {
        return Err("there is no string `prompt`".to_owned());
    };
    for name in OF_OTHERS {
        if !matches!(columns.get(name), None | Some(Value::Null | Value::String(_))) {
            return Err(format!("`{name}` is not a string"));
        }
    }
    Ok(Record { id: format!("{kind} {number}"), prompt, columns, ..Record::default() })
}
