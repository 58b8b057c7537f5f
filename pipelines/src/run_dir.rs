//! The folder of a run: what lies in it and where.
//!
//! | path | what |
//! |---|---|
//! | `config.yaml` | the config as the user wrote it |
//! | `resolved.yaml` | what it resolved to; written last, so a folder that has it holds a run |
//! | `metrics.jsonl` | one object a step ([`crate::metrics`]) |
//! | `samples.jsonl` | the samples of the evaluations ([`crate::samples`]) |
//! | `report.html` | curves and samples for a browser ([`crate::report`]) |
//! | `tensorboard/` | event files, one per start ([`crate::tensorboard`]) |
//! | `checkpoints/` | what the run resumes from |
//! | `best/` | the checkpoint with the best held-out score, if `checkpoint.keep_best` is set |
//! | `lock` | locked by the process that writes the folder, which says in it who it is |

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;

use anyroll_strategy::checkpoint;
use jiff::{Timestamp, Zoned};

use crate::atomic_file::write_atomic;
use crate::output_error::{OutputError, Result};

const CONFIG: &str = "config.yaml";
const RESOLVED: &str = "resolved.yaml";
const LOCK: &str = "lock";

/// That a run folder is this process's.
#[derive(Debug)]
pub struct Lock {
    _file: File,
    mark: String,
}

impl Lock {
    /// What the file says of this process: no other has ever said it.
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// Whether the folder at `path`, as this host sees it, has the lock with that mark.
    pub fn is_at(path: &Path, mark: &str) -> bool {
        fs::read_to_string(path.join(LOCK)).is_ok_and(|found| found == mark)
    }
}

/// The folder of one run. A value of this type means that the folder exists and holds both configs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// The run folder that a path names, and the checkpoint if it is one: those of a run lie in its `checkpoints/`, the best
    /// one in the run itself.
    pub fn and_checkpoint(path: &Path) -> (PathBuf, Option<PathBuf>) {
        let is_checkpoint = checkpoint::is_at(path);
        let mut above = path.ancestors().skip(1).take(2);
        match above.find(|it| is_checkpoint && RunDir::open(it).is_ok()) {
            Some(run) => (run.to_owned(), Some(path.to_owned())),
            None => (path.to_owned(), None),
        }
    }

    /// Makes the folder of a new run at `path`, with its parents, and writes both configs.
    ///
    /// # Errors
    /// [`OutputError::AlreadyARun`], [`OutputError::NotEmpty`] and [`OutputError::NotAFolder`] if `path` is
    /// anything but absent or an empty folder. Of two processes that ask for one path at once, one gets it.
    pub fn create(path: &Path, config_as_written: &str, resolved_yaml: &str) -> Result<RunDir> {
        fs::create_dir_all(path).map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => OutputError::NotAFolder { path: path.to_owned() },
            _ => OutputError::io("create", path, source),
        })?;
        let run = RunDir { path: path.to_owned() };
        run.refuse_if_occupied()?;
        // Making a folder is atomic: this claims the run folder, whoever else just found it empty too.
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

    /// Claims the folder for this process, for as long as the lock that is returned lives. The system lets go of
    /// it however the process ends.
    ///
    /// # Errors
    /// [`OutputError::InUse`] while another process has it.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.path.join(LOCK);
        let io = |action| {
            let path = &path;
            move |source| OutputError::io(action, path, source)
        };
        // Emptied when it is this process's, and not before.
        let mut file =
            File::options().write(true).create(true).truncate(false).open(&path).map_err(io("create"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OutputError::InUse { path: self.path.clone() }),
            Err(TryLockError::Error(source)) => return Err(io("lock")(source)),
        }
        let mark = format!("process {} of {}", process::id(), Timestamp::now());
        let written = file.set_len(0).and_then(|()| file.write_all(mark.as_bytes()));
        written.and_then(|()| file.sync_all()).map_err(io("write"))?;
        Ok(Lock { _file: file, mark })
    }

    /// Where a run goes whose user names no folder: `runs/<name>-<YYYYmmdd-HHMMSS>`, in `now`'s time zone,
    /// with `-2`, `-3` and so on behind it if that exists. Characters of `name` that a shell or a file
    /// system could take otherwise become `-`.
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

    /// What the config resolved to.
    pub fn resolved(&self) -> PathBuf {
        self.path.join(RESOLVED)
    }

    /// One JSON object a step.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// One JSON object a sample of an evaluation.
    pub fn samples(&self) -> PathBuf {
        self.path.join("samples.jsonl")
    }

    /// What a model of images painted at a step's evaluation.
    pub fn picture(&self, step: u64) -> PathBuf {
        self.pictures().join(format!("step_{step:06}.png"))
    }

    /// The steps that have a picture, in order.
    ///
    /// # Errors
    /// If the folder of the pictures is there and cannot be read.
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

    /// The folder of the pictures, which a run without any lacks.
    pub fn pictures(&self) -> PathBuf {
        self.path.join("pictures")
    }

    /// The page for a browser.
    pub fn report(&self) -> PathBuf {
        self.path.join("report.html")
    }

    /// The folder of the event files.
    pub fn tensorboard(&self) -> PathBuf {
        self.path.join("tensorboard")
    }

    /// The folder of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    fn refuse_if_occupied(&self) -> Result<()> {
        let path = self.path.clone();
        if self.resolved().exists() {
            return Err(OutputError::AlreadyARun { path });
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
        check("run", &run, "--resume");
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
