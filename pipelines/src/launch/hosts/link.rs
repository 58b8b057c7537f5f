//! [`Link`]: a connection of two supervisors, each of which knows that the other is there.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::Message;

/// Interval at which a supervisor says that it is there.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// Silence after which the other side is given up. A switch that restarts takes less.
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// Bytes of a message.
const LONGEST: u64 = 1 << 20;

/// Sign that the other side is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Its process ended, or its system ended the connection.
    Closed,
    /// It says nothing.
    Silent,
    /// It says what no supervisor says.
    Garbled,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(f, "its connection was closed"),
            Self::Silent => write!(f, "nothing was heard of it for {} s", SILENCE.as_secs()),
            Self::Garbled => write!(f, "it is no supervisor of this version"),
        }
    }
}

/// Messages in order, one a line, in both directions.
#[derive(Debug)]
pub(super) struct Link {
    out: Arc<Mutex<TcpStream>>,
    inbox: Receiver<Result<Message, Lost>>,
}

impl Link {
    /// Begins to listen and to say that this side is there, in threads that end with this value.
    pub(super) fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let (to, inbox) = mpsc::channel();
        let from = stream.try_clone()?;
        let out = Arc::new(Mutex::new(stream));
        let beating = Arc::downgrade(&out);
        let spawn = |name: &str| thread::Builder::new().name(name.to_owned());
        spawn("link").spawn(move || read(from, &to))?;
        spawn("beat").spawn(move || {
            while let Some(out) = beating.upgrade()
                && write(&out, &Message::Beat).is_ok()
            {
                drop(out);
                thread::sleep(BEAT_EVERY);
            }
        })?;
        Ok(Self { out, inbox })
    }

    /// Sends a message. One that cannot be sent is not an error: the other side is gone then, which is heard.
    pub(super) fn send(&self, message: &Message) {
        let _ = write(&self.out, message);
    }

    /// The next message, if one has come.
    pub(super) fn poll(&self) -> Result<Option<Message>, Lost> {
        match self.inbox.try_recv() {
            Ok(message) => message.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Lost::Closed),
        }
    }

    /// The next message that comes within `time`.
    pub(super) fn wait(&self, time: Duration) -> Result<Option<Message>, Lost> {
        match self.inbox.recv_timeout(time) {
            Ok(message) => message.map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Lost::Closed),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Wakes the thread that reads. Fails if the connection has ended.
        let _ = self.out.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
    }
}

fn write(out: &Mutex<TcpStream>, message: &Message) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    out.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line)
}

/// Passes messages on until the other side is gone.
fn read(from: TcpStream, to: &Sender<Result<Message, Lost>>) {
    let mut from = BufReader::new(from);
    loop {
        let message = next(&mut from);
        let is_last = message.is_err();
        let is_unheard = message != Ok(Message::Beat) && to.send(message).is_err();
        if is_last || is_unheard {
            return;
        }
    }
}

fn next(from: &mut impl BufRead) -> Result<Message, Lost> {
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
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Link, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Link::over(listener.accept().unwrap().0).unwrap(), other)
    }

    #[test]
    fn messages_come_in_order_and_then_the_end() {
        let (link, other) = pair();
        let other = Link::over(other).unwrap();
        for message in [Message::Kill, Message::Interrupt(2), Message::Over(Err("why\nnot".into()))] {
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
        for (words, lost) in [(&b"GET / HTTP/1.1\r\n"[..], Lost::Garbled), (b"\"Beat\"\n\"Kil", Lost::Closed)]
        {
            let (link, mut other) = pair();
            other.write_all(words).unwrap();
            other.shutdown(Shutdown::Write).unwrap();
            assert_eq!(link.wait(SILENCE), Err(lost));
        }
        let (link, mut other) = pair();
        other.write_all(&vec![b' '; LONGEST as usize]).unwrap();
        assert_eq!(link.wait(SILENCE), Err(Lost::Garbled));
    }
}
