//! Most likely tokens at each position, computed on the device of the logits.

use anyroll_backends::ops::upload;
use tch::{Device, Kind, Tensor};

use super::{sampling::Sampled, sequence::Row};
use crate::Result;

/// Most likely tokens of rows of logits, if a sequence asks for them.
pub(super) struct TopLogprobs {
    /// int64 `[R, most]`; the log-probabilities are fp32.
    tokens: Tensor,
    logprobs: Tensor,
}

impl TopLogprobs {
    /// Computes those of `logits` `[R, V]`, of a step's rows, on their device and without waiting for it.
    pub fn of(logits: &Tensor, rows: &[Row]) -> Result<Option<TopLogprobs>> {
        let most = rows.iter().map(|row| row.params().top_logprobs as i64).max().unwrap_or(0);
        if most == 0 {
            return Ok(None);
        }
        let temperatures: Vec<f64> = rows.iter().map(|row| row.params().softmax_temperature()).collect();
        let temperatures = upload(&temperatures, logits.device())?.f_to_kind(Kind::Float)?.f_unsqueeze(1)?;
        let scaled = logits.f_to_kind(Kind::Float)?.f_div(&temperatures)?;
        let (values, tokens) = scaled.f_topk(most.min(logits.size()[1]), -1, true, true)?;
        let logprobs = values.f_sub(&scaled.f_logsumexp([-1i64].as_slice(), true)?)?;
        Ok(Some(TopLogprobs { tokens, logprobs }))
    }

    /// Adds each row's most likely tokens to its sampled token.
    pub fn write_to(&self, rows: &[Row], sampled: &mut [Sampled]) -> Result<()> {
        let most = self.tokens.size()[1] as usize;
        let tokens: Vec<i64> = self.tokens.f_to_device(Device::Cpu)?.f_flatten(0, 1)?.try_into()?;
        let logprobs: Vec<f32> = self.logprobs.f_to_device(Device::Cpu)?.f_flatten(0, 1)?.try_into()?;
        let of_rows = tokens.chunks(most).zip(logprobs.chunks(most));
        for ((sampled, row), (tokens, logprobs)) in sampled.iter_mut().zip(rows).zip(of_rows) {
            let all = tokens.iter().copied().zip(logprobs.iter().copied());
            sampled.top_logprobs = all.take(row.params().top_logprobs).collect();
        }
        Ok(())
    }
}
