//! Loss of implicit language Q-learning as a function of the outputs for tokens, as in trlx.
//!
//! A token is an action, and the text before it is the state. The state after a token is that of the answer's next
//! token. An answer has one reward, at its last token, after which the episode ends.

use anyroll_config::IlqlConfig;
use tch::{Kind, TchError, Tensor};

use super::objective::{Answers, Sums, Terms, Whole};

type Result<T> = std::result::Result<T, TchError>;

/// Outputs of the heads for the answers' tokens, or their gradient: each fp64 `[M]`.
#[derive(Debug)]
pub struct HeadOutputs {
    /// Value of the token, for each Q head.
    pub qs: Vec<Tensor>,
    /// Log-prob of the token under softmax(Q), for each Q head.
    pub q_logprobs: Vec<Tensor>,
    /// Value V of the state before the token.
    pub values: Tensor,
    /// Smallest value of the token over the target heads, without a gradient.
    pub target_q: Tensor,
}

impl HeadOutputs {
    /// Outputs that have a gradient, in the order that [`Self::with`] reads.
    pub fn trained(&self) -> impl Iterator<Item = &Tensor> {
        self.qs.iter().chain(&self.q_logprobs).chain([&self.values])
    }

    /// These outputs with others in place of those that have a gradient.
    pub fn with(&self, trained: &mut impl Iterator<Item = Tensor>) -> Self {
        let count = self.qs.len();
        let mut take = |count: usize| -> Vec<Tensor> { trained.by_ref().take(count).collect() };
        let (qs, q_logprobs) = (take(count), take(count));
        let values = take(1).pop().expect("one tensor for each that is trained");
        Self { qs, q_logprobs, values, target_q: self.target_q.shallow_clone() }
    }

    /// Applies `change` to every tensor.
    pub fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let all = |of: &[Tensor]| of.iter().map(&change).collect::<Result<Vec<_>>>();
        Ok(Self {
            qs: all(&self.qs)?,
            q_logprobs: all(&self.q_logprobs)?,
            values: change(&self.values)?,
            target_q: change(&self.target_q)?,
        })
    }

    /// Concatenates outputs of the same heads; there is at least one.
    pub fn join(parts: &[&Self]) -> Result<Self> {
        let cat = |of: &dyn Fn(&Self) -> Tensor| {
            Tensor::f_cat(&parts.iter().map(|part| of(part)).collect::<Vec<_>>(), 0)
        };
        let each = |of: fn(&Self) -> &[Tensor]| {
            (0..of(parts[0]).len())
                .map(|head| cat(&|part| of(part)[head].shallow_clone()))
                .collect::<Result<_>>()
        };
        Ok(Self {
            qs: each(|part| &part.qs)?,
            q_logprobs: each(|part| &part.q_logprobs)?,
            values: cat(&|part| part.values.shallow_clone())?,
            target_q: cat(&|part| part.target_q.shallow_clone())?,
        })
    }
}

/// Answers with rewards, and the heads' outputs for their tokens.
#[derive(Debug)]
pub struct Valued {
    /// The heads' outputs.
    pub heads: HeadOutputs,
    /// Scaled rewards of the answers, fp64 `[S]`.
    pub rewards: Tensor,
}

/// Terms of answers whose `logprobs` are those of tokens, `[M]`.
pub fn terms(config: &IlqlConfig, answers: &Answers, valued: &Valued, whole: Whole) -> Result<Terms> {
    let HeadOutputs { qs, q_logprobs, values, target_q } = &valued.heads;
    let sum = |values: &Tensor| values.f_sum(Kind::Double);
    let ends = answers.lengths.f_cumsum(0, Kind::Int64)?.f_sub_scalar(1)?;
    let rewards = values.f_detach()?.f_zeros_like()?.f_index_copy(0, &ends, &valued.rewards)?;
    let next =
        values.f_detach()?.f_roll([-1i64].as_slice(), [0i64].as_slice())?.f_index_fill(0, &ends, 0.0)?;
    let aim = rewards.f_add(&next.f_mul_scalar(config.gamma)?)?;
    let mut q_loss = none(values)?;
    for q in qs {
        q_loss = q_loss.f_add(&sum(&q.f_sub(&aim)?.f_square()?)?)?;
    }
    let mut cql = none(values)?;
    for logprobs in q_logprobs {
        cql = cql.f_sub(&sum(logprobs)?)?;
    }
    let error = target_q.f_sub(values)?;
    let is_above = error.f_detach()?.f_ge(0.0)?.f_to_kind(Kind::Double)?;
    // tau where the error is 0 or above, else 1 - tau.
    let weights = is_above.f_mul_scalar(2.0 * config.tau - 1.0)?.f_add_scalar(1.0 - config.tau)?;
    let v_loss = sum(&error.f_square()?.f_mul(&weights)?)?;
    let weights = error.f_detach()?.f_mul_scalar(config.beta)?.f_exp()?;
    let awac = sum(&answers.logprobs.f_mul(&weights)?)?.f_neg()?;
    let loss = q_loss
        .f_add(&v_loss)?
        .f_add(&cql.f_mul_scalar(config.cql_scale)?)?
        .f_add(&awac.f_mul_scalar(config.awac_scale)?)?;
    let of_answers = means(&least(qs)?, answers)?;
    let other = answers.labels.f_neg()?.f_add_scalar(1.0)?;
    let sums = Sums {
        nll: sum(&answers.logprobs.f_detach()?)?.f_neg()?,
        chosen: sum(&of_answers.f_mul(&answers.labels)?)?,
        rejected: sum(&of_answers.f_mul(&other)?)?,
        q_loss: q_loss.f_detach()?,
        v_loss: v_loss.f_detach()?,
        cql: cql.f_detach()?,
        awac: awac.f_detach()?,
        awac_weights: sum(&weights)?,
        values: sum(&values.f_detach()?)?,
        ..Sums::none(values.device())?
    };
    Ok(Terms { loss: loss.f_div_scalar(whole.tokens)?, sums })
}

/// Smallest value of each token over the heads, without a gradient.
fn least(qs: &[Tensor]) -> Result<Tensor> {
    let mut least = qs[0].f_detach()?;
    for q in &qs[1..] {
        least = least.f_minimum(&q.f_detach()?)?;
    }
    Ok(least)
}

/// Mean of the tokens' values for each answer, `[S]`.
fn means(of_tokens: &Tensor, answers: &Answers) -> Result<Tensor> {
    let lengths = answers.lengths.f_to_kind(Kind::Int64)?;
    let (indices, offsets, unchecked) = (None::<&Tensor>, None::<&Tensor>, true);
    let sums =
        Tensor::f_segment_reduce(of_tokens, "sum", Some(&lengths), indices, offsets, 0, unchecked, 0.0)?;
    sums.f_div(&answers.lengths)
}

fn none(like: &Tensor) -> Result<Tensor> {
    Tensor::f_zeros([], (Kind::Double, like.device()))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use tch::Device;

    use super::*;

    /// Output of tests/python/make_ilql_golden.py: the formulas of trlx on padded batches, and their gradients.
    #[derive(Deserialize)]
    struct Golden {
        normalized: Vec<f64>,
        lengths: Vec<f64>,
        actions: Vec<i64>,
        logits: Vec<Vec<f64>>,
        qs: Vec<Vec<Vec<f64>>>,
        target_qs: Vec<Vec<Vec<f64>>>,
        values: Vec<f64>,
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        config: IlqlConfig,
        loss: f64,
        losses: Losses,
        means: Means,
        of_logits: Vec<Vec<f64>>,
        of_qs: Vec<Vec<Vec<f64>>>,
        of_values: Vec<f64>,
    }

    #[derive(Deserialize)]
    struct Losses {
        q: f64,
        v: f64,
        cql: f64,
        awac: f64,
    }

    #[derive(Deserialize)]
    struct Means {
        weight: f64,
        v: f64,
    }

    fn golden() -> Golden {
        serde_json::from_str(include_str!("../../../tests/golden/ilql.json")).unwrap()
    }

    fn matrix(rows: &[Vec<f64>]) -> Tensor {
        Tensor::from_slice2(rows)
    }

    #[track_caller]
    fn near(found: &Tensor, expected: &Tensor) {
        assert_eq!(found.size(), expected.size());
        let apart = (found - expected).abs().max().double_value(&[]);
        assert!(apart < 1e-12, "{apart}");
    }

    #[test]
    fn losses_and_gradients_are_those_of_trlx() {
        let golden = golden();
        let actions = Tensor::from_slice(&golden.actions).unsqueeze(1);
        let of_actions = |of_all: &Tensor| of_all.gather(1, &actions, false).squeeze_dim(1);
        let logprobs = |of_all: &Tensor| of_actions(&of_all.log_softmax(1, Kind::Double));
        for Case { config, loss, losses, means, of_logits, of_qs, of_values } in &golden.cases {
            let heads = if config.two_qs { 2 } else { 1 };
            let leaf = |values: Tensor| values.set_requires_grad(true);
            let logits = leaf(matrix(&golden.logits));
            let qs: Vec<Tensor> = golden.qs[..heads].iter().map(|q| leaf(matrix(q))).collect();
            let values = leaf(Tensor::from_slice(&golden.values));
            let targets: Vec<Tensor> =
                golden.target_qs[..heads].iter().map(|q| of_actions(&matrix(q))).collect();
            let outputs = HeadOutputs {
                qs: qs.iter().map(of_actions).collect(),
                q_logprobs: qs.iter().map(logprobs).collect(),
                values: values.shallow_clone(),
                target_q: least(&targets).unwrap(),
            };
            let answers = Answers {
                logprobs: logprobs(&logits),
                lengths: Tensor::from_slice(&golden.lengths),
                labels: Tensor::from_slice(&[1.0, 0.0, 0.0, 1.0]),
                reference: None,
                divergence: None,
                valued: None,
            };
            let valued = Valued { heads: outputs, rewards: Tensor::from_slice(&golden.normalized) };
            let tokens = golden.lengths.iter().sum::<f64>();
            let whole = Whole { records: 4.0, better: 2.0, worse: 2.0, tokens, kl: 0.0 };
            let terms = terms(config, &answers, &valued, whole).unwrap();
            near(&terms.loss, &Tensor::from(*loss));
            let sums = Sums::read(&terms.sums.stack().unwrap()).unwrap();
            let found = [sums.q_loss, sums.v_loss, sums.cql, sums.awac, sums.awac_weights, sums.values];
            let expected = [losses.q, losses.v, losses.cql, losses.awac, means.weight, means.v];
            near(&(Tensor::from_slice(&found) / tokens), &Tensor::from_slice(&expected));
            let inputs: Vec<&Tensor> = [&logits, &values].into_iter().chain(&qs).collect();
            let gradients = Tensor::run_backward(&[&terms.loss], &inputs, false, false);
            near(&gradients[0], &matrix(of_logits));
            near(&gradients[1], &Tensor::from_slice(of_values));
            for (found, expected) in gradients[2..].iter().zip(of_qs) {
                near(found, &matrix(expected));
            }
        }
        assert_eq!(golden.cases.len(), 6);
    }

    #[test]
    fn a_rank_may_have_no_answers() {
        let nothing = || Tensor::zeros([0], (Kind::Double, Device::Cpu));
        let (qs, q_logprobs) = (vec![nothing()], vec![nothing()]);
        let outputs = HeadOutputs { qs, q_logprobs, values: nothing(), target_q: nothing() };
        let answers = Answers {
            logprobs: nothing(),
            lengths: nothing(),
            labels: nothing(),
            reference: None,
            divergence: None,
            valued: None,
        };
        let valued = Valued { heads: outputs, rewards: nothing() };
        let whole = Whole { records: 1.0, better: 1.0, worse: 0.0, tokens: 1.0, kl: 0.0 };
        let terms = terms(&IlqlConfig::default(), &answers, &valued, whole).unwrap();
        let sums = Vec::<f64>::try_from(terms.sums.stack().unwrap()).unwrap();
        assert!(sums.iter().all(|sum| *sum == 0.0), "{sums:?}");
    }
}
