//! The image model of a run with its prompts.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyroll_models::{
    diffusion::{self, Dit, Transformer, TransformerConfig},
    hf::{DiffusersFolder, ImageAdapterFiles, TextEmbeddings, WithAdapter},
    init::{Seed, WeightSource},
};
use serde_json::{Map, Value};
use tch::Device;

use super::{decoder::ImageDecoder, prompts::OF_OTHERS, shapes};
use crate::{
    Result,
    config::{DiffusersConfig, DiffusionConfig, DitConfig, ImageDataConfig, ModelConfig, PromptsConfig},
    data::{self, Record, without_mark},
    error_chain::one_line,
    run::Run,
};

/// An image model with its classes or texts.
pub struct Subject {
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

impl Subject {
    /// Opens the model of `run` on `device`; `embeddings` is the file of its texts.
    pub fn open(
        run: &Run,
        config: &DiffusionConfig,
        embeddings: Option<&Path>,
        device: Device,
    ) -> Result<Self> {
        match (&run.config.model, &config.data) {
            (ModelConfig::Dit(dit), ImageDataConfig::Shapes) => Self::shapes(dit, run.config.seed),
            (ModelConfig::Diffusers(model), ImageDataConfig::Prompts(prompts)) => {
                let embeddings = embeddings.or(prompts.embeddings.as_deref());
                let embeddings = embeddings.expect("texts are encoded before the run or at its beginning");
                Self::prompts(run, config, model, (prompts, embeddings), device)
            }
            _ => unreachable!("a checked config has a model that fits its data"),
        }
    }

    fn shapes(dit: &DitConfig, seed: u64) -> Result<Self> {
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

    fn prompts(
        run: &Run,
        config: &DiffusionConfig,
        model: &DiffusersConfig,
        (prompts, embeddings): (&PromptsConfig, &Path),
        device: Device,
    ) -> Result<Self> {
        let folder = DiffusersFolder::open(&model.path, model.variant.as_deref())
            .map_err(anyroll_models::Error::from)?;
        let shape = folder.transformer_config().clone();
        let texts = TextEmbeddings::open(embeddings, shape.text_widths());
        let texts = texts.map_err(anyroll_models::Error::from)?;
        let lora = model.lora.as_ref().map(|lora| {
            lora.image_shape(&shape.modules()).expect("a config whose targets match nothing is refused")
        });
        let count = texts.count();
        let records = match &prompts.records {
            Some(path) => read_records(path)?,
            None => (0..count).map(numbered).collect(),
        };
        let precision = run.policy.strategy.precision;
        let decoder = match folder.decoder() {
            Ok(decoder) => {
                Some(ImageDecoder::new(decoder, prompts.frames, &config.sampler, precision, device)?)
            }
            Err(error) => {
                tracing::warn!("videos are not decoded, so there are no pictures: {}", one_line(error));
                None
            }
        };
        let sizes = [prompts.frames, prompts.height, prompts.width].map(|size| size as i64);
        let sizes = folder.latent_sizes(sizes).expect("a checked config's sizes fit");
        let latents = shape.latents();
        let sizes = if latents.is_video { &sizes[..] } else { &sizes[1..] };
        let trained = count - prompts.held_out;
        Ok(Self {
            model: shape.build(lora.as_ref(), Some(texts.load(device)?), device)?,
            weights: Box::new(WithAdapter {
                base: folder,
                adapter: first_adapter(model, &shape, run.config.seed)?,
            }),
            has_adapters: lora.is_some(),
            latent_shape: [&[latents.channels], sizes].concat(),
            decoder,
            trained,
            evaluated: if prompts.held_out == 0 { 0..count } else { trained..count },
            no_class: count as i64,
            boundary: shape.boundary(),
            records,
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

/// Initial weights of adapters for a model of shape `shape`: from a file, or drawn from `seed`.
///
/// # Errors
/// A file that is missing or was changed.
pub fn first_adapter(
    model: &DiffusersConfig,
    shape: &TransformerConfig,
    seed: u64,
) -> Result<Box<dyn WeightSource>> {
    Ok(match model.lora.as_ref().and_then(|lora| lora.path.as_ref()) {
        Some(path) => Box::new(ImageAdapterFiles::open(path, shape).map_err(anyroll_models::Error::from)?),
        None => Box::new(Seed(seed)),
    })
}

/// Record of a text without records.
fn numbered(number: usize) -> Record {
    Record { id: number.to_string(), prompt: number.to_string(), ..Record::default() }
}

/// Reads records, one per line, each with a `prompt`; in a `.txt` each line is a prompt.
///
/// # Errors
/// [`data::Error`] for a file that cannot be read, or an invalid line.
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
                    .map_err(|error| wrong(format!("the line is not a JSON object: {error}")))?;
                let Some(Value::String(prompt)) = columns.shift_remove("prompt") else {
                    return Err(wrong("there is no string `prompt`".into()));
                };
                (prompt, columns)
            }
        };
        for name in OF_OTHERS {
            if !matches!(columns.get(name), None | Some(Value::Null | Value::String(_))) {
                return Err(wrong(format!("`{name}` is not a string")));
            }
        }
        Ok(Record { id: format!("line {}", index + 1), prompt, columns, ..Record::default() })
    };
    without_mark(&text).lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
}
