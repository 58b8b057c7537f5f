//! The text half of CLIP, which also encodes prompts for image generators.

use tch::{Kind, Tensor};

use super::INIT;
use super::tower::{Tower, TowerConfig};
use crate::Result;
use crate::diffusion::layers::{Linear, Params};
use crate::error::check_config;
use crate::model::{Unit, Weights};

/// The shape of a [`TextEncoder`] without its projection, with the field names of its configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
    /// Layers of the tower.
    pub tower: TowerConfig,
    /// Vocabulary size.
    pub vocab_size: i64,
    /// Maximum text length in tokens, including the first and the last token.
    pub max_position_embeddings: i64,
    /// Token that ends a text.
    pub eos_token_id: i64,
}

/// The text tower, with the names of `transformers`' `CLIPTextModelWithProjection`. Holds no weights.
#[derive(Debug)]
pub struct TextEncoder {
    config: TextConfig,
    unit: Unit,
    tokens: usize,
    positions: usize,
    tower: Tower,
    last_norm: Linear,
    projection: usize,
}

/// Output of a [`TextEncoder`], in its weights' dtype.
#[derive(Debug)]
pub struct EncodedTexts {
    /// Input states of the last layer, or of an earlier one: `[B, T, hidden_size]`.
    pub hidden: Tensor,
    /// Vector of each text, projected from the last state of its end: `[B, projection_dim]`.
    pub pooled: Tensor,
}

impl TextEncoder {
    /// Lays out the tower, whose output vectors have `projection_dim` elements.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for invalid sizes.
    pub fn new(config: TextConfig, projection_dim: i64) -> Result<TextEncoder> {
        config.validate("text_model")?;
        check_config(projection_dim > 0, "projection_dim", || {
            format!("is {projection_dim}, must be at least 1")
        })?;
        let mut params = Params::default();
        let size = config.tower.hidden_size;
        let mut table = |name: &str, rows: i64| {
            params.table(&format!("text_model.embeddings.{name}_embedding.weight"), &[rows, size], INIT)
        };
        let (tokens, positions) =
            (table("token", config.vocab_size), table("position", config.max_position_embeddings));
        let tower = Tower::new(&mut params, "text_model", &config.tower);
        let last_norm = params.group_norm("text_model.final_layer_norm", size);
        let projection = params.table("text_projection.weight", &[projection_dim, size], INIT);
        let unit = Unit { trainable: false, ..params.into_unit("text_model") };
        Ok(TextEncoder { config, unit, tokens, positions, tower, last_norm, projection })
    }

    /// Returns the shape.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// Returns the parameters.
    pub fn unit(&self) -> &Unit {
        &self.unit
    }

    /// Encodes tokenized texts, int64 `[B, T]`, of at most `max_position_embeddings` tokens. Each text ends
    /// with its first `eos_token_id`; later tokens have no effect. `hidden` is the input of the layer `skip`
    /// layers before the last, like diffusers' `clip_skip`; `skip` is less than the number of layers.
    ///
    /// # Errors
    /// libtorch's.
    pub fn encode(&self, weights: &[Tensor], texts: &Tensor, skip: usize) -> Result<EncodedTexts> {
        let units = [weights];
        let weights = Weights::new(&units);
        let get = |index: usize| weights.get(0, index);
        let (count, longest) = texts.size2()?;
        let positions = get(self.positions).f_narrow(0, 0, longest)?;
        let tokens = Tensor::f_embedding(get(self.tokens), texts, -1, false, false)?.f_add(&positions)?;
        let [hidden, tokens] = self.tower.forward(&weights, tokens, skip + 1, true)?;
        let eps = self.config.tower.layer_norm_eps;
        let tokens = self.last_norm.layer_norm(&weights, &tokens, eps)?.f_flatten(0, 1)?;
        let ends = texts.f_eq(self.config.eos_token_id)?.f_to_kind(Kind::Int)?.f_argmax(-1, false)?;
        let rows = Tensor::f_arange(count, (Kind::Int64, texts.device()))?.f_mul_scalar(longest)?;
        let pooled = tokens.f_index_select(0, &ends.f_add(&rows)?)?;
        Ok(EncodedTexts { hidden, pooled: pooled.f_linear(get(self.projection), None::<&Tensor>)? })
    }
}

impl TextConfig {
    /// Checks that the sizes are valid; `name` is the layers' name in the configuration.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub(super) fn validate(&self, name: &'static str) -> Result<()> {
        self.tower.validate(name)?;
        let sizes =
            [("vocab_size", self.vocab_size), ("max_position_embeddings", self.max_position_embeddings)];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let is_token = (0..self.vocab_size).contains(&self.eos_token_id);
        check_config(is_token, "eos_token_id", || format!("is {}, no token", self.eos_token_id))
    }
}
