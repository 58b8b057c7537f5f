//! A layer's mixture of experts, in the place of its MLP: see [`ops::Choice`] for the formula.
//!
//! The matrices of all experts lie one below the other in one parameter, so that grouped products take them as they are.
//! Backward sorts the rows again, which is little beside the products, and reaches the router through the weights of the
//! experts that were chosen.

use anyroll_backends::ops::{self, Activation, Choice, Dispatch};
use tch::Tensor;

use super::{DecoderConfig, ExpertNames, ExpertsConfig, block::Block, math::Math, matrix_spec};
use crate::Result;
use crate::model::{Grads, ParamSpec, Part, Saved, Weights};

/// Of a block that has experts, beside `gate_up` and `down`, which are all experts' then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    /// The matrix `[E, C]` whose product with a token tells the experts that it goes to.
    pub router: usize,
    pub count: i64,
    pub per_token: i64,
    pub is_normalized: bool,
}

/// What a mixture's forward computes on its way.
pub(super) struct Mixed {
    /// The block's output `[N, C]`.
    pub out: Tensor,
    /// `[R, 2 F]`, sorted by expert.
    pub gate_up: Tensor,
    pub choice: Choice,
}

/// The router, and the matrices of all experts in the layer `prefix`: gate and up, and down.
pub(super) fn params(config: &DecoderConfig, experts: &ExpertsConfig, prefix: &str) -> [ParamSpec; 3] {
    let (hidden, width, std) = (config.hidden_size, experts.moe_intermediate_size, config.initializer_range);
    let (mixture, [gate, up, out]) = match experts.names {
        ExpertNames::Usual => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        ExpertNames::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
    };
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

impl Experts {
    /// Of the parameter `router`.
    pub fn new(config: &ExpertsConfig, router: usize) -> Experts {
        Experts {
            router,
            count: config.num_experts,
            per_token: config.num_experts_per_tok,
            is_normalized: config.norm_topk_prob,
        }
    }

    fn choose(self, weights: &Weights, h: &Tensor, math: Math) -> Result<Choice> {
        let logits = math.linear(h, weights.get(0, self.router), None)?;
        Ok(Choice::new(&logits, self.per_token, self.is_normalized)?)
    }

    /// What forward saves of a choice behind all else.
    pub fn save(choice: Choice) -> [Tensor; 2] {
        [choice.probs, choice.chosen]
    }

    /// The choice in what forward saved of it.
    pub fn saved(self, saved: Saved) -> Choice {
        let [probs, chosen] = saved.unpack();
        Choice { probs, chosen, is_normalized: self.is_normalized }
    }

    fn dispatch(self, chosen: &Tensor) -> Result<Dispatch> {
        Ok(Dispatch::new(chosen, self.count)?)
    }
}

impl Block {
    /// The residual stream `x2` `[N, C]` with what experts make of its norm `h2`.
    pub(super) fn mix(&self, experts: Experts, weights: &Weights, x2: &Tensor, h2: Tensor) -> Result<Mixed> {
        let choice = experts.choose(weights, &h2, self.math)?;
        let dispatch = experts.dispatch(&choice.chosen)?;
        let gate_up = self.expand(weights, h2, &dispatch)?;
        let product = {
            let activated = ops::glu(&gate_up, Activation::Silu)?;
            self.math.grouped_linear(&activated, weights.get(0, self.down), &dispatch.groups)?
        };
        let out = dispatch.add_up(x2, &product, Some(&choice.weights()?))?;
        Ok(Mixed { out, gate_up, choice })
    }

    /// The gates and inputs `[R, 2 F]` of experts for the rows of `h2` `[N, C]`.
    fn expand(&self, weights: &Weights, h2: Tensor, dispatch: &Dispatch) -> Result<Tensor> {
        let sorted = dispatch.spread(&h2)?;
        drop(h2);
        self.math.grouped_linear(&sorted, weights.get(0, self.gate_up), &dispatch.groups)
    }

    /// [`Mixed::gate_up`] again, for tokens that chose `chosen`.
    pub(super) fn expand_again(
        &self,
        experts: Experts,
        weights: &Weights,
        h2: Tensor,
        chosen: &Tensor,
    ) -> Result<Tensor> {
        self.expand(weights, h2, &experts.dispatch(chosen)?)
    }

    /// Backward of [`Self::mix`] and of the norm before it: adds to `dx`, the gradient of the output, that of `x2`.
    pub(super) fn mix_backward(
        &self,
        experts: Experts,
        weights: &Weights,
        grads: &mut Grads,
        (x2, rstd2, mut gate_up, choice): (&Tensor, &Tensor, Tensor, &Choice),
        dx: &mut Tensor,
    ) -> Result<()> {
        let dispatch = experts.dispatch(&choice.chosen)?;
        let groups = &dispatch.groups;
        let dproduct = dispatch.spread(dx)?;
        // Without the weights, which are put in between the products: so theirs is a sum over F in place of C.
        let mut activated = ops::grouped_input_backward(&dproduct, weights.get(0, self.down), groups)?;
        let dchosen = dispatch.dots(&activated, &ops::glu(&gate_up, Activation::Silu)?)?;
        let dlogits = choice.backward(&dchosen)?.f_to_kind(dx.kind())?;
        let of_rows = dispatch.sorted(&choice.weights()?)?;
        drop(activated.f_mul_(&of_rows)?);
        ops::glu_backward_(&mut gate_up, &mut activated, Activation::Silu)?;
        drop(activated.f_mul_(&of_rows)?);
        grads.put(0, self.down, |buffer, how| {
            ops::grouped_weight_backward(&dproduct, &activated, groups, buffer, how)
        })?;
        drop((dproduct, activated, of_rows));

        let dgate_up = gate_up;
        let mut h2 = {
            let drows = ops::grouped_input_backward(&dgate_up, weights.get(0, self.gate_up), groups)?;
            dispatch.add_up(&dlogits.f_mm(weights.get(0, experts.router))?, &drows, None)?
        };
        self.stream_backward_(weights, grads, self.mlp_input_norm, (&mut h2, x2, rstd2), dx)?;
        grads.put_linear(0, experts.router, &dlogits, &h2)?;
        grads.put(0, self.gate_up, |buffer, how| {
            ops::grouped_weight_backward(&dgate_up, &dispatch.spread(&h2)?, groups, buffer, how)
        })
    }
}
