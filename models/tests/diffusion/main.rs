//! Diffusion models, block by block, compared with references.

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
