//! The fields of a YAML file, their defaults and their ranges: [`Config`], and the tree with positions that it is read from.
//!
//! Nothing here opens a file or asks the machine; [`prepare`](crate::prepare) does both. Every error names the field, points
//! at the line or the `--set` to blame, and gives a right value. `schema` has the top level, and each other file a section.

mod algorithm;
mod data;
mod de;
mod diffusion;
mod environment;
mod error;
mod image_reward;
mod include;
mod metrics;
mod model;
mod offline;
mod optimizer;
mod reward;
mod reward_model;
mod schema;
mod stage;
mod steps;
mod tree;

pub use algorithm::*;
pub use data::*;
pub(crate) use de::from_node;
pub use diffusion::*;
pub use environment::{EnvironmentConfig, Speaker};
pub use error::{Error, Invalid};
pub(crate) use error::{Problem, Source, list, suggestion};
pub use image_reward::*;
#[cfg(test)]
pub(crate) use include::READY;
pub(crate) use include::include_strategies;
pub use metrics::{Listen, MetricsConfig};
pub use model::{DiffusersConfig, FolderConfig, LoraConfig};
pub use offline::*;
pub use optimizer::*;
pub use reward::*;
pub(crate) use reward_model::host;
pub use reward_model::*;
pub use schema::*;
pub use stage::ZeroStage;
pub(crate) use steps::whole_steps;
pub use steps::{DataEpochs, Measure, Steps};
pub(crate) use tree::Node;

impl Config {
    /// The config as YAML with every field, defaults included: reading it gives the same config again.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("plain data can be written as YAML")
    }
}
