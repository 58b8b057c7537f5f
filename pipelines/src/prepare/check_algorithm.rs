//! What must hold for the fields of `algorithm` and `critic`.

use super::check::Check;
use crate::algorithm::losses::Range;
use crate::config::*;

impl Check<'_> {
    pub(super) fn algorithm(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let algorithm = &rlvr.algorithm;
        self.reward_norm(rlvr)?;
        self.decoupled(rlvr)?;
        self.credit(rlvr)?;
        let field = |name: &str| format!("pipeline.rlvr.algorithm.{name}");
        let AlgorithmConfig { kl_coef, entropy_coef, .. } = *algorithm;
        self.number(&field("kl_coef"), kl_coef, kl_coef >= 0.0, "0 or above")?;
        for (name, clip) in
            [("reward_clip", algorithm.reward_clip), ("advantage_clip", algorithm.advantage_clip)]
        {
            self.number(&field(name), clip.unwrap_or(1.0), clip.is_none_or(|clip| clip > 0.0), "above 0")?;
        }
        match algorithm.advantage {
            Advantage::Grpo(GrpoConfig { eps, .. }) => {
                self.number(&field("advantage.grpo.eps"), eps, eps > 0.0, "above 0")?;
            }
            Advantage::Gdpo(GdpoConfig { eps }) => {
                self.number(&field("advantage.gdpo.eps"), eps, eps > 0.0, "above 0")?;
            }
            Advantage::Reinforce(ReinforceConfig { gamma }) => {
                let holds = gamma > 0.0 && gamma <= 1.0;
                self.number(&field("advantage.reinforce.gamma"), gamma, holds, "above 0, at most 1")?;
            }
            Advantage::Gae(GaeConfig { gamma, lambda }) => {
                let holds = gamma > 0.0 && gamma <= 1.0;
                self.number(&field("advantage.gae.gamma"), gamma, holds, "above 0, at most 1")?;
                let holds = (0.0..=1.0).contains(&lambda);
                self.number(&field("advantage.gae.lambda"), lambda, holds, "from 0 to 1")?;
            }
            Advantage::Rloo | Advantage::Opo | Advantage::Gpg | Advantage::Remax => {}
            Advantage::None => self.ensure(
                kl_coef > 0.0,
                &field("advantage"),
                "without advantages and without a KL divergence there is nothing to learn",
                "write `kl_coef: 1` and `kl_in: advantage` beside it, and a teacher in `roles.reference.path`",
            )?,
        }
        if let Aggregation::SeqMeanTokenSumNorm(norm) = algorithm.aggregation {
            self.positive(&field("aggregation.seq_mean_token_sum_norm.length"), norm.length)?;
        }
        self.number(&field("entropy_coef"), entropy_coef, entropy_coef >= 0.0, "0 or above")?;
        self.policy_loss(&algorithm.loss)?;
        self.rollout_correction(&algorithm.rollout_correction)?;
        let threshold = algorithm.off_policy_mask.unwrap_or(1.0);
        self.number(&field("off_policy_mask"), threshold, threshold > 0.0, "above 0")?;
        let share = algorithm.top_entropy.unwrap_or(0.5);
        let holds = share > 0.0 && share < 1.0;
        self.number(&field("top_entropy"), share, holds, "above 0 and below 1, or leave it out")?;
        self.algorithm_as_a_whole(algorithm)
    }

    fn policy_loss(&self, loss: &PolicyLoss) -> Result<(), Problem> {
        loss.formula().ranges().into_iter().try_for_each(|Range { field, value, holds, range }| {
            self.number(&format!("pipeline.rlvr.algorithm.loss.{}.{field}", loss.name()), value, holds, range)
        })
    }

    fn rollout_correction(&self, correction: &RolloutCorrection) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.rlvr.algorithm.rollout_correction.{name}");
        match *correction {
            RolloutCorrection::None => Ok(()),
            RolloutCorrection::Truncate(TruncateConfig { max, .. }) => {
                self.number(&field("truncate.max"), max, max > 0.0, "above 0")
            }
            RolloutCorrection::Mask(MaskConfig { min, max, .. }) => {
                self.number(&field("mask.min"), min, min >= 0.0, "0 or above")?;
                self.number(&field("mask.max"), max, max > min, "above `min`")
            }
        }
    }

    /// Whether rewards can be normalized as they are to be.
    fn reward_norm(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let RewardNormConfig { mean, std } = rlvr.algorithm.reward_norm;
        let path = "pipeline.rlvr.algorithm.reward_norm";
        let normalizes = [mean, std].iter().any(|over| *over != Over::None);
        self.ensure(
            !(normalizes && rlvr.algorithm.advantage == Advantage::Remax),
            path,
            "`remax` compares with the reward of the greedy completion as it is",
            "leave it out, or write another advantage",
        )?;
        self.ensure(
            rlvr.group_size >= 2 || ![mean, std].contains(&Over::Group),
            path,
            "a group of 1 has no mean to differ from",
            "write `batch` or `running`",
        )
    }

    /// Whether terms are normalized each by itself and by nothing else.
    fn decoupled(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let algorithm = &rlvr.algorithm;
        if !matches!(algorithm.advantage, Advantage::Gdpo(_)) {
            return Ok(());
        }
        for (name, is_set) in [
            ("reward_norm", algorithm.reward_norm != RewardNormConfig::default()),
            ("reward_clip", algorithm.reward_clip.is_some()),
            ("kl_in", matches!(algorithm.kl_in, KlTerm::Reward(_))),
        ] {
            self.ensure(
                !is_set,
                &format!("pipeline.rlvr.algorithm.{name}"),
                "it is of the sum of the reward's terms, and `gdpo` normalizes each of them before",
                "leave it out, or write `advantage: grpo`",
            )?;
        }
        Ok(())
    }

    /// What each field allows, and together comes to nothing or to something else than it says.
    fn algorithm_as_a_whole(&self, algorithm: &AlgorithmConfig) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.rlvr.algorithm.{name}");
        self.ensure(
            algorithm.rollout_correction == RolloutCorrection::None
                || algorithm.old_logprobs == OldLogprobs::Recompute,
            &field("rollout_correction"),
            "all its weights are 1, since the old log-probs are those of the rollout",
            "write `old_logprobs: recompute` beside it",
        )?;
        self.ensure(
            algorithm.top_entropy.is_none() || algorithm.old_logprobs == OldLogprobs::Recompute,
            &field("top_entropy"),
            "entropies before the first update of a step come with log-probs that are computed again",
            "write `old_logprobs: recompute` beside it",
        )?;
        let refused = algorithm.loss.formula().refuses_correction();
        self.ensure(
            algorithm.rollout_correction == RolloutCorrection::None || refused.is_none(),
            &field("rollout_correction"),
            refused.unwrap_or_default(),
            "leave it out, and write `old_logprobs: rollout`: then they are of the whole difference",
        )?;
        let in_reward = match algorithm.kl_in {
            KlTerm::Loss(_) => false,
            KlTerm::Advantage => {
                self.ensure(
                    algorithm.kl_coef > 0.0,
                    &field("kl_coef"),
                    "at 0 nothing is taken off the advantages",
                    "write a number above 0, such as 1, or leave `kl_in` out",
                )?;
                false
            }
            KlTerm::Reward(KlRewardConfig { adaptive }) => {
                if let Some(AdaptiveKlConfig { target, horizon }) = adaptive {
                    let field = |name: &str| field(&format!("kl_in.reward.adaptive.{name}"));
                    self.number(&field("target"), target, target > 0.0, "above 0")?;
                    self.number(&field("horizon"), horizon, horizon > 0.0, "above 0")?;
                }
                self.ensure(
                    algorithm.kl_coef > 0.0,
                    &field("kl_coef"),
                    "at 0 nothing is taken off the reward, and no controller moves it",
                    "write a number above 0, such as 0.001, or leave `kl_in` out",
                )?;
                true
            }
        };
        let varies = match algorithm.advantage {
            _ if algorithm.credit.gamma().is_some() => true,
            Advantage::Reinforce(ReinforceConfig { gamma }) if gamma < 1.0 || in_reward => true,
            Advantage::Gae(_) => true,
            _ => algorithm.kl_in == KlTerm::Advantage,
        };
        self.ensure(
            !(varies && algorithm.loss.formula().is_of_sequences()),
            &field("loss"),
            "it has one ratio a sequence, and these advantages differ from token to token",
            "write `gamma: 1`, `kl_in: loss` and `credit: episode`, or an advantage of another kind",
        )
    }

    /// Whether turns can have credit of their own.
    fn credit(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let algorithm = &rlvr.algorithm;
        let Some(gamma) = algorithm.credit.gamma() else { return Ok(()) };
        let field = |name: &str| format!("pipeline.rlvr.algorithm.{name}");
        self.number(&field("credit.turns.gamma"), gamma, (0.0..=1.0).contains(&gamma), "from 0 to 1")?;
        let help = "write `credit: episode`, or leave it out";
        let no_turns = "there are no turns without `rollout.environment`";
        self.ensure(rlvr.rollout.environment.is_some(), &field("credit"), no_turns, help)?;
        let why = match algorithm.advantage {
            Advantage::Grpo(_) | Advantage::Rloo | Advantage::Reinforce(_) | Advantage::Gae(_) => None,
            Advantage::Opo => Some("`opo` weighs rewards by the length of whole completions"),
            Advantage::Gpg => {
                Some("`gpg` counts groups whose rewards are equal, and those of turns are many")
            }
            Advantage::Gdpo(_) => Some("`gdpo` normalizes what terms say of whole completions"),
            Advantage::None => Some("`none` has rewards move nothing"),
            Advantage::Remax => Some("`remax` compares with a greedy episode, whose turns are others"),
        };
        let others = "write `grpo`, `rloo`, `reinforce` or `gae`, or `credit: episode`";
        self.ensure(why.is_none(), &field("advantage"), why.unwrap_or_default(), others)?;
        let normalizes = algorithm.reward_norm != RewardNormConfig::default();
        for (name, is_set) in [("reward_norm", normalizes), ("reward_clip", algorithm.reward_clip.is_some())]
        {
            let problem = "it is of what whole completions earn, and `credit: turns` asks for that of turns";
            self.ensure(!is_set, &field(name), problem, "leave it out, or write `credit: episode`")?;
        }
        Ok(())
    }

    /// Values and what is made of them go together.
    pub(super) fn critic(&self, rlvr: &RlvrConfig) -> Result<(), Problem> {
        let path = "pipeline.rlvr.critic";
        let needed = matches!(rlvr.algorithm.advantage, Advantage::Gae(_));
        let Some(critic) = &rlvr.critic else {
            let help = "write `critic: {optimizer: {adamw: {learning_rate: 1.0e-5}}}` beside `algorithm`";
            return self.ensure(!needed, path, "it is missing, and `advantage: gae` needs its values", help);
        };
        let help = "write `advantage: gae`, or leave the critic out";
        self.ensure(needed, path, "no advantage is made from its values", help)?;
        let clip = critic.value_clip;
        let field = format!("{path}.value_clip");
        self.number(&field, clip.unwrap_or(1.0), clip.is_none_or(|clip| clip > 0.0), "above 0")?;
        self.optimizer(&format!("{path}.optimizer"), &critic.optimizer)
    }

    /// Whether the critic's part of the run ends before the run does.
    pub(super) fn critic_over(&self, critic: &CriticConfig, steps: u64) -> Result<(), Problem> {
        let path = "pipeline.rlvr.critic";
        self.ensure(
            critic.warmup_steps < steps,
            &format!("{path}.warmup_steps"),
            format!("{} of {steps} steps leave none to the policy", critic.warmup_steps),
            "write fewer than the steps",
        )?;
        self.schedule(&format!("{path}.optimizer"), &critic.optimizer, steps)
    }
}

impl Advantage {
    /// Whether it compares the completions of a prompt.
    pub(super) fn needs_groups(self) -> bool {
        match self {
            Self::Grpo(_) | Self::Gdpo(_) | Self::Rloo | Self::Opo | Self::Gpg => true,
            Self::Reinforce(_) | Self::Remax | Self::Gae(_) | Self::None => false,
        }
    }
}
