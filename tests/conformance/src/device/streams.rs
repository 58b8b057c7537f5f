//! Order: within a stream, between streams through events, and between device and host.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyroll_backends::{Buffer, DType, Device, Error, PinnedBuffer, Stream};

use super::Check;
use crate::{
    host::{GATE_LIMIT, Gate, PATIENCE, download, upload},
    runner::{Verdict, ensure, same, same_bytes},
};

pub(super) const RULES: &[(&str, Check)] = &[
    ("stream: work runs in the order in which it was enqueued", in_order),
    ("stream: host functions run in order, one at a time", host_functions),
    ("stream: no verb that enqueues waits for the work", no_blocking),
    ("stream: one that is dropped finishes its work", dropped_stream),
    ("stream: several threads may enqueue on one", many_threads),
    ("event: is reached when the work before it is done, and not earlier", events),
    ("event: orders one stream after another", waits),
    ("event: orders streams there and back, again and again", ping_pong),
    ("event: orders only after what was there when it was recorded", later_work),
    ("event: measures the time between two", elapsed),
    ("errors: come out of the next synchronize, once, and later work still runs", errors),
    ("errors: a panic of a host function on libtorch's stream is one, too", torch_errors),
];

fn in_order(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let cell = Buffer::zeros(&stream, 1, DType::U8)?;
    let log = Buffer::zeros(&stream, 200, DType::U8)?;
    for step in 0..200 {
        cell.fill(step, &stream)?;
        log.slice(step.into()..usize::from(step) + 1).copy_from(&cell, &stream)?;
    }
    same_bytes("the log", &download(&log, &stream)?, &(0..200).collect::<Vec<u8>>())
}

fn host_functions(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let log = Arc::new(Mutex::new(Vec::new()));
    for step in 0..100 {
        let log = log.clone();
        stream.enqueue_host_fn(Box::new(move || {
            log.try_lock().map_err(|_| "two at a time".to_owned())?.push(step);
            Ok(())
        }))?;
    }
    stream.synchronize()?;
    same("the log", log.lock().unwrap().clone(), (0..100).collect())
}

fn no_blocking(device: &Arc<dyn Device>) -> Verdict {
    let (stream, other) = (Stream::new(device)?, Stream::new(device)?);
    let (a, b) = (Buffer::zeros(&stream, 1001, DType::U8)?, Buffer::zeros(&stream, 1001, DType::U8)?);
    let doomed = Buffer::zeros(&stream, 1001, DType::U8)?;
    let (mut to_host, mut from_host) = (PinnedBuffer::new(device, 1001)?, PinnedBuffer::new(device, 1001)?);
    from_host.bytes_mut()?.fill(3);
    stream.synchronize()?;

    let gate = Gate::close(&stream)?;
    let start = Instant::now();
    a.fill(1, &stream)?;
    b.copy_from(&a, &stream)?;
    to_host.copy_from(0, &b, &stream)?;
    from_host.copy_to(0, &a, &stream)?;
    stream.enqueue_host_fn(Box::new(|| Ok(())))?;
    drop(doomed);
    let event = stream.record()?;
    other.wait(&event)?;
    let blocked = start.elapsed();
    let is_complete = event.is_complete()?;
    gate.open();

    stream.synchronize()?; // an error here is the gate's, which the host did not come to open
    other.synchronize()?;
    ensure!(blocked < GATE_LIMIT, "enqueueing took {blocked:?}");
    ensure!(!is_complete, "the work was done behind a closed gate");
    same_bytes("copied to the host", to_host.bytes()?, &[1; 1001])?;
    same_bytes("copied from the host", &download(&a, &stream)?, &[3; 1001])
}

fn dropped_stream(device: &Arc<dyn Device>) -> Verdict {
    let (home, stream) = (Stream::new(device)?, Stream::new(device)?);
    let buffer = upload(&home, &[0; 1001], DType::U8)?;
    let gate = Gate::close(&stream)?;
    buffer.fill(5, &stream)?;
    let event = stream.record()?;
    drop(stream);
    gate.open();
    ensure!(event.wait_for(PATIENCE)?, "its last event is not reached");
    home.wait(&event)?;
    same_bytes("what it had to fill", &download(&buffer, &home)?, &[5; 1001])
}

fn many_threads(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let cells = Buffer::zeros(&stream, 4, DType::U8)?;
    let logs = Buffer::zeros(&stream, 4 * 50, DType::U8)?;
    let work = |number: usize| -> Verdict {
        let cell = cells.slice(number..number + 1);
        for step in 0..50 {
            cell.fill(step, &stream)?;
            let at = number * 50 + usize::from(step);
            logs.slice(at..at + 1).copy_from(&cell, &stream)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("checks return"))
    })?;
    let want: Vec<u8> = (0..4).flat_map(|_| 0..50).collect();
    same_bytes("the logs of four threads", &download(&logs, &stream)?, &want)
}

fn events(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let gate = Gate::close(&stream)?;
    let event = stream.record()?;
    let early = (event.is_complete()?, event.wait_for(Duration::from_millis(20))?);
    gate.open();
    let late = event.wait_for(PATIENCE)?;
    same("before the gate opens: is_complete, wait_for", early, (false, false))?;
    same("after it opens: wait_for, is_complete", (late, event.is_complete()?), (true, true))
}

fn waits(device: &Arc<dyn Device>) -> Verdict {
    let (producer, consumer) = (Stream::new(device)?, Stream::new(device)?);
    let value = upload(&producer, &[0; 1001], DType::U8)?;
    let seen = upload(&consumer, &[0; 1001], DType::U8)?;
    let gate = Gate::close(&producer)?;
    value.fill(1, &producer)?;
    consumer.wait(&producer.record()?)?; // the event itself goes at once: the wait stays
    seen.copy_from(&value, &consumer)?;
    let read = consumer.record()?;
    let is_early = read.wait_for(Duration::from_millis(20))?;
    gate.open();
    let seen = download(&seen, &consumer)?;
    producer.synchronize()?;
    ensure!(!is_early, "the consumer did not wait for the producer");
    same_bytes("what the consumer saw", &seen, &[1; 1001])
}

fn ping_pong(device: &Arc<dyn Device>) -> Verdict {
    let (producer, consumer) = (Stream::new(device)?, Stream::new(device)?);
    let cell = Buffer::zeros(&producer, 1, DType::U8)?;
    let log = Buffer::zeros(&consumer, 100, DType::U8)?;
    for step in 0..100 {
        cell.fill(step, &producer)?;
        consumer.wait_stream(&producer)?;
        log.slice(step.into()..usize::from(step) + 1).copy_from(&cell, &consumer)?;
        producer.wait_stream(&consumer)?; // the next value must not overtake the read
    }
    let log = download(&log, &consumer)?;
    producer.synchronize()?;
    same_bytes("the log", &log, &(0..100).collect::<Vec<u8>>())
}

fn later_work(device: &Arc<dyn Device>) -> Verdict {
    let (first, second) = (Stream::new(device)?, Stream::new(device)?);
    let event = first.record()?;
    let gate = Gate::close(&first)?;
    second.wait(&event)?;
    let reached = second.record()?.wait_for(GATE_LIMIT / 2)?;
    gate.open();
    first.synchronize()?;
    ensure!(reached, "a wait for an event also waited for work that came after it");
    Ok(())
}

fn elapsed(device: &Arc<dyn Device>) -> Verdict {
    const PAUSE: Duration = Duration::from_millis(20);
    let stream = Stream::new(device)?;
    let before = stream.record_timed()?;
    stream.enqueue_host_fn(Box::new(|| {
        thread::sleep(PAUSE);
        Ok(())
    }))?;
    let after = stream.record_timed()?;
    stream.synchronize()?;
    let time = before.elapsed(&after)?;
    // Devices round to microseconds.
    ensure!(time + Duration::from_millis(1) >= PAUSE && time < PATIENCE, "{time:?} for a pause of {PAUSE:?}");

    let gate = Gate::close(&stream)?;
    let pending = stream.record_timed()?;
    let outcome = after.elapsed(&pending);
    gate.open();
    stream.synchronize()?;
    ensure!(outcome.is_err(), "an elapsed time up to an event that is not reached: {outcome:?}");
    Ok(())
}

fn errors(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let buffer = Buffer::zeros(&stream, 10, DType::U8)?;
    for word in ["refused", "panicked"] {
        stream.enqueue_host_fn(Box::new(move || match word {
            "refused" => Err(word.to_owned()),
            _ => panic!("{word}, as this check wants"),
        }))?;
        stream.enqueue_host_fn(Box::new(|| Err("a second error".into())))?;
        buffer.fill(9, &stream)?;
        match stream.synchronize() {
            Err(Error::Stream { device: id, message }) => {
                same("device", id, device.id())?;
                ensure!(message.contains(word), "the first error is {word:?}, not {message:?}");
            }
            other => same(word, format!("{other:?}"), "Stream".into())?,
        }
        ensure!(stream.synchronize().is_ok(), "{word}: the error came out twice");
        same_bytes(&format!("work behind what {word}"), &download(&buffer, &stream)?, &[9; 10])?;
        buffer.fill(0, &stream)?;
    }
    Ok(())
}

fn torch_errors(device: &Arc<dyn Device>) -> Verdict {
    let torch = Stream::torch(device)?;
    // Where libtorch computes on this thread, so do host functions, and there is nothing to wait for.
    let enqueued = torch.enqueue_host_fn(Box::new(|| panic!("as this check wants")));
    match enqueued.and_then(|()| torch.synchronize()) {
        Err(Error::Stream { message, .. }) => same("the error", message.as_str(), "as this check wants"),
        other => same("the error", format!("{other:?}"), "Stream".into()),
    }
}
