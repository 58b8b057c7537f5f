//! Allocation, accounting, fills, copies and what outlives what.

use std::{sync::Arc, thread, time::Duration};

use anyroll_backends::{Arena, Buffer, DType, Device, Error, PinnedBuffer, Stream};

use super::Check;
use crate::{
    host::{Gate, PATIENCE, download, pinned, upload},
    runner::{Verdict, ensure, same, same_bytes},
    values::random,
};

pub(super) const RULES: &[(&str, Check)] = &[
    ("memory: a new buffer has its length, is zeroed and aligned to 64 bytes", new_buffers),
    ("memory: what is allocated is counted, until its last owner is gone", accounting),
    ("memory: more than there is is OutOfMemory, and the device goes on", out_of_memory),
    ("memory: fill sets the bytes asked for and no others", fill),
    ("memory: copies move the bytes asked for and no others", copies),
    ("memory: pinned memory starts zeroed and comes back as it was sent", pinned_round_trip),
    ("memory: copies of one pinned buffer follow one another across streams", pinned_order),
    ("memory: a buffer dropped while its work is pending lives until it is done", dropped_buffer),
    ("memory: pinned memory dropped while a copy is pending lives until it is done", dropped_pinned),
    ("memory: threads use one device at a time", threads),
];

fn new_buffers(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    for dtype in DType::ALL {
        for len in [0, 1, 3, 1001, 1 << 18] {
            let what = format!("{len} x {dtype:?}");
            let buffer = Buffer::zeros(&stream, len, dtype)?;
            same(&what, (buffer.len(), buffer.dtype()), (len, dtype))?;
            same_bytes(&what, &download(&buffer, &stream)?, &vec![0; len * dtype.size_bytes()])?;
            if let Some(address) = device.address(buffer.raw()?.buffer) {
                ensure!((address as usize).is_multiple_of(64), "{what}: address {address:?}");
            }
        }
    }
    Ok(())
}

fn accounting(device: &Arc<dyn Device>) -> Verdict {
    const LEN: usize = 1 << 20;
    let stream = Stream::new(device)?;
    let before = device.memory_info()?;
    ensure!(before.free_bytes <= before.total_bytes, "more is free than there is: {before:?}");

    let buffer = Buffer::zeros(&stream, LEN, DType::U8)?;
    let held = device.memory_info()?.allocated_bytes;
    ensure!(held >= before.allocated_bytes + LEN, "{before:?}, then {held} bytes with {LEN} more");
    let slice = buffer.slice(3..4);
    drop(buffer);
    stream.synchronize()?;
    same("a slice holds the allocation", device.memory_info()?.allocated_bytes, held)?;
    drop(slice);
    stream.synchronize()?;
    same("allocated after the last owner", device.memory_info()?.allocated_bytes, before.allocated_bytes)?;

    let pinned = PinnedBuffer::new(device, LEN)?;
    let held = device.memory_info()?.pinned_bytes;
    ensure!(held >= before.pinned_bytes + LEN, "{before:?}, then {held} bytes pinned with {LEN} more");
    drop(pinned);
    same("pinned after the last owner", device.memory_info()?.pinned_bytes, before.pinned_bytes)
}

fn out_of_memory(device: &Arc<dyn Device>) -> Verdict {
    const TOO_MUCH: usize = 1 << 60;
    let stream = Stream::new(device)?;
    let before = device.memory_info()?;
    let refused = |what: &str, outcome: Result<(), Error>| match outcome {
        Err(Error::OutOfMemory { device: id, requested_bytes, free_bytes }) => {
            same(&format!("{what}: device"), id, device.id())?;
            ensure!(requested_bytes >= TOO_MUCH, "{what}: requested {requested_bytes} bytes");
            ensure!(free_bytes < TOO_MUCH, "{what}: {free_bytes} bytes free");
            Ok(())
        }
        other => same(what, format!("{other:?}"), "OutOfMemory".into()),
    };
    refused("buffer", Buffer::zeros(&stream, TOO_MUCH, DType::U8).map(drop))?;
    refused("buffer of wider elements", Buffer::zeros(&stream, TOO_MUCH, DType::I64).map(drop))?;
    refused("buffer whose bytes overflow", Buffer::zeros(&stream, usize::MAX / 3, DType::F32).map(drop))?;
    refused("pinned", PinnedBuffer::new(device, TOO_MUCH).map(drop))?;
    refused("arena", Arena::new("too much", &stream, TOO_MUCH).map(drop))?;
    refused("arena whose bytes overflow", Arena::new("too much", &stream, usize::MAX).map(drop))?;

    let buffer = upload(&stream, &[7; 100], DType::U8)?;
    same_bytes("a buffer afterwards", &download(&buffer, &stream)?, &[7; 100])?;
    drop(buffer);
    stream.synchronize()?;
    same("allocated afterwards", device.memory_info()?.allocated_bytes, before.allocated_bytes)
}

fn fill(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    for (len, part) in [(1, 0..1), (1001, 3..998), (1001, 7..7), (1 << 20, 1..(1 << 20) - 1)] {
        let buffer = upload(&stream, &vec![0x11; len], DType::U8)?;
        buffer.slice(part.clone()).fill(0xee, &stream)?;
        let mut want = vec![0x11; len];
        want[part.clone()].fill(0xee);
        same_bytes(&format!("{part:?} of {len}"), &download(&buffer, &stream)?, &want)?;
    }
    Ok(())
}

fn copies(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    for dtype in DType::ALL {
        let size = dtype.size_bytes();
        for (len, from, to) in [(0, 2, 5), (1, 0, 0), (1, 3, 9), (63, 1, 2), (1001, 5, 0), (1 << 17, 1, 3)] {
            let what = format!("{len} x {dtype:?} from {from} to {to}");
            let whole = random(dtype, len + 16, 1);
            let part = &whole[from * size..(from + len) * size];
            let spliced = |mut bytes: Vec<u8>, at: usize| {
                bytes[at..at + part.len()].copy_from_slice(part);
                bytes
            };

            let src = upload(&stream, &whole, dtype)?;
            let dst = upload(&stream, &vec![0xaa; whole.len()], dtype)?;
            dst.slice(to..to + len).copy_from(&src.slice(from..from + len), &stream)?;
            let want = spliced(vec![0xaa; whole.len()], to * size);
            same_bytes(&format!("{what}, within the device"), &download(&dst, &stream)?, &want)?;

            // Host offsets are bytes and need not be multiples of the element.
            let mut host = pinned(&stream, &vec![0x55; whole.len() + 3])?;
            host.copy_from(to * size + 3, &src.slice(from..from + len), &stream)?;
            let want = spliced(vec![0x55; whole.len() + 3], to * size + 3);
            same_bytes(&format!("{what}, to the host"), host.bytes()?, &want)?;

            let dst = upload(&stream, &vec![0xaa; whole.len()], dtype)?;
            host.copy_to(to * size + 3, &dst.slice(from..from + len), &stream)?;
            let want = spliced(vec![0xaa; whole.len()], from * size);
            same_bytes(&format!("{what}, from the host"), &download(&dst, &stream)?, &want)?;
        }
    }
    Ok(())
}

fn pinned_round_trip(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    for len in [1, 3, 4097, 1 << 20] {
        let mut host = PinnedBuffer::new(device, len)?;
        same_bytes(&format!("{len} new bytes"), host.bytes()?, &vec![0; len])?;
        let bytes = random(DType::U8, len, 2);
        host.bytes_mut()?.copy_from_slice(&bytes);
        let buffer = Buffer::zeros(&stream, len, DType::U8)?;
        host.copy_to(0, &buffer, &stream)?;
        host.bytes_mut()?.fill(0);
        host.copy_from(0, &buffer, &stream)?;
        same_bytes(&format!("{len} bytes, there and back"), host.bytes()?, &bytes)?;
    }
    Ok(())
}

fn pinned_order(device: &Arc<dyn Device>) -> Verdict {
    const LEN: usize = 1001;
    let (first, second) = (Stream::new(device)?, Stream::new(device)?);
    let bytes = random(DType::U8, LEN, 3);
    let src = upload(&first, &bytes, DType::U8)?;
    let dst = upload(&second, &[0; LEN], DType::U8)?;
    let mut host = PinnedBuffer::new(device, LEN)?;
    let gate = Gate::close(&first)?;
    host.copy_from(0, &src, &first)?;
    host.copy_to(0, &dst, &second)?;
    gate.open();
    same_bytes("what went through pinned memory", &download(&dst, &second)?, &bytes)
}

fn dropped_buffer(device: &Arc<dyn Device>) -> Verdict {
    const LEN: usize = 1 << 16;
    let stream = Stream::new(device)?;
    let bytes = random(DType::U8, LEN, 4);
    let dst = Buffer::zeros(&stream, LEN, DType::U8)?;
    let src = upload(&stream, &bytes, DType::U8)?;
    let gate = Gate::close(&stream)?;
    dst.copy_from(&src, &stream)?;
    drop(src);
    // Whoever gets memory now must not get that of `src`.
    let other = Stream::new(device)?;
    let next = upload(&other, &[0xff; LEN], DType::U8)?;
    gate.open();
    same_bytes("a copy of the dropped buffer", &download(&dst, &stream)?, &bytes)?;
    same_bytes("the buffer made since", &download(&next, &other)?, &[0xff; LEN])
}

fn dropped_pinned(device: &Arc<dyn Device>) -> Verdict {
    const LEN: usize = 1 << 16;
    let stream = Stream::new(device)?;
    let bytes = random(DType::U8, LEN, 5);
    let dst = Buffer::zeros(&stream, LEN, DType::U8)?;
    let mut host = pinned(&stream, &bytes)?;
    let gate = Gate::close(&stream)?;
    host.copy_to(0, &dst, &stream)?;
    gate.open_after(Duration::from_millis(20));
    drop(host);
    same_bytes("a copy of dropped pinned memory", &download(&dst, &stream)?, &bytes)
}

fn threads(device: &Arc<dyn Device>) -> Verdict {
    let work = |seed: u64| -> Verdict {
        let stream = Stream::new(device)?;
        for round in 0..20 {
            let bytes = random(DType::I64, 257, seed * 1000 + round);
            let src = upload(&stream, &bytes, DType::I64)?;
            let dst = Buffer::zeros(&stream, 257, DType::I64)?;
            dst.copy_from(&src, &stream)?;
            let event = stream.record()?;
            drop(src);
            ensure!(event.wait_for(PATIENCE)?, "thread {seed}: no end of round {round}");
            same_bytes(&format!("thread {seed}, round {round}"), &download(&dst, &stream)?, &bytes)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|seed| scope.spawn(move || work(seed))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("checks return"))
    })
}
