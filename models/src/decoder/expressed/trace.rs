//! Memory of an expressed layer: its functions over tensors without values, as the block runs them.

use super::super::{DecoderConfig, PackedSize};
use super::ExpressedBlock;
use super::operations::{Choice, Pairs, Value, WeightsOf};
use super::pass::Pass;
use crate::Result;
use crate::footprint::{BlockBytes, Runs};
use crate::memory_trace::{F32, Gradient, MemoryTrace, TracedTensor, TracedWeights};
use crate::model::Unit;

const INDEX: usize = size_of::<i64>();

impl ExpressedBlock {
    /// Returns the memory of a pass over a batch of this size. `units` are the block's, and `attention` the bytes of
    /// attention forward and backward in addition to its arguments and results.
    pub fn block_bytes(
        &self,
        config: &DecoderConfig,
        units: &[&Unit],
        attention: (usize, usize),
        size: &PackedSize,
        runs: Runs,
    ) -> BlockBytes {
        let sizes = Sizes::of(config, size);
        let [x, out, lse] = sizes.saved(runs);
        let forward = self.forward_peak(units, attention.0, &sizes, runs);
        let saved = x + out + lse;
        BlockBytes {
            input: x,
            saved,
            thinned: saved,
            forward,
            scoring: forward,
            output_grad: x,
            backward: self.backward_peak(units, attention.1, &sizes, runs),
        }
    }

    fn forward_peak(&self, units: &[&Unit], attention: usize, sizes: &Sizes, runs: Runs) -> usize {
        let trace = MemoryTrace::new(runs);
        let weights = trace.weights(units, |_| false);
        let x = trace.given(&sizes.x(), runs.size(), false);
        let qkv = self.traced_project(&weights, &x, sizes);
        let _attended = (trace.tensor(&sizes.attended()), trace.of(&[sizes.rows, sizes.heads], F32));
        drop(trace.of(&[sizes.copied(&qkv, 1) + attention], 1));
        drop(qkv);
        let attended = trace.given(&sizes.attended(), runs.size(), false);
        let _out = self.traced_finish(&weights, &x, &attended);
        trace.peak()
    }

    fn backward_peak(&self, units: &[&Unit], attention: usize, sizes: &Sizes, runs: Runs) -> usize {
        let after = MemoryTrace::new(runs);
        let weights = after.weights(units, |unit| unit.trainable);
        let x = after.given(&sizes.x(), runs.size(), true);
        let attended = after.given(&sizes.attended(), runs.size(), true);
        let out = self.traced_finish(&weights, &x, &attended);
        let _of_after = after.gradients(&[&out]);
        drop(out);

        let before = after.apart();
        let weights = before.weights(units, |unit| unit.trainable);
        let x = before.given(&sizes.x(), runs.size(), true);
        let qkv = self.traced_project(&weights, &x, sizes);
        let _dqkv: Vec<TracedTensor> = qkv.iter().map(|of| before.of(&of.size, of.element)).collect();
        drop(before.of(&[2 * sizes.copied(&qkv, 2) + attention], 1));
        let _of_before = before.gradients(&qkv.iter().collect::<Vec<_>>());
        let _dx = before.tensor(&sizes.x());
        before.peak()
    }

    fn traced_project(&self, weights: &TracedWeights, x: &TracedTensor, sizes: &Sizes) -> [TracedTensor; 3] {
        let turns = x.on.of(&[sizes.rows, sizes.rotary], F32);
        let pass = self.traced_pass(weights);
        self.layer.project(&pass, x, &turns).expect("a trace does not fail")
    }

    fn traced_finish(
        &self,
        weights: &TracedWeights,
        x: &TracedTensor,
        attended: &TracedTensor,
    ) -> TracedTensor {
        self.layer.finish(&self.traced_pass(weights), x, attended).expect("a trace does not fail")
    }

    fn traced_pass<'a>(&'a self, weights: &'a TracedWeights) -> Pass<'a, TracedTensor> {
        Pass { weights, lora: self.lora.as_ref() }
    }
}

/// Sizes of a batch in a layer.
struct Sizes {
    rows: usize,
    /// Rows that attention reads if it needs copies of shared ones.
    copies: usize,
    hidden: usize,
    heads: usize,
    dim: usize,
    rotary: usize,
}

impl Sizes {
    fn of(config: &DecoderConfig, size: &PackedSize) -> Sizes {
        let [hidden, heads, dim, rotary] =
            [config.hidden_size, config.num_attention_heads, config.head_dim, config.rotary_dim()]
                .map(|it| it as usize);
        Sizes { rows: size.tokens, copies: size.copies, hidden, heads, dim, rotary }
    }

    fn x(&self) -> [usize; 2] {
        [self.rows, self.hidden]
    }

    fn attended(&self) -> [usize; 2] {
        [self.rows, self.heads * self.dim]
    }

    /// Returns the bytes of what forward saves: its input, attention's output and its log-sum-exps.
    fn saved(&self, runs: Runs) -> [usize; 3] {
        let rows = |width: usize, element: usize| self.rows * width * element;
        [rows(self.hidden, runs.size()), rows(self.heads * self.dim, runs.size()), rows(self.heads, F32)]
    }

    /// Returns the bytes of attention's copies of queries, keys and values, and of `outputs` tensors like its output.
    fn copied(&self, qkv: &[TracedTensor], outputs: usize) -> usize {
        if self.copies <= self.rows {
            return 0;
        }
        let element = qkv[0].element;
        let inputs: usize = qkv.iter().map(TracedTensor::bytes).sum();
        let of_output = self.rows * self.heads * (self.dim * element * outputs + F32);
        (inputs + of_output) / self.rows * self.copies
    }
}

impl WeightsOf<TracedTensor> for TracedWeights {
    fn of(&self, unit: usize, param: usize) -> &TracedTensor {
        self.get(unit, param)
    }
}

/// Memory of the order of a mixture's rows.
pub(super) struct TracedRoutes {
    per_token: usize,
    experts: usize,
    _order: [TracedTensor; 2],
}

/// Returns the size with its -1 replaced, for this many values.
fn whole(size: &[i64], values: usize) -> Vec<usize> {
    let known: usize = size.iter().filter(|&&it| it >= 0).map(|&it| it as usize).product();
    size.iter().map(|&it| if it < 0 { values / known } else { it as usize }).collect()
}

/// Returns the size with another last dimension.
fn of_width(size: &[usize], width: usize) -> Vec<usize> {
    [&size[..size.len() - 1], &[width]].concat()
}

impl Value for TracedTensor {
    type Routes = TracedRoutes;

    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        Ok(TracedTensor::linear(self, weight, bias))
    }

    fn plus(&self, other: &Self) -> Result<Self> {
        Ok(self.add(other))
    }

    fn times(&self, other: &Self) -> Result<Self> {
        Ok(self.mul(other))
    }

    fn scaled(&self, _: f64) -> Result<Self> {
        Ok(TracedTensor::scaled(self))
    }

    fn silu(&self) -> Result<Self> {
        Ok(self.activated())
    }

    fn sigmoid(&self) -> Result<Self> {
        Ok(self.activated())
    }

    fn rms_norm(&self, weight: &Self, _: f64) -> Result<Self> {
        Ok(self.rms_normed(weight.numel(), weight))
    }

    fn rotated(&self, turns: &Self, _: Pairs) -> Result<Self> {
        let half = turns.size[1] / 2;
        let of_half = || turns.narrow(1, half).view(&[turns.size[0], 1, half]);
        let (cos, sin, wide) = (of_half(), of_half(), self.to(F32));
        let (a, b) = (wide.narrow(2, half), wide.narrow(2, half));
        let turned = [a.mul(&cos).add(&b.mul(&sin)), b.mul(&cos).add(&a.mul(&sin))];
        Ok(TracedTensor::cat(&[&turned[0], &turned[1]], 2).to(self.element))
    }

    fn wide(&self) -> Result<Self> {
        Ok(self.to(F32))
    }

    fn shaped(&self, size: &[i64]) -> Result<Self> {
        Ok(self.contiguous().view(&whole(size, self.numel())))
    }

    fn columns(&self, _: i64, count: i64) -> Result<Self> {
        Ok(self.narrow(self.size.len() - 1, count as usize))
    }

    fn beside(&self, other: &Self) -> Result<Self> {
        Ok(TracedTensor::cat(&[self, other], self.size.len() - 1))
    }

    fn padded(&self, width: i64) -> Result<Self> {
        Ok(self.resized(&of_width(&self.size, width as usize)))
    }

    fn repeated(&self, heads: i64) -> Result<Self> {
        Ok(self.permuted(&[self.size[0], heads as usize, self.size[2]]))
    }

    fn routed(&self, _: &Self, choice: Choice) -> Result<(Self, TracedRoutes)> {
        let (on, [rows, experts]) = (&self.on, [self.size[0], self.size[1]]);
        let per_token = choice.per_token as usize;
        // Scores with the bias, without those of other groups, and sorted with their indices.
        let _scores = on.of(&[3 * rows * experts], F32);
        let _sorted = on.of(&[rows, experts], INDEX);
        let chosen = on.of(&[rows, per_token], INDEX);
        let mut weights = on.of(&[rows, per_token], F32);
        on.record(&[(self, Gradient::Own)], &mut [&mut weights], &[&chosen], 0);
        let weights =
            if choice.is_normalized { weights.divided(&weights.resized(&[rows, 1])) } else { weights };
        let order = || on.of(&[rows * per_token], INDEX);
        let _sorting = [order(), order()];
        Ok((TracedTensor::scaled(&weights), TracedRoutes { per_token, experts, _order: [order(), order()] }))
    }

    fn spread(&self, routes: &TracedRoutes) -> Result<Self> {
        let size = [self.size[0] * routes.per_token, self.size[1]];
        Ok(self.resized(&size).resized(&size))
    }

    fn grouped_linear(&self, weight: &Self, routes: &TracedRoutes) -> Result<Self> {
        let x = self.contiguous();
        let mut out = self.on.of(&of_width(&self.size, weight.size[0] / routes.experts), self.element);
        let inputs = [&x, weight].map(|input| (input, Gradient::Own));
        self.on.record(&inputs, &mut [&mut out], &[&x], 0);
        Ok(out)
    }

    fn collected(&self, weights: &Self, routes: &TracedRoutes) -> Result<Self> {
        let rows = weights.size[0];
        let size = [rows, routes.per_token, self.size[1]];
        let of_tokens = self.resized(&self.size).view(&size);
        let weighted = of_tokens.mul(&weights.view(&[rows, routes.per_token, 1]));
        Ok(weighted.resized(&[rows, self.size[1]]).to(self.element))
    }
}
