//! Measures how fast the optimizer's states leave the device and return, on all ranks at once.

use std::time::Instant;

use anyroll_backends::Stream;
use anyroll_models::Decoder;
use anyroll_strategy::{State, Zero};
use serde_json::{Value, json};

const ROUNDS: usize = 4;

/// Returns the bytes per rank, and GB/s of each round in both directions. The first round also allocates the
/// host memory.
pub fn times(zero: &mut Zero<Decoder>, compute: &Stream) -> Value {
    let (mut bytes, mut out, mut back) = (0, vec![], vec![]);
    for _ in 0..ROUNDS {
        meet(zero, compute);
        let start = Instant::now();
        bytes = zero.offload_states(&[State::Optimizer]).unwrap();
        out.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
        meet(zero, compute);
        let start = Instant::now();
        zero.load_states(&[State::Optimizer]).unwrap();
        zero.finish_loading().unwrap();
        back.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    json!({ "bytes": bytes, "out_gb_per_s": out, "back_gb_per_s": back })
}

/// Waits for all ranks, and for all work queued on the device.
fn meet(zero: &Zero<Decoder>, compute: &Stream) {
    zero.group().barrier(compute).unwrap().wait().unwrap();
    compute.synchronize().unwrap();
}
