//! Tests of the whole strategy layer; ranks are threads.

mod checkpoints;
mod experts;
mod expressed;
mod folders;
mod four_bits;
mod fp16;
mod frozen;
mod harness;
mod images;
mod moments;
mod offload;
mod passes;
mod plain_loop;
mod plan;
mod precision;
mod seals;
mod sequence;
mod shard_groups;
mod shared;
mod split;
mod stages;
mod streamed;
mod targets;
mod tensor;
