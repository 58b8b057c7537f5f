//! Times generation with random weights in bf16 on the first GPU: `bench_generate SIZE BATCH... [--prompt
//! 256] [--tokens 512] [--group 1] [--lora RANK [--merged]] [--fp16] [--fp8] [--strict] [--routes]
//! [--greedy] [--speculation TOKENS] [--steps]`.
//!
//! SIZE is 0.5b, 1.5b or 7b (Qwen2.5's shapes), olmo2-1b, or a mixture: olmoe, or 30b-a3b (Qwen3's shape, 61
//! GB of weights). `--group` samples share a prompt. With `--lora` every matrix of a layer has an adapter;
//! `--merged` merges them first and reports the time. `--fp16` takes fp16 in place of bf16. `--fp8`
//! keeps the layers' matrices in 8 bits. `--strict` computes row by row. `--routes` records the
//! experts of a mixture's tokens. `--greedy` takes the likeliest tokens, which soon repeat themselves, and `--speculation` lets
//! each sequence propose TOKENS of them. Prints one JSON line per batch size; `--steps` adds the times of the single operations of a decoding step.
//! `bench/generate/run.py` runs it against its peer.

#![forbid(unsafe_code)]

use std::{
    mem::take,
    sync::Arc,
    time::{Duration, Instant},
};

use anyroll_backends::{
    BackendKind, DType, DeviceId, Graph, Stream, TorchDevice, devices, open,
    ops::{self, AttentionParts, Normed, PagedCache, StepRotation},
};
use anyroll_models::{
    Decoder, DecoderConfig, Engine, ExpertsConfig, KvCache, LoraConfig, LoraTarget, Model, NormPlaces,
    QkNorm, Request, Sample, SamplingParams,
    generation::{Limits, Speculated, Speculation},
};
use tch::{Device, Kind, Tensor};

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let size = arguments.next().expect("usage: bench_generate SIZE BATCH..., see its source");
    let (mut batches, mut lora, mut merged, mut strict, mut steps) = (Vec::new(), None, false, false, false);
    let (mut dtype, mut fp8, mut rounds_rows, mut routes) = (DType::Bf16, false, false, false);
    let mut work = Work { prompt: 256, tokens: 512, group: 1, temperature: 1.0 };
    let mut speculation = None;
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().expect("a number follows").parse().expect("a number");
        match argument.as_str() {
            "--prompt" => work.prompt = number(),
            "--tokens" => work.tokens = number(),
            "--group" => work.group = number(),
            "--lora" => lora = Some(number() as i64),
            "--merged" => merged = true,
            "--fp16" => dtype = DType::F16,
            "--fp8" => fp8 = true,
            "--fp8-activations" => (fp8, rounds_rows) = (true, true),
            "--strict" => strict = true,
            "--routes" => routes = true,
            "--greedy" => work.temperature = 0.0,
            "--speculation" => {
                speculation =
                    Some(Speculation { tokens: number(), longest: 4, shortest: 2, sequences: usize::MAX });
            }
            "--steps" => steps = true,
            batch => batches.push(batch.parse::<usize>().expect("a batch size")),
        }
    }
    let device = open(gpu()).unwrap();
    let stream = Stream::torch(&device).unwrap();
    let config = config(&size);
    assert!(!steps || config.experts.is_none(), "--steps does not support mixtures");
    let decoder = match lora {
        None => Decoder::new(config.clone(), torch(&device)),
        Some(rank) => {
            let targets = LoraTarget::ALL.to_vec();
            let lora = LoraConfig::new(rank, 2.0 * rank as f64, targets);
            Decoder::with_lora(config.clone(), &lora, torch(&device))
        }
    };
    let mut decoder = Arc::new(decoder.unwrap().strict(strict));
    let mut weights = weights(&decoder, (dtype.kind(), torch(&device)));
    let timed = |name: &str, made: &mut dyn FnMut()| {
        stream.synchronize().unwrap();
        let started = Instant::now();
        made();
        stream.synchronize().unwrap();
        println!("{{\"size\": \"{size}\", \"{name}\": {:.4}}}", started.elapsed().as_secs_f64());
    };
    if merged {
        timed("merge_s", &mut || weights = decoder.merge(take(&mut weights)).unwrap());
        decoder = Arc::new(decoder.merged());
    }
    if fp8 {
        timed("round_s", &mut || weights = decoder.all_in_eight_bits(take(&mut weights)).unwrap());
    }
    if rounds_rows {
        decoder = Arc::new(Decoder::clone(&decoder).rounding_rows());
    }
    let weight_bytes: usize =
        weights.iter().flatten().map(|it| it.numel() * it.kind().elt_size_in_bytes()).sum();
    for batch in batches {
        let run = || {
            let blocks = KvCache::blocks_for(batch, work.prompt + work.tokens);
            let cache = KvCache::new(&config, blocks, dtype, &stream).unwrap();
            let weights =
                weights.iter().map(|unit| unit.iter().map(Tensor::shallow_clone).collect()).collect();
            let limits = Limits { speculation, ..Limits::new(batch) };
            let engine = Engine::new(decoder.clone(), weights, 0, cache, limits).unwrap();
            let mut engine = if routes { engine.recording_routes().unwrap() } else { engine };
            generate(&mut engine, batch, work, &config)
        };
        run(); // libraries and kernels are loaded
        let (prefill, whole, told) = run();
        let Work { prompt, tokens, group, .. } = work;
        let made = (batch * tokens) as f64;
        println!(
            "{{\"size\": \"{size}\", \"dtype\": \"{dtype:?}\", \"batch\": {batch}, \"prompt\": {prompt}, \"tokens\": {tokens}, \
             \"group\": {group}, \"lora\": {}, \"fp8\": {fp8}, \"fp8_activations\": {rounds_rows}, \"routes\": {routes}, \"weight_bytes\": {weight_bytes}, \"merged\": {merged}, \"strict\": {strict}, \"proposals\": {}, \"proposed\": {}, \"accepted\": {}, \"tokens_per_s\": {:.0}, \"prefill_s\": {:.4}, \"step_ms\": {:.4}}}",
            lora.unwrap_or(0),
            told.proposals,
            told.proposed,
            told.accepted,
            made / whole.as_secs_f64(),
            prefill.as_secs_f64(),
            (whole - prefill).as_secs_f64() * 1e3 / tokens as f64,
        );
        if steps {
            let length = (prompt + tokens / 2) as i64;
            operations(&config, (dtype.kind(), torch(&device)), (batch as i64, length), fp8);
        }
    }
}

/// Tokens per prompt and per completion, samples per prompt, and their temperature.
#[derive(Clone, Copy)]
struct Work {
    prompt: usize,
    tokens: usize,
    group: usize,
    temperature: f64,
}

/// Returns the first device that runs models and is not the host.
fn gpu() -> DeviceId {
    let is_gpu = |kind: &BackendKind| kind.runs_models() && !kind.is_host() && devices(*kind).is_ok();
    let backend = BackendKind::all().find(is_gpu).expect("no GPU here: see `anyroll doctor`");
    DeviceId { backend, ordinal: 0 }
}

/// Returns libtorch's device.
fn torch(device: &Arc<dyn anyroll_backends::Device>) -> Device {
    device.torch_device().map(TorchDevice::tch).expect("libtorch computes on it")
}

fn config(size: &str) -> DecoderConfig {
    let (hidden_size, num_hidden_layers, heads, kv_heads, head_dim, intermediate_size, tie) = match size {
        "0.5b" => (896, 24, 14, 2, 64, 4864, true),
        "1.5b" => (1536, 28, 12, 2, 128, 8960, true),
        "7b" => (3584, 28, 28, 4, 128, 18944, false),
        "14b" => (5120, 48, 40, 8, 128, 13824, false),
        "olmo2-1b" => (2048, 16, 16, 16, 128, 8192, false),
        "olmoe" => (2048, 16, 16, 16, 128, 1024, false),
        "30b-a3b" => (2048, 48, 32, 4, 128, 6144, false),
        other => panic!("there is no size {other}"),
    };
    let plain = DecoderConfig {
        vocab_size: 151_936,
        num_key_value_heads: kv_heads,
        head_dim,
        intermediate_size,
        rope_theta: 1e6,
        max_position_embeddings: 40_960,
        tie_word_embeddings: tie,
        ..DecoderConfig::plain(num_hidden_layers, hidden_size, heads)
    };
    let experts = |num_experts, moe_intermediate_size| {
        ExpertsConfig::plain(vec![true; num_hidden_layers], num_experts, 8, moe_intermediate_size)
    };
    let (together, per_head) = (Some(QkNorm::Together), Some(QkNorm::PerHead));
    match size {
        "olmo2-1b" => {
            DecoderConfig { vocab_size: 100_352, qk_norm: together, norms: NormPlaces::After, ..plain }
        }
        "olmoe" => {
            DecoderConfig { vocab_size: 50_304, qk_norm: together, experts: Some(experts(64, 1024)), ..plain }
        }
        "30b-a3b" => DecoderConfig { qk_norm: per_head, experts: Some(experts(128, 768)), ..plain },
        _ => DecoderConfig { qkv_bias: true, ..plain },
    }
}

fn weights(decoder: &Decoder, at: (Kind, Device)) -> Vec<Vec<Tensor>> {
    let weight = |spec: &anyroll_models::ParamSpec| {
        let values = Tensor::randn(spec.shape.as_slice(), at) * 0.02;
        if spec.shape.len() == 1 { values + 1.0 } else { values }
    };
    decoder.units().iter().map(|unit| unit.params.iter().map(weight).collect()).collect()
}

/// Returns the time of the first step, which runs the prompts, the total time, and what was proposed.
fn generate(
    engine: &mut Engine,
    batch: usize,
    Work { prompt, tokens, group, temperature }: Work,
    config: &DecoderConfig,
) -> (Duration, Duration, Speculated) {
    let params = SamplingParams { temperature, max_new_tokens: tokens, ..SamplingParams::default() };
    let params = Arc::new(params);
    let started = Instant::now();
    for row in (0..batch).step_by(group) {
        let prompt = (0..prompt).map(|i| ((row * 7919 + i * 104_729) as i64) % config.vocab_size).collect();
        let sample = |seed: usize| Sample { seed: seed as u64, ..Sample::default() };
        let samples = (row..batch.min(row + group)).map(sample).collect();
        engine.submit(Request { prompt, params: params.clone(), stop: None, format: None, samples }).unwrap();
    }
    while engine.load().waiting > 0 {
        engine.step().unwrap();
    }
    let prefill = started.elapsed();
    engine.run(|_, completion| assert_eq!(completion.tokens.len(), tokens)).unwrap();
    (prefill, started.elapsed(), engine.load().speculated)
}

/// Times the single operations of a step, recorded, in microseconds, with their number per step.
fn operations(config: &DecoderConfig, at: (Kind, Device), (rows, length): (i64, i64), fp8: bool) {
    let DecoderConfig { hidden_size, intermediate_size, head_dim, vocab_size, .. } = *config;
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    let random = |size: &[i64]| Tensor::randn(size, at) * 0.1;
    let layers = config.num_hidden_layers;
    let qkv_width = (heads + 2 * kv_heads) * head_dim;
    // One copy per layer, so that weights, keys and values come from memory as in a step.
    let weights = |outputs: i64, inputs: i64, count: usize| -> Vec<Tensor> {
        let weight = |_| random(&[outputs, inputs]);
        let narrow =
            |weight: Tensor| if fp8 && count > 1 { ops::in_eight_bits(&weight).unwrap() } else { weight };
        (0..count).map(weight).map(narrow).collect()
    };
    let normed = |dim: i64| {
        let mut normed = Normed::new(rows, dim, at.0, at.1).unwrap();
        normed.become_norm_of(&random(&[rows, dim]), &random(&[dim]), 1e-6).unwrap();
        normed
    };
    for (name, count, outputs) in [("qkv", layers, qkv_width), ("head", 1, vocab_size)] {
        let (mut x, mut y) = (normed(hidden_size), random(&[rows, outputs]));
        let weights = weights(outputs, hidden_size, count);
        let mut next = weights.iter().cycle();
        time(name, count, count, || ops::linear_into(&mut x, next.next().unwrap(), None, &mut y).unwrap());
    }
    for (name, inputs) in [("o, norm", heads * head_dim), ("down, norm", intermediate_size)] {
        let (weights, x, norm) =
            (weights(hidden_size, inputs, layers), random(&[rows, inputs]), random(&[hidden_size]));
        let (mut y, mut of_y, mut next) =
            (random(&[rows, hidden_size]), normed(hidden_size), weights.iter().cycle());
        time(name, layers, layers, || {
            ops::add_linear_and_norm_(&mut y, &x, next.next().unwrap(), (&norm, 1e-6), &mut of_y).unwrap();
        });
    }
    let (gates, mut x) = (weights(2 * intermediate_size, hidden_size, layers), normed(hidden_size));
    let [mut gate_up, mut activated] = [2, 1].map(|halves| random(&[rows, halves * intermediate_size]));
    let mut next = gates.iter().cycle();
    time("gate_up, swiglu", layers, layers, || {
        ops::swiglu_linear_into(&mut x, next.next().unwrap(), &mut gate_up, &mut activated).unwrap();
    });

    let table_len = (length + 15) / 16;
    let tables = (Tensor::arange(rows * table_len, (Kind::Int, at.1)) + 1).view([rows, table_len]);
    let size = [rows * table_len + 1, 16, kv_heads, head_dim];
    let caches: Vec<[Tensor; 2]> = (0..layers).map(|_| [random(&size), random(&size)]).collect();
    let caches: Vec<PagedCache> =
        caches.iter().map(|[keys, values]| PagedCache { keys, values, tables: &tables }).collect();
    let positions = Tensor::full([rows], length - 1, (Kind::Int64, at.1));
    let qkv = random(&[rows, heads + 2 * kv_heads, head_dim]);
    let frequencies = ops::rope_frequencies(head_dim, config.rope_theta);
    let table = ops::rope_table(config.max_position_embeddings, &frequencies, 1.0, at.1).unwrap();
    let mut parts = AttentionParts::new(rows, heads, head_dim, length, at.1).unwrap();
    let mut out = random(&[rows, heads * head_dim]);
    let rotation = StepRotation { norms: None, table: &table };
    let (causal, mut next) = (ops::Causal::whole(0.1), caches.iter().cycle());
    time("rotation, attention", layers, layers, || {
        let cache = *next.next().unwrap();
        ops::attend_into(&qkv, Some(rotation), &positions, cache, causal, &mut parts, &mut out).unwrap();
    });
    let logits = random(&[rows, vocab_size]);
    let choices = Tensor::from_slice(&[1.0f32, 1.0, 0.0, 0.0, 1.0]).repeat([rows, 1]).to_device(at.1);
    let uniforms = Tensor::rand([rows], (Kind::Double, at.1));
    let [mut tokens, mut next, mut chosen] = [(); 3].map(|()| Tensor::zeros([rows], (Kind::Int64, at.1)));
    let mut logprobs = Tensor::zeros([rows], (Kind::Float, at.1));
    let mut seen = Tensor::zeros([rows, (vocab_size + 31) / 32], (Kind::Int, at.1));
    time("sampling", 1, 8, || {
        let sampling = ops::Sampling {
            choices: &choices,
            uniforms: &uniforms,
            seen: &mut seen,
            tokens: &mut tokens,
            positions: &mut next,
            chosen: &mut chosen,
            logprobs: &mut logprobs,
        };
        ops::sample_into(&logits, sampling).unwrap();
    });
}

/// Times a recording of `copies` repetitions of `body`.
fn time(name: &str, count: usize, copies: usize, mut body: impl FnMut()) {
    const REPETITIONS: u32 = 20;
    let device = open(gpu()).unwrap();
    let stream = Stream::torch(&device).unwrap();
    let graph = Graph::record::<anyroll_backends::Error>(&device, || {
        (0..copies).for_each(|_| body());
        Ok(())
    });
    let graph = graph.unwrap();
    graph.launch(&stream).unwrap();
    let begin = stream.record_timed().unwrap();
    (0..REPETITIONS).for_each(|_| graph.launch(&stream).unwrap());
    let end = stream.record_timed().unwrap();
    stream.synchronize().unwrap();
    let each = begin.elapsed(&end).unwrap().as_secs_f64() * 1e6 / f64::from(REPETITIONS) / copies as f64;
    println!("{name:20} {each:8.1} us x {count:3} = {:8.3} ms", each * count as f64 / 1e3);
}
