//! Input of a decoder in training: sequences of unequal length, packed without padding.

mod cut;
pub(crate) mod padding;

use std::ops::Range;

use anyroll_backends::ops::{Divergence, Packing, upload};
use tch::{Device, Tensor};

use crate::router::RouterWatch;
use crate::slice::{Slice, Turn};
use crate::{Error, Result, RouteShape, Routes};
use padding::{Counted, Padding, repeat_last};

/// A prompt and its completion.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Prompt tokens, then completion tokens.
    pub tokens: &'a [i64],
    /// Number of prompt tokens: at least 1, at most all tokens. A sequence without a completion has no
    /// target, and so no gradient.
    pub prompt_len: usize,
}

impl Sequence<'_> {
    /// Returns all tokens but the last.
    fn inputs(&self) -> &[i64] {
        &self.tokens[..self.tokens.len() - 1]
    }
}

/// Lists the indices of targets that lie in the given ranges of their sequence's tokens, such as answers
/// between other messages. Ranges are ascending and lie after the prompt. [`PackedBatch::keeping`] takes
/// these indices.
pub fn targets_in<'a>(sequences: impl IntoIterator<Item = (Sequence<'a>, &'a [Range<usize>])>) -> Vec<i64> {
    let (mut kept, mut before) = (Vec::new(), 0);
    for (Sequence { tokens, prompt_len }, ranges) in sequences {
        let target = |token: usize| (before + token - prompt_len) as i64;
        kept.extend(ranges.iter().flat_map(|range| range.clone().map(target)));
        before += tokens.len() - prompt_len;
    }
    kept
}

/// A teacher's output for a batch's targets, on the batch's device. Its logits are `rows` times `lm_head`.
#[derive(Debug)]
pub struct Teacher {
    /// Input of the teacher's head for each target, as [`crate::HiddenModel`] computes it: `[M, D]`.
    pub rows: Tensor,
    /// Matrix of the teacher's head, `[W, D]` in the dtype of `rows`. W may differ from the student's
    /// vocabulary size.
    pub lm_head: Tensor,
    /// Divergence between teacher and student.
    pub divergence: Divergence,
}

/// Sequences packed one after the other, on a device. The targets are the completion tokens, in the order of
/// the sequences.
///
/// A sequence's last token predicts no known token, so it is a target but not an input: a sequence of T
/// tokens takes T - 1 rows. Rows of a prefix shared with the previous sequence may be that sequence's rows.
///
/// Off the host, rows and targets have padding behind them, which no number of this type counts.
#[derive(Debug)]
pub struct PackedBatch {
    /// Input tokens: int64 `[N]`, with padding.
    pub(crate) tokens: Tensor,
    pub(crate) packing: Packing,
    /// The row whose output predicts each target: int64 `[M]`, with padding.
    pub(crate) target_rows: Tensor,
    /// The target tokens: int64 `[M]`, with padding.
    pub(crate) targets: Tensor,
    /// Numbers without padding.
    counted: Counted,
    padding: Padding,
    /// Smallest and largest token, including targets; `None` if there are no tokens.
    pub(crate) extremes: Option<[i64; 2]>,
    /// Divisor of the logits.
    pub(crate) temperature: f64,
    /// True if a decoder's adapters are on, if it has any.
    pub(crate) adapters: bool,
    /// Keys of adapter dropout, if this is a training batch: see [`anyroll_backends::ops::Dropout::keys`].
    pub(crate) row_keys: Option<Tensor>,
    /// Experts of each row, int16 `[N, layers with experts, J]`; -1 for those of the router.
    pub(crate) routes: Option<Tensor>,
    /// Sums over the routers of mixtures.
    pub(crate) router: Option<RouterWatch>,
    /// Teacher to compare with.
    pub(crate) teacher: Option<Teacher>,
    /// Its place among the batches of several ranks, if these run them together.
    pub(crate) turn: Option<Turn>,
    /// This rank's rows, if several ranks each take some: tokens and targets are then those of the rows.
    pub(crate) slice: Option<Slice>,
}

impl PackedBatch {
    /// Packs sequences and moves them to a device.
    ///
    /// # Errors
    /// A prompt length out of range, a temperature that is not a positive number, or libtorch's error.
    pub fn new(sequences: &[Sequence], temperature: f64, device: Device) -> Result<PackedBatch> {
        PackedBatch::pack(sequences, false, temperature, (device, Padding::on(device)))
    }

    /// Like [`Self::new`], but computes a prefix shared with the previous sequence only once, such as the
    /// prompt of a group's samples. Tokens see only earlier tokens, so the results are the same up to the
    /// order of sums. If sharing saves less than it may cost attention, nothing is shared.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn sharing(sequences: &[Sequence], temperature: f64, device: Device) -> Result<PackedBatch> {
        PackedBatch::pack(sequences, true, temperature, (device, Padding::on(device)))
    }

    fn pack(
        sequences: &[Sequence],
        shares: bool,
        temperature: f64,
        (device, padding): (Device, Padding),
    ) -> Result<PackedBatch> {
        if !(temperature > 0.0 && temperature.is_finite()) {
            return Err(input("temperature", format!("{temperature} is not a positive number")));
        }
        for (index, &Sequence { tokens, prompt_len }) in sequences.iter().enumerate() {
            if prompt_len == 0 || prompt_len > tokens.len() {
                let problem = format!("is {prompt_len} in sequence {index}, must be 1 to {}", tokens.len());
                return Err(input("prompt_len", problem));
            }
        }
        let mut rows = Rows::of(sequences, shares);
        let mut target_rows = rows.of_targets(sequences);
        let mut targets: Vec<i64> =
            sequences.iter().flat_map(|it| it.tokens[it.prompt_len..].iter().copied()).collect();
        let counted = Counted {
            sequences: sequences.len() as i64,
            inputs: rows.of.len() as i64,
            tokens: rows.tokens.len() as i64,
            targets: targets.len() as i64,
        };
        rows.pad(padding);
        repeat_last(&mut target_rows, padding);
        repeat_last(&mut targets, padding);
        let tokens = || sequences.iter().flat_map(|it| it.tokens).copied();
        Ok(PackedBatch {
            extremes: tokens().min().zip(tokens().max()).map(<[i64; 2]>::from),
            tokens: upload(&rows.tokens, device)?,
            target_rows: upload(&target_rows, device)?,
            targets: upload(&targets, device)?,
            packing: Packing::sharing(&rows.lengths, &rows.of, device)?,
            counted,
            padding,
            temperature,
            adapters: true,
            row_keys: None,
            routes: None,
            router: None,
            teacher: None,
            turn: None,
            slice: None,
        })
    }

    /// Turns a decoder's adapters off for this batch: computes with the model that they are trained from.
    #[must_use]
    pub fn without_adapters(self) -> PackedBatch {
        PackedBatch { adapters: false, ..self }
    }

    /// Turns on dropout in a decoder's adapters, if they are configured with it. The dropped values of a
    /// sequence depend only on its key in `keys`.
    ///
    /// # Errors
    /// A number of keys other than of sequences, sequences with shared rows, or libtorch's error.
    pub fn with_dropout(self, keys: &[u64]) -> Result<PackedBatch> {
        if self.tokens() < self.inputs() {
            return Err(input("keys", "belong to sequences with shared rows".to_owned()));
        }
        if keys.len() as i64 != self.sequences() {
            return Err(input(
                "keys",
                format!("are {}, must be one for each of {} sequences", keys.len(), self.sequences()),
            ));
        }
        let mut rows = Vec::with_capacity(self.rows() as usize);
        for (&key, ends) in keys.iter().zip(self.packing.offsets().windows(2)) {
            rows.extend((0..ends[1] - ends[0]).map(|token| row_key(key, token as u64)));
        }
        rows.resize(self.rows() as usize, 0);
        let row_keys = Some(upload(&rows, self.tokens.device())?);
        Ok(PackedBatch { row_keys, ..self })
    }

    /// Sends the tokens of each sequence to the experts of its `routes`, of which there is one for each sequence. Tokens
    /// behind them go where the layer's router sends them. A row that sequences share goes where the first of them went.
    ///
    /// # Errors
    /// A number of routes other than of sequences, routes of another model, or libtorch's error.
    pub fn with_routes(self, routes: &[&Routes], shape: RouteShape) -> Result<PackedBatch> {
        if routes.len() as i64 != self.sequences() {
            let problem =
                format!("are {}, must be one for each of {} sequences", routes.len(), self.sequences());
            return Err(input("routes", problem));
        }
        let width = shape.choices();
        let mut rows: Vec<i16> = Vec::with_capacity(self.rows() as usize * width);
        let mut of_tokens = self.packing.shared_rows().map(<[i64]>::iter);
        for (routes, ends) in routes.iter().zip(self.packing.offsets().windows(2)) {
            let experts = routes.experts(shape)?;
            let mut given = experts.chunks_exact(width);
            for _ in ends[0]..ends[1] {
                let given = given.next();
                let made = (rows.len() / width) as i64;
                let is_shared = of_tokens.as_mut().and_then(Iterator::next).is_some_and(|&row| row < made);
                if !is_shared {
                    match given {
                        Some(given) => rows.extend(given),
                        None => rows.resize(rows.len() + width, -1),
                    }
                }
            }
        }
        rows.resize(self.rows() as usize * width, -1);
        let size = [self.rows(), shape.layers as i64, shape.per_token as i64];
        let routes = Some(upload(&rows, self.tokens.device())?.f_view(size)?);
        Ok(PackedBatch { routes, ..self })
    }

    /// Sums what the routers of a mixture do, for [`Self::router`], and adds `coef` times their balancing loss to the
    /// batch's loss; 0 adds nothing.
    #[must_use]
    pub fn watching(self, coef: f64) -> PackedBatch {
        PackedBatch { router: Some(RouterWatch::new(coef, self.tokens())), ..self }
    }

    /// Returns the sums over routers, if the batch has them.
    pub fn router(&self) -> Option<&RouterWatch> {
        self.router.as_ref()
    }

    /// Adds a teacher: a decoder's scores then include divergences.
    ///
    /// # Errors
    /// A number of rows other than of targets, or a head of another width than the rows.
    pub fn with_teacher(self, teacher: Teacher) -> Result<PackedBatch> {
        let (rows, head) = (teacher.rows.size(), teacher.lm_head.size());
        if rows.len() != 2 || rows[0] != self.targets() || head.len() != 2 || rows[1] != head[1] {
            let problem = format!("has rows {rows:?} and a head {head:?}, for {} targets", self.targets());
            return Err(input("teacher", problem));
        }
        Ok(PackedBatch { teacher: Some(teacher), ..self })
    }

    /// Keeps only some of the targets: `kept` are their indices, ascending from 0.
    ///
    /// # Errors
    /// Indices that do not rise or are out of range, or libtorch's error.
    pub fn keeping(self, kept: &[i64]) -> Result<PackedBatch> {
        let rise = kept.windows(2).all(|pair| pair[0] < pair[1]);
        let exist = kept.first().is_none_or(|&first| first >= 0)
            && kept.last().is_none_or(|&last| last < self.targets());
        if !(rise && exist) {
            return Err(input("kept", format!("must be ascending indices below {}", self.targets())));
        }
        let counted = Counted { targets: kept.len() as i64, ..self.counted };
        let mut kept = kept.to_vec();
        repeat_last(&mut kept, self.padding);
        let kept = upload(&kept, self.tokens.device())?;
        Ok(PackedBatch {
            target_rows: self.target_rows.f_index_select(0, &kept)?,
            targets: self.targets.f_index_select(0, &kept)?,
            counted,
            ..self
        })
    }

    /// Returns the number of input tokens N; shared ones count once.
    pub fn tokens(&self) -> i64 {
        self.counted.tokens
    }

    /// Returns the number of rows that blocks compute: N with padding.
    pub(crate) fn rows(&self) -> i64 {
        self.tokens.numel() as i64
    }

    /// Returns the number of rows that the head computes: M with padding.
    pub(crate) fn head_rows(&self) -> i64 {
        self.targets.numel() as i64
    }

    /// Returns the row that predicts each target, without padding: int64 `[M]`.
    pub(crate) fn own_target_rows(&self) -> Result<Tensor> {
        Ok(self.target_rows.f_narrow(0, 0, self.targets())?)
    }

    /// Returns the number of input tokens with shared ones counted for each sequence.
    pub fn inputs(&self) -> i64 {
        self.counted.inputs
    }

    /// Returns the number of targets M: the length of the head's outputs.
    pub fn targets(&self) -> i64 {
        self.counted.targets
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> i64 {
        self.counted.sequences
    }
}

/// Rows are shared if that saves at least one row in this many. Attention may need copies of shared rows,
/// which cost about 2 % of a pass.
const LEAST_SHARED: usize = 16;

/// Returns true if `rows` shared rows, of `apart` unshared ones, are worth the copies that attention may
/// need.
pub(crate) fn is_worth_sharing(rows: usize, apart: usize) -> bool {
    (apart - rows) * LEAST_SHARED >= apart
}

/// The rows of a batch.
struct Rows {
    /// The token of each row.
    tokens: Vec<i64>,
    /// The row of each input of each sequence.
    of: Vec<i64>,
    /// Number of inputs of each sequence.
    lengths: Vec<i64>,
}

impl Rows {
    /// Computes the rows of sequences. Prefixes are shared if `shares` is set and sharing is worth it.
    fn of(sequences: &[Sequence], shares: bool) -> Rows {
        let inputs: usize = sequences.iter().map(|it| it.inputs().len()).sum();
        let mut rows =
            Rows { tokens: Vec::with_capacity(inputs), of: Vec::with_capacity(inputs), lengths: Vec::new() };
        let mut before: &[i64] = &[];
        for sequence in sequences {
            let own = sequence.inputs();
            let common = if shares { own.iter().zip(before).take_while(|(a, b)| a == b).count() } else { 0 };
            let start_before = rows.of.len() - before.len();
            rows.of.extend_from_within(start_before..start_before + common);
            rows.of.extend((rows.tokens.len() as i64..).take(own.len() - common));
            rows.tokens.extend_from_slice(&own[common..]);
            rows.lengths.push(own.len() as i64);
            before = own;
        }
        let shared = rows.tokens.len();
        if shared == inputs || is_worth_sharing(shared, inputs) { rows } else { Rows::of(sequences, false) }
    }

    /// Adds sequences of padding behind all others. They are no longer than these, so that attention over them costs little.
    fn pad(&mut self, padding: Padding) {
        let longest = self.lengths.iter().copied().max().unwrap_or(0) as usize;
        let (counted, rows) = (self.tokens.len(), padding.rows(self.tokens.len()));
        self.of.extend(counted as i64..rows as i64);
        self.lengths.extend(padding::lengths(rows - counted, longest));
        self.tokens.resize(rows, padding::TOKEN);
    }

    /// Returns the row that predicts each target.
    fn of_targets(&self, sequences: &[Sequence]) -> Vec<i64> {
        let mut rows = Vec::with_capacity(self.of.len());
        let mut of = self.of.as_slice();
        for sequence in sequences {
            let (own, others) = of.split_at(sequence.inputs().len());
            rows.extend_from_slice(&own[sequence.prompt_len - 1..]);
            of = others;
        }
        rows
    }
}

/// Hashes a sequence's key and a token's position to 32 bits, by one step of SplitMix64 (Steele et al.,
/// 2014).
fn row_key(key: u64, token: u64) -> i64 {
    let mut bits = key.wrapping_add((token + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ (bits >> 31)) >> 32) as i64
}

fn input(what: &'static str, problem: String) -> Error {
    Error::Input { what, problem }
}
