//! Models of images, block by block, against references.

mod dit;
mod golden;
mod passes;
mod sd3;
mod vae;
