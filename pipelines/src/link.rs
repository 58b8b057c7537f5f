//! [`Link`]: a connection of two processes, each of which knows that the other is there; [`Arrivals`]: those who connect.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Interval at which a process says that it is there.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// Silence after which the other side is given up. A switch that restarts takes less.
const SILENCE: Duration = Duration::from_secs(10);
/// Bytes of a message. The longest is a completion with a log-prob for each token.
const LONGEST: u64 = 1 << 26;
/// Time of one attempt to connect to an address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time from a connection to its first words.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between looks for connections.
const ACCEPT_EVERY: Duration = Duration::from_millis(50);

/// Sign that the other side is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Its process ended, or its system ended the connection.
    Closed,
    /// It says nothing.
    Silent,
    /// It says what no process of ours says.
    Garbled,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(f, "its connection was closed"),
            Self::Silent => write!(f, "nothing was heard of it for {} s", SILENCE.as_secs()),
            Self::Garbled => write!(f, "it is no `anyroll` of this version"),
        }
    }
}

/// A line of a connection.
#[derive(Serialize, Deserialize)]
enum Line<M> {
    /// The sender is there.
    Beat,
    /// A message.
    Said(M),
}

/// Words of one process to another.
pub trait Message: Serialize + DeserializeOwned + Send + 'static {}

/// Messages in order, one a line, in both directions.
#[derive(Debug)]
pub struct Link<M> {
    out: Arc<Mutex<TcpStream>>,
    inbox: Receiver<Result<M, Lost>>,
    own: SocketAddr,
    other: SocketAddr,
}

impl<M: Message> Link<M> {
    /// Connects to the first of a host's addresses that answers.
    ///
    /// # Errors
    /// A name without an address, or the error of the last attempt.
    pub fn to(address: (&str, u16)) -> io::Result<Self> {
        let mut problem = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).and_then(Self::over) {
                Ok(link) => return Ok(link),
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Begins to listen and to say that this side is there, in threads that end with this value.
    fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let (to, inbox) = mpsc::channel();
        let (own, other) = (stream.local_addr()?, stream.peer_addr()?);
        let from = stream.try_clone()?;
        let out = Arc::new(Mutex::new(stream));
        let beating = Arc::downgrade(&out);
        let spawn = |name: &str| thread::Builder::new().name(name.to_owned());
        spawn("link").spawn(move || read(from, &to))?;
        spawn("beat").spawn(move || {
            while let Some(out) = beating.upgrade()
                && write(&out, &Line::<&M>::Beat).is_ok()
            {
                drop(out);
                thread::sleep(BEAT_EVERY);
            }
        })?;
        Ok(Self { out, inbox, own, other })
    }

    /// Sends a message. One that cannot be sent is not an error: the other side is gone then, which is heard.
    pub fn send(&self, message: &M) {
        let _ = write(&self.out, &Line::Said(message));
    }

    /// Address of this side.
    pub fn own_address(&self) -> IpAddr {
        self.own.ip()
    }

    /// Address of the other side.
    pub fn other_address(&self) -> IpAddr {
        self.other.ip()
    }

    /// The next message, if one has come.
    pub fn poll(&self) -> Result<Option<M>, Lost> {
        match self.inbox.try_recv() {
            Ok(message) => message.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Lost::Closed),
        }
    }

    /// The next message that comes within `time`.
    pub fn wait(&self, time: Duration) -> Result<Option<M>, Lost> {
        match self.inbox.recv_timeout(time) {
            Ok(message) => message.map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Lost::Closed),
        }
    }
}

impl<M> Drop for Link<M> {
    fn drop(&mut self) {
        // Wakes the thread that reads. Fails if the connection has ended.
        let _ = self.out.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
    }
}

/// The processes that connect to a port, with the first words of each.
#[derive(Debug)]
pub struct Arrivals<M> {
    come: Receiver<(M, Link<M>)>,
    /// The thread that listens ends with it.
    _listening: Arc<()>,
}

impl<M: Message> Arrivals<M> {
    /// Begins to listen.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn at(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (to, come) = mpsc::channel();
        let listening = Arc::new(());
        let lasting = Arc::downgrade(&listening);
        let accepts = move || accept(&listener, &to, &lasting);
        thread::Builder::new().name("listen".into()).spawn(accepts)?;
        Ok(Self { come, _listening: listening })
    }

    /// The next one, if it has come.
    pub fn next(&self) -> Option<(M, Link<M>)> {
        self.come.try_recv().ok()
    }
}

/// Greets those who connect, each in a thread of its own, as long as somebody wants to know.
fn accept<M: Message>(listener: &TcpListener, to: &Sender<(M, Link<M>)>, lasting: &Weak<()>) {
    while lasting.strong_count() > 0 {
        match listener.accept() {
            Ok((stream, _)) => {
                let to = to.clone();
                // One that cannot be greeted comes again.
                let _ = thread::Builder::new().name("greet".into()).spawn(move || greet(stream, &to));
            }
            Err(_) => thread::sleep(ACCEPT_EVERY),
        }
    }
}

fn greet<M: Message>(stream: TcpStream, to: &Sender<(M, Link<M>)>) {
    let Ok(link) = Link::over(stream) else { return };
    if let Ok(Some(first)) = link.wait(HELLO_TIMEOUT) {
        let _ = to.send((first, link));
    }
}

fn write(out: &Mutex<TcpStream>, line: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(line)?;
    line.push(b'\n');
    out.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line)
}

/// Passes messages on until the other side is gone.
fn read<M: Message>(from: TcpStream, to: &Sender<Result<M, Lost>>) {
    let mut from = BufReader::new(from);
    loop {
        let message = match next(&mut from) {
            Ok(Line::Beat) => continue,
            Ok(Line::Said(message)) => Ok(message),
            Err(lost) => Err(lost),
        };
        let is_last = message.is_err();
        if to.send(message).is_err() || is_last {
            return;
        }
    }
}

fn next<M: Message>(from: &mut impl BufRead) -> Result<Line<M>, Lost> {
    let mut line = Vec::new();
    match from.take(LONGEST).read_until(b'\n', &mut line) {
        Ok(_) if line.ends_with(b"\n") => serde_json::from_slice(&line).map_err(|_| Lost::Garbled),
        Ok(read) if read as u64 == LONGEST => Err(Lost::Garbled),
        Ok(_) => Err(Lost::Closed),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(Lost::Silent)
        }
        Err(_) => Err(Lost::Closed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Message for String {}

    fn pair() -> (Link<String>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Link::over(listener.accept().unwrap().0).unwrap(), other)
    }

    #[test]
    fn messages_come_in_order_and_then_the_end() {
        let (link, other) = pair();
        let other = Link::over(other).unwrap();
        for message in ["one", "", "why\nnot"].map(str::to_owned) {
            other.send(&message);
            assert_eq!(link.wait(SILENCE), Ok(Some(message)));
        }
        assert_eq!(link.poll(), Ok(None));
        drop(other);
        assert_eq!(link.wait(SILENCE), Err(Lost::Closed));
        assert_eq!(link.wait(SILENCE), Err(Lost::Closed));
    }

    #[test]
    fn words_of_others_are_refused() {
        let foreign = [(&b"GET / HTTP/1.1\r\n"[..], Lost::Garbled), (b"\"Beat\"\n\"Kil", Lost::Closed)];
        for (words, lost) in foreign {
            let (link, mut other) = pair();
            other.write_all(words).unwrap();
            other.shutdown(Shutdown::Write).unwrap();
            assert_eq!(link.wait(SILENCE), Err(lost));
        }
        let (link, mut other) = pair();
        other.write_all(&vec![b' '; LONGEST as usize]).unwrap();
        assert_eq!(link.wait(SILENCE), Err(Lost::Garbled));
    }

    #[test]
    fn who_connects_is_known_by_its_first_words() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let arrivals = Arrivals::<String>::at(listener).unwrap();
        let one = Link::to(("127.0.0.1", port)).unwrap();
        one.send(&"one".to_owned());
        let (first, link) = loop {
            match arrivals.next() {
                Some(arrived) => break arrived,
                None => thread::sleep(ACCEPT_EVERY),
            }
        };
        assert_eq!((first.as_str(), link.other_address()), ("one", one.own_address()));
        link.send(&"two".to_owned());
        assert_eq!(one.wait(SILENCE), Ok(Some("two".to_owned())));
    }
}
