//! Ranks that do not come and groups that are aborted: an error in time, no hang, and a new group works.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyroll_backends::{
    Buffer, CollectiveGroup, DType, Error, P2p, ReduceOp, Rendezvous, Result, Store, Work,
};

use super::member::Member;
use crate::{
    host::upload,
    runner::{Case, Stop, Verdict, ensure, same, same_bytes},
};

/// The deadline of a group whose ranks do not all come.
const SHORT: Duration = Duration::from_millis(600);
/// Time after its deadline at which a call ends at the latest.
const GRACE: Duration = Duration::from_secs(2);
/// Operations behind the one that hangs: more than the flight recorder remembers.
const QUEUED: u32 = 300;
/// Time that a queued operation may take to run out after an abort: 27 ms on an H200 over sockets. NCCL's kernels ask
/// for an abort after every 10,000 looks at their peer, and each crosses PCIe there.
const RUN_OUT: Duration = Duration::from_millis(40);
/// Time that an abort may take to free waiting threads, including the half second in which other ranks notice.
const ABORT: Duration = Duration::from_secs(2);
/// "At once": generous, for a busy machine.
const AT_ONCE: Duration = Duration::from_millis(500);

pub(super) fn cases() -> Vec<Case<Member>> {
    vec![
        Case::new(
            "timeout: a rank that nobody joins ends with Error::Timeout, which tells what happened",
            alone,
        ),
        Case::new("timeout: an all_to_all of lengths that nobody joins ends in time", alone_with_lengths),
        Case::new("timeout: ranks that miss one end in time, behind a queue of operations too", missing),
        Case::new("timeout: what another rank has given up is an error, and never a result", given_up),
        Case::new("timeout: a rendezvous to which a rank does not come ends in time", rendezvous),
        Case::new("abort: frees a host that waits for work", abort_frees_work),
        Case::new("abort: frees streams, and what waits for them", abort_frees_streams),
        Case::new("failure: every later call is an error at once", after_failure),
        Case::new("failure: a new group works, and the old one goes away", new_group),
    ]
}

fn alone(m: &Member) -> Verdict {
    m.needs_peers()?;
    let group = doomed(m, "doomed", SHORT)?;
    on_rank_0(m, || {
        let buffer = upload(&m.compute, &[1; 12], DType::Bf16)?;
        let start = Instant::now();
        let outcome = group.all_reduce(&buffer, ReduceOp::Sum, &m.compute)?.wait();
        in_time(start, SHORT)?;
        let Err(Error::Timeout { call, group, rank, world_size, timeout, recent, .. }) = outcome else {
            return same("the error", format!("{outcome:?}"), "Timeout".into());
        };
        same("call and group", (call, group.as_str()), ("all_reduce", "doomed"))?;
        same("rank of world size", (rank, world_size), (0, m.world_size))?;
        same("deadline", timeout, SHORT)?;
        for word in ["all_reduce", "Bf16 x 6", "started"] {
            ensure!(recent.contains(word), "the flight recorder's lines lack {word:?}:\n{recent}");
        }
        Ok(())
    })
}

fn alone_with_lengths(m: &Member) -> Verdict {
    m.needs_peers()?;
    let group = doomed(m, "doomed", SHORT)?;
    on_rank_0(m, || {
        let buffer = Buffer::zeros(&m.compute, 5, DType::F32)?;
        let mut lens = vec![0; m.world_size];
        lens[1] = 5;
        let output = Buffer::zeros(&m.compute, 5, DType::F32)?;
        let start = Instant::now();
        let outcome = group.all_to_all_of((&output, &lens), (&buffer, &lens), &m.compute)?.wait();
        in_time(start, SHORT)?;
        let is_timeout = matches!(&outcome, Err(Error::Timeout { call: "all_to_all", .. }));
        ensure!(is_timeout, "the error is {outcome:?}, not Timeout");
        Ok(())
    })
}

/// The rank that is missed comes when the others have given up, and hears of it at once, however long their queues
/// are; they are free once those ran out.
fn missing(m: &Member) -> Verdict {
    m.needs_peers()?;
    let group = doomed(m, "doomed", SHORT)?;
    let is_missed = m.rank == m.world_size - 1;
    let (late, sums) = if is_missed { (SHORT + GRACE / 2, 1) } else { (Duration::ZERO, QUEUED) };
    let start = Instant::now();
    thread::sleep(late);
    let buffer = Buffer::zeros(&m.compute, 100, DType::F32)?;
    let works = (0..sums).map(|_| group.all_reduce(&buffer, ReduceOp::Sum, &m.compute));
    let outcomes = match works.collect::<Result<Vec<_>>>() {
        Ok(works) => works.iter().map(Work::wait).collect(),
        // Another rank may have given up, or does so while this one still enqueues: the same error, only earlier.
        Err(error) => vec![Err(error)],
    };
    let took = start.elapsed();
    m.meet("all have given up")?;
    let most = SHORT + GRACE + RUN_OUT * (sums - 1);
    ensure!(
        took < most,
        "it ended after {took:?}, with a deadline of {SHORT:?} and {sums} sums in its queue"
    );
    for outcome in outcomes {
        let is_from_peer = outcome.as_ref().is_err_and(Error::is_from_peer);
        ensure!(is_from_peer, "{outcome:?} is not an error that another rank caused");
    }
    Ok(())
}

/// Rank 0 gives up first. What it leaves must not look like a result to the others, whose own deadlines are far: those
/// that wait with it, and the last one, which comes when it is gone.
fn given_up(m: &Member) -> Verdict {
    m.needs_peers()?;
    let is_first = m.rank == 0;
    let timeout = if is_first { SHORT } else { m.store.rendezvous().timeout };
    let group = doomed(m, "given up", timeout)?;
    if m.rank == m.world_size - 1 {
        thread::sleep(SHORT + GRACE / 2);
    }
    let start = Instant::now();
    let buffer = Buffer::zeros(&m.compute, 100, DType::F32)?;
    let outcome = group.all_reduce(&buffer, ReduceOp::Sum, &m.compute).and_then(|work| work.wait());
    let took = start.elapsed();
    m.meet("all have an error")?;
    ensure!(took < SHORT + GRACE, "it ended after {took:?}; rank 0 had {SHORT:?}");
    let is_from_peer = outcome.as_ref().is_err_and(Error::is_from_peer);
    ensure!(is_from_peer, "{outcome:?} is not an error that another rank caused");
    Ok(())
}

fn rendezvous(m: &Member) -> Verdict {
    // The rank that serves the store waits for the other, and the other for the store.
    let rank = m.rank % 2;
    let place = Rendezvous::in_this_process(2, SHORT)?.swap_remove(rank);
    let start = Instant::now();
    let outcome = Store::connect(&place);
    let took = start.elapsed();
    let Err(Error::Rendezvous { address: at, rank: of, world_size, .. }) = outcome else {
        return same("the error", format!("{outcome:?}"), "Rendezvous".into());
    };
    same("address", at, format!("127.0.0.1:{}", place.master_port))?;
    same("rank of world size", (of, world_size), (rank, 2))?;
    // A client sleeps between its attempts to connect.
    ensure!(took < SHORT + 3 * GRACE, "it ended after {took:?}, with a deadline of {SHORT:?}");
    Ok(())
}

fn abort_frees_work(m: &Member) -> Verdict {
    m.needs_peers()?;
    let group = doomed(m, "doomed", m.store.rendezvous().timeout)?;
    on_rank_0(m, || {
        let buffer = Buffer::zeros(&m.compute, 100, DType::F32)?;
        let work = group.all_reduce(&buffer, ReduceOp::Sum, &m.compute)?;
        let freed = while_aborting(&group, || work.wait())?;
        let is_aborted = matches!(&freed, Err(Error::Aborted { rank: 0, .. }));
        ensure!(is_aborted, "the waiter's error is {freed:?}, not Aborted");
        let start = Instant::now();
        drop((work, buffer));
        ensure!(start.elapsed() < ABORT, "to drop the work took {:?}", start.elapsed());
        Ok(())
    })
}

fn abort_frees_streams(m: &Member) -> Verdict {
    m.needs_peers()?;
    let group = doomed(m, "doomed", m.store.rendezvous().timeout)?;
    on_rank_0(m, || {
        let buffer = Buffer::zeros(&m.compute, 100, DType::F32)?;
        let work = group.broadcast(&buffer, 1, &m.compute)?;
        work.wait_stream(&m.compute)?;
        while_aborting(&group, || m.compute.synchronize())??;
        ensure!(group.check().is_err(), "the stream went on, and the group does not say that it failed");
        ensure!(work.wait().is_err(), "the stream went on, and the work does not say that it failed");
        Ok(())
    })
}

fn after_failure(m: &Member) -> Verdict {
    let group = doomed(m, "aborted", m.store.rendezvous().timeout)?;
    m.meet("all are members")?;
    group.abort();
    let start = Instant::now();
    let (after, peer) = (&m.compute, (m.rank + 1) % m.world_size);
    let small = Buffer::zeros(after, 4, DType::F32)?;
    let large = Buffer::zeros(after, 4 * m.world_size, DType::F32)?;
    let send = P2p::Send { buffer: small.clone(), to: peer };
    let lens = vec![4; m.world_size];
    let parts = (&large, &lens[..]);
    let calls = [
        ("broadcast", group.broadcast(&small, 0, after).map(drop)),
        ("all_reduce", group.all_reduce(&small, ReduceOp::Sum, after).map(drop)),
        ("all_gather", group.all_gather(&large, &small, after).map(drop)),
        ("reduce_scatter", group.reduce_scatter(&small, &large, ReduceOp::Sum, after).map(drop)),
        ("all_to_all", group.all_to_all(&large, &large.clone(), after).map(drop)),
        ("batch", group.batch(&[send], after).map(drop)),
        ("all_to_all of lengths", group.all_to_all_of(parts, parts, after).map(drop)),
        ("barrier", group.barrier(after).map(drop)),
        ("split", group.split("child", Some(0), 0).map(drop)),
        ("check", group.check()),
    ];
    let took = start.elapsed();
    for (call, outcome) in calls {
        ensure!(outcome.is_err(), "{call} succeeded on an aborted group");
    }
    ensure!(took < AT_ONCE, "ten calls that fail took {took:?}");
    group.abort(); // a second time does nothing
    Ok(())
}

fn new_group(m: &Member) -> Verdict {
    for round in 0..2 {
        let group = doomed(m, "doomed", SHORT)?;
        let buffer = Buffer::zeros(&m.compute, 100, DType::F32)?;
        // Rank 0 is left alone by the others until it gives up; alone in the world it gives up by itself.
        let lonely = m.rank == 0 && m.world_size > 1;
        let outcome =
            if lonely { group.all_reduce(&buffer, ReduceOp::Sum, &m.compute)?.wait() } else { Ok(()) };
        m.meet(&format!("rank 0 has given up {round}"))?;
        group.abort();
        let start = Instant::now();
        drop((group, buffer));
        let took = start.elapsed();

        let group = doomed(m, "next", m.store.rendezvous().timeout / 4)?;
        let data = m.place(&[m.rank as u8; 9], DType::U8)?;
        group.all_reduce(&data.inner, ReduceOp::Max, &m.compute)?.wait()?;
        let what = format!("round {round}: a new group");
        same_bytes(&what, &data.read(&m.compute)?, &[m.world_size as u8 - 1; 9])?;
        same(&format!("round {round}: whether the old group failed"), outcome.is_err(), lonely)?;
        ensure!(took < ABORT, "round {round}: to drop the old group took {took:?}");
    }
    Ok(())
}

/// Runs `check` on rank 0 while the others wait for its end: who left earlier would be a rank that died, and not
/// one that does not come.
fn on_rank_0(m: &Member, check: impl FnOnce() -> Verdict) -> Verdict {
    let verdict = if m.rank == 0 { check() } else { Ok(()) };
    m.meet("rank 0 is done")?;
    verdict
}

/// A group of all ranks for this case alone.
fn doomed(m: &Member, name: &str, timeout: Duration) -> Result<CollectiveGroup> {
    let comm = m.world.split(Some(0), m.rank as i32)?.expect("a rank with a color is a member");
    CollectiveGroup::new(name, comm, &m.device, timeout)
}

/// Runs `wait`, which blocks, and aborts the group meanwhile. Fails if the abort does not end it soon.
fn while_aborting<T>(group: &CollectiveGroup, wait: impl FnOnce() -> T) -> Result<T, Stop> {
    const HEAD_START: Duration = Duration::from_millis(100);
    let start = Instant::now();
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(HEAD_START);
            group.abort();
        });
        wait()
    });
    let took = start.elapsed();
    ensure!(took >= HEAD_START, "the wait ended after {took:?}, before the abort");
    ensure!(took < HEAD_START + ABORT, "the wait ended {:?} after the abort", took - HEAD_START);
    Ok(outcome)
}

fn in_time(start: Instant, timeout: Duration) -> Verdict {
    let took = start.elapsed();
    ensure!(took >= timeout, "it ended after {took:?}, before its deadline of {timeout:?}");
    ensure!(took < timeout + GRACE, "it ended after {took:?}, with a deadline of {timeout:?}");
    Ok(())
}
