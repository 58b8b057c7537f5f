//! Text encoders of an image or video model in diffusers' format, in folders next to its transformer's.

use std::path::Path;

use serde::Deserialize;

use super::clip::{TextFile, first_projection};
use super::diffusers::transformer_config;
use super::weights::{WeightFiles, check_variant, reads_files};
use super::{Result, T5Folder, field, read_json, validated};
use crate::clip::{TextConfig, TextEncoder};
use crate::diffusion::TransformerConfig;

/// The folder of CLIP's text half, opened and checked: `config.json` and safetensors.
#[derive(Debug)]
pub struct ClipTextFolder {
    config: TextConfig,
    projection_dim: i64,
    weights: WeightFiles,
}

impl ClipTextFolder {
    /// Opens the folder at `path`, of a `CLIPTextModelWithProjection`. Weights are those of the `variant` if
    /// the folder has it.
    ///
    /// # Errors
    /// [`Error`](super::Error), which names the file and the field or tensor in it.
    pub fn open(path: &Path, variant: Option<&str>) -> Result<ClipTextFolder> {
        let config_path = path.join("config.json");
        let file: ConfigFile = read_json(&config_path)?;
        if file.model_type != "clip_text_model" {
            let problem = format!("is `{}`, must be `clip_text_model`", file.model_type);
            return Err(field(&config_path, "model_type", problem));
        }
        let config = file.text.into_config("", &config_path)?;
        let projection_dim = file.projection_dim;
        let encoder = TextEncoder::new(config.clone(), projection_dim);
        let encoder = validated(&config_path, encoder)?;
        let weights = WeightFiles::open_variant(path, "model", variant)?;
        weights.check([encoder.unit()], |name| name.ends_with("embeddings.position_ids"))?;
        Ok(ClipTextFolder { config, projection_dim, weights })
    }

    /// Returns the encoder's shape.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// Returns the number of elements of a text's vector.
    pub fn projection_dim(&self) -> i64 {
        self.projection_dim
    }
}

reads_files!(ClipTextFolder);

/// Fields read from `config.json`.
#[derive(Deserialize)]
struct ConfigFile {
    model_type: String,
    #[serde(default = "first_projection")]
    projection_dim: i64,
    #[serde(flatten)]
    text: TextFile,
}

/// The folders of a model's text encoders, opened and checked to fit its transformer.
#[derive(Debug)]
pub enum TextEncoderFolders {
    /// Encoders of Stable Diffusion 3.
    Sd3 {
        /// `text_encoder` and `text_encoder_2`.
        clips: Box<[ClipTextFolder; 2]>,
        /// `text_encoder_3`, which may be missing.
        t5: Option<T5Folder>,
        /// Width of the tokens that the transformer reads.
        width: i64,
    },
    /// Encoder of Wan.
    Wan {
        /// `text_encoder`.
        umt5: T5Folder,
    },
}

impl TextEncoderFolders {
    /// Opens the encoders in the folder at `path`; reads only the configuration of its transformer. Weights
    /// are those of the `variant`, such as `fp16`, in each folder that has it.
    ///
    /// # Errors
    /// [`Error`](super::Error), which names the file and the field or tensor in it, or a variant that no
    /// folder has.
    pub fn open(path: &Path, variant: Option<&str>) -> Result<TextEncoderFolders> {
        let transformer = transformer_config(&path.join("transformer"))?;
        check_variant(path, variant)?;
        let widths = transformer.text_widths();
        match transformer {
            TransformerConfig::Sd3(config) => {
                Self::sd3(path, variant, config.joint_attention_dim, config.pooled_projection_dim)
            }
            TransformerConfig::Wan(_) => {
                let folder = path.join("text_encoder");
                let umt5 = T5Folder::open(&folder, variant)?;
                expect_width(&folder, "d_model", umt5.config().d_model, widths.token)?;
                Ok(Self::Wan { umt5 })
            }
        }
    }

    fn sd3(path: &Path, variant: Option<&str>, width: i64, pooled: i64) -> Result<TextEncoderFolders> {
        let [one, two, three] =
            ["text_encoder", "text_encoder_2", "text_encoder_3"].map(|part| path.join(part));
        let clips = Box::new([ClipTextFolder::open(&one, variant)?, ClipTextFolder::open(&two, variant)?]);
        let [first, second] = clips.each_ref().map(|clip| &clip.config);
        let [hidden, other] = [first, second].map(|config| config.tower.hidden_size);
        if hidden + other > width {
            let problem = format!(
                "is {other}, and {hidden} in text_encoder; together they may be at most {width}, the width that the transformer reads"
            );
            return Err(field(&two.join("config.json"), "hidden_size", problem));
        }
        let [most, of_second] = [first, second].map(|config| config.max_position_embeddings);
        if most != of_second {
            let problem = format!(
                "is {of_second}, but {most} in text_encoder; both must read the same number of tokens"
            );
            return Err(field(&two.join("config.json"), "max_position_embeddings", problem));
        }
        expect_width(&two, "projection_dim", clips[1].projection_dim, pooled - clips[0].projection_dim)?;
        let t5 = if three.exists() { Some(T5Folder::open(&three, variant)?) } else { None };
        if let Some(t5) = &t5 {
            expect_width(&three, "d_model", t5.config().d_model, width)?;
        }
        Ok(Self::Sd3 { clips, t5, width })
    }
}

/// Returns an error unless an encoder's states are as wide as the transformer's input.
fn expect_width(folder: &Path, name: &str, found: i64, wanted: i64) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    let problem = format!("is {found}, but the transformer reads a width of {wanted}");
    Err(field(&folder.join("config.json"), name, problem))
}
