//! `roles.reference`: the frozen model that a policy is compared with, a copy of itself or a published one, a teacher say.

use anyroll_models::hf::ModelFolder;

use super::check::Check;
use crate::config::{Advantage, AlgorithmConfig, Config, PipelineConfig, Problem, RoleConfig};
use crate::data::{CharTokenizer, Dataset, HfTokenizer, Tokenizer};
use crate::error_chain::one_line;

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
        let Some(path) = &config.roles.reference.path else { return self.is_taught(config) };
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
        let model = folder.decoder_config();
        let (most, why) = (model.max_position_embeddings, model.why_no_longer());
        self.ensure(
            longest as i64 <= most,
            field,
            format!("it has room for {most} tokens{why}, and the policy's sequences have up to {longest}"),
            "give one with more room, or allow fewer tokens",
        )
    }

    /// Without advantages a policy has a teacher to learn from: it is not far from itself, and would stay where it is.
    fn is_taught(&self, config: &Config) -> Result<(), Problem> {
        let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { return Ok(()) };
        let AlgorithmConfig { advantage, entropy_coef, .. } = rlvr.algorithm;
        self.ensure(
            advantage != Advantage::None || entropy_coef > 0.0,
            "roles.reference.path",
            "it is missing, and with `advantage: none` the model there is all that there is to learn from",
            "name the folder of a teacher: `roles: {reference: {path: DIR}}`; or write another advantage",
        )
    }

    /// No other role is a model of its own, and a model of images is compared with itself alone.
    pub(super) fn published_roles(&self, config: &Config) -> Result<(), Problem> {
        for (role, path, what) in [
            ("policy", &config.roles.policy.path, "the policy is the `model` of the top level"),
            ("critic", &config.roles.critic.path, "a critic begins as the policy does"),
        ] {
            self.ensure(path.is_none(), &format!("roles.{role}.path"), what, "leave it out")?;
        }
        self.ensure(
            config.roles.reference.path.is_none() || !matches!(config.pipeline, PipelineConfig::Diffusion(_)),
            "roles.reference.path",
            "a model of images is compared with itself as it was before training",
            "leave it out",
        )
    }

    /// With adapters the reference is the policy, and nothing can be said of how it is held, unless it is another model.
    pub(super) fn no_reference(&self, reference: &RoleConfig) -> Result<(), Problem> {
        self.ensure(
            *reference == RoleConfig::default() || reference.path.is_some(),
            "roles.reference",
            "with `model.lora` the reference is the policy with its adapters off: it has no strategy of its own",
            "leave it out, or name another model in `path`",
        )
    }
}
