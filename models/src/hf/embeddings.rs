//! Text embeddings that encoders made beforehand, in a safetensors file with the names of diffusers' arguments.

use std::path::{Path, PathBuf};

use tch::{Device, Tensor};

use super::Result;
use super::weights::WeightFiles;
use crate::diffusion::Texts;

const PROMPTS: [&str; 2] = ["prompt_embeds", "pooled_prompt_embeds"];
const NEGATIVE: [&str; 2] = ["negative_prompt_embeds", "negative_pooled_prompt_embeds"];

/// A file of text embeddings, opened and checked: `prompt_embeds` `[P, S, D]` and `pooled_prompt_embeds` `[P, E]`, and for
/// guidance `negative_prompt_embeds` `[1, S, D]` and `negative_pooled_prompt_embeds` `[1, E]`.
#[derive(Debug)]
pub struct TextEmbeddings {
    path: PathBuf,
    files: WeightFiles,
    count: i64,
    has_negative: bool,
}

impl TextEmbeddings {
    /// Opens the file at `path`, whose texts must have `widths`: of tokens and, if the model reads it, of the whole.
    ///
    /// # Errors
    /// [`Error`](super::Error), which names the tensor that is missing or of another shape.
    pub fn open(path: &Path, widths: (i64, Option<i64>)) -> Result<TextEmbeddings> {
        let files = WeightFiles::open_file(path)?;
        let missing = || files.problem(PROMPTS[0], "is missing, or not F32, BF16 or F16".into());
        let whole = files.shape(PROMPTS[0]).ok_or_else(missing)?.to_vec();
        let &[count, tokens, width] = &whole[..] else {
            return Err(files.problem(PROMPTS[0], format!("has shape {whole:?}, must have 3 dimensions")));
        };
        if count == 0 || width != widths.0 {
            let wanted = widths.0;
            return Err(files
                .problem(PROMPTS[0], format!("has shape {whole:?}, must be [prompts, tokens, {wanted}]")));
        }
        let has_negative = files.contains(NEGATIVE[0]);
        let expect = |[embeds, pooled]: [&str; 2], rows: i64| {
            let shapes =
                [(embeds, Some(vec![rows, tokens, width])), (pooled, widths.1.map(|it| vec![rows, it]))];
            for (name, shape) in shapes {
                let (Some(wanted), found) = (shape, files.shape(name)) else { continue };
                if found != Some(&wanted[..]) {
                    let found = found.map_or("is missing".to_owned(), |found| format!("has shape {found:?}"));
                    return Err(files.problem(name, format!("{found}, must be {wanted:?}")));
                }
            }
            Ok(())
        };
        expect(PROMPTS, count)?;
        if has_negative {
            expect(NEGATIVE, 1)?;
        }
        Ok(TextEmbeddings { path: path.to_owned(), files, count, has_negative })
    }

    /// The number of texts P, apart from the negative one.
    pub fn count(&self) -> usize {
        self.count as usize
    }

    /// Whether there is a text to be led away from.
    pub fn has_negative(&self) -> bool {
        self.has_negative
    }

    /// The texts on `device`, and behind them the negative one if there is one.
    ///
    /// # Errors
    /// [`Error::Tensor`](super::Error::Tensor) for values that are no numbers, [`Error::Read`](super::Error::Read) if the
    /// file cannot be read any more, or libtorch's (out of memory).
    pub fn load(&self, device: Device) -> crate::Result<Texts> {
        let read = |prompt: &str, negative: &str| -> crate::Result<Tensor> {
            let names = [prompt, negative].into_iter().take(if self.has_negative { 2 } else { 1 });
            let finite = |name| {
                let tensor = self.files.tensor(name, device)?;
                match tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? {
                    0 => {
                        Err(self.files.problem(name, "has values that are not finite numbers".into()).into())
                    }
                    _ => Ok(tensor),
                }
            };
            let tensors = names.map(finite).collect::<crate::Result<Vec<_>>>()?;
            Ok(Tensor::f_cat(&tensors, 0)?)
        };
        let pooled = match self.files.contains(PROMPTS[1]) {
            true => Some(read(PROMPTS[1], NEGATIVE[1])?),
            false => None,
        };
        Texts::new(read(PROMPTS[0], NEGATIVE[0])?, pooled)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
