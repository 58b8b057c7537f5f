//! Routes of sampling, replayed in training; and sums over routers, with the loss that balances them.

use anyroll_close::largest_difference;
use anyroll_models::{
    Completion, Decoder, DecoderConfig, ExpertsConfig, KvCache, Model, PackedBatch, Request, RouteShape,
    Routes, Sample, SamplingParams, Scores, Sequence, generation::Limits,
};
use tch::{Device, Kind, Tensor};

use crate::generation::{config, engine, params};
use crate::holder::Holder;

const EXPERTS: i64 = 5;

/// Experts in the first and the last of three layers.
fn mixture() -> Decoder {
    let experts = ExpertsConfig::plain(vec![true, false, true], EXPERTS, 2, 12);
    let config = config(true);
    Decoder::new(DecoderConfig { num_hidden_layers: 3, experts: Some(experts), ..config }, Device::Cpu)
        .unwrap()
}

fn request(prompt: &[i64], samples: Vec<Sample>) -> Request {
    let params = SamplingParams { max_new_tokens: 28, stop_tokens: vec![], ..params(0.7) };
    Request { prompt: prompt.to_vec(), params: params.into(), stop: None, format: None, samples }
}

/// Returns completions of groups and single prompts in a cache too small for all, so that sequences are preempted.
fn sampled(holder: &Holder) -> Vec<(Vec<i64>, Completion)> {
    let prompts =
        [3, 40, 1, 17, 16, 50, 8].map(|len| (0..len).map(|i| (i * 5 + len) % 12).collect::<Vec<i64>>());
    let limits = Limits { prefill_tokens: 32, ..Limits::new(7) };
    let mut engine = engine(holder, 0, 8, limits).recording_routes().unwrap();
    let mut of_sample = Vec::new();
    for (number, prompt) in (0_u64..).zip(&prompts) {
        let sample = |sample| Sample { seed: number * 10 + sample, ..Sample::default() };
        let samples: Vec<Sample> = (0..1 + number % 3).map(sample).collect();
        of_sample.extend(samples.iter().map(|_| prompt.clone()));
        engine.submit(request(prompt, samples)).unwrap();
    }
    let mut completions = vec![Completion::default(); of_sample.len()];
    engine.run(|id, completion| completions[id as usize] = completion).unwrap();
    assert!(engine.load().preemptions > 0, "the test needs a cache that is short of room");
    of_sample.into_iter().zip(completions).collect()
}

type Pack = fn(&[Sequence], f64, Device) -> anyroll_models::Result<PackedBatch>;

fn packed(pack: Pack, sampled: &[(Vec<i64>, Completion)]) -> PackedBatch {
    let texts: Vec<(Vec<i64>, usize)> =
        sampled.iter().map(|(prompt, it)| ([&prompt[..], &it.tokens].concat(), prompt.len())).collect();
    let sequences: Vec<Sequence> =
        texts.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
    pack(&sequences, 0.7, Device::Cpu).unwrap()
}

fn routed(batch: PackedBatch, sampled: &[(Vec<i64>, Completion)], shape: RouteShape) -> PackedBatch {
    let routes: Vec<&Routes> = sampled.iter().map(|(_, it)| &it.routes).collect();
    batch.with_routes(&routes, shape).unwrap()
}

/// Rows, entropy, replayed rows and differing rows of the last forward.
fn others(batch: &PackedBatch) -> Vec<f64> {
    let sums = batch.router().unwrap().take().unwrap().unwrap();
    Vec::try_from(sums.others).unwrap()
}

#[test]
fn the_choices_of_sampling_are_those_of_the_same_weights_in_training() {
    let holder = Holder::new(mixture(), 3);
    let shape = holder.decoder.route_shape().unwrap();
    assert_eq!(shape, RouteShape { layers: 2, per_token: 2, experts: EXPERTS });
    let sampled = sampled(&holder);
    for (prompt, completion) in &sampled {
        assert_eq!(completion.routes.tokens(shape), prompt.len() + completion.tokens.len() - 1);
    }
    for pack in [PackedBatch::new as Pack, PackedBatch::sharing] {
        let own = holder.forward(&packed(pack, &sampled), false).0;
        let batch = routed(packed(pack, &sampled), &sampled, shape).watching(0.0);
        let replayed = holder.forward(&batch, false).0;
        assert!(largest_difference(&own.logprobs, &replayed.logprobs) <= 1e-5);
        let rows = 2.0 * batch.tokens() as f64;
        let others = others(&batch);
        assert_eq!((others[0], others[2], others[3]), (rows, rows, 0.0));
        assert!(others[1] > 0.0 && others[1] < rows * (EXPERTS as f64).ln());
    }
}

/// With other weights the sampled choices stay; some differ from the router's own, and the log-probs with them.
#[test]
fn other_weights_keep_the_choices_that_were_sampled() {
    let sampled = sampled(&Holder::new(mixture(), 3));
    let holder = Holder::new(mixture(), 4);
    let shape = holder.decoder.route_shape().unwrap();
    let own = holder.forward(&packed(PackedBatch::new, &sampled), false).0;
    let batch = routed(packed(PackedBatch::new, &sampled), &sampled, shape).watching(0.0);
    let replayed = holder.forward(&batch, false).0;
    assert!(largest_difference(&own.logprobs, &replayed.logprobs) > 0.01);
    let found = others(&batch);
    assert!(found[3] > 0.0 && found[3] < found[2], "{found:?}");
    // Tokens behind the routes have the router's own.
    let few: Vec<(Vec<i64>, Completion)> = sampled
        .iter()
        .map(|(prompt, it)| (prompt.clone(), Completion { routes: Routes::default(), ..it.clone() }))
        .collect();
    let batch = routed(packed(PackedBatch::new, &few), &few, shape).watching(0.0);
    assert_eq!(largest_difference(&holder.forward(&batch, false).0.logprobs, &own.logprobs), 0.0);
    assert_eq!(others(&batch)[2..], [0.0, 0.0]);
}

/// A turn after an aborted one, with other weights, and one that follows a kept sample: tokens keep their first routes.
#[test]
fn continued_completions_keep_their_routes() {
    let [first, second] = [3, 4].map(|seed| Holder::new(mixture(), seed));
    let shape = first.decoder.route_shape().unwrap();
    let engine_of = |holder: &Holder| {
        engine(holder, 0, KvCache::blocks_for(2, 80), Limits::new(2)).recording_routes().unwrap()
    };
    let prompt = [1, 2, 3, 4];
    let mut engine = engine_of(&first);
    let id = engine.submit(request(&prompt, vec![Sample { seed: 5, ..Sample::default() }])).unwrap().start;
    (0..6).for_each(|_| drop(engine.step().unwrap()));
    let begun = engine.abort(id).unwrap();
    assert_eq!(begun.routes.tokens(shape), prompt.len() + begun.tokens.len() - 1);
    let mut engine = engine_of(&second);
    let more = Sample { seed: 5, begun: begun.clone(), keep: true, ..Sample::default() };
    let kept = engine.submit(request(&prompt, vec![more])).unwrap().start;
    let mut ended = Vec::new();
    engine.run(|_, completion| ended.push(completion)).unwrap();
    let turn = ended.pop().unwrap();
    let text = |routes: &Routes| String::from(routes.clone());
    // Base64 of whole groups of three bytes.
    let known = begun.routes.tokens(shape) * shape.token_bytes() / 3 * 4;
    assert_eq!(text(&turn.routes)[..known], text(&begun.routes)[..known]);
    let context = [&prompt[..], &turn.tokens, &[7, 8]].concat();
    let begun = Completion { routes: turn.routes.clone(), ..Completion::default() };
    let follow = |begun| Sample { seed: 6, begun, follows: Some(kept), ..Sample::default() };
    let error =
        engine.submit(request(&context, vec![follow(Completion::default())])).unwrap_err().to_string();
    assert!(error.contains("`begun.routes`"), "{error}");
    engine.submit(request(&context, vec![follow(begun)])).unwrap();
    engine.run(|_, completion| ended.push(completion)).unwrap();
    let last = ended.pop().unwrap();
    assert!(engine.load().reused_tokens > 0);
    assert_eq!(last.routes.tokens(shape), context.len() + last.tokens.len() - 1);
    let known = turn.routes.tokens(shape) * shape.token_bytes() / 3 * 4;
    assert_eq!(text(&last.routes)[..known], text(&turn.routes)[..known]);
}

#[test]
fn what_has_no_routes_is_refused() {
    let dense = Holder::new(Decoder::new(config(true), Device::Cpu).unwrap(), 3);
    assert!(dense.decoder.route_shape().is_none());
    let error = engine(&dense, 0, 9, Limits::new(2)).recording_routes().unwrap_err().to_string();
    assert!(error.contains("no layer has experts"), "{error}");
    let shape = mixture().route_shape().unwrap();
    let sampled = [(vec![1, 2], Completion { tokens: vec![3], ..Completion::default() })];
    assert!(packed(PackedBatch::new, &sampled).with_routes(&[], shape).is_err());
}

/// A sum of log-probs, each with a weight, plus `coef` times the balancing loss.
fn loss(holder: &Holder, batch: &PackedBatch, coef: f64) -> f64 {
    let logprobs = holder.forward(batch, false).0.logprobs;
    let balance = batch.router().unwrap().take().unwrap().unwrap().balance.double_value(&[0]);
    (weights_of(&logprobs) * logprobs).sum(Kind::Double).double_value(&[]) + coef * balance
}

fn weights_of(logprobs: &Tensor) -> Tensor {
    (Tensor::arange(logprobs.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7).sin()
}

/// Gradients of every parameter, with given routes and with the balancing loss, against finite differences.
#[test]
fn gradients_equal_finite_differences() {
    const STEP: f64 = 1e-5;
    let sampled = sampled(&Holder::new(mixture(), 3));
    for (is_replayed, coef) in [(true, 0.0), (true, 0.8), (false, 0.8)] {
        let mut holder = Holder::of_kind(mixture(), 4, Kind::Double);
        let shape = holder.decoder.route_shape().unwrap();
        let batch = packed(PackedBatch::sharing, &sampled[..5]).watching(coef);
        let batch = if is_replayed { routed(batch, &sampled[..5], shape) } else { batch };
        let (Scores { logprobs, .. }, saved) = holder.forward(&batch, true);
        holder.backward(&batch, saved, weights_of(&logprobs), None);
        for unit in 0..holder.weights.len() {
            for param in 0..holder.weights[unit].len() {
                let values = holder.weights[unit][param].view([-1]);
                let gradient = holder.grads[unit].views()[param].view([-1]);
                // The values with the largest gradients: of rows and experts that the batch reaches.
                let index = gradient.abs().argmax(0, false).int64_value(&[]);
                let value = values.get(index);
                let before = value.double_value(&[]);
                let [above, below] = [STEP, -STEP].map(|step| {
                    drop(value.shallow_clone().fill_(before + step));
                    loss(&holder, &batch, coef)
                });
                drop(value.shallow_clone().fill_(before));
                let (expected, found) = ((above - below) / (2.0 * STEP), gradient.double_value(&[index]));
                let name = &holder.decoder.units()[unit].params[param].name;
                let near = 1e-5 * (1.0 + expected.abs());
                assert!((found - expected).abs() < near, "{name}: {found}, expected {expected}");
            }
        }
    }
}
