//! Devices, values and references that tests of several modules share.

use std::{io::Write, sync::Arc};

use crate::{BackendKind, Buffer, DType, Device, DeviceId, Error, PinnedBuffer, Stream, open, ops};

/// The first device of a backend, which has kernels; without one says so past the harness, which keeps what passing
/// tests print.
pub(crate) fn first_of(backend: BackendKind) -> Option<Arc<dyn Device>> {
    match open(DeviceId { backend, ordinal: 0 }) {
        Ok(device) => {
            assert!(device.has_kernels());
            Some(device)
        }
        Err(error @ Error::Unavailable { .. }) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Values of many sizes and both signs, from a fixed sequence (Knuth's MMIX).
pub(crate) fn values(len: usize, mut state: u64) -> Vec<f32> {
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..len).map(|_| (draw() - 0.5) * (draw() * 16.0 - 8.0).exp2()).collect()
}

pub(crate) fn upload(stream: &Stream, bytes: &[u8], dtype: DType) -> Buffer {
    let buffer = Buffer::zeros(stream, bytes.len() / dtype.size_bytes(), dtype).unwrap();
    let mut host = PinnedBuffer::new(stream.device(), bytes.len()).unwrap();
    host.bytes_mut().unwrap().copy_from_slice(bytes);
    host.copy_to(0, &buffer, stream).unwrap();
    buffer
}

pub(crate) fn download(buffer: &Buffer, stream: &Stream) -> Vec<u8> {
    let mut host = PinnedBuffer::new(stream.device(), buffer.len_bytes()).unwrap();
    host.copy_from(0, buffer, stream).unwrap();
    host.bytes().unwrap().to_vec()
}

/// One element of the step, as `kernels/strategy.cu` and `shim/optimizer.cpp` write it.
pub(crate) fn adamw_one([w, m, v]: [f32; 3], gradient: f32, h: &ops::AdamW, step: i32) -> [f32; 3] {
    let (learning_rate, beta1, beta2) = (h.learning_rate as f32, h.betas.0 as f32, h.betas.1 as f32);
    let bias1 = (1.0 - h.betas.0.powi(step)) as f32;
    let bias2_root = (1.0 - h.betas.1.powi(step)).sqrt() as f32;
    let keep = 1.0 - learning_rate * h.weight_decay as f32;
    let m = beta1 * m + (1.0 - beta1) * gradient;
    let v = beta2 * v + (1.0 - beta2) * gradient * gradient;
    [keep * w - learning_rate / bias1 * m / (v.sqrt() / bias2_root + h.eps as f32), m, v]
}
