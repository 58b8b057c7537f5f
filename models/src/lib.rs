//! Models as stacks of blocks with hand-written forward and backward passes, and generation with them.
//!
//! Read in this order: [`model`] (the contract between a model and the holder of its weights), [`batch`] (a
//! decoder's input), [`decoder`] (the blocks), then [`generation`]. [`diffusion`] has image and video models,
//! [`clip`] and [`t5`] their text encoders. [`hf`] reads and writes the folders of published models. This
//! crate knows no ranks, shards, configuration files or vendors: weights come as tensors, and gradients go
//! into tensors.
#![forbid(unsafe_code)]

mod autograd;
pub mod batch;
pub mod clip;
mod cut;
pub mod decoder;
pub mod diffusion;
mod error;
pub mod footprint;
pub mod generation;
pub mod hf;
pub mod init;
mod measured;
pub mod model;
pub mod passes;
mod random;
mod router;
mod routes;
mod slice;
pub mod t5;

pub use batch::{PackedBatch, Sequence, Teacher, targets_in};
pub use cut::{Cut, Run};
pub use decoder::{
    Activation, AdapterShape, BlockWork, Decoder, DecoderConfig, DeepseekV3, ExpertNames, ExpertParts,
    ExpertsConfig, Expressed, HiddenModel, IlqlGrad, IlqlModel, IlqlScores, KvCache, LoraConfig, LoraTarget,
    LoraTargets, ModulePattern, Multipliers, NormPlaces, OfAction, OtherRope, PackedSize, Pairs, QkNorm,
    RopeScaling, SlidingWindow, ValueHead, ValueModel, WithIlqlHeads, lora_scale,
};
pub use error::{Error, Result};
pub use footprint::{BlockBytes, Footprint, Runs};
pub use generation::{Completion, Engine, KeptSteps, Request, Sample, SamplingParams};
pub use model::{
    Grads, Model, Output, OutputGrad, ParamSpec, Saved, Scores, ScoresGrad, Unit, UnitGrads, Weights,
};
pub use random::normals;
pub use router::{OTHERS, RouterSums, RouterWatch};
pub use routes::{RouteShape, Routes};
pub use slice::{Peers, Room, Sharers, absent, join_columns};
