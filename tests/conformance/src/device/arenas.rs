//! Arenas: memory that is given back and taken again at one address.

use std::sync::Arc;

use anyroll_backends::{Arena, Buffer, DType, Device, Error, PinnedBuffer, Stream};

use super::Check;
use crate::{
    host::{Gate, download, eventually, pinned, upload},
    runner::{Verdict, ensure, same, same_bytes},
    values::random,
};

pub(super) const RULES: &[(&str, Check)] = &[
    ("arena: is zeroed, and its buffers share it", shared),
    ("arena: unmap gives its bytes back and keeps its address, and both may be called again", accounting),
    ("arena: contents come back after an offload to pinned memory", offload),
    ("arena: use while unmapped is Error::Released, with its name", released),
    ("arena: one that is dropped while its work is pending lives until it is done", dropped),
];

/// Not a multiple of any page.
const LEN: usize = (1 << 20) + 1;

fn shared(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let arena = Arena::new("shared", &stream, LEN)?;
    ensure!(arena.len_bytes() >= LEN, "{} bytes", arena.len_bytes());
    ensure!(
        arena.len_bytes().is_multiple_of(device.arena_granularity_bytes()),
        "{} bytes are no multiple of {}",
        arena.len_bytes(),
        device.arena_granularity_bytes()
    );
    let whole = arena.buffer(0..LEN, DType::U8);
    same_bytes("a new arena", &download(&whole, &stream)?, &[0; LEN])?;
    let part = arena.buffer(64..64 + 4 * 99, DType::F32);
    same("elements of a part", (part.len(), part.dtype()), (99, DType::F32))?;
    part.fill(0x3c, &stream)?;
    let mut want = vec![0; LEN];
    want[64..64 + 4 * 99].fill(0x3c);
    same_bytes("a part of it filled", &download(&whole, &stream)?, &want)
}

fn accounting(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let allocated = || device.memory_info().map(|info| info.allocated_bytes);
    let before = allocated()?;
    let arena = Arena::new("accounting", &stream, LEN)?;
    let buffer = arena.buffer(0..LEN, DType::U8);
    let address = device.address(buffer.raw()?.buffer);
    let mapped = before + arena.len_bytes();
    for round in 0..3 {
        same(
            &format!("round {round}: allocated while mapped"),
            (allocated()?, arena.is_mapped()),
            (mapped, true),
        )?;
        arena.map()?;
        same(&format!("round {round}: allocated after another map"), allocated()?, mapped)?;
        arena.unmap()?;
        arena.unmap()?;
        same(
            &format!("round {round}: allocated while unmapped"),
            (allocated()?, arena.is_mapped()),
            (before, false),
        )?;
        arena.map()?;
        same(&format!("round {round}: address"), device.address(buffer.raw()?.buffer), address)?;
        buffer.fill(round, &stream)?;
        same_bytes(&format!("round {round}: contents"), &download(&buffer, &stream)?, &[round; LEN])?;
    }
    drop(arena);
    same("allocated while a buffer holds the arena", allocated()?, mapped)?;
    drop(buffer);
    eventually("the arena's bytes are back after its last owner", || Ok(allocated()? == before))?;

    let arena = Arena::new("dropped unmapped", &stream, LEN)?;
    arena.unmap()?;
    drop(arena);
    same("allocated after an arena was dropped unmapped", allocated()?, before)
}

fn offload(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let arena = Arena::new("optimizer", &stream, LEN)?;
    let states = arena.buffer(128..128 + 4 * 1001, DType::F32);
    let bytes = random(DType::F32, 1001, 6);
    pinned(&stream, &bytes)?.copy_to(0, &states, &stream)?;

    let mut host = PinnedBuffer::new(device, bytes.len())?;
    host.copy_from(0, &states, &stream)?;
    arena.unmap()?;
    same_bytes("what was offloaded", host.bytes()?, &bytes)?;
    arena.map()?;
    arena.buffer(0..LEN, DType::U8).fill(0xcd, &stream)?; // fresh memory may hold the old bytes by chance
    host.copy_to(0, &states, &stream)?;
    same_bytes("what was loaded again", &download(&states, &stream)?, &bytes)
}

fn released(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let arena = Arena::new("kv cache", &stream, LEN)?;
    let buffer = arena.buffer(0..100, DType::U8);
    let other = upload(&stream, &[1; 100], DType::U8)?;
    let mut host = PinnedBuffer::new(device, 100)?;
    arena.unmap()?;
    let uses = [
        ("raw", buffer.raw().map(drop)),
        ("fill", buffer.fill(0, &stream)),
        ("copy_from", buffer.copy_from(&other, &stream)),
        ("copy_from of it", other.copy_from(&buffer, &stream)),
        ("a copy to the host", host.copy_from(0, &buffer, &stream)),
        ("a copy from the host", host.copy_to(0, &buffer, &stream)),
        ("a slice", buffer.slice(3..4).fill(0, &stream)),
        ("a new buffer", arena.buffer(0..4, DType::F32).fill(0, &stream)),
        ("tensor", buffer.tensor(&[100]).map(drop)),
    ];
    for (what, outcome) in uses {
        match outcome {
            Err(Error::Released { arena }) => same(what, arena.as_str(), "kv cache")?,
            other => same(what, format!("{other:?}"), "Released".into())?,
        }
    }
    stream.synchronize()?;
    arena.map()?;
    buffer.copy_from(&other, &stream)?;
    same_bytes("contents after it was mapped again", &download(&buffer, &stream)?, &[1; 100])
}

fn dropped(device: &Arc<dyn Device>) -> Verdict {
    let stream = Stream::new(device)?;
    let bytes = random(DType::U8, LEN, 7);
    let dst = Buffer::zeros(&stream, LEN, DType::U8)?;
    let arena = Arena::new("dropped", &stream, LEN)?;
    let src = arena.buffer(0..LEN, DType::U8);
    pinned(&stream, &bytes)?.copy_to(0, &src, &stream)?;
    let gate = Gate::close(&stream)?;
    dst.copy_from(&src, &stream)?;
    drop((arena, src));
    gate.open();
    same_bytes("a copy of the dropped arena", &download(&dst, &stream)?, &bytes)
}
