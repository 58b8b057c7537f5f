//! [`Notice`]: ranks say that they end a communicator before they do.
//!
//! A communicator that is ended on the device lets its kernels run out, and what they leave in a neighbour's memory
//! reads like data there: an operation of the neighbour's may be done, with no error, and its result be nonsense. So
//! a rank that gives up says so in the store first, and ends the communicator only when the others have had the time
//! to hear of it, after which nothing that they wait for counts.

use std::{
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::Duration,
};

use crate::{Result, Store};

/// Interval at which a rank checks if another has given up.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// Time that a rank which gives up leaves the others to notice.
const TIME_TO_HEAR: Duration = Duration::from_millis(500);
const KEY: &str = "given up";

/// One rank's part in it, for one communicator.
#[derive(Debug)]
pub(crate) struct Notice {
    store: Arc<Store>,
    heard: Arc<OnceLock<String>>,
}

impl Notice {
    /// Begins to listen to the other ranks of `store`, if there are any.
    pub(crate) fn among(store: &Store) -> Result<Option<Self>> {
        (store.rendezvous().world_size > 1).then(|| Self::listen(store)).transpose()
    }

    /// Returns `outcome`, and tells the other ranks of its error, unless it is theirs.
    pub(crate) fn telling<T>(notice: Option<&Self>, outcome: Result<T>) -> Result<T> {
        if let (Some(notice), Err(error)) = (notice, &outcome)
            && notice.heard().is_none()
        {
            notice.tell(&error.to_string());
        }
        outcome
    }

    /// Begins to listen, in a thread that ends with this. `store` has keys of this communicator alone.
    fn listen(store: &Store) -> Result<Self> {
        let store = Arc::new(store.again()?);
        let heard = Arc::new(OnceLock::new());
        let (asked, told) = (store.clone(), Arc::downgrade(&heard));
        let ask = move || {
            while let Some(heard) = told.upgrade() {
                match asked.is_set(KEY).and_then(|is_set| is_set.then(|| asked.get(KEY)).transpose()) {
                    Ok(None) => {}
                    Ok(Some(words)) => {
                        let _ = heard.set(String::from_utf8_lossy(&words).into_owned());
                        return;
                    }
                    // The store went with its rank, at a run's end or before it: nobody says anything there any more.
                    Err(_) => return,
                }
                drop(heard);
                thread::sleep(ASK_EVERY);
            }
        };
        let spawned = thread::Builder::new().name("notice".into()).spawn(ask);
        spawned.map_err(|error| store.rendezvous().error(format!("no thread to listen: {error}")))?;
        Ok(Self { store, heard })
    }

    /// The reason of another rank that gave up, if one has.
    pub(crate) fn heard(&self) -> Option<&str> {
        self.heard.get().map(String::as_str)
    }

    /// Says that this rank gives up, and returns when others have had the time to hear of it. The store may not
    /// answer any more, which is not waited for.
    pub(crate) fn tell(&self, reason: &str) {
        let words = format!("rank {} gave up: {}", self.store.rendezvous().rank, first_line(reason));
        let store = self.store.clone();
        let (said, is_said) = mpsc::channel();
        let say = move || drop(said.send(store.set(KEY, words.as_bytes())));
        if thread::Builder::new().name("notice".into()).spawn(say).is_ok()
            && is_said.recv_timeout(TIME_TO_HEAR).is_ok_and(|outcome| outcome.is_ok())
        {
            thread::sleep(TIME_TO_HEAR);
        }
    }
}

/// Without the flight recorder's lines: one rank's are enough.
fn first_line(reason: &str) -> &str {
    reason.lines().next().unwrap_or_default()
}
