//! The `aesthetic` reward: predicted human preference, by a head on a CLIP.

use anyroll_config::AestheticConfig;
use anyroll_models::{
    clip::Head,
    hf::{ClipFolder, HeadFile},
};
use tch::{Device, Tensor};

use super::clip::ImageTower;
use crate::Result;

/// Image tower of a CLIP with a head.
#[derive(Debug)]
pub struct AestheticScorer {
    tower: ImageTower,
    head: Head,
}

impl AestheticScorer {
    /// Loads the tower and the head on `device`.
    pub fn new(config: &AestheticConfig, device: Device) -> Result<Self> {
        let folder = ClipFolder::open(&config.clip).map_err(anyroll_models::Error::from)?;
        let head = HeadFile::open(&config.head, folder.config().projection_dim)
            .map_err(anyroll_models::Error::from)?;
        Ok(Self { tower: ImageTower::read(&folder, config.dtype, device)?, head: head.load(device)? })
    }

    /// Score of each image: fp32 `[B]`. `images` are -1 to 1; other values are clamped.
    pub fn score(&self, images: &Tensor) -> Result<Tensor> {
        Ok(self.head.score(&self.tower.vectors(images)?)?)
    }
}
