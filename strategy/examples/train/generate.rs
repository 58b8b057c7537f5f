//! Times sampling by ranks that each have a part of the weights, and the way of the weights to it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyroll_backends::{CollectiveGroup, DType, Device, Stream, TorchDevice};
use anyroll_models::{
    Decoder, Engine, ExpertParts, KvCache, Request, Sample, SamplingParams, generation::Limits,
};
use anyroll_strategy::{Zero, neighbours, peers, shared};
use serde_json::{Value, json};

use crate::{Noise, Options, mix, shapes, strategy, used_gib};

/// Prompts, and the tokens of each and of its completion.
#[derive(Clone, Copy)]
struct Work {
    batch: usize,
    prompt: usize,
    tokens: usize,
}

/// Returns the tokens per second of a group of ranks, the time of a step, and that of the weights' way to the group.
pub fn times(device: &Arc<dyn Device>, group: CollectiveGroup, options: &Options) -> Value {
    let work = Work {
        batch: options.number("batch", 64),
        prompt: options.number("prompt", 256),
        tokens: options.number("tokens", 256),
    };
    let at = device.torch_device().map(TorchDevice::tch).expect("libtorch computes on it");
    let together = options.number("together", 1);
    let compute = Stream::torch(device).unwrap();
    let model = options.text("model", "0.5b");
    let decoder = Arc::new(Decoder::new(shapes::decoder(model, 8192), at).unwrap());
    let split = (together > 1).then(|| {
        let ranks = neighbours(&group, "rollout", together).unwrap();
        Arc::new(decoder.split(peers(&ranks, &compute), ExpertParts::Columns).unwrap())
    });
    let mut zero =
        Zero::from_source(decoder.clone(), strategy(options), None, device, group, &Noise).unwrap();
    let (mut ways, mut weights) = (Vec::new(), None);
    for _ in 0..3 {
        drop(weights.take());
        compute.synchronize().unwrap();
        let started = Instant::now();
        weights = Some(match &split {
            None => zero.weights().unwrap(),
            Some(split) => zero
                .weights_made(|_, whole, _| Some(whole / together), |unit, whole| split.own_part(unit, whole))
                .unwrap(),
        });
        compute.synchronize().unwrap();
        ways.push(started.elapsed().as_secs_f64());
    }
    let (weights, sampled) = (weights.expect("made above"), split.as_ref().unwrap_or(&decoder));
    let run = || {
        let blocks = KvCache::blocks_for(work.batch, work.prompt + work.tokens);
        let cache = KvCache::new(sampled.config(), blocks, DType::Bf16, &compute).unwrap();
        let mut engine =
            Engine::new(sampled.clone(), shared(&weights), 0, cache, Limits::new(work.batch)).unwrap();
        generate(&mut engine, work, decoder.config().vocab_size)
    };
    run(); // libraries and kernels are loaded
    let (prefill, whole, digest) = run();
    json!({
        "model": model, "mode": "generate", "together": together, "batch": work.batch, "prompt": work.prompt,
        "tokens": work.tokens, "weights_s": ways.into_iter().fold(f64::INFINITY, f64::min),
        "prefill_s": prefill.as_secs_f64(), "digest": digest, "used_gib": used_gib(device),
        "tokens_per_s": (work.batch * work.tokens) as f64 / whole.as_secs_f64(),
        "step_ms": (whole - prefill).as_secs_f64() * 1e3 / work.tokens as f64,
    })
}

/// Returns the time of the prompts, the total, and a digest of all tokens.
fn generate(
    engine: &mut Engine,
    Work { batch, prompt, tokens }: Work,
    vocab: i64,
) -> (Duration, Duration, u64) {
    let params = Arc::new(SamplingParams { max_new_tokens: tokens, ..SamplingParams::default() });
    let started = Instant::now();
    for row in 0..batch {
        let prompt = (0..prompt).map(|at| ((row * 7919 + at * 104_729) as i64) % vocab).collect();
        let samples = vec![Sample { seed: row as u64, ..Sample::default() }];
        engine.submit(Request { prompt, params: params.clone(), stop: None, format: None, samples }).unwrap();
    }
    while engine.load().waiting > 0 {
        engine.step().unwrap();
    }
    let prefill = started.elapsed();
    let mut digest = 0;
    engine
        .run(|id, completion| {
            let tokens = completion.tokens.iter().zip(0..);
            digest ^=
                tokens.fold(mix(id), |sum, (&token, at)| sum.wrapping_add(mix(token as u64 ^ at << 32)));
        })
        .unwrap();
    (prefill, started.elapsed(), digest)
}
