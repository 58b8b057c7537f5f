//! Tests of the decoder as a whole.

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
