//! The `model` section: a decoder with new weights, or a published model's folder.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use anyroll_models::{LoraTarget, LoraTargets, ModulePattern, lora_scale};
use indexmap::IndexMap;
use regex::Regex;

use super::decoder::DecoderConfig;
use super::diffusion::DitConfig;
use super::schema::{ModelConfig, is_default};
use crate::document::Section;

/// A model in a folder as Hugging Face publishes it, including its tokenizer and its chat template.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderConfig {
    /// Folder of the model, or its name on the hub, `ORG/NAME` or `ORG/NAME@REVISION`, which is looked up in the local
    /// cache. A relative path starts at the config's folder, or else at the shell's.
    pub path: PathBuf,
    /// True if a prompt becomes a user's message in the model's chat template; false if it stays a plain text.
    /// Default true.
    pub chat: bool,
    /// System message before each prompt, if `chat`. Default: none, or the template's own.
    pub system_prompt: Option<String>,
    /// Trains adapters, with the model's weights frozen. Default: the weights are trained.
    pub lora: Option<LoraConfig>,
}

/// An image model in a folder as diffusers publishes it.
#[derive(Clone, Debug, PartialEq)]
pub struct DiffusersConfig {
    /// The folder, with `transformer`, `vae` and `scheduler`; a relative path starts at the config's folder.
    pub path: PathBuf,
    /// Variant of the weights, as named by diffusers, which is read from a part's folder if present: `fp16` is
    /// `diffusion_pytorch_model.fp16.safetensors`. Default: the plain files.
    pub variant: Option<String>,
    /// Trains adapters, with the model's weights frozen. Default: the transformer's weights are trained.
    pub lora: Option<LoraConfig>,
}

/// Low-rank adapters of the model's projections. The reference of a KL term is then the model without adapters, and not
/// a copy.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// Inner width of the adapters' products; 1 or above.
    pub rank: usize,
    /// Scale of the products, which are multiplied by alpha / rank; above 0. Default 2 x rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// True if the products are multiplied by alpha / sqrt(rank) instead (rsLoRA). Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rslora: bool,
    /// Ranks of particular projections, by patterns as in PEFT. A pattern is a regular expression for the end of a
    /// name, starting after a dot, such as `v_proj` or `layers.(0|1).mlp.up_proj`. The first match counts. For language
    /// models only. Default: none.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub rank_pattern: IndexMap<String, usize>,
    /// Alphas of particular projections, by patterns as in `rank_pattern`. Default: none.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub alpha_pattern: IndexMap<String, f64>,
    /// True if adapters have magnitudes, the norm of each row of the projection with its product (DoRA); for language
    /// models only. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dora: bool,
    /// Projections with an adapter, by patterns as in `rank_pattern`: `q_proj`, `mlp[.].*`, or with layers
    /// `layers.[0-9].self_attn.(q|v)_proj`. A Phi-3 has `qkv_proj`, `o_proj`, `gate_up_proj` and `down_proj`. In an
    /// image model a pattern is the end of a layer's name, such as `attn.to_q`. Default: all.
    #[serde(default = "all_targets")]
    pub targets: Vec<String>,
    /// Indices of the layers with adapters, from 0; for language models only. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Fraction of an adapter's input that is dropped in training, from 0 to below 1; for language models only.
    /// Default 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dropout: f64,
    /// Folder of an adapter in PEFT's format, to continue from; for an image model, a file or a folder in diffusers'
    /// format, `pytorch_lora_weights.safetensors`. The other fields here must have the adapter's shape, from the rank
    /// to the targets. Default: a new adapter, which has no effect until it is trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
}

impl LoraConfig {
    /// Returns the adapters' shape for a language model. The error is a field and its entry that is no pattern, or an
    /// entry of `targets` that matches nothing.
    pub fn shape(
        &self,
        model: &anyroll_models::DecoderConfig,
    ) -> Result<anyroll_models::LoraConfig, (&'static str, &str)> {
        let layers = 0..model.num_hidden_layers;
        let mut chosen: Vec<Vec<(LoraTarget, bool)>> = layers
            .map(|layer| {
                LoraTarget::of_layer(model, layer).into_iter().map(|target| (target, false)).collect()
            })
            .collect();
        for entry in &self.targets {
            let unknown = ("targets", entry.as_str());
            let pattern = ModulePattern::new(entry).ok_or(unknown)?;
            let mut found = false;
            for (layer, chosen) in chosen.iter_mut().enumerate().filter(|(layer, _)| self.is_in(*layer)) {
                for (target, chosen) in chosen {
                    let all = target.modules_in(model, layer);
                    let matches = pattern.matches(&target.module(layer))
                        || all.iter().all(|module| pattern.matches(module));
                    *chosen |= matches;
                    found |= matches;
                }
            }
            found.then_some(()).ok_or(unknown)?;
        }
        let of_layer = |targets: Vec<(LoraTarget, bool)>| {
            targets.into_iter().filter(|(_, chosen)| *chosen).map(|(target, _)| target).collect()
        };
        Ok(anyroll_models::LoraConfig {
            rank: self.rank as i64,
            alpha: self.alpha(),
            rslora: self.rslora,
            rank_pattern: patterns("rank_pattern", &self.rank_pattern, |rank| rank as i64)?,
            alpha_pattern: patterns("alpha_pattern", &self.alpha_pattern, |alpha| alpha)?,
            targets: LoraTargets::of_layers(chosen.into_iter().map(of_layer).collect()),
            dora: self.dora,
            dropout: self.dropout,
        })
    }

    fn is_in(&self, layer: usize) -> bool {
        self.layers.as_ref().is_none_or(|layers| layers.contains(&layer))
    }

    fn alpha(&self) -> f64 {
        self.alpha.unwrap_or(2.0 * self.rank as f64)
    }

    /// Returns the adapters' shape for an image model with the layers `modules`. The error is an entry of `targets`
    /// that is no pattern or matches no layer.
    pub fn image_shape(&self, modules: &[String]) -> Result<anyroll_models::diffusion::Lora, &str> {
        let mut chosen = vec![false; modules.len()];
        for entry in &self.targets {
            let pattern = Regex::new(&format!("^(?:{entry})$")).map_err(|_| entry.as_str())?;
            let end = format!(".{entry}");
            let mut found = false;
            for (module, chosen) in modules.iter().zip(&mut chosen) {
                let matches = module.ends_with(&end) || pattern.is_match(module);
                *chosen |= matches;
                found |= matches;
            }
            found.then_some(()).ok_or(entry.as_str())?;
        }
        let modules =
            modules.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(module, _)| module.clone());
        let (rank, modules) = (self.rank as i64, modules.collect());
        Ok(anyroll_models::diffusion::Lora {
            rank,
            scale: lora_scale(rank, self.alpha(), self.rslora),
            modules,
        })
    }
}

impl FolderConfig {
    pub(super) fn validate(&self, at: &Section) {
        if let Some(lora) = &self.lora {
            lora.validate(&at.below("lora"));
        }
    }
}

impl DiffusersConfig {
    pub(super) fn validate(&self, at: &Section) {
        if let Some(lora) = &self.lora {
            lora.validate(&at.below("lora"));
            lora.validate_of_images(&at.below("lora"));
        }
    }
}

impl LoraConfig {
    fn validate(&self, at: &Section) {
        at.positive("rank", self.rank);
        let alpha = self.alpha.unwrap_or(1.0);
        at.number("alpha", alpha, alpha > 0.0, "above 0");
        for &rank in self.rank_pattern.values() {
            at.positive("rank_pattern", rank);
        }
        for &alpha in self.alpha_pattern.values() {
            at.number("alpha_pattern", alpha, alpha > 0.0, "above 0");
        }
        at.number("dropout", self.dropout, (0.0..1.0).contains(&self.dropout), "from 0 to below 1");
    }

    /// Reports fields that adapters of image models do not support.
    fn validate_of_images(&self, at: &Section) {
        let one_shape = "adapters of a model of images have one rank and one alpha";
        for (field, is_absent, message) in [
            ("dropout", self.dropout == 0.0, "adapters of a model of images see all of their input"),
            ("rank_pattern", self.rank_pattern.is_empty(), one_shape),
            ("alpha_pattern", self.alpha_pattern.is_empty(), one_shape),
            ("dora", !self.dora, "adapters of a model of images have no magnitudes"),
            ("layers", self.layers.is_none(), "blocks of a model of images are named in `targets`"),
        ] {
            at.ensure(is_absent, field, message, "leave it out");
        }
    }
}

fn patterns<'a, V: Copy, T>(
    field: &'static str,
    entries: &'a IndexMap<String, V>,
    value: impl Fn(V) -> T,
) -> Result<Vec<(ModulePattern, T)>, (&'static str, &'a str)> {
    let compiled = entries.iter().map(|(pattern, &of_pattern)| {
        let pattern = ModulePattern::new(pattern).ok_or((field, pattern.as_str()))?;
        Ok((pattern, value(of_pattern)))
    });
    compiled.collect()
}

fn all_targets() -> Vec<String> {
    vec![".*".to_owned()]
}

/// The keys of `model:`; one of the first four names the kind.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    decoder: Option<DecoderConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dit: Option<DitConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    diffusers: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    variant: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chat: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    system_prompt: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lora: Option<LoraConfig>,
}

impl TryFrom<ModelFields> for ModelConfig {
    type Error = &'static str;

    fn try_from(fields: ModelFields) -> Result<Self, &'static str> {
        let ModelFields { decoder, dit, path, diffusers, variant, chat, system_prompt, lora } = fields;
        let of_text = chat.is_some() || system_prompt.is_some();
        if variant.is_some() && diffusers.is_none() {
            return Err("`variant` goes with `diffusers`, a published model of images");
        }
        match (decoder, dit, path, diffusers) {
            (None, None, Some(path), None) => {
                Ok(Self::Folder(FolderConfig { path, chat: chat.unwrap_or(true), system_prompt, lora }))
            }
            _ if of_text => Err("`chat` and `system_prompt` go with `path`, a published language model"),
            (None, None, None, Some(path)) => Ok(Self::Diffusers(DiffusersConfig { path, variant, lora })),
            _ if lora.is_some() => Err("`lora` goes with `path` or `diffusers`, a published model"),
            (Some(decoder), None, None, None) => Ok(Self::Decoder(decoder)),
            (None, Some(dit), None, None) => Ok(Self::Dit(dit)),
            _ => Err("expected exactly one of `decoder`, `path`, `dit` and `diffusers`"),
        }
    }
}

impl From<ModelConfig> for ModelFields {
    fn from(model: ModelConfig) -> Self {
        let empty = Self {
            decoder: None,
            dit: None,
            path: None,
            diffusers: None,
            variant: None,
            chat: None,
            system_prompt: None,
            lora: None,
        };
        match model {
            ModelConfig::Decoder(decoder) => Self { decoder: Some(decoder), ..empty },
            ModelConfig::Dit(dit) => Self { dit: Some(dit), ..empty },
            ModelConfig::Folder(FolderConfig { path, chat, system_prompt, lora }) => {
                Self { path: Some(path), chat: Some(chat), system_prompt, lora, ..empty }
            }
            ModelConfig::Diffusers(DiffusersConfig { path, variant, lora }) => {
                Self { diffusers: Some(path), variant, lora, ..empty }
            }
        }
    }
}
