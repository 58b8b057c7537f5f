//! The strategy layer as a whole; ranks are threads here.

mod frozen;
mod offload;
mod passes;
mod precision;
mod stages;
mod world;
