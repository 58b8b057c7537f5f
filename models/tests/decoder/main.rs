//! Tests of the decoder as a whole.

mod generation;
mod golden;
mod holder;
mod properties;
