//! Runs of `anyroll`: both sides at once, and one that is interrupted and resumed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::compare::{self, Checkpoints};
use crate::list::{Model, Run};
use crate::{Programs, Result};

/// Timeout of a run of the list.
const DEADLINE: Duration = Duration::from_secs(600);

/// Makes runs.
pub struct Runner<'a> {
    /// The checkout, from which both sides run, so that paths in `resolved.yaml` are equal.
    pub root: &'a Path,
    /// The programs of REV.
    pub old: &'a Programs,
    /// The programs of the working tree.
    pub new: &'a Programs,
    /// The folder of all run folders.
    pub folder: PathBuf,
}

/// A finished run.
pub struct Made<'a> {
    programs: &'a Programs,
    folder: PathBuf,
}

impl<'a> Runner<'a> {
    /// Trains and exports models with the older programs.
    pub fn make_models(&self, models: &[(&str, Model)]) -> Result<()> {
        for (name, Model { config, set, .. }) in models {
            let run = Run {
                name: format!("model_{name}"),
                config: config.clone(),
                set: set.clone(),
                resumed: false,
            };
            let made = self.finished(self.start(self.old, &run, "old")?)?;
            let to = self.models().join(name);
            export(self.root, self.old, &made.folder, &to)?;
        }
        Ok(())
    }

    fn models(&self) -> PathBuf {
        self.folder.join("models")
    }

    /// Makes the run with both programs, side by side.
    pub fn both(&self, run: &Run) -> Result<(Made<'a>, Made<'a>)> {
        let (old, new) = (self.start(self.old, run, "old")?, self.start(self.new, run, "new")?);
        let (old, new) = (self.finished(old), self.finished(new));
        Ok((old?, new?))
    }

    /// Begins the run with `begins`, interrupts it after a step or more, and resumes it with the newer
    /// programs. `side` names its folder.
    pub fn interrupted_and_resumed(&self, run: &Run, begins: &'a Programs, side: &str) -> Result<Made<'a>> {
        let mut started = self.start(begins, run, side)?;
        let metrics = started.folder.join("metrics.jsonl");
        // The record of step 0 and that of the first step.
        while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 2 {
            if started.child.try_wait().map_err(|error| error.to_string())?.is_some() {
                return Err(started.reason("ended before it was interrupted"));
            }
            started.check_deadline()?;
            thread::sleep(Duration::from_millis(5));
        }
        kill(Pid::from_raw(started.child.id() as i32), Signal::SIGINT).map_err(|error| error.to_string())?;
        started.wait()?;
        let said = started.said();
        if !said.contains("interrupted after step") {
            return Err(started.reason("was not interrupted: give it more steps"));
        }
        let folder = started.folder;
        let args = ["run".into(), "--resume".into(), folder.clone().into_os_string()];
        self.finished(self.spawn(self.new, &args, folder)?)
    }

    /// Differences between two runs, one line each; empty if the runs are equal.
    pub fn differences(&self, old: &Made, new: &Made) -> Result<Vec<String>> {
        let mut all = compare::folders(&old.folder, &new.folder)?;
        match compare::checkpoints(&old.folder, &new.folder)? {
            Checkpoints::Equal => {}
            // Another format, perhaps, of equal weights.
            Checkpoints::Differ(reason) => match (self.weights(old), self.weights(new)) {
                (Ok(old), Ok(new)) => {
                    all.extend(compare::files(&old, &new)?.map(|it| format!("{reason}; {it}")))
                }
                (Err(failed), _) | (_, Err(failed)) => all.push(format!("{reason}; {failed}")),
            },
        }
        Ok(all)
    }

    /// Returns the exported weights of a run, which is exported once.
    fn weights(&self, made: &Made) -> Result<PathBuf> {
        let to = made.folder.with_extension("export");
        if !to.exists() {
            export(self.root, made.programs, &made.folder, &to)?;
        }
        Ok(to.join("model.safetensors"))
    }

    fn start(&self, programs: &'a Programs, run: &Run, side: &str) -> Result<Started<'a>> {
        let folder = self.folder.join(&run.name).join(side);
        let mut args = vec!["run".into(), run.config.clone().into_os_string(), "--output".into()];
        args.push(folder.clone().into_os_string());
        for set in &run.set {
            let models = self.models();
            args.extend(["--set".into(), set.replace("{models}", &models.to_string_lossy()).into()]);
        }
        self.spawn(programs, &args, folder)
    }

    fn spawn(&self, programs: &'a Programs, args: &[OsString], folder: PathBuf) -> Result<Started<'a>> {
        let log = folder.with_extension("log");
        let parent = log.parent().unwrap_or(self.root);
        let file = fs::create_dir_all(parent).and_then(|()| File::create(&log));
        let file = file.map_err(|error| format!("cannot write {}: {error}", log.display()))?;
        let second = file.try_clone().map_err(|error| error.to_string())?;
        let mut command = Command::new(programs.anyroll());
        command.args(args).current_dir(self.root).stdin(Stdio::null()).stdout(file).stderr(second);
        let child = command.spawn().map_err(|error| format!("anyroll did not start: {error}"))?;
        Ok(Started { programs, child, folder, log, since: Instant::now() })
    }

    fn finished(&self, mut started: Started<'a>) -> Result<Made<'a>> {
        match started.wait()? {
            Some(0) => Ok(Made { programs: started.programs, folder: started.folder }),
            _ => Err(started.reason("failed")),
        }
    }
}

struct Started<'a> {
    programs: &'a Programs,
    child: Child,
    folder: PathBuf,
    log: PathBuf,
    since: Instant,
}

impl Started<'_> {
    /// Waits for the process to end, and returns its exit code, if it has one.
    fn wait(&mut self) -> Result<Option<i32>> {
        loop {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                return Ok(status.code());
            }
            self.check_deadline()?;
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn check_deadline(&mut self) -> Result<()> {
        if self.since.elapsed() < DEADLINE {
            return Ok(());
        }
        let _ = self.child.kill();
        Err(self.reason(&format!("took longer than {} s", DEADLINE.as_secs())))
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn reason(&self, what: &str) -> String {
        let said = self.said();
        let lines: Vec<&str> = said.lines().collect();
        let last = lines[lines.len().saturating_sub(12)..].join("\n");
        format!("{} {what}:\n{last}", self.folder.display())
    }
}

/// Writes the model of the run at `run` to the new folder `to`.
fn export(root: &Path, programs: &Programs, run: &Path, to: &Path) -> Result<()> {
    let mut command = Command::new(programs.anyroll());
    command.arg("export").arg(run).arg("--to").arg(to).current_dir(root);
    let ended = command.output().map_err(|error| format!("anyroll did not start: {error}"))?;
    match ended.status.success() {
        true => Ok(()),
        false => Err(format!("cannot export {}: {}", run.display(), String::from_utf8_lossy(&ended.stderr))),
    }
}
