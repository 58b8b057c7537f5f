//! The fields of a YAML file, their defaults and their ranges: [`Config`], and the tree with the positions of the
//! fields.
//!
//! Nothing here opens a file or queries the machine; `prepare` does both. Every error names the field, points at the
//! line or the `--set` to blame, and has a fix. `schema` has the top level, and most other files a section, which
//! reports its problems to the [`Problems`] of the file.

#![forbid(unsafe_code)]

mod algorithm;
mod critic;
mod data;
mod de;
mod decoder;
mod diffusion;
mod diffusion_method;
mod endpoint;
mod environment;
mod error;
pub mod error_chain;
mod image_reward;
mod include;
mod metrics;
mod model;
mod offline;
mod optimizer;
mod problem;
mod reward;
mod reward_model;
mod rlvr;
mod roles;
mod sampler;
mod schema;
mod stage;
mod stand_ins;
mod steps;
mod strategy;
mod tree;

pub use algorithm::*;
pub use critic::*;
pub use data::*;
pub use de::{Reading, from_node};
pub use decoder::*;
pub use diffusion::*;
pub use diffusion_method::*;
pub use endpoint::*;
pub use environment::{EnvironmentConfig, Speaker};
pub use error::{Error, Invalid};
pub use error::{Source, list, suggestion};
pub use image_reward::*;
pub use include::READY;
pub use include::include_strategies;
pub use metrics::{Listen, MetricsConfig};
pub use model::{DiffusersConfig, FolderConfig, LoraConfig};
pub use offline::*;
pub use optimizer::*;
pub use problem::{Problem, Problems, Section};
pub use reward::*;
pub use reward_model::host;
pub use reward_model::*;
pub use rlvr::*;
pub use roles::*;
pub use sampler::*;
pub use schema::*;
pub use stage::ZeroStage;
pub use steps::whole_steps;
pub use steps::{DataEpochs, Measure, Steps};
pub use strategy::*;
pub use tree::Node;

impl Config {
    /// Returns the config as YAML with every field, defaults included; reading the YAML returns the same config.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("plain data can be written as YAML")
    }
}
