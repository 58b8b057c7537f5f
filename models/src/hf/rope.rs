//! Rotations in a `config.json`, read and written.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Result, field};
use crate::RopeScaling;

/// Fields of a `config.json` that describe rotations.
pub(super) struct RopeFields<'a> {
    /// The file.
    pub path: &'a Path,
    /// `max_position_embeddings`.
    pub max_length: f64,
    /// `original_max_position_embeddings`, if the family's files have it at the top level.
    pub original_length: Option<f64>,
    /// `rope_theta`, or its default.
    pub theta: f64,
    /// `rope_scaling`.
    pub scaling: Option<&'a Map<String, Value>>,
    /// `rope_parameters`, newer files' replacement of both.
    pub parameters: Option<&'a Map<String, Value>>,
    /// Rotations that the family's files may have.
    pub kind: RopeKind,
    /// Base of those layers, if it always differs (Gemma).
    pub local_theta: Option<f64>,
}

/// Rotations that a family's files may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RopeKind {
    /// One for all layers and whole heads.
    Usual,
    /// Layers with a sliding window have their own angles: without the scaling, unless newer files differ.
    ByWindow,
    /// Like [`Self::Usual`], but heads may be rotated in part.
    InPart,
    /// Heads may be rotated in part, and every name of a scaling means `longrope` (Phi-3).
    LongInPart,
}

impl RopeKind {
    /// Returns true if heads may be rotated in part.
    pub fn turns_parts(self) -> bool {
        matches!(self, RopeKind::InPart | RopeKind::LongInPart)
    }
}

/// Kinds of layers that have their own rotations in newer files of some families.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Rotations of a model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rotations {
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Fraction of a head that is rotated, if newer files have it.
    pub partial: Option<f64>,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
    /// Base of layers with a sliding window, without scaling, if they differ.
    pub sliding_theta: Option<f64>,
}

impl<'a> RopeFields<'a> {
    /// Reads the rotations from the fields that the file has.
    pub fn read(&self) -> Result<Rotations> {
        match self.parameters {
            Some(parameters)
                if self.kind == RopeKind::ByWindow
                    && KINDS.iter().any(|&kind| parameters.contains_key(kind)) =>
            {
                self.read_kinds(parameters)
            }
            _ => self.read_one(),
        }
    }

    fn read_one(&self) -> Result<Rotations> {
        let read = |name, fields| -> Result<_> {
            let rope = self.rope(name, fields);
            Ok((rope.optional("rope_theta")?, rope.optional("partial_rotary_factor")?, rope.scaling()?))
        };
        let new = self.parameters.map(|fields| read("rope_parameters", fields)).transpose()?;
        let old = self.scaling.map(|fields| read("rope_scaling", fields)).transpose()?;
        if let (Some((.., new)), Some((.., old))) = (&new, &old)
            && new != old
        {
            let problem = "differs from `rope_parameters`, which replaces it in newer files: change it there";
            return Err(field(self.path, "rope_scaling", problem));
        }
        let (theta, partial, scaling) = new.or(old).unwrap_or((None, None, RopeScaling::None));
        let theta = theta.unwrap_or(self.theta);
        let differs = self.kind == RopeKind::ByWindow && scaling != RopeScaling::None;
        let sliding_theta = self.local_theta.or(differs.then_some(theta));
        Ok(Rotations { theta, partial, scaling, sliding_theta })
    }

    fn read_kinds(&self, parameters: &'a Map<String, Value>) -> Result<Rotations> {
        let read = |kind: &str, name: &'static str, silent: f64| -> Result<_> {
            let fields = parameters.get(kind).and_then(Value::as_object);
            let rope = self.rope(name, fields.ok_or_else(|| field(self.path, name, "is missing"))?);
            Ok((rope.optional("rope_theta")?.unwrap_or(silent), rope.scaling()?))
        };
        let full = read(KINDS[0], "rope_parameters.full_attention", self.theta)?;
        let local = self.local_theta.unwrap_or(self.theta);
        let sliding = read(KINDS[1], "rope_parameters.sliding_attention", local)?;
        let differs = sliding != full;
        if differs && sliding.1 != RopeScaling::None {
            let problem = "has a scaling other than that of full attention, which is not supported";
            return Err(field(self.path, "rope_parameters.sliding_attention.rope_type", problem));
        }
        let (theta, scaling) = full;
        let sliding_theta = (differs || self.local_theta.is_some()).then_some(sliding.0);
        Ok(Rotations { theta, partial: None, scaling, sliding_theta })
    }

    fn rope<'b>(&'b self, name: &'static str, fields: &'b Map<String, Value>) -> Rope<'b> {
        Rope { path: self.path, name, fields, of: self }
    }
}

/// A `rope_scaling`, with the context of its errors.
struct Rope<'a> {
    path: &'a Path,
    name: &'static str,
    fields: &'a Map<String, Value>,
    /// The fields next to it.
    of: &'a RopeFields<'a>,
}

impl Rope<'_> {
    fn scaling(&self) -> Result<RopeScaling> {
        if let Some(kind) = KINDS.into_iter().find(|&kind| self.fields.contains_key(kind)) {
            let problem = "is set, a rotation per kind of layer, which is not supported here: write that of full attention instead";
            return Err(field(self.path, format!("{}.{kind}", self.name), problem));
        }
        let is_phi = self.of.kind == RopeKind::LongInPart;
        let in_part = self.optional("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0);
        if in_part && !self.of.kind.turns_parts() {
            return Err(field(self.path, format!("{}.partial_rotary_factor", self.name), TURNED_WHOLE));
        }
        let kind = self.fields.get("rope_type").or_else(|| self.fields.get("type"));
        match kind.map_or(Some("default"), Value::as_str) {
            Some("default") => Ok(RopeScaling::None),
            // Older files of this family have two other names for it; read like in `transformers`.
            Some("longrope" | "su" | "yarn") if is_phi => self.longrope(),
            Some(kind @ ("linear" | "llama3")) if is_phi => {
                let problem = format!("is `{kind}`, but Phi-3 supports only `longrope`");
                Err(field(self.path, format!("{}.rope_type", self.name), problem))
            }
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
                let problem =
                    format!("is {kind}, must be default, linear, llama3 or yarn, or longrope for Phi-3");
                Err(field(self.path, format!("{}.rope_type", self.name), problem))
            }
        }
    }

    fn yarn(&self) -> Result<RopeScaling> {
        let factor = self.required("factor")?;
        // The paper's temperature, as a factor of both queries and keys.
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
                    return Err(field(self.path, name, format!("is {value}, must be true or false")));
                }
            },
        })
    }

    fn longrope(&self) -> Result<RopeScaling> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        /// Default of the family's class.
        const SILENT: f64 = 4096.0;
        let refuse =
            |name: &str, problem: String| Err(field(self.path, format!("{}.{name}", self.name), problem));
        let (own, beside) = (self.optional(ORIGINAL)?, self.of.original_length);
        if let (Some(own), Some(beside)) = (own, beside)
            && own != beside
        {
            return refuse(
                ORIGINAL,
                format!("is {own}, but {beside} next to `rope_scaling`: make them agree"),
            );
        }
        let (original, longest) = (beside.or(own).unwrap_or(SILENT), self.of.max_length);
        // Older versions always use the ratio, newer ones the written factor.
        if let Some(factor) = self.optional("factor")?
            && factor != longest / original
        {
            let ratio = longest / original;
            return refuse(
                "factor",
                format!("is {factor}, but max_position_embeddings / {ORIGINAL} is {ratio}"),
            );
        }
        Ok(RopeScaling::LongRope {
            short_factor: self.numbers("short_factor")?,
            long_factor: self.numbers("long_factor")?,
            original_max_position_embeddings: original,
            max_position_embeddings: longest,
            attention_factor: self.optional("attention_factor")?,
        })
    }

    /// Returns the maximum text length before the scaling.
    fn original_length(&self) -> Result<f64> {
        Ok(self.optional("original_max_position_embeddings")?.unwrap_or(self.of.max_length))
    }

    fn numbers(&self, name: &str) -> Result<Vec<f64>> {
        let wrong = |problem: &str| field(self.path, format!("{}.{name}", self.name), problem);
        let list = self.fields.get(name).ok_or_else(|| wrong("is missing"))?.as_array();
        let numbers = list.map(|list| list.iter().map(Value::as_f64).collect::<Option<_>>());
        numbers.flatten().ok_or_else(|| wrong("is not a list of numbers"))
    }

    fn required(&self, name: &str) -> Result<f64> {
        self.optional(name)?.ok_or_else(|| field(self.path, format!("{}.{name}", self.name), "is missing"))
    }

    fn optional(&self, name: &str) -> Result<Option<f64>> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| {
                field(
                    self.path,
                    format!("{}.{name}", self.name),
                    format!("is {value}, which is not a number"),
                )
            }),
        }
    }
}

/// Error for heads that are rotated in part.
pub(super) const TURNED_WHOLE: &str = "is not 1, but rotating part of a head is not supported";

/// Returns the `rope_scaling` of a `config.json`.
pub(super) fn rope_scaling(scaling: &RopeScaling) -> Value {
    match *scaling {
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
        // Only these three fields, or older versions refuse it; the lengths are stored next to it.
        RopeScaling::LongRope { ref short_factor, ref long_factor, attention_factor, .. } => {
            let mut file =
                json!({"type": "longrope", "short_factor": short_factor, "long_factor": long_factor});
            if let Some(factor) = attention_factor {
                file["attention_factor"] = factor.into();
            }
            file
        }
    }
}
