//! A family's class in `transformers`: which shared fields it reads, and its defaults.

use super::super::rope::RopeKind;
use crate::Activation;

/// A class: the shared fields that it reads, and the values where a file is silent. Fields that it does not read
/// are ignored.
#[derive(Debug)]
pub(super) struct Class {
    /// True if it reads `attention_bias`.
    pub attention_bias: bool,
    /// True if it reads `mlp_bias`.
    pub mlp_bias: bool,
    /// True if `num_key_value_heads` must be given; else there are as many as query heads.
    pub needs_kv_heads: bool,
    /// Default of `head_dim`; `None`: the stream's width is divided among the heads.
    pub head_dim: Option<i64>,
    /// Activation of the MLP's gate; `hidden_act` must be SiLU if this is.
    pub activation: Activation,
    /// Default of `rms_norm_eps`.
    pub rms_norm_eps: f64,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Default of `sliding_window`.
    pub sliding_window: Option<i64>,
    /// Default of `rope_theta`.
    pub rope_theta: f64,
    /// Rotations that files may have.
    pub rope: RopeKind,
    /// Field with the base of layers with a window, and its default, if they always have another base.
    pub sliding_theta: Option<(&'static str, f64)>,
}

impl Class {
    /// The most usual values.
    pub const USUAL: Class = Class {
        attention_bias: false,
        mlp_bias: false,
        needs_kv_heads: true,
        head_dim: None,
        activation: Activation::Silu,
        rms_norm_eps: 1e-6,
        tied: false,
        sliding_window: Some(4096),
        rope_theta: 10_000.0,
        rope: RopeKind::Usual,
        sliding_theta: None,
    };
}
