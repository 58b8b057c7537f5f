//! The rendezvous of ranks: c10d's TCPStore, served by rank 0 or by the launcher.

use std::{
    ffi::{CString, c_void},
    io,
    net::{IpAddr, Ipv4Addr, TcpListener},
    os::fd::IntoRawFd,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::notice::Notice;
use crate::{Error, Result, ffi};

/// In which c10d may say itself that it gives up, and why.
const GRACE: Duration = Duration::from_secs(5);
/// Interval at which a rank that connects looks if another has given up.
const LISTEN_EVERY: Duration = Duration::from_millis(100);

/// Who this process is, and where the others meet. The values of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    /// This process's number.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port on which the store is served.
    pub master_port: u16,
    /// `None`: rank 0 serves the store. Otherwise the launcher does, and our keys in it start with this, which a
    /// restart changes: the store outlives the ranks.
    pub agent_store: Option<String>,
    /// The socket on which rank 0 serves the store; empty: it binds `master_port` itself.
    pub listener: Listener,
    /// Interfaces, names separated by commas: the other ranks are offered the address of the first that has one. `None`: the
    /// address on the way to the rendezvous.
    pub interfaces: Option<String>,
    /// Time that ranks wait for one another, here and in every collective.
    pub timeout: Duration,
}

impl Rendezvous {
    /// A rendezvous of ranks on this host alone.
    pub fn on_this_host(rank: usize, world_size: usize, master_port: u16, timeout: Duration) -> Self {
        let (master_addr, listener) = ("127.0.0.1".to_owned(), Listener::default());
        let (agent_store, interfaces) = (None, None);
        Self { rank, world_size, master_addr, master_port, agent_store, listener, interfaces, timeout }
    }

    /// Rendezvous of ranks that are threads of this process, by rank, at a port that the system assigns.
    ///
    /// # Errors
    /// If no port is free.
    pub fn in_this_process(world_size: usize, timeout: Duration) -> io::Result<Vec<Self>> {
        let (listener, port) = Listener::bind(Ipv4Addr::LOCALHOST.into())?;
        let mut ranks: Vec<_> =
            (0..world_size).map(|rank| Self::on_this_host(rank, world_size, port, timeout)).collect();
        ranks[0].listener = listener;
        Ok(ranks)
    }

    /// Runs `connect`, which may block for longer than it is asked to, in a thread of its own, and returns its outcome.
    /// After `deadline`, or once another rank tells that it gave up, the error is `ended`, of that rank's words. The thread
    /// is left behind then, by a job that cannot go on.
    pub(crate) fn in_time<T: Send + 'static>(
        &self,
        deadline: Duration,
        notice: Option<&Notice>,
        connect: impl FnOnce() -> Result<T> + Send + 'static,
        ended: impl FnOnce(Option<&str>) -> Error,
    ) -> Result<T> {
        let (to, outcome) = mpsc::channel();
        let thread = thread::Builder::new().name("connect".into());
        let spawned = thread.spawn(move || drop(to.send(connect()))); // to nobody, when it is too late
        spawned.map_err(|error| self.error(format!("no thread to connect: {error}")))?;
        let started = Instant::now();
        loop {
            let left = deadline.saturating_sub(started.elapsed());
            match outcome.recv_timeout(left.min(LISTEN_EVERY)) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {
                    if let Some(words) = notice.and_then(Notice::heard) {
                        return Err(ended(Some(words)));
                    }
                }
                Err(_) => return Err(ended(None)),
            }
        }
    }

    pub(crate) fn error(&self, message: String) -> Error {
        Error::Rendezvous {
            address: format!("{}:{}", self.master_addr, self.master_port),
            rank: self.rank,
            world_size: self.world_size,
            message,
        }
    }
}

/// A socket that listens at the rendezvous's port before rank 0 serves there, so that no other program can take the port.
/// The first connection of rank 0 takes it out of all clones.
#[derive(Clone, Debug, Default)]
pub struct Listener(Arc<Mutex<Option<TcpListener>>>);

impl Listener {
    /// Binds a port of an address, which the system assigns. Returns the port too.
    ///
    /// # Errors
    /// If no port is free.
    pub fn bind(address: IpAddr) -> io::Result<(Self, u16)> {
        let socket = TcpListener::bind((address, 0))?;
        let port = socket.local_addr()?.port();
        Ok((socket.into(), port))
    }

    /// Takes the socket out; `None` if it was taken before.
    pub fn take(&self) -> Option<TcpListener> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl From<TcpListener> for Listener {
    fn from(socket: TcpListener) -> Self {
        Self(Arc::new(Mutex::new(Some(socket))))
    }
}

/// The ranks of one color after [`Store::split`], seen from one of them.
#[derive(Debug)]
pub(crate) struct Part {
    /// Their store, in which this rank has its new number.
    pub(crate) store: Store,
    /// The lowest rank among them, as numbered before the split.
    pub(crate) first: usize,
}

/// A key-value store shared by all ranks.
#[derive(Debug)]
pub struct Store {
    raw: Arc<Raw>,
    rendezvous: Rendezvous,
}

/// c10d's store, for this value and for calls of it that have not come back.
#[derive(Debug)]
struct Raw(*mut c_void);

// SAFETY: c10d's stores lock inside; every call may come from any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: the last use; c10d keeps what its own groups still need by reference count.
        unsafe { ffi::anyroll_store_free(self.0) };
    }
}

impl Store {
    /// Waits, up to the time-out, until all ranks are there. A process may connect more than once; what it gets
    /// is the same store each time.
    pub fn connect(rendezvous: &Rendezvous) -> Result<Self> {
        let host = CString::new(rendezvous.master_addr.as_str())
            .map_err(|_| rendezvous.error("MASTER_ADDR contains a NUL byte".into()))?;
        let server = i32::from(rendezvous.rank == 0 && rendezvous.agent_store.is_none());
        let place = rendezvous.clone();
        let connect = move || {
            let (world_size, timeout_ms) = (place.world_size as i32, millis(place.timeout));
            let socket = if server == 1 { place.listener.take() } else { None };
            let socket = socket.map_or(-1, IntoRawFd::into_raw_fd);
            // SAFETY: `host` lives through the call, c10d owns the socket, and the shim returns a store of our own or null.
            let raw = unsafe {
                ffi::anyroll_store_tcp(
                    host.as_ptr(),
                    place.master_port,
                    server,
                    socket,
                    world_size,
                    timeout_ms,
                )
            };
            Self::owned(raw, place)
        };
        // c10d has no deadline for the first word of whoever listens there: another program may, and say nothing.
        let silent = |_: Option<&str>| {
            let problem = "nobody answers in time: is rank 0 started, and the port no other program's?";
            rendezvous.error(problem.into())
        };
        let store = rendezvous.in_time(rendezvous.timeout + GRACE, None, connect, silent)?;
        match &rendezvous.agent_store {
            Some(prefix) => store.prefix(prefix, rendezvous.rank, rendezvous.world_size),
            None => Ok(store),
        }
    }

    /// The part of this store whose keys start with `prefix`, for `rank` of `world_size`.
    pub(crate) fn prefix(&self, prefix: &str, rank: usize, world_size: usize) -> Result<Self> {
        let prefix = self.key(prefix)?;
        // SAFETY: `self.raw` is live.
        let raw = unsafe { ffi::anyroll_store_prefix(self.raw(), prefix.as_ptr()) };
        Self::owned(raw, Rendezvous { rank, world_size, ..self.rendezvous.clone() })
    }

    /// The part for the next group of ranks that this rank connects through this store: each has keys of its own. Ranks
    /// connect their groups in the same order.
    pub fn next_part(&self) -> Result<Self> {
        let Rendezvous { rank, world_size, .. } = self.rendezvous;
        let groups = self.key(&format!("groups/{rank}"))?;
        let number = self.ask(move |raw| {
            // SAFETY: the store is live.
            let number = unsafe { ffi::anyroll_store_add(raw, groups.as_ptr(), 1) };
            if number < 0 { Err(ffi::last_error()) } else { Ok(number) }
        })?;
        self.prefix(&format!("group/{number}/"), rank, world_size)
    }

    /// This process's rendezvous.
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// Sets a key for all ranks.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (key, value) = (self.key(key)?, value.to_owned());
        self.ask(move |raw| {
            // SAFETY: the store is live, and `value` is readable for its length.
            let code = unsafe { ffi::anyroll_store_set(raw, key.as_ptr(), value.as_ptr(), value.len()) };
            if code == 0 { Ok(()) } else { Err(ffi::last_error()) }
        })
    }

    /// Returns true if some rank has set the key. Waits without end if the host of the store is gone, so that it is for a
    /// thread of its own.
    pub(crate) fn is_set(&self, key: &str) -> Result<bool> {
        let key = self.key(key)?;
        // SAFETY: the store is live.
        match unsafe { ffi::anyroll_store_is_set(self.raw(), key.as_ptr()) } {
            ..0 => Err(self.rendezvous.error(ffi::last_error())),
            is_set => Ok(is_set > 0),
        }
    }

    /// Asks c10d, which waits for an answer without end if the host of the store is gone, and returns in time.
    fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(*mut c_void) -> Result<T, String> + Send + 'static,
    ) -> Result<T> {
        let (raw, place) = (self.raw.clone(), self.rendezvous.clone());
        let ask = move || call(raw.0).map_err(|problem| place.error(problem));
        let silent = |_: Option<&str>| {
            self.rendezvous.error("the store does not answer in time: is the host of rank 0 gone?".into())
        };
        self.rendezvous.in_time(self.rendezvous.timeout + GRACE, None, ask, silent)
    }

    /// The same store once more, for another owner.
    pub(crate) fn again(&self) -> Result<Self> {
        let Rendezvous { rank, world_size, .. } = self.rendezvous;
        self.prefix("", rank, world_size)
    }

    /// Waits, up to the time-out, until some rank has set the key. Values are at most 8 KiB.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        const CAPACITY: usize = 8 << 10;
        let (name, key) = (self.key(key)?, key.to_owned());
        let timeout_ms = millis(self.rendezvous.timeout);
        self.ask(move |raw| {
            let mut value = vec![0; CAPACITY];
            // SAFETY: the store is live, and `value` is writable for its length.
            let len = unsafe {
                ffi::anyroll_store_get(raw, name.as_ptr(), value.as_mut_ptr(), CAPACITY, timeout_ms)
            };
            let len = usize::try_from(len).map_err(|_| format!("{key}: {}", ffi::last_error()))?;
            if len > CAPACITY {
                return Err(format!("the value of {key} has {len} bytes, more than {CAPACITY}"));
            }
            value.truncate(len);
            Ok(value)
        })
    }

    /// Divides the ranks by color, each part in the order of `key`, then of rank; a rank without a color is in no
    /// part. Every rank calls it with the same `number`, which is unique to this division.
    pub(crate) fn split(&self, number: u64, color: Option<u32>, key: i32) -> Result<Option<Part>> {
        let name = |rank: usize| format!("split/{number}/{rank}");
        let (this_rank, world_size) = (self.rendezvous.rank, self.rendezvous.world_size);
        let mine = color.map_or(-1, i64::from);
        self.set(&name(this_rank), format!("{mine} {key}").as_bytes())?;
        let mut members = Vec::new();
        for rank in 0..world_size {
            let value = String::from_utf8_lossy(&self.get(&name(rank))?).into_owned();
            let (color, key) = value
                .split_once(' ')
                .and_then(|(color, key)| Some((color.parse::<i64>().ok()?, key.parse::<i32>().ok()?)))
                .ok_or_else(|| self.rendezvous.error(format!("{} is {value:?}", name(rank))))?;
            if color == mine {
                members.push((key, rank));
            }
        }
        if color.is_none() {
            return Ok(None);
        }
        let first = members[0].1;
        members.sort_unstable();
        let rank =
            members.iter().position(|member| member.1 == this_rank).expect("this rank has its own color");
        let store = self.prefix(&format!("split/{number}/{mine}/"), rank, members.len())?;
        Ok(Some(Part { store, first }))
    }

    pub(crate) fn raw(&self) -> *mut c_void {
        self.raw.0
    }

    fn key(&self, key: &str) -> Result<CString> {
        CString::new(key).map_err(|_| self.rendezvous.error(format!("key {key:?} contains a NUL byte")))
    }

    fn owned(raw: *mut c_void, rendezvous: Rendezvous) -> Result<Self> {
        if raw.is_null() {
            return Err(rendezvous.error(ffi::last_error()));
        }
        Ok(Self { raw: Arc::new(Raw(raw)), rendezvous })
    }
}

pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{
        net::TcpListener,
        thread,
        time::{Duration, Instant},
    };

    use super::{Rendezvous, Store};

    /// Another program on the port, which takes connections and says nothing.
    #[test]
    fn a_silent_listener_is_not_waited_for_without_end() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let start = Instant::now();
        let place = Rendezvous::on_this_host(1, 2, port, Duration::from_millis(100));
        let error = Store::connect(&place).unwrap_err().to_string();
        assert!(error.contains("no other program's"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }

    /// A process that meets the others more than once finds them each time.
    #[test]
    fn groups_do_not_read_each_others_keys() {
        let places = Rendezvous::in_this_process(2, Duration::from_secs(20)).unwrap();
        thread::scope(|scope| {
            let ranks: Vec<_> = [0_u8, 1]
                .map(|rank| {
                    let place = places[usize::from(rank)].clone();
                    scope.spawn(move || {
                        let store = Store::connect(&place).unwrap();
                        let groups = [(); 2].map(|()| store.next_part().unwrap());
                        for (group, number) in groups.iter().zip(0..) {
                            group.set(&format!("rank {rank}"), &[rank, number]).unwrap();
                        }
                        let found =
                            groups.each_ref().map(|group| group.get(&format!("rank {}", 1 - rank)).unwrap());
                        (found, groups)
                    })
                })
                .into_iter()
                .map(|rank| rank.join().unwrap())
                .collect();
            // The store is served until both have read.
            let [found, others] = [0, 1].map(|rank| &ranks[rank].0);
            assert_eq!((found, others), (&[[1, 0], [1, 1]].map(Vec::from), &[[0, 0], [0, 1]].map(Vec::from)));
        });
    }

    /// torchrun's case: the agent's process serves the store, with keys of its own in it.
    #[test]
    fn ranks_meet_in_a_store_that_the_launcher_serves() {
        let served = Rendezvous::in_this_process(1, Duration::from_secs(20)).unwrap().remove(0);
        let place = |rank, world_size, agent_store: Option<&str>| Rendezvous {
            rank,
            world_size,
            agent_store: agent_store.map(Into::into),
            ..served.clone()
        };
        let agent = Store::connect(&place(0, 1, None)).unwrap();
        agent.set("rank 0", b"the agent's").unwrap();
        thread::scope(|scope| {
            let ranks: Vec<_> = [0, 1]
                .map(|rank| {
                    let place = place(rank, 2, Some("anyroll/attempt_0/"));
                    scope.spawn(move || {
                        let store = Store::connect(&place).unwrap();
                        store.set(&format!("rank {rank}"), &[rank as u8]).unwrap();
                        store.get(&format!("rank {}", 1 - rank)).unwrap()
                    })
                })
                .into_iter()
                .map(|rank| rank.join().unwrap())
                .collect();
            assert_eq!(ranks, [[1], [0]]);
        });
        assert_eq!(agent.get("rank 0").unwrap(), b"the agent's");
    }
}
