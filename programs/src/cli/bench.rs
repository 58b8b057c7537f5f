//! `anyroll doctor --bench`: measured speed of this machine's devices, compared with the vendors' limits.

use std::{env, fs, path::Path, time::Duration};

use anyroll_backends::{
    BackendKind, CollectiveGroup, DeviceId, Reduction, connect_with, devices, diagnose, open,
};
use anyroll_pipelines::{
    Error, Result,
    atomic_file::write_atomic,
    launch::{self, LaunchPlan, Rank},
    measure::{Bench, Figure, Sizes, Unit},
};
use serde::{Deserialize, Serialize};

use super::stdout::print;

/// File in which rank 0 leaves the results for the parent that started it.
const FIGURES: &str = "ANYROLL_FIGURES";
/// Longer than any measurement.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Number of ranks on a host, which has no fixed number of devices.
const HOST_RANKS: usize = 2;

/// Results of a benchmark.
#[derive(Debug, Deserialize, Serialize)]
struct Report {
    backend: String,
    device: String,
    ranks: usize,
    figures: Vec<Figure>,
}

/// Benchmarks `backend`, or the first available one.
pub(super) fn bench(backend: Option<BackendKind>, json: bool) -> Result<u8> {
    launch::watch_parent();
    let is_there = |kind: &BackendKind| kind.runs_models() && devices(*kind).is_ok();
    let found = || BackendKind::all().find(is_there).expect("the host is always there");
    let backend = backend.unwrap_or_else(found);
    if !backend.runs_models() {
        let what = "products, which `--bench` measures: libtorch does not compute on it".into();
        return Err(anyroll_backends::Error::Unsupported { backend, what }.into());
    }
    match Rank::from_env()? {
        Some(rank) => work(backend, &rank),
        None => supervise(backend, json),
    }
}

fn supervise(backend: BackendKind, json: bool) -> Result<u8> {
    let found = devices(backend)?;
    let world_size = if backend.is_host() { HOST_RANKS } else { found.len() };
    let folder = tempfile::tempdir().map_err(Error::Bench)?;
    let file = folder.path().join("figures.json");
    let plan = LaunchPlan {
        program: env::current_exe().map_err(Error::Bench)?,
        args: env::args_os().skip(1).collect(),
        local_ranks: world_size,
        threads: (std::thread::available_parallelism().map_or(1, usize::from) / world_size).max(1),
        env: vec![(FIGURES.into(), file.clone().into())],
    };
    let outcome = launch::launch(&plan, &mut launch::Interrupts::catch()?)?;
    if outcome == launch::Outcome::Interrupted {
        return Ok(outcome.exit_code());
    }
    let text = fs::read_to_string(&file).map_err(Error::Bench)?;
    let report: Report = serde_json::from_str(&text).map_err(std::io::Error::from).map_err(Error::Bench)?;
    print(if json { text } else { table(&report) })?;
    Ok(0)
}

/// Runs a rank: measures, and on rank 0 hands over the results.
fn work(backend: BackendKind, rank: &Rank) -> Result<u8> {
    let ordinal = if backend.is_host() { 0 } else { rank.local_rank };
    let device = open(DeviceId { backend, ordinal })?;
    let rendezvous = rank.rendezvous(TIMEOUT);
    let group = |name, reduction| {
        let comm = connect_with(reduction, &*device, &rendezvous)?;
        CollectiveGroup::new(name, comm, &device, TIMEOUT)
    };
    let in_order = group("in rank order", Reduction::Ordered)?;
    // The host has no communication library that sums.
    let library = match backend.is_host() {
        true => None,
        false => Some(group("library", Reduction::Library)?),
    };
    let limits = diagnose(device.id())?.limits;
    let name = device.info().name;
    let bench = Bench { device, limits, group: in_order, library, sizes: Sizes::of(backend.is_host()) };
    let figures = bench.run()?;
    if rank.rank == 0 {
        let report = Report { backend: backend.to_string(), device: name, ranks: rank.world_size, figures };
        let text = serde_json::to_string_pretty(&report).expect("plain data") + "\n";
        match env::var_os(FIGURES) {
            Some(path) => write_atomic(Path::new(&path), text.as_bytes())?,
            None => drop(print(table(&report))?),
        }
    }
    Ok(0)
}

fn table(report: &Report) -> String {
    let Report { backend, device, ranks, figures } = report;
    let mut text = format!("{backend}: {device}, {ranks} ranks; all at once unless said otherwise\n\n");
    let wide = figures.iter().map(|figure| figure.what.len()).max().unwrap_or(0);
    for Figure { what, seconds, per_s, unit, limit } in figures {
        let (scale, unit) = match unit {
            Unit::Bytes => (1e9, "GB/s"),
            Unit::Operations => (1e12, "TFLOP/s"),
        };
        let limit = match limit {
            Some(limit) => format!("{:3.0} % of {:.0}", 100.0 * per_s / limit, limit / scale),
            None => "-".into(),
        };
        let (ms, rate) = (seconds * 1e3, per_s / scale);
        text += &format!("{what:<wide$}  {ms:9.3} ms  {rate:8.1} {unit:<7}  {limit}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_stands_beside_its_limit() {
        let figure = |what: &str, per_s, unit, limit| Figure {
            what: what.into(),
            seconds: 0.0195,
            per_s,
            unit,
            limit,
        };
        let figures = vec![
            figure("copy", 55.1e9, Unit::Bytes, Some(63.0e9)),
            figure("a product", 788.4e12, Unit::Operations, None),
        ];
        let report = Report { backend: "cuda".into(), device: "a GPU".into(), ranks: 4, figures };
        let text = table(&report);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines[0], "copy          19.500 ms      55.1 GB/s      87 % of 63");
        assert_eq!(lines[1], "a product     19.500 ms     788.4 TFLOP/s  -");
    }
}
