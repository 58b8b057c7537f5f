//! Completions with a format, alone and mixed with others.

use std::sync::Arc;

use anyroll_models::{
    Completion, KvCache, PackedBatch, Request, Sample, SamplingParams, Sequence,
    generation::{Ending, Format, FormatTracker, Limits},
};
use tch::Device;

use crate::generation::{engine, holder, params, request};

/// A format of tokens that increase by at most 3, and end with 12 after one above 8. It fails after 7.
pub struct Rising(i64);

impl Rising {
    pub fn format() -> Format {
        Format(Arc::new(|| Box::new(Rising(0))))
    }

    pub fn may_follow(last: i64, token: i64) -> bool {
        if token == 12 { last > 8 } else { (last + 1..=last + 3).contains(&token) && token < 12 }
    }
}

impl FormatTracker for Rising {
    fn allowed(&mut self) -> Result<Vec<u32>, String> {
        let bits = (0..13).filter(|&token| Rising::may_follow(self.0, token)).map(|token| 1u32 << token);
        if self.0 == 7 { Err("7 is followed by nothing".to_owned()) } else { Ok(vec![bits.sum()]) }
    }

    fn push(&mut self, token: i64) -> Result<(), String> {
        self.0 = token;
        Ok(())
    }
}

/// Runs `count` samples of a prompt, of which `held` selects those with a format, with the given number of
/// cache blocks.
fn run(
    params: &SamplingParams,
    count: u64,
    blocks: usize,
    held: impl Fn(u64) -> bool,
) -> (Vec<Completion>, u64) {
    let holder = holder(false);
    let mut engine = engine(&holder, 0, blocks, Limits::new(8));
    for seed in 0..count {
        let format = held(seed).then(Rising::format);
        engine.submit(Request { format, ..request(&[1, 2, 3], params, &[seed]) }).unwrap();
    }
    let mut completions = vec![Completion::default(); count as usize];
    engine.run(|id, completion| completions[id as usize] = completion).unwrap();
    assert_eq!(engine.load().free_blocks, engine.load().blocks);
    (completions, engine.load().preemptions)
}

#[test]
fn held_completions_keep_to_their_format_and_others_are_as_without_them() {
    const COUNT: u64 = 40;
    let room = KvCache::blocks_for(8, 80);
    for params in
        [params(1.0), params(0.0), SamplingParams { top_k: 2, repetition_penalty: 1.3, ..params(0.7) }]
    {
        let (mixed, _) = run(&params, COUNT, room, |seed| seed % 2 == 0);
        let (free, _) = run(&params, COUNT, room, |_| false);
        let mut endings = Vec::new();
        for (seed, completion) in mixed.iter().enumerate() {
            if seed % 2 == 1 {
                assert_eq!(completion, &free[seed], "{params:?}");
                continue;
            }
            let mut last = 0;
            for &token in &completion.tokens {
                assert!(Rising::may_follow(last, token), "{params:?}: {:?}", completion.tokens);
                last = token;
            }
            let ending = match last {
                12 => Ending::Stop,
                7 => Ending::Broken,
                _ => Ending::Length,
            };
            assert_eq!(completion.ending, Some(ending), "{:?}", completion.tokens);
            endings.push(ending);
        }
        if params.temperature == 1.0 {
            assert!(endings.contains(&Ending::Stop) && endings.contains(&Ending::Broken));
        }
    }
}

/// Log-probs are those of training over all tokens, regardless of the format.
#[test]
fn log_probs_of_held_completions_are_those_of_training() {
    let (completions, _) = run(&params(0.8), 10, KvCache::blocks_for(8, 80), |_| true);
    let texts: Vec<Vec<i64>> = completions.iter().map(|it| [&[1, 2, 3], &it.tokens[..]].concat()).collect();
    let sequences: Vec<Sequence> = texts.iter().map(|tokens| Sequence { tokens, prompt_len: 3 }).collect();
    let batch = PackedBatch::new(&sequences, 0.8, Device::Cpu).unwrap();
    let expected = Vec::<f32>::try_from(holder(false).forward(&batch, false).0.logprobs).unwrap();
    let found: Vec<f32> = completions.iter().flat_map(|it| it.logprobs.clone()).collect();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-5, "{found} {expected}");
    }
}

#[test]
fn who_has_to_wait_or_goes_on_is_held_to_the_same() {
    let params = SamplingParams { max_new_tokens: 30, stop_tokens: vec![], ..params(1.0) };
    // Up, and from any token of 9 or more down to the start.
    struct Round(i64);
    impl FormatTracker for Round {
        fn allowed(&mut self) -> Result<Vec<u32>, String> {
            Ok(vec![if self.0 >= 9 { 0b111 } else { 0b111 << (self.0 + 1) }])
        }
        fn push(&mut self, token: i64) -> Result<(), String> {
            self.0 = token;
            Ok(())
        }
    }
    let format = || Some(Format(Arc::new(|| Box::new(Round(0)))));
    let holder = holder(false);
    let all = |blocks: usize| {
        let mut engine = engine(&holder, 0, blocks, Limits::new(8));
        for seed in 0..8 {
            engine.submit(Request { format: format(), ..request(&[1; 20], &params, &[seed]) }).unwrap();
        }
        let mut completions = vec![Completion::default(); 8];
        engine.run(|id, completion| completions[id as usize] = completion).unwrap();
        (completions, engine.load().preemptions)
    };
    let ((expected, none), (found, some)) = (all(40), all(9));
    assert!(none == 0 && some > 0, "{none} {some}");
    assert_eq!(
        found.iter().map(|it| &it.tokens).collect::<Vec<_>>(),
        expected.iter().map(|it| &it.tokens).collect::<Vec<_>>()
    );
    // A completion aborted after a few tokens.
    let mut engine = engine(&holder, 0, 40, Limits::new(8));
    let id = engine.submit(Request { format: format(), ..request(&[1; 20], &params, &[3]) }).unwrap().start;
    (0..5).for_each(|_| assert_eq!(engine.step().unwrap(), []));
    let begun = engine.abort(id).unwrap();
    assert!((3..20).contains(&begun.tokens.len()));
    let samples = vec![Sample { seed: 3, begun, ..Sample::default() }];
    engine.submit(Request { format: format(), samples, ..request(&[1; 20], &params, &[]) }).unwrap();
    let mut tokens = Vec::new();
    engine.run(|_, completion| tokens = completion.tokens).unwrap();
    assert_eq!(tokens, expected[3].tokens);
}

#[test]
fn a_format_that_cannot_begin_is_refused() {
    let mut engine = engine(&holder(false), 0, 20, Limits::new(4));
    let begun = Completion { tokens: vec![7], logprobs: vec![-1.0], ..Completion::default() };
    let samples = vec![Sample { begun, ..Sample::default() }];
    let asked = Request { format: Some(Rising::format()), samples, ..request(&[1], &params(1.0), &[]) };
    let error = engine.submit(asked).unwrap_err().to_string();
    assert!(error.contains("format") && error.contains("7 is followed by nothing"), "{error}");
    assert!(engine.is_idle());
}
