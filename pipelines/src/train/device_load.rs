//! Use of the ranks' devices and of their processes' memory, read once a step.

use anyroll_backends::DeviceLoad;

use super::{Exchange, reduced};
use crate::{Result, metrics::Metrics, process_memory::size_bytes};

reduced! {
    /// Use of all ranks' devices.
    struct Load {
        /// Most bytes in use on a device.
        max used_bytes: f64,
        /// Largest share of a device's memory in use.
        max used_share: f64,
        /// Number of devices that report their memory.
        sum devices: f64,
        /// Sum of the shares of time in which devices were busy.
        sum busy: f64,
        /// Number of devices that report it.
        sum report_busy: f64,
        /// Most host memory of a process.
        max resident_bytes: f64,
    }
}

/// Returns metrics of all ranks' devices and processes; what no rank reports is left out. Every rank must call this.
pub(super) fn device_load(exchange: &Exchange) -> Result<Metrics> {
    let device = exchange.group().stream().device().load();
    Ok(exchange.reduce(&Load::of(device, size_bytes("VmRSS").ok()))?.metrics())
}

impl Load {
    fn of(device: Option<DeviceLoad>, resident_bytes: Option<u64>) -> Self {
        let mut load = Self { resident_bytes: resident_bytes.unwrap_or(0) as f64, ..Self::default() };
        if let Some(DeviceLoad { used_bytes, total_bytes, busy }) = device {
            load.used_bytes = used_bytes as f64;
            load.used_share = used_bytes as f64 / total_bytes.max(1) as f64;
            load.devices = 1.0;
            load.busy = busy.unwrap_or(0.0);
            load.report_busy = f64::from(u8::from(busy.is_some()));
        }
        load
    }

    fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::new();
        if self.devices > 0.0 {
            metrics.insert("perf/device_used_bytes", self.used_bytes);
            metrics.insert("perf/device_used_share", self.used_share);
        }
        if self.report_busy > 0.0 {
            metrics.insert("perf/device_utilization", self.busy / self.report_busy);
        }
        if self.resident_bytes > 0.0 {
            metrics.insert("perf/resident_bytes", self.resident_bytes);
        }
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::Reduce;

    #[test]
    fn ranks_are_reduced_and_what_none_reports_is_left_out() {
        let of = |used_bytes, busy, resident| {
            let device = DeviceLoad { used_bytes, total_bytes: 1000, busy };
            Load::of(Some(device), resident)
        };
        let metrics = |loads: Vec<Load>| {
            let mut all = Load::default();
            loads.into_iter().for_each(|load| all.reduce(load));
            all.metrics().iter().map(|(name, value)| (name.to_owned(), value)).collect::<Vec<_>>()
        };
        let expected = [
            ("perf/device_used_bytes", 600.0),
            ("perf/device_used_share", 0.6),
            ("perf/device_utilization", 0.75),
            ("perf/resident_bytes", 9.0),
        ];
        let loads = vec![of(600, Some(0.5), Some(8)), of(200, Some(1.0), Some(9)), of(0, None, None)];
        assert_eq!(metrics(loads), expected.map(|(name, value)| (name.to_owned(), value)));
        let silent = metrics(vec![of(600, None, None), Load::of(None, None)]);
        assert_eq!(
            silent.iter().map(|(name, _)| &**name).collect::<Vec<_>>(),
            ["perf/device_used_bytes", "perf/device_used_share"]
        );
        assert!(metrics(vec![Load::of(None, None)]).is_empty());
    }
}
