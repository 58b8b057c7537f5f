//! Objectives as functions of the log-probs of whole answers; `docs/guides/offline.md` has their sources.
//!
//! Everything is fp64, and nothing here waits for the device. For objectives that compare, a better answer
//! precedes its worse one, so that `[S]` is `[pairs, 2]`. Labelled answers are in any order.

use anyroll_config::{
    DistillConfig, DpoConfig, HingeConfig, IpoConfig, JudgedConfig, Objective, OrpoConfig,
    RewardModelObjective, SimpoConfig,
};
use tch::{Device, Kind, TchError, Tensor};

use super::ilql::{self, Valued};
use crate::train::device_sums;

type Result<T> = std::result::Result<T, TchError>;

/// ORPO's upper bound of a mean log-prob, since the odds of probability 1 are infinite.
const MOST_LOGPROB: f64 = -1e-9;

/// Denominators of sums over answers: totals of a whole step, over all ranks and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Whole {
    /// Records.
    pub records: f64,
    /// Better or desirable answers.
    pub better: f64,
    /// Worse or undesirable answers, if any.
    pub worse: f64,
    /// Tokens of the better answers; labelled steps for a process reward model.
    pub tokens: f64,
    /// KTO's divergence of the policy from the reference; 0 for other objectives.
    pub kl: f64,
}

/// Outputs of a model for some answers. A process reward model has one for each labelled step.
#[derive(Debug)]
pub struct Answers {
    /// Sum of log-probs over tokens, or the scalar: `[S]`.
    pub logprobs: Tensor,
    /// Token counts, `[S]`.
    pub lengths: Tensor,
    /// 1 for better or desirable answers, else 0, or a step's label: `[S]`.
    pub labels: Tensor,
    /// `logprobs` under the frozen reference; `None` for objectives without one.
    pub reference: Option<Tensor>,
    /// Sum of the teacher's divergence over tokens, `[S]`; `None` without a teacher.
    pub divergence: Option<Tensor>,
    /// Rewards, and outputs for single tokens, of an objective that learns values. `logprobs` are then those of tokens,
    /// `[M]`.
    pub valued: Option<Valued>,
}

device_sums! {
    /// Sums over answers; 0 where the objective has no such term.
    pub struct Sums {
        /// Negative log-probs of the better answers' tokens.
        nll,
        /// The objective's term of pairs, or of labelled answers.
        preference,
        /// Rewards of the better answers, as defined by the objective.
        chosen,
        /// Rewards of the worse answers.
        rejected,
        /// Pairs whose better answer has the larger reward, or steps that are classified as their label.
        right,
        /// Divergences of the teacher from the policy, over tokens.
        divergence,
        /// Labels of steps.
        labels,
        /// Squared errors of Q, over tokens and heads.
        q_loss,
        /// Weighted squared errors of V, over tokens.
        v_loss,
        /// Negative log-probs of tokens under softmax(Q), over heads.
        cql,
        /// Weighted negative log-probs of tokens.
        awac,
        /// Weights of tokens in `awac`.
        awac_weights,
        /// Values V of the states before tokens.
        values,
    }
}

impl Sums<Tensor> {
    /// Sums of nothing, on `device`.
    pub fn none(device: Device) -> Result<Self> {
        let zero = Tensor::f_zeros([], (Kind::Double, device))?;
        let zero = || zero.shallow_clone();
        Ok(Self {
            nll: zero(),
            preference: zero(),
            chosen: zero(),
            rejected: zero(),
            right: zero(),
            divergence: zero(),
            labels: zero(),
            q_loss: zero(),
            v_loss: zero(),
            cql: zero(),
            awac: zero(),
            awac_weights: zero(),
            values: zero(),
        })
    }
}

/// Loss and sums of some answers.
#[derive(Debug)]
pub struct Terms {
    /// Part of the loss, with its gradient.
    pub loss: Tensor,
    /// Sums without a gradient.
    pub sums: Sums<Tensor>,
}

/// Weight of the better answers' negative log-likelihood in the loss.
pub fn likelihood_weight(objective: &Objective) -> f64 {
    match objective {
        Objective::Sft | Objective::Orpo(_) | Objective::Prm(_) => 1.0,
        Objective::Dpo(DpoConfig { sft_weight, .. })
        | Objective::Distill(DistillConfig { sft_weight, .. }) => *sft_weight,
        Objective::Ilql(_) => 0.0,
        Objective::Ipo(_) | Objective::Hinge(_) | Objective::Simpo(_) | Objective::RewardModel(_) => 0.0,
        Objective::Kto(_) | Objective::ApoZeroUnpaired(_) => 0.0,
    }
}

/// The terms of `objective`.
pub fn terms(objective: &Objective, answers: &Answers, whole: Whole) -> Result<Terms> {
    if let Some(config) = objective.judged() {
        let reference = answers.reference.as_ref().expect("objectives on labelled answers have a reference");
        return judged(config, answers, reference, whole);
    }
    if objective.prm().is_some() {
        return of_steps(answers, whole);
    }
    if let Some(config) = objective.ilql() {
        let valued = answers.valued.as_ref().expect("the model has heads of values");
        return ilql::terms(config, answers, valued, whole);
    }
    let Some(pairs) = pairs(objective, answers)? else { return of_tokens(objective, answers, whole) };
    let nll = side(&answers.logprobs, 0)?.f_sum(Kind::Double)?.f_neg()?;
    let preference = pairs.loss.f_sum(Kind::Double)?;
    let likelihood = nll.f_mul_scalar(likelihood_weight(objective) / whole.tokens)?;
    let loss = preference.f_div_scalar(whole.records)?.f_add(&likelihood)?;
    let (better, worse) = (side(&pairs.rewards, 0)?, side(&pairs.rewards, 1)?);
    let right = better.f_gt_tensor(&worse)?;
    let sum = |values: &Tensor| values.f_detach()?.f_sum(Kind::Double);
    let sums = Sums {
        nll: nll.f_detach()?,
        preference: preference.f_detach()?,
        chosen: sum(&better)?,
        rejected: sum(&worse)?,
        right: sum(&right)?,
        ..Sums::none(nll.device())?
    };
    Ok(Terms { loss, sums })
}

/// Terms of labelled steps, from the log-odds of a right one. The loss of a step is -y log p - (1 - y) log(1 - p), the
/// cross-entropy of two classes as in TRL's PRMTrainer (Lightman et al., 2023): p is sigmoid of the log-odds, the
/// difference of the two logits.
fn of_steps(answers: &Answers, whole: Whole) -> Result<Terms> {
    let (log_odds, labels) = (&answers.logprobs, &answers.labels);
    let right = log_odds.f_log_sigmoid()?.f_mul(labels)?;
    let wrong = log_odds.f_neg()?.f_log_sigmoid()?.f_mul(&labels.f_neg()?.f_add_scalar(1.0)?)?;
    let nll = right.f_add(&wrong)?.f_sum(Kind::Double)?.f_neg()?;
    // At log-odds of 0, as under a new head, no step is classified.
    let (says_right, says_wrong) = (log_odds.f_gt(0.0)?, log_odds.f_lt(0.0)?);
    let is_right = labels.f_gt(0.5)?;
    let agreed = is_right
        .f_logical_and(&says_right)?
        .f_logical_or(&is_right.f_logical_not()?.f_logical_and(&says_wrong)?)?;
    let sums = Sums {
        nll: nll.f_detach()?,
        right: agreed.f_sum(Kind::Double)?,
        labels: labels.f_sum(Kind::Double)?,
        ..Sums::none(nll.device())?
    };
    Ok(Terms { loss: nll.f_div_scalar(whole.tokens)?, sums })
}

/// Terms of an objective on tokens.
fn of_tokens(objective: &Objective, answers: &Answers, whole: Whole) -> Result<Terms> {
    let nll = answers.logprobs.f_sum(Kind::Double)?.f_neg()?;
    let likelihood = nll.f_mul_scalar(likelihood_weight(objective))?;
    let (loss, divergence) = match &answers.divergence {
        Some(divergence) => {
            let apart = divergence.f_sum(Kind::Double)?;
            (apart.f_add(&likelihood)?, apart.f_detach()?)
        }
        None => (likelihood, Tensor::f_zeros([], (Kind::Double, nll.device()))?),
    };
    let sums = Sums { nll: nll.f_detach()?, divergence, ..Sums::none(nll.device())? };
    Ok(Terms { loss: loss.f_div_scalar(whole.tokens)?, sums })
}

/// Terms of an objective on labelled answers.
fn judged(config: &JudgedConfig, answers: &Answers, reference: &Tensor, whole: Whole) -> Result<Terms> {
    let JudgedConfig { beta, desirable_weight, undesirable_weight } = *config;
    let desirable = &answers.labels;
    let other = desirable.f_neg()?.f_add_scalar(1.0)?;
    let rewards = answers.logprobs.f_sub(reference)?.f_mul_scalar(beta)?;
    // 1 - sigmoid(x) is sigmoid(-x), where x is reward - z for a desirable answer and z - reward otherwise.
    let toward = rewards.f_sub_scalar(beta * whole.kl)?.f_mul(&desirable.f_sub(&other)?)?;
    let weights =
        desirable.f_mul_scalar(desirable_weight)?.f_add(&other.f_mul_scalar(undesirable_weight)?)?;
    let preference = toward.f_neg()?.f_sigmoid()?.f_mul(&weights)?.f_sum(Kind::Double)?;
    let sum = |values: &Tensor, which: &Tensor| values.f_detach()?.f_mul(which)?.f_sum(Kind::Double);
    let sums = Sums {
        nll: sum(&answers.logprobs, desirable)?.f_neg()?,
        preference: preference.f_detach()?,
        chosen: sum(&rewards, desirable)?,
        rejected: sum(&rewards, &other)?,
        ..Sums::none(preference.device())?
    };
    Ok(Terms { loss: preference.f_div_scalar(whole.records)?, sums })
}

/// Terms of pairs.
struct Pairs {
    /// `[pairs]`.
    loss: Tensor,
    /// Rewards of the answers, up to a constant per prompt: `[S]`.
    rewards: Tensor,
}

/// `None` for an objective that does not compare.
fn pairs(objective: &Objective, answers: &Answers) -> Result<Option<Pairs>> {
    let gained = |logprobs: &Tensor| match &answers.reference {
        Some(reference) => logprobs.f_sub(reference),
        None => Ok(logprobs.shallow_clone()),
    };
    let mean = |sums: &Tensor| sums.f_div(&answers.lengths);
    let pairs = match *objective {
        Objective::Sft | Objective::Distill(_) | Objective::Prm(_) | Objective::Ilql(_) => return Ok(None),
        Objective::Kto(_) | Objective::ApoZeroUnpaired(_) => return Ok(None),
        Objective::Dpo(DpoConfig { beta, label_smoothing, .. }) => {
            let rewards = gained(&answers.logprobs)?.f_mul_scalar(beta)?;
            let margin = margin(&rewards)?;
            let right = margin.f_log_sigmoid()?.f_mul_scalar(label_smoothing - 1.0)?;
            let wrong = margin.f_neg()?.f_log_sigmoid()?.f_mul_scalar(label_smoothing)?;
            Pairs { loss: right.f_sub(&wrong)?, rewards }
        }
        Objective::Ipo(IpoConfig { beta }) => {
            let gained = mean(&gained(&answers.logprobs)?)?;
            let loss = margin(&gained)?.f_sub_scalar(0.5 / beta)?.f_square()?;
            Pairs { loss, rewards: gained.f_mul_scalar(beta)? }
        }
        Objective::Hinge(HingeConfig { beta }) => {
            let rewards = gained(&answers.logprobs)?.f_mul_scalar(beta)?;
            Pairs { loss: margin(&rewards)?.f_neg()?.f_add_scalar(1.0)?.f_relu()?, rewards }
        }
        Objective::Simpo(SimpoConfig { beta, gamma }) => {
            let rewards = mean(&answers.logprobs)?.f_mul_scalar(beta)?;
            Pairs { loss: margin(&rewards)?.f_sub_scalar(gamma)?.f_log_sigmoid()?.f_neg()?, rewards }
        }
        Objective::Orpo(OrpoConfig { beta }) => {
            let mean = mean(&answers.logprobs)?;
            let certain = mean.f_clamp_max(MOST_LOGPROB)?;
            // log(p / (1 - p)) of p = exp(x) is x - log(1 - exp(x)).
            let log_odds = certain.f_sub(&certain.f_expm1()?.f_neg()?.f_log()?)?;
            let loss = margin(&log_odds)?.f_log_sigmoid()?.f_mul_scalar(-beta)?;
            Pairs { loss, rewards: mean.f_mul_scalar(beta)? }
        }
        Objective::RewardModel(RewardModelObjective { center }) => {
            let numbers = &answers.logprobs;
            let apart = margin(numbers)?.f_log_sigmoid()?.f_neg()?;
            let off_center = side(numbers, 0)?.f_add(&side(numbers, 1)?)?.f_square()?.f_mul_scalar(center)?;
            Pairs { loss: apart.f_add(&off_center)?, rewards: numbers.shallow_clone() }
        }
    };
    Ok(Some(pairs))
}

/// Difference between the better and the worse answer of each pair.
fn margin(values: &Tensor) -> Result<Tensor> {
    side(values, 0)?.f_sub(&side(values, 1)?)
}

/// Values of the better answers for side 0, of the worse for side 1.
fn side(values: &Tensor, side: i64) -> Result<Tensor> {
    values.f_view([-1, 2])?.f_select(1, side)
}

#[cfg(test)]
mod tests {
    use anyroll_config::PrmConfig;
    use serde::Deserialize;

    use super::*;

    /// Output of tests/python/make_offline_golden.py: TRL's losses and their gradients.
    #[derive(Deserialize)]
    struct Golden {
        lengths: Vec<f64>,
        logprobs: Vec<f64>,
        reference: Vec<f64>,
        desirable: Vec<f64>,
        cases: Vec<Case>,
        judged: Vec<JudgedCase>,
    }

    #[derive(Deserialize)]
    struct JudgedCase {
        /// Number of answers; these are the first ones.
        answers: usize,
        /// TRL's divergence, computed from the log-probs of mismatched answers.
        kl: f64,
        #[serde(flatten)]
        case: Case,
    }

    #[derive(Deserialize)]
    struct Case {
        objective: Objective,
        loss: f64,
        chosen: f64,
        rejected: f64,
        gradient: Vec<f64>,
    }

    fn golden() -> Golden {
        serde_json::from_str(include_str!("../../../tests/golden/offline.json")).unwrap()
    }

    fn answers(golden: &Golden, objective: &Objective) -> Answers {
        Answers {
            logprobs: Tensor::from_slice(&golden.logprobs).set_requires_grad(true),
            lengths: Tensor::from_slice(&golden.lengths),
            labels: Tensor::from_slice(&[1.0, 0.0]).repeat([golden.lengths.len() as i64 / 2]),
            reference: objective.has_reference().then(|| Tensor::from_slice(&golden.reference)),
            divergence: None,
            valued: None,
        }
    }

    /// The whole loss, its gradient, and the sums.
    fn found(objective: &Objective, answers: &Answers, whole: Whole) -> (f64, Vec<f64>, Sums) {
        let terms = terms(objective, answers, whole).unwrap();
        let gradient = Tensor::run_backward(&[&terms.loss], &[&answers.logprobs], false, false);
        let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor).unwrap();
        (
            terms.loss.double_value(&[]),
            values(&gradient[0]),
            Sums::read(&terms.sums.stack().unwrap()).unwrap(),
        )
    }

    #[track_caller]
    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{found}, not {expected}");
    }

    #[test]
    fn losses_of_pairs_are_those_of_trl() {
        let golden = golden();
        let pairs = golden.lengths.len() as f64 / 2.0;
        let whole = Whole { records: pairs, better: pairs, worse: pairs, tokens: 7.0, kl: 0.0 };
        for Case { objective, loss, chosen, rejected, gradient } in &golden.cases {
            let answers = answers(&golden, objective);
            let (found_loss, mut found_gradient, sums) = found(objective, &answers, whole);
            let nll = likelihood_weight(objective) / whole.tokens;
            near(found_loss - nll * sums.nll, *loss);
            near(sums.preference / pairs, *loss);
            near(sums.chosen / pairs, *chosen);
            near(sums.rejected / pairs, *rejected);
            found_gradient.iter_mut().step_by(2).for_each(|of_better| *of_better += nll);
            found_gradient.iter().zip(gradient).for_each(|(found, expected)| near(*found, *expected));
        }
        assert_eq!(golden.cases.len(), 7);
    }

    #[test]
    fn losses_of_judged_answers_are_those_of_trl() {
        let golden = golden();
        for JudgedCase { answers: count, kl, case } in &golden.judged {
            let Case { objective, loss, chosen, rejected, gradient } = case;
            let first = |all: &[f64]| Tensor::from_slice(&all[..*count]);
            let answers = Answers {
                logprobs: first(&golden.logprobs).set_requires_grad(true),
                lengths: first(&golden.lengths),
                labels: first(&golden.desirable),
                reference: Some(first(&golden.reference)),
                divergence: None,
                valued: None,
            };
            let better = golden.desirable[..*count].iter().sum::<f64>();
            let records = *count as f64;
            let whole = Whole { records, better, worse: records - better, tokens: 7.0, kl: *kl };
            let (found_loss, found_gradient, sums) = found(objective, &answers, whole);
            near(found_loss, *loss);
            near(sums.preference / records, *loss);
            near(sums.chosen, *chosen);
            near(sums.rejected, *rejected);
            assert_eq!(found_gradient.len(), gradient.len());
            found_gradient.iter().zip(gradient).for_each(|(found, expected)| near(*found, *expected));
        }
        assert_eq!(golden.judged.len(), 6);
    }

    /// Output of tests/python/make_prm_golden.py: the cross-entropy of two classes by torch, of labels that are 0 or 1,
    /// and of others between.
    #[derive(Deserialize)]
    struct StepsGolden {
        log_odds: Vec<f64>,
        losses: Vec<StepsCase>,
    }

    #[derive(Deserialize)]
    struct StepsCase {
        labels: Vec<f64>,
        loss: f64,
        right: f64,
        gradient: Vec<f64>,
    }

    #[test]
    fn losses_of_steps_are_those_of_two_classes() {
        let golden: StepsGolden =
            serde_json::from_str(include_str!("../../../tests/golden/prm/steps.json")).unwrap();
        let steps = golden.log_odds.len() as f64;
        for StepsCase { labels, loss, right, gradient } in &golden.losses {
            let answers = Answers {
                logprobs: Tensor::from_slice(&golden.log_odds).set_requires_grad(true),
                lengths: Tensor::from_slice(&[2.0, 4.0, 1.0, 3.0]),
                labels: Tensor::from_slice(labels),
                reference: None,
                divergence: None,
                valued: None,
            };
            let whole = Whole { records: 4.0, better: 4.0, worse: 0.0, tokens: steps, kl: 0.0 };
            let (found, found_gradient, sums) = found(&Objective::Prm(PrmConfig::default()), &answers, whole);
            near(found, *loss);
            near(sums.nll / steps, *loss);
            near(sums.right, *right);
            near(sums.labels, labels.iter().sum());
            assert_eq!(found_gradient.len(), gradient.len());
            found_gradient.iter().zip(gradient).for_each(|(found, expected)| near(*found, *expected));
        }
        assert_eq!(golden.losses.len(), 2);
    }

    #[test]
    fn likelihood_is_a_mean_over_tokens() {
        let golden = golden();
        let whole = Whole { records: 3.0, better: 3.0, worse: 3.0, tokens: 8.0, kl: 0.0 };
        let (loss, gradient, sums) = found(&Objective::Sft, &answers(&golden, &Objective::Sft), whole);
        let nll: f64 = -golden.logprobs.iter().sum::<f64>();
        near(loss, nll / 8.0);
        near(sums.nll, nll);
        assert_eq!(
            [sums.preference, sums.chosen, sums.rejected, sums.right, sums.divergence, sums.labels],
            [0.0; 6]
        );
        gradient.iter().for_each(|of_answer| near(*of_answer, -1.0 / 8.0));
        // The SFT term of pairs counts only the better answers.
        let dpo = |sft_weight| Objective::Dpo(DpoConfig { sft_weight, ..DpoConfig::default() });
        let of = |sft_weight| found(&dpo(sft_weight), &answers(&golden, &dpo(sft_weight)), whole);
        let better: f64 = golden.logprobs.iter().step_by(2).sum();
        near(of(0.5).0 - of(0.0).0, -0.5 * better / 8.0);
        near(of(0.5).1[1], of(0.0).1[1]);
    }

    #[test]
    fn a_teacher_is_learnt_by_the_token_beside_the_answers() {
        let golden = golden();
        let whole = Whole { records: 3.0, better: 3.0, worse: 3.0, tokens: 8.0, kl: 0.0 };
        let objective = Objective::Distill(DistillConfig { sft_weight: 0.5, ..DistillConfig::default() });
        let apart: Vec<f64> = golden.lengths.iter().map(|length| 0.1 * length).collect();
        let divergence = Tensor::from_slice(&apart).set_requires_grad(true);
        let answers = Answers {
            reference: None,
            divergence: Some(divergence.shallow_clone()),
            ..answers(&golden, &objective)
        };
        let terms = terms(&objective, &answers, whole).unwrap();
        let (nll, apart): (f64, f64) = (-golden.logprobs.iter().sum::<f64>(), apart.iter().sum());
        near(terms.loss.double_value(&[]), (apart + 0.5 * nll) / 8.0);
        let sums = Sums::read(&terms.sums.stack().unwrap()).unwrap();
        near(sums.nll, nll);
        near(sums.divergence, apart);
        let gradients = Tensor::run_backward(&[&terms.loss], &[&answers.logprobs, &divergence], false, false);
        for (gradient, expected) in gradients.iter().zip([-0.5 / 8.0, 1.0 / 8.0]) {
            Vec::<f64>::try_from(gradient).unwrap().iter().for_each(|it| near(*it, expected));
        }
    }

    #[test]
    fn certain_answers_have_finite_odds() {
        let logprobs = Tensor::from_slice(&[0.0, -3.0]).set_requires_grad(true);
        let [lengths, labels] = [[2.0, 2.0], [1.0, 0.0]].map(|values| Tensor::from_slice(&values));
        let answers = Answers { logprobs, lengths, labels, reference: None, divergence: None, valued: None };
        let whole = Whole { records: 1.0, better: 1.0, worse: 1.0, tokens: 2.0, kl: 0.0 };
        let (loss, gradient, _) = found(&Objective::Orpo(OrpoConfig::default()), &answers, whole);
        assert!(loss.is_finite() && gradient.iter().all(|it| it.is_finite()), "{loss} {gradient:?}");
    }

    #[test]
    fn a_rank_may_have_no_answers() {
        let none = || Tensor::zeros([0], (Kind::Double, Device::Cpu));
        let (reference, labels) = (Some(none()), none());
        let (logprobs, lengths) = (none(), none());
        let answers = Answers { logprobs, lengths, labels, reference, divergence: None, valued: None };
        let whole = Whole { records: 1.0, better: 1.0, worse: 1.0, tokens: 1.0, kl: 0.0 };
        let objectives = [
            Objective::Dpo(DpoConfig::default()),
            Objective::Kto(JudgedConfig::default()),
            Objective::Prm(PrmConfig::default()),
        ];
        for objective in objectives {
            let terms = terms(&objective, &answers, whole).unwrap();
            let sums = Vec::<f64>::try_from(terms.sums.stack().unwrap()).unwrap();
            assert!(sums.iter().all(|sum| *sum == 0.0), "{sums:?}");
        }
    }
}
