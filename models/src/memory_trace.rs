//! Memory of functions that libtorch differentiates, measured by tracing them on tensors without values.
//!
//! A [`TracedTensor`] has a shape but no values. Its memory is allocated where libtorch would allocate
//! it, and freed with its last holder. So a function rewritten line by line with such tensors has the
//! lifetimes of the real one. The tensors that an operation keeps for its gradient, and those that its
//! backward creates, are libtorch's (`derivatives.yaml` and the kernels it names). [`MemoryTrace::backward`]
//! visits the operations in libtorch's order.
//!
//! Temporary memory of library kernels (cuDNN's workspace) is not reported by any interface, and not counted.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use crate::footprint::{BlockBytes, Runs};
use crate::model::Unit;

pub(crate) const F32: usize = size_of::<f32>();

/// Context of a trace: its memory meter and its graph.
#[derive(Clone)]
pub(crate) struct MemoryTrace {
    pub runs: Runs,
    meter: Rc<Meter>,
    graph: Rc<Graph>,
}

#[derive(Default)]
struct Meter {
    live: Cell<usize>,
    peak: Cell<usize>,
}

#[derive(Default)]
struct Graph {
    variables: Cell<usize>,
    nodes: RefCell<Vec<Node>>,
}

/// A differentiable operation.
struct Node {
    /// For each input that needs a gradient: its variable, its bytes, and the memory of the gradient.
    inputs: Vec<(usize, usize, Gradient)>,
    outputs: Vec<usize>,
    saved: Vec<Rc<Memory>>,
    /// Bytes allocated and freed while backward runs.
    passing: usize,
}

/// Memory of an input's gradient.
#[derive(Clone, Copy)]
pub(crate) enum Gradient {
    /// Newly allocated.
    Own,
    /// The output's gradient, or a view of it.
    Outputs,
    /// Newly allocated, with this many temporary bytes; for example a broadcast input, whose gradient is
    /// summed.
    Beside(usize),
}

struct Memory {
    bytes: usize,
    meter: Rc<Meter>,
}

impl Memory {
    fn take(meter: &Rc<Meter>, bytes: usize) -> Rc<Memory> {
        let live = meter.live.get() + bytes;
        meter.live.set(live);
        meter.peak.set(meter.peak.get().max(live));
        Rc::new(Memory { bytes, meter: meter.clone() })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.meter.live.set(self.meter.live.get() - self.bytes);
    }
}

/// A tensor without values.
#[derive(Clone)]
pub(crate) struct TracedTensor {
    pub size: Vec<usize>,
    /// Bytes per element.
    pub element: usize,
    is_dense: bool,
    memory: Rc<Memory>,
    variable: Option<usize>,
    pub on: MemoryTrace,
}

/// Weights of a block, without values.
pub(crate) struct TracedWeights(Vec<Vec<TracedTensor>>);

impl TracedWeights {
    pub fn has_adapters(&self) -> bool {
        self.0.len() > 1
    }

    pub fn get(&self, unit: usize, param: usize) -> &TracedTensor {
        &self.0[unit][param]
    }
}

impl MemoryTrace {
    pub fn new(runs: Runs) -> MemoryTrace {
        MemoryTrace { runs, meter: Rc::default(), graph: Rc::default() }
    }

    /// Returns the peak so far, in bytes.
    pub fn peak(&self) -> usize {
        self.meter.peak.get()
    }

    /// Returns the bytes allocated now.
    pub fn live(&self) -> usize {
        self.meter.live.get()
    }

    /// Returns a new graph whose memory is counted here.
    pub fn apart(&self) -> MemoryTrace {
        MemoryTrace { graph: Rc::default(), ..self.clone() }
    }

    /// Allocates a tensor in the weights' dtype.
    pub fn tensor(&self, size: &[usize]) -> TracedTensor {
        self.of(size, self.runs.size())
    }

    pub fn of(&self, size: &[usize], element: usize) -> TracedTensor {
        let bytes = size.iter().product::<usize>() * element;
        self.over(size, element, Memory::take(&self.meter, bytes))
    }

    /// Returns a tensor whose memory counts elsewhere, with a gradient if `is_wanted`.
    pub fn given(&self, size: &[usize], element: usize, is_wanted: bool) -> TracedTensor {
        let variable = is_wanted.then(|| self.variable());
        TracedTensor { variable, ..self.over(size, element, Memory::take(&self.meter, 0)) }
    }

    /// Returns the parameters of `units`, with gradients for those that are trained.
    pub fn weights(&self, units: &[&Unit], trains: impl Fn(&Unit) -> bool) -> TracedWeights {
        let of_unit = |unit: &&Unit| {
            let size = |shape: &[i64]| shape.iter().map(|&it| it as usize).collect::<Vec<_>>();
            let params = unit.params.iter();
            params.map(|spec| self.given(&size(&spec.shape), self.runs.size(), trains(unit))).collect()
        };
        TracedWeights(units.iter().map(of_unit).collect())
    }

    fn over(&self, size: &[usize], element: usize, memory: Rc<Memory>) -> TracedTensor {
        TracedTensor {
            size: size.to_vec(),
            element,
            is_dense: true,
            memory,
            variable: None,
            on: self.clone(),
        }
    }

    fn variable(&self) -> usize {
        let variable = self.graph.variables.get();
        self.graph.variables.set(variable + 1);
        variable
    }

    /// Records an operation with the given `outputs`. Keeps `saved` if an input needs a gradient; its
    /// backward uses `passing` temporary bytes.
    pub fn record(
        &self,
        inputs: &[(&TracedTensor, Gradient)],
        outputs: &mut [&mut TracedTensor],
        saved: &[&TracedTensor],
        passing: usize,
    ) {
        let inputs = inputs.iter().filter_map(|(input, how)| Some((input.variable?, input.bytes(), *how)));
        let inputs: Vec<_> = inputs.collect();
        if inputs.is_empty() {
            return;
        }
        let outputs = outputs.iter_mut().map(|output| *output.variable.insert(self.variable())).collect();
        let saved = saved.iter().map(|tensor| tensor.memory.clone()).collect();
        self.graph.nodes.borrow_mut().push(Node { inputs, outputs, saved, passing });
    }

    /// Runs backward from the gradients of some variables to those of the leaves, which are returned.
    fn backward(&self, mut grads: HashMap<usize, Rc<Memory>>) -> HashMap<usize, Rc<Memory>> {
        for Node { inputs, outputs, saved, passing } in self.graph.nodes.take().into_iter().rev() {
            let of_outputs: Vec<_> = outputs.iter().filter_map(|output| grads.remove(output)).collect();
            let Some(first) = of_outputs.first() else { continue };
            let passing = Memory::take(&self.meter, passing);
            let mut found = Vec::with_capacity(inputs.len());
            for (variable, bytes, how) in inputs {
                let memory = match how {
                    Gradient::Outputs => first.clone(),
                    Gradient::Own => Memory::take(&self.meter, bytes),
                    Gradient::Beside(beside) => {
                        let _beside = Memory::take(&self.meter, beside);
                        Memory::take(&self.meter, bytes)
                    }
                };
                found.push((variable, bytes, memory));
            }
            drop((of_outputs, passing, saved));
            for (variable, bytes, memory) in found {
                match grads.remove(&variable) {
                    None => drop(grads.insert(variable, memory)),
                    // Added in place, unless it has another holder.
                    Some(before) if Rc::strong_count(&before) == 1 => drop(grads.insert(variable, before)),
                    Some(_before) => drop(grads.insert(variable, Memory::take(&self.meter, bytes))),
                }
            }
        }
        grads
    }

    /// Returns the gradients of the leaves, from those of `outputs`, which are allocated as well.
    pub fn gradients(&self, outputs: &[&TracedTensor]) -> impl Sized + use<> {
        let mut grads = HashMap::new();
        for output in outputs {
            // libtorch differentiates the sum of the products with the gradient.
            drop(output.on.of(&output.size, output.element));
            if let Some(variable) = output.variable {
                grads.insert(variable, Memory::take(&self.meter, output.bytes()));
            }
        }
        self.backward(grads)
    }
}

impl TracedTensor {
    pub fn numel(&self) -> usize {
        self.size.iter().product()
    }

    pub fn bytes(&self) -> usize {
        self.numel() * self.element
    }

    /// Returns a new tensor computed from this one, whose gradient uses memory according to `how`.
    fn made(&self, size: &[usize], element: usize, saved: &[&TracedTensor], how: Gradient) -> TracedTensor {
        let mut out = self.on.of(size, element);
        self.on.record(&[(self, how)], &mut [&mut out], saved, 0);
        out
    }

    /// Returns a view with another shape or order.
    fn seen(&self, size: &[usize], is_dense: bool, how: Gradient) -> TracedTensor {
        let seen = self.on.over(size, self.element, self.memory.clone());
        let mut seen = TracedTensor { is_dense, ..seen };
        self.on.record(&[(self, how)], &mut [&mut seen], &[], 0);
        seen
    }

    /// Returns the same memory, without a graph.
    pub fn detached(&self) -> TracedTensor {
        TracedTensor { variable: None, ..self.clone() }
    }

    /// Returns the same memory as a leaf of another graph.
    pub fn leaf_on(&self, on: &MemoryTrace) -> TracedTensor {
        TracedTensor { variable: Some(on.variable()), on: on.clone(), ..self.clone() }
    }

    /// Returns the norms along a dimension, whose size becomes 1.
    pub fn length(&self, size: &[usize]) -> TracedTensor {
        let mut out = self.on.of(size, self.element);
        let seen = out.clone();
        self.on.record(&[(self, Gradient::Own)], &mut [&mut out], &[self, &seen], self.bytes());
        out
    }

    /// Divides by another tensor, whose dimensions may be 1.
    pub fn divided(&self, by: &TracedTensor) -> TracedTensor {
        let mut out = self.on.of(&self.size, self.element);
        let inputs = [(self, Gradient::Own), (by, Gradient::Beside(4 * self.bytes()))];
        self.on.record(&inputs, &mut [&mut out], &[self, by], 0);
        out
    }

    /// Returns a view with another shape.
    pub fn view(&self, size: &[usize]) -> TracedTensor {
        self.seen(size, self.is_dense, Gradient::Outputs)
    }

    /// Returns a view with permuted dimensions.
    pub fn permuted(&self, size: &[usize]) -> TracedTensor {
        self.seen(size, false, Gradient::Outputs)
    }

    /// Returns part of a dimension; the rest has a gradient of zeros.
    pub fn narrow(&self, dim: usize, len: usize) -> TracedTensor {
        let mut size = self.size.clone();
        size[dim] = len;
        self.seen(&size, self.is_dense && self.is_alone(dim), Gradient::Own)
    }

    /// Returns true if part of a dimension is dense.
    fn is_alone(&self, dim: usize) -> bool {
        self.size[..dim].iter().product::<usize>() == 1
    }

    /// Splits along a dimension.
    pub fn split(&self, dim: usize, lens: &[usize]) -> Vec<TracedTensor> {
        let part = |&len: &usize| {
            let mut size = self.size.clone();
            size[dim] = len;
            let part = self.on.over(&size, self.element, self.memory.clone());
            TracedTensor { is_dense: self.is_dense && self.is_alone(dim), ..part }
        };
        let mut parts: Vec<TracedTensor> = lens.iter().map(part).collect();
        let mut outputs: Vec<&mut TracedTensor> = parts.iter_mut().collect();
        self.on.record(&[(self, Gradient::Own)], &mut outputs, &[], 0);
        parts
    }

    /// Splits into `count` equal parts along a dimension.
    pub fn chunk(&self, dim: usize, count: usize) -> Vec<TracedTensor> {
        self.split(dim, &vec![self.size[dim] / count; count])
    }

    /// Returns dense values, copied if necessary.
    pub fn contiguous(&self) -> TracedTensor {
        if self.is_dense { self.clone() } else { self.copied() }
    }

    /// Returns a dense copy.
    pub fn copied(&self) -> TracedTensor {
        self.made(&self.size, self.element, &[], Gradient::Outputs)
    }

    /// Converts to another dtype.
    pub fn to(&self, element: usize) -> TracedTensor {
        if element == self.element {
            self.clone()
        } else {
            self.made(&self.size, element, &[], Gradient::Own)
        }
    }

    /// Applies an elementwise function whose gradient needs its input, such as SiLU or GELU.
    pub fn activated(&self) -> TracedTensor {
        self.made(&self.size, self.element, &[self], Gradient::Own)
    }

    /// Multiplies by a number. Also stands for an elementwise function whose gradient needs its result, if a
    /// later product keeps that.
    pub fn scaled(&self) -> TracedTensor {
        self.made(&self.size, self.element, &[], Gradient::Own)
    }

    /// Adds a number.
    pub fn shifted(&self) -> TracedTensor {
        self.made(&self.size, self.element, &[], Gradient::Outputs)
    }

    /// Returns a tensor of another size, whose gradient needs no saved tensors.
    pub fn resized(&self, size: &[usize]) -> TracedTensor {
        self.made(size, self.element, &[], Gradient::Own)
    }

    /// Multiplies elementwise by another tensor, whose dimensions may be 1.
    pub fn mul(&self, other: &TracedTensor) -> TracedTensor {
        let (size, element) = self.with(other);
        let mut out = self.on.of(&size, element);
        let bytes = out.bytes();
        let how = |tensor: &TracedTensor| match tensor.numel() == out.numel() {
            true => Gradient::Own,
            false => Gradient::Beside(bytes),
        };
        let inputs = [(self, how(self)), (other, how(other))];
        let mut saved = Vec::new();
        saved.extend(self.variable.map(|_| other));
        saved.extend(other.variable.map(|_| self));
        self.on.record(&inputs, &mut [&mut out], &saved, 0);
        out
    }

    /// Adds another tensor, whose dimensions may be 1.
    pub fn add(&self, other: &TracedTensor) -> TracedTensor {
        let (size, element) = self.with(other);
        let mut out = self.on.of(&size, element);
        let how = |tensor: &TracedTensor| match tensor.bytes() == out.bytes() {
            true => Gradient::Outputs,
            false => Gradient::Own,
        };
        self.on.record(&[(self, how(self)), (other, how(other))], &mut [&mut out], &[], 0);
        out
    }

    /// Returns the broadcast size and the dtype of both.
    fn with(&self, other: &TracedTensor) -> (Vec<usize>, usize) {
        let (long, short) = if self.size.len() < other.size.len() { (other, self) } else { (self, other) };
        let mut size = long.size.clone();
        for (one, other) in size.iter_mut().rev().zip(short.size.iter().rev()) {
            *one = (*one).max(*other);
        }
        (size, self.element.max(other.element))
    }

    /// Concatenates tensors along a dimension.
    pub fn cat(all: &[&TracedTensor], dim: usize) -> TracedTensor {
        let mut size = all[0].size.clone();
        size[dim] = all.iter().map(|tensor| tensor.size[dim]).sum();
        let mut out = all[0].on.of(&size, all[0].element);
        let inputs: Vec<_> = all.iter().map(|tensor| (*tensor, Gradient::Outputs)).collect();
        all[0].on.record(&inputs, &mut [&mut out], &[], 0);
        out
    }

    /// Computes `x W^T + bias`.
    pub fn linear(&self, weight: &TracedTensor, bias: Option<&TracedTensor>) -> TracedTensor {
        let [leading @ .., _] = &self.size[..] else { unreachable!("a matrix") };
        let x = self.contiguous();
        let mut out = self.on.of(&[leading, &[weight.size[0]]].concat(), self.element);
        let saved: Vec<&TracedTensor> = weight.variable.map(|_| &x).into_iter().collect();
        self.on.record(&x.with_weights(weight, bias), &mut [&mut out], &saved, 0);
        out
    }

    /// Convolves to `size`. Libraries copy their inputs into their own layout.
    pub fn convolved(
        &self,
        weight: &TracedTensor,
        bias: Option<&TracedTensor>,
        size: &[usize],
    ) -> TracedTensor {
        let _read = [self.on.of(&self.size, self.element), self.on.of(&weight.size, self.element)];
        let x = self.contiguous();
        let mut out = self.on.of(size, self.element);
        let passing = out.bytes() + weight.bytes();
        // libtorch keeps a convolution's input for the weight's gradient, even if that is not needed.
        self.on.record(&x.with_weights(weight, bias), &mut [&mut out], &[&x], passing);
        out
    }

    fn with_weights<'a>(
        &'a self,
        weight: &'a TracedTensor,
        bias: Option<&'a TracedTensor>,
    ) -> Vec<(&'a TracedTensor, Gradient)> {
        [self, weight].into_iter().chain(bias).map(|input| (input, Gradient::Own)).collect()
    }

    /// Norms over `values` values each, with an optional weight and bias: libtorch's layer and group norm.
    pub fn normed(&self, values: usize, weights: [Option<&TracedTensor>; 2]) -> TracedTensor {
        let x = self.contiguous();
        let mut out = self.on.of(&self.size, self.element);
        let stats = self.on.of(&[2 * self.numel() / values], F32);
        let inputs = std::iter::once((self, Gradient::Own));
        let inputs: Vec<_> =
            inputs.chain(weights.into_iter().flatten().map(|it| (it, Gradient::Own))).collect();
        let copy = if self.is_dense { 0 } else { x.bytes() };
        self.on.record(&inputs, &mut [&mut out], &[self, &stats], copy);
        out
    }

    /// Computes `x / rms(x) weight` over the last `values` values. On a host with a gradient, like libtorch's
    /// composition.
    pub fn rms_normed(&self, values: usize, weight: &TracedTensor) -> TracedTensor {
        if !self.on.runs.on_host || self.variable.is_none() {
            return self.normed(values, [Some(weight), None]);
        }
        let wide = self.to(F32);
        let squares = wide.made(&wide.size, F32, &[&wide], Gradient::Beside(wide.bytes()));
        let mut size = self.size.clone();
        *size.last_mut().expect("a norm is over a dimension") = 1;
        let inverse = squares.resized(&size).scaled();
        drop(squares);
        let normed = wide.mul(&inverse);
        normed.mul(weight).to(self.element)
    }

    /// Runs attention over these queries `[B, H, N, D]`, keys and values, with kernels that store no scores:
    /// `[B, N, H D]`.
    pub fn attended(&self, keys: &TracedTensor, values: &TracedTensor) -> TracedTensor {
        let [batch, heads, tokens, dim] = self.size[..] else { unreachable!("heads have four dimensions") };
        let mut out = self.on.tensor(&[batch, tokens, heads * dim]);
        let sums = self.on.of(&[batch, heads, tokens], F32);
        let inputs = [self, keys, values].map(|tensor| (tensor, Gradient::Own));
        // The queries' gradients are summed in fp32.
        let summed = if self.on.runs.on_host { 0 } else { self.numel() * F32 + sums.bytes() };
        let seen = out.clone();
        self.on.record(&inputs, &mut [&mut out], &[self, keys, values, &seen, &sums], summed);
        out
    }
}

/// A block of an [`AutogradModel`](crate::autograd::AutogradModel).
pub(crate) struct BlockTrace<'a> {
    /// Its units; the adapters' unit is last.
    pub units: &'a [&'a Unit],
    /// Shape of its input, and bytes per element.
    pub input: (&'a [usize], usize),
    /// True if the input needs a gradient.
    pub input_grad: bool,
    pub place: BlockPlace,
    /// True if the weights stay in place until backward.
    pub weights_last: bool,
}

/// Position of a block: the first reads the batch's input, and the last one's output is no block's input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockPlace {
    First,
    Inner,
    Last,
}

impl BlockPlace {
    /// Returns the position of a block among `blocks`.
    pub fn of(block: usize, blocks: usize) -> BlockPlace {
        match block {
            0 => Self::First,
            _ if block + 1 == blocks => Self::Last,
            _ => Self::Inner,
        }
    }
}

/// Returns the memory of a block with the function `run`, as [`crate::autograd`] runs it.
pub(crate) fn block_bytes(
    BlockTrace { units, input: (size, element), input_grad, place, weights_last }: BlockTrace,
    runs: Runs,
    run: impl Fn(&TracedWeights, &TracedTensor) -> TracedTensor,
) -> BlockBytes {
    let plain = MemoryTrace::new(runs);
    let out = run(&plain.weights(units, |_| false), &plain.given(size, element, false));
    let (scoring, output) = (plain.peak(), out.bytes());
    let input = if place == BlockPlace::First { 0 } else { size.iter().product::<usize>() * element };

    let trace = MemoryTrace::new(runs);
    let weights = trace.weights(units, |unit| unit.trainable);
    let x = trace.given(size, element, input_grad);
    let out = run(&weights, &x);
    let (forward, kept) = (trace.peak(), trace.live());
    let (_grad, is_followed) = (trace.of(&out.size, out.element), out.variable.is_some());
    let _grads = is_followed.then(|| trace.gradients(&[&out]));
    // In addition to saved tensors and the output's gradient.
    let backward = if is_followed { trace.peak().saturating_sub(kept + output) } else { 0 };
    // An inner block's output counts as the next block's input; the graph holds it to the end.
    let (next, held) = if place == BlockPlace::Last { (0, 0) } else { (output, output) };
    let bytes = BlockBytes { input, forward, scoring, output_grad: output, ..BlockBytes::default() };
    if weights_last {
        let saved = kept - next + input;
        return BlockBytes { saved, thinned: saved, backward: backward + held, ..bytes };
    }
    let saved = input + output - next;
    // Only the input is kept, and backward recomputes the block.
    let backward = if is_followed { forward.max(kept + backward) } else { 0 };
    BlockBytes { saved, thinned: saved, forward: scoring, backward, ..bytes }
}
