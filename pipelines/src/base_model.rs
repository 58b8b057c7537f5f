//! What a model is made from: its shape, its tokenizer and its first weights.

use anyroll_models::{
    DecoderConfig, RopeScaling,
    hf::ModelFolder,
    init::{Seed, WeightSource},
};

use crate::{
    Result,
    config::{self, ModelConfig},
    data::{CharTokenizer, Dataset, Tokenizer},
};

/// A model before training.
pub struct BaseModel {
    /// Its shape.
    pub config: DecoderConfig,
    /// Text to tokens.
    pub tokenizer: Tokenizer,
    /// Its weights, read as they are asked for.
    pub weights: Box<dyn WeightSource>,
}

impl BaseModel {
    /// Opens the folder that `model` names, or lays out the decoder that it describes: that one has a token for each
    /// character of `dataset`, and weights from `seed`.
    pub fn open(model: &ModelConfig, dataset: &Dataset, seed: u64) -> Result<BaseModel> {
        match model {
            ModelConfig::Decoder(decoder) => {
                let tokenizer = CharTokenizer::new(&dataset.characters());
                Ok(BaseModel {
                    config: decoder_config(decoder, tokenizer.vocab_size()),
                    tokenizer: Tokenizer::Characters(tokenizer),
                    weights: Box::new(Seed(seed)),
                })
            }
            ModelConfig::Folder(config) => {
                let folder = ModelFolder::open(&config.path).map_err(anyroll_models::Error::from)?;
                Ok(BaseModel {
                    config: folder.decoder_config().clone(),
                    tokenizer: Tokenizer::of_folder(&folder, config)?,
                    weights: Box::new(folder),
                })
            }
        }
    }
}

fn decoder_config(decoder: &config::DecoderConfig, vocab_size: usize) -> DecoderConfig {
    DecoderConfig {
        vocab_size: vocab_size as i64,
        hidden_size: decoder.hidden_size as i64,
        num_hidden_layers: decoder.layers,
        num_attention_heads: decoder.heads as i64,
        num_key_value_heads: decoder.kv_heads.unwrap_or(decoder.heads) as i64,
        head_dim: (decoder.hidden_size / decoder.heads) as i64,
        intermediate_size: decoder.intermediate_size as i64,
        rms_norm_eps: decoder.norm_eps,
        rope_theta: decoder.rope_theta,
        rope_scaling: RopeScaling::None,
        max_position_embeddings: decoder.max_length as i64,
        sliding_window: None,
        qkv_bias: decoder.qkv_bias,
        qk_norm: decoder.qk_norm,
        tie_word_embeddings: decoder.tie_embeddings,
        initializer_range: 0.02,
    }
}
