//! Samples that follow others, compared with runs that keep nothing, and with the training forward.

use std::collections::BTreeMap;

use anyroll_models::{
    Completion, Decoder, DecoderConfig, Request, Sample, SamplingParams, SlidingWindow,
    generation::{Limits, Load, SampleId, Speculation},
};
use tch::{Device, Kind};

use crate::{
    generation::{Random, config, engine, holder, params, request, trained},
    holder::Holder,
    speculation::SPECULATION,
};

const TALKS: usize = 12;
const TURNS: usize = 3;

/// Settings of a run of conversations.
#[derive(Clone, Copy)]
struct Setting {
    keep: bool,
    blocks: usize,
    prefill_tokens: usize,
    /// Seed of the waiting time for each answer.
    seed: u64,
    /// True if turns are aborted at random and continue at once.
    aborts: bool,
    speculation: Option<Speculation>,
}

const ROOMY: Setting =
    Setting { keep: true, blocks: 80, prefill_tokens: 1 << 14, seed: 1, aborts: false, speculation: None };

/// Runs groups of three conversations with a common beginning. Each turn of the model is followed, after a
/// while, by an answer that depends on the indices of conversation and turn. Returns each turn with its
/// context, and the engine's final load.
fn talks(holder: &Holder, setting: Setting) -> (Vec<(Vec<i64>, Completion)>, Load) {
    let Setting { keep, blocks, prefill_tokens, seed, aborts, speculation } = setting;
    let mut random = Random(seed);
    let mut engine = engine(holder, 0, blocks, Limits { prefill_tokens, speculation, ..Limits::new(7) });
    let params = SamplingParams { max_new_tokens: 5, ..params(0.7) };
    let sample = |talk: usize, turn: usize, follows: Option<SampleId>| {
        let seed = (talk * 10 + turn) as u64;
        Sample { seed, keep, follows: follows.filter(|_| keep), ..Sample::default() }
    };
    let mut contexts: Vec<Vec<i64>> = Vec::new();
    let mut followed: Vec<Option<SampleId>> = vec![None; TALKS];
    let mut open: BTreeMap<SampleId, usize> = BTreeMap::new();
    for (group, len) in [3, 17, 33, 8].into_iter().enumerate() {
        let prompt: Vec<i64> = (0..len).map(|i| (i * 5 + len) % 12).collect();
        let samples = (0..3).map(|at| sample(group * 3 + at, 0, None)).collect();
        let ids = engine.submit(Request { samples, ..request(&prompt, &params, &[]) }).unwrap();
        open.extend(ids.zip(group * 3..));
        contexts.extend(vec![prompt; 3]);
    }
    let mut turns: Vec<Vec<(Vec<i64>, Completion)>> = vec![Vec::new(); TALKS];
    let mut thinking: Vec<(u64, usize)> = Vec::new();
    for step in 0.. {
        for (_, talk) in thinking.extract_if(.., |(until, _)| *until <= step) {
            let turn = turns[talk].len();
            let answer = (0..1 + (talk * 7 + turn * 5) % 9).map(|i| ((i * 3 + talk + turn) % 12) as i64);
            contexts[talk].extend(answer);
            let samples = vec![sample(talk, turn, followed[talk])];
            let request = Request { samples, ..request(&contexts[talk], &params, &[]) };
            open.insert(engine.submit(request).unwrap().start, talk);
        }
        if aborts && random.below(3) == 0 && !open.is_empty() {
            let (&id, &talk) = open.iter().nth(random.below(open.len() as u64) as usize).unwrap();
            open.remove(&id);
            let begun = engine.abort(id).expect("the sample is live");
            let samples = vec![Sample { begun, ..sample(talk, turns[talk].len(), followed[talk]) }];
            let request = Request { samples, ..request(&contexts[talk], &params, &[]) };
            open.insert(engine.submit(request).unwrap().start, talk);
        }
        for (id, completion) in engine.step().unwrap() {
            let talk = open.remove(&id).unwrap();
            turns[talk].push((contexts[talk].clone(), completion.clone()));
            contexts[talk].extend(completion.tokens);
            followed[talk] = Some(id);
            match turns[talk].len() {
                TURNS => engine.release(id),
                _ => thinking.push((step + 1 + random.below(6), talk)),
            }
        }
        if open.is_empty() && thinking.is_empty() {
            break;
        }
    }
    let load = engine.load();
    assert!(engine.is_idle() && load.kept == 0, "{load:?}");
    assert_eq!(load.free_blocks, load.blocks);
    (turns.concat(), load)
}

#[test]
fn what_is_kept_is_not_run_again_and_changes_nothing() {
    let holder = holder(true);
    let (expected, load) = talks(&holder, Setting { keep: false, ..ROOMY });
    assert_eq!((expected.len(), load.reused_tokens), (TALKS * TURNS, 0));
    let (found, roomy) = talks(&holder, ROOMY);
    assert_eq!(found, expected);
    // All but the last token of each turn that another follows, with its context.
    let cached = expected.chunks(TURNS).flat_map(|talk| &talk[..TURNS - 1]);
    let cached: usize = cached.map(|(context, turn)| context.len() + turn.tokens.len() - 1).sum();
    assert_eq!(roomy.reused_tokens, cached as u64);

    let tight = Setting { blocks: 9, ..ROOMY };
    let (mut reused, mut accepted) = (0, 0);
    for seed in 1..12 {
        for aborts in [false, true] {
            for (prefill_tokens, speculation) in [(1 << 14, None), (16, None), (16, Some(SPECULATION))] {
                let setting = Setting { seed, aborts, prefill_tokens, speculation, ..tight };
                let (found, load) = talks(&holder, setting);
                assert_eq!(found, expected, "{load:?}");
                accepted += load.speculated.accepted;
                assert!(speculation.is_some() || load.speculated.proposals == 0);
                reused += load.reused_tokens;
                assert!(aborts || load.reused_tokens < roomy.reused_tokens, "the test needs a tight cache");
            }
        }
    }
    assert!(reused > 0, "nothing is kept in a tight cache");
    assert!(accepted > 0, "no proposed token is chosen");
}

#[test]
fn strict_logprobs_behind_what_was_kept_are_those_of_training_to_the_bit() {
    let window = Some(SlidingWindow { tokens: 9, layers: vec![true, false] });
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for sliding_window in [None, window.clone()] {
            let config = DecoderConfig { sliding_window, ..config(false) };
            let decoder = Decoder::new(config, Device::Cpu).unwrap().strict(true);
            let holder = Holder::of_kind(decoder, 3, kind);
            for setting in [ROOMY, Setting { blocks: 12, aborts: true, ..ROOMY }] {
                let (turns, load) = talks(&holder, setting);
                assert!(load.reused_tokens > 0);
                let found: Vec<f32> = turns.iter().flat_map(|(_, it)| it.logprobs.clone()).collect();
                assert_eq!(trained(&holder, &turns, 5), found, "{kind:?}, {:?}", holder.decoder.config());
            }
        }
    }
}

#[test]
fn a_group_shares_what_is_kept_of_its_prompt() {
    let holder = holder(false);
    let params = SamplingParams { max_new_tokens: 4, stop_tokens: vec![], ..params(1.0) };
    let prompt: Vec<i64> = (0..36).map(|index| index % 12).collect();
    let mut engine = engine(&holder, 0, 20, Limits::new(4));
    let keep = |seed| Sample { seed, keep: true, ..Sample::default() };
    let samples = (0..3).map(keep).collect();
    let ids = engine.submit(Request { samples, ..request(&prompt, &params, &[]) }).unwrap();
    let mut completions = Vec::new();
    engine.run(|_, completion| completions.push(completion)).unwrap();
    // 39 tokens each: two blocks of the prompt, and an own block per sample.
    let load = engine.load();
    assert_eq!((load.kept, load.blocks - load.free_blocks), (3, 2 + 3));

    let follow = |tokens: &[i64], first: SampleId| {
        let samples = vec![Sample { follows: Some(first), ..Sample::default() }];
        Request { samples, ..request(tokens, &params, &[]) }
    };
    let context = [&prompt[..], &completions[0].tokens, &[7]].concat();
    let error = engine.submit(follow(&context[1..], ids.start)).unwrap_err().to_string();
    assert!(error.contains("does not begin with the tokens of the sample it follows"), "{error}");
    engine.submit(follow(&context, ids.start)).unwrap();
    engine.run(|_, _| ()).unwrap();
    // It was not marked to be kept.
    let load = engine.load();
    assert_eq!((load.kept, load.blocks - load.free_blocks, load.reused_tokens), (2, 2 + 2, 39));
    ids.for_each(|id| engine.release(id));
    assert_eq!(engine.load().free_blocks, engine.load().blocks);
    // Nothing of it is kept anymore.
    engine.submit(follow(&context, 0)).unwrap();
    engine.run(|_, _| ()).unwrap();
    assert_eq!(engine.load().reused_tokens, 39);
}
