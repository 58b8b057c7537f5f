//! Adapters of diffusion models in the format of diffusers' pipelines: `pytorch_lora_weights.safetensors`.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::diffusers::folders;
use super::export::FolderKind;
use super::weights::{WeightFiles, reads_files};
use super::{Error, Result, field, parse_json};
use crate::decoder::lora::{self, lora_scale};
use crate::diffusion::{Lora, TransformerConfig};

/// An adapter's file, or those of a pair of transformers, opened and checked.
#[derive(Debug)]
pub struct ImageAdapterFiles {
    lora: Lora,
    weights: WeightFiles,
}

/// Key of PEFT's configuration in a file's header; older files lack it.
const METADATA: &str = "lora_adapter_metadata";

/// Prefix of the tensors' names, with or without that metadata.
const OF_TRANSFORMER: &str = "transformer.";

/// Fields read from the metadata.
#[derive(Deserialize)]
struct AdapterMetadata {
    #[serde(rename = "transformer.lora_alpha")]
    lora_alpha: Option<f64>,
    #[serde(rename = "transformer.use_rslora", default)]
    use_rslora: bool,
    #[serde(rename = "transformer.use_dora", default)]
    use_dora: bool,
    #[serde(rename = "transformer.rank_pattern")]
    rank_pattern: Option<Map<String, Value>>,
    #[serde(rename = "transformer.alpha_pattern")]
    alpha_pattern: Option<Map<String, Value>>,
}

impl ImageAdapterFiles {
    /// Opens the file `path` with an adapter for a transformer of the shape `config`, or the folder that
    /// contains such a file under diffusers' name. A pair needs a folder with such folders `transformer` and
    /// `transformer_2`, or one of them. The layers with an adapter follow from the tensors' names. Alpha is
    /// the rank unless the file has one.
    ///
    /// # Errors
    /// [`Error`], which names the file and the field or tensor in it.
    pub fn open(path: &Path, config: &TransformerConfig) -> Result<ImageAdapterFiles> {
        let mut weights = WeightFiles::empty(path);
        let mut scales = Vec::new();
        for (folder, prefix) in folders(config) {
            let folder = path.join(folder);
            if config.boundary().is_none() {
                scales.push(add(&mut weights, path, prefix)?);
            } else if folder.is_dir() {
                scales.push(add(&mut weights, &folder, prefix)?);
            }
        }
        let modules: BTreeSet<&str> = weights.names().into_iter().filter_map(module_of).collect();
        let Some(first) = modules.first() else {
            let problem = match config.boundary() {
                None => "it has no tensor with a name like diffusers' `transformer.LAYER.lora_A.weight`",
                Some(_) => "it has no folder `transformer` or `transformer_2` with adapters",
            };
            return Err(Error::Broken { path: path.to_owned(), problem: problem.to_owned() });
        };
        let [a, _] = lora::names(first);
        let rank = weights.shape(&a).and_then(|shape| shape.first().copied()).unwrap_or(0);
        let mut scales = scales
            .into_iter()
            .map(|(alpha, is_stabilized)| lora_scale(rank, alpha.unwrap_or(rank as f64), is_stabilized));
        let scale = scales.next().expect("a tensor came from a file");
        if scales.any(|other| other != scale) {
            let problem = "or `use_rslora` differs in `transformer_2`, but all adapters must have one scale";
            return Err(field(path, "lora_alpha", problem));
        }
        let modules = modules.into_iter().map(str::to_owned).collect();
        let lora = Lora { rank, scale, modules };
        let units = config
            .adapter_units(&lora)
            .map_err(|error| Error::Broken { path: path.to_owned(), problem: error.to_string() })?;
        weights.check(&units, |_| false)?;
        Ok(ImageAdapterFiles { lora, weights })
    }

    /// Returns the adapters' shape.
    pub fn lora(&self) -> &Lora {
        &self.lora
    }
}

reads_files!(ImageAdapterFiles);

/// Adds the tensors of a file, or of the one in a folder, with the names of adapters of the transformer with
/// this `prefix`. Returns alpha, if the file has it, and true if the scale is that of rsLoRA.
fn add(weights: &mut WeightFiles, path: &Path, prefix: &str) -> Result<(Option<f64>, bool)> {
    let path = match path.is_dir() {
        true => path.join(format!("{}.safetensors", FolderKind::ImageAdapter.weights_stem())),
        false => path.to_owned(),
    };
    let file = WeightFiles::open_file(&path)?;
    let scale = match file.metadata(METADATA) {
        Some(text) => scale_of(&path, text)?,
        None => (None, false),
    };
    weights.join(file.renamed(|name| match name.strip_prefix(OF_TRANSFORMER) {
        Some(rest) => format!("{}{prefix}{rest}", lora::PREFIX),
        None => name.to_owned(),
    })?);
    Ok(scale)
}

fn scale_of(path: &Path, text: &str) -> Result<(Option<f64>, bool)> {
    let found: AdapterMetadata = parse_json(path, text.as_bytes())?;
    let refuse = |holds: bool, name: &str, problem: &str| {
        if holds { Ok(()) } else { Err(field(path, name, problem)) }
    };
    refuse(!found.use_dora, "use_dora", "is true, but only plain LoRA is supported")?;
    let is_empty = |pattern: &Option<Map<String, Value>>| pattern.as_ref().is_none_or(Map::is_empty);
    refuse(is_empty(&found.rank_pattern), "rank_pattern", "is set, but all adapters must have one rank")?;
    refuse(is_empty(&found.alpha_pattern), "alpha_pattern", "is set, but all adapters must have one alpha")?;
    Ok((found.lora_alpha, found.use_rslora))
}

/// Returns the layer of the adapter that the tensor `name` belongs to, if it is the first of the adapter's
/// two.
fn module_of(name: &str) -> Option<&str> {
    name.strip_prefix(lora::PREFIX)?.strip_suffix(".lora_A.weight")
}
