//! Tests of the decoder as a whole.

mod generation;
mod golden;
mod hf;
mod holder;
mod properties;
