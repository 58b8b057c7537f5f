//! Reads the fields of a `config.json` that families share.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::super::config::ConfigFile;
use super::super::rope::{RopeFields, Rotations, TURNED_WHOLE};
use super::super::{Error, Result, field};
use super::class::Class;
use crate::{Activation, DecoderConfig, OtherRope, SlidingWindow};

/// A `config.json` of a known family.
pub(in crate::hf) struct Reader<'a> {
    /// The file.
    pub path: &'a Path,
    /// Its shared fields.
    pub shared: &'a ConfigFile,
    pub(super) class: &'a Class,
}

impl Reader<'_> {
    /// Returns an error for a setting that changes the model and is not supported.
    pub(super) fn refuse_unsupported(&self) -> Result<()> {
        let file = self.shared;
        let is_silu = file.hidden_act.as_ref().is_none_or(|name| matches!(&**name, "silu" | "swish"));
        let silu = self.class.activation != Activation::Silu || is_silu;
        self.ensure(silu, "hidden_act", "must be `silu`")?;
        self.ensure_no_dropout("attention_dropout")?;
        let whole = self.class.rope.turns_parts() || file.partial_rotary_factor.is_none_or(|it| it == 1.0);
        self.ensure(whole, "partial_rotary_factor", TURNED_WHOLE)?;
        let plain = self.get::<serde_json::Value>("quantization_config")?.is_none();
        self.ensure(plain, "quantization_config", "is set; weights must be fp32, bf16 or fp16")
    }

    /// Returns the decoder of the shared fields, with norms on branch inputs and these windows.
    pub fn decoder(&self, sliding_window: Option<SlidingWindow>) -> Result<DecoderConfig> {
        let (file, class) = (self.shared, self.class);
        let kv_heads = match file.num_key_value_heads {
            Some(heads) => heads,
            None if class.needs_kv_heads => return Err(self.wrong("num_key_value_heads", "is missing")),
            None => file.num_attention_heads,
        };
        let Rotations { theta, partial, scaling, sliding_theta } = self.rotations()?;
        let other_rope = sliding_theta.zip(sliding_window.as_ref());
        let other_rope =
            other_rope.map(|(theta, window)| OtherRope { theta: Some(theta), layers: window.layers.clone() });
        let is_biased = file.attention_bias && class.attention_bias;
        let (width, heads) = (file.hidden_size, file.num_attention_heads.max(1));
        Ok(DecoderConfig {
            vocab_size: file.vocab_size,
            num_attention_heads: file.num_attention_heads,
            num_key_value_heads: kv_heads,
            head_dim: file.head_dim.or(class.head_dim).unwrap_or(width / heads),
            intermediate_size: file.intermediate_size,
            rms_norm_eps: file.rms_norm_eps.unwrap_or(class.rms_norm_eps),
            rope_theta: theta,
            partial_rotary_factor: partial.or(file.partial_rotary_factor).unwrap_or(1.0),
            max_position_embeddings: scaling.most_positions(file.max_position_embeddings),
            rope_scaling: scaling,
            other_rope,
            sliding_window,
            qkv_bias: is_biased,
            o_bias: is_biased,
            mlp_bias: file.mlp_bias && class.mlp_bias,
            activation: class.activation,
            tie_word_embeddings: file.tie_word_embeddings.unwrap_or(class.tied),
            initializer_range: file.initializer_range.unwrap_or(0.02),
            ..DecoderConfig::plain(file.num_hidden_layers, width, heads)
        })
    }

    fn rotations(&self) -> Result<Rotations> {
        let file = self.shared;
        let local_theta = match self.class.sliding_theta {
            Some((name, silent)) => Some(self.get(name)?.unwrap_or(silent)),
            None => None,
        };
        let rope = RopeFields {
            path: self.path,
            max_length: file.max_position_embeddings as f64,
            original_length: file.original_max_position_embeddings,
            theta: file.rope_theta.unwrap_or(self.class.rope_theta),
            scaling: file.rope_scaling.as_ref(),
            parameters: file.rope_parameters.as_ref(),
            kind: self.class.rope,
            local_theta,
        };
        rope.read()
    }

    /// Returns the fraction of a head that is rotated, if the file has one.
    pub fn rotary_part(&self) -> Result<Option<f64>> {
        Ok(self.rotations()?.partial.or(self.shared.partial_rotary_factor))
    }

    /// Returns true for each layer that `layer_types` gives a sliding window; `None`: the file has no such field.
    pub fn named_layers(&self) -> Result<Option<Vec<bool>>> {
        let slides = |kind: &String| match kind.as_str() {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            _ => {
                let problem = format!("has `{kind}`, must be `full_attention` or `sliding_attention`");
                Err(self.wrong("layer_types", problem))
            }
        };
        self.shared.layer_types.as_ref().map(|kinds| kinds.iter().map(slides).collect()).transpose()
    }

    /// Returns the layers with a sliding window, and its size: those that `layer_types` names, or else `layers`.
    pub fn window(&self, layers: Vec<bool>) -> Result<Option<SlidingWindow>> {
        let layers = self.named_layers()?.unwrap_or(layers);
        Ok(self
            .window_tokens()?
            .filter(|_| layers.contains(&true))
            .map(|tokens| SlidingWindow { tokens, layers }))
    }

    /// Like [`Self::window`]; layers with a window must have a size.
    pub fn sized_window(&self, layers: Vec<bool>) -> Result<Option<SlidingWindow>> {
        let slide = self.named_layers()?.as_ref().unwrap_or(&layers).contains(&true);
        let is_sized = !slide || self.window_tokens()?.is_some();
        self.ensure(is_sized, "sliding_window", "is null, but layers have a sliding window")?;
        self.window(layers)
    }

    /// Returns the windows of a file that has them only with `use_sliding_window`, then in the layers from
    /// `max_window_layers` on.
    pub fn late_window(&self) -> Result<Option<SlidingWindow>> {
        if !self.uses_window()? {
            return Ok(None);
        }
        let first = self.get("max_window_layers")?.unwrap_or(28);
        self.window((0..self.shared.num_hidden_layers).map(|layer| layer >= first).collect())
    }

    /// Returns `use_sliding_window`.
    pub fn uses_window(&self) -> Result<bool> {
        Ok(self.get("use_sliding_window")?.unwrap_or(false))
    }

    /// Returns true for each layer.
    pub fn all_layers(&self) -> Vec<bool> {
        vec![true; self.shared.num_hidden_layers]
    }

    /// Returns the size of windows, whatever layers have one. Null differs from a missing field.
    pub fn window_tokens(&self) -> Result<Option<i64>> {
        let name = "sliding_window";
        if self.shared.others.contains_key(name) { self.get(name) } else { Ok(self.class.sliding_window) }
    }

    /// Returns a field that not every family has; `None` for a missing one or null.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(value) = self.shared.others.get(name) else { return Ok(None) };
        serde_json::from_value(value.clone())
            .map_err(|error| self.wrong(name, format!("is {value}: {error}")))
    }

    /// Returns [`Self::get`], or an error for a missing field.
    pub fn required<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        self.get(name)?.ok_or_else(|| self.wrong(name, "is missing"))
    }

    /// Refuses a dropout other than 0.
    pub fn ensure_no_dropout(&self, name: &str) -> Result<()> {
        let dropout: f64 = self.get(name)?.unwrap_or(0.0);
        self.ensure(dropout == 0.0, name, "is not 0, but dropout is not supported")
    }

    /// Returns an error about the field `name` unless `holds`.
    pub fn ensure(&self, holds: bool, name: &str, problem: impl Into<String>) -> Result<()> {
        if holds { Ok(()) } else { Err(self.wrong(name, problem)) }
    }

    /// Returns an error about the field `name`.
    pub fn wrong(&self, name: &str, problem: impl Into<String>) -> Error {
        field(self.path, name, problem)
    }
}
