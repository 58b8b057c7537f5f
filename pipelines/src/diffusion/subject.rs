//! What a run paints, and what with.

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
    /// What `run` names, on `device`; of texts with the file of their `embeddings`.
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
                tracing::warn!("videos are not decoded, and have no pictures: {}", one_line(error));
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

/// The first values of the adapters of a model of the shape `shape`: those of a file, or of `seed`.
///
/// # Errors
/// A file that is no longer there or as it was.
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
