//! Export of a run's model to a folder that `transformers` or `diffusers` loads: weights, configuration and
//! tokenizer.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyroll_config::{Config, FrozenWeights, ModelConfig, PipelineConfig};
use anyroll_data::Tokenizer;
use anyroll_models::{
    Decoder, IlqlModel, Model, ParamSpec, Unit, ValueModel,
    hf::{
        ExportDtype, FolderContents, FolderKind, InFourBits, Merged, ModelFolder, PublishedFiles, Unscaled,
        WithAdapter, adapter_config_file, config_file, scorer_config_file, write_diffusers_folder,
        write_folder, write_image_adapter,
    },
    init::WeightSource,
};
use anyroll_strategy::checkpoint::{self, CheckpointWeights};
use serde_json::{Map, Value};

use crate::{
    Error, Result, base_model::BaseModel, diffusion::PublishedModel, hub::Name, offline::value_head,
    opened::Opened, prepare::Draft, run_dir::RunDir, train::or_older,
};

/// File of a published model that is copied along with its weights.
const GENERATION: &str = "generation_config.json";

/// Files of a tokenizer, which are copied along with a model's weights and with adapters.
const TOKENIZER: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
];

/// Options of an export.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Dtype of the written weights.
    pub dtype: ExportDtype,
    /// Write only the adapters, as PEFT loads them (diffusers for an image model), instead of merging them.
    pub adapter: bool,
}

/// Writes the model of the run folder `run` to the new folder `to` and returns the checkpoint that was used:
/// `checkpoint` or the last one. No device is opened. The checkpoint may come from any number of ranks and
/// any stage.
///
/// # Errors
/// [`Error::Export`] for a run without a checkpoint, or without the adapters asked for; or the error of a
/// file.
pub fn export(run: &Path, checkpoint: Option<&Path>, to: &Path, options: ExportOptions) -> Result<PathBuf> {
    let refuse = |problem: &str| Error::Export { run: run.to_owned(), problem: problem.to_owned() };
    let dir = RunDir::open(run)?;
    let (config, opened) = Draft::read(&dir.resolved(), &[])?.open()?;
    let last = || dir.newest_checkpoint()?.ok_or_else(|| refuse("it has no checkpoint yet"));
    let checkpoint = checkpoint.map_or_else(last, |path| Ok(path.to_owned()))?;
    let base = match opened {
        Opened::Texts(texts) => texts.base,
        Opened::Images(images) => {
            export_images(images.model, config.seed, &checkpoint, to, options)?;
            return Ok(checkpoint);
        }
        Opened::Shapes(_) => {
            return Err(refuse("it trains a class-conditional model, which no other program loads"));
        }
    };
    let begun = begun(&base, &config)?;
    let trained = |units: &[Unit]| {
        Ok::<_, Error>(Trained { checkpoint: open_checkpoint(&checkpoint, units)?, base: &*begun })
    };
    if let PipelineConfig::Offline(offline) = &config.pipeline
        && offline.objective.is_of_numbers()
    {
        if options.adapter {
            return Err(refuse("it trains a reward model, which has no adapters"));
        }
        let head = value_head(&offline.objective);
        let model = ValueModel::with_head(base.config.clone(), head, tch::Device::Cpu)?;
        let weights = trained(model.units())?;
        let file = config_json(&base, &config.model).map_err(anyroll_models::Error::from)?;
        let file = scorer_config_file(file, head);
        write_model(to, &base, &config.model, model.units(), file, &weights, options.dtype)?;
        return Ok(checkpoint);
    }
    let weights = trained(policy(&base, &config, tch::Device::Cpu)?.units())?;
    match (&base.lora, options.adapter) {
        (None, true) => return Err(refuse("it has no adapter: it was run without `model.lora`")),
        (Some(lora), true) => {
            let ModelConfig::Folder(folder) = &config.model else {
                unreachable!("only a folder has adapters")
            };
            let (named, revision) = base_named(&dir, &folder.path);
            let decoder = base.decoder(tch::Device::Cpu)?;
            let files = published_files(&folder.path)?;
            let contents = FolderContents {
                kind: FolderKind::Adapter,
                config: adapter_config_file((lora, &base.config), &named, revision.as_deref()),
                copied: &files.copied(&TOKENIZER),
                made: &files.made(&TOKENIZER),
                units: decoder.units(),
                weights: &weights,
                dtype: options.dtype,
            };
            write_adapter(to, contents)?;
        }
        (Some(lora), false) => {
            let merged = Merged { base: &*begun, adapter: &weights, lora };
            write_language_model(to, &base, &config.model, &merged, options.dtype)?;
        }
        (None, false) => write_language_model(to, &base, &config.model, &weights, options.dtype)?,
    }
    if config.trains_values() {
        tracing::warn!(
            "the heads of `ilql` are left out: the exported model completes without their guidance"
        );
    }
    Ok(checkpoint)
}

/// The weights that a run with this config trained from: those of its base, with matrices in 4 bits if it kept them so.
pub fn begun<'a>(base: &'a BaseModel, config: &Config) -> Result<Box<dyn WeightSource + 'a>> {
    Ok(match config.strategy.frozen_weights {
        FrozenWeights::Precision => Box::new(&*base.weights),
        FrozenWeights::Nf4 => {
            let kind =
                config.roles.policy.strategy.precision.unwrap_or(config.strategy.precision).dtype().kind();
            Box::new(InFourBits::new(&*base.weights, &base.decoder(tch::Device::Cpu)?, kind))
        }
    })
}

/// The policy of a run with this config, on `device`, with its adapters or with the heads of values that guide it.
pub fn policy(base: &BaseModel, config: &Config, device: tch::Device) -> Result<Decoder> {
    match &config.pipeline {
        PipelineConfig::Offline(offline) => match offline.objective.ilql() {
            Some(ilql) => Ok(IlqlModel::new(base.config.clone(), ilql.two_qs, device)?.guided(ilql.guidance)),
            None => base.decoder(device),
        },
        _ => base.decoder(device),
    }
}

/// Exports an image model, or its adapters, for diffusers.
fn export_images(
    model: PublishedModel,
    seed: u64,
    checkpoint: &Path,
    to: &Path,
    options: ExportOptions,
) -> Result<()> {
    let lora = model.lora.clone();
    let (folder, adapter) = model.into_weights(seed);
    let shape = folder.transformer_config();
    let built = shape.build(lora.as_ref(), None, tch::Device::Cpu)?;
    let begun = WithAdapter { base: &folder, adapter };
    let trained = Trained { checkpoint: open_checkpoint(checkpoint, built.units())?, base: &begun };
    if options.adapter {
        let Some(lora) = &lora else {
            let problem = "it has no adapter: it was run without `model.lora`".to_owned();
            return Err(Error::Export { run: checkpoint.to_owned(), problem });
        };
        let unscaled = Unscaled { adapter: &trained, scale: lora.scale };
        return Ok(write_image_adapter(to, (shape, lora), &unscaled, options.dtype)?);
    }
    let merged = lora.as_ref().map(|lora| Merged { base: &folder, adapter: &trained, lora });
    let weights: &dyn WeightSource = match &merged {
        Some(merged) => merged,
        None => &trained,
    };
    Ok(write_diffusers_folder(to, &folder, weights, options.dtype)?)
}

/// Opens the checkpoint at `path` of a model with these units, with the checks of `--resume`.
///
/// # Errors
/// Errors of [`CheckpointWeights::open`], which name the newest complete checkpoint if a file of the run's last one is
/// broken.
pub fn open_checkpoint(path: &Path, units: &[Unit]) -> Result<CheckpointWeights> {
    CheckpointWeights::open(path, units).map_err(|error| {
        let siblings = path.parent().map(checkpoint::list);
        let saved = siblings.and_then(Result::ok).unwrap_or_default();
        or_older(error.into(), &saved)
    })
}

/// Weights of a checkpoint, and the base model's for parameters that were not trained.
pub struct Trained<'a> {
    /// Weights of the run's checkpoint.
    pub checkpoint: CheckpointWeights,
    /// Weights that the run started from.
    pub base: &'a dyn WeightSource,
}

impl WeightSource for Trained<'_> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> anyroll_models::Result<()> {
        match self.checkpoint.holds(spec) {
            true => self.checkpoint.read(spec, range, values),
            false => self.base.read(spec, range, values),
        }
    }
}

fn write_language_model(
    to: &Path,
    base: &BaseModel,
    model: &ModelConfig,
    weights: &dyn WeightSource,
    dtype: ExportDtype,
) -> Result<()> {
    let decoder = Decoder::new(base.config.clone(), tch::Device::Cpu)?;
    let config = config_json(base, model).map_err(anyroll_models::Error::from)?;
    write_model(to, base, model, decoder.units(), config, weights, dtype)
}

/// Writes a model of these units with this `config.json` and the tokenizer of the base model.
fn write_model(
    to: &Path,
    base: &BaseModel,
    model: &ModelConfig,
    units: &[Unit],
    config: Map<String, Value>,
    weights: &dyn WeightSource,
    dtype: ExportDtype,
) -> Result<()> {
    let (copied, made) = match (model, &*base.tokenizer) {
        (ModelConfig::Folder(folder), _) => {
            let (files, names) = (published_files(&folder.path)?, [&[GENERATION], &TOKENIZER[..]].concat());
            (files.copied(&names), files.made(&names))
        }
        (_, Tokenizer::Characters(tokenizer)) => (Vec::new(), tokenizer.files()),
        (_, Tokenizer::Folder(_)) => (Vec::new(), Vec::new()),
    };
    let contents = FolderContents {
        kind: FolderKind::Model,
        config,
        copied: &copied,
        made: &made,
        units,
        weights,
        dtype,
    };
    Ok(write_folder(to, &contents)?)
}

/// Writes the trainable units of `contents`.
fn write_adapter(to: &Path, contents: FolderContents) -> Result<()> {
    let units: Vec<_> = contents.units.iter().filter(|unit| unit.trainable).cloned().collect();
    Ok(write_folder(to, &FolderContents { units: &units, ..contents })?)
}

/// Name of the base model in the folder `folder` for other programs, and its revision: the name on the hub, the path as
/// `config.yaml` has it, or the whole path.
fn base_named(dir: &RunDir, folder: &Path) -> (String, Option<String>) {
    if let Some(name) = Name::of_snapshot(folder) {
        return (name.repository().to_owned(), name.revision().map(str::to_owned));
    }
    let written = Draft::read(&dir.config(), &[]).ok();
    let given = written.as_ref().and_then(Draft::config).and_then(|config| match &config.model {
        ModelConfig::Folder(given) => Some(&given.path),
        _ => None,
    });
    // A `--set` may have named another one.
    let given = given.filter(|given| folder.ends_with(given.strip_prefix(".").unwrap_or(given)));
    (given.map_or(folder, |given| given).display().to_string(), None)
}

/// `config.json` of the published model, or a new one for a decoder trained from scratch.
fn config_json(base: &BaseModel, model: &ModelConfig) -> anyroll_models::hf::Result<Map<String, Value>> {
    match model {
        ModelConfig::Folder(folder) => Ok(ModelFolder::open_shape(&folder.path)?.config_file()),
        _ => config_file(&base.config, &base.tokenizer.stop_tokens()),
    }
}

fn published_files(model: &Path) -> Result<PublishedFiles> {
    Ok(PublishedFiles::open(model).map_err(anyroll_models::Error::from)?)
}
