//! One rank of the conformance suite, for machines with accelerators: `rank BACKEND RANK WORLD_SIZE PORT
//! [device|collective|failure]... [filter=TEXT]`. Start one process a device, all with the same port. Rank 0 prints
//! a table a suite; the exit status is 1 when a case failed.

#![forbid(unsafe_code)]

use std::{process::ExitCode, time::Duration};

use anyroll_backends::{DeviceId, Rendezvous, open};
use anyroll_conformance::{Counts, Outcome, Peers, collective_suite, device_suite, failure_suite, table};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [backend, rank, world_size, port, suites @ ..] = &*arguments else {
        eprintln!("usage: rank BACKEND RANK WORLD_SIZE PORT [device|collective|failure]... [filter=TEXT]");
        return ExitCode::FAILURE;
    };
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let rank = number(rank);
    let device = open(DeviceId { backend: backend.parse().expect("a backend"), ordinal: rank }).unwrap();
    let rendezvous = Rendezvous {
        rank,
        world_size: number(world_size),
        master_addr: "127.0.0.1".into(),
        master_port: port.parse().expect("a port"),
        timeout: Duration::from_secs(60),
        agent_store: None,
    };
    let filter = suites.iter().find_map(|word| word.strip_prefix("filter="));
    let runs = |name: &str| suites.iter().any(|suite| suite == name);
    let mut failed = false;
    let mut report = |outcomes: &[Outcome]| {
        failed |= Counts::of(outcomes).failed > 0;
        if rank == 0 {
            println!("{}", table(outcomes));
        }
    };
    if runs("device") && rank == 0 {
        report(&device_suite(&device, filter));
    }
    if runs("collective") || runs("failure") {
        let peers = Peers::connect(device, &rendezvous).unwrap();
        if runs("collective") {
            report(&collective_suite(&peers, filter));
        }
        if runs("failure") {
            report(&failure_suite(&peers, filter));
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
