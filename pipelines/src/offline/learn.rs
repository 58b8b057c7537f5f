//! An objective's gradient, through a model.

use anyroll_backends::ops::upload;
use anyroll_models::{Decoder, ScoresGrad};
use anyroll_strategy::Zero;
use tch::{Device, Kind, TchError, Tensor};

use super::{
    Written,
    objective::{Answers, SUMS, Whole, terms},
    written::{pack, pack_to_train},
};
use crate::{Result, config::Objective, train::Purpose};

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
pub fn learn(policy: &mut Zero<Decoder>, objective: &Objective, batch: &Batch, pass: Pass) -> Result<Seen> {
    let (model, device) = (policy.model().clone(), policy.torch_device());
    let mut seen =
        Seen { sums: Tensor::f_zeros([SUMS.len() as i64 + 1], (Kind::Double, device))?, rows: 0, inputs: 0 };
    let mut done = 0;
    for part in batch.sequences.chunks(whole_pairs(objective, batch.micro_batch_size)) {
        let pass = Pass { first: pass.first + done, ..pass };
        let packed = pack_to_train(&model, part, pass, device)?;
        let lengths = lengths(part, device)?;
        let part_of = |all: &Tensor| all.f_narrow(0, done as i64, part.len() as i64);
        let reference = batch.reference.as_ref().map(part_of).transpose()?;
        done += part.len();
        (seen.rows, seen.inputs) = (seen.rows + packed.tokens(), seen.inputs + packed.inputs());
        policy.accumulate(&packed, |scores| {
            let logprobs = sums(&scores.logprobs, &lengths)?.f_set_requires_grad(true)?;
            let answers = Answers { logprobs, lengths: lengths.f_to_kind(Kind::Double)?, reference };
            let terms = terms(objective, &answers, batch.whole)?;
            let of_answers = Tensor::f_run_backward(&[&terms.loss], &[&answers.logprobs], false, false)?;
            let entropy = scores.entropy.f_sum(Kind::Double)?.f_reshape([1])?;
            seen.sums = seen.sums.f_add(&Tensor::f_cat(&[terms.sums, entropy], 0)?)?;
            let logprobs = spread(&of_answers[0], &lengths, packed.targets())?;
            Ok(ScoresGrad { logprobs, entropy: None })
        })?;
    }
    Ok(seen)
}

/// The log-probs that `model` gives the answers, fp64 `[S]`. Every rank calls with as many sequences.
pub fn score(
    model: &mut Zero<Decoder>,
    sequences: &[Written],
    micro_batch_size: usize,
    with_adapters: bool,
) -> Result<Tensor> {
    let device = model.torch_device();
    let parts = sequences.chunks(micro_batch_size).map(|part| {
        let batch = pack(part, device)?;
        let batch = if with_adapters { batch } else { batch.without_adapters() };
        Ok(sums(&model.score(&batch)?.logprobs, &lengths(part, device)?)?)
    });
    Ok(Tensor::f_cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
}

/// So many sequences, but whole pairs, where they are compared.
pub fn whole_pairs(objective: &Objective, sequences: usize) -> usize {
    if objective.compares() { (sequences / 2).max(1) * 2 } else { sequences }
}

/// Tokens of each answer: int64 `[S]`.
pub fn lengths(sequences: &[Written], device: Device) -> Result<Tensor> {
    let lengths: Vec<i64> = sequences.iter().map(|sequence| sequence.answer_len() as i64).collect();
    Ok(upload(&lengths, device).map_err(anyroll_models::Error::from)?)
}

/// Of each answer the sum of its tokens' values, fp64 `[S]` of `[M]`, without a gradient.
fn sums(values: &Tensor, lengths: &Tensor) -> std::result::Result<Tensor, TchError> {
    // In a fixed order, and unchecked, since a check of the lengths would wait for the device.
    let values = values.f_detach()?.f_to_kind(Kind::Double)?;
    let (indices, offsets, unchecked) = (None::<&Tensor>, None::<&Tensor>, true);
    Tensor::f_segment_reduce(&values, "sum", Some(lengths), indices, offsets, 0, unchecked, 0.0)
}

/// For each of `tokens` tokens what its answer has, fp32 `[M]` of `[S]`.
fn spread(of_answers: &Tensor, lengths: &Tensor, tokens: i64) -> std::result::Result<Tensor, TchError> {
    of_answers.f_to_kind(Kind::Float)?.f_repeat_interleave_self_tensor(lengths, 0, tokens)
}
