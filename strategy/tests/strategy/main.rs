//! The strategy layer as a whole; ranks are threads here.

mod checkpoints;
mod fp16;
mod frozen;
mod images;
mod offload;
mod passes;
mod plain_loop;
mod plan;
mod precision;
mod seals;
mod shared;
mod stages;
mod streamed;
mod world;
