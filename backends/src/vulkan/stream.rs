//! A stream: a thread that submits the stream's work in order.
//!
//! A queue of the device runs what it was given in order, and may have to serve all streams. So nothing is submitted
//! that waits for what has yet to be submitted: the thread holds host functions, and what comes behind them, back.
//! Everything else stays with the device, where each submission waits for the one before and for the points of events.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
};

use ash::vk;

use super::{
    context::Context,
    memory::{Block, Memory},
    timeline::{Mark, Point, Timeline},
};
use crate::{Error, Result, device::HostFn, host::work::run, safe::stream::report};

/// Writes commands into a buffer of the stream's. What it names lives until they are done.
pub(super) type Recording = Box<dyn FnOnce(&ash::Device, vk::CommandBuffer) + Send>;
/// A resource that lives until a submission is done.
pub(super) type Kept = Arc<dyn Any + Send + Sync>;

/// One step of a stream's work.
pub(super) enum Item {
    /// Commands of the device.
    Commands(Recording, Option<Kept>),
    /// A function of the host, once all before it is done.
    Host(HostFn),
    /// Sets a mark to the end of what is before it.
    Record(Arc<Mark>),
    /// Holds back what comes next until a mark's point.
    Wait(Arc<Mark>),
    /// Gives memory back once all before it is done.
    Free(Block),
}

/// The sending side.
pub(super) struct Stream {
    queue: mpsc::Sender<Item>,
    failure: Arc<Mutex<Option<Error>>>,
    thread: JoinHandle<()>,
}

impl Stream {
    pub(super) fn spawn(context: &Arc<Context>, memory: &Arc<Memory>, name: String) -> Result<Self> {
        let failure: Arc<Mutex<Option<Error>>> = Arc::default();
        let mut worker = Worker::new(context, memory)?;
        let (queue, work) = mpsc::channel();
        let first_failure = Arc::clone(&failure);
        let thread = thread::Builder::new().name(name).spawn(move || {
            for item in work {
                if let Err(error) = worker.take(item) {
                    first_failure.lock().unwrap().get_or_insert(error);
                }
            }
            report(worker.end());
        });
        let refused = |source: io::Error| Error::Stream { device: context.id, message: source.to_string() };
        Ok(Self { queue, failure, thread: thread.map_err(refused)? })
    }

    /// Returns true if the stream took it.
    pub(super) fn enqueue(&self, item: Item) -> bool {
        self.queue.send(item).is_ok()
    }

    /// Takes no more work; the thread ends after what is pending.
    pub(super) fn end(self) -> JoinHandle<()> {
        self.thread
    }

    /// The first failure since it was last taken.
    pub(super) fn failure(&self) -> Arc<Mutex<Option<Error>>> {
        self.failure.clone()
    }
}

/// State of the stream's thread.
struct Worker {
    context: Arc<Context>,
    memory: Arc<Memory>,
    queue: usize,
    pool: vk::CommandPool,
    timeline: Arc<Timeline>,
    /// Number of submissions: the timeline's value when all are done.
    submitted: u64,
    /// Points of other streams for which the next submission waits.
    waits: Vec<Point>,
    in_flight: VecDeque<InFlight>,
    /// Command buffers that can be written again.
    spare: Vec<vk::CommandBuffer>,
}

struct InFlight {
    value: u64,
    commands: Option<vk::CommandBuffer>,
    _kept: Option<Kept>,
    /// Timelines, which live until no stream waits for them.
    _waits: Vec<Point>,
}

impl Worker {
    fn new(context: &Arc<Context>, memory: &Arc<Memory>) -> Result<Self> {
        let timeline = Arc::new(Timeline::new(context)?);
        let description = vk::CommandPoolCreateInfo::default()
            .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER | vk::CommandPoolCreateFlags::TRANSIENT)
            .queue_family_index(context.physical.queue_family);
        // SAFETY: the description lives through the call; given back by `end`.
        let pool = unsafe { context.device.create_command_pool(&description, None) }
            .map_err(|code| context.error("vkCreateCommandPool", code))?;
        Ok(Self {
            context: context.clone(),
            memory: memory.clone(),
            queue: context.choose_queue(),
            pool,
            timeline,
            submitted: 0,
            waits: Vec::new(),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    fn take(&mut self, item: Item) -> Result<()> {
        match item {
            Item::Commands(recording, kept) => {
                let commands = self.write(recording)?;
                self.submit(Some(commands), kept)
            }
            Item::Host(work) => {
                self.catch_up()?;
                run(work).map_err(|message| Error::Stream { device: self.context.id, message })
            }
            Item::Record(mark) => {
                let outcome = self.join_waits();
                mark.set(self.end_of_work());
                outcome
            }
            Item::Wait(mark) => {
                let point = mark.wait();
                if !Arc::ptr_eq(&point.timeline, &self.timeline) && !point.is_reached()? {
                    self.waits.push(point);
                }
                Ok(())
            }
            Item::Free(block) => {
                let outcome = self.join_waits();
                self.memory.release_after(self.end_of_work(), block);
                outcome
            }
        }
    }

    fn end_of_work(&self) -> Point {
        Point { timeline: self.timeline.clone(), value: self.submitted }
    }

    /// Makes the end of this stream's work come after what it waits for.
    fn join_waits(&mut self) -> Result<()> {
        if self.waits.is_empty() { Ok(()) } else { self.submit(None, None) }
    }

    /// Blocks this thread until all is done that is before.
    fn catch_up(&mut self) -> Result<()> {
        self.end_of_work().wait()?;
        self.waits.iter().try_for_each(Point::wait)?;
        self.waits.clear();
        Ok(())
    }

    fn write(&mut self, recording: Recording) -> Result<vk::CommandBuffer> {
        self.recycle()?;
        let commands = match self.spare.pop() {
            Some(commands) => commands,
            None => self.new_commands()?,
        };
        let description =
            vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        let device = &self.context.device;
        // SAFETY: nothing is pending that uses this buffer, and the pool belongs to this thread.
        let outcome = unsafe {
            device.begin_command_buffer(commands, &description).and_then(|()| {
                recording(device, commands);
                device.end_command_buffer(commands)
            })
        };
        match outcome {
            Ok(()) => Ok(commands),
            Err(code) => {
                self.spare.push(commands);
                Err(self.context.error("vkBeginCommandBuffer or vkEndCommandBuffer", code))
            }
        }
    }

    fn new_commands(&self) -> Result<vk::CommandBuffer> {
        let description =
            vk::CommandBufferAllocateInfo::default().command_pool(self.pool).command_buffer_count(1);
        // SAFETY: the pool belongs to this thread, and its buffers go with it.
        let made = unsafe { self.context.device.allocate_command_buffers(&description) };
        Ok(made.map_err(|code| self.context.error("vkAllocateCommandBuffers", code))?[0])
    }

    /// Submits what comes after all that is before, and after what the stream waits for.
    fn submit(&mut self, commands: Option<vk::CommandBuffer>, kept: Option<Kept>) -> Result<()> {
        let before = self.end_of_work();
        let waits: Vec<&Point> = self.waits.iter().chain([&before]).collect();
        let semaphores: Vec<_> = waits.iter().map(|point| point.timeline.semaphore).collect();
        let values: Vec<_> = waits.iter().map(|point| point.value).collect();
        // A wait of a semaphore, unlike a barrier, orders and makes visible all that any queue did before.
        let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; waits.len()];
        let (signal, value) = ([self.timeline.semaphore], [self.submitted + 1]);
        let buffers: Vec<_> = commands.into_iter().collect();
        let mut order = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&values)
            .signal_semaphore_values(&value);
        let description = vk::SubmitInfo::default()
            .wait_semaphores(&semaphores)
            .wait_dst_stage_mask(&stages)
            .command_buffers(&buffers)
            .signal_semaphores(&signal)
            .push_next(&mut order);
        // SAFETY: what the description names is kept in `in_flight` until it is done, or by the caller of the verb.
        unsafe { self.context.submit(self.queue, description)? };
        self.submitted += 1;
        let waits = std::mem::take(&mut self.waits);
        self.in_flight.push_back(InFlight { value: self.submitted, commands, _kept: kept, _waits: waits });
        Ok(())
    }

    /// Takes back what submissions needed that are done.
    fn recycle(&mut self) -> Result<()> {
        if self.in_flight.is_empty() {
            return Ok(());
        }
        let done = self.timeline.value()?;
        while self.in_flight.front().is_some_and(|first| first.value <= done) {
            self.spare.extend(self.in_flight.pop_front().and_then(|first| first.commands));
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        let outcome = self.catch_up();
        // SAFETY: nothing is pending, or the device is lost.
        unsafe { self.context.device.destroy_command_pool(self.pool, None) };
        outcome
    }
}
