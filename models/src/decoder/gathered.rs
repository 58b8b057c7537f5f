//! Attention of a block over a [`Slice`] of a batch's rows where the ranks cannot share the heads: each attends for its own
//! rows with all heads, to keys and values that all ranks gather (Llama 3, Dubey et al. 2024, section 3.3.2).
//!
//! Later rows see more, so each rank has two pieces of the rows, as far from the begin as from the end
//! ([`crate::slice::Division`]). Backward gathers again, so that a rank keeps only keys and values of its own rows. Every
//! rank then has gradients of keys and values of all rows, by its own queries. They travel to the rows' ranks and are summed
//! there, in rank order.
//!
//! Letters in shapes: P ranks, n rows each.

use anyroll_backends::ops::{self, AttentionOutput, Qkv, QkvGrads};
use tch::Tensor;

use super::block::Block;
use super::layer::Layer;
use super::spread::sum_in_order;
use crate::Result;
use crate::slice::{Seen, Slice, padded};

impl Block {
    /// Computes attention's output for this rank's rows, `[n, H D]`, and the log-sum-exps of those before the padding.
    pub(super) fn attend_gathered(
        &self,
        [q, k, v]: [&Tensor; 3],
        slice: &Slice,
        layer: &Layer,
    ) -> Result<(Tensor, Tensor)> {
        let seen = slice.seen(layer.packing)?;
        let [k, v] = self.gather([k, v], slice, seen)?;
        let q = q.f_narrow(0, 0, slice.real_rows())?;
        let (out, lse) = self.math.attention(&q, &k, &v, &seen.packing, self.causal(layer.window))?;
        Ok((padded(&out, slice.rows())?, lse))
    }

    /// Writes the gradients of queries, keys and values of this rank's rows.
    pub(super) fn gathered_backward(
        &self,
        dout: &Tensor,
        Qkv { q, k, v }: Qkv,
        AttentionOutput { out, lse }: AttentionOutput,
        (slice, layer): (&Slice, &Layer),
        QkvGrads { dq, dk, dv }: QkvGrads,
    ) -> Result<()> {
        let (seen, real, rows) = (slice.seen(layer.packing)?, slice.real_rows(), slice.rows());
        let own = |x: &Tensor| x.f_narrow(0, 0, real);
        drop(dq.f_narrow(0, real, rows - real)?.f_zero_()?);
        let size = [slice.ranks() * rows, 2 * self.kv_heads, self.head_dim];
        let of_all = Tensor::f_zeros(size, (dk.kind(), dk.device()))?;
        {
            let [k, v] = self.gather([k, v], slice, seen)?;
            let [mut dk, mut dv] = self.keys_and_values(&of_all, seen)?;
            let (qkv, output) = (Qkv { q: &own(q)?, k: &k, v: &v }, AttentionOutput { out: &own(out)?, lse });
            let grads = QkvGrads { dq: &mut own(dq)?, dk: &mut dk, dv: &mut dv };
            let options = self.options(&seen.packing, layer);
            ops::attention_backward(&own(dout)?, qkv, output, options, grads)?;
        }
        let sent = of_ranks(&of_all, slice)?;
        drop(of_all);
        let received = slice.peers.all_to_all(&sent)?;
        drop(sent);
        let sum = sum_in_order(&received, 0)?;
        dk.f_copy_(&sum.f_narrow(1, 0, self.kv_heads)?)?;
        Ok(dv.f_copy_(&sum.f_narrow(1, self.kv_heads, self.kv_heads)?)?)
    }

    /// Returns the keys and values that this rank's rows see, out of those of all ranks' rows, `[n, K, D]` each.
    fn gather(&self, [k, v]: [&Tensor; 2], slice: &Slice, seen: &Seen) -> Result<[Tensor; 2]> {
        let of_ranks = slice.peers.all_gather(&Tensor::f_cat(&[k, v], 1)?)?;
        self.keys_and_values(&in_order(&of_ranks)?, seen)
    }

    /// Returns views of what is seen of all rows' keys and values `[P n, 2 K, D]`: `[_, K, D]` each.
    fn keys_and_values(&self, of_all: &Tensor, Seen { rows, .. }: &Seen) -> Result<[Tensor; 2]> {
        let both = of_all.f_narrow(0, rows.start, rows.end - rows.start)?;
        let part = |first: i64| both.f_narrow(1, first, self.kv_heads);
        Ok([part(0)?, part(self.kv_heads)?])
    }
}

/// Brings the two pieces of each rank, `[P, n, ...]`, into the order of the batch: `[P n, ...]`.
fn in_order(of_ranks: &Tensor) -> Result<Tensor> {
    let half = of_ranks.size()[1] / 2;
    let (first, last) = (of_ranks.f_narrow(1, 0, half)?, of_ranks.f_narrow(1, half, half)?);
    Ok(Tensor::f_cat(&[first, last.f_flip([0])?], 0)?.f_flatten(0, 1)?)
}

/// The reverse of [`in_order`].
fn of_ranks(in_order: &Tensor, slice: &Slice) -> Result<Tensor> {
    let pieces = in_order.f_unflatten(0, [2 * slice.ranks(), slice.rows() / 2])?;
    let (first, last) =
        (pieces.f_narrow(0, 0, slice.ranks())?, pieces.f_narrow(0, slice.ranks(), slice.ranks())?);
    Ok(Tensor::f_cat(&[first, last.f_flip([0])?], 1)?)
}
