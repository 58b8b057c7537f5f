//! Models of images and videos in diffusers' published format: a folder with one subfolder per part, such as
//! `transformer`, `vae` and `scheduler`.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::export::{
    DIFFUSERS_STEM, ExportDtype, FolderContents, FolderKind, failed, sync_folder, write_whole,
};
use super::latent_decoder::{LatentDecoderFolder, video_zoom};
use super::weights::{WeightFiles, check_variant, reads_files};
use super::{Error, Result, field, read_json, refuse_any, validated, write_folder};
use crate::decoder::lora;
use crate::diffusion::sd3::PositionTable;
use crate::diffusion::{EXPERTS, Lora, Sd3Config, TransformerConfig, WanConfig};
use crate::init::WeightSource;
use crate::model::{ParamSpec, Unit};

/// Name of the transformer's folder.
const TRANSFORMER: &str = "transformer";

/// Name of a second transformer's folder, which is used at lower sigmas.
const SECOND: &str = "transformer_2";

/// Returns the folders of a model's transformers, and the prefix of each one's parameter names.
pub(super) fn folders(config: &TransformerConfig) -> &'static [(&'static str, &'static str)] {
    match config.boundary() {
        None => &[(TRANSFORMER, "")],
        Some(_) => &[(TRANSFORMER, EXPERTS[0]), (SECOND, EXPERTS[1])],
    }
}

/// A published model's folder, opened and checked. As a source of weights it provides the transformer's.
#[derive(Debug)]
pub struct DiffusersFolder {
    path: PathBuf,
    transformer: TransformerConfig,
    weights: WeightFiles,
    /// Decoder of latents; for videos the error if it is not supported.
    decoder: Result<LatentDecoderFolder>,
    /// Frames and pixels per side of a latent.
    zoom: (i64, i64),
    shift: f64,
}

impl DiffusersFolder {
    /// Opens the folder at `path`. Weights are those of the `variant`, such as `fp16`, in each folder that
    /// has it.
    ///
    /// # Errors
    /// [`Error`], which names the file and the field or tensor in it. Causes are an unsupported class or
    /// feature, a tensor that is missing, unknown or of another shape, a broken file, or a variant that no
    /// folder has.
    pub fn open(path: &Path, variant: Option<&str>) -> Result<DiffusersFolder> {
        let (transformer, weights) = transformers(path, variant)?;
        check_variant(path, variant)?;
        weights.check(&transformer.units(), |name| name == PositionTable::NAME)?;
        let vae = path.join("vae");
        let (decoder, zoom) = match &transformer {
            TransformerConfig::Sd3(_) => {
                let decoder = LatentDecoderFolder::of_images(&vae, variant)?;
                let zoom = decoder.config().zoom();
                (Ok(decoder), zoom)
            }
            TransformerConfig::Wan(_) => {
                let zoom = video_zoom(&vae)?;
                let channels = transformer.latents().channels;
                (LatentDecoderFolder::of_videos(&vae, channels, zoom, variant), zoom)
            }
        };
        let shift = shift(&path.join("scheduler"))?;
        Ok(DiffusersFolder { path: path.to_owned(), transformer, weights, decoder, zoom, shift })
    }

    /// Returns the transformer's shape.
    pub fn transformer_config(&self) -> &TransformerConfig {
        &self.transformer
    }

    /// Returns the decoder of latents.
    ///
    /// # Errors
    /// The unsupported part of the decoder's file. Only a video model opens with such a decoder, since its
    /// latents are useful by themselves.
    pub fn decoder(&self) -> std::result::Result<&LatentDecoderFolder, &Error> {
        self.decoder.as_ref()
    }

    /// Returns the size in latents of this many frames and pixels per side; `None` if it is not whole.
    pub fn latent_sizes(&self, [frames, height, width]: [i64; 3]) -> Option<[i64; 3]> {
        let (in_time, of_sides) = self.zoom;
        // The first frame is a latent of its own.
        let fits =
            frames > 0 && (frames - 1) % in_time == 0 && height % of_sides == 0 && width % of_sides == 0;
        fits.then(|| [(frames - 1) / in_time + 1, height / of_sides, width / of_sides])
    }

    /// Returns the frames and pixels per side of a latent.
    pub fn zoom(&self) -> (i64, i64) {
        self.zoom
    }

    /// Returns the scheduler's shift of the sigmas towards noise.
    pub fn shift(&self) -> f64 {
        self.shift
    }
}

reads_files!(DiffusersFolder);

/// Writes the new folder `to`: a copy of the folder `from` with the `weights` of its transformer, or of both,
/// rounded to `dtype`. It gets its name once it is complete and on disk.
///
/// # Errors
/// The errors of [`write_folder`].
pub fn write_diffusers_folder(
    to: &Path,
    from: &DiffusersFolder,
    weights: &dyn WeightSource,
    dtype: ExportDtype,
) -> crate::Result<()> {
    if is_inside(to, &from.path) {
        // The copy would contain itself.
        let inside = std::io::Error::other("it is inside the model's own folder; choose another folder");
        return Err(failed(to)(inside).into());
    }
    let folders = folders(&from.transformer);
    let mut units = from.transformer.units();
    let mut weights = WithTable { table: None, weights };
    if let TransformerConfig::Sd3(config) = &from.transformer {
        // diffusers stores its own table among the weights.
        let table = weights.table.insert(PositionTable::new(config)?);
        units.push(Unit { name: "positions".into(), params: vec![table.spec()], trainable: false });
    }
    write_whole(to, |aside| {
        copy_folder(&from.path, aside, &|name| folders.iter().any(|(folder, _)| *folder == name))?;
        for (name, prefix) in folders {
            let contents = FolderContents {
                kind: FolderKind::Transformer,
                config: read_json(&from.path.join(name).join("config.json"))?,
                copied: &[],
                made: &[],
                units: &of_transformer(&units, prefix),
                weights: &weights,
                dtype,
            };
            write_folder(&aside.join(name), &contents)?;
        }
        Ok(())
    })
}

/// Returns true if the new folder `to` would be inside `folder`, at any depth.
fn is_inside(to: &Path, folder: &Path) -> bool {
    let there = std::path::absolute(to)
        .ok()
        .and_then(|to| to.ancestors().skip(1).find_map(|ancestor| ancestor.canonicalize().ok()));
    let folder = folder.canonicalize();
    there.zip(folder.ok()).is_some_and(|(there, folder)| there.starts_with(folder))
}

/// Writes the new folder `to` with the adapters `lora` of a transformer of the shape `config`, in the format
/// of diffusers' pipelines. Those of a pair are in two folders, `transformer` and `transformer_2`.
///
/// # Errors
/// The errors of [`write_folder`].
pub fn write_image_adapter(
    to: &Path,
    (config, lora): (&TransformerConfig, &Lora),
    weights: &dyn WeightSource,
    dtype: ExportDtype,
) -> crate::Result<()> {
    let units = config.adapter_units(lora)?;
    let write = |to: &Path, units: &[Unit]| {
        let (kind, config) = (FolderKind::ImageAdapter, Map::new());
        write_folder(to, &FolderContents { kind, config, copied: &[], made: &[], units, weights, dtype })
    };
    if config.boundary().is_none() {
        return write(to, &units);
    }
    write_whole(to, |aside| {
        for (name, prefix) in folders(config) {
            let own = of_transformer(&units, prefix);
            if !own.is_empty() {
                write(&aside.join(name), &own)?;
            }
        }
        Ok(())
    })
}

/// Returns the units with only the parameters whose names begin with `prefix`.
fn of_transformer(units: &[Unit], prefix: &str) -> Vec<Unit> {
    let own = |unit: &Unit| {
        let mut unit = unit.clone();
        unit.params.retain(|spec| spec.name.trim_start_matches(lora::PREFIX).starts_with(prefix));
        unit
    };
    units.iter().map(own).filter(|unit| !unit.params.is_empty()).collect()
}

struct WithTable<'a> {
    table: Option<PositionTable>,
    weights: &'a dyn WeightSource,
}

impl WeightSource for WithTable<'_> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        match &self.table {
            Some(table) if spec.name == PositionTable::NAME => table.read(spec, range, values),
            _ => self.weights.read(spec, range, values),
        }
    }
}

/// Copies a folder to a new one, except for the top-level entries that `is_left_out`.
fn copy_folder(from: &Path, to: &Path, is_left_out: &dyn Fn(&str) -> bool) -> Result<()> {
    let unreadable = |source| Error::Read { path: from.to_owned(), source };
    fs::create_dir_all(to).map_err(failed(to))?;
    for entry in fs::read_dir(from).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let (name, path) = (entry.file_name(), entry.path());
        let target = to.join(&name);
        // Hidden entries are leftovers of a download.
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

/// The field read from `model_index.json`.
#[derive(Deserialize)]
struct IndexFile {
    boundary_ratio: Option<f64>,
}

/// Reads the transformer of a model, or its pair, and their weights.
fn transformers(path: &Path, variant: Option<&str>) -> Result<(TransformerConfig, WeightFiles)> {
    let mut config = transformer_config(&path.join(TRANSFORMER))?;
    let index = path.join("model_index.json");
    let boundary = if index.exists() { read_json::<IndexFile>(&index)?.boundary_ratio } else { None };
    let second = path.join(SECOND);
    match (boundary, second.exists()) {
        (None, false) => {}
        (None, true) => {
            let problem = format!("is missing, but the second transformer {} exists", second.display());
            return Err(field(&index, "boundary_ratio", problem));
        }
        (Some(_), false) => {
            let problem = format!("is set, but the second transformer {} does not exist", second.display());
            return Err(field(&index, "boundary_ratio", problem));
        }
        (Some(ratio), true) => {
            if transformer_config(&second)? != config {
                let path = second.join("config.json");
                return Err(field(&path, "_class_name", "or a size differs from `transformer`"));
            }
            let TransformerConfig::Wan(wan) = &mut config else {
                return Err(field(
                    &index,
                    "boundary_ratio",
                    "is set, but only Wan's transformers come in pairs",
                ));
            };
            wan.boundary_ratio = Some(ratio);
            validated(&index, wan.validate())?;
        }
    }
    let mut weights = WeightFiles::empty(path);
    for (name, prefix) in folders(&config) {
        let own = WeightFiles::open_variant(&path.join(name), DIFFUSERS_STEM, variant)?;
        weights.join(own.renamed(|name| format!("{prefix}{name}"))?);
    }
    Ok((config, weights))
}

/// Returns the shape that the transformer's `config.json` describes.
pub(super) fn transformer_config(folder: &Path) -> Result<TransformerConfig> {
    let path = folder.join("config.json");
    let file: Value = read_json(&path)?;
    let understood = |source| Error::Json { path: path.clone(), hint: "", source };
    match class_of(&file) {
        "SD3Transformer2DModel" => {
            serde_json::from_value::<Sd3File>(file).map_err(understood)?.into_config(&path)
        }
        "WanTransformer3DModel" => {
            serde_json::from_value::<WanFile>(file).map_err(understood)?.into_config(&path)
        }
        found => {
            let problem = format!("is {found}, must be SD3Transformer2DModel or WanTransformer3DModel");
            Err(field(&path, "_class_name", problem))
        }
    }
}

/// Fields read from the `config.json` of Wan's transformer.
#[derive(Deserialize)]
struct WanFile {
    patch_size: [i64; 3],
    num_attention_heads: i64,
    attention_head_dim: i64,
    in_channels: i64,
    out_channels: Option<i64>,
    text_dim: i64,
    freq_dim: i64,
    ffn_dim: i64,
    num_layers: usize,
    cross_attn_norm: bool,
    qk_norm: Option<String>,
    eps: f64,
    image_dim: Option<i64>,
    added_kv_proj_dim: Option<i64>,
    #[serde(default = "rope_default")]
    rope_max_seq_len: i64,
}

impl WanFile {
    fn into_config(self, path: &Path) -> Result<TransformerConfig> {
        let refuse = |holds: bool, name: &str, problem: &str| {
            if holds { Ok(()) } else { Err(field(path, name, problem)) }
        };
        let normed = self.qk_norm.as_deref() == Some("rms_norm_across_heads");
        refuse(normed, "qk_norm", "must be `rms_norm_across_heads`")?;
        let plain = self.image_dim.is_none() && self.added_kv_proj_dim.is_none();
        refuse(plain, "image_dim", "or `added_kv_proj_dim` is set, but only text conditioning is supported")?;
        let same = self.out_channels.is_none_or(|channels| channels == self.in_channels);
        refuse(same, "out_channels", "differs from `in_channels`, but only text conditioning is supported")?;
        let config = WanConfig {
            patch_size: self.patch_size,
            num_attention_heads: self.num_attention_heads,
            attention_head_dim: self.attention_head_dim,
            in_channels: self.in_channels,
            text_dim: self.text_dim,
            freq_dim: self.freq_dim,
            ffn_dim: self.ffn_dim,
            num_layers: self.num_layers,
            cross_attn_norm: self.cross_attn_norm,
            eps: self.eps,
            rope_max_seq_len: self.rope_max_seq_len,
            boundary_ratio: None,
        };
        validated(path, config.validate())?;
        Ok(TransformerConfig::Wan(config))
    }
}

/// Fields read from the `config.json` of Stable Diffusion 3's transformer.
#[derive(Deserialize)]
struct Sd3File {
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

impl Sd3File {
    fn into_config(self, path: &Path) -> Result<TransformerConfig> {
        let qk_rms_norm = match self.qk_norm.as_deref() {
            None => false,
            Some("rms_norm") => true,
            Some(other) => return Err(field(path, "qk_norm", format!("is `{other}`, must be rms_norm"))),
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
            let problem = format!("is {}, must be the inner size {inner}", self.caption_projection_dim);
            return Err(field(path, "caption_projection_dim", problem));
        }
        if config.out_channels != config.in_channels {
            let problem = format!("is {}, must equal in_channels", config.out_channels);
            return Err(field(path, "out_channels", problem));
        }
        Ok(TransformerConfig::Sd3(config))
    }
}

/// Fields read from `scheduler/scheduler_config.json`.
#[derive(Deserialize)]
struct SchedulerFile {
    #[serde(rename = "_class_name")]
    class_name: String,
    #[serde(default = "one")]
    shift: f64,
    #[serde(default = "one")]
    flow_shift: f64,
    #[serde(default)]
    use_flow_sigmas: bool,
    #[serde(default)]
    use_dynamic_shifting: bool,
    #[serde(default = "a_thousand")]
    num_train_timesteps: f64,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Fields that change a scheduler's sigmas or steps.
const OTHER_SIGMAS: [&str; 6] = [
    "invert_sigmas",
    "shift_terminal",
    "stochastic_sampling",
    "use_beta_sigmas",
    "use_exponential_sigmas",
    "use_karras_sigmas",
];

fn shift(folder: &Path) -> Result<f64> {
    let path = folder.join("scheduler_config.json");
    let file: SchedulerFile = read_json(&path)?;
    let (name, shift) = match file.class_name.as_str() {
        "FlowMatchEulerDiscreteScheduler" => ("shift", file.shift),
        // In Wan's folders; its sigmas are those of Euler's method, the one used here.
        "UniPCMultistepScheduler" if file.use_flow_sigmas => ("flow_shift", file.flow_shift),
        found => {
            let problem = format!("is `{found}`, must be FlowMatchEulerDiscreteScheduler");
            return Err(field(&path, "_class_name", problem));
        }
    };
    if file.use_dynamic_shifting {
        return Err(field(&path, "use_dynamic_shifting", "is true, but only a constant shift is supported"));
    }
    let problem = "is set, but only evenly spaced, shifted sigmas are supported";
    refuse_any(&path, &file.others, &OTHER_SIGMAS, problem)?;
    if file.num_train_timesteps != a_thousand() {
        return Err(field(
            &path,
            "num_train_timesteps",
            "must be 1000: models receive the timestep 1000 sigma",
        ));
    }
    if shift > 0.0 { Ok(shift) } else { Err(field(&path, name, "must be above 0")) }
}

/// Reads the `config.json` of a part that must have the class `class`.
pub(super) fn read_config<T: DeserializeOwned>(folder: &Path, class: &str) -> Result<T> {
    let path = folder.join("config.json");
    let file: Value = read_json(&path)?;
    let found = class_of(&file);
    if found != class {
        return Err(field(&path, "_class_name", format!("is {found}, must be {class}")));
    }
    serde_json::from_value(file).map_err(|source| Error::Json { path, hint: "", source })
}

fn class_of(file: &Value) -> &str {
    file["_class_name"].as_str().unwrap_or("missing")
}

fn one() -> f64 {
    1.0
}

fn a_thousand() -> f64 {
    1000.0
}

fn rope_default() -> i64 {
    1024
}
