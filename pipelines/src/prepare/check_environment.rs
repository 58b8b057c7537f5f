//! What must hold for an environment, and between it and the rest of a run.

use std::sync::Arc;

use super::check::Check;
use crate::config::{
    Config, EnvironmentConfig, Problem, RewardConfig, RewardKind, RewardTerm, RlvrConfig, RolloutConfig,
    Speaker,
};
use crate::data::{CharTokenizer, Tokenizer};
use crate::environment::Environment;
use crate::error_chain::one_line;

const PATH: &str = "pipeline.rlvr.rollout.environment";

impl Check<'_> {
    /// `tokenizer` is a published model's.
    pub(super) fn environment(
        &self,
        config: &Config,
        rlvr: &RlvrConfig,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<(), Problem> {
        self.environment_is_rewarded(rlvr)?;
        let Some(environment) = &rlvr.rollout.environment else { return Ok(()) };
        self.environment_fields(&rlvr.rollout, environment)?;
        let help = "write `ahead: 0`, or leave `rollout.environment` out";
        self.ensure(
            rlvr.rollout.asynchronous.ahead == 0,
            "pipeline.rlvr.rollout.async.ahead",
            "an episode lives in a process, and ends with the step that began it",
            help,
        )?;
        self.ensure(
            config.roles.rollout.is_none(),
            "roles.rollout",
            "with `rollout.environment` sampling and training take turns on the policy's devices",
            "leave one of the two out",
        )?;
        self.environment_is_read(environment, tokenizer)
    }

    fn environment_fields(
        &self,
        rollout: &RolloutConfig,
        environment: &EnvironmentConfig,
    ) -> Result<(), Problem> {
        let field = |name: &str| format!("{PATH}.{name}");
        self.file(&field("path"), &environment.path)?;
        self.positive(&field("max_turns"), environment.max_turns)?;
        if let Some(tokens) = environment.max_turn_tokens {
            self.positive(&field("max_turn_tokens"), tokens)?;
            self.ensure(
                tokens <= rollout.max_new_tokens,
                &field("max_turn_tokens"),
                format!("{tokens} is more than all turns may have together"),
                format!("write at most `rollout.max_new_tokens`, {}", rollout.max_new_tokens),
            )?;
        }
        self.number_of_threads(&field("workers"), rollout.open_episodes())?;
        self.seconds(&field("timeout_s"), environment.timeout_s)?;
        self.seconds(&field("start_timeout_s"), environment.start_timeout_s)
    }

    /// An episode that fails is told by its reward.
    fn environment_is_rewarded(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let terms = match &rlvr.reward {
            RewardConfig::Exact => &[][..],
            RewardConfig::Sum(terms) => terms,
        };
        let is_environment = |term: &RewardTerm| matches!(term.kind, RewardKind::Environment(_));
        let rewarded = terms.iter().position(is_environment);
        let path = "pipeline.rlvr.reward";
        match (&rlvr.rollout.environment, rewarded) {
            (Some(_), None) => {
                let help = "add `- environment: {}`; what the environment gives no reward for counts 0 there";
                Err(self.problem(path, "no term is what `rollout.environment` gives", help))
            }
            (None, Some(index)) => {
                let help = "leave it out, or write `rollout.environment`";
                Err(self.problem(&format!("{path}[{index}].environment"), "there is no environment", help))
            }
            (Some(_), Some(index)) => self.ensure(
                terms[index].domains.is_empty(),
                &format!("{path}[{index}].domains"),
                "all records have episodes",
                "leave it out",
            ),
            (None, None) => Ok(()),
        }
    }

    /// Whether the model can read what the environment says.
    fn environment_is_read(
        &self,
        environment: &EnvironmentConfig,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<(), Problem> {
        let (field, help) = (format!("{PATH}.role"), "write `none`: what it says then stands as it is");
        let speaker = tokenizer.map_or(environment.role.unwrap_or(Speaker::None), |tokenizer| {
            tokenizer.speaker(environment.role)
        });
        let Some(role) = speaker.role() else { return Ok(()) };
        match tokenizer.filter(|tokenizer| tokenizer.is_of_chat()) {
            None => Err(self.problem(&field, "without `model.chat: true` there are no messages", help)),
            Some(tokenizer) => tokenizer
                .encode_observation("ok", Some(role), tokenizer.stop_tokens()[0])
                .map(drop)
                .map_err(|error| self.problem(&field, one_line(&error), help)),
        }
    }

    /// Whether its file has the class.
    pub(super) fn environment_starts(&self, rollout: &RolloutConfig) -> Result<(), Problem> {
        // Nothing is read here.
        let tokenizer = Arc::new(Tokenizer::Characters(CharTokenizer::new(&[].into())));
        Environment::new(rollout, tokenizer).map(drop).map_err(|failure| {
            let help = "mend the file, or name in `python` an interpreter that has what it imports";
            self.problem(&format!("{PATH}.path"), failure.to_string(), help)
        })
    }
}
