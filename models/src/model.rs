//! The contract between a model and the holder of its weights.
//!
//! A model describes its [`Unit`]s of parameters and the flow of a batch through a stack of blocks, each of
//! which reads a few units. It never owns a weight: every call gets views of the weights that it needs and,
//! in backward, views to write gradients to. So the holder of the weights may shard them, gather them just in
//! time, and reduce the gradients block by block.

use std::sync::Arc;

use tch::Tensor;

use crate::{Cut, Error, Peers, Result, Sharers};
use anyroll_backends::ops::{self, Store};

/// Parameters that are laid out, gathered and reduced together, in one flat buffer.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Name of the unit, for messages.
    pub name: String,
    /// Parameters, in their order in the buffer.
    pub params: Vec<ParamSpec>,
    /// True if the unit is trained. A frozen unit is laid out and gathered like any other, but has no
    /// gradient and no optimizer states.
    pub trainable: bool,
}

/// One tensor of a unit.
///
/// Matrices with the same input (q, k and v; gate and up) are one parameter, so that one matrix product
/// computes all of them. `parts` splits it into the tensors of a checkpoint.
#[derive(Clone, Debug)]
pub struct ParamSpec {
    /// Name of the whole parameter; equal to the part's name if there is one part.
    pub name: String,
    /// Shape: `[rows, columns]`, `[rows]`, or `[rows, columns, height, width]` for a convolution.
    pub shape: Vec<i64>,
    /// Parts along the rows, from the first row on.
    pub parts: Vec<Part>,
    /// Initialization, if training starts from scratch.
    pub init: Init,
    /// True if weight decay applies: to matrices, not to norms and biases.
    pub decay: bool,
    /// Difference between its values in memory and in files; usually 0.
    pub offset: f32,
}

/// A tensor of a Hugging Face checkpoint inside a [`ParamSpec`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the checkpoint, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Number of rows.
    pub rows: i64,
}

/// Distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// Uniform in [-bound, bound).
    Uniform {
        /// Largest magnitude.
        bound: f64,
    },
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Norms of the rows of a matrix with this many columns, which the parameter belongs to; 1 if the matrix
    /// is unknown, as for a seed.
    RowNorms {
        /// Columns of the matrix.
        columns: i64,
    },
}

impl ParamSpec {
    /// Returns the number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }
}

/// A stack of blocks. Block `b` reads the units `units_of(b)`; a unit that two blocks read (tied embeddings)
/// gets the sum of their gradients.
pub trait Model: Send + Sync {
    /// Input of a forward pass.
    type Batch;
    /// Output of the last block.
    type Scores;
    /// Gradient of the loss with respect to the scores.
    type ScoresGrad: Gradient;

    /// Returns all units.
    fn units(&self) -> &[Unit];

    /// Returns the number of blocks.
    fn blocks(&self) -> usize;

    /// Returns the units that a block reads, as indices into [`Self::units`], in the order of its `Weights`.
    fn units_of(&self, block: usize) -> &[usize];

    /// Runs one block. `x` is the hidden output of the previous block, `None` for the first. With `save`,
    /// also returns the tensors that backward needs.
    ///
    /// # Errors
    /// A batch that does not fit the model, or libtorch's error (out of memory).
    fn forward(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &Self::Batch,
        save: bool,
    ) -> Result<(Output<Self::Scores>, Saved)>;

    /// Writes the weights' gradients to `grads` and returns the gradient of `x`. For the first block, it is
    /// the gradient of the batch's input, or `None` if that has none, such as tokens. After the backward of
    /// the last block that reads a trainable unit, all of its gradients are written.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    fn backward(
        &self,
        block: usize,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        grad_output: OutputGrad<Self::ScoresGrad>,
        batch: &Self::Batch,
    ) -> Result<Option<Tensor>>;

    /// Drops saved tensors that [`Self::refill`] can recompute for much less than the whole forward. The
    /// default drops nothing.
    fn thin(&self, _block: usize, saved: Saved) -> Saved {
        saved
    }

    /// Recomputes the tensors that [`Self::thin`] dropped, bitwise equal.
    ///
    /// # Errors
    /// libtorch's (out of memory).
    fn refill(&self, _block: usize, _weights: &Weights, saved: Saved, _batch: &Self::Batch) -> Result<Saved> {
        Ok(saved)
    }

    /// Returns the parameters of a unit that may be kept in 4 bits while they are frozen: the matrices of a layer's products.
    /// The default is none.
    fn layer_matrices(&self, _unit: usize) -> Vec<usize> {
        Vec::new()
    }

    /// Returns this rank's part of the model, which `peers` hold and run together. Its units have the shapes of
    /// [`Self::cut_on`]. The default refuses.
    ///
    /// # Errors
    /// [`Error::Config`] for a shape that the ranks cannot share.
    fn split_over(&self, _peers: &Arc<dyn Peers>) -> Result<Self>
    where
        Self: Sized,
    {
        let problem = "is of a kind that ranks do not hold together".to_owned();
        Err(Error::Input { what: "model", problem })
    }

    /// Returns this rank's part of a model with experts, which are spread over `peers`; `None` if it has no experts. Its units
    /// are those of the whole model without experts, in their order, and behind them those of experts; a unit of experts alone
    /// stays in its place. The default is of a model without experts.
    ///
    /// # Errors
    /// [`Error::Config`] for experts that the ranks cannot share.
    fn spread_experts(&self, _peers: &Arc<dyn Peers>) -> Result<Option<Self>>
    where
        Self: Sized,
    {
        Ok(None)
    }

    /// Returns true if [`Self::spread_experts`] takes parameters out of a unit of the whole model.
    fn has_experts(&self, _unit: usize) -> bool {
        false
    }

    /// Returns the unit and the index in it that a parameter of a rank's part has in the whole model.
    fn whole_place(&self, unit: usize, param: usize) -> (usize, usize) {
        (unit, param)
    }

    /// Returns true if a unit of a rank's part has spread experts.
    fn is_of_experts(&self, unit: usize) -> bool {
        self.whole_place(unit, 0).0 != unit
    }

    /// Returns the part that `rank` has of a parameter, of a model that [`Self::split_over`] or [`Self::spread_experts`]
    /// returned.
    fn cut_on(&self, _rank: usize, _unit: usize, _param: usize) -> Cut {
        Cut::Whole
    }

    /// Cuts the batches of all `sharers`, which run them together: returns this rank's part of each, in rank order. All
    /// of them call this at once. The default refuses.
    ///
    /// # Errors
    /// A model or a batch that cannot be cut, a failure of another rank, or libtorch's error.
    fn cut(&self, _batch: &Self::Batch, _sharers: &Sharers) -> Result<Vec<Self::Batch>> {
        Err(not_cut())
    }

    /// Joins the ranks' scores of `part`, which [`Self::cut`] returned, to those of the whole batch. All ranks call
    /// this.
    ///
    /// # Errors
    /// The errors of [`Self::cut`].
    fn join_scores(&self, _scores: Self::Scores, _part: &Self::Batch) -> Result<Self::Scores> {
        Err(not_cut())
    }

    /// Returns the gradient of this rank's scores of `part` from that of the whole batch, which only the batch's rank
    /// has. All ranks call this.
    ///
    /// # Errors
    /// The errors of [`Self::cut`].
    fn cut_grad(&self, _grad: Option<Self::ScoresGrad>, _part: &Self::Batch) -> Result<Self::ScoresGrad> {
        Err(not_cut())
    }
}

fn not_cut() -> Error {
    let problem = "this model does not split it over ranks".to_owned();
    Error::Input { what: "batch", problem }
}

/// Output of a block.
#[derive(Debug)]
pub enum Output<S> {
    /// An inner block's activations.
    Hidden(Tensor),
    /// The last block's result.
    Scores(S),
}

/// A language model head's output for each target token, each fp32 `[M]`.
#[derive(Debug)]
pub struct Scores {
    /// Log-probability of the target under softmax(logits / temperature).
    pub logprobs: Tensor,
    /// Entropy of that distribution, in nats.
    pub entropy: Tensor,
    /// Divergence from a teacher's distribution, if the batch has a teacher.
    pub divergence: Option<Tensor>,
}

/// Gradient of the loss with respect to an [`Output`].
#[derive(Debug)]
pub enum OutputGrad<G> {
    /// For an inner block, which may reuse this memory.
    Hidden(Tensor),
    /// For the last block.
    Scores(G),
}

/// Gradient of the loss with respect to [`Scores`], each fp32 `[M]`.
#[derive(Debug)]
pub struct ScoresGrad {
    /// Gradient of the log-probabilities.
    pub logprobs: Tensor,
    /// Gradient of the entropies, if the loss has an entropy term.
    pub entropy: Option<Tensor>,
    /// Gradient of the divergences, if the loss has such a term.
    pub divergence: Option<Tensor>,
}

/// A gradient of scores, in one or more tensors.
pub trait Gradient: Sized {
    /// Multiplies by `factor` (one element, on the same device): a loss scale.
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

/// Tensors that a block's forward keeps for its backward; empty if nothing was saved.
#[derive(Debug, Default)]
pub struct Saved(pub(crate) Vec<Tensor>);

impl Saved {
    /// Returns the device memory in bytes.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }

    /// Returns the tensors, for comparisons.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.0.iter().map(Tensor::shallow_clone).collect()
    }

    /// Returns the first saved tensors, and the remaining ones.
    pub(crate) fn unpack_first<const N: usize>(mut self) -> ([Tensor; N], Vec<Tensor>) {
        let behind = self.0.split_off(N.min(self.0.len()));
        (self.unpack(), behind)
    }

    /// Returns the tensors in the order in which forward saved them.
    pub(crate) fn unpack<const N: usize>(self) -> [Tensor; N] {
        self.0.try_into().unwrap_or_else(|tensors: Vec<Tensor>| {
            panic!("backward needs what forward saves: {N} tensors, got {}", tensors.len())
        })
    }
}

/// Weights of a block: the tensors of each unit that it reads.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    units: &'a [&'a [Tensor]],
    lasts: bool,
    prepared: bool,
}

impl<'a> Weights<'a> {
    /// Takes one slice per unit in the order of `units_of`, with one dense tensor per parameter.
    pub fn new(units: &'a [&'a [Tensor]]) -> Weights<'a> {
        Weights { units, lasts: false, prepared: false }
    }

    /// Marks the weights as unchanged until the backward of the forward that gets them, which must get the
    /// mark, too. Saved tensors may then refer to them.
    #[must_use]
    pub fn lasting(self) -> Weights<'a> {
        Weights { lasts: true, ..self }
    }

    /// Returns true if they are [`Self::lasting`].
    pub(crate) fn lasts(&self) -> bool {
        self.lasts
    }

    /// Marks the weights as prepared for many passes by [`Decoder::prepare`](crate::Decoder::prepare).
    pub(crate) fn prepared(self) -> Weights<'a> {
        Weights { prepared: true, ..self }
    }

    /// Returns true if they are [`Self::prepared`].
    pub(crate) fn are_prepared(&self) -> bool {
        self.prepared
    }

    /// Returns only the weights of the first unit.
    pub(crate) fn first(&self) -> Weights<'a> {
        Weights { units: &self.units[..1], ..*self }
    }

    /// Returns all tensors, unit by unit.
    pub(crate) fn units(&self) -> &'a [&'a [Tensor]] {
        self.units
    }

    /// Returns the parameter `param` of the block's `unit`-th unit.
    pub(crate) fn get(&self, unit: usize, param: usize) -> &'a Tensor {
        &self.units[unit][param]
    }
}

/// Gradients of one unit: a dense view per parameter, and flags for those written since the last
/// [`Self::reset`].
#[derive(Debug)]
pub struct UnitGrads {
    views: Vec<Tensor>,
    written: Vec<bool>,
}

impl UnitGrads {
    /// Takes gradient buffers in the order and shapes of the unit's parameters; their contents are not read.
    pub fn new(views: Vec<Tensor>) -> UnitGrads {
        let written = vec![false; views.len()];
        UnitGrads { views, written }
    }

    /// Clears the flags: the next write of each parameter overwrites its gradient.
    pub fn reset(&mut self) {
        self.written.fill(false);
    }

    /// Returns true if every parameter has its gradient.
    pub fn all_written(&self) -> bool {
        self.written.iter().all(|&written| written)
    }

    /// Returns the gradients.
    pub fn views(&self) -> &[Tensor] {
        &self.views
    }
}

/// Destination of the weights' gradients in a block's backward. The first write of a parameter overwrites the
/// buffer, later ones add.
#[derive(Debug)]
pub struct Grads<'a> {
    units: Vec<Option<&'a mut UnitGrads>>,
}

impl<'a> Grads<'a> {
    /// Takes the gradients of each unit that the block reads, in the order of `units_of`; `None` for a frozen
    /// unit.
    pub fn new(units: Vec<Option<&'a mut UnitGrads>>) -> Grads<'a> {
        Grads { units }
    }

    /// Returns true if a unit has gradients, which a frozen unit does not.
    pub(crate) fn wants(&self, unit: usize) -> bool {
        self.units[unit].is_some()
    }

    /// Calls `put` with the buffer of a parameter and the way to store the gradient. Does nothing for a
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

    /// Like [`Self::put`], for an operation that also computes the gradient of its input. It is called for a
    /// frozen parameter, too; that gradient goes to a temporary buffer like `weight`.
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

    /// Writes the gradient of the weight of `y = x W^T`, `dy^T x`, directly to the buffer.
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
