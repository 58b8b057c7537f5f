//! Attention by kernels of ours ([`crate::kernels::attention`]): 16 bits, heads of 64 or 128, on NVIDIA's compute capability 9.0. They
//! repeat themselves to the bit, take sequences of any lengths and windows, and read rows that sequences have in common where
//! they lie (docs/results/training.md has all in figures).

use std::{cmp::Reverse, ptr};

use tch::{Kind, Tensor};

use super::check::Args;
use super::{AttentionOptions, AttentionOutput, Causal, Packing, Qkv, QkvGrads, Result, upload};
use crate::Device;
use crate::kernels::{
    self, Heads, Narrow,
    attention::{Backward, Forward, TILE, Tiles},
};

/// Layout of sequences as the kernels take it, int32 on the device.
#[derive(Debug)]
pub(super) struct Layout {
    /// `[B + 1]`: where the tokens of each begin and those of the last one end.
    offsets: Tensor,
    /// `[B + 1]`: the same of its queries, if not all tokens are.
    queries: Option<Tensor>,
    /// `[N]`: the row of each token, if that is not its number.
    rows: Option<Tensor>,
    /// `[tiles, 2]`, with the longest work first.
    tiles_of_queries: Tensor,
    tiles_of_keys: Tensor,
}

impl Layout {
    /// `queries` and `rows` may be empty.
    pub fn new(offsets: &[i64], queries: &[i64], rows: &[i64], device: tch::Device) -> Result<Layout> {
        let (mut of_queries, mut of_keys) = (Vec::new(), Vec::new());
        for (sequence, ends) in offsets.windows(2).enumerate() {
            let len = ends[1] - ends[0];
            let common = queries.get(sequence..sequence + 2).map_or(0, |ends| len - (ends[1] - ends[0]));
            let tiles =
                |from: i64| (from..len).step_by(TILE as usize).map(move |first| [sequence as i64, first]);
            of_queries.extend(tiles(common));
            of_keys.extend(tiles(0).map(|tile| (len - tile[1].max(common), tile)));
        }
        of_queries.sort_by_key(|&[_, first]| Reverse(first));
        of_keys.sort_by_key(|&(queries, _)| Reverse(queries));
        let of_keys: Vec<[i64; 2]> = of_keys.into_iter().map(|(_, tile)| tile).collect();

        let parts = [offsets, queries, rows, of_queries.as_flattened(), of_keys.as_flattened()];
        let sizes = parts.map(|part| part.len() as i64);
        let all = upload(&parts.concat(), device)?.f_to_kind(Kind::Int)?;
        let all: [Tensor; 5] = all.f_split_with_sizes(sizes, 0)?.try_into().expect("as many as sizes");
        let [offsets, queries, rows, tiles_of_queries, tiles_of_keys] = all;
        let if_any = |part: Tensor| (part.numel() > 0).then_some(part);
        let (queries, rows) = (if_any(queries), if_any(rows));
        Ok(Layout { offsets, queries, rows, tiles_of_queries, tiles_of_keys })
    }

    fn queries(&self) -> Tiles {
        tiles(&self.tiles_of_queries)
    }

    fn keys(&self) -> Tiles {
        tiles(&self.tiles_of_keys)
    }
}

fn tiles(places: &Tensor) -> Tiles {
    Tiles { places: places.data_ptr(), count: places.numel() as i64 / 2 }
}

/// See [`super::attention()`]; `None` where the kernels do not take these tensors.
pub(super) fn attention(
    device: &dyn Device,
    qkv: Qkv,
    packing: &Packing,
    causal: Causal,
) -> Result<Option<(Tensor, Tensor)>> {
    let args = Args::new("attention", qkv.q);
    let Some(narrow) = takes(args, device, qkv.q, causal)? else { return Ok(None) };
    attend(args, (device, narrow), qkv, (packing.layout()?, packing.rows()), causal)
}

/// See [`super::attention_with_history`]; `None` where the kernels do not take these tensors.
pub(super) fn attention_with_history(
    device: &dyn Device,
    qkv @ Qkv { q, k, .. }: Qkv,
    causal: Causal,
) -> Result<Option<Tensor>> {
    let args = Args::new("attention_with_history", q);
    let Some(narrow) = takes(args, device, q, causal)? else { return Ok(None) };
    let ([rows, ..], [tokens, ..]) = (args.dims::<3>("q", q)?, args.dims::<3>("k", k)?);
    let layout = Layout::new(&[0, tokens], &[0, rows], &[], q.device())?;
    let done = attend(args, (device, narrow), qkv, (&layout, tokens), causal)?;
    Ok(done.map(|(out, _)| out))
}

/// The float of queries like `q`, if there are kernels for them.
fn takes(args: Args, device: &dyn Device, q: &Tensor, causal: Causal) -> Result<Option<Narrow>> {
    let [_, _, dim] = args.dims("q", q)?;
    let exist = |&narrow: &Narrow| kernels::attention::exist_on(device, narrow, dim);
    Ok(args.narrow().filter(|_| causal.scale > 0.0).filter(exist))
}

/// Attention of the layout's queries over `rows` rows of keys and values.
fn attend(
    args: Args,
    (device, narrow): (&dyn Device, Narrow),
    Qkv { q, k, v }: Qkv,
    (layout, rows): (&Layout, i64),
    causal: Causal,
) -> Result<Option<(Tensor, Tensor)>> {
    let [queries, heads, dim] = args.dims("q", q)?;
    let (out, lse) = (args.empty(&[queries, heads * dim])?, args.empty_floats(&[queries, heads])?);
    let of = forward(args, [q, k, v, &out], (&lse, rows), layout, causal)?;
    if !of.fits() {
        return Ok(None);
    }
    // SAFETY: the sizes of all tensors were checked or made here; a layout's offsets rise from 0 to the number of tokens, its
    // rows are below `rows` and its tiles are of queries that there are; libtorch takes memory back in the order of its stream.
    args.launched(unsafe { kernels::attention::forward(device, narrow, of, dim, layout.queries()) })?;
    Ok(Some((out, lse)))
}

/// Writes the gradients and says so, if the kernels take these tensors: see [`super::attention_backward`]. Those of keys and
/// values have a row for each token.
pub(super) fn attention_backward(
    device: &dyn Device,
    dout: &Tensor,
    Qkv { q, k, v }: Qkv,
    AttentionOutput { out, lse }: AttentionOutput,
    AttentionOptions { packing, causal, .. }: AttentionOptions,
    QkvGrads { dq, dk, dv }: QkvGrads,
) -> Result<bool> {
    let args = Args::new("attention_backward", q);
    let Some(narrow) = takes(args, device, q, causal)? else { return Ok(false) };
    let (of_queries @ [rows, heads, dim], [_, kv_heads, _]) = (args.dims("q", q)?, args.dims("k", k)?);
    let (layout, of_tokens) = (packing.layout()?, [packing.tokens(), kv_heads, dim]);
    let stats = args.empty_floats(&[2, heads, rows])?;
    let backward = Backward {
        forward: forward(args, [q, k, v, out], (lse, packing.rows()), layout, causal)?,
        dout: dense(args, "dout", dout, of_queries)?,
        dq: args.heads("dq", dq, of_queries)?,
        dk: args.heads("dk", dk, of_tokens)?,
        dv: args.heads("dv", dv, of_tokens)?,
        stats: stats.data_ptr().cast(),
        rows,
    };
    if !backward.fits() {
        return Ok(false);
    }
    let tiles = [layout.queries(), layout.keys()];
    // SAFETY: as in `attend`; what is written is borrowed mutably, or was made here.
    args.launched(unsafe { kernels::attention::backward(device, narrow, backward, dim, tiles) })?;
    Ok(true)
}

/// Forward's tensors as the kernels take them, if keys and values have `rows` rows.
fn forward(
    args: Args,
    [q, k, v, out]: [&Tensor; 4],
    (lse, rows): (&Tensor, i64),
    layout: &Layout,
    causal: Causal,
) -> Result<Forward> {
    let (of_queries @ [queries, heads, dim], [_, kv_heads, _]) = (args.dims("q", q)?, args.dims("k", k)?);
    let (lse, lse_strides) = args.float_matrix("lse", lse, [queries, heads])?;
    let address = |tensor: &Option<Tensor>| tensor.as_ref().map_or(ptr::null_mut(), Tensor::data_ptr);
    Ok(Forward {
        q: args.heads("q", q, of_queries)?,
        k: args.heads("k", k, [rows, kv_heads, dim])?,
        v: args.heads("v", v, [rows, kv_heads, dim])?,
        out: dense(args, "out", out, of_queries)?,
        lse,
        lse_strides,
        offsets: layout.offsets.data_ptr(),
        queries: address(&layout.queries),
        rows: address(&layout.rows),
        tiles: ptr::null_mut(),
        heads: heads as i32,
        kv_heads: kv_heads as i32,
        window: causal.window.and_then(|window| i32::try_from(window).ok()).unwrap_or(i32::MAX),
        scale: causal.scale as f32,
    })
}

/// A dense `[N, H D]` as heads.
fn dense(args: Args, argument: &'static str, tensor: &Tensor, [rows, heads, dim]: [i64; 3]) -> Result<Heads> {
    Ok(Heads { data: args.values(argument, tensor, &[rows, heads * dim])?, stride: heads * dim })
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;

    use super::super::tests::{PLACES, random, tolerance};
    use super::*;
    use crate::ops::{attention_backward, attention_with_history, composite};

    const WINDOWS: [Option<i64>; 4] = [None, Some(1), Some(100), Some(129)];

    fn causal(dim: i64, window: Option<i64>) -> Causal {
        Causal { scale: (dim as f64).powf(-0.5), window }
    }

    fn wide(tensors: [&Tensor; 3]) -> [Tensor; 3] {
        tensors.map(|tensor| tensor.to_kind(Kind::Float))
    }

    /// Shared rows, in the kernels and as copies, against the plain formula over all tokens in fp32.
    #[test]
    fn rows_in_common_are_seen_where_they_lie() {
        // The second sequence begins as the first, the third as the second and behind it; the fourth is the third; the last one
        // has nothing in common.
        let rows: Vec<i64> =
            [0..200, 0..150, 200..330, 0..150, 200..205, 330..600, 0..150, 200..205, 330..600, 600..670]
                .into_iter()
                .flatten()
                .collect();
        let lengths = [200, 280, 425, 425, 70];
        for &at in PLACES.iter() {
            let packing = Packing::sharing(&lengths, &rows, at.1).unwrap();
            let apart = Packing::new(&lengths, at.1).unwrap();
            assert_eq!([packing.tokens(), packing.rows(), apart.rows()], [1400, 670, 1400]);
            let of = Tensor::from_slice(&rows).to_device(at.1);
            let first: Vec<i64> =
                (0..670).map(|row| rows.iter().position(|&of| of == row).unwrap() as i64).collect();
            let first = Tensor::from_slice(&first).to_device(at.1);
            for ((heads, kv_heads, dim), window) in
                [(6, 2, 128), (3, 3, 64)].into_iter().flat_map(|heads| WINDOWS.map(|window| (heads, window)))
            {
                let causal = causal(dim, window);
                let qkv = [heads, kv_heads, kv_heads].map(|heads| random(&[670, heads, dim], at));
                let [q, k, v] = &qkv;
                let dout = random(&[670, heads * dim], at);
                let run = || {
                    let (out, lse) = super::super::attention(q, k, v, &packing, causal).unwrap();
                    let [mut dq, mut dk, mut dv] = qkv.each_ref().map(|rows| rows.full_like(f64::NAN));
                    let (qkv, output) = (Qkv { q, k, v }, AttentionOutput { out: &out, lse: &lse });
                    let options = AttentionOptions { packing: &packing, causal, deterministic: true };
                    let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
                    attention_backward(&dout, qkv, output, options, grads).unwrap();
                    [out, lse, dq, dk, dv]
                };
                let found = run();

                let [q, k, v] = wide([q, k, v]).map(|rows| rows.index_select(0, &of));
                let (out, lse) = composite::attention(&q, &k, &v, &apart, causal).unwrap();
                let of_first = Tensor::zeros([1400, heads * dim], (Kind::Float, at.1)).index_copy(
                    0,
                    &first,
                    &dout.to_kind(Kind::Float),
                );
                let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(Tensor::zeros_like);
                let qkv = Qkv { q: &q, k: &k, v: &v };
                let output = AttentionOutput { out: &out, lse: &lse };
                let options = AttentionOptions { packing: &apart, causal, deterministic: true };
                let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
                composite::attention_backward(&of_first, qkv, output, options, grads).unwrap();
                let sum = |copies: Tensor| copies.narrow(0, 0, 670).zeros_like().index_add(0, &of, &copies);
                let [out, lse] = [out, lse].map(|copies| copies.index_select(0, &first));
                let expected = [out, lse, sum(dq), sum(dk), sum(dv)];
                for ((name, found), (expected, again)) in
                    ["out", "lse", "dq", "dk", "dv"].iter().zip(&found).zip(expected.iter().zip(run()))
                {
                    let what = format!("{name}, {heads} heads, {kv_heads} of {dim}, {window:?}, {at:?}");
                    assert_close(&what, found, expected, tolerance(at.0, 4.0));
                    assert!(found.equal(&again), "{what}: other bits");
                }
            }
        }
    }

    /// A sequence in pieces, on a GPU in 16 bits, against the plain formula in fp32.
    #[test]
    fn a_piece_sees_what_is_before_it() {
        for &at in PLACES.iter().filter(|place| Narrow::of(place.0).is_some()) {
            for ((heads, kv_heads, dim), window) in
                [(6, 2, 128), (3, 3, 64)].into_iter().flat_map(|heads| WINDOWS.map(|window| (heads, window)))
            {
                let causal = causal(dim, window);
                let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| random(&[700, heads, dim], at));
                for (start, rows) in [(0, 700), (0, 1), (128, 128), (300, 400), (699, 1), (1, 257)] {
                    let ([q], [k, v]) = (
                        [&q].map(|q| q.narrow(0, start, rows)),
                        [&k, &v].map(|all| all.narrow(0, 0, start + rows)),
                    );
                    let found = attention_with_history(&q, &k, &v, causal).unwrap();
                    let [q, k, v] = wide([&q, &k, &v]);
                    let expected = composite::attention_with_history(&q, &k, &v, causal).unwrap();
                    let what = format!("{rows} from {start}, {kv_heads} heads of {dim}, {window:?}, {at:?}");
                    assert_close(&what, &found, &expected, tolerance(at.0, 4.0));
                }
            }
        }
    }
}
