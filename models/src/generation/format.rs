//! Structured output: restricts the tokens that a completion may contain.

use std::{fmt, sync::Arc};

use anyroll_backends::ops::upload;
use tch::Tensor;

use super::sequence::Row;
use crate::Result;

/// Tracks the tokens of one completion.
pub trait FormatTracker: Send {
    /// Returns the tokens that may come next, as a bit set from the lowest bit of the first word; tokens past
    /// the last word may not. At least one token is allowed, if only one that ends the completion.
    ///
    /// # Errors
    /// The reason why the tokens cannot be computed.
    fn allowed(&mut self) -> std::result::Result<Vec<u32>, String>;

    /// Appends the next token, one of those allowed.
    ///
    /// # Errors
    /// The reason why the token is not accepted.
    fn push(&mut self, token: i64) -> std::result::Result<(), String>;
}

/// Starts to track a new completion on each call.
#[derive(Clone)]
pub struct Format(pub Arc<dyn Fn() -> Box<dyn FormatTracker> + Send + Sync>);

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Format")
    }
}

/// A logit far below all others, which stays finite under every penalty and temperature.
const NEVER: f32 = -1e20;

/// Tracking state of a completion.
pub(super) struct FormatState {
    tracker: Box<dyn FormatTracker>,
    allowed: Vec<u32>,
}

impl FormatState {
    /// Tracks a completion that begins with these tokens.
    pub fn begin(format: &Format, begun: &[i64]) -> std::result::Result<FormatState, String> {
        let mut tracker = format.0();
        begun.iter().try_for_each(|&token| tracker.push(token))?;
        let allowed = some(tracker.allowed()?)?;
        Ok(FormatState { tracker, allowed })
    }

    /// Appends a token that is not the last one.
    pub fn push(&mut self, token: i64) -> std::result::Result<(), String> {
        self.tracker.push(token)?;
        self.allowed = some(self.tracker.allowed()?)?;
        Ok(())
    }

    fn allows(&self, token: usize) -> bool {
        self.allowed.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Returns the logits with those of disallowed tokens set to [`NEVER`].
    pub fn mask(&self, logits: &[f32]) -> Vec<f32> {
        let of_token = |(token, &logit)| if self.allows(token) { logit } else { NEVER };
        logits.iter().enumerate().map(of_token).collect()
    }
}

/// Returns the allowed tokens, or an error if there are none.
fn some(allowed: Vec<u32>) -> std::result::Result<Vec<u32>, String> {
    match allowed.iter().any(|&word| word != 0) {
        true => Ok(allowed),
        false => Err("no token may come next".to_owned()),
    }
}

impl fmt::Debug for FormatState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FormatState")
    }
}

/// Like [`FormatState::mask`] for `logits` `[R, V]` of a step's rows, on their device. `None` if no sequence has a
/// format.
pub(super) fn masked(logits: &Tensor, rows: &[Row]) -> Result<Option<Tensor>> {
    let states = rows.iter().enumerate();
    let states: Vec<(usize, &FormatState)> =
        states.filter_map(|(row, it)| Some((row, it.sequence.format_state.as_ref()?))).collect();
    if states.is_empty() {
        return Ok(None);
    }
    let vocab_size = logits.size()[1] as usize;
    let rows: Vec<i64> = states.iter().map(|(row, _)| *row as i64).collect();
    let never: Vec<bool> =
        states.iter().flat_map(|(_, state)| (0..vocab_size).map(|token| !state.allows(token))).collect();
    let never = upload(&never, logits.device())?.f_view([-1, vocab_size as i64])?;
    let rows = upload(&rows, logits.device())?;
    let of_rows = logits.f_index_select(0, &rows)?.f_masked_fill(&never, f64::from(NEVER))?;
    Ok(Some(logits.f_index_copy(0, &rows, &of_rows)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Even;

    impl FormatTracker for Even {
        fn allowed(&mut self) -> std::result::Result<Vec<u32>, String> {
            Ok(vec![0x5555_5555])
        }

        fn push(&mut self, _: i64) -> std::result::Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn tokens_without_a_bit_are_out_of_reach() {
        let state = FormatState::begin(&Format(Arc::new(|| Box::new(Even))), &[2]).unwrap();
        let logits: Vec<f32> = (0..40).map(|token| token as f32).collect();
        let masked = state.mask(&logits);
        for (token, masked) in masked.into_iter().enumerate() {
            let expected = if token < 32 && token % 2 == 0 { token as f32 } else { NEVER };
            assert_eq!(masked, expected, "{token}");
        }
    }
}
