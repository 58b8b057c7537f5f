//! The base of a language model: its shape, its tokenizer and its initial weights.

use std::{ops::Range, path::Path, sync::Arc};

use anyroll_config::{self, FolderConfig, error_chain::one_line};
use anyroll_data::{CharTokenizer, Dataset, Tokenizer};
use anyroll_models::{
    Decoder, DecoderConfig, ExpertNames, ExpertsConfig, LoraConfig, ParamSpec, QkNorm, ValueModel,
    hf::{AdapterFolder, ModelFolder, NewAdapter, WithAdapter},
    init::{Seed, WeightSource},
};

use crate::{Result, hub::Hub, run::Strategy};

/// A model before training.
pub struct BaseModel {
    /// Shape of the decoder.
    pub config: DecoderConfig,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Shape of the adapters; `None` if all weights are trained.
    pub lora: Option<LoraConfig>,
    /// Weights of the model and its adapters, read on demand.
    pub weights: Box<dyn WeightSource>,
}

impl BaseModel {
    /// Returns the name of a matrix of experts with adapters, if there is one.
    pub fn adapted_expert(&self) -> Option<String> {
        self.lora.as_ref()?.targets.first_of_experts(&self.config)
    }

    /// Creates the decoder that `decoder` describes, with a token for each character of `dataset` and weights drawn from `seed`.
    pub fn made(decoder: &anyroll_config::DecoderConfig, dataset: &Dataset, seed: u64) -> BaseModel {
        let tokenizer = CharTokenizer::new(&dataset.characters());
        BaseModel {
            config: decoder_config(decoder, tokenizer.vocab_size()),
            tokenizer: Arc::new(Tokenizer::Characters(tokenizer)),
            lora: None,
            weights: Box::new(Seed(seed)),
        }
    }

    /// Model in `folder`, with `adapters` of a shape if there are any. Adapters without a folder are drawn from `seed`.
    pub fn published(
        folder: ModelFolder,
        tokenizer: Tokenizer,
        adapters: Option<(LoraConfig, Option<AdapterFolder>)>,
        seed: u64,
    ) -> BaseModel {
        let config = folder.decoder_config().clone();
        let tokenizer = Arc::new(tokenizer);
        let Some((lora, adapter)) = adapters else {
            return BaseModel { config, tokenizer, lora: None, weights: Box::new(folder) };
        };
        let weights: Box<dyn WeightSource> = match adapter {
            Some(adapter) => Box::new(WithAdapter { base: folder, adapter }),
            None => Box::new(NewAdapter { base: folder, seed: Seed(seed) }),
        };
        BaseModel { config, tokenizer, lora: Some(lora), weights }
    }

    /// Opens a published model's folder, without adapters.
    pub fn of_folder(config: &FolderConfig) -> Result<BaseModel> {
        let folder = ModelFolder::open(&config.path).map_err(anyroll_models::Error::from)?;
        let tokenizer = Tokenizer::of_folder(&folder, config)?;
        Ok(Self::published(folder, tokenizer, None, 0))
    }

    /// Opens the adapter folder `path` and the model that it names: a folder, relative to the adapter's or to the current
    /// one, or a name in the cache of `hub`. `chat` and `system_prompt` apply to that model's prompts.
    pub fn of_adapter(
        path: &Path,
        chat: bool,
        system_prompt: Option<String>,
        hub: &Hub,
    ) -> Result<BaseModel> {
        let named = AdapterFolder::base_of(path).map_err(anyroll_models::Error::from)?;
        let beside = path.join(&named);
        let named = if beside.is_dir() { Ok(beside) } else { hub.model(&named) };
        let named = named.map_err(|error| {
            let problem = format!("names no model here: {}", one_line(&error));
            anyroll_models::Error::from(AdapterFolder::base_problem(path, problem))
        })?;
        let folder = FolderConfig { path: named, chat, system_prompt, lora: None };
        let BaseModel { config, tokenizer, weights: base, .. } = BaseModel::of_folder(&folder)?;
        let adapter = AdapterFolder::open(path, &config).map_err(anyroll_models::Error::from)?;
        let lora = Some(adapter.lora_config().clone());
        Ok(BaseModel { config, tokenizer, lora, weights: Box::new(WithAdapter { base, adapter }) })
    }

    /// [`Self::decoder`] configured for training under `strategy`.
    pub fn policy(&self, device: tch::Device, strategy: &Strategy) -> Result<Decoder> {
        let Strategy { deterministic, keep_logits, .. } = *strategy;
        Ok(self.decoder(device)?.deterministic(deterministic).keeping_logits(keep_logits))
    }

    /// The decoder of this shape, with its adapters, on `device`.
    pub fn decoder(&self, device: tch::Device) -> Result<Decoder> {
        Ok(match &self.lora {
            Some(lora) => Decoder::with_lora(self.config.clone(), lora, device)?,
            None => Decoder::new(self.config.clone(), device)?,
        })
    }
}

/// Weights of a model with a new value head, which the model lacks and which starts at 0.
pub struct UnderNewHead<'a>(pub &'a dyn WeightSource);

impl WeightSource for UnderNewHead<'_> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> anyroll_models::Result<()> {
        match [ValueModel::HEAD, ValueModel::HEAD_BIAS].contains(&&*spec.name) {
            true => values.fill(0.0),
            false => self.0.read(spec, range, values)?,
        }
        Ok(())
    }
}

/// The mixture of experts of a checked config.
fn experts(decoder: &anyroll_config::DecoderConfig) -> Option<ExpertsConfig> {
    let plain = decoder.mlp_only_layers.as_deref().unwrap_or_default();
    Some(ExpertsConfig {
        num_experts: decoder.num_experts? as i64,
        num_experts_per_tok: decoder.num_experts_per_tok? as i64,
        moe_intermediate_size: decoder.moe_intermediate_size? as i64,
        norm_topk_prob: decoder.norm_topk_prob.unwrap_or(true),
        layers: (0..decoder.layers).map(|layer| !plain.contains(&layer)).collect(),
        names: ExpertNames::Usual,
    })
}

fn decoder_config(decoder: &anyroll_config::DecoderConfig, vocab_size: usize) -> DecoderConfig {
    let (width, heads) = (decoder.hidden_size as i64, decoder.heads as i64);
    DecoderConfig {
        vocab_size: vocab_size as i64,
        num_key_value_heads: decoder.kv_heads.unwrap_or(decoder.heads) as i64,
        intermediate_size: decoder.intermediate_size as i64,
        experts: experts(decoder),
        rms_norm_eps: decoder.norm_eps,
        rope_theta: decoder.rope_theta,
        max_position_embeddings: decoder.max_length as i64,
        qkv_bias: decoder.qkv_bias,
        qk_norm: decoder.qk_norm.then_some(QkNorm::PerHead),
        tie_word_embeddings: decoder.tie_embeddings,
        ..DecoderConfig::plain(decoder.layers, width, heads)
    }
}
