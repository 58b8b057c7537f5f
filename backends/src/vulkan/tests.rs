//! Kernels against the CPU's, and rules that the conformance suite does not know. Without a driver they say that they are
//! skipped.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::*;
use crate::{
    Arena, Buffer, DType, PinnedBuffer, flat, kernels, ops,
    testing::{adamw_one, download, first_of, upload, values},
};

fn device() -> Option<Arc<dyn Device>> {
    first_of(BackendKind::VULKAN)
}

/// The stream on which `kernels::launch` launches.
fn stream(device: &Arc<dyn Device>) -> crate::Stream {
    crate::Stream::torch(device).unwrap()
}

/// `values` as elements of a type, `skip` elements behind the beginning of a buffer.
fn place(stream: &crate::Stream, values: &Tensor, skip: usize) -> Buffer {
    let dtype = DType::of(values.kind()).unwrap();
    let mut bytes = vec![0xee; (skip + values.numel()) * dtype.size_bytes()];
    values.contiguous().copy_data_u8(&mut bytes[skip * dtype.size_bytes()..], values.numel());
    if bytes.is_empty() {
        return Buffer::zeros(stream, 0, dtype).unwrap();
    }
    let whole = upload(stream, &bytes, dtype);
    whole.slice(skip..whole.len())
}

fn floats(buffer: &Buffer, stream: &crate::Stream) -> Vec<f32> {
    let bytes = download(buffer, stream);
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Fails unless the bits are equal, and reports the difference.
#[track_caller]
fn same_bits(what: &str, got: &[f32], want: &Tensor) {
    let want = Vec::<f32>::try_from(want).unwrap();
    let apart = |(a, b): (&f32, &f32)| a.to_bits().abs_diff(b.to_bits());
    let worst = got.iter().zip(&want).map(apart).max().unwrap_or(0);
    assert!(got.len() == want.len() && worst == 0, "{what}: up to {worst} units in the last place");
}

#[test]
fn adamw_has_the_bits_of_the_formula() {
    let Some(device) = device() else { return };
    let stream = stream(&device);
    let hyper = ops::AdamW { learning_rate: 1e-2, betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1 };
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (len, skip) in [(1, 0), (7, 0), (4096, 0), (4099, 1), (100_001, 3)] {
            let mut host: Vec<[f32; 3]> = values(len, 1).into_iter().map(|w| [w, 0.0, 0.0]).collect();
            let column = |host: &[[f32; 3]], number: usize| {
                Tensor::from_slice(&host.iter().map(|state| state[number]).collect::<Vec<_>>())
            };
            let states = [0, 1, 2].map(|number| place(&stream, &column(&host, number), skip));
            for step in 1..=5 {
                let gradient = Tensor::from_slice(&values(len, 10 + step as u64)).to_kind(kind);
                let on_device = place(&stream, &gradient, skip);
                for scale in [0.37f32, f32::NAN] {
                    let factors = hyper.factors(&Tensor::from(scale), &Tensor::from(step)).unwrap();
                    let factors = place(&stream, &factors, skip);
                    flat::adamw(states.each_ref(), &on_device, &factors, &hyper, &stream).unwrap();
                }
                let gradient = Vec::<f32>::try_from(gradient.to_kind(Kind::Float)).unwrap();
                for (state, gradient) in host.iter_mut().zip(gradient) {
                    *state = adamw_one(*state, gradient * 0.37, &hyper, step);
                }
            }
            for (number, state) in states.iter().enumerate() {
                let what = format!("state {number}, {len} elements after {skip}, {kind:?}");
                same_bits(&what, &floats(state, &stream), &column(&host, number));
            }
        }
    }
}

#[test]
fn sums_over_ranks_have_the_bits_of_the_cpu() {
    let Some(device) = device() else { return };
    let stream = stream(&device);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (ranks, len, skip) in [(1, 1, 0), (2, 999, 1), (5, 4096, 0), (3, 100_001, 3)] {
            let received =
                Tensor::from_slice(&values((ranks * len) as usize, 4)).to_kind(kind).reshape([ranks, len]);
            let before = Tensor::from_slice(&values(len as usize, 5));
            for store in [ops::Store::Write, ops::Store::Add] {
                let mut want = before.copy();
                ops::sum_ranks(&received, &mut want, store).unwrap();
                let (from, to) = (place(&stream, &received, skip), place(&stream, &before, skip));
                flat::sum_ranks(&to, &from, store, &stream).unwrap();
                same_bits(
                    &format!("{ranks} x {len} after {skip}, {kind:?}, {store:?}"),
                    &floats(&to, &stream),
                    &want,
                );
            }
        }
    }
}

#[test]
fn sums_of_squares_depend_on_the_length_alone() {
    let Some(device) = device() else { return };
    let stream = stream(&device);
    for len in [0, 1, 255, 16_384, 16_385, 1_000_003] {
        let x = Tensor::from_slice(&values(len, 5));
        let exact = x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
        let sums = [0, 1, 2, 3].map(|skip| {
            let x = place(&stream, &x, skip);
            match flat::sum_of_squares(&x, &stream) {
                Err(Error::Unsupported { .. }) => f64::NAN, // no fp64
                total => f64::from_le_bytes(download(&total.unwrap(), &stream).try_into().unwrap()),
            }
        });
        if sums[0].is_nan() {
            return;
        }
        assert!((sums[0] - exact).abs() <= 1e-12 * exact, "{len} elements: {} and {exact}", sums[0]);
        assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()), "{len} elements: {sums:?}");
    }
}

#[test]
fn casts_scales_and_fills_have_the_bits_of_the_cpu() {
    let Some(device) = device() else { return };
    let stream = stream(&device);
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
    for (len, skip) in [(1, 0), (2, 1), (999, 1), (100_001, 3)] {
        // Also what is below the least normal fp16, beyond the largest, and between two of them.
        let mut numbers = values(len, 6);
        let edges = [1e-7, -6e-8, 2.9e-8, 65_519.9, 65_520.0, -1e9, 1.000_488_3, f32::INFINITY, -0.0];
        numbers.iter_mut().zip(edges).for_each(|(number, edge)| *number = edge);
        let x = Tensor::from_slice(&numbers);
        for (from, to) in kinds.iter().flat_map(|from| kinds.map(|to| (*from, to))) {
            let x = x.to_kind(from);
            let want = place(&stream, &x.to_kind(to), 0);
            let around = place(&stream, &x.to_kind(to).zeros_like(), skip + 1);
            let got = around.slice(0..len);
            flat::cast(&got, &place(&stream, &x, skip), &stream).unwrap();
            let same = download(&got, &stream) == download(&want, &stream);
            assert!(same, "{len} after {skip} from {from:?} to {to:?}");
        }
        let scaled = place(&stream, &x, skip);
        flat::scale(&scaled, 0.37, &stream).unwrap();
        let want: Vec<f32> = numbers.iter().map(|number| number * 0.37).collect();
        same_bits(
            &format!("{len} after {skip}, scaled"),
            &floats(&scaled, &stream),
            &Tensor::from_slice(&want),
        );
        flat::fill(&scaled, -2.5, &stream).unwrap();
        assert_eq!(floats(&scaled, &stream), vec![-2.5; len], "{len} after {skip}, filled");
    }
}

#[test]
fn every_kernel_compiles_with_and_without_fp64() {
    for rest in ["strategy_f64.wgsl", "strategy_f32.wgsl"] {
        let source = |name| std::fs::read_to_string(format!("{}/kernels/{name}", env!("CARGO_MANIFEST_DIR")));
        let both = source("strategy.wgsl").unwrap() + &source(rest).unwrap();
        shader::compile(&both).unwrap_or_else(|error| panic!("{rest}: {error}"));
    }
}

#[test]
fn kernels_that_are_not_there_and_memory_that_is_not_there_are_refused() {
    let Some(device) = device() else { return };
    let mut none: [*mut c_void; 0] = [];
    // SAFETY: nothing is launched.
    let unknown = unsafe { device.launch(c"rms_norm", Grid::new(1, 256), &mut none, DEFAULT) }.unwrap_err();
    assert!(
        matches!(unknown, Error::Unsupported { .. }) && unknown.to_string().contains("rms_norm"),
        "{unknown}"
    );
    let (stream, numbers) = (stream(&device), [0f32; 8]);
    let short = place(&stream, &Tensor::from_slice(&numbers), 0);
    let at = short.address().unwrap();
    let to = stream.raw();
    // SAFETY: refused, since there are not so many elements.
    let beyond =
        unsafe { kernels::strategy::sum_ranks(&*device, Kind::Float, at.cast(), at, (1, 9), false, to) };
    let beyond = beyond.unwrap_err().to_string();
    assert!(beyond.contains("9 F32"), "{beyond}");
}

// The safe `Event` is recorded once, when it is made. This is the rule about other ones.
#[test]
fn a_wait_is_for_the_last_record_before_it() {
    let Some(device) = device() else { return };
    let (first, second) = (device.stream_create().unwrap(), device.stream_create().unwrap());
    let event = device.event_create(false).unwrap();
    let (open, opened) = std::sync::mpsc::channel::<()>();
    // SAFETY: all are live until their end; a wait that was enqueued outlives its event.
    unsafe {
        assert!(device.event_query(event).unwrap(), "an event that was never recorded is complete");
        device.stream_wait_event(second, event).unwrap();
        device.event_record(event, first).unwrap();
        device.stream_wait_event(second, event).unwrap();
        device.enqueue_host_fn(first, Box::new(move || opened.recv().map_err(|e| e.to_string()))).unwrap();
        device.event_record(event, first).unwrap();
        assert!(!device.event_query(event).unwrap());
        device.stream_synchronize(second).unwrap(); // returns: the second record came after the wait

        device.stream_wait_event(second, event).unwrap();
        device.event_destroy(event).unwrap();
        open.send(()).unwrap();
        device.stream_synchronize(second).unwrap();
        device.stream_destroy(first).unwrap();
        device.stream_destroy(second).unwrap();
    }
}

#[test]
fn lengths_that_no_buffer_has_are_refused_with_both_numbers() {
    let Some(device) = device() else { return };
    let info = device.memory_info().unwrap();
    let stream = stream(&device);
    let error = Buffer::zeros(&stream, info.total_bytes + 1, DType::U8).unwrap_err();
    let Error::OutOfMemory { requested_bytes, free_bytes, .. } = error else { panic!("{error}") };
    assert!(requested_bytes == info.total_bytes + 1 && free_bytes <= info.total_bytes);
    let error = Arena::new("too long", &stream, info.total_bytes + 1).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
}

#[test]
fn host_memory_that_is_not_pinned_is_refused() {
    let Some(device) = device() else { return };
    let stream = stream(&device);
    let buffer = Buffer::zeros(&stream, 8, DType::U8).unwrap();
    let pinned = PinnedBuffer::new(&device, 8).unwrap();
    let plain = [0u8; 8];
    // SAFETY: refused.
    let error = unsafe { device.copy_h2d(buffer.raw().unwrap(), plain.as_ptr(), stream.raw()) }.unwrap_err();
    assert!(error.to_string().contains("not pinned"), "{error}");
    drop(pinned);
}

#[test]
fn a_device_that_is_not_there_is_refused_by_number() {
    let Some(_open) = device() else { return };
    let count = BACKEND.devices().unwrap().len();
    let error = BACKEND.open(count).unwrap_err().to_string();
    assert!(error.contains(&format!("sees {count} devices")), "{error}");
}

#[test]
fn threads_end_with_the_device() {
    let Some(_driver) = device() else { return };
    let device = Vulkan::open(DeviceId { backend: BackendKind::VULKAN, ordinal: 0 }).unwrap();
    let streams: Vec<_> = (0..5).map(|_| device.stream_create().unwrap()).collect();
    // SAFETY: live until here.
    streams.into_iter().for_each(|stream| unsafe { device.stream_destroy(stream).unwrap() });
    let memory = Arc::downgrade(&device.memory);
    drop(device);
    assert!(memory.upgrade().is_none(), "a thread still holds the device's memory");
}
