//! Gradient of an objective through a model: a language model, or one that gives texts a scalar.

use anyroll_backends::ops::upload;
use anyroll_config::Objective;
use anyroll_models::{Decoder, Model, PackedBatch, Scores, ScoresGrad, ValueModel};
use anyroll_strategy::Zero;
use tch::{Device, Kind, TchError, Tensor};

use super::{
    Written,
    objective::{Answers, Sums, Whole, terms},
    teacher::Taught,
    written::{pack, pack_to_train},
};
use crate::{
    Result,
    train::{Exchange, Purpose, reduced},
};

type TchResult<T> = std::result::Result<T, TchError>;

/// A model's outputs for answers, or their gradient: each fp64 `[S]`.
#[derive(Debug)]
pub struct Said {
    /// Sum of the log-probs of the answer's tokens, or the scalar.
    pub logprobs: Tensor,
    /// Sum of the teacher's divergence over the answer's tokens; `None` without a teacher.
    pub divergence: Option<Tensor>,
}

impl Said {
    /// Concatenates outputs.
    pub fn join(parts: &[Said]) -> TchResult<Said> {
        let cat = |parts: Vec<&Tensor>| Tensor::f_cat(&parts, 0);
        let divergences: Option<Vec<&Tensor>> = parts.iter().map(|part| part.divergence.as_ref()).collect();
        let logprobs = cat(parts.iter().map(|part| &part.logprobs).collect())?;
        Ok(Said { logprobs, divergence: divergences.map(cat).transpose()? })
    }

    /// The first `count` outputs, on `device`.
    pub fn first(&self, count: i64, device: Device) -> TchResult<Said> {
        let first = |of: &Tensor| of.f_narrow(0, 0, count)?.f_to_device(device);
        Ok(Said {
            logprobs: first(&self.logprobs)?,
            divergence: self.divergence.as_ref().map(first).transpose()?,
        })
    }

    fn set_requires_grad(self) -> TchResult<Said> {
        let requires = |of: Tensor| of.f_set_requires_grad(true);
        Ok(Said {
            logprobs: requires(self.logprobs)?,
            divergence: self.divergence.map(requires).transpose()?,
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
        Ok(Said { logprobs: sums(&scores.logprobs)?, divergence })
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
}

/// The output is the scalar at the token after the text, or one at the token after each labelled step.
impl Answering for ValueModel {
    fn drops(&self) -> bool {
        false
    }

    fn of_answers(values: &Tensor, _: &Tensor) -> TchResult<Said> {
        Ok(Said { logprobs: values.f_detach()?.f_to_kind(Kind::Double)?, divergence: None })
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
}

/// This rank's part of a step.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Sequences in the form that the objective reads.
    pub sequences: &'a [Written],
    /// Sequences per forward and backward pass. Pairs are never split, so at least one pair.
    pub micro_batch_size: usize,
    /// Outputs of the frozen reference for the answers, fp64 `[S]`, if the objective uses them.
    pub reference: Option<Tensor>,
    /// Outputs of a teacher for the answers' tokens, if the objective uses them.
    pub taught: Option<&'a Taught>,
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
    for part in batch.sequences.chunks(whole_pairs(objective, batch.micro_batch_size)) {
        let pass = Pass { first: pass.first + done, ..pass };
        let packed = beside_teacher(pack_to_train(drops, part, pass, device)?, batch.taught, &mut tokens)?;
        let (lengths, labels) = (lengths(part, device)?, labels(part, device)?);
        let part_of = |all: &Tensor| all.f_narrow(0, done as i64, part.len() as i64);
        let reference = batch.reference.as_ref().map(part_of).transpose()?;
        done += part.len();
        (seen.rows, seen.inputs) = (seen.rows + packed.tokens(), seen.inputs + packed.inputs());
        policy.accumulate(&packed, |scores| {
            let Said { logprobs, divergence } = M::of_answers(scores, &lengths)?.set_requires_grad()?;
            let lengths_fp64 = lengths.f_to_kind(Kind::Double)?;
            let answers = Answers { logprobs, lengths: lengths_fp64, labels, reference, divergence };
            let terms = terms(objective, &answers, batch.whole)?;
            let said: Vec<&Tensor> = [&answers.logprobs].into_iter().chain(&answers.divergence).collect();
            let mut gradients = Tensor::f_run_backward(&[&terms.loss], &said, false, false)?.into_iter();
            let logprobs = gradients.next().expect("one of the log-probs");
            let of_answers = Said { logprobs, divergence: gradients.next() };
            seen.sums = Some(added(seen.sums.take(), terms.sums.stack()?)?);
            seen.entropy = Some(added(seen.entropy.take(), M::entropy(scores)?)?);
            Ok(M::gradient(&of_answers, &lengths, packed.targets())?)
        })?;
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
    sequences: &[Written],
    micro_batch_size: usize,
    with_adapters: bool,
    taught: Option<&Taught>,
) -> Result<Said> {
    let device = model.torch_device();
    let mut tokens = 0;
    let parts = sequences.chunks(micro_batch_size).map(|part| {
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

/// Number of sequences, rounded down to whole pairs (at least one) for objectives that compare.
pub fn whole_pairs(objective: &Objective, sequences: usize) -> usize {
    let answers = objective.answers();
    (sequences / answers).max(1) * answers
}

/// 1 for each answer that is better or desirable, else 0; for solutions the labels of their steps: fp64 `[S]`.
pub fn labels(sequences: &[Written], device: Device) -> Result<Tensor> {
    let mut labels: Vec<f64> = Vec::with_capacity(sequences.len());
    for sequence in sequences {
        match &sequence.step_labels[..] {
            [] => labels.push(f64::from(u8::from(sequence.desirable))),
            of_steps => labels.extend(of_steps),
        }
    }
    Ok(upload(&labels, device).map_err(anyroll_models::Error::from)?)
}

/// Token count of each answer: int64 `[S]`.
pub fn lengths(sequences: &[Written], device: Device) -> Result<Tensor> {
    let lengths: Vec<i64> = sequences.iter().map(|sequence| sequence.answer_len() as i64).collect();
    Ok(upload(&lengths, device).map_err(anyroll_models::Error::from)?)
}
