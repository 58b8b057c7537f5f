//! `roles.reference`: the frozen model that a policy is compared with, a copy of itself or a published one, a teacher say.

use std::path::PathBuf;

use anyroll_models::hf::ModelFolder;
use serde::{Deserialize, Serialize};

use super::check::Check;
use super::error::Problem;
use super::resolve::{Role, Run};
use super::schema::{Config, Devices, ModelConfig, PipelineConfig, RoleConfig, StrategyOverride, is_default};
use crate::data::{CharTokenizer, Dataset, HfTokenizer, Tokenizer};
use crate::error_chain::one_line;

/// The frozen model that the policy is compared with, and what it says otherwise than the top level.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceRoleConfig {
    /// The folder of a published model that reads tokens as the policy does, of any size: a teacher. A relative path starts
    /// at the current folder. Default: the policy as it is after the warm-up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Instead of the top-level `backend`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Instead of the top-level `devices`; as many, since every rank holds its part of every role. These may be others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
    /// Instead of fields of the top-level `strategy`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub strategy: StrategyOverride,
}

impl ReferenceRoleConfig {
    /// Where and how it is held.
    pub fn role(&self) -> RoleConfig {
        let Self { path: _, backend, devices, strategy } = self.clone();
        RoleConfig { backend, devices, strategy }
    }
}

impl Run {
    /// The reference, if it has weights of its own: it has none where it is the policy with its adapters off.
    pub fn held_reference(&self) -> Option<&Role> {
        let is_held = self.config.roles.reference.path.is_some() || !self.config.model.has_adapters();
        self.reference.as_ref().filter(|_| is_held)
    }
}

impl Check<'_> {
    /// Whether a published reference can score what the policy of `config` reads and writes, up to `longest` tokens.
    /// `tokenizer` is that of a published policy.
    pub(super) fn reference(
        &self,
        config: &Config,
        tokenizer: Option<&Tokenizer>,
        dataset: &Dataset,
        longest: usize,
    ) -> Result<(), Problem> {
        let field = "roles.reference.path";
        let Some(path) = &config.roles.reference.path else { return Ok(()) };
        let folder = ModelFolder::open(path).map_err(|error| {
            let help = "give the folder of a model as Hugging Face publishes it; `anyroll export` writes one of a run";
            self.problem(field, one_line(&error), help)
        })?;
        let help = "give a model of the policy's family, which has the same tokenizer";
        let theirs = HfTokenizer::open(path).map_err(|error| self.problem(field, one_line(&error), help))?;
        let made;
        let own = match tokenizer {
            Some(tokenizer) => tokenizer,
            None => {
                made = Tokenizer::Characters(CharTokenizer::new(&dataset.characters()));
                &made
            }
        };
        if let Some((text, token)) = own.vocabulary().find(|(text, token)| theirs.token(text) != Some(*token))
        {
            let there = theirs.token(&text).map_or("does not have".to_owned(), |it| format!("calls {it}"));
            let message = format!("it reads other tokens: the policy's {token}, {text:?}, it {there}");
            return Err(self.problem(field, message, help));
        }
        let most = folder.decoder_config().max_position_embeddings;
        self.ensure(
            longest as i64 <= most,
            field,
            format!("it has room for {most} tokens, and the policy's sequences have up to {longest}"),
            "give one with more room, or allow fewer tokens",
        )
    }

    /// A model of images is compared with itself alone.
    pub(super) fn no_published_reference(&self, config: &Config) -> Result<(), Problem> {
        self.ensure(
            config.roles.reference.path.is_none() || !matches!(config.pipeline, PipelineConfig::Diffusion(_)),
            "roles.reference.path",
            "a model of images is compared with itself as it was before training",
            "leave it out",
        )
    }

    /// With adapters the reference is the policy, and nothing can be said of how it is held, unless it is another model.
    pub(super) fn no_reference(&self, reference: &ReferenceRoleConfig) -> Result<(), Problem> {
        self.ensure(
            *reference == ReferenceRoleConfig::default() || reference.path.is_some(),
            "roles.reference",
            "with `model.lora` the reference is the policy with its adapters off: it has no strategy of its own",
            "leave it out, or name another model in `path`",
        )
    }
}

impl ModelConfig {
    /// Whether adapters are what is trained.
    fn has_adapters(&self) -> bool {
        match self {
            Self::Folder(folder) => folder.lora.is_some(),
            Self::Diffusers(model) => model.lora.is_some(),
            Self::Decoder(_) | Self::Dit(_) => false,
        }
    }
}
