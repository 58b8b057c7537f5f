//! What must hold for the fields of rewards.

use std::path::Path;

use super::check::Check;
use crate::config::*;
use crate::reward::{Code, Judge, Model, Pattern, Python, key};

/// Checks a reward that stands alone, read from `tree`.
pub(super) fn check_reward(kind: &RewardKind, tree: &Node) -> Result<(), Problem> {
    let check = Check { tree };
    if let RewardKind::Model(model) = kind {
        let alone = "here is no policy, and there are no ranks";
        let help = "leave it out: it computes on the host";
        check.ensure(model.devices.is_none(), "model.devices", alone, help)?;
        check.ensure(model.strategy.is_none(), "model.strategy", alone, help)?;
        check.ensure(model.backend == host(), "model.backend", alone, help)?;
    }
    if let RewardKind::Environment(_) = kind {
        let help = "train with `rollout.environment`: its rewards are in `samples.jsonl`";
        return Err(check.problem("environment", "it is of episodes, and here is none", help));
    }
    check.reward_kind("", kind)
}

impl Check<'_> {
    pub(super) fn reward(&self, path: &str, reward: &RewardConfig) -> Result<(), Problem> {
        let RewardConfig::Sum(terms) = reward else { return Ok(()) };
        self.ensure(!terms.is_empty(), path, "the list is empty", "add a term, such as `- math: {}`")?;
        for (index, term) in terms.iter().enumerate() {
            let field = format!("{path}[{index}]");
            self.weight_and_error_rate(&field, term.weight, term.max_error_rate)?;
            self.reward_kind(&format!("{field}."), &term.kind)?;
        }
        Ok(())
    }

    /// What stands beside every reward of a sum.
    pub(super) fn weight_and_error_rate(&self, term: &str, weight: f64, rate: f64) -> Result<(), Problem> {
        self.number(&format!("{term}.weight"), weight, weight != 0.0, "other than 0")?;
        let holds = (0.0..=1.0).contains(&rate);
        self.number(&format!("{term}.max_error_rate"), rate, holds, "from 0 to 1")
    }

    /// What must hold for a reward's own fields, whose paths start with `path`.
    fn reward_kind(&self, path: &str, kind: &RewardKind) -> Result<(), Problem> {
        match kind {
            RewardKind::Exact(_)
            | RewardKind::Choice(_)
            | RewardKind::Countdown(_)
            | RewardKind::Ifeval(_)
            | RewardKind::Environment(_) => Ok(()),
            RewardKind::Math(math) => {
                let holds = (0.0..=0.1).contains(&math.tolerance);
                self.number(&format!("{path}math.tolerance"), math.tolerance, holds, "from 0 to 0.1")
            }
            RewardKind::Regex(regex) => Pattern::new(&regex.pattern).map(|_| ()).map_err(|why| {
                let help = "mend the pattern; it has no look-around and no back-references";
                self.problem(&format!("{path}regex.pattern"), why, help)
            }),
            RewardKind::Code(code) => self.code(&format!("{path}code"), code),
            RewardKind::Judge(judge) => self.judge(&format!("{path}judge"), judge),
            RewardKind::Model(model) => self.reward_model(&format!("{path}model"), model),
            RewardKind::Python(python) => {
                self.python(&format!("{path}python"), python)?;
                let field = format!("{path}python.images");
                self.ensure(python.images.is_none(), &field, "completions are no images", "leave it out")
            }
            RewardKind::Length(length) => {
                self.positive(&format!("{path}length.max_tokens"), length.max_tokens)?;
                let field = format!("{path}length.buffer_tokens");
                self.positive(&field, length.buffer_tokens)?;
                self.ensure(
                    length.buffer_tokens <= length.max_tokens,
                    &field,
                    format!("{} is more than `max_tokens`", length.buffer_tokens),
                    format!("write {} or fewer", length.max_tokens),
                )
            }
            RewardKind::Repetition(repetition) => {
                self.positive(&format!("{path}repetition.ngram_words"), repetition.ngram_words)
            }
        }
    }

    fn reward_model(&self, path: &str, model: &RewardModelConfig) -> Result<(), Problem> {
        self.positive(&format!("{path}.batch_size"), model.batch_size)?;
        if let Some(RewardStrategyConfig { zero_stage, collective_timeout_s, .. }) = &model.strategy {
            self.ensure(
                matches!(zero_stage, ZeroStage::Stage(0 | 3) | ZeroStage::Auto),
                &format!("{path}.strategy.zero_stage"),
                "a model that is not trained is whole on every rank, 0, or sharded, 3",
                "write 0, 3 or auto",
            )?;
            if let Some(timeout_s) = collective_timeout_s {
                self.collective_timeout(&format!("{path}.strategy.collective_timeout_s"), *timeout_s)?;
            }
        }
        Model::open(model).map(|_| ()).map_err(|error| {
            let help =
                "give the folder of a sequence classifier with one label; docs/guides/rewards.md has the kinds";
            self.problem(&format!("{path}.path"), error.to_string(), help)
        })
    }

    pub(super) fn python(&self, path: &str, python: &PythonConfig) -> Result<(), Problem> {
        self.file(&format!("{path}.path"), &python.path)?;
        self.seconds(&format!("{path}.timeout_s"), python.timeout_s)?;
        self.seconds(&format!("{path}.start_timeout_s"), python.start_timeout_s)
    }

    fn code(&self, path: &str, code: &CodeConfig) -> Result<(), Problem> {
        self.seconds(&format!("{path}.timeout_s"), code.timeout_s)?;
        for (name, size) in [
            ("memory_mib", code.memory_mib),
            ("processes", code.processes),
            ("disk_mib", code.disk_mib),
            ("output_kib", code.output_kib),
        ] {
            self.positive(&format!("{path}.{name}"), size)?;
        }
        if let Some(http) = &code.http {
            return self.http_sandbox(path, code, http);
        }
        for (index, readable) in code.readable.iter().enumerate() {
            let field = format!("{path}.readable[{index}]");
            let help = "write the path from the root of a folder or file that exists";
            let holds = readable.is_absolute() && readable.exists();
            self.ensure(holds, &field, format!("{} is not there", readable.display()), help)?;
        }
        Ok(())
    }

    /// Nothing is asked of this machine's sandbox where programs run elsewhere.
    fn http_sandbox(&self, path: &str, code: &CodeConfig, http: &HttpSandboxConfig) -> Result<(), Problem> {
        let plain = CodeConfig::default();
        for (name, unsaid) in [
            ("python", code.python == plain.python),
            ("readable", code.readable == plain.readable),
            ("isolation", code.isolation == plain.isolation),
            ("processes", code.processes == plain.processes),
            ("disk_mib", code.disk_mib == plain.disk_mib),
        ] {
            let message = "it is of this machine's sandbox, and with `http` programs run in another";
            let help = "leave it out: whoever runs the service says it there";
            self.ensure(unsaid, &format!("{path}.{name}"), message, help)?;
        }
        let path = format!("{path}.http");
        self.endpoint(&path, &http.endpoint())?;
        let help = "write a language of the service's, such as `python` or `cpp`";
        self.ensure(!http.language.is_empty(), &format!("{path}.language"), "it is empty", help)?;
        self.ensure(
            http.timeout_s > code.timeout_s,
            &format!("{path}.timeout_s"),
            format!("an attempt ends after {} s, and a test may take {}", http.timeout_s, code.timeout_s),
            "write more than `code.timeout_s`",
        )
    }

    fn judge(&self, path: &str, judge: &JudgeConfig) -> Result<(), Problem> {
        self.endpoint(path, &judge.endpoint())?;
        self.positive(&format!("{path}.max_tokens"), judge.max_tokens)?;
        self.number(&format!("{path}.scale"), judge.scale, judge.scale != 0.0, "other than 0")?;
        for (word, number) in &judge.words {
            self.number(&format!("{path}.words.{word}"), *number, true, "that is finite")?;
        }
        Judge::pattern(&judge.pattern).map_err(|why| {
            let help = "write one group, around the number, as in `Score: ([0-9.]+)`; `(?:...)` is none";
            self.problem(&format!("{path}.pattern"), why, help)
        })?;
        Judge::templates(&judge.template).map(|_| ()).map_err(|why| {
            let help =
                "write a text with `{{ prompt }}`, `{{ completion }}` and `{{ answer }}`, as Jinja has it";
            self.problem(&format!("{path}.template"), why, help)
        })
    }

    /// Whether the environment, here and now, has the keys of the endpoints that rewards ask.
    pub(super) fn keys(&self, config: &Config) -> Result<(), Problem> {
        let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { return Ok(()) };
        let RewardConfig::Sum(terms) = &rlvr.reward else { return Ok(()) };
        for (index, term) in terms.iter().enumerate() {
            let (name, variable) = match &term.kind {
                RewardKind::Judge(judge) => ("judge", &judge.key_variable),
                RewardKind::Code(CodeConfig { http: Some(http), .. }) => ("code.http", &http.key_variable),
                _ => continue,
            };
            if let Some(variable) = variable {
                let field = format!("pipeline.rlvr.reward[{index}].{name}.key_variable");
                let help = "set it, or leave the field out if the endpoint wants no key";
                key(variable).map_err(|why| self.problem(&field, why, help))?;
            }
        }
        Ok(())
    }

    /// Whether what rewards start on this machine does start.
    pub(super) fn rewards_start(&self, config: &Config) -> Result<(), Problem> {
        match &config.pipeline {
            PipelineConfig::Rlvr(rlvr) => {
                self.environment_starts(&rlvr.rollout)?;
                let RewardConfig::Sum(terms) = &rlvr.reward else { return Ok(()) };
                terms.iter().enumerate().try_for_each(|(index, term)| {
                    let field = |name: &str| format!("pipeline.rlvr.reward[{index}].{name}");
                    match &term.kind {
                        RewardKind::Python(python) => self.function_loads(&field("python.path"), python),
                        RewardKind::Code(code) => Code::new(code).map(drop).map_err(|failure| {
                            let help =
                                "run it where user namespaces are allowed, or name a service in `http`";
                            self.problem(&field("code"), failure.to_string(), help)
                        }),
                        _ => Ok(()),
                    }
                })
            }
            PipelineConfig::Diffusion(diffusion) => {
                diffusion.reward.fields().into_iter().try_for_each(|(index, kind)| match kind {
                    ImageReward::Python(python) => {
                        self.function_loads(&format!("pipeline.diffusion.reward{index}.python.path"), python)
                    }
                    _ => Ok(()),
                })
            }
            PipelineConfig::Offline(_) => Ok(()),
        }
    }

    fn function_loads(&self, field: &str, python: &PythonConfig) -> Result<(), Problem> {
        Python::new(python).map(drop).map_err(|failure| {
            let help = "mend the file, or name in `python` an interpreter that has what it imports";
            self.problem(field, failure.to_string(), help)
        })
    }

    fn endpoint(&self, path: &str, endpoint: &EndpointConfig) -> Result<(), Problem> {
        let EndpointConfig { url, retries, .. } = endpoint;
        let is_url = url.starts_with("http://") || url.starts_with("https://");
        let help = "write it with `http://` or `https://` before";
        self.ensure(is_url, &format!("{path}.url"), format!("`{url}` is no URL"), help)?;
        self.positive(&format!("{path}.concurrency"), endpoint.concurrency)?;
        self.seconds(&format!("{path}.retry_s"), endpoint.retry_s)?;
        self.seconds(&format!("{path}.timeout_s"), endpoint.timeout_s)?;
        const MOST_RETRIES: u32 = 16;
        let message = format!("{retries} are too many: each waits twice as long as the one before");
        let help = format!("write {MOST_RETRIES} or fewer");
        self.ensure(*retries <= MOST_RETRIES, &format!("{path}.retries"), message, help)
    }

    pub(super) fn seconds(&self, field: &str, value: f64) -> Result<(), Problem> {
        const HOUR_S: f64 = 3600.0;
        let holds = value > 0.0 && value <= HOUR_S;
        self.number(field, value, holds, "of seconds above 0, at most an hour, 3600")
    }

    pub(super) fn file(&self, field: &str, path: &Path) -> Result<(), Problem> {
        let message = format!("there is no file {}", path.display());
        self.ensure(
            path.is_file(),
            field,
            message,
            "give its path; a relative one starts at the current folder",
        )
    }
}
