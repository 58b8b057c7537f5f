//! To come.

pub mod algorithm;
