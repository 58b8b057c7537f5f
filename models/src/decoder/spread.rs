//! Attention of a block, over all rows of a batch, also if this rank has a [`Slice`] of them: then queries, keys and
//! values travel to the ranks of their heads, and the output travels back. Heads that the ranks cannot share stay, and keys
//! and values of all rows travel ([`super::gathered`]).
//!
//! Letters in shapes: P ranks, n = N' / P rows each, where N' are the N rows with padding; h = H / P query heads each, and
//! k = max(K / P, 1) key heads.

use anyroll_backends::ops::{self, AttentionOptions, AttentionOutput, Packing, Qkv, QkvGrads};
use tch::{Kind, Tensor};

use super::block::{Attended, Block, Projected};
use super::layer::Layer;
use crate::Result;
use crate::slice::{Slice, padded};

impl Block {
    /// Computes attention's output for this rank's rows, `[n, H D]`, and its log-sum-exps. Over slices, its inputs
    /// replace those in `projected` that backward does not need.
    pub(super) fn attend(&self, projected: &mut Projected, layer: &Layer) -> Result<(Tensor, Tensor)> {
        let Projected { q, k, v, qkv, .. } = projected;
        let causal = self.causal(layer.window);
        let Some(slice) = layer.slice else {
            return self.math.attention(q, k, v, layer.packing, causal);
        };
        if slice.division.is_mirrored {
            return self.attend_gathered([q, k, v], slice, layer);
        }
        let inputs = self.to_heads([q, k, v], slice, layer.packing.rows())?;
        let [of_q, of_k, of_v] = self.split_own(&inputs, slice)?;
        let (out, lse) = self.math.attention(&of_q, &of_k, &of_v, layer.packing, causal)?;
        let none = || Tensor::f_empty([0], (inputs.kind(), inputs.device()));
        (*q, *k, *v) = (inputs.shallow_clone(), none()?, none()?);
        if self.qk_norm.is_none() {
            *qkv = inputs;
        }
        Ok((to_rows(&out, slice)?, lse))
    }

    /// Writes the gradients of queries, keys and values of this rank's rows. `normed` are queries and keys as attention
    /// read them, if the block norms these.
    pub(super) fn attend_backward(
        &self,
        attended: &Attended,
        normed: Option<[&Tensor; 2]>,
        layer: &Layer,
        grads: QkvGrads,
    ) -> Result<()> {
        let Attended { dout, out, lse, qkv } = attended;
        let options = self.options(layer.packing, layer);
        let Some(slice) = layer.slice.filter(|slice| !slice.division.is_mirrored) else {
            let [q, k, v] = self.split(qkv)?;
            let [q, k] = normed.unwrap_or([&q, &k]);
            let (qkv, output) = (Qkv { q, k, v: &v }, AttentionOutput { out, lse });
            return match layer.slice {
                Some(slice) => self.gathered_backward(dout, qkv, output, (slice, layer), grads),
                None => Ok(ops::attention_backward(dout, qkv, output, options, grads)?),
            };
        };
        let [q, k, v] = self.split_own(normed.map_or(qkv, |[inputs, _]| inputs), slice)?;
        let rows = layer.packing.rows();
        let [dout, out] = to_own([dout, out], slice, rows)?;
        let mut size = q.size();
        (size[0], size[1]) =
            (slice.rows() * slice.ranks(), self.own_heads(slice) + 2 * self.own_kv_heads(slice));
        let dinputs = Tensor::f_zeros(&size, (q.kind(), q.device()))?;
        let [mut dq, mut dk, mut dv] = self.split_own(&dinputs.f_narrow(0, 0, rows)?, slice)?;
        let own = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        let output = AttentionOutput { out: &out, lse };
        ops::attention_backward(&dout, Qkv { q: &q, k: &k, v: &v }, output, options, own)?;
        self.send_back(&dinputs, slice, grads)
    }

    /// Returns the options of attention's backward over these sequences.
    pub(super) fn options<'a>(&self, packing: &'a Packing, layer: &Layer) -> AttentionOptions<'a> {
        AttentionOptions { packing, causal: self.causal(layer.window), deterministic: self.deterministic }
    }

    fn own_heads(&self, slice: &Slice) -> i64 {
        self.heads / slice.ranks()
    }

    fn own_kv_heads(&self, slice: &Slice) -> i64 {
        (self.kv_heads / slice.ranks()).max(1)
    }

    /// Returns views of this rank's queries, keys and values in `[N, h + 2 k, D]`.
    fn split_own(&self, inputs: &Tensor, slice: &Slice) -> Result<[Tensor; 3]> {
        let (heads, kv_heads) = (self.own_heads(slice), self.own_kv_heads(slice));
        Ok([
            inputs.f_narrow(1, 0, heads)?,
            inputs.f_narrow(1, heads, kv_heads)?,
            inputs.f_narrow(1, heads + kv_heads, kv_heads)?,
        ])
    }

    /// Sends queries, keys and values of this rank's rows, `[n, heads, D]`, to the ranks of their heads. Returns those of
    /// this rank's heads for all rows: `[N, h + 2 k, D]`. A key head that several ranks read goes to each.
    fn to_heads(&self, qkv: [&Tensor; 3], slice: &Slice, rows: i64) -> Result<Tensor> {
        let (ranks, dim) = (slice.ranks(), self.head_dim);
        let sharing = ranks / self.kv_heads.min(ranks);
        let parts = qkv.map(|x| -> Result<Tensor> {
            let (n, heads) = (x.size()[0], x.size()[1]);
            let by_rank = match heads % ranks {
                0 => x.f_view([n, ranks, heads / ranks, dim])?,
                _ => {
                    let shared = x.f_unsqueeze(2)?.f_expand([n, heads, sharing, dim], false)?;
                    shared.f_reshape([n, ranks, 1, dim])?
                }
            };
            Ok(by_rank.f_transpose(0, 1)?)
        });
        let [q, k, v] = parts;
        let sent = Tensor::f_cat(&[q?, k?, v?], 2)?;
        Ok(slice.peers.all_to_all(&sent)?.f_flatten(0, 1)?.f_narrow(0, 0, rows)?)
    }

    /// The backward of [`Self::to_heads`]: sends the gradients `[N', h + 2 k, D]` of this rank's heads to the ranks of
    /// their rows, and writes those of this rank's rows. Gradients of a key head that several ranks read are summed in
    /// rank order.
    fn send_back(&self, dinputs: &Tensor, slice: &Slice, grads: QkvGrads) -> Result<()> {
        let (ranks, dim) = (slice.ranks(), self.head_dim);
        let heads = dinputs.size()[1];
        let received = slice.peers.all_to_all(&dinputs.f_view([ranks, slice.rows(), heads, dim])?)?;
        let QkvGrads { dq, dk, dv } = grads;
        let (own, own_kv) = (self.own_heads(slice), self.own_kv_heads(slice));
        for (to, first, count) in [(dq, 0, own), (dk, own, own_kv), (dv, own + own_kv, own_kv)] {
            let of_ranks = received.f_narrow(2, first, count)?;
            let (n, heads) = (to.size()[0], to.size()[1]);
            let by_head = match heads % ranks {
                0 => of_ranks,
                _ => {
                    let sharing = ranks / heads;
                    sum_in_order(&of_ranks.f_view([heads, sharing, n, 1, dim])?, 1)?
                }
            };
            let by_row = by_head.f_transpose(0, 1)?;
            to.f_view(by_row.size().as_slice())?.f_copy_(&by_row)?;
        }
        Ok(())
    }
}

/// Returns the sum over `dim`, in its order and in fp32.
pub(super) fn sum_in_order(parts: &Tensor, dim: i64) -> Result<Tensor> {
    let mut sum = parts.f_select(dim, 0)?.f_to_dtype(Kind::Float, false, true)?;
    for part in 1..parts.size()[dim as usize] {
        drop(sum.f_add_(&parts.f_select(dim, part)?)?);
    }
    Ok(sum)
}

/// Sends the output of this rank's heads for all rows, `[N, h D]`, to the ranks of the rows. Returns that of all heads for
/// this rank's rows: `[n, H D]`.
fn to_rows(out: &Tensor, slice: &Slice) -> Result<Tensor> {
    let (ranks, width) = (slice.ranks(), out.size()[1]);
    let sent = padded(out, slice.rows() * ranks)?.f_view([ranks, slice.rows(), width])?;
    let received = slice.peers.all_to_all(&sent)?;
    Ok(received.f_transpose(0, 1)?.f_reshape([slice.rows(), ranks * width])?)
}

/// The reverse of [`to_rows`], for two tensors at once.
fn to_own(of_rows: [&Tensor; 2], slice: &Slice, rows: i64) -> Result<[Tensor; 2]> {
    let ranks = slice.ranks();
    let (n, width) = (of_rows[0].size()[0], of_rows[0].size()[1] / ranks);
    let [first, second] = of_rows.map(|x| x.f_view([n, ranks, width]).and_then(|x| x.f_transpose(0, 1)));
    let received = slice.peers.all_to_all(&Tensor::f_cat(&[first?, second?], 2)?)?;
    let all = received.f_flatten(0, 1)?.f_narrow(0, 0, rows)?;
    Ok([all.f_narrow(1, 0, width)?.f_contiguous()?, all.f_narrow(1, width, width)?.f_contiguous()?])
}
