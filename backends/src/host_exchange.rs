//! [`HostExchange`]: sums and joins of ranks of one host through memory that all of them read, each a kernel of its own. For
//! small tensors and recorded steps, in which a communication library's latency is most of the time.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tch::{Kind, Tensor};

use crate::{
    Buffer, CollectiveGroup, DType, RawBuffer, Result, SharedHandle, Stream,
    device::unsupported,
    kernels::exchange::{self, MOST_BLOCKS, MOST_RANKS, Ranks, State},
};

/// Bytes of the turns that blocks tell each other, before the parts.
const TURNS_BYTES: usize = (MOST_BLOCKS * MOST_RANKS * size_of::<u32>()).next_multiple_of(4096);
/// Time beyond the group's deadline after which a kernel gives up: the watchdog, which names the operation, comes first.
const GRACE: Duration = Duration::from_secs(2);

/// Memory of each rank of a group that the others read. It has two halves, which exchanges use in turn, and stays until the
/// process ends, since no rank can know that the others are done with it.
#[derive(Debug)]
pub struct HostExchange {
    group: CollectiveGroup,
    /// This rank's memory.
    own: Buffer,
    /// Addresses of every rank's memory.
    addresses: [u64; MOST_RANKS],
    /// Turns of this rank's blocks, and a number that is not 0 once a wait has failed.
    state: Buffer,
    half_bytes: usize,
    /// Number of exchanges so far.
    turn: AtomicUsize,
}

impl HostExchange {
    /// Shares memory for parts of up to `len_bytes` bytes; `None` where the ranks of `group` cannot read each other's. Every
    /// rank calls this. Blocks the host.
    pub fn new(group: &CollectiveGroup, len_bytes: usize) -> Result<Option<Self>> {
        let half_bytes = len_bytes.next_multiple_of(4096);
        let (device, ranks) = (group.stream().device().clone(), group.world_size());
        let own = match exchange::exist(&*device, Kind::BFloat16) && ranks <= MOST_RANKS {
            true => device.shared_alloc(TURNS_BYTES + 2 * half_bytes),
            false => unsupported(device.id(), "exchanges between devices"),
        };
        let handle = own.as_ref().ok().map(|(_, handle)| *handle);
        let handles = told(group, handle.as_ref())?;
        let open = |(rank, handle): (usize, Option<SharedHandle>)| match &own {
            Ok((own, _)) if rank == group.rank() => Some(*own),
            _ => device.shared_open(&handle?).ok(),
        };
        let opened: Option<Vec<RawBuffer>> = handles.into_iter().enumerate().map(open).collect();
        // Ranks decide alike.
        let is_whole = told(group, opened.is_some().then_some(&[1; 64]))?.iter().all(Option::is_some);
        let (Some(opened), true, Ok((own, _))) = (opened, is_whole, own) else { return Ok(None) };
        let compute = Stream::torch(&device)?;
        let mut addresses = [0; MOST_RANKS];
        for (address, buffer) in addresses.iter_mut().zip(opened) {
            *address = device.address(buffer).map_or(0, |address| address as u64);
        }
        Ok(Some(Self {
            group: group.clone(),
            own: Buffer::kept(&compute, own, TURNS_BYTES + 2 * half_bytes),
            addresses,
            state: Buffer::zeros(&compute, MOST_BLOCKS + 1, DType::I32)?,
            half_bytes,
            turn: AtomicUsize::new(0),
        }))
    }

    /// Returns the number of bytes that a part may have.
    pub fn len_bytes(&self) -> usize {
        self.half_bytes
    }

    /// Returns the memory of this rank's part in the next exchange, which is to be written on libtorch's stream.
    pub fn own(&self, len: usize, dtype: DType) -> Buffer {
        let start = TURNS_BYTES + self.half(self.turn.load(Ordering::Relaxed));
        self.own.slice(start..start + len * dtype.size_bytes()).cast(dtype)
    }

    /// Writes the sum of all parts to `out`, or adds it, rounded, to `out`: in rank order, in fp32, and rounded once. Parts
    /// have as many elements as `out`. Every rank makes the same calls in the same order, and a recorded step makes an even
    /// number, so that halves stay in turn.
    pub fn sum(&self, out: &mut Tensor, is_added: bool) -> Result<()> {
        let (ranks, state, at) = self.take_turn(out)?;
        let device = self.own.home().device();
        // SAFETY: parts are as long as `out`, which is dense; the memory stays.
        unsafe { exchange::sum(&**device, out.kind(), ranks, state, (at, out.numel() as i64), is_added) }
    }

    /// Writes `[rows, columns]` to `out`: of each rank's part `[rows, width]`, one after the other, the first `count` columns.
    pub fn join(&self, out: &mut Tensor, [width, count]: [i64; 2]) -> Result<()> {
        let (ranks, state, at) = self.take_turn(out)?;
        let (device, size) = (self.own.home().device(), out.size());
        assert!(count * ranks.count as i64 >= size[1] && count <= width, "parts cover all columns");
        let sizes = (at, size[0], size[1]);
        // SAFETY: as in `sum`.
        unsafe { exchange::join(&**device, out.kind(), ranks, state, sizes, [width, count]) }
    }

    /// Returns true if a wait of a kernel that has ended has failed. Waits for the device.
    pub fn has_failed(&self) -> Result<bool> {
        let failed = self.state.slice(MOST_BLOCKS..MOST_BLOCKS + 1).tensor(&[1])?;
        Ok(failed.f_int64_value(&[0])? != 0)
    }

    /// Returns the memory of this exchange, and the address of `out`.
    fn take_turn(&self, out: &Tensor) -> Result<(Ranks, State, *mut c_void)> {
        assert!(out.is_contiguous() && out.numel() * out.kind().elt_size_in_bytes() <= u32::MAX as usize);
        let half = self.half(self.turn.fetch_add(1, Ordering::Relaxed));
        let count = self.group.world_size();
        let limit = self.group.timeout() + GRACE;
        let ranks = Ranks {
            parts: self.addresses.map(|address| address + (TURNS_BYTES + half) as u64),
            turns: self.addresses,
            rank: self.group.rank() as i32,
            count: count as i32,
            limit_ns: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
        };
        let state = State {
            taken: self.state.address()?,
            failed: self.state.slice(MOST_BLOCKS..MOST_BLOCKS + 1).address()?,
        };
        Ok((ranks, state, out.data_ptr()))
    }

    fn half(&self, turn: usize) -> usize {
        turn % 2 * self.half_bytes
    }
}

/// Gathers the handles of all ranks; a rank without one has `None`.
fn told(group: &CollectiveGroup, own: Option<&SharedHandle>) -> Result<Vec<Option<SharedHandle>>> {
    let own = own.map_or([0; size_of::<SharedHandle>() + 1].to_vec(), |own| [&[1], &own[..]].concat());
    let all = group.gather_bytes(&own, &Stream::new(group.stream().device())?)?;
    let of_rank = |bytes: &[u8]| (bytes[0] == 1).then(|| bytes[1..].try_into().expect("a handle's length"));
    Ok(all.chunks_exact(own.len()).map(of_rank).collect())
}
