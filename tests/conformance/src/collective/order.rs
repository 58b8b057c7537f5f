//! When operations run: after what stands before them, before what waits for them, and none is lost.

use std::time::Duration;

use anyroll_backends::{Arena, Buffer, CollectiveGroup, DType, ReduceOp, Stream, Work};

use super::member::{Member, Tally};
use crate::{
    host::{GATE_LIMIT, Gate, PATIENCE, download, tensor_bytes, upload},
    runner::{Case, Stop, Verdict, ensure, same, same_bytes},
    values::{random, reduce},
};

/// Elements in the cases of this file.
const LEN: usize = 1001;

pub(super) fn cases() -> Vec<Case<Member>> {
    vec![
        Case::new("order: an operation starts after the work that is on its stream", after_compute),
        Case::new("order: enqueueing does not wait, for the stream or for the other ranks", no_blocking),
        Case::new("order: a stream that waits for the work sees the result", consumer),
        Case::new("order: libtorch's stream that waits for the work sees the result", torch_consumer),
        Case::new("order: what is written behind a wait does not reach the operation", write_after_read),
        Case::new("order: hundreds of operations in flight run in order", many_in_flight),
        Case::new("order: groups of the same ranks do not disturb one another", interleaved),
        Case::new("order: work and buffers dropped in flight live until the operation is done", dropped),
        Case::new("order: an arena whose last owner is the operation goes away behind it", dropped_arena),
        Case::new("order: a barrier holds everybody until the last has come", barrier),
        Case::new("flight recorder: shows the last operations and their states", flight_recorder),
    ]
}

fn after_compute(m: &Member) -> Verdict {
    let inputs = m.inputs(DType::I64, LEN);
    let (late, data) = (m.place(&inputs[m.rank], DType::I64)?, m.place(&vec![0; LEN * 8], DType::I64)?);
    let gate = Gate::close(&m.compute)?;
    data.inner.copy_from(&late.inner, &m.compute)?;
    let work = m.group.all_reduce(&data.inner, ReduceOp::Sum, &m.compute)?;
    std::thread::sleep(Duration::from_millis(10)); // time to run ahead, if it did not wait
    gate.open();
    work.wait()?;
    let want = reduce(DType::I64, ReduceOp::Sum, &inputs);
    same_bytes("the sum of what was written late", &data.read(&m.compute)?, &want)
}

fn no_blocking(m: &Member) -> Verdict {
    let data = m.place(&random(DType::F32, LEN, 1), DType::F32)?;
    let other = Stream::new(&m.device)?;
    // Rank 0 comes last: nobody can be done before it opens its gate.
    let gate = if m.rank == 0 { Some(Gate::close(&m.compute)?) } else { None };
    let work = m.group.all_reduce(&data.inner, ReduceOp::Sum, &m.compute)?;
    work.wait_stream(&other)?;
    let done = other.record()?;
    m.meet("enqueued")?; // a rank that blocks until the others are there never gets here in time
    let is_early = done.is_complete()?;
    m.meet("looked")?;
    if let Some(gate) = gate {
        gate.open();
    }
    work.wait()?;
    m.compute.synchronize()?; // a gate that nobody opened in time says so
    ensure!(!is_early, "it was done before rank 0 had started");
    ensure!(done.wait_for(PATIENCE)?, "a stream that waits for it does not go on");
    Ok(())
}

fn consumer(m: &Member) -> Verdict {
    let stream = Stream::new(&m.device)?;
    let mut tally = Tally::default();
    for round in 0..20 {
        let inputs: Vec<_> =
            (0..m.world_size).map(|rank| random(DType::I32, LEN, 100 * round + rank as u64)).collect();
        let data = m.place(&inputs[m.rank], DType::I32)?;
        let seen = m.place(&vec![0; LEN * 4], DType::I32)?;
        stream.wait_stream(&m.compute)?;
        let work = m.group.all_reduce(&data.inner, ReduceOp::Sum, &m.compute)?;
        work.wait_stream(&stream)?;
        seen.inner.copy_from(&data.inner, &stream)?;
        m.compute.wait_stream(&stream)?;
        let want = reduce(DType::I32, ReduceOp::Sum, &inputs);
        tally.holds(&format!("round {round}: the sum"), &seen, &want, &m.compute);
    }
    tally.verdict()
}

fn torch_consumer(m: &Member) -> Verdict {
    if m.device.torch_device().is_none() {
        return Err(Stop::Skipped(format!("libtorch does not compute on {}", m.device.id())));
    }
    let torch = Stream::torch(&m.device)?;
    let inputs = m.inputs(DType::I64, LEN);
    let data = upload(&m.compute, &inputs[m.rank], DType::I64)?;
    let tensor = data.tensor(&[LEN as i64])?;
    m.group.all_reduce(&data, ReduceOp::Sum, &m.compute)?.wait_stream(&torch)?;
    let want = reduce(DType::I64, ReduceOp::Sum, &inputs);
    same_bytes("the sum, read by libtorch", &tensor_bytes(&tensor)?, &want)
}

fn write_after_read(m: &Member) -> Verdict {
    let mut tally = Tally::default();
    for round in 0..10 {
        let inputs = m.inputs(DType::U8, LEN);
        let input = m.place(&inputs[m.rank], DType::U8)?;
        let output = m.place(&vec![0; LEN * m.world_size], DType::U8)?;
        let work = m.group.all_gather(&output.inner, &input.inner, &m.compute)?;
        work.wait_stream(&m.compute)?;
        input.inner.fill(0xff, &m.compute)?;
        tally.holds(&format!("round {round}: what was gathered"), &output, &inputs.concat(), &m.compute);
    }
    tally.verdict()
}

fn many_in_flight(m: &Member) -> Verdict {
    const OPERATIONS: usize = 300; // more than the flight recorder remembers
    let data = m.place(&1i64.to_ne_bytes().repeat(LEN), DType::I64)?;
    let works = (0..OPERATIONS)
        .map(|_| m.group.all_reduce(&data.inner, ReduceOp::Sum, &m.compute))
        .collect::<Result<Vec<_>, _>>()?;
    works.iter().try_for_each(Work::wait)?;
    let want = (0..OPERATIONS).fold(1i64, |sum, _| sum.wrapping_mul(m.world_size as i64));
    let want = want.to_ne_bytes().repeat(LEN);
    same_bytes("a sum of sums", &data.read(&m.compute)?, &want)
}

fn interleaved(m: &Member) -> Verdict {
    let everybody = |name: &str| -> Result<CollectiveGroup, Stop> {
        let group = m.group.split(name, Some(0), m.rank as i32)?;
        group.ok_or_else(|| Stop::Failed("a rank with a color is not a member".into()))
    };
    let groups = [everybody("first")?, everybody("second")?, everybody("third")?];
    let inputs = m.inputs(DType::F32, LEN);
    let mut in_flight = Vec::new();
    for _ in 0..10 {
        for group in &groups {
            let input = m.place(&inputs[m.rank], DType::F32)?;
            let output = m.place(&vec![0; LEN * 4 * m.world_size], DType::F32)?;
            let work = group.all_gather(&output.inner, &input.inner, &m.compute)?;
            in_flight.push((output, work));
        }
    }
    let mut tally = Tally::default();
    for (output, work) in in_flight.into_iter().rev() {
        work.wait()?;
        tally.holds("what was gathered", &output, &inputs.concat(), &m.compute);
    }
    tally.verdict()
}

fn dropped(m: &Member) -> Verdict {
    let inputs = m.inputs(DType::I32, LEN);
    let kept = m.place(&vec![0; LEN * 4], DType::I32)?;
    for _ in 0..10 {
        let data = m.place(&inputs[m.rank], DType::I32)?;
        let work = m.group.all_reduce(&data.inner, ReduceOp::Sum, &m.compute)?;
        work.wait_stream(&m.compute)?;
        kept.inner.copy_from(&data.inner, &m.compute)?;
        drop((work, data));
        drop(m.group.broadcast(&Buffer::zeros(&m.compute, LEN, DType::U8)?, 0, &m.compute)?);
    }
    let want = reduce(DType::I32, ReduceOp::Sum, &inputs);
    same_bytes("a copy of what was dropped", &kept.read(&m.compute)?, &want)
}

fn dropped_arena(m: &Member) -> Verdict {
    let arena = Arena::new("in flight", &m.compute, LEN)?;
    let gate = Gate::close(&m.compute)?;
    let work = m.group.all_reduce(&arena.buffer(0..LEN, DType::U8), ReduceOp::Max, &m.compute)?;
    // The arena's home waits for the operation, which is now the one to release the arena.
    drop((work, arena));
    gate.open();
    Ok(m.compute.synchronize()?)
}

fn barrier(m: &Member) -> Verdict {
    let mut tally = Tally::default();
    for last in 0..m.world_size {
        let gate = if m.rank == last { Some(Gate::close(&m.compute)?) } else { None };
        let work = m.group.barrier(&m.compute)?;
        let probe = Stream::new(&m.device)?;
        work.wait_stream(&probe)?;
        let passed = probe.record()?;
        m.meet(&format!("armed {last}"))?;
        let is_early = passed.wait_for(Duration::from_millis(10))?;
        m.meet(&format!("looked {last}"))?;
        drop(gate);
        work.wait()?;
        let is_passed = passed.wait_for(GATE_LIMIT)?;
        let what = format!("passed before and after rank {last} has come");
        tally.add(same(&what, (is_early, is_passed), (false, true)));
    }
    tally.verdict()
}

fn flight_recorder(m: &Member) -> Verdict {
    let buffer = Buffer::zeros(&m.compute, 12 * m.world_size, DType::Bf16)?;
    m.group.all_reduce(&buffer, ReduceOp::Max, &m.compute)?.wait()?;
    let gate = Gate::close(&m.compute)?;
    let work = m.group.broadcast(&buffer, 0, &m.compute)?;
    let recent = m.group.recent();
    gate.open();
    work.wait()?;
    let lines: Vec<&str> = recent.lines().collect();
    let [.., reduced, pending] = lines[..] else {
        return Err(Stop::Failed(format!("it shows {} operations, not two or more", lines.len())));
    };
    let len = 12 * m.world_size;
    for (line, call, state) in [(reduced, "all_reduce", "done"), (pending, "broadcast", "enqueued")] {
        let words = [call, &format!("Bf16 x {len}"), state];
        ensure!(words.iter().all(|word| line.contains(word)), "{line:?} lacks one of {words:?}");
    }
    same_bytes("the buffer", &download(&buffer, &m.compute)?, &vec![0; len * 2])
}
