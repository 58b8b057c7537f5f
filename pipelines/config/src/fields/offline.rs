//! The `offline` pipeline: training on texts that exist before the run.

use serde::{Deserialize, Serialize};

use super::data::{DataConfig, Keep, LongPrompts};
use super::optimizer::{Decays, OptimizerConfig};
use super::schema::{CheckpointConfig, Config, ModelConfig, WarmupConfig, is_default};
use super::stage::ZeroStage;
use super::steps::{DataEpochs, Steps};
use crate::document::Section;

/// Training on texts that exist before the run: answers, or pairs of a chosen and a rejected answer.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OfflineConfig {
    /// Source of prompts and answers, and of rejected answers where the objective compares two answers.
    pub data: DataConfig,
    /// Objective of the training. Default sft.
    #[serde(default)]
    pub objective: Objective,
    /// Weight of the loss that balances a mixture's experts, `transformers`' own, in all steps; 0 or above, and 0 adds no loss.
    /// Default 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub router_aux_loss_coef: f64,
    /// Messages of a conversation that are trained on; all assistant messages only with `sft`, `distill` and `ilql`.
    /// Default last.
    #[serde(default)]
    pub turns: Turns,
    /// Supervised steps on the answers, or the chosen answers, before the first step. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup: Option<WarmupConfig>,
    /// Number of optimizer steps: a count, or `{data_epochs: 3}` for the steps of that number of passes over the data.
    pub steps: Steps<DataEpochs>,
    /// Number of records of a step, over all ranks; a multiple of the number of ranks. If the objective compares two
    /// answers, a record is two sequences of `strategy.micro_batch_size`.
    pub batch_size: usize,
    /// The optimizer; its schedule counts steps.
    pub optimizer: OptimizerConfig,
    /// Interval and number of held-out records of evaluations.
    #[serde(default)]
    pub evaluation: OfflineEvaluationConfig,
    /// Interval and number of checkpoints. `keep_best` keeps the policy with the least `eval/loss`.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// Objective of the training on a record. c and r are the log-probs of the chosen and the rejected answer, summed over
/// the answer's tokens; c' and r' are the reference's log-probs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// Supervised fine-tuning on the answers: the mean of -log-prob over their tokens.
    #[default]
    Sft,
    /// Direct preference optimization (Rafailov et al., 2023).
    Dpo(DpoConfig),
    /// Identity preference optimization (Azar et al., 2023): pairs with a fixed margin.
    Ipo(IpoConfig),
    /// Sequence likelihood calibration by a hinge loss (Zhao et al., 2023), relative to a reference.
    Hinge(HingeConfig),
    /// Simple preference optimization (Meng et al., 2024): no reference, and log-probs are divided by lengths.
    Simpo(SimpoConfig),
    /// Odds ratio preference optimization (Hong et al., 2024): no reference, added to the loss of `sft`.
    Orpo(OrpoConfig),
    /// Kahneman-Tversky optimization (Ethayarajh et al., 2024): single answers that are desirable or undesirable. The
    /// baseline is an estimate of the policy's KL divergence from the reference.
    Kto(JudgedConfig),
    /// The unpaired form of anchored preference optimization (D'Oosterlinck et al., 2024): the same as KTO, with a
    /// baseline of 0.
    ApoZeroUnpaired(JudgedConfig),
    /// Distillation of a teacher, `roles.reference.path`: the teacher's whole distribution at each token of the answers
    /// (Hinton et al., 2015; Agarwal et al., 2024).
    Distill(DistillConfig),
    /// Training of a reward model: the score of the chosen answer is to be larger (Bradley and Terry, 1952). The result
    /// is a model for the reward `model`; c and r are the scores.
    RewardModel(RewardModelObjective),
    /// Training of a process reward model: the probability that a step of a solution is right (Lightman et al., 2023).
    /// The result is a model for the reward `model` with `per_step`. Records have `columns.steps`.
    Prm(PrmConfig),
    /// Implicit language Q-learning (Snell et al., 2022): answers with rewards, from which heads of the policy learn the
    /// values of tokens. The heads guide the policy's completions.
    Ilql(IlqlConfig),
}

/// Messages of a conversation that are trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Turns {
    /// The last message.
    #[default]
    Last,
    /// All assistant messages, each after the messages before it.
    All,
}

impl Objective {
    /// Returns true if the objective compares a chosen answer with a rejected one.
    pub fn compares(&self) -> bool {
        let pairs = !matches!(self, Self::Sft | Self::Distill(_) | Self::Prm(_) | Self::Ilql(_));
        pairs && self.judged().is_none()
    }

    /// Returns the section of `prm`; `None` for other objectives.
    pub fn prm(&self) -> Option<&PrmConfig> {
        match self {
            Self::Prm(prm) => Some(prm),
            _ => None,
        }
    }

    /// Returns the section of `ilql`; `None` for other objectives.
    pub fn ilql(&self) -> Option<&IlqlConfig> {
        match self {
            Self::Ilql(ilql) => Some(ilql),
            _ => None,
        }
    }

    /// Returns true if the objective reads the two answers of a pair as two records.
    pub fn unpairs(&self) -> bool {
        self.judged().is_some() || self.ilql().is_some()
    }

    /// Returns the objective that an evaluation measures. It reads all steps, as in TRL.
    pub fn evaluated(&self) -> Self {
        match self {
            Self::Prm(prm) => Self::Prm(PrmConfig { train_on_last_step_only: false, ..prm.clone() }),
            other => other.clone(),
        }
    }

    /// Returns the section of `distill`; `None` for other objectives.
    pub fn distills(&self) -> Option<&DistillConfig> {
        match self {
            Self::Distill(distill) => Some(distill),
            _ => None,
        }
    }

    /// Returns the section of an unpaired objective, `kto` or `apo_zero_unpaired`; `None` for other objectives.
    pub fn judged(&self) -> Option<&JudgedConfig> {
        match self {
            Self::Kto(judged) | Self::ApoZeroUnpaired(judged) => Some(judged),
            _ => None,
        }
    }

    /// Returns true if the objective estimates the KL divergence from the reference.
    pub fn estimates_kl(&self) -> bool {
        matches!(self, Self::Kto(_))
    }

    /// Returns the number of answers of a record that the objective reads.
    pub fn answers(&self) -> usize {
        if self.compares() { 2 } else { 1 }
    }

    /// Returns true if the trained model scores texts, instead of predicting tokens.
    pub fn is_of_numbers(&self) -> bool {
        matches!(self, Self::RewardModel(_) | Self::Prm(_))
    }

    /// Returns true if the objective needs a reference's log-probs of the answers. The reference is the policy before
    /// training, unless `roles.reference.path` names another model.
    pub fn compares_with_reference(&self) -> bool {
        matches!(self, Self::Dpo(_) | Self::Ipo(_) | Self::Hinge(_)) || self.judged().is_some()
    }

    /// Returns true if the objective needs a reference or a teacher.
    pub fn has_reference(&self) -> bool {
        self.compares_with_reference() || self.distills().is_some()
    }
}

/// Loss of a pair: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), with h = (c - c') - (r - r').
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DpoConfig {
    /// Weight of the distance from the reference; above 0. Default 0.1.
    pub beta: f64,
    /// e, the fraction of the pairs whose order may be wrong, 0 to below 0.5 (cDPO). Default 0.
    pub label_smoothing: f64,
    /// Weight of the loss of `sft` on the chosen answers, which keeps the answers' probability from falling (RPO); 0 or
    /// above. Default 0.
    pub sft_weight: f64,
}

impl Default for DpoConfig {
    fn default() -> Self {
        Self { beta: 0.1, label_smoothing: 0.0, sft_weight: 0.0 }
    }
}

/// Loss of a pair: (h - 1 / (2 beta))², with h as in DPO, but from means over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct IpoConfig {
    /// Parameter of the margin, which is 1 / (2 beta); above 0. Default 0.1.
    pub beta: f64,
}

impl Default for IpoConfig {
    fn default() -> Self {
        Self { beta: 0.1 }
    }
}

/// Loss of a pair: max(0, 1 - beta h), with h as in DPO.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct HingeConfig {
    /// Parameter of the margin: a pair has a loss until h is 1 / beta; above 0. Default 0.1.
    pub beta: f64,
}

impl Default for HingeConfig {
    fn default() -> Self {
        Self { beta: 0.1 }
    }
}

/// Loss of a pair: -log sigmoid(beta (c - r) - gamma), from means over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SimpoConfig {
    /// Scale of the difference; above 0. Default 2.
    pub beta: f64,
    /// Margin; 0 or above. Default 1.
    pub gamma: f64,
}

impl Default for SimpoConfig {
    fn default() -> Self {
        Self { beta: 2.0, gamma: 1.0 }
    }
}

/// Loss of a pair: the loss of `sft` on the chosen answer, plus -beta log sigmoid(log odds(c) - log odds(r)). Here c
/// and r are means over tokens, and odds(x) = p / (1 - p) with p = exp(x).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OrpoConfig {
    /// Weight of the odds ratio, the paper's lambda; above 0. Default 0.1.
    pub beta: f64,
}

impl Default for OrpoConfig {
    fn default() -> Self {
        Self { beta: 0.1 }
    }
}

/// Loss of an answer: w (1 - sigmoid(beta (c - c' - z))) if the answer is desirable, and w (1 - sigmoid(beta (z - r +
/// r'))) if not. Here w is the answer's weight. In `apo_zero_unpaired` z is 0. In `kto` z estimates the KL divergence
/// from the reference, without a gradient. The estimate pairs each of a step's prompts with the answer of the record
/// before it. Over these pairs z is the mean of log-prob minus the reference's log-prob, at least 0.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct JudgedConfig {
    /// Weight of the distance from the reference; above 0. Default 0.1.
    pub beta: f64,
    /// Weight of a desirable answer; 0 or above. Default 1.
    pub desirable_weight: f64,
    /// Weight of an undesirable answer; 0 or above. Default 1.
    pub undesirable_weight: f64,
}

impl Default for JudgedConfig {
    fn default() -> Self {
        Self { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0 }
    }
}

/// Loss of a token: beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p. Here p is the policy's
/// distribution, and q is the teacher's. The loss at beta 0 is KL(q || p), and the loss at beta 1 is KL(p || q), as in
/// TRL. The losses of the answers' tokens are averaged.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DistillConfig {
    /// Interpolation between 0, forward KL, which covers all modes of the teacher, and 1, reverse KL, which covers the
    /// most likely modes. Default 0.5.
    pub beta: f64,
    /// Divisor of the logits of both models; 0.001 or above. Default 1.
    pub temperature: f64,
    /// Weight of the loss of `sft` on the answers, added to the divergence; 0 or above. Default 0.
    pub sft_weight: f64,
}

impl Default for DistillConfig {
    fn default() -> Self {
        Self { beta: 0.5, temperature: 1.0, sft_weight: 0.0 }
    }
}

/// Loss of a pair: -log sigmoid(c - r) + center (c + r)².
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardModelObjective {
    /// Weight of a penalty that centers scores at 0 (Eisenstein et al., 2023), since otherwise only differences of
    /// scores count; 0 or above. Default 0.
    pub center: f64,
}

/// Loss of a step: -y log p - (1 - y) log(1 - p). Here y is the step's label, and p is the probability of the class
/// "right". The loss is the cross-entropy of two classes, as in TRL's PRMTrainer. The probability is read at the last
/// token of the separator that follows the step. The losses of a batch's steps are averaged.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrmConfig {
    /// Text after every step; not empty. Default a line break, `"\n"`.
    pub step_separator: String,
    /// True if only the last step of a record is trained on. Evaluations read all steps. Default false.
    pub train_on_last_step_only: bool,
}

impl Default for PrmConfig {
    fn default() -> Self {
        Self { step_separator: "\n".to_owned(), train_on_last_step_only: false }
    }
}

/// Loss of a token a after the state s, with the values Q1, Q2 and V of the policy's heads: (r + gamma V(s') - Qi(s, a))²
/// for each Q head, plus w (T(s, a) - V(s))², plus `cql_scale` times -log softmax(Qi)(a) for each Q head, plus
/// `awac_scale` times -exp(beta (T(s, a) - V(s))) log p(a). T is the smaller value of the target heads. The weight w is
/// `tau` if T is V or above, else 1 - `tau`. The reward r is 0 but at an answer's last token, after which V(s') is 0.
/// The losses of all answers' tokens are averaged. Everything is that of trlx.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct IlqlConfig {
    /// Expectile of the Q values that V predicts, above 0 and below 1. Default 0.7.
    pub tau: f64,
    /// Discount of the next state's value, 0 to 1. Default 0.99.
    pub gamma: f64,
    /// Weight of the conservative term, which lowers Q of tokens that the data lack; 0 or above. Default 0.1.
    pub cql_scale: f64,
    /// Weight of the likelihood of the answers, as in `sft`; 0 or above. Default 1.
    pub awac_scale: f64,
    /// Exponent of the advantage in a token's weight in the likelihood. With 0 all tokens have the weight 1. Default 0.
    pub beta: f64,
    /// Share by which the target heads move towards the Q heads, above 0 to 1. Default 0.001.
    pub alpha: f64,
    /// Number of steps between moves of the target heads; 1 or above. Default 5.
    pub steps_for_target_q_sync: u64,
    /// True for two Q heads, of which the smaller target counts; false for one. Default true.
    pub two_qs: bool,
    /// True if rewards are scaled to mean 0 and standard deviation 1 over the training records, as in trlx. Each source
    /// of a mix is scaled by itself. Default true.
    pub normalize_rewards: bool,
    /// Weight of the values in completions, `beta` of trlx's `gen_kwargs`: a token's logit is that of the language model
    /// plus `guidance` times T. With 0 the language model completes alone. Default 1.
    pub guidance: f64,
}

impl Default for IlqlConfig {
    fn default() -> Self {
        Self {
            tau: 0.7,
            gamma: 0.99,
            cql_scale: 0.1,
            awac_scale: 1.0,
            beta: 0.0,
            alpha: 0.001,
            steps_for_target_q_sync: 5,
            two_qs: true,
            normalize_rewards: true,
            guidance: 1.0,
        }
    }
}

/// Interval and number of held-out records of evaluations. The policy is always evaluated before and after training.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OfflineEvaluationConfig {
    /// Number of steps between evaluations; 1 or above. Default 25.
    pub every: u64,
    /// Number of held-out records, the same ones each time. With 0 there is no evaluation, and files hold out no
    /// records unless their fields request it. Default 500, or all if there are fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<usize>,
    /// Number of the held-out prompts that the policy also completes, greedily and up to the length of the longest
    /// answer, for people to read. `eval/exact` is the fraction of completions that equal the answer. At most the
    /// number of prompts with an answer; 0 for none. Default 16, or all if there are fewer; a reward model completes
    /// nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completions: Option<usize>,
}

impl Default for OfflineEvaluationConfig {
    fn default() -> Self {
        Self { every: 25, prompts: None, completions: None }
    }
}

impl OfflineConfig {
    /// Returns the number of prompts that an evaluation completes, at most `most`.
    pub fn completions_of(&self, most: usize) -> usize {
        const FEW: usize = 16;
        let own = if self.objective.is_of_numbers() { 0 } else { FEW.min(most) };
        self.evaluation.completions.unwrap_or(own)
    }
}

impl OfflineConfig {
    /// Reports invalid fields of the pipeline of `config`.
    pub(super) fn validate(&self, config: &Config, at: &Section) {
        for (name, value) in
            [("batch_size", self.batch_size as u64), ("evaluation.every", self.evaluation.every)]
        {
            at.positive(name, value);
        }
        let coef = self.router_aux_loss_coef;
        at.number("router_aux_loss_coef", coef, coef >= 0.0, "0 or above");
        self.checkpoint.validate(&at.below("checkpoint"));
        at.given(&["evaluation.prompts"]).ensure(
            self.evaluation.prompts != Some(0) || !self.checkpoint.keep_best,
            "checkpoint.keep_best",
            "the best policy is told by `eval/loss`, and with `evaluation.prompts: 0` nothing is evaluated",
            "leave it out, or evaluate some held-out records",
        );
        self.objective.validate(&at.below("objective"));
        at.root().given(&["pipeline.offline.objective"]).ensure(
            self.objective.distills().is_none() || config.roles.reference.path.is_some(),
            "roles.reference.path",
            "it is missing, and `objective: distill` learns from the model there",
            "name the folder of a teacher: `roles: {reference: {path: DIR}}`",
        );
        self.validate_turns(&config.model, &at.given(&["objective"]));
        self.optimizer.validate(&at.below("optimizer"));
        if let Some(warmup) = &self.warmup {
            warmup.validate(&at.below("warmup"));
        }
        if self.objective.is_of_numbers() {
            self.validate_numbers(config, at);
            self.data.validate_cuts(self.objective.prm().is_some(), &at.below("data"));
        }
        if self.objective.ilql().is_some() {
            self.validate_ilql(config, at);
        }
        at.given(&["objective"]).ensure(
            self.batch_size >= 2 || !self.objective.estimates_kl(),
            "batch_size",
            "how far the policy has moved is told by a prompt with another record's answer",
            "write 2 or above",
        );
        let of_policy = config.roles.policy.strategy.micro_batch_size;
        let size = of_policy.unwrap_or(config.strategy.micro_batch_size);
        let of_pairs = ["pipeline.offline.objective", "roles.policy.strategy.micro_batch_size"];
        at.root().given(&of_pairs).ensure(
            size >= 2 || !self.objective.compares(),
            "strategy.micro_batch_size",
            "a better and a worse answer are two sequences, and go through the model together",
            "write 2 or above",
        );
        if self.objective.prm().is_none() {
            self.data.validate_answers(&at.below("data"), "`objective` learns from answers", &[]);
        }
        self.data.validate(&at.below("data"));
    }

    fn validate_turns(&self, model: &ModelConfig, at: &Section) {
        if self.turns == Turns::Last {
            return;
        }
        at.ensure(
            matches!(self.objective, Objective::Sft | Objective::Distill(_) | Objective::Ilql(_)),
            "turns",
            "only `sft`, `distill` and `ilql` learn more than the last message of a conversation",
            "leave it out",
        );
        at.when(at.root().is_read("model")).ensure(
            matches!(model, ModelConfig::Folder(folder) if folder.chat),
            "turns",
            "the model has no chat template for conversations",
            "name a folder that has one, with `model.chat: true`, or leave it out",
        );
    }

    /// Reports fields that a reward model does not support. A reward model generates nothing, has no adapters, and has
    /// no plan of its memory.
    fn validate_numbers(&self, config: &Config, at: &Section) {
        let what = "the objective is a reward model's, which gives texts a number";
        at.ensure(self.warmup.is_none(), "warmup", what, "leave it out");
        let completions = self.evaluation.completions.unwrap_or(0);
        at.ensure(completions == 0, "evaluation.completions", what, "write 0, or leave it out");
        let root = at.root();
        if let ModelConfig::Folder(folder) = &config.model {
            root.ensure(
                folder.lora.is_none(),
                "model.lora",
                "a reward model has no adapters",
                "leave it out",
            );
            root.ensure(
                folder.system_prompt.is_none(),
                "model.system_prompt",
                "a reward model reads a record's own messages only",
                "leave it out, or write it into the prompts as a message of `system`",
            );
        }
        refuse_auto(config, &root, "`auto` does not plan the training of a reward model");
    }

    /// Reports fields that a model with the heads of ILQL does not support. It has no adapters, and no plan of its
    /// memory.
    fn validate_ilql(&self, config: &Config, at: &Section) {
        let what = "`ilql` learns its answers by `awac_scale`, and has no warm-up";
        at.ensure(self.warmup.is_none(), "warmup", what, "leave it out");
        let root = at.root();
        let adapts = matches!(&config.model, ModelConfig::Folder(folder) if folder.lora.is_some());
        root.ensure(
            !adapts,
            "model.lora",
            "a model with the heads of `ilql` has no adapters",
            "leave it out",
        );
        let adamw = &self.optimizer.adamw;
        at.ensure(
            adamw.decays == Decays::Matrices || adamw.weight_decay == 0.0,
            "optimizer.adamw.decays",
            "`all` would decay the target heads of `ilql` too",
            "write `matrices`, or `weight_decay: 0`",
        );
        refuse_auto(config, &root, "`auto` does not plan the heads of `ilql`");
    }
}

/// Reports a role whose `zero_stage` is `auto`.
fn refuse_auto(config: &Config, root: &Section, message: &str) {
    let roles = &config.roles;
    for (path, stage) in [
        ("strategy", Some(config.strategy.zero_stage)),
        ("roles.policy.strategy", roles.policy.strategy.zero_stage),
        ("roles.reference.strategy", roles.reference.strategy.zero_stage),
        ("roles.critic.strategy", roles.critic.strategy.zero_stage),
    ] {
        let holds = stage != Some(ZeroStage::Auto);
        root.ensure(holds, &format!("{path}.zero_stage"), message, "write 0, 1, 2 or 3");
    }
}

impl DataConfig {
    /// Reports a source that cuts texts where a score is read: a reward model reads it at the end of a text, and a
    /// process reward model (`of_steps`) after each step.
    fn validate_cuts(&self, of_steps: bool, at: &Section) {
        match self {
            Self::File(file) => {
                let (holds, message, help) = match (file.long_prompts, of_steps) {
                    (LongPrompts::Truncate(Keep::KeepStart), true) => return,
                    (LongPrompts::Truncate(Keep::KeepEnd), true) => (
                        false,
                        "a step is judged by the prompt and all steps before it",
                        "write `keep_start`",
                    ),
                    (long, _) => (
                        !matches!(long, LongPrompts::Truncate(_)),
                        "a reward model reads a text's number at its end, which would be cut off",
                        "write `leave_out` or `refuse`",
                    ),
                };
                at.ensure(holds, "file.long_prompts.truncate", message, help);
            }
            Self::Mix(sources) => {
                for (index, source) in sources.iter().enumerate() {
                    source.data.validate_cuts(of_steps, &at.below("mix").item(index).below("data"));
                }
            }
            Self::Sort(_) | Self::Addition(_) | Self::Countdown(_) => {}
        }
    }
}

impl Objective {
    fn validate(&self, at: &Section) {
        let not_negative = |name: &str, value: f64| at.number(name, value, value >= 0.0, "0 or above");
        let (name, beta) = match *self {
            Self::Sft => return,
            Self::Prm(PrmConfig { ref step_separator, .. }) => {
                let help = "write the text between steps, such as \"\\n\"";
                at.ensure(!step_separator.is_empty(), "prm.step_separator", "it is empty", help);
                return;
            }
            Self::Dpo(DpoConfig { beta, label_smoothing, sft_weight }) => {
                let holds = (0.0..0.5).contains(&label_smoothing);
                at.number("dpo.label_smoothing", label_smoothing, holds, "from 0 to below 0.5");
                not_negative("dpo.sft_weight", sft_weight);
                ("dpo", beta)
            }
            Self::Ipo(IpoConfig { beta }) => ("ipo", beta),
            Self::Hinge(HingeConfig { beta }) => ("hinge", beta),
            Self::Simpo(SimpoConfig { beta, gamma }) => {
                not_negative("simpo.gamma", gamma);
                ("simpo", beta)
            }
            Self::Orpo(OrpoConfig { beta }) => ("orpo", beta),
            Self::Kto(judged) => {
                judged.validate_weights(&at.below("kto"));
                ("kto", judged.beta)
            }
            Self::ApoZeroUnpaired(judged) => {
                judged.validate_weights(&at.below("apo_zero_unpaired"));
                ("apo_zero_unpaired", judged.beta)
            }
            Self::Distill(DistillConfig { beta, temperature, sft_weight }) => {
                at.number("distill.beta", beta, (0.0..=1.0).contains(&beta), "from 0 to 1");
                // The divisor of logits.
                at.number("distill.temperature", temperature, temperature >= 1e-3, "0.001 or above");
                not_negative("distill.sft_weight", sft_weight);
                return;
            }
            Self::RewardModel(RewardModelObjective { center }) => {
                not_negative("reward_model.center", center);
                return;
            }
            Self::Ilql(ilql) => return ilql.validate(&at.below("ilql")),
        };
        at.number(&format!("{name}.beta"), beta, beta > 0.0, "above 0");
    }
}

impl IlqlConfig {
    fn validate(&self, at: &Section) {
        let Self { tau, gamma, cql_scale, awac_scale, beta, alpha, guidance, .. } = *self;
        at.number("tau", tau, tau > 0.0 && tau < 1.0, "above 0 and below 1");
        at.number("gamma", gamma, (0.0..=1.0).contains(&gamma), "from 0 to 1");
        at.number("cql_scale", cql_scale, cql_scale >= 0.0, "0 or above");
        at.number("awac_scale", awac_scale, awac_scale >= 0.0, "0 or above");
        at.number("beta", beta, true, "that is finite");
        at.number("guidance", guidance, true, "that is finite");
        at.number("alpha", alpha, alpha > 0.0 && alpha <= 1.0, "above 0 to 1");
        at.positive("steps_for_target_q_sync", self.steps_for_target_q_sync);
    }
}

impl JudgedConfig {
    fn validate_weights(&self, at: &Section) {
        let Self { desirable_weight, undesirable_weight, .. } = *self;
        for (name, weight) in
            [("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)]
        {
            at.number(name, weight, weight >= 0.0, "0 or above");
        }
        at.given(&["undesirable_weight"]).ensure(
            desirable_weight + undesirable_weight > 0.0,
            "desirable_weight",
            "both weights are 0, and nothing is learnt",
            "write a weight above 0",
        );
    }
}
