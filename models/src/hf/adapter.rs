//! Adapters in PEFT's published format, `adapter_config.json` and `adapter_model.safetensors`, and merging
//! them.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::weights::{WeightFiles, reads_files};
use super::{Error, Result, field, read_json, refuse_any, validated};
use crate::decoder::{
    self, AdapterShape, DecoderConfig, LoraConfig, LoraTarget, LoraTargets, ModulePattern, lora,
};
use crate::diffusion::Lora;
use crate::init::{Seed, WeightSource};
use crate::model::{Init, ParamSpec, Part};

/// A folder with an adapter, opened and checked.
#[derive(Debug)]
pub struct AdapterFolder {
    lora: LoraConfig,
    weights: WeightFiles,
}

const CONFIG: &str = "adapter_config.json";

/// The fields read from an `adapter_config.json`.
#[derive(Deserialize)]
struct AdapterConfig {
    peft_type: String,
    r: i64,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    init_lora_weights: Option<Value>,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
    bias: Option<String>,
    rank_pattern: Option<Map<String, Value>>,
    alpha_pattern: Option<Map<String, Value>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// The fields of an `adapter_config.json` that name the base model.
#[derive(Deserialize)]
struct Base {
    base_model_name_or_path: Option<String>,
    revision: Option<String>,
}

/// Fields of PEFT that change the computation of an adapter, though its tensors look the same.
const VARIANTS: [&str; 11] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
];

/// Initializations of an adapter that leave the model's weights unchanged; others subtract their part from
/// them.
const BEGINNINGS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

impl AdapterFolder {
    /// Returns true if the folder `path` contains an adapter.
    pub fn is_at(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// Returns the base model that the adapter's file names: a folder, or a name on the hub, `ORG/NAME` or
    /// `ORG/NAME@REVISION`.
    ///
    /// # Errors
    /// [`Error::Field`] if it names none.
    pub fn base_of(path: &Path) -> Result<PathBuf> {
        let config_path = path.join(CONFIG);
        let Base { base_model_name_or_path: base, revision } = read_json(&config_path)?;
        let Some(base) = base.filter(|base| !base.is_empty()) else {
            let problem = "is missing: set it to the folder of the base model, or to its name on the hub";
            return Err(Self::base_problem(path, problem.to_owned()));
        };
        Ok(match revision {
            Some(revision) if !Path::new(&base).exists() => format!("{base}@{revision}").into(),
            _ => base.into(),
        })
    }

    /// Returns an error about the base model that the adapter in the folder `path` names.
    pub fn base_problem(path: &Path, problem: String) -> Error {
        field(&path.join(CONFIG), "base_model_name_or_path", problem)
    }

    /// Opens the folder at `path` with an adapter for a model of the shape `config`. The matrices with an
    /// adapter follow from the tensors' names.
    ///
    /// # Errors
    /// [`Error`], which names the file and the field or tensor in it.
    pub fn open(path: &Path, config: &DecoderConfig) -> Result<AdapterFolder> {
        let config_path = path.join(CONFIG);
        let file: AdapterConfig = read_json(&config_path)?;
        let refuse = |holds: bool, field: &str, problem: &str| {
            let problem = problem.to_owned();
            let error = || Error::Field { path: config_path.clone(), field: field.to_owned(), problem };
            if holds { Ok(()) } else { Err(error()) }
        };
        refuse(file.peft_type == "LORA", "peft_type", "must be `LORA`")?;
        refuse(!file.fan_in_fan_out, "fan_in_fan_out", "is true; matrices are [out, in] here")?;
        let no_bias = file.bias.as_deref().is_none_or(|bias| bias == "none");
        refuse(no_bias, "bias", "must be `none`")?;
        refuse_any(
            &config_path,
            &file.others,
            &VARIANTS,
            "is not supported: adapters can be LoRA, rsLoRA and DoRA",
        )?;
        let leaves_weights = match &file.init_lora_weights {
            Some(Value::String(how)) => BEGINNINGS.contains(&how.as_str()),
            _ => true,
        };
        let help = "changes the model's weights as well: have PEFT save it as plain LoRA, by \
                    `path_initial_model_for_weight_conversion`";
        refuse(leaves_weights, "init_lora_weights", help)?;
        let whole = file.modules_to_save.iter().flatten().next();
        let problem = whole.map(|name| {
            format!(
                "names `{name}`, a fully trained module next to the adapters: merge them with PEFT's `merge_and_unload`"
            )
        });
        refuse(whole.is_none(), "modules_to_save", &problem.unwrap_or_default())?;

        let weights = WeightFiles::open_file(&path.join("adapter_model.safetensors"))?.renamed(saved_name)?;
        let holds = (0.0..1.0).contains(&file.lora_dropout);
        refuse(holds, "lora_dropout", "must be at least 0 and below 1")?;
        let lora = LoraConfig {
            rank: file.r,
            alpha: file.lora_alpha,
            rslora: file.use_rslora,
            rank_pattern: patterns(&config_path, "rank_pattern", file.rank_pattern, Value::as_i64)?,
            alpha_pattern: patterns(&config_path, "alpha_pattern", file.alpha_pattern, Value::as_f64)?,
            targets: targets(&weights, config),
            dora: file.use_dora,
            dropout: file.lora_dropout,
        };
        validated(&config_path, lora.validate(config))?;
        weights.check(&decoder::lora_units(config, &lora), |_| false)?;
        Ok(AdapterFolder { lora, weights })
    }

    /// Returns the shape.
    pub fn lora_config(&self) -> &LoraConfig {
        &self.lora
    }
}

/// Returns the matrices with adapters in a model of this shape, from the tensors' names. Includes matrices of
/// other models, so that they can be refused by name.
/// Name under which PEFT saves a tensor, for one that a model's `state_dict` has: with the adapter's name in it, such as
/// `default`.
fn saved_name(name: &str) -> String {
    for part in [".lora_A", ".lora_B", ".lora_magnitude_vector"] {
        let Some((module, rest)) = name.split_once(&format!("{part}.")) else { continue };
        return match rest.split_once('.') {
            Some((_, "weight")) if part == ".lora_magnitude_vector" => format!("{module}{part}"),
            Some((_, "weight")) => format!("{module}{part}.weight"),
            _ => name.to_owned(),
        };
    }
    name.to_owned()
}

fn targets(weights: &WeightFiles, config: &DecoderConfig) -> LoraTargets {
    let is_there = |layer: usize, target: &LoraTarget| {
        let [a, _] = lora::names(&target.modules_in(config, layer)[0]);
        weights.contains(&a)
    };
    let foreign: Vec<LoraTarget> = LoraTarget::foreign_to(config).collect();
    let of_layer = |layer| {
        let all = LoraTarget::of_layer(config, layer).into_iter().chain(foreign.iter().copied());
        all.filter(|target| is_there(layer, target)).collect()
    };
    LoraTargets::of_layers((0..config.num_hidden_layers).map(of_layer).collect())
}

/// Reads the entries of the field `name` of the file `path`, in order.
fn patterns<T>(
    path: &Path,
    name: &str,
    entries: Option<Map<String, Value>>,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(ModulePattern, T)>> {
    let entries = entries.into_iter().flatten().map(|(pattern, value)| {
        let wrong = |problem: String| field(path, format!("{name}.{pattern}"), problem);
        let compiled = ModulePattern::new(&pattern)
            .ok_or_else(|| wrong("is not a supported regular expression".to_owned()))?;
        let value = read(&value).ok_or_else(|| wrong(format!("is {value}, which is not a valid number")))?;
        Ok((compiled, value))
    });
    entries.collect()
}

reads_files!(AdapterFolder);

/// Returns the `adapter_config.json` of an adapter for a language model of a shape, which `base` names, on the hub at `revision` if
/// it is not the newest.
pub fn adapter_config_file(
    (lora, model): (&LoraConfig, &DecoderConfig),
    base: &str,
    revision: Option<&str>,
) -> Map<String, Value> {
    let (modules, layers) = lora.targets.names(model);
    let ranks = lora.rank_pattern.iter().map(|(pattern, rank)| (pattern.as_str().to_owned(), json!(rank)));
    let alphas =
        lora.alpha_pattern.iter().map(|(pattern, alpha)| (pattern.as_str().to_owned(), json!(alpha)));
    let file = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "rank_pattern": Value::Object(ranks.collect()),
        "alpha_pattern": Value::Object(alphas.collect()),
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "layers_to_transform": layers,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
    });
    let Value::Object(file) = file else { unreachable!("written as an object above") };
    file
}

/// An adapter with its alpha equal to its rank: A and scale B, so that the products stay the same in a format
/// without alpha.
pub struct Unscaled<'a> {
    /// The adapter's weights.
    pub adapter: &'a dyn WeightSource,
    /// Factor of its products.
    pub scale: f64,
}

impl WeightSource for Unscaled<'_> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        self.adapter.read(spec, range, values)?;
        if lora::is_second(spec) {
            values.iter_mut().for_each(|value| *value = (f64::from(*value) * self.scale) as f32);
        }
        Ok(())
    }
}

/// The weights of a model and of its adapter, each from its own source.
pub struct WithAdapter<B, A> {
    /// The model's.
    pub base: B,
    /// The adapter's.
    pub adapter: A,
}

impl<B: WeightSource, A: WeightSource> WeightSource for WithAdapter<B, A> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        match lora::is_adapter(spec) {
            true => self.adapter.read(spec, range, values),
            false => self.base.read(spec, range, values),
        }
    }
}

/// The weights of a model and of a new adapter, initialized from a seed. Magnitudes are the norms of the
/// model's rows, so that the adapter has no effect at first.
pub struct NewAdapter<B> {
    /// The model's.
    pub base: B,
    /// The adapter's.
    pub seed: Seed,
}

impl<B: WeightSource> WeightSource for NewAdapter<B> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        let Some((matrix, columns)) = lora::matrix_of_magnitudes(spec) else {
            let NewAdapter { base, seed } = self;
            return WithAdapter { base, adapter: seed }.read(spec, range, values);
        };
        let at_once = (ROWS_BYTES / size_of::<f32>() / columns).max(1);
        let size = (spec.shape[0] as usize, columns);
        for (number, norms) in values.chunks_mut(at_once).enumerate() {
            let first = range.start + number * at_once;
            let rows = matrix_of(&self.base, &matrix, size, first..first + norms.len())?;
            norms.copy_from_slice(&Vec::try_from(row_norms(&rows)?)?);
        }
        Ok(())
    }
}

/// Maximum bytes of rows that are read for their norms at a time.
const ROWS_BYTES: usize = 1 << 24;

/// Returns the norms of the rows of fp32 `[rows, columns]`: fp32 `[rows]`.
fn row_norms(rows: &Tensor) -> crate::Result<Tensor> {
    let norms = rows.f_norm_scalaropt_dim_dtype(2, [1i64].as_slice(), false, Kind::Double)?;
    Ok(norms.f_to_kind(Kind::Float)?.f_clamp_min(lora::LEAST_NORM)?)
}

/// Returns rows of the tensor `name` of `size`.
fn matrix_of(
    source: &dyn WeightSource,
    name: &str,
    size: (usize, usize),
    rows: Range<usize>,
) -> crate::Result<Tensor> {
    let (all_rows, columns) = (size.0 as i64, size.1 as i64);
    let parts = vec![Part { name: name.to_owned(), rows: all_rows }];
    let shape = vec![all_rows, columns];
    let spec = ParamSpec { name: name.to_owned(), shape, parts, init: Init::Zeros, decay: true, offset: 0.0 };
    let mut values = vec![0.0; rows.len() * size.1];
    source.read(&spec, rows.start * size.1..rows.end * size.1, &mut values)?;
    Ok(Tensor::f_from_slice(&values)?.f_view([rows.len() as i64, columns])?)
}

/// The shape of a model's adapters.
pub trait Adapters {
    /// Returns the shape of the adapter of the weight `name`, if it has one.
    fn adapter_of(&self, name: &str) -> Option<AdapterShape>;
}

impl Adapters for LoraConfig {
    fn adapter_of(&self, name: &str) -> Option<AdapterShape> {
        let module = name.strip_suffix(".weight")?;
        let (layer, target) = module.strip_prefix("model.layers.")?.split_once('.')?;
        let is_there = self.targets.of(layer.parse().ok()?).iter().any(|it| it.is_named(target));
        is_there.then(|| self.shape_of(module))
    }
}

impl Adapters for Lora {
    fn adapter_of(&self, name: &str) -> Option<AdapterShape> {
        let module = name.strip_suffix(".weight")?;
        let shape = AdapterShape { rank: self.rank, scale: self.scale, dora: false };
        self.modules.iter().any(|name| name == module).then_some(shape)
    }
}

/// A model's weights with its adapter's products added to them, in fp32. With magnitudes, rows are scaled: W
/// + scale B A, times m / ||W + scale B A||.
pub struct Merged<'a> {
    /// The model's weights.
    pub base: &'a dyn WeightSource,
    /// The adapter's.
    pub adapter: &'a dyn WeightSource,
    /// The adapter's shape.
    pub lora: &'a dyn Adapters,
}

impl WeightSource for Merged<'_> {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        self.base.read(spec, range.clone(), values)?;
        let mut first_row = 0;
        for part in &spec.parts {
            if let Some(shape) = self.lora.adapter_of(&part.name) {
                let place = (first_row, spec.shape[1] as usize);
                self.adapt(part, shape, place, range.clone(), values)?;
            }
            first_row += part.rows as usize;
        }
        Ok(())
    }
}

impl Merged<'_> {
    /// Applies the adapter to those of `values`, the model's in `range`, that belong to `part`. The part's
    /// rows of `columns` values begin at `first_row`.
    fn adapt(
        &self,
        part: &Part,
        shape: AdapterShape,
        (first_row, columns): (usize, usize),
        range: Range<usize>,
        values: &mut [f32],
    ) -> crate::Result<()> {
        let start = range.start.max(first_row * columns);
        let end = range.end.min((first_row + part.rows as usize) * columns);
        if start >= end {
            return Ok(());
        }
        let rows = start / columns - first_row..end.div_ceil(columns) - first_row;
        let skipped = (start - (first_row + rows.start) * columns) as i64;
        let values = &mut values[start - range.start..end - range.start];
        let wanted = |of_rows: &Tensor| -> crate::Result<Vec<f32>> {
            Ok(of_rows.f_flatten(0, -1)?.f_narrow(0, skipped, values.len() as i64)?.try_into()?)
        };
        let product = self.product(part, shape, columns, rows.clone())?;
        if shape.dora {
            let scaled = wanted(&self.scaled(part, columns, rows, &product)?)?;
            values.copy_from_slice(&scaled);
        } else {
            let product = wanted(&product)?;
            values.iter_mut().zip(&product).for_each(|(value, product)| *value += product);
        }
        Ok(())
    }

    /// Returns rows of a part's adapter product: `[rows, columns]`.
    fn product(
        &self,
        part: &Part,
        shape: AdapterShape,
        columns: usize,
        rows: Range<usize>,
    ) -> crate::Result<Tensor> {
        let (outputs, rank) = (part.rows as usize, shape.rank as usize);
        let [a, b] = lora::names(&part.name);
        let a = matrix_of(self.adapter, &a, (rank, columns), 0..rank)?;
        let b = matrix_of(self.adapter, &b, (outputs, rank), rows)?;
        Ok(b.f_mm(&a)?.f_mul_scalar(shape.scale)?)
    }

    /// Returns rows of a part plus its product, scaled to the magnitudes: `[rows, columns]`.
    fn scaled(
        &self,
        part: &Part,
        columns: usize,
        rows: Range<usize>,
        product: &Tensor,
    ) -> crate::Result<Tensor> {
        let size = (part.rows as usize, columns);
        let sum = matrix_of(self.base, &part.name, size, rows.clone())?.f_add(product)?;
        let spec = lora::magnitudes(&part.name, part.rows, columns as i64);
        let mut magnitudes = vec![0.0; rows.len()];
        self.adapter.read(&spec, rows, &mut magnitudes)?;
        let factors = Tensor::f_from_slice(&magnitudes)?.f_div(&row_norms(&sum)?)?;
        Ok(sum.f_mul(&factors.f_unsqueeze(1)?)?)
    }
}
