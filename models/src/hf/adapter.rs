//! Adapters as PEFT publishes them: `adapter_config.json` and `adapter_model.safetensors`; and merging them.

use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::Tensor;

use super::weights::WeightFiles;
use super::{Error, Result, field, read_json, refuse_any, validated};
use crate::decoder::{self, AdapterShape, DecoderConfig, LoraConfig, LoraTarget, ModulePattern, lora};
use crate::diffusion::Lora;
use crate::init::WeightSource;
use crate::model::{Init, ParamSpec, Part};

/// A folder with an adapter, opened and checked.
#[derive(Debug)]
pub struct AdapterFolder {
    lora: LoraConfig,
    weights: WeightFiles,
}

/// What matters of an `adapter_config.json`.
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
    bias: Option<String>,
    rank_pattern: Option<Map<String, Value>>,
    alpha_pattern: Option<Map<String, Value>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Fields of PEFT with which an adapter computes something else, though its tensors look the same.
const VARIANTS: [&str; 7] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
];

impl AdapterFolder {
    /// Opens the folder at `path` with an adapter for a model of the shape `config`. Which matrices have one is read
    /// from the tensors' names.
    ///
    /// # Errors
    /// [`Error`], which names the file and in it the field or the tensor.
    pub fn open(path: &Path, config: &DecoderConfig) -> Result<AdapterFolder> {
        let config_path = path.join("adapter_config.json");
        let file: AdapterConfig = read_json(&config_path)?;
        let refuse = |holds: bool, field: &str, problem: &str| {
            let problem = problem.to_owned();
            let error = || Error::Field { path: config_path.clone(), field: field.to_owned(), problem };
            if holds { Ok(()) } else { Err(error()) }
        };
        refuse(file.peft_type == "LORA", "peft_type", "is another than `LORA`")?;
        refuse(!file.use_dora, "use_dora", "is true; there is plain LoRA here")?;
        refuse(!file.fan_in_fan_out, "fan_in_fan_out", "is true; matrices are [out, in] here")?;
        let no_bias = file.bias.as_deref().is_none_or(|bias| bias == "none");
        refuse(no_bias, "bias", "is another than `none`")?;
        refuse_any(&config_path, &file.others, &VARIANTS, "is there; there is plain LoRA here")?;

        let weights = WeightFiles::open_file(&path.join("adapter_model.safetensors"))?;
        let is_there = |target: &LoraTarget| {
            weights.contains(&lora::names(&format!("model.layers.0.{}.weight", target.name()))[0])
        };
        let targets = LoraTarget::ALL.into_iter().filter(is_there).collect();
        let holds = (0.0..1.0).contains(&file.lora_dropout);
        refuse(holds, "lora_dropout", "is not from 0 to below 1")?;
        let lora = LoraConfig {
            rank: file.r,
            alpha: file.lora_alpha,
            rslora: file.use_rslora,
            rank_pattern: patterns(&config_path, "rank_pattern", file.rank_pattern, Value::as_i64)?,
            alpha_pattern: patterns(&config_path, "alpha_pattern", file.alpha_pattern, Value::as_f64)?,
            targets,
            dropout: file.lora_dropout,
        };
        validated(&config_path, lora.validate())?;
        weights.check(&decoder::lora_units(config, &lora), |_| false)?;
        Ok(AdapterFolder { lora, weights })
    }

    /// Its shape.
    pub fn lora_config(&self) -> &LoraConfig {
        &self.lora
    }
}

/// The entries of the field `name` of the file `path`, in their order.
fn patterns<T>(
    path: &Path,
    name: &str,
    entries: Option<Map<String, Value>>,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(ModulePattern, T)>> {
    let entries = entries.into_iter().flatten().map(|(pattern, value)| {
        let wrong = |problem: String| field(path, format!("{name}.{pattern}"), problem);
        let compiled = ModulePattern::new(&pattern)
            .ok_or_else(|| wrong("is no regular expression that is read here".to_owned()))?;
        let value =
            read(&value).ok_or_else(|| wrong(format!("is {value}, and not a number that it can be")))?;
        Ok((compiled, value))
    });
    entries.collect()
}

impl WeightSource for AdapterFolder {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> crate::Result<()> {
        Ok(self.weights.read(spec, range, values)?)
    }
}

/// The `adapter_config.json` of an adapter for the language model that `base` names.
pub fn adapter_config_file(lora: &LoraConfig, base: &str) -> Map<String, Value> {
    let modules: Vec<&str> = lora.targets.iter().map(|target| last_segment(target.name())).collect();
    let ranks = lora.rank_pattern.iter().map(|(pattern, rank)| (pattern.as_str().to_owned(), json!(rank)));
    let alphas =
        lora.alpha_pattern.iter().map(|(pattern, alpha)| (pattern.as_str().to_owned(), json!(alpha)));
    let file = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "rank_pattern": Value::Object(ranks.collect()),
        "alpha_pattern": Value::Object(alphas.collect()),
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
    });
    let Value::Object(file) = file else { unreachable!("written as an object above") };
    file
}

/// An adapter whose alpha is its rank: A and scale B, so that the products are the same where there is nothing
/// to say what alpha is.
pub struct Unscaled<'a> {
    /// The adapter's weights.
    pub adapter: &'a dyn WeightSource,
    /// What its products are multiplied by.
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

/// The shape of a model's adapters.
pub trait Adapters {
    /// That of the adapter of the weight of this name, if it has one.
    fn adapter_of(&self, name: &str) -> Option<AdapterShape>;
}

impl Adapters for LoraConfig {
    fn adapter_of(&self, name: &str) -> Option<AdapterShape> {
        let module = name.strip_suffix(".weight")?;
        let is_there = self.targets.iter().any(|target| module.ends_with(&format!(".{}", target.name())));
        is_there.then(|| self.shape_of(module))
    }
}

impl Adapters for Lora {
    fn adapter_of(&self, name: &str) -> Option<AdapterShape> {
        let module = name.strip_suffix(".weight")?;
        let shape = AdapterShape { rank: self.rank, scale: self.scale };
        self.modules.iter().any(|name| name == module).then_some(shape)
    }
}

/// A model's weights with its adapter's products added to them: W + scale B A, in fp32.
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
                self.add_product(part, shape, place, range.clone(), values)?;
            }
            first_row += part.rows as usize;
        }
        Ok(())
    }
}

impl Merged<'_> {
    /// Adds the product of `part`, whose rows of `columns` values begin at `first_row`, to those in `range`.
    fn add_product(
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
        let rank = shape.rank as usize;
        let [a_name, b_name] = lora::names(&part.name);
        let a = self.matrix(&a_name, (rank, columns), 0..rank)?;
        let b = self.matrix(&b_name, (part.rows as usize, rank), rows.clone())?;
        let product: Vec<f32> = b.f_mm(&a)?.f_mul_scalar(shape.scale)?.f_flatten(0, -1)?.try_into()?;
        let skipped = start - (first_row + rows.start) * columns;
        for (value, product) in
            values[start - range.start..end - range.start].iter_mut().zip(&product[skipped..])
        {
            *value += product;
        }
        Ok(())
    }

    /// Rows of an adapter's tensor of `size`.
    fn matrix(&self, name: &str, size: (usize, usize), rows: Range<usize>) -> crate::Result<Tensor> {
        let (all_rows, columns) = (size.0 as i64, size.1 as i64);
        let parts = vec![Part { name: name.to_owned(), rows: all_rows }];
        let shape = vec![all_rows, columns];
        let spec = ParamSpec { name: name.to_owned(), shape, parts, init: Init::Zeros, decay: true };
        let mut values = vec![0.0; rows.len() * size.1];
        self.adapter.read(&spec, rows.start * size.1..rows.end * size.1, &mut values)?;
        Ok(Tensor::f_from_slice(&values)?.f_view([rows.len() as i64, columns])?)
    }
}

fn last_segment(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}
