//! The suite can fail: each fault below breaks a rule, and the rule's case says so.

mod common;

use std::sync::Arc;

use anyroll_backends::{
    Buffer, Collective, P2p, ReduceOp, Result, Stream,
    faults::{Fault, Faulty},
};
use anyroll_conformance::{Outcome, Peers, Status, collective_suite, device_suite, failure_suite};
use common::{cpu, on_ranks};

#[test]
fn a_device_that_breaks_the_contract() {
    let cases = [
        (Fault::LosesWaits, "event: orders one stream after another", "the consumer did not wait"),
        (Fault::ShortCopies, "memory: copies move the bytes asked for and no others", "1 bytes differ"),
        (
            Fault::Leaks,
            "memory: fill sets the bytes asked for and no others",
            "all memory that the case took is back",
        ),
        (
            Fault::HidesErrors,
            "errors: come out of the next synchronize, once, and later work still runs",
            "want \"Stream\"",
        ),
    ];
    for (fault, rule, words) in cases {
        assert_finds(&device_suite(&Faulty::wrap(cpu().open(0).unwrap(), fault), Some(rule)), rule, words);
    }
}

#[test]
fn a_collective_that_computes_something_else() {
    let cases = [
        (Broken::Order, "all_reduce: F32, Sum", "bytes differ"),
        (Broken::Order, "all_gather: Bf16, apart and in place", "bytes differ"),
        (Broken::Order, "broadcast: U8, from every root", "1 elements from 0"),
        (Broken::Lost, "all_to_all: I64", "1 elements to each"),
        (Broken::Lost, "order: a barrier holds everybody until the last has come", "got (true, true)"),
        (Broken::Early, "order: an operation starts after the work that is on its stream", "bytes differ"),
    ];
    for (fault, rule, words) in cases {
        let outcomes = on_ranks(cpu(), 3, |peers| collective_suite(&broken(&peers, fault), Some(rule)));
        assert_finds(&outcomes, rule, words);
    }
}

#[test]
fn a_collective_that_cannot_be_aborted() {
    let rule = "failure: every later call is an error at once";
    let outcomes =
        on_ranks(cpu(), 2, |peers| failure_suite(&broken(&peers, Broken::Unabortable), Some(rule)));
    assert_finds(&outcomes, rule, "succeeded on an aborted group");
}

/// The rule's first case failed, and its reason contains `words`.
fn assert_finds(outcomes: &[Outcome], rule: &str, words: &str) {
    let outcome = outcomes.iter().find(|outcome| outcome.name == rule).expect("the suite has this rule");
    match &outcome.status {
        Status::Failed(reason) if reason.contains(words) => {}
        other => panic!("{rule}: {other:?}, not a failure with {words:?}"),
    }
}

fn broken(peers: &Peers, fault: Broken) -> Peers {
    Peers { world: Faults::wrap(peers.world.clone(), fault).expect("the ranks split"), ..peers.clone() }
}

/// A breach of a communicator's contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// It takes the ranks in the reverse order.
    Order,
    /// It does not run some operations.
    Lost,
    /// It does not wait for the work on the stream.
    Early,
    /// It does not end when it is told to.
    Unabortable,
}

#[derive(Debug)]
struct Faults {
    inner: Arc<dyn Collective>,
    rank: usize,
    fault: Broken,
}

impl Faults {
    fn wrap(inner: Arc<dyn Collective>, fault: Broken) -> Result<Arc<dyn Collective>> {
        let rank = inner.rank();
        let key = if fault == Broken::Order { -(rank as i32) } else { rank as i32 };
        let inner = inner.split(Some(0), key)?.expect("a rank with a color is a member");
        Ok(Arc::new(Self { inner, rank, fault }))
    }
}

impl Collective for Faults {
    fn rank(&self) -> usize {
        self.rank
    }
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }
    fn sums_in_rank_order(&self) -> bool {
        self.inner.sums_in_rank_order()
    }
    fn broadcast(&self, buffer: &Buffer, root: usize, stream: &Stream) -> Result<()> {
        self.inner.broadcast(buffer, root, stream)
    }
    fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        if self.fault != Broken::Early {
            return self.inner.all_reduce(buffer, op, stream);
        }
        let early = Stream::new(stream.device())?;
        self.inner.all_reduce(buffer, op, &early)?;
        stream.wait_stream(&early)
    }
    fn all_gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        self.inner.all_gather(output, input, stream)
    }
    fn reduce_scatter(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        self.inner.reduce_scatter(output, input, op, stream)
    }
    fn all_to_all(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        if self.fault == Broken::Lost { Ok(()) } else { self.inner.all_to_all(output, input, stream) }
    }
    fn batch(&self, transfers: &[P2p], stream: &Stream) -> Result<()> {
        self.inner.batch(transfers, stream)
    }
    fn barrier(&self, stream: &Stream) -> Result<()> {
        if self.fault == Broken::Lost { Ok(()) } else { self.inner.barrier(stream) }
    }
    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn Collective>>> {
        let inner = self.inner.split(color, key)?;
        inner.map(|inner| Self::wrap(inner, self.fault)).transpose()
    }
    fn check(&self) -> Result<()> {
        self.inner.check()
    }
    fn abort(&self, why: &str) {
        if self.fault != Broken::Unabortable {
            self.inner.abort(why);
        }
    }
}
