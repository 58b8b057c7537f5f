//! Models of images, block by block, against references.

mod clip;
mod dit;
mod folder;
mod golden;
mod lora;
mod passes;
mod sd3;
mod text_encoders;
mod tiles;
mod vae;
mod wan;
mod wan_vae;
