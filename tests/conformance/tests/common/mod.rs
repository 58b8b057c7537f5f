//! The host as a backend, and ranks that are threads of this process.

use std::{sync::Arc, thread, time::Duration};

use anyroll_backends::{Backend, BackendKind, Reduction, Rendezvous, Result, Store, backend};
use anyroll_conformance::Peers;

/// The host's processor.
#[allow(dead_code)] // each program of tests has its own part of this module
pub fn cpu() -> &'static dyn Backend {
    backend(BackendKind::CPU).expect("every machine has a processor")
}

/// Runs `rank` on every rank of a job and returns what rank 0 returned. Each has a device of the backend and a store of its
/// own.
pub fn on_ranks<T: Send>(backend: &dyn Backend, world_size: usize, rank: impl Fn(Peers) -> T + Sync) -> T {
    // Four times an operation's deadline. TCP that loses a packet on a crowded machine stalls for seconds.
    const TIMEOUT: Duration = Duration::from_secs(160);
    let places = Rendezvous::in_this_process(world_size, TIMEOUT).expect("a free port");
    let connect = |number: usize| -> Result<Peers> {
        let device = backend.open(number)?;
        let store = Store::connect(&places[number])?;
        let world = backend.connect(&*device, store.next_part()?, Reduction::Ordered)?;
        Ok(Peers { device, world, store: Arc::new(store) })
    };
    let start = |number| rank(connect(number).expect("the ranks meet"));
    thread::scope(|scope| {
        let start = &start;
        let ranks: Vec<_> = (0..world_size).map(|number| scope.spawn(move || start(number))).collect();
        let results: Vec<T> = ranks.into_iter().map(|rank| rank.join().expect("ranks return")).collect();
        results.into_iter().next().expect("there is a rank")
    })
}
