//! The shape of Stable Diffusion 3's transformer.

use crate::Result;
use crate::diffusion::TextWidths;
use crate::error::{check_config, check_layers};

/// The shape of an [`Sd3`](super::Sd3), with the field names of diffusers' `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sd3Config {
    /// Height and width of the latents that positions are scaled for.
    pub sample_size: i64,
    /// Height and width of a patch.
    pub patch_size: i64,
    /// Channels of the latents.
    pub in_channels: i64,
    /// Channels of the velocities.
    pub out_channels: i64,
    /// Number of joint blocks; at least 1.
    pub num_layers: usize,
    /// Width of a head; even.
    pub attention_head_dim: i64,
    /// Number of heads H. The inner size C is their total width; a multiple of 4.
    pub num_attention_heads: i64,
    /// Width of the text's tokens.
    pub joint_attention_dim: i64,
    /// Width of the pooled text vector.
    pub pooled_projection_dim: i64,
    /// Maximum number of patches per side.
    pub pos_embed_max_size: i64,
    /// Indices of joint blocks in which patches also attend among themselves (3.5).
    pub dual_attention_layers: Vec<usize>,
    /// True if queries and keys are normed per head (3.5): diffusers' `qk_norm: rms_norm`.
    pub qk_rms_norm: bool,
}

impl Sd3Config {
    /// Returns the widths of the texts that the model reads.
    pub fn text_widths(&self) -> TextWidths {
        TextWidths { token: self.joint_attention_dim, pooled: Some(self.pooled_projection_dim) }
    }

    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("sample_size", self.sample_size),
            ("patch_size", self.patch_size),
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("num_layers", self.num_layers as i64),
            ("attention_head_dim", self.attention_head_dim),
            ("num_attention_heads", self.num_attention_heads),
            ("joint_attention_dim", self.joint_attention_dim),
            ("pooled_projection_dim", self.pooled_projection_dim),
            ("pos_embed_max_size", self.pos_embed_max_size),
        ];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        check_layers("num_layers", self.num_layers)?;
        check_config(self.inner_dim() % 4 == 0, "attention_head_dim", || {
            format!(
                "makes an inner size of {}, must make a multiple of 4: positions are cosines and sines of two \
                     sides",
                self.inner_dim()
            )
        })?;
        check_config(self.sample_size >= self.patch_size, "sample_size", || {
            format!("is {}, must be at least patch_size = {}", self.sample_size, self.patch_size)
        })?;
        let last = self.dual_attention_layers.iter().max();
        check_config(last.is_none_or(|&last| last < self.num_layers), "dual_attention_layers", || {
            format!("are {:?}, must be below num_layers = {}", self.dual_attention_layers, self.num_layers)
        })
    }

    /// Returns the width of the residual stream C.
    pub(super) fn inner_dim(&self) -> i64 {
        self.num_attention_heads * self.attention_head_dim
    }
}
