//! The decoder of latents in the folder `vae` of a model in diffusers' format, for images or videos.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::diffusers::read_config;
use super::export::DIFFUSERS_STEM;
use super::weights::{WeightFiles, reads_files};
use super::{Result, field, validated};
use crate::diffusion::{VaeConfig, VaeDecoder, WanVaeConfig, WanVaeDecoder};
use crate::model::{Model, Unit};

/// A decoder's folder, opened and checked; as a source it provides the decoder's weights.
#[derive(Debug)]
pub struct LatentDecoderFolder {
    config: LatentDecoderConfig,
    weights: WeightFiles,
}

/// The shape of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub enum LatentDecoderConfig {
    /// `AutoencoderKL`.
    Images(VaeConfig),
    /// `AutoencoderKLWan`.
    Videos(WanVaeConfig),
}

impl LatentDecoderConfig {
    /// Returns the frames and pixels per side of a latent.
    pub fn zoom(&self) -> (i64, i64) {
        match self {
            Self::Images(config) => (1, config.zoom()),
            Self::Videos(config) => (config.zoom_in_time(), config.zoom()),
        }
    }
}

impl LatentDecoderFolder {
    /// Returns the shape.
    pub fn config(&self) -> &LatentDecoderConfig {
        &self.config
    }

    pub(super) fn of_images(folder: &Path, variant: Option<&str>) -> Result<Self> {
        let config = read_config::<VaeFile>(folder, "AutoencoderKL")?.into_config(folder)?;
        let decoder = VaeDecoder::new(config.clone(), false).expect("just validated");
        Self::with_weights(folder, variant, LatentDecoderConfig::Images(config), decoder.units())
    }

    /// Opens the decoder for latents of `channels` channels; `zoom` holds the frames and the pixels per side
    /// of a latent.
    pub(super) fn of_videos(
        folder: &Path,
        channels: i64,
        zoom: (i64, i64),
        variant: Option<&str>,
    ) -> Result<Self> {
        let config = read_config::<WanVaeFile>(folder, WAN)?.into_config(folder, channels, zoom)?;
        let decoder = WanVaeDecoder::new(config.clone()).expect("just validated");
        Self::with_weights(folder, variant, LatentDecoderConfig::Videos(config), decoder.units())
    }

    fn with_weights(
        folder: &Path,
        variant: Option<&str>,
        config: LatentDecoderConfig,
        units: &[Unit],
    ) -> Result<Self> {
        let weights = WeightFiles::open_variant(folder, DIFFUSERS_STEM, variant)?;
        let of_encoder = |name: &str| name.starts_with("encoder.") || name.starts_with("quant_conv.");
        weights.check(units, of_encoder)?;
        Ok(Self { config, weights })
    }
}

reads_files!(LatentDecoderFolder);

/// Fields read from an `AutoencoderKL`'s `config.json`.
#[derive(Deserialize)]
struct VaeFile {
    latent_channels: i64,
    out_channels: i64,
    block_out_channels: Vec<i64>,
    layers_per_block: usize,
    norm_num_groups: i64,
    scaling_factor: f64,
    shift_factor: Option<f64>,
    up_block_types: Vec<String>,
    #[serde(default = "yes")]
    use_post_quant_conv: bool,
    #[serde(default = "yes")]
    mid_block_add_attention: bool,
    act_fn: Option<String>,
    latents_mean: Option<Value>,
    latents_std: Option<Value>,
}

impl VaeFile {
    fn into_config(self, folder: &Path) -> Result<VaeConfig> {
        let path = folder.join("config.json");
        let refuse = |holds: bool, name: &str, problem: &str| {
            if holds { Ok(()) } else { Err(field(&path, name, problem)) }
        };
        let plain = self.up_block_types.iter().all(|kind| kind == "UpDecoderBlock2D");
        refuse(plain, "up_block_types", "must all be `UpDecoderBlock2D`")?;
        refuse(self.mid_block_add_attention, "mid_block_add_attention", "is false, must be true")?;
        let silu = self.act_fn.as_deref().is_none_or(|name| name == "silu");
        refuse(silu, "act_fn", "must be `silu`")?;
        let scaled = self.latents_mean.is_none() && self.latents_std.is_none();
        refuse(
            scaled,
            "latents_mean",
            "or `latents_std` is set, but only one scaling factor and one shift are supported",
        )?;
        let config = VaeConfig {
            latent_channels: self.latent_channels,
            out_channels: self.out_channels,
            block_out_channels: self.block_out_channels,
            layers_per_block: self.layers_per_block,
            norm_num_groups: self.norm_num_groups,
            scaling_factor: self.scaling_factor,
            shift_factor: self.shift_factor.unwrap_or(0.0),
            use_post_quant_conv: self.use_post_quant_conv,
        };
        validated(&path, config.validate())?;
        Ok(config)
    }
}

fn yes() -> bool {
    true
}

/// The class of Wan's autoencoder.
const WAN: &str = "AutoencoderKLWan";

/// Returns the frames and pixels per side of a latent of Wan's autoencoder, even if the autoencoder is not
/// supported.
pub(super) fn video_zoom(folder: &Path) -> Result<(i64, i64)> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default = "four")]
        scale_factor_temporal: i64,
        #[serde(default = "eight")]
        scale_factor_spatial: i64,
    }
    let file: File = read_config(folder, WAN)?;
    let path = folder.join("config.json");
    let (in_time, of_sides) = (file.scale_factor_temporal, file.scale_factor_spatial);
    if in_time < 1 || of_sides < 1 {
        return Err(field(&path, "scale_factor_spatial", "or `scale_factor_temporal` is below 1"));
    }
    Ok((in_time, of_sides))
}

fn four() -> i64 {
    4
}

fn eight() -> i64 {
    8
}

/// Fields read from an `AutoencoderKLWan`'s `config.json`. `attn_scales` applies only to the encoder, in
/// diffusers too.
#[derive(Deserialize)]
struct WanVaeFile {
    base_dim: i64,
    decoder_base_dim: Option<i64>,
    z_dim: i64,
    dim_mult: Vec<i64>,
    num_res_blocks: usize,
    temperal_downsample: Vec<bool>,
    latents_mean: Vec<f64>,
    latents_std: Vec<f64>,
    #[serde(default)]
    is_residual: bool,
    #[serde(default = "three")]
    out_channels: i64,
    patch_size: Option<i64>,
}

impl WanVaeFile {
    fn into_config(self, folder: &Path, channels: i64, zoom: (i64, i64)) -> Result<WanVaeConfig> {
        let path = folder.join("config.json");
        let refuse = |holds: bool, name: &str, problem: &str| {
            if holds { Ok(()) } else { Err(field(&path, name, problem)) }
        };
        let config = WanVaeConfig {
            base_dim: self.decoder_base_dim.unwrap_or(self.base_dim),
            z_dim: self.z_dim,
            dim_mult: self.dim_mult,
            num_res_blocks: self.num_res_blocks,
            temperal_downsample: self.temperal_downsample,
            latents_mean: self.latents_mean,
            latents_std: self.latents_std,
            out_channels: self.out_channels,
            patch_size: self.patch_size.unwrap_or(1),
            is_residual: self.is_residual,
        };
        validated(&path, config.validate())?;
        let problem = format!("is {}, but the transformer's latents have {channels} channels", config.z_dim);
        refuse(config.z_dim == channels, "z_dim", &problem)?;
        for (name, told, made) in [
            ("scale_factor_temporal", zoom.0, config.zoom_in_time()),
            ("scale_factor_spatial", zoom.1, config.zoom()),
        ] {
            let problem = format!("is {told}, but the file describes a decoder with {made}");
            refuse(told == made, name, &problem)?;
        }
        Ok(config)
    }
}

fn three() -> i64 {
    3
}
