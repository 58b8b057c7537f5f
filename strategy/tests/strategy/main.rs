//! The strategy layer as a whole; ranks are threads here.

mod frozen;
mod offload;
mod precision;
mod stages;
mod world;
