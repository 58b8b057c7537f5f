//! Gradient of an objective through a model: a language model, with heads of values or without, or one that gives texts
//! a scalar.

use anyroll_backends::ops::upload;
use anyroll_config::Objective;
use anyroll_models::{
    Decoder, IlqlGrad, IlqlModel, IlqlScores, Model, OfAction, PackedBatch, Scores, ScoresGrad, ValueModel,
};
use anyroll_strategy::{Weights, Zero};
use tch::{Device, Kind, TchError, Tensor};

use super::{
    Tokenized,
    ilql::{HeadOutputs, Valued},
    objective::{Answers, Sums, Whole, terms},
    teacher::Taught,
    tokenized::{pack, pack_to_train},
};
use crate::{
    Result,
    train::{Exchange, MicroBatch, Purpose, RouterStats, reduced},
};

type TchResult<T> = std::result::Result<T, TchError>;

/// A model's outputs for answers, or their gradient: each fp64 `[S]`.
#[derive(Debug)]
pub struct Said {
    /// Sum of the log-probs of the answer's tokens, or the scalar. A model with heads of values has one log-prob for
    /// each token, `[M]`.
    pub logprobs: Tensor,
    /// Sum of the teacher's divergence over the answer's tokens; `None` without a teacher.
    pub divergence: Option<Tensor>,
    /// Outputs of the heads for the answers' tokens; `None` without heads of values.
    pub heads: Option<HeadOutputs>,
}

impl Said {
    /// Outputs that have no heads.
    fn new(logprobs: Tensor, divergence: Option<Tensor>) -> Said {
        Said { logprobs, divergence, heads: None }
    }

    /// Concatenates outputs.
    pub fn join(parts: &[Said]) -> TchResult<Said> {
        let cat = |parts: Vec<&Tensor>| Tensor::f_cat(&parts, 0);
        let divergences: Option<Vec<&Tensor>> = parts.iter().map(|part| part.divergence.as_ref()).collect();
        let logprobs = cat(parts.iter().map(|part| &part.logprobs).collect())?;
        let heads: Vec<&HeadOutputs> = parts.iter().filter_map(|part| part.heads.as_ref()).collect();
        let heads = if heads.is_empty() { None } else { Some(HeadOutputs::join(&heads)?) };
        Ok(Said { logprobs, divergence: divergences.map(cat).transpose()?, heads })
    }

    /// The first `count` outputs, on `device`.
    pub fn first(&self, count: i64, device: Device) -> TchResult<Said> {
        self.map(|of| of.f_narrow(0, 0, count)?.f_to_device(device))
    }

    fn map(&self, change: impl Fn(&Tensor) -> TchResult<Tensor>) -> TchResult<Said> {
        Ok(Said {
            logprobs: change(&self.logprobs)?,
            divergence: self.divergence.as_ref().map(&change).transpose()?,
            heads: self.heads.as_ref().map(|heads| heads.map(&change)).transpose()?,
        })
    }

    /// Answers of these token counts, labels, rewards and `reference` outputs, each `[S]`, with these outputs.
    pub fn answers(
        &self,
        lengths: Tensor,
        labels: Tensor,
        rewards: Tensor,
        reference: Option<Tensor>,
    ) -> TchResult<Answers> {
        let Said { logprobs, divergence, heads } = self.map(|of| Ok(of.shallow_clone()))?;
        let valued = heads.map(|heads| Valued { heads, rewards });
        Ok(Answers { logprobs, lengths, labels, reference, divergence, valued })
    }

    /// The gradient of `loss` with respect to these outputs.
    fn gradient(&self, loss: &Tensor) -> TchResult<Said> {
        let of_heads = self.heads.iter().flat_map(HeadOutputs::trained);
        let said: Vec<&Tensor> =
            [&self.logprobs].into_iter().chain(&self.divergence).chain(of_heads).collect();
        let mut gradients = Tensor::f_run_backward(&[loss], &said, false, false)?.into_iter();
        Ok(Said {
            logprobs: gradients.next().expect("one of the log-probs"),
            divergence: self.divergence.as_ref().and_then(|_| gradients.next()),
            heads: self.heads.as_ref().map(|heads| heads.with(&mut gradients)),
        })
    }
}

/// A model with one output per answer.
pub trait Answering: Model<Batch = PackedBatch> {
    /// Returns true if its adapters have dropout in training.
    fn drops(&self) -> bool;

    /// Outputs of answers, without a gradient, from those of their tokens. `lengths` are the answers' token
    /// counts.
    fn of_answers(scores: &Self::Scores, lengths: &Tensor) -> TchResult<Said>;

    /// Sum of the entropies of all tokens, fp64; 0 for a scalar model.
    fn entropy(scores: &Self::Scores) -> TchResult<Tensor>;

    /// Gradient with respect to the outputs of `tokens` tokens, from that with respect to the answers.
    fn gradient(of_answers: &Said, lengths: &Tensor, tokens: i64) -> TchResult<Self::ScoresGrad>;

    /// The policy as a language model; `None` if it is not one.
    fn writer(policy: &mut Zero<Self>) -> Option<&mut Zero<Decoder>>
    where
        Self: Sized;

    /// Moves the parts of the policy that follow others instead of a gradient, before the optimizer's step `step`,
    /// from 0. Every rank must call this.
    fn follow(_policy: &mut Zero<Self>, _objective: &Objective, _step: u64) -> Result<()>
    where
        Self: Sized,
    {
        Ok(())
    }

    /// The whole weights of the policy, as a language model that completes prompts.
    fn weights_to_write(policy: &mut Zero<Self>) -> Result<Weights>
    where
        Self: Sized;
}

/// The output is the sum of the log-probs of an answer's tokens.
impl Answering for Decoder {
    fn drops(&self) -> bool {
        self.drops()
    }

    fn of_answers(scores: &Scores, lengths: &Tensor) -> TchResult<Said> {
        // In a fixed order. Unchecked, since a check of the lengths would wait for the device.
        let sums = |of_tokens: &Tensor| {
            let of_tokens = of_tokens.f_detach()?.f_to_kind(Kind::Double)?;
            let (indices, offsets, unchecked) = (None::<&Tensor>, None::<&Tensor>, true);
            Tensor::f_segment_reduce(&of_tokens, "sum", Some(lengths), indices, offsets, 0, unchecked, 0.0)
        };
        let divergence = scores.divergence.as_ref().map(sums).transpose()?;
        Ok(Said::new(sums(&scores.logprobs)?, divergence))
    }

    fn entropy(scores: &Scores) -> TchResult<Tensor> {
        scores.entropy.f_sum(Kind::Double)
    }

    fn gradient(of_answers: &Said, lengths: &Tensor, tokens: i64) -> TchResult<ScoresGrad> {
        let of_tokens = |of_answers: &Tensor| {
            of_answers.f_to_kind(Kind::Float)?.f_repeat_interleave_self_tensor(lengths, 0, tokens)
        };
        let divergence = of_answers.divergence.as_ref().map(of_tokens).transpose()?;
        Ok(ScoresGrad { logprobs: of_tokens(&of_answers.logprobs)?, entropy: None, divergence })
    }

    fn writer(policy: &mut Zero<Self>) -> Option<&mut Zero<Decoder>> {
        Some(policy)
    }

    fn weights_to_write(policy: &mut Zero<Self>) -> Result<Weights> {
        Ok(policy.weights()?)
    }
}

/// The output is the scalar at the token after the text, or one at the token after each labelled step.
impl Answering for ValueModel {
    fn drops(&self) -> bool {
        false
    }

    fn of_answers(values: &Tensor, _: &Tensor) -> TchResult<Said> {
        Ok(Said::new(values.f_detach()?.f_to_kind(Kind::Double)?, None))
    }

    fn entropy(values: &Tensor) -> TchResult<Tensor> {
        Tensor::f_zeros([], (Kind::Double, values.device()))
    }

    fn gradient(of_answers: &Said, _: &Tensor, _: i64) -> TchResult<Tensor> {
        of_answers.logprobs.f_to_kind(Kind::Float)
    }

    fn writer(_: &mut Zero<Self>) -> Option<&mut Zero<Decoder>> {
        None
    }

    fn weights_to_write(_: &mut Zero<Self>) -> Result<Weights> {
        unreachable!("a reward model completes nothing")
    }
}

/// The outputs are those of single tokens, from the language model's head and from the heads of values.
impl Answering for IlqlModel {
    fn drops(&self) -> bool {
        false
    }

    fn of_answers(scores: &IlqlScores, _: &Tensor) -> TchResult<Said> {
        let fp64 = |of: &Tensor| of.f_detach()?.f_to_kind(Kind::Double);
        let each =
            |of: fn(&OfAction) -> &Tensor| scores.qs.iter().map(|q| fp64(of(q))).collect::<TchResult<_>>();
        let heads = HeadOutputs {
            qs: each(|of| &of.q)?,
            q_logprobs: each(|of| &of.logprobs)?,
            values: fp64(&scores.values)?,
            target_q: fp64(&scores.target_q)?,
        };
        Ok(Said { logprobs: fp64(&scores.language.logprobs)?, divergence: None, heads: Some(heads) })
    }

    fn entropy(scores: &IlqlScores) -> TchResult<Tensor> {
        Decoder::entropy(&scores.language)
    }

    fn gradient(of_answers: &Said, _: &Tensor, _: i64) -> TchResult<IlqlGrad> {
        let fp32 = |of: &Tensor| of.f_to_kind(Kind::Float);
        let heads = of_answers.heads.as_ref().expect("the model has heads of values");
        let of_q =
            |(q, logprobs): (&Tensor, &Tensor)| Ok(OfAction { q: fp32(q)?, logprobs: fp32(logprobs)? });
        let qs = heads.qs.iter().zip(&heads.q_logprobs).map(of_q).collect::<TchResult<_>>()?;
        let logprobs = fp32(&of_answers.logprobs)?;
        let language = ScoresGrad { logprobs, entropy: None, divergence: None };
        Ok(IlqlGrad { language, qs, values: fp32(&heads.values)? })
    }

    fn writer(_: &mut Zero<Self>) -> Option<&mut Zero<Decoder>> {
        None
    }

    /// Moves the target heads in the steps 0, n, 2n, ..., towards the Q heads before the step, as trlx does.
    fn follow(policy: &mut Zero<Self>, objective: &Objective, step: u64) -> Result<()> {
        let ilql = objective.ilql().expect("only `ilql` trains heads of values");
        if step.is_multiple_of(ilql.steps_for_target_q_sync) {
            let (targets, sources) = policy.model().targets_and_sources();
            policy.move_unit_towards(targets, sources, ilql.alpha)?;
        }
        Ok(())
    }

    fn weights_to_write(policy: &mut Zero<Self>) -> Result<Weights> {
        Ok(policy.weights()?)
    }
}

/// This rank's part of a step.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Sequences in the form that the objective reads.
    pub sequences: &'a [Tokenized],
    /// Limit of a forward and backward pass. Pairs are never split, so at least one pair.
    pub micro_batch: MicroBatch,
    /// Outputs of the frozen reference for the answers, fp64 `[S]`, if the objective uses them.
    pub reference: Option<Tensor>,
    /// Outputs of a teacher for the answers' tokens, if the objective uses them.
    pub taught: Option<&'a Taught>,
    /// Weight of the loss that balances experts.
    pub router_aux_loss_coef: f64,
    /// Totals of the whole step.
    pub whole: Whole,
}

/// Identity of a pass, which seeds its random numbers.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Kind of random numbers.
    pub purpose: Purpose,
    /// The run's seed.
    pub seed: u64,
    /// Index of the pass.
    pub number: u64,
    /// Index of this rank's first sequence, over all ranks.
    pub first: usize,
}

/// Results of a rank's part of a step.
#[derive(Debug, Default)]
pub struct Seen {
    /// The stacked [`Sums`]; `None` before the first micro-batch.
    sums: Option<Tensor>,
    /// The sum of the entropies of the answers' tokens, fp64.
    entropy: Option<Tensor>,
    /// Statistics of the routers of experts.
    pub routers: RouterStats,
    /// Rows that went through the model.
    pub rows: i64,
    /// Rows without sharing of prefixes.
    pub inputs: i64,
}

impl Seen {
    /// Returns the sums over all ranks; waits for the device. Every rank must call this.
    pub fn read(&self, exchange: &Exchange) -> Result<SeenSums> {
        let objective = self.sums.as_ref().map_or(Ok(Sums::default()), Sums::read)?;
        let entropy = self.entropy.as_ref().map_or(Ok(0.0), |sum| sum.f_double_value(&[]))?;
        exchange.reduce(&SeenSums { objective, entropy })
    }
}

reduced! {
    /// [`Seen`] on the host.
    pub struct SeenSums {
        /// Sums of the objective.
        nested objective: Sums,
        /// Entropies of the answers' tokens.
        sum entropy: f64,
    }
}

/// Adds the gradient of `objective` on `batch` to those of the policy's step. Every rank must call this with
/// the same number of sequences.
pub fn learn<M: Answering>(
    policy: &mut Zero<M>,
    objective: &Objective,
    batch: &Batch,
    pass: Pass,
) -> Result<Seen> {
    let (drops, device) = (policy.model().drops(), policy.torch_device());
    let mut seen = Seen::default();
    let (mut done, mut tokens) = (0, 0);
    let whole = objective.answers();
    let counts: Vec<usize> = batch.sequences.chunks(whole).map(|it| token_counts(it).iter().sum()).collect();
    let micro_batch = batch.micro_batch.in_units_of(whole);
    let micro_batches = micro_batch.split(&counts, 0..counts.len(), policy.group())?;
    let balance = batch.router_aux_loss_coef / (micro_batches.len() * policy.group().world_size()) as f64;
    for units in micro_batches {
        let part = &batch.sequences[units.start * whole..units.end * whole];
        let pass = Pass { first: pass.first + done, ..pass };
        let packed = beside_teacher(pack_to_train(drops, part, pass, device)?, batch.taught, &mut tokens)?;
        let (lengths, labels) = (lengths(part, device)?, labels(part, device)?);
        let rewards = rewards(part, device)?;
        let part_of = |all: &Tensor| all.f_narrow(0, done as i64, part.len() as i64);
        let reference = batch.reference.as_ref().map(part_of).transpose()?;
        done += part.len();
        (seen.rows, seen.inputs) = (seen.rows + packed.tokens(), seen.inputs + packed.inputs());
        let packed = packed.watching(balance);
        policy.accumulate(&packed, |scores| {
            let said = M::of_answers(scores, &lengths)?.map(|of| of.f_set_requires_grad(true))?;
            let lengths_fp64 = lengths.f_to_kind(Kind::Double)?;
            let answers = said.answers(lengths_fp64, labels, rewards, reference)?;
            let terms = terms(objective, &answers, batch.whole)?;
            let of_answers = said.gradient(&terms.loss)?;
            seen.sums = Some(added(seen.sums.take(), terms.sums.stack()?)?);
            seen.entropy = Some(added(seen.entropy.take(), M::entropy(scores)?)?);
            Ok(M::gradient(&of_answers, &lengths, packed.targets())?)
        })?;
        seen.routers.add(&packed, false)?;
    }
    Ok(seen)
}

/// Adds `next` to the sum so far.
fn added(sum: Option<Tensor>, next: Tensor) -> TchResult<Tensor> {
    match sum {
        Some(sum) => sum.f_add(&next),
        None => Ok(next),
    }
}

/// Returns the outputs of `model` for the answers, with the teacher's if the answers are `taught`. Every rank must
/// call this with the same number of sequences.
pub fn score<M: Answering>(
    model: &mut Zero<M>,
    sequences: &[Tokenized],
    micro_batch: MicroBatch,
    with_adapters: bool,
    taught: Option<&Taught>,
) -> Result<Said> {
    let device = model.torch_device();
    let mut tokens = 0;
    let parts = micro_batch.split(&token_counts(sequences), 0..sequences.len(), model.group())?;
    let parts = parts.into_iter().map(|part| {
        let part = &sequences[part];
        let batch = beside_teacher(pack(part, device)?, taught, &mut tokens)?;
        let batch = if with_adapters { batch } else { batch.without_adapters() };
        Ok(M::of_answers(&model.score(&batch)?, &lengths(part, device)?)?)
    });
    Ok(Said::join(&parts.collect::<Result<Vec<_>>>()?)?)
}

/// Adds the teacher's outputs for the batch's tokens, which start at index `before`.
fn beside_teacher(packed: PackedBatch, taught: Option<&Taught>, before: &mut i64) -> Result<PackedBatch> {
    let Some(taught) = taught else { return Ok(packed) };
    let start = *before;
    *before += packed.targets();
    Ok(taught.beside(packed, start)?)
}

/// Number of tokens of each sequence.
pub fn token_counts(sequences: &[Tokenized]) -> Vec<usize> {
    sequences.iter().map(|sequence| sequence.tokens.len()).collect()
}

/// 1 for each answer that is better or desirable, else 0; for solutions the labels of their steps: fp64 `[S]`.
pub fn labels(sequences: &[Tokenized], device: Device) -> Result<Tensor> {
    let mut labels: Vec<f64> = Vec::with_capacity(sequences.len());
    for sequence in sequences {
        match &sequence.step_labels[..] {
            [] => labels.push(f64::from(u8::from(sequence.desirable))),
            of_steps => labels.extend(of_steps),
        }
    }
    Ok(upload(&labels, device).map_err(anyroll_models::Error::from)?)
}

/// Reward of each answer, or 0: fp64 `[S]`.
pub fn rewards(sequences: &[Tokenized], device: Device) -> Result<Tensor> {
    let rewards: Vec<f64> = sequences.iter().map(|sequence| sequence.reward.unwrap_or(0.0)).collect();
    Ok(upload(&rewards, device).map_err(anyroll_models::Error::from)?)
}

/// Token count of each answer: int64 `[S]`.
pub fn lengths(sequences: &[Tokenized], device: Device) -> Result<Tensor> {
    let lengths: Vec<i64> = sequences.iter().map(|sequence| sequence.answer_len() as i64).collect();
    Ok(upload(&lengths, device).map_err(anyroll_models::Error::from)?)
}
