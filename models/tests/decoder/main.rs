//! Tests of the whole decoder.

mod format;
mod generation;
mod golden;
mod hf;
mod holder;
mod kept;
mod lora;
mod properties;
mod recorded;
mod teacher;
mod value;
