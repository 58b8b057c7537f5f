//! `anyroll doctor --test`: the quickstart for some steps, in a folder that is then deleted.

use std::{
    fs::{self, File},
    io,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyroll_backends::BackendKind;
use anyroll_pipelines::{Error, Result};
use serde_json::Value;

use super::{
    quickstart::{CONFIG, engine},
    stdout::print,
};

/// Changes that make the run short.
const SHORT: [&str; 10] = [
    "pipeline.rlvr.data.sort.digits=3",
    "pipeline.rlvr.warmup.steps=20",
    "pipeline.rlvr.warmup.optimizer.schedule.constant.warmup_steps=5",
    "pipeline.rlvr.steps=4",
    "pipeline.rlvr.prompts_per_step=8",
    "pipeline.rlvr.group_size=4",
    "pipeline.rlvr.optimizer.schedule.linear.warmup_steps=1",
    "pipeline.rlvr.rollout.max_new_tokens=4",
    "pipeline.rlvr.evaluation.prompts=20",
    "strategy.micro_batch_size=8",
];
/// Step of the run's last line of metrics.
const LAST_STEP: u64 = 4;
/// Variables of launchers, by which the run would take itself for a rank of another job.
const LAUNCHERS: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];
/// Time in which the slowest machine finishes.
const DEADLINE: Duration = Duration::from_secs(180);

/// Trains and reports the time. Without a backend, on the first available.
pub(super) fn test(backend: Option<BackendKind>) -> Result<u8> {
    let scratch = tempfile::tempdir().map_err(|error| failed(format!("no scratch folder: {error}")))?;
    let backend = backend.map_or("auto", BackendKind::name);
    let start = Instant::now();
    let run = train(scratch.path(), backend)?;
    let greedy = last_accuracy(&scratch.path().join("run/metrics.jsonl"))?;
    print(format_args!(
        "{run}\nworks: {LAST_STEP} steps in {:.1} s, held-out accuracy {greedy:.2}\n",
        start.elapsed().as_secs_f64()
    ))?;
    Ok(0)
}

/// Runs the short quickstart in `folder`, and returns its description.
fn train(folder: &Path, backend: &str) -> Result<String> {
    let at = |name: &str| folder.join(name);
    let io_failed = |error: io::Error| failed(format!("{}: {error}", folder.display()));
    fs::write(at("quickstart.yaml"), CONFIG).map_err(io_failed)?;
    let program = engine()?;
    let mut command = Command::new(&program);
    command.arg("run").arg(at("quickstart.yaml")).arg("--output").arg(at("run"));
    command.args(["--set", &format!("backend={backend}")]).args(SHORT.iter().flat_map(|set| ["--set", set]));
    for name in LAUNCHERS {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command.stdout(File::create(at("stdout")).map_err(io_failed)?);
    command.stderr(File::create(at("stderr")).map_err(io_failed)?);
    let mut child = command.spawn().map_err(|source| Error::Program { program, source })?;
    let status = ended(&mut child).map_err(io_failed)?;
    let said = |name: &str| fs::read_to_string(at(name)).unwrap_or_default();
    let output = said("stdout") + &said("stderr");
    let reason = match status {
        // The run's first line is "GRPO, 102336 parameters, fp32 on 1 x cpu; everything lands in ...".
        Some(status) if status.success() => {
            let line = output.lines().find_map(|line| line.split_once("; everything lands in"));
            return line.map(|(run, _)| run.to_owned()).ok_or_else(|| failed(output.clone()));
        }
        Some(status) => status.to_string(),
        None => format!("the run did not end in {} s", DEADLINE.as_secs()),
    };
    Err(failed(format!("{reason}\n{output}")))
}

/// Waits for the run; kills it after the deadline and returns nothing.
fn ended(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < DEADLINE {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(20));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// Returns the accuracy after the last step.
fn last_accuracy(metrics: &Path) -> Result<f64> {
    let text = fs::read_to_string(metrics).unwrap_or_default();
    let last: Value =
        text.lines().last().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
    let accuracy = last["eval/greedy"].as_f64().filter(|_| last["step"] == LAST_STEP);
    accuracy.ok_or_else(|| failed(format!("its metrics end with `{last}`")))
}

fn failed(problem: String) -> Error {
    Error::Trial { problem }
}
