//! Models of images as diffusers publishes them: a folder with one for each part, `transformer`, `vae` and `scheduler`
//! among them.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::export::{DIFFUSERS_STEM, failed, sync_folder};
use super::weights::WeightFiles;
use super::{Error, FolderContents, Result, read_json, write_folder};
use crate::diffusion::sd3::PositionTable;
use crate::diffusion::{Sd3Config, TransformerConfig, VaeConfig, VaeDecoder};
use crate::init::WeightSource;
use crate::model::{Model, ParamSpec, Unit};

/// What the folder of the transformer is called.
const TRANSFORMER: &str = "transformer";

/// A published model's folder, opened and checked. As a source of weights it has the transformer's.
#[derive(Debug)]
pub struct DiffusersFolder {
    path: PathBuf,
    transformer: TransformerConfig,
    weights: WeightFiles,
    vae: Vae,
    shift: f64,
}

/// The decoder of latents, and its weights.
#[derive(Debug)]
struct Vae {
    config: VaeConfig,
    weights: WeightFiles,
}

impl DiffusersFolder {
    /// Opens the folder at `path`.
    ///
    /// # Errors
    /// [`Error`], which names the file and in it the field or the tensor: a class or a feature that this crate lacks, a
    /// tensor that is missing, too many or of an odd shape, a broken file.
    pub fn open(path: &Path) -> Result<DiffusersFolder> {
        let folder = path.join(TRANSFORMER);
        let config: TransformerFile = read_config(&folder, "SD3Transformer2DModel")?;
        let transformer = config.into_config(&folder.join("config.json"))?;
        let weights = WeightFiles::open(&folder, DIFFUSERS_STEM)?;
        weights.check(&transformer.units(), |name| name == PositionTable::NAME)?;
        let (vae, shift) = (Vae::open(&path.join("vae"))?, shift(&path.join("scheduler"))?);
        Ok(DiffusersFolder { path: path.to_owned(), transformer, weights, vae, shift })
    }

    /// The shape of the transformer.
    pub fn transformer_config(&self) -> &TransformerConfig {
        &self.transformer
    }

    /// The shape of the decoder of latents.
    pub fn vae_config(&self) -> &VaeConfig {
        &self.vae.config
    }

    /// The weights of the decoder of latents.
    pub fn vae_weights(&self) -> &dyn WeightSource {
        &self.vae
    }

    /// How far its scheduler moves the sigmas towards noise.
    pub fn shift(&self) -> f64 {
        self.shift
    }

    /// All of the transformer's `config.json`.
    ///
    /// # Errors
    /// [`Error`] if the file cannot be read any more.
    pub fn transformer_config_file(&self) -> Result<Map<String, Value>> {
        read_json(&self.path.join(TRANSFORMER).join("config.json"))
    }
}

impl WeightSource for DiffusersFolder {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        Ok(self.weights.read(spec, range, values)?)
    }
}

impl WeightSource for Vae {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        Ok(self.weights.read(spec, range, values)?)
    }
}

/// Writes the new folder `to`: all of the folder `from`, but with the transformer `contents`. It gets its name once it is
/// whole and on the disk.
///
/// # Errors
/// As [`write_folder`].
pub fn write_diffusers_folder(
    to: &Path,
    from: &DiffusersFolder,
    contents: &FolderContents,
) -> crate::Result<()> {
    if to.exists() {
        return Err(failed(to)(std::io::ErrorKind::AlreadyExists.into()).into());
    }
    let aside = to.with_extension("partial");
    if aside.exists() {
        fs::remove_dir_all(&aside).map_err(failed(&aside))?; // what an interrupted export left behind
    }
    copy_folder(&from.path, &aside, &|name| name == TRANSFORMER)?;
    // diffusers' own buffer stands among the weights.
    let TransformerConfig::Sd3(config) = &from.transformer;
    let table = PositionTable::new(config)?;
    let unit = Unit { name: "positions".into(), params: vec![table.spec()], trainable: false };
    let units = [contents.units, &[unit]].concat();
    let weights = WithTable { table, weights: contents.weights };
    let contents =
        FolderContents { units: &units, weights: &weights, config: contents.config.clone(), ..*contents };
    write_folder(&aside.join(TRANSFORMER), &contents)?;
    sync_folder(&aside)?;
    fs::rename(&aside, to).map_err(failed(to))?;
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(sync_folder(parent.unwrap_or(Path::new(".")))?)
}

struct WithTable<'a> {
    table: PositionTable,
    weights: &'a dyn WeightSource,
}

impl WeightSource for WithTable<'_> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        match spec.name == PositionTable::NAME {
            true => self.table.read(spec, range, values),
            false => self.weights.read(spec, range, values),
        }
    }
}

/// Copies a folder to a new one, but for the entries at its top that `is_left_out`.
fn copy_folder(from: &Path, to: &Path, is_left_out: &dyn Fn(&str) -> bool) -> Result<()> {
    let unreadable = |source| Error::Read { path: from.to_owned(), source };
    fs::create_dir_all(to).map_err(failed(to))?;
    for entry in fs::read_dir(from).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let (name, path) = (entry.file_name(), entry.path());
        let target = to.join(&name);
        // The hidden ones are traces of whoever fetched the folder.
        if name.to_str().is_some_and(|name| is_left_out(name) || name.starts_with('.')) {
            continue;
        }
        if path.is_dir() {
            copy_folder(&path, &target, &|_| false)?;
        } else {
            fs::copy(&path, &target).map_err(failed(&target))?;
        }
    }
    sync_folder(to)
}

/// What matters of `transformer/config.json`.
#[derive(Deserialize)]
struct TransformerFile {
    sample_size: i64,
    patch_size: i64,
    in_channels: i64,
    out_channels: Option<i64>,
    num_layers: usize,
    attention_head_dim: i64,
    num_attention_heads: i64,
    joint_attention_dim: i64,
    caption_projection_dim: i64,
    pooled_projection_dim: i64,
    pos_embed_max_size: i64,
    #[serde(default)]
    dual_attention_layers: Vec<usize>,
    qk_norm: Option<String>,
}

impl TransformerFile {
    fn into_config(self, path: &Path) -> Result<TransformerConfig> {
        let qk_rms_norm = match self.qk_norm.as_deref() {
            None => false,
            Some("rms_norm") => true,
            Some(other) => return Err(field(path, "qk_norm", format!("is `{other}`; there is rms_norm"))),
        };
        let config = Sd3Config {
            sample_size: self.sample_size,
            patch_size: self.patch_size,
            in_channels: self.in_channels,
            out_channels: self.out_channels.unwrap_or(self.in_channels),
            num_layers: self.num_layers,
            attention_head_dim: self.attention_head_dim,
            num_attention_heads: self.num_attention_heads,
            joint_attention_dim: self.joint_attention_dim,
            pooled_projection_dim: self.pooled_projection_dim,
            pos_embed_max_size: self.pos_embed_max_size,
            dual_attention_layers: self.dual_attention_layers,
            qk_rms_norm,
        };
        validated(path, config.validate())?;
        let inner = config.num_attention_heads * config.attention_head_dim;
        if self.caption_projection_dim != inner {
            let problem = format!("is {}; the text must be as wide as {inner}", self.caption_projection_dim);
            return Err(field(path, "caption_projection_dim", problem));
        }
        if config.out_channels != config.in_channels {
            let problem = format!("is {}; velocities have in_channels", config.out_channels);
            return Err(field(path, "out_channels", problem));
        }
        Ok(TransformerConfig::Sd3(config))
    }
}

/// What matters of `vae/config.json`.
#[derive(Deserialize)]
struct VaeFile {
    latent_channels: i64,
    out_channels: i64,
    block_out_channels: Vec<i64>,
    layers_per_block: usize,
    norm_num_groups: i64,
    scaling_factor: f64,
    shift_factor: Option<f64>,
    up_block_types: Vec<String>,
    #[serde(default = "yes")]
    use_post_quant_conv: bool,
    #[serde(default = "yes")]
    mid_block_add_attention: bool,
    act_fn: Option<String>,
    latents_mean: Option<Value>,
    latents_std: Option<Value>,
}

impl Vae {
    fn open(folder: &Path) -> Result<Vae> {
        let file: VaeFile = read_config(folder, "AutoencoderKL")?;
        let path = folder.join("config.json");
        let refuse = |holds: bool, name: &str, problem: &str| {
            if holds { Ok(()) } else { Err(field(&path, name, problem)) }
        };
        let plain = file.up_block_types.iter().all(|kind| kind == "UpDecoderBlock2D");
        refuse(plain, "up_block_types", "has another than `UpDecoderBlock2D`")?;
        refuse(file.mid_block_add_attention, "mid_block_add_attention", "is false; there is one here")?;
        let silu = file.act_fn.as_deref().is_none_or(|name| name == "silu");
        refuse(silu, "act_fn", "is another than `silu`")?;
        let scaled = file.latents_mean.is_none() && file.latents_std.is_none();
        refuse(scaled, "latents_mean", "or `latents_std` is there; latents have one factor and one shift")?;
        let config = VaeConfig {
            latent_channels: file.latent_channels,
            out_channels: file.out_channels,
            block_out_channels: file.block_out_channels,
            layers_per_block: file.layers_per_block,
            norm_num_groups: file.norm_num_groups,
            scaling_factor: file.scaling_factor,
            shift_factor: file.shift_factor.unwrap_or(0.0),
            use_post_quant_conv: file.use_post_quant_conv,
        };
        validated(&path, config.validate())?;
        let weights = WeightFiles::open(folder, DIFFUSERS_STEM)?;
        let decoder = VaeDecoder::new(config.clone(), false).expect("just validated");
        let of_encoder = |name: &str| name.starts_with("encoder.") || name.starts_with("quant_conv.");
        weights.check(decoder.units(), of_encoder)?;
        Ok(Vae { config, weights })
    }
}

/// What matters of `scheduler/scheduler_config.json`.
#[derive(Deserialize)]
struct SchedulerFile {
    #[serde(rename = "_class_name")]
    class_name: String,
    #[serde(default = "one")]
    shift: f64,
    #[serde(default)]
    use_dynamic_shifting: bool,
}

fn shift(folder: &Path) -> Result<f64> {
    let path = folder.join("scheduler_config.json");
    let file: SchedulerFile = read_json(&path)?;
    const CLASS: &str = "FlowMatchEulerDiscreteScheduler";
    if file.class_name != CLASS {
        return Err(field(&path, "_class_name", format!("is `{}`; there is {CLASS}", file.class_name)));
    }
    if file.use_dynamic_shifting {
        return Err(field(&path, "use_dynamic_shifting", "is true; the shift is one number here"));
    }
    if file.shift > 0.0 { Ok(file.shift) } else { Err(field(&path, "shift", "is not above 0")) }
}

/// The `config.json` of a part that must be a `class`.
fn read_config<T: DeserializeOwned>(folder: &Path, class: &str) -> Result<T> {
    let path = folder.join("config.json");
    let file: Value = read_json(&path)?;
    let found = file["_class_name"].as_str().unwrap_or("missing");
    if found != class {
        return Err(field(&path, "_class_name", format!("is {found}; there is {class}")));
    }
    serde_json::from_value(file).map_err(|source| Error::Json { path, source })
}

fn validated(path: &Path, found: crate::Result<()>) -> Result<()> {
    match found {
        Err(crate::Error::Config { field: name, problem }) => Err(field(path, name, problem)),
        _ => Ok(()),
    }
}

fn field(path: &Path, field: &str, problem: impl Into<String>) -> Error {
    Error::Field { path: path.to_owned(), field: field.to_owned(), problem: problem.into() }
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}
