//! [`Mirror`]: a run's checkpoints in a store.
//!
//! A checkpoint that is complete in the ranks' folders is copied in two phases, in a thread, while training continues. In
//! the first, one rank for each folder puts the files in it. Once all have, rank 0 puts the manifests. A checkpoint without
//! its manifest does not count, so that one whose copy was interrupted is never resumed from.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyroll_config::error_chain::one_line;
use anyroll_strategy::checkpoint::{self, Folders, MANIFEST};
use serde::{Deserialize, Serialize};

use super::Exchange;
use crate::{
    Error, Result,
    atomic_file::place,
    run_dir::RunDir,
    storage::{self, Storage},
};

/// Interval between two looks at a copy that all wait for.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Folders of checkpoints in a run's folder, with the number that is kept in addition to those of the config.
const KINDS: [(&str, usize); 2] = [("checkpoints", 0), ("old_policy", 1)];
const REFERENCE: &str = "reference";
const BEST: &str = "best";

/// State of a rank's part of a copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Status {
    /// It is not over.
    Busy,
    /// It is there.
    Done,
    /// It failed, for this reason.
    Failed(String),
}

/// Copies between the folder of a run on this host and a store. All ranks make the same calls in the same order.
#[derive(Debug)]
pub struct Mirror {
    storage: Arc<Storage>,
    folder: PathBuf,
    folders: Folders,
    keep_last: usize,
    upload: Option<Upload>,
    /// The reason why the last copy to the store failed.
    failure: Option<String>,
}

/// A copy to the store in progress.
#[derive(Debug)]
struct Upload {
    name: String,
    items: Vec<Item>,
    has_files: bool,
    work: Work,
}

/// A checkpoint, and its place in the store.
#[derive(Clone, Debug)]
struct Item {
    path: PathBuf,
    key: String,
}

/// A rank's part of a copy, in a thread.
#[derive(Debug)]
struct Work {
    thread: Option<JoinHandle<storage::Result<()>>>,
    status: Status,
}

impl Mirror {
    /// The mirror of the run in `folder`, one of `folders`. `keep_last` of its checkpoints are kept.
    pub fn new(storage: Arc<Storage>, folder: &Path, folders: Folders, keep_last: usize) -> Self {
        Self { storage, folder: folder.to_owned(), folders, keep_last, upload: None, failure: None }
    }

    /// Begins to copy the checkpoint `path`, which is complete in all folders, with the models that belong to it and, on
    /// rank 0, the run's records. There is no copy in progress.
    pub fn start(&mut self, exchange: &Exchange, path: &Path) -> Result<()> {
        let name = path.strip_prefix(&self.folder).unwrap_or(path).display().to_string();
        let items = self.items(path)?;
        let (storage, folder) = (self.storage.clone(), self.folder.clone());
        let (of_folder, leads, is_first) =
            (items.clone(), self.folders.leads(exchange.rank()), exchange.rank() == 0);
        let work = Work::start(leads, move || {
            of_folder.iter().try_for_each(|item| put_files(&storage, item))?;
            if is_first { put_records(&storage, &folder) } else { Ok(()) }
        });
        self.upload = Some(Upload { name, items, has_files: false, work });
        Ok(())
    }

    /// The checkpoint `path` comes last, since it is resumed from.
    fn items(&self, path: &Path) -> Result<Vec<Item>> {
        let own = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let item = |key: String| Item { path: self.folder.join(&key), key };
        let last = if own == BEST {
            let step = checkpoint::stamp(path)?.map_or(0, |stamp| stamp.step);
            Item { path: path.to_owned(), key: format!("{BEST}/step_{step:06}") }
        } else {
            item(format!("checkpoints/{own}"))
        };
        let others = [item(REFERENCE.to_owned()), item(format!("old_policy/{own}"))];
        Ok(others.into_iter().filter(|item| item.path.join(MANIFEST).is_file()).chain([last]).collect())
    }

    /// Returns true if a copy is in progress, on all ranks.
    pub fn is_busy(&self) -> bool {
        self.upload.is_some()
    }

    /// Looks if the copy in progress goes on, on all ranks. Returns the reason if it has failed.
    pub fn poll(&mut self, exchange: &Exchange) -> Result<Option<String>> {
        let Some(upload) = &mut self.upload else { return Ok(None) };
        match upload.work.agree(exchange)? {
            Status::Busy => return Ok(None),
            Status::Failed(reason) => {
                let reason = format!("{} is not in `checkpoint.storage`: {reason}", upload.name);
                self.upload = None;
                self.failure = Some(reason);
            }
            Status::Done if upload.has_files => {
                self.upload = None;
                self.failure = None;
            }
            Status::Done => {
                let (storage, items, keep) = (self.storage.clone(), upload.items.clone(), self.keep_last);
                upload.has_files = true;
                upload.work = Work::start(exchange.rank() == 0, move || {
                    items.iter().try_for_each(|item| put_manifests(&storage, item))?;
                    prune(&storage, keep)
                });
            }
        }
        Ok(self.failure.clone().filter(|_| self.upload.is_none()))
    }

    /// Waits until the copy in progress is over. Returns the reason if it has failed.
    pub fn finish(&mut self, exchange: &Exchange) -> Result<Option<String>> {
        let mut failed = None;
        while self.is_busy() {
            failed = self.poll(exchange)?;
            if self.is_busy() {
                thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(failed)
    }

    /// The reason why the newest checkpoint is not in the store.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Brings the newest checkpoint to this host's folder, with the models that belong to it, unless it is there. One that
    /// only the folder has is copied to the store. Returns its path; `None` if there is none.
    pub fn restore(&mut self, exchange: &Exchange) -> Result<Option<PathBuf>> {
        let choice = if exchange.rank() == 0 { self.choose() } else { Ok(None) };
        let choice = choice.map_err(|error| one_line(&error));
        let (name, is_stored) = match exchange.gather(&choice)?.swap_remove(0) {
            Ok(Some(choice)) => choice,
            Ok(None) => return Ok(None),
            Err(problem) => return Err(Error::NotRestored { problem }),
        };
        let path = self.folder.join("checkpoints").join(&name);
        if !is_stored {
            self.start(exchange, &path)?;
            return Ok(Some(path));
        }
        let (storage, folder) = (self.storage.clone(), self.folder.clone());
        let leads = self.folders.leads(exchange.rank());
        let mut work = Work::start(leads, move || fetch_all(&storage, &folder, &name));
        loop {
            match work.agree(exchange)? {
                Status::Busy => thread::sleep(POLL_INTERVAL),
                Status::Failed(problem) => return Err(Error::NotRestored { problem }),
                Status::Done => return Ok(Some(path)),
            }
        }
    }

    /// Name of the newest checkpoint, of the store or of the folder if all ranks see that, and true if the store has it.
    fn choose(&self) -> storage::Result<Option<(String, bool)>> {
        let stored = newest(&self.storage)?;
        let local = checkpoint::list(&self.folder.join("checkpoints")).unwrap_or_default().pop();
        let local = local.filter(|_| self.folders == Folders::One);
        let local = local.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let is_stored = stored >= local;
        Ok(stored.max(local).map(|name| (name, is_stored)))
    }
}

impl Work {
    /// Starts a thread, if this rank has something to do.
    fn start(has_part: bool, part: impl FnOnce() -> storage::Result<()> + Send + 'static) -> Self {
        let thread = has_part.then(|| thread::Builder::new().name("storage".into()).spawn(part));
        match thread.transpose() {
            Ok(None) => Self { thread: None, status: Status::Done },
            Ok(thread) => Self { thread, status: Status::Busy },
            Err(error) => Self { thread: None, status: Status::Failed(error.to_string()) },
        }
    }

    /// The status of all ranks: over once none is busy, and failed if one has.
    fn agree(&mut self, exchange: &Exchange) -> Result<Status> {
        if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
            self.status = match thread.join() {
                Ok(Ok(())) => Status::Done,
                Ok(Err(error)) => Status::Failed(one_line(&error)),
                Err(_) => Status::Failed("its thread panicked".to_owned()),
            };
        }
        let all = exchange.gather(&self.status)?;
        if all.contains(&Status::Busy) {
            return Ok(Status::Busy);
        }
        let failed = all.into_iter().enumerate().find_map(|(rank, status)| match status {
            Status::Failed(reason) => Some(Status::Failed(format!("rank {rank}: {reason}"))),
            _ => None,
        });
        Ok(failed.unwrap_or(Status::Done))
    }
}

/// Writes the records of the run in the store into its new folder.
///
/// # Errors
/// If one cannot be read or written.
pub fn fetch_records(storage: &Storage, folder: &Path) -> Result<()> {
    let mut listed = storage.list("")?;
    listed.retain(|(key, _)| RunDir::RECORDS.contains(&key.as_str()));
    // A folder with metrics is one of a run that has begun, which is not fetched again.
    listed.sort_by_key(|(key, _)| key == "metrics.jsonl");
    for (key, bytes) in listed {
        place(&folder.join(&key), |aside| Ok(storage.get_file(&key, bytes, aside)?))?;
    }
    Ok(())
}

/// Name of the newest whole checkpoint in the store.
///
/// # Errors
/// If the store cannot be read.
pub fn newest(storage: &Storage) -> storage::Result<Option<String>> {
    Ok(whole(&storage.list("checkpoints")?, "checkpoints").pop())
}

/// Names of the checkpoints with a manifest below `kind`, sorted.
fn whole(listed: &[(String, u64)], kind: &str) -> Vec<String> {
    let name = |key: &str| {
        let (name, file) = key.strip_prefix(kind)?.strip_prefix('/')?.split_once('/')?;
        (file == MANIFEST).then(|| name.to_owned())
    };
    listed.iter().filter_map(|(key, _)| name(key)).collect()
}

/// Puts what a folder has of a checkpoint, but for manifests. An old manifest goes first, so that nobody takes the files of
/// two saves for one.
fn put_files(storage: &Storage, item: &Item) -> storage::Result<()> {
    let manifest = format!("{}/{MANIFEST}", item.key);
    match storage.get_bytes(&manifest)? {
        Some(stored) if is_at(&item.path, &stored) => return Ok(()),
        Some(_) => storage.remove(&manifest)?,
        None => {}
    }
    files(storage, &item.path, false)?
        .iter()
        .try_for_each(|file| storage.put_file(&format!("{}/{file}", item.key), &item.path.join(file)))
}

fn put_manifests(storage: &Storage, item: &Item) -> storage::Result<()> {
    // Those of further models have longer paths, and come before the one that makes it whole.
    let mut manifests = files(storage, &item.path, true)?;
    manifests.sort_by_key(|file| std::cmp::Reverse(file.len()));
    manifests
        .iter()
        .try_for_each(|file| storage.put_file(&format!("{}/{file}", item.key), &item.path.join(file)))
}

/// Puts the files of the run's folder that are not checkpoints, for a host that has none.
fn put_records(storage: &Storage, folder: &Path) -> storage::Result<()> {
    let records = RunDir::RECORDS.iter().filter(|name| folder.join(name).is_file());
    records.into_iter().try_for_each(|name| storage.put_file(name, &folder.join(name)))
}

/// Paths of the manifests below a folder, or of all other files, relative to it.
fn files(storage: &Storage, folder: &Path, are_manifests: bool) -> storage::Result<Vec<String>> {
    fn walk(at: &Path, prefix: &str, found: &mut Vec<String>) -> io::Result<()> {
        for entry in fs::read_dir(at)? {
            let entry = entry?;
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            match entry.file_type()?.is_dir() {
                true => walk(&entry.path(), &format!("{path}/"), found)?,
                false => found.push(path),
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    walk(folder, "", &mut found)
        .map_err(|source| storage.failed(&format!("read {}", folder.display()), source))?;
    found.retain(|file| (file.rsplit('/').next() == Some(MANIFEST)) == are_manifests);
    found.sort();
    Ok(found)
}

/// Removes all but the newest checkpoints, and what is left of copies before them that were interrupted.
fn prune(storage: &Storage, keep_last: usize) -> storage::Result<()> {
    let kinds = KINDS.iter().map(|(kind, more)| (*kind, keep_last + more)).chain([(BEST, 1)]);
    for (kind, keep) in kinds {
        let listed = storage.list(kind)?;
        let whole = whole(&listed, kind);
        let Some(oldest_kept) = whole.get(whole.len().saturating_sub(keep)) else { continue };
        let names: BTreeSet<&str> = listed.iter().filter_map(|(key, _)| key.split('/').nth(1)).collect();
        for name in names.into_iter().filter(|name| name < &oldest_kept.as_str()) {
            // First what makes it whole.
            storage.remove(&format!("{kind}/{name}/{MANIFEST}"))?;
            storage.remove_below(&format!("{kind}/{name}"))?;
        }
    }
    Ok(())
}

/// Brings a checkpoint and what belongs to it into the run's folder. The best one comes only if the folder has none.
fn fetch_all(storage: &Storage, folder: &Path, name: &str) -> storage::Result<()> {
    let best = whole(&storage.list(BEST)?, BEST).pop().filter(|_| !folder.join(BEST).exists());
    let best = best.map(|step| Item { path: folder.join(BEST), key: format!("{BEST}/{step}") });
    let keys = [REFERENCE.to_owned(), format!("old_policy/{name}"), format!("checkpoints/{name}")];
    let items = keys.into_iter().map(|key| Item { path: folder.join(&key), key });
    best.into_iter().chain(items).try_for_each(|item| fetch(storage, &item))
}

/// Brings a checkpoint of the store into its folder. Files that are there already stay.
fn fetch(storage: &Storage, item: &Item) -> storage::Result<()> {
    let Item { path, key } = item;
    let failed =
        |action: &str, source: io::Error| storage.failed(&format!("{action} {}", path.display()), source);
    let Some(manifest) = storage.get_bytes(&format!("{key}/{MANIFEST}"))? else { return Ok(()) };
    let listed = storage.list(key)?;
    let objects = || {
        listed.iter().filter_map(|(it, bytes)| Some((it.strip_prefix(key)?.trim_start_matches('/'), *bytes)))
    };
    if is_at(path, &manifest)
        && let Ok(broken) = checkpoint::broken(path)
    {
        for (file, bytes) in objects().filter(|(file, _)| broken.contains(&path.join(file))) {
            let aside = path.join(format!("{file}.partial"));
            storage.get_file(&format!("{key}/{file}"), bytes, &aside)?;
            fs::rename(&aside, path.join(file)).map_err(|source| failed("complete", source))?;
        }
        return Ok(());
    }
    let aside = path.with_extension("partial");
    if aside.exists() {
        fs::remove_dir_all(&aside).map_err(|source| failed("replace", source))?;
    }
    for (file, bytes) in objects() {
        let to = aside.join(file);
        let above = to.parent().unwrap_or(&aside);
        fs::create_dir_all(above).map_err(|source| failed("create", source))?;
        storage.get_file(&format!("{key}/{file}"), bytes, &to)?;
    }
    checkpoint::place(&aside, path)
        .map_err(|source| storage.failed(&format!("complete {}", path.display()), source))
}

/// Returns true if the folder has this manifest.
fn is_at(folder: &Path, manifest: &[u8]) -> bool {
    fs::read(folder.join(MANIFEST)).is_ok_and(|own| own == manifest)
}
