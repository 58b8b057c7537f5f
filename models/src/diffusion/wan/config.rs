//! The shape of Wan's transformer.

use crate::Result;
use crate::diffusion::TextWidths;
use crate::error::{check_config, check_layers};

/// The shape of a [`Wan`](super::Wan), with the field names of diffusers' `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct WanConfig {
    /// Frames, height and width of a patch.
    pub patch_size: [i64; 3],
    /// Number of heads H. The inner size C is their total width.
    pub num_attention_heads: i64,
    /// Width of a head; even, and a third of it, too.
    pub attention_head_dim: i64,
    /// Channels of the latents, and of the velocities.
    pub in_channels: i64,
    /// Width of the text's tokens.
    pub text_dim: i64,
    /// Number of cosines and sines that encode sigma; even.
    pub freq_dim: i64,
    /// Width of the feed-forward's hidden layer.
    pub ffn_dim: i64,
    /// Number of blocks; at least 1.
    pub num_layers: usize,
    /// True if the input of the attention to the text is normed, with a weight and a bias.
    pub cross_attn_norm: bool,
    /// Added to the variance or the mean square in norms.
    pub eps: f64,
    /// Maximum number of patches per side, and in time.
    pub rope_max_seq_len: i64,
    /// For a pair of transformers of this shape: the first is used down to this sigma, the second below it.
    /// `None` for a single transformer.
    pub boundary_ratio: Option<f64>,
}

/// Prefixes of the parameter names of a pair: the first transformer's and the second's.
pub const EXPERTS: [&str; 2] = ["transformer.", "transformer_2."];

impl WanConfig {
    /// Returns the widths of the texts that the model reads.
    pub fn text_widths(&self) -> TextWidths {
        TextWidths { token: self.text_dim, pooled: None }
    }

    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("patch_size", self.patch_size.into_iter().min().unwrap_or(0)),
            ("num_attention_heads", self.num_attention_heads),
            ("attention_head_dim", self.attention_head_dim),
            ("in_channels", self.in_channels),
            ("text_dim", self.text_dim),
            ("freq_dim", self.freq_dim),
            ("ffn_dim", self.ffn_dim),
            ("num_layers", self.num_layers as i64),
            ("rope_max_seq_len", self.rope_max_seq_len),
        ];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        check_layers("num_layers", self.num_layers)?;
        let dim = self.attention_head_dim;
        check_config(dim % 2 == 0 && (dim / 3) % 2 == 0, "attention_head_dim", || {
            format!(
                "is {dim}, must be even, and a third of it, too: rotations take pairs for time and for each side"
            )
        })?;
        let boundary = self.boundary_ratio.unwrap_or(1.0);
        check_config((0.0..=1.0).contains(&boundary), "boundary_ratio", || {
            format!("is {boundary}, must be from 0 to 1")
        })?;
        check_config(self.freq_dim % 2 == 0, "freq_dim", || format!("is {}, must be even", self.freq_dim))?;
        let eps = self.eps;
        check_config(eps > 0.0 && eps.is_finite(), "eps", || format!("is {eps}, must be a positive number"))
    }

    /// Returns the prefix of each transformer's parameter names.
    pub(super) fn experts(&self) -> &'static [&'static str] {
        if self.boundary_ratio.is_some() { &EXPERTS } else { &[""] }
    }

    /// Returns the width of the residual stream C.
    pub(super) fn inner_dim(&self) -> i64 {
        self.num_attention_heads * self.attention_head_dim
    }
}
