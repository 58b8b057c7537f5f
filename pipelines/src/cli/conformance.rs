//! `anyroll conformance`: the contract of a backend, checked on this machine.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyroll_backends::{BackendKind, Device, DeviceId, Reduction, Rendezvous, devices, open};
use anyroll_conformance::{
    Counts, Outcome, Peers, Status, collective_suite, device_suite, failure_suite, json, table,
};
use clap::Args;

use crate::{
    Error, Result,
    atomic_file::write_atomic,
    launch::{self, LaunchPlan, Rank},
};

/// Where rank 0 leaves what the ranks found, for the parent that started them.
const OUTCOMES: &str = "ANYROLL_OUTCOMES";

#[derive(Debug, Args)]
pub(super) struct ConformanceArgs {
    /// Which backend
    #[arg(long, default_value = "cpu")]
    backend: BackendKind,
    /// Numbers of ranks to check the collectives with; by default 1 to 4, or to the number of devices where each rank needs
    /// its own
    #[arg(long, value_delimiter = ',', value_name = "N,...")]
    world_size: Vec<usize>,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Also write every outcome as JSON
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Check the communication library's own sums, as with `strategy.reduction: library`
    #[arg(long)]
    library_sums: bool,
    /// Bounds the suite's waits: a case may take half of it
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    timeout_s: f64,
}

/// Exit code 0 only if no case failed.
pub(super) fn conformance(args: &ConformanceArgs) -> Result<u8> {
    launch::watch_parent();
    match Rank::from_env()? {
        Some(rank) => work(args, &rank),
        None => supervise(args),
    }
}

/// Starts a job for each world size and shows what all found.
fn supervise(args: &ConformanceArgs) -> Result<u8> {
    let outcomes = match devices(args.backend) {
        Ok(found) => {
            let most = if args.backend.shares_devices() { 4 } else { found.len().min(4) };
            let default: Vec<usize> = (1..=most).collect();
            run_jobs(if args.world_size.is_empty() { &default } else { &args.world_size })?
        }
        // Loud, and not a pass: a vendor's machine shows what is missing.
        Err(error) => vec![Outcome {
            group: args.backend.to_string(),
            name: "every case".into(),
            status: Status::Skipped(error.to_string()),
            elapsed_s: 0.0,
        }],
    };
    print!("{}", table(&outcomes));
    if let Some(path) = &args.report {
        write_atomic(path, json(&outcomes).as_bytes())?;
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
            world_size: *world_size,
            threads: 1,
            env: vec![(OUTCOMES.into(), file.clone().into())],
        };
        if launch::launch(&plan)? == launch::Outcome::Interrupted {
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

/// Is a rank: checks, and on rank 0 hands over what all found.
fn work(args: &ConformanceArgs, rank: &Rank) -> Result<u8> {
    let ordinal = match args.backend.shares_devices() {
        true => rank.local_rank % devices(args.backend)?.len(),
        false => rank.local_rank,
    };
    let device: Arc<dyn Device> = open(DeviceId { backend: args.backend, ordinal })?;
    let filter = args.filter.as_deref();
    let mut outcomes = if rank.world_size == 1 { device_suite(&device, filter) } else { Vec::new() };
    let rendezvous = Rendezvous {
        rank: rank.rank,
        world_size: rank.world_size,
        master_addr: rank.master_addr.clone(),
        master_port: rank.master_port,
        agent_store: rank.agent_store.clone(),
        timeout: Duration::from_secs_f64(args.timeout_s),
    };
    let reduction = if args.library_sums { Reduction::Library } else { Reduction::Ordered };
    let peers = Peers::connect(device, &rendezvous, reduction)?;
    outcomes.extend(collective_suite(&peers, filter));
    outcomes.extend(failure_suite(&peers, filter));
    if rank.rank == 0 {
        let bytes = serde_json::to_vec(&outcomes).expect("outcomes are plain data");
        match env::var_os(OUTCOMES) {
            Some(path) => write_atomic(Path::new(&path), &bytes)?,
            None => print!("{}", table(&outcomes)),
        }
    }
    Ok(u8::from(Counts::of(&outcomes).failed > 0 && env::var_os(OUTCOMES).is_none()))
}
