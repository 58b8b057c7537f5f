//! Kernels that a device compiles at run time, a file for each family of `kernels/`.

pub(crate) mod arguments;
pub(crate) mod attention;
mod cache;
pub(crate) mod decode;
pub(crate) mod diffusion;
pub(crate) mod experts;
pub(crate) mod launch;
pub(crate) mod model;
pub(crate) mod product;
pub(crate) mod rows;
pub(crate) mod sample;
pub(crate) mod source;
pub(crate) mod strategy;

pub(crate) use arguments::Heads;
pub use cache::cache_kernels_in;
pub(crate) use cache::cached;
pub(crate) use launch::device_of;
use launch::{grid, launch};
use source::source_text;
pub(crate) use source::{Architecture, Source};

/// All files of kernels. A device without the first counts as one without kernels.
pub(crate) const SOURCES: [Source; 13] = [
    strategy::SOURCE,
    model::SOURCE,
    diffusion::SOURCE,
    decode::F32_SOURCE,
    decode::BF16_SOURCE,
    decode::MATRIX_SOURCE,
    sample::SOURCE,
    product::SOURCE,
    product::SOURCE_128,
    product::SOURCE_MANY,
    experts::SOURCE,
    attention::SOURCE,
    attention::BACKWARD_SOURCE,
];
