//! Precomputed text embeddings in a safetensors file, named like diffusers' arguments.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use tch::{Device, Kind, Tensor};

use super::export::{ExportDtype, failed, header, sync_folder};
use super::weights::WeightFiles;
use super::{Error, Result};
use crate::diffusion::{TextWidths, Texts};

const PROMPTS: [&str; 2] = ["prompt_embeds", "pooled_prompt_embeds"];
const NEGATIVE: [&str; 2] = ["negative_prompt_embeds", "negative_pooled_prompt_embeds"];

/// A file of text embeddings, opened and checked: `prompt_embeds` `[P, S, D]` and `pooled_prompt_embeds` `[P,
/// E]`, and for guidance `negative_prompt_embeds` `[1, S, D]` and `negative_pooled_prompt_embeds` `[1, E]`.
#[derive(Debug)]
pub struct TextEmbeddings {
    path: PathBuf,
    files: WeightFiles,
    count: i64,
    has_negative: bool,
}

impl TextEmbeddings {
    /// Opens the file at `path`. Its texts must have these `widths`.
    ///
    /// # Errors
    /// [`Error`], which names the tensor that is missing or of another shape.
    pub fn open(path: &Path, widths: TextWidths) -> Result<TextEmbeddings> {
        let files = WeightFiles::open_file(path)?;
        let missing = || files.problem(PROMPTS[0], "is missing, or not F32, BF16 or F16".into());
        let whole = files.shape(PROMPTS[0]).ok_or_else(missing)?.to_vec();
        let &[count, tokens, width] = &whole[..] else {
            return Err(files.problem(PROMPTS[0], format!("has shape {whole:?}, must have 3 dimensions")));
        };
        if count == 0 || width != widths.token {
            let wanted = widths.token;
            return Err(files
                .problem(PROMPTS[0], format!("has shape {whole:?}, must be [prompts, tokens, {wanted}]")));
        }
        let has_negative = files.contains(NEGATIVE[0]);
        let expect = |[embeds, pooled]: [&str; 2], rows: i64| {
            let shapes =
                [(embeds, Some(vec![rows, tokens, width])), (pooled, widths.pooled.map(|it| vec![rows, it]))];
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

    /// Returns the number of texts P, without the negative one.
    pub fn count(&self) -> usize {
        self.count as usize
    }

    /// Returns the number of tokens S per text.
    pub fn tokens(&self) -> usize {
        self.files.shape(PROMPTS[0]).expect("checked when the file was opened")[1] as usize
    }

    /// Returns the bytes of all texts on a device.
    pub fn bytes(&self) -> usize {
        [PROMPTS, NEGATIVE].concat().iter().filter_map(|name| self.files.bytes(name)).sum()
    }

    /// Returns true if there is a negative prompt.
    pub fn has_negative(&self) -> bool {
        self.has_negative
    }

    /// Loads the texts to `device`, followed by the negative one if there is one.
    ///
    /// # Errors
    /// [`Error::Tensor`] for values that are not finite, [`Error::Read`] if the file is no longer readable,
    /// or libtorch's (out of memory).
    pub fn load(&self, device: Device) -> crate::Result<Texts> {
        let read = |prompt: &str, negative: &str| -> crate::Result<Tensor> {
            let names = [prompt, negative].into_iter().take(if self.has_negative { 2 } else { 1 });
            let finite = |name| {
                let tensor = self.files.tensor(name, device)?;
                if is_finite(&tensor)? {
                    Ok(tensor)
                } else {
                    Err(self.files.problem(name, NOT_FINITE.into()).into())
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

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

const NOT_FINITE: &str = "has values that are not finite numbers";

fn is_finite(tensor: &Tensor) -> crate::Result<bool> {
    Ok(tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0)
}

/// The planned contents of a file of [`TextEmbeddings`], except for its one negative text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingsShape {
    /// Number of texts P, at least 1.
    pub count: usize,
    /// Number of tokens S per text.
    pub tokens: i64,
    /// Widths of the texts.
    pub widths: TextWidths,
}

/// Writes a file of [`TextEmbeddings`] in parts. The file has a temporary name until it is complete and on
/// disk.
#[derive(Debug)]
pub struct TextEmbeddingsWriter {
    path: PathBuf,
    aside: PathBuf,
    file: File,
    dtype: ExportDtype,
    shape: EmbeddingsShape,
    /// Offset of each tensor in the file.
    starts: HashMap<String, u64>,
    /// Number of rows written so far.
    written: usize,
}

impl TextEmbeddingsWriter {
    /// Starts the new file `path`.
    ///
    /// # Errors
    /// [`Error::Write`] if `path` exists or cannot be written.
    pub fn create(path: &Path, shape: EmbeddingsShape, dtype: ExportDtype) -> Result<TextEmbeddingsWriter> {
        if path.exists() {
            return Err(failed(path)(io::ErrorKind::AlreadyExists.into()));
        }
        let mut aside = OsString::from(path);
        aside.push(".partial");
        let aside = PathBuf::from(aside);
        let file = File::create(&aside).map_err(failed(path))?;
        let tensors = shape.tensors(dtype);
        let header = header(tensors.clone());
        file.write_all_at(&header, 0).map_err(failed(path))?;
        let starts =
            tensors.into_iter().map(|(name, info)| (name, (header.len() + info.data_offsets.0) as u64));
        Ok(Self { path: path.to_owned(), aside, file, dtype, shape, starts: starts.collect(), written: 0 })
    }

    /// Writes texts: their tokens `[B, S, D]` and, if the shape has it, the pooled texts `[B, E]`. Each is
    /// written to the rows in its `places`, and every row is written once.
    ///
    /// # Errors
    /// [`Error::Tensor`] for values that are not finite, [`Error::Write`], or libtorch's.
    pub fn put(
        &mut self,
        places: &[Vec<usize>],
        tokens: &Tensor,
        pooled: Option<&Tensor>,
    ) -> crate::Result<()> {
        self.written += places.iter().map(Vec::len).sum::<usize>();
        for (name, tensor) in PROMPTS.into_iter().zip([Some(tokens), pooled]) {
            if let Some(tensor) = tensor {
                self.write(name, places, tensor)?;
            }
        }
        Ok(())
    }

    /// Writes the negative text, one row per tensor, and renames the file to its final name.
    ///
    /// # Errors
    /// The errors of [`Self::put`].
    pub fn finish(self, tokens: &Tensor, pooled: Option<&Tensor>) -> crate::Result<()> {
        assert_eq!(self.written, self.shape.count, "all texts were written");
        for (name, tensor) in NEGATIVE.into_iter().zip([Some(tokens), pooled]) {
            if let Some(tensor) = tensor {
                self.write(name, &[vec![0]], tensor)?;
            }
        }
        let failed = failed(&self.path);
        self.file.sync_all().map_err(&failed)?;
        fs::rename(&self.aside, &self.path).map_err(&failed)?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        Ok(sync_folder(parent.unwrap_or(Path::new(".")))?)
    }

    /// Writes each row of `tensor` to the rows of its `places` in the tensor `name`.
    fn write(&self, name: &str, places: &[Vec<usize>], tensor: &Tensor) -> crate::Result<()> {
        let bytes = self.bytes(tensor, places.len() as i64, name)?;
        let row_bytes = bytes.len() / places.len();
        for (row, places) in bytes.chunks_exact(row_bytes).zip(places) {
            for place in places {
                let start = self.starts[name] + (place * row_bytes) as u64;
                self.file.write_all_at(row, start).map_err(failed(&self.path))?;
            }
        }
        Ok(())
    }

    /// Encodes the values of `rows` rows of the tensor `name`.
    fn bytes(&self, tensor: &Tensor, rows: i64, name: &str) -> crate::Result<Vec<u8>> {
        let shape = self.shape.of_rows(name, rows);
        assert_eq!(tensor.size(), shape, "{name} has the announced shape");
        if !is_finite(tensor)? {
            let (path, name) = (self.path.clone(), name.to_owned());
            return Err(Error::Tensor { path, name, problem: NOT_FINITE.to_owned() }.into());
        }
        let values = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_flatten(0, -1)?;
        Ok(self.dtype.encode(&Vec::<f32>::try_from(&values)?))
    }
}

impl Drop for TextEmbeddingsWriter {
    fn drop(&mut self) {
        // Removes the file of an unfinished writer; a finished file has been renamed.
        let _ = fs::remove_file(&self.aside);
    }
}

impl EmbeddingsShape {
    /// Returns the shape of a tensor with this many rows.
    fn of_rows(&self, name: &str, rows: i64) -> Vec<i64> {
        let TextWidths { token, pooled } = self.widths;
        match name == PROMPTS[0] || name == NEGATIVE[0] {
            true => vec![rows, self.tokens, token],
            false => vec![rows, pooled.expect("a model that reads pooled texts")],
        }
    }

    /// Returns the tensors in the order in which they are written.
    fn tensors(&self, dtype: ExportDtype) -> Vec<(String, TensorInfo)> {
        let kinds = if self.widths.pooled.is_some() { 2 } else { 1 };
        let all = [(PROMPTS, self.count as i64), (NEGATIVE, 1)];
        let all =
            all.into_iter().flat_map(|(names, rows)| names.into_iter().take(kinds).map(move |it| (it, rows)));
        let mut end = 0;
        let infos = all.map(|(name, rows)| {
            let shape: Vec<usize> = self.of_rows(name, rows).into_iter().map(|size| size as usize).collect();
            let start = end;
            end += shape.iter().product::<usize>() * dtype.bytes();
            let info = TensorInfo { dtype: dtype.safetensors(), shape, data_offsets: (start, end) };
            (name.to_owned(), info)
        });
        infos.collect()
    }
}
