//! The rotations of a `config.json`, read and written.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Result, field};
use crate::RopeScaling;

/// What a `config.json` says of rotations.
pub(super) struct RopeFields<'a> {
    /// The file.
    pub path: &'a Path,
    /// `max_position_embeddings`.
    pub max_length: f64,
    /// `rope_theta`, or what it is where files are silent.
    pub theta: f64,
    /// `rope_scaling`.
    pub scaling: Option<&'a Map<String, Value>>,
    /// Where newer files have both.
    pub parameters: Option<&'a Map<String, Value>>,
    /// Whether layers with a sliding window turn by angles of their own: without the scaling, unless newer files say otherwise.
    pub by_kind: bool,
}

/// The kinds of layers for which newer files of some families have rotations of their own.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// What positions turn by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rotations {
    /// The base of the rotary frequencies.
    pub theta: f64,
    /// How they are scaled.
    pub scaling: RopeScaling,
    /// The base of layers with a sliding window, not scaled, where they turn otherwise.
    pub sliding_theta: Option<f64>,
}

impl<'a> RopeFields<'a> {
    /// The rotations, from where the file has them.
    pub fn read(&self) -> Result<Rotations> {
        match self.parameters {
            Some(parameters) if self.by_kind && KINDS.iter().any(|&kind| parameters.contains_key(kind)) => {
                self.read_kinds(parameters)
            }
            _ => self.read_one(),
        }
    }

    fn read_one(&self) -> Result<Rotations> {
        let read = |name, fields| -> Result<_> {
            let rope = self.rope(name, fields);
            Ok((rope.optional("rope_theta")?, rope.scaling()?))
        };
        let new = self.parameters.map(|fields| read("rope_parameters", fields)).transpose()?;
        let old = self.scaling.map(|fields| read("rope_scaling", fields)).transpose()?;
        if let (Some((_, new)), Some((_, old))) = (new, old)
            && new != old
        {
            let problem =
                "is another than `rope_parameters`, which newer files have in its place: write it there";
            return Err(field(self.path, "rope_scaling", problem));
        }
        let (theta, scaling) = new.or(old).unwrap_or((None, RopeScaling::None));
        let theta = theta.unwrap_or(self.theta);
        let differs = self.by_kind && scaling != RopeScaling::None;
        Ok(Rotations { theta, scaling, sliding_theta: differs.then_some(theta) })
    }

    fn read_kinds(&self, parameters: &'a Map<String, Value>) -> Result<Rotations> {
        let read = |kind: &str, name: &'static str| -> Result<_> {
            let fields = parameters.get(kind).and_then(Value::as_object);
            let rope = self.rope(name, fields.ok_or_else(|| field(self.path, name, "is missing"))?);
            Ok((rope.optional("rope_theta")?.unwrap_or(self.theta), rope.scaling()?))
        };
        let full = read(KINDS[0], "rope_parameters.full_attention")?;
        let sliding = read(KINDS[1], "rope_parameters.sliding_attention")?;
        let (theta, scaling) = full;
        if sliding != full && sliding.1 != RopeScaling::None {
            let problem = "scales, otherwise than that of full attention; such layers are not scaled here";
            return Err(field(self.path, "rope_parameters.sliding_attention.rope_type", problem));
        }
        Ok(Rotations { theta, scaling, sliding_theta: (sliding != full).then_some(sliding.0) })
    }

    fn rope(&self, name: &'static str, fields: &'a Map<String, Value>) -> Rope<'a> {
        Rope { path: self.path, name, fields, max_length: self.max_length }
    }
}

/// A `rope_scaling`, with what its errors say.
struct Rope<'a> {
    path: &'a Path,
    name: &'static str,
    fields: &'a Map<String, Value>,
    max_length: f64,
}

impl Rope<'_> {
    fn scaling(&self) -> Result<RopeScaling> {
        if let Some(kind) = KINDS.into_iter().find(|&kind| self.fields.contains_key(kind)) {
            let problem = "is there, a rotation of some layers; write that of full attention in its place";
            return Err(field(self.path, format!("{}.{kind}", self.name), problem));
        }
        if self.optional("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(field(self.path, format!("{}.partial_rotary_factor", self.name), TURNED_WHOLE));
        }
        let kind = self.fields.get("rope_type").or_else(|| self.fields.get("type"));
        match kind.map_or(Some("default"), Value::as_str) {
            Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: self.required("factor")? }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: self.required("factor")?,
                low_freq_factor: self.required("low_freq_factor")?,
                high_freq_factor: self.required("high_freq_factor")?,
                original_max_position_embeddings: self.original_length()?,
            }),
            Some("yarn") => self.yarn(),
            kind => {
                let kind = kind.map_or_else(|| "no text".to_owned(), |kind| format!("`{kind}`"));
                let problem = format!("is {kind}; there is default, linear, llama3 and yarn");
                Err(field(self.path, format!("{}.rope_type", self.name), problem))
            }
        }
    }

    fn yarn(&self) -> Result<RopeScaling> {
        let factor = self.required("factor")?;
        // The paper's temperature, as a factor on both queries and keys.
        let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let attention_factor = match (self.optional("mscale")?, self.optional("mscale_all_dim")?) {
            (Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => scale(mscale) / scale(all),
            _ => scale(1.0),
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.optional("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.optional("beta_slow")?.unwrap_or(1.0),
            original_max_position_embeddings: self.original_length()?,
            attention_factor: self.optional("attention_factor")?.unwrap_or(attention_factor),
            truncate: match self.fields.get("truncate") {
                None | Some(Value::Null) => true,
                Some(Value::Bool(truncate)) => *truncate,
                Some(value) => {
                    let name = format!("{}.truncate", self.name);
                    return Err(field(self.path, name, format!("is {value}, and neither true nor false")));
                }
            },
        })
    }

    /// The longest text before the scaling.
    fn original_length(&self) -> Result<f64> {
        Ok(self.optional("original_max_position_embeddings")?.unwrap_or(self.max_length))
    }

    fn required(&self, name: &str) -> Result<f64> {
        self.optional(name)?.ok_or_else(|| field(self.path, format!("{}.{name}", self.name), "is missing"))
    }

    fn optional(&self, name: &str) -> Result<Option<f64>> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| {
                field(self.path, format!("{}.{name}", self.name), format!("is {value}, and not a number"))
            }),
        }
    }
}

/// What is wrong with another part of a head's elements that positions turn.
pub(super) const TURNED_WHOLE: &str = "is not 1; heads are turned whole";

/// The `rope_scaling` of a `config.json`.
pub(super) fn rope_scaling(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings as i64,
        }),
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings,
            attention_factor,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "original_max_position_embeddings": original_max_position_embeddings as i64,
            "attention_factor": attention_factor,
            "truncate": truncate,
        }),
    }
}
