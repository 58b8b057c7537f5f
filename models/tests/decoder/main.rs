//! Tests of the whole decoder.

mod eight_bits;
mod format;
mod generation;
mod gguf;
mod golden;
mod hf;
mod holder;
mod ilql;
mod lora;
mod prefix_cache;
mod properties;
mod recorded;
mod routes;
mod speculation;
mod teacher;
mod value;
