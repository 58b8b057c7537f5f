//! A stream of the CPU backend is a thread with a queue; an event is a pair of counters.

use std::{
    io,
    sync::{Arc, Condvar, Mutex, mpsc},
    thread,
    time::Instant,
};

use crate::{device::HostFn, host::work::run};

/// The thread of one stream. Dropping it ends the thread after its pending work.
#[derive(Debug)]
pub(super) struct Worker {
    queue: mpsc::Sender<HostFn>,
    failure: Arc<Mutex<Option<String>>>,
}

impl Worker {
    pub(super) fn spawn(name: String) -> io::Result<Self> {
        let (queue, work) = mpsc::channel::<HostFn>();
        let failure = Arc::new(Mutex::new(None));
        let first_failure = failure.clone();
        thread::Builder::new().name(name).spawn(move || {
            for item in work {
                if let Err(message) = run(item) {
                    first_failure.lock().unwrap().get_or_insert(message);
                }
            }
        })?;
        Ok(Self { queue, failure })
    }

    pub(super) fn enqueue(&self, work: HostFn) -> Result<(), String> {
        self.queue.send(work).map_err(|_| "the stream's thread is gone".to_owned())
    }

    /// The first failure since it was last taken.
    pub(super) fn failure(&self) -> Arc<Mutex<Option<String>>> {
        self.failure.clone()
    }
}

/// Counts records: the n-th record is complete once `completed >= n`. A wait fixes n when it is enqueued, so
/// that a later record of the same event does not move it.
#[derive(Debug, Default)]
pub(super) struct EventState {
    counters: Mutex<Counters>,
    advanced: Condvar,
}

#[derive(Debug, Default)]
struct Counters {
    recorded: u64,
    completed: u64,
    finished_at: Option<Instant>,
}

impl EventState {
    pub(super) fn begin_record(&self) -> u64 {
        let mut counters = self.counters.lock().unwrap();
        counters.recorded += 1;
        counters.recorded
    }

    pub(super) fn finish_record(&self, target: u64) {
        let mut counters = self.counters.lock().unwrap();
        if target > counters.completed {
            counters.completed = target;
            counters.finished_at = Some(Instant::now());
        }
        self.advanced.notify_all();
    }

    pub(super) fn recorded(&self) -> u64 {
        self.counters.lock().unwrap().recorded
    }

    pub(super) fn is_complete(&self, target: u64) -> bool {
        self.counters.lock().unwrap().completed >= target
    }

    pub(super) fn wait(&self, target: u64) {
        let counters = self.counters.lock().unwrap();
        drop(self.advanced.wait_while(counters, |c| c.completed < target).unwrap());
    }

    /// When the last record completed.
    pub(super) fn finished_at(&self) -> Option<Instant> {
        let counters = self.counters.lock().unwrap();
        if counters.completed == counters.recorded { counters.finished_at } else { None }
    }
}
