//! Speculation compared with steps of one token, and with the model's distribution.

use std::sync::Arc;

use anyroll_models::{
    Completion, Decoder, DecoderConfig, ExpertsConfig, KvCache, PackedBatch, Request, SamplingParams,
    Sequence,
    generation::{Ending, Limits, Load, Speculated, Speculation, StopCondition},
};
use tch::Device;

use crate::generation::{config, engine, holder, params, request};
use crate::holder::Holder;

/// Speculation that is not limited by the number of sequences.
pub const SPECULATION: Speculation = Speculation { tokens: 5, longest: 3, shortest: 1, sequences: 64 };

const VOCAB: i64 = 13;

/// Returns prompts that repeat themselves, and prompts that do not.
fn prompts() -> Vec<Vec<i64>> {
    let repeated = |of: &[i64], times| of.repeat(times);
    let mut noise = (1_u64..).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as i64 % (VOCAB - 1));
    vec![
        repeated(&[1, 2, 3, 4], 5),
        noise.by_ref().take(30).collect(),
        repeated(&[7], 17),
        vec![4],
        noise.by_ref().take(9).collect(),
        repeated(&[5, 6, 5, 7, 1, 1, 2], 4),
    ]
}

/// Returns two completions of each prompt, and the engine's load at the end.
fn completions(
    holder: &Holder,
    limits: Limits,
    blocks: usize,
    (params, stop): (&SamplingParams, Option<&StopCondition>),
) -> (Vec<Completion>, Load) {
    let engine = engine(holder, 0, blocks, limits);
    let routes = holder.decoder.config().experts.is_some();
    let mut engine = if routes { engine.recording_routes().unwrap() } else { engine };
    for (number, prompt) in (0..).zip(prompts()) {
        let request = request(&prompt, params, &[2 * number, 2 * number + 1]);
        engine.submit(Request { stop: stop.cloned(), ..request }).unwrap();
    }
    let mut all = vec![Completion::default(); 2 * prompts().len()];
    engine.run(|id, completion| all[id as usize] = completion).unwrap();
    assert_eq!(engine.load().free_blocks, engine.load().blocks);
    (all, engine.load())
}

fn limits(speculation: Option<Speculation>) -> Limits {
    Limits { speculation, ..Limits::new(12) }
}

fn long(params: SamplingParams) -> SamplingParams {
    SamplingParams { max_new_tokens: 40, ..params }
}

/// Asserts that completions are those of steps of one token. Returns what was proposed.
fn check(holder: &Holder, params: &SamplingParams, speculation: Speculation) -> Speculated {
    let roomy = KvCache::blocks_for(12, 80);
    let (expected, load) = completions(holder, limits(None), roomy, (params, None));
    assert_eq!(load.speculated.proposals, 0);
    let mut all = Speculated::default();
    for blocks in [roomy, 7] {
        let (found, load) = completions(holder, limits(Some(speculation)), blocks, (params, None));
        assert_eq!(found, expected, "{params:?}, {speculation:?}");
        let told = load.speculated;
        assert!(told.proposals > 0 && told.proposals <= told.proposed, "{told:?}: {params:?}");
        all = all + told;
        let is_long = params.stop_tokens.is_empty() && blocks < roomy;
        assert!(!is_long || load.preemptions > 0, "the test needs a cache that is short of room");
    }
    all
}

#[test]
fn completions_are_those_of_steps_of_one_token() {
    let (free, mut told) = (params(1.0), Speculated::default());
    for params in [
        SamplingParams { temperature: 0.0, stop_tokens: vec![], ..free.clone() },
        SamplingParams { temperature: 0.0, ..free.clone() },
        SamplingParams { temperature: 0.0, repetition_penalty: 1.2, ..free.clone() },
        free.clone(),
        SamplingParams { temperature: 0.5, top_k: 4, ..free.clone() },
        SamplingParams { temperature: 0.7, top_p: 0.8, repetition_penalty: 1.1, ..free.clone() },
        SamplingParams { min_p: 0.1, top_logprobs: 3, ..free },
    ] {
        for speculation in [SPECULATION, Speculation { tokens: 15, longest: 1, ..SPECULATION }] {
            told = told + check(&holder(true), &long(params.clone()), speculation);
        }
    }
    assert!(told.accepted > 100 && told.proposed - told.accepted > 100, "{told:?}");
    let experts = ExpertsConfig::plain(vec![true, false], 5, 2, 12);
    let mixture = DecoderConfig { experts: Some(experts), ..config(true) };
    let mixture = Decoder::new(mixture, Device::Cpu).unwrap();
    check(&Holder::new(mixture, 3), &long(params(0.7)), SPECULATION);
    let strict = Decoder::new(config(false), Device::Cpu).unwrap().strict(true);
    check(&Holder::new(strict, 3), &long(params(0.7)), SPECULATION);
}

/// Every length, so that completions end at each place of a step's accepted tokens.
#[test]
fn completions_end_inside_a_step() {
    let holder = holder(true);
    let greedy = SamplingParams { temperature: 0.0, stop_tokens: vec![], ..params(1.0) };
    let roomy = KvCache::blocks_for(12, 80);
    let run = |params: &SamplingParams, stop: Option<&StopCondition>| {
        completions(&holder, limits(Some(SPECULATION)), roomy, (params, stop))
    };
    let (whole, _) = completions(&holder, limits(None), roomy, (&long(greedy.clone()), None));
    for len in 20..30 {
        let cut = run(&SamplingParams { max_new_tokens: len, ..greedy.clone() }, None).0;
        let stop = StopCondition(Arc::new(move |tokens: &[i64]| tokens.len() == len));
        let (stopped, load) = run(&long(greedy.clone()), Some(&stop));
        assert!(load.speculated.tokens_per_proposal().unwrap() > 2.0, "{load:?}");
        for (found, ending) in [(cut, Ending::Length), (stopped, Ending::Stop)] {
            for (found, whole) in found.iter().zip(&whole) {
                assert_eq!(found.tokens, whole.tokens[..len]);
                assert_eq!(found.logprobs, whole.logprobs[..len]);
                assert_eq!((found.ending, found.policies[0].tokens), (Some(ending), len));
            }
        }
    }
}

#[test]
fn only_few_sequences_propose() {
    let holder = holder(true);
    let of_limit = |sequences| {
        let speculation = Speculation { sequences, ..SPECULATION };
        let greedy = SamplingParams { temperature: 0.0, stop_tokens: vec![], ..long(params(1.0)) };
        let mut engine = engine(&holder, 0, KvCache::blocks_for(12, 80), limits(Some(speculation)));
        engine.submit(request(&[1, 2].repeat(5), &greedy, &[0, 1, 2])).unwrap();
        engine.run(|_, _| ()).unwrap();
        engine.load().speculated.proposals
    };
    assert_eq!(of_limit(2), 0);
    assert!(of_limit(3) > 0);
}

/// Pearson's statistic of the first four tokens of 25,000 completions against their probabilities by the training forward.
#[test]
fn tokens_have_the_distribution_of_the_model() {
    const TOKENS: i64 = 5;
    const LEN: u32 = 4;
    const SAMPLES: u64 = 25_000;
    let small = DecoderConfig { vocab_size: TOKENS, initializer_range: 0.2, ..config(true) };
    let holder = Holder::new(Decoder::new(small, Device::Cpu).unwrap(), 3);
    let temperature = 1.5;
    // After each token another one came twice.
    let prompt: Vec<i64> = [0, 1, 2, 3, 4, 0, 2, 4, 1, 3].repeat(2);
    let params = SamplingParams { temperature, max_new_tokens: LEN as usize, ..SamplingParams::default() };
    let speculation = Speculation { tokens: 3, longest: 2, shortest: 1, sequences: 500 };
    let limits = Limits { speculation: Some(speculation), ..Limits::new(500) };
    let cell = |tokens: &[i64]| tokens.iter().fold(0, |cell, token| cell * TOKENS + token) as usize;
    let (mut counts, mut told) = (vec![0u64; TOKENS.pow(LEN) as usize], Speculated::default());
    // An engine checks the first proposals, and may pause after them.
    for first in (0..SAMPLES).step_by(500) {
        let mut engine = engine(&holder, 0, KvCache::blocks_for(500, 24), limits);
        let seeds: Vec<u64> = (first..first + 500).collect();
        engine.submit(request(&prompt, &params, &seeds)).unwrap();
        engine.run(|_, completion| counts[cell(&completion.tokens)] += 1).unwrap();
        told = told + engine.load().speculated;
    }
    assert!(told.accepted > SAMPLES / 10 && told.proposed - told.accepted > SAMPLES / 4, "{told:?}");

    let texts: Vec<Vec<i64>> = (0..TOKENS.pow(LEN))
        .map(|cell| (0..LEN).rev().map(move |place| cell / TOKENS.pow(place) % TOKENS))
        .map(|tokens| prompt.iter().copied().chain(tokens).collect())
        .collect();
    let sequences: Vec<Sequence> =
        texts.iter().map(|tokens| Sequence { tokens, prompt_len: prompt.len() }).collect();
    let batch = PackedBatch::new(&sequences, temperature, Device::Cpu).unwrap();
    let logprobs = Vec::<f32>::try_from(holder.forward(&batch, false).0.logprobs).unwrap();
    let expected: Vec<f64> = logprobs
        .chunks(LEN as usize)
        .map(|of_text| of_text.iter().copied().map(f64::from).sum::<f64>().exp() * SAMPLES as f64)
        .collect();
    assert!((expected.iter().sum::<f64>() / SAMPLES as f64 - 1.0).abs() < 1e-4);
    // Texts that are too rare for the normal approximation count as one.
    let (common, rare): (Vec<_>, Vec<_>) =
        counts.iter().map(|&count| count as f64).zip(expected).partition(|&(_, expected)| expected >= 5.0);
    let rare = rare.into_iter().fold((0.0, 0.0), |(a, b), (count, expected)| (a + count, b + expected));
    let cells: Vec<(f64, f64)> = common.into_iter().chain((rare.1 >= 5.0).then_some(rare)).collect();
    let statistic: f64 = cells.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum();
    let freedom = cells.len() as f64 - 1.0;
    println!("{statistic:.1} with {freedom} degrees of freedom; {told:?}");
    assert!(
        freedom > 100.0 && (statistic - freedom).abs() < 4.0 * (2.0 * freedom).sqrt(),
        "{statistic}, {freedom}"
    );
}
