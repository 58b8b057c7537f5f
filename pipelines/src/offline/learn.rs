//! An objective's gradient, through a model: one of language, or one that gives texts a number.

use anyroll_backends::ops::upload;
use anyroll_models::{Decoder, Model, PackedBatch, Scores, ScoresGrad, ValueModel};
use anyroll_strategy::Zero;
use tch::{Device, Kind, TchError, Tensor};

use super::{
    Written,
    objective::{Answers, SUMS, Whole, terms},
    written::{pack, pack_to_train},
};
use crate::{Result, config::Objective, train::Purpose};

type TchResult<T> = std::result::Result<T, TchError>;

/// A model that says something of an answer as a whole.
pub trait Answering: Model<Batch = PackedBatch> {
    /// Whether its adapters drop values in training.
    fn drops(&self) -> bool;

    /// What it says of each answer, fp64 `[S]`, without a gradient, from what it says of their tokens. `lengths` are their
    /// numbers.
    fn of_answers(scores: &Self::Scores, lengths: &Tensor) -> TchResult<Tensor>;

    /// The sum of the entropies of all tokens, fp64; 0 where there are none.
    fn entropy(scores: &Self::Scores) -> TchResult<Tensor>;

    /// The gradient with respect to what it says of `tokens` tokens, from that with respect to the answers.
    fn gradient(of_answers: &Tensor, lengths: &Tensor, tokens: i64) -> TchResult<Self::ScoresGrad>;

    /// The policy, if it is one of language.
    fn writer(policy: &mut Zero<Self>) -> Option<&mut Zero<Decoder>>
    where
        Self: Sized;
}

/// The sum of the log-probs of an answer's tokens.
impl Answering for Decoder {
    fn drops(&self) -> bool {
        self.drops()
    }

    fn of_answers(scores: &Scores, lengths: &Tensor) -> TchResult<Tensor> {
        // In a fixed order, and unchecked, since a check of the lengths would wait for the device.
        let logprobs = scores.logprobs.f_detach()?.f_to_kind(Kind::Double)?;
        let (indices, offsets, unchecked) = (None::<&Tensor>, None::<&Tensor>, true);
        Tensor::f_segment_reduce(&logprobs, "sum", Some(lengths), indices, offsets, 0, unchecked, 0.0)
    }

    fn entropy(scores: &Scores) -> TchResult<Tensor> {
        scores.entropy.f_sum(Kind::Double)
    }

    fn gradient(of_answers: &Tensor, lengths: &Tensor, tokens: i64) -> TchResult<ScoresGrad> {
        let of_answers = of_answers.f_to_kind(Kind::Float)?;
        let logprobs = of_answers.f_repeat_interleave_self_tensor(lengths, 0, tokens)?;
        Ok(ScoresGrad { logprobs, entropy: None })
    }

    fn writer(policy: &mut Zero<Self>) -> Option<&mut Zero<Decoder>> {
        Some(policy)
    }
}

/// The number of a text, which is that of the one token behind it.
impl Answering for ValueModel {
    fn drops(&self) -> bool {
        false
    }

    fn of_answers(values: &Tensor, _: &Tensor) -> TchResult<Tensor> {
        values.f_detach()?.f_to_kind(Kind::Double)
    }

    fn entropy(values: &Tensor) -> TchResult<Tensor> {
        Tensor::f_zeros([], (Kind::Double, values.device()))
    }

    fn gradient(of_answers: &Tensor, _: &Tensor, _: i64) -> TchResult<Tensor> {
        of_answers.f_to_kind(Kind::Float)
    }

    fn writer(_: &mut Zero<Self>) -> Option<&mut Zero<Decoder>> {
        None
    }
}

/// What is learnt in a step: this rank's part of it.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Its sequences, as the objective reads them.
    pub sequences: &'a [Written],
    /// Sequences that go through forward and backward at a time; of pairs as many as are whole, at least one.
    pub micro_batch_size: usize,
    /// What the frozen reference says of the answers, fp64 `[S]`, if the objective asks.
    pub reference: Option<Tensor>,
    /// The whole step.
    pub whole: Whole,
}

/// Which pass it is, for what is drawn in it.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// What it is for.
    pub purpose: Purpose,
    /// The run's seed.
    pub seed: u64,
    /// The pass's number.
    pub number: u64,
    /// The number of this rank's first sequence, over all ranks.
    pub first: usize,
}

/// What a rank's part of a step showed.
#[derive(Debug)]
pub struct Seen {
    /// [`SUMS`], then the entropies of the answers' tokens; fp64, on the device until they are read.
    sums: Tensor,
    /// Rows that went through the model.
    pub rows: i64,
    /// Those that would have without a beginning in common.
    pub inputs: i64,
}

impl Seen {
    /// The sums in the order of [`SUMS`], and that of entropies; waits for the device.
    pub fn read(&self) -> Result<([f64; SUMS.len()], f64)> {
        let all = Vec::<f64>::try_from(self.sums.f_to_device(Device::Cpu)?)?;
        let mut sums = [0.0; SUMS.len()];
        sums.copy_from_slice(&all[..SUMS.len()]);
        Ok((sums, all[SUMS.len()]))
    }
}

/// Adds the gradient of `objective` on `batch` to those of the policy's step. Every rank calls with as many sequences.
pub fn learn<M: Answering>(
    policy: &mut Zero<M>,
    objective: &Objective,
    batch: &Batch,
    pass: Pass,
) -> Result<Seen> {
    let (drops, device) = (policy.model().drops(), policy.torch_device());
    let mut seen =
        Seen { sums: Tensor::f_zeros([SUMS.len() as i64 + 1], (Kind::Double, device))?, rows: 0, inputs: 0 };
    let mut done = 0;
    for part in batch.sequences.chunks(whole_pairs(objective, batch.micro_batch_size)) {
        let pass = Pass { first: pass.first + done, ..pass };
        let packed = pack_to_train(drops, part, pass, device)?;
        let (lengths, desirable) = (lengths(part, device)?, desirable(part, device)?);
        let part_of = |all: &Tensor| all.f_narrow(0, done as i64, part.len() as i64);
        let reference = batch.reference.as_ref().map(part_of).transpose()?;
        done += part.len();
        (seen.rows, seen.inputs) = (seen.rows + packed.tokens(), seen.inputs + packed.inputs());
        policy.accumulate(&packed, |scores| {
            let logprobs = M::of_answers(scores, &lengths)?.f_set_requires_grad(true)?;
            let lengths_fp64 = lengths.f_to_kind(Kind::Double)?;
            let answers = Answers { logprobs, lengths: lengths_fp64, desirable, reference };
            let terms = terms(objective, &answers, batch.whole)?;
            let of_answers = Tensor::f_run_backward(&[&terms.loss], &[&answers.logprobs], false, false)?;
            let entropy = M::entropy(scores)?.f_reshape([1])?;
            seen.sums = seen.sums.f_add(&Tensor::f_cat(&[terms.sums, entropy], 0)?)?;
            Ok(M::gradient(&of_answers[0], &lengths, packed.targets())?)
        })?;
    }
    Ok(seen)
}

/// What `model` says of the answers, fp64 `[S]`. Every rank calls with as many sequences.
pub fn score<M: Answering>(
    model: &mut Zero<M>,
    sequences: &[Written],
    micro_batch_size: usize,
    with_adapters: bool,
) -> Result<Tensor> {
    let device = model.torch_device();
    let parts = sequences.chunks(micro_batch_size).map(|part| {
        let batch = pack(part, device)?;
        let batch = if with_adapters { batch } else { batch.without_adapters() };
        Ok(M::of_answers(&model.score(&batch)?, &lengths(part, device)?)?)
    });
    Ok(Tensor::f_cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
}

/// So many sequences, but whole pairs, where they are compared.
pub fn whole_pairs(objective: &Objective, sequences: usize) -> usize {
    let answers = objective.answers();
    (sequences / answers).max(1) * answers
}

/// Of each answer 1 if it is better, or desirable, else 0: fp64 `[S]`.
pub fn desirable(sequences: &[Written], device: Device) -> Result<Tensor> {
    let desirable: Vec<i64> = sequences.iter().map(|sequence| i64::from(sequence.desirable)).collect();
    Ok(upload(&desirable, device).map_err(anyroll_models::Error::from)?.f_to_kind(Kind::Double)?)
}

/// Tokens of each answer: int64 `[S]`.
pub fn lengths(sequences: &[Written], device: Device) -> Result<Tensor> {
    let lengths: Vec<i64> = sequences.iter().map(|sequence| sequence.answer_len() as i64).collect();
    Ok(upload(&lengths, device).map_err(anyroll_models::Error::from)?)
}
