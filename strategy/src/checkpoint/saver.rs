//! Background saves. The state is copied to pinned memory in stream order, and a host thread writes it. The
//! manifest makes the folder a checkpoint, and is written after all ranks' shards.

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

/// Writes checkpoints, one at a time. Every rank has its own saver and makes the same calls in the same
/// order.
#[derive(Debug)]
pub struct Saver {
    disk: Arc<dyn Disk>,
    /// Allocated at the first save and reused, since pinning memory takes longer than the copy.
    memory: Option<PinnedBuffer>,
    pending: Option<Pending>,
}

/// A save in progress.
#[derive(Debug)]
struct Pending {
    path: PathBuf,
    /// `Some` on rank 0 only.
    manifest: Option<Vec<u8>>,
    writing: JoinHandle<(PinnedBuffer, Result<()>)>,
}

impl Default for Saver {
    fn default() -> Self {
        Self::on(Arc::new(RealDisk))
    }
}

impl Saver {
    /// Returns a saver for `disk`, which may be one that fails in tests.
    pub fn on(disk: Arc<dyn Disk>) -> Self {
        Self { disk, memory: None, pending: None }
    }

    /// Starts to write a checkpoint to the new folder `path`. Returns once no later work on the device can
    /// change the saved state. A save in progress is finished first. [`super::load`] returns `extra`, which
    /// is rank 0's.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if the folder cannot be created, or if the previous save failed. A checkpoint
    /// that was at `path` is then still there.
    pub fn start<M: Model>(
        &mut self,
        zero: &mut Zero<M>,
        path: &Path,
        extra: serde_json::Value,
    ) -> Result<()> {
        self.start_with(zero, path, extra, None, |_| Ok(()))
    }

    /// Like [`Self::start`], for more state than one model. `own` is this rank's further state, which
    /// [`super::own`] returns; either every rank gives some or none does. `others` saves further models into
    /// subfolders of the folder it receives, before this call returns. A checkpoint with its final name holds
    /// all of it.
    ///
    /// # Errors
    /// The errors of [`Self::start`], or the error of `others`, which must fail on all ranks together.
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

    /// Completes the save if all ranks have written their shards by now, and returns true if it did. Waits
    /// for the disk only to write the manifest.
    ///
    /// # Errors
    /// The errors of [`Self::finish`].
    pub fn poll(&mut self, group: &CollectiveGroup) -> Result<bool> {
        let Some(pending) = &self.pending else { return Ok(false) };
        let done = flags(group, pending.writing.is_finished())?;
        if done.iter().all(|&done| done) { self.finish(group) } else { Ok(false) }
    }

    /// Waits for the save in progress and completes it. Returns false if there was none.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if this rank could not write, [`Error::CheckpointOfPeer`] if another rank could
    /// not. A checkpoint that was at the path before is then still there.
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

    /// Removes the leftovers of an interrupted save and creates the folder.
    fn make_room(&self, aside: &Path) -> Result<()> {
        self.disk.remove_folder(aside).and_then(|()| self.disk.create_folder(aside)).map_err(failed(aside))
    }

    fn place(&self, path: &Path, manifest: &[u8]) -> Result<()> {
        let aside = aside(path);
        self.disk.write(&aside.join(MANIFEST), manifest).map_err(failed(&aside))?;
        put_in_place(&*self.disk, &aside, path).map_err(failed(path))
    }
}

/// Returns the temporary name that a checkpoint has while it is written.
fn aside(path: &Path) -> PathBuf {
    path.with_extension("partial")
}

/// Copies this rank's shards of all trained units to pinned memory, and leaves room for their checksum at the
/// end. Later work on the compute stream waits for the copies.
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
    let (compute, to_host) = (&zero.compute, &zero.transfers.to_host);
    to_host.wait_stream(compute)?;
    let mut offset = 0;
    for part in &parts {
        match part {
            Part::Device(buffer) => memory.copy_from(offset, buffer, to_host)?,
            Part::Host(tensor) => {
                let len = part.len();
                tensor.f_copy_data_u8(&mut memory.bytes_mut()?[offset..offset + len * F32_BYTES], len)?;
            }
        }
        offset += part.len() * F32_BYTES;
    }
    compute.wait_stream(to_host)?;
    Ok(memory)
}

/// Writes raw little-endian values and then their CRC-32C.
fn write_shard(disk: &dyn Disk, memory: &mut PinnedBuffer, shard: &Path) -> Result<()> {
    let bytes = memory.bytes_mut()?; // waits for the copies
    let (values, sum) = bytes.split_at_mut(bytes.len() - F32_BYTES);
    sum.copy_from_slice(&crc32c::crc32c(values).to_le_bytes());
    disk.write(shard, bytes).map_err(failed(shard))
}

/// Writes the bytes and then their CRC-32C.
fn write_own(disk: &dyn Disk, mut bytes: Vec<u8>, path: &Path) -> Result<()> {
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    disk.write(path, &bytes).map_err(failed(path))
}

/// Returns an error on every rank if any rank has one.
fn agree(group: &CollectiveGroup, path: &Path, own: Result<()>) -> Result<()> {
    let failures = flags(group, own.is_err())?;
    own?;
    let failed = failures.iter().position(|&failed| failed);
    failed.map_or(Ok(()), |rank| Err(Error::CheckpointOfPeer { path: path.to_owned(), rank }))
}

/// Returns the flags of all ranks, by rank.
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
