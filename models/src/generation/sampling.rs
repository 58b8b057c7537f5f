//! Chooses the next token from logits, on the host.

use crate::random::Stream;
use crate::{Error, Result};

/// Parameters for choosing tokens and ending a completion. The default samples from the whole softmax.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divisor of the logits; 0 takes the most probable token, and the lowest id of equally probable ones.
    pub temperature: f64,
    /// Only the `top_k` most probable tokens are candidates; 0: all.
    pub top_k: usize,
    /// Only the most probable tokens that together reach this probability are candidates, after `top_k`; 1:
    /// all.
    pub top_p: f64,
    /// Only tokens with at least this fraction of the highest probability are candidates; 0: all.
    pub min_p: f64,
    /// Repetition penalty (Keskar et al., 2019): positive logits of tokens in the prompt or the completion
    /// are divided by it, others multiplied by it; 1: none.
    pub repetition_penalty: f64,
    /// Maximum number of tokens of a completion, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a completion; they are part of it.
    pub stop_tokens: Vec<i64>,
    /// Number of most likely tokens reported for each position: see [`super::Completion::top_logprobs`].
    pub top_logprobs: usize,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            max_new_tokens: 1,
            stop_tokens: Vec::new(),
            top_logprobs: 0,
        }
    }
}

impl SamplingParams {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::Input`] with the field and the valid range.
    pub fn validate(&self) -> Result<()> {
        let check = |holds: bool, what: &'static str, value: f64, range: &str| {
            if holds {
                Ok(())
            } else {
                Err(Error::Input { what, problem: format!("{value:?} is not {range}") })
            }
        };
        let SamplingParams { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        // Logits stay finite in fp32 if divided or multiplied by such a value.
        let usable = |value: f64| (1e-6..=1e6).contains(&value);
        check(
            temperature == 0.0 || usable(temperature),
            "temperature",
            temperature,
            "0 or a number from 1e-6 to 1e6",
        )?;
        check(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "in (0, 1]")?;
        check((0.0..=1.0).contains(&min_p), "min_p", min_p, "in [0, 1]")?;
        check(
            usable(repetition_penalty),
            "repetition_penalty",
            repetition_penalty,
            "a number from 1e-6 to 1e6",
        )?;
        if self.max_new_tokens == 0 {
            return Err(Error::Input {
                what: "max_new_tokens",
                problem: "is 0, must be at least 1".to_owned(),
            });
        }
        Ok(())
    }

    /// Returns the divisor of the logits in the softmax that defines log-probabilities.
    pub(crate) fn softmax_temperature(&self) -> f64 {
        if self.is_greedy() { 1.0 } else { self.temperature }
    }

    pub(crate) fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Returns the reciprocal of [`Self::softmax_temperature`].
    pub(crate) fn inverse_temperature(&self) -> f32 {
        (1.0 / self.softmax_temperature()) as f32
    }

    pub(crate) fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

/// A chosen token, and its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sampled {
    pub token: i64,
    /// See [`super::Completion::logprobs`].
    pub logprob: f32,
    /// See [`super::Completion::top_logprobs`].
    pub top_logprobs: Vec<(i64, f32)>,
    /// Routes of the token before it, whose pass chose it, if they are recorded and not yet known.
    pub route: Vec<u8>,
}

impl Sampled {
    pub fn new(token: i64, logprob: f32) -> Sampled {
        Sampled { token, logprob, top_logprobs: Vec::new(), route: Vec::new() }
    }
}

/// Returns the random number in [0, 1) that chooses the `index`-th token of a completion.
pub(crate) fn uniform(seed: u64, index: usize) -> f64 {
    Stream::new(seed, index as u64).uniform()
}

/// Chooses the `index`-th token of a completion: a pure function of its arguments. `context` holds the prior
/// tokens of prompt and completion, in any order.
pub(crate) fn sample(
    logits: &[f32],
    params: &SamplingParams,
    seed: u64,
    index: usize,
    context: impl Iterator<Item = i64>,
) -> i64 {
    let penalized = params.penalizes().then(|| penalized(logits, params, context));
    let logits = penalized.as_deref().unwrap_or(logits);
    let token = if params.is_greedy() {
        (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
    } else {
        let masses = masses(logits, params.inverse_temperature());
        let random = uniform(seed, index);
        match candidates(&masses, params) {
            None => invert(random, masses.iter().copied().enumerate()),
            Some(tokens) => invert(random, tokens.into_iter().map(|token| (token, masses[token]))),
        }
    };
    token as i64
}

/// Returns probabilities up to a factor.
fn masses(logits: &[f32], inverse_temperature: f32) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) * inverse_temperature;
    logits.iter().map(|logit| f64::from((logit * inverse_temperature - max).exp())).collect()
}

fn penalized(logits: &[f32], params: &SamplingParams, context: impl Iterator<Item = i64>) -> Vec<f32> {
    let penalty = params.repetition_penalty as f32;
    let mut changed = logits.to_vec();
    for token in context {
        let token = token as usize;
        // From the unchanged logit, so that a repeated token is penalized once.
        changed[token] = if logits[token] > 0.0 { logits[token] / penalty } else { logits[token] * penalty };
    }
    changed
}

/// Returns the ids of the tokens that top-k, top-p and min-p leave, or `None` if they leave all.
fn candidates(masses: &[f64], params: &SamplingParams) -> Option<Vec<usize>> {
    let limit = if params.top_k == 0 { masses.len() } else { params.top_k.min(masses.len()) };
    if limit == masses.len() && params.top_p >= 1.0 && params.min_p <= 0.0 {
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
    let least = params.min_p * masses[tokens[0]];
    let mut reached = 0.0;
    let kept = tokens.iter().take_while(|&&token| {
        let more = reached < wanted && masses[token] >= least;
        reached += masses[token];
        more
    });
    let kept = kept.count();
    tokens.truncate(kept);
    // In ascending order, as a device iterates over them.
    tokens.sort_unstable();
    Some(tokens)
}

/// Returns the token at which the cumulated mass exceeds `random` times the total.
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
    const CONTEXT: [i64; 3] = [1, 2, 1];

    fn params(temperature: f64, top_k: usize, top_p: f64) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, ..SamplingParams::default() }
    }

    fn choose(params: &SamplingParams, seed: u64) -> i64 {
        sample(&LOGITS, params, seed, 3, CONTEXT.into_iter())
    }

    /// Compares frequencies of many samples with the softmax over the candidates.
    fn check(params: &SamplingParams, allowed: &[usize]) {
        let count = 20_000;
        let mut seen = [0usize; 5];
        for seed in 0..count {
            seen[choose(params, seed) as usize] += 1;
        }
        let penalty = |token: usize| match (CONTEXT.contains(&(token as i64)), LOGITS[token] > 0.0) {
            (false, _) => 1.0,
            (true, true) => 1.0 / params.repetition_penalty,
            (true, false) => params.repetition_penalty,
        };
        let mass = |token| (f64::from(LOGITS[token]) * penalty(token) / params.temperature).exp();
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
        check(&params(1.0, 1, 1.0), &[1]); // the first of equal logits
        check(&params(1.0, 99, 1.0), &[0, 1, 2, 3, 4]);
        check(&params(1.0, 0, 0.5), &[1, 4]); // 0.408 alone does not reach a half
        check(&params(1.0, 0, 0.9), &[1, 3, 4]);
        check(&params(1.0, 2, 0.5), &[1]); // top-p applies after top-k
        let all = params(1.0, 0, 1.0);
        check(&SamplingParams { min_p: 0.3, ..all.clone() }, &[1, 3, 4]); // exp(-1) is above 0.3, exp(-2) is not
        check(&SamplingParams { min_p: 0.3, temperature: 0.5, ..all.clone() }, &[1, 4]);
        check(&SamplingParams { min_p: 1.0, ..all.clone() }, &[1, 4]);
        check(&SamplingParams { repetition_penalty: 1.5, ..all.clone() }, &[0, 1, 2, 3, 4]);
        check(&SamplingParams { repetition_penalty: 2.0, top_k: 2, ..all }, &[3, 4]); // 3.0 / 2 is below 2.0
    }

    #[test]
    fn greedy_takes_the_first_maximum() {
        assert_eq!(choose(&params(0.0, 0, 1.0), 0), 1);
        let penalized = SamplingParams { repetition_penalty: 1.1, ..params(0.0, 0, 1.0) };
        assert_eq!(choose(&penalized, 0), 4);
    }

    #[test]
    fn out_of_range_parameters_are_named() {
        for (what, wrong) in [
            ("temperature", params(-1.0, 0, 1.0)),
            ("temperature", params(f64::NAN, 0, 1.0)),
            ("top_p", params(1.0, 0, 0.0)),
            ("top_p", params(1.0, 0, 1.5)),
            ("min_p", SamplingParams { min_p: 1.1, ..params(1.0, 0, 1.0) }),
            ("temperature", params(1e-320, 0, 1.0)),
            ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..params(1.0, 0, 1.0) }),
            ("max_new_tokens", SamplingParams { max_new_tokens: 0, ..params(1.0, 0, 1.0) }),
        ] {
            match wrong.validate() {
                Err(Error::Input { what: found, .. }) => assert_eq!(found, what),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}
