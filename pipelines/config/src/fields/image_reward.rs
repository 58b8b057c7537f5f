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

/// What an image earns: a reward, or a list of terms whose weighted sum it is.
///
/// ```yaml
/// reward:
///   - python: {path: rewards.py, function: aesthetics}
///   - torchscript: {path: scorer.pt}
///     weight: 0.5
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum ImageRewardConfig {
    /// One alone.
    One(ImageReward),
    /// A list, at least one.
    Sum(Vec<ImageTerm>),
}

/// A reward of a sum: its name with its fields, and beside it these.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageTerm {
    /// Which, the only key of its own: `python: {...}`, `lit: {}`.
    pub kind: ImageReward,
    /// What its score is multiplied by; negative for a reward that is to be avoided. Default 1.
    pub weight: f64,
    /// The part of a step's images on which it may fail; on more, the run ends. Default 0.
    pub max_error_rate: f64,
    /// Of a video it sees so many frames, evenly spaced, the first and the last among them. Default: all.
    pub frames: Option<usize>,
}

impl ImageTerm {
    /// One with nothing beside it.
    pub fn of(kind: ImageReward) -> Self {
        Self { kind, weight: 1.0, max_error_rate: 0.0, frames: None }
    }
}

impl ImageRewardConfig {
    /// All rewards with their weights.
    pub fn terms(&self) -> Vec<ImageTerm> {
        match self {
            Self::One(kind) => vec![ImageTerm::of(kind.clone())],
            Self::Sum(terms) => terms.clone(),
        }
    }

    /// All rewards, each with the field that it stands in, below the one that this is: nothing, or `[1]`.
    pub fn fields(&self) -> Vec<(String, &ImageReward)> {
        match self {
            Self::One(kind) => vec![(String::new(), kind)],
            Self::Sum(terms) => {
                terms.iter().enumerate().map(|(index, term)| (format!("[{index}]"), &term.kind)).collect()
            }
        }
    }

    /// The files and folders of all rewards, to be changed.
    pub fn paths_mut(&mut self) -> Vec<&mut PathBuf> {
        match self {
            Self::One(kind) => kind.paths_mut(),
            Self::Sum(terms) => terms.iter_mut().flat_map(|term| term.kind.paths_mut()).collect(),
        }
    }
}

/// A reward of images.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageReward {
    /// The mean brightness of the class's quadrant, -1 to 1, less half of the mean light elsewhere, 0 to 2.
    /// Differentiable.
    Brightness,
    /// The fraction of lit pixels in the class's quadrant less that elsewhere, -1 to 1: what evaluations measure.
    Lit,
    /// What a function of the user's says of it: `f(images, prompts, **columns)` with lists of one to a list of one number,
    /// or of None for an image that is not to count; a video is a list of its frames. Not differentiable.
    Python(PythonConfig),
    /// The cosine of the image and its text in the eyes of a CLIP, of a video the frames' mean. Differentiable.
    Clip(ClipRewardConfig),
    /// How much people like it, as a head on a CLIP sees it, of a video the frames' mean. Differentiable.
    Aesthetic(AestheticConfig),
    /// What a network in a file says of it. Differentiable.
    Torchscript(TorchscriptConfig),
}

impl ImageReward {
    /// Its name in YAML and in metrics.
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

    /// Whether it has a gradient.
    pub fn is_differentiable(&self) -> bool {
        match self {
            Self::Brightness | Self::Clip(_) | Self::Aesthetic(_) | Self::Torchscript(_) => true,
            Self::Lit | Self::Python(_) => false,
        }
    }

    fn paths_mut(&mut self) -> Vec<&mut PathBuf> {
        match self {
            Self::Brightness | Self::Lit => Vec::new(),
            Self::Python(python) => vec![&mut python.path],
            Self::Clip(clip) => vec![&mut clip.path],
            Self::Aesthetic(aesthetic) => vec![&mut aesthetic.clip, &mut aesthetic.head],
            Self::Torchscript(script) => vec![&mut script.path],
        }
    }
}

impl ImageRewardConfig {
    /// Reports what cannot be, of what stands beside the rewards of a list.
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

    /// Reports frames that rewards do not see, of videos of which so many are decoded, or of images.
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
    /// Whether it sees what is denoised, before the decoder.
    pub fn is_of_latents(&self) -> bool {
        matches!(self, Self::Torchscript(script) if script.input == ScorerInput::Latents)
    }

    /// Refuses a reward that the shapes cannot have: they have classes, and are grey.
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
    /// Reports what a function of images cannot be.
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

/// How a user's function gets an image, of C channels: 3, or 1 where images are grey; and a video.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageForm {
    /// The bytes of a PNG file; of a video a list of one for each frame.
    #[default]
    Png,
    /// A numpy array `[height, width, C]` of 0 to 255, of a video `[frames, height, width, C]`.
    Uint8,
    /// The same of 0 to 1, which is not rounded.
    Float32,
}

impl ImageForm {
    /// Its name in YAML; of arrays that of their dtype.
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Uint8 => "uint8",
            Self::Float32 => "float32",
        }
    }
}

/// A CLIP as `transformers` publishes it. It reads the texts of the data's `records`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClipRewardConfig {
    /// Its folder, with its tokenizer; a relative path starts at the current folder.
    pub path: PathBuf,
    /// The dtype of its weights and activations. Default fp32.
    #[serde(default)]
    pub dtype: RewardDtype,
}

/// A CLIP as `transformers` publishes it, of which only the images' tower is held, and a head, as LAION's aesthetic
/// predictor is made. It needs no texts.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AestheticConfig {
    /// The CLIP's folder; a relative path starts at the current folder.
    pub clip: PathBuf,
    /// A safetensors file with linear layers, `layers.N.weight` and `layers.N.bias`, in the order of their numbers and with
    /// nothing in between; they compute in fp32.
    pub head: PathBuf,
    /// The dtype of the CLIP's weights and activations. Default fp32.
    #[serde(default)]
    pub dtype: RewardDtype,
}

/// A network that `torch.jit.save` wrote. It is called with fp32 images `[B, C, height, width]`, or videos
/// `[B, C, frames, height, width]`, of 0 to 1 and says fp32 `[B]`; what is not finite does not count.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TorchscriptConfig {
    /// The file; a relative path starts at the current folder.
    pub path: PathBuf,
    /// What it is called with. Default images.
    #[serde(default)]
    pub input: ScorerInput,
    /// Whether it is called with the texts' numbers, int64 `[B]`, as well. Default false.
    #[serde(default)]
    pub labels: bool,
}

/// What a scoring network reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScorerInput {
    /// Pixels, 0 to 1.
    #[default]
    Images,
    /// What is denoised, before the decoder.
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
