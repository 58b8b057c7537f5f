//! Packing: sequences of unequal length in one batch without padding.

use std::{cell::OnceCell, ops::Range};

use tch::{Device, Kind, Tensor};

use super::copies::Copies;
use super::tiled::Layout;
use super::{Error, Result};
use crate::{device::opened, ffi, kernels::rows::ceil_div};

/// Sequences back to back: sequence `b` is the tokens `offsets[b] .. offsets[b + 1]` of a batch. Each token has a row, its own
/// one unless sequences have tokens in common.
///
/// The last tokens of each sequence are queries: those whose rows no earlier sequence has, or fewer
/// ([`Self::of_queries`]). All tokens are keys.
///
/// Kernels index with these numbers unchecked, so they are made here from lengths and cannot be changed.
#[derive(Debug)]
pub struct Packing {
    offsets: Vec<i64>,
    sharing: Option<Sharing>,
    queries: Option<Queries>,
    offsets_int32: Tensor,
    positions: Tensor,
    max_len: i64,
    pages: OnceCell<Pages>,
    layout: OnceCell<Layout>,
}

/// Tokens that have the rows of others.
#[derive(Debug)]
struct Sharing {
    /// Copies of rows, one for each token.
    copies: Copies,
    /// The row of each token.
    rows: Vec<i64>,
}

/// The tokens that are queries, if there are others.
#[derive(Debug)]
struct Queries {
    /// The first query of each sequence, and the number of all.
    offsets: Vec<i64>,
    offsets_int32: Tensor,
    /// The place of each query in its sequence: int64 `[Q]`.
    positions: Tensor,
    /// Most queries of a sequence.
    longest: i64,
}

/// Places of a packing's tokens in a cache of blocks.
#[derive(Debug)]
pub(super) struct Pages {
    /// int32 `[Q, W]`: the blocks of each query's sequence.
    pub tables: Tensor,
    /// int64 `[N]`: each token's place in the cache.
    pub places: Tensor,
    pub blocks: i64,
}

impl Packing {
    /// Packs sequences of these lengths; a length may be 0. The tensors go to `device`.
    ///
    /// # Errors
    /// A negative length, or libtorch's error.
    pub fn new(lengths: &[i64], device: Device) -> Result<Packing> {
        if let Some(length) = lengths.iter().find(|&&length| length < 0) {
            let problem = format!("holds {length}");
            return Err(Error::Argument { op: "packing", argument: "lengths", problem });
        }
        let offsets = offsets_of(lengths.iter().copied());
        let positions: Vec<i64> = lengths.iter().flat_map(|&length| 0..length).collect();
        Ok(Packing {
            offsets_int32: upload(&offsets, device)?.f_to_kind(Kind::Int)?,
            positions: upload(&positions, device)?,
            max_len: lengths.iter().copied().max().unwrap_or(0),
            offsets,
            sharing: None,
            queries: None,
            pages: OnceCell::new(),
            layout: OnceCell::new(),
        })
    }

    /// The same for sequences that may share their first tokens with earlier ones. `rows` has the row of each token, numbered by
    /// first use.
    ///
    /// # Errors
    /// The same as [`Self::new`]; also if the numbers of rows and tokens differ, rows are not numbered by first use, or a
    /// sequence's rows do not rise.
    pub fn sharing(lengths: &[i64], rows: &[i64], device: Device) -> Result<Packing> {
        let packing = Packing::new(lengths, device)?;
        let refuse = |problem: String| Error::Argument { op: "packing", argument: "rows", problem };
        if rows.len() as i64 != packing.tokens() {
            return Err(refuse(format!("are {}, of {} tokens", rows.len(), packing.tokens())));
        }
        let (mut queries, mut next) = (vec![0], 0);
        for (sequence, ends) in packing.offsets.windows(2).enumerate() {
            let of_sequence = &rows[ends[0] as usize..ends[1] as usize];
            if let Some(pair) = of_sequence.windows(2).find(|pair| pair[0] >= pair[1]) {
                return Err(refuse(format!("hold {} behind {}, in sequence {sequence}", pair[1], pair[0])));
            }
            let shared = of_sequence.iter().take_while(|&&row| row < next).count();
            for &row in &of_sequence[shared..] {
                if row != next {
                    return Err(refuse(format!("hold {row} where at most {next} can come up")));
                }
                next += 1;
            }
            queries.push(next);
        }
        packing.of(rows.to_vec(), next, queries)
    }

    /// The packing whose queries are these pieces of this one's rows, one behind the other, and those rows of keys that they
    /// see. Each row is a query here. Rows of the new packing's keys are numbered from the first of these.
    ///
    /// # Errors
    /// libtorch's error.
    pub fn of_queries(&self, pieces: &[Range<i64>]) -> Result<(Packing, Range<i64>)> {
        let (mut lengths, mut queries, mut of) = (Vec::new(), vec![0], Vec::new());
        for piece in pieces {
            for (ends, own) in self.offsets.windows(2).zip(self.query_offsets().windows(2)) {
                let count = own[1].min(piece.end) - own[0].max(piece.start);
                if count > 0 {
                    let tokens = ends[0]..ends[1] - (own[1] - own[1].min(piece.end));
                    lengths.push(tokens.end - tokens.start);
                    queries.push(queries[queries.len() - 1] + count);
                    match self.shared_rows() {
                        Some(rows) => of.extend_from_slice(&rows[tokens.start as usize..tokens.end as usize]),
                        None => of.extend(tokens),
                    }
                }
            }
        }
        let start = of.iter().copied().min().unwrap_or(0);
        let keys = start..of.iter().map(|row| row + 1).max().unwrap_or(start);
        of.iter_mut().for_each(|row| *row -= start);
        let packing = Packing::new(&lengths, self.positions.device())?;
        Ok((packing.of(of, keys.end - keys.start, queries)?, keys))
    }

    /// Gives each token one of `count` rows, and each sequence the queries between two of these offsets.
    fn of(self, rows: Vec<i64>, count: i64, offsets: Vec<i64>) -> Result<Packing> {
        let device = self.positions.device();
        let has_own = (0..count).eq(rows.iter().copied());
        let sharing = match has_own {
            true => None,
            false => Some(Sharing { copies: Copies::new(&rows, count, device)?, rows }),
        };
        if offsets == self.offsets {
            return Ok(Packing { sharing, ..self });
        }
        let ranges = || {
            let lengths = self.offsets.windows(2).map(|ends| ends[1] - ends[0]);
            lengths.zip(offsets.windows(2)).map(|(length, own)| length - (own[1] - own[0])..length)
        };
        let positions: Vec<i64> = ranges().flatten().collect();
        let queries = Some(Queries {
            offsets_int32: upload(&offsets, device)?.f_to_kind(Kind::Int)?,
            positions: upload(&positions, device)?,
            longest: ranges().map(|range| range.end - range.start).max().unwrap_or(0),
            offsets,
        });
        Ok(Packing { sharing, queries, ..self })
    }

    /// The number of sequences B.
    pub fn sequences(&self) -> i64 {
        self.offsets.len() as i64 - 1
    }

    /// The number of tokens of all sequences.
    pub fn tokens(&self) -> i64 {
        self.offsets[self.offsets.len() - 1]
    }

    /// The number of rows N of keys, which is smaller where sequences have tokens in common.
    pub fn rows(&self) -> i64 {
        self.copies().map_or_else(|| self.tokens(), Copies::rows)
    }

    /// The number of queries Q: as many as rows, unless they are [some of these](Self::of_queries).
    pub fn queries(&self) -> i64 {
        let offsets = self.query_offsets();
        offsets[offsets.len() - 1]
    }

    /// The row of each token, if there are fewer rows than tokens.
    pub fn shared_rows(&self) -> Option<&[i64]> {
        self.sharing.as_ref().map(|sharing| sharing.rows.as_slice())
    }

    /// The rows' copies in the order of the tokens, if there are fewer rows.
    pub(super) fn copies(&self) -> Option<&Copies> {
        self.sharing.as_ref().map(|sharing| &sharing.copies)
    }

    /// Keys and values of each token, `[tokens, K, D]`, from those of the rows, for what knows of no row in common.
    pub(super) fn spread(&self, keys_and_values: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        let [k, v] = keys_and_values.map(|rows| match self.copies() {
            Some(copies) => copies.spread(rows),
            None => Ok(rows.shallow_clone()),
        });
        Ok([k?, v?])
    }

    /// The length of the longest sequence.
    pub fn max_len(&self) -> i64 {
        self.max_len
    }

    /// The first token of each sequence, and the end of the last: B + 1 numbers.
    pub fn offsets(&self) -> &[i64] {
        &self.offsets
    }

    /// The first query of each sequence, and the end of the last: B + 1 numbers.
    pub(super) fn query_offsets(&self) -> &[i64] {
        self.queries.as_ref().map_or(&self.offsets, |queries| &queries.offsets)
    }

    /// [`Self::query_offsets`] and [`Self::offsets`] as libtorch's attention takes them: int32 `[B + 1]`, on the device.
    pub(super) fn offsets_int32(&self) -> [&Tensor; 2] {
        let of_queries = self.queries.as_ref().map_or(&self.offsets_int32, |queries| &queries.offsets_int32);
        [of_queries, &self.offsets_int32]
    }

    /// The most queries of a sequence.
    pub(super) fn most_queries(&self) -> i64 {
        self.queries.as_ref().map_or(self.max_len, |queries| queries.longest)
    }

    /// The length that all sequences have, if they do and all tokens are queries.
    pub(super) fn uniform_len(&self) -> Option<i64> {
        let is_uniform = self.queries.is_none() && self.max_len * self.sequences() == self.tokens();
        is_uniform.then_some(self.max_len)
    }

    /// Places of its tokens in blocks of `block_tokens`, the same in every call.
    pub(super) fn pages(&self, block_tokens: i64) -> Result<&Pages> {
        if self.pages.get().is_none() {
            let pages = self.lay_out(block_tokens)?;
            self.pages.set(pages).expect("nobody else is here");
        }
        Ok(self.pages.get().expect("just made"))
    }

    /// The layout that our kernels of attention take, the same in every call.
    pub(super) fn layout(&self) -> Result<&Layout> {
        if self.layout.get().is_none() {
            let rows = self.shared_rows().unwrap_or_default();
            let queries = self.queries.as_ref().map_or(&[][..], |queries| &queries.offsets);
            let layout = Layout::new(&self.offsets, queries, rows, self.positions.device())?;
            self.layout.set(layout).expect("nobody else is here");
        }
        Ok(self.layout.get().expect("just made"))
    }

    fn lay_out(&self, block_tokens: i64) -> Result<Pages> {
        let table_len = ceil_div(self.max_len, block_tokens).max(1);
        let (mut tables, mut sequences, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut blocks = 0;
        for (sequence, ends) in self.offsets.windows(2).enumerate() {
            let length = ends[1] - ends[0];
            // Those behind the sequence's own are not read.
            tables.extend((0..table_len).map(|index| blocks + index));
            let queries = &self.query_offsets()[sequence..];
            sequences.extend((queries[0]..queries[1]).map(|_| sequence as i64));
            places.extend((0..length).map(|token| blocks * block_tokens + token));
            blocks += ceil_div(length, block_tokens);
        }
        let device = self.positions.device();
        let of_sequences = upload(&tables, device)?.f_to_kind(Kind::Int)?.f_view([-1, table_len])?;
        Ok(Pages {
            tables: of_sequences.f_index_select(0, &upload(&sequences, device)?)?,
            places: upload(&places, device)?,
            blocks,
        })
    }

    /// The place of each query in its sequence, from 0, on the device: int64 `[Q]`.
    pub fn positions(&self) -> &Tensor {
        self.queries.as_ref().map_or(&self.positions, |queries| &queries.positions)
    }

    /// The place of each token in its sequence.
    pub(super) fn positions_of_tokens(&self) -> &Tensor {
        &self.positions
    }
}

/// The begins of ranges of these lengths, one behind the other, and the end of the last.
fn offsets_of(lengths: impl Iterator<Item = i64>) -> Vec<i64> {
    let ends = lengths.scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Copies values to a device, in the order of its stream. The host does not wait, unless libtorch has no page-locked memory for
/// this device.
///
/// # Errors
/// libtorch's error.
pub fn upload<T: tch::kind::Element>(values: &[T], device: Device) -> Result<Tensor> {
    let host = Tensor::f_from_slice(values)?;
    if device == Device::Cpu {
        return Ok(host);
    }
    // An accelerator that nobody has opened, as in a test of libtorch's own.
    let Some(at) = opened::torch_device(device) else { return Ok(host.f_to_device(device)?) };
    // SAFETY: a live tensor; the shim makes another and gives it away.
    let uploaded =
        unsafe { ffi::own_tensor(ffi::anyroll_tensor_upload(ffi::tensor_ptr(&host), at.kind, at.index)) };
    uploaded.map_err(|error| Error::Kernel { op: "upload", message: error.to_string() })
}

/// Returns a tensor on `device`; the same one if it is there already.
///
/// # Errors
/// libtorch's error.
pub fn moved(tensor: &Tensor, device: Device) -> Result<Tensor, tch::TchError> {
    if tensor.device() == device {
        return Ok(tensor.shallow_clone());
    }
    let mut there = Tensor::f_empty(tensor.size(), (tensor.kind(), device))?;
    copy_across(&mut there, tensor)?;
    Ok(there)
}

/// Copies a tensor into one of libtorch's own memory, on any device. A copy between two devices goes through libtorch's own
/// memory, which both can read: other memory may be private to its device.
///
/// # Errors
/// libtorch's error.
pub fn copy_across(to: &mut Tensor, from: &Tensor) -> Result<(), tch::TchError> {
    let (there, here) = (to.device(), from.device());
    if here == there || [here, there].contains(&Device::Cpu) {
        return to.f_copy_(from);
    }
    let mut own = from.f_empty_like()?;
    own.f_copy_(from)?;
    to.f_copy_(&own)
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;

    use super::super::tests::{PLACES, autograd_of, random, tolerance};
    use super::super::{
        AttentionOptions, AttentionOutput, Causal, Qkv, QkvGrads, attention, attention_backward,
    };
    use super::*;

    /// Sequences of tokens that have rows, and those that have rows of their own alone.
    fn sequences() -> [Vec<Vec<i64>>; 2] {
        let apart = [13, 0, 1, 150, 2, 300].iter().scan(0, |end, length| {
            *end += length;
            Some((*end - length..*end).collect())
        });
        // The second begins as the first, the third as the second and behind it; the fourth is the third.
        let third: Vec<i64> = [0..150, 200..205, 330..420].into_iter().flatten().collect();
        let shared = [(0..200).collect(), (0..150).chain(200..330).collect(), third.clone(), third];
        [apart.collect(), shared.into_iter().chain([(420..466).collect()]).collect()]
    }

    /// Keys that each row sees, as ones: fp32 `[N, N]`.
    fn seen(sequences: &[Vec<i64>], rows: i64, window: i64) -> Tensor {
        let mut seen = vec![0f32; (rows * rows) as usize];
        for sequence in sequences {
            for (at, query) in sequence.iter().enumerate() {
                let from = (at as i64 + 1 - window).max(0) as usize;
                sequence[from..=at].iter().for_each(|key| seen[(query * rows + key) as usize] = 1.0);
            }
        }
        Tensor::from_slice(&seen).view([rows, rows])
    }

    /// Outputs and gradients for some rows' queries, against libtorch's autograd of the formula with an explicit mask.
    #[test]
    fn some_rows_see_what_is_before_them() {
        let heads = [(2, 1, 128), (3, 3, 64), (3, 1, 24)];
        for (&at, sequences) in PLACES.iter().flat_map(|at| sequences().map(|of| (at, of))) {
            let lengths: Vec<i64> = sequences.iter().map(|sequence| sequence.len() as i64).collect();
            let whole = Packing::sharing(&lengths, &sequences.concat(), at.1).unwrap();
            let rows = whole.rows();
            // Pieces of rows: one, or a first and a last one.
            let all = [0..rows, 160..320, rows - 1..rows, rows..rows];
            let mut parts: Vec<Vec<Range<i64>>> = all.into_iter().map(|piece| vec![piece]).collect();
            parts.extend([vec![0..100, rows - 100..rows], vec![100..170, 290..360]]);
            for (part, (heads, kv_heads, dim)) in
                parts.iter().flat_map(|part| heads.map(|heads| (part, heads)))
            {
                let (packing, keys) = whole.of_queries(part).unwrap();
                let own: Vec<i64> = part.iter().cloned().flatten().collect();
                let (count, own) = (own.len() as i64, Tensor::from_slice(&own).to_device(at.1));
                assert_eq!([packing.queries(), packing.rows()], [count, keys.end - keys.start]);
                let qkv = [(rows, heads), (rows, kv_heads), (rows, kv_heads)]
                    .map(|(rows, heads)| random(&[rows, heads, dim], at));
                let dout = random(&[count, heads * dim], at);
                for window in [None, Some(100)] {
                    let causal = Causal { scale: (dim as f64).powf(-0.5), window };
                    let seen_of = |rows: &Tensor| rows.narrow(0, keys.start, keys.end - keys.start);
                    let q = qkv[0].index_select(0, &own);
                    let [k, v] = [1, 2].map(|of| seen_of(&qkv[of]));
                    let (out, lse) = attention(&q, &k, &v, &packing, causal).unwrap();
                    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|rows| rows.full_like(f64::NAN));
                    let (of_qkv, output) =
                        (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse: &lse });
                    let options = AttentionOptions { packing: &packing, causal, deterministic: true };
                    let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
                    attention_backward(&dout, of_qkv, output, options, grads).unwrap();

                    let leaves =
                        qkv.each_ref().map(|of| of.to_kind(Kind::Float).detach().set_requires_grad(true));
                    let unseen = seen(&sequences, rows, window.unwrap_or(rows)).eq(0.0).to_device(at.1);
                    let [q, k, v] = [&leaves[0], &leaves[1], &leaves[2]].map(|of| of.transpose(0, 1));
                    let group = heads / kv_heads;
                    let [k, v] = [k, v].map(|of| of.repeat_interleave_self_int(group, 0, None));
                    let scores = (q.matmul(&k.transpose(1, 2)) * causal.scale)
                        .masked_fill(&unseen, f64::NEG_INFINITY)
                        .index_select(1, &own);
                    let expected = scores.softmax(-1, None).matmul(&v).transpose(0, 1).flatten(1, 2);
                    let loss = (&expected * dout.to_kind(Kind::Float)).sum(None);
                    let gradients = autograd_of(&loss, &leaves);
                    let of_lse = scores.logsumexp([-1i64].as_slice(), false).transpose(0, 1);
                    let what = format!("{part:?}, {heads} heads, {kv_heads} of {dim}, {window:?}, {at:?}");
                    for (name, found, expected) in [
                        ("out", out, expected),
                        ("lse", lse, of_lse),
                        ("dq", dq, gradients[0].index_select(0, &own)),
                        ("dk", dk, seen_of(&gradients[1])),
                        ("dv", dv, seen_of(&gradients[2])),
                    ] {
                        let (expected, most) = (expected.detach(), tolerance(at.0, 4.0));
                        assert_close(&format!("{name}, {what}"), &found, &expected, most);
                    }
                    let beside = gradients[1].abs().sum(None) - seen_of(&gradients[1]).abs().sum(None);
                    assert!(beside.double_value(&[]).abs() < 1e-2, "{what}: keys beside those that are seen");
                }
            }
        }
    }
}
