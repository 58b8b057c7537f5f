//! What must hold for the `offline` pipeline.

use anyroll_models::hf::ModelFolder;

use super::check::Check;
use super::check_data::evaluated;
use crate::config::*;
use crate::data::{Dataset, Record, Tokenizer};
use crate::offline::read;

/// Held-out records of an evaluation whose prompts the policy could complete.
fn to_complete(offline: &OfflineConfig, dataset: &Dataset) -> usize {
    let records = dataset.held_out(evaluated(offline.evaluation.prompts, dataset)).unwrap_or_default();
    records.iter().filter(|record| record.is_to_complete()).count()
}

/// Writes how many prompts an evaluation completes into a `config` that is checked.
pub(super) fn settle(config: &mut Config, dataset: &Dataset) {
    if let PipelineConfig::Offline(offline) = &mut config.pipeline {
        let completions = offline.completions_of(to_complete(offline, dataset));
        offline.evaluation.completions = Some(completions);
    }
}

impl Check<'_> {
    pub(super) fn offline(&self, config: &Config, offline: &OfflineConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.offline.{name}");
        for (name, value) in [
            ("batch_size", offline.batch_size as u64),
            ("evaluation.every", offline.evaluation.every),
            ("checkpoint.every", offline.checkpoint.every),
            ("checkpoint.keep_last", offline.checkpoint.keep_last as u64),
        ] {
            self.positive(&field(name), value)?;
        }
        self.ensure(
            offline.evaluation.prompts != Some(0) || !offline.checkpoint.keep_best,
            &field("checkpoint.keep_best"),
            "the best policy is told by `eval/loss`, and with `evaluation.prompts: 0` nothing is evaluated",
            "leave it out, or evaluate some held-out records",
        )?;
        self.objective(&field("objective"), &offline.objective)?;
        self.ensure(
            offline.objective.distills().is_none() || config.roles.reference.path.is_some(),
            "roles.reference.path",
            "it is missing, and `objective: distill` learns from the model there",
            "name the folder of a teacher: `roles: {reference: {path: DIR}}`",
        )?;
        self.turns(&field("turns"), config, offline)?;
        self.optimizer(&field("optimizer"), &offline.optimizer)?;
        if let Some(warmup) = &offline.warmup {
            self.warmup(&field("warmup"), warmup)?;
        }
        if offline.objective.is_of_numbers() {
            self.numbers(config, offline)?;
            self.uncut(&field("data"), &offline.data)?;
        }
        self.ensure(
            offline.batch_size >= 2 || !offline.objective.estimates_kl(),
            &field("batch_size"),
            "how far the policy has moved is told by a prompt with another record's answer",
            "write 2 or above",
        )?;
        let StrategyConfig { micro_batch_size, .. } = config.strategy;
        let micro_batch_size = config.roles.policy.strategy.micro_batch_size.unwrap_or(micro_batch_size);
        self.ensure(
            micro_batch_size >= 2 || !offline.objective.compares(),
            "strategy.micro_batch_size",
            "a better and a worse answer are two sequences, and go through the model together",
            "write 2 or above",
        )
    }

    fn turns(&self, path: &str, config: &Config, offline: &OfflineConfig) -> Result<(), Problem> {
        if offline.turns == Turns::Last {
            return Ok(());
        }
        self.ensure(
            offline.objective == Objective::Sft || offline.objective.distills().is_some(),
            path,
            "only `sft` and `distill` learn more than the last message of a conversation",
            "leave it out",
        )?;
        let chats = matches!(&config.model, ModelConfig::Folder(folder) if folder.chat);
        self.ensure(
            chats,
            path,
            "the model has no chat template for conversations",
            "name a folder that has one, with `model.chat: true`, or leave it out",
        )
    }

    fn objective(&self, path: &str, objective: &Objective) -> Result<(), Problem> {
        let (name, beta) = match *objective {
            Objective::Sft => return Ok(()),
            Objective::Dpo(DpoConfig { beta, label_smoothing, sft_weight }) => {
                let holds = (0.0..0.5).contains(&label_smoothing);
                let range = "from 0 to below 0.5";
                self.number(&format!("{path}.dpo.label_smoothing"), label_smoothing, holds, range)?;
                let field = format!("{path}.dpo.sft_weight");
                self.number(&field, sft_weight, sft_weight >= 0.0, "0 or above")?;
                ("dpo", beta)
            }
            Objective::Ipo(IpoConfig { beta }) => ("ipo", beta),
            Objective::Hinge(HingeConfig { beta }) => ("hinge", beta),
            Objective::Simpo(SimpoConfig { beta, gamma }) => {
                self.number(&format!("{path}.simpo.gamma"), gamma, gamma >= 0.0, "0 or above")?;
                ("simpo", beta)
            }
            Objective::Orpo(OrpoConfig { beta }) => ("orpo", beta),
            Objective::Kto(judged) => ("kto", self.judged(&format!("{path}.kto"), judged)?),
            Objective::ApoZeroUnpaired(judged) => {
                let name = "apo_zero_unpaired";
                (name, self.judged(&format!("{path}.{name}"), judged)?)
            }
            Objective::Distill(DistillConfig { beta, temperature, sft_weight }) => {
                let field = |name: &str| format!("{path}.distill.{name}");
                self.number(&field("beta"), beta, (0.0..=1.0).contains(&beta), "from 0 to 1")?;
                // Logits are divided by it.
                self.number(&field("temperature"), temperature, temperature >= 1e-3, "0.001 or above")?;
                return self.number(&field("sft_weight"), sft_weight, sft_weight >= 0.0, "0 or above");
            }
            Objective::RewardModel(RewardModelObjective { center }) => {
                let field = format!("{path}.reward_model.center");
                return self.number(&field, center, center >= 0.0, "0 or above");
            }
        };
        self.number(&format!("{path}.{name}.beta"), beta, beta > 0.0, "above 0")
    }

    /// The weights of answers that are judged each by itself; returns beta.
    fn judged(&self, path: &str, judged: JudgedConfig) -> Result<f64, Problem> {
        let JudgedConfig { beta, desirable_weight, undesirable_weight } = judged;
        for (name, weight) in
            [("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)]
        {
            self.number(&format!("{path}.{name}"), weight, weight >= 0.0, "0 or above")?;
        }
        self.ensure(
            desirable_weight + undesirable_weight > 0.0,
            &format!("{path}.desirable_weight"),
            "both weights are 0, and nothing is learnt",
            "write a weight above 0",
        )?;
        Ok(beta)
    }

    /// A reward model writes nothing, and has no adapters.
    fn numbers(&self, config: &Config, offline: &OfflineConfig) -> Result<(), Problem> {
        let what = "the objective is a reward model's, which gives texts a number";
        self.ensure(offline.warmup.is_none(), "pipeline.offline.warmup", what, "leave it out")?;
        let field = "pipeline.offline.evaluation.completions";
        let completions = offline.evaluation.completions.unwrap_or(0);
        self.ensure(completions == 0, field, what, "write 0, or leave it out")?;
        let adapts = matches!(&config.model, ModelConfig::Folder(folder) if folder.lora.is_some());
        self.ensure(!adapts, "model.lora", "a reward model has no adapters", "leave it out")?;
        self.stages_are_said(config)
    }

    /// A text's number is read at its end.
    fn uncut(&self, path: &str, data: &DataConfig) -> Result<(), Problem> {
        match data {
            DataConfig::File(file) => self.ensure(
                !matches!(file.long_prompts, LongPrompts::Truncate(_)),
                &format!("{path}.file.long_prompts.truncate"),
                "a reward model reads a text's number at its end, which would be cut off",
                "write `leave_out` or `refuse`",
            ),
            DataConfig::Mix(sources) => sources.iter().enumerate().try_for_each(|(index, source)| {
                self.uncut(&format!("{path}.mix[{index}].data"), &source.data)
            }),
            DataConfig::Sort(_) | DataConfig::Addition(_) | DataConfig::Countdown(_) => Ok(()),
        }
    }

    /// Whether every record has what the objective compares, and the model has room for the answers; returns the tokens of the
    /// longest.
    pub(super) fn written(
        &self,
        config: &Config,
        offline: &OfflineConfig,
        published: Option<&(Tokenizer, ModelFolder)>,
        dataset: &Dataset,
    ) -> Result<usize, Problem> {
        let examples = dataset.examples();
        let lacks = |record: &&Record| record.rejected.is_none();
        if let Some(record) = examples.iter().find(lacks).filter(|_| offline.objective.compares()) {
            return Err(self.problem(
                "pipeline.offline.data",
                format!("record {} has no worse answer to compare with", record.id),
                "name its column, `columns: {answer: chosen, rejected: rejected}`, or write `objective: sft`",
            ));
        }
        self.answers_teach(offline, &examples)?;
        self.labels(offline, &examples)?;
        let warms_up = offline.warmup.as_ref().is_some_and(|warmup| warmup.steps > 0);
        self.ensure(
            !warms_up || offline.objective.judged().is_none() || dataset.desirable().is_some(),
            "pipeline.offline.warmup",
            "it learns desirable answers, and a source of the data has none",
            "leave it out, or add some",
        )?;
        let records = evaluated(offline.evaluation.prompts, dataset);
        let prompts = to_complete(offline, dataset);
        let completions = offline.completions_of(prompts);
        self.ensure(
            completions <= prompts,
            "pipeline.offline.evaluation.completions",
            format!(
                "{completions} completions are asked for, and {prompts} of the {records} held-out records can be completed"
            ),
            format!("write {prompts} or fewer, or more `evaluation.prompts`"),
        )?;
        let (field, max_length, why, longest) = match (&config.model, published) {
            (ModelConfig::Decoder(decoder), _) => {
                self.texts(&examples)?;
                ("model.decoder.max_length", decoder.max_length, "", dataset.longest_record() + 1)
            }
            (ModelConfig::Folder(model), Some((tokenizer, folder))) => {
                if let Some(lora) = &model.lora {
                    self.lora(lora, folder, &config.roles.reference)?;
                }
                let shape = folder.decoder_config();
                let max_length = shape.max_position_embeddings as usize;
                let read = read(tokenizer, &offline.objective, offline.turns, &examples);
                let sequences = read.map_err(|error| self.not_read(&error))?;
                let longest = sequences.iter().map(|it| it.tokens.len()).max().unwrap_or(0);
                ("model.path", max_length, shape.why_no_longer(), longest)
            }
            _ => unreachable!("a folder was opened, and a model of images refused"),
        };
        self.ensure(
            longest <= max_length,
            field,
            format!(
                "the longest prompt with its answer is {longest} tokens, and it has room for {max_length}{why}"
            ),
            format!(
                "allow {longest} or above, or write `max_tokens: {max_length}` beside the file's path, which leaves longer \
                 records out; with `long_prompts: {{truncate: keep_start}}` it cuts them"
            ),
        )?;
        Ok(longest)
    }

    /// Whether the answers are judged just where the objective asks for it, and by weights that balance them.
    fn labels(&self, offline: &OfflineConfig, examples: &[Record]) -> Result<(), Problem> {
        let judged = offline.objective.judged();
        let wrong = examples.iter().find(|record| record.desirable.is_some() != judged.is_some());
        let (Some(weights), None) = (judged, wrong) else {
            return wrong.map_or(Ok(()), |record| {
                let (message, help) = match judged {
                    Some(_) => (
                        "does not say whether its answer is desirable",
                        "name the column that does, `columns: {answer: completion, label: label}`, or that of a worse \
                         answer, `columns: {answer: chosen, rejected: rejected}`",
                    ),
                    None => (
                        "has a label, and the objective reads none",
                        "leave `columns.label` out, or write `objective: {kto: {}}`",
                    ),
                };
                Err(self.problem("pipeline.offline.data", format!("record {} {message}", record.id), help))
            });
        };
        let desirable = examples.iter().filter(|record| record.desirable == Some(true)).count();
        let undesirable = examples.len() - desirable;
        if desirable == 0 || undesirable == 0 {
            tracing::warn!(
                desirable,
                undesirable,
                "all answers are of one kind: nothing is held against them"
            );
        } else if desirable != undesirable {
            // As TRL's KTOTrainer recommends.
            let balance = weights.desirable_weight * desirable as f64
                / (weights.undesirable_weight * undesirable as f64);
            if !(1.0..=4.0 / 3.0).contains(&balance) {
                tracing::warn!(
                    desirable,
                    undesirable,
                    balance,
                    "weights are best where desirable_weight x desirable is 1 to 4/3 of undesirable_weight x undesirable"
                );
            }
        }
        Ok(())
    }

    /// Tells which records teach nothing, or to say nothing.
    fn answers_teach(&self, offline: &OfflineConfig, examples: &[Record]) -> Result<(), Problem> {
        let empty: Vec<&Record> = examples.iter().filter(|record| record.answer.is_empty()).collect();
        if let Some(first) = empty.first() {
            let (records, first) = (empty.len(), &first.id);
            tracing::warn!(records, first, "answers are empty: what they teach is to end at once");
        }
        let is_equal = |record: &&Record| record.rejected.as_ref() == Some(&record.answer);
        let equal: Vec<&Record> = examples.iter().filter(is_equal).collect();
        let Some(first) = equal.first().filter(|_| offline.objective.compares()) else { return Ok(()) };
        let (records, id) = (equal.len(), &first.id);
        self.ensure(
            records < examples.len(),
            "pipeline.offline.data",
            "in every record the better answer and the worse one are the same",
            "name another column for one of them, `columns: {answer: chosen, rejected: rejected}`",
        )?;
        tracing::warn!(
            records,
            first = id,
            "the better answer and the worse one are the same: nothing is compared"
        );
        Ok(())
    }
}
