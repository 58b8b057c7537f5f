//! A model loaded from a folder on one device, for inference.

mod device;
mod scorer;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use anyroll_backends::{CollectiveGroup, Rendezvous, Stream, connect};
use anyroll_config::{
    Config, FolderConfig, FrozenWeights, ModelConfig, Moments, Objective, Offload, OffloadConfig,
    OptimizerOffload, PipelineConfig, Precision, Recompute, Reduction, ShardGroup,
};
use anyroll_data::Tokenizer;
use anyroll_models::{
    Decoder, Engine, Model, PackedBatch, Sequence,
    hf::{AdapterFolder, Merged, ModelFolder},
    init::WeightSource,
};
use anyroll_strategy::{Weights, Zero, checkpoint};
pub use device::DeviceChoice;
pub use scorer::{LoadedScorer, ScoredTexts};
use serde_json::Value;

use crate::{
    Error, Result,
    base_model::BaseModel,
    export::{Trained, begun, open_checkpoint, policy},
    hub::Hub,
    inference::{Capacity, Sampler},
    prepare::Draft,
    run::Strategy,
    run_dir::RunDir,
    train::{Place, hold},
};

/// Options of loading a model.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Device and dtype.
    pub device: DeviceChoice,
    /// Uses the model's chat template, with a prompt as the user's message. Otherwise a run's model is
    /// prompted as in the run.
    pub chat: bool,
    /// System message before it.
    pub system_prompt: Option<String>,
    /// Weight of the values in completions, in place of `guidance` in the run's `ilql`.
    pub guidance: Option<f64>,
    /// Cache in which a model is found by its name.
    pub hub: Hub,
}

/// A model of either kind.
#[derive(Debug)]
pub enum Loaded {
    /// A model that generates text.
    Text(LoadedModel),
    /// A reward model.
    Scorer(LoadedScorer),
}

impl Loaded {
    /// Loads the folder `path`: one of [`LoadedModel::open`], a run that trained a reward model, one of its
    /// checkpoints, or a published sequence classifier.
    ///
    /// # Errors
    /// The errors of [`LoadedModel::open`].
    pub fn open(path: &Path, options: &Options) -> Result<Self> {
        let path = &options.hub.model(path)?;
        if LoadedScorer::is_at(path) {
            if options.guidance.is_some() {
                return Err(no_values());
            }
            return LoadedScorer::of_folder(path, options).map(Self::Scorer);
        }
        match found(path, options)? {
            Found::Text(base, saved) => LoadedModel::new(base, saved, options).map(Self::Text),
            Found::Scorer { config, base, saved, .. } => {
                LoadedScorer::of_run(&config, &base, &saved, options).map(Self::Scorer)
            }
        }
    }
}

/// Base model of a folder.
enum Found {
    /// A model that generates text, and the checkpoint to load over it.
    Text(BaseModel, Option<Saved>),
    /// The reward model of a run.
    Scorer { run: PathBuf, config: Box<Config>, base: BaseModel, saved: PathBuf },
}

/// Checkpoint of a run.
struct Saved {
    path: PathBuf,
    /// Config of the run.
    config: Box<Config>,
}

impl Saved {
    /// Sets the weight of the values in completions. Returns false for a run that trained no values.
    fn guide(&mut self, guidance: f64) -> bool {
        let PipelineConfig::Offline(offline) = &mut self.config.pipeline else { return false };
        let Objective::Ilql(ilql) = &mut offline.objective else { return false };
        ilql.guidance = guidance;
        true
    }
}

/// Error of guidance without heads of values.
fn no_values() -> Error {
    let problem = "is for runs of `ilql`, whose checkpoints have heads of values: leave it out".to_owned();
    anyroll_models::Error::Input { what: "--guidance", problem }.into()
}

/// A model for inference on one device.
#[derive(Debug)]
pub struct LoadedModel {
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    zero: Zero<Decoder>,
    compute: Stream,
    torch: tch::Device,
    /// Step of the run that the weights are from; 0 for a published model.
    version: u64,
}

impl LoadedModel {
    /// Loads the folder or name `path`: a run (its last checkpoint), one of its checkpoints, a published model, or a
    /// PEFT adapter, merged into the model that it names.
    ///
    /// # Errors
    /// [`Error::Model`] and similar errors, which name the file or field that cannot be used.
    pub fn open(path: &Path, options: &Options) -> Result<Self> {
        match found(&options.hub.model(path)?, options)? {
            Found::Text(base, saved) => Self::new(base, saved, options),
            Found::Scorer { run, .. } => {
                let trained = "a reward model, which generates no text: `anyroll serve` answers with its rewards, and \
                               `anyroll export` writes the folder that the reward `model` reads";
                Err(Error::NoText { run, trained })
            }
        }
    }

    fn new(base: BaseModel, saved: Option<Saved>, options: &Options) -> Result<Self> {
        let place = place(options)?;
        let torch = place.torch_device()?;
        let strategy = strategy(options.device.precision(&*place.device));
        // Adapters are merged into the weights.
        let model = Arc::new(match &saved {
            Some(saved) if saved.config.trains_values() => policy(&base, &saved.config, torch)?,
            _ => Decoder::new(base.config.clone(), torch)?,
        });
        let hold = |weights: &dyn WeightSource| hold(model.clone(), &strategy, &place, None, weights);
        let begun = saved.as_ref().map(|saved| begun(&base, &saved.config)).transpose()?;
        let begun = begun.as_deref().unwrap_or(&*base.weights);
        let trained = match &saved {
            Some(Saved { path, config }) => {
                // Units are laid out without a device.
                let units = policy(&base, config, tch::Device::Cpu)?;
                Some(Trained { checkpoint: open_checkpoint(path, units.units())?, base: begun })
            }
            None => None,
        };
        let weights = trained.as_ref().map_or(begun, |trained| trained as &dyn WeightSource);
        let zero = match &base.lora {
            Some(lora) => hold(&Merged { base: begun, adapter: weights, lora })?,
            None => hold(weights)?,
        };
        let version = match &saved {
            Some(Saved { path, .. }) => {
                checkpoint::extra(path)?.get("steps").and_then(Value::as_u64).unwrap_or(0)
            }
            None => 0,
        };
        let compute = Stream::torch(&place.device)?;
        Ok(Self { tokenizer: base.tokenizer.clone(), zero, compute, torch, version })
    }

    /// Maximum length of a sequence.
    pub fn max_length(&self) -> usize {
        self.zero.model().config().max_position_embeddings as usize
    }

    /// Explanation for errors about [`Self::max_length`].
    pub fn why_no_longer(&self) -> &'static str {
        self.zero.model().config().why_no_longer()
    }

    /// Checks that the model has all of these tokens; the error names one that it lacks.
    pub fn check_tokens(&self, tokens: &[i64]) -> Result<()> {
        Ok(self.zero.model().check_tokens(tokens.iter().copied())?)
    }

    /// An engine with these weights.
    pub fn engine(&mut self, capacity: Capacity) -> Result<Engine> {
        let weights = self.zero.weights()?;
        capacity.engine(self.zero.model(), &weights, self.version, &self.compute, None)
    }

    /// The weights.
    pub fn weights(&mut self) -> Result<Weights> {
        Ok(self.zero.weights()?)
    }

    /// Step of the run that the weights are from; 0 for a published model.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The group of the model's one rank.
    pub fn group(&self) -> &CollectiveGroup {
        self.zero.group()
    }

    /// A sampler of this model with `sequences` in flight, whose KV cache may take the fraction `memory` of the free
    /// memory. Completions end with any text of `stop`.
    pub fn sampler(&self, sequences: usize, memory: f64, stop: &[String]) -> Sampler {
        Sampler {
            model: self.zero.model().clone(),
            compute: self.compute.clone(),
            tokenizer: self.tokenizer.clone(),
            max_turn_tokens: None,
            batch_size: sequences,
            stop: stop.to_vec(),
            cache_memory: memory,
            threads: None,
            records_routing: false,
            speculation: None,
            kept: Mutex::default(),
        }
    }

    /// Log-probs of all tokens after the prompts, under softmax(logits / temperature), computed by training's
    /// forward pass; one list per sequence.
    pub fn logprobs(&mut self, sequences: &[Sequence], temperature: f64) -> Result<Vec<Vec<f32>>> {
        let batch = PackedBatch::new(sequences, temperature, self.torch)?;
        let logprobs = self.zero.score(&batch)?.logprobs.f_to_device(tch::Device::Cpu)?;
        let logprobs: Vec<f32> = logprobs.try_into()?;
        let mut rest = logprobs.as_slice();
        let lengths = sequences.iter().map(|sequence| sequence.tokens.len() - sequence.prompt_len);
        let parts = lengths.map(|length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            part.to_vec()
        });
        Ok(parts.collect())
    }
}

/// Fails if log-probs are NaN.
pub fn check_numbers(logprobs: &[f32]) -> Result<()> {
    if logprobs.iter().any(|logprob| logprob.is_nan()) { Err(Error::NoNumbers) } else { Ok(()) }
}

/// Finds the model of a folder, with the guidance that the options ask for.
fn found(path: &Path, options: &Options) -> Result<Found> {
    let mut found = found_at(path, options)?;
    let Some(guidance) = options.guidance else { return Ok(found) };
    let is_guided = match &mut found {
        Found::Text(_, Some(saved)) => saved.guide(guidance),
        Found::Text(_, None) | Found::Scorer { .. } => false,
    };
    if is_guided { Ok(found) } else { Err(no_values()) }
}

fn found_at(path: &Path, options: &Options) -> Result<Found> {
    let Options { chat, system_prompt, .. } = options.clone();
    let is_adapter = AdapterFolder::is_at(path);
    let (run, named) = RunDir::and_checkpoint(path);
    let dir = RunDir::open(&run);
    // A folder with weights of several kinds is what it was before its GGUF file was put there.
    let is_model =
        path.join("config.json").is_file() || !is_adapter && dir.is_err() && ModelFolder::is_at(path);
    if path.is_file() || is_model {
        let config = FolderConfig { path: path.to_owned(), chat, system_prompt, lora: None };
        return Ok(Found::Text(BaseModel::of_folder(&config)?, None));
    }
    if is_adapter {
        return Ok(Found::Text(BaseModel::of_adapter(path, chat, system_prompt, &options.hub)?, None));
    }
    let dir = dir.map_err(|_| Error::NoModel { path: path.to_owned() })?;
    let saved = match named {
        Some(checkpoint) => Some(checkpoint),
        None => dir.newest_checkpoint()?,
    };
    let saved = saved
        .ok_or_else(|| Error::Resume { run: run.clone(), problem: "it has no checkpoint yet".to_owned() })?;
    let draft = Draft::read(&dir.resolved(), &[])?;
    let (config, opened) = draft.open()?;
    let trains_a_reward_model = config.trains_a_reward_model();
    let Some(texts) = opened.into_texts() else {
        return Err(Error::NoText { run, trained: "an image model, which generates no text" });
    };
    let mut base = texts.base;
    if matches!(&config.pipeline, PipelineConfig::Offline(offline) if offline.objective.prm().is_some()) {
        let trained = "a process reward model, which scores steps: `anyroll export` writes the folder that the reward \
                       `model` reads with `per_step`";
        return Err(Error::NoText { run, trained });
    }
    if trains_a_reward_model {
        return Ok(Found::Scorer { run, config: Box::new(config), base, saved });
    }
    if options.chat {
        base.tokenizer = Arc::new(chatting(config.model.clone(), options)?);
    }
    Ok(Found::Text(base, Some(Saved { path: saved, config: Box::new(config) })))
}

/// Tokenizer of a run's model with its chat template on request. Reads the model's folder again.
fn chatting(model: ModelConfig, options: &Options) -> Result<Tokenizer> {
    let ModelConfig::Folder(mut config) = model else {
        let problem = "cannot be used, since the run's character model has no chat template: leave it out";
        return Err(anyroll_models::Error::Input { what: "--chat", problem: problem.to_owned() }.into());
    };
    config.chat = true;
    config.system_prompt = options.system_prompt.clone().or(config.system_prompt);
    let folder = ModelFolder::open(&config.path).map_err(anyroll_models::Error::from)?;
    Ok(Tokenizer::of_folder(&folder, &config)?)
}

/// A single device as a place.
fn place(options: &Options) -> Result<Place> {
    const TIMEOUT: Duration = Duration::from_secs(60);
    let device = options.device.open()?;
    let rendezvous = Rendezvous::in_this_process(1, TIMEOUT).map_err(Error::Port)?;
    let comm = connect(&*device, &rendezvous[0])?;
    let group = CollectiveGroup::new("inference", comm, &device, TIMEOUT)?;
    Ok(Place { device, mesh: group.into() })
}

/// Strategy of a whole model on one device.
fn strategy(precision: Precision) -> Strategy {
    Strategy {
        zero_stage: 0,
        precision,
        frozen_weights: FrozenWeights::Precision,
        moments: Moments::Fp32,
        recompute: Recompute::None,
        offload: OffloadConfig { optimizer: OptimizerOffload::None, params: Offload::None },
        deterministic: true,
        keep_logits: false,
        sequence_parallel: 1,
        tensor_parallel: 1,
        expert_parallel: 1,
        shard_group: ShardGroup::All,
        reduction: Reduction::Ordered,
        micro_batch_size: 1,
        micro_batch_tokens: None,
        collective_timeout_s: 60.0,
    }
}
