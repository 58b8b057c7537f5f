//! A decoder block: attention and a gated MLP, each after a norm and added to the residual stream.
//!
//! ```text
//! h = norm(x);  q, k, v = h Wqkv^T (+ bias);  q, k = rope(norm(q), norm(k))
//! x2 = x + attention(q, k, v) Wo^T
//! h2 = norm(x2);  out = x2 + swiglu(h2 Wgate_up^T) Wdown^T
//! ```
//!
//! or a mixture of experts instead of SwiGLU ([`super::experts`]). With [`super::NormPlaces::After`] the norm is on a branch's
//! output instead of its input:
//!
//! ```text
//! x2 = x + norm(attention(q, k, v) Wo^T);  out = x2 + norm(swiglu(x2 Wgate_up^T) Wdown^T)
//! ```
//!
//! and with [`super::NormPlaces::Both`] on both. The gate's activation may differ from SiLU ([`ops::Activation`]). A branch's
//! output may be multiplied by a constant ([`super::Multipliers`]).
//!
//! Backward recomputes the outputs of the norms and of SwiGLU, which costs one pass over memory that it reads
//! anyway. So forward saves little more than the inputs of attention and of SwiGLU.

use std::sync::Arc;

use anyroll_backends::ops::{self, Activation, Causal, Choice, QkvGrads, Rotation, Store};
use tch::{Kind, Tensor};

use super::experts::{Experts, MixtureOutput, MixtureTape};
use super::layer::Layer;
use super::lora::{AdapterDropout, InnerGrads, Lora, Projection};
use super::multipliers::multiply_;
use super::spread_experts::Spread;
use super::{DecoderConfig, math::Math, recorded::Scratch};
use crate::Result;
use crate::autograd;
use crate::model::{Grads, Saved, Weights};
use crate::slice::Peers;

/// Indices of the MLP's input and its projection among the saved tensors.
const X2: usize = 5;
const GATE_UP: usize = 7;
/// Number of tensors that a choice of experts saves, after all others.
const OF_CHOICE: usize = 2;

/// Indices of the block's parameters in its unit, and the sizes that the weights do not determine.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// Norm before attention.
    pub input_norm: Option<usize>,
    pub qkv: usize,
    pub qkv_bias: Option<usize>,
    /// Norms of queries and keys.
    pub qk_norm: Option<(usize, usize)>,
    /// True if the norms span all heads together.
    pub norms_heads_together: bool,
    pub o: usize,
    pub o_bias: Option<usize>,
    /// Norm of attention's output.
    pub attention_norm: Option<usize>,
    /// Norm before the MLP.
    pub mlp_input_norm: Option<usize>,
    /// Experts, if there are any; the MLP's other matrices then hold all experts.
    pub experts: Option<Experts>,
    pub gate_up: usize,
    pub gate_up_bias: Option<usize>,
    pub down: usize,
    pub down_bias: Option<usize>,
    /// Norm of the MLP's output.
    pub mlp_norm: Option<usize>,
    pub heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
    pub eps: f64,
    /// Factor of the attention scores, usually 1 / sqrt(D).
    pub scale: f64,
    /// Factor of each branch's output.
    pub residual_multiplier: f64,
    /// Activation of the MLP's gate.
    pub activation: Activation,
    /// True if attention's backward is bitwise deterministic.
    pub deterministic: bool,
    /// Order of sums in a forward pass.
    pub math: Math,
    /// Adapters of the matrices, if there are any.
    pub(super) lora: Option<Lora>,
    /// The ranks that each have some heads and columns of the block, if it is split. Sizes are then this rank's.
    pub(super) peers: Option<Arc<dyn Peers>>,
    /// The ranks among which the experts are spread, if they are. `gate_up` and `down` are then of this rank's experts, and
    /// indices in their unit.
    pub(super) spread: Option<Spread>,
    /// Number of ranks that have the same key heads; 1 unless there are fewer heads than ranks.
    pub(super) kv_sharers: i64,
}

/// Inputs of attention.
pub(super) struct Projected {
    /// `[N, H, D]`, rotated.
    pub q: Tensor,
    /// `[N, K, D]`, rotated.
    pub k: Tensor,
    /// `[N, K, D]`.
    pub v: Tensor,
    /// Reciprocal standard deviations of the input norm, `[N]`; `[0]` without a norm.
    rstd: Tensor,
    /// The projection `[N, H + 2 K, D]`. `v` is a view of it; without qk-norm `q` and `k` are, too.
    pub(super) qkv: Tensor,
    /// Reciprocal standard deviations of qk-norm, `[N, H]` and `[N, K]`, or `[N]` each.
    qk_rstd: Option<(Tensor, Tensor)>,
}

/// Intermediate results of the second half of a block.
struct Finished {
    out: Tensor,
    x2: Tensor,
    rstd2: Tensor,
    gate_up: Tensor,
    /// Inputs of the norms of both branches, each with its reciprocal standard deviations.
    branches: Vec<Tensor>,
    /// Choice of experts, if there are any, and the rows that travel if experts are spread over ranks.
    choice: Option<Choice>,
    counts: Option<Tensor>,
}

impl Block {
    /// Returns the attention mask and scale of a layer with this window.
    pub fn causal(&self, window: Option<i64>) -> Causal {
        Causal { scale: self.scale, window }
    }

    /// Maps `x` `[N, C]` to `[N, C]`.
    pub fn forward(
        &self,
        weights: &Weights,
        x: &Tensor,
        layer: &Layer,
        save: bool,
    ) -> Result<(Tensor, Saved)> {
        let drops = layer.drops;
        let mut projected = self.project(weights, x, (layer.positions(), &layer.rope_table), drops)?;
        let (attended, lse) = self.attend(&mut projected, layer)?;
        let finished = self.finish_saving(weights, x, &attended, Some(layer), save)?;
        let Finished { out, x2, rstd2, gate_up, branches, choice, counts } = finished;
        if !save {
            return Ok((out, Saved::default()));
        }
        let Projected { q, k, rstd, qkv, qk_rstd, .. } = projected;
        let mut saved = vec![x.shallow_clone(), rstd, qkv, attended, lse, x2, rstd2, gate_up];
        if let Some((q_rstd, k_rstd)) = qk_rstd {
            saved.extend([q, k, q_rstd, k_rstd]);
        }
        saved.extend(branches);
        saved.extend(counts);
        saved.extend(choice.into_iter().flat_map(Experts::save));
        Ok((out, Saved(saved)))
    }

    /// Computes the inputs of attention for the rows of `x` `[N, C]` at `positions` `[N]`.
    pub fn project(
        &self,
        weights: &Weights,
        x: &Tensor,
        (positions, rope_table): (&Tensor, &Tensor),
        drops: Option<AdapterDropout>,
    ) -> Result<Projected> {
        let (h, rstd) = self.norm_input(weights, self.input_norm, x)?;
        let qkv = self.linear(Projection::Qkv, weights, &h, drops)?;
        let qkv = qkv.f_view([-1, self.heads + 2 * self.kv_heads, self.head_dim])?;
        let [mut q, mut k, v] = self.split(&qkv)?;
        let mut qk_rstd = None;
        if let Some((q_norm, k_norm)) = self.qk_norm {
            let normed = |heads: &Tensor, norm: usize| -> Result<_> {
                let (y, rstd) = ops::rms_norm(&self.normed_together(heads)?, weights.get(0, norm), self.eps)?;
                Ok((y.f_view_as(heads)?, rstd))
            };
            let ((q_normed, q_rstd), (k_normed, k_rstd)) = (normed(&q, q_norm)?, normed(&k, k_norm)?);
            (q, k, qk_rstd) = (q_normed, k_normed, Some((q_rstd, k_rstd)));
            ops::rope_(&mut q, positions, rope_table, Rotation::Forward)?;
            ops::rope_(&mut k, positions, rope_table, Rotation::Forward)?;
        } else {
            let mut qk = qkv.f_narrow(1, 0, self.heads + self.kv_heads)?;
            ops::rope_(&mut qk, positions, rope_table, Rotation::Forward)?;
        }
        Ok(Projected { q, k, v, rstd, qkv, qk_rstd })
    }

    /// Computes the block's output from the output of attention `[N, H D]`, and the rows' experts if there are any.
    pub fn finish(
        &self,
        weights: &Weights,
        x: &Tensor,
        attended: &Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Finished { out, choice, .. } = self.finish_saving(weights, x, attended, None, false)?;
        Ok((out, choice.map(|choice| choice.chosen)))
    }

    fn finish_saving(
        &self,
        weights: &Weights,
        x: &Tensor,
        attended: &Tensor,
        layer: Option<&Layer>,
        save: bool,
    ) -> Result<Finished> {
        let (mut branches, drops) = (Vec::new(), layer.and_then(|layer| layer.drops));
        let x2 = self.linear(Projection::O, weights, attended, drops)?;
        let mut x2 = self.end_branch(weights, self.attention_norm, x2, save.then_some(&mut branches))?;
        let (h2, rstd2) = match self.mlp_input_norm {
            Some(norm) => ops::add_rms_norm_(&mut x2, x, weights.get(0, norm), self.eps)?,
            None => self.norm_input(weights, None, &x2.f_add_(x)?)?,
        };
        if let Some(experts) = self.experts {
            let mixed = self.mix(experts, weights, &x2, (h2, layer))?;
            let MixtureOutput { out, gate_up, choice, counts } = mixed;
            return Ok(Finished { out, x2, rstd2, gate_up, branches, choice: Some(choice), counts });
        }
        let gate_up = self.linear(Projection::GateUp, weights, &h2, drops)?;
        let activated = ops::glu(&gate_up, self.activation)?;
        let out = if self.mlp_norm.is_none() && self.residual_multiplier == 1.0 && self.peers.is_none() {
            self.add_down(weights, &mut x2, &activated, drops, save)?
        } else {
            let product = self.linear(Projection::Down, weights, &activated, drops)?;
            let kept = save.then_some(&mut branches);
            self.end_branch(weights, self.mlp_norm, product, kept)?.f_add_(&x2)?
        };
        Ok(Finished { out, x2, rstd2, gate_up, branches, choice: None, counts: None })
    }

    /// Returns a branch's input for the stream `x` `[N, C]`, and the norm's reciprocal standard deviations.
    /// Without a norm these are `x` itself and `[0]`.
    fn norm_input(&self, weights: &Weights, norm: Option<usize>, x: &Tensor) -> Result<(Tensor, Tensor)> {
        match norm {
            Some(norm) => Ok(ops::rms_norm(x, weights.get(0, norm), self.eps)?),
            None => Ok((x.shallow_clone(), Tensor::f_empty([0], (Kind::Float, x.device()))?)),
        }
    }

    /// Sums this rank's part of a branch's output over the ranks that share the block, if there are any.
    pub(super) fn sum_parts_(&self, product: &mut Tensor) -> Result<()> {
        self.peers.as_ref().map_or(Ok(()), |peers| peers.sum_(product))
    }

    /// Turns the last product of a branch into the branch's output. The inputs of the norm's backward are
    /// pushed to `kept`.
    fn end_branch(
        &self,
        weights: &Weights,
        norm: Option<usize>,
        mut product: Tensor,
        kept: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor> {
        self.sum_parts_(&mut product)?;
        let mut y = match norm {
            Some(norm) => {
                let (y, rstd) = ops::rms_norm(&product, weights.get(0, norm), self.eps)?;
                kept.into_iter()
                    .for_each(|kept| kept.extend([product.shallow_clone(), rstd.shallow_clone()]));
                y
            }
            None => product,
        };
        multiply_(&mut y, self.residual_multiplier)?;
        Ok(y)
    }

    /// Returns a view of heads `[N, H, D]` in the shape that is normed: as it is, or `[N, H D]`.
    fn normed_together(&self, heads: &Tensor) -> Result<Tensor> {
        Ok(if self.norms_heads_together { heads.f_flatten(1, 2)? } else { heads.shallow_clone() })
    }

    /// Returns the inner width of the MLP, or of an expert.
    pub(super) fn width(&self, config: &DecoderConfig) -> i64 {
        let of_experts = config.experts.as_ref().filter(|_| self.experts.is_some());
        of_experts.map_or(config.intermediate_size, |experts| experts.moe_intermediate_size)
    }

    /// Returns the indices of a projection's matrix and of its bias, if it has one.
    pub(super) fn params_at(&self, projection: Projection) -> (usize, Option<usize>) {
        match projection {
            Projection::Qkv => (self.qkv, self.qkv_bias),
            Projection::O => (self.o, self.o_bias),
            Projection::GateUp => (self.gate_up, self.gate_up_bias),
            Projection::Down => (self.down, self.down_bias),
        }
    }

    /// Returns `x` times a projection's matrix, with its bias and its adapters.
    fn linear(
        &self,
        projection: Projection,
        weights: &Weights,
        x: &Tensor,
        drops: Option<AdapterDropout>,
    ) -> Result<Tensor> {
        let (matrix, bias) =
            (weights.get(0, self.params_at(projection).0), self.inner_bias(projection, weights));
        let mut y = self.math.linear(x, matrix, bias)?;
        self.adapt_(projection, weights, x, drops, &mut y)?;
        Ok(y)
    }

    /// Adds the MLP's product `[N, F]` times its last matrix to `x` `[N, C]`, the residual stream. Overwrites
    /// `x` unless it is kept.
    fn add_down(
        &self,
        weights: &Weights,
        x: &mut Tensor,
        activated: &Tensor,
        drops: Option<AdapterDropout>,
        kept: bool,
    ) -> Result<Tensor> {
        if self.scales(Projection::Down) {
            let product = self.linear(Projection::Down, weights, activated, drops)?;
            return Ok(if kept { x.f_add(&product)? } else { x.f_add_(&product)? });
        }
        let mut out = self.math.add_linear(x, activated, weights.get(0, self.down), kept)?;
        if let Some(bias) = self.inner_bias(Projection::Down, weights) {
            drop(out.f_add_(bias)?);
        }
        self.adapt_(Projection::Down, weights, activated, drops, &mut out)?;
        Ok(out)
    }

    /// Returns true if adapters scale a projection's product.
    pub(super) fn scales(&self, projection: Projection) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.scales(projection))
    }

    fn bias<'a>(&self, projection: Projection, weights: &Weights<'a>) -> Option<&'a Tensor> {
        self.params_at(projection).1.map(|bias| weights.get(0, bias))
    }

    /// Returns a projection's bias if it is added before the adapters.
    pub(super) fn inner_bias<'a>(&self, projection: Projection, weights: &Weights<'a>) -> Option<&'a Tensor> {
        self.bias(projection, weights).filter(|_| !self.scales(projection))
    }

    /// Returns a projection's bias if it is added after the adapters' scaling.
    fn outer_bias<'a>(&self, projection: Projection, weights: &Weights<'a>) -> Option<&'a Tensor> {
        self.bias(projection, weights).filter(|_| self.scales(projection))
    }

    /// AdapterDropout the MLP's projection, which is most of the saved memory and one product away from the
    /// rest. For Qwen2.5-7B 30 of 106 KB per token remain, for a fifth more compute.
    pub fn thin(&self, Saved(mut saved): Saved) -> Saved {
        drop(saved.remove(GATE_UP));
        Saved(saved)
    }

    /// Recomputes the MLP's projection.
    pub fn refill(
        &self,
        weights: &Weights,
        Saved(mut saved): Saved,
        drops: Option<AdapterDropout>,
    ) -> Result<Saved> {
        let (h2, _) = self.norm_input(weights, self.mlp_input_norm, &saved[X2])?;
        let gate_up = match (self.experts, saved.last()) {
            (Some(experts), Some(chosen)) => {
                let counts = self.spread.as_ref().map(|_| &saved[saved.len() - OF_CHOICE - 1]);
                self.expand_again(experts, weights, h2, (chosen, counts))?
            }
            _ => self.linear(Projection::GateUp, weights, &h2, drops)?,
        };
        saved.insert(GATE_UP, gate_up);
        Ok(Saved(saved))
    }

    /// Turns the gradient of the output into the gradient of `x`, in the same memory.
    pub fn backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        dout: Tensor,
        layer: &Layer,
    ) -> Result<Tensor> {
        let drops = layer.drops;
        let (saved, qk_normed, [of_attention, of_mlp], counts, choice) = self.unpack(saved);
        let [x, rstd, qkv, attended, lse, x2, rstd2, gate_up] = saved;
        let mut dx = dout; // the residual stream: each branch adds its part

        match self.experts.zip(choice) {
            Some((experts, choice)) => {
                let (rstd, routing) = (&rstd2, &layer.routing);
                let tape = MixtureTape { x: &x2, rstd, gate_up, choice: &choice, counts, routing };
                self.mix_backward(experts, weights, grads, tape, &mut dx)?;
            }
            None => {
                let tape = MlpTape { x: &x2, rstd: &rstd2, gate_up, of_branch: of_mlp };
                self.mlp_backward(weights, grads, tape, drops, &mut dx)?;
            }
        }
        let dproduct = self.branch_backward(weights, grads, self.attention_norm, of_attention, &dx)?;
        let (dattended, inner_grads) = self.input_backward(Projection::O, weights, &dproduct, drops)?;
        self.weight_backward(Projection::O, weights, grads, (&dproduct, &attended), drops, inner_grads)?;
        drop(dproduct);
        let attention = Attended { dout: dattended, out: attended, lse, qkv };
        let dqkv = self.attention_backward(weights, grads, attention, qk_normed, layer)?;
        let (mut h, inner_grads) = self.input_backward(Projection::Qkv, weights, &dqkv, drops)?;
        let of_norm = NormTape { dy: &mut h, x: &x, rstd: &rstd };
        self.stream_backward_(weights, grads, self.input_norm, of_norm, &mut dx)?;
        self.sum_kv_(&dqkv)?;
        self.weight_backward(Projection::Qkv, weights, grads, (&dqkv, &h), drops, inner_grads)?;
        Ok(dx)
    }

    /// Runs the backward of the MLP and its norms: adds the gradient of the stream before them to `dx`, the
    /// gradient of the output.
    fn mlp_backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        MlpTape { x, rstd, mut gate_up, of_branch }: MlpTape,
        drops: Option<AdapterDropout>,
        dx: &mut Tensor,
    ) -> Result<()> {
        let dproduct = self.branch_backward(weights, grads, self.mlp_norm, of_branch, dx)?;
        let (mut activated, inner_grads) =
            self.input_backward(Projection::Down, weights, &dproduct, drops)?;
        ops::glu_backward_(&mut gate_up, &mut activated, self.activation)?;
        self.weight_backward(Projection::Down, weights, grads, (&dproduct, &activated), drops, inner_grads)?;
        drop(dproduct);
        let dgate_up = gate_up;
        let (mut h2, inner_grads) = self.input_backward(Projection::GateUp, weights, &dgate_up, drops)?;
        let of_norm = NormTape { dy: &mut h2, x, rstd };
        self.stream_backward_(weights, grads, self.mlp_input_norm, of_norm, dx)?;
        self.weight_backward(Projection::GateUp, weights, grads, (&dgate_up, &h2), drops, inner_grads)
    }

    /// Adds the effect of a projection's adapters, if it has any, to its product `y`.
    fn adapt_(
        &self,
        projection: Projection,
        weights: &Weights,
        x: &Tensor,
        drops: Option<AdapterDropout>,
        y: &mut Tensor,
    ) -> Result<()> {
        let Some(lora) = &self.lora else { return Ok(()) };
        lora.forward_(projection, weights, x, drops, self.math, y)?;
        if let Some(bias) = self.outer_bias(projection, weights) {
            drop(y.f_add_(bias)?);
        }
        Ok(())
    }

    /// Returns true if a projection has adapters.
    pub(super) fn adapts(&self, projection: Projection) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.is_at(projection))
    }

    /// Like [`Self::adapt_`], without dropout and without allocating memory.
    pub(super) fn adapt_in_place(
        &self,
        projection: Projection,
        weights: &Weights,
        x: &Tensor,
        scratch: &Scratch,
        y: &mut Tensor,
    ) -> Result<()> {
        let Some(lora) = &self.lora else { return Ok(()) };
        lora.forward_in_place(projection, weights, x, scratch, self.math, y)?;
        if let Some(bias) = self.outer_bias(projection, weights) {
            drop(y.f_add_(bias)?);
        }
        Ok(())
    }

    /// Turns the gradient of a projection's output into that of its input. Also returns what
    /// [`Self::weight_backward`] needs in addition to the input.
    fn input_backward(
        &self,
        projection: Projection,
        weights: &Weights,
        dy: &Tensor,
        drops: Option<AdapterDropout>,
    ) -> Result<(Tensor, InnerGrads)> {
        let matrix = weights.get(0, self.params_at(projection).0);
        let (mut dx, inner_grads) = match &self.lora {
            Some(lora) => lora.input_backward(projection, weights, matrix, dy, drops)?,
            None => (dy.f_mm(matrix)?, InnerGrads::default()),
        };
        if !projection.reads_part() {
            self.sum_parts_(&mut dx)?;
        }
        Ok((dx, inner_grads))
    }

    /// Writes the gradients of a projection's matrix, bias and adapters.
    fn weight_backward(
        &self,
        projection: Projection,
        weights: &Weights,
        grads: &mut Grads,
        (dy, x): (&Tensor, &Tensor),
        drops: Option<AdapterDropout>,
        inner_grads: InnerGrads,
    ) -> Result<()> {
        let (matrix, bias) = self.params_at(projection);
        if let Some(bias) = bias {
            let is_elsewhere = projection.reads_part() && self.peers.as_ref().is_some_and(|it| it.rank() > 0);
            grads.put(0, bias, |buffer, how| match is_elsewhere {
                true => autograd::store(buffer, &Tensor::new(), how),
                false => ops::sum_rows(dy, buffer, how),
            })?;
        }
        grads.put_linear(0, matrix, dy, x)?;
        let Some(lora) = &self.lora else { return Ok(()) };
        lora.weight_backward(projection, weights, grads, (dy, x), drops, inner_grads)
    }

    /// Turns the gradient `dx` of the stream into that of a branch's last product. `of_branch` holds the
    /// norm's input and reciprocal standard deviations. Without a norm and a multiplier the two gradients are
    /// equal.
    fn branch_backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        norm: Option<usize>,
        of_branch: Option<[Tensor; 2]>,
        dx: &Tensor,
    ) -> Result<Tensor> {
        let by = self.residual_multiplier;
        let (Some(norm), Some([product, rstd])) = (norm, of_branch) else {
            return Ok(if by == 1.0 { dx.shallow_clone() } else { dx.f_mul_scalar(by)? });
        };
        let (mut dy, mut dproduct) = (dx.f_empty_like()?, product.f_zeros_like()?);
        dy.f_copy_(dx)?;
        multiply_(&mut dy, by)?;
        let of_norm = NormTape { dy: &mut dy, x: &product, rstd: &rstd };
        self.norm_backward_(weights, grads, norm, of_norm, &mut dproduct)?;
        Ok(dproduct)
    }

    /// Turns the gradient `dy` of a branch's input into that of the stream, and adds it to `dx`. Leaves the
    /// branch's input in `dy`.
    pub(super) fn stream_backward_(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        norm: Option<usize>,
        of_norm: NormTape,
        dx: &mut Tensor,
    ) -> Result<()> {
        if let Some(norm) = norm {
            return self.norm_backward_(weights, grads, norm, of_norm, dx);
        }
        drop(dx.f_add_(of_norm.dy)?);
        *of_norm.dy = of_norm.x.shallow_clone();
        Ok(())
    }

    /// Runs the backward of a norm: adds to `dx`, and leaves the norm's output in `dy`.
    fn norm_backward_(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        param: usize,
        NormTape { dy, x, rstd }: NormTape,
        dx: &mut Tensor,
    ) -> Result<()> {
        let weight = weights.get(0, param);
        grads.put_beside(0, param, weight, |dweight, how| {
            ops::rms_norm_backward_(dy, x, rstd, weight, dx, dweight, how)
        })
    }

    /// Runs the backward from attention's output to the projection: `[N, (H + 2 K) D]`.
    fn attention_backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        attended: Attended,
        qk_normed: Option<[Tensor; 4]>,
        layer: &Layer,
    ) -> Result<Tensor> {
        let (positions, rope_table) = (layer.positions(), &layer.rope_table);
        let (rows, heads) = (attended.dout.size()[0], self.heads + 2 * self.kv_heads);
        let like = (attended.dout.kind(), attended.dout.device());
        let mut dqkv = Tensor::f_empty([rows, heads, self.head_dim], like)?;
        let flat = [rows, heads * self.head_dim];
        let [mut dq, mut dk, mut dv] = self.split(&dqkv)?;
        let Some([q_normed, k_normed, q_rstd, k_rstd]) = qk_normed else {
            let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
            self.attend_backward(&attended, None, layer, grads)?;
            let mut dqk = dqkv.f_narrow(1, 0, self.heads + self.kv_heads)?;
            ops::rope_(&mut dqk, positions, rope_table, Rotation::Inverse)?;
            return Ok(dqkv.f_view(flat)?);
        };

        let [q, k, _] = self.split(&attended.qkv)?;
        let [mut dq_normed, mut dk_normed] =
            [Tensor::f_empty(q.size(), like)?, Tensor::f_empty(k.size(), like)?];
        drop(dqkv.f_zero_()?); // the norms add to it
        let of_attention = QkvGrads { dq: &mut dq_normed, dk: &mut dk_normed, dv: &mut dv };
        self.attend_backward(&attended, Some([&q_normed, &k_normed]), layer, of_attention)?;
        ops::rope_(&mut dq_normed, positions, rope_table, Rotation::Inverse)?;
        ops::rope_(&mut dk_normed, positions, rope_table, Rotation::Inverse)?;
        let (q_norm, k_norm) = self.qk_norm.expect("only a block with qk-norm saves normed queries");
        for (norm, dnormed, heads, rstd, dheads) in
            [(q_norm, &dq_normed, &q, &q_rstd, &dq), (k_norm, &dk_normed, &k, &k_rstd, &dk)]
        {
            let [mut dnormed, heads, mut dheads] =
                [self.normed_together(dnormed)?, self.normed_together(heads)?, self.normed_together(dheads)?];
            let of_norm = NormTape { dy: &mut dnormed, x: &heads, rstd };
            self.heads_norm_backward_(weights, grads, norm, of_norm, &mut dheads)?;
        }
        Ok(dqkv.f_view(flat)?)
    }

    /// Like [`Self::norm_backward_`], for a norm of heads, of which each rank has some.
    fn heads_norm_backward_(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        param: usize,
        of_norm: NormTape,
        dx: &mut Tensor,
    ) -> Result<()> {
        let Some(peers) = &self.peers else {
            return self.norm_backward_(weights, grads, param, of_norm, dx);
        };
        let (weight, NormTape { dy, x, rstd }) = (weights.get(0, param), of_norm);
        let mut dweight = weight.f_empty_like()?;
        ops::rms_norm_backward_(dy, x, rstd, weight, dx, &mut dweight, Store::Write)?;
        peers.sum_(&mut dweight)?;
        grads.put(0, param, |buffer, how| autograd::store(buffer, &dweight, how))
    }

    /// Adds the gradients of keys and values in `dqkv` `[N, (H + 2 K) D]` over the ranks that have the same key heads,
    /// which each have the part of their own queries.
    fn sum_kv_(&self, dqkv: &Tensor) -> Result<()> {
        let Some(peers) = self.peers.as_ref().filter(|_| self.kv_sharers > 1) else { return Ok(()) };
        let (first, width) = (self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim);
        let mut own = dqkv.f_narrow(1, first, width)?;
        let all = peers.all_gather(&own)?;
        let sharers =
            all.f_narrow(0, peers.rank() as i64 / self.kv_sharers * self.kv_sharers, self.kv_sharers)?;
        Ok(own.f_copy_(&sharers.f_sum_dim_intlist([0].as_slice(), false, None)?)?)
    }

    /// Unpacks the tensors that [`Self::forward`] saved.
    fn unpack(&self, saved: Saved) -> Unpacked {
        let (of_block, mut others) = saved.unpack_first();
        let mut first = |count: usize| Saved(others.drain(..count).collect());
        let of_qk_norm = self.qk_norm.map(|_| first(4).unpack());
        let of_branches = [self.attention_norm, self.mlp_norm].map(|norm| norm.map(|_| first(2).unpack()));
        let counts = self.spread.as_ref().map(|_| {
            let [counts] = first(1).unpack();
            counts
        });
        let choice = self.experts.map(|experts| experts.saved(first(OF_CHOICE)));
        (of_block, of_qk_norm, of_branches, counts, choice)
    }

    /// Returns views of the queries, keys and values in `[N, H + 2 K, D]`.
    pub(super) fn split(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        Ok([
            qkv.f_narrow(1, 0, heads)?,
            qkv.f_narrow(1, heads, kv_heads)?,
            qkv.f_narrow(1, heads + kv_heads, kv_heads)?,
        ])
    }
}

/// Saved tensors of every block, of qk-norm, of the norms of attention and MLP outputs, of rows that travel to experts, and of
/// the choice of experts.
type Unpacked = ([Tensor; 8], Option<[Tensor; 4]>, [Option<[Tensor; 2]>; 2], Option<Tensor>, Option<Choice>);

/// Inputs of the backward of a norm.
pub(super) struct NormTape<'a> {
    /// Gradient of its output, which the norm's output replaces.
    pub dy: &'a mut Tensor,
    /// Its input, and the reciprocal standard deviations.
    pub x: &'a Tensor,
    pub rstd: &'a Tensor,
}

/// State of an MLP's forward.
struct MlpTape<'a> {
    /// The stream before it, and the reciprocal standard deviations of the norm's input.
    x: &'a Tensor,
    rstd: &'a Tensor,
    gate_up: Tensor,
    /// The same two of the norm of its output.
    of_branch: Option<[Tensor; 2]>,
}

/// Inputs of attention's backward: its output with the gradient, its log-sum-exp and the projection.
pub(super) struct Attended {
    pub dout: Tensor,
    pub out: Tensor,
    pub lse: Tensor,
    pub qkv: Tensor,
}
