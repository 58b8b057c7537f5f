//! Rotary scaling in a GGUF file: keys, and a tensor of factors.

use std::f64::consts::PI;
use std::os::unix::fs::FileExt;

use serde_json::{Value as Json, json};

use super::super::encoding::Encoding;
use super::super::{Error, Result};
use super::config::Keys;
use super::file::{TensorInfo, Value};

/// Tensor of the factors that divide the frequencies.
pub(super) const FACTORS: &str = "rope_freqs.weight";

/// Keys of scalings that are read.
pub(super) const SCALING: [&str; 4] = [
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
];

/// Low and high factors of frequencies and the original length: those of every Llama 3.1 to 3.3.
const LLAMA3: (f64, f64, f64) = (1.0, 4.0, 8192.0);

/// Returns the `rope_scaling` of a `config.json`.
pub(super) fn scaling(keys: &Keys, head_dim: i64) -> Result<Json> {
    let kind = match keys.value("rope.scaling.type") {
        None => "none",
        Some(Value::Text(kind)) => kind,
        Some(_) => return Err(keys.wrong("rope.scaling.type", "is no text")),
    };
    let factor = keys.number("rope.scaling.factor")?.or(keys.number("rope.scale_linear")?);
    let given = || factor.ok_or_else(|| keys.wrong("rope.scaling.factor", "is missing"));
    let scaled = match kind {
        "none" => match factor {
            None | Some(0.0 | 1.0) => Json::Null,
            // Older files have the factor alone.
            Some(factor) => json!({"rope_type": "linear", "factor": factor}),
        },
        "linear" => json!({"rope_type": "linear", "factor": given()?}),
        "yarn" => json!({
            "rope_type": "yarn",
            "factor": given()?,
            "original_max_position_embeddings": keys.number("rope.scaling.original_context_length")?,
        }),
        other => {
            let problem =
                format!("is `{other}`, must be none, linear or yarn: give the published model's folder");
            return Err(keys.wrong("rope.scaling.type", &problem));
        }
    };
    match keys.tensor(FACTORS) {
        None => Ok(scaled),
        Some(_) if !scaled.is_null() => {
            Err(keys.wrong("rope.scaling.type", &format!("is set, and so are the factors of `{FACTORS}`")))
        }
        Some(tensor) => of_factors(keys, tensor, head_dim),
    }
}

/// Returns the scaling `llama3` whose factors the tensor has. The file has only these, not the numbers that they
/// are computed of.
fn of_factors(keys: &Keys, tensor: &TensorInfo, head_dim: i64) -> Result<Json> {
    let refuse = |problem: &str| {
        let (path, name) = (keys.file.path.clone(), tensor.name.clone());
        Err(Error::Tensor { path, name, problem: problem.to_owned() })
    };
    if tensor.encoding != Encoding::F32 || tensor.shape != [head_dim / 2] {
        return refuse("is not F32, or has not a factor for each pair of a head");
    }
    let mut bytes = vec![0; (tensor.place.end - tensor.place.start) as usize];
    let read = keys.file.file.read_exact_at(&mut bytes, tensor.place.start);
    read.map_err(|source| Error::Read { path: keys.file.path.clone(), source })?;
    let mut factors = vec![0.0; tensor.shape[0] as usize];
    tensor.encoding.decode(&bytes, 0, &mut factors);
    let factors: Vec<f64> = factors.into_iter().map(f64::from).collect();
    let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
    let factor = factors.iter().copied().fold(1.0, f64::max);
    let is_alike = |(index, found): (usize, &f64)| {
        let expected = llama3_factor(theta.powf(-2.0 * index as f64 / head_dim as f64), factor);
        (found / expected - 1.0).abs() < 1e-4
    };
    if !factors.iter().enumerate().all(is_alike) {
        return refuse(
            "has factors that are not those of Llama 3.1 to 3.3: give the published model's folder",
        );
    }
    let (low, high, original) = LLAMA3;
    Ok(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original as i64,
    }))
}

/// Returns the number that divides `frequency`: 1 for short waves, `factor` for long ones.
fn llama3_factor(frequency: f64, factor: f64) -> f64 {
    let (low, high, original) = LLAMA3;
    let turns = original * frequency / (2.0 * PI);
    if turns > high {
        return 1.0;
    }
    if turns < low {
        return factor;
    }
    let share = (turns - low) / (high - low);
    1.0 / ((1.0 - share) / factor + share)
}
