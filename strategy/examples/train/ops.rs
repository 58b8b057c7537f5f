//! Times each operation of a step separately, at the step's sizes: a breakdown of the step, and its lower
//! bound.

use std::sync::Arc;

use anyroll_backends::{
    Device, Stream, TorchDevice,
    ops::{self, Activation, AttentionOptions, AttentionOutput, Packing, Qkv, QkvGrads, Rotation, Store},
};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::{Options, shapes};

/// Times of operations, each the mean of several calls after a warm-up call, with the calls per step.
struct Clock {
    stream: Stream,
    rows: Vec<Value>,
}

impl Clock {
    /// `work` counts floating-point operations for matrix products, and bytes for everything else.
    fn time(&mut self, name: &str, calls: usize, work: f64, mut run: impl FnMut()) {
        const REPEATS: u32 = 10;
        run();
        let start = self.stream.record_timed().unwrap();
        (0..REPEATS).for_each(|_| run());
        let end = self.stream.record_timed().unwrap();
        self.stream.synchronize().unwrap();
        let ms = start.elapsed(&end).unwrap().as_secs_f64() * 1e3 / f64::from(REPEATS);
        self.rows.push(json!([name, calls, ms, ms * calls as f64, work / ms / 1e9]));
    }
}

/// Returns rows of `[name, calls per step, ms, ms per step, TFLOP/s or TB/s]` for a step without
/// recomputation.
pub fn times(device: &Arc<dyn Device>, options: &Options) -> Value {
    let at = device.torch_device().map(TorchDevice::tch).expect("libtorch computes on it");
    let (seq, sequences) = (options.number("seq", 4096) as i64, options.number("micro_batch", 4) as i64);
    let name = options.text("model", "0.5b");
    let shape = shapes::decoder(name, seq);
    let (rows, layers) = (seq * sequences, shape.num_hidden_layers);
    let (hidden, dim, vocab) = (shape.hidden_size, shape.head_dim, shape.vocab_size);
    let (heads, kv_heads, size) =
        (shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size);
    let random = |size: &[i64]| Tensor::randn(size, (Kind::BFloat16, at));
    let mut clock = Clock { stream: Stream::torch(device).unwrap(), rows: vec![] };
    let packing = Packing::new(&vec![seq; sequences as usize], at).unwrap();
    let bytes = |elements: i64| 2.0 * elements as f64;

    let products = [
        ("qkv", (heads + 2 * kv_heads) * dim, hidden),
        ("o", hidden, heads * dim),
        ("gate_up", 2 * size, hidden),
        ("down", hidden, size),
    ];
    for (name, columns, inner) in products {
        let (x, weight, dy) = (random(&[rows, inner]), random(&[columns, inner]), random(&[rows, columns]));
        let (dweight, work) = (weight.zeros_like(), 2.0 * (rows * columns * inner) as f64);
        clock.time(&format!("{name} y"), layers, work, || drop(x.linear(&weight, None::<&Tensor>)));
        clock.time(&format!("{name} dx"), layers, work, || drop(dy.mm(&weight)));
        clock.time(&format!("{name} dw"), layers, work, || drop(dy.tr().f_mm_out(&dweight, &x)));
    }

    let (mut x, residual, weight) = (random(&[rows, hidden]), random(&[rows, hidden]), random(&[hidden]));
    let (mut dx, mut dy, mut dweight) = (x.zeros_like(), residual.copy(), weight.copy());
    let (_, rstd) = ops::rms_norm(&residual, &weight, 1e-6).unwrap();
    let wide = rows * hidden;
    clock.time("rms_norm", layers + 1, bytes(2 * wide), || drop(ops::rms_norm(&x, &weight, 1e-6).unwrap()));
    clock.time("add_rms_norm", layers, bytes(4 * wide), || {
        drop(ops::add_rms_norm_(&mut x, &residual, &weight, 1e-6).unwrap());
    });
    clock.time("rms_norm backward", 2 * layers + 1, bytes(5 * wide), || {
        ops::rms_norm_backward_(&mut dy, &residual, &rstd, &weight, &mut dx, &mut dweight, Store::Write)
            .unwrap();
    });

    let qkv = random(&[rows, heads + 2 * kv_heads, dim]);
    let parts = |whole: &Tensor| {
        [(0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)]
            .map(|(at, count)| whole.narrow(1, at, count))
    };
    let dqkv = qkv.zeros_like();
    let ([q, k, v], [mut dq, mut dk, mut dv]) = (parts(&qkv), parts(&dqkv));
    let table = {
        let angles = Tensor::rand([seq, dim], (Kind::Float, at));
        angles.cos()
    };
    let mut rotated = qkv.narrow(1, 0, heads + kv_heads);
    let rotated_bytes = bytes(2 * rows * (heads + kv_heads) * dim);
    clock.time("rope", 2 * layers, rotated_bytes, || {
        ops::rope_(&mut rotated, packing.positions(), &table, Rotation::Forward).unwrap();
    });
    let causal = ops::Causal::whole((dim as f64).powf(-0.5));
    let flops = 2.0 * (sequences * heads * seq * seq * dim) as f64;
    let (out, lse) = ops::attention(&q, &k, &v, &packing, causal).unwrap();
    clock.time("attention", layers, flops, || drop(ops::attention(&q, &k, &v, &packing, causal).unwrap()));
    for (name, deterministic) in [("deterministic", true), ("not deterministic", false)] {
        let name = format!("attention backward, {name}");
        let calls = if deterministic == options.switch("deterministic", true) { layers } else { 0 };
        clock.time(&name, calls, 2.5 * flops, || {
            let (qkv, output) = (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse: &lse });
            let options = AttentionOptions { packing: &packing, causal, deterministic };
            let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
            ops::attention_backward(&out, qkv, output, options, grads).unwrap();
        });
    }
    let unequal: Vec<i64> =
        (0..2 * sequences).map(|i| if i % 2 == 0 { seq - seq / 3 } else { seq / 3 }).collect();
    let flops = 2.0 * (heads * dim * unequal.iter().map(|len| len * len).sum::<i64>()) as f64;
    // Eight samples of each prompt, which makes up half of the rows.
    let (prompt, completion) = (seq / 2, seq / 16);
    let (mut rows_of, mut next) = (Vec::new(), 0);
    for _ in 0..sequences {
        let own = (0..8).flat_map(|i| {
            [next..next + prompt, next + prompt + i * completion..next + prompt + (i + 1) * completion]
        });
        rows_of.extend(own.flatten());
        next += seq;
    }
    let groups = Packing::sharing(&vec![prompt + completion; 8 * sequences as usize], &rows_of, at).unwrap();
    let work_of_groups = 2.0
        * (sequences * heads * dim * (prompt * prompt + 8 * completion * (2 * prompt + completion))) as f64;
    let unequal = Packing::new(&unequal, at).unwrap();
    for (name, packing, flops) in
        [("unequal lengths", &unequal, flops), ("groups with their prompts", &groups, work_of_groups)]
    {
        let (out, lse) = ops::attention(&q, &k, &v, packing, causal).unwrap();
        clock.time(&format!("attention, {name}"), 0, flops, || {
            drop(ops::attention(&q, &k, &v, packing, causal).unwrap());
        });
        clock.time(&format!("attention backward, {name}"), 0, 2.5 * flops, || {
            let (qkv, output) = (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse: &lse });
            let options = AttentionOptions { packing, causal, deterministic: true };
            let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
            ops::attention_backward(&out, qkv, output, options, grads).unwrap();
        });
    }
    let mut bias = random(&[(heads + 2 * kv_heads) * dim]);
    let flat = qkv.flatten(1, 2);
    clock.time("sum_rows", layers, bytes(flat.numel() as i64), || {
        ops::sum_rows(&flat, &mut bias, Store::Write).unwrap();
    });

    let (mut gate_up, mut dactivated) = (random(&[rows, 2 * size]), random(&[rows, size]));
    clock.time("swiglu", layers, bytes(3 * rows * size), || {
        drop(ops::glu(&gate_up, Activation::Silu).unwrap())
    });
    clock.time("swiglu backward", layers, bytes(6 * rows * size), || {
        ops::glu_backward_(&mut gate_up, &mut dactivated, Activation::Silu).unwrap();
    });
    drop((gate_up, dactivated));

    let chunk = 1536.min(rows);
    let chunks = (rows / chunk) as usize;
    let (h, lm_head) = (random(&[chunk, hidden]), random(&[vocab, hidden]));
    let targets = Tensor::randint(vocab, [chunk], (Kind::Int64, at));
    let work = 2.0 * (chunk * vocab * hidden) as f64;
    let (dh, mut dlm_head) = (h.zeros_like(), lm_head.zeros_like());
    let mut logits = h.linear(&lm_head, None::<&Tensor>);
    clock.time("logits", 2 * chunks, work, || drop(h.linear(&lm_head, None::<&Tensor>)));
    clock.time("logits dx", chunks, work, || drop(logits.f_mm_out(&dh, &lm_head)));
    clock.time("logits dw", chunks, work, || drop(dlm_head.f_addmm_(&logits.tr(), &h)));
    let scores = ops::logprobs(&logits, &targets, 1.0).unwrap();
    clock.time("logprobs", chunks, bytes(chunk * vocab), || {
        drop(ops::logprobs(&logits, &targets, 1.0).unwrap())
    });
    clock.time("logprobs backward", chunks, bytes(2 * chunk * vocab), || {
        let saved = (&scores.lse, &scores.entropy);
        ops::logprobs_backward_(&mut logits, &targets, 1.0, saved, &scores.logprobs, None).unwrap();
    });
    let tokens = Tensor::randint(vocab, [rows], (Kind::Int64, at));
    clock.time("embedding backward", 1, bytes(vocab * hidden), || {
        ops::embedding_backward(&dy, &tokens, &mut dlm_head, Store::Write).unwrap();
    });
    let [from, to] = [(); 2].map(|()| Tensor::zeros([1 << 28], (Kind::Float, at)));
    clock.time("device copy of 1 GiB", 0, 8.0 * f64::from(1 << 28), || to.shallow_clone().copy_(&from));
    let total: f64 = clock.rows.iter().filter_map(|row| row[3].as_f64()).sum();
    json!({ "model": name, "tokens": rows, "sum_ms": total, "ops": clock.rows })
}
