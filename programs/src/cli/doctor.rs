//! `anyroll doctor`: the backends of this machine, with the reason for each that is unavailable.

use std::{fs, path::PathBuf};

use anyroll_backends::{BackendKind, DeviceInfo, diagnose, open, ops};
use anyroll_libtorch::Torch;
use anyroll_pipelines::Result;
use serde::Serialize;

use super::stdout::print;

#[derive(Debug, Serialize)]
struct Report {
    anyroll: &'static str,
    torch: TorchReport,
    backends: Vec<BackendReport>,
}

#[derive(Debug, Serialize)]
pub(super) struct TorchReport {
    /// Folder of the libraries that this process has loaded.
    path: Option<PathBuf>,
    pub(super) version: Option<String>,
    threads: i32,
}

#[derive(Debug, Serialize)]
pub(super) struct BackendReport {
    name: &'static str,
    available: bool,
    /// Reason why it is unavailable.
    reason: Option<String>,
    /// Attempts, in order.
    tried: Vec<String>,
    devices: Vec<DeviceReport>,
}

#[derive(Debug, Serialize)]
struct DeviceReport {
    id: String,
    name: String,
    details: Vec<(String, String)>,
    free_bytes: Option<usize>,
    total_bytes: Option<usize>,
}

pub(super) fn doctor(json: bool) -> Result<u8> {
    let backends = BackendKind::all().map(backend).collect();
    let report = Report { anyroll: env!("CARGO_PKG_VERSION"), torch: torch(), backends };
    print(match json {
        true => serde_json::to_string_pretty(&report).expect("plain data") + "\n",
        false => text(&report),
    })?;
    Ok(0)
}

/// State of a backend: its devices, or the reason why it is unavailable.
pub(super) fn backend(kind: BackendKind) -> BackendReport {
    let (devices, reason, tried) = match anyroll_backends::devices(kind) {
        Ok(devices) => (devices, None, Vec::new()),
        Err(anyroll_backends::Error::Unavailable { reason, tried, .. }) => (Vec::new(), Some(reason), tried),
        Err(error) => (Vec::new(), Some(error.to_string()), Vec::new()),
    };
    let devices: Vec<DeviceReport> = devices.into_iter().map(device).collect();
    BackendReport { name: kind.name(), available: reason.is_none(), reason, tried, devices }
}

fn device(info: DeviceInfo) -> DeviceReport {
    let DeviceInfo { id, name, mut details, .. } = info;
    match diagnose(id) {
        Ok(more) => details.extend(more.details),
        Err(error) => details.push(("links".into(), error.to_string())),
    }
    let device = open(id).ok();
    if let Some(device) = device.as_deref().filter(|_| id.backend.runs_models()) {
        let decoding = match ops::records_steps(device) {
            Ok(()) => "recorded steps".to_owned(),
            Err(reason) => format!("ordinary operations: {reason}"),
        };
        details.push(("decoding".into(), decoding));
    }
    let memory = device.and_then(|device| device.memory_info().ok());
    DeviceReport {
        id: id.to_string(),
        name,
        details,
        free_bytes: memory.map(|memory| memory.free_bytes),
        total_bytes: memory.map(|memory| memory.total_bytes),
    }
}

/// The libtorch that is mapped into this process.
pub(super) fn torch() -> TorchReport {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let library = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.ends_with("libtorch_cpu.so"));
    let path = library.and_then(|library| Some(PathBuf::from(library).parent()?.to_owned()));
    let version = path.as_deref().and_then(|lib| Torch::open(lib).ok()).map(|torch| torch.version);
    TorchReport { path, version, threads: tch::get_num_threads() }
}

fn text(report: &Report) -> String {
    let torch = &report.torch;
    let path = torch.path.as_ref().map_or_else(|| "?".into(), |path| path.display().to_string());
    let mut lines = vec![
        format!("anyroll {}", report.anyroll),
        format!("torch   {} at {path}, {} threads", torch.version.as_deref().unwrap_or("?"), torch.threads),
        String::new(),
    ];
    for backend in &report.backends {
        match &backend.reason {
            None => lines.push(format!("{:<8} available", backend.name)),
            Some(reason) => lines.push(format!("{:<8} not available: {reason}", backend.name)),
        }
        lines.extend(backend.tried.iter().map(|tried| format!("         tried {tried}")));
        for device in &backend.devices {
            let gib = |bytes: Option<usize>| {
                bytes.map_or_else(|| "?".into(), |b| format!("{:.1}", b as f64 / f64::from(1 << 30)))
            };
            let (free, total) = (gib(device.free_bytes), gib(device.total_bytes));
            lines.push(format!("         {} {}: {free} of {total} GiB free", device.id, device.name));
            lines.extend(device.details.iter().map(|(name, value)| format!("           {name}: {value}")));
        }
    }
    lines.join("\n") + "\n"
}
