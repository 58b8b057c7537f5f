//! A step's time on paper, for hosts that need not be here.

use anyroll_backends::Card;
use anyroll_config::Reduction;
use anyroll_pipelines::{
    NoTime, Result,
    plan::{
        Planner, Stages,
        time::{Cluster, Phase, Sheet, StepTime},
    },
    run::Run,
};
use clap::Args;
use serde_json::{Value, json};

/// Hosts, their links and their devices.
#[derive(Debug, Args)]
pub(super) struct TimeArgs {
    /// Plan a step's time, on so many hosts with equally many devices
    #[arg(long, value_name = "HOSTS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    #[arg(requires = "devices_per_host", conflicts_with = "world")]
    hosts: Option<u32>,
    /// Devices of each host, a rank each
    #[arg(long, value_name = "DEVICES", value_parser = clap::value_parser!(u32).range(1..=1024), requires = "hosts")]
    devices_per_host: Option<u32>,
    /// Rate at which a host sends to others, shared by its devices
    #[arg(long, value_name = "400Gb/s", value_parser = rate, requires = "hosts")]
    link: Option<f64>,
    /// The devices: A100, H100, H200, B200 or MI300X
    #[arg(long, value_name = "CARD", value_parser = card, requires = "hosts")]
    device: Option<Card>,
    /// Matrix products of a device in the config's precision, by its data sheet
    #[arg(long, value_name = "989TFLOP/s", value_parser = flops, requires = "hosts")]
    device_flops: Option<f64>,
    /// Memory of a device, by its data sheet
    #[arg(long, value_name = "4.8TB/s", value_parser = rate, requires = "hosts")]
    device_memory_rate: Option<f64>,
    /// Link of a device to others of its host, each way, by its data sheet
    #[arg(long, value_name = "450GB/s", value_parser = rate, requires = "hosts")]
    device_link: Option<f64>,
    /// Link of a device to host memory, each way, by its data sheet
    #[arg(long, value_name = "63GB/s", value_parser = rate, requires = "hosts")]
    host_link: Option<f64>,
}

impl TimeArgs {
    /// The hosts, if there are any.
    pub(super) fn cluster(&self) -> Result<Option<Cluster>, NoTime> {
        let (Some(hosts), Some(devices_per_host)) = (self.hosts, self.devices_per_host) else {
            return Ok(None);
        };
        if hosts > 1 && self.link.is_none() {
            return Err(NoTime::NoLink);
        }
        let figures = [
            ("--device-flops", self.device_flops, self.device.map(|card| card.flops)),
            ("--device-memory-rate", self.device_memory_rate, self.device.map(|card| card.memory)),
            ("--device-link", self.device_link, self.device.map(|card| card.in_host)),
            ("--host-link", self.host_link, self.device.map(|card| card.host_link)),
        ];
        let missing = figures.iter().filter(|(_, own, of_card)| own.or(*of_card).is_none());
        let missing: Vec<&str> = missing.map(|(option, ..)| *option).collect();
        if !missing.is_empty() {
            return Err(NoTime::NoDevice { missing: missing.join(", ") });
        }
        let [flops, memory, in_host, host_link] =
            figures.map(|(_, own, of_card)| own.or(of_card).expect("none is missing"));
        Ok(Some(Cluster {
            sheet: Sheet { flops, memory, in_host, host_link },
            is_16_bit: self.device_flops.is_none(),
            hosts: hosts as usize,
            devices_per_host: devices_per_host as usize,
            link: self.link,
        }))
    }

    fn device(&self) -> &'static str {
        self.device.map_or("devices", |card| card.name)
    }
}

/// Times of a step.
pub(super) struct Times {
    cluster: Cluster,
    device: &'static str,
    stage: u8,
    /// Ranks of a shard group.
    sharers: usize,
    /// The config's step.
    whole: StepTime,
    /// The same work of each device on one host alone.
    one_host: StepTime,
    /// Shards in each host and replicas across; `None` if it is the config's step, nothing is sharded, or there is one host.
    hybrid: Option<StepTime>,
    /// With sums by the library; `None` if the config has them, or there is one host.
    library: Option<StepTime>,
}

impl Times {
    pub(super) fn new(
        args: &TimeArgs,
        (planner, run): (&Planner, &Run),
        stages: Stages,
        cluster: Cluster,
    ) -> Result<Self> {
        let per_host = cluster.devices_per_host;
        let one = Cluster { hosts: 1, ..cluster };
        let sharers = run.policy.strategy.shard_group.ranks(cluster.world_size(), per_host);
        let is_hybrid = cluster.hosts > 1 && stages.policy > 0 && sharers != per_host;
        let hybrid = is_hybrid.then(|| planner.time(run, stages, &cluster, per_host)).transpose()?;
        let is_library = run.policy.strategy.reduction == Reduction::Library;
        let mut by_library = run.clone();
        by_library.policy.strategy.reduction = Reduction::Library;
        let library =
            (cluster.hosts > 1 && !is_library).then(|| planner.time(&by_library, stages, &cluster, sharers));
        Ok(Self {
            cluster,
            library: library.transpose()?,
            device: args.device(),
            stage: stages.policy,
            sharers,
            whole: planner.time(run, stages, &cluster, sharers)?,
            one_host: planner.time(run, stages, &one, sharers.min(per_host))?,
            hybrid,
        })
    }

    pub(super) fn text(&self) -> String {
        let Cluster { hosts, devices_per_host, link, .. } = self.cluster;
        let link = link.map_or(String::new(), |link| format!(", {} Gb/s of a host", link * 8.0 / 1e9));
        let mut text = format!(
            "\na step on paper, on {} of {devices_per_host} {}{link}; nothing of it is measured here\n\nZeRO {} over {}\n",
            if hosts == 1 { "1 host".to_owned() } else { format!("{hosts} hosts") },
            self.device,
            self.stage,
            match (self.sharers, self.cluster.world_size()) {
                (sharers, ranks) if sharers == ranks => format!("all {ranks} ranks"),
                (sharers, ranks) => format!("groups of {sharers} of {ranks} ranks"),
            },
        );
        text += &self.of(&self.whole);
        text.extend(self.library.iter().map(|library| {
            let tokens = library.training_tokens_per_s;
            format!("with `reduction: library`: {tokens:.0} tokens/s of a device in training\n")
        }));
        if let Some(hybrid) = &self.hybrid {
            text += &format!(
                "\nwith `shard_group: host`: shards in each host, replicas across\n{}",
                self.of(hybrid)
            );
        }
        text + &format!("not counted: {}\n", self.whole.not_counted.join("; "))
    }

    fn of(&self, step: &StepTime) -> String {
        let mut text = format!("{:<12}{:>10}{:>10}  bounded by\n", "phase", "seconds", "waiting");
        let all: f64 = step.phases.iter().map(|phase| phase.waited_s).sum();
        for Phase { name, seconds, waited_s, bound, .. } in &step.phases {
            let bound = if *seconds == 0.0 { "hidden" } else { bound };
            text += &format!("{name:<12}{seconds:>10.3}{waited_s:>10.3}  {bound}\n");
        }
        text += &format!("{:<12}{:>10.3}{all:>10.3}\n", "step", step.seconds);
        text += &format!(
            "tokens/s of a device: {:.0} in a step, {:.0} in training, at {:.0} % of its operations\n",
            step.tokens_per_s,
            step.training_tokens_per_s,
            100.0 * step.flops_utilization,
        );
        if self.cluster.hosts > 1 {
            text += &format!(
                "{:.0} % of one host's speed per device, {:.0} % in training\n",
                100.0 * self.one_host.seconds / step.seconds,
                100.0 * self.one_host.training_s / step.training_s,
            );
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "hosts": self.cluster.hosts,
            "devices_per_host": self.cluster.devices_per_host,
            "link_bytes_per_s": self.cluster.link,
            "step": self.whole,
            "one_host": self.one_host,
            "hybrid": self.hybrid,
            "library": self.library,
        })
    }
}

fn card(text: &str) -> std::result::Result<Card, String> {
    let names: Vec<&str> = Card::all().map(|card| card.name).collect();
    Card::find(text).ok_or_else(|| {
        format!(
            "not among {}: give `--device-flops`, `--device-memory-rate`, `--device-link` and `--host-link` instead",
            names.join(", ")
        )
    })
}

/// `400Gb/s` in bits or `50GB/s` in bytes, as bytes/s.
fn rate(text: &str) -> std::result::Result<f64, String> {
    const BITS: f64 = 1.0 / 8.0;
    const UNITS: [(&str, f64); 6] = [
        ("Tb/s", 1e12 * BITS),
        ("Gb/s", 1e9 * BITS),
        ("Mb/s", 1e6 * BITS),
        ("TB/s", 1e12),
        ("GB/s", 1e9),
        ("MB/s", 1e6),
    ];
    positive(text, &UNITS).ok_or_else(|| "write a rate such as 400Gb/s (bits) or 50GB/s (bytes)".into())
}

fn flops(text: &str) -> std::result::Result<f64, String> {
    const UNITS: [(&str, f64); 3] = [("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)];
    positive(text, &UNITS).ok_or_else(|| "write a rate such as 989TFLOP/s or 50GFLOP/s".into())
}

/// A number above 0 in one of the units.
fn positive(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, factor) =
        units.iter().find_map(|(unit, factor)| Some((text.trim().strip_suffix(unit)?, factor)))?;
    let value = number.trim().parse::<f64>().ok()? * factor;
    (value > 0.0 && value < 1e21).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::{card, flops, rate};

    #[test]
    fn rates_are_read_with_their_unit() {
        assert_eq!((rate("400Gb/s"), rate("50 GB/s"), rate("1.5Tb/s")), (Ok(50e9), Ok(50e9), Ok(187.5e9)));
        assert_eq!((rate("100Mb/s"), flops("989TFLOP/s")), (Ok(12.5e6), Ok(989e12)));
        for wrong in ["", "400", "Gb/s", "-1Gb/s", "0Gb/s", "nanGB/s", "infGB/s", "400 gb", "1e30TB/s"] {
            assert!(rate(wrong).unwrap_err().contains("400Gb/s"), "{wrong}");
        }
        assert!(flops("989").unwrap_err().contains("989TFLOP/s"));
        assert!(card("h100").is_ok());
        assert!(card("H2000").unwrap_err().contains("--device-flops"));
    }
}
