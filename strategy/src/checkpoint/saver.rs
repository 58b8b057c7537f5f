//! Saves that go on beside training: what is to be saved is copied to pinned memory in stream order, a thread of the
//! host writes it, and the manifest, which makes it a checkpoint, follows when all ranks have written theirs.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyroll_backends::{Buffer, CollectiveGroup, DType, PinnedBuffer, Stream};
use anyroll_models::Model;

use super::{F32_BYTES, MANIFEST, Manifest, failed, manifest_of, own_name, put_in_place, shard_name};
use crate::{
    Error, Result, State, Zero,
    disk::{Disk, RealDisk},
    weights::Part,
};

/// Writes checkpoints, one at a time. Every rank has one, and makes the same calls on it in the same order.
#[derive(Debug)]
pub struct Saver {
    disk: Arc<dyn Disk>,
    /// Made at the first save and kept: to pin memory takes longer than to copy it.
    memory: Option<PinnedBuffer>,
    pending: Option<Pending>,
}

/// A save under way.
#[derive(Debug)]
struct Pending {
    path: PathBuf,
    /// On rank 0.
    manifest: Option<Vec<u8>>,
    writing: JoinHandle<(PinnedBuffer, Result<()>)>,
}

impl Default for Saver {
    fn default() -> Self {
        Self::on(Arc::new(RealDisk))
    }
}

impl Saver {
    /// On a disk that may fail.
    pub fn on(disk: Arc<dyn Disk>) -> Self {
        Self { disk, memory: None, pending: None }
    }

    /// Starts to write a checkpoint to the new folder `path`, and returns once nothing that follows on the device can
    /// change what it holds. One that is under way is finished first. `extra` (rank 0's) comes back from
    /// [`super::load`].
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when the folder cannot be made, or for what became of the save before. What was at
    /// `path` is still there then.
    pub fn start<M: Model>(
        &mut self,
        zero: &mut Zero<M>,
        path: &Path,
        extra: serde_json::Value,
    ) -> Result<()> {
        self.start_with(zero, path, extra, None, |_| Ok(()))
    }

    /// As [`Self::start`], with more than one model. `own` is what this rank has beside it, which comes back from
    /// [`super::own`]: of every rank or of none. `others` saves further models into folders of the one that it is given,
    /// before this returns. All of it is there when the checkpoint has its name, or nothing.
    ///
    /// # Errors
    /// As [`Self::start`], or that of `others`, which is one on all ranks.
    pub fn start_with<M: Model>(
        &mut self,
        zero: &mut Zero<M>,
        path: &Path,
        extra: serde_json::Value,
        own: Option<Vec<u8>>,
        others: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        self.finish(&zero.group().clone())?;
        zero.needs("save", &[State::Params, State::Optimizer])?;
        let rank = zero.group().rank();
        let aside = aside(path);
        let made = if rank == 0 { self.make_room(&aside) } else { Ok(()) };
        agree(zero.group(), path, made)?;
        others(&aside)?;
        let mut memory = snapshot(zero, self.memory.take())?;
        let manifest = (rank == 0).then(|| -> Result<Vec<u8>> {
            let manifest = Manifest { optimizer: zero.counters()?, extra, ..manifest_of(zero) };
            Ok(serde_json::to_vec_pretty(&manifest).expect("a manifest is plain data"))
        });
        let disk = self.disk.clone();
        let write = move || {
            let written = write_shard(&*disk, &mut memory, &aside.join(shard_name(rank)))
                .and_then(|()| own.map_or(Ok(()), |own| write_own(&*disk, own, &aside.join(own_name(rank)))));
            (memory, written)
        };
        let writing = thread::Builder::new().name("checkpoint".into()).spawn(write).map_err(failed(path))?;
        self.pending = Some(Pending { path: path.to_owned(), manifest: manifest.transpose()?, writing });
        Ok(())
    }

    /// Completes a save if all ranks have written their shards by now; whether it did. Never waits for a disk but to
    /// write the manifest.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn poll(&mut self, group: &CollectiveGroup) -> Result<bool> {
        let Some(pending) = &self.pending else { return Ok(false) };
        let done = flags(group, pending.writing.is_finished())?;
        if done.iter().all(|&done| done) { self.finish(group) } else { Ok(false) }
    }

    /// Waits for a save that is under way, and completes it; whether there was one.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for what this rank could not write, [`Error::CheckpointOfPeer`] for what another could
    /// not. What was at the path before is still there then.
    pub fn finish(&mut self, group: &CollectiveGroup) -> Result<bool> {
        let Some(Pending { path, manifest, writing }) = self.pending.take() else { return Ok(false) };
        let written = match writing.join() {
            Ok((memory, written)) => {
                self.memory = Some(memory);
                written
            }
            Err(_) => Err(failed(&path)(io::Error::other("the thread that wrote it panicked"))),
        };
        agree(group, &path, written)?;
        let placed = manifest.map_or(Ok(()), |manifest| self.place(&path, &manifest));
        agree(group, &path, placed)?;
        Ok(true)
    }

    /// Removes what an interrupted save left behind.
    fn make_room(&self, aside: &Path) -> Result<()> {
        self.disk.remove_folder(aside).and_then(|()| self.disk.create_folder(aside)).map_err(failed(aside))
    }

    fn place(&self, path: &Path, manifest: &[u8]) -> Result<()> {
        let aside = aside(path);
        self.disk.write(&aside.join(MANIFEST), manifest).map_err(failed(&aside))?;
        put_in_place(&*self.disk, &aside, path).map_err(failed(path))
    }
}

/// Where a checkpoint is written before it has its name.
fn aside(path: &Path) -> PathBuf {
    path.with_extension("partial")
}

/// Copies this rank's shards of all trained units to pinned memory, with room for their sum behind them. Work on the
/// compute stream that comes later waits for the copies.
fn snapshot<M: Model>(zero: &mut Zero<M>, memory: Option<PinnedBuffer>) -> Result<PinnedBuffer> {
    let model = zero.model().clone();
    let mut parts = Vec::new();
    for (index, _) in model.units().iter().enumerate().filter(|(_, unit)| unit.trainable) {
        parts.push(zero.saved_weights(index)?);
        parts.extend(zero.saved_moments(index)?.into_iter().flatten());
    }
    let len_bytes = parts.iter().map(Part::len).sum::<usize>() * F32_BYTES + F32_BYTES;
    let mut memory = match memory {
        Some(memory) if memory.len_bytes() == len_bytes => memory,
        _ => PinnedBuffer::new(zero.compute.device(), len_bytes)?,
    };
    let (compute, out) = (&zero.compute, &zero.transfers.out);
    out.wait_stream(compute)?;
    let mut offset = 0;
    for part in &parts {
        match part {
            Part::Device(buffer) => memory.copy_from(offset, buffer, out)?,
            Part::Host(tensor) => {
                let len = part.len();
                tensor.f_copy_data_u8(&mut memory.bytes_mut()?[offset..offset + len * F32_BYTES], len)?;
            }
        }
        offset += part.len() * F32_BYTES;
    }
    compute.wait_stream(out)?;
    Ok(memory)
}

/// Raw little-endian values, then their CRC-32C.
fn write_shard(disk: &dyn Disk, memory: &mut PinnedBuffer, shard: &Path) -> Result<()> {
    let bytes = memory.bytes_mut()?; // waits for the copies
    let (values, sum) = bytes.split_at_mut(bytes.len() - F32_BYTES);
    sum.copy_from_slice(&crc32c::crc32c(values).to_le_bytes());
    disk.write(shard, bytes).map_err(failed(shard))
}

/// The bytes, then their CRC-32C.
fn write_own(disk: &dyn Disk, mut bytes: Vec<u8>, path: &Path) -> Result<()> {
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    disk.write(path, &bytes).map_err(failed(path))
}

/// An error on every rank if there is one on any.
fn agree(group: &CollectiveGroup, path: &Path, own: Result<()>) -> Result<()> {
    let failures = flags(group, own.is_err())?;
    own?;
    let failed = failures.iter().position(|&failed| failed);
    failed.map_or(Ok(()), |rank| Err(Error::CheckpointOfPeer { path: path.to_owned(), rank }))
}

/// Everybody's flag, by rank.
fn flags(group: &CollectiveGroup, own: bool) -> Result<Vec<bool>> {
    let stream = Stream::new(group.stream().device())?;
    let all = Buffer::zeros(&stream, group.world_size(), DType::U8)?;
    let mine = all.slice(group.rank()..group.rank() + 1);
    let mut host = PinnedBuffer::new(stream.device(), group.world_size())?;
    host.bytes_mut()?[0] = u8::from(own);
    host.copy_to(0, &mine, &stream)?;
    let work = group.all_gather(&all, &mine, &stream)?;
    work.wait()?;
    work.wait_stream(&stream)?;
    host.copy_from(0, &all, &stream)?;
    Ok(host.bytes()?.iter().map(|&flag| flag != 0).collect())
}
