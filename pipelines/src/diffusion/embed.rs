//! Text encoders of a published model, called as in diffusers' pipelines.

use std::path::Path;

use anyroll_data::{HfTokenizer, TokenizerError};
use anyroll_models::{
    ParamSpec, Unit,
    clip::{EncodedTexts, TextEncoder},
    diffusion::TextWidths,
    hf::{ClipTextFolder, EmbeddingsShape, T5Folder, TextEncoderFolders},
    init::{WeightSource, whole},
    t5::T5Encoder,
};
use tch::{Device, Kind, Tensor, no_grad};

use super::prompts::{OF_OTHERS, PromptTexts};
use crate::Result;

/// Default and maximum tokens of Stable Diffusion 3's T5, as in diffusers' pipeline.
const SD3_TOKENS: [usize; 2] = [256, 512];
/// Default tokens of Wan's UMT5, as in its pipeline.
const WAN_TOKENS: usize = 512;

/// Text encoders of a model's folder with their tokenizers, checked, without weights.
#[derive(Debug)]
pub struct PromptEncoders {
    folders: TextEncoderFolders,
    /// Tokenizers in the order of the encoders.
    readers: Vec<Reader>,
    /// Tokens of a text that T5 reads.
    length: usize,
    clip_skip: usize,
}

/// Options of text encoders.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncoderOptions<'a> {
    /// Variant of the weights, such as `fp16`; `None` for the plain ones.
    pub variant: Option<&'a str>,
    /// Tokens of a text that T5 reads; `None` for the default of diffusers' pipeline.
    pub max_sequence_length: Option<usize>,
    /// Last layers of each CLIP to skip, in addition to the last one.
    pub clip_skip: usize,
}

/// Token ids by encoder and text.
pub type Tokens = Vec<Vec<Vec<i64>>>;

impl PromptEncoders {
    /// Opens the encoders in the folder `model`.
    ///
    /// # Errors
    /// The file that cannot be used, with its field or tensor; an option that the model does not support.
    pub fn open(model: &Path, options: EncoderOptions) -> Result<Self> {
        let EncoderOptions { variant, max_sequence_length, clip_skip } = options;
        let folders = TextEncoderFolders::open(model, variant).map_err(anyroll_models::Error::from)?;
        check_clip_skip(&folders, clip_skip)?;
        let (usual, most) = match &folders {
            TextEncoderFolders::Sd3 { .. } => (SD3_TOKENS[0], Some(SD3_TOKENS[1])),
            TextEncoderFolders::Wan { .. } => (WAN_TOKENS, None),
        };
        let length = max_sequence_length.unwrap_or(usual);
        if length == 0 || most.is_some_and(|most| length > most) {
            let most = most.map_or(String::new(), |most| format!(", at most {most}"));
            let problem = format!("is {length}: write a number above 0{most}");
            return Err(anyroll_models::Error::Input { what: "max_sequence_length", problem }.into());
        }
        let readers = match &folders {
            TextEncoderFolders::Sd3 { clips, t5, .. } => {
                let first = Reader::of_clip(model, "tokenizer", &clips[0], None)?;
                let second = Reader::of_clip(model, "tokenizer_2", &clips[1], Some(first.most))?;
                let third = t5.as_ref().map(|t5| Reader::of_t5(model, "tokenizer_3", t5, length));
                if third.is_none() {
                    let model = model.display();
                    tracing::warn!("{model} has no text_encoder_3: its tokens are zeros, as in diffusers");
                }
                [first, second].into_iter().map(Ok).chain(third).collect::<Result<_>>()?
            }
            TextEncoderFolders::Wan { umt5 } => vec![Reader::of_t5(model, "tokenizer", umt5, length)?],
        };
        Ok(Self { folders, readers, length, clip_skip })
    }

    /// Shape of the embeddings of `count` texts.
    pub fn shape(&self, count: usize) -> EmbeddingsShape {
        let length = self.length as i64;
        let (tokens, widths) = match &self.folders {
            TextEncoderFolders::Sd3 { clips, width, .. } => {
                let pooled = clips.iter().map(ClipTextFolder::projection_dim).sum();
                (self.readers[0].most as i64 + length, TextWidths { token: *width, pooled: Some(pooled) })
            }
            TextEncoderFolders::Wan { umt5 } => {
                (length, TextWidths { token: umt5.config().d_model, pooled: None })
            }
        };
        EmbeddingsShape { count, tokens, widths }
    }

    /// Last layers of each CLIP that are skipped.
    pub fn clip_skip(&self) -> usize {
        self.clip_skip
    }

    /// Number of weights of all encoders.
    pub fn elements(&self) -> usize {
        const OPENED: &str = "an encoder of a folder that was opened";
        let of = |unit: &Unit| unit.params.iter().map(ParamSpec::elements).sum::<usize>();
        let of_t5 = |folder: &T5Folder| of(T5Encoder::new(folder.config().clone()).expect(OPENED).unit());
        let of_clip = |folder: &ClipTextFolder| {
            of(TextEncoder::new(folder.config().clone(), folder.projection_dim()).expect(OPENED).unit())
        };
        match &self.folders {
            TextEncoderFolders::Sd3 { clips, t5, .. } => {
                clips.iter().map(of_clip).sum::<usize>() + t5.as_ref().map_or(0, of_t5)
            }
            TextEncoderFolders::Wan { umt5 } => of_t5(umt5),
        }
    }

    /// Refuses texts for encoders that the model lacks.
    ///
    /// # Errors
    /// The field of such a text.
    pub fn check(&self, texts: &[&PromptTexts]) -> Result<()> {
        let has_one = matches!(self.folders, TextEncoderFolders::Wan { .. });
        if has_one && texts.iter().any(|texts| texts.differ()) {
            let problem = "or `prompt_3` differs from `prompt`, but the model has one text encoder";
            return Err(anyroll_models::Error::Input { what: OF_OTHERS[0], problem: problem.into() }.into());
        }
        Ok(())
    }

    /// Tokenizes texts. A warning counts texts that an encoder truncates.
    ///
    /// # Errors
    /// Texts for encoders that the model lacks, or an error of a tokenizer.
    pub fn tokens(&self, texts: &[&PromptTexts]) -> Result<Tokens> {
        self.check(texts)?;
        let is_wan = matches!(self.folders, TextEncoderFolders::Wan { .. });
        let readers = self.readers.iter().enumerate();
        let tokens = readers.map(|(number, reader)| {
            let own = texts.iter().map(|texts| texts.of_encoder(number));
            let own = own.map(|text| if is_wan { clean(text) } else { text.to_owned() });
            reader.tokens(&own.collect::<Vec<String>>())
        });
        tokens.collect()
    }

    /// Loads the weights.
    ///
    /// # Errors
    /// A file that can no longer be read, or an error of libtorch (out of memory).
    pub fn load(&self, kind: Kind, device: Device) -> Result<Loaded> {
        let t5 = |folder: &T5Folder| -> Result<T5> {
            let encoder = T5Encoder::new(folder.config().clone())?;
            let weights = read(folder, encoder.unit(), kind, device)?;
            Ok(T5 { encoder, weights })
        };
        let encoders = match &self.folders {
            TextEncoderFolders::Sd3 { clips, t5: third, width } => {
                let clip = |folder: &ClipTextFolder| -> Result<Clip> {
                    let encoder = TextEncoder::new(folder.config().clone(), folder.projection_dim())?;
                    let weights = read(folder, encoder.unit(), kind, device)?;
                    Ok(Clip { encoder, weights })
                };
                let clips = Box::new([clip(&clips[0])?, clip(&clips[1])?]);
                Encoders::Sd3 { clips, t5: third.as_ref().map(t5).transpose()?, width: *width }
            }
            TextEncoderFolders::Wan { umt5 } => Encoders::Wan(t5(umt5)?),
        };
        let padding = self.readers.iter().map(|reader| (reader.most, reader.pad)).collect();
        Ok(Loaded { encoders, padding, device, length: self.length as i64 })
    }
}

/// Refuses to skip more layers than a CLIP has before its last, or any of a model without CLIP.
fn check_clip_skip(folders: &TextEncoderFolders, clip_skip: usize) -> Result<()> {
    let most = match folders {
        TextEncoderFolders::Sd3 { clips, .. } => {
            clips.iter().map(|clip| clip.config().tower.num_hidden_layers - 1).min().unwrap_or(0)
        }
        TextEncoderFolders::Wan { .. } => 0,
    };
    if clip_skip <= most {
        return Ok(());
    }
    let problem = match folders {
        TextEncoderFolders::Sd3 { .. } => format!("is {clip_skip}: write a number up to {most}"),
        TextEncoderFolders::Wan { .. } => {
            "cannot be used, since the model has no CLIP: leave it out".to_owned()
        }
    };
    Err(anyroll_models::Error::Input { what: "clip_skip", problem }.into())
}

/// Tokenizer of an encoder.
#[derive(Debug)]
struct Reader {
    name: &'static str,
    tokenizer: HfTokenizer,
    /// Maximum length of a text.
    most: usize,
    end: i64,
    pad: i64,
}

impl Reader {
    /// Opens the tokenizer of a CLIP, with its own maximum length unless `most` is given.
    fn of_clip(
        model: &Path,
        name: &'static str,
        folder: &ClipTextFolder,
        most: Option<usize>,
    ) -> Result<Self> {
        let (path, config) = (model.join(name), folder.config());
        let tokenizer = HfTokenizer::open_clip(&path)?;
        let positions = config.max_position_embeddings as usize;
        let most = most.or(tokenizer.max_length()).unwrap_or(positions);
        if most == 0 || most > positions {
            let problem = format!("`model_max_length` is {most}, but the encoder reads {positions} tokens");
            return Err(TokenizerError::Broken { path: path.join("tokenizer_config.json"), problem }.into());
        }
        let (end, pad) = (config.eos_token_id, tokenizer.pad().unwrap_or(config.eos_token_id));
        Self { name, tokenizer, most, end, pad }.checked(&path, config.vocab_size)
    }

    /// Opens the tokenizer of a T5 or a UMT5.
    fn of_t5(model: &Path, name: &'static str, folder: &T5Folder, most: usize) -> Result<Self> {
        let (path, config) = (model.join(name), folder.config());
        let tokenizer = HfTokenizer::open(&path)?;
        let (end, pad) = (config.eos_token_id, tokenizer.pad().unwrap_or(config.pad_token_id));
        Self { name, tokenizer, most, end, pad }.checked(&path, config.vocab_size)
    }

    /// Refuses a tokenizer with more tokens than the encoder has.
    fn checked(self, path: &Path, vocab_size: i64) -> Result<Self> {
        let tokens = self.tokenizer.vocab_size();
        if tokens as i64 > vocab_size {
            let problem = format!("it has {tokens} tokens, but the encoder has {vocab_size}");
            return Err(TokenizerError::Broken { path: path.to_owned(), problem }.into());
        }
        Ok(self)
    }

    fn tokens(&self, texts: &[String]) -> Result<Vec<Vec<i64>>> {
        let mut cut = 0;
        let mut all = Vec::with_capacity(texts.len());
        for text in texts {
            let (tokens, is_cut) = self.tokenizer.encode_ending(text, self.most, self.end)?;
            cut += usize::from(is_cut);
            all.push(tokens);
        }
        if cut > 0 {
            let (of, most, name) = (texts.len(), self.most, self.name);
            tracing::warn!(
                "{cut} of {of} texts have more than the {most} tokens of `{name}`, and are truncated"
            );
        }
        Ok(all)
    }
}

/// Weights of an encoder.
fn read(folder: &dyn WeightSource, unit: &Unit, kind: Kind, device: Device) -> Result<Vec<Tensor>> {
    let params = unit.params.iter().map(|spec| whole(folder, spec, kind, device));
    Ok(params.collect::<anyroll_models::Result<_>>()?)
}

/// Text encoders with their weights.
#[derive(Debug)]
pub struct Loaded {
    encoders: Encoders,
    /// Length and padding token of each encoder's texts.
    padding: Vec<(usize, i64)>,
    device: Device,
    /// Tokens of a text that T5 reads.
    length: i64,
}

#[derive(Debug)]
enum Encoders {
    Sd3 { clips: Box<[Clip; 2]>, t5: Option<T5>, width: i64 },
    Wan(T5),
}

#[derive(Debug)]
struct Clip {
    encoder: TextEncoder,
    weights: Vec<Tensor>,
}

#[derive(Debug)]
struct T5 {
    encoder: T5Encoder,
    weights: Vec<Tensor>,
}

impl Loaded {
    /// Embeddings of the texts `rows` of `tokens`: `[B, S, D]` and, if the model uses it, `[B, E]`. Each CLIP
    /// skips `clip_skip` last layers.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn encode(
        &self,
        tokens: &Tokens,
        rows: std::ops::Range<usize>,
        clip_skip: usize,
    ) -> anyroll_models::Result<(Tensor, Option<Tensor>)> {
        no_grad(|| match &self.encoders {
            Encoders::Sd3 { clips, t5, width } => {
                let of_clip = |number: usize| -> anyroll_models::Result<EncodedTexts> {
                    let Clip { encoder, weights } = &clips[number];
                    encoder.encode(weights, &self.padded(tokens, number, rows.clone())?, clip_skip)
                };
                let (one, two) = (of_clip(0)?, of_clip(1)?);
                let states = Tensor::f_cat(&[&one.hidden, &two.hidden], -1)?;
                let states = states.f_constant_pad_nd([0, width - states.size()[2]])?;
                let of_t5 = match t5 {
                    Some(T5 { encoder, weights }) => {
                        // Padding is not masked, as in the transformer's training.
                        encoder.encode(weights, &self.padded(tokens, 2, rows.clone())?, None)?
                    }
                    None => states.f_new_zeros(
                        [rows.len() as i64, self.length, *width],
                        (states.kind(), self.device),
                    )?,
                };
                let pooled = Tensor::f_cat(&[one.pooled, two.pooled], -1)?;
                Ok((Tensor::f_cat(&[states, of_t5], 1)?, Some(pooled)))
            }
            Encoders::Wan(umt5) => Ok((self.of_wan(umt5, &tokens[0][rows])?, None)),
        })
    }

    /// States of texts, with zeros after their ends. A text's states do not depend on the length of others.
    fn of_wan(&self, umt5: &T5, texts: &[Vec<i64>]) -> anyroll_models::Result<Tensor> {
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
        let padded = self.tensor(texts, longest, self.padding[0].1)?;
        let lengths: Vec<i64> = texts.iter().map(|text| text.len() as i64).collect();
        let states = umt5.encoder.encode(&umt5.weights, &padded, Some(&lengths))?;
        let places = Tensor::f_arange(longest as i64, (Kind::Int64, self.device))?.f_view([1, -1, 1])?;
        let lengths = Tensor::f_from_slice(&lengths)?.f_view([-1, 1, 1])?.f_to_device(self.device)?;
        let states = states.f_masked_fill(&places.f_ge_tensor(&lengths)?, 0.0)?;
        Ok(states.f_constant_pad_nd([0, 0, 0, self.length - longest as i64])?)
    }

    /// Tokens of an encoder's texts, padded to its maximum length: int64 `[B, T]`.
    fn padded(
        &self,
        tokens: &Tokens,
        encoder: usize,
        rows: std::ops::Range<usize>,
    ) -> anyroll_models::Result<Tensor> {
        let (most, pad) = self.padding[encoder];
        self.tensor(&tokens[encoder][rows], most, pad)
    }

    fn tensor(&self, texts: &[Vec<i64>], length: usize, pad: i64) -> anyroll_models::Result<Tensor> {
        let padded = texts
            .iter()
            .flat_map(|text| text.iter().copied().chain(std::iter::repeat_n(pad, length - text.len())));
        let padded = Tensor::f_from_slice(&padded.collect::<Vec<_>>())?;
        Ok(padded.f_view([texts.len() as i64, length as i64])?.f_to_device(self.device)?)
    }
}

/// Text cleaning of Wan's pipeline: HTML entities are unescaped twice, and white space becomes single spaces.
/// Before that ftfy makes quotation marks straight and, without tags, unescapes entities until none is left.
/// Its other repairs are omitted.
fn clean(text: &str) -> String {
    let written_out = |text: &str| htmlize::unescape(text).into_owned();
    let is_tagged = text.contains('<');
    let mut text = text.to_owned();
    loop {
        let named = if is_tagged { text.clone() } else { written_out(&text) };
        let mended: String = named.chars().map(straight).collect();
        if mended == text {
            break;
        }
        text = mended;
    }
    let text = written_out(&written_out(&text));
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A quotation mark as normalized by ftfy.
fn straight(mark: char) -> char {
    match mark {
        '\u{02bc}' | '\u{2018}'..='\u{201b}' => '\'',
        '\u{201c}'..='\u{201f}' => '"',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::clean;

    /// Expected texts are from `prompt_clean` of diffusers 0.42.1 with ftfy.
    #[test]
    fn texts_are_cleaned_as_by_the_pipeline_of_wan() {
        for (text, cleaned) in [
            ("  a\u{3000}red\n\tcat ", "a red cat"),
            ("\u{201c}red\u{201d} cat\u{2019}s", "\"red\" cat's"),
            ("a &amp;lt;b&amp;gt; &quot&eacute;&#39;&#x72;ed", "a <b> \"é'red"),
            ("&amp;amp;amp;lt;", "<"),
            ("<i> &amp;amp;amp;", "<i> &amp;"),
            ("&notit; &nosuchname; & AT&T", "¬it; &nosuchname; & AT&T"),
            ("&ldquo;red&rdquo;", "\"red\""),
            ("", ""),
        ] {
            assert_eq!(clean(text), cleaned, "{text}");
        }
    }
}
