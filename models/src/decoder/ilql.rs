//! A decoder with the heads of implicit language Q-learning (Snell et al., 2022): for each target token the Q values
//! of the token, and the value of the state before it, beside the language model's own output.
//!
//! The heads read the normed rows that the language model's head reads. Each is a perceptron with one hidden layer, as
//! in trlx: C to 2C, ReLU, then 2C to V for Q and 2C to 1 for the value. The target heads are a unit like that of the Q
//! heads. Its gradient is 0 and its weights do not decay, so optimizer steps do not change it. The holder of the
//! weights moves it towards the Q heads.

use std::{ops::Range, sync::Arc};

use anyroll_backends::ops::{self, LogProbs, Store};
use tch::{Device, Tensor};

use super::head::{Head, chunks_of};
use super::{Decoder, DecoderConfig, matrix_spec, norm_spec, wide};
use crate::error::check_config;
use crate::init::{Seed, WeightSource};
use crate::model::{
    Gradient, Grads, Init, Model, Output, OutputGrad, ParamSpec, Part, Saved, Scores, ScoresGrad, Unit,
    Weights,
};
use crate::{PackedBatch, Peers, Result};

/// Prefix of the names of the heads' parameters.
const HEADS: &str = "ilql_heads.";
const Q_HEADS: &str = "q_heads";
const TARGET_Q_HEADS: &str = "target_q_heads";
const V_HEAD: &str = "v_head";

/// The blocks of a [`Decoder`] whose last block also has the heads of ILQL. It holds no weights.
#[derive(Debug)]
pub struct IlqlModel {
    decoder: Decoder,
    units: Vec<Unit>,
    units_of_head: Vec<usize>,
    heads: Heads,
}

/// Places of the heads' parameters.
#[derive(Debug)]
struct Heads {
    qs: Vec<Perceptron>,
    target_qs: Vec<Perceptron>,
    value: Perceptron,
}

/// A head with one hidden layer.
#[derive(Clone, Copy, Debug)]
struct Perceptron {
    /// Index of its unit among those that the last block reads.
    unit: usize,
    /// Index of its first parameter in the unit.
    first: usize,
}

/// Outputs for each target token, each fp32 `[M]`.
#[derive(Debug)]
pub struct IlqlScores {
    /// Output of the language model's head.
    pub language: Scores,
    /// Output of each Q head.
    pub qs: Vec<OfAction>,
    /// Smallest of the target heads' Q values of the target; it has no gradient.
    pub target_q: Tensor,
    /// Value of the state in which the target is the action.
    pub values: Tensor,
}

/// Output of a Q head for each target token, or its gradient: fp32 `[M]`.
#[derive(Debug)]
pub struct OfAction {
    /// Q value of the target.
    pub q: Tensor,
    /// Log-probability of the target under softmax(Q).
    pub logprobs: Tensor,
}

/// Gradient of the loss with respect to [`IlqlScores`].
#[derive(Debug)]
pub struct IlqlGrad {
    /// Gradient of the language model's output.
    pub language: ScoresGrad,
    /// Gradient of each Q head's output.
    pub qs: Vec<OfAction>,
    /// Gradient of the values.
    pub values: Tensor,
}

impl Gradient for IlqlGrad {
    fn scaled(self, factor: &Tensor) -> Result<Self> {
        let of_action = |OfAction { q, logprobs }: OfAction| {
            Ok(OfAction { q: q.scaled(factor)?, logprobs: logprobs.scaled(factor)? })
        };
        let qs = self.qs.into_iter().map(of_action).collect::<Result<_>>()?;
        Ok(Self { language: self.language.scaled(factor)?, qs, values: self.values.scaled(factor)? })
    }
}

impl IlqlModel {
    /// Lays out a model with one Q head, or with two, whose weights and batches will be on `device`.
    ///
    /// # Errors
    /// The errors of [`Decoder::new`].
    pub fn new(config: DecoderConfig, two_qs: bool, device: Device) -> Result<IlqlModel> {
        let decoder = Decoder::new(config, device)?;
        let DecoderConfig { hidden_size, vocab_size, .. } = *decoder.config();
        let count = if two_qs { 2 } else { 1 };
        let of_qs = |group: &str, decays: bool| {
            let heads =
                (0..count).flat_map(|head| perceptron(&format!("{group}.{head}"), hidden_size, vocab_size));
            let params = heads.map(|spec| ParamSpec { decay: spec.decay && decays, ..spec }).collect();
            Unit { name: group.to_owned(), params, trainable: true }
        };
        let value =
            Unit { name: V_HEAD.to_owned(), params: perceptron(V_HEAD, hidden_size, 1), trainable: true };
        let mut units = decoder.units().to_vec();
        let own = units.len()..units.len() + 3;
        units.extend([of_qs(Q_HEADS, true), of_qs(TARGET_Q_HEADS, false), value]);
        let below = decoder.units_of(decoder.blocks() - 1);
        let heads = |unit| (0..count).map(|head| Perceptron { unit, first: 4 * head }).collect();
        let heads = Heads {
            qs: heads(below.len()),
            target_qs: heads(below.len() + 1),
            value: Perceptron { unit: below.len() + 2, first: 0 },
        };
        let units_of_head = below.iter().copied().chain(own).collect();
        Ok(IlqlModel { decoder, units, units_of_head, heads })
    }

    /// Like [`Decoder::deterministic`].
    #[must_use]
    pub fn deterministic(self, deterministic: bool) -> IlqlModel {
        IlqlModel { decoder: self.decoder.deterministic(deterministic), ..self }
    }

    /// Like [`Decoder::keeping_logits`], for the language model's logits.
    #[must_use]
    pub fn keeping_logits(self, keeps_logits: bool) -> IlqlModel {
        IlqlModel { decoder: self.decoder.keeping_logits(keeps_logits), ..self }
    }

    /// Returns the decoder below the heads. Its units are the first of this model's.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Returns the decoder with this model's units, whose completions the target heads guide: `scale` times their
    /// smallest Q is added to the logits. V need not be subtracted, since it is the same for all tokens. Passes over
    /// batches are those of the plain decoder.
    #[must_use]
    pub fn guided(self, scale: f64) -> Decoder {
        let IlqlModel { decoder, units, units_of_head, heads } = self;
        let mut units_of = decoder.units_of.clone();
        *units_of.last_mut().expect("a decoder has blocks") = units_of_head;
        let guide = (scale != 0.0).then_some(Guide { scale, target_qs: heads.target_qs });
        Decoder { units, units_of, guide, ..decoder }
    }

    /// Returns the unit of the target heads, and that of the Q heads, which has the same layout.
    pub fn targets_and_sources(&self) -> (usize, usize) {
        let own = self.decoder.units().len();
        (own + 1, own)
    }

    /// Heads' outputs for normed rows `h` `[M, C]`, with the tensors that backward needs: log-sum-exp and entropy of
    /// each Q head, `[Q, M]`.
    fn scores(
        &self,
        weights: &Weights,
        h: &Tensor,
        batch: &PackedBatch,
    ) -> Result<(HeadScores, [Tensor; 2])> {
        let (mut qs, mut lses, mut entropies) = (Vec::new(), Vec::new(), Vec::new());
        for head in &self.heads.qs {
            let (mut q, mut logprobs) = (Vec::new(), Vec::new());
            let (mut lse, mut entropy) = (Vec::new(), Vec::new());
            for (start, length) in chunks_of(batch, batch.targets(), head.output_weight(weights)) {
                let (all, targets) = head.of_rows(weights, h, batch, start, length)?;
                let found = ops::logprobs(&all, &targets, 1.0)?;
                q.push(chosen(&all, &targets)?);
                let LogProbs { logprobs: of_targets, entropy: spread, lse: total } = found;
                logprobs.push(of_targets);
                lse.push(total);
                entropy.push(spread);
            }
            qs.push(OfAction { q: Tensor::f_cat(&q, 0)?, logprobs: Tensor::f_cat(&logprobs, 0)? });
            lses.push(Tensor::f_cat(&lse, 0)?);
            entropies.push(Tensor::f_cat(&entropy, 0)?);
        }
        let mut target_q: Option<Tensor> = None;
        for head in &self.heads.target_qs {
            let mut q = Vec::new();
            for (start, length) in chunks_of(batch, batch.targets(), head.output_weight(weights)) {
                let (all, targets) = head.of_rows(weights, h, batch, start, length)?;
                q.push(chosen(&all, &targets)?);
            }
            let q = Tensor::f_cat(&q, 0)?;
            target_q = Some(match target_q {
                Some(least) => least.f_minimum(&q)?,
                None => q,
            });
        }
        let target_q = target_q.expect("there is a target head");
        let values = self.heads.value.output(weights, &self.heads.value.hidden(weights, h)?)?;
        let values = wide(&values.f_squeeze_dim(1)?)?;
        Ok((
            HeadScores { qs, target_q, values },
            [Tensor::f_stack(&lses, 0)?, Tensor::f_stack(&entropies, 0)?],
        ))
    }

    /// Gradient of normed rows `h` `[M, C]` from that of the heads' outputs.
    fn scores_backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        (h, lses, entropies): (&Tensor, &Tensor, &Tensor),
        grad: &IlqlGrad,
        batch: &PackedBatch,
    ) -> Result<Tensor> {
        let mut dh = h.f_zeros_like()?;
        for (index, (head, of_head)) in self.heads.qs.iter().zip(&grad.qs).enumerate() {
            let (lse, entropy) = (lses.f_select(0, index as i64)?, entropies.f_select(0, index as i64)?);
            for (start, length) in chunks_of(batch, batch.targets(), head.output_weight(weights)) {
                let rows = |tensor: &Tensor| tensor.f_narrow(0, start, length);
                let (x, targets) = (rows(h)?, rows(&batch.targets)?);
                let hidden = head.hidden(weights, &x)?;
                let mut dq = head.output(weights, &hidden)?;
                let saved = (&rows(&lse)?, &rows(&entropy)?);
                ops::logprobs_backward_(&mut dq, &targets, 1.0, saved, &rows(&of_head.logprobs)?, None)?;
                let of_targets = rows(&of_head.q)?.f_to_kind(dq.kind())?.f_unsqueeze(1)?;
                drop(dq.f_scatter_add_(1, &targets.f_unsqueeze(1)?, &of_targets)?);
                head.backward(weights, grads, (&x, &hidden), &dq, &mut rows(&dh)?)?;
            }
        }
        let value = &self.heads.value;
        let dvalues = grad.values.f_to_kind(h.kind())?.f_unsqueeze(1)?;
        value.backward(weights, grads, (h, &value.hidden(weights, h)?), &dvalues, &mut dh)?;
        self.heads.target_qs.iter().try_for_each(|head| head.no_gradient(grads))?;
        Ok(dh)
    }
}

/// Guidance of completions.
#[derive(Clone, Debug)]
pub(super) struct Guide {
    scale: f64,
    target_qs: Vec<Perceptron>,
}

impl Guide {
    /// Adds the guidance to the logits `[R, V]` of normed rows `h` `[R, C]`. The result is fp32 at least.
    pub fn added_to(&self, logits: &Tensor, weights: &Weights, h: &Tensor) -> Result<Tensor> {
        let q = |head: &Perceptron| head.output(weights, &head.hidden(weights, h)?);
        let mut least = q(&self.target_qs[0])?;
        for head in &self.target_qs[1..] {
            least = least.f_minimum(&q(head)?)?;
        }
        Ok(wide(logits)?.f_add(&wide(&least)?.f_mul_scalar(self.scale)?)?)
    }
}

/// The heads' part of [`IlqlScores`].
struct HeadScores {
    qs: Vec<OfAction>,
    target_q: Tensor,
    values: Tensor,
}

impl Perceptron {
    const PARAMS: Range<usize> = 0..4;

    fn weight<'a>(&self, weights: &Weights<'a>, layer: usize) -> (&'a Tensor, &'a Tensor) {
        let first = self.first + 2 * layer;
        (weights.get(self.unit, first), weights.get(self.unit, first + 1))
    }

    /// Matrix of the second layer, `[outputs, 2C]`.
    fn output_weight<'a>(&self, weights: &Weights<'a>) -> &'a Tensor {
        self.weight(weights, 1).0
    }

    /// Hidden layer of rows `x` `[R, C]`: `[R, 2C]`.
    fn hidden(&self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        let (matrix, bias) = self.weight(weights, 0);
        Ok(x.f_linear(matrix, Some(bias))?.f_relu_()?)
    }

    /// Outputs of a hidden layer: `[R, outputs]`.
    fn output(&self, weights: &Weights, hidden: &Tensor) -> Result<Tensor> {
        let (matrix, bias) = self.weight(weights, 1);
        Ok(hidden.f_linear(matrix, Some(bias))?)
    }

    /// Outputs of some rows of `h` for all tokens, and the rows' targets.
    fn of_rows(
        &self,
        weights: &Weights,
        h: &Tensor,
        batch: &PackedBatch,
        start: i64,
        length: i64,
    ) -> Result<(Tensor, Tensor)> {
        let hidden = self.hidden(weights, &h.f_narrow(0, start, length)?)?;
        Ok((self.output(weights, &hidden)?, batch.targets.f_narrow(0, start, length)?))
    }

    /// Writes the gradients of the parameters from that of the outputs, and adds to the gradient `dx` of the rows.
    fn backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        (x, hidden): (&Tensor, &Tensor),
        doutputs: &Tensor,
        dx: &mut Tensor,
    ) -> Result<()> {
        let (unit, first) = (self.unit, self.first);
        grads.put_linear(unit, first + 2, doutputs, hidden)?;
        grads.put(unit, first + 3, |buffer, how| ops::sum_rows(doutputs, buffer, how))?;
        let is_on = hidden.f_gt(0.0)?;
        let dhidden = doutputs.f_mm(self.output_weight(weights))?.f_mul_(&is_on)?;
        grads.put_linear(unit, first, &dhidden, x)?;
        grads.put(unit, first + 1, |buffer, how| ops::sum_rows(&dhidden, buffer, how))?;
        drop(dx.f_addmm_(&dhidden, self.weight(weights, 0).0)?);
        Ok(())
    }

    /// Writes gradients of 0.
    fn no_gradient(&self, grads: &mut Grads) -> Result<()> {
        for param in Self::PARAMS {
            grads.put(self.unit, self.first + param, |buffer, how| {
                if how == Store::Write {
                    drop(buffer.f_zero_()?);
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Specs of a head's parameters, with PyTorch's initialization of linear layers.
fn perceptron(name: &str, hidden_size: i64, outputs: i64) -> Vec<ParamSpec> {
    let wide = 2 * hidden_size;
    let linear = |layer: usize, outputs: i64, inputs: i64| {
        let init = Init::Uniform { bound: 1.0 / (inputs as f64).sqrt() };
        let named = |part: &str| format!("{HEADS}{name}.{layer}.{part}");
        let matrix = matrix_spec(named("weight"), outputs, inputs, 0.0);
        let bias = norm_spec(named("bias"), outputs, 0.0);
        [ParamSpec { init, ..matrix }, ParamSpec { init, ..bias }]
    };
    // As in a sequence of a linear layer, ReLU, and a linear layer.
    [linear(0, wide, hidden_size), linear(2, outputs, wide)].into_iter().flatten().collect()
}

/// Values of the targets `[R]` in `all` `[R, V]`, in fp32 at least.
fn chosen(all: &Tensor, targets: &Tensor) -> Result<Tensor> {
    wide(&all.f_gather(1, &targets.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?)
}

/// Initial weights of an [`IlqlModel`] with the decoder of `base`. The heads are generated from a seed; target heads
/// equal the Q heads.
pub struct WithIlqlHeads<'a> {
    /// Weights of the decoder.
    pub base: &'a dyn WeightSource,
    /// Seed of the heads.
    pub seed: Seed,
}

impl WeightSource for WithIlqlHeads<'_> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        if !spec.name.starts_with(HEADS) {
            return self.base.read(spec, range, values);
        }
        let renamed =
            |part: &Part| Part { name: part.name.replace(TARGET_Q_HEADS, Q_HEADS), rows: part.rows };
        let spec = ParamSpec { parts: spec.parts.iter().map(renamed).collect(), ..spec.clone() };
        self.seed.read(&spec, range, values)
    }
}

impl Model for IlqlModel {
    type Batch = PackedBatch;
    type Scores = IlqlScores;
    type ScoresGrad = IlqlGrad;

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn blocks(&self) -> usize {
        self.decoder.blocks()
    }

    fn units_of(&self, block: usize) -> &[usize] {
        if block + 1 == self.blocks() { &self.units_of_head } else { self.decoder.units_of(block) }
    }

    fn layer_matrices(&self, unit: usize) -> Vec<usize> {
        self.decoder.layer_matrices(unit)
    }

    fn forward(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &PackedBatch,
        save: bool,
    ) -> Result<(Output<IlqlScores>, Saved)> {
        if block + 1 < self.blocks() {
            return self.decoder.forward_below_head(block, weights, x, batch, save);
        }
        let x = x.expect("only the first block has no input");
        let head = &self.decoder.head;
        let (language, of_language) = head.forward(weights, x, batch, save, None)?;
        let rows = x.f_index_select(0, &batch.own_target_rows()?)?;
        let (h, _) = ops::rms_norm(&rows, head.norm(weights), head.eps)?;
        let (HeadScores { qs, target_q, values }, own) = self.scores(weights, &h, batch)?;
        let saved =
            if save { Saved(own.into_iter().chain(of_language.0).collect()) } else { Saved::default() };
        Ok((Output::Scores(IlqlScores { language, qs, target_q, values }), saved))
    }

    fn thin(&self, block: usize, saved: Saved) -> Saved {
        self.decoder.thin(block, saved)
    }

    fn refill(&self, block: usize, weights: &Weights, saved: Saved, batch: &PackedBatch) -> Result<Saved> {
        self.decoder.refill(block, weights, saved, batch)
    }

    fn spread_experts(&self, peers: &Arc<dyn Peers>) -> Result<Option<IlqlModel>> {
        check_config(self.decoder.config().experts.is_none(), "num_experts", || {
            format!("is of a model with heads of values, whose experts {} ranks cannot share", peers.count())
        })?;
        Ok(None)
    }

    fn backward(
        &self,
        block: usize,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        grad_output: OutputGrad<IlqlGrad>,
        batch: &PackedBatch,
    ) -> Result<Option<Tensor>> {
        match grad_output {
            OutputGrad::Scores(grad) => {
                let ([lses, entropies], of_language) = saved.unpack_first();
                let saved = Saved(of_language);
                let h = Head::normed_rows(&saved, batch.targets())?;
                let dh = self.scores_backward(weights, grads, (&h, &lses, &entropies), &grad, batch)?;
                let head = &self.decoder.head;
                Ok(Some(head.backward(weights, grads, saved, (&grad.language, Some(&dh)), batch, None)?))
            }
            OutputGrad::Hidden(dy) => {
                self.decoder.backward(block, weights, grads, saved, OutputGrad::Hidden(dy), batch)
            }
        }
    }
}
