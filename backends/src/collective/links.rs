//! [`Links`]: a TCP connection to each other rank of a communicator, over which bytes move.
//!
//! The thread that asks for transfers makes them: it writes what the sockets take and reads what they have, and sleeps until
//! they take or have more. There is no other thread, so none waits for a lock, and what has failed touches no memory later.

use std::{
    collections::VecDeque,
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    slice,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use tch::{Kind, Tensor};

use super::rendezvous::{Store, millis};
use crate::Result as Checked;

/// Time that whoever connects may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a hello: the listener's number, and the rank that connects.
const HELLO_BYTES: usize = 16;
/// Answer to a hello.
const WELCOME: u8 = 1;
/// Bytes in front of a message: its length.
const LENGTH_BYTES: usize = 8;

/// One transfer of an operation. Those of one direction between two ranks match in order.
pub(super) struct Transfer {
    tensor: Tensor,
    peer: usize,
    is_send: bool,
}

impl Transfer {
    pub fn send(tensor: &Tensor, to: usize) -> Self {
        Self { tensor: tensor.shallow_clone(), peer: to, is_send: true }
    }

    pub fn receive(tensor: &Tensor, from: usize) -> Self {
        Self { tensor: tensor.shallow_clone(), peer: from, is_send: false }
    }
}

/// A failure, and the rank at the other end.
#[derive(Debug)]
pub(super) struct Broken {
    pub peer: usize,
    pub message: String,
}

/// See the module's description.
#[derive(Debug)]
pub(super) struct Links {
    /// By rank; `None` for this one.
    streams: Vec<Option<TcpStream>>,
    /// Rank of a transfer that is waited for.
    awaited: Mutex<Option<usize>>,
}

impl Links {
    /// Connects this rank of `store` to the others, which reach it at `address`. Each rank listens, connects to the lower
    /// ranks, and hears the higher ones. Blocks until all are there, up to `timeout`.
    ///
    /// # Errors
    /// The failure, in words.
    pub fn connect(store: &Store, address: IpAddr, timeout: Duration) -> Result<Self, String> {
        let (rank, world_size) = (store.rendezvous().rank, store.rendezvous().world_size);
        let deadline = Instant::now() + timeout;
        let words = |error: crate::Error| error.to_string();
        let listener =
            TcpListener::bind((address, 0)).map_err(|error| format!("to listen there: {error}"))?;
        // Whoever does not know it does not belong to this communicator.
        let number = RandomState::new().build_hasher().finish();
        let place = listener.local_addr().map_err(|error| error.to_string())?;
        store.set(&key(rank), format!("{place} {number}").as_bytes()).map_err(words)?;

        let mut streams: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
        for (peer, stream) in streams.iter_mut().enumerate().take(rank) {
            let (place, number) = published(store, peer).map_err(words)?;
            let found = greet(place, number, rank, deadline);
            *stream = Some(found.map_err(|error| format!("to rank {peer} at {place}: {error}"))?);
        }
        listener.set_nonblocking(true).map_err(|error| error.to_string())?;
        while let Some(missing) = (rank + 1..world_size).find(|&peer| streams[peer].is_none()) {
            let late = |error| format!("waiting for rank {missing} at {place}: {error}");
            wait(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], deadline).map_err(late)?;
            if let Some((peer, stream)) = hear(&listener, number, deadline)
                && (rank + 1..world_size).contains(&peer)
            {
                streams[peer] = Some(stream);
            }
        }
        for (peer, stream) in streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            let ready = if peer < rank { welcomed(stream, deadline) } else { Ok(()) };
            ready
                .and_then(|()| stream.set_nonblocking(true))
                .map_err(|error| format!("with rank {peer}: {error}"))?;
        }
        Ok(Self { streams, awaited: Mutex::default() })
    }

    /// Makes all transfers at once, up to `timeout`. Those of no elements are nothing, on both sides.
    ///
    /// # Errors
    /// The first failure. What the other transfers have moved by then is not defined.
    pub fn exchange(&self, transfers: &[Transfer], timeout: Duration) -> Result<(), Broken> {
        let deadline = Instant::now() + timeout;
        let mut pending = self.pending(transfers)?;
        let outcome = loop {
            if let Some((peer, error)) =
                pending.iter_mut().find_map(|one| Some((one.peer, one.advance().err()?)))
            {
                break Err(Broken { peer, message: error.to_string() });
            }
            pending.retain(|one| !one.is_done());
            let Some(first) = pending.first() else { break Ok(()) };
            self.await_rank(Some(first.peer));
            let mut fds: Vec<_> =
                pending.iter().map(|one| PollFd::new(one.stream.as_fd(), one.wants())).collect();
            if let Err(error) = wait(&mut fds, deadline) {
                break Err(Broken { peer: first.peer, message: error.to_string() });
            }
        };
        self.await_rank(None);
        outcome
    }

    /// The rank of a transfer that is waited for, if one is.
    pub fn awaited(&self) -> Option<usize> {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all transfers, here and at the other ends, now and later.
    pub fn close(&self) {
        for stream in self.streams.iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both); // fails if the other end has done it
        }
    }

    fn await_rank(&self, rank: Option<usize>) {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner) = rank;
    }

    /// Returns the transfers by rank, without ranks that have none.
    fn pending(&self, transfers: &[Transfer]) -> Result<Vec<Pending<'_>>, Broken> {
        let mut pending: Vec<Pending<'_>> = Vec::new();
        for Transfer { tensor, peer, is_send } in transfers.iter().filter(|one| one.tensor.numel() > 0) {
            let stream = self.streams[*peer].as_ref().expect("transfers are with other ranks");
            let at = pending.iter().position(|one| one.peer == *peer).unwrap_or_else(|| {
                pending.push(Pending {
                    peer: *peer,
                    stream,
                    sends: VecDeque::new(),
                    receives: VecDeque::new(),
                });
                pending.len() - 1
            });
            let queue = if *is_send { &mut pending[at].sends } else { &mut pending[at].receives };
            let message = Message::of(tensor);
            queue.push_back(message.map_err(|error| Broken { peer: *peer, message: error.to_string() })?);
        }
        Ok(pending)
    }
}

/// Transfers with one rank, in order.
struct Pending<'a> {
    peer: usize,
    stream: &'a TcpStream,
    sends: VecDeque<Message>,
    receives: VecDeque<Message>,
}

impl Pending<'_> {
    /// Moves what the socket takes and has.
    fn advance(&mut self) -> io::Result<()> {
        while let Some(message) = self.sends.front_mut() {
            if !message.send(self.stream)? {
                break;
            }
            self.sends.pop_front();
        }
        while let Some(message) = self.receives.front_mut() {
            if !message.receive(self.stream)? {
                break;
            }
            self.receives.pop_front();
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }

    fn wants(&self) -> PollFlags {
        let flag = |queue: &VecDeque<_>, flag| if queue.is_empty() { PollFlags::empty() } else { flag };
        flag(&self.sends, PollFlags::POLLOUT) | flag(&self.receives, PollFlags::POLLIN)
    }
}

/// A message, whose length comes first. Its bytes are a tensor's.
struct Message {
    length: [u8; LENGTH_BYTES],
    tensor: Tensor,
    len: usize,
    /// Bytes that have moved, of the length and then of the tensor.
    moved: usize,
}

impl Message {
    fn of(tensor: &Tensor) -> Checked<Self> {
        // Everything is bytes to what only moves it.
        let tensor = tensor.f_view_dtype(Kind::Uint8)?;
        assert!(
            tensor.is_contiguous() && tensor.device() == tch::Device::Cpu,
            "transfers are of the host's flat tensors"
        );
        let len = tensor.numel();
        Ok(Self { length: (len as u64).to_le_bytes(), tensor, len, moved: 0 })
    }

    /// Sends what the socket takes, and returns true once that is all.
    fn send(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        self.advance(|length, bytes| stream.write_vectored(&[IoSlice::new(length), IoSlice::new(bytes)]))
    }

    /// Receives what the socket has, and returns true once that is all.
    fn receive(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        let outcome = self.advance(|length, bytes| {
            stream.read_vectored(&mut [IoSliceMut::new(length), IoSliceMut::new(bytes)])
        });
        let sent = u64::from_le_bytes(self.length);
        // Said also of a rank that is gone by now.
        if self.moved >= LENGTH_BYTES && sent != self.len as u64 {
            let problem = format!("it sent {sent} bytes where {} were expected", self.len);
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        outcome
    }

    /// Lets `transfer` move parts of what is left until it would block, and returns true once nothing is.
    fn advance(
        &mut self,
        mut transfer: impl FnMut(&mut [u8], &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<bool> {
        while self.moved < LENGTH_BYTES + self.len {
            let of_length = self.moved.min(LENGTH_BYTES);
            let of_bytes = self.moved - of_length;
            // SAFETY: the tensor has `len` contiguous bytes of the host and lives as long as this. No one else touches
            // those that an operation writes, nor writes those that it reads, before it is done.
            let bytes = unsafe {
                let start = self.tensor.data_ptr().cast::<u8>();
                slice::from_raw_parts_mut(start.add(of_bytes), self.len - of_bytes)
            };
            match transfer(&mut self.length[of_length..], bytes) {
                Ok(0) => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"));
                }
                Ok(moved) => self.moved += moved,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Waits until a socket is ready.
///
/// # Errors
/// The system's, or that the deadline has passed.
fn wait(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Up to the next millisecond, so that the last wait is not many.
        let timeout = PollTimeout::try_from(millis(left).saturating_add(1)).unwrap_or(PollTimeout::MAX);
        match poll(fds, timeout) {
            Ok(0) if left.is_zero() => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time"));
            }
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Name of the store's key with the place of a rank.
fn key(rank: usize) -> String {
    format!("link/{rank}")
}

/// Returns where a rank listens, and the number that it wants to hear.
fn published(store: &Store, peer: usize) -> Checked<(SocketAddr, u64)> {
    let text = String::from_utf8_lossy(&store.get(&key(peer))?).into_owned();
    let parts =
        text.split_once(' ').and_then(|(place, number)| Some((place.parse().ok()?, number.parse().ok()?)));
    parts.ok_or_else(|| store.rendezvous().error(format!("{} is {text:?}", key(peer))))
}

/// Connects to a rank, and says who this one is.
fn greet(place: SocketAddr, number: u64, rank: usize, deadline: Instant) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&place, left(deadline))?;
    stream.set_nodelay(true)?;
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&number.to_le_bytes());
    hello[8..].copy_from_slice(&(rank as u64).to_le_bytes());
    stream.write_all(&hello)?;
    Ok(stream)
}

/// Returns who has connected, after an answer; `None` for strangers, and for whoever is gone.
fn hear(listener: &TcpListener, number: u64, deadline: Instant) -> Option<(usize, TcpStream)> {
    let (mut stream, _) = listener.accept().ok()?;
    stream.set_nonblocking(false).ok()?;
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(left(deadline).min(HELLO_TIMEOUT))).ok()?;
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).ok()?;
    let [theirs, rank] =
        [0, 8].map(|at| u64::from_le_bytes(hello[at..at + 8].try_into().expect("eight bytes")));
    if theirs != number {
        return None;
    }
    stream.write_all(&[WELCOME]).ok()?;
    Some((usize::try_from(rank).ok()?, stream))
}

/// Waits for the answer to a hello.
fn welcomed(mut stream: &TcpStream, deadline: Instant) -> io::Result<()> {
    stream.set_read_timeout(Some(left(deadline)))?;
    let mut answer = [0];
    match stream.read_exact(&mut answer) {
        Ok(()) if answer == [WELCOME] => Ok(()),
        Ok(()) => Err(io::Error::new(io::ErrorKind::InvalidData, "another program answers there")),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time"))
        }
        Err(error) => Err(error),
    }
}

/// Time to a deadline; not zero, which sockets refuse.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;
    use crate::Rendezvous;

    const LOCALHOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const TIMEOUT: Duration = Duration::from_secs(20);

    /// Runs both ranks of a pair.
    fn pair<R: Send>(rank: impl Fn(usize, &Links) -> R + Sync) -> Vec<R> {
        let places = Rendezvous::in_this_process(2, TIMEOUT).unwrap();
        let run = |number: usize| {
            let store = Store::connect(&places[number]).unwrap();
            rank(number, &Links::connect(&store, LOCALHOST, TIMEOUT).unwrap())
        };
        thread::scope(|scope| {
            let ranks = [0, 1].map(|number| scope.spawn(move || run(number)));
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// More than sockets hold, in both directions at once, and two messages in order.
    #[test]
    fn messages_arrive_whole_and_in_order() {
        const LEN: i64 = 5_000_003;
        let number = |rank: usize, message: i64| {
            Tensor::full([LEN], 10 * rank as i64 + message, (Kind::Uint8, tch::Device::Cpu))
        };
        pair(|rank, links| {
            let (first, second) = (number(rank, 0), number(rank, 1));
            let got = [(); 2].map(|()| Tensor::zeros([LEN], (Kind::Uint8, tch::Device::Cpu)));
            let peer = 1 - rank;
            let sends = [Transfer::send(&first, peer), Transfer::send(&second, peer)];
            let receives = got.each_ref().map(|got| Transfer::receive(got, peer));
            links.exchange(&sends.into_iter().chain(receives).collect::<Vec<_>>(), TIMEOUT).unwrap();
            for (message, got) in got.iter().enumerate() {
                assert!(got.equal(&number(peer, message as i64)), "message {message} of rank {peer}");
            }
        });
    }

    #[test]
    fn failures_have_their_reason_and_come_in_time() {
        let bytes = |len: i64| Tensor::zeros([len], (Kind::Uint8, tch::Device::Cpu));
        let run = |links: &Links, transfer, timeout| links.exchange(&[transfer], timeout);
        // Lengths that differ.
        let outcomes = pair(|rank, links| match rank {
            0 => run(links, Transfer::send(&bytes(3), 1), TIMEOUT).map_err(|broken| broken.message),
            _ => run(links, Transfer::receive(&bytes(4), 0), TIMEOUT).map_err(|broken| broken.message),
        });
        assert_eq!(outcomes[1].as_ref().unwrap_err(), "it sent 3 bytes where 4 were expected");
        // A rank that ends, and one that does not come.
        let outcomes = pair(|rank, links| match rank {
            0 => links.close(),
            _ => {
                let broken = run(links, Transfer::receive(&bytes(4), 0), TIMEOUT).unwrap_err();
                assert_eq!((broken.peer, broken.message.as_str()), (0, "it closed the connection"));
            }
        });
        assert_eq!(outcomes.len(), 2);
        let outcomes = pair(|rank, links| {
            let outcome =
                (rank == 1).then(|| run(links, Transfer::receive(&bytes(4), 0), Duration::from_millis(50)));
            thread::sleep(Duration::from_millis(200)); // the other end is open meanwhile
            outcome.map(|outcome| outcome.unwrap_err().message)
        });
        assert_eq!(outcomes, [None, Some("it did not answer in time".to_owned())]);
    }

    /// A scanner of ports, or a rank of another job.
    #[test]
    fn strangers_are_not_taken_for_ranks() {
        let places = Rendezvous::in_this_process(2, TIMEOUT).unwrap();
        let connect = |number: usize| {
            let store = Store::connect(&places[number]).unwrap();
            if number == 1 {
                let (place, _) = published(&store, 0).unwrap();
                let mut stranger = TcpStream::connect(place).unwrap();
                stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
                drop(TcpStream::connect(place).unwrap());
            }
            let links = Links::connect(&store, LOCALHOST, TIMEOUT).unwrap();
            let byte = Tensor::from_slice(&[7_u8]);
            let transfer = if number == 0 { Transfer::send(&byte, 1) } else { Transfer::receive(&byte, 0) };
            links.exchange(&[transfer], TIMEOUT).unwrap();
        };
        let connect = &connect;
        thread::scope(|scope| [0, 1].map(|number| drop(scope.spawn(move || connect(number)))));
    }
}
