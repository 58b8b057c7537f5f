//! The numbers of an evaluation.

use std::collections::BTreeSet;

use anyroll_algorithm::{Method, interval};
use anyroll_data::stream;
use rand_chacha::rand_core::Rng;
use serde::Serialize;

use super::{Completion, Prompt, Verdicts};

/// Constant of the random stream of intervals.
const PURPOSE: u64 = u64::from_le_bytes(*b"interval");

/// The numbers of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Numbers of all prompts.
    pub all: DomainSummary,
    /// Numbers of each domain, if there are several.
    pub domains: Vec<DomainSummary>,
    /// Lengths of all completions.
    pub lengths: Lengths,
    /// Reason why no vote is counted; `None` if votes are, or would be of one sample.
    pub no_votes: Option<&'static str>,
}

/// The numbers of some prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DomainSummary {
    /// Name of the domain; empty without domains.
    pub domain: String,
    /// Number of prompts.
    pub prompts: usize,
    /// Prompts with a completion that could not be scored, which count in no estimate.
    pub unscored: usize,
    /// Estimates, in the order of a table.
    pub estimates: Vec<Estimate>,
}

/// A mean over prompts, with its 95 % confidence interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Name, such as `pass@4`.
    pub name: String,
    /// Mean.
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Method of the interval.
    pub interval: Method,
}

/// Lengths of completions in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Lengths {
    /// Number of completions.
    pub completions: usize,
    /// Mean length.
    pub mean: f64,
    /// Length that 95 % of the completions do not exceed.
    pub p95: usize,
    /// Length of the longest completion.
    pub max: usize,
    /// Number of completions that were cut at the limit.
    pub cut: usize,
}

impl Summary {
    /// Computes the numbers of `prompts` with `samples` samples each. `seed` is that of bootstrap intervals.
    ///
    /// # Panics
    ///
    /// Panics without prompts.
    pub fn new(prompts: &[Prompt], samples: usize, seed: u64) -> Self {
        let has_answers = prompts.iter().flat_map(|prompt| &prompt.samples).any(|it| it.extracted.is_some());
        let names: BTreeSet<&str> = prompts.iter().map(|prompt| prompt.record.domain.as_str()).collect();
        let of = |domain: &str, prompts: Vec<&Prompt>| {
            let verdicts: Vec<&Verdicts> = prompts.iter().filter_map(|it| it.verdicts.as_ref()).collect();
            DomainSummary {
                domain: domain.to_owned(),
                prompts: prompts.len(),
                unscored: prompts.len() - verdicts.len(),
                estimates: estimates(&verdicts, samples, has_answers, seed),
            }
        };
        let of_domain =
            |name: &&str| of(name, prompts.iter().filter(|prompt| prompt.record.domain == **name).collect());
        Self {
            all: of("", prompts.iter().collect()),
            domains: if names.len() > 1 { names.iter().map(of_domain).collect() } else { Vec::new() },
            lengths: Lengths::new(prompts.iter().flat_map(Prompt::completions)),
            no_votes: (samples > 1 && !has_answers).then_some(
                "the reward extracts no answer from a completion, so that there is nothing to vote on",
            ),
        }
    }
}

/// Estimates over prompts: greedy, pass@k for 1 and all powers of two, and the vote.
fn estimates(verdicts: &[&Verdicts], samples: usize, votes: bool, seed: u64) -> Vec<Estimate> {
    if verdicts.is_empty() {
        return Vec::new();
    }
    let mut estimates: Vec<Estimate> = Vec::new();
    let mut add = |name: String, of: &dyn Fn(&Verdicts) -> f64| {
        let values: Vec<f64> = verdicts.iter().map(|verdicts| of(verdicts)).collect();
        let mut random = stream(PURPOSE, seed, estimates.len() as u64);
        let ([low, high], interval) = interval(&values, || random.next_u64());
        let value = values.iter().sum::<f64>() / values.len() as f64;
        estimates.push(Estimate { name, value, low, high, interval });
    };
    add("greedy".to_owned(), &|verdicts| verdicts.greedy);
    let powers = (0..usize::BITS).map(|power| 1 << power).take_while(|k| *k < samples);
    for k in powers.chain([samples].into_iter().filter(|samples| *samples > 0)) {
        add(format!("pass@{k}"), &|verdicts| verdicts.pass_at(k));
    }
    if votes && samples > 1 {
        add(format!("maj@{samples}"), &Verdicts::majority);
    }
    estimates
}

impl Lengths {
    fn new<'a>(completions: impl Iterator<Item = &'a Completion>) -> Self {
        let (mut lengths, mut cut) = (Vec::new(), 0);
        for completion in completions {
            lengths.push(completion.tokens);
            cut += usize::from(!completion.finished);
        }
        lengths.sort_unstable();
        let completions = lengths.len();
        // The nearest rank: the smallest length that 95 % of the completions do not exceed.
        let rank = (completions * 95).div_ceil(100).saturating_sub(1);
        Self {
            completions,
            mean: lengths.iter().sum::<usize>() as f64 / completions as f64,
            p95: lengths[rank],
            max: lengths[completions - 1],
            cut,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use anyroll_data::Record;
    use anyroll_reward::Score;

    use super::*;

    fn completion(answer: &str, right: bool, tokens: usize) -> Completion {
        let measured = f64::from(u8::from(right));
        Completion {
            text: answer.to_owned(),
            tokens,
            finished: tokens < 9,
            score: Ok(Score { total: measured, measured, parts: vec![Some(measured)], logged: Vec::new() }),
            extracted: Some(answer.to_owned()),
        }
    }

    fn prompt(domain: &str, greedy: bool, answers: &[(&str, bool)]) -> Prompt {
        Prompt {
            record: Arc::new(Record { domain: domain.to_owned(), ..Record::default() }),
            greedy: completion("g", greedy, 1),
            samples: answers.iter().map(|(answer, right)| completion(answer, *right, 9)).collect(),
            verdicts: Some(Verdicts {
                greedy: f64::from(u8::from(greedy)),
                votes: answers.iter().map(|(answer, right)| ((*answer).to_owned(), *right)).collect(),
            }),
        }
    }

    #[test]
    fn means_over_prompts_of_each_domain_and_of_all() {
        let mut prompts = vec![
            prompt("a", true, &[("4", true), ("4", true), ("5", false), ("6", false)]),
            prompt("a", false, &[("4", false), ("4", false), ("5", true), ("6", false)]),
            prompt("b", true, &[("7", true), ("7", true), ("7", true), ("7", true)]),
        ];
        let summary = Summary::new(&prompts, 4, 0);
        let values = |summary: &DomainSummary| {
            summary.estimates.iter().map(|it| (it.name.clone(), it.value)).collect::<Vec<_>>()
        };
        // By hand: of four samples with two right, two contain a right one with probability 1 - 1/6.
        let expected = |rows: [f64; 5]| {
            ["greedy", "pass@1", "pass@2", "pass@4", "maj@4"]
                .map(str::to_owned)
                .into_iter()
                .zip(rows)
                .collect::<Vec<_>>()
        };
        let close = |found: Vec<(String, f64)>, expected: Vec<(String, f64)>| {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-12,
                    "{found:?}, {expected:?}"
                );
            }
        };
        close(values(&summary.domains[0]), expected([0.5, 0.375, (5.0 / 6.0 + 0.5) / 2.0, 1.0, 0.5]));
        close(values(&summary.domains[1]), expected([1.0; 5]));
        close(
            values(&summary.all),
            expected([2.0 / 3.0, 1.75 / 3.0, (5.0 / 6.0 + 1.5) / 3.0, 1.0, 2.0 / 3.0]),
        );
        for Estimate { value, low, high, .. } in &summary.all.estimates {
            assert!(low <= value && value <= high && low < high, "{low} {value} {high}");
        }
        assert_eq!((summary.lengths.completions, summary.lengths.cut, summary.lengths.p95), (15, 12, 9));
        assert_eq!(summary.no_votes, None);

        prompts[2].verdicts = None;
        let summary = Summary::new(&prompts, 4, 0);
        assert_eq!((summary.all.prompts, summary.all.unscored), (3, 1));
        close(values(&summary.all), values(&summary.domains[0]));
        assert!(summary.domains[1].estimates.is_empty());
    }

    #[test]
    fn without_extracted_answers_there_is_no_vote_and_a_reason() {
        let mut prompts = vec![prompt("", true, &[("4", true), ("5", false)])];
        prompts[0].samples.iter_mut().for_each(|sample| sample.extracted = None);
        let summary = Summary::new(&prompts, 2, 0);
        assert!(summary.all.estimates.iter().all(|estimate| !estimate.name.starts_with("maj")));
        assert!(summary.no_votes.is_some() && summary.domains.is_empty());
        assert_eq!(Summary::new(&[prompt("", false, &[])], 0, 0).all.estimates.len(), 1);
    }

    #[test]
    fn the_95th_percentile_is_the_nearest_rank() {
        let lengths = |count: usize| {
            Lengths::new((1..=count).map(|tokens| completion("", false, tokens)).collect::<Vec<_>>().iter())
        };
        assert_eq!([1, 2, 20, 100].map(|count| lengths(count).p95), [1, 2, 19, 95]);
        assert_eq!((lengths(100).mean, lengths(100).max), (50.5, 100));
    }
}
