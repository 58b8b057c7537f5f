//! Files that the config of a language model names: folder, data, reference and reward models.

use std::path::Path;

use anyroll_config::error_chain::one_line;
use anyroll_config::{
    Config, DataConfig, DecoderConfig, ModelConfig, OfflineConfig, RlvrConfig, RolesConfig, Section, Turns,
};
use anyroll_data::{Dataset, Tokenizer, TokenizerError};
use anyroll_models::hf::{self, ModelFolder};
use anyroll_reward::OpenModel;

use super::adapters::{self, Adapters};
use super::{answers, data, environment, reference, rewards, steps};
use crate::base_model::BaseModel;
use crate::opened::{Opened, Texts};

/// Help for an unusable model folder.
const MEND_FOLDER: &str =
    "mend the folder; `model.chat: false` gives prompts as they are, without a chat template";

/// Help for prompts that are messages.
const TEXTS_OR_CHAT: &str =
    "give a model's folder with `chat: true`, or name a column of texts: `columns: {prompt: ...}`";

/// The policy, as far as it is known before its data.
pub(super) enum Policy<'a> {
    /// A model made from scratch, with one token per character of its data.
    Made(&'a DecoderConfig),
    /// A published model.
    Published(Box<Published>),
}

/// A published model.
pub(super) struct Published {
    pub(super) folder: ModelFolder,
    pub(super) tokenizer: Tokenizer,
    adapters: Option<Adapters>,
}

/// Maximum tokens of a sequence of the policy.
pub(super) struct LengthLimit<'a> {
    /// The field that sets the maximum.
    pub(super) field: &'static str,
    pub(super) max_length: usize,
    /// Reason for the maximum.
    pub(super) why: &'a str,
}

impl<'a> Policy<'a> {
    /// Opens the folder that the config names; `None` if it cannot be used.
    fn open(config: &'a Config, at: &Section, reads_weights: bool) -> Option<Self> {
        if !at.is_read("model") {
            return None;
        }
        let model = match &config.model {
            ModelConfig::Decoder(decoder) => {
                return at.is_sound("model.decoder").then_some(Self::Made(decoder));
            }
            ModelConfig::Folder(model) if at.is_read("model.path") => model,
            ModelConfig::Folder(_) | ModelConfig::Dit(_) | ModelConfig::Diffusers(_) => return None,
        };
        let help = "give the folder of a model as Hugging Face publishes it, with its config.json and safetensors files, or a \
                    GGUF file; docs/guides/models.md has the families";
        let opened = open_folder(&model.path, reads_weights);
        let folder = at.take(opened, "model.path", |error| one_line(error), help)?;
        let lora = model.lora.as_ref();
        let adapters = lora.and_then(|lora| adapters::open(lora, &folder, &at.below("model.lora")));
        let tokenizer = Tokenizer::of_folder(&folder, model);
        let tokenizer = tokenizer.inspect_err(|error| refuse_unread(error, at)).ok()?;
        Some(Self::Published(Box::new(Published { folder, tokenizer, adapters })))
    }

    /// Tokenizer of a published model.
    pub(super) fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Made(_) => None,
            Self::Published(published) => Some(&published.tokenizer),
        }
    }

    pub(super) fn length_limit(&self) -> LengthLimit<'_> {
        match self {
            Self::Made(decoder) => {
                LengthLimit { field: "model.decoder.max_length", max_length: decoder.max_length, why: "" }
            }
            Self::Published(published) => {
                let shape = published.folder.decoder_config();
                let max_length = shape.max_position_embeddings as usize;
                LengthLimit { field: "model.path", max_length, why: shape.why_no_longer() }
            }
        }
    }

    /// Converts to the model of the run; new weights are drawn with `seed`.
    fn into_base(self, dataset: &Dataset, seed: u64) -> BaseModel {
        match self {
            Self::Made(decoder) => BaseModel::made(decoder, dataset, seed),
            Self::Published(published) => {
                let Published { folder, tokenizer, adapters } = *published;
                let adapters = adapters.map(|Adapters { shape, folder }| (shape, folder));
                BaseModel::published(folder, tokenizer, adapters, seed)
            }
        }
    }
}

/// Reports a text that a published model's tokenizer cannot read.
pub(super) fn refuse_unread(error: &TokenizerError, at: &Section) {
    match error {
        TokenizerError::Messages { .. } => at.refuse("model.chat", one_line(error), TEXTS_OR_CHAT),
        _ => at.refuse("model.path", one_line(error), MEND_FOLDER),
    }
}

/// Returns the dataset, or `None` and a problem if it has messages, which a model of characters cannot read.
pub(super) fn without_messages<'a>(dataset: &'a Dataset, at: &Section) -> Option<&'a Dataset> {
    let examples = dataset.examples();
    let Some(record) = examples.iter().find(|record| !record.messages.is_empty()) else {
        return Some(dataset);
    };
    let error = TokenizerError::Messages { record: record.id.clone() };
    at.refuse("model.decoder", one_line(&error), TEXTS_OR_CHAT);
    None
}

/// Opens the files of an RLVR run.
pub(super) fn of_rlvr(
    config: &Config,
    rlvr: &RlvrConfig,
    at: &Section,
    reads_weights: bool,
) -> Option<Opened> {
    let pipeline = at.below("pipeline.rlvr");
    let policy = Policy::open(config, at, reads_weights);
    environment::check(rlvr, policy.as_ref(), at);
    let reward_models = rewards::open(&rlvr.reward, &pipeline.below("reward"));
    let evaluated = rlvr.evaluation.prompts;
    let wanted = data::Use { evaluated, turns: Turns::Last, unpaired: false, prm: None, ilql: None };
    let dataset = open_data(&pipeline, &rlvr.data, &wanted, policy.as_ref());
    let length = steps::length(&config.pipeline, dataset.as_ref(), at);
    // Without steps no schedule is used.
    if let Some(steps) = length.filter(|length| length.steps > 0) {
        rlvr.optimizer.validate_over(steps.steps, &pipeline.below("optimizer"));
        if let Some(critic) = &rlvr.critic {
            critic.validate_over(steps.steps, &pipeline.below("critic"));
        }
    }
    if let Some(dataset) = &dataset {
        data::check_domains(rlvr, dataset, &pipeline);
    }
    let longest = match (&policy, &dataset) {
        (Some(policy), Some(dataset)) => data::check_lengths(rlvr, policy, dataset, at),
        _ => None,
    };
    check_micro_batches(config, longest, at);
    let reference =
        reference::open(config, policy.as_ref().zip(dataset.as_ref()), longest, at, reads_weights);
    finish(config, policy, dataset, reference, reward_models)
}

/// Opens the files of an offline run.
pub(super) fn of_offline(
    config: &Config,
    offline: &OfflineConfig,
    at: &Section,
    reads_weights: bool,
) -> Option<Opened> {
    let pipeline = at.below("pipeline.offline");
    let policy = Policy::open(config, at, reads_weights);
    let (evaluated, turns, objective) = (offline.evaluation.prompts, offline.turns, &offline.objective);
    let (prm, ilql) = (objective.prm(), objective.ilql());
    let wanted = data::Use { evaluated, turns, unpaired: objective.unpairs(), prm, ilql };
    let dataset = open_data(&pipeline, &offline.data, &wanted, policy.as_ref());
    if let Some(steps) = steps::length(&config.pipeline, dataset.as_ref(), at) {
        offline.optimizer.validate_over(steps.steps, &pipeline.below("optimizer"));
    }
    let longest = match (&policy, &dataset) {
        (Some(policy), Some(dataset)) => answers::check(offline, policy, dataset, at),
        _ => None,
    };
    // A record's answers are never split.
    check_micro_batches(config, longest.map(|longest| longest * offline.objective.answers()), at);
    let reference =
        reference::open(config, policy.as_ref().zip(dataset.as_ref()), longest, at, reads_weights);
    finish(config, policy, dataset, reference, Some(Vec::new()))
}

/// Reports limits of micro-batches below the `longest` sequence, in tokens.
fn check_micro_batches(config: &Config, longest: Option<usize>, at: &Section) {
    let RolesConfig { policy, reference, critic, rollout: _ } = &config.roles;
    let roles = [("policy", policy), ("reference", reference), ("critic", critic)];
    let of_roles = roles.map(|(name, role)| (format!("roles.{name}."), role.strategy.micro_batch_tokens));
    let all = of_roles.into_iter().chain([(String::new(), config.strategy.micro_batch_tokens)]);
    for (role, tokens) in all {
        let (Some(tokens), Some(longest)) = (tokens, longest) else { continue };
        at.ensure(
            tokens >= longest,
            &format!("{role}strategy.micro_batch_tokens"),
            format!("what is never split, a sequence or a pair, has up to {longest} tokens"),
            format!("write {longest} or above"),
        );
    }
}

fn open_data(
    pipeline: &Section,
    data: &DataConfig,
    wanted: &data::Use,
    policy: Option<&Policy>,
) -> Option<Dataset> {
    if !pipeline.is_sound("data") || !pipeline.is_read("evaluation.prompts") {
        return None;
    }
    data::open(data, wanted, policy, pipeline)
}

/// Opens the folder of a language model, for its shape alone unless its weights are read.
pub(super) fn open_folder(path: &Path, reads_weights: bool) -> hf::Result<ModelFolder> {
    if reads_weights { ModelFolder::open(path) } else { ModelFolder::open_shape(path) }
}

/// Combines all parts.
fn finish(
    config: &Config,
    policy: Option<Policy>,
    dataset: Option<Dataset>,
    reference: Option<Option<ModelFolder>>,
    reward_models: Option<Vec<OpenModel>>,
) -> Option<Opened> {
    let (policy, dataset) = policy.zip(dataset)?;
    let base = policy.into_base(&dataset, config.seed);
    let (reference, reward_models) = (reference?, reward_models?);
    Some(Opened::Texts(Box::new(Texts { dataset, base, reference, reward_models })))
}
