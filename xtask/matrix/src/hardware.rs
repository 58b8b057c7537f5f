//! Hardware of this machine, as reported by `anyroll doctor`.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;

use crate::Result;
use crate::matrix::{Backend, Cell};

/// Set if vendors' libraries are our shims: a pass on shims is no pass on hardware.
const SHIM: &str = "ANYROLL_SHIM";

/// A launcher's variables. A cell starts its own ranks, even if started by a launcher.
const PLACE: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];

/// The backends of this machine.
pub struct Hardware {
    backends: BTreeMap<String, Found>,
    /// True if the devices are shims.
    pub shims: bool,
}

#[derive(Deserialize)]
struct Doctor {
    backends: Vec<Found>,
}

#[derive(Deserialize)]
struct Found {
    name: String,
    reason: Option<String>,
    devices: Vec<Device>,
}

#[derive(Deserialize)]
struct Device {
    name: String,
}

impl Hardware {
    /// Runs `anyroll doctor`.
    pub fn ask() -> Result<Self> {
        let output = anyroll()?.args(["doctor", "--json"]).output();
        let output = output.map_err(|error| format!("anyroll doctor did not start: {error}"))?;
        let doctor: Doctor = serde_json::from_slice(&output.stdout).map_err(|error| {
            format!("anyroll doctor: {error}\n{}", String::from_utf8_lossy(&output.stderr))
        })?;
        let backends = doctor.backends.into_iter().map(|found| (found.name.clone(), found)).collect();
        Ok(Self { backends, shims: env::var_os(SHIM).is_some() })
    }

    /// Returns the reason why a cell cannot run on this machine, if any.
    pub fn lacks(&self, cell: &Cell, backend: &Backend) -> Option<String> {
        let Some(found) = self.backends.get(&cell.backend) else {
            return Some(format!("this version does not have the backend {}", cell.backend));
        };
        if let Some(reason) = &found.reason {
            return Some(reason.clone());
        }
        let devices = found.devices.len();
        let enough = devices >= cell.devices || backend.ranks_share_a_device && devices > 0;
        (!enough).then(|| format!("{devices} of {} devices are present", cell.devices))
    }

    /// Returns the name of a backend's first device.
    pub fn device(&self, backend: &str) -> Option<&str> {
        self.backends.get(backend)?.devices.first().map(|device| device.name.as_str())
    }
}

/// Returns the `anyroll` next to this program, without a launcher's variables.
pub fn anyroll() -> Result<Command> {
    let own = env::current_exe().map_err(|error| format!("cannot find this program's path: {error}"))?;
    let program: PathBuf = own.with_file_name("anyroll");
    if !program.is_file() {
        return Err(format!(
            "no {}: start this with `cargo xtask matrix`, which builds it",
            program.display()
        ));
    }
    let mut command = Command::new(program);
    for name in PLACE {
        command.env_remove(name);
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_needs_its_backend_and_so_many_devices() {
        let found = |json| serde_json::from_str::<Doctor>(json).unwrap().backends;
        let backends = found(
            r#"{"backends": [
                {"name": "gpu", "available": true, "reason": null, "devices": [{"name": "A"}, {"name": "A"}]},
                {"name": "old", "available": false, "reason": "no libold.so", "devices": []}]}"#,
        );
        let backends = backends.into_iter().map(|found| (found.name.clone(), found)).collect();
        let hardware = Hardware { backends, shims: false };
        let check = |backend: &str, devices, ranks_share_a_device, expected: Option<&str>| {
            let cell = Cell {
                name: "a".into(),
                backend: backend.into(),
                devices,
                zero_stage: None,
                precision: None,
                pipeline: "conformance".into(),
                tolerance: None,
                time_limit_s: 1,
            };
            let own = Backend { runs_on: vec![], setup: vec![], curves: "gpu".into(), ranks_share_a_device };
            assert_eq!(hardware.lacks(&cell, &own).as_deref(), expected);
        };
        check("gpu", 2, false, None);
        check("gpu", 4, false, Some("2 of 4 devices are present"));
        check("gpu", 4, true, None);
        check("old", 1, true, Some("no libold.so"));
        check("new", 1, false, Some("this version does not have the backend new"));
    }
}
