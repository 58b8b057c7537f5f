//! Times a decoder of the quickstart's shape on a CPU: forward, backward and each operation.
//!
//! `cargo run --release -p anyroll-models --example bench_decoder -- [threads] [passes]`
//!
//! By default glibc returns large blocks to the kernel and faults them in again in every pass, which takes a
//! tenth of the time. `MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=33554432` in the environment
//! avoids that.

#![forbid(unsafe_code)]

#[path = "../tests/decoder/holder.rs"]
mod holder;

use std::{sync::Arc, time::Instant};

use anyroll_backends::{
    BackendKind, DType, DeviceId, Stream, open,
    ops::{self, AttentionOptions, AttentionOutput, Packing, Qkv, QkvGrads, Rotation, Store},
};
use anyroll_models::{
    Decoder, DecoderConfig, Engine, KvCache, PackedBatch, Request, Sample, SamplingParams, Sequence,
    generation::Limits,
};
use holder::Holder;
use tch::{Device, Kind, Tensor};

const SEQUENCES: usize = 512;
const PROMPT: usize = 7;
const LENGTH: usize = 14;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse().expect("a number"));
    let threads = arguments.next().unwrap_or(1);
    let passes = arguments.next().unwrap_or(20) as usize;
    tch::set_num_threads(threads);
    println!("{threads} threads, best and median of {passes} passes, milliseconds");

    let config =
        DecoderConfig { intermediate_size: 176, tie_word_embeddings: true, ..DecoderConfig::plain(2, 64, 4) };
    let tokens: Vec<i64> = (0..SEQUENCES * LENGTH).map(|i| (i * 7 % 12) as i64).collect();
    let sequences: Vec<Sequence> =
        tokens.chunks(LENGTH).map(|tokens| Sequence { tokens, prompt_len: PROMPT }).collect();
    let batch = PackedBatch::new(&sequences, 1.0, Device::Cpu).unwrap();
    let mut holder = Holder::new(Decoder::new(config.clone(), Device::Cpu).unwrap(), 0);
    let ones = Tensor::ones([batch.targets()], (Kind::Float, Device::Cpu));

    time("pack a batch", passes, || drop(PackedBatch::new(&sequences, 1.0, Device::Cpu).unwrap()));
    time("forward, not saving", passes, || drop(holder.forward(&batch, false)));
    time("forward + backward", passes, || {
        let (_, saved) = holder.forward(&batch, true);
        holder.backward(&batch, saved, ones.shallow_clone(), None);
    });
    generation(&holder, passes);
    operations(&config, passes);
}

/// Times completions of groups of 16 equal prompts, none of which stops early.
fn generation(holder: &Holder, passes: usize) {
    const GROUP: usize = 16;
    let device = open(DeviceId { backend: BackendKind::CPU, ordinal: 0 }).unwrap();
    let stream = Stream::torch(&device).unwrap();
    let params = Arc::new(SamplingParams { max_new_tokens: LENGTH - PROMPT, ..SamplingParams::default() });
    let config = holder.decoder.config();
    let decoder = Arc::new(Decoder::new(config.clone(), Device::Cpu).unwrap());
    time("generate", passes, || {
        let weights =
            holder.weights.iter().map(|unit| unit.iter().map(Tensor::shallow_clone).collect()).collect();
        let blocks = KvCache::blocks_for(SEQUENCES, LENGTH);
        let cache = KvCache::new(config, blocks, DType::F32, &stream).unwrap();
        let mut engine = Engine::new(decoder.clone(), weights, 0, cache, Limits::new(SEQUENCES)).unwrap();
        for group in 0..SEQUENCES / GROUP {
            let prompt = (0..PROMPT).map(|i| ((group + i) % 12) as i64).collect();
            let sample = |number| Sample { seed: (group * GROUP + number) as u64, ..Sample::default() };
            let samples = (0..GROUP).map(sample).collect();
            engine
                .submit(Request { prompt, params: params.clone(), stop: None, format: None, samples })
                .unwrap();
        }
        engine.run(|_, _| ()).unwrap();
    });
}

/// Times the operations of one block, at the block's sizes.
fn operations(config: &DecoderConfig, passes: usize) {
    let DecoderConfig { hidden_size: hidden, intermediate_size: intermediate, head_dim: dim, .. } = *config;
    let (heads, vocab) = (config.num_attention_heads, config.vocab_size);
    let rows = (SEQUENCES * (LENGTH - 1)) as i64;
    let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
    let packing = Packing::new(&[LENGTH as i64 - 1; SEQUENCES], Device::Cpu).unwrap();
    let table = ops::rope_table(64, &ops::rope_frequencies(dim, 10_000.0), 1.0, Device::Cpu).unwrap();

    for (name, rows_in, columns) in [
        ("qkv", hidden, 3 * hidden),
        ("o", hidden, hidden),
        ("gate_up", hidden, 2 * intermediate),
        ("down", intermediate, hidden),
    ] {
        let (x, weight, dy) =
            (random(&[rows, rows_in]), random(&[columns, rows_in]), random(&[rows, columns]));
        let dweight = random(&[columns, rows_in]);
        time(&format!("matmul {name}"), passes, || drop(x.linear(&weight, None::<&Tensor>)));
        time(&format!("matmul {name}, dx"), passes, || drop(dy.mm(&weight)));
        time(&format!("matmul {name}, dw"), passes, || drop(dy.tr().f_mm_out(&dweight, &x)));
    }
    let (mut x, weight) = (random(&[rows, hidden]), random(&[hidden]));
    let (mut dx, mut dy, mut dweight) = (random(&[rows, hidden]), random(&[rows, hidden]), random(&[hidden]));
    let residual = x.zeros_like();
    let (_, rstd) = ops::rms_norm(&x, &weight, 1e-6).unwrap();
    time("rms_norm", passes, || drop(ops::rms_norm(&x, &weight, 1e-6).unwrap()));
    time("add_rms_norm_", passes, || drop(ops::add_rms_norm_(&mut x, &residual, &weight, 1e-6).unwrap()));
    time("rms_norm_backward_", passes, || {
        ops::rms_norm_backward_(&mut dy, &x, &rstd, &weight, &mut dx, &mut dweight, Store::Write).unwrap();
    });
    let qkv = random(&[rows, 3 * heads, dim]);
    let dqkv = qkv.zeros_like();
    let [q, k, v] = [0, 1, 2].map(|part| qkv.narrow(1, part * heads, heads));
    let [mut dq, mut dk, mut dv] = [0, 1, 2].map(|part| dqkv.narrow(1, part * heads, heads));
    let mut qk = qkv.narrow(1, 0, 2 * heads);
    time("rope_", passes, || ops::rope_(&mut qk, packing.positions(), &table, Rotation::Forward).unwrap());
    let causal = ops::Causal::whole(0.25);
    let (out, lse) = ops::attention(&q, &k, &v, &packing, causal).unwrap();
    time("attention", passes, || drop(ops::attention(&q, &k, &v, &packing, causal).unwrap()));
    time("attention_backward", passes, || {
        let (qkv, output) = (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse: &lse });
        let options = AttentionOptions { packing: &packing, causal, deterministic: true };
        let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        ops::attention_backward(&out, qkv, output, options, grads).unwrap();
    });
    let padded: Vec<Tensor> = [&q, &k, &v]
        .iter()
        .map(|x| x.reshape([SEQUENCES as i64, -1, heads, dim]).transpose(1, 2).contiguous())
        .collect();
    time("libtorch's flash attention", passes, || {
        let (q, k, v) = (&padded[0], &padded[1], &padded[2]);
        drop(Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
            q,
            k,
            v,
            0.0,
            true,
            None::<&Tensor>,
            0.25,
        ));
    });
    let (mut gate_up, mut dact) = (random(&[rows, 2 * intermediate]), random(&[rows, intermediate]));
    time("swiglu", passes, || drop(ops::glu(&gate_up, ops::Activation::Silu).unwrap()));
    time("swiglu_backward_", passes, || {
        ops::glu_backward_(&mut gate_up, &mut dact, ops::Activation::Silu).unwrap()
    });
    let targets = rows / 2;
    let mut logits = random(&[targets, vocab]);
    let tokens = Tensor::zeros([targets], (Kind::Int64, Device::Cpu));
    let scores = ops::logprobs(&logits, &tokens, 1.0).unwrap();
    time("logprobs", passes, || drop(ops::logprobs(&logits, &tokens, 1.0).unwrap()));
    time("logprobs_backward_", passes, || {
        let saved = (&scores.lse, &scores.entropy);
        ops::logprobs_backward_(&mut logits, &tokens, 1.0, saved, &scores.logprobs, None).unwrap();
    });
    let tokens = packing.positions();
    let mut dembedding = random(&[LENGTH as i64, hidden]);
    time("embedding_backward", passes, || {
        ops::embedding_backward(&dy, tokens, &mut dembedding, Store::Write).unwrap();
    });
}

fn time(name: &str, passes: usize, mut body: impl FnMut()) {
    body();
    let mut times: Vec<f64> = (0..passes.max(1))
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{name:28} {:9.3} {:9.3}", times[0], times[times.len() / 2]);
}
