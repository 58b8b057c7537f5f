//! The fields of rewards of images.

use std::fmt;
use std::path::PathBuf;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::reward::{NoFields, PythonConfig, Signature, only, validate_term};
use super::reward_model::RewardDtype;
use crate::document::Section;

/// The reward of an image: a single reward, or a list of terms with a weighted sum.
///
/// ```yaml
/// reward:
///   - python: {path: rewards.py, function: aesthetics}
///   - torchscript: {path: scorer.pt}
///     weight: 0.5
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum ImageRewardConfig {
    /// A single reward.
    One(ImageReward),
    /// A list of at least one term.
    Sum(Vec<ImageTerm>),
}

/// A term of a sum: a reward's name with the reward's fields, and the fields of the term.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageTerm {
    /// The reward, the only key that is not a field of terms: `python: {...}`, `lit: {}`.
    pub kind: ImageReward,
    /// Weight of the score; other than 0, negative for a penalty. Default 1.
    pub weight: f64,
    /// Maximum fraction of a step's images on which the reward may fail, 0 to 1; the run ends above this fraction.
    /// Default 0.
    pub max_error_rate: f64,
    /// Number of frames of a video that the reward receives, evenly spaced, the first and the last included; from 1 to
    /// the number of decoded frames. Default: all.
    pub frames: Option<usize>,
}

impl ImageTerm {
    /// Returns a term with the defaults of its fields.
    pub fn of(kind: ImageReward) -> Self {
        Self { kind, weight: 1.0, max_error_rate: 0.0, frames: None }
    }
}

impl ImageRewardConfig {
    /// Returns all rewards with their weights.
    pub fn terms(&self) -> Vec<ImageTerm> {
        match self {
            Self::One(kind) => vec![ImageTerm::of(kind.clone())],
            Self::Sum(terms) => terms.clone(),
        }
    }

    /// Returns all rewards, each with its path relative to this field: empty, or `[1]`.
    pub fn fields(&self) -> Vec<(String, &ImageReward)> {
        match self {
            Self::One(kind) => vec![(String::new(), kind)],
            Self::Sum(terms) => {
                terms.iter().enumerate().map(|(index, term)| (format!("[{index}]"), &term.kind)).collect()
            }
        }
    }
}

/// A reward of images.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageReward {
    /// The mean brightness of the class's quadrant, -1 to 1, minus half of the mean light elsewhere, 0 to 2.
    /// Differentiable.
    Brightness,
    /// The fraction of lit pixels in the class's quadrant minus that elsewhere, -1 to 1; the measure of evaluations.
    Lit,
    /// Score of a user's function `f(images, prompts, **columns)`, from lists of one to a list of one number. None
    /// excludes the image; a video is a list of frames. Not differentiable.
    Python(PythonConfig),
    /// Cosine of the CLIP embeddings of the image and its text; of a video, the mean over frames. Differentiable.
    Clip(ClipRewardConfig),
    /// Aesthetic score of a head on CLIP embeddings; of a video, the mean over frames. Differentiable.
    Aesthetic(AestheticConfig),
    /// Score of a TorchScript network in a file. Differentiable.
    Torchscript(TorchscriptConfig),
}

impl ImageReward {
    /// Returns the reward's name in YAML and in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Brightness => "brightness",
            Self::Lit => "lit",
            Self::Python(_) => "python",
            Self::Clip(_) => "clip",
            Self::Aesthetic(_) => "aesthetic",
            Self::Torchscript(_) => "torchscript",
        }
    }

    /// Returns true if the reward is differentiable.
    pub fn is_differentiable(&self) -> bool {
        match self {
            Self::Brightness | Self::Clip(_) | Self::Aesthetic(_) | Self::Torchscript(_) => true,
            Self::Lit | Self::Python(_) => false,
        }
    }
}

impl ImageRewardConfig {
    /// Reports invalid fields of the terms of a list.
    pub(super) fn validate(&self, at: &Section) {
        let Self::Sum(terms) = self else { return };
        if !at.has_all_items() {
            return;
        }
        let help = "add a term, such as `- torchscript: {path: scorer.pt}`";
        at.ensure(!terms.is_empty(), "", "the list is empty", help);
        for (index, term) in terms.iter().enumerate() {
            validate_term(&at.item(index), term.weight, term.max_error_rate);
        }
    }

    /// Reports `frames` that exceed the number of `decoded` frames, and `frames` for images.
    pub fn validate_frames(&self, decoded: Option<usize>, at: &Section) {
        if !at.has_all_items() {
            return;
        }
        for (term, (index, kind)) in self.terms().iter().zip(self.fields()) {
            let Some(frames) = term.frames else { continue };
            let at = at.below(&index);
            let decoded = decoded.filter(|_| !kind.is_of_latents());
            let Some(decoded) = decoded else {
                let message = match kind.is_of_latents() {
                    true => "it sees latents, and no frames",
                    false => "images have no frames",
                };
                at.refuse("frames", message, "leave it out");
                continue;
            };
            at.ensure(
                (1..=decoded).contains(&frames),
                "frames",
                format!("{frames} frames are out of range"),
                format!("write 1 or above, at most {decoded}, as are decoded"),
            );
        }
    }
}

impl ImageReward {
    /// Returns true if the reward reads latents, before the decoder.
    pub fn is_of_latents(&self) -> bool {
        matches!(self, Self::Torchscript(script) if script.input == ScorerInput::Latents)
    }

    /// Refuses a reward that `shapes` do not support: the images have classes instead of texts, and are grey.
    pub(super) fn validate_of_shapes(&self, at: &Section) {
        let why = match self {
            Self::Clip(_) => "it reads texts, and the shapes have classes",
            Self::Aesthetic(_) => "it reads colours, and the shapes are grey",
            Self::Python(python) => return python.validate_of_images(&at.below("python")),
            Self::Brightness | Self::Lit | Self::Torchscript(_) => return,
        };
        at.refuse("", why, "write `brightness`, `lit`, `python` or `torchscript`");
    }
}

impl PythonConfig {
    /// Reports fields that a function of images does not support.
    pub fn validate_of_images(&self, at: &Section) {
        self.validate(at);
        at.ensure(
            self.signature == Signature::Trl,
            "signature",
            "verl's functions read texts, and no images",
            "leave it out: the function is called with `images`, `prompts` and the columns",
        );
    }
}

/// Format of an image for a user's function, with C channels: 3, or 1 for grey images; and of a video.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageForm {
    /// The bytes of a PNG file; of a video a list with a file for each frame.
    #[default]
    Png,
    /// A numpy array `[height, width, C]` of 0 to 255; of a video `[frames, height, width, C]`.
    Uint8,
    /// The same array of 0 to 1, without rounding.
    Float32,
}

impl ImageForm {
    /// Returns the format's name in YAML; for arrays, the name of their dtype.
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Uint8 => "uint8",
            Self::Float32 => "float32",
        }
    }
}

/// A CLIP model as `transformers` publishes it. The reward needs the texts of the data's `records`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClipRewardConfig {
    /// Folder of the model, with its tokenizer; a relative path starts at the config's folder.
    pub path: PathBuf,
    /// Dtype of the model's weights and activations. Default fp32.
    #[serde(default)]
    pub dtype: RewardDtype,
}

/// The image tower of a CLIP model as `transformers` publishes it, and a head, in the form of LAION's aesthetic
/// predictor. The reward needs no texts.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AestheticConfig {
    /// Folder of the CLIP model; a relative path starts at the config's folder.
    pub clip: PathBuf,
    /// A safetensors file with linear layers, `layers.N.weight` and `layers.N.bias`, applied in the order of N without
    /// activations; the head computes in fp32.
    pub head: PathBuf,
    /// Dtype of the CLIP model's weights and activations. Default fp32.
    #[serde(default)]
    pub dtype: RewardDtype,
}

/// A network saved by `torch.jit.save`. The input is fp32 images `[B, C, height, width]`, or videos
/// `[B, C, frames, height, width]`, of 0 to 1. The output is fp32 `[B]`; a score that is not finite does not count.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TorchscriptConfig {
    /// The file; a relative path starts at the config's folder.
    pub path: PathBuf,
    /// Input of the network. Default images.
    #[serde(default)]
    pub input: ScorerInput,
    /// True if the texts' indices, int64 `[B]`, are a second input. Default false.
    #[serde(default)]
    pub labels: bool,
}

/// Input of a scoring network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScorerInput {
    /// Pixels, 0 to 1.
    #[default]
    Images,
    /// Latents, before the decoder.
    Latents,
}

impl<'de> Deserialize<'de> for ImageRewardConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RewardVisitor;

        impl<'de> Visitor<'de> for RewardVisitor {
            type Value = ImageRewardConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "`brightness`, `lit`, a reward such as {torchscript: {path: scorer.pt}}, or a list of such",
                )
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<ImageRewardConfig, E> {
                ImageReward::deserialize(name.into_deserializer()).map(ImageRewardConfig::One)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ImageRewardConfig, A::Error> {
                let reward = ImageReward::deserialize(MapAccessDeserializer::new(&mut map))?;
                match map.next_key::<String>()? {
                    None => Ok(ImageRewardConfig::One(reward)),
                    Some(beside) => Err(de::Error::custom(format!(
                        "`{beside}` stands beside a reward: write a list of one, such as `- lit: {{}}` with it below"
                    ))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, terms: A) -> Result<ImageRewardConfig, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(terms)).map(ImageRewardConfig::Sum)
            }
        }

        deserializer.deserialize_any(RewardVisitor)
    }
}

impl Serialize for ImageRewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::One(kind) => kind.serialize(serializer),
            Self::Sum(terms) => terms.serialize(serializer),
        }
    }
}

/// The keys of a term.
#[derive(Clone, Copy, Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Key {
    Brightness,
    Lit,
    Python,
    Clip,
    Aesthetic,
    Torchscript,
    Weight,
    MaxErrorRate,
    Frames,
}

impl<'de> Deserialize<'de> for ImageTerm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TermVisitor;

        impl<'de> Visitor<'de> for TermVisitor {
            type Value = ImageTerm;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping with a reward, such as {lit: {}, weight: 1.0}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<ImageTerm, A::Error> {
                let (mut kinds, mut weight, mut max_error_rate, mut frames) = (Vec::new(), 1.0, 0.0, None);
                while let Some(key) = entries.next_key()? {
                    match key {
                        Key::Brightness => {
                            let NoFields {} = entries.next_value()?;
                            kinds.push(ImageReward::Brightness);
                        }
                        Key::Lit => {
                            let NoFields {} = entries.next_value()?;
                            kinds.push(ImageReward::Lit);
                        }
                        Key::Python => kinds.push(ImageReward::Python(entries.next_value()?)),
                        Key::Clip => kinds.push(ImageReward::Clip(entries.next_value()?)),
                        Key::Aesthetic => kinds.push(ImageReward::Aesthetic(entries.next_value()?)),
                        Key::Torchscript => kinds.push(ImageReward::Torchscript(entries.next_value()?)),
                        Key::Weight => weight = entries.next_value()?,
                        Key::MaxErrorRate => max_error_rate = entries.next_value()?,
                        Key::Frames => frames = entries.next_value()?,
                    }
                }
                Ok(ImageTerm { kind: only(kinds)?, weight, max_error_rate, frames })
            }
        }

        deserializer.deserialize_map(TermVisitor)
    }
}

impl Serialize for ImageTerm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match &self.kind {
            ImageReward::Brightness | ImageReward::Lit => {
                map.serialize_entry(self.kind.name(), &NoFields {})?
            }
            ImageReward::Python(config) => map.serialize_entry(self.kind.name(), config)?,
            ImageReward::Clip(config) => map.serialize_entry(self.kind.name(), config)?,
            ImageReward::Aesthetic(config) => map.serialize_entry(self.kind.name(), config)?,
            ImageReward::Torchscript(config) => map.serialize_entry(self.kind.name(), config)?,
        }
        map.serialize_entry("weight", &self.weight)?;
        map.serialize_entry("max_error_rate", &self.max_error_rate)?;
        if let Some(frames) = self.frames {
            map.serialize_entry("frames", &frames)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reward_reads_as_it_was_written() {
        for yaml in [
            "brightness",
            "{python: {path: a.py, function: f, images: float32}}",
            "{aesthetic: {clip: folder, head: head.safetensors, dtype: bf16}}",
            "[{lit: {}}, {clip: {path: folder}, weight: -2, frames: 8}, {torchscript: {path: a.pt, input: latents}}]",
            "[{aesthetic: {clip: folder, head: head.safetensors}, max_error_rate: 0.5}]",
        ] {
            let read: ImageRewardConfig = serde_saphyr::from_str(yaml).unwrap();
            let written = serde_saphyr::to_string(&read).unwrap();
            assert_eq!(serde_saphyr::from_str::<ImageRewardConfig>(&written).unwrap(), read, "{written}");
        }
    }
}
