//! Rates that a step reaches, as fractions of a device's data sheet. Each was fitted to a measurement on H200s.

use anyroll_backends::Card;

/// Matrix products in a step. Alone they reach 0.72 to 0.84 (docs/results/training.md, operations of a step); a device at
/// its power limit is slower in a step. Fitted to the rows `fit` of `measured.tsv`.
const PRODUCTS: f64 = 0.67;
/// Attention forward: 628 of 989 TFLOP/s, half of the square counted (the same table).
const ATTENTION: f64 = 0.63;
/// Attention backward by the own kernel: 426 TFLOP/s; if it need not repeat its bits 466.
const ATTENTION_BACKWARD: f64 = 0.43;
const ATTENTION_BACKWARD_ANY_ORDER: f64 = 0.47;
/// Norms, activations, rotations and log-probs: 3.0 of 4.8 TB/s in sum (the same table).
const TRAFFIC: f64 = 0.62;
/// The optimizer's kernels, sums of gradients, and decoding's reads: 4.2 of 4.8 TB/s (docs/results/hardware.md).
const MEMORY: f64 = 0.88;
/// Large collectives in a host: 324 to 334 of 450 GB/s (docs/results/hardware.md, 1000 MB).
const IN_HOST: f64 = 0.73;
/// Copies to the host and back: 55 of 63 GB/s alone, and 34 if all of four devices copy at once.
const HOST_LINK_ALONE: f64 = 0.88;
const HOST_LINK_SHARED: f64 = 0.54;
/// Loss of speed next to collectives (docs/results/training.md, between the sum and a step).
const SLOWDOWN: f64 = 0.25;
/// Prompts that are read before decoding: 16,384 tokens of 7B in 0.43 s (docs/results/decoding.md).
const PREFILL: f64 = 0.5;

/// Figures of a device's data sheet, in FLOP/s and bytes/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sheet {
    /// Matrix products in the run's precision.
    pub flops: f64,
    /// Device memory.
    pub memory: f64,
    /// Each way to devices of the same host.
    pub in_host: f64,
    /// Each way to host memory.
    pub host_link: f64,
}

impl From<Card> for Sheet {
    fn from(Card { flops, memory, in_host, host_link, .. }: Card) -> Self {
        Self { flops, memory, in_host, host_link }
    }
}

/// Rates of a device in a step, in FLOP/s and bytes/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    pub peak: f64,
    pub products: f64,
    pub attention: f64,
    pub attention_backward: f64,
    pub prefill: f64,
    pub traffic: f64,
    pub memory: f64,
    pub in_host: f64,
    pub host_link: f64,
    pub slowdown: f64,
}

impl Rates {
    /// Rates of a device on a host with so many of them.
    pub fn new(sheet: Sheet, devices_per_host: usize, deterministic: bool) -> Self {
        let Sheet { flops, memory, in_host, host_link } = sheet;
        let backward = if deterministic { ATTENTION_BACKWARD } else { ATTENTION_BACKWARD_ANY_ORDER };
        let shared = if devices_per_host == 1 { HOST_LINK_ALONE } else { HOST_LINK_SHARED };
        Self {
            peak: flops,
            products: PRODUCTS * flops,
            attention: ATTENTION * flops,
            attention_backward: backward * flops,
            prefill: PREFILL * flops,
            traffic: TRAFFIC * memory,
            memory: MEMORY * memory,
            in_host: IN_HOST * in_host,
            host_link: shared * host_link,
            slowdown: SLOWDOWN,
        }
    }
}
