//! The folder of a run, and the paths in it.
//!
//! | path | content |
//! |---|---|
//! | `config.yaml` | the config as the user wrote it |
//! | `resolved.yaml` | the resolved config; written last, so a folder that has it holds a run |
//! | `metrics.jsonl` | one object per step ([`crate::metrics`]) |
//! | `warmup.jsonl` | one object per step of the supervised warm-up |
//! | `samples.jsonl` | samples of evaluations and of training steps ([`crate::samples`]) |
//! | `advice.jsonl` | what goes wrong, and how to mend it ([`crate::advice`]) |
//! | `log.jsonl` | printed lines, and how each start ended ([`crate::run_log`]) |
//! | `report.html` | curves and samples for a browser ([`crate::report`]) |
//! | `tensorboard/` | event files, one per start ([`crate::tensorboard`]) |
//! | `checkpoints/` | checkpoints to resume from |
//! | `best/` | the checkpoint with the best held-out score, if `checkpoint.keep_best` is set |
//! | `lock` | locked by the process that writes the folder; contains its id |

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyroll_strategy::checkpoint;
use jiff::{Timestamp, Zoned};
use serde::de::IgnoredAny;

use crate::atomic_file::write_atomic;
use crate::json_lines;
use crate::output_error::{OutputError, Result};

const CONFIG: &str = "config.yaml";
const RESOLVED: &str = "resolved.yaml";
const LOCK: &str = "lock";

/// Most time for which readers may hold the lock.
const READERS: Duration = Duration::from_millis(200);

/// Exclusive lock of a run folder.
#[derive(Debug)]
pub struct Lock {
    _file: File,
    mark: String,
}

impl Lock {
    /// Content of the lock file, unique to this process.
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// Returns true if the folder at `path`, as this host sees it, has the lock with this mark.
    pub fn is_at(path: &Path, mark: &str) -> bool {
        fs::read_to_string(path.join(LOCK)).is_ok_and(|found| found == mark)
    }
}

/// The folder of one run. It exists and holds both configs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// Files that rank 0 writes, and that a run continues to write after a resume.
    pub const RECORDS: [&str; 7] =
        [CONFIG, RESOLVED, "metrics.jsonl", "warmup.jsonl", "samples.jsonl", "advice.jsonl", "log.jsonl"];

    /// The run folder and checkpoint that `path` names; the checkpoint is `None` if `path` is the run folder
    /// itself. A run's checkpoints are in its `checkpoints/`, and the best one in the run folder.
    pub fn and_checkpoint(path: &Path) -> (PathBuf, Option<PathBuf>) {
        let is_checkpoint = checkpoint::is_at(path);
        let mut above = path.ancestors().skip(1).take(2);
        match above.find(|it| is_checkpoint && RunDir::open(it).is_ok()) {
            Some(run) => (run.to_owned(), Some(path.to_owned())),
            None => (path.to_owned(), None),
        }
    }

    /// Creates the folder of a new run at `path`, with its parents, and writes both configs.
    ///
    /// # Errors
    /// [`OutputError::AlreadyARun`], [`OutputError::NotEmpty`] and [`OutputError::NotAFolder`] unless `path`
    /// is absent, an empty folder, or that of a run that ended before its first evaluation and is written anew;
    /// [`OutputError::InUse`] and [`OutputError::NotUtf8`]. If two processes create one path at once, one of them
    /// succeeds.
    pub fn create(path: &Path, config_as_written: &str, resolved_yaml: &str) -> Result<RunDir> {
        if path.to_str().is_none() {
            return Err(OutputError::NotUtf8 { path: path.to_owned() });
        }
        fs::create_dir_all(path).map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => OutputError::NotAFolder { path: path.to_owned() },
            _ => OutputError::io("create", path, source),
        })?;
        let run = RunDir { path: path.to_owned() };
        run.refuse_if_occupied()?;
        // Creating a folder is atomic, so only one of several processes that found the run folder empty gets it.
        fs::create_dir(run.checkpoints()).map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => OutputError::AlreadyARun { path: path.to_owned() },
            _ => OutputError::io("create", &run.checkpoints(), source),
        })?;
        let tensorboard = run.tensorboard();
        fs::create_dir(&tensorboard).map_err(|source| OutputError::io("create", &tensorboard, source))?;
        write_atomic(&run.config(), config_as_written.as_bytes())?;
        write_atomic(&run.resolved(), resolved_yaml.as_bytes())?;
        Ok(run)
    }

    /// The run that lies at `path`, to resume it or to read it.
    ///
    /// # Errors
    /// [`OutputError::NotARun`] if one of the two configs is missing.
    pub fn open(path: &Path) -> Result<RunDir> {
        for missing in [CONFIG, RESOLVED] {
            if !path.join(missing).is_file() {
                return Err(OutputError::NotARun { path: path.to_owned(), missing });
            }
        }
        Ok(RunDir { path: path.to_owned() })
    }

    /// Keeps other processes from writing the run anew until the returned file is dropped: for a process that starts the
    /// one that locks the folder.
    ///
    /// # Errors
    /// [`OutputError::InUse`] if another process does so.
    pub fn keep(&self) -> Result<File> {
        let path = self.config();
        let file = File::options().write(true).open(&path);
        let file = file.map_err(|source| OutputError::io("open", &path, source))?;
        self.lock_file(&path, &file)?;
        Ok(file)
    }

    /// Locks an open file of the folder for this process.
    fn lock_file(&self, path: &Path, file: &File) -> Result<()> {
        let since = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(()),
                // A reader asks for a moment, in `is_in_use`.
                Err(TryLockError::WouldBlock) if since.elapsed() < READERS => sleep(READERS / 10),
                Err(TryLockError::WouldBlock) => return Err(OutputError::InUse { path: self.path.clone() }),
                Err(TryLockError::Error(source)) => return Err(OutputError::io("lock", path, source)),
            }
        }
    }

    /// Locks the folder for this process until the returned lock is dropped. The system releases it however
    /// the process ends.
    ///
    /// # Errors
    /// [`OutputError::InUse`] while another process holds the lock.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.path.join(LOCK);
        let io = |action| {
            let path = &path;
            move |source| OutputError::io(action, path, source)
        };
        // Truncated only after the lock is held.
        let mut file =
            File::options().write(true).create(true).truncate(false).open(&path).map_err(io("create"))?;
        self.lock_file(&path, &file)?;
        let mark = format!("process {} of {}", process::id(), Timestamp::now());
        let written = file.set_len(0).and_then(|()| file.write_all(mark.as_bytes()));
        written.and_then(|()| file.sync_all()).map_err(io("write"))?;
        Ok(Lock { _file: file, mark })
    }

    /// Returns true while a process writes the run. A file system without locks never does.
    pub fn is_in_use(&self) -> bool {
        let is_locked = |path: PathBuf| {
            let locked = File::open(path).map(|file| file.try_lock_shared());
            matches!(locked, Ok(Err(TryLockError::WouldBlock)))
        };
        is_locked(self.path.join(LOCK)) || is_locked(self.config())
    }

    /// Default path of a run: `runs/<name>-<YYYYmmdd-HHMMSS>` in `now`'s time zone, with `-2`, `-3` and so on
    /// appended if it exists. Characters of `name` that are special to a shell or a file system become `-`.
    pub fn default_path(runs: &Path, name: &str, now: &Zoned) -> PathBuf {
        let plain = |c: char| if c.is_alphanumeric() || "._-".contains(c) { c } else { '-' };
        let name: String = name.chars().map(plain).collect();
        let base = format!("{name}-{}", now.strftime("%Y%m%d-%H%M%S"));
        let numbered = (2..).map(|number| format!("{base}-{number}"));
        std::iter::once(base.clone())
            .chain(numbered)
            .map(|folder| runs.join(folder))
            .find(|path| !path.exists())
            .expect("one of endlessly many names is free")
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The config as the user wrote it.
    pub fn config(&self) -> PathBuf {
        self.path.join(CONFIG)
    }

    /// The resolved config.
    pub fn resolved(&self) -> PathBuf {
        self.path.join(RESOLVED)
    }

    /// Metrics, one JSON object per step.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Metrics of the warm-up, one JSON object per step.
    pub fn warmup(&self) -> PathBuf {
        self.path.join("warmup.jsonl")
    }

    /// Samples of evaluations and of training steps, one JSON object each.
    pub fn samples(&self) -> PathBuf {
        self.path.join("samples.jsonl")
    }

    /// Advice, one JSON object each.
    pub fn advice(&self) -> PathBuf {
        self.path.join("advice.jsonl")
    }

    /// Printed lines, one JSON object each.
    pub fn log(&self) -> PathBuf {
        self.path.join("log.jsonl")
    }

    /// Images generated in the evaluation at a step.
    pub fn picture(&self, step: u64) -> PathBuf {
        self.pictures().join(format!("step_{step:06}.png"))
    }

    /// Steps that have a picture, in order.
    ///
    /// # Errors
    /// If the folder of the pictures exists and cannot be read.
    pub fn pictured_steps(&self) -> Result<Vec<u64>> {
        let pictures = self.pictures();
        let entries = match fs::read_dir(&pictures) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|source| OutputError::io("read", &pictures, source))?,
        };
        let step_of = |name: &str| name.strip_prefix("step_")?.strip_suffix(".png")?.parse().ok();
        let mut steps: Vec<u64> =
            entries.filter_map(|entry| step_of(entry.ok()?.file_name().to_str()?)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The folder of the pictures; absent if the run has none.
    pub fn pictures(&self) -> PathBuf {
        self.path.join("pictures")
    }

    /// The report page.
    pub fn report(&self) -> PathBuf {
        self.path.join("report.html")
    }

    /// The folder with a tracker's id, its last step and its output, by its name.
    pub fn trackers(&self) -> PathBuf {
        self.path.join("trackers")
    }

    /// The folder of the event files.
    pub fn tensorboard(&self) -> PathBuf {
        self.path.join("tensorboard")
    }

    /// The folder of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// The checkpoint that the run continues from; `None` before the first.
    ///
    /// # Errors
    /// If the folder of the checkpoints cannot be read.
    pub fn newest_checkpoint(&self) -> anyroll_strategy::Result<Option<PathBuf>> {
        Ok(checkpoint::list(&self.checkpoints())?.pop())
    }

    /// Returns true if the run has an evaluation, a step or a checkpoint, or files of another kind than a run's.
    fn has_begun(&self) -> Result<bool> {
        const OWN: [&str; 16] = [
            CONFIG,
            RESOLVED,
            LOCK,
            "metrics.jsonl",
            "warmup.jsonl",
            "samples.jsonl",
            "advice.jsonl",
            "log.jsonl",
            "report.html",
            "tensorboard",
            "trackers",
            "wandb",
            "checkpoints",
            "pictures",
            "reference",
            "old_policy",
        ];
        let entries = |folder: &Path| {
            let io = |source| OutputError::io("read", folder, source);
            let names = fs::read_dir(folder).map_err(io)?.map(|entry| Ok(entry.map_err(io)?.file_name()));
            names.collect::<Result<Vec<_>>>()
        };
        let is_own = |name: &OsString| name.to_str().is_some_and(|name| OWN.contains(&name));
        // A checkpoint that was not finished is none, but may be looked at.
        let checkpoints = self.checkpoints();
        if !entries(&self.path)?.iter().all(is_own)
            || (checkpoints.exists() && !entries(&checkpoints)?.is_empty())
        {
            return Ok(true);
        }
        let metrics = self.metrics();
        // Step 0 is the evaluation before training, which may be all that was asked for.
        Ok(metrics.exists() && !json_lines::read::<IgnoredAny>(&metrics)?.is_empty())
    }

    /// Removes the files of a run that has not begun, and that no process writes.
    fn clear(&self) -> Result<()> {
        let (_kept, _lock) = (self.keep()?, self.lock()?);
        for entry in fs::read_dir(&self.path).map_err(|source| OutputError::io("read", &self.path, source))? {
            let path = entry.map_err(|source| OutputError::io("read", &self.path, source))?.path();
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(|source| OutputError::io("remove", &path, source))?;
        }
        Ok(())
    }

    fn refuse_if_occupied(&self) -> Result<()> {
        let path = self.path.clone();
        if self.resolved().exists() {
            return if self.has_begun()? { Err(OutputError::AlreadyARun { path }) } else { self.clear() };
        }
        let mut entries = fs::read_dir(&path).map_err(|source| OutputError::io("read", &path, source))?;
        if entries.next().is_some() {
            return Err(OutputError::NotEmpty { path });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_run_holds_both_configs_as_given_and_opens_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs/one");
        let run = RunDir::create(&path, "name: one # mine\n", "name: one\nseed: 0\n").unwrap();
        assert_eq!(fs::read_to_string(run.config()).unwrap(), "name: one # mine\n");
        assert_eq!(fs::read_to_string(run.resolved()).unwrap(), "name: one\nseed: 0\n");
        assert!(run.tensorboard().is_dir() && run.checkpoints().is_dir());
        assert_eq!(RunDir::open(&path).unwrap(), run);
    }

    #[test]
    fn refuses_what_is_not_an_empty_folder_and_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let check = |name: &str, prepare: &dyn Fn(&Path), says: &str| {
            let path = folder.path().join(name);
            prepare(&path);
            let message = RunDir::create(&path, "", "").unwrap_err().to_string();
            assert!(message.contains(says) && message.contains(path.to_str().unwrap()), "{message}");
        };
        let run = |path: &Path| drop(RunDir::create(path, "", "").unwrap());
        let with_step = |path: &Path| {
            run(path);
            fs::write(path.join("metrics.jsonl"), "{\"step\": 0}\n{\"step\": 1}\n").unwrap();
        };
        check("run", &with_step, "--resume");
        let with_evaluation = |path: &Path| {
            run(path);
            fs::write(path.join("metrics.jsonl"), "{\"step\": 0}\n").unwrap();
        };
        check("evaluation", &with_evaluation, "--resume");
        let with_checkpoint = |path: &Path| {
            run(path);
            fs::create_dir(path.join("checkpoints/step_000000")).unwrap();
        };
        check("checkpoint", &with_checkpoint, "--resume");
        let with_notes = |path: &Path| {
            run(path);
            fs::write(path.join("notes.txt"), "").unwrap();
        };
        check("notes", &with_notes, "--resume");
        check("file", &|path| fs::write(path, "").unwrap(), "not a folder");
        let other = |path: &Path| {
            fs::create_dir(path).unwrap();
            fs::write(path.join("thesis.tex"), "").unwrap();
        };
        check("other", &other, "not empty");
        assert!(folder.path().join("other/thesis.tex").exists());
        fs::create_dir(folder.path().join("empty")).unwrap();
        run(&folder.path().join("empty"));
    }

    #[test]
    fn a_run_that_ended_before_its_first_step_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let first = RunDir::create(&path, "a", "a").unwrap();
        fs::write(first.metrics(), "").unwrap();
        fs::write(first.tensorboard().join("events"), "").unwrap();
        // While a process starts it or writes it, it is not.
        let is_in_use = || matches!(RunDir::create(&path, "b", "b"), Err(OutputError::InUse { .. }));
        let kept = first.keep().unwrap();
        assert!(is_in_use());
        drop(kept);
        let lock = first.lock().unwrap();
        assert!(is_in_use());
        drop(lock);
        let second = RunDir::create(&path, "b", "b").unwrap();
        assert_eq!(fs::read_to_string(second.config()).unwrap(), "b");
        assert!(!second.metrics().exists() && fs::read_dir(second.tensorboard()).unwrap().next().is_none());
    }

    #[test]
    fn opening_needs_a_run() {
        let folder = tempfile::tempdir().unwrap();
        let error = RunDir::open(folder.path()).unwrap_err();
        assert!(matches!(&error, OutputError::NotARun { missing: CONFIG, .. }), "{error}");
    }

    #[test]
    fn one_process_at_a_time_writes_a_run() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::create(&folder.path().join("run"), "", "").unwrap();
        let lock = run.lock().unwrap();
        let error = RunDir::open(run.path()).unwrap().lock().unwrap_err();
        assert!(matches!(&error, OutputError::InUse { path } if path == run.path()), "{error}");
        assert!(Lock::is_at(run.path(), lock.mark()), "who failed has left the mark");
        let before = lock.mark().to_owned();
        drop(lock);
        let lock = run.lock().unwrap();
        assert!(Lock::is_at(run.path(), lock.mark()) && !Lock::is_at(run.path(), &before));
    }

    #[test]
    fn the_default_path_is_named_by_time_and_never_taken() {
        let runs = tempfile::tempdir().unwrap();
        let now: Zoned = "2026-03-04T05:06:07+00:00[UTC]".parse().unwrap();
        let check = |name: &str, expected: &str| {
            let path = RunDir::default_path(runs.path(), name, &now);
            assert_eq!(path, runs.path().join(expected));
            RunDir::create(&path, "", "").unwrap();
        };
        check("sort", "sort-20260304-050607");
        check("sort", "sort-20260304-050607-2");
        check("sort", "sort-20260304-050607-3");
        check("../a b", "..-a-b-20260304-050607");
    }
}
