//! What a run paints, and what with.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyroll_models::{
    diffusion::{self, Dit, Transformer},
    hf::WithAdapter,
    init::{Seed, WeightSource},
};
use serde_json::{Map, Value};
use tch::Device;

use super::opened::{EncodedTexts, PublishedModel};
use super::{decoder::ImageDecoder, prompts::OF_OTHERS, shapes};
use crate::{
    Result,
    config::{DiffusionConfig, DitConfig},
    data::{self, Record, without_mark},
    error_chain::one_line,
    run::Run,
};

/// A model of images, and what it is asked for.
pub struct Subject {
    /// The transformer.
    pub model: Transformer,
    /// Its first weights.
    pub weights: Box<dyn WeightSource>,
    /// Whether adapters are what is trained; the reference is then the policy with its adapters off.
    pub has_adapters: bool,
    /// The sizes of what is denoised: channels, of a video frames, height and width.
    pub latent_shape: Vec<i64>,
    /// From that to pixels; `None` where pixels are denoised, and where videos cannot be decoded.
    pub decoder: Option<ImageDecoder>,
    /// The labels that are trained on.
    pub trained: usize,
    /// Those that are evaluated.
    pub evaluated: Range<usize>,
    /// The label that guidance leads away from.
    pub no_class: i64,
    /// Of a pair of transformers the sigma below which the second paints.
    pub boundary: Option<f64>,
    /// What is known of each class or text.
    pub records: Vec<Record>,
}

impl Subject {
    /// Images that are made in code, and a model of this shape with weights from `seed`.
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
                tracing::warn!("videos are not decoded, and have no pictures: {}", one_line(error));
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

/// The model of shapes.
///
/// # Errors
/// For sizes that make no model.
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

/// What is known of a text without records.
fn numbered(number: usize) -> Record {
    Record { id: number.to_string(), prompt: number.to_string(), ..Record::default() }
}

/// A record a line, each with a `prompt`; of a `.txt` each line is one.
///
/// # Errors
/// [`data::Error`] for a file that cannot be read, or a line that is none.
pub fn read_records(path: &Path) -> Result<Vec<Record>, data::Error> {
    let text =
        fs::read_to_string(path).map_err(|source| data::Error::Read { path: path.to_owned(), source })?;
    let is_plain = path.extension().is_some_and(|extension| extension == "txt");
    let parse = |(index, line): (usize, &str)| {
        let wrong = |message: String| data::Error::Line { path: path.to_owned(), line: index + 1, message };
        let (prompt, columns) = match is_plain {
            true => (line.to_owned(), Map::new()),
            false => {
                let mut columns: Map<String, Value> = serde_json::from_str(line)
                    .map_err(|error| wrong(format!("the line is no JSON object: {error}")))?;
                let Some(Value::String(prompt)) = columns.shift_remove("prompt") else {
                    return Err(wrong("there is no text `prompt`".into()));
                };
                (prompt, columns)
            }
        };
        for name in OF_OTHERS {
            if !matches!(columns.get(name), None | Some(Value::Null | Value::String(_))) {
                return Err(wrong(format!("`{name}` is no text")));
            }
        }
        Ok(Record { id: format!("line {}", index + 1), prompt, columns, ..Record::default() })
    };
    without_mark(&text).lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
}
