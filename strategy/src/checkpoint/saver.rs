//! Background saves. The state is copied to pinned memory in stream order, and a host thread writes it. The
//! manifest makes the folder a checkpoint, and is written after all ranks' shards.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyroll_backends::{CollectiveGroup, PinnedBuffer, Stream};
use anyroll_models::Model;
use tch::Device;

use super::{
    F32_BYTES, Folders, Save, failed, is_at,
    manifest::{FileSums, MANIFEST, Manifest, sum_of},
    own_name, put_in_place,
    seal::{END_BYTES, Seal, Stamp},
    shard_name,
};
use crate::{
    Error, Result, State, Zero,
    disk::{Disk, RealDisk},
    optimizer::Part,
};

/// Writes checkpoints, one at a time. Every rank has its own saver and makes the same calls in the same
/// order.
#[derive(Debug)]
pub struct Saver {
    disk: Arc<dyn Disk>,
    folders: Folders,
    /// The run, and the step of the next save.
    stamp: Stamp,
    /// Allocated at the first save and reused, since pinning memory takes longer than the copy.
    memory: Option<PinnedBuffer>,
    pending: Option<Pending>,
}

/// A save in progress.
#[derive(Debug)]
struct Pending {
    path: PathBuf,
    /// `Some` on rank 0 only. The files' checksums are filled in once they are written.
    manifest: Option<Manifest>,
    /// True if this rank completes the folder.
    leads: bool,
    /// The number of this rank's shard among the files.
    slice: usize,
    writing: JoinHandle<(PinnedBuffer, Result<FileSums>)>,
}

impl Default for Saver {
    fn default() -> Self {
        Self::on(Arc::new(RealDisk))
    }
}

impl Saver {
    /// Returns a saver for `disk`, which may be one that fails in tests.
    pub fn on(disk: Arc<dyn Disk>) -> Self {
        Self { disk, folders: Folders::One, stamp: Stamp::default(), memory: None, pending: None }
    }

    /// Returns a saver for the run with this number, which is the same on all ranks.
    pub fn of_run(run: u32) -> Self {
        Self { stamp: Stamp { run, step: 0 }, ..Self::default() }
    }

    /// The same saver for other folders than one that all ranks see.
    pub fn into_folders(self, folders: Folders) -> Self {
        Self { folders, ..self }
    }

    /// Sets the step of the next save.
    pub fn at(&mut self, step: u64) -> &mut Self {
        self.stamp.step = step;
        self
    }

    /// Run and step of the next save.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// The next save, for further models that are saved with it.
    pub fn save(&self) -> Save {
        Save { stamp: self.stamp, folders: self.folders }
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
        let (aside, leads) = (aside(path), self.folders.leads(rank));
        let made = if leads { self.make_room(&aside) } else { Ok(()) };
        agree(zero.group(), path, made)?;
        others(&aside)?;
        let mut manifest = Manifest::new(zero.model().units(), zero.group().world_size(), self.stamp);
        let slice = zero.mesh.saved_slice();
        let [seal, own_seal] = [slice, rank].map(|it| manifest.seal(it).expect("a new manifest has a stamp"));
        if rank == 0 {
            (manifest.optimizer, manifest.extra) = (zero.counters()?, extra);
            manifest.parts = parts(&aside)?;
        }
        let mut memory = snapshot(zero, self.memory.take())?;
        let disk = self.disk.clone();
        let write = move || {
            let written =
                write_shard(&*disk, &mut memory, seal, &aside.join(shard_name(slice))).and_then(|shard| {
                    let own = own.map(|own| write_own(&*disk, own, own_seal, &aside.join(own_name(rank))));
                    Ok(FileSums { shard, own: own.transpose()? })
                });
            (memory, written)
        };
        let writing = thread::Builder::new().name("checkpoint".into()).spawn(write).map_err(failed(path))?;
        let manifest = (rank == 0).then_some(manifest);
        self.pending = Some(Pending { path: path.to_owned(), manifest, leads, slice, writing });
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
        let Some(Pending { path, manifest, leads, slice, writing }) = self.pending.take() else {
            return Ok(false);
        };
        let written = match writing.join() {
            Ok((memory, written)) => {
                self.memory = Some(memory);
                written
            }
            Err(_) => Err(failed(&path)(io::Error::other("the thread that wrote it panicked"))),
        };
        let files = exchange_sums(group, &path, slice, written)?;
        let text = manifest.map(|manifest| Manifest { files, ..manifest }.to_text());
        let text = match self.folders {
            Folders::One => text,
            Folders::OfHosts { .. } => Some(of_first(group, text)?),
        };
        let placed = text.filter(|_| leads).map_or(Ok(()), |text| self.complete(&path, &text));
        agree(group, &path, placed)?;
        Ok(true)
    }

    /// Removes the leftovers of an interrupted save and creates the folder.
    fn make_room(&self, aside: &Path) -> Result<()> {
        self.disk.remove_folder(aside).and_then(|()| self.disk.create_folder(aside)).map_err(failed(aside))
    }

    fn complete(&self, path: &Path, manifest: &str) -> Result<()> {
        let aside = aside(path);
        self.disk.write(&aside.join(MANIFEST), manifest.as_bytes()).map_err(failed(&aside))?;
        put_in_place(&*self.disk, &aside, path).map_err(failed(path))
    }
}

/// Returns the temporary name that a checkpoint has while it is written.
fn aside(path: &Path) -> PathBuf {
    path.with_extension("partial")
}

/// Copies this rank's shards of all trained units to pinned memory, and leaves room for the seal and checksum
/// at the end. Later work on the compute stream waits for the copies.
fn snapshot<M: Model>(zero: &mut Zero<M>, memory: Option<PinnedBuffer>) -> Result<PinnedBuffer> {
    let model = zero.model().clone();
    let mut parts = Vec::new();
    for (index, _) in model.units().iter().enumerate().filter(|(_, unit)| unit.trainable) {
        parts.push(zero.saved_weights(index)?);
        parts.extend(zero.saved_moments(index)?.into_iter().flatten());
    }
    let len_bytes = parts.iter().map(Part::len).sum::<usize>() * F32_BYTES + END_BYTES;
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
            Part::Host(_) | Part::EightBit(_) => {
                let (tensor, len) = (part.on(Device::Cpu)?, part.len());
                tensor.f_copy_data_u8(&mut memory.bytes_mut()?[offset..offset + len * F32_BYTES], len)?;
            }
        }
        offset += part.len() * F32_BYTES;
    }
    compute.wait_stream(to_host)?;
    Ok(memory)
}

/// Writes raw little-endian values, the seal and the checksum, which is returned.
fn write_shard(disk: &dyn Disk, memory: &mut PinnedBuffer, seal: Seal, shard: &Path) -> Result<u32> {
    let bytes = memory.bytes_mut()?; // waits for the copies
    let sum = seal.close(bytes);
    disk.write(shard, bytes).map_err(failed(shard))?;
    Ok(sum)
}

/// Writes the bytes, the seal and the checksum, which is returned.
fn write_own(disk: &dyn Disk, mut bytes: Vec<u8>, seal: Seal, path: &Path) -> Result<u32> {
    bytes.resize(bytes.len() + END_BYTES, 0);
    let sum = seal.close(&mut bytes);
    disk.write(path, &bytes).map_err(failed(path))?;
    Ok(sum)
}

/// Returns the checksums of the manifests of the further models in `aside`.
fn parts(aside: &Path) -> Result<BTreeMap<String, u32>> {
    let mut parts = BTreeMap::new();
    for entry in fs::read_dir(aside).map_err(failed(aside))? {
        let path = entry.map_err(failed(aside))?.path();
        if is_at(&path) {
            let name = path.file_name().expect("an entry of a folder has a name");
            parts.insert(name.to_string_lossy().into_owned(), sum_of(&path)?);
        }
    }
    Ok(parts)
}

/// Returns the checksums of all files: of the shards by their number, which is `slice` for this rank's, and of the own files by
/// rank. Returns an error on every rank if any rank has one.
fn exchange_sums(
    group: &CollectiveGroup,
    path: &Path,
    slice: usize,
    own: Result<FileSums>,
) -> Result<Vec<FileSums>> {
    // A flag of an error, a flag of an own file, both checksums, and the shard's number.
    let mut mine = [0; 14];
    mine[0] = u8::from(own.is_err());
    mine[10..].copy_from_slice(&(slice as u32).to_le_bytes());
    if let Ok(FileSums { shard, own }) = &own {
        mine[1] = u8::from(own.is_some());
        mine[2..6].copy_from_slice(&shard.to_le_bytes());
        mine[6..10].copy_from_slice(&own.unwrap_or(0).to_le_bytes());
    }
    let all = gather(group, &mine)?;
    own?;
    let of_ranks: Vec<&[u8]> = all.chunks_exact(mine.len()).collect();
    if let Some(rank) = of_ranks.iter().position(|theirs| theirs[0] != 0) {
        return Err(Error::CheckpointOfPeer { path: path.to_owned(), rank });
    }
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
    let own_sum = |theirs: &&[u8]| (theirs[1] == 1).then(|| number(&theirs[6..10]));
    let mut sums: Vec<_> =
        of_ranks.iter().map(|theirs| FileSums { shard: 0, own: own_sum(theirs) }).collect();
    for theirs in of_ranks {
        sums[number(&theirs[10..]) as usize].shard = number(&theirs[2..6]);
    }
    Ok(sums)
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
    Ok(gather(group, &[u8::from(own)])?.iter().map(|&flag| flag != 0).collect())
}

/// Returns the text of rank 0, which alone has one.
fn of_first(group: &CollectiveGroup, text: Option<String>) -> Result<String> {
    let mut bytes = text.unwrap_or_default().into_bytes();
    let lengths = gather(group, &(bytes.len() as u64).to_le_bytes())?;
    let length = u64::from_le_bytes(*lengths.first_chunk().expect("a group has a rank")) as usize;
    bytes.resize(length, 0);
    let mut all = gather(group, &bytes)?;
    all.truncate(length);
    Ok(String::from_utf8(all).expect("a text of rank 0"))
}

/// Returns the bytes of all ranks, by rank. Every rank passes equally many.
fn gather(group: &CollectiveGroup, own: &[u8]) -> Result<Vec<u8>> {
    Ok(group.gather_bytes(own, &Stream::new(group.stream().device())?)?)
}
