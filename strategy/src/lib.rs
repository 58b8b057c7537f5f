//! Who holds which part of a model while it trains: flat shards, gathers, reductions, the optimizer and its
//! checkpoints.
//!
//! Read in this order: [`layout`] is how parameters lie in a flat buffer, [`Zero`] the one implementation of the
//! ZeRO stages over it, [`AdamW`] and [`Schedule`] how it steps, [`State`] what can leave the device between
//! steps, [`checkpoint`] how it is kept on disk, [`plan`] what it will all take. Nothing here knows what a reward is, nor which vendor made the
//! device.

#![forbid(unsafe_code)]

pub mod checkpoint;
mod config;
pub mod disk;
mod error;
pub mod layout;
mod learnt;
mod loss_scale;
mod memory;
mod offload;
mod optimizer;
pub mod plan;
mod porter;
mod schedule;
mod weights;
mod zero;

pub use config::{AdamW, Decays, LossScale, ParamsOn, Precision, Recompute, StepsOn, ZeroConfig, ZeroStage};
pub use error::{Error, Result};
pub use offload::State;
pub use optimizer::{StepStats, Stepped};
pub use schedule::Schedule;
pub use weights::{Weights, shared};
pub use zero::{Tape, Zero};
