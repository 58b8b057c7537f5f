//! The tensor operations that tch lacks or that libtorch does in many passes.
//!
//! Every operation is here once, as a function that checks its arguments and then takes one of three ways:
//! a C++ kernel (`shim/`) for fp32 tensors on a CPU, a kernel compiled at run time (`kernels/`) on a device that has
//! them, or [`composite`], the same formula in plain ATen calls, for every other dtype and device. They agree to
//! rounding, and the tests hold them to it. Operations of image transformers ([`modulated_norm`], [`gated_sums_behind`],
//! [`joint_heads`]) have no kernel for CPUs. libtorch's autograd differentiates them, by a backward of their own if they have
//! kernels ([`differentiable`]). All others know no graph, and have a function for their backward.
//!
//! Rules of all operations:
//! - sums run in fp32 (fp64 for fp64 inputs) whatever the dtype of the tensors;
//! - a kernel's result does not depend on the number of threads: sums over rows are cut in chunks whose size depends
//!   on their number alone (libtorch's matrix products make no such promise);
//! - on a CPU, a row's result depends on that row alone, and in attention on the rows that it sees;
//! - an index out of range is an error on a CPU; on a device it ends the process's work there, as in libtorch's own
//!   operations, since a check on the host would wait for the device;
//! - a name that ends in `_` writes into its arguments, as in PyTorch;
//! - gradients of weights are either written or added, as [`Store`] says, so that no buffer needs zeroing.
//!
//! Letters in shapes: N tokens of a packed batch, H query heads, K key/value heads, D head dim, C channels,
//! F intermediate, V vocabulary, M targets, B sequences. For images: B images of N tokens. For mixtures: E experts, J experts
//! of a token, R rows of tokens sorted by expert.

mod attention;
mod by_rows;
mod check;
pub mod composite;
mod copies;
mod cpu_kernels;
mod decode;
mod divergence;
mod dropout;
mod eight_bit_rows;
mod eight_bits;
mod embedding;
mod experts;
mod flash;
mod four_bits;
mod glu;
mod graph;
mod grouped;
mod joint;
mod logprob;
mod modulation;
mod moments;
mod norm;
mod optimizer;
mod packing;
mod product;
mod ranks;
mod rope;
mod routing;
#[cfg(test)]
mod tests;
mod tiled;
mod torch;

pub use crate::kernels::arguments::Activation;
pub use attention::{
    AttentionOptions, AttentionOutput, Causal, Qkv, QkvGrads, attention, attention_backward,
    attention_with_history, decode_attention,
};
pub use by_rows::{
    attention_by_rows, attention_with_history_by_rows, decode_attention_by_rows, exist_by_rows,
    linear_by_rows, linear_by_rows_into,
};
pub use decode::{
    AttentionParts, PagedCache, Sampling, StepRotation, attend_into, recording_device, records_steps,
    rms_norm_, sample_into, swiglu_into, turn_rows_,
};
use decode::{device_of_kernels, rms_norm_into};
pub use divergence::Divergence;
pub use dropout::{Dropout, dropout};
pub use eight_bit_rows::{EightBitRows, linear_of_eight_bits, multiplies_eight_bit_rows};
pub use eight_bits::{EIGHT_BIT_COLUMNS, in_eight_bits, is_in_eight_bits, rows_of_scales, widened};
pub use embedding::{embedding_backward, sum_rows};
pub use experts::{Choice, Dispatch, ExpertOrder, row_dots};
pub use four_bits::{FOUR_BIT_BLOCK, FOUR_BIT_BLOCK_BYTES, from_four_bits, in_four_bits};
pub use glu::{glu, glu_backward_};
pub use graph::{Asked, differentiable};
pub use grouped::{
    Groups, grouped_input_backward, grouped_linear, grouped_linear_by_rows, grouped_weight_backward,
    padded_rows,
};
pub use joint::{TokenKind, joint_heads};
pub use logprob::{LogProbs, logprobs, logprobs_backward_};
pub use modulation::{GatedSum, gated_add, gated_sums_behind, modulated_norm};
pub use moments::{DecayRuns, EightBitMoments, MOMENT_BLOCK, MomentMaps, adamw_in_eight_bits_};
pub use norm::{add_rms_norm_, rms_norm, rms_norm_backward_};
pub use optimizer::{AdamW, adamw_, sum_of_squares};
pub use packing::{Packing, copy_across, moved, upload};
pub use product::{
    Normed, add_linear_, add_linear_and_norm_, is_quick_in_eight_bits, linear, linear_into,
    multiplies_in_eight_bits, swiglu_linear_into,
};
pub use ranks::sum_ranks;
pub use rope::{Rotation, rope_, rope_frequencies, rope_table};
pub use routing::{Routing, routes_in_place};
pub use torch::{attend, rms_normed};

/// Mode of writing a gradient to its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Replace what the buffer holds.
    Write,
    /// Add to what the buffer holds.
    Add,
}

/// An error of an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument has a shape, dtype, device or value that the operation cannot take.
    #[error("{op}: argument `{argument}` {problem}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// The argument's name in the operation's signature.
        argument: &'static str,
        /// The problem, and the expected value.
        problem: String,
    },
    /// A kernel failed.
    #[error("{op}: {message}")]
    Kernel {
        /// The operation.
        op: &'static str,
        /// The C++ exception's text, or the device's error.
        message: String,
    },
    /// libtorch refused a call (out of memory, an unsupported dtype, a shape).
    #[error("libtorch refused an operation")]
    Torch(#[from] tch::TchError),
}

/// The result of an operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
