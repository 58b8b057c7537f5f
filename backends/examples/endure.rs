//! One rank of a job that runs collectives until one fails, to see what becomes of it when another rank is killed or
//! stopped: `endure BACKEND RANK WORLD_SIZE PORT DEADLINE_S`. Start one process a device, all with the same port.
//! Prints what failed, and how long after the last success.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyroll_backends::{
    Buffer, CollectiveGroup, DType, DeviceId, ReduceOp, Rendezvous, Result, Stream, connect, open,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [backend, rank, world_size, port, deadline_s] = &*arguments else {
        panic!("usage: endure BACKEND RANK WORLD_SIZE PORT DEADLINE_S");
    };
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let (rank, world_size) = (number(rank), number(world_size));
    let deadline = Duration::from_secs(number(deadline_s) as u64);
    let device = open(DeviceId { backend: backend.parse().expect("a backend"), ordinal: rank }).unwrap();
    let port = port.parse().expect("a port");
    let rendezvous = Rendezvous::on_this_host(rank, world_size, port, Duration::from_secs(60));
    let group =
        CollectiveGroup::new("world", connect(&*device, &rendezvous).unwrap(), &device, deadline).unwrap();
    let stream = Stream::new(&device).unwrap();
    let buffer = Buffer::zeros(&stream, 50_000_000, DType::Bf16).unwrap();
    let (mut rounds, mut last) = (0, Instant::now());
    let round = || -> Result<()> {
        // Several in flight, and of two kinds, so that ranks are caught in different ones.
        let sums =
            (0..4).map(|_| group.all_reduce(&buffer, ReduceOp::Sum, &stream)).collect::<Result<Vec<_>>>()?;
        group.barrier(&stream)?.wait()?;
        sums.iter().try_for_each(|work| work.wait())
    };
    let error = loop {
        match round() {
            Ok(()) => (rounds, last) = (rounds + 1, Instant::now()),
            Err(error) => break error,
        }
        if rounds == 1 {
            println!("rank {rank} runs");
        }
    };
    println!(
        "rank {rank} after {rounds} rounds, {:.2} s after the last: {error}",
        last.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    drop((buffer, stream, group));
    println!("rank {rank} let go of everything in {:.2} s", start.elapsed().as_secs_f64());
    assert!(error.is_from_peer(), "{error:?}");
}
