//! [`CollectiveGroup`]: a communicator with its own stream, a deadline, a watchdog and a flight recorder.

use std::{
    collections::VecDeque,
    fmt::Write as _,
    sync::{Arc, Mutex, Weak},
    thread,
    time::{Duration, Instant},
};

use crate::{Buffer, Collective, DType, Device, Error, Event, P2p, PinnedBuffer, ReduceOp, Result, Stream};

/// Operations that the flight recorder remembers once they are done.
const RECORDED: usize = 256;
/// Operations that an error message shows.
const SHOWN: usize = 8;
/// Interval between two checks of the watchdog.
const WATCH_EVERY: Duration = Duration::from_millis(50);

/// A process group. Operations start after the work that is on `after` now, run on the group's own stream, and
/// overlap with what comes next on `after`.
///
/// Each has a deadline, counted from its start on this rank. A watchdog aborts the communicator when one is
/// passed; the error, [`Error::Timeout`], comes out of the [`Work`] and of every later call, with the last
/// operations of the flight recorder.
#[derive(Clone, Debug)]
pub struct CollectiveGroup(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    comm: Arc<dyn Collective>,
    stream: Stream,
    timeout: Duration,
    recorder: Mutex<Recorder>,
    failure: Mutex<Option<Error>>,
}

/// The last operations, oldest first.
#[derive(Debug, Default)]
struct Recorder {
    sequence: u64,
    entries: VecDeque<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    sequence: u64,
    call: &'static str,
    dtype: Option<DType>,
    len: usize,
    enqueued_at: Instant,
    /// The event that it waits for in addition to the previous operation; `None` if its caller works on the group's own
    /// stream.
    after: Option<Event>,
    /// When the watchdog first saw that it had started.
    started_at: Option<Instant>,
    done: Event,
    is_done: bool,
}

impl Entry {
    /// An operation that begins after `after`, if that is not the previous one, until `done`.
    fn begun(call: &'static str, after: Option<Event>, done: Event) -> Self {
        Self {
            sequence: 0,
            call,
            dtype: None,
            len: 0,
            enqueued_at: Instant::now(),
            after,
            started_at: None,
            done,
            is_done: false,
        }
    }

    /// Returns true once it is done. Queries the device only until then.
    fn is_done(&mut self) -> bool {
        self.is_done = self.is_done || self.done.is_complete().unwrap_or(false);
        self.is_done
    }

    /// Returns true if it has started, given that the previous operation is done.
    fn may_start(&self) -> bool {
        self.after.as_ref().is_none_or(|after| after.is_complete().unwrap_or(false))
    }
}

impl CollectiveGroup {
    /// A group over `comm` whose operations each have `timeout`. `name` appears in errors.
    pub fn new(
        name: impl Into<String>,
        comm: Arc<dyn Collective>,
        device: &Arc<dyn Device>,
        timeout: Duration,
    ) -> Result<Self> {
        let inner = Arc::new(Inner {
            name: name.into(),
            comm,
            stream: Stream::new(device)?,
            timeout,
            recorder: Mutex::default(),
            failure: Mutex::default(),
        });
        let watched = Arc::downgrade(&inner);
        thread::Builder::new()
            .name(format!("watchdog {}", inner.name))
            .spawn(move || watch(&watched))
            .map_err(|source| Error::Stream { device: device.id(), message: source.to_string() })?;
        Ok(Self(inner))
    }

    /// This process's number in the group.
    pub fn rank(&self) -> usize {
        self.0.comm.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.comm.world_size()
    }

    /// See [`Collective::name_hosts`].
    pub fn name_hosts(&self, names: &[String]) {
        self.0.comm.name_hosts(names);
    }

    /// See [`Collective::sums_in_rank_order`].
    pub fn sums_in_rank_order(&self) -> bool {
        self.0.comm.sums_in_rank_order()
    }

    /// The time that an operation may take.
    pub fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// The stream on which the operations run.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// See [`Collective::broadcast`].
    pub fn broadcast(&self, buffer: &Buffer, root: usize, after: &Stream) -> Result<Work> {
        self.run("broadcast", &[buffer], after, |comm, stream| comm.broadcast(buffer, root, stream))
    }

    /// See [`Collective::all_reduce`].
    pub fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, after: &Stream) -> Result<Work> {
        self.run("all_reduce", &[buffer], after, |comm, stream| comm.all_reduce(buffer, op, stream))
    }

    /// See [`Collective::all_gather`].
    pub fn all_gather(&self, output: &Buffer, input: &Buffer, after: &Stream) -> Result<Work> {
        self.assert_lengths("all_gather", output, input);
        self.run("all_gather", &[input, output], after, |comm, stream| comm.all_gather(output, input, stream))
    }

    /// Returns the bytes of all ranks' hosts, by rank. Every rank passes equally many, at least one. They travel over `stream`,
    /// which the host waits for.
    pub fn gather_bytes(&self, own: &[u8], stream: &Stream) -> Result<Vec<u8>> {
        let (start, len) = (self.rank() * own.len(), self.world_size() * own.len());
        let all = Buffer::zeros(stream, len, DType::U8)?;
        let mine = all.slice(start..start + own.len());
        let mut host = PinnedBuffer::new(stream.device(), len)?;
        host.bytes_mut()?[..own.len()].copy_from_slice(own);
        host.copy_to(0, &mine, stream)?;
        let work = self.all_gather(&all, &mine, stream)?;
        work.wait()?;
        work.wait_stream(stream)?;
        host.copy_from(0, &all, stream)?;
        Ok(host.bytes()?.to_vec())
    }

    /// See [`Collective::reduce_scatter`].
    pub fn reduce_scatter(
        &self,
        output: &Buffer,
        input: &Buffer,
        op: ReduceOp,
        after: &Stream,
    ) -> Result<Work> {
        self.assert_lengths("reduce_scatter", input, output);
        self.run("reduce_scatter", &[input, output], after, |comm, stream| {
            comm.reduce_scatter(output, input, op, stream)
        })
    }

    /// See [`Collective::all_to_all`].
    pub fn all_to_all(&self, output: &Buffer, input: &Buffer, after: &Stream) -> Result<Work> {
        assert_eq!(output.len(), input.len(), "all_to_all of group {}", self.0.name);
        assert_eq!(input.len() % self.world_size(), 0, "all_to_all of group {}: equal slices", self.0.name);
        self.run("all_to_all", &[input, output], after, |comm, stream| comm.all_to_all(output, input, stream))
    }

    /// An all-to-all of parts of any lengths: sends the first `sent[0]` elements of `input` to rank 0, those behind them to rank
    /// 1 and so on, and writes the `received[i]` elements from rank `i` behind those from the ranks before to `output`. What a
    /// rank sends to another is what the other receives; a length may be 0. Transfers are those of [`Collective::batch`].
    pub fn all_to_all_of(
        &self,
        (output, received): (&Buffer, &[usize]),
        (input, sent): (&Buffer, &[usize]),
        after: &Stream,
    ) -> Result<Work> {
        let (to, from) = (self.parts(input, sent), self.parts(output, received));
        let rank = self.rank();
        let mut transfers = Vec::with_capacity(2 * (to.len() - 1));
        for peer in (0..to.len()).filter(|&peer| peer != rank) {
            transfers.push(P2p::Send { buffer: to[peer].clone(), to: peer });
            transfers.push(P2p::Recv { buffer: from[peer].clone(), from: peer });
        }
        transfers.retain(|transfer| !transfer.buffer().is_empty());
        self.run("all_to_all", &[input, output], after, |comm, stream| {
            if !to[rank].is_empty() {
                from[rank].copy_from(&to[rank], stream)?;
            }
            comm.batch(&transfers, stream)
        })
    }

    /// See [`Collective::batch`].
    pub fn batch(&self, transfers: &[P2p], after: &Stream) -> Result<Work> {
        let buffers: Vec<&Buffer> = transfers.iter().map(P2p::buffer).collect();
        self.run("batch", &buffers, after, |comm, stream| comm.batch(transfers, stream))
    }

    /// See [`Collective::barrier`].
    pub fn barrier(&self, after: &Stream) -> Result<Work> {
        self.run("barrier", &[], after, |comm, stream| comm.barrier(stream))
    }

    /// See [`Collective::is_recordable`].
    pub fn is_recordable(&self) -> bool {
        self.0.comm.is_recordable()
    }

    /// Enqueues an all-gather on `stream` itself, for a step that is recorded there: it has no deadline, but that of
    /// [`Self::watch`].
    pub fn all_gather_on(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        self.assert_lengths("all_gather", output, input);
        self.0.comm.all_gather(output, input, stream)
    }

    /// Gives what runs on `stream` now the deadline of an operation called `call`.
    pub fn watch(&self, call: &'static str, stream: &Stream) -> Result<()> {
        self.check()?;
        self.0.recorder.lock().unwrap().push(Entry::begun(call, None, stream.record()?));
        Ok(())
    }

    /// See [`Collective::split`].
    pub fn split(&self, name: impl Into<String>, color: Option<u32>, key: i32) -> Result<Option<Self>> {
        self.check()?;
        let comm = self.0.comm.split(color, key)?;
        comm.map(|comm| Self::new(name, comm, self.0.stream.device(), self.0.timeout)).transpose()
    }

    /// The error that ended this group, if one has.
    pub fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// Ends the group: pending and later operations fail.
    pub fn abort(&self) {
        self.0.comm.abort("its group was ended");
    }

    /// Ends the group, since a kernel's wait in `call` has failed.
    ///
    /// # Errors
    /// The group's failure.
    pub fn give_up(&self, call: &'static str) -> Result<()> {
        self.0.give_up(call, &self.0.recorder.lock().unwrap());
        self.check()
    }

    /// The flight recorder's last operations, one a line.
    pub fn recent(&self) -> String {
        self.0.recorder.lock().unwrap().show()
    }

    /// Returns consecutive parts of a buffer, one of each rank, of these lengths.
    fn parts(&self, buffer: &Buffer, lens: &[usize]) -> Vec<Buffer> {
        let name = &self.0.name;
        assert_eq!(lens.len(), self.world_size(), "all_to_all of group {name}: a length for each rank");
        assert_eq!(lens.iter().sum::<usize>(), buffer.len(), "all_to_all of group {name}");
        let part = |end: &mut usize, len: &usize| {
            let start = *end;
            *end += len;
            Some(buffer.slice(start..*end))
        };
        lens.iter().scan(0, part).collect()
    }

    fn assert_lengths(&self, call: &str, whole: &Buffer, slice: &Buffer) {
        assert_eq!(whole.len(), slice.len() * self.world_size(), "{call} of group {}", self.0.name);
        assert_eq!(whole.dtype(), slice.dtype(), "{call} of group {}", self.0.name);
    }

    fn run(
        &self,
        call: &'static str,
        buffers: &[&Buffer],
        after: &Stream,
        operation: impl FnOnce(&dyn Collective, &Stream) -> Result<()>,
    ) -> Result<Work> {
        self.check()?;
        let stream = &self.0.stream;
        let after = if after.raw() == stream.raw() { None } else { Some(after.record()?) };
        if let Some(after) = &after {
            stream.wait(after)?;
        }
        let outcome = operation(&*self.0.comm, stream);
        let done = stream.record()?;
        let buffers = buffers.iter().copied().cloned().collect::<Vec<_>>();
        let work = Work { call, done: done.clone(), group: self.0.clone(), buffers };
        // One that fails half-way has begun as well: then `work` goes here, and keeps its buffers until that is over.
        outcome?;
        self.0.recorder.lock().unwrap().push(Entry {
            dtype: work.buffers.first().map(Buffer::dtype),
            len: work.buffers.first().map_or(0, Buffer::len),
            ..Entry::begun(call, after, done)
        });
        Ok(work)
    }
}

/// A collective in flight. Keeps its buffers alive, and orders their release after itself.
#[must_use = "a result that nobody waits for is not there yet"]
#[derive(Debug)]
pub struct Work {
    call: &'static str,
    done: Event,
    group: Arc<Inner>,
    buffers: Vec<Buffer>,
}

impl Work {
    /// Orders `stream` after this operation. Does not block the host, unless `stream` is the host's own.
    pub fn wait_stream(&self, stream: &Stream) -> Result<()> {
        self.group.check()?;
        stream.wait(&self.done)
    }

    /// Blocks the host until the operation is done or the group has failed; the deadline is the group's.
    pub fn wait(&self) -> Result<()> {
        while !self.done.wait_for(WATCH_EVERY)? {
            self.group.check()?;
        }
        // A failed operation lets its stream go on: that the event is reached proves nothing by itself.
        self.group.check()
    }

    /// The operation's name.
    pub fn call(&self) -> &'static str {
        self.call
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // A buffer is released in its home stream's order, which must not run ahead of this operation. The group's
        // own stream does not, and one wait is enough for neighbours.
        let mut ordered = self.group.stream.raw();
        for home in self.buffers.iter().map(Buffer::home) {
            if home.raw() != ordered {
                crate::safe::stream::report(home.wait(&self.done));
                ordered = home.raw();
            }
        }
    }
}

impl Inner {
    fn check(&self) -> Result<()> {
        match &*self.failure.lock().unwrap() {
            Some(error) => Err(error.clone()),
            None => self.comm.check(),
        }
    }

    /// Ends the group when its oldest operation is past its deadline.
    fn enforce_deadline(&self) {
        let mut recorder = self.recorder.lock().unwrap();
        if let Some(call) = recorder.overdue(self.timeout) {
            self.give_up(call, &recorder);
        }
    }

    /// Ends the group, since `call` took too long.
    fn give_up(&self, call: &'static str, recorder: &Recorder) {
        let error = Error::Timeout {
            call,
            group: self.name.clone(),
            rank: self.comm.rank(),
            world_size: self.comm.world_size(),
            timeout: self.timeout,
            waits_for: self.comm.waits_for().map(String::into_boxed_str),
            recent: recorder.show(),
        };
        tracing::error!("{error}");
        let why = error.to_string();
        // Locked until the communicator has ended: who is told may leave the process next, and the library with it.
        let mut failure = self.failure.lock().unwrap();
        failure.get_or_insert(error);
        self.comm.abort(&why);
    }
}

fn watch(group: &Weak<Inner>) {
    while let Some(group) = group.upgrade() {
        if group.check().is_err() {
            return; // it does not recover, and what it did last is kept
        }
        group.enforce_deadline();
        drop(group);
        thread::sleep(WATCH_EVERY);
    }
}

impl Recorder {
    fn push(&mut self, entry: Entry) {
        // One that is not done stays however long the queue behind it: the watchdog looks at nothing else.
        while self.entries.len() >= RECORDED && self.entries.front_mut().is_some_and(Entry::is_done) {
            self.entries.pop_front();
        }
        self.entries.push_back(Entry { sequence: self.sequence, ..entry });
        self.sequence += 1;
    }

    /// The oldest operation that started more than `timeout` ago and is not done.
    fn overdue(&mut self, timeout: Duration) -> Option<&'static str> {
        // Operations of one stream finish in order, so the first that is not done is the one to look at.
        for entry in &mut self.entries {
            if entry.is_done() {
                continue;
            }
            if entry.started_at.is_none() && entry.may_start() {
                entry.started_at = Some(Instant::now());
            }
            return entry.started_at.is_some_and(|at| at.elapsed() > timeout).then_some(entry.call);
        }
        None
    }

    fn show(&self) -> String {
        let mut text = String::new();
        let first = self.entries.len().saturating_sub(SHOWN);
        let is_done = |entry: &Entry| entry.done.is_complete().unwrap_or(false);
        let mut its_turn = first == 0 || is_done(&self.entries[first - 1]);
        for entry in self.entries.iter().skip(first) {
            let is_done = is_done(entry);
            let state = match is_done {
                true => "done",
                false if its_turn && entry.may_start() => "started",
                false => "enqueued",
            };
            its_turn = is_done;
            let dtype = entry.dtype.map_or_else(|| "-".into(), |dtype| format!("{dtype:?}"));
            let _ = writeln!(
                text,
                "  #{} {} {dtype} x {}: {state}, enqueued {:.1} s ago",
                entry.sequence,
                entry.call,
                entry.len,
                entry.enqueued_at.elapsed().as_secs_f64(),
            );
        }
        text
    }
}
