//! The shape of Wan's transformer.

use crate::Result;
use crate::error::{check_config, check_layers};

/// The shape of a [`Wan`](super::Wan), with the names of diffusers' `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct WanConfig {
    /// Frames, height and width of a patch.
    pub patch_size: [i64; 3],
    /// The number of heads H. The inner size C is their width together.
    pub num_attention_heads: i64,
    /// The width of a head; its third part is even.
    pub attention_head_dim: i64,
    /// Channels of the latents, and of the velocities.
    pub in_channels: i64,
    /// The width of the text's tokens.
    pub text_dim: i64,
    /// Cosines and sines that sigma is told by; even.
    pub freq_dim: i64,
    /// The width of the feed-forward's hidden layer.
    pub ffn_dim: i64,
    /// The number of blocks; at least 1.
    pub num_layers: usize,
    /// Whether the input of the attention to the text is normed, with a weight and a bias.
    pub cross_attn_norm: bool,
    /// Added to the variance or the mean square in norms.
    pub eps: f64,
    /// Patches in the longest side, and in time.
    pub rope_max_seq_len: i64,
    /// Of a pair of transformers of this shape: from this sigma on the first is asked, below it the second. `None` where
    /// one paints at all of them.
    pub boundary_ratio: Option<f64>,
}

/// What the names of the parameters of a pair begin with, those of the first one and of the second.
pub const EXPERTS: [&str; 2] = ["transformer.", "transformer_2."];

impl WanConfig {
    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and what it should be.
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
                "is {dim}, must be even and its third part too: rotations take pairs of time and of each side"
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

    /// What the names of each transformer's parameters begin with.
    pub(super) fn experts(&self) -> &'static [&'static str] {
        if self.boundary_ratio.is_some() { &EXPERTS } else { &[""] }
    }

    /// The width of the residual stream C.
    pub(super) fn inner_dim(&self) -> i64 {
        self.num_attention_heads * self.attention_head_dim
    }
}
