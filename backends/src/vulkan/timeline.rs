//! Order between streams and with the host: counters of the device (timeline semaphores) and points on them.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use ash::vk;

use super::context::Context;
use crate::Result;

/// The counter of one stream: it is `n` once the stream's first `n` submissions are done.
pub(super) struct Timeline {
    context: Arc<Context>,
    pub(super) semaphore: vk::Semaphore,
}

impl Timeline {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let mut kind = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(0);
        let description = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the description lives through the call; given back in `drop`.
        let semaphore = unsafe { context.device.create_semaphore(&description, None) }
            .map_err(|code| context.error("vkCreateSemaphore", code))?;
        Ok(Self { context: context.clone(), semaphore })
    }

    /// Current value.
    pub(super) fn value(&self) -> Result<u64> {
        // SAFETY: the semaphore is live.
        unsafe { self.context.device.get_semaphore_counter_value(self.semaphore) }
            .map_err(|code| self.context.error("vkGetSemaphoreCounterValue", code))
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // SAFETY: every submission that names it holds on to it until it is done.
        unsafe { self.context.device.destroy_semaphore(self.semaphore, None) };
    }
}

/// The end of a submission. It has been submitted, so that it comes by itself.
#[derive(Clone)]
pub(super) struct Point {
    pub(super) timeline: Arc<Timeline>,
    pub(super) value: u64,
}

impl Point {
    pub(super) fn is_reached(&self) -> Result<bool> {
        Ok(self.value == 0 || self.timeline.value()? >= self.value)
    }

    /// Blocks the host until it is reached, or the device is lost: a driver resets a device that does not get on.
    pub(super) fn wait(&self) -> Result<()> {
        /// Only how often the driver is asked anew.
        const SLICE: Duration = Duration::from_secs(1);
        let context = &self.timeline.context;
        let (semaphores, values) = ([self.timeline.semaphore], [self.value]);
        let description = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        while !self.is_reached()? {
            // SAFETY: the description lives through the call, and the semaphore longer.
            match unsafe { context.device.wait_semaphores(&description, SLICE.as_nanos() as u64) } {
                Ok(()) | Err(vk::Result::TIMEOUT) => {}
                Err(code) => return Err(context.error("vkWaitSemaphores", code)),
            }
        }
        Ok(())
    }
}

/// One record of an event: a point, once the stream has got as far as to submit it.
#[derive(Default)]
pub(super) struct Mark {
    point: Mutex<Option<Point>>,
    is_set: Condvar,
}

impl Mark {
    pub(super) fn set(&self, point: Point) {
        *self.point.lock().unwrap() = Some(point);
        self.is_set.notify_all();
    }

    pub(super) fn get(&self) -> Option<Point> {
        self.point.lock().unwrap().clone()
    }

    /// Blocks the host until it is set. Every record is, since streams end after their pending work only.
    pub(super) fn wait(&self) -> Point {
        let point = self.is_set.wait_while(self.point.lock().unwrap(), |point| point.is_none()).unwrap();
        point.clone().expect("waited for")
    }
}

/// A time stamp that the device writes.
pub(super) struct Stamp {
    context: Arc<Context>,
    pub(super) pool: vk::QueryPool,
}

impl Stamp {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let description =
            vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(1);
        // SAFETY: the description lives through the call; given back in `drop`.
        let pool = unsafe { context.device.create_query_pool(&description, None) }
            .map_err(|code| context.error("vkCreateQueryPool", code))?;
        Ok(Self { context: context.clone(), pool })
    }

    /// Time from it to `later`; both are written.
    pub(super) fn until(&self, later: &Self) -> Result<Duration> {
        let physical = &self.context.physical;
        let mask = u64::MAX >> (64 - physical.timestamp_bits.clamp(1, 64));
        let ticks = later.read()?.wrapping_sub(self.read()?) & mask;
        // More than half of what there is is less than nothing.
        let ticks = if ticks > mask / 2 { 0 } else { ticks };
        let nanoseconds = ticks as f64 * f64::from(physical.limits.timestamp_period);
        Ok(Duration::from_nanos(nanoseconds as u64))
    }

    fn read(&self) -> Result<u64> {
        let mut ticks = [0u64];
        // SAFETY: one query of 64 bits into one number.
        unsafe {
            self.context.device.get_query_pool_results(
                self.pool,
                0,
                &mut ticks,
                vk::QueryResultFlags::TYPE_64,
            )
        }
        .map_err(|code| self.context.error("vkGetQueryPoolResults", code))?;
        Ok(ticks[0])
    }
}

impl Drop for Stamp {
    fn drop(&mut self) {
        // SAFETY: every submission that names it holds on to it until it is done.
        unsafe { self.context.device.destroy_query_pool(self.pool, None) };
    }
}
