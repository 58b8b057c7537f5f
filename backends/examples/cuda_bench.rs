//! Times what `anyroll doctor --bench` does not: to open and connect, the optimizer's kernels, arenas and pinned memory.
//! `cuda_bench RANK WORLD_SIZE PORT`: start one process a GPU, all with the same port; rank 0 prints. Times of kernels
//! are the device's own, the mean over the repetitions after a warm-up.

#![forbid(unsafe_code)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyroll_backends::{
    Arena, BackendKind, CollectiveGroup, Device, DeviceId, PinnedBuffer, Rendezvous, Stream, connect, open,
    ops,
};
use tch::{Kind, Tensor};

const GIB: usize = 1 << 30;
const TIMEOUT: Duration = Duration::from_secs(120);

fn main() {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse().expect("a number")).collect();
    let [rank, world_size, port] = *arguments else { panic!("usage: cuda_bench RANK WORLD_SIZE PORT") };
    let start = Instant::now();
    let device = open(DeviceId { backend: BackendKind::CUDA, ordinal: rank }).unwrap();
    let opened_s = start.elapsed().as_secs_f64();
    let port = u16::try_from(port).expect("a port");
    let rendezvous = Rendezvous::on_this_host(rank, world_size, port, TIMEOUT);
    let start = Instant::now();
    let comm = connect(&*device, &rendezvous).unwrap();
    let connected_s = start.elapsed().as_secs_f64();
    let group = CollectiveGroup::new("world", comm, &device, TIMEOUT).unwrap();
    let say = |text: String| {
        if rank == 0 {
            println!("{text}");
        }
    };
    say(format!("{}: {:?}", device.info().name, device.info().details));
    say(format!("open {opened_s:.2} s, connect {connected_s:.2} s"));
    let start = Instant::now();
    let child = group.split("child", Some(0), 0).unwrap();
    say(format!("split {:.2} s", start.elapsed().as_secs_f64()));
    drop(child);
    // Every rank at once, as in a job.
    let barrier = || group.barrier(group.stream()).unwrap().wait().unwrap();
    barrier();
    kernels(&device, &say);
    barrier();
    arenas(&device, &say);
    barrier();
    pinned(&device, &say);
}

/// Mean seconds of `work` on `stream`.
fn time(stream: &Stream, repetitions: u32, mut work: impl FnMut()) -> f64 {
    for _ in 0..3 {
        work();
    }
    stream.synchronize().unwrap();
    let start = stream.record_timed().unwrap();
    for _ in 0..repetitions {
        work();
    }
    let end = stream.record_timed().unwrap();
    stream.synchronize().unwrap();
    start.elapsed(&end).unwrap().as_secs_f64() / f64::from(repetitions)
}

fn kernels(device: &Arc<dyn Device>, say: &dyn Fn(String)) {
    const LEN: i64 = 500_000_000;
    let at = torch_device(device);
    let stream = Stream::torch(device).unwrap();
    let random = || Tensor::randn([LEN], (Kind::Float, at));
    let (mut w, mut m, mut v, g) = (random(), random(), random().abs(), random());
    let hyper = ops::AdamW { learning_rate: 1e-6, betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1 };
    let (scale, step) = (Tensor::from(1f32).to_device(at), Tensor::from(9).to_device(at));
    let factors = hyper.factors(&scale, &step).unwrap();
    let rate = |bytes: i64, seconds: f64| {
        format!("{:.3} ms, {:.0} GB/s", seconds * 1e3, bytes as f64 / seconds / 1e9)
    };
    let adamw = time(&stream, 20, || ops::adamw_(&mut w, &mut m, &mut v, &g, &factors, &hyper).unwrap());
    let squares = time(&stream, 20, || drop(ops::sum_of_squares(&g).unwrap()));
    let copy = time(&stream, 20, || w.copy_(&g));
    let g16 = g.to_kind(Kind::BFloat16);
    let adamw16 = time(&stream, 20, || ops::adamw_(&mut w, &mut m, &mut v, &g16, &factors, &hyper).unwrap());
    say(format!("AdamW of {LEN} elements, 28 bytes each: {}", rate(28 * LEN, adamw)));
    say(format!("AdamW of {LEN} elements, bf16 gradients, 26 bytes each: {}", rate(26 * LEN, adamw16)));
    say(format!("sum of squares of {LEN} elements, 4 bytes each: {}", rate(4 * LEN, squares)));
    say(format!("libtorch's copy of {LEN} elements, 8 bytes each: {}", rate(8 * LEN, copy)));
}

fn arenas(device: &Arc<dyn Device>, say: &dyn Fn(String)) {
    let stream = Stream::new(device).unwrap();
    let used = || {
        let info = device.memory_info().unwrap();
        (info.total_bytes - info.free_bytes) as f64 / 1e9
    };
    let timed = |work: &dyn Fn()| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64() * 1e3
    };
    let before = used();
    let arena = Arena::new("bench", &stream, 20 * GIB).unwrap();
    stream.synchronize().unwrap();
    let mapped = used();
    let unmap = timed(&|| arena.unmap().unwrap());
    let released = used();
    let map = timed(&|| arena.map().unwrap());
    say(format!(
        "arena of 20 GiB: unmap {unmap:.1} ms, map {map:.1} ms; device memory in use, GB: {before:.1}, mapped {mapped:.1}, released {released:.1}, mapped again {:.1}",
        used()
    ));
}

fn pinned(device: &Arc<dyn Device>, say: &dyn Fn(String)) {
    let start = Instant::now();
    let memory = PinnedBuffer::new(device, 8 * GIB).unwrap();
    say(format!("8 GiB of pinned memory: {:.2} s", start.elapsed().as_secs_f64()));
    drop(memory);
}

fn torch_device(device: &Arc<dyn Device>) -> tch::Device {
    tch::Device::Cuda(device.id().ordinal)
}
