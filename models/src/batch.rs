//! What a decoder reads in training: sequences of unequal length, packed without padding.

use std::ops::Range;

use anyroll_backends::ops::{Divergence, Packing, upload};
use tch::{Device, Tensor};

use crate::{Error, Result};

/// A prompt and its completion.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Prompt, then completion.
    pub tokens: &'a [i64],
    /// How many of the tokens are prompt: at least 1, at most all of them. A sequence without a completion
    /// has no target and so no gradient.
    pub prompt_len: usize,
}

impl Sequence<'_> {
    /// All tokens but the last one.
    fn inputs(&self) -> &[i64] {
        &self.tokens[..self.tokens.len() - 1]
    }
}

/// Which targets lie in some ranges of their sequence's tokens, behind its prompt and rising, as [`PackedBatch::keeping`]
/// numbers them: those of answers, say, and not of what is said between them.
pub fn targets_in<'a>(sequences: impl IntoIterator<Item = (Sequence<'a>, &'a [Range<usize>])>) -> Vec<i64> {
    let (mut kept, mut before) = (Vec::new(), 0);
    for (Sequence { tokens, prompt_len }, ranges) in sequences {
        let target = |token: usize| (before + token - prompt_len) as i64;
        kept.extend(ranges.iter().flat_map(|range| range.clone().map(target)));
        before += tokens.len() - prompt_len;
    }
    kept
}

/// What a teacher says of a batch's targets, on the batch's device: its logits would be `rows` times `lm_head`.
#[derive(Debug)]
pub struct Teacher {
    /// What its head reads to predict each target, as [`crate::HiddenModel`] has it: `[M, D]`.
    pub rows: Tensor,
    /// Its head's matrix, `[W, D]` in the dtype of `rows`; W need not be the vocabulary of the model that learns.
    pub lm_head: Tensor,
    /// What is asked of the two.
    pub divergence: Divergence,
}

/// Sequences back to back, on a device. The targets are the completion tokens, in the order of the sequences.
///
/// The last token of a sequence predicts nothing that is known, so it is a target but not an input: a
/// sequence of T tokens takes T - 1 rows; those that it has in common with the one before it may be that one's.
#[derive(Debug)]
pub struct PackedBatch {
    /// Input tokens: int64 `[N]`.
    pub(crate) tokens: Tensor,
    pub(crate) packing: Packing,
    /// The row whose output predicts each target: int64 `[M]`.
    pub(crate) target_rows: Tensor,
    /// The target tokens: int64 `[M]`.
    pub(crate) targets: Tensor,
    /// The least and the largest of all tokens, the targets among them; `None` if there are none.
    pub(crate) extremes: Option<[i64; 2]>,
    /// What the logits are divided by.
    pub(crate) temperature: f64,
    /// Whether a decoder's adapters are on, if it has any.
    pub(crate) adapters: bool,
    /// What adapters drop of their input, if this is a batch to train on: see [`anyroll_backends::ops::Dropout::keys`].
    pub(crate) row_keys: Option<Tensor>,
    /// Who is compared with.
    pub(crate) teacher: Option<Teacher>,
}

impl PackedBatch {
    /// Packs sequences and moves them to a device.
    ///
    /// # Errors
    /// A prompt length out of range, a temperature that is not a positive number, or libtorch's error.
    pub fn new(sequences: &[Sequence], temperature: f64, device: Device) -> Result<PackedBatch> {
        PackedBatch::pack(sequences, false, temperature, device)
    }

    /// The same, but for the tokens that a sequence begins with as the one before it does, such as the prompt that samples
    /// of a group have in common: they are computed once for both. No token sees those after it, so what comes out is the
    /// same, up to the order of sums. As far as that saves less than it may cost attention, it is [`Self::new`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sharing(sequences: &[Sequence], temperature: f64, device: Device) -> Result<PackedBatch> {
        PackedBatch::pack(sequences, true, temperature, device)
    }

    fn pack(sequences: &[Sequence], shares: bool, temperature: f64, device: Device) -> Result<PackedBatch> {
        if !(temperature > 0.0 && temperature.is_finite()) {
            return Err(input("temperature", format!("{temperature} is not a positive number")));
        }
        for (index, &Sequence { tokens, prompt_len }) in sequences.iter().enumerate() {
            if prompt_len == 0 || prompt_len > tokens.len() {
                let problem = format!("is {prompt_len} in sequence {index} of {} tokens", tokens.len());
                return Err(input("prompt_len", problem));
            }
        }
        let rows = Rows::of(sequences, shares);
        let packing = Packing::sharing(&rows.lengths, &rows.of, device)?;
        let targets: Vec<i64> =
            sequences.iter().flat_map(|it| it.tokens[it.prompt_len..].iter().copied()).collect();
        let tokens = || sequences.iter().flat_map(|it| it.tokens).copied();
        Ok(PackedBatch {
            extremes: tokens().min().zip(tokens().max()).map(<[i64; 2]>::from),
            tokens: upload(&rows.tokens, device)?,
            target_rows: upload(&rows.of_targets(sequences), device)?,
            targets: upload(&targets, device)?,
            packing,
            temperature,
            adapters: true,
            row_keys: None,
            teacher: None,
        })
    }

    /// The same batch for a decoder with its adapters off: for the model that they are trained from.
    #[must_use]
    pub fn without_adapters(self) -> PackedBatch {
        PackedBatch { adapters: false, ..self }
    }

    /// The same batch to train on: a decoder's adapters drop some of what they read, if they are made so. What they drop
    /// of a sequence is a function of its key in `keys` and of nothing else.
    ///
    /// # Errors
    /// Another number of keys than of sequences, sequences that have rows in common, or libtorch's error.
    pub fn with_dropout(self, keys: &[u64]) -> Result<PackedBatch> {
        if self.tokens() < self.inputs() {
            return Err(input("keys", "are of sequences that have rows in common".to_owned()));
        }
        if keys.len() as i64 != self.sequences() {
            return Err(input("keys", format!("are {}, for {} sequences", keys.len(), self.sequences())));
        }
        let mut rows = Vec::with_capacity(self.tokens() as usize);
        for (&key, ends) in keys.iter().zip(self.packing.offsets().windows(2)) {
            rows.extend((0..ends[1] - ends[0]).map(|token| row_key(key, token as u64)));
        }
        let row_keys = Some(upload(&rows, self.tokens.device())?);
        Ok(PackedBatch { row_keys, ..self })
    }

    /// The same batch beside a teacher: a decoder's scores have divergences then.
    ///
    /// # Errors
    /// Another number of rows than of targets, or a head that does not read them.
    pub fn with_teacher(self, teacher: Teacher) -> Result<PackedBatch> {
        let (rows, head) = (teacher.rows.size(), teacher.lm_head.size());
        if rows.len() != 2 || rows[0] != self.targets() || head.len() != 2 || rows[1] != head[1] {
            let problem = format!("is {rows:?} times {head:?}, for {} targets", self.targets());
            return Err(input("teacher", problem));
        }
        Ok(PackedBatch { teacher: Some(teacher), ..self })
    }

    /// The same batch with some of its targets alone: `kept` are their numbers among all, from 0, which rise.
    ///
    /// # Errors
    /// Numbers that do not rise or of no target, or libtorch's error.
    pub fn keeping(self, kept: &[i64]) -> Result<PackedBatch> {
        let rise = kept.windows(2).all(|pair| pair[0] < pair[1]);
        let exist = kept.first().is_none_or(|&first| first >= 0)
            && kept.last().is_none_or(|&last| last < self.targets());
        if !(rise && exist) {
            return Err(input("kept", format!("are no rising numbers below {}", self.targets())));
        }
        let kept = upload(kept, self.tokens.device())?;
        Ok(PackedBatch {
            target_rows: self.target_rows.f_index_select(0, &kept)?,
            targets: self.targets.f_index_select(0, &kept)?,
            ..self
        })
    }

    /// The number of input tokens N; those that sequences have in common count once.
    pub fn tokens(&self) -> i64 {
        self.packing.rows()
    }

    /// The number of input tokens as each sequence would have them by itself.
    pub fn inputs(&self) -> i64 {
        self.packing.tokens()
    }

    /// The number of targets M: the length of the head's outputs.
    pub fn targets(&self) -> i64 {
        self.targets.numel() as i64
    }

    /// The number of sequences.
    pub fn sequences(&self) -> i64 {
        self.packing.sequences()
    }
}

/// The share of a batch's rows, one in so many, that has to be saved for rows to be shared: where attention needs copies of them,
/// these cost about 2 % of a pass.
const LEAST_SHARED: usize = 16;

/// Whether rows that are computed once where they would be so many apart are worth the copies of them.
pub(crate) fn is_worth_sharing(rows: usize, apart: usize) -> bool {
    (apart - rows) * LEAST_SHARED >= apart
}

/// Which rows there are.
struct Rows {
    /// The token of each row.
    tokens: Vec<i64>,
    /// The row of each input of each sequence.
    of: Vec<i64>,
    /// How many inputs each sequence has.
    lengths: Vec<i64>,
}

impl Rows {
    /// Those of sequences that share what they begin with, if that is enough to be worth it, or share nothing.
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

    /// The row that predicts each target of these sequences.
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

/// 32 bits for a sequence's key and a token's place, by one step of SplitMix64 (Steele et al., 2014).
fn row_key(key: u64, token: u64) -> i64 {
    let mut bits = key.wrapping_add((token + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ (bits >> 31)) >> 32) as i64
}

fn input(what: &'static str, problem: String) -> Error {
    Error::Input { what, problem }
}
