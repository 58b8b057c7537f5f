//! Kernels that a device compiles at run time, a file for each family of `kernels/`.

pub(crate) mod arguments;
pub(crate) mod attention;
mod cache;
pub(crate) mod decode;
pub(crate) mod diffusion;
pub(crate) mod eight_bits;
pub(crate) mod exchange;
pub(crate) mod experts;
pub(crate) mod four_bits;
pub(crate) mod launch;
pub(crate) mod model;
pub(crate) mod narrow;
pub(crate) mod product;
pub(crate) mod product_eight;
pub(crate) mod rows;
pub(crate) mod sample;
pub(crate) mod source;
pub(crate) mod strategy;

pub(crate) use arguments::Heads;
pub use cache::cache_kernels_in;
pub(crate) use cache::cached;
pub(crate) use launch::device_of;
use launch::{grid, launch};
pub(crate) use narrow::Narrow;
use source::source_text;
pub(crate) use source::{Architecture, Source};

/// Files of kernels by family.
const FAMILIES: [&[Source]; 12] = [
    &[strategy::SOURCE, model::SOURCE, diffusion::SOURCE, four_bits::SOURCE, eight_bits::SOURCE],
    &decode::SOURCES,
    &decode::MATRIX_SOURCES,
    &sample::SOURCES,
    &product::SOURCES,
    &product::SOURCES_128,
    &product::SOURCES_MANY,
    &product_eight::SOURCES,
    &experts::SOURCES,
    &exchange::SOURCES,
    &attention::SOURCES,
    &attention::BACKWARD_SOURCES,
];

/// All files of kernels. A device without the first counts as one without kernels.
pub(crate) const SOURCES: [Source; 30] = {
    let mut sources = [strategy::SOURCE; 30];
    let (mut count, mut family) = (0, 0);
    while family < FAMILIES.len() {
        let mut index = 0;
        while index < FAMILIES[family].len() {
            sources[count] = FAMILIES[family][index];
            count += 1;
            index += 1;
        }
        family += 1;
    }
    assert!(count == sources.len(), "the number of all files");
    sources
};
