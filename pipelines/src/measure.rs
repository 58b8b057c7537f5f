//! Benchmarks of a job's devices, run through the types that a training run uses.
//!
//! Times are measured by the device and averaged over repetitions after a warm-up. If all ranks measure at
//! once, a figure is that of the slowest.

use std::sync::Arc;

use anyroll_backends::{
    Buffer, CollectiveGroup, DType, Device, Limits, PinnedBuffer, ReduceOp, Stream, TorchDevice, Work,
};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::{Result, train::Exchange};

/// One measurement.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Figure {
    /// Description of the operation.
    pub what: String,
    /// Seconds for one operation.
    pub seconds: f64,
    /// Bytes or operations per second.
    pub per_s: f64,
    /// Unit of `per_s`.
    pub unit: Unit,
    /// Limit of the hardware per second; `None` if unknown.
    pub limit: Option<f64>,
}

/// Unit of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Bytes moved.
    Bytes,
    /// Additions and multiplications.
    Operations,
}

/// Sizes of the benchmarks.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of a copy.
    pub copy_bytes: usize,
    /// Rows and columns of the matrices.
    pub matrix: i64,
    /// Dtype of the matrices.
    pub kind: Kind,
    /// Bytes of a collective's whole tensor, one figure each.
    pub collective_bytes: &'static [usize],
    /// Repetitions of a collective of up to 10 MB, and of a larger one.
    pub repetitions: (u32, u32),
}

impl Sizes {
    /// Sizes that reach a device's limit, or take a second or two on a host.
    pub fn of(is_host: bool) -> Self {
        if is_host {
            Self {
                copy_bytes: 64 << 20,
                matrix: 1024,
                kind: Kind::Float,
                collective_bytes: &[1_000_000, 16_000_000],
                repetitions: (20, 4),
            }
        } else {
            Self {
                copy_bytes: 1 << 30,
                matrix: 8192,
                kind: Kind::BFloat16,
                collective_bytes: &[1_000_000, 64_000_000, 1_000_000_000],
                repetitions: (200, 20),
            }
        }
    }
}

/// A rank of a benchmark job.
#[derive(Debug)]
pub struct Bench {
    /// This rank's device.
    pub device: Arc<dyn Device>,
    /// Limits of the device.
    pub limits: Limits,
    /// Communicator of all ranks, with sums in rank order.
    pub group: CollectiveGroup,
    /// Communicator of all ranks with the library's own sums; `None` if the backend has no such library.
    pub library: Option<CollectiveGroup>,
    /// Sizes of the benchmarks.
    pub sizes: Sizes,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug)]
enum Way {
    ToDevice,
    ToHost,
}

/// A stream of copies with its own buffers.
struct Lane {
    way: Way,
    stream: Stream,
    host: PinnedBuffer,
    memory: Buffer,
}

impl Bench {
    /// Runs all benchmarks. Every rank must call this, and all get the same figures.
    pub fn run(&self) -> Result<Vec<Figure>> {
        let mut figures = Vec::new();
        self.host_copies(&mut figures)?;
        figures.push(self.device_copy()?);
        figures.push(self.matmul()?);
        for bytes in self.sizes.collective_bytes {
            self.collectives(*bytes, &mut figures)?;
        }
        Ok(figures)
    }

    /// Copies from and to pinned memory: on one rank while the others wait, then on all at once.
    fn host_copies(&self, figures: &mut Vec<Figure>) -> Result<()> {
        let mut down = Lane::new(&self.device, Way::ToHost, self.sizes.copy_bytes)?;
        let mut up = Lane::new(&self.device, Way::ToDevice, self.sizes.copy_bytes)?;
        let ranks = self.group.world_size();
        let rounds: &[bool] = if ranks == 1 { &[true] } else { &[true, false] };
        for alone in rounds {
            let measure = |lanes: &mut [&mut Lane]| -> Result<Vec<f64>> {
                self.barrier()?;
                let idle = *alone && self.group.rank() != 0;
                let seconds =
                    if idle { vec![0.0; lanes.len()] } else { copy(lanes, self.sizes.repetitions.1)? };
                self.slowest(&seconds)
            };
            let (to_host, to_device) = (measure(&mut [&mut down])?, measure(&mut [&mut up])?);
            let both = measure(&mut [&mut down, &mut up])?;
            let who = if *alone { "one device".into() } else { format!("{ranks} at once") };
            for (what, seconds) in [
                ("to the host", to_host[0]),
                ("to the device", to_device[0]),
                ("to the host while copying to the device", both[0]),
                ("to the device while copying to the host", both[1]),
            ] {
                let what = format!("pinned copy {what}, {who}");
                figures.push(bytes_figure(
                    what,
                    self.sizes.copy_bytes,
                    seconds,
                    self.limits.host_bytes_per_s,
                ));
            }
        }
        Ok(())
    }

    fn device_copy(&self) -> Result<Figure> {
        let stream = Stream::new(&self.device)?;
        let zeros = || Buffer::zeros(&stream, self.sizes.copy_bytes, DType::U8);
        let (from, to) = (zeros()?, zeros()?);
        let seconds = self.time(&stream, self.sizes.repetitions.1, || Ok(to.copy_from(&from, &stream)?))?;
        let what = "device copy, read and written".into();
        Ok(bytes_figure(what, 2 * self.sizes.copy_bytes, seconds, self.limits.memory_bytes_per_s))
    }

    fn matmul(&self) -> Result<Figure> {
        let (size, kind) = (self.sizes.matrix, self.sizes.kind);
        let at = self.device.torch_device().map(TorchDevice::tch).unwrap_or(tch::Device::Cpu);
        let (a, b) = (Tensor::f_randn([size, size], (kind, at))?, Tensor::f_randn([size, size], (kind, at))?);
        let stream = Stream::torch(&self.device)?;
        let seconds = self.time(&stream, self.sizes.repetitions.1, || Ok(a.f_matmul(&b).map(drop)?))?;
        let limit = (kind == Kind::BFloat16).then_some(self.limits.bf16_flops).flatten();
        Ok(Figure {
            what: format!("product of {size} x {size} {kind:?} matrices"),
            seconds,
            per_s: 2.0 * (size as f64).powi(3) / seconds,
            unit: Unit::Operations,
            limit,
        })
    }

    /// Collectives on about `bytes` of bf16. The rate is the bus bandwidth: bytes that each rank sends, which
    /// is the load of its links in one direction.
    fn collectives(&self, bytes: usize, figures: &mut Vec<Figure>) -> Result<()> {
        let ranks = self.group.world_size();
        if ranks == 1 {
            return Ok(());
        }
        let slice = bytes / DType::Bf16.size_bytes() / ranks / 128 * 128;
        let zeros = |group: &CollectiveGroup| Buffer::zeros(group.stream(), slice * ranks, DType::Bf16);
        let mut add =
            |name: &str, trips: usize, stream: &Stream, start: &dyn Fn() -> Result<Work>| -> Result<()> {
                let (small, large) = self.sizes.repetitions;
                let repetitions = if bytes <= 10_000_000 { small } else { large };
                let seconds = self.time(stream, repetitions, || start().map(drop))?;
                let sent = trips * slice * DType::Bf16.size_bytes() * (ranks - 1);
                let what = format!("{name}, {} MB", bytes / 1_000_000);
                figures.push(bytes_figure(what, sent, seconds, self.limits.peer_bytes_per_s));
                Ok(())
            };
        {
            let (group, stream) = (&self.group, self.group.stream());
            let (whole, other) = (zeros(group)?, zeros(group)?);
            let mine = whole.slice(0..slice);
            add("all_gather", 1, stream, &|| Ok(group.all_gather(&other, &mine, stream)?))?;
            add("all_to_all", 1, stream, &|| Ok(group.all_to_all(&other, &whole, stream)?))?;
        }
        for (sums, group) in [("in rank order", Some(&self.group)), ("by the library", self.library.as_ref())]
        {
            let Some(group) = group else { continue };
            let (whole, other, stream) = (zeros(group)?, zeros(group)?, group.stream());
            let part = other.slice(0..slice);
            add(&format!("reduce_scatter {sums}"), 1, stream, &|| {
                Ok(group.reduce_scatter(&part, &whole, ReduceOp::Sum, stream)?)
            })?;
            add(&format!("all_reduce {sums}"), 2, stream, &|| {
                Ok(group.all_reduce(&whole, ReduceOp::Sum, stream)?)
            })?;
        }
        Ok(())
    }

    /// Mean seconds of the work that `work` enqueues on `stream`. All ranks start together, and the slowest
    /// counts.
    fn time(&self, stream: &Stream, repetitions: u32, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        for _ in 0..3 {
            work()?;
        }
        stream.synchronize()?;
        // A barrier on the devices, since hosts wake up at different times.
        self.group.barrier(stream)?.wait_stream(stream)?;
        let start = stream.record_timed()?;
        for _ in 0..repetitions {
            work()?;
        }
        let end = stream.record_timed()?;
        stream.synchronize()?;
        Ok(self.slowest(&[start.elapsed(&end)?.as_secs_f64() / f64::from(repetitions)])?[0])
    }

    fn barrier(&self) -> Result<()> {
        Ok(self.group.barrier(self.group.stream())?.wait()?)
    }

    /// The largest value of each over all ranks.
    fn slowest(&self, seconds: &[f64]) -> Result<Vec<f64>> {
        let all = Exchange::new(&self.group)?.gather_rows(seconds)?;
        Ok((0..seconds.len()).map(|index| all.iter().map(|rank| rank[index]).fold(0.0, f64::max)).collect())
    }
}

impl Lane {
    fn new(device: &Arc<dyn Device>, way: Way, bytes: usize) -> Result<Self> {
        let stream = Stream::new(device)?;
        let memory = Buffer::zeros(&stream, bytes, DType::U8)?;
        Ok(Self { way, host: PinnedBuffer::new(device, bytes)?, memory, stream })
    }

    fn start(&mut self) -> Result<()> {
        match self.way {
            Way::ToDevice => self.host.copy_to(0, &self.memory, &self.stream)?,
            Way::ToHost => self.host.copy_from(0, &self.memory, &self.stream)?,
        }
        Ok(())
    }
}

/// Seconds of one copy on each lane, with all lanes at once.
fn copy(lanes: &mut [&mut Lane], repetitions: u32) -> Result<Vec<f64>> {
    for lane in lanes.iter_mut() {
        lane.start()?;
        lane.stream.synchronize()?;
    }
    let starts = lanes.iter().map(|lane| lane.stream.record_timed()).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..repetitions {
        lanes.iter_mut().try_for_each(|lane| lane.start())?;
    }
    let ends = lanes.iter().map(|lane| lane.stream.record_timed()).collect::<Result<Vec<_>, _>>()?;
    lanes.iter().try_for_each(|lane| lane.stream.synchronize())?;
    let seconds = starts
        .iter()
        .zip(&ends)
        .map(|(start, end)| Ok(start.elapsed(end)?.as_secs_f64() / f64::from(repetitions)));
    seconds.collect()
}

fn bytes_figure(what: String, bytes: usize, seconds: f64, limit: Option<f64>) -> Figure {
    Figure { what, seconds, per_s: bytes as f64 / seconds, unit: Unit::Bytes, limit }
}
