//! Choosing the next token from logits, on the host.

use crate::random::Stream;
use crate::{Error, Result};

/// How tokens are chosen and when a completion ends.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by it; 0 takes the most probable token, of equals the one with the lowest id.
    pub temperature: f64,
    /// Only the `top_k` most probable tokens may be chosen; 0: all.
    pub top_k: usize,
    /// Only the most probable tokens that together reach this probability may be chosen, after `top_k`;
    /// 1: all.
    pub top_p: f64,
    /// The most tokens of a completion, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a completion, and belong to it.
    pub stop_tokens: Vec<i64>,
}

impl SamplingParams {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::Input`] with the field and what it should be.
    pub fn validate(&self) -> Result<()> {
        let check = |holds: bool, what: &'static str, problem: String| {
            if holds { Ok(()) } else { Err(Error::Input { what, problem }) }
        };
        let (temperature, top_p) = (self.temperature, self.top_p);
        check(temperature >= 0.0 && temperature.is_finite(), "temperature", {
            format!("{temperature} is not 0 or a positive number")
        })?;
        check(top_p > 0.0 && top_p <= 1.0, "top_p", format!("{top_p} is not in (0, 1]"))?;
        check(self.max_new_tokens > 0, "max_new_tokens", "0 is not at least 1".to_owned())
    }
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sampled {
    pub token: i64,
    /// Its log-probability under softmax(logits / temperature) over the whole vocabulary, without `top_k` and
    /// `top_p`: what the training forward computes. At temperature 0, that of temperature 1.
    pub logprob: f32,
}

/// Chooses the `index`-th token of a completion: a pure function of its arguments.
pub(crate) fn sample(logits: &[f32], params: &SamplingParams, seed: u64, index: usize) -> Sampled {
    let greedy = params.temperature == 0.0;
    let inverse_temperature = if greedy { 1.0 } else { 1.0 / params.temperature } as f32;
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) * inverse_temperature;
    // Log-probabilities up to a constant, and probabilities up to a factor.
    let shifted = |token: usize| logits[token] * inverse_temperature - max;
    let masses: Vec<f64> = (0..logits.len()).map(|token| f64::from(shifted(token).exp())).collect();
    let token = if greedy {
        (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
    } else {
        let random = Stream::new(seed, index as u64).uniform();
        match candidates(&masses, params) {
            None => invert(random, masses.iter().copied().enumerate()),
            Some(tokens) => invert(random, tokens.into_iter().map(|token| (token, masses[token]))),
        }
    };
    let log_sum = masses.iter().sum::<f64>().ln();
    Sampled { token: token as i64, logprob: (f64::from(shifted(token)) - log_sum) as f32 }
}

/// The tokens that top-k and top-p leave, most probable first; `None` if they leave all.
fn candidates(masses: &[f64], params: &SamplingParams) -> Option<Vec<usize>> {
    let limit = if params.top_k == 0 { masses.len() } else { params.top_k.min(masses.len()) };
    if limit == masses.len() && params.top_p >= 1.0 {
        return None;
    }
    let mut tokens: Vec<usize> = (0..masses.len()).collect();
    let by_mass = |&a: &usize, &b: &usize| masses[b].total_cmp(&masses[a]).then(a.cmp(&b));
    if limit < masses.len() {
        tokens.select_nth_unstable_by(limit - 1, by_mass);
        tokens.truncate(limit);
    }
    tokens.sort_unstable_by(by_mass);
    let wanted = params.top_p * tokens.iter().map(|&token| masses[token]).sum::<f64>();
    let mut reached = 0.0;
    let kept = tokens.iter().take_while(|&&token| {
        let more = reached < wanted;
        reached += masses[token];
        more
    });
    let kept = kept.count();
    tokens.truncate(kept);
    Some(tokens)
}

/// The token at which the cumulated mass passes `random` times the whole.
fn invert(random: f64, tokens: impl Iterator<Item = (usize, f64)> + Clone) -> usize {
    let mut rest = random * tokens.clone().map(|(_, mass)| mass).sum::<f64>();
    let mut last = 0;
    for (token, mass) in tokens.filter(|&(_, mass)| mass > 0.0) {
        last = token;
        if rest < mass {
            break;
        }
        rest -= mass;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, -1.0, 2.0, 3.0];

    fn params(temperature: f64, top_k: usize, top_p: f64) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, max_new_tokens: 1, stop_tokens: vec![] }
    }

    /// Frequencies of many samples against the softmax over the tokens that may be chosen.
    fn check(params: &SamplingParams, allowed: &[usize]) {
        let count = 20_000;
        let mut seen = [0usize; 5];
        for seed in 0..count {
            seen[sample(&LOGITS, params, seed, 3).token as usize] += 1;
        }
        let mass = |token: usize| (f64::from(LOGITS[token]) / params.temperature).exp();
        let sum: f64 = allowed.iter().map(|&token| mass(token)).sum();
        for (token, &seen) in seen.iter().enumerate() {
            let expected = if allowed.contains(&token) { mass(token) / sum } else { 0.0 };
            let found = seen as f64 / count as f64;
            assert!((found - expected).abs() < 0.015, "{params:?}: {token} {found} {expected}");
            assert_eq!(expected == 0.0, seen == 0, "{params:?}: {token}");
        }
    }

    #[test]
    fn frequencies_follow_the_filtered_softmax() {
        check(&params(1.0, 0, 1.0), &[0, 1, 2, 3, 4]);
        check(&params(2.0, 0, 1.0), &[0, 1, 2, 3, 4]);
        check(&params(1.0, 3, 1.0), &[1, 3, 4]);
        check(&params(1.0, 1, 1.0), &[1]); // of equals the first
        check(&params(1.0, 99, 1.0), &[0, 1, 2, 3, 4]);
        check(&params(1.0, 0, 0.5), &[1, 4]); // 0.408 alone does not reach a half
        check(&params(1.0, 0, 0.9), &[1, 3, 4]);
        check(&params(1.0, 2, 0.5), &[1]); // top-p counts what top-k left
    }

    #[test]
    fn greedy_takes_the_first_maximum() {
        let sampled = sample(&LOGITS, &params(0.0, 0, 1.0), 0, 0);
        assert_eq!(sampled.token, 1);
    }

    #[test]
    fn logprob_is_that_of_the_whole_softmax() {
        for (temperature, divisor) in [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)] {
            let sampled = sample(&LOGITS, &params(temperature, 1, 1.0), 0, 0);
            let sum: f64 = LOGITS.iter().map(|&logit| (f64::from(logit) / divisor).exp()).sum();
            let expected = 3.0 / divisor - sum.ln();
            assert_eq!(sampled.token, 1);
            assert!((f64::from(sampled.logprob) - expected).abs() < 1e-6, "{sampled:?} {expected}");
        }
    }

    #[test]
    fn out_of_range_parameters_are_named() {
        for (what, wrong) in [
            ("temperature", params(-1.0, 0, 1.0)),
            ("temperature", params(f64::NAN, 0, 1.0)),
            ("top_p", params(1.0, 0, 0.0)),
            ("top_p", params(1.0, 0, 1.5)),
            ("max_new_tokens", SamplingParams { max_new_tokens: 0, ..params(1.0, 0, 1.0) }),
        ] {
            match wrong.validate() {
                Err(Error::Input { what: found, .. }) => assert_eq!(found, what),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}
