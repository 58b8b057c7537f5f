//! The vanilla policy gradient (Williams, 1992).

use super::{Loss, Result, Terms, Tokens, ratio};

/// The vanilla policy gradient, which has no constants.
pub struct Reinforce;

impl Loss for Reinforce {
    fn title(&self) -> Option<&'static str> {
        None
    }

    /// -A l.
    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let log_ratio = tokens.log_ratio()?;
        let ratio = ratio(&log_ratio)?;
        let loss = tokens.advantages.f_neg()?.f_mul(tokens.logprobs)?;
        Ok(Terms { loss, log_ratio, ratio, clipped: None })
    }
}
