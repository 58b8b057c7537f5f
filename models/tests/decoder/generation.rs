//! Generation compared with the training forward, and the engine compared with itself without a batch.

use std::sync::Arc;

use crate::holder::Holder;
use anyroll_backends::{BackendKind, DType, DeviceId, Stream, open};
use anyroll_models::{
    Completion, Decoder, DecoderConfig, Engine, KvCache, LoraConfig, LoraTarget, LoraTargets, Model,
    Multipliers, NormPlaces, PackedBatch, QkNorm, Request, Sample, SamplingParams, Sequence, SlidingWindow,
    generation::{Ending, Limits, PolicySpan, StopCondition},
};
use tch::{Device, Kind, Tensor};

const MAX_NEW_TOKENS: usize = 9;

/// Returns a model whose distributions are far from uniform: its weights have a larger deviation.
pub fn holder(qk_norm: bool) -> Holder {
    Holder::new(Decoder::new(config(qk_norm), Device::Cpu).unwrap(), 3)
}

pub fn config(qk_norm: bool) -> DecoderConfig {
    DecoderConfig {
        vocab_size: 13,
        num_key_value_heads: 2,
        head_dim: 10,
        intermediate_size: 40,
        rope_theta: 1000.0,
        max_position_embeddings: 80,
        qkv_bias: true,
        qk_norm: qk_norm.then_some(QkNorm::PerHead),
        initializer_range: 0.4,
        ..DecoderConfig::plain(2, 24, 4)
    }
}

/// Returns groups of equal prompts, of unequal lengths.
fn prompts() -> Vec<Vec<i64>> {
    let distinct =
        [vec![1, 2, 3], vec![4], vec![5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9], vec![4, 4]];
    distinct.iter().flat_map(|prompt| std::iter::repeat_n(prompt.clone(), 5)).collect()
}

pub fn params(temperature: f64) -> SamplingParams {
    SamplingParams {
        temperature,
        max_new_tokens: MAX_NEW_TOKENS,
        stop_tokens: vec![12],
        ..SamplingParams::default()
    }
}

/// Returns an engine with the holder's weights.
pub fn engine(holder: &Holder, version: u64, blocks: usize, limits: Limits) -> Engine {
    let config = holder.decoder.config();
    let device = open(DeviceId { backend: BackendKind::CPU, ordinal: 0 }).unwrap();
    let dtype = match holder.weights[0][0].kind() {
        Kind::BFloat16 => DType::Bf16,
        Kind::Half => DType::F16,
        _ => DType::F32,
    };
    let cache = KvCache::new(config, blocks, dtype, &Stream::torch(&device).unwrap()).unwrap();
    let weights =
        holder.weights.iter().map(|unit| unit.iter().map(Tensor::shallow_clone).collect()).collect();
    Engine::new(holder.decoder.clone(), weights, version, cache, limits).unwrap()
}

/// Returns a request with one sample per seed.
pub fn request(prompt: &[i64], params: &SamplingParams, seeds: &[u64]) -> Request {
    let samples = seeds.iter().map(|&seed| Sample { seed, ..Sample::default() }).collect();
    Request { prompt: prompt.to_vec(), params: Arc::new(params.clone()), stop: None, format: None, samples }
}

/// Runs consecutive equal prompts as one request.
pub fn run(holder: &Holder, prompts: &[Vec<i64>], params: &SamplingParams, seeds: &[u64]) -> Vec<Completion> {
    let mut engine = engine(holder, 0, KvCache::blocks_for(prompts.len(), 80), Limits::new(prompts.len()));
    let mut rest = seeds;
    for group in prompts.chunk_by(|a, b| a == b) {
        let (seeds, after) = rest.split_at(group.len());
        engine.submit(request(&group[0], params, seeds)).unwrap();
        rest = after;
    }
    let mut completions = vec![Completion::default(); prompts.len()];
    engine.run(|id, completion| completions[id as usize] = completion).unwrap();
    assert_eq!(engine.load().free_blocks, engine.load().blocks);
    completions
}

#[test]
fn logprobs_equal_the_training_forward() {
    for (qk_norm, temperature) in [(false, 1.0), (true, 0.6)] {
        let (holder, prompts) = (holder(qk_norm), prompts());
        let seeds: Vec<u64> = (0..prompts.len() as u64).collect();
        let completions = run(&holder, &prompts, &params(temperature), &seeds);
        let tokens: Vec<Vec<i64>> =
            prompts.iter().zip(&completions).map(|(p, c)| [p.as_slice(), &c.tokens].concat()).collect();
        let sequences: Vec<Sequence> = tokens
            .iter()
            .zip(&prompts)
            .map(|(tokens, prompt)| Sequence { tokens, prompt_len: prompt.len() })
            .collect();
        let batch = PackedBatch::new(&sequences, temperature, Device::Cpu).unwrap();
        let expected = Vec::<f32>::try_from(holder.forward(&batch, false).0.logprobs).unwrap();
        let found: Vec<f32> = completions.iter().flat_map(|c| c.logprobs.clone()).collect();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-5, "{found} {expected}");
        }
        let ends: Vec<bool> = completions.iter().map(|c| c.finished()).collect();
        assert!(ends.contains(&true) && ends.contains(&false), "the test needs both ends");
        for completion in &completions {
            let stop = completion.tokens.iter().position(|&token| token == 12);
            assert_eq!(stop, completion.finished().then(|| completion.tokens.len() - 1));
            assert!(completion.finished() || completion.tokens.len() == MAX_NEW_TOKENS);
        }
    }
}

/// Returns the completions of groups and single prompts, short and of several blocks, in a cache too small
/// for all.
fn crowded(holder: &Holder, prefill_tokens: usize) -> Vec<(Vec<i64>, Completion)> {
    let params = SamplingParams { max_new_tokens: 28, stop_tokens: vec![], ..params(0.7) };
    let prompts: Vec<Vec<i64>> =
        [3, 40, 1, 17, 16, 50, 8].iter().map(|&len| (0..len).map(|i| (i * 5 + len) % 12).collect()).collect();
    let mut engine = engine(holder, 0, 8, Limits { prefill_tokens, ..Limits::new(7) });
    let mut of_sample = Vec::new();
    for (number, prompt) in prompts.iter().enumerate() {
        let seeds: Vec<u64> = (0..1 + number as u64 % 3).map(|sample| number as u64 * 10 + sample).collect();
        engine.submit(request(prompt, &params, &seeds)).unwrap();
        of_sample.extend(seeds.iter().map(|_| prompt.clone()));
    }
    let mut completions = vec![Completion::default(); of_sample.len()];
    engine.run(|id, completion| completions[id as usize] = completion).unwrap();
    assert!(engine.load().preemptions > 0, "the test needs a cache that is short of room");
    of_sample.into_iter().zip(completions).collect()
}

/// Returns the log-probs of completions by the training forward, in batches of `at_once`.
pub fn trained(holder: &Holder, sampled: &[(Vec<i64>, Completion)], at_once: usize) -> Vec<f32> {
    let mut found = Vec::new();
    for part in sampled.chunks(at_once) {
        let tokens: Vec<Vec<i64>> =
            part.iter().map(|(prompt, completion)| [&prompt[..], &completion.tokens].concat()).collect();
        let sequences = tokens.iter().zip(part);
        let sequences: Vec<Sequence> =
            sequences.map(|(tokens, (prompt, _))| Sequence { tokens, prompt_len: prompt.len() }).collect();
        let batch = PackedBatch::new(&sequences, 0.7, Device::Cpu).unwrap();
        found.extend(Vec::<f32>::try_from(holder.forward(&batch, false).0.logprobs).unwrap());
    }
    found
}

#[test]
fn strict_logprobs_are_those_of_training_to_the_bit() {
    let window = Some(SlidingWindow { tokens: 9, layers: vec![true, false] });
    let lora = LoraConfig::new(3, 4.0, LoraTarget::ALL.to_vec());
    let targets = vec![LoraTarget::K, LoraTarget::O, LoraTarget::Up, LoraTarget::Down];
    let dora = LoraConfig {
        targets: LoraTargets::ByLayer([(0, vec![LoraTarget::Q, LoraTarget::Up]), (1, targets)].into()),
        dora: true,
        ..lora.clone()
    };
    let of_fused = |dora| LoraConfig { dora, ..LoraConfig::new(3, 4.0, LoraTarget::FUSED.to_vec()) };
    let (fused, fused_dora) = (of_fused(false), of_fused(true));
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (qk_norm, sliding_window, lora) in [
            (None, None, None),
            (Some(QkNorm::PerHead), None, None),
            (Some(QkNorm::PerHead), window.clone(), None),
            (Some(QkNorm::Together), window.clone(), None),
            (Some(QkNorm::Together), None, Some(&dora)),
            (None, None, Some(&lora)),
            (None, None, Some(&dora)),
            (None, window.clone(), Some(&fused)),
            (None, None, Some(&fused_dora)),
        ] {
            // Like OLMo: together with norms on branch outputs.
            let norms = match qk_norm {
                Some(QkNorm::Together) => NormPlaces::After,
                _ => NormPlaces::Before,
            };
            // Like Granite, for heads with norms and full attention.
            let multipliers = match (qk_norm, &sliding_window) {
                (Some(QkNorm::PerHead), None) => Multipliers {
                    embedding: 3.3,
                    rounds_embedding: false,
                    attention: Some(0.7),
                    residual: 0.4,
                    logits_scaling: 1.3,
                },
                _ => Multipliers::default(),
            };
            let config = DecoderConfig { sliding_window, qk_norm, norms, multipliers, ..config(false) };
            let decoder = match lora {
                Some(lora) => {
                    let fused_projections = lora.targets.first_foreign(&config).is_some();
                    let biased = DecoderConfig { fused_projections, o_bias: true, mlp_bias: true, ..config };
                    Decoder::with_lora(biased, lora, Device::Cpu).unwrap()
                }
                None => Decoder::new(config, Device::Cpu).unwrap(),
            };
            let mut holder = Holder::of_kind(decoder.strict(true), 3, kind);
            // Adapters and biases without zeros.
            for (unit, weights) in holder.decoder.units().iter().zip(&mut holder.weights) {
                for (spec, weight) in unit.params.iter().zip(weights) {
                    if unit.name.ends_with("lora") || spec.name.ends_with("bias") {
                        let numbers = Tensor::arange(weight.numel() as i64, (Kind::Float, Device::Cpu));
                        weight.copy_(&(numbers.sin() * 0.3).view_as(weight));
                    }
                }
            }
            let what = format!("{kind:?}, {:?}", holder.decoder.config());
            let sampled = crowded(&holder, 1 << 14);
            let found: Vec<f32> = sampled.iter().flat_map(|(_, it)| it.logprobs.clone()).collect();
            for at_once in [1, 4, sampled.len()] {
                assert_eq!(trained(&holder, &sampled, at_once), found, "{at_once} in a batch: {what}");
            }
            assert_eq!(crowded(&holder, 16), sampled, "prompts in chunks: {what}");
        }
    }
}

#[test]
fn a_sample_does_not_depend_on_its_batch() {
    let (holder, prompts) = (holder(false), prompts());
    let seeds: Vec<u64> = (0..prompts.len() as u64).map(|index| index % 4 + 100).collect();
    let params = SamplingParams { top_k: 6, top_p: 0.9, ..params(0.9) };
    let together = run(&holder, &prompts, &params, &seeds);
    for ((prompt, &seed), in_batch) in prompts.iter().zip(&seeds).zip(&together) {
        let alone = run(&holder, std::slice::from_ref(prompt), &params, &[seed]).remove(0);
        assert_eq!((&alone.tokens, alone.ending), (&in_batch.tokens, in_batch.ending));
        for (alone, in_batch) in alone.logprobs.iter().zip(&in_batch.logprobs) {
            assert!((alone - in_batch).abs() <= 1e-5);
        }
    }
    assert_eq!(together[0], together[4], "one prompt, one seed");
    assert_ne!(together[0].tokens, together[1].tokens, "one prompt, two seeds");
}

#[test]
fn greedy_is_the_argmax_without_a_cache() {
    let (holder, prompts) = (holder(true), prompts());
    let params = SamplingParams { stop_tokens: vec![], ..params(0.0) };
    let completions = run(&holder, &prompts, &params, &vec![0; prompts.len()]);
    for (prompt, completion) in prompts.iter().zip(&completions) {
        let mut tokens = prompt.clone();
        for _ in 0..MAX_NEW_TOKENS {
            tokens.push(most_probable(&holder, &tokens));
        }
        assert_eq!(completion.tokens, tokens[prompt.len()..]);
    }
}

/// Returns the token with the highest log-probability after `tokens`, by scoring each.
fn most_probable(holder: &Holder, tokens: &[i64]) -> i64 {
    of_each(holder, tokens, 1.0).argmax(0, false).int64_value(&[])
}

/// Returns the log-probability of each token after `tokens`.
fn of_each(holder: &Holder, tokens: &[i64], temperature: f64) -> Tensor {
    let continued: Vec<Vec<i64>> = (0..13).map(|token| [tokens, &[token]].concat()).collect();
    let sequences: Vec<Sequence> =
        continued.iter().map(|all| Sequence { tokens: all, prompt_len: tokens.len() }).collect();
    let batch = PackedBatch::new(&sequences, temperature, Device::Cpu).unwrap();
    holder.forward(&batch, false).0.logprobs
}

#[test]
fn the_likeliest_tokens_are_those_of_the_training_forward() {
    let (holder, prompts) = (holder(false), &prompts()[4..7]);
    let asked = |temperature, top_logprobs| SamplingParams { top_k: 2, top_logprobs, ..params(temperature) };
    // One batch with two temperatures, more likely tokens than the vocabulary, and none for some.
    let all = [asked(0.7, 4), asked(0.0, 99), asked(0.7, 0)];
    let mut engine = engine(&holder, 0, 100, Limits::new(8));
    for (prompt, params) in prompts.iter().zip(&all) {
        engine.submit(request(prompt, params, &[5])).unwrap();
    }
    let mut completions = vec![Completion::default(); all.len()];
    engine.run(|id, completion| completions[id as usize] = completion).unwrap();
    assert!(completions[2].top_logprobs.is_empty());
    for (wanted, temperature, id) in [(4, 0.7, 0), (13, 1.0, 1)] {
        let (mut tokens, completion) = (prompts[id].clone(), &completions[id]);
        assert_eq!(completion.top_logprobs.len(), completion.tokens.len());
        for (&token, found) in completion.tokens.iter().zip(&completion.top_logprobs) {
            let (values, expected) = of_each(&holder, &tokens, temperature).topk(wanted, 0, true, true);
            let (values, expected) =
                (Vec::<f32>::try_from(values).unwrap(), Vec::<i64>::try_from(expected).unwrap());
            assert_eq!(found.iter().map(|(token, _)| *token).collect::<Vec<_>>(), expected);
            assert!(
                found.iter().zip(&values).all(|((_, found), value)| (found - value).abs() < 1e-5),
                "{found:?}"
            );
            tokens.push(token);
        }
    }
}

#[test]
fn a_long_prompt_in_pieces_is_the_same_prompt() {
    let holder = holder(true);
    let prompt: Vec<i64> = (0..70).map(|index| index * 5 % 12).collect();
    let params = SamplingParams { stop_tokens: vec![], ..params(1.0) };
    let run = |prefill_tokens: usize| {
        let mut engine = engine(&holder, 0, 20, Limits { prefill_tokens, ..Limits::new(4) });
        engine.submit(request(&[1, 2], &params, &[9])).unwrap();
        engine.submit(request(&prompt, &params, &[1, 2, 3])).unwrap();
        let mut completions = vec![Completion::default(); 4];
        engine.run(|id, completion| completions[id as usize] = completion).unwrap();
        completions
    };
    let whole = run(128);
    for prefill_tokens in [16, 40] {
        for (pieces, whole) in run(prefill_tokens).iter().zip(&whole) {
            assert_eq!(pieces.tokens, whole.tokens);
            for (pieces, whole) in pieces.logprobs.iter().zip(&whole.logprobs) {
                assert!((pieces - whole).abs() <= 1e-5);
            }
        }
    }
}

#[test]
fn a_group_shares_the_blocks_of_its_prompt() {
    let holder = holder(false);
    let mut engine = engine(&holder, 0, 40, Limits::new(8));
    let params = SamplingParams { stop_tokens: vec![], ..params(1.0) };
    // 40 tokens: two full shared blocks, and an own block for each of eight samples.
    let ids = engine.submit(request(&[7; 40], &params, &[0; 8])).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.load().blocks - engine.load().free_blocks, 2 + 8);
    for id in ids.skip(1) {
        engine.abort(id).unwrap();
    }
    assert_eq!(engine.load().blocks - engine.load().free_blocks, 3);
}

#[test]
fn an_aborted_sample_goes_on_with_other_weights() {
    let (old, new) = (holder(false), Holder::new(Decoder::new(config(false), Device::Cpu).unwrap(), 4));
    let params = SamplingParams { stop_tokens: vec![], ..params(1.0) };
    let mut first = engine(&old, 7, 20, Limits::new(4));
    let id = first.submit(request(&[1, 2, 3], &params, &[5])).unwrap().start;
    (0..3).for_each(|_| drop(first.step().unwrap())); // the prompt, and two tokens
    let live: Vec<_> = first.live().map(|(id, completion)| (id, completion.tokens.len())).collect();
    assert_eq!(live, [(id, 3)]);
    let begun = first.abort(id).unwrap();
    assert_eq!((begun.ending, first.abort(id), first.is_idle()), (None, None, true));

    let go_on = |holder: &Holder| {
        let mut engine = engine(holder, 8, 20, Limits::new(4));
        let samples = vec![Sample { seed: 5, begun: begun.clone(), ..Sample::default() }];
        engine.submit(Request { samples, ..request(&[1, 2, 3], &params, &[]) }).unwrap();
        let mut completed = None;
        engine.run(|_, completion| completed = Some(completion)).unwrap();
        completed.unwrap()
    };
    let spans = [PolicySpan { version: 7, tokens: 3 }, PolicySpan { version: 8, tokens: MAX_NEW_TOKENS - 3 }];
    assert_eq!(go_on(&new).policies, spans);
    assert_eq!(go_on(&new).logprobs[..3], begun.logprobs);
    let undisturbed = run(&old, &[vec![1, 2, 3]], &params, &[5]).remove(0);
    assert_eq!(go_on(&old).tokens, undisturbed.tokens);
    assert_ne!(go_on(&new).tokens, undisturbed.tokens);
}

#[test]
fn a_stop_condition_sees_every_token() {
    let holder = holder(false);
    let params = SamplingParams { stop_tokens: vec![], ..params(1.0) };
    let whole = run(&holder, &[vec![1, 2, 3]], &params, &[5]).remove(0);
    let mut engine = engine(&holder, 0, 20, Limits::new(4));
    let stop = StopCondition(Arc::new(|tokens: &[i64]| tokens.len() == 4));
    engine.submit(Request { stop: Some(stop), ..request(&[1, 2, 3], &params, &[5]) }).unwrap();
    let mut stopped = None;
    engine.run(|_, completion| stopped = Some(completion)).unwrap();
    let stopped = stopped.unwrap();
    assert_eq!((&stopped.tokens[..], stopped.ending), (&whole.tokens[..4], Some(Ending::Stop)));
}

/// Pseudorandom numbers below a bound (Knuth's MMIX).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// A cache with room for a fraction of the requests, prompts of several chunks, and random aborts, half of
/// which continue later.
#[test]
fn ten_thousand_requests_leave_no_block_behind() {
    const REQUESTS: usize = 10_000;
    let holder = holder(false);
    let greedy = |max_new_tokens: usize| SamplingParams { max_new_tokens, ..params(0.0) };
    let mut random = Random(1);
    let kinds: Vec<(Vec<i64>, SamplingParams)> = (0..60)
        .map(|kind| {
            let prompt_len = if kind % 10 == 0 { 50 } else { 1 + random.below(20) };
            let prompt = (0..prompt_len).map(|_| random.below(12) as i64).collect();
            (prompt, greedy(1 + random.below(30) as usize))
        })
        .collect();
    let expected: Vec<Vec<i64>> = kinds
        .iter()
        .map(|(prompt, params)| run(&holder, std::slice::from_ref(prompt), params, &[0]).remove(0).tokens)
        .collect();

    let mut engine = engine(&holder, 0, 10, Limits { prefill_tokens: 32, ..Limits::new(12) });
    let (mut kind_of, mut open) = (Vec::new(), Vec::new());
    let (mut asked, mut ended, mut given_up) = (0, 0, 0);
    while asked < REQUESTS || !engine.is_idle() {
        while asked < REQUESTS && engine.load().waiting < 10 {
            let (kind, samples) = (random.below(60) as usize, 1 + random.below(3) as usize);
            let (prompt, params) = &kinds[kind];
            let ids = engine.submit(request(prompt, params, &vec![0; samples])).unwrap();
            open.extend(ids);
            kind_of.resize(kind_of.len() + samples, kind);
            asked += 1;
        }
        if random.below(8) == 0 && !open.is_empty() {
            let id = open.swap_remove(random.below(open.len() as u64) as usize);
            let begun = engine.abort(id).expect("the sample is live");
            assert!(expected[kind_of[id as usize]].starts_with(&begun.tokens));
            given_up += 1;
            if random.below(2) == 0 {
                let (prompt, params) = &kinds[kind_of[id as usize]];
                let samples = vec![Sample { begun, ..Sample::default() }];
                let ids = engine.submit(Request { samples, ..request(prompt, params, &[]) }).unwrap();
                kind_of.push(kind_of[id as usize]);
                open.extend(ids);
            }
        }
        for (id, completion) in engine.step().unwrap() {
            assert_eq!(completion.tokens, expected[kind_of[id as usize]], "sample {id}");
            assert!(completion.ending.is_some());
            open.retain(|&other| other != id);
            ended += 1;
        }
    }
    let load = engine.load();
    assert_eq!((open.len(), load.waiting, load.live), (0, 0, 0));
    assert_eq!(load.free_blocks, load.blocks);
    assert_eq!(ended + given_up, kind_of.len());
    assert!(load.preemptions > 100, "{load:?}: the test needs a cache that is short of room");
}

#[test]
fn what_does_not_fit_is_refused() {
    let holder = holder(false);
    let check = |prompt: &[i64], params: &SamplingParams, expected: &str| {
        let mut engine = engine(&holder, 0, 5, Limits::new(2));
        let error = engine.submit(request(prompt, params, &[0])).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(engine.is_idle());
    };
    check(&[], &params(1.0), "is empty");
    check(&[1; 57], &params(1.0), "needs 5 cache blocks");
    check(&[1; 73], &params(1.0), "max_position_embeddings = 80");
    check(&[1], &params(-1.0), "temperature");
    check(&[1, 99], &params(1.0), "there is no token 99");
}
