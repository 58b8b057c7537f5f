//! Results of every operation, for each element type, reduction and awkward length, compared with plain loops.

use anyroll_backends::{DType, Error, P2p, ReduceOp};

use super::member::{Member, Tally};
use crate::{
    runner::{Case, Verdict, same, same_bytes},
    values::{hash, random},
};

/// A length, over all ranks, at which libraries leave their path for small messages.
const LARGE: usize = 1 << 20;

pub(super) fn cases(dtypes: &[DType]) -> Vec<Case<Member>> {
    let mut cases = Vec::new();
    for dtype in dtypes.iter().copied() {
        cases.extend([
            Case::new(format!("broadcast: {dtype:?}, from every root"), move |m| broadcast(m, dtype)),
            Case::new(format!("all_gather: {dtype:?}, apart and in place"), move |m| all_gather(m, dtype)),
            Case::new(format!("all_to_all: {dtype:?}"), move |m| all_to_all(m, dtype)),
            Case::new(format!("batch: {dtype:?}, around a ring"), move |m| ring(m, dtype)),
            Case::new(format!("batch: {dtype:?}, between all pairs, in order"), move |m| pairs(m, dtype)),
            Case::new(format!("all_to_all: {dtype:?}, of any lengths"), move |m| unequal(m, dtype)),
        ]);
        for op in ReduceOp::ALL {
            cases.extend([
                Case::new(format!("all_reduce: {dtype:?}, {op:?}"), move |m| all_reduce(m, dtype, op)),
                Case::new(format!("reduce_scatter: {dtype:?}, {op:?}, apart and in place"), move |m| {
                    reduce_scatter(m, dtype, op)
                }),
            ]);
        }
        if dtype.is_float() {
            let name = format!("all_reduce: {dtype:?}, every rank has the same bits");
            cases.push(Case::new(name, move |m| same_bits(m, dtype)));
        }
    }
    cases.push(Case::new("an operation that is refused leaves the group whole", refused));
    cases
}

/// None, one, fewer than the ranks may be, a multiple of them and not, and with fp32 a large one.
fn lengths(m: &Member, dtype: DType) -> Vec<usize> {
    let mut lengths = vec![0, 1, 3, 24 * m.world_size, 24 * m.world_size + 1, 10_007];
    if dtype == DType::F32 {
        lengths.push(LARGE / m.world_size);
    }
    lengths
}

fn broadcast(m: &Member, dtype: DType) -> Verdict {
    let mut tally = Tally::default();
    for len in lengths(m, dtype) {
        let inputs = m.inputs(dtype, len);
        for root in 0..m.world_size {
            let data = m.place(&inputs[m.rank], dtype)?;
            m.group.broadcast(&data.inner, root, &m.compute)?.wait()?;
            tally.holds(&format!("{len} elements from {root}"), &data, &inputs[root], &m.compute);
        }
    }
    tally.verdict()
}

fn all_gather(m: &Member, dtype: DType) -> Verdict {
    let mut tally = Tally::default();
    for len in lengths(m, dtype) {
        let inputs = m.inputs(dtype, len);
        let want = inputs.concat();

        let input = m.place(&inputs[m.rank], dtype)?;
        let output = m.place(&vec![0xee; want.len()], dtype)?;
        m.group.all_gather(&output.inner, &input.inner, &m.compute)?.wait()?;
        tally.holds(&format!("{len} elements"), &output, &want, &m.compute);
        tally.holds(&format!("{len} elements: the input"), &input, &inputs[m.rank], &m.compute);

        let mut whole = vec![0xee; want.len()];
        let mine = m.rank * inputs[0].len()..(m.rank + 1) * inputs[0].len();
        whole[mine].copy_from_slice(&inputs[m.rank]);
        let output = m.place(&whole, dtype)?;
        let input = output.inner.slice(m.rank * len..(m.rank + 1) * len);
        m.group.all_gather(&output.inner, &input, &m.compute)?.wait()?;
        tally.holds(&format!("{len} elements in place"), &output, &want, &m.compute);
    }
    tally.verdict()
}

fn all_to_all(m: &Member, dtype: DType) -> Verdict {
    let mut tally = Tally::default();
    for len in lengths(m, dtype) {
        let inputs = m.inputs(dtype, len * m.world_size);
        let slice = len * dtype.size_bytes();
        let want: Vec<u8> =
            inputs.iter().flat_map(|input| &input[m.rank * slice..(m.rank + 1) * slice]).copied().collect();
        let input = m.place(&inputs[m.rank], dtype)?;
        let output = m.place(&vec![0xee; want.len()], dtype)?;
        m.group.all_to_all(&output.inner, &input.inner, &m.compute)?.wait()?;
        tally.holds(&format!("{len} elements to each"), &output, &want, &m.compute);
        tally.holds(&format!("{len} elements to each: the input"), &input, &inputs[m.rank], &m.compute);
    }
    tally.verdict()
}

fn all_reduce(m: &Member, dtype: DType, op: ReduceOp) -> Verdict {
    if op.check(dtype).is_err() {
        let data = m.place(&random(dtype, 8, 1), dtype)?;
        return no_reduction(m.group.all_reduce(&data.inner, op, &m.compute).map(drop), dtype);
    }
    let mut tally = Tally::default();
    for len in lengths(m, dtype) {
        let inputs = m.inputs(dtype, len);
        let data = m.place(&inputs[m.rank], dtype)?;
        m.group.all_reduce(&data.inner, op, &m.compute)?.wait()?;
        let got = data.read(&m.compute);
        tally.add(
            got.and_then(|got| m.same_reduction(&format!("{len} elements"), &got, (dtype, op), &inputs)),
        );
    }
    tally.verdict()
}

fn reduce_scatter(m: &Member, dtype: DType, op: ReduceOp) -> Verdict {
    if op.check(dtype).is_err() {
        let input = m.place(&random(dtype, 8 * m.world_size, 1), dtype)?;
        let output = m.place(&random(dtype, 8, 1), dtype)?;
        let outcome = m.group.reduce_scatter(&output.inner, &input.inner, op, &m.compute);
        return no_reduction(outcome.map(drop), dtype);
    }
    let mut tally = Tally::default();
    for len in lengths(m, dtype) {
        let inputs = m.inputs(dtype, len * m.world_size);
        let slice = m.rank * len * dtype.size_bytes()..(m.rank + 1) * len * dtype.size_bytes();
        let slices: Vec<Vec<u8>> = inputs.iter().map(|input| input[slice.clone()].to_vec()).collect();

        let input = m.place(&inputs[m.rank], dtype)?;
        let output = m.place(&vec![0xee; slice.len()], dtype)?;
        m.group.reduce_scatter(&output.inner, &input.inner, op, &m.compute)?.wait()?;
        let got = output.read(&m.compute);
        let what = format!("{len} elements for each");
        tally.add(got.and_then(|got| m.same_reduction(&what, &got, (dtype, op), &slices)));
        tally.holds(&format!("{what}: the input"), &input, &inputs[m.rank], &m.compute);

        let output = input.inner.slice(m.rank * len..(m.rank + 1) * len);
        m.group.reduce_scatter(&output, &input.inner, op, &m.compute)?.wait()?;
        let got = input.read(&m.compute).map(|whole| whole[slice.clone()].to_vec());
        let what = format!("{what}, in place");
        tally.add(got.and_then(|got| m.same_reduction(&what, &got, (dtype, op), &slices)));
    }
    tally.verdict()
}

fn ring(m: &Member, dtype: DType) -> Verdict {
    let (to, from) = ((m.rank + 1) % m.world_size, (m.rank + m.world_size - 1) % m.world_size);
    let mut tally = Tally::default();
    for len in lengths(m, dtype) {
        let inputs = m.inputs(dtype, len);
        let (sent, received) = (m.place(&inputs[m.rank], dtype)?, m.place(&inputs[m.rank], dtype)?);
        let mut transfers = vec![
            P2p::Send { buffer: sent.inner.clone(), to },
            P2p::Recv { buffer: received.inner.clone(), from },
        ];
        if m.world_size == 1 {
            transfers.clear(); // a rank sends nothing to itself: what is left is an empty batch
        }
        m.group.batch(&transfers, &m.compute)?.wait()?;
        tally.holds(&format!("{len} elements"), &received, &inputs[from], &m.compute);
        tally.holds(&format!("{len} elements: what was sent"), &sent, &inputs[m.rank], &m.compute);
    }
    tally.verdict()
}

/// Two transfers of different lengths in each direction of each pair, listed in another order on every rank.
fn pairs(m: &Member, dtype: DType) -> Verdict {
    let lens = [101, 7];
    let seed = |from: usize, to: usize, number: usize| (from * 100 + to * 10 + number) as u64;
    let mut tally = Tally::default();
    let (mut transfers, mut expected) = (Vec::new(), Vec::new());
    for step in 1..m.world_size {
        let peer = (m.rank + step) % m.world_size;
        for (number, len) in lens.into_iter().enumerate() {
            let sent = m.place(&random(dtype, len, seed(m.rank, peer, number)), dtype)?;
            transfers.push(P2p::Send { buffer: sent.inner, to: peer });
            let received = m.place(&vec![0xee; len * dtype.size_bytes()], dtype)?;
            transfers.push(P2p::Recv { buffer: received.inner.clone(), from: peer });
            let want = random(dtype, len, seed(peer, m.rank, number));
            expected.push((format!("number {number} from {peer}"), received, want));
        }
    }
    m.group.batch(&transfers, &m.compute)?.wait()?;
    for (what, received, want) in expected {
        tally.holds(&what, &received, &want, &m.compute);
    }
    tally.verdict()
}

/// Parts of other lengths from each rank to each, some of none; in the last round a rank gets all, and in the one before none
/// gets anything.
fn unequal(m: &Member, dtype: DType) -> Verdict {
    let last = m.world_size - 1;
    let lens: [fn(usize, usize, usize) -> usize; 4] = [
        |from, to, _| (from * 37 + to * 11) % 64,
        |from, to, _| if from == to { 0 } else { 1000 + from },
        |_, _, _| 0,
        |from, to, last| if to == last { 5 + from } else { 0 },
    ];
    let mut tally = Tally::default();
    for (round, len) in lens.into_iter().enumerate() {
        let part = |from: usize, to: usize| {
            random(dtype, len(from, to, last), (round * 10_000 + from * 100 + to) as u64)
        };
        let ranks = 0..m.world_size;
        let sent: Vec<usize> = ranks.clone().map(|to| len(m.rank, to, last)).collect();
        let received: Vec<usize> = ranks.clone().map(|from| len(from, m.rank, last)).collect();
        let given: Vec<u8> = ranks.clone().flat_map(|to| part(m.rank, to)).collect();
        let wanted: Vec<u8> = ranks.flat_map(|from| part(from, m.rank)).collect();
        let (input, output) = (m.place(&given, dtype)?, m.place(&vec![0xee; wanted.len()], dtype)?);
        let work = m.group.all_to_all_of((&output.inner, &received), (&input.inner, &sent), &m.compute)?;
        work.wait()?;
        tally.holds(&format!("round {round}"), &output, &wanted, &m.compute);
        tally.holds(&format!("round {round}: what was sent"), &input, &given, &m.compute);
    }
    tally.verdict()
}

fn same_bits(m: &Member, dtype: DType) -> Verdict {
    let inputs = m.inputs(dtype, 10_007);
    let mut hashes = String::new();
    for op in ReduceOp::ALL {
        let data = m.place(&inputs[m.rank], dtype)?;
        m.group.all_reduce(&data.inner, op, &m.compute)?.wait()?;
        hashes += &format!("{op:?} {:016x} ", hash(&data.read(&m.compute)?));
    }
    let everybody = m.exchange("hashes", &hashes)?;
    same("hashes of the results on all ranks", everybody, vec![hashes; m.world_size])
}

fn refused(m: &Member) -> Verdict {
    let data = m.place(&[1, 2, 3], DType::U8)?;
    no_reduction(m.group.all_reduce(&data.inner, ReduceOp::Avg, &m.compute).map(drop), DType::U8)?;
    m.group.check()?;
    m.group.all_reduce(&data.inner, ReduceOp::Max, &m.compute)?.wait()?;
    same_bytes("an all_reduce afterwards", &data.read(&m.compute)?, &[1, 2, 3])
}

fn no_reduction(outcome: Result<(), Error>, dtype: DType) -> Verdict {
    match outcome {
        Err(Error::NoReduction { op, dtype: of }) => same("the error's fields", (op, of), ("avg", dtype)),
        other => same("the average of integers", format!("{other:?}"), "NoReduction".into()),
    }
}
