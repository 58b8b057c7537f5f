//! [`Member`]: what a case of the collective part works with.

use std::sync::Arc;

use anyroll_backends::{Buffer, CollectiveGroup, DType, Device, ReduceOp, Result, Store, Stream};

use super::Peers;
use crate::{
    host::{download, upload},
    runner::{Stop, Verdict, ensure, same_bytes},
    values::{random, same_reduction},
};

/// One rank in one case.
pub(super) struct Member {
    pub(super) device: Arc<dyn Device>,
    pub(super) world: Arc<dyn anyroll_backends::Collective>,
    pub(super) store: Arc<Store>,
    /// The group under test.
    pub(super) group: CollectiveGroup,
    /// The stream on which data is made and checked.
    pub(super) compute: Stream,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    prefix: String,
}

impl Member {
    pub(super) fn new(peers: &Peers, group: CollectiveGroup, prefix: &str) -> Result<Self> {
        Ok(Self {
            device: peers.device.clone(),
            world: peers.world.clone(),
            store: peers.store.clone(),
            compute: Stream::new(&peers.device)?,
            rank: group.rank(),
            world_size: group.world_size(),
            group,
            prefix: prefix.into(),
        })
    }

    /// Inputs of each rank: `len` elements, in rank order.
    pub(super) fn inputs(&self, dtype: DType, len: usize) -> Vec<Vec<u8>> {
        (0..self.world_size).map(|rank| random(dtype, len, rank as u64 + 1)).collect()
    }

    /// `bytes` on the device, between guards.
    pub(super) fn place(&self, bytes: &[u8], dtype: DType) -> Result<Guarded> {
        Guarded::new(&self.compute, bytes, dtype)
    }

    /// Fails unless `got` is the reduction of `inputs`, as exactly as the backend promises.
    pub(super) fn same_reduction(
        &self,
        what: &str,
        got: &[u8],
        (dtype, op): (DType, ReduceOp),
        inputs: &[Vec<u8>],
    ) -> Verdict {
        same_reduction(what, got, (dtype, op, inputs), self.world.sums_in_rank_order())
    }

    /// Gives `value` to every rank and returns everybody's in rank order, over the store. Blocks until all are here.
    pub(super) fn exchange(&self, label: &str, value: &str) -> Result<Vec<String>> {
        let key = |rank: usize| format!("{}/{label}/{rank}", self.prefix);
        self.store.set(&key(self.rank), value.as_bytes())?;
        let theirs = |rank| Ok(String::from_utf8_lossy(&self.store.get(&key(rank))?).into_owned());
        (0..self.world_size).map(theirs).collect()
    }

    /// Blocks until all ranks are here, over the store.
    pub(super) fn meet(&self, label: &str) -> Result<()> {
        self.exchange(label, "here").map(drop)
    }

    /// Ends the check as skipped where there is nobody to talk to.
    pub(super) fn needs_peers(&self) -> Verdict {
        match self.world_size {
            1 => Err(Stop::Skipped("needs two ranks".into())),
            _ => Ok(()),
        }
    }
}

/// Device data with guards on both sides, which start it at an odd offset and show writes outside.
pub(super) struct Guarded {
    whole: Buffer,
    /// The data.
    pub(super) inner: Buffer,
}

impl Guarded {
    /// Elements of each guard.
    const GUARD: usize = 3;
    const PATTERN: u8 = 0xa5;

    fn new(stream: &Stream, bytes: &[u8], dtype: DType) -> Result<Self> {
        let guard = vec![Self::PATTERN; Self::GUARD * dtype.size_bytes()];
        let whole = upload(stream, &[&guard, bytes, &guard].concat(), dtype)?;
        let inner = whole.slice(Self::GUARD..whole.len() - Self::GUARD);
        Ok(Self { whole, inner })
    }

    /// The data in order with `stream`; a failure if a guard has changed.
    pub(super) fn read(&self, stream: &Stream) -> Result<Vec<u8>, Stop> {
        let bytes = download(&self.whole, stream)?;
        let guard = Self::GUARD * self.whole.dtype().size_bytes();
        let (before, rest) = bytes.split_at(guard);
        let (inner, after) = rest.split_at(rest.len() - guard);
        ensure!(
            [before, after].concat().iter().all(|byte| *byte == Self::PATTERN),
            "wrote outside its buffer"
        );
        Ok(inner.to_vec())
    }
}

/// Collects mismatches, so that a rank which finds one stays in step with the others; the first is reported.
#[derive(Default)]
pub(super) struct Tally(Option<Stop>);

impl Tally {
    pub(super) fn add(&mut self, verdict: Verdict) {
        if let Err(stop) = verdict {
            self.0.get_or_insert(stop);
        }
    }

    /// Adds whether `data` now holds `want`.
    pub(super) fn holds(&mut self, what: &str, data: &Guarded, want: &[u8], stream: &Stream) {
        self.add(data.read(stream).and_then(|got| same_bytes(what, &got, want)));
    }

    pub(super) fn verdict(self) -> Verdict {
        self.0.map_or(Ok(()), Err)
    }
}
