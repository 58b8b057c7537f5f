//! [`on_threads`]: ranks that are threads of this process, for tests.

use std::{sync::Arc, thread, time::Duration};

use crate::{CollectiveGroup, Device, Rendezvous, connect};

/// Time that ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `rank` on `world_size` threads, each with the device that `open` returns for its number, and a group. Returns their
/// results by rank.
///
/// # Panics
/// If a rank does, or the ranks do not meet.
pub fn on_threads<R: Send>(
    world_size: usize,
    open: impl Fn(usize) -> Arc<dyn Device> + Sync,
    rank: impl Fn(&Arc<dyn Device>, CollectiveGroup) -> R + Sync,
) -> Vec<R> {
    let places = Rendezvous::in_this_process(world_size, TIMEOUT).expect("there is a free port");
    let start = |number: usize| {
        let device = open(number);
        let comm = connect(&*device, &places[number]).expect("the ranks meet");
        let group = CollectiveGroup::new("threads", comm, &device, TIMEOUT).expect("they have met");
        rank(&device, group)
    };
    thread::scope(|scope| {
        let start = &start;
        let threads: Vec<_> = (0..world_size).map(|number| scope.spawn(move || start(number))).collect();
        threads.into_iter().map(|thread| thread.join().expect("ranks return")).collect()
    })
}
