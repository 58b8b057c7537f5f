//! Prompts to a file of what a model's text encoders say of them.

use std::collections::HashMap;
use std::path::Path;

use anyroll_backends::release_cached;
use anyroll_models::hf::{ExportDtype, TextEmbeddingsWriter};
use tch::{Device, Kind};

use super::embed::PromptEncoders;
use crate::{Result, data::Record};

/// What each encoder of a model reads of a prompt, the first one's text first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PromptTexts([String; 3]);

impl PromptTexts {
    /// The encoders behind the first read `prompt` as well where they have no text of their own.
    pub fn new(prompt: &str, second: Option<&str>, third: Option<&str>) -> Self {
        Self([prompt, second.unwrap_or(prompt), third.unwrap_or(prompt)].map(str::to_owned))
    }

    /// Those of a record: its `prompt`, `prompt_2` and `prompt_3`, as diffusers calls them.
    fn of(record: &Record) -> Self {
        let [second, third] = OF_OTHERS.map(|name| record.columns.get(name).and_then(|text| text.as_str()));
        Self::new(&record.prompt, second, third)
    }

    /// That of the encoder of this number.
    pub fn of_encoder(&self, number: usize) -> &str {
        &self.0[number]
    }

    /// Whether encoders have texts of their own.
    pub fn differ(&self) -> bool {
        self.0.iter().any(|text| *text != self.0[0])
    }
}

/// The columns of a record with texts of their own for the encoders behind the first.
pub const OF_OTHERS: [&str; 2] = ["prompt_2", "prompt_3"];

/// Prompts that are to be encoded.
#[derive(Debug)]
pub struct Prompts {
    /// Each once.
    distinct: Vec<PromptTexts>,
    /// In which rows of the file each is.
    places: Vec<Vec<usize>>,
    /// What guidance leads away from.
    negative: PromptTexts,
    /// So many are read at a time.
    batch_size: usize,
}

impl Prompts {
    /// Those of `records`, a row each.
    pub fn new(records: &[Record], negative: PromptTexts, batch_size: usize) -> Self {
        let (mut distinct, mut places) = (Vec::new(), Vec::<Vec<usize>>::new());
        let mut known = HashMap::new();
        for (row, record) in records.iter().enumerate() {
            let texts = PromptTexts::of(record);
            let number = *known.entry(texts).or_insert_with_key(|texts| {
                distinct.push(texts.clone());
                places.push(Vec::new());
                places.len() - 1
            });
            places[number].push(row);
        }
        Self { distinct, places, negative, batch_size }
    }

    /// All texts, the negative one last.
    pub fn texts(&self) -> Vec<&PromptTexts> {
        self.distinct.iter().chain([&self.negative]).collect()
    }

    /// Rows of the file, apart from the negative one.
    pub fn rows(&self) -> usize {
        self.places.iter().map(Vec::len).sum()
    }

    /// Writes the new file `out`, each text encoded once, in the dtype `kind` on `device`, whose memory is free again afterwards.
    /// `goes_on` is told after each batch how many texts are done, of how many; where it does not, there is no file, and this
    /// returns false.
    ///
    /// # Errors
    /// What `goes_on` says; a text that encoders do not read; files that cannot be read or written; libtorch's (out of memory).
    pub fn write(
        &self,
        encoders: &PromptEncoders,
        (kind, device): (Kind, Device),
        out: &Path,
        goes_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<bool> {
        let dtype = if kind == Kind::Float { ExportDtype::Fp32 } else { ExportDtype::Bf16 };
        let tokens = encoders.tokens(&self.texts())?;
        let file = TextEmbeddingsWriter::create(out, encoders.shape(self.rows()), dtype);
        let mut file = file.map_err(anyroll_models::Error::from)?;
        let loaded = encoders.load(kind, device)?;
        let count = self.distinct.len();
        for first in (0..count).step_by(self.batch_size) {
            let rows = first..count.min(first + self.batch_size);
            let (states, pooled) = loaded.encode(&tokens, rows.clone(), encoders.clip_skip())?;
            file.put(&self.places[rows.clone()], &states, pooled.as_ref())?;
            if !goes_on(rows.end, count)? {
                return Ok(false);
            }
        }
        // diffusers skips no layer here.
        let (states, pooled) = loaded.encode(&tokens, count..count + 1, 0)?;
        file.finish(&states, pooled.as_ref())?;
        drop((loaded, states, pooled));
        release_cached(device)?;
        Ok(true)
    }
}
