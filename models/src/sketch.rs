//! The memory of functions that libtorch differentiates, told by going through them without values.
//!
//! A [`Sketched`] is a tensor that has a size and no values. Its memory is taken where libtorch would take it, and given back
//! with the last of those who hold it: so a function of tensors that is written down once more with these, line by line, has
//! the lifetimes of the real one. What an operation keeps for its gradient, and what that makes, are libtorch's
//! (`derivatives.yaml` and the kernels it names); [`Sketch::backward`] goes back through them in its order.
//!
//! What kernels of libraries take for themselves while they run (cuDNN's workspace) nobody tells, and is not counted.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use crate::footprint::{BlockBytes, Runs};
use crate::model::Unit;

pub(crate) const F32: usize = size_of::<f32>();

/// What functions are sketched on.
#[derive(Clone)]
pub(crate) struct Sketch {
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

/// An operation that can be differentiated.
struct Node {
    /// Of each input whose gradient is wanted its variable, its bytes and how that comes about.
    inputs: Vec<(usize, usize, Gradient)>,
    outputs: Vec<usize>,
    saved: Vec<Rc<Memory>>,
    /// Made and given back while it runs.
    passing: usize,
}

/// How the gradient of an input comes about.
#[derive(Clone, Copy)]
pub(crate) enum Gradient {
    /// In memory of its own.
    Own,
    /// It is the output's, or a view of that.
    Outputs,
    /// Beside so many bytes, as of what is broadcast, whose gradient is summed.
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
pub(crate) struct Sketched {
    pub size: Vec<usize>,
    /// Bytes of an element.
    pub element: usize,
    is_dense: bool,
    memory: Rc<Memory>,
    variable: Option<usize>,
    pub on: Sketch,
}

/// The weights of a block, in whose place there are none.
pub(crate) struct SketchedWeights(Vec<Vec<Sketched>>);

impl SketchedWeights {
    pub fn has_adapters(&self) -> bool {
        self.0.len() > 1
    }

    pub fn get(&self, unit: usize, param: usize) -> &Sketched {
        &self.0[unit][param]
    }
}

impl Sketch {
    pub fn new(runs: Runs) -> Sketch {
        Sketch { runs, meter: Rc::default(), graph: Rc::default() }
    }

    /// The most bytes at a time so far.
    pub fn peak(&self) -> usize {
        self.meter.peak.get()
    }

    /// Those that are there now.
    pub fn live(&self) -> usize {
        self.meter.live.get()
    }

    /// Another graph, whose memory is counted here.
    pub fn apart(&self) -> Sketch {
        Sketch { graph: Rc::default(), ..self.clone() }
    }

    /// A tensor of the dtype of the weights.
    pub fn tensor(&self, size: &[usize]) -> Sketched {
        self.of(size, self.runs.size())
    }

    pub fn of(&self, size: &[usize], element: usize) -> Sketched {
        let bytes = size.iter().product::<usize>() * element;
        self.over(size, element, Memory::take(&self.meter, bytes))
    }

    /// What somebody else counts; with a gradient, if that is wanted.
    pub fn given(&self, size: &[usize], element: usize, is_wanted: bool) -> Sketched {
        let variable = is_wanted.then(|| self.variable());
        Sketched { variable, ..self.over(size, element, Memory::take(&self.meter, 0)) }
    }

    /// The parameters of some units, with gradients where they are trained.
    pub fn weights(&self, units: &[&Unit], trains: impl Fn(&Unit) -> bool) -> SketchedWeights {
        let of_unit = |unit: &&Unit| {
            let size = |shape: &[i64]| shape.iter().map(|&it| it as usize).collect::<Vec<_>>();
            let params = unit.params.iter();
            params.map(|spec| self.given(&size(&spec.shape), self.runs.size(), trains(unit))).collect()
        };
        SketchedWeights(units.iter().map(of_unit).collect())
    }

    fn over(&self, size: &[usize], element: usize, memory: Rc<Memory>) -> Sketched {
        Sketched { size: size.to_vec(), element, is_dense: true, memory, variable: None, on: self.clone() }
    }

    fn variable(&self) -> usize {
        let variable = self.graph.variables.get();
        self.graph.variables.set(variable + 1);
        variable
    }

    /// An operation that has made `outputs`: what it keeps, if somebody wants a gradient of an input, and what backward
    /// takes in `passing`.
    pub fn record(
        &self,
        inputs: &[(&Sketched, Gradient)],
        outputs: &mut [&mut Sketched],
        saved: &[&Sketched],
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

    /// Goes back from the gradients of some variables to those of the leaves, which are returned.
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
                    // Added to in place, unless somebody else has it.
                    Some(before) if Rc::strong_count(&before) == 1 => drop(grads.insert(variable, before)),
                    Some(_before) => drop(grads.insert(variable, Memory::take(&self.meter, bytes))),
                }
            }
        }
        grads
    }

    /// The gradients of the leaves, from that of `output`, which is there as well; each of these may have its own.
    pub fn gradients(&self, outputs: &[&Sketched]) -> impl Sized + use<> {
        let mut grads = HashMap::new();
        for output in outputs {
            // The sum of the products with the gradient is what libtorch differentiates.
            drop(output.on.of(&output.size, output.element));
            if let Some(variable) = output.variable {
                grads.insert(variable, Memory::take(&self.meter, output.bytes()));
            }
        }
        self.backward(grads)
    }
}

impl Sketched {
    pub fn numel(&self) -> usize {
        self.size.iter().product()
    }

    pub fn bytes(&self) -> usize {
        self.numel() * self.element
    }

    /// Another tensor that is made of this one, whose gradient comes about as `how` says.
    fn made(&self, size: &[usize], element: usize, saved: &[&Sketched], how: Gradient) -> Sketched {
        let mut out = self.on.of(size, element);
        self.on.record(&[(self, how)], &mut [&mut out], saved, 0);
        out
    }

    /// The same values in another shape, or order.
    fn seen(&self, size: &[usize], is_dense: bool, how: Gradient) -> Sketched {
        let seen = self.on.over(size, self.element, self.memory.clone());
        let mut seen = Sketched { is_dense, ..seen };
        self.on.record(&[(self, how)], &mut [&mut seen], &[], 0);
        seen
    }

    /// The same memory, without a graph.
    pub fn detached(&self) -> Sketched {
        Sketched { variable: None, ..self.clone() }
    }

    /// The same memory as what gradients on another graph are asked of.
    pub fn leaf_on(&self, on: &Sketch) -> Sketched {
        Sketched { variable: Some(on.variable()), on: on.clone(), ..self.clone() }
    }

    /// The lengths along a dimension, of which there is one then.
    pub fn length(&self, size: &[usize]) -> Sketched {
        let mut out = self.on.of(size, self.element);
        let seen = out.clone();
        self.on.record(&[(self, Gradient::Own)], &mut [&mut out], &[self, &seen], self.bytes());
        out
    }

    /// Each value divided by that of another tensor, whose dimensions may be 1.
    pub fn divided(&self, by: &Sketched) -> Sketched {
        let mut out = self.on.of(&self.size, self.element);
        let inputs = [(self, Gradient::Own), (by, Gradient::Beside(4 * self.bytes()))];
        self.on.record(&inputs, &mut [&mut out], &[self, by], 0);
        out
    }

    /// In another shape, without a copy.
    pub fn view(&self, size: &[usize]) -> Sketched {
        self.seen(size, self.is_dense, Gradient::Outputs)
    }

    /// With its dimensions in another order.
    pub fn permuted(&self, size: &[usize]) -> Sketched {
        self.seen(size, false, Gradient::Outputs)
    }

    /// Some of a dimension; what is left out has a gradient of zeros.
    pub fn narrow(&self, dim: usize, len: usize) -> Sketched {
        let mut size = self.size.clone();
        size[dim] = len;
        self.seen(&size, self.is_dense && self.is_alone(dim), Gradient::Own)
    }

    /// Whether a part of a dimension is dense.
    fn is_alone(&self, dim: usize) -> bool {
        self.size[..dim].iter().product::<usize>() == 1
    }

    /// Parts along a dimension.
    pub fn split(&self, dim: usize, lens: &[usize]) -> Vec<Sketched> {
        let part = |&len: &usize| {
            let mut size = self.size.clone();
            size[dim] = len;
            let part = self.on.over(&size, self.element, self.memory.clone());
            Sketched { is_dense: self.is_dense && self.is_alone(dim), ..part }
        };
        let mut parts: Vec<Sketched> = lens.iter().map(part).collect();
        let mut outputs: Vec<&mut Sketched> = parts.iter_mut().collect();
        self.on.record(&[(self, Gradient::Own)], &mut outputs, &[], 0);
        parts
    }

    /// So many equal parts along a dimension.
    pub fn chunk(&self, dim: usize, count: usize) -> Vec<Sketched> {
        self.split(dim, &vec![self.size[dim] / count; count])
    }

    /// Dense values: a copy, if they are not.
    pub fn contiguous(&self) -> Sketched {
        if self.is_dense { self.clone() } else { self.copied() }
    }

    /// A dense copy.
    pub fn copied(&self) -> Sketched {
        self.made(&self.size, self.element, &[], Gradient::Outputs)
    }

    /// In another dtype.
    pub fn to(&self, element: usize) -> Sketched {
        if element == self.element {
            self.clone()
        } else {
            self.made(&self.size, element, &[], Gradient::Own)
        }
    }

    /// A function of each value whose gradient needs that: SiLU, GELU.
    pub fn activated(&self) -> Sketched {
        self.made(&self.size, self.element, &[self], Gradient::Own)
    }

    /// Times a number; or a function of each value whose gradient needs the result, where whoever multiplies by that keeps it.
    pub fn scaled(&self) -> Sketched {
        self.made(&self.size, self.element, &[], Gradient::Own)
    }

    /// Plus a number.
    pub fn shifted(&self) -> Sketched {
        self.made(&self.size, self.element, &[], Gradient::Outputs)
    }

    /// Something of another size, whose gradient needs nothing.
    pub fn resized(&self, size: &[usize]) -> Sketched {
        self.made(size, self.element, &[], Gradient::Own)
    }

    /// The product of each value with that of another tensor, whose dimensions may be 1.
    pub fn mul(&self, other: &Sketched) -> Sketched {
        let (size, element) = self.with(other);
        let mut out = self.on.of(&size, element);
        let bytes = out.bytes();
        let how = |tensor: &Sketched| match tensor.numel() == out.numel() {
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

    /// The sum, likewise.
    pub fn add(&self, other: &Sketched) -> Sketched {
        let (size, element) = self.with(other);
        let mut out = self.on.of(&size, element);
        let how = |tensor: &Sketched| match tensor.bytes() == out.bytes() {
            true => Gradient::Outputs,
            false => Gradient::Own,
        };
        self.on.record(&[(self, how(self)), (other, how(other))], &mut [&mut out], &[], 0);
        out
    }

    /// The size and the dtype of what is made of both.
    fn with(&self, other: &Sketched) -> (Vec<usize>, usize) {
        let (long, short) = if self.size.len() < other.size.len() { (other, self) } else { (self, other) };
        let mut size = long.size.clone();
        for (one, other) in size.iter_mut().rev().zip(short.size.iter().rev()) {
            *one = (*one).max(*other);
        }
        (size, self.element.max(other.element))
    }

    /// Several along a dimension.
    pub fn cat(all: &[&Sketched], dim: usize) -> Sketched {
        let mut size = all[0].size.clone();
        size[dim] = all.iter().map(|tensor| tensor.size[dim]).sum();
        let mut out = all[0].on.of(&size, all[0].element);
        let inputs: Vec<_> = all.iter().map(|tensor| (*tensor, Gradient::Outputs)).collect();
        all[0].on.record(&inputs, &mut [&mut out], &[], 0);
        out
    }

    /// `x W^T + bias`.
    pub fn linear(&self, weight: &Sketched, bias: Option<&Sketched>) -> Sketched {
        let [leading @ .., _] = &self.size[..] else { unreachable!("a matrix") };
        let x = self.contiguous();
        let mut out = self.on.of(&[leading, &[weight.size[0]]].concat(), self.element);
        let saved: Vec<&Sketched> = weight.variable.map(|_| &x).into_iter().collect();
        self.on.record(&x.with_weights(weight, bias), &mut [&mut out], &saved, 0);
        out
    }

    /// A convolution to such a size. Libraries bring what they read into an order of their own.
    pub fn convolved(&self, weight: &Sketched, bias: Option<&Sketched>, size: &[usize]) -> Sketched {
        let _read = [self.on.of(&self.size, self.element), self.on.of(&weight.size, self.element)];
        let x = self.contiguous();
        let mut out = self.on.of(size, self.element);
        let passing = out.bytes() + weight.bytes();
        // libtorch keeps what a convolution reads for the weight's gradient, asked for or not.
        self.on.record(&x.with_weights(weight, bias), &mut [&mut out], &[&x], passing);
        out
    }

    fn with_weights<'a>(
        &'a self,
        weight: &'a Sketched,
        bias: Option<&'a Sketched>,
    ) -> Vec<(&'a Sketched, Gradient)> {
        [self, weight].into_iter().chain(bias).map(|input| (input, Gradient::Own)).collect()
    }

    /// A norm over so many values each, with a weight and a bias or without: libtorch's own of layers and of groups.
    pub fn normed(&self, values: usize, weights: [Option<&Sketched>; 2]) -> Sketched {
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

    /// `x / rms(x) weight` over the last `values` values: on a host, with a gradient, as libtorch puts it together.
    pub fn rms_normed(&self, values: usize, weight: &Sketched) -> Sketched {
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

    /// What attention makes of these queries `[B, H, N, D]`, keys and values, by kernels that hold no scores: `[B, N, H D]`.
    pub fn attended(&self, keys: &Sketched, values: &Sketched) -> Sketched {
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
pub(crate) struct BlockSketch<'a> {
    /// Its units, that of its adapters behind.
    pub units: &'a [&'a Unit],
    /// The size of what it reads, and bytes of an element.
    pub input: (&'a [usize], usize),
    /// Whether the gradient of that is wanted.
    pub input_grad: bool,
    pub place: BlockPlace,
    /// Whether the weights stay as they are until backward.
    pub weights_last: bool,
}

/// Where a block stands: the first reads what the batch holds, and what the last says is nobody's input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockPlace {
    First,
    Inner,
    Last,
}

impl BlockPlace {
    /// That of a block among so many.
    pub fn of(block: usize, blocks: usize) -> BlockPlace {
        match block {
            0 => Self::First,
            _ if block + 1 == blocks => Self::Last,
            _ => Self::Inner,
        }
    }
}

/// The bytes of a block that is the function `run`, as [`crate::autograd`] runs it.
pub(crate) fn block_bytes(
    BlockSketch { units, input: (size, element), input_grad, place, weights_last }: BlockSketch,
    runs: Runs,
    run: impl Fn(&SketchedWeights, &Sketched) -> Sketched,
) -> BlockBytes {
    let plain = Sketch::new(runs);
    let out = run(&plain.weights(units, |_| false), &plain.given(size, element, false));
    let (scoring, output) = (plain.peak(), out.bytes());
    let input = if place == BlockPlace::First { 0 } else { size.iter().product::<usize>() * element };

    let sketch = Sketch::new(runs);
    let weights = sketch.weights(units, |unit| unit.trainable);
    let x = sketch.given(size, element, input_grad);
    let out = run(&weights, &x);
    let (forward, kept) = (sketch.peak(), sketch.live());
    let (_grad, is_followed) = (sketch.of(&out.size, out.element), out.variable.is_some());
    let _grads = is_followed.then(|| sketch.gradients(&[&out]));
    // Beside what was kept and the gradient of the output.
    let backward = if is_followed { sketch.peak().saturating_sub(kept + output) } else { 0 };
    // An inner block's output is the next one's input, and counted there; the graph holds it to the end.
    let (next, held) = if place == BlockPlace::Last { (0, 0) } else { (output, output) };
    let bytes = BlockBytes { input, forward, scoring, output_grad: output, ..BlockBytes::default() };
    if weights_last {
        let saved = kept - next + input;
        return BlockBytes { saved, thinned: saved, backward: backward + held, ..bytes };
    }
    let saved = input + output - next;
    // The input alone is kept, and backward runs the block once more.
    let backward = if is_followed { forward.max(kept + backward) } else { 0 };
    BlockBytes { saved, thinned: saved, forward: scoring, backward, ..bytes }
}
