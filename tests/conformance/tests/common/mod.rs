//! What the tests share: a device, and ranks that are threads of this process.

use std::{net::TcpListener, sync::Arc, thread, time::Duration};

use anyroll_backends::{BackendKind, Device, DeviceId, Reduction, Rendezvous, open};
use anyroll_conformance::Peers;

/// The host's processor; `ordinal` tells ranks apart.
pub fn cpu(ordinal: usize) -> Arc<dyn Device> {
    open(DeviceId { backend: BackendKind::Cpu, ordinal }).expect("every machine has a processor")
}

/// Runs `rank` on every rank of a job and returns what rank 0 returned. Each has a device and a store of its own.
#[allow(dead_code)] // each program of tests has its own part of this module
pub fn on_ranks<T: Send>(world_size: usize, rank: impl Fn(Peers) -> T + Sync) -> T {
    on_ranks_of(&|number| cpu(number), world_size, rank)
}

/// The same on devices of another backend.
pub fn on_ranks_of<T: Send>(
    device: &(dyn Fn(usize) -> Arc<dyn Device> + Sync),
    world_size: usize,
    rank: impl Fn(Peers) -> T + Sync,
) -> T {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    drop(listener);
    let start = |number: usize| {
        let rendezvous = Rendezvous {
            rank: number,
            world_size,
            master_addr: address.ip().to_string(),
            master_port: address.port(),
            agent_store: None,
            // Four times an operation's deadline. TCP that loses a packet on a crowded machine stalls for seconds.
            timeout: Duration::from_secs(160),
        };
        rank(Peers::connect(device(number), &rendezvous, Reduction::Ordered).expect("the ranks meet"))
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size).map(|number| scope.spawn(move || start(number))).collect();
        let results: Vec<T> = ranks.into_iter().map(|rank| rank.join().expect("ranks return")).collect();
        results.into_iter().next().expect("there is a rank")
    })
}
