//! Sharded training of a model: flat shards, gathers, reductions, the optimizer and checkpoints.
//!
//! Read in this order: [`layout`] places parameters in a flat buffer, [`Zero`] implements all ZeRO stages
//! over it, [`AdamW`] and [`Schedule`] set how it steps. [`State`] names what can leave the device between
//! steps, [`checkpoint`] saves a model to disk. [`plan`] computes memory sizes beforehand, and [`timeline`] a step's
//! time. This crate knows neither rewards nor vendors.

#![forbid(unsafe_code)]

pub mod checkpoint;
mod config;
mod copy_thread;
pub mod disk;
mod divergence;
mod error;
pub mod layout;
mod loss_scale;
mod memory;
mod mesh;
mod moments;
mod offload_arena;
mod optimizer;
pub mod plan;
mod schedule;
mod settings;
mod state;
pub mod timeline;
mod traffic;
mod walk;
mod weights;
mod zero;

pub use config::{AdamW, ParamsOn, StepsOn, ZeroConfig, ZeroStage};
pub use error::{Error, Result};
pub use mesh::{Mesh, neighbours, peers};
pub use optimizer::{StepStats, Stepped};
pub use schedule::Schedule;
pub use settings::{Decays, Fp16Config, FrozenWeights, Moments, Precision, Recompute};
pub use state::State;
pub use traffic::Exchanged;
pub use weights::{Weights, shared};
pub use zero::{Tape, Zero};
