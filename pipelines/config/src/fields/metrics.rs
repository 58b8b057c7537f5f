//! The `metrics` section: the publication of a run's metrics while the run continues.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::reward::python3;
use crate::document::Section;

/// Publication of the metrics while the run continues. Several trackers may be named; each is a Python process on rank
/// 0's host.
///
/// ```yaml
/// metrics:
///   wandb: {project: sorting, tags: [grpo]}
///   mlflow: {experiment: sorting}
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Address of the Prometheus endpoint `/metrics` on rank 0's host: a port of the loopback interface, such as
    /// `9400`, or an address, such as `0.0.0.0:9400`. Default: no endpoint.
    pub prometheus: Option<Listen>,
    /// Weights & Biases, which gets metrics, samples, advice and the config. Default: it gets nothing.
    pub wandb: Option<WandbConfig>,
    /// trackio, which gets the same. Default: it gets nothing.
    pub trackio: Option<TrackioConfig>,
    /// MLflow, which gets the same. Default: it gets nothing.
    pub mlflow: Option<MlflowConfig>,
    /// The interpreter, whose Python environment has the packages of the trackers. Default `python3`.
    pub python: String,
    /// Maximum time for the trackers to send the rest at the end of the run, in seconds; above 0, at most 3600. Default
    /// 60.
    pub finish_timeout_s: f64,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self {
            prometheus: None,
            wandb: None,
            trackio: None,
            mlflow: None,
            python: python3(),
            finish_timeout_s: 60.0,
        }
    }
}

/// A run of Weights & Biases. A resumed run continues the same one.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WandbConfig {
    /// The project to write to.
    pub project: String,
    /// The user or team that owns the project. Default: wandb's own.
    #[serde(default)]
    pub entity: Option<String>,
    /// Name of the run there. Default: the config's `name`.
    #[serde(default)]
    pub name: Option<String>,
    /// Group of runs that it belongs to. Default: none.
    #[serde(default)]
    pub group: Option<String>,
    /// Tags of the run. Default: none.
    #[serde(default)]
    pub tags: Vec<String>,
    /// Destination of the data. Default: wandb's own, which is `online` unless `WANDB_MODE` is set.
    #[serde(default)]
    pub mode: Option<WandbMode>,
}

/// Destination of wandb's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WandbMode {
    /// The server, at once.
    Online,
    /// The folder `wandb/` in the run folder, for `wandb sync`.
    Offline,
    /// Nowhere.
    Disabled,
}

/// A run of trackio, named as the run folder. A resumed run continues the same one.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TrackioConfig {
    /// The project to write to.
    pub project: String,
}

/// A run of MLflow. A resumed run continues the same one.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MlflowConfig {
    /// The experiment to write to, which is created if there is none of this name.
    pub experiment: String,
    /// Address of the server or store, such as `http://127.0.0.1:5000` or `sqlite:///mlflow.db`. Default: MLflow's own,
    /// which `MLFLOW_TRACKING_URI` sets.
    #[serde(default)]
    pub tracking_uri: Option<String>,
}

/// Names of all trackers: their fields, and their packages.
const TRACKERS: [&str; 3] = ["wandb", "trackio", "mlflow"];

impl MetricsConfig {
    /// Returns the names of the trackers that the config has.
    pub fn trackers(&self) -> impl Iterator<Item = &'static str> {
        let named = [self.wandb.is_some(), self.trackio.is_some(), self.mlflow.is_some()];
        TRACKERS.into_iter().zip(named).filter_map(|(name, is_named)| is_named.then_some(name))
    }

    /// Returns true if a tracker is named.
    pub fn has_trackers(&self) -> bool {
        self.trackers().next().is_some()
    }

    pub(super) fn validate(&self, at: &Section) {
        if let Some(wandb) = &self.wandb {
            wandb.validate(&at.below("wandb"));
        }
        if let Some(trackio) = &self.trackio {
            is_named("trackio.project", &trackio.project, at);
        }
        if let Some(mlflow) = &self.mlflow {
            is_named("mlflow.experiment", &mlflow.experiment, at);
            let uri = mlflow.tracking_uri.as_deref();
            let help = "write an address such as `http://127.0.0.1:5000`, or leave it out";
            at.ensure(uri != Some(""), "mlflow.tracking_uri", "it is empty", help);
        }
        at.seconds("finish_timeout_s", self.finish_timeout_s);
        let plain = Self::default();
        let trackers = at.given(&TRACKERS).when(!self.has_trackers());
        for (name, is_default) in [
            ("python", self.python == plain.python),
            ("finish_timeout_s", self.finish_timeout_s == plain.finish_timeout_s),
        ] {
            let help = "leave it out, or name `wandb`, `trackio` or `mlflow`";
            trackers.ensure(is_default, name, "it is of trackers, and none is named", help);
        }
    }
}

impl WandbConfig {
    /// The limits are wandb's own, which its server reports only after the start.
    fn validate(&self, at: &Section) {
        const REFUSED: &str = "/\\#?%:";
        if is_named("project", &self.project, at) {
            let holds =
                !self.project.contains(|it| REFUSED.contains(it)) && self.project.chars().count() <= 128;
            let message = format!("wandb has no project `{}`", self.project);
            at.ensure(
                holds,
                "project",
                message,
                format!("write at most 128 characters, and none of `{REFUSED}`"),
            );
        }
        let texts = [("entity", &self.entity), ("name", &self.name), ("group", &self.group)];
        for (name, text) in texts {
            at.ensure(text.as_deref() != Some(""), name, "it is empty", "write a name, or leave it out");
        }
        for (index, tag) in self.tags.iter().enumerate() {
            let holds = (1..=64).contains(&tag.chars().count());
            let message = format!("wandb has no tag `{tag}`");
            at.ensure(holds, &format!("tags[{index}]"), message, "write 1 to 64 characters");
        }
    }
}

fn is_named(field: &str, name: &str, at: &Section) -> bool {
    at.ensure(!name.trim().is_empty(), field, "it is empty", "write a name")
}

/// An address to listen on, written as a port or as `ADDRESS:PORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Listen(pub SocketAddr);

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListenVisitor;

        impl Visitor<'_> for ListenVisitor {
            type Value = Listen;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port such as 9400, or an address with one such as `0.0.0.0:9400`")
            }

            fn visit_u64<E: de::Error>(self, port: u64) -> Result<Listen, E> {
                match u16::try_from(port) {
                    Ok(port) if port > 0 => Ok(Listen((Ipv4Addr::LOCALHOST, port).into())),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(port), &self)),
                }
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Listen, E> {
                match text.parse::<SocketAddr>() {
                    Ok(address) if address.port() > 0 => Ok(Listen(address)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(ListenVisitor)
    }
}
