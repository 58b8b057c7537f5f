//! A layer's mixture of experts instead of its MLP: see [`ops::Choice`] for the formula.
//!
//! The matrices of all experts are stacked in one parameter, so that grouped products read them directly.
//! Backward sorts the rows again, which is cheap compared with the products. It reaches the router through
//! the weights of the chosen experts.

use anyroll_backends::ops::{self, Activation, Choice, Groups};
use tch::Tensor;

use super::block::{Block, NormTape};
use super::expert_rows::ExpertRows;
use super::layer::Layer;
use super::lora::{Lora, Projection};
use super::routing::LayerRouting;
use super::{DecoderConfig, ExpertNames, ExpertsConfig, math::Math, matrix_spec};
use crate::Result;
use crate::model::{Grads, ParamSpec, Part, Saved, Weights};

/// A block's experts, in addition to `gate_up` and `down`, which then hold all experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    /// Index of the matrix `[E, C]` whose product with a token selects its experts.
    pub router: usize,
    pub count: i64,
    pub per_token: i64,
    pub is_normalized: bool,
    /// The first of this rank's experts, and their number: all, unless ranks that hold the block together each have some.
    pub own: (i64, i64),
}

/// Intermediate results of a mixture's forward.
pub(super) struct MixtureOutput {
    /// The block's output `[N, C]`.
    pub out: Tensor,
    /// `[R, 2 F]`, sorted by expert.
    pub gate_up: Tensor,
    pub choice: Choice,
    /// See [`ExpertRows::counts`].
    pub counts: Option<Tensor>,
}

/// State of a mixture's forward.
pub(super) struct MixtureTape<'a> {
    /// The stream before it, and the reciprocal standard deviations of the norm's input.
    pub x: &'a Tensor,
    pub rstd: &'a Tensor,
    pub gate_up: Tensor,
    pub choice: &'a Choice,
    pub counts: Option<Tensor>,
    pub routing: &'a LayerRouting<'a>,
}

/// Returns the router, and all experts' gate-and-up and down matrices, in the layer `prefix`.
pub(super) fn params(config: &DecoderConfig, experts: &ExpertsConfig, prefix: &str) -> [ParamSpec; 3] {
    let (hidden, width, std) = (config.hidden_size, experts.moe_intermediate_size, config.initializer_range);
    let (mixture, [gate, up, out]) = experts.names.modules();
    let name = |rest: &str| format!("{prefix}.{mixture}.{rest}.weight");
    let part =
        |expert: i64, which: &str, rows: i64| Part { name: name(&format!("experts.{expert}.{which}")), rows };
    let all = 0..experts.num_experts;
    let gate_up = all.clone().flat_map(|it| [part(it, gate, width), part(it, up, width)]).collect();
    let down = all.map(|it| part(it, out, hidden)).collect();
    let stacked = |which: &str, parts: Vec<Part>, columns: i64| {
        let rows = parts.iter().map(|part| part.rows).sum();
        ParamSpec { parts, ..matrix_spec(name(&format!("experts.{which}_proj")), rows, columns, std) }
    };
    [
        matrix_spec(name("gate"), experts.num_experts, hidden, std),
        stacked("gate_up", gate_up, hidden),
        stacked("down", down, width),
    ]
}

impl ExpertNames {
    /// Returns the name of a mixture in its layer, and those of an expert's gate, up and down matrices.
    pub(super) fn modules(self) -> (&'static str, [&'static str; 3]) {
        match self {
            ExpertNames::Usual => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
            ExpertNames::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
        }
    }
}

impl Experts {
    /// Creates the experts with `router` as the router's parameter index.
    pub fn new(config: &ExpertsConfig, router: usize) -> Experts {
        Experts {
            router,
            count: config.num_experts,
            per_token: config.num_experts_per_tok,
            is_normalized: config.norm_topk_prob,
            own: (0, config.num_experts),
        }
    }

    /// Returns the experts of which `rank` has an equal part.
    pub fn part(self, rank: i64, ranks: i64) -> Experts {
        let own = self.count / ranks;
        Experts { own: (rank * own, own), ..self }
    }

    fn choose(self, weights: &Weights, h: &Tensor, math: Math, layer: Option<&Layer>) -> Result<Choice> {
        let logits = math.linear(h, weights.get(0, self.router), None)?;
        let own = Choice::new(&logits, self.per_token, self.is_normalized)?;
        match layer {
            Some(layer) => layer.routing.of(own),
            None => Ok(own),
        }
    }

    /// Returns the tensors that forward saves of a choice, after all others.
    pub fn save(choice: Choice) -> [Tensor; 2] {
        [choice.probs, choice.chosen]
    }

    /// Restores the choice from the saved tensors.
    pub fn saved(self, saved: Saved) -> Choice {
        let [probs, chosen] = saved.unpack();
        Choice { probs, chosen, is_normalized: self.is_normalized }
    }
}

impl Block {
    /// Returns the residual stream `x2` `[N, C]` plus the experts' output for its norm `h2`.
    pub(super) fn mix(
        &self,
        experts: Experts,
        weights: &Weights,
        x2: &Tensor,
        (h2, layer): (Tensor, Option<&Layer>),
    ) -> Result<MixtureOutput> {
        let choice = experts.choose(weights, &h2, self.math, layer)?;
        let rows = self.rows(experts, &choice.chosen, None)?;
        let gate_up = self.expand(weights, h2, &rows)?;
        let product = {
            let activated = ops::glu(&gate_up, Activation::Silu)?;
            self.grouped_linear(Projection::Down, weights, &activated, rows.groups())?
        };
        let of_chosen = choice.weights()?;
        let out = self.add_up(x2, &rows, product, Some(&of_chosen))?;
        Ok(MixtureOutput { out, gate_up, choice, counts: rows.counts() })
    }

    /// Returns the rows of tokens that chose `chosen`, at their experts.
    fn rows(&self, experts: Experts, chosen: &Tensor, counts: Option<&Tensor>) -> Result<ExpertRows> {
        let peers = self.spread.as_ref().map(|spread| &spread.peers);
        match experts.own {
            (_, own) if own == experts.count => ExpertRows::new(chosen, experts.count, peers, counts),
            own => ExpertRows::of_own(chosen, own),
        }
    }

    /// Returns `base` `[N, C]` plus the sum of each token's rows of experts, `made`, over all ranks that have columns of them.
    fn add_up(
        &self,
        base: &Tensor,
        rows: &ExpertRows,
        made: Tensor,
        weights: Option<&Tensor>,
    ) -> Result<Tensor> {
        let Some(peers) = &self.peers else { return rows.add_up(base, made, weights) };
        let mut sum = rows.add_up(&base.f_zeros_like()?, made, weights)?;
        peers.sum_(&mut sum)?;
        Ok(sum.f_add_(base)?)
    }

    /// Position of the unit with the experts' matrices among the block's.
    fn experts_unit(&self) -> usize {
        self.spread.as_ref().map_or(0, |spread| spread.unit)
    }

    /// Returns the matrices `param` of all of this rank's experts.
    fn of_experts<'a>(&self, weights: &Weights<'a>, param: usize) -> &'a Tensor {
        weights.get(self.experts_unit(), param)
    }

    /// Computes the experts' gates and inputs `[R, 2 F]` for the rows of `h2` `[N, C]`.
    fn expand(&self, weights: &Weights, h2: Tensor, rows: &ExpertRows) -> Result<Tensor> {
        let sorted = rows.spread(&h2)?;
        drop(h2);
        self.grouped_linear(Projection::GateUp, weights, &sorted, rows.groups())
    }

    /// Returns the sorted rows `x` times the matrices of their experts, with the adapters of these.
    fn grouped_linear(
        &self,
        projection: Projection,
        weights: &Weights,
        x: &Tensor,
        groups: &Groups,
    ) -> Result<Tensor> {
        let y =
            self.math.grouped_linear(x, self.of_experts(weights, self.params_at(projection).0), groups)?;
        if let Some(lora) = self.lora_of_experts(projection) {
            lora.forward_sorted_(projection, weights, x, (groups, self.math), &y)?;
        }
        Ok(y)
    }

    /// Turns the gradient of the result of [`Self::grouped_linear`] into that of its input. Also returns the gradients inside
    /// of the adapters.
    fn grouped_input_backward(
        &self,
        projection: Projection,
        weights: &Weights,
        dy: &Tensor,
        groups: &Groups,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let matrices = self.of_experts(weights, self.params_at(projection).0);
        let mut dx = ops::grouped_input_backward(dy, matrices, groups)?;
        let inner = match self.lora_of_experts(projection) {
            Some(lora) => lora.input_backward_sorted_(projection, weights, dy, groups, &mut dx)?,
            None => Vec::new(),
        };
        Ok((dx, inner))
    }

    /// Writes the gradients of the experts' matrices and of their adapters.
    fn grouped_weight_backward(
        &self,
        projection: Projection,
        weights: &Weights,
        grads: &mut Grads,
        (dy, x, groups): (&Tensor, &Tensor, &Groups),
        inner: &[Tensor],
    ) -> Result<()> {
        grads.put(self.experts_unit(), self.params_at(projection).0, |buffer, how| {
            ops::grouped_weight_backward(dy, x, groups, buffer, how)
        })?;
        let Some(lora) = self.lora_of_experts(projection) else { return Ok(()) };
        lora.weight_backward_sorted(projection, weights, grads, (dy, x, groups), inner)
    }

    /// Returns the adapters, if experts have some at the projection.
    pub(super) fn lora_of_experts(&self, projection: Projection) -> Option<&Lora> {
        self.lora.as_ref().filter(|lora| lora.is_of_experts(projection))
    }

    /// Recomputes [`MixtureOutput::gate_up`] for tokens that chose `chosen`.
    pub(super) fn expand_again(
        &self,
        experts: Experts,
        weights: &Weights,
        h2: Tensor,
        (chosen, counts): (&Tensor, Option<&Tensor>),
    ) -> Result<Tensor> {
        self.expand(weights, h2, &self.rows(experts, chosen, counts)?)
    }

    /// Runs the backward of [`Self::mix`] and of the norm before it: adds the gradient of the stream before
    /// them to `dx`, the gradient of the output.
    pub(super) fn mix_backward(
        &self,
        experts: Experts,
        weights: &Weights,
        grads: &mut Grads,
        MixtureTape { x, rstd, mut gate_up, choice, counts, routing }: MixtureTape,
        dx: &mut Tensor,
    ) -> Result<()> {
        let rows = self.rows(experts, &choice.chosen, counts.as_ref())?;
        let groups = rows.groups();
        let dproduct = rows.spread(dx)?;
        // Without the routing weights, which are applied between the products. So their gradient is a sum
        // over F instead of C.
        let (mut activated, inner) =
            self.grouped_input_backward(Projection::Down, weights, &dproduct, groups)?;
        let mut dchosen = rows.dots(&activated, &ops::glu(&gate_up, Activation::Silu)?)?;
        self.sum_parts_(&mut dchosen)?;
        let dlogits = routing.balanced(choice, choice.backward(&dchosen)?)?.f_to_kind(dx.kind())?;
        let of_rows = rows.sorted(&choice.weights()?)?;
        drop(activated.f_mul_(&of_rows)?);
        ops::glu_backward_(&mut gate_up, &mut activated, Activation::Silu)?;
        drop(activated.f_mul_(&of_rows)?);
        let of_down = (&dproduct, &activated, groups);
        self.grouped_weight_backward(Projection::Down, weights, grads, of_down, &inner)?;
        drop((dproduct, activated, of_rows, inner));

        let dgate_up = gate_up;
        let (mut h2, inner) = {
            let (drows, inner) =
                self.grouped_input_backward(Projection::GateUp, weights, &dgate_up, groups)?;
            let of_router = dlogits.f_mm(weights.get(0, experts.router))?;
            (self.add_up(&of_router, &rows, drows, None)?, inner)
        };
        let of_norm = NormTape { dy: &mut h2, x, rstd };
        self.stream_backward_(weights, grads, self.mlp_input_norm, of_norm, dx)?;
        grads.put_linear(0, experts.router, &dlogits, &h2)?;
        if !grads.wants(self.experts_unit()) && inner.is_empty() {
            return Ok(()); // no row travels for frozen experts
        }
        let sorted = rows.spread(&h2)?;
        let of_gate_up = (&dgate_up, &sorted, groups);
        self.grouped_weight_backward(Projection::GateUp, weights, grads, of_gate_up, &inner)
    }
}
