//! The contract between a model and whoever holds its weights.
//!
//! A model says what it is made of ([`Unit`]s of parameters) and how a batch flows through it (a stack of
//! blocks, each of which reads a few units). It never owns a weight: every call gets views of the weights it
//! needs and, backward, views to write gradients into. So whoever holds the weights may shard them, gather
//! them just in time and reduce the gradients block by block.

use tch::Tensor;

use crate::Result;
use anyroll_backends::ops::{self, Store};

/// Parameters that are laid out, gathered and reduced together: one flat buffer's worth.
#[derive(Clone, Debug)]
pub struct Unit {
    /// The unit's name, for messages.
    pub name: String,
    /// Its parameters, in the order in which they lie in the buffer.
    pub params: Vec<ParamSpec>,
    /// Whether it is trained. A frozen unit is laid out and gathered as any other, and has neither a gradient nor
    /// optimizer states.
    pub trainable: bool,
}

/// One tensor of a unit.
///
/// Matrices that read the same input (q, k and v; gate and up) are one parameter, so that one matrix product
/// serves all of them. `parts` says how it falls into the tensors that a checkpoint holds.
#[derive(Clone, Debug)]
pub struct ParamSpec {
    /// The name of the whole; equal to the part's if there is one part.
    pub name: String,
    /// `[rows, columns]` or `[rows]`; of a convolution `[rows, columns, height, width]`.
    pub shape: Vec<i64>,
    /// What it is cut into along its rows, from the first row on.
    pub parts: Vec<Part>,
    /// How it is filled at the start of a training from nothing.
    pub init: Init,
    /// Whether weight decay applies: to matrices yes, to norms and biases no.
    pub decay: bool,
    /// How much more it is than files have; most often 0.
    pub offset: f32,
}

/// A tensor of a Hugging Face checkpoint inside a [`ParamSpec`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its name there, as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Its number of rows.
    pub rows: i64,
}

/// The distribution of a parameter's first values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// Uniform in [-bound, bound).
    Uniform {
        /// The largest magnitude.
        bound: f64,
    },
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// The norms of the rows of a matrix of so many columns, which the parameter goes with; 1 where that is not known, as
    /// to a seed.
    RowNorms {
        /// Of the matrix.
        columns: i64,
    },
}

impl ParamSpec {
    /// The number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }
}

/// A stack of blocks. Block `b` reads the units `units_of(b)`; a unit that two blocks read (tied embeddings)
/// gets the sum of their gradients.
pub trait Model: Send + Sync {
    /// What a forward pass reads.
    type Batch;
    /// What the last block says of it.
    type Scores;
    /// The gradient of the loss with respect to that.
    type ScoresGrad: Gradient;

    /// All units.
    fn units(&self) -> &[Unit];

    /// The number of blocks.
    fn blocks(&self) -> usize;

    /// The units that a block reads, as indices into [`Self::units`], in the order of its `Weights`.
    fn units_of(&self, block: usize) -> &[usize];

    /// Runs one block. `x` is the hidden output of the previous block, `None` for the first; what backward
    /// needs is returned if `save` is set.
    ///
    /// # Errors
    /// A batch that the model cannot take, or libtorch's error (out of memory).
    fn forward(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &Self::Batch,
        save: bool,
    ) -> Result<(Output<Self::Scores>, Saved)>;

    /// Writes the weights' gradients into `grads` and returns the gradient of `x`; for the first block that of
    /// what the batch holds in its place, or `None` if that has none, as tokens. After the backward of the last
    /// block that reads a trainable unit, each of its gradients is written.
    ///
    /// # Errors
    /// As [`Self::forward`].
    fn backward(
        &self,
        block: usize,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        grad_output: OutputGrad<Self::ScoresGrad>,
        batch: &Self::Batch,
    ) -> Result<Option<Tensor>>;

    /// Drops of what forward saved what [`Self::refill`] can make again for much less than the whole forward. By
    /// default nothing.
    fn thin(&self, _block: usize, saved: Saved) -> Saved {
        saved
    }

    /// Makes again what [`Self::thin`] dropped, the same to the bit.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    fn refill(&self, _block: usize, _weights: &Weights, saved: Saved, _batch: &Self::Batch) -> Result<Saved> {
        Ok(saved)
    }
}

/// What a block returns.
#[derive(Debug)]
pub enum Output<S> {
    /// An inner block's activations.
    Hidden(Tensor),
    /// The last block's result.
    Scores(S),
}

/// What a language model's head says of each target token, each fp32 `[M]`.
#[derive(Debug)]
pub struct Scores {
    /// Log-probability of the target under softmax(logits / temperature).
    pub logprobs: Tensor,
    /// Entropy of that distribution, in nats.
    pub entropy: Tensor,
    /// How far a teacher's distribution is, if the batch has one.
    pub divergence: Option<Tensor>,
}

/// The gradient of the loss with respect to an [`Output`].
#[derive(Debug)]
pub enum OutputGrad<G> {
    /// For an inner block; the block may reuse this memory.
    Hidden(Tensor),
    /// For the last block.
    Scores(G),
}

/// The gradient of the loss with respect to [`Scores`], each fp32 `[M]`.
#[derive(Debug)]
pub struct ScoresGrad {
    /// Gradient of the log-probabilities.
    pub logprobs: Tensor,
    /// Gradient of the entropies, if the loss has an entropy term.
    pub entropy: Option<Tensor>,
    /// Gradient of the divergences, if the loss has some.
    pub divergence: Option<Tensor>,
}

/// A gradient of scores, in one or more tensors.
pub trait Gradient: Sized {
    /// Times `factor` (one element, on the same device): a loss scale.
    ///
    /// # Errors
    /// libtorch's.
    fn scaled(self, factor: &Tensor) -> Result<Self>;
}

impl Gradient for Tensor {
    fn scaled(self, factor: &Tensor) -> Result<Self> {
        Ok(self.f_mul(factor)?)
    }
}

impl Gradient for ScoresGrad {
    fn scaled(self, factor: &Tensor) -> Result<Self> {
        let scaled = |of: Option<Tensor>| of.map(|of| of.scaled(factor)).transpose();
        let (entropy, divergence) = (scaled(self.entropy)?, scaled(self.divergence)?);
        Ok(Self { logprobs: self.logprobs.scaled(factor)?, entropy, divergence })
    }
}

/// What a block's forward keeps for its backward. Empty if nothing was to be saved.
#[derive(Debug, Default)]
pub struct Saved(pub(crate) Vec<Tensor>);

impl Saved {
    /// The device memory that it holds.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }

    /// The tensors, to compare them.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.0.iter().map(Tensor::shallow_clone).collect()
    }

    /// The first tensors that forward saved, and those behind them.
    pub(crate) fn unpack_first<const N: usize>(mut self) -> ([Tensor; N], Vec<Tensor>) {
        let behind = self.0.split_off(N.min(self.0.len()));
        (self.unpack(), behind)
    }

    /// The tensors in the order in which forward saved them.
    pub(crate) fn unpack<const N: usize>(self) -> [Tensor; N] {
        self.0.try_into().unwrap_or_else(|tensors: Vec<Tensor>| {
            panic!("backward needs what forward saves: {N} tensors, got {}", tensors.len())
        })
    }
}

/// A block's weights: the tensors of each unit that it reads.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    units: &'a [&'a [Tensor]],
    lasts: bool,
    prepared: bool,
}

impl<'a> Weights<'a> {
    /// One slice a unit in the order of `units_of`, in it one dense tensor a parameter.
    pub fn new(units: &'a [&'a [Tensor]]) -> Weights<'a> {
        Weights { units, lasts: false, prepared: false }
    }

    /// The same, and they stay as they are until the backward of the forward that gets them, which is told so, too: what
    /// forward saves may point into them.
    #[must_use]
    pub fn lasting(self) -> Weights<'a> {
        Weights { lasts: true, ..self }
    }

    /// Whether they are [`Self::lasting`].
    pub(crate) fn lasts(&self) -> bool {
        self.lasts
    }

    /// The same, which [`Decoder::prepare`](crate::Decoder::prepare) has prepared for many passes.
    pub(crate) fn prepared(self) -> Weights<'a> {
        Weights { prepared: true, ..self }
    }

    /// Whether they are [`Self::prepared`].
    pub(crate) fn are_prepared(&self) -> bool {
        self.prepared
    }

    /// Those of the first unit alone.
    pub(crate) fn first(&self) -> Weights<'a> {
        Weights { units: &self.units[..1], ..*self }
    }

    /// All of them, unit by unit.
    pub(crate) fn units(&self) -> &'a [&'a [Tensor]] {
        self.units
    }

    /// The parameter `param` of the block's `unit`-th unit.
    pub(crate) fn get(&self, unit: usize, param: usize) -> &'a Tensor {
        &self.units[unit][param]
    }
}

/// The gradients of one unit: a dense view for each parameter, and which of them were written since the last
/// [`Self::reset`].
#[derive(Debug)]
pub struct UnitGrads {
    views: Vec<Tensor>,
    written: Vec<bool>,
}

impl UnitGrads {
    /// Gradient buffers in the order of the unit's parameters, of their shapes; what they hold is not read.
    pub fn new(views: Vec<Tensor>) -> UnitGrads {
        let written = vec![false; views.len()];
        UnitGrads { views, written }
    }

    /// Forgets what was written: the next write of each parameter overwrites.
    pub fn reset(&mut self) {
        self.written.fill(false);
    }

    /// Whether every parameter has its gradient.
    pub fn all_written(&self) -> bool {
        self.written.iter().all(|&written| written)
    }

    /// The gradients.
    pub fn views(&self) -> &[Tensor] {
        &self.views
    }
}

/// Where a block's backward puts the gradients of its weights. The first write of a parameter overwrites the
/// buffer, later ones add.
#[derive(Debug)]
pub struct Grads<'a> {
    units: Vec<Option<&'a mut UnitGrads>>,
}

impl<'a> Grads<'a> {
    /// The gradients of each unit that the block reads, in the order of `units_of`; `None` for a frozen one.
    pub fn new(units: Vec<Option<&'a mut UnitGrads>>) -> Grads<'a> {
        Grads { units }
    }

    /// Whether a unit has gradients, and is not frozen.
    pub(crate) fn wants(&self, unit: usize) -> bool {
        self.units[unit].is_some()
    }

    /// Hands the buffer of a parameter to `put`, with the way in which it must be stored. Nothing is called for a
    /// frozen parameter.
    pub(crate) fn put(
        &mut self,
        unit: usize,
        param: usize,
        put: impl FnOnce(&mut Tensor, Store) -> Result<(), ops::Error>,
    ) -> Result<()> {
        let Some(grads) = &mut self.units[unit] else { return Ok(()) };
        let how = if grads.written[param] { Store::Add } else { Store::Write };
        put(&mut grads.views[param], how)?;
        grads.written[param] = true;
        Ok(())
    }

    /// As [`Self::put`], for an operation that makes the gradient of its input as well: it is called for a frozen
    /// parameter, too, whose own gradient goes into a buffer like `weight` that is dropped.
    pub(crate) fn put_beside(
        &mut self,
        unit: usize,
        param: usize,
        weight: &Tensor,
        put: impl FnOnce(&mut Tensor, Store) -> Result<(), ops::Error>,
    ) -> Result<()> {
        match self.units[unit] {
            Some(_) => self.put(unit, param, put),
            None => Ok(put(&mut weight.f_empty_like()?, Store::Write)?),
        }
    }

    /// The gradient of the weight of `y = x W^T`: `dy^T x`, straight into the buffer.
    pub(crate) fn put_linear(&mut self, unit: usize, param: usize, dy: &Tensor, x: &Tensor) -> Result<()> {
        let dy_transposed = dy.f_tr()?;
        self.put(unit, param, |buffer, how| {
            match how {
                Store::Write => drop(dy_transposed.f_mm_out(buffer, x)?),
                Store::Add => drop(buffer.f_addmm_(&dy_transposed, x)?),
            }
            Ok(())
        })
    }
}
