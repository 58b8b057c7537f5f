//! Times what the CUDA backend is made of, beside the hardware's own limits: `cuda_bench RANK WORLD_SIZE PORT`. Start
//! one process a GPU, all with the same port; rank 0 prints. Times are the device's own, the mean over the
//! repetitions after a warm-up.

#![forbid(unsafe_code)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyroll_backends::{
    Arena, BackendKind, Buffer, CollectiveGroup, DType, Device, DeviceId, PinnedBuffer, ReduceOp, Rendezvous,
    Stream, connect, open, ops,
};
use tch::{Kind, Tensor};

const GIB: usize = 1 << 30;
const TIMEOUT: Duration = Duration::from_secs(120);

fn main() {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse().expect("a number")).collect();
    let [rank, world_size, port] = *arguments else { panic!("usage: cuda_bench RANK WORLD_SIZE PORT") };
    let start = Instant::now();
    let device = open(DeviceId { backend: BackendKind::Cuda, ordinal: rank }).unwrap();
    let opened_s = start.elapsed().as_secs_f64();
    let rendezvous = Rendezvous {
        rank,
        world_size,
        master_addr: "127.0.0.1".into(),
        master_port: u16::try_from(port).expect("a port"),
        timeout: TIMEOUT,
        agent_store: None,
    };
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
    collectives(&device, &group, &say);
    // Every rank at once, as in a job.
    let barrier = || group.barrier(group.stream()).unwrap().wait().unwrap();
    barrier();
    kernels(&device, &say);
    barrier();
    arenas(&device, &say);
    barrier();
    copies(&device, &say, &barrier);
}

/// Mean seconds of `work` on `stream`.
fn time(stream: &Stream, repetitions: u32, mut work: impl FnMut()) -> f64 {
    for _ in 0..3 {
        work();
    }
    stream.synchronize().unwrap();
    let start = stream.record().unwrap();
    for _ in 0..repetitions {
        work();
    }
    let end = stream.record().unwrap();
    stream.synchronize().unwrap();
    start.elapsed(&end).unwrap().as_secs_f64() / f64::from(repetitions)
}

fn collectives(device: &Arc<dyn Device>, group: &CollectiveGroup, say: &dyn Fn(String)) {
    let world_size = group.world_size();
    say(format!("collectives of {world_size} ranks, bf16: ms (bus GB/s); MB is the whole tensor"));
    let stream = group.stream();
    for megabytes in [1usize, 64, 94, 466, 1000] {
        let slice = megabytes * 1_000_000 / 2 / world_size / 128 * 128;
        let whole = Buffer::zeros(stream, slice * world_size, DType::Bf16).unwrap();
        let other = Buffer::zeros(stream, slice * world_size, DType::Bf16).unwrap();
        let torch = Stream::torch(device).unwrap();
        let values = Tensor::randn([whole.len() as i64], (Kind::BFloat16, torch_device(device)));
        torch.wait_stream(stream).unwrap();
        whole.tensor(&[whole.len() as i64]).unwrap().copy_(&values);
        stream.wait_stream(&torch).unwrap();
        let part = other.slice(0..slice);
        let ms = |factor: f64, work: &mut dyn FnMut()| {
            group.barrier(stream).unwrap().wait().unwrap();
            let seconds = time(stream, 20, work);
            let moved = whole.len_bytes() as f64 * (world_size - 1) as f64 / world_size as f64;
            format!("{:.3} ({:.0})", seconds * 1e3, factor * moved / seconds / 1e9)
        };
        let gather = ms(1.0, &mut || drop(group.all_gather(&other, &whole.slice(0..slice), stream).unwrap()));
        let exchange = ms(1.0, &mut || drop(group.all_to_all(&other, &whole, stream).unwrap()));
        let scatter =
            ms(1.0, &mut || drop(group.reduce_scatter(&part, &whole, ReduceOp::Sum, stream).unwrap()));
        let reduce = ms(2.0, &mut || drop(group.all_reduce(&other, ReduceOp::Max, stream).unwrap()));
        say(format!(
            "  {megabytes} MB: all_gather {gather}, all_to_all {exchange}, reduce_scatter in rank order {scatter}, all_reduce in rank order {reduce}"
        ));
    }
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
    say(format!("AdamW of {LEN} elements, 28 bytes each: {}", rate(28 * LEN, adamw)));
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

fn copies(device: &Arc<dyn Device>, say: &dyn Fn(String), barrier: &dyn Fn()) {
    let len = 8 * GIB;
    let (down, up) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let start = Instant::now();
    let mut host = PinnedBuffer::new(device, len).unwrap();
    say(format!("8 GiB of pinned memory: {:.2} s", start.elapsed().as_secs_f64()));
    let mut second = PinnedBuffer::new(device, len).unwrap();
    let (a, b) = (Buffer::zeros(&down, len, DType::U8).unwrap(), Buffer::zeros(&up, len, DType::U8).unwrap());
    let rate = |seconds: f64| format!("{:.1} GB/s", len as f64 / seconds / 1e9);
    barrier();
    let to_host = time(&down, 2, || host.copy_from(0, &a, &down).unwrap());
    barrier();
    let to_device = time(&up, 2, || second.copy_to(0, &b, &up).unwrap());
    barrier();
    let (from, start) = (down.record().unwrap(), up.record().unwrap());
    for _ in 0..2 {
        host.copy_from(0, &a, &down).unwrap();
        second.copy_to(0, &b, &up).unwrap();
    }
    let (to, end) = (down.record().unwrap(), up.record().unwrap());
    down.synchronize().unwrap();
    up.synchronize().unwrap();
    let seconds =
        |event: std::result::Result<Duration, _>| event.map(|time: Duration| time.as_secs_f64() / 2.0);
    let (both_down, both_up) =
        (seconds(from.elapsed(&to)).unwrap_or(f64::NAN), seconds(start.elapsed(&end)).unwrap_or(f64::NAN));
    say(format!(
        "pinned copies, all ranks at once: to the host {}, to the device {}; both at once {} and {}",
        rate(to_host),
        rate(to_device),
        rate(both_down),
        rate(both_up)
    ));
}

fn torch_device(device: &Arc<dyn Device>) -> tch::Device {
    tch::Device::Cuda(device.id().ordinal)
}
