//! `anyroll conformance`: checks a backend's contract on this machine.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyroll_backends::{BackendKind, Device, DeviceId, Reduction, devices, open};
use anyroll_conformance::{
    Counts, Outcome, Peers, Status, collective_suite, device_suite, failure_suite, table,
};
use anyroll_pipelines::{
    Error, Result,
    atomic_file::write_atomic,
    launch::{self, LaunchPlan, Rank},
};
use clap::Args;
use serde::Serialize;

use super::{
    doctor::{self, BackendReport, TorchReport},
    log_to,
    stdout::print,
};

/// File in which rank 0 leaves the outcomes of all ranks for the parent that started them.
const OUTCOMES: &str = "ANYROLL_OUTCOMES";

#[derive(Debug, Args)]
pub(super) struct ConformanceArgs {
    /// The backend to check
    #[arg(long, default_value = "cpu")]
    backend: BackendKind,
    /// Numbers of ranks to check the collectives with [default: 1 to 4, or up to the number of devices if
    /// each rank needs its own]
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u16).range(1..))]
    world_size: Vec<u16>,
    /// Run only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Also write every outcome as JSON, with a description of the machine: the file to send with a patch
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Check the communication library's own sums, as with `strategy.reduction: library`
    #[arg(long)]
    library_sums: bool,
    /// Limit of the suite's waits in seconds; a single case may take half of it
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    timeout_s: f64,
}

/// The report that a vendor sends: what ran, on which machine, and the outcome of each case.
#[derive(Debug, Serialize)]
struct Report<'a> {
    anyroll: &'static str,
    /// Time at which the last case ended, in UTC.
    at: String,
    /// The command line.
    command: Vec<String>,
    system: System,
    torch: TorchReport,
    backend: BackendReport,
    counts: Counts,
    outcomes: &'a [Outcome],
}

/// The host.
#[derive(Debug, Serialize)]
struct System {
    architecture: &'static str,
    /// `PRETTY_NAME` of the distribution.
    distribution: Option<String>,
    kernel: Option<String>,
}

impl<'a> Report<'a> {
    fn of(args: &ConformanceArgs, outcomes: &'a [Outcome]) -> Self {
        Self {
            anyroll: env!("CARGO_PKG_VERSION"),
            at: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            command: env::args_os().skip(1).map(|it| it.to_string_lossy().into_owned()).collect(),
            system: System::this(),
            torch: doctor::torch(),
            backend: doctor::backend(args.backend),
            counts: Counts::of(outcomes),
            outcomes,
        }
    }
}

impl System {
    fn this() -> Self {
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").ok();
        Self {
            architecture: env::consts::ARCH,
            distribution: name.map(|name| name.trim_matches('"').to_owned()),
            kernel: kernel.map(|kernel| kernel.trim().to_owned()),
        }
    }
}

/// Returns exit code 0 only if no case failed. With `ANYROLL_LOG=info` each rank logs a case when it begins.
pub(super) fn conformance(args: &ConformanceArgs) -> Result<u8> {
    launch::watch_parent();
    match Rank::from_env()? {
        Some(rank) => work(args, &rank),
        None => supervise(args),
    }
}

/// Starts a job for each world size and prints the outcomes of all.
fn supervise(args: &ConformanceArgs) -> Result<u8> {
    let outcomes = match devices(args.backend) {
        Ok(found) => {
            let most = if args.backend.shares_devices() { 4 } else { found.len().min(4) };
            let default: Vec<usize> = (1..=most).collect();
            let asked: Vec<usize> = args.world_size.iter().copied().map(usize::from).collect();
            run_jobs(if asked.is_empty() { &default } else { &asked })?
        }
        // An unavailable backend is a failure, so that a vendor's machine shows what is missing.
        Err(error) => vec![Outcome {
            group: args.backend.to_string(),
            name: "every case".into(),
            status: Status::Skipped(error.to_string()),
            elapsed_s: 0.0,
        }],
    };
    if outcomes.is_empty() {
        let filter = args.filter.as_deref().unwrap_or_default();
        return Err(Error::NoCase { filter: filter.to_owned() });
    }
    print(table(&outcomes))?;
    if let Some(path) = &args.report {
        let report = serde_json::to_string_pretty(&Report::of(args, &outcomes)).expect("plain data");
        write_atomic(path, report.as_bytes())?;
    }
    let counts = Counts::of(&outcomes);
    Ok(u8::from(counts.failed > 0 || counts.passed == 0))
}

fn run_jobs(world_sizes: &[usize]) -> Result<Vec<Outcome>> {
    let folder = tempfile::tempdir().map_err(Error::Conformance)?;
    let mut outcomes = Vec::new();
    for world_size in world_sizes {
        let file = folder.path().join(format!("outcomes_{world_size}.json"));
        let plan = LaunchPlan {
            program: env::current_exe().map_err(Error::Conformance)?,
            args: env::args_os().skip(1).collect(),
            local_ranks: *world_size,
            threads: 1,
            env: vec![(OUTCOMES.into(), file.clone().into())],
        };
        if launch::launch(&plan, &mut launch::Interrupts::catch()?)? == launch::Outcome::Interrupted {
            return Err(Error::Conformance(std::io::ErrorKind::Interrupted.into()));
        }
        let bytes = fs::read(&file).map_err(Error::Conformance)?;
        outcomes.extend(
            serde_json::from_slice::<Vec<Outcome>>(&bytes)
                .map_err(std::io::Error::from)
                .map_err(Error::Conformance)?,
        );
    }
    Ok(outcomes)
}

/// Runs a rank: checks, and on rank 0 hands over the outcomes of all.
fn work(args: &ConformanceArgs, rank: &Rank) -> Result<u8> {
    log_to(io::stderr);
    let ordinal = match args.backend.shares_devices() {
        true => rank.local_rank % devices(args.backend)?.len(),
        false => rank.local_rank,
    };
    let device: Arc<dyn Device> = open(DeviceId { backend: args.backend, ordinal })?;
    let filter = args.filter.as_deref();
    let mut outcomes = if rank.world_size == 1 { device_suite(&device, filter) } else { Vec::new() };
    let rendezvous = rank.rendezvous(Duration::from_secs_f64(args.timeout_s));
    let reduction = if args.library_sums { Reduction::Library } else { Reduction::Ordered };
    let peers = Peers::connect(device, &rendezvous, reduction)?;
    outcomes.extend(collective_suite(&peers, filter));
    outcomes.extend(failure_suite(&peers, filter));
    if rank.rank == 0 {
        let bytes = serde_json::to_vec(&outcomes).expect("outcomes are plain data");
        match env::var_os(OUTCOMES) {
            Some(path) => write_atomic(Path::new(&path), &bytes)?,
            None => drop(print(table(&outcomes))?),
        }
    }
    Ok(u8::from(Counts::of(&outcomes).failed > 0 && env::var_os(OUTCOMES).is_none()))
}
