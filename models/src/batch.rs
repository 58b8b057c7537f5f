//! What a decoder reads in training: sequences of unequal length, packed without padding.

use anyroll_backends::ops::{Packing, upload};
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

/// Sequences back to back, on a device. The targets are the completion tokens, in the order of the sequences.
///
/// The last token of a sequence predicts nothing that is known, so it is a target but not an input: a
/// sequence of T tokens takes T - 1 rows.
#[derive(Debug)]
pub struct PackedBatch {
    /// Input tokens: int64 `[N]`.
    pub(crate) tokens: Tensor,
    pub(crate) packing: Packing,
    /// The row whose output predicts each target: int64 `[M]`, ascending.
    pub(crate) target_rows: Tensor,
    /// The target tokens: int64 `[M]`.
    pub(crate) targets: Tensor,
    /// What the logits are divided by.
    pub(crate) temperature: f64,
    /// Whether a decoder's adapters are on, if it has any.
    pub(crate) adapters: bool,
    /// What adapters drop of their input, if this is a batch to train on: see [`anyroll_backends::ops::Dropout::keys`].
    pub(crate) row_keys: Option<Tensor>,
}

impl PackedBatch {
    /// Packs sequences and moves them to a device.
    ///
    /// # Errors
    /// A prompt length out of range, a temperature that is not a positive number, or libtorch's error.
    pub fn new(sequences: &[Sequence], temperature: f64, device: Device) -> Result<PackedBatch> {
        if !(temperature > 0.0 && temperature.is_finite()) {
            return Err(input("temperature", format!("{temperature} is not a positive number")));
        }
        let inputs = sequences.iter().map(|sequence| sequence.tokens.len().saturating_sub(1)).sum();
        let (mut tokens, mut lengths) = (Vec::with_capacity(inputs), Vec::with_capacity(sequences.len()));
        let (mut target_rows, mut targets) = (Vec::with_capacity(inputs), Vec::with_capacity(inputs));
        for (index, &Sequence { tokens: sequence, prompt_len }) in sequences.iter().enumerate() {
            if prompt_len == 0 || prompt_len > sequence.len() {
                let problem = format!("is {prompt_len} in sequence {index} of {} tokens", sequence.len());
                return Err(input("prompt_len", problem));
            }
            let start = tokens.len();
            let (inputs, completion) = (&sequence[..sequence.len() - 1], &sequence[prompt_len..]);
            tokens.extend_from_slice(inputs);
            lengths.push(inputs.len() as i64);
            targets.extend_from_slice(completion);
            target_rows.extend((0..completion.len()).map(|t| (start + prompt_len - 1 + t) as i64));
        }
        let to_device = |values: &[i64]| upload(values, device);
        Ok(PackedBatch {
            tokens: to_device(&tokens)?,
            packing: Packing::new(&lengths, device)?,
            target_rows: to_device(&target_rows)?,
            targets: to_device(&targets)?,
            temperature,
            adapters: true,
            row_keys: None,
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
    /// Another number of keys than of sequences, or libtorch's error.
    pub fn with_dropout(self, keys: &[u64]) -> Result<PackedBatch> {
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

    /// The number of input tokens N.
    pub fn tokens(&self) -> i64 {
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
